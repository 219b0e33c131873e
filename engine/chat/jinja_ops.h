/* Operators, attributes, items and slices, as Python and Jinja define them. */

#ifndef ENGINE_CHAT_JINJA_OPS_H
#define ENGINE_CHAT_JINJA_OPS_H

#include "engine/chat/jinja_value.h"


/* op is a token, JT_ADD … JT_TILDE. */
jv_t jinja_binary(jinja_t *run, int op, const jv_t *a, const jv_t *b);
jv_t jinja_negate(jinja_t *run, const jv_t *a);

/* op is JT_EQ … JT_GE, OP_IN or OP_NOT_IN. */
bool jinja_compare(jinja_t *run, int op, const jv_t *a, const jv_t *b);

/* a in b */
bool jinja_in(jinja_t *run, const jv_t *a, const jv_t *b);

/* object.name: methods before items.  Undefined if there is neither. */
jv_t jinja_attr(jinja_t *run, const jv_t *object, jstr_t *name);

/* object[key]: items before methods. */
jv_t jinja_item(jinja_t *run, const jv_t *object, const jv_t *key);

/* object[part[0]:part[1]:part[2]]; undefined or none: left out. */
jv_t jinja_slice(jinja_t *run, const jv_t *object, const jv_t part[3]);

/* Fails the run because v is undefined. */
jv_t jinja_is_undefined(jinja_t *run, const jv_t *v);

/* The first place of needle in s at or behind byte `at`, or SIZE_MAX. */
size_t jinja_find(const jstr_t *s, const jstr_t *needle, size_t at);

/* The last place of needle that ends at or before byte `end`. */
size_t jinja_find_last(jinja_t *run, const jstr_t *s, const jstr_t *needle,
                       size_t end);

#endif /* ENGINE_CHAT_JINJA_OPS_H */
