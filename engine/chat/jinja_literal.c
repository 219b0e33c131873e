/* Numbers with underscores and bases, strings with Python's escapes. */

#include "engine/chat/jinja_literal.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"

enum { MAX_DIGITS = 60 };


static bool
digit_value(char c, int base, int *value)
{
    *value = c >= '0' && c <= '9'   ? c - '0'
             : c >= 'a' && c <= 'f' ? c - 'a' + 10
             : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                    : 99;
    return *value < base;
}


/* Copies digits without their underscores; returns the offset behind them. */
static size_t
copy_digits(const char *p, size_t len, size_t at, char *text, size_t *n)
{
    while (
        at < len && *n < MAX_DIGITS
        && (isdigit((uint8_t) p[at])
            || (p[at] == '_' && at + 1 < len && isdigit((uint8_t) p[at + 1]))))
    {
        if (p[at] != '_') {
            text[(*n)++] = p[at];
        }
        at++;
    }

    return at;
}


/* 0x1f, 0b101, 0o17 */
static size_t
read_based(const char *p, size_t len, int base, jnumber_t *number)
{
    size_t at = 2;
    int digit;

    *number = (jnumber_t){ 0 };

    while (at < len && (p[at] == '_' || digit_value(p[at], base, &digit))) {
        if (p[at] != '_') {
            if (number->integer > INT64_MAX / 16 - 1) {
                return 0;
            }
            number->integer = number->integer * base + digit;
        }
        at++;
    }

    return at;
}


size_t
jinja_read_number(const char *p, size_t len, bool whole, jnumber_t *number)
{
    const char second = len > 1 ? p[1] : '\0';
    char text[2 * MAX_DIGITS + 8];
    size_t n = 0;

    *number = (jnumber_t){ 0 };

    if (p[0] == '0' && second != '\0' && strchr("xXoObB", second) != NULL) {
        return read_based(p, len,
                          tolower(second) == 'x'   ? 16
                          : tolower(second) == 'o' ? 8
                                                   : 2,
                          number);
    }

    size_t at = copy_digits(p, len, 0, text, &n);

    if (!whole && at + 1 < len && p[at] == '.' && isdigit((uint8_t) p[at + 1]))
    {
        number->is_float = true;
        text[n++] = '.';
        at = copy_digits(p, len, at + 1, text, &n);
    }

    if (!whole && at + 1 < len && (p[at] == 'e' || p[at] == 'E')) {
        const bool sign = p[at + 1] == '-' || p[at + 1] == '+';

        if (at + 1 + sign < len && isdigit((uint8_t) p[at + 1 + sign])) {
            number->is_float = true;
            text[n++] = 'e';
            text[n++] = sign ? p[at + 1] : '+';
            at = copy_digits(p, len, at + 1 + sign, text, &n);
        }
    }

    if (n >= MAX_DIGITS) {
        return 0;
    }

    text[n] = '\0';
    errno = 0;
    number->integer = number->is_float ? 0 : strtoll(text, NULL, 10);

    if (errno == ERANGE) {
        return 0;
    }

    number->number = strtod(text, NULL);
    return at;
}


/* \x41, \u0041, \U00000041 or \101 at p (behind the backslash).  Returns how
 * many bytes it takes, 0 if it is none. */
static size_t
numeric_escape(const char *p, size_t len, uint32_t *cp)
{
    const bool octal = *p >= '0' && *p <= '7';
    const size_t want = octal ? 3 : *p == 'x' ? 2 : *p == 'u' ? 4 : 8;
    const size_t skip = octal ? 0 : 1;
    size_t n = 0;
    int digit;

    if (!octal && *p != 'x' && *p != 'u' && *p != 'U') {
        return 0;
    }

    *cp = 0;

    while (n < want && skip + n < len
           && digit_value(p[skip + n], octal ? 8 : 16, &digit))
    {
        *cp = *cp * (octal ? 8 : 16) + (uint32_t) digit;
        n++;
    }

    if ((!octal && n < want) || *cp > 0x10ffff
        || (*cp >= 0xd800 && *cp < 0xe000)) {
        return 0;
    }

    return skip + n;
}


/* Decodes one escape at p (behind the backslash) into out, adding to *n. */
static size_t
decode_escape(const char *p, size_t len, char *out, size_t *n)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    const char *at = strchr(from, *p);
    uint32_t cp;

    if (*p == '\n') {
        return 1;
    }

    if (*p != '\0' && at != NULL) {
        out[(*n)++] = to[at - from];
        return 1;
    }

    const size_t used = numeric_escape(p, len, &cp);

    if (used > 0) {
        *n += (size_t) utf8_encode(cp, (uint8_t *) out + *n);
        return used;
    }

    out[(*n)++] = '\\'; /* an unknown escape stays as it is */
    return 0;
}


size_t
jinja_read_string(const char *p, size_t len, char *out)
{
    size_t n = 0;

    for (size_t i = 0; i < len;) {
        if (p[i] != '\\' || i + 1 == len) {
            out[n++] = p[i++];
            continue;
        }

        i++;
        i += decode_escape(p + i, len - i, out, &n);
    }

    return n;
}
