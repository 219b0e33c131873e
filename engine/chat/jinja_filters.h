/*
 * The tables of what templates may call: filters, tests, methods, globals.
 * To add one, write its function and give it a row.
 */

#ifndef ENGINE_CHAT_JINJA_FILTERS_H
#define ENGINE_CHAT_JINJA_FILTERS_H

#include "engine/chat/jinja_value.h"


/* NULL when there is none of this name. */
const jrow_t *jinja_filter(const char *name, size_t len);
const jrow_t *jinja_test(const char *name, size_t len);
const jrow_t *jinja_global(const char *name, size_t len);
const jrow_t *jinja_method(jv_kind_t kind, const char *name, size_t len);

/* Parts of the tables in files of their own; a row without name ends them. */
extern const jrow_t jinja_list_filters[];
extern const jrow_t jinja_str_methods[];

/* A row of a table that ends with a row without name. */
const jrow_t *jinja_row(const jrow_t *rows, const char *name, size_t len);

#endif /* ENGINE_CHAT_JINJA_FILTERS_H */
