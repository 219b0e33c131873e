/*
 * All that one request owns.  It is born in intake.c, runs as one sequence,
 * and dies when its last record has left.
 */

#ifndef ENGINE_REQUEST_H
#define ENGINE_REQUEST_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/buf.h"
#include "engine/base/list.h"
#include "engine/base/status.h"
#include "engine/ipc/msg.h"
#include "engine/sample/sampler.h"
#include "engine/sched/seq.h"
#include "engine/spec/choose.h"
#include "engine/spec/draft.h"
#include "engine/text/detok.h"

typedef struct {
    const char *text;
    uint32_t len;
} stop_string_t;

/* Where a request came from: the port's business, zero elsewhere. */
typedef struct {
    uint32_t worker;
    uint32_t slot;
    uint32_t ticket;
    uint64_t submit_ns; /* monotonic */
} request_origin_t;

typedef struct request_s request_t;

struct request_s {
    list_t link; /* in engine->requests */
    arena_t *arena;
    const llm_request_t *msg; /* private copy, in the arena */

    request_origin_t from;

    struct intake_thread_s *preparer; /* the thread that has it, or NULL */
    list_t turn;                      /* in one of that thread's lines */
    llm_err_t err;                    /* what prepare.c found wrong */

    seq_t seq;
    bool queued;  /* seq is with the scheduler */
    bool fresh;   /* counted in n_fresh */
    bool textual; /* for the tokenizer alone: not counted */
    int max_tokens;
    int n_output;

    samp_params_t samp;
    samp_state_t *samp_state; /* NULL: no penalties */
    int place; /* of the backend: the token drawn last, on its way to the host;
                  −1: it is not there (ahead.h) */

    const int32_t *stop_tokens;
    int n_stop_tokens;
    stop_string_t *stops;
    int n_stops;

    detok_t detok;
    buf_t text;       /* decoded, not yet sent: may begin a stop string */
    size_t text_safe; /* bytes of text that cannot belong to one */
    buf_t logprobs;   /* encoded entries of the next delta */
    uint32_t n_logprobs;
    uint32_t n_pending; /* tokens of the next delta */
    int n_scored;       /* echoed prompt tokens with their log-probability */
    bool echoed;        /* START and the echo are written */

    /* records that are not yet in the output ring: {u32 length, payload}… */
    buf_t out;
    size_t out_pos;
    bool finished; /* DONE or ERROR is written */

    /* speculative decoding (speculate.c) */
    uint64_t salt_hash; /* drafts are of what equal salts wrote */
    spec_track_t track[SPEC_DRAFTERS];
    int drafter; /* that made these drafts */
    draft_track_t drafted;
    int32_t draft[SPEC_MAX];
    int n_right;         /* of the drafts of this step, so far */
    uint32_t n_drafted;  /* verified, */
    uint32_t n_accepted; /* and right, in all */

    uint64_t scheduled_ns; /* 0: not yet */
    uint64_t first_ns;
    uint64_t last_ns;
};


/* Bytes of a section of the request, LLM_SEC_…; *len is 0 when it is absent. */
static inline const void *
request_section(const request_t *req, int sec, uint32_t *len)
{
    *len = req->msg->section[sec].len;
    return (const uint8_t *) req->msg + req->msg->section[sec].off;
}

#endif /* ENGINE_REQUEST_H */
