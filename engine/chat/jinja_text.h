/* Text functions that filters and methods share. */

#ifndef ENGINE_CHAT_JINJA_TEXT_H
#define ENGINE_CHAT_JINJA_TEXT_H

#include "engine/chat/jinja_value.h"

typedef enum {
    TEXT_UPPER,
    TEXT_LOWER,
    TEXT_CAPITALIZE,
    TEXT_TITLE,       /* str.title(): a word begins behind a non-letter */
    TEXT_JINJA_TITLE, /* the filter: behind space, dash or bracket */
} text_case_t;

enum {
    TEXT_LEFT = 1,
    TEXT_RIGHT = 2,
};


/* Python's notion of a space. */
bool text_is_space(uint32_t cp);

/* chars: what to strip, NULL: space. */
jv_t text_strip(jinja_t *run, const jstr_t *s, const jstr_t *chars, int sides);
jv_t text_case(jinja_t *run, jstr_t *s, text_case_t how);

/* At most count times; negative: all. */
jv_t text_replace(jinja_t *run, const jstr_t *s, const jstr_t *from,
                  const jstr_t *to, int64_t count);

/* sep NULL: at runs of space.  A list of at most max + 1 parts. */
jv_t text_split(jinja_t *run, const jstr_t *s, const jstr_t *sep, int64_t max);
jv_t text_rsplit(jinja_t *run, const jstr_t *s, const jstr_t *sep, int64_t max);
jv_t text_lines(jinja_t *run, const jstr_t *s);

/* "%s is %d" % args, where args may be a tuple. */
jv_t text_percent(jinja_t *run, const jstr_t *s, const jv_t *args);

/* "{} is {name}".format(args) */
jv_t text_format(jinja_t *run, const jstr_t *s, const jargs_t *args);

#endif /* ENGINE_CHAT_JINJA_TEXT_H */
