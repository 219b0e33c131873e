/*
 * Values as text: Python's str() and repr(), and json.dumps().
 *
 * The whole text carries one mark: trusted only if everything in the value is,
 * because quoting and layout blur which byte came from where.
 */

#ifndef ENGINE_CHAT_JINJA_PRINT_H
#define ENGINE_CHAT_JINJA_PRINT_H

#include "engine/chat/jinja_value.h"

typedef struct {
    const char *indent; /* one level, or NULL: all in one line */
    size_t indent_len;
    const char *item_sep;
    const char *key_sep;
    bool ascii; /* \u escapes for all that is not ASCII */
    bool sort_keys;
} jjson_t;


/* repr(v) */
jv_t jinja_repr(jinja_t *run, const jv_t *v);

/* json.dumps(v); fails the run for what JSON cannot say. */
jv_t jinja_json(jinja_t *run, const jv_t *v, const jjson_t *how);

/* repr of a float into text[32]. */
void jinja_float_text(double f, char *text, size_t cap);

#endif /* ENGINE_CHAT_JINJA_PRINT_H */
