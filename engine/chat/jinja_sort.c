/* Bottom-up merge sort over indices: stable, no recursion, n log n steps. */

#include "engine/chat/jinja_sort.h"

#include <string.h>

typedef struct {
    jinja_t *run;
    const jv_t *keys;
    jcompare_t compare;
} sorter_t;


/* Merges from[a … b-1] and from[b … c-1] into to[a … c-1]. */
static void
merge(const sorter_t *s, const size_t *from, size_t *to, const size_t at[3])
{
    size_t left = at[0], right = at[1];

    for (size_t i = at[0]; i < at[2]; i++) {
        bool take_right = right < at[2];

        if (take_right && left < at[1]) {
            jinja_step(s->run, 1);
            take_right =
                s->compare(s->run, &s->keys[from[right]], &s->keys[from[left]])
                < 0;
        }

        to[i] = from[take_right ? right++ : left++];
    }
}


size_t *
jinja_order(jinja_t *run, const jv_t *keys, size_t n, jcompare_t compare)
{
    const sorter_t s = { run, keys, compare != NULL ? compare : jv_compare };
    size_t *from = jinja_alloc(run, (n + 1) * sizeof(size_t));
    size_t *to = jinja_alloc(run, (n + 1) * sizeof(size_t));

    if (from == NULL || to == NULL) {
        return NULL;
    }

    for (size_t i = 0; i < n; i++) {
        from[i] = i;
    }

    for (size_t width = 1; width < n && run->code == LLM_OK; width *= 2) {
        for (size_t a = 0; a < n; a += 2 * width) {
            const size_t b = a + width < n ? a + width : n;
            const size_t c = b + width < n ? b + width : n;
            const size_t at[3] = { a, b, c };
            merge(&s, from, to, at);
        }

        size_t *swap = from;
        from = to;
        to = swap;
    }

    return run->code == LLM_OK ? from : NULL;
}
