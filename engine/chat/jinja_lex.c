/*
 * Template text → tokens.  The rules are those of Jinja's documentation,
 * "Whitespace Control": a block's or comment's line is stripped in front when
 * nothing else stands there, one newline behind it is dropped; - and + change
 * that.
 */

#include "engine/chat/jinja_lex.h"

#include <ctype.h>
#include <stdbool.h>
#include <string.h>

#include "engine/base/utf8.h"
#include "engine/chat/jinja_literal.h"

enum { MAX_BRACKETS = 200 };

typedef struct {
    arena_t *arena;
    llm_err_t *err;
    jtoks_t *toks;
    const char *src;
    size_t len;
    size_t at;
    uint32_t line;
    size_t line_at;              /* `line` holds for this offset */
    char brackets[MAX_BRACKETS]; /* the closers that are due */
    int n_brackets;
    int code;
} lex_t;

static const struct {
    const char text[3];
    uint8_t kind;
} operators[] = {
    { "//", JT_FLOORDIV }, { "**", JT_POW },     { "==", JT_EQ },
    { "!=", JT_NE },       { "<=", JT_LE },      { ">=", JT_GE },
    { "<", JT_LT },        { ">", JT_GT },       { "=", JT_ASSIGN },
    { "+", JT_ADD },       { "-", JT_SUB },      { "*", JT_MUL },
    { "/", JT_DIV },       { "%", JT_MOD },      { "~", JT_TILDE },
    { ".", JT_DOT },       { ",", JT_COMMA },    { ":", JT_COLON },
    { "|", JT_PIPE },      { "(", JT_LPAREN },   { ")", JT_RPAREN },
    { "[", JT_LBRACKET },  { "]", JT_RBRACKET }, { "{", JT_LBRACE },
    { "}", JT_RBRACE },
};


const char *
jinja_token_name(jtok_kind_t kind)
{
    static const char *const names[] = {
        [JT_END] = "the end of the template",
        [JT_TEXT] = "text",
        [JT_VAR_OPEN] = "'{{'",
        [JT_VAR_CLOSE] = "'}}'",
        [JT_TAG_OPEN] = "'{%'",
        [JT_TAG_CLOSE] = "'%}'",
        [JT_NAME] = "a name",
        [JT_STRING] = "a string",
        [JT_INT] = "an integer",
        [JT_FLOAT] = "a number",
    };

    if (kind < sizeof(names) / sizeof(names[0])) {
        return names[kind];
    }

    for (size_t i = 0; i < sizeof(operators) / sizeof(operators[0]); i++) {
        if (operators[i].kind == kind) {
            return operators[i].text;
        }
    }

    return "?";
}


static uint32_t
line_of(lex_t *lex, size_t at)
{
    while (lex->line_at < at && lex->line_at < lex->len) {
        lex->line += lex->src[lex->line_at++] == '\n';
    }

    return lex->line;
}


static bool
lex_fail(lex_t *lex, size_t at, const char *what)
{
    if (lex->code == LLM_OK) {
        lex->code =
            llm_err_set(lex->err, LLM_BADREQ, "chat_template",
                        "chat template, line %u: %s", line_of(lex, at), what);
    }

    return false;
}


static bool
lex_nomem(lex_t *lex)
{
    lex->code = llm_err_set(lex->err, LLM_NOMEM, NULL,
                            "no memory for the chat template");
    return false;
}


static jtok_t *
push(lex_t *lex, jtok_kind_t kind, size_t at, const char *text, size_t len)
{
    jtoks_t *toks = lex->toks;

    if (toks->n == toks->cap) {
        const size_t cap = toks->cap == 0 ? 64 : toks->cap * 2;
        jtok_t *items = arena_alloc(lex->arena, cap * sizeof(jtok_t));

        if (items == NULL) {
            lex_nomem(lex);
            return NULL;
        }

        if (toks->n > 0) {
            memcpy(items, toks->items, toks->n * sizeof(jtok_t));
        }

        toks->items = items;
        toks->cap = cap;
    }

    jtok_t *tok = &toks->items[toks->n++];

    *tok = (jtok_t){
        .kind = kind, .line = line_of(lex, at), .text = text, .len = len
    };
    return tok;
}


static bool
is_space(char c)
{
    return c == ' ' || (c >= '\t' && c <= '\r');
}


static bool
looking_at(const lex_t *lex, size_t at, const char *text)
{
    const size_t n = strlen(text);

    return at <= lex->len && lex->len - at >= n
           && memcmp(lex->src + at, text, n) == 0;
}


static size_t
skip_space(const lex_t *lex, size_t at)
{
    while (at < lex->len && is_space(lex->src[at])) {
        at++;
    }

    return at;
}


/* The source with every line ended by \n and without the last newline. */
static bool
normalise(lex_t *lex, const char *source, size_t len)
{
    char *p = arena_alloc(lex->arena, len + 1);
    size_t n = 0;

    if (p == NULL) {
        return lex_nomem(lex);
    }

    for (size_t i = 0; i < len; i++) {
        if (source[i] == '\r') {
            i += i + 1 < len && source[i + 1] == '\n';
            p[n++] = '\n';

        } else {
            p[n++] = source[i];
        }
    }

    if (n > 0 && p[n - 1] == '\n') {
        n--;
    }

    lex->src = p;
    lex->len = n;

    return true;
}


/* Pushes the text [at, end) before a tag whose sign is '-', '+' or 0. */
static bool
push_text(lex_t *lex, size_t end, char sign, bool is_variable)
{
    const size_t start = lex->at;
    size_t cut = end;

    if (sign == '-') {
        while (cut > start && is_space(lex->src[cut - 1])) {
            cut--;
        }

    } else if (sign != '+' && !is_variable) {
        while (cut > start && is_space(lex->src[cut - 1])
               && lex->src[cut - 1] != '\n') {
            cut--;
        }

        /* only a line of its own is stripped */
        if (cut > 0 && lex->src[cut - 1] != '\n') {
            cut = end;
        }
    }

    return cut == start
           || push(lex, JT_TEXT, start, lex->src + start, cut - start) != NULL;
}


/* Moves behind a closing delimiter that begins at `at` ("%}" or "#}"). */
static void
close_at(lex_t *lex, size_t at, char sign)
{
    lex->at = at + 2;

    if (sign == '-') {
        lex->at = skip_space(lex, lex->at);

    } else if (sign != '+' && lex->at < lex->len && lex->src[lex->at] == '\n') {
        lex->at++;
    }
}


static bool
lex_comment(lex_t *lex, size_t open, size_t body)
{
    for (size_t i = body; i + 1 < lex->len; i++) {
        if (looking_at(lex, i, "#}")) {
            const char sign = i > body ? lex->src[i - 1] : 0;
            close_at(lex, i, sign);
            return true;
        }
    }

    return lex_fail(lex, open, "a comment is not closed");
}


/* Is there a tag of this name at `at`?  *end: behind its closing delimiter's
 * first byte; *sign: what stands before that delimiter. */
static bool
bare_tag(const lex_t *lex, size_t at, const char *name, size_t *end, char *sign)
{
    at = skip_space(lex, at);

    if (!looking_at(lex, at, name)) {
        return false;
    }

    at = skip_space(lex, at + strlen(name));
    *sign = 0;

    if (at < lex->len && (lex->src[at] == '-' || lex->src[at] == '+')) {
        *sign = lex->src[at++];
    }

    *end = at;
    return looking_at(lex, at, "%}");
}


static bool
lex_raw(lex_t *lex, size_t open, size_t close, char sign)
{
    size_t end;

    lex->at = close + 2;

    if (sign == '-') {
        lex->at = skip_space(lex, lex->at);
    }

    for (size_t i = lex->at; i + 1 < lex->len; i++) {
        if (!looking_at(lex, i, "{%")) {
            continue;
        }

        const char s = i + 2 < lex->len ? lex->src[i + 2] : 0;
        const bool has = s == '-' || s == '+';

        if (bare_tag(lex, i + 2 + has, "endraw", &end, &sign)) {
            const bool ok = push_text(lex, i, has ? s : 0, false);
            close_at(lex, end, sign);
            return ok;
        }
    }

    return lex_fail(lex, open, "{% raw %} is not closed");
}


static bool
lex_number(lex_t *lex)
{
    const jtoks_t *toks = lex->toks;
    const bool after_dot =
        toks->n > 0 && toks->items[toks->n - 1].kind == JT_DOT;
    const size_t start = lex->at;
    jnumber_t number;
    const size_t n = jinja_read_number(lex->src + start, lex->len - start,
                                       after_dot, &number);

    if (n == 0) {
        return lex_fail(lex, start, "the number is too large");
    }

    jtok_t *tok = push(lex, number.is_float ? JT_FLOAT : JT_INT, start,
                       lex->src + start, n);

    if (tok == NULL) {
        return false;
    }

    tok->integer = number.integer;
    tok->number = number.number;
    lex->at += n;

    return true;
}


static bool
lex_string(lex_t *lex)
{
    const size_t start = lex->at;
    const char quote = lex->src[start];
    size_t end = start + 1;

    while (end < lex->len && lex->src[end] != quote) {
        end += lex->src[end] == '\\' ? 2 : 1;
    }

    if (end >= lex->len) {
        return lex_fail(lex, start, "a string is not closed");
    }

    char *out = arena_alloc(lex->arena, end - start);

    if (out == NULL) {
        return lex_nomem(lex);
    }

    lex->at = end + 1;

    return push(lex, JT_STRING, start, out,
                jinja_read_string(lex->src + start + 1, end - start - 1, out))
           != NULL;
}


static bool
balance(lex_t *lex, size_t at, char c)
{
    static const char opening[] = "([{", closing[] = ")]}";
    const char *open = strchr(opening, c);

    if (open != NULL) {
        if (lex->n_brackets == MAX_BRACKETS) {
            return lex_fail(lex, at, "brackets are nested too deeply");
        }
        lex->brackets[lex->n_brackets++] = closing[open - opening];
        return true;
    }

    if (strchr(closing, c) != NULL
        && (lex->n_brackets == 0 || lex->brackets[--lex->n_brackets] != c))
    {
        return lex_fail(lex, at, "a bracket is closed that is not open");
    }

    return true;
}


static bool
lex_operator(lex_t *lex)
{
    for (size_t i = 0; i < sizeof(operators) / sizeof(operators[0]); i++) {
        const char *text = operators[i].text;

        if (looking_at(lex, lex->at, text)) {
            const size_t at = lex->at;

            lex->at += strlen(text);
            return balance(lex, at, text[0])
                   && push(lex, operators[i].kind, at, lex->src + at,
                           strlen(text))
                          != NULL;
        }
    }

    return lex_fail(lex, lex->at, "unexpected character");
}


static bool
is_name(char c)
{
    return isalnum((uint8_t) c) || c == '_' || (uint8_t) c >= 0x80;
}


static bool
lex_token(lex_t *lex)
{
    const char c = lex->src[lex->at];
    const size_t start = lex->at;

    if (isdigit((uint8_t) c)) {
        return lex_number(lex);
    }

    if (c == '\'' || c == '"') {
        return lex_string(lex);
    }

    if (!is_name(c)) {
        return lex_operator(lex);
    }

    while (lex->at < lex->len && is_name(lex->src[lex->at])) {
        lex->at++;
    }

    return push(lex, JT_NAME, start, lex->src + start, lex->at - start) != NULL;
}


/* Everything up to the delimiter that closes a {{ or a {%. */
static bool
lex_inside(lex_t *lex, size_t open, bool is_variable)
{
    const char *close = is_variable ? "}}" : "%}";

    lex->n_brackets = 0;

    for (;;) {
        lex->at = skip_space(lex, lex->at);

        if (lex->at >= lex->len) {
            return lex_fail(lex, open, "a tag is not closed");
        }

        const char c = lex->src[lex->at];
        const bool sign = c == '-' || (c == '+' && !is_variable);

        if (lex->n_brackets == 0 && looking_at(lex, lex->at + sign, close)) {
            const size_t at = lex->at + sign;

            if (push(lex, is_variable ? JT_VAR_CLOSE : JT_TAG_CLOSE, at, "", 0)
                == NULL) {
                return false;
            }

            /* only blocks swallow the newline behind them */
            close_at(lex, at, sign ? c : is_variable ? '+' : 0);
            return true;
        }

        if (!lex_token(lex)) {
            return false;
        }
    }
}


/* The next delimiter at or behind `at`, or len. */
static size_t
next_open(const lex_t *lex, size_t at)
{
    while (at < lex->len) {
        const char *p = memchr(lex->src + at, '{', lex->len - at);

        if (p == NULL) {
            break;
        }

        at = (size_t) (p - lex->src);

        if (at + 1 < lex->len && strchr("{%#", p[1]) != NULL && p[1] != 0) {
            return at;
        }
        at++;
    }

    return lex->len;
}


static bool
lex_section(lex_t *lex)
{
    const size_t open = next_open(lex, lex->at);

    if (open == lex->len) {
        const bool ok = push_text(lex, open, '+', false);
        lex->at = open;
        return ok;
    }

    const char type = lex->src[open + 1];
    const char c = open + 2 < lex->len ? lex->src[open + 2] : 0;
    const char sign = c == '-' || c == '+' ? c : 0;
    const size_t body = open + 2 + (sign != 0);
    size_t end;
    char end_sign;

    if (!push_text(lex, open, sign, type == '{')) {
        return false;
    }

    if (type == '#') {
        return lex_comment(lex, open, body);
    }

    if (type == '%' && bare_tag(lex, body, "raw", &end, &end_sign)
        && end_sign != '+')
    {
        return lex_raw(lex, open, end, end_sign);
    }

    lex->at = body;
    return push(lex, type == '{' ? JT_VAR_OPEN : JT_TAG_OPEN, open, "", 0)
               != NULL
           && lex_inside(lex, open, type == '{');
}


int
jinja_lex(arena_t *arena, const char *source, size_t len, jtoks_t *toks,
          llm_err_t *err)
{
    lex_t lex = { .arena = arena, .err = err, .toks = toks, .line = 1 };

    *toks = (jtoks_t){ 0 };

    if (!normalise(&lex, source, len)) {
        return lex.code;
    }

    if (!utf8_valid((const uint8_t *) lex.src, lex.len)) {
        lex_fail(&lex, 0, "the template is not valid UTF-8");
        return lex.code;
    }

    while (lex.at < lex.len) {
        if (!lex_section(&lex)) {
            return lex.code;
        }
    }

    if (push(&lex, JT_END, lex.len, "", 0) == NULL) {
        return lex.code;
    }

    return LLM_OK;
}
