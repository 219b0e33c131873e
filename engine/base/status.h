/*
 * Result codes of the engine, and the error that travels to a client.
 *
 * Functions return int: LLM_OK or one of the negative codes.  Where the cause
 * must reach a person, the callee fills an llm_err_t; nobody on the way up
 * adds to it or logs it again.
 */

#ifndef ENGINE_BASE_STATUS_H
#define ENGINE_BASE_STATUS_H

#include <assert.h>


enum {
    LLM_OK = 0,
    LLM_ERROR = -1,    /* ours or the system's: the client sees a 500 */
    LLM_AGAIN = -2,    /* nothing to do now, try later */
    LLM_NOMEM = -3,    /* no memory for this request */
    LLM_LIMIT = -4,    /* a limit is exceeded (context length) */
    LLM_BADREQ = -5,   /* the request is wrong */
    LLM_CANCELED = -6, /* the client has gone */
};


typedef struct {
    int code;       /* one of the codes above */
    char param[32]; /* the request field at fault, or "" */
    char text[480]; /* one sentence for a person, no newline */
} llm_err_t;


/* Our own invariants only; never on data from outside this process. */
#define llm_assert(x) assert(x)

#ifdef LLM_DEBUG
#define llm_dassert(x) assert(x)
#else
#define llm_dassert(x) ((void) 0)
#endif


/* Fills *err (which may be NULL) and returns code.  param may be NULL. */
int llm_err_set(llm_err_t *err, int code, const char *param, const char *fmt,
                ...) __attribute__((format(printf, 4, 5)));

/* The name of a code, "ok", "limit" …; never NULL. */
const char *llm_code_name(int code);

#endif /* ENGINE_BASE_STATUS_H */
