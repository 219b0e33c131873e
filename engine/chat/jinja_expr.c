/*
 * Expressions: tokens → tree, by recursive descent over Jinja's precedences.
 *
 * Two of them differ from Python's and are kept: ~ binds tighter than +, and a
 * filter or a test binds tighter than any operator.
 */

#include <string.h>

#include "engine/chat/jinja_parser.h"

enum { MAX_PARSE_DEPTH = 200 }; /* brackets in brackets */

/* Left-associative operators, loosest first. */
static const uint8_t levels[][4] = {
    { JT_ADD, JT_SUB },
    { JT_TILDE },
    { JT_MUL, JT_DIV, JT_FLOORDIV, JT_MOD },
    { JT_POW },
};

enum { N_LEVELS = sizeof(levels) / sizeof(levels[0]) };


static node_t *
parse_unary(parser_t *p, bool filters)
{
    node_t *node;

    if (++p->depth > MAX_PARSE_DEPTH) {
        return parse_fail(p, "the expression is nested too deeply");
    }

    if (parse_skip(p, JT_SUB)) {
        node = parse_node(p, N_NEG, parse_unary(p, false), NULL);

    } else if (parse_skip(p, JT_ADD)) {
        node = parse_node(p, N_POS, parse_unary(p, false), NULL);

    } else {
        node = parse_primary(p);
    }

    node = parse_behind(p, node);

    if (filters) {
        node = parse_modifiers(p, node);
    }

    p->depth--;
    return node;
}


static bool
in_level(int level, jtok_kind_t kind)
{
    for (int i = 0; i < 4 && kind != 0; i++) {
        if (levels[level][i] == kind) {
            return true;
        }
    }

    return false;
}


static node_t *
parse_binary(parser_t *p, int level)
{
    if (level == N_LEVELS) {
        return parse_unary(p, true);
    }

    node_t *left = parse_binary(p, level + 1);

    while (left != NULL && in_level(level, parse_peek(p)->kind)) {
        const jtok_kind_t op = parse_peek(p)->kind;

        p->at++;
        left = parse_node(p, N_BINARY, left, parse_binary(p, level + 1));

        if (left != NULL) {
            left->op = (uint8_t) op;
        }
    }

    return left;
}


/* The comparison operator at hand, stepped over; 0 if there is none. */
static uint8_t
comparison(parser_t *p)
{
    const jtok_kind_t kind = parse_peek(p)->kind;

    if (kind >= JT_EQ && kind <= JT_GE) {
        p->at++;
        return (uint8_t) kind;
    }

    if (parse_skip_name(p, "in")) {
        return OP_IN;
    }

    if (parse_is_name(p, "not") && parse_peek(p)[1].kind == JT_NAME
        && parse_peek(p)[1].len == 2
        && memcmp(parse_peek(p)[1].text, "in", 2) == 0)
    {
        p->at += 2;
        return OP_NOT_IN;
    }

    return 0;
}


/* a < b < c: a node for each comparison, b and c wrapped with their operator
 * so that each operand is evaluated once. */
static node_t *
parse_comparison(parser_t *p)
{
    node_t *first = parse_binary(p, 0);
    kids_t kids = { 0 };
    uint8_t op;

    while (first != NULL && p->code == LLM_OK && (op = comparison(p)) != 0) {
        node_t *right = parse_node(p, N_ARG, parse_binary(p, 0), NULL);

        if (!parse_kid(p, &kids, right)) {
            return NULL;
        }
        right->op = op;
    }

    if (kids.n == 0) {
        return first;
    }

    return parse_kids(p, parse_node(p, N_CHAIN, first, NULL), &kids);
}


static node_t *
parse_not(parser_t *p)
{
    int n = 0;

    while (parse_skip_name(p, "not")) {
        n++;
    }

    node_t *node = parse_comparison(p);

    for (; node != NULL && n > 0; n--) {
        node = parse_node(p, N_NOT, node, NULL);
    }

    return node;
}


static node_t *
parse_and(parser_t *p)
{
    node_t *left = parse_not(p);

    while (left != NULL && parse_skip_name(p, "and")) {
        left = parse_node(p, N_AND, left, parse_not(p));
    }

    return left;
}


static node_t *
parse_or(parser_t *p)
{
    node_t *left = parse_and(p);

    while (left != NULL && parse_skip_name(p, "or")) {
        left = parse_node(p, N_OR, left, parse_and(p));
    }

    return left;
}


node_t *
parse_expr(parser_t *p, bool condexpr)
{
    if (++p->depth > MAX_PARSE_DEPTH) {
        return parse_fail(p, "the expression is nested too deeply");
    }

    node_t *unknown = p->unknown;
    node_t *node = parse_or(p);

    while (condexpr && node != NULL && parse_skip_name(p, "if")) {
        node_t *test = parse_or(p);

        p->unknown = unknown; /* what depends on a condition may never run */
        node = parse_node(p, N_IF, node, test);

        if (node != NULL && parse_skip_name(p, "else")) {
            node->c = parse_expr(p, true);
            parse_deepen(p, node, node->c);
            p->unknown = unknown;
        }
    }

    p->depth--;

    return p->code == LLM_OK ? node : NULL;
}


node_t *
parse_exprs(parser_t *p, bool condexpr)
{
    node_t *first = parse_expr(p, condexpr);
    kids_t kids = { 0 };

    if (first == NULL || !parse_is(p, JT_COMMA)) {
        return first;
    }

    parse_kid(p, &kids, first);

    while (p->code == LLM_OK && parse_skip(p, JT_COMMA)) {
        if (parse_is(p, JT_VAR_CLOSE) || parse_is(p, JT_TAG_CLOSE)) {
            break;
        }
        parse_kid(p, &kids, parse_expr(p, condexpr));
    }

    return parse_kids(p, parse_node(p, N_TUPLE, NULL, NULL), &kids);
}
