/*
 * Statements: tokens → tree.  Called once per model, by template.c.
 */

#include "engine/chat/jinja_parser.h"

#include <stdio.h>
#include <string.h>

enum { MAX_STATEMENT_DEPTH = 60 }; /* blocks in blocks */

typedef node_t *(*statement_t)(parser_t *p);

static node_t *parse_body(parser_t *p, const char *const *ends);


/* Steps over "{% end %}", or over its name and close when at the name. */
static bool
parse_end(parser_t *p, const char *name)
{
    if (!parse_skip_name(p, name)) {
        parse_fail(p, "expected '%s'", name);
        return false;
    }

    return parse_expect(p, JT_TAG_CLOSE);
}


/* A body up to its end tag, which is stepped over. */
static node_t *
parse_block(parser_t *p, const char *end)
{
    const char *const ends[] = { end, NULL };
    node_t *body = parse_body(p, ends);

    return body != NULL && parse_end(p, end) ? body : NULL;
}


/* A body that becomes a string: no break leads out of it. */
static node_t *
parse_captured(parser_t *p, const char *end)
{
    const int loops = p->loops;

    p->loops = 0;
    node_t *body = parse_block(p, end);
    p->loops = loops;

    return body;
}


static node_t *
parse_if(parser_t *p)
{
    static const char *const ends[] = { "elif", "else", "endif", NULL };
    node_t *node = parse_node(p, N_BRANCHES, NULL, NULL);
    node_t *otherwise = NULL;
    kids_t kids = { 0 };

    do {
        node_t *test = parse_exprs(p, false);

        if (test == NULL || !parse_expect(p, JT_TAG_CLOSE)) {
            return NULL;
        }

        p->soft++;
        node_t *body = parse_body(p, ends);
        p->soft--;

        if (!parse_kid(p, &kids, parse_node(p, N_BRANCH, test, body))) {
            return NULL;
        }
    } while (parse_skip_name(p, "elif"));

    if (parse_skip_name(p, "else")) {
        parse_expect(p, JT_TAG_CLOSE);
        p->soft++;
        otherwise = parse_block(p, "endif");
        p->soft--;

    } else {
        parse_end(p, "endif");
    }

    if (node != NULL) {
        node->c = otherwise;
        parse_deepen(p, node, otherwise);
    }

    return parse_kids(p, node, &kids);
}


/* a, (a, b) or a, b: names only. */
static node_t *
parse_target(parser_t *p, bool attribute)
{
    const bool bracket = parse_skip(p, JT_LPAREN);
    kids_t kids = { 0 };
    bool comma;

    do {
        jname_t *name = parse_name(p);
        node_t *node = parse_node(p, N_NAME, NULL, NULL);

        if (node == NULL || name == NULL) {
            return NULL;
        }

        node->name = name;

        if (attribute && kids.n == 0 && parse_skip(p, JT_DOT)) {
            node = parse_node(p, N_ATTR, node, NULL);
            name = parse_name(p);

            if (node == NULL || name == NULL) {
                return NULL;
            }

            node->name = name;
            return node;
        }

        parse_kid(p, &kids, node);
        comma = parse_skip(p, JT_COMMA);
    } while (comma && parse_is(p, JT_NAME) && !parse_is_name(p, "in"));

    if (bracket && !parse_expect(p, JT_RPAREN)) {
        return NULL;
    }

    if (kids.n == 1 && !comma) {
        return kids.items[0];
    }

    return parse_kids(p, parse_node(p, N_TUPLE, NULL, NULL), &kids);
}


static node_t *
parse_for(parser_t *p)
{
    static const char *const ends[] = { "else", "endfor", NULL };
    node_t *target = parse_target(p, false);

    if (target != NULL && !parse_skip_name(p, "in")) {
        return parse_fail(p, "expected 'in'");
    }

    node_t *node = parse_node(p, N_FOR, target, parse_exprs(p, false));

    if (node == NULL) {
        return NULL;
    }

    node->name = parse_intern(p, "loop", strlen("loop"));

    if (parse_skip_name(p, "if")) {
        node->c = parse_expr(p, false);
        parse_deepen(p, node, node->c);
    }

    if (parse_is_name(p, "recursive")) {
        return parse_fail(p, "recursive loops are not supported");
    }

    if (!parse_expect(p, JT_TAG_CLOSE)) {
        return NULL;
    }

    p->loops++;
    node->d = parse_body(p, ends);
    p->loops--;
    parse_deepen(p, node, node->d);

    if (parse_skip_name(p, "else")) {
        parse_expect(p, JT_TAG_CLOSE);
        node->e = parse_block(p, "endfor");
        parse_deepen(p, node, node->e);

    } else {
        parse_end(p, "endfor");
    }

    return p->code == LLM_OK ? node : NULL;
}


static node_t *
parse_set(parser_t *p)
{
    node_t *target = parse_target(p, true);
    node_t *node;

    if (parse_skip(p, JT_ASSIGN)) {
        node = parse_node(p, N_SET, target, parse_exprs(p, true));
        return parse_expect(p, JT_TAG_CLOSE) ? node : NULL;
    }

    node_t *captured = parse_node(p, N_CAPTURED, NULL, NULL);
    node_t *filters = parse_filters(p, captured, false);

    if (!parse_expect(p, JT_TAG_CLOSE)) {
        return NULL;
    }

    node = parse_node(p, N_SETBLOCK, target, parse_captured(p, "endset"));

    if (node != NULL) {
        node->c = filters;
        parse_deepen(p, node, filters);
    }

    return node;
}


/* Parameters up to ")". */
static bool
parse_params(parser_t *p, node_t *macro)
{
    kids_t kids = { 0 };

    while (p->code == LLM_OK && !parse_skip(p, JT_RPAREN)) {
        if (kids.n > 0 && !parse_expect(p, JT_COMMA)) {
            return false;
        }

        jname_t *name = parse_name(p);
        node_t *value = parse_skip(p, JT_ASSIGN) ? parse_expr(p, true) : NULL;
        node_t *param = parse_node(p, N_PARAM, value, NULL);

        if (param == NULL || name == NULL) {
            return false;
        }

        param->name = name;
        parse_kid(p, &kids, param);
    }

    return parse_kids(p, macro, &kids) != NULL;
}


static node_t *
name_node(parser_t *p, const char *name)
{
    node_t *node = parse_node(p, N_NAME, NULL, NULL);

    if (node != NULL) {
        node->name = parse_intern(p, name, strlen(name));
    }

    return node;
}


/* The body of a macro or call block. */
static bool
parse_macro_body(parser_t *p, node_t *macro, const char *end)
{
    const bool varargs = p->varargs;

    if (!parse_expect(p, JT_TAG_CLOSE)) {
        return false;
    }

    macro->c = name_node(p, "varargs");
    macro->d = name_node(p, "kwargs");
    macro->e = name_node(p, "caller");

    p->varargs = false;
    macro->b = parse_captured(p, end);
    macro->flag = p->varargs;
    p->varargs = varargs;
    parse_deepen(p, macro, macro->b);

    return p->code == LLM_OK;
}


static node_t *
parse_macro(parser_t *p)
{
    node_t *node = parse_node(p, N_MACRO, NULL, NULL);
    jname_t *name = parse_name(p);

    if (node == NULL || name == NULL || !parse_expect(p, JT_LPAREN)) {
        return NULL;
    }

    node->name = name;

    return parse_params(p, node) && parse_macro_body(p, node, "endmacro")
               ? node
               : NULL;
}


static node_t *
parse_call(parser_t *p)
{
    node_t *macro = parse_node(p, N_MACRO, NULL, NULL);

    if (macro == NULL || (parse_skip(p, JT_LPAREN) && !parse_params(p, macro)))
    {
        return NULL;
    }

    macro->name = parse_intern(p, "caller", strlen("caller"));
    node_t *call = parse_expr(p, true);

    if (call != NULL && call->kind != N_CALL) {
        return parse_fail(p, "expected a call");
    }

    if (call == NULL || !parse_macro_body(p, macro, "endcall")) {
        return NULL;
    }

    return parse_node(p, N_CALLBLOCK, call, macro);
}


static node_t *
parse_filter_block(parser_t *p)
{
    node_t *captured = parse_node(p, N_CAPTURED, NULL, NULL);
    node_t *filters = parse_filters(p, captured, true);

    if (!parse_expect(p, JT_TAG_CLOSE)) {
        return NULL;
    }

    node_t *node =
        parse_node(p, N_FILTERBLOCK, NULL, parse_captured(p, "endfilter"));

    if (node != NULL) {
        node->c = filters;
        parse_deepen(p, node, filters);
    }

    return node;
}


static node_t *
parse_with(parser_t *p)
{
    kids_t kids = { 0 };

    while (p->code == LLM_OK && !parse_skip(p, JT_TAG_CLOSE)) {
        if (kids.n > 0) {
            parse_expect(p, JT_COMMA);
        }

        node_t *target = parse_target(p, false);

        parse_expect(p, JT_ASSIGN);
        parse_kid(p, &kids, parse_node(p, N_SET, target, parse_expr(p, true)));
    }

    node_t *body = parse_block(p, "endwith");

    return parse_kids(p, parse_node(p, N_WITH, NULL, body), &kids);
}


static node_t *
parse_generation(parser_t *p)
{
    if (!parse_expect(p, JT_TAG_CLOSE)) {
        return NULL;
    }

    return parse_node(p, N_SCOPE, NULL, parse_captured(p, "endgeneration"));
}


static node_t *
parse_jump(parser_t *p, node_kind_t kind)
{
    if (p->loops == 0) {
        return parse_fail(p, "break and continue belong into a loop");
    }

    parse_expect(p, JT_TAG_CLOSE);
    return parse_node(p, kind, NULL, NULL);
}


static node_t *
parse_break(parser_t *p)
{
    return parse_jump(p, N_BREAK);
}


static node_t *
parse_continue(parser_t *p)
{
    return parse_jump(p, N_CONTINUE);
}


/* Behind "{%": one statement. */
static node_t *
parse_statement(parser_t *p)
{
    static const struct {
        const char *name;
        statement_t parse;
    } statements[] = {
        { "if", parse_if },       { "for", parse_for },
        { "set", parse_set },     { "macro", parse_macro },
        { "call", parse_call },   { "filter", parse_filter_block },
        { "with", parse_with },   { "generation", parse_generation },
        { "break", parse_break }, { "continue", parse_continue },
    };

    for (size_t i = 0; i < sizeof(statements) / sizeof(statements[0]); i++) {
        if (parse_skip_name(p, statements[i].name)) {
            const uint32_t line = parse_peek(p)->line;
            node_t *node = statements[i].parse(p);

            if (node != NULL) {
                node->line = line;
            }

            return node;
        }
    }

    const jtok_t *tok = parse_peek(p);

    return parse_fail(p, "unknown or misplaced tag '%.*s'",
                      tok->len < 40 ? (int) tok->len : 40, tok->text);
}


static node_t *
parse_text(parser_t *p)
{
    const jtok_t *tok = parse_peek(p);
    node_t *node = parse_node(p, N_TEXT, NULL, NULL);

    p->at++;

    if (node != NULL) {
        node->text = (jstr_t){ .data = tok->text,
                               .len = tok->len,
                               .n_chars = SIZE_MAX,
                               .uniform = 1 };
    }

    return node;
}


static node_t *
parse_output(parser_t *p)
{
    const uint32_t line = parse_peek(p)->line;
    node_t *node = parse_node(p, N_OUTPUT, parse_exprs(p, true), NULL);

    if (!parse_expect(p, JT_VAR_CLOSE)) {
        return NULL;
    }

    node->line = line;
    return node;
}


/* Is the tag at hand one of the end tags?  Steps over its "{%" if so. */
static bool
at_end(parser_t *p, const char *const *ends)
{
    if (!parse_skip(p, JT_TAG_OPEN)) {
        return false;
    }

    for (; ends != NULL && *ends != NULL; ends++) {
        if (parse_is_name(p, *ends)) {
            return true;
        }
    }

    p->at--;
    return false;
}


/* Statements up to one of the end tags (NULL: up to the end); stops at the
 * end tag's name. */
static node_t *
parse_body(parser_t *p, const char *const *ends)
{
    const uint32_t line = parse_peek(p)->line;
    kids_t kids = { 0 };

    if (++p->depth > MAX_STATEMENT_DEPTH) {
        return parse_fail(p, "blocks are nested too deeply");
    }

    while (p->code == LLM_OK && !at_end(p, ends)) {
        node_t *kid;

        if (parse_is(p, JT_END)) {
            if (ends != NULL) {
                char text[80];
                snprintf(text, sizeof(text),
                         "a block that begins here lacks its '%s'",
                         ends[1] == NULL   ? ends[0]
                         : ends[2] == NULL ? ends[1]
                                           : ends[2]);
                parse_fail_at(p, line, text);
            }
            break;
        }

        if (parse_is(p, JT_TEXT)) {
            kid = parse_text(p);

        } else if (parse_skip(p, JT_VAR_OPEN)) {
            kid = parse_output(p);

        } else {
            parse_expect(p, JT_TAG_OPEN);
            kid = parse_statement(p);
        }

        parse_kid(p, &kids, kid);
    }

    p->depth--;
    return parse_kids(p, parse_node(p, N_BODY, NULL, NULL), &kids);
}


int
jinja_parse(arena_t *arena, const char *source, size_t len, node_t **root,
            llm_err_t *err)
{
    parser_t p = { .arena = arena, .err = err };

    p.code = jinja_lex(arena, source, len, &p.toks, err);

    if (p.code != LLM_OK) {
        return p.code;
    }

    *root = parse_body(&p, NULL);

    if (p.code == LLM_OK && p.unknown != NULL) {
        char text[120];
        const jstr_t *name = &p.unknown->name->text;

        snprintf(text, sizeof(text), "there is no %s named '%.*s'",
                 p.unknown->kind == N_FILTER ? "filter" : "test",
                 name->len < 60 ? (int) name->len : 60, name->data);
        parse_fail_at(&p, p.unknown->line, text);
    }

    return p.code;
}
