/*
 * Values: the run's failure and limits, lists, truth, equality, order.
 */

#include "engine/chat/jinja_value.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const type_names[] = {
    [JV_UNDEFINED] = "Undefined",
    [JV_NONE] = "None",
    [JV_BOOL] = "bool object",
    [JV_INT] = "int object",
    [JV_FLOAT] = "float object",
    [JV_STR] = "str object",
    [JV_LIST] = "list object",
    [JV_TUPLE] = "tuple object",
    [JV_GEN] = "generator object",
    [JV_DICT] = "dict object",
    [JV_NAMESPACE] = "namespace object",
    [JV_LOOP] = "loop",
    [JV_MACRO] = "macro",
    [JV_FUNC] = "function",
    [JV_METHOD] = "method",
};


static void
fail_va(jinja_t *run, int code, const char *where, const char *fmt,
        va_list args)
{
    char text[400];

    if (run->code != LLM_OK) {
        return;
    }

    vsnprintf(text, sizeof(text), fmt, args);
    run->code = code;
    llm_err_set(run->err, code, "messages", "%s%s", where, text);
}


jv_t
jv_fail(jinja_t *run, const char *fmt, ...)
{
    char where[64];
    va_list args;

    snprintf(where, sizeof(where), "chat template, line %u: ", run->line);

    va_start(args, fmt);
    fail_va(run, LLM_BADREQ, where, fmt, args);
    va_end(args);

    return jv_undefined();
}


jv_t
jv_abort(jinja_t *run, int code, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    fail_va(run, code, "", fmt, args);
    va_end(args);

    return jv_undefined();
}


bool
jinja_step(jinja_t *run, size_t steps)
{
    if (run->code != LLM_OK) {
        return false;
    }

    if (steps >= run->steps) {
        run->steps = 0;
        jv_fail(run, "the template takes more than %d steps", JINJA_MAX_STEPS);
        return false;
    }

    run->steps -= (uint32_t) steps;
    return true;
}


bool
jinja_step_text(jinja_t *run, size_t len)
{
    return jinja_step(run, 1 + len / 1024);
}


void *
jinja_alloc(jinja_t *run, size_t bytes)
{
    if (run->code != LLM_OK) {
        return NULL;
    }

    if (bytes > JINJA_MAX_MEMORY
        || arena_bytes(run->arena) > JINJA_MAX_MEMORY - bytes)
    {
        jv_fail(run, "the template needs more than %d MB of memory",
                JINJA_MAX_MEMORY >> 20);
        return NULL;
    }

    void *p = arena_calloc(run->arena, bytes);

    if (p == NULL) {
        jv_abort(run, LLM_NOMEM, "no memory to render the chat template");
    }

    return p;
}


jv_t
jv_undefined(void)
{
    return (jv_t){ .kind = JV_UNDEFINED, .origin = JV_UNDEFINED };
}


jv_t
jv_missing(const jv_t *object, jstr_t *name)
{
    return (jv_t){ .kind = JV_UNDEFINED, .origin = object->kind, .str = name };
}


jv_t
jv_none(void)
{
    return (jv_t){ .kind = JV_NONE, .trusted = 1 };
}


jv_t
jv_bool(bool b)
{
    return (jv_t){ .kind = JV_BOOL, .trusted = 1, .b = b };
}


jv_t
jv_int(int64_t i)
{
    return (jv_t){ .kind = JV_INT, .trusted = 1, .i = i };
}


jv_t
jv_float(double f)
{
    return (jv_t){ .kind = JV_FLOAT, .trusted = 1, .f = f };
}


int64_t
jv_to_int(jinja_t *run, const jv_t *v)
{
    if (v->kind == JV_INT) {
        return v->i;
    }

    if (v->kind == JV_BOOL) {
        return v->b;
    }

    jv_fail(run, "'%s' cannot be interpreted as an integer", jv_type(v));
    return 0;
}


const char *
jv_type(const jv_t *v)
{
    return type_names[v->kind];
}


bool
jv_is_seq(const jv_t *v)
{
    return v->kind == JV_LIST || v->kind == JV_TUPLE || v->kind == JV_GEN;
}


bool
jv_is_number(const jv_t *v)
{
    return v->kind == JV_INT || v->kind == JV_FLOAT || v->kind == JV_BOOL;
}


double
jv_double(const jv_t *v)
{
    if (v->kind == JV_FLOAT) {
        return v->f;
    }

    return v->kind == JV_BOOL ? v->b : (double) v->i;
}


bool
jv_truth(const jv_t *v)
{
    switch (v->kind) {
    case JV_UNDEFINED:
    case JV_NONE:
        return false;
    case JV_BOOL:
        return v->b;
    case JV_INT:
        return v->i != 0;
    case JV_FLOAT:
        return v->f != 0;
    case JV_STR:
        return v->str->len > 0;
    case JV_LIST:
    case JV_TUPLE:
        return v->list->n > 0;
    case JV_DICT:
        return v->dict->n > 0;
    default:
        return true;
    }
}


jlist_t *
jlist_create(jinja_t *run, size_t cap)
{
    jlist_t *list = jinja_alloc(run, sizeof(jlist_t));

    if (list == NULL || cap == 0) {
        return list;
    }

    list->items = jinja_alloc(run, cap * sizeof(jv_t));

    if (list->items == NULL) {
        return NULL;
    }

    list->cap = cap;
    return list;
}


bool
jlist_add(jinja_t *run, jlist_t *list, jv_t v)
{
    if (list == NULL || run->code != LLM_OK) {
        return false;
    }

    if (list->n == list->cap) {
        const size_t cap = list->cap < 4 ? 4 : list->cap * 2;
        jv_t *items = jinja_alloc(run, cap * sizeof(jv_t));

        if (items == NULL) {
            return false;
        }

        if (list->n > 0) {
            memcpy(items, list->items, list->n * sizeof(jv_t));
        }

        list->items = items;
        list->cap = cap;
    }

    list->items[list->n++] = v;
    return true;
}


jv_t
jv_list(jv_kind_t kind, jlist_t *list, uint8_t trusted)
{
    if (list == NULL) {
        return jv_undefined();
    }

    return (jv_t){ .kind = (uint8_t) kind, .trusted = trusted, .list = list };
}


static jlist_t *
characters(jinja_t *run, jstr_t *s)
{
    const size_t n = jstr_chars(s);
    jlist_t *list = jinja_step(run, n) ? jlist_create(run, n) : NULL;

    for (size_t at = 0; list != NULL && at < s->len;) {
        size_t end = at + 1;

        while (end < s->len && ((uint8_t) s->data[end] & 0xc0) == 0x80) {
            end++;
        }

        jlist_add(run, list, jv_sub(run, s, at, end));
        at = end;

        if (run->code != LLM_OK) {
            return NULL;
        }
    }

    return list;
}


jlist_t *
jv_items(jinja_t *run, const jv_t *v)
{
    static jlist_t empty;

    switch (v->kind) {
    case JV_UNDEFINED:
        return &empty;
    case JV_LIST:
    case JV_TUPLE:
    case JV_GEN:
        return v->list;
    case JV_STR:
        return characters(run, v->str);
    case JV_DICT: {
        jlist_t *keys = jlist_create(run, 0);

        if (keys != NULL) {
            *keys = (jlist_t){ v->dict->keys, v->dict->n, v->dict->n };
        }

        return keys;
    }
    default:
        jv_fail(run, "'%s' is not iterable", jv_type(v));
        return NULL;
    }
}


static bool
equal_lists(jinja_t *run, const jlist_t *a, const jlist_t *b)
{
    if (a->n != b->n) {
        return false;
    }

    for (size_t i = 0; i < a->n; i++) {
        if (!jv_equal(run, &a->items[i], &b->items[i])) {
            return false;
        }
    }

    return true;
}


static bool
equal_dicts(jinja_t *run, const jdict_t *a, const jdict_t *b)
{
    if (a->n != b->n) {
        return false;
    }

    for (size_t i = 0; i < a->n; i++) {
        const jv_t *other = jdict_get(run, b, &a->keys[i]);

        if (other == NULL || !jv_equal(run, &a->values[i], other)) {
            return false;
        }
    }

    return true;
}


static bool
equal_deep(jinja_t *run, const jv_t *a, const jv_t *b)
{
    bool equal;

    if (!jinja_step(run, 1)) {
        return false;
    }

    if (++run->depth > JINJA_MAX_DEPTH) {
        jv_fail(run, "values are nested too deeply to compare");
    }

    if (run->code != LLM_OK) {
        equal = false;

    } else if (a->kind == JV_DICT) {
        equal = equal_dicts(run, a->dict, b->dict);

    } else {
        equal = equal_lists(run, a->list, b->list);
    }

    run->depth--;
    return equal;
}


bool
jv_equal(jinja_t *run, const jv_t *a, const jv_t *b)
{
    if (a->kind == JV_INT && b->kind == JV_INT) {
        return a->i == b->i;
    }

    if (jv_is_number(a) && jv_is_number(b)) {
        return jv_double(a) == jv_double(b);
    }

    if (a->kind != b->kind) {
        return false;
    }

    switch (a->kind) {
    case JV_UNDEFINED:
    case JV_NONE:
        return true;
    case JV_STR:
        return a->str->len == b->str->len && jinja_step(run, a->str->len / 1024)
               && memcmp(a->str->data, b->str->data, a->str->len) == 0;
    case JV_LIST:
    case JV_TUPLE:
    case JV_DICT:
        return equal_deep(run, a, b);
    default:
        return a->list == b->list;
    }
}


static int
compare_lists(jinja_t *run, const jlist_t *a, const jlist_t *b)
{
    int order = 0;

    if (++run->depth > JINJA_MAX_DEPTH) {
        jv_fail(run, "values are nested too deeply to compare");
    }

    for (size_t i = 0; order == 0 && i < a->n && i < b->n; i++) {
        if (!jinja_step(run, 1)) {
            break;
        }

        if (!jv_equal(run, &a->items[i], &b->items[i])) {
            order = jv_compare(run, &a->items[i], &b->items[i]);
        }
    }

    run->depth--;
    return order != 0 ? order : (a->n > b->n) - (a->n < b->n);
}


int
jv_compare(jinja_t *run, const jv_t *a, const jv_t *b)
{
    if (a->kind == JV_INT && b->kind == JV_INT) {
        return (a->i > b->i) - (a->i < b->i);
    }

    if (jv_is_number(a) && jv_is_number(b)) {
        const double x = jv_double(a), y = jv_double(b);
        return (x > y) - (x < y);
    }

    if (a->kind == JV_STR && b->kind == JV_STR) {
        /* byte order of UTF-8 is code point order */
        const size_t len =
            a->str->len < b->str->len ? a->str->len : b->str->len;
        const int order = memcmp(a->str->data, b->str->data, len);

        jinja_step_text(run, len);
        return order != 0
                   ? order
                   : (a->str->len > b->str->len) - (a->str->len < b->str->len);
    }

    if (a->kind == b->kind && (a->kind == JV_LIST || a->kind == JV_TUPLE)) {
        return compare_lists(run, a->list, b->list);
    }

    jv_fail(run, "no order between '%s' and '%s'", jv_type(a), jv_type(b));
    return 0;
}


const jv_t *
jarg(const jargs_t *args, size_t at, const char *name)
{
    if (at < args->n) {
        return &args->pos[at];
    }

    for (size_t i = 0; name != NULL && i < args->n_kw; i++) {
        if (args->kw[i].len == strlen(name)
            && memcmp(args->kw[i].name, name, args->kw[i].len) == 0)
        {
            return &args->kw[i].value;
        }
    }

    return NULL;
}


bool
jarg_truth(const jargs_t *args, size_t at, const char *name, bool other)
{
    const jv_t *v = jarg(args, at, name);

    return v == NULL ? other : jv_truth(v);
}
