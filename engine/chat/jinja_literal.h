/* The values of numbers and strings as a template writes them. */

#ifndef ENGINE_CHAT_JINJA_LITERAL_H
#define ENGINE_CHAT_JINJA_LITERAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    bool is_float;
    int64_t integer;
    double number;
} jnumber_t;


/* Reads the number at p, which begins with a digit.  whole: read no fraction
 * (behind a dot, a.0.1).  Returns how many bytes it takes, 0 if it is too large
 * or too long. */
size_t jinja_read_number(const char *p, size_t len, bool whole,
                         jnumber_t *number);

/* Decodes what stands between a string's quotes into out, which holds len
 * bytes: no escape is longer decoded than written.  Returns the length. */
size_t jinja_read_string(const char *p, size_t len, char *out);

#endif /* ENGINE_CHAT_JINJA_LITERAL_H */
