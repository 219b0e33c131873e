/*
 * Filters.  Each is called as filter(run, self, args), self being what stands
 * in front of the bar.
 */

#include "engine/chat/jinja_filters.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/chat/jinja_ops.h"
#include "engine/chat/jinja_lex.h"
#include "engine/chat/jinja_print.h"
#include "engine/chat/jinja_sort.h"
#include "engine/chat/jinja_text.h"


const jrow_t *
jinja_row(const jrow_t *rows, const char *name, size_t len)
{
    for (; rows->name != NULL; rows++) {
        if (strlen(rows->name) == len && memcmp(rows->name, name, len) == 0) {
            return rows;
        }
    }

    return NULL;
}


/* Argument `at` as text; NULL when absent or none.  Check run->code. */
static jstr_t *
text_arg(jinja_t *run, const jargs_t *args, size_t at, const char *name)
{
    const jv_t *v = jarg(args, at, name);

    if (v == NULL || v->kind == JV_NONE || v->kind == JV_UNDEFINED) {
        return NULL;
    }

    const jv_t text = jv_string(run, v);

    return text.kind == JV_STR ? text.str : NULL;
}


static jv_t
filter_trim(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jstr_t *chars = text_arg(run, args, 0, "chars");
    const jv_t text = jv_string(run, &self);

    return run->code == LLM_OK
               ? text_strip(run, text.str, chars, TEXT_LEFT | TEXT_RIGHT)
               : text;
}


static jv_t
filter_length(jinja_t *run, jv_t self, const jargs_t *args)
{
    jv_t n = jv_int(0);

    (void) args;
    n.trusted = 0;

    switch (self.kind) {
    case JV_UNDEFINED:
        break;
    case JV_STR:
        n.i = (int64_t) jstr_chars(self.str);
        break;
    case JV_LIST:
    case JV_TUPLE:
        n.i = (int64_t) self.list->n;
        break;
    case JV_DICT:
        n.i = (int64_t) self.dict->n;
        break;
    default:
        return jv_fail(run, "'%s' has no length", jv_type(&self));
    }

    return n;
}


/* indent=4 or indent="\t" */
static void
read_indent(jinja_t *run, const jv_t *v, jjson_t *how)
{
    if (v == NULL || v->kind == JV_NONE) {
        return;
    }

    how->item_sep = ",";

    if (v->kind == JV_STR) {
        how->indent = v->str->data;
        how->indent_len = v->str->len;
        return;
    }

    const int64_t n = jv_to_int(run, v);

    if (n > 64) {
        jv_fail(run, "tojson's indent is too large");
        return;
    }

    how->indent =
        "                                                                ";
    how->indent_len = n < 0 ? 0 : (size_t) n;
}


static const char *
separator(jinja_t *run, const jv_t *v)
{
    if (v->kind != JV_STR) {
        jv_fail(run, "tojson's separators must be strings");
        return "";
    }

    char *copy = jinja_alloc(run, v->str->len + 1);

    if (copy == NULL) {
        return "";
    }

    memcpy(copy, v->str->data, v->str->len);
    return copy;
}


/* With the parameters and the defaults of Hugging Face's own tojson. */
static jv_t
filter_tojson(jinja_t *run, jv_t self, const jargs_t *args)
{
    jjson_t how = { .item_sep = ", ", .key_sep = ": " };
    const jv_t *separators = jarg(args, 2, "separators");

    how.ascii = jarg_truth(args, 0, "ensure_ascii", false);
    how.sort_keys = jarg_truth(args, 3, "sort_keys", false);
    read_indent(run, jarg(args, 1, "indent"), &how);

    if (separators != NULL && separators->kind != JV_NONE) {
        if (!jv_is_seq(separators) || separators->list->n != 2) {
            return jv_fail(run, "tojson needs two separators");
        }

        how.item_sep = separator(run, &separators->list->items[0]);
        how.key_sep = separator(run, &separators->list->items[1]);
    }

    return jinja_json(run, &self, &how);
}


static jv_t
change_case(jinja_t *run, jv_t self, text_case_t how)
{
    const jv_t text = jv_string(run, &self);

    return run->code == LLM_OK ? text_case(run, text.str, how) : text;
}


static jv_t
filter_upper(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return change_case(run, self, TEXT_UPPER);
}


static jv_t
filter_lower(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return change_case(run, self, TEXT_LOWER);
}


static jv_t
filter_title(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return change_case(run, self, TEXT_JINJA_TITLE);
}


static jv_t
filter_capitalize(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return change_case(run, self, TEXT_CAPITALIZE);
}


static jv_t
filter_default(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *other = jarg(args, 0, "default_value");
    const bool falsy = jarg_truth(args, 1, "boolean", false);

    if (self.kind == JV_UNDEFINED || (falsy && !jv_truth(&self))) {
        return other != NULL ? *other : jv_const(run, "");
    }

    return self;
}


static jv_t
filter_replace(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t text = jv_string(run, &self);
    const jstr_t *from = text_arg(run, args, 0, "old");
    const jstr_t *to = text_arg(run, args, 1, "new");
    const jv_t *count = jarg(args, 2, "count");

    if (run->code != LLM_OK) {
        return jv_undefined();
    }

    if (from == NULL || to == NULL) {
        return jv_fail(run, "replace needs two strings");
    }

    return text_replace(
        run, text.str, from, to,
        count == NULL || count->kind == JV_NONE ? -1 : jv_to_int(run, count));
}


static jv_t
filter_string(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return jv_string(run, &self);
}


static jv_t
filter_safe(jinja_t *run, jv_t self, const jargs_t *args)
{
    return filter_string(run, self, args);
}


static jv_t
filter_escape(jinja_t *run, jv_t self, const jargs_t *args)
{
    static const char plain[] = "&<>\"'";
    static const char *const escaped[] = { "&amp;", "&lt;", "&gt;", "&#34;",
                                           "&#39;" };
    const jv_t text = jv_string(run, &self);
    jbuf_t *buf = jbuf_create(run);
    size_t from = 0;

    (void) args;

    if (run->code != LLM_OK || !jinja_step(run, 1 + text.str->len / 128)) {
        return jv_undefined();
    }

    const jstr_t *s = text.str;

    for (size_t i = 0; i < s->len; i++) {
        const char *at = s->data[i] ? strchr(plain, s->data[i]) : NULL;

        if (at != NULL) {
            const char *entity = escaped[at - plain];

            jbuf_part(buf, s, from, i - from);
            jbuf_add(buf, entity, strlen(entity), jstr_mark(s, i));
            from = i + 1;
        }
    }

    jbuf_part(buf, s, from, s->len - from);
    return jbuf_string(buf);
}


static jv_t
filter_format(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t text = jv_string(run, &self);
    jlist_t list = { (jv_t *) args->pos, args->n, args->n };

    if (run->code != LLM_OK) {
        return text;
    }

    const jv_t tuple = jv_list(JV_TUPLE, &list, 1);

    return text_percent(run, text.str, &tuple);
}


/* Each line but the first (and the blank ones) a little to the right. */
static jv_t
filter_indent(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *width = jarg(args, 0, "width");
    const bool first = jarg_truth(args, 1, "first", false);
    const bool blank = jarg_truth(args, 2, "blank", false);
    const jv_t text = jv_string(run, &self), space = jv_const(run, " ");
    jv_t by = jv_int(4);

    if (width != NULL && width->kind == JV_STR) {
        by = *width;

    } else {
        const jv_t n = width != NULL ? *width : by;

        jv_to_int(run, &n);
        by = run->code == LLM_OK ? jinja_binary(run, JT_MUL, &space, &n) : by;
    }

    if (run->code != LLM_OK || !jinja_step_text(run, text.str->len)) {
        return jv_undefined();
    }

    const jstr_t *s = text.str;
    jbuf_t *buf = jbuf_create(run);
    bool indent = first;

    for (size_t at = 0; at <= s->len && jinja_step(run, 1);) {
        size_t end = at;

        while (end < s->len && s->data[end] != '\n' && s->data[end] != '\r') {
            end++;
        }

        if (indent) {
            jbuf_part(buf, by.str, 0, by.str->len);
        }

        jbuf_part(buf, s, at, end - at);

        if (end < s->len) {
            jbuf_add(buf, "\n", 1, jstr_mark(s, end));
        }

        at = end + 1;
        at += end + 1 < s->len && s->data[end] == '\r' && s->data[at] == '\n';
        indent = blank
                 || (at < s->len && s->data[at] != '\n' && s->data[at] != '\r');
    }

    return jbuf_string(buf);
}


static jv_t
trusted_as(jv_t v, const jv_t *source)
{
    v.trusted = source->kind == JV_STR ? 0 : source->trusted;
    return v;
}


/* A number out of text; false, and *v as it was, if it is none. */
static bool
parse_number(const jstr_t *s, int base, jv_t *v)
{
    char text[80], *end;
    size_t n = 0;

    for (size_t i = 0; i < s->len; i++) {
        if (n + 1 >= sizeof(text) || s->data[i] == '\0') {
            return false;
        }

        if (s->data[i] != '_') {
            text[n++] = s->data[i];
        }
    }

    while (n > 0 && text_is_space((uint8_t) text[n - 1])) {
        n--;
    }

    text[n] = '\0';

    if (base != 0) {
        const int64_t i = strtoll(text, &end, base);

        /* what strtoll cuts off at its ends is no number for us */
        if (n == 0 || *end != '\0' || i == INT64_MAX || i == INT64_MIN) {
            return false;
        }

        *v = jv_int(i);
        return true;
    }

    if (n == 0 || strspn(text, "0123456789+-.eE \t\n") != n) {
        return false;
    }

    const double d = strtod(text, &end);

    if (*end != '\0') {
        return false;
    }

    *v = jv_float(d);
    return true;
}


static jv_t
filter_int(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *other = jarg(args, 0, "default");
    const jv_t *base = jarg(args, 1, "base");
    const int64_t b = base != NULL ? jv_to_int(run, base) : 10;
    jv_t v = self;

    if (self.kind == JV_UNDEFINED) {
        return jinja_is_undefined(run, &self);
    }

    if (b < 2 || b > 36) {
        return jv_fail(run, "int's base must be from 2 to 36");
    }

    if (self.kind == JV_INT) {
        return self;
    }

    if (self.kind == JV_STR && parse_number(self.str, (int) b, &v)) {
        return trusted_as(v, &self);
    }

    if ((self.kind == JV_STR && parse_number(self.str, 0, &v))
        || jv_is_number(&v)) {
        const double d = jv_double(&v);

        if (fabs(d) < 9.2e18) {
            return trusted_as(jv_int((int64_t) d), &self);
        }
    }

    return other != NULL ? *other : jv_int(0);
}


static jv_t
filter_float(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *other = jarg(args, 0, "default");
    jv_t v = self;

    if (self.kind == JV_UNDEFINED) {
        return jinja_is_undefined(run, &self);
    }

    if ((self.kind == JV_STR && parse_number(self.str, 0, &v))
        || jv_is_number(&v)) {
        return trusted_as(jv_float(jv_double(&v)), &self);
    }

    return other != NULL ? *other : jv_float(0);
}


static jv_t
filter_abs(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;

    if (!jv_is_number(&self)) {
        return jv_fail(run, "abs does not work on '%s'", jv_type(&self));
    }

    return jv_double(&self) < 0 ? jinja_negate(run, &self) : self;
}


static jv_t
filter_round(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *digits = jarg(args, 0, "precision");
    const jv_t *method = jarg(args, 1, "method");
    const int64_t n = digits != NULL ? jv_to_int(run, digits) : 0;
    const bool ceiling = method != NULL && method->kind == JV_STR
                         && jstr_is(method->str, "ceil");
    const bool flooring = method != NULL && method->kind == JV_STR
                          && jstr_is(method->str, "floor");
    char text[500];

    if (!jv_is_number(&self)) {
        return jv_fail(run, "round does not work on '%s'", jv_type(&self));
    }

    const double d = jv_double(&self);

    if (n > 100 || n < -17 || !isfinite(d)) {
        return self;
    }

    if (ceiling || flooring) {
        const double scale = pow(10, (double) n);

        return trusted_as(
            jv_float((ceiling ? ceil(d * scale) : floor(d * scale)) / scale),
            &self);
    }

    if (self.kind != JV_FLOAT && n >= 0) {
        return self;
    }

    if (n < 0) {
        const double scale = pow(10, (double) -n);

        const double rounded = rint(d / scale) * scale;

        return trusted_as(self.kind == JV_FLOAT ? jv_float(rounded)
                                                : jv_int((int64_t) rounded),
                          &self);
    }

    /* printf rounds the exact value, ties to even, as Python does */
    snprintf(text, sizeof(text), "%.*f", (int) n, d);
    return trusted_as(jv_float(strtod(text, NULL)), &self);
}


static const jrow_t text_filters[] = {
    { "trim", filter_trim },       { "length", filter_length },
    { "count", filter_length },    { "tojson", filter_tojson },
    { "upper", filter_upper },     { "lower", filter_lower },
    { "title", filter_title },     { "capitalize", filter_capitalize },
    { "default", filter_default }, { "d", filter_default },
    { "replace", filter_replace }, { "string", filter_string },
    { "safe", filter_safe },       { "escape", filter_escape },
    { "e", filter_escape },        { "format", filter_format },
    { "indent", filter_indent },   { "int", filter_int },
    { "float", filter_float },     { "abs", filter_abs },
    { "round", filter_round },     { NULL, NULL },
};


const jrow_t *
jinja_filter(const char *name, size_t len)
{
    const jrow_t *row = jinja_row(text_filters, name, len);

    return row != NULL ? row : jinja_row(jinja_list_filters, name, len);
}
