/*
 * Mappings, and the conversion from cJSON trees.
 *
 * A mapping keeps the order of insertion; beyond a few entries a hash table
 * with a seed of its own finds the keys, since a client chooses them.
 */

#include "engine/chat/jinja_value.h"

#include <math.h>
#include <string.h>

#include <xxhash.h>

enum { DICT_SMALL = 8 }; /* entries up to which a search is linear */


jdict_t *
jdict_create(jinja_t *run)
{
    return jinja_alloc(run, sizeof(jdict_t));
}


jv_t
jv_dict(jdict_t *dict, uint8_t trusted)
{
    if (dict == NULL) {
        return jv_undefined();
    }

    return (jv_t){ .kind = JV_DICT, .trusted = trusted, .dict = dict };
}


/* Equal keys have equal hashes: 1, 1.0 and True are one key in Python. */
static uint64_t
hash_key(const jinja_t *run, const jv_t *key)
{
    if (key->kind == JV_STR) {
        return XXH3_64bits_withSeed(key->str->data, key->str->len, run->seed);
    }

    if (jv_is_number(key)) {
        const double d = jv_double(key) + 0.0; /* -0.0 is 0.0 */
        return XXH3_64bits_withSeed(&d, sizeof(d), run->seed);
    }

    return key->kind;
}


/* The entry of key, or SIZE_MAX. */
static size_t
dict_at(jinja_t *run, const jdict_t *dict, const jv_t *key)
{
    if (dict->index == NULL) {
        for (size_t i = 0; i < dict->n; i++) {
            if (jv_equal(run, &dict->keys[i], key)) {
                return i;
            }
        }

        return SIZE_MAX;
    }

    const size_t mask = dict->index_cap - 1;

    if (key->kind == JV_STR && !jinja_step(run, key->str->len / 1024)) {
        return SIZE_MAX;
    }

    for (size_t h = hash_key(run, key) & mask; dict->index[h] != 0;
         h = (h + 1) & mask)
    {
        const size_t at = dict->index[h] - 1;

        if (jv_equal(run, &dict->keys[at], key)) {
            return at;
        }
    }

    return SIZE_MAX;
}


static void
index_add(jinja_t *run, jdict_t *dict, size_t at)
{
    const size_t mask = dict->index_cap - 1;
    size_t h = hash_key(run, &dict->keys[at]) & mask;

    while (dict->index[h] != 0) {
        h = (h + 1) & mask;
    }

    dict->index[h] = (uint32_t) at + 1;
}


static bool
dict_grow(jinja_t *run, jdict_t *dict)
{
    const size_t cap = dict->cap < 4 ? 4 : dict->cap * 2;
    jv_t *both = jinja_alloc(run, 2 * cap * sizeof(jv_t));
    uint32_t *index = NULL;

    if (both != NULL && cap > DICT_SMALL) {
        index = jinja_alloc(run, 2 * cap * sizeof(uint32_t));
    }

    if (both == NULL || (cap > DICT_SMALL && index == NULL)) {
        return false;
    }

    if (dict->n > 0) {
        memcpy(both, dict->keys, dict->n * sizeof(jv_t));
        memcpy(both + cap, dict->values, dict->n * sizeof(jv_t));
    }

    dict->keys = both;
    dict->values = both + cap;
    dict->cap = cap;
    dict->index = index;
    dict->index_cap = 2 * cap;

    for (size_t i = 0; index != NULL && i < dict->n; i++) {
        index_add(run, dict, i);
    }

    return true;
}


bool
jdict_set(jinja_t *run, jdict_t *dict, jv_t key, jv_t value)
{
    if (dict == NULL || run->code != LLM_OK) {
        return false;
    }

    if (key.kind != JV_STR && key.kind != JV_NONE && key.kind != JV_TUPLE
        && !jv_is_number(&key))
    {
        jv_fail(run, "unhashable type: '%s'", jv_type(&key));
        return false;
    }

    const size_t at = dict_at(run, dict, &key);

    if (at != SIZE_MAX) {
        dict->values[at] = value;
        return true;
    }

    if (dict->n == dict->cap && !dict_grow(run, dict)) {
        return false;
    }

    dict->keys[dict->n] = key;
    dict->values[dict->n] = value;
    dict->n++;

    if (dict->index != NULL) {
        index_add(run, dict, dict->n - 1);
    }

    return true;
}


const jv_t *
jdict_get(jinja_t *run, const jdict_t *dict, const jv_t *key)
{
    const size_t at = dict_at(run, dict, key);

    return at == SIZE_MAX ? NULL : &dict->values[at];
}


const jv_t *
jdict_find(jinja_t *run, const jdict_t *dict, const char *key, size_t len)
{
    jstr_t text = { .data = key, .len = len, .n_chars = SIZE_MAX };
    const jv_t name = { .kind = JV_STR, .str = &text };

    return jdict_get(run, dict, &name);
}


static jv_t
from_number(const cJSON *json)
{
    const double d = json->valuedouble;

    /* JSON's 3 and 3.0 look the same here; whole numbers are integers */
    if (d == floor(d) && fabs(d) < 9007199254740992.0) {
        return (jv_t){ .kind = JV_INT, .i = (int64_t) d };
    }

    return (jv_t){ .kind = JV_FLOAT, .f = d };
}


static jv_t
from_object(jinja_t *run, const cJSON *json, int depth)
{
    jdict_t *dict = jdict_create(run);
    const cJSON *child;

    cJSON_ArrayForEach(child, json)
    {
        const char *name = child->string == NULL ? "" : child->string;
        const jv_t key = jv_text(run, name, strlen(name), 0);
        const jv_t value = jv_from_json(run, child, depth + 1);

        if (run->code != LLM_OK || !jdict_set(run, dict, key, value)) {
            return jv_undefined();
        }
    }

    return jv_dict(dict, 0);
}


static jv_t
from_array(jinja_t *run, const cJSON *json, int depth)
{
    jlist_t *list = jlist_create(run, 0);
    const cJSON *child;

    cJSON_ArrayForEach(child, json)
    {
        const jv_t value = jv_from_json(run, child, depth + 1);

        if (run->code != LLM_OK || !jlist_add(run, list, value)) {
            return jv_undefined();
        }
    }

    return jv_list(JV_LIST, list, 0);
}


jv_t
jv_from_json(jinja_t *run, const cJSON *json, int depth)
{
    jv_t v = { .kind = JV_NONE };

    if (run->code != LLM_OK) {
        return jv_undefined();
    }

    if (depth > JINJA_MAX_NESTING) {
        return jv_abort(run, LLM_BADREQ,
                        "the JSON is nested deeper than %d levels",
                        JINJA_MAX_NESTING);
    }

    if (cJSON_IsString(json) && json->valuestring != NULL) {
        return jv_text(run, json->valuestring, strlen(json->valuestring), 0);
    }

    if (cJSON_IsObject(json)) {
        return from_object(run, json, depth);
    }

    if (cJSON_IsArray(json)) {
        return from_array(run, json, depth);
    }

    if (cJSON_IsNumber(json)) {
        return from_number(json);
    }

    if (cJSON_IsBool(json)) {
        v.kind = JV_BOOL;
        v.b = cJSON_IsTrue(json);
    }

    return v;
}
