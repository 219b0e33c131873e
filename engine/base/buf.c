/* Growing byte buffer. */

#include "engine/base/buf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>


void
buf_fini(buf_t *buf)
{
    free(buf->data);
    *buf = (buf_t){ 0 };
}


void
buf_clear(buf_t *buf)
{
    buf->len = 0;
    buf->failed = false;
}


char *
buf_room(buf_t *buf, size_t more)
{
    if (buf->failed) {
        return NULL;
    }

    if (buf->cap - buf->len < more) {
        if (more > SIZE_MAX / 4 || buf->len > SIZE_MAX / 4) {
            buf->failed = true;
            return NULL;
        }

        size_t cap = buf->cap < 64 ? 64 : buf->cap * 2;
        while (cap - buf->len < more) {
            cap *= 2;
        }

        char *data = realloc(buf->data, cap);
        if (data == NULL) {
            buf->failed = true;
            return NULL;
        }

        buf->data = data;
        buf->cap = cap;
    }

    return buf->data + buf->len;
}


void
buf_add(buf_t *buf, const void *bytes, size_t len)
{
    char *p = len > 0 ? buf_room(buf, len) : NULL;

    if (p != NULL) {
        memcpy(p, bytes, len);
        buf->len += len;
    }
}


void
buf_addc(buf_t *buf, char c)
{
    buf_add(buf, &c, 1);
}


void
buf_adds(buf_t *buf, const char *text)
{
    buf_add(buf, text, strlen(text));
}


void
buf_addf(buf_t *buf, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    const int len = vsnprintf(NULL, 0, fmt, args);
    va_end(args);

    char *p = len < 0 ? NULL : buf_room(buf, (size_t) len + 1);

    if (p == NULL) {
        buf->failed = true;
        return;
    }

    va_start(args, fmt);
    vsnprintf(p, (size_t) len + 1, fmt, args);
    va_end(args);

    buf->len += (size_t) len;
}


void
buf_consume(buf_t *buf, size_t n)
{
    if (n > 0) {
        memmove(buf->data, buf->data + n, buf->len - n);
        buf->len -= n;
    }
}
