/*
 * Unicode normalization form C (UAX #15), in linear time.
 *
 * utf8proc knows the tables; the ordering of combining marks is done here,
 * because its own is quadratic in a run of marks.
 */

#ifndef ENGINE_TEXT_NFC_H
#define ENGINE_TEXT_NFC_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/buf.h"


/* True: the text is in NFC for sure, false: it may not be. */
bool nfc_quick(const char *text, size_t len);

/* Replaces the content of out by the NFC of text, which is valid UTF-8.
 * LLM_NOMEM. */
int nfc(const char *text, size_t len, buf_t *out);

#endif /* ENGINE_TEXT_NFC_H */
