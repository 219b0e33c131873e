/* Slices: object[start:stop:step]. */

#include "engine/chat/jinja_ops.h"


/* Python's slice.indices(): *start and the count of items to take. */
static size_t
slice_range(jinja_t *run, const jv_t part[3], size_t n, int64_t *start,
            int64_t *step)
{
    int64_t bound_at[2];
    const int64_t len = (int64_t) n;
    bool given[3];

    for (int i = 0; i < 3; i++) {
        given[i] = part[i].kind != JV_UNDEFINED && part[i].kind != JV_NONE;
    }

    *step = given[2] ? jv_to_int(run, &part[2]) : 1;

    if (*step == 0) {
        jv_fail(run, "a slice's step cannot be zero");
        return 0;
    }

    const bool back = *step < 0;

    for (int i = 0; i < 2; i++) {
        if (!given[i]) {
            bound_at[i] = (i == 0) == back ? len - back : 0 - back;
            continue;
        }

        int64_t at = jv_to_int(run, &part[i]);

        if (at < 0) {
            at = at < -len ? 0 - back : at + len;

        } else if (at >= len) {
            at = len - back;
        }

        bound_at[i] = at;
    }

    *start = bound_at[0];
    const int64_t span =
        back ? bound_at[0] - bound_at[1] : bound_at[1] - bound_at[0];

    if (span <= 0) {
        return 0;
    }

    /* the step's size may be anything: divide in unsigned */
    const uint64_t size = back ? 0 - (uint64_t) *step : (uint64_t) *step;

    return (size_t) ((uint64_t) (span - 1) / size) + 1;
}


static jv_t
slice_text(jinja_t *run, jstr_t *s, const jv_t part[3])
{
    int64_t start, step;
    const size_t n_chars = jstr_chars(s);
    const size_t n = slice_range(run, part, n_chars, &start, &step);
    size_t *offsets = NULL;

    if (!jinja_step_text(run, s->len)) {
        return jv_undefined();
    }

    if (n == 0) {
        return jv_sub(run, s, 0, 0);
    }

    if (step == 1) {
        return jv_sub(run, s, jstr_offset(s, (size_t) start),
                      jstr_offset(s, (size_t) start + n));
    }

    if (n_chars != s->len) {
        size_t at = 0;

        offsets = jinja_alloc(run, (n_chars + 1) * sizeof(size_t));

        for (size_t i = 0; offsets != NULL && i < s->len; i++) {
            if (((uint8_t) s->data[i] & 0xc0) != 0x80) {
                offsets[at++] = i;
            }
        }

        if (offsets == NULL) {
            return jv_undefined();
        }
        offsets[n_chars] = s->len;
    }

    jbuf_t *buf = jbuf_create(run);

    for (size_t i = 0; i < n; i++) {
        const size_t at = (size_t) (start + (int64_t) i * step);
        const size_t from = offsets != NULL ? offsets[at] : at;
        const size_t to = offsets != NULL ? offsets[at + 1] : at + 1;

        jbuf_part(buf, s, from, to - from);
    }

    return jbuf_string(buf);
}


jv_t
jinja_slice(jinja_t *run, const jv_t *object, const jv_t part[3])
{
    int64_t start, step;

    if (object->kind == JV_UNDEFINED) {
        return jinja_is_undefined(run, object);
    }

    if (object->kind == JV_STR) {
        return slice_text(run, object->str, part);
    }

    if (object->kind != JV_LIST && object->kind != JV_TUPLE) {
        return jv_missing(object, NULL); /* as Jinja's getitem */
    }

    const size_t n = slice_range(run, part, object->list->n, &start, &step);
    jlist_t *list = jinja_step(run, n) ? jlist_create(run, n) : NULL;

    for (size_t i = 0; list != NULL && i < n; i++) {
        jlist_add(run, list, object->list->items[start + (int64_t) i * step]);
    }

    return jv_list((jv_kind_t) object->kind, list, object->trusted);
}
