/*
 * What crosses the segment: the request in a slot's request area, and the
 * records in its output ring.
 *
 * Request area:  llm_request_t | section bytes …   (offsets, never pointers)
 * Output ring:   records, first byte block llm_record_t
 *
 * Writers build with the encode functions; readers decode with the checked
 * ones, which copy nothing and verify every offset and length against the
 * buffer they were given.  The reader must first copy the bytes out of the
 * segment (the other process could change them between check and use).
 *
 * libc only.
 */

#ifndef ENGINE_IPC_MSG_H
#define ENGINE_IPC_MSG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/ipc/stats.h" /* LLM_FINISH_* */


/* --- requests --- */

enum {
    LLM_REQ_CHAT = 1,      /* LLM_SEC_MESSAGES: JSON array */
    LLM_REQ_TEXT,          /* LLM_SEC_PROMPT: UTF-8 text */
    LLM_REQ_TOKENS,        /* LLM_SEC_PROMPT: int32 token ids */
    LLM_REQ_TOKENIZE,      /* LLM_SEC_PROMPT: UTF-8 text */
    LLM_REQ_TOKENIZE_CHAT, /* LLM_SEC_MESSAGES */
    LLM_REQ_DETOKENIZE,    /* LLM_SEC_PROMPT: int32 token ids */
};

enum {
    LLM_SEC_PROMPT = 0,
    LLM_SEC_MESSAGES,    /* JSON array text */
    LLM_SEC_TOOLS,       /* JSON array text */
    LLM_SEC_KWARGS,      /* JSON object text: chat_template_kwargs */
    LLM_SEC_STOP,        /* repeated {u32 length, bytes} */
    LLM_SEC_STOP_TOKENS, /* int32 ids */
    LLM_SEC_LOGIT_BIAS,  /* repeated llm_bias_t */
    LLM_SEC_SALT,        /* any bytes: KV pages are shared under equal ones */
    LLM_SEC_TENANT,      /* any bytes: whose request it is; at most
                            LLM_TENANT_MAX */
    LLM_SEC_MAX
};

enum {
    LLM_F_ECHO = 1 << 0,              /* begin with the prompt's text */
    LLM_F_PARSE_SPECIAL = 1 << 1,     /* special tokens in the text count */
    LLM_F_ADD_SPECIAL = 1 << 2,       /* BOS/EOS as the model asks */
    LLM_F_GENERATION_PROMPT = 1 << 3, /* add_generation_prompt */
    LLM_F_CONTINUE_FINAL = 1 << 4,    /* continue_final_message */
    LLM_F_IGNORE_EOS = 1 << 5,
    LLM_F_INCLUDE_STOP = 1 << 6, /* include_stop_str_in_output */
    LLM_F_KEEP_SPECIAL = 1 << 7, /* skip_special_tokens: false */
    LLM_F_LOGPROBS = 1 << 8,     /* log-probabilities wanted */
    LLM_F_STREAM = 1 << 9,       /* deltas at once; else they may be held */
};

typedef struct {
    int32_t token;
    float bias;
} llm_bias_t;

/* Sampling parameters, checked by the module (ngx_http_llm_params.c), checked
 * again for range by llm_request_decode. */
typedef struct {
    float temperature;        /* 0: greedy */
    float top_p;              /* (0, 1] */
    float min_p;              /* [0, 1] */
    float repetition_penalty; /* > 0, 1: off */
    float presence_penalty;   /* [-2, 2] */
    float frequency_penalty;  /* [-2, 2] */
    int32_t top_k;            /* 0: off */
    int32_t max_tokens;       /* -1: whatever fits */
    int32_t min_tokens;
    int32_t top_logprobs; /* 0 … 20 */
    int32_t priority;     /* within a tenant, lower first */
    uint64_t seed;        /* always set: the module draws one if absent */
} llm_params_t;

typedef struct {
    uint32_t off; /* from the start of the request area */
    uint32_t len;
} llm_section_t;

enum { LLM_TENANT_MAX = 255 };

#define LLM_WEIGHT_MIN 0.01
#define LLM_WEIGHT_MAX 1000.0

/* How a request stands in line.  Slots that carry one request of a client
 * (several prompts, several answers) are submitted one behind the other: the
 * first has their number, the others 0, and are taken or refused with it. */
typedef struct {
    uint32_t max_queue; /* sequences that may wait; 0: no limit */
    uint32_t n_choices;
    double weight; /* the tenant's share, LLM_WEIGHT_MIN … LLM_WEIGHT_MAX */
} llm_turn_t;

typedef struct {
    uint32_t kind;  /* LLM_REQ_… */
    uint32_t flags; /* LLM_F_… */
    llm_turn_t turn;
    llm_params_t params;
    llm_section_t section[LLM_SEC_MAX];
} llm_request_t;

/* Builds a request in place.  area: the slot's request area, or any buffer of
 * the same capacity. */
typedef struct {
    uint8_t *area;
    uint32_t cap;
    uint32_t len;
    bool overflow; /* something did not fit: answer 413 */
    /* the section being written, where it began, and those begun so far */
    uint32_t section;
    uint32_t start;
    uint32_t seen;
} llm_request_writer_t;


void llm_request_begin(llm_request_writer_t *w, uint8_t *area, uint32_t cap,
                       uint32_t kind, uint32_t flags,
                       const llm_params_t *params);

/* Instead of what llm_request_begin sets: no limit, one choice, weight 1. */
void llm_request_turn(llm_request_writer_t *w, const llm_turn_t *turn);

/* Starts section sec, 8-aligned; bytes follow by llm_request_add until the
 * next llm_request_section or llm_request_end.  Each section once. */
void llm_request_section(llm_request_writer_t *w, uint32_t sec);
void llm_request_add(llm_request_writer_t *w, const void *bytes, size_t len);

/* Total length, or 0 when it did not fit. */
uint32_t llm_request_end(llm_request_writer_t *w);

/* Checks kind, ranges (also NaN), section bounds and alignment, that int32 and
 * bias sections are whole, that stop strings parse, the tenant's length.  0,
 * or -1 with a static sentence in *why.  On success *req points into area. */
int llm_request_decode(const uint8_t *area, uint32_t len,
                       const llm_request_t **req, const char **why);

/* Walks LLM_SEC_STOP: sets text and len of the next stop string, false at the
 * end.  *pos starts at 0. */
bool llm_stop_next(const uint8_t *sec, uint32_t sec_len, uint32_t *pos,
                   const char **text, uint32_t *len);


/* --- records --- */

enum {
    LLM_REC_START = 1, /* the request was admitted; precedes any delta */
    LLM_REC_DELTA,
    LLM_REC_DONE,
    LLM_REC_ERROR,
};

/* What a delta's text is. */
enum { LLM_DELTA_CONTENT = 0, LLM_DELTA_PROMPT /* echo */ };

enum { LLM_TOP_MAX = 20 };

/* Largest record payload; writers split text so that it is kept.  One token
 * with 20 alternatives takes at most 21 × (12 + 256) bytes. */
enum { LLM_RECORD_MAX = 8192, LLM_TOKEN_BYTES_MAX = 256 };

typedef struct {
    uint32_t prompt_tokens;
    uint32_t cached_tokens;
    uint32_t max_tokens; /* after clamping to the context */
} llm_start_t;

typedef struct {
    uint32_t kind;       /* LLM_DELTA_… */
    uint32_t n_tokens;   /* generated tokens this delta accounts for */
    const uint8_t *text; /* whole UTF-8 characters; may be empty */
    uint32_t text_len;
    uint32_t n_logprobs; /* token entries in logprobs */
    const uint8_t *logprobs;
    uint32_t logprobs_len;
} llm_delta_t;

/* One token's log-probability: raw, natural logarithm.  NaN: not defined (the
 * first prompt token of an echo). */
typedef struct {
    int32_t token;
    float logprob;
    const uint8_t *bytes; /* the token's bytes, perhaps not UTF-8 */
    uint32_t len;         /* at most LLM_TOKEN_BYTES_MAX */
} llm_token_logprob_t;

typedef struct {
    llm_token_logprob_t chosen;
    uint32_t n_top; /* ≤ LLM_TOP_MAX, best first */
    llm_token_logprob_t top[LLM_TOP_MAX];
} llm_logprob_t;

enum { LLM_STOP_NONE = 0, LLM_STOP_TOKEN, LLM_STOP_STRING };

typedef struct {
    uint32_t finish;    /* LLM_FINISH_… */
    uint32_t stop_kind; /* LLM_STOP_…: what matched, for stop_reason */
    int32_t stop_value; /* token id, or index of the stop string */
    uint32_t prompt_tokens;
    uint32_t completion_tokens; /* for tokenize: tokens in the slot's log */
    uint32_t cached_tokens;
    uint32_t queue_us; /* submit → first scheduled */
    uint32_t ttft_us;  /* submit → first token */
    uint32_t total_us; /* submit → done */
    uint32_t preemptions;
    uint32_t drafted_tokens;  /* of speculative decoding: verified, */
    uint32_t accepted_tokens; /* and right; at most as many */
} llm_done_t;

/* Classes of failure; the module maps them to HTTP statuses. */
enum {
    LLM_FAIL_BADREQ = 1, /* 400 */
    LLM_FAIL_CONTEXT,    /* 400 context_length_exceeded */
    LLM_FAIL_BUSY,       /* 503, try later */
    LLM_FAIL_INTERNAL,   /* 500 */
    LLM_FAIL_DRAINING,   /* 503: the engine is going away */
};

typedef struct {
    uint32_t fail;        /* LLM_FAIL_… */
    uint32_t retry_after; /* seconds, 0: not known */
    char param[32];       /* field at fault or "" */
    char text[480];       /* one sentence */
} llm_fail_t;

/* A decoded record; pointers lead into the buffer that was decoded. */
typedef struct {
    uint32_t type; /* LLM_REC_… */
    union {
        llm_start_t start;
        llm_delta_t delta;
        llm_done_t done;
        llm_fail_t fail;
    } u;
} llm_record_t;


/* Each writes one payload into out (LLM_RECORD_MAX bytes are always enough for
 * start, done and error) and returns its length, 0 when out_cap is too
 * small. */
uint32_t llm_encode_start(uint8_t *out, uint32_t out_cap,
                          const llm_start_t *start);
uint32_t llm_encode_delta(uint8_t *out, uint32_t out_cap,
                          const llm_delta_t *delta);
uint32_t llm_encode_done(uint8_t *out, uint32_t out_cap,
                         const llm_done_t *done);
uint32_t llm_encode_fail(uint8_t *out, uint32_t out_cap,
                         const llm_fail_t *fail);

/* Appends one logprob entry to out; its length, or 0. */
uint32_t llm_encode_logprob(uint8_t *out, uint32_t out_cap,
                            const llm_logprob_t *entry);

/* 0, or -1 when the payload is not a whole, well-formed record. */
int llm_record_decode(const uint8_t *payload, uint32_t len,
                      llm_record_t *record);

/* Walks delta->logprobs; false at the end (llm_record_decode has checked that
 * all n_logprobs entries parse).  *pos starts at 0. */
bool llm_logprob_next(const llm_delta_t *delta, uint32_t *pos,
                      llm_logprob_t *entry);

#endif /* ENGINE_IPC_MSG_H */
