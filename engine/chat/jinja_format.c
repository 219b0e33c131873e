/*
 * Python's two ways to format text: "%s" % x and "{}".format(x).
 *
 * The parts keep their own marks: the format's text those of the template, an
 * inserted string its own.
 */

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/chat/jinja_print.h"
#include "engine/chat/jinja_text.h"

enum { MAX_WIDTH = 1000 };

typedef struct {
    char flags[8];
    int width;     /* -1: none */
    int precision; /* -1: none */
    char type;
    bool left;
} spec_t;


/* Reads digits; a width beyond all use fails. */
static size_t
read_number(jinja_t *run, const jstr_t *s, size_t at, int *n)
{
    *n = 0;

    while (at < s->len && isdigit((uint8_t) s->data[at])) {
        *n = *n * 10 + s->data[at++] - '0';

        if (*n > MAX_WIDTH) {
            jv_fail(run, "a width in a format is too large");
            *n = 0;
        }
    }

    return at;
}


static void
pad(jbuf_t *buf, size_t n, uint8_t mark)
{
    while (n-- > 0) {
        jbuf_add(buf, " ", 1, mark);
    }
}


static void
put_string(jbuf_t *buf, jstr_t *s, const spec_t *spec)
{
    size_t chars = jstr_chars(s), len = s->len;

    if (spec->precision >= 0 && (size_t) spec->precision < chars) {
        chars = (size_t) spec->precision;
        len = jstr_offset(s, chars);
    }

    const size_t space = spec->width > 0 && (size_t) spec->width > chars
                             ? (size_t) spec->width - chars
                             : 0;

    pad(buf, spec->left ? 0 : space, 1);
    jbuf_part(buf, s, 0, len);
    pad(buf, spec->left ? space : 0, 1);
}


static void
put_number(jinja_t *run, jbuf_t *buf, const jv_t *v, const spec_t *spec)
{
    const bool whole = strchr("dixXo", spec->type) != NULL;
    char format[48], text[MAX_WIDTH + 400];
    int n;

    if (!jv_is_number(v) || (whole && v->kind == JV_FLOAT && v->f != v->f)) {
        jv_fail(run, "a number is required, not '%s'", jv_type(v));
        return;
    }

    n = snprintf(format, sizeof(format), "%%%s%s", spec->flags,
                 spec->left && strchr(spec->flags, '-') == NULL ? "-" : "");

    if (spec->width >= 0) {
        n += snprintf(format + n, sizeof(format) - (size_t) n, "%d",
                      spec->width);
    }

    if (spec->precision >= 0) {
        n += snprintf(format + n, sizeof(format) - (size_t) n, ".%d",
                      spec->precision);
    }

    if (whole) {
        const double d = jv_double(v);

        if (v->kind == JV_FLOAT && (d >= 9.2e18 || d <= -9.2e18)) {
            jv_fail(run, "a number is too large to format");
            return;
        }

        const int64_t i = v->kind == JV_INT ? v->i : (int64_t) d;
        const char *type = spec->type == 'x'   ? PRIx64
                           : spec->type == 'X' ? PRIX64
                           : spec->type == 'o' ? PRIo64
                                               : PRId64;

        snprintf(format + n, sizeof(format) - (size_t) n, "%s", type);
        n = snprintf(text, sizeof(text), format, i);

    } else {
        snprintf(format + n, sizeof(format) - (size_t) n, "%c", spec->type);
        n = snprintf(text, sizeof(text), format, jv_double(v));
    }

    if (n < 0 || (size_t) n >= sizeof(text)) {
        jv_fail(run, "a number is too long to format");
        return;
    }

    jbuf_add(buf, text, (size_t) n, v->trusted);
}


static void
put_value(jinja_t *run, jbuf_t *buf, const jv_t *v, const spec_t *spec)
{
    if (spec->type != 's' && spec->type != 'r') {
        put_number(run, buf, v, spec);
        return;
    }

    const jv_t text =
        spec->type == 'r' ? jinja_repr(run, v) : jv_string(run, v);

    if (run->code == LLM_OK) {
        put_string(buf, text.str, spec);
    }
}


/* Behind "%": flags, width, precision, type.  Returns the offset behind. */
static size_t
read_percent(jinja_t *run, const jstr_t *s, size_t at, spec_t *spec)
{
    size_t n = 0;

    *spec = (spec_t){ .width = -1, .precision = -1 };

    while (at < s->len && s->data[at] != '\0'
           && strchr("-+ 0", s->data[at]) != NULL && n < 5)
    {
        spec->left |= s->data[at] == '-';
        spec->flags[n++] = s->data[at++];
    }

    if (at < s->len && isdigit((uint8_t) s->data[at])) {
        at = read_number(run, s, at, &spec->width);
    }

    if (at < s->len && s->data[at] == '.') {
        at = read_number(run, s, at + 1, &spec->precision);
    }

    if (at < s->len) {
        spec->type = s->data[at++];
        spec->type = spec->type == 'u' || spec->type == 'i' ? 'd' : spec->type;
    }

    if (spec->type == '\0' || strchr("srdxXofFeEgG%", spec->type) == NULL) {
        jv_fail(run, "unsupported format character");
    }

    return at;
}


/* "%(name)s": the value, and *at moved behind ")". */
static const jv_t *
named(jinja_t *run, const jstr_t *s, size_t *at, const jv_t *args)
{
    const char *end = memchr(s->data + *at, ')', s->len - *at);

    if (end == NULL || args->kind != JV_DICT) {
        jv_fail(run, "a format by name needs a mapping");
        return NULL;
    }

    const size_t from = *at;
    const size_t to = (size_t) (end - s->data);
    const jv_t *v = jdict_find(run, args->dict, s->data + from, to - from);

    *at = to + 1;

    if (v == NULL) {
        jv_fail(run, "a name in a format is not in the mapping");
    }

    return v;
}


jv_t
text_percent(jinja_t *run, const jstr_t *s, const jv_t *args)
{
    const jlist_t one = { (jv_t *) args, 1, 1 };
    const jlist_t *list = args->kind == JV_TUPLE ? args->list : &one;
    jbuf_t *buf = jbuf_create(run);
    size_t at = 0, used = 0;
    bool by_name = false;

    while (at < s->len && jinja_step(run, 1)) {
        const char *p = memchr(s->data + at, '%', s->len - at);
        const size_t hit = p == NULL ? s->len : (size_t) (p - s->data);
        const jv_t *v = NULL;
        spec_t spec;

        jbuf_part(buf, s, at, hit - at);
        at = hit + 1;

        if (hit == s->len) {
            break;
        }

        if (at < s->len && s->data[at] == '(') {
            at++;
            v = named(run, s, &at, args);
            by_name = true;
        }

        at = read_percent(run, s, at, &spec);

        if (spec.type == '%') {
            jbuf_add(buf, "%", 1, jstr_mark(s, hit));
            continue;
        }

        if (v == NULL && used < list->n) {
            v = &list->items[used++];
        }

        if (v == NULL) {
            return jv_fail(run, "not enough arguments for the format");
        }

        if (run->code == LLM_OK) {
            put_value(run, buf, v, &spec);
        }
    }

    if (used < list->n && !by_name
        && (args->kind == JV_TUPLE || jv_is_number(args)
            || args->kind == JV_STR))
    {
        return jv_fail(run, "not all arguments were used by the format");
    }

    return jbuf_string(buf);
}


/* Between { and }: which argument. */
static const jv_t *
field_value(jinja_t *run, const jstr_t *name, const jargs_t *args, size_t *next)
{
    if (name->len == 0) {
        (*next)++;
        return jarg(args, *next - 1, NULL);
    }

    if (isdigit((uint8_t) name->data[0])) {
        int at;

        return read_number(run, name, 0, &at) == name->len
                   ? jarg(args, (size_t) at, NULL)
                   : NULL;
    }

    for (size_t i = 0; i < args->n_kw; i++) {
        if (args->kw[i].len == name->len
            && memcmp(args->kw[i].name, name->data, name->len) == 0)
        {
            return &args->kw[i].value;
        }
    }

    return NULL;
}


/* "[<>][0][width][.precision][type]" of a replacement field. */
static bool
read_spec(jinja_t *run, const jstr_t *s, const jv_t *v, spec_t *spec)
{
    const bool number = jv_is_number(v) && v->kind != JV_BOOL;
    size_t at = 0;

    *spec = (spec_t){ .width = -1, .precision = -1, .left = !number };

    if (at < s->len && (s->data[at] == '<' || s->data[at] == '>')) {
        spec->left = s->data[at++] == '<';
    }

    if (at < s->len && s->data[at] == '0') {
        spec->flags[0] = '0';
        at++;
    }

    if (at < s->len && isdigit((uint8_t) s->data[at])) {
        at = read_number(run, s, at, &spec->width);
    }

    if (at < s->len && s->data[at] == '.') {
        at = read_number(run, s, at + 1, &spec->precision);
    }

    spec->type = v->kind == JV_INT && at == s->len ? 'd' : 's';

    if (at < s->len) {
        spec->type = s->data[at++];
    }

    return at == s->len && strchr("srdxXofFeEgG", spec->type) != NULL;
}


/* One replacement field; field is what stands between the braces. */
static void
put_field(jinja_t *run, jbuf_t *buf, const jstr_t *field, const jargs_t *args,
          size_t *next)
{
    const char *colon = memchr(field->data, ':', field->len);
    jstr_t name = *field, rest = { .data = "" };
    spec_t spec;
    char conversion = 0;

    if (colon != NULL) {
        name.len = (size_t) (colon - field->data);
        rest = (jstr_t){ .data = colon + 1, .len = field->len - name.len - 1 };
    }

    if (name.len >= 2 && name.data[name.len - 2] == '!') {
        conversion = name.data[name.len - 1];
        name.len -= 2;
    }

    const jv_t *v = field_value(run, &name, args, next);

    if (v == NULL || (conversion != 0 && conversion != 'r')) {
        jv_fail(run, "a format's field '%.*s' has no value",
                name.len < 40 ? (int) name.len : 40, name.data);
        return;
    }

    const jv_t shown = conversion == 'r' ? jinja_repr(run, v) : *v;

    if (run->code != LLM_OK) {
        return;
    }

    if (!read_spec(run, &rest, &shown, &spec)) {
        jv_fail(run, "unsupported format '%.*s'",
                rest.len < 40 ? (int) rest.len : 40, rest.data);
        return;
    }

    put_value(run, buf, &shown, &spec);
}


jv_t
text_format(jinja_t *run, const jstr_t *s, const jargs_t *args)
{
    jbuf_t *buf = jbuf_create(run);
    size_t next = 0;

    for (size_t at = 0; at < s->len && run->code == LLM_OK;) {
        size_t end = at;

        while (end < s->len && s->data[end] != '{' && s->data[end] != '}') {
            end++;
        }

        jbuf_part(buf, s, at, end - at);
        at = end;

        if (at >= s->len || !jinja_step(run, 1)) {
            break;
        }

        if (at + 1 < s->len && s->data[at + 1] == s->data[at]) {
            jbuf_part(buf, s, at, 1);
            at += 2;
            continue;
        }

        const char *close =
            s->data[at] == '{' ? memchr(s->data + at, '}', s->len - at) : NULL;

        if (close == NULL) {
            return jv_fail(run, "a brace in a format has no partner");
        }

        const jstr_t field = { .data = s->data + at + 1,
                               .len = (size_t) (close - s->data) - at - 1 };

        put_field(run, buf, &field, args, &next);
        at += field.len + 2;
    }

    return jbuf_string(buf);
}
