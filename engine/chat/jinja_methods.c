/* Methods of lists, mappings and loops; the table of all methods. */

#include "engine/chat/jinja_eval.h"
#include "engine/chat/jinja_filters.h"


static jv_t
list_index(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *v = jarg(args, 0, NULL);

    for (size_t i = 0; v != NULL && i < self.list->n && jinja_step(run, 1); i++)
    {
        if (jv_equal(run, &self.list->items[i], v)) {
            return jv_int((int64_t) i);
        }
    }

    return jv_fail(run, "the item is not in the list");
}


static jv_t
list_count(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *v = jarg(args, 0, NULL);
    jv_t n = jv_int(0);

    for (size_t i = 0; v != NULL && i < self.list->n && jinja_step(run, 1); i++)
    {
        n.i += jv_equal(run, &self.list->items[i], v);
    }

    return n;
}


static jv_t
dict_get(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *key = jarg(args, 0, NULL);
    const jv_t *other = jarg(args, 1, NULL);

    if (key == NULL) {
        return jv_fail(run, "get needs a key");
    }

    const jv_t *v = jdict_get(run, self.dict, key);

    return v != NULL ? *v : other != NULL ? *other : jv_none();
}


static jv_t
dict_items(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jdict_t *dict = self.dict;
    jlist_t *list = jlist_create(run, dict->n);

    (void) args;

    for (size_t i = 0; i < dict->n && jinja_step(run, 1); i++) {
        jlist_t *pair = jlist_create(run, 2);

        jlist_add(run, pair, dict->keys[i]);
        jlist_add(run, pair, dict->values[i]);
        jlist_add(run, list, jv_list(JV_TUPLE, pair, self.trusted));
    }

    return jv_list(JV_LIST, list, self.trusted);
}


static jv_t
dict_keys(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return jv_list(JV_LIST, jv_items(run, &self), self.trusted);
}


static jv_t
dict_values(jinja_t *run, jv_t self, const jargs_t *args)
{
    jlist_t *list = jlist_create(run, 0);

    (void) args;

    if (list != NULL) {
        *list = (jlist_t){ self.dict->values, self.dict->n, self.dict->n };
    }

    return jv_list(JV_LIST, list, self.trusted);
}


static jv_t
copy_self(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return self;
}


static jv_t
loop_cycle(jinja_t *run, jv_t self, const jargs_t *args)
{
    return args->n > 0 ? args->pos[self.loop->at % args->n]
                       : jv_fail(run, "cycle needs values");
}


static jv_t
loop_changed(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t now = args->n > 0 ? args->pos[0] : jv_none();
    const bool same = jv_equal(run, &self.loop->changed, &now);

    self.loop->changed = now;
    return jv_bool(!same);
}


static const jrow_t list_methods[] = {
    { "index", list_index },
    { "count", list_count },
    { "copy", copy_self },
    { NULL, NULL },
};

static const jrow_t dict_methods[] = {
    { "get", dict_get },       { "items", dict_items }, { "keys", dict_keys },
    { "values", dict_values }, { "copy", copy_self },   { NULL, NULL },
};

static const jrow_t loop_methods[] = {
    { "cycle", loop_cycle },
    { "changed", loop_changed },
    { NULL, NULL },
};


const jrow_t *
jinja_method(jv_kind_t kind, const char *name, size_t len)
{
    switch (kind) {
    case JV_STR:
        return jinja_row(jinja_str_methods, name, len);
    case JV_LIST:
    case JV_TUPLE:
        return jinja_row(list_methods, name, len);
    case JV_DICT:
        return jinja_row(dict_methods, name, len);
    case JV_LOOP:
        return jinja_row(loop_methods, name, len);
    default:
        return NULL;
    }
}
