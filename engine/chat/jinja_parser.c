/*
 * The parser's tools: a look at the tokens, nodes and their kids, names.
 */

#include "engine/chat/jinja_parser.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <xxhash.h>


void
parse_fail_at(parser_t *p, uint32_t line, const char *text)
{
    if (p->code == LLM_OK) {
        p->code = llm_err_set(p->err, LLM_BADREQ, "chat_template",
                              "chat template, line %u: %s", line, text);
    }
}


node_t *
parse_fail(parser_t *p, const char *fmt, ...)
{
    char text[256];
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);

    parse_fail_at(p, parse_peek(p)->line, text);
    return NULL;
}


static void *
parse_alloc(parser_t *p, size_t bytes)
{
    void *mem = p->code == LLM_OK ? arena_calloc(p->arena, bytes) : NULL;

    if (mem == NULL && p->code == LLM_OK) {
        p->code = llm_err_set(p->err, LLM_NOMEM, NULL,
                              "no memory for the chat template");
    }

    return mem;
}


const jtok_t *
parse_peek(const parser_t *p)
{
    return &p->toks.items[p->at];
}


bool
parse_is(const parser_t *p, jtok_kind_t kind)
{
    return parse_peek(p)->kind == kind;
}


bool
parse_is_name(const parser_t *p, const char *name)
{
    const jtok_t *tok = parse_peek(p);

    return tok->kind == JT_NAME && tok->len == strlen(name)
           && memcmp(tok->text, name, tok->len) == 0;
}


bool
parse_skip(parser_t *p, jtok_kind_t kind)
{
    if (p->code != LLM_OK || !parse_is(p, kind)) {
        return false;
    }

    p->at += kind != JT_END;
    return true;
}


bool
parse_skip_name(parser_t *p, const char *name)
{
    return parse_is_name(p, name) && parse_skip(p, JT_NAME);
}


bool
parse_expect(parser_t *p, jtok_kind_t kind)
{
    if (parse_skip(p, kind)) {
        return true;
    }

    parse_fail(p, "expected %s, got %s", jinja_token_name(kind),
               jinja_token_name(parse_peek(p)->kind));
    return false;
}


jname_t *
parse_intern(parser_t *p, const char *text, size_t len)
{
    jname_t **bucket = &p->names[XXH3_64bits(text, len) % PARSER_BUCKETS];

    for (jname_t *name = *bucket; name != NULL; name = name->next) {
        if (name->text.len == len && memcmp(name->text.data, text, len) == 0) {
            return name;
        }
    }

    jname_t *name = parse_alloc(p, sizeof(jname_t));

    if (name != NULL) {
        name->text = (jstr_t){
            .data = text, .len = len, .n_chars = SIZE_MAX, .uniform = 1
        };
        jstr_chars(&name->text);
        name->next = *bucket;
        *bucket = name;
    }

    return name;
}


jname_t *
parse_name(parser_t *p)
{
    const jtok_t *tok = parse_peek(p);

    return parse_expect(p, JT_NAME) ? parse_intern(p, tok->text, tok->len)
                                    : NULL;
}


void
parse_deepen(parser_t *p, node_t *node, const node_t *child)
{
    if (node == NULL || child == NULL || child->depth < node->depth) {
        return;
    }

    if (child->depth >= JINJA_MAX_TREE) {
        parse_fail(p, "the template is nested too deeply");
        return;
    }

    node->depth = (uint16_t) (child->depth + 1);
}


node_t *
parse_node(parser_t *p, node_kind_t kind, node_t *a, node_t *b)
{
    node_t *node = parse_alloc(p, sizeof(node_t));

    if (node == NULL) {
        return NULL;
    }

    node->kind = (uint8_t) kind;
    node->line = parse_peek(p)->line;
    node->a = a;
    node->b = b;
    parse_deepen(p, node, a);
    parse_deepen(p, node, b);

    return p->code == LLM_OK ? node : NULL;
}


bool
parse_kid(parser_t *p, kids_t *kids, node_t *kid)
{
    if (kid == NULL || p->code != LLM_OK) {
        return false;
    }

    if (kids->n == kids->cap) {
        const size_t cap = kids->cap == 0 ? 4 : kids->cap * 2;
        node_t **items = parse_alloc(p, cap * sizeof(node_t *));

        if (items == NULL) {
            return false;
        }

        if (kids->n > 0) {
            memcpy(items, kids->items, kids->n * sizeof(node_t *));
        }

        kids->items = items;
        kids->cap = cap;
    }

    kids->items[kids->n++] = kid;
    return true;
}


node_t *
parse_kids(parser_t *p, node_t *node, const kids_t *kids)
{
    if (node == NULL) {
        return NULL;
    }

    node->kids = kids->items;
    node->n_kids = kids->n;

    for (size_t i = 0; i < kids->n; i++) {
        parse_deepen(p, node, kids->items[i]);
    }

    return p->code == LLM_OK ? node : NULL;
}
