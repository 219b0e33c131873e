/* Methods of strings. */

#include <string.h>

#include <utf8proc.h>

#include "engine/base/utf8.h"
#include "engine/chat/jinja_filters.h"
#include "engine/chat/jinja_ops.h"
#include "engine/chat/jinja_text.h"


/* Argument `at`, which must be a string; NULL and a failure otherwise. */
static jstr_t *
need_text(jinja_t *run, const jargs_t *args, size_t at, const char *name)
{
    const jv_t *v = jarg(args, at, name);

    if (v == NULL || v->kind != JV_STR) {
        jv_fail(run, "a method needs a string, not '%s'",
                v != NULL ? jv_type(v) : "nothing");
        return NULL;
    }

    return v->str;
}


/* The same, but it may be absent or None. */
static bool
may_text(jinja_t *run, const jargs_t *args, size_t at, const char *name,
         jstr_t **s)
{
    const jv_t *v = jarg(args, at, name);

    *s = NULL;

    if (v == NULL || v->kind == JV_NONE) {
        return true;
    }

    *s = need_text(run, args, at, name);
    return *s != NULL;
}


static int64_t
int_arg(jinja_t *run, const jargs_t *args, size_t at, const char *name,
        int64_t other)
{
    const jv_t *v = jarg(args, at, name);

    return v == NULL || v->kind == JV_NONE ? other : jv_to_int(run, v);
}


static jv_t
str_upper(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return text_case(run, self.str, TEXT_UPPER);
}


static jv_t
str_lower(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return text_case(run, self.str, TEXT_LOWER);
}


static jv_t
str_title(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return text_case(run, self.str, TEXT_TITLE);
}


static jv_t
str_capitalize(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return text_case(run, self.str, TEXT_CAPITALIZE);
}


static jv_t
strip(jinja_t *run, const jv_t *self, const jargs_t *args, int sides)
{
    jstr_t *chars;

    return may_text(run, args, 0, NULL, &chars)
               ? text_strip(run, self->str, chars, sides)
               : jv_undefined();
}


static jv_t
str_strip(jinja_t *run, jv_t self, const jargs_t *args)
{
    return strip(run, &self, args, TEXT_LEFT | TEXT_RIGHT);
}


static jv_t
str_lstrip(jinja_t *run, jv_t self, const jargs_t *args)
{
    return strip(run, &self, args, TEXT_LEFT);
}


static jv_t
str_rstrip(jinja_t *run, jv_t self, const jargs_t *args)
{
    return strip(run, &self, args, TEXT_RIGHT);
}


static jv_t
str_split(jinja_t *run, jv_t self, const jargs_t *args)
{
    jstr_t *sep;

    return may_text(run, args, 0, "sep", &sep) ? text_split(
               run, self.str, sep, int_arg(run, args, 1, "maxsplit", -1))
                                               : jv_undefined();
}


static jv_t
str_rsplit(jinja_t *run, jv_t self, const jargs_t *args)
{
    jstr_t *sep;

    return may_text(run, args, 0, "sep", &sep) ? text_rsplit(
               run, self.str, sep, int_arg(run, args, 1, "maxsplit", -1))
                                               : jv_undefined();
}


static jv_t
str_splitlines(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return text_lines(run, self.str);
}


static bool
has_end(const jstr_t *s, const jstr_t *part, bool start)
{
    return s->len >= part->len
           && memcmp(start ? s->data : s->data + s->len - part->len, part->data,
                     part->len)
                  == 0;
}


/* startswith and endswith: one string or a tuple of them. */
static jv_t
ends(jinja_t *run, const jv_t *self, const jargs_t *args, bool start)
{
    const jv_t *v = jarg(args, 0, NULL);

    if (v != NULL && v->kind == JV_TUPLE) {
        for (size_t i = 0; i < v->list->n && jinja_step(run, 1); i++) {
            if (v->list->items[i].kind == JV_STR
                && has_end(self->str, v->list->items[i].str, start))
            {
                return jv_bool(true);
            }
        }
        return jv_bool(false);
    }

    const jstr_t *part = need_text(run, args, 0, NULL);

    return part != NULL && jinja_step_text(run, part->len)
               ? jv_bool(has_end(self->str, part, start))
               : jv_undefined();
}


static jv_t
str_startswith(jinja_t *run, jv_t self, const jargs_t *args)
{
    return ends(run, &self, args, true);
}


static jv_t
str_endswith(jinja_t *run, jv_t self, const jargs_t *args)
{
    return ends(run, &self, args, false);
}


static jv_t
cut_end(jinja_t *run, const jv_t *self, const jargs_t *args, bool start)
{
    const jstr_t *part = need_text(run, args, 0, NULL);
    const jstr_t *s = self->str;

    if (part == NULL) {
        return jv_undefined();
    }

    const size_t n = has_end(s, part, start) ? part->len : 0;

    return jv_sub(run, s, start ? n : 0, start ? s->len : s->len - n);
}


static jv_t
str_removeprefix(jinja_t *run, jv_t self, const jargs_t *args)
{
    return cut_end(run, &self, args, true);
}


static jv_t
str_removesuffix(jinja_t *run, jv_t self, const jargs_t *args)
{
    return cut_end(run, &self, args, false);
}


static jv_t
str_replace(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jstr_t *from = need_text(run, args, 0, "old");
    const jstr_t *to = need_text(run, args, 1, "new");

    return from != NULL && to != NULL ? text_replace(
               run, self.str, from, to, int_arg(run, args, 2, "count", -1))
                                      : jv_undefined();
}


/* find, rfind and index: a character's number, or -1. */
static jv_t
find(jinja_t *run, const jv_t *self, const jargs_t *args, bool last)
{
    const jstr_t *part = need_text(run, args, 0, NULL);
    jstr_t *s = self->str;
    int64_t from = int_arg(run, args, 1, NULL, 0);
    jv_t v = jv_int(-1);

    v.trusted = 0;

    if (part == NULL || !jinja_step_text(run, s->len)) {
        return jv_undefined();
    }

    const int64_t n = (int64_t) jstr_chars(s);

    from = from < 0 ? from + n : from;
    from = from < 0 ? 0 : from;

    if (from > n) {
        return v;
    }

    const size_t first = jstr_offset(s, (size_t) from);
    const size_t at = last ? jinja_find_last(run, s, part, s->len)
                           : jinja_find(s, part, first);

    if (at != SIZE_MAX && at >= first) {
        jstr_t before = { .data = s->data, .len = at, .n_chars = SIZE_MAX };
        v.i = (int64_t) jstr_chars(&before);
    }

    return v;
}


static jv_t
str_find(jinja_t *run, jv_t self, const jargs_t *args)
{
    return find(run, &self, args, false);
}


static jv_t
str_rfind(jinja_t *run, jv_t self, const jargs_t *args)
{
    return find(run, &self, args, true);
}


static jv_t
str_index(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t at = find(run, &self, args, false);

    return at.kind == JV_INT && at.i < 0 ? jv_fail(run, "substring not found")
                                         : at;
}


static jv_t
str_count(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jstr_t *part = need_text(run, args, 0, NULL);
    jv_t v = jv_int(0);

    v.trusted = 0;

    if (part == NULL || !jinja_step_text(run, self.str->len)) {
        return jv_undefined();
    }

    if (part->len == 0) {
        v.i = (int64_t) jstr_chars(self.str) + 1;
        return v;
    }

    for (size_t at = 0; (at = jinja_find(self.str, part, at)) != SIZE_MAX
                        && jinja_step_text(run, part->len);)
    {
        at += part->len;
        v.i++;
    }

    return v;
}


static jv_t
str_join(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *v = jarg(args, 0, NULL);
    const jlist_t *items = v != NULL ? jv_items(run, v) : NULL;
    jbuf_t *buf = jbuf_create(run);

    if (items == NULL) {
        return jv_fail(run, "join needs a list");
    }

    for (size_t i = 0; i < items->n && jinja_step(run, 1); i++) {
        if (items->items[i].kind != JV_STR) {
            return jv_fail(run, "join needs strings, not '%s'",
                           jv_type(&items->items[i]));
        }

        if (i > 0) {
            jbuf_part(buf, self.str, 0, self.str->len);
        }

        jinja_step_text(run, items->items[i].str->len);
        jbuf_part(buf, items->items[i].str, 0, items->items[i].str->len);
    }

    return jbuf_string(buf);
}


static jv_t
str_format(jinja_t *run, jv_t self, const jargs_t *args)
{
    return text_format(run, self.str, args);
}


static jv_t
partition(jinja_t *run, const jv_t *self, const jargs_t *args, bool last)
{
    const jstr_t *sep = need_text(run, args, 0, NULL);
    const jstr_t *s = self->str;
    jlist_t *list = jlist_create(run, 3);

    if (sep == NULL || sep->len == 0 || !jinja_step_text(run, s->len)) {
        return jv_fail(run, "partition needs a separator");
    }

    const size_t at =
        last ? jinja_find_last(run, s, sep, s->len) : jinja_find(s, sep, 0);
    const bool found = at != SIZE_MAX;
    const size_t from = found ? at : last ? 0 : s->len;
    const size_t to = found ? at + sep->len : from;

    jlist_add(run, list, jv_sub(run, s, 0, from));
    jlist_add(run, list, jv_sub(run, s, from, to));
    jlist_add(run, list, jv_sub(run, s, to, s->len));

    return jv_list(JV_TUPLE, list, 1);
}


static jv_t
str_partition(jinja_t *run, jv_t self, const jargs_t *args)
{
    return partition(run, &self, args, false);
}


static jv_t
str_rpartition(jinja_t *run, jv_t self, const jargs_t *args)
{
    return partition(run, &self, args, true);
}


typedef enum {
    CLASS_DIGIT = 1,
    CLASS_ALPHA = 2,
    CLASS_SPACE = 4,
    CLASS_UPPER = 8,
    CLASS_LOWER = 16,
} class_t;


static int
classify(uint32_t cp)
{
    const utf8proc_category_t category =
        utf8proc_category((utf8proc_int32_t) cp);
    int class = text_is_space(cp) ? CLASS_SPACE : 0;

    if (category == UTF8PROC_CATEGORY_ND) {
        class |= CLASS_DIGIT;
    }

    if (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) {
        class |= CLASS_ALPHA;
    }

    if (category == UTF8PROC_CATEGORY_LU) {
        class |= CLASS_UPPER;
    }

    if (category == UTF8PROC_CATEGORY_LL) {
        class |= CLASS_LOWER;
    }

    return class;
}


/* isdigit and its like.  want: each character is one of these; never: no
 * character may be one of these, and one at least must be of `want`. */
static jv_t
all_of(jinja_t *run, const jv_t *self, int want, int never)
{
    const jstr_t *s = self->str;
    bool any = false;

    if (!jinja_step(run, 1 + s->len / 64)) {
        return jv_undefined();
    }

    for (size_t i = 0; i < s->len;) {
        uint32_t cp = (uint8_t) s->data[i];
        const int n =
            utf8_decode((const uint8_t *) s->data + i, s->len - i, &cp);
        const int class = classify(cp);

        if ((class & never) != 0 || (never == 0 && (class & want) == 0)) {
            return jv_bool(false);
        }

        any |= (class & want) != 0;
        i += n > 0 ? (size_t) n : 1;
    }

    return jv_bool(any);
}


static jv_t
str_isdigit(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return all_of(run, &self, CLASS_DIGIT, 0);
}


static jv_t
str_isalpha(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return all_of(run, &self, CLASS_ALPHA, 0);
}


static jv_t
str_isalnum(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return all_of(run, &self, CLASS_ALPHA | CLASS_DIGIT, 0);
}


static jv_t
str_isspace(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return all_of(run, &self, CLASS_SPACE, 0);
}


static jv_t
str_isupper(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return all_of(run, &self, CLASS_UPPER, CLASS_LOWER);
}


static jv_t
str_islower(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return all_of(run, &self, CLASS_LOWER, CLASS_UPPER);
}


static jv_t
str_zfill(jinja_t *run, jv_t self, const jargs_t *args)
{
    jstr_t *s = self.str;
    const int64_t width = int_arg(run, args, 0, NULL, 0);
    const int64_t n = width - (int64_t) jstr_chars(s);
    const size_t sign = s->len > 0 && (s->data[0] == '-' || s->data[0] == '+');
    jbuf_t *buf = jbuf_create(run);

    jbuf_part(buf, s, 0, sign);

    for (int64_t i = 0; i < n && jinja_step(run, 1); i++) {
        jbuf_add(buf, "0", 1, 1);
    }

    jbuf_part(buf, s, sign, s->len - sign);
    return jbuf_string(buf);
}


const jrow_t jinja_str_methods[] = {
    { "strip", str_strip },
    { "lstrip", str_lstrip },
    { "rstrip", str_rstrip },
    { "split", str_split },
    { "rsplit", str_rsplit },
    { "splitlines", str_splitlines },
    { "startswith", str_startswith },
    { "endswith", str_endswith },
    { "removeprefix", str_removeprefix },
    { "removesuffix", str_removesuffix },
    { "replace", str_replace },
    { "upper", str_upper },
    { "lower", str_lower },
    { "title", str_title },
    { "capitalize", str_capitalize },
    { "find", str_find },
    { "rfind", str_rfind },
    { "index", str_index },
    { "count", str_count },
    { "join", str_join },
    { "format", str_format },
    { "partition", str_partition },
    { "rpartition", str_rpartition },
    { "isdigit", str_isdigit },
    { "isnumeric", str_isdigit },
    { "isdecimal", str_isdigit },
    { "isalpha", str_isalpha },
    { "isalnum", str_isalnum },
    { "isspace", str_isspace },
    { "isupper", str_isupper },
    { "islower", str_islower },
    { "zfill", str_zfill },
    { NULL, NULL },
};
