/*
 * Values of a running chat template, and the run itself.
 *
 * Everything lives in the arena of one run.  Failure is sticky: the first
 * jv_fail() is kept, later work returns undefined and the evaluator stops at
 * its next check, so that expression code needs no error paths of its own.
 *
 * Trust: every byte of a string has a mark, 1 when it was written in the
 * template, 0 when it came from the client.  Numbers and containers carry one
 * mark as a whole.
 */

#ifndef ENGINE_CHAT_JINJA_VALUE_H
#define ENGINE_CHAT_JINJA_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "engine/base/arena.h"
#include "engine/base/status.h"

enum {
    JINJA_MAX_STEPS = 4 * 1000 * 1000,
    JINJA_MAX_DEPTH = 400,        /* nested evaluation, macros included */
    JINJA_MAX_NESTING = 128,      /* lists in lists, JSON in JSON */
    JINJA_MAX_RANGE = 100000,     /* items of range() */
    JINJA_MAX_TEXT = 16 << 20,    /* bytes of one string or of the output */
    JINJA_MAX_MEMORY = 256 << 20, /* bytes of a run's arena */
};

typedef enum {
    JV_UNDEFINED,
    JV_NONE,
    JV_BOOL,
    JV_INT,
    JV_FLOAT,
    JV_STR,
    JV_LIST,
    JV_TUPLE,
    JV_GEN, /* what a lazy filter gives: a list that is always true */
    JV_DICT,
    JV_NAMESPACE,
    JV_LOOP,
    JV_MACRO,
    JV_FUNC,   /* a global such as range */
    JV_METHOD, /* a method bound to its object */
} jv_kind_t;

typedef struct jinja_s jinja_t;
typedef struct jv_s jv_t;
typedef struct jstr_s jstr_t;
typedef struct jbuf_s jbuf_t;
typedef struct jlist_s jlist_t;
typedef struct jdict_s jdict_t;
typedef struct jargs_s jargs_t;
typedef struct jloop_s jloop_t;
typedef struct jmacro_s jmacro_t;
typedef struct jmethod_s jmethod_t;
typedef struct jscope_s jscope_t;
typedef struct node_s node_t;

struct jv_s {
    uint8_t kind;
    uint8_t trusted; /* not for JV_STR, which has marks */
    uint8_t origin;  /* JV_UNDEFINED: kind of the object that lacks it */
    union {
        bool b;
        int64_t i;
        double f;
        jstr_t *str; /* JV_UNDEFINED: the missing name, may be NULL */
        jlist_t *list;
        jdict_t *dict; /* JV_NAMESPACE too */
        jloop_t *loop;
        const jmacro_t *macro;
        const jmethod_t *method;
        const struct jrow_s *func;
    };
};

/* Immutable.  UTF-8, but no code relies on it being valid. */
struct jstr_s {
    const char *data;
    const uint8_t *marks; /* NULL: each byte's mark is `uniform` */
    size_t len;
    size_t n_chars; /* SIZE_MAX until counted */
    jbuf_t *grow;   /* the buffer it was built in, or NULL */
    uint8_t uniform;
};

/* A growing string.  A finished string may be extended in place as long as it
 * is still the whole content, which makes x = x + y in a loop linear. */
struct jbuf_s {
    jinja_t *run;
    char *data;
    uint8_t *marks;
    size_t len;
    size_t cap;
};

struct jlist_s {
    jv_t *items;
    size_t n;
    size_t cap;
};

/* Keeps the order of insertion, as Python does. */
struct jdict_s {
    jv_t *keys;
    jv_t *values;
    size_t n;
    size_t cap;
    uint32_t *index; /* open addressing, entry + 1; NULL while small */
    size_t index_cap;
};

typedef struct {
    const char *name;
    size_t len;
    jv_t value;
} jkwarg_t;

struct jargs_s {
    const jv_t *pos;
    size_t n;
    const jkwarg_t *kw;
    size_t n_kw;
};

/* Filters, tests, methods and globals share one form. */
typedef struct jrow_s {
    const char *name;
    jv_t (*call)(jinja_t *run, jv_t self, const jargs_t *args);
} jrow_t;

struct jmethod_s {
    jv_t self;
    const jrow_t *row;
};

struct jinja_s {
    arena_t *arena;
    llm_err_t *err;
    int code; /* LLM_OK until something failed */
    uint32_t steps;
    uint32_t depth;
    uint32_t line; /* of the statement that runs */
    uint64_t seed; /* of the hashes */
    jdict_t *globals;
    jscope_t *scope;
    jbuf_t *out;
    jv_t captured; /* a block's text, which its filters work on */
};


/* Records the first failure as LLM_BADREQ, with the line; returns undefined. */
jv_t jv_fail(jinja_t *run, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* The same with another code and no line. */
jv_t jv_abort(jinja_t *run, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Counts work; false when the run has failed or has used up its steps. */
bool jinja_step(jinja_t *run, size_t steps);

/* Counts the work of passing over len bytes of text. */
bool jinja_step_text(jinja_t *run, size_t len);

/* Arena memory, zeroed; NULL when the run has failed. */
void *jinja_alloc(jinja_t *run, size_t bytes);

/* --- scalars --- */

jv_t jv_undefined(void);
jv_t jv_missing(const jv_t *object, jstr_t *name);
jv_t jv_none(void);
jv_t jv_bool(bool b);
jv_t jv_int(int64_t i);
jv_t jv_float(double f);

/* Reads an argument as an integer; fails the run when it is none. */
int64_t jv_to_int(jinja_t *run, const jv_t *v);

/* --- strings --- */

/* Borrows data, which must outlive the run. */
jv_t jv_text(jinja_t *run, const char *data, size_t len, uint8_t mark);

/* A zero-terminated constant, trusted. */
jv_t jv_const(jinja_t *run, const char *text);

/* Bytes [from, to) of s; shares its memory. */
jv_t jv_sub(jinja_t *run, const jstr_t *s, size_t from, size_t to);

/* Text as {{ }} prints it: a string as it is, the rest formatted. */
jv_t jv_string(jinja_t *run, const jv_t *v);

jv_t jv_concat(jinja_t *run, const jstr_t *a, const jstr_t *b);
size_t jstr_chars(jstr_t *s);
uint8_t jstr_mark(const jstr_t *s, size_t at);
bool jstr_trusted(const jstr_t *s);
bool jstr_is(const jstr_t *s, const char *text);

/* Byte offset of character `at`, which is at most the number of them. */
size_t jstr_offset(jstr_t *s, size_t at);

jbuf_t *jbuf_create(jinja_t *run);
void jbuf_add(jbuf_t *buf, const char *data, size_t len, uint8_t mark);
void jbuf_part(jbuf_t *buf, const jstr_t *s, size_t from, size_t len);
jv_t jbuf_string(jbuf_t *buf);

/* --- containers --- */

jlist_t *jlist_create(jinja_t *run, size_t cap);
bool jlist_add(jinja_t *run, jlist_t *list, jv_t v);
jv_t jv_list(jv_kind_t kind, jlist_t *list, uint8_t trusted);

jdict_t *jdict_create(jinja_t *run);
bool jdict_set(jinja_t *run, jdict_t *dict, jv_t key, jv_t value);
const jv_t *jdict_get(jinja_t *run, const jdict_t *dict, const jv_t *key);
const jv_t *jdict_find(jinja_t *run, const jdict_t *dict, const char *key,
                       size_t len);
jv_t jv_dict(jdict_t *dict, uint8_t trusted);

/* What a loop or a filter iterates over; NULL and a failure if it cannot. */
jlist_t *jv_items(jinja_t *run, const jv_t *v);

bool jv_is_seq(const jv_t *v); /* list, tuple or lazy list */
bool jv_is_number(const jv_t *v);
double jv_double(const jv_t *v);

/* --- what Python says about them --- */

bool jv_truth(const jv_t *v);
bool jv_equal(jinja_t *run, const jv_t *a, const jv_t *b);

/* <0, 0, >0; fails the run when the two have no order. */
int jv_compare(jinja_t *run, const jv_t *a, const jv_t *b);
const char *jv_type(const jv_t *v);

/* Everything in v was written in the template. */
bool jv_trusted(jinja_t *run, const jv_t *v);

/* A tree of untrusted values; strings are borrowed from json. */
jv_t jv_from_json(jinja_t *run, const cJSON *json, int depth);

/* --- arguments --- */

/* Argument number at, or the one named so; NULL when absent. */
const jv_t *jarg(const jargs_t *args, size_t at, const char *name);
bool jarg_truth(const jargs_t *args, size_t at, const char *name, bool other);

#endif /* ENGINE_CHAT_JINJA_VALUE_H */
