/* Filters on lists: choose, map, sort, join. */

#include <string.h>

#include "engine/chat/jinja_filters.h"
#include "engine/chat/jinja_lex.h"
#include "engine/chat/jinja_ops.h"
#include "engine/chat/jinja_sort.h"
#include "engine/chat/jinja_text.h"


/* value.a.0.b for the path "a.0.b"; missing parts are undefined. */
static jv_t
follow(jinja_t *run, jv_t value, const jv_t *path)
{
    if (path->kind != JV_STR) {
        return jinja_item(run, &value, path);
    }

    const jstr_t *s = path->str;

    for (size_t at = 0; at <= s->len && run->code == LLM_OK;) {
        const char *dot = memchr(s->data + at, '.', s->len - at);
        const size_t end = dot == NULL ? s->len : (size_t) (dot - s->data);
        jv_t key = jv_sub(run, s, at, end);
        int64_t number = 0;
        size_t i = at;

        while (i < end && i - at < 9 && s->data[i] >= '0' && s->data[i] <= '9')
        {
            number = number * 10 + s->data[i++] - '0';
        }

        if (i == end && end > at) {
            key = jv_int(number);
        }

        if (run->code == LLM_OK) {
            value = jinja_item(run, &value, &key);
        }

        at = end + 1;
    }

    return value;
}


/* The arguments from number `from` on. */
static jargs_t
rest(const jargs_t *args, size_t from)
{
    jargs_t left = *args;

    left.pos = args->n > from ? args->pos + from : NULL;
    left.n = args->n > from ? args->n - from : 0;

    return left;
}


static const jrow_t *
row_arg(jinja_t *run, const jargs_t *args, size_t at, bool filter)
{
    const jv_t *v = jarg(args, at, NULL);
    const jrow_t *row = NULL;

    if (v != NULL && v->kind == JV_STR) {
        row = filter ? jinja_filter(v->str->data, v->str->len)
                     : jinja_test(v->str->data, v->str->len);
    }

    if (row == NULL) {
        jv_fail(run, "there is no %s named '%.*s'", filter ? "filter" : "test",
                v != NULL && v->kind == JV_STR && v->str->len < 60
                    ? (int) v->str->len
                    : 0,
                v != NULL && v->kind == JV_STR ? v->str->data : "");
    }

    return row;
}


/* What map and select go through: nothing at all if it is none or false. */
static const jlist_t *
items_of(jinja_t *run, const jv_t *v)
{
    const jv_t nothing = jv_undefined();

    return jv_items(run, jv_truth(v) ? v : &nothing);
}


static jv_t
filter_map(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jlist_t *items = items_of(run, &self);
    const jv_t *path = args->n == 0 ? jarg(args, 0, "attribute") : NULL;
    const jv_t *other = jarg(args, SIZE_MAX, "default");
    const jrow_t *row = path == NULL ? row_arg(run, args, 0, true) : NULL;
    const jargs_t left = rest(args, 1);
    jlist_t *list = jlist_create(run, 0);

    /* map('map', 'map', …) nests as deep as it is long */
    if (++run->depth > JINJA_MAX_DEPTH) {
        jv_fail(run, "filters are nested too deeply");
    }

    for (size_t i = 0; items != NULL && i < items->n; i++) {
        if (!jinja_step(run, 1)) {
            break;
        }

        jv_t v = path != NULL ? follow(run, items->items[i], path)
                              : row->call(run, items->items[i], &left);

        if (path != NULL && other != NULL && v.kind == JV_UNDEFINED) {
            v = *other;
        }

        jlist_add(run, list, v);
    }

    run->depth--;
    return jv_list(JV_GEN, list, 1);
}


/* select, reject, selectattr, rejectattr: `by` is where the test's name
 * stands among the arguments. */
static jv_t
choose(jinja_t *run, const jv_t *self, const jargs_t *args, size_t by,
       bool keep)
{
    const jlist_t *items = items_of(run, self);
    const jrow_t *row = args->n > by ? row_arg(run, args, by, false) : NULL;
    const jargs_t left = rest(args, by + 1);
    jlist_t *list = jlist_create(run, 0);

    if (by > 0 && args->n == 0) {
        return jv_fail(run, "missing parameter for attribute name");
    }

    for (size_t i = 0; items != NULL && i < items->n; i++) {
        if (!jinja_step(run, 1)) {
            break;
        }

        jv_t v = items->items[i];

        if (by > 0) {
            v = follow(run, v, &args->pos[0]);
        }

        if (row != NULL && run->code == LLM_OK) {
            v = row->call(run, v, &left);
        }

        if (jv_truth(&v) == keep) {
            jlist_add(run, list, items->items[i]);
        }
    }

    return jv_list(JV_GEN, list, 1);
}


static jv_t
filter_select(jinja_t *run, jv_t self, const jargs_t *args)
{
    return choose(run, &self, args, 0, true);
}


static jv_t
filter_reject(jinja_t *run, jv_t self, const jargs_t *args)
{
    return choose(run, &self, args, 0, false);
}


static jv_t
filter_selectattr(jinja_t *run, jv_t self, const jargs_t *args)
{
    return choose(run, &self, args, 1, true);
}


static jv_t
filter_rejectattr(jinja_t *run, jv_t self, const jargs_t *args)
{
    return choose(run, &self, args, 1, false);
}


static jv_t
filter_join(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jlist_t *items = jv_items(run, &self);
    const jv_t *d = jarg(args, 0, "d");
    const jv_t *path = jarg(args, 1, "attribute");
    const jv_t sep = d != NULL ? jv_string(run, d) : jv_const(run, "");
    jbuf_t *buf = jbuf_create(run);

    for (size_t i = 0; items != NULL && i < items->n; i++) {
        if (!jinja_step(run, 1)) {
            break;
        }

        const jv_t v =
            path != NULL ? follow(run, items->items[i], path) : items->items[i];
        const jv_t text = jv_string(run, &v);

        if (run->code != LLM_OK) {
            break;
        }

        if (i > 0) {
            jbuf_part(buf, sep.str, 0, sep.str->len);
        }

        jinja_step_text(run, text.str->len);
        jbuf_part(buf, text.str, 0, text.str->len);
    }

    return jbuf_string(buf);
}


static jv_t
filter_list(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return jv_list(JV_LIST, jv_items(run, &self), self.trusted);
}


/* The first or the last item, without listing a long text's characters. */
static jv_t
end_item(jinja_t *run, const jv_t *self, bool last)
{
    if (self->kind == JV_STR) {
        const jv_t at = jv_int(last ? -1 : 0);

        return jinja_item(run, self, &at);
    }

    const jlist_t *items = jv_items(run, self);

    if (items == NULL || items->n == 0) {
        return jv_undefined();
    }

    return items->items[last ? items->n - 1 : 0];
}


static jv_t
filter_first(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return end_item(run, &self, false);
}


static jv_t
filter_last(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return end_item(run, &self, true);
}


static jv_t
filter_reverse(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t part[3] = { jv_none(), jv_none(), jv_int(-1) };

    (void) args;

    if (self.kind == JV_STR) {
        return jinja_slice(run, &self, part);
    }

    const jv_t list = jv_list(JV_LIST, jv_items(run, &self), self.trusted);

    if (run->code != LLM_OK) {
        return list;
    }

    jv_t reversed = jinja_slice(run, &list, part);

    if (reversed.kind == JV_LIST) {
        reversed.kind = JV_GEN;
    }

    return reversed;
}


static jv_t
filter_items(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;

    if (self.kind == JV_UNDEFINED) {
        return jv_list(JV_GEN, jlist_create(run, 0), 1);
    }

    if (self.kind != JV_DICT) {
        return jv_fail(run, "can only get item pairs from a mapping");
    }

    const jrow_t *row = jinja_method(JV_DICT, "items", strlen("items"));
    const jargs_t empty = { 0 };
    jv_t pairs = row->call(run, self, &empty);

    if (pairs.kind == JV_LIST) {
        pairs.kind = JV_GEN;
    }

    return pairs;
}


static int
descending(jinja_t *run, const jv_t *a, const jv_t *b)
{
    return jv_compare(run, b, a);
}


/* What sort, unique, min and max compare of an item. */
static jv_t
sort_key(jinja_t *run, jv_t item, const jv_t *path, bool case_sensitive)
{
    const jv_t v =
        path != NULL && path->kind != JV_NONE ? follow(run, item, path) : item;

    return v.kind == JV_STR && !case_sensitive && run->code == LLM_OK
               ? text_case(run, v.str, TEXT_LOWER)
               : v;
}


/* The keys of all items; NULL when the run has failed. */
static jv_t *
sort_keys(jinja_t *run, const jlist_t *items, const jv_t *path,
          bool case_sensitive)
{
    if (items == NULL) {
        return NULL;
    }

    jv_t *keys = jinja_alloc(run, (items->n + 1) * sizeof(jv_t));

    for (size_t i = 0; keys != NULL && i < items->n && jinja_step(run, 1); i++)
    {
        keys[i] = sort_key(run, items->items[i], path, case_sensitive);
    }

    return run->code == LLM_OK ? keys : NULL;
}


static jv_t
ordered(jinja_t *run, const jlist_t *items, const jv_t *keys, bool reverse)
{
    const size_t *order =
        keys != NULL
            ? jinja_order(run, keys, items->n, reverse ? descending : NULL)
            : NULL;
    jlist_t *list = order != NULL ? jlist_create(run, items->n) : NULL;

    for (size_t i = 0; list != NULL && i < items->n; i++) {
        jlist_add(run, list, items->items[order[i]]);
    }

    return jv_list(JV_LIST, list, 1);
}


static jv_t
filter_sort(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jlist_t *items = jv_items(run, &self);
    const bool case_sensitive = jarg_truth(args, 1, "case_sensitive", false);
    const jv_t *keys =
        sort_keys(run, items, jarg(args, 2, "attribute"), case_sensitive);

    return ordered(run, items, keys, jarg_truth(args, 0, "reverse", false));
}


static jv_t
filter_dictsort(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *by = jarg(args, 1, "by");
    const bool by_value =
        by != NULL && by->kind == JV_STR && jstr_is(by->str, "value");
    const jv_t path = jv_int(by_value);
    const jv_t pairs = filter_items(run, self, args);

    if (run->code != LLM_OK) {
        return pairs;
    }

    const jv_t *keys = sort_keys(run, pairs.list, &path,
                                 jarg_truth(args, 0, "case_sensitive", false));

    return ordered(run, pairs.list, keys,
                   jarg_truth(args, 2, "reverse", false));
}


static jv_t
filter_unique(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jlist_t *items = jv_items(run, &self);
    const jv_t *keys = sort_keys(run, items, jarg(args, 1, "attribute"),
                                 jarg_truth(args, 0, "case_sensitive", false));
    jdict_t *seen = jdict_create(run);
    jlist_t *list = jlist_create(run, 0);

    for (size_t i = 0; keys != NULL && run->code == LLM_OK && i < items->n; i++)
    {
        if (jdict_get(run, seen, &keys[i]) == NULL) {
            jdict_set(run, seen, keys[i], jv_none());
            jlist_add(run, list, items->items[i]);
        }
    }

    return jv_list(JV_GEN, list, 1);
}


static jv_t
extreme(jinja_t *run, const jv_t *self, const jargs_t *args, int sign)
{
    const jlist_t *items = jv_items(run, self);
    const jv_t *keys = sort_keys(run, items, jarg(args, 1, "attribute"),
                                 jarg_truth(args, 0, "case_sensitive", false));
    size_t best = 0;

    if (keys == NULL || items->n == 0) {
        return jv_undefined();
    }

    for (size_t i = 1; i < items->n && run->code == LLM_OK; i++) {
        if (jv_compare(run, &keys[i], &keys[best]) * sign > 0) {
            best = i;
        }
    }

    return items->items[best];
}


static jv_t
filter_min(jinja_t *run, jv_t self, const jargs_t *args)
{
    return extreme(run, &self, args, -1);
}


static jv_t
filter_max(jinja_t *run, jv_t self, const jargs_t *args)
{
    return extreme(run, &self, args, 1);
}


static jv_t
filter_sum(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jlist_t *items = jv_items(run, &self);
    const jv_t *path = jarg(args, 0, "attribute");
    const jv_t *start = jarg(args, 1, "start");
    jv_t sum = start != NULL ? *start : jv_int(0);

    for (size_t i = 0; items != NULL && i < items->n && jinja_step(run, 1); i++)
    {
        const jv_t v = path != NULL && path->kind != JV_NONE
                           ? follow(run, items->items[i], path)
                           : items->items[i];

        if (run->code == LLM_OK) {
            sum = jinja_binary(run, JT_ADD, &sum, &v);
        }
    }

    return sum;
}


const jrow_t jinja_list_filters[] = {
    { "map", filter_map },
    { "select", filter_select },
    { "reject", filter_reject },
    { "selectattr", filter_selectattr },
    { "rejectattr", filter_rejectattr },
    { "join", filter_join },
    { "list", filter_list },
    { "first", filter_first },
    { "last", filter_last },
    { "reverse", filter_reverse },
    { "items", filter_items },
    { "sort", filter_sort },
    { "dictsort", filter_dictsort },
    { "unique", filter_unique },
    { "min", filter_min },
    { "max", filter_max },
    { "sum", filter_sum },
    { NULL, NULL },
};
