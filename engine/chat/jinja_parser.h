/*
 * The parser's own state and tools (jinja_parser.c), shared by its parts:
 * statements (jinja_parse.c), expressions (jinja_expr.c) and their operands
 * (jinja_primary.c).
 */

#ifndef ENGINE_CHAT_JINJA_PARSER_H
#define ENGINE_CHAT_JINJA_PARSER_H

#include "engine/chat/jinja_lex.h"
#include "engine/chat/jinja_parse.h"

enum { PARSER_BUCKETS = 256 };

typedef struct {
    arena_t *arena;
    llm_err_t *err;
    jtoks_t toks;
    size_t at;
    int code; /* sticky, as in a run */
    int depth;
    int loops;       /* loops around the place, inside the macro */
    int soft;        /* {% if %} around the place */
    node_t *unknown; /* the first unknown filter that no condition guards */
    bool varargs;    /* a use of varargs or kwargs was seen */
    jname_t *names[PARSER_BUCKETS];
} parser_t;

/* Kids under construction. */
typedef struct {
    node_t **items;
    size_t n;
    size_t cap;
} kids_t;


/* Records the first failure, with the line of the current token. */
node_t *parse_fail(parser_t *p, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

void parse_fail_at(parser_t *p, uint32_t line, const char *text);

const jtok_t *parse_peek(const parser_t *p);
bool parse_is(const parser_t *p, jtok_kind_t kind);
bool parse_is_name(const parser_t *p, const char *name);

/* Steps over the token if it is this one. */
bool parse_skip(parser_t *p, jtok_kind_t kind);
bool parse_skip_name(parser_t *p, const char *name);
bool parse_expect(parser_t *p, jtok_kind_t kind);

/* The one copy of a name; NULL when there is no memory. */
jname_t *parse_intern(parser_t *p, const char *text, size_t len);

/* Steps over a name; NULL and a failure if there is none. */
jname_t *parse_name(parser_t *p);

/* A node with children a and b (or NULL).  Returns NULL after a failure: all
 * of these functions pass NULL on. */
node_t *parse_node(parser_t *p, node_kind_t kind, node_t *a, node_t *b);
bool parse_kid(parser_t *p, kids_t *kids, node_t *kid);

/* Gives node its kids and deepens it accordingly. */
node_t *parse_kids(parser_t *p, node_t *node, const kids_t *kids);
void parse_deepen(parser_t *p, node_t *node, const node_t *child);

/* condexpr: a trailing "if" belongs to the expression. */
node_t *parse_expr(parser_t *p, bool condexpr);

/* a, b, c makes a tuple; a alone is a. */
node_t *parse_exprs(parser_t *p, bool condexpr);

/* Filters behind operand: "|name(args)" repeated; `open`: the first one comes
 * without its bar. */
node_t *parse_filters(parser_t *p, node_t *operand, bool open);

/* A literal, a name or brackets; what stands behind it: attributes, items and
 * calls; both at once; filters and tests. */
node_t *parse_primary(parser_t *p);
node_t *parse_behind(parser_t *p, node_t *node);
node_t *parse_postfix(parser_t *p);
node_t *parse_modifiers(parser_t *p, node_t *node);

#endif /* ENGINE_CHAT_JINJA_PARSER_H */
