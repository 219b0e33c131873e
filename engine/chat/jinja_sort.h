/* A stable merge sort for values, whose comparison may fail the run. */

#ifndef ENGINE_CHAT_JINJA_SORT_H
#define ENGINE_CHAT_JINJA_SORT_H

#include "engine/chat/jinja_value.h"

/* How two keys compare; NULL stands for jv_compare. */
typedef int (*jcompare_t)(jinja_t *run, const jv_t *a, const jv_t *b);


/* The order that sorts keys[0 … n-1]: order[0] is the index of the smallest.
 * NULL when the run has failed. */
size_t *jinja_order(jinja_t *run, const jv_t *keys, size_t n,
                    jcompare_t compare);

#endif /* ENGINE_CHAT_JINJA_SORT_H */
