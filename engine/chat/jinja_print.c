/*
 * Values as text: Python's str() and repr(), and json.dumps().
 */

#include "engine/chat/jinja_print.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "engine/base/utf8.h"
#include "engine/chat/jinja_sort.h"

typedef struct {
    jbuf_t *buf;
    jinja_t *run;
    const jjson_t *json;
    uint8_t mark;
    int depth;
} out_t;

static void write_repr(out_t *out, const jv_t *v);
static void write_json(out_t *out, const jv_t *v);


static void
put(out_t *out, const char *text)
{
    jbuf_add(out->buf, text, strlen(text), out->mark);
}


/* Counts one value; false when the run has failed or is nested too deeply. */
static bool
enter(out_t *out)
{
    if (out->depth >= JINJA_MAX_NESTING) {
        jv_fail(out->run, "a value is nested deeper than %d levels",
                JINJA_MAX_NESTING);
    }

    if (!jinja_step(out->run, 1)) {
        return false;
    }

    out->depth++;
    return true;
}


static bool
trusted_deep(jinja_t *run, const jv_t *v, int depth)
{
    if (depth >= JINJA_MAX_NESTING || !jinja_step(run, 1)) {
        return false;
    }

    if (v->kind == JV_STR) {
        return jstr_trusted(v->str);
    }

    if (v->kind == JV_UNDEFINED) {
        return true;
    }

    bool all = v->trusted;

    if (jv_is_seq(v)) {
        for (size_t i = 0; all && i < v->list->n; i++) {
            all = trusted_deep(run, &v->list->items[i], depth + 1);
        }

    } else if (v->kind == JV_DICT || v->kind == JV_NAMESPACE) {
        for (size_t i = 0; all && i < v->dict->n; i++) {
            all = trusted_deep(run, &v->dict->keys[i], depth + 1)
                  && trusted_deep(run, &v->dict->values[i], depth + 1);
        }
    }

    return all;
}


bool
jv_trusted(jinja_t *run, const jv_t *v)
{
    return trusted_deep(run, v, 0);
}


/* The shortest digits that read back as f, laid out as Python does. */
void
jinja_float_text(double f, char *text, size_t cap)
{
    char e[40], digits[24];

    if (!isfinite(f)) {
        snprintf(text, cap, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }

    for (int precision = 0; precision < 17; precision++) {
        snprintf(e, sizeof(e), "%.*e", precision, fabs(f));

        if (strtod(e, NULL) == fabs(f)) {
            break;
        }
    }

    const char *sign = signbit(f) ? "-" : "";
    const int exponent = (int) strtol(strchr(e, 'e') + 1, NULL, 10);
    int n = 0;

    for (const char *p = e; *p != 'e'; p++) {
        if (*p != '.') {
            digits[n++] = *p;
        }
    }

    digits[n] = '\0';

    if (exponent < -4 || exponent >= 16) {
        snprintf(text, cap, "%s%c%s%se%c%02d", sign, digits[0],
                 n > 1 ? "." : "", digits + 1, exponent < 0 ? '-' : '+',
                 abs(exponent));

    } else if (exponent < 0) {
        snprintf(text, cap, "%s0.%.*s%s", sign, -exponent - 1, "000", digits);

    } else if (n <= exponent + 1) {
        snprintf(text, cap, "%s%s%.*s.0", sign, digits, exponent + 1 - n,
                 "000000000000000");

    } else {
        snprintf(text, cap, "%s%.*s.%s", sign, exponent + 1, digits,
                 digits + exponent + 1);
    }
}


/* Numbers, True, None: the same in str() and repr().  False: none of them. */
static bool
scalar_text(const jv_t *v, char *text, size_t cap)
{
    switch (v->kind) {
    case JV_NONE:
        snprintf(text, cap, "None");
        return true;
    case JV_BOOL:
        snprintf(text, cap, "%s", v->b ? "True" : "False");
        return true;
    case JV_INT:
        snprintf(text, cap, "%" PRId64, v->i);
        return true;
    case JV_FLOAT:
        jinja_float_text(v->f, text, cap);
        return true;
    default:
        return false;
    }
}


static bool
printable(uint32_t cp)
{
    if (cp < 0x7f) {
        return cp >= 0x20;
    }

    switch (utf8proc_category((utf8proc_int32_t) cp)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
        return false;
    default:
        return true;
    }
}


/* One character of repr(); returns how many bytes it took. */
static size_t
repr_char(out_t *out, const char *p, size_t len, char quote)
{
    char text[16] = { '\\', *p, '\0' };
    uint32_t cp = (uint8_t) *p;
    int n = utf8_decode((const uint8_t *) p, len, &cp);

    if (n <= 0) {
        n = 1;
        cp = (uint8_t) *p;
    }

    if (*p == '\n' || *p == '\r' || *p == '\t') {
        text[1] = *p == '\n' ? 'n' : *p == '\r' ? 'r' : 't';

    } else if (printable(cp) && *p != '\\' && *p != quote) {
        jbuf_add(out->buf, p, (size_t) n, out->mark);
        return (size_t) n;

    } else if (*p != '\\' && *p != quote) {
        snprintf(text, sizeof(text),
                 cp < 0x100     ? "\\x%02x"
                 : cp < 0x10000 ? "\\u%04x"
                                : "\\U%08x",
                 cp);
    }

    put(out, text);
    return (size_t) n;
}


static void
repr_string(out_t *out, const jstr_t *s)
{
    const bool both = memchr(s->data, '\'', s->len) != NULL
                      && memchr(s->data, '"', s->len) == NULL;
    const char quote[2] = { both ? '"' : '\'', '\0' };

    put(out, quote);
    jinja_step(out->run, s->len / 256);

    for (size_t i = 0; i < s->len && out->run->code == LLM_OK;) {
        size_t plain = i;

        while (plain < s->len && (uint8_t) s->data[plain] - 0x20 < 0x5f
               && (uint8_t) s->data[plain] >= 0x20 && s->data[plain] != '\\'
               && s->data[plain] != quote[0])
        {
            plain++;
        }

        jbuf_add(out->buf, s->data + i, plain - i, out->mark);
        i = plain;

        if (i < s->len) {
            i += repr_char(out, s->data + i, s->len - i, quote[0]);
        }
    }

    put(out, quote);
}


static void
repr_list(out_t *out, const jv_t *v)
{
    const bool tuple = v->kind == JV_TUPLE;

    put(out, tuple ? "(" : "[");

    for (size_t i = 0; i < v->list->n && out->run->code == LLM_OK; i++) {
        put(out, i > 0 ? ", " : "");
        write_repr(out, &v->list->items[i]);
    }

    put(out, tuple ? v->list->n == 1 ? ",)" : ")" : "]");
}


static void
repr_dict(out_t *out, const jdict_t *dict)
{
    put(out, "{");

    for (size_t i = 0; i < dict->n && out->run->code == LLM_OK; i++) {
        put(out, i > 0 ? ", " : "");
        write_repr(out, &dict->keys[i]);
        put(out, ": ");
        write_repr(out, &dict->values[i]);
    }

    put(out, "}");
}


static void
write_repr(out_t *out, const jv_t *v)
{
    char text[40];

    if (!enter(out)) {
        return;
    }

    switch (v->kind) {
    case JV_STR:
        repr_string(out, v->str);
        break;
    case JV_LIST:
    case JV_TUPLE:
    case JV_GEN:
        repr_list(out, v);
        break;
    case JV_DICT:
        repr_dict(out, v->dict);
        break;
    case JV_NAMESPACE:
        put(out, "<Namespace ");
        repr_dict(out, v->dict);
        put(out, ">");
        break;
    default:
        if (scalar_text(v, text, sizeof(text))) {
            put(out, text);

        } else {
            put(out, v->kind == JV_UNDEFINED ? "" : "<");
            put(out, jv_type(v));
            put(out, v->kind == JV_UNDEFINED ? "" : ">");
        }
    }

    out->depth--;
}


jv_t
jinja_repr(jinja_t *run, const jv_t *v)
{
    out_t out = { .buf = jbuf_create(run), .run = run };

    out.mark = jv_trusted(run, v);
    write_repr(&out, v);

    return jbuf_string(out.buf);
}


jv_t
jv_string(jinja_t *run, const jv_t *v)
{
    char text[40];

    if (v->kind == JV_STR) {
        return *v;
    }

    if (v->kind == JV_UNDEFINED) {
        return jv_const(run, "");
    }

    if (scalar_text(v, text, sizeof(text))) {
        const size_t len = strlen(text);
        char *copy = jinja_alloc(run, len + 1);

        if (copy == NULL) {
            return jv_undefined();
        }

        memcpy(copy, text, len);
        return jv_text(run, copy, len, v->trusted);
    }

    return jinja_repr(run, v);
}


static void
json_escape(out_t *out, uint32_t cp)
{
    static const char plain[] = "\b\t\n\f\r\"\\", letter[] = "btnfr\"\\";
    char text[16];
    const char *at = cp != 0 && cp < 0x80 ? strchr(plain, (int) cp) : NULL;

    if (at != NULL) {
        snprintf(text, sizeof(text), "\\%c", letter[at - plain]);

    } else if (cp < 0x10000) {
        snprintf(text, sizeof(text), "\\u%04x", cp);

    } else {
        snprintf(text, sizeof(text), "\\u%04x\\u%04x",
                 0xd800 + ((cp - 0x10000) >> 10),
                 0xdc00 + ((cp - 0x10000) & 0x3ff));
    }

    put(out, text);
}


static void
json_string(out_t *out, const char *data, size_t len)
{
    size_t from = 0;

    put(out, "\"");
    jinja_step(out->run, len / 256);

    for (size_t i = 0; i < len && out->run->code == LLM_OK;) {
        uint32_t cp = (uint8_t) data[i];
        int n = 1;

        if (cp >= 0x80 && out->json->ascii) {
            n = utf8_decode((const uint8_t *) data + i, len - i, &cp);
            n = n <= 0 ? 1 : n;
        }

        if (cp < 0x20 || cp == '"' || cp == '\\'
            || (cp > 0x7e && out->json->ascii)) {
            jbuf_add(out->buf, data + from, i - from, out->mark);
            json_escape(out, cp);
            from = i + (size_t) n;
        }

        i += (size_t) n;
    }

    jbuf_add(out->buf, data + from, len - from, out->mark);
    put(out, "\"");
}


static void
json_break(out_t *out, bool comma)
{
    if (comma) {
        put(out, out->json->item_sep);
    }

    if (out->json->indent == NULL) {
        return;
    }

    put(out, "\n");

    for (int i = 0; i < out->depth; i++) {
        jbuf_add(out->buf, out->json->indent, out->json->indent_len, out->mark);
    }
}


static void
json_key(out_t *out, const jv_t *key)
{
    char text[40] = "null";

    if (key->kind == JV_STR) {
        json_string(out, key->str->data, key->str->len);

    } else {
        if (key->kind == JV_BOOL) {
            snprintf(text, sizeof(text), "%s", key->b ? "true" : "false");

        } else if (key->kind != JV_NONE
                   && !scalar_text(key, text, sizeof(text))) {
            jv_fail(out->run, "a key in JSON cannot be a '%s'", jv_type(key));
        }

        json_string(out, text, strlen(text));
    }

    put(out, out->json->key_sep);
}


static void
json_dict(out_t *out, const jdict_t *dict)
{
    size_t *order = NULL;

    if (out->json->sort_keys && dict->n > 0) {
        order = jinja_order(out->run, dict->keys, dict->n, NULL);

        if (order == NULL) {
            return;
        }
    }

    put(out, "{");

    for (size_t i = 0; i < dict->n && out->run->code == LLM_OK; i++) {
        const size_t at = order != NULL ? order[i] : i;

        json_break(out, i > 0);
        json_key(out, &dict->keys[at]);
        write_json(out, &dict->values[at]);
    }

    out->depth--;
    if (dict->n > 0) {
        json_break(out, false);
    }
    out->depth++;

    put(out, "}");
}


static void
json_list(out_t *out, const jlist_t *list)
{
    put(out, "[");

    for (size_t i = 0; i < list->n && out->run->code == LLM_OK; i++) {
        json_break(out, i > 0);
        write_json(out, &list->items[i]);
    }

    out->depth--;
    if (list->n > 0) {
        json_break(out, false);
    }
    out->depth++;

    put(out, "]");
}


static void
json_number(out_t *out, const jv_t *v)
{
    char text[40];

    if (v->kind == JV_FLOAT && !isfinite(v->f)) {
        put(out, isnan(v->f) ? "NaN" : v->f < 0 ? "-Infinity" : "Infinity");
        return;
    }

    scalar_text(v, text, sizeof(text));
    put(out, text);
}


static void
write_json(out_t *out, const jv_t *v)
{
    if (!enter(out)) {
        return;
    }

    switch (v->kind) {
    case JV_NONE:
        put(out, "null");
        break;
    case JV_BOOL:
        put(out, v->b ? "true" : "false");
        break;
    case JV_INT:
    case JV_FLOAT:
        json_number(out, v);
        break;
    case JV_STR:
        json_string(out, v->str->data, v->str->len);
        break;
    case JV_LIST:
    case JV_TUPLE:
        json_list(out, v->list);
        break;
    case JV_DICT:
        json_dict(out, v->dict);
        break;
    default:
        jv_fail(out->run, "'%s' cannot be written as JSON", jv_type(v));
    }

    out->depth--;
}


jv_t
jinja_json(jinja_t *run, const jv_t *v, const jjson_t *how)
{
    out_t out = { .buf = jbuf_create(run), .run = run, .json = how };

    out.mark = jv_trusted(run, v);
    write_json(&out, v);

    return jbuf_string(out.buf);
}
