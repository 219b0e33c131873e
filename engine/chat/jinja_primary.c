/*
 * The operands of expressions: literals, names, calls, items, filters, tests.
 */

#include <string.h>

#include "engine/chat/jinja_filters.h"
#include "engine/chat/jinja_parser.h"


static node_t *
constant(parser_t *p, jv_t v)
{
    node_t *node = parse_node(p, N_CONST, NULL, NULL);

    if (node != NULL) {
        node->constant = v;
    }

    return node;
}


/* A string, and those that follow it directly. */
static node_t *
parse_string(parser_t *p)
{
    const size_t first = p->at;
    size_t len = 0, n = 0;

    while (parse_is(p, JT_STRING)) {
        len += parse_peek(p)->len;
        p->at++;
    }

    node_t *node = parse_node(p, N_CONST, NULL, NULL);
    char *text = arena_alloc(p->arena, len + 1);

    if (node == NULL) {
        return NULL;
    }

    if (text == NULL) {
        p->code = llm_err_set(p->err, LLM_NOMEM, NULL,
                              "no memory for the chat template");
        return NULL;
    }

    for (size_t i = first; i < p->at; i++) {
        const jtok_t *tok = &p->toks.items[i];

        if (tok->len > 0) {
            memcpy(text + n, tok->text, tok->len);
        }
        n += tok->len;
    }

    node->text =
        (jstr_t){ .data = text, .len = len, .n_chars = SIZE_MAX, .uniform = 1 };
    jstr_chars(&node->text); /* counted now: runs share the tree */
    node->constant = (jv_t){ .kind = JV_STR, .str = &node->text };

    return node;
}


static node_t *
parse_word(parser_t *p)
{
    static const struct {
        const char *name;
        jv_t value;
    } words[] = {
        { "true", { .kind = JV_BOOL, .trusted = 1, .b = true } },
        { "True", { .kind = JV_BOOL, .trusted = 1, .b = true } },
        { "false", { .kind = JV_BOOL, .trusted = 1, .b = false } },
        { "False", { .kind = JV_BOOL, .trusted = 1, .b = false } },
        { "none", { .kind = JV_NONE, .trusted = 1 } },
        { "None", { .kind = JV_NONE, .trusted = 1 } },
    };

    for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); i++) {
        if (parse_skip_name(p, words[i].name)) {
            return constant(p, words[i].value);
        }
    }

    if (parse_is_name(p, "varargs") || parse_is_name(p, "kwargs")) {
        p->varargs = true;
    }

    jname_t *name = parse_name(p);
    node_t *node = parse_node(p, N_NAME, NULL, NULL);

    if (node != NULL) {
        node->name = name;
    }

    return node;
}


/* Expressions up to `close`, which is stepped over. */
static bool
parse_until(parser_t *p, jtok_kind_t close, kids_t *kids)
{
    while (p->code == LLM_OK && !parse_skip(p, close)) {
        if (kids->n > 0 && !parse_expect(p, JT_COMMA)) {
            return false;
        }

        if (kids->n > 0 && parse_skip(p, close)) {
            return true; /* a trailing comma */
        }

        if (!parse_kid(p, kids, parse_expr(p, true))) {
            return false;
        }
    }

    return p->code == LLM_OK;
}


static node_t *
parse_dict(parser_t *p)
{
    kids_t kids = { 0 };

    while (p->code == LLM_OK && !parse_skip(p, JT_RBRACE)) {
        if (kids.n > 0 && !parse_expect(p, JT_COMMA)) {
            return NULL;
        }

        if (kids.n > 0 && parse_skip(p, JT_RBRACE)) {
            break;
        }

        if (!parse_kid(p, &kids, parse_expr(p, true))
            || !parse_expect(p, JT_COLON)
            || !parse_kid(p, &kids, parse_expr(p, true)))
        {
            return NULL;
        }
    }

    return parse_kids(p, parse_node(p, N_DICT, NULL, NULL), &kids);
}


/* Behind "(": an expression, or a tuple. */
static node_t *
parse_paren(parser_t *p)
{
    if (parse_skip(p, JT_RPAREN)) {
        return parse_node(p, N_TUPLE, NULL, NULL);
    }

    node_t *first = parse_expr(p, true);

    if (!parse_is(p, JT_COMMA)) {
        parse_expect(p, JT_RPAREN);
        return first;
    }

    kids_t kids = { 0 };

    parse_kid(p, &kids, first);
    if (!parse_until(p, JT_RPAREN, &kids)) {
        return NULL;
    }

    return parse_kids(p, parse_node(p, N_TUPLE, NULL, NULL), &kids);
}


node_t *
parse_primary(parser_t *p)
{
    const jtok_t *tok = parse_peek(p);

    switch (tok->kind) {
    case JT_NAME:
        return parse_word(p);
    case JT_STRING:
        return parse_string(p);
    case JT_INT:
        p->at++;
        return constant(p, jv_int(tok->integer));
    case JT_FLOAT:
        p->at++;
        return constant(p, jv_float(tok->number));
    case JT_LPAREN:
        p->at++;
        return parse_paren(p);
    case JT_LBRACE:
        p->at++;
        return parse_dict(p);
    case JT_LBRACKET: {
        kids_t kids = { 0 };

        p->at++;
        if (!parse_until(p, JT_RBRACKET, &kids)) {
            return NULL;
        }
        return parse_kids(p, parse_node(p, N_LIST, NULL, NULL), &kids);
    }
    default:
        return parse_fail(p, "expected an expression, got %s",
                          jinja_token_name(tok->kind));
    }
}


static node_t *
parse_arg(parser_t *p)
{
    if (parse_skip(p, JT_MUL)) {
        return parse_node(p, N_STAR, parse_expr(p, true), NULL);
    }

    if (parse_skip(p, JT_POW)) {
        return parse_node(p, N_STARS, parse_expr(p, true), NULL);
    }

    if (parse_is(p, JT_NAME) && parse_peek(p)[1].kind == JT_ASSIGN) {
        jname_t *name = parse_name(p);

        p->at++;
        node_t *node = parse_node(p, N_ARG, parse_expr(p, true), NULL);

        if (node != NULL) {
            node->name = name;
        }
        return node;
    }

    return parse_expr(p, true);
}


/* Behind "(": arguments up to ")". */
static node_t *
parse_args(parser_t *p, node_t *node)
{
    kids_t kids = { 0 };

    while (p->code == LLM_OK && !parse_skip(p, JT_RPAREN)) {
        if (kids.n > 0 && !parse_expect(p, JT_COMMA)) {
            return NULL;
        }

        if (kids.n > 0 && parse_skip(p, JT_RPAREN)) {
            break;
        }

        node_t *arg = parse_arg(p);

        if (arg != NULL && arg->kind < N_ARG && kids.n > 0
            && kids.items[kids.n - 1]->kind >= N_ARG)
        {
            return parse_fail(p, "a positional argument after a named one");
        }

        if (!parse_kid(p, &kids, arg)) {
            return NULL;
        }
    }

    return parse_kids(p, node, &kids);
}


/* Behind "[": an index or a slice. */
static node_t *
parse_subscript(parser_t *p, node_t *object)
{
    node_t *part[3] = { NULL, NULL, NULL };
    int n = 0;

    for (;;) {
        if (!parse_is(p, JT_COLON) && !parse_is(p, JT_RBRACKET)) {
            part[n] = parse_expr(p, true);
        }

        if (n == 2 || !parse_skip(p, JT_COLON)) {
            break;
        }
        n++;
    }

    if (n == 0 && part[0] == NULL) {
        return parse_fail(p, "expected an expression between the brackets");
    }

    node_t *node = parse_node(p, n == 0 ? N_ITEM : N_SLICE, object, part[0]);

    if (node == NULL || !parse_expect(p, JT_RBRACKET)) {
        return NULL;
    }

    node->c = part[1];
    node->d = part[2];
    parse_deepen(p, node, part[1]);
    parse_deepen(p, node, part[2]);

    return node;
}


static node_t *
parse_attribute(parser_t *p, node_t *object)
{
    if (parse_is(p, JT_INT)) {
        node_t *at = constant(p, jv_int(parse_peek(p)->integer));

        p->at++;
        return parse_node(p, N_ITEM, object, at);
    }

    jname_t *name = parse_name(p);
    node_t *node = parse_node(p, N_ATTR, object, NULL);

    if (node != NULL) {
        node->name = name;
    }

    return node;
}


node_t *
parse_behind(parser_t *p, node_t *node)
{
    while (node != NULL && p->code == LLM_OK) {
        if (parse_skip(p, JT_DOT)) {
            node = parse_attribute(p, node);

        } else if (parse_skip(p, JT_LBRACKET)) {
            node = parse_subscript(p, node);

        } else if (parse_skip(p, JT_LPAREN)) {
            node = parse_args(p, parse_node(p, N_CALL, node, NULL));

        } else {
            break;
        }
    }

    return node;
}


node_t *
parse_postfix(parser_t *p)
{
    return parse_behind(p, parse_primary(p));
}


/* A filter's or a test's name, its row set; dotted names are unknown. */
static node_t *
parse_row(parser_t *p, node_kind_t kind, node_t *operand)
{
    jname_t *name = parse_name(p);
    node_t *node = parse_node(p, kind, operand, NULL);

    if (node == NULL || name == NULL) {
        return NULL;
    }

    node->name = name;
    node->row = kind == N_FILTER ? jinja_filter(name->text.data, name->text.len)
                                 : jinja_test(name->text.data, name->text.len);

    if (node->row == NULL && p->soft == 0 && p->unknown == NULL) {
        p->unknown = node;
    }

    return node;
}


/* Does an argument without brackets follow a test, as in "is divisibleby 3"? */
static bool
bare_argument(const parser_t *p)
{
    switch (parse_peek(p)->kind) {
    case JT_STRING:
    case JT_INT:
    case JT_FLOAT:
    case JT_LBRACKET:
    case JT_LBRACE:
        return true;
    case JT_NAME:
        return !parse_is_name(p, "else") && !parse_is_name(p, "or")
               && !parse_is_name(p, "and") && !parse_is_name(p, "if")
               && !parse_is_name(p, "not") && !parse_is_name(p, "is")
               && !parse_is_name(p, "in") && !parse_is_name(p, "recursive");
    default:
        return false;
    }
}


static node_t *
parse_test(parser_t *p, node_t *operand)
{
    const bool negated = parse_skip_name(p, "not");
    node_t *node = parse_row(p, N_TEST, operand);

    if (node != NULL && parse_skip(p, JT_LPAREN)) {
        node = parse_args(p, node);

    } else if (node != NULL && bare_argument(p)) {
        kids_t kids = { 0 };

        parse_kid(p, &kids, parse_postfix(p));
        node = parse_kids(p, node, &kids);
    }

    return negated ? parse_node(p, N_NOT, node, NULL) : node;
}


node_t *
parse_filters(parser_t *p, node_t *operand, bool open)
{
    node_t *node = operand;

    while (node != NULL && p->code == LLM_OK
           && (open || parse_skip(p, JT_PIPE))) {
        node = parse_row(p, N_FILTER, node);
        open = false;

        if (node != NULL && parse_skip(p, JT_LPAREN)) {
            node = parse_args(p, node);
        }
    }

    return node;
}


/* Filters, tests and calls of their results, in any order. */
node_t *
parse_modifiers(parser_t *p, node_t *node)
{
    while (node != NULL && p->code == LLM_OK) {
        if (parse_is(p, JT_PIPE)) {
            node = parse_filters(p, node, false);

        } else if (parse_skip_name(p, "is")) {
            node = parse_test(p, node);

        } else if (parse_skip(p, JT_LPAREN)) {
            node = parse_args(p, parse_node(p, N_CALL, node, NULL));

        } else {
            break;
        }
    }

    return node;
}
