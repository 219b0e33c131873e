/*
 * Template text → tokens, with Jinja's whitespace control applied as Hugging
 * Face's chat templates expect it (trim_blocks and lstrip_blocks on).
 */

#ifndef ENGINE_CHAT_JINJA_LEX_H
#define ENGINE_CHAT_JINJA_LEX_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"

typedef enum {
    JT_END,
    JT_TEXT, /* template text between tags */
    JT_VAR_OPEN,
    JT_VAR_CLOSE,
    JT_TAG_OPEN,
    JT_TAG_CLOSE,
    JT_NAME,
    JT_STRING, /* text is decoded */
    JT_INT,
    JT_FLOAT,
    /* operators */
    JT_ADD,
    JT_SUB,
    JT_MUL,
    JT_DIV,
    JT_FLOORDIV,
    JT_MOD,
    JT_POW,
    JT_TILDE,
    JT_EQ,
    JT_NE,
    JT_LT,
    JT_LE,
    JT_GT,
    JT_GE,
    JT_ASSIGN,
    JT_DOT,
    JT_COMMA,
    JT_COLON,
    JT_PIPE,
    JT_LPAREN,
    JT_RPAREN,
    JT_LBRACKET,
    JT_RBRACKET,
    JT_LBRACE,
    JT_RBRACE,
} jtok_kind_t;

typedef struct {
    jtok_kind_t kind;
    uint32_t line;
    const char *text; /* in the arena */
    size_t len;
    int64_t integer;
    double number;
} jtok_t;

typedef struct {
    jtok_t *items; /* the last one is JT_END */
    size_t n;
    size_t cap;
} jtoks_t;


/* LLM_BADREQ with line and cause for what is no template, LLM_NOMEM. */
int jinja_lex(arena_t *arena, const char *source, size_t len, jtoks_t *toks,
              llm_err_t *err);

/* How a token is called in an error message. */
const char *jinja_token_name(jtok_kind_t kind);

#endif /* ENGINE_CHAT_JINJA_LEX_H */
