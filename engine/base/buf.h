/*
 * Growing byte buffer on the heap.
 *
 * A failed growth sets `failed` and drops what was appended, so a writer may
 * append many times and check once.
 */

#ifndef ENGINE_BASE_BUF_H
#define ENGINE_BASE_BUF_H

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    char *data;
    size_t len;
    size_t cap;
    bool failed;
} buf_t;


/* A zeroed buf_t is an empty buffer. */
void buf_fini(buf_t *buf);

/* Forgets the content and the failure, keeps the memory. */
void buf_clear(buf_t *buf);

/* Room for `more` bytes behind the content; NULL (and failed) if none. */
char *buf_room(buf_t *buf, size_t more);

void buf_add(buf_t *buf, const void *bytes, size_t len);
void buf_addc(buf_t *buf, char c);
void buf_adds(buf_t *buf, const char *text);
void buf_addf(buf_t *buf, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* Removes the first n bytes. */
void buf_consume(buf_t *buf, size_t n);

#endif /* ENGINE_BASE_BUF_H */
