/* UTF-8: decode, validate, find the longest complete prefix (RFC 3629). */

#ifndef ENGINE_BASE_UTF8_H
#define ENGINE_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>


/* Reads one code point from len bytes.  Returns its length 1…4 and sets *cp;
 * 0 when the bytes are a proper but unfinished beginning; -1 when they can
 * never become valid (surrogates, overlong forms, above U+10FFFF). */
int utf8_decode(const uint8_t *p, size_t len, uint32_t *cp);

/* Writes cp as 1…4 bytes and returns how many. */
int utf8_encode(uint32_t cp, uint8_t *out);

bool utf8_valid(const uint8_t *p, size_t len);

/* Length of the longest prefix that does not end inside a code point.
 * Invalid bytes count as complete: they will not get better by waiting. */
size_t utf8_complete(const uint8_t *p, size_t len);

#endif /* ENGINE_BASE_UTF8_H */
