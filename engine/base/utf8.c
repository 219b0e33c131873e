/* UTF-8 by the table of RFC 3629. */

#include "engine/base/utf8.h"


int
utf8_decode(const uint8_t *p, size_t len, uint32_t *cp)
{
    if (len == 0) {
        return 0;
    }

    const uint8_t c = p[0];

    if (c < 0x80) {
        *cp = c;
        return 1;
    }

    int n;
    uint8_t lo = 0x80, hi = 0xbf; /* bounds of the second byte */

    if (c >= 0xc2 && c <= 0xdf) {
        n = 2;
    } else if (c >= 0xe0 && c <= 0xef) {
        n = 3;
        lo = c == 0xe0 ? 0xa0 : 0x80;
        hi = c == 0xed ? 0x9f : 0xbf;
    } else if (c >= 0xf0 && c <= 0xf4) {
        n = 4;
        lo = c == 0xf0 ? 0x90 : 0x80;
        hi = c == 0xf4 ? 0x8f : 0xbf;
    } else {
        return -1;
    }

    uint32_t v = c & (0x7f >> n);

    for (int i = 1; i < n; i++) {
        if ((size_t) i >= len) {
            return 0;
        }

        if (p[i] < lo || p[i] > hi) {
            return -1;
        }

        v = v << 6 | (p[i] & 0x3f);
        lo = 0x80;
        hi = 0xbf;
    }

    *cp = v;
    return n;
}


int
utf8_encode(uint32_t cp, uint8_t *out)
{
    if (cp < 0x80) {
        out[0] = (uint8_t) cp;
        return 1;
    }

    if (cp < 0x800) {
        out[0] = (uint8_t) (0xc0 | cp >> 6);
        out[1] = (uint8_t) (0x80 | (cp & 0x3f));
        return 2;
    }

    if (cp < 0x10000) {
        out[0] = (uint8_t) (0xe0 | cp >> 12);
        out[1] = (uint8_t) (0x80 | (cp >> 6 & 0x3f));
        out[2] = (uint8_t) (0x80 | (cp & 0x3f));
        return 3;
    }

    out[0] = (uint8_t) (0xf0 | cp >> 18);
    out[1] = (uint8_t) (0x80 | (cp >> 12 & 0x3f));
    out[2] = (uint8_t) (0x80 | (cp >> 6 & 0x3f));
    out[3] = (uint8_t) (0x80 | (cp & 0x3f));
    return 4;
}


bool
utf8_valid(const uint8_t *p, size_t len)
{
    uint32_t cp;

    while (len > 0) {
        const int n = utf8_decode(p, len, &cp);

        if (n <= 0) {
            return false;
        }

        p += n;
        len -= (size_t) n;
    }

    return true;
}


size_t
utf8_complete(const uint8_t *p, size_t len)
{
    uint32_t cp;

    /* an unfinished code point is at most three bytes long */
    for (size_t back = 1; back <= 3 && back <= len; back++) {
        if ((p[len - back] & 0xc0) == 0x80) {
            continue;
        }

        return utf8_decode(p + len - back, back, &cp) == 0 ? len - back : len;
    }

    return len;
}
