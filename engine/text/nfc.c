/*
 * Normalization form C for the pre-tokenizers that ask for it: decompose each
 * character, order the combining marks, compose.
 */

#include "engine/text/nfc.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "engine/base/status.h"
#include "engine/base/utf8.h"

/* No character decomposes into more than four (UAX #15, 12.1). */
enum { EXPANSION = 4 };

typedef struct {
    utf8proc_int32_t *cps; /* [2 * cap], the second half to sort by */
    size_t cap;
} work_t;


bool
nfc_quick(const char *text, size_t len)
{
    /* U+0300, the first that is not always NFC, begins with 0xcc */
    for (size_t i = 0; i < len; i++) {
        if ((uint8_t) text[i] >= 0xcc) {
            return false;
        }
    }

    return true;
}


static uint32_t
mark_class(utf8proc_int32_t cp)
{
    /* combining classes are 0 … 254, 0 for what is no mark */
    return (uint32_t) utf8proc_get_property(cp)->combining_class & 0xff;
}


/* Sorts n marks by their class, equal ones in their order, by counting. */
static void
order_marks(utf8proc_int32_t *marks, size_t n, utf8proc_int32_t *work)
{
    size_t at[257] = { 0 };

    for (size_t i = 0; i < n; i++) {
        work[i] = marks[i];
        at[mark_class(marks[i]) + 1]++;
    }

    for (int c = 1; c < 257; c++) {
        at[c] += at[c - 1];
    }

    for (size_t i = 0; i < n; i++) {
        marks[at[mark_class(work[i])]++] = work[i];
    }
}


static void
order_all(utf8proc_int32_t *cps, size_t n, utf8proc_int32_t *work)
{
    size_t run = 0; /* where the current run of marks begins */
    uint32_t last = 0;
    bool ordered = true;

    for (size_t i = 0; i <= n; i++) {
        const uint32_t class = i < n ? mark_class(cps[i]) : 0;

        if (class == 0) {
            if (!ordered) {
                order_marks(cps + run, i - run, work);
            }

            run = i + 1;
            ordered = true;
        } else if (class < last) {
            ordered = false;
        }

        last = class;
    }
}


/* Decomposes the text; returns the number of code points. */
static size_t
decompose(const char *text, size_t len, utf8proc_int32_t *cps, size_t cap)
{
    const uint8_t *p = (const uint8_t *) text;
    size_t n = 0;

    while (len > 0) {
        uint32_t cp = 0;
        int boundary = 0;
        const int step = utf8_decode(p, len, &cp);

        llm_assert(step > 0);

        const utf8proc_ssize_t more = utf8proc_decompose_char(
            (utf8proc_int32_t) cp, cps + n, (utf8proc_ssize_t) (cap - n),
            UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &boundary);

        llm_assert(more >= 0 && (size_t) more <= cap - n);

        n += (size_t) more;
        p += step;
        len -= (size_t) step;
    }

    return n;
}


/* Appends the NFC of one stretch. */
static int
normalize(const char *text, size_t len, work_t *work, buf_t *out)
{
    const size_t cap = len * EXPANSION; /* code points are fewer than bytes */

    if (cap > work->cap) {
        free(work->cps);
        work->cps = malloc(2 * cap * sizeof(utf8proc_int32_t));
        work->cap = work->cps == NULL ? 0 : cap;
    }

    if (work->cps == NULL) {
        return LLM_NOMEM;
    }

    const size_t n = decompose(text, len, work->cps, work->cap);

    order_all(work->cps, n, work->cps + work->cap);

    const utf8proc_ssize_t composed = utf8proc_normalize_utf32(
        work->cps, (utf8proc_ssize_t) n, UTF8PROC_STABLE | UTF8PROC_COMPOSE);

    llm_assert(composed >= 0);

    uint8_t *p = (uint8_t *) buf_room(out, (size_t) composed * 4);

    for (utf8proc_ssize_t i = 0; p != NULL && i < composed; i++) {
        const int step = utf8_encode((uint32_t) work->cps[i], p);

        p += step;
        out->len += (size_t) step;
    }

    return out->failed ? LLM_NOMEM : LLM_OK;
}


/* Nothing composes across the front of such a character.  ASCII is one; U+11A7
 * (e1 86 a7) is here because utf8proc takes it for a final consonant, which it
 * is one below of, and drops it behind a syllable. */
static bool
is_boundary(const char *text, size_t len)
{
    return (uint8_t) text[0] < 0x80
           || (len >= 3 && memcmp(text, "\xe1\x86\xa7", 3) == 0);
}


int
nfc(const char *text, size_t len, buf_t *out)
{
    work_t work = { 0 };
    int rc = LLM_OK;
    size_t at = 0;

    buf_clear(out);

    /* a stretch is a boundary and what is behind it */
    while (rc == LLM_OK && at < len) {
        size_t end = at + 1;

        while (end < len && !is_boundary(text + end, len - end)) {
            end++;
        }

        if (nfc_quick(text + at, end - at)) {
            buf_add(out, text + at, end - at);
        } else {
            rc = normalize(text + at, end - at, &work, out);
        }

        at = end;
    }

    free(work.cps);

    return rc == LLM_OK && out->failed ? LLM_NOMEM : rc;
}
