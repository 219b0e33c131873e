/*
 * Bytes of tokens → UTF-8 text, as they come.
 *
 * A byte that cannot follow ends the character before it: what was held
 * becomes one U+FFFD and the byte starts anew (the "maximal subpart" practice
 * of the Unicode standard, 3.9).  Each byte decides on what is held alone, so
 * it does not matter how the bytes were cut into tokens.
 */

#include "engine/text/detok.h"

#include <string.h>

#include "engine/base/utf8.h"

#define REPLACEMENT "\xef\xbf\xbd"


static void
push_byte(detok_t *detok, uint8_t byte, buf_t *out)
{
    uint32_t cp;

    detok->held[detok->n_held++] = byte;

    int rc = utf8_decode(detok->held, (size_t) detok->n_held, &cp);

    if (rc < 0 && detok->n_held > 1) {
        buf_adds(out, REPLACEMENT);
        detok->held[0] = byte;
        detok->n_held = 1;
        rc = utf8_decode(detok->held, 1, &cp);
    }

    if (rc == 0) {
        return;
    }

    if (rc > 0) {
        buf_add(out, detok->held, (size_t) rc);
    } else {
        buf_adds(out, REPLACEMENT);
    }

    detok->n_held = 0;
}


void
detok_push(detok_t *detok, const tok_t *tok, int32_t id, bool keep_special,
           buf_t *out)
{
    if (!keep_special && tok_is_control(tok, id)) {
        return;
    }

    size_t len;
    const uint8_t *p = (const uint8_t *) tok_bytes(tok, id, &len);

    if (detok->n_held == 0 && utf8_valid(p, len)) {
        buf_add(out, p, len);
        return;
    }

    for (size_t i = 0; i < len; i++) {
        push_byte(detok, p[i], out);
    }
}


void
detok_finish(detok_t *detok, buf_t *out)
{
    if (detok->n_held > 0) {
        buf_adds(out, REPLACEMENT);
        detok->n_held = 0;
    }
}
