/*
 * Requests, see msg.h: the module builds one in a slot's request area, the
 * engine copies it out and checks it.  Nothing here trusts a number that came
 * across: every offset, length and parameter is checked before it is used.
 */

#include <math.h>
#include <string.h>

#include "engine/ipc/msg.h"

#define LLM_F_ALL ((LLM_F_STREAM << 1) - 1)

/* int32_t prompts and llm_bias_t are read in place */
enum { SECTION_ALIGN = 8 };

_Static_assert(sizeof(llm_request_t) % SECTION_ALIGN == 0, "first section");
_Static_assert(sizeof(llm_bias_t) == 8, "bias entries are packed");
_Static_assert(sizeof(llm_turn_t) == 16, "no bytes of chance cross over");


/* --- writing a request --- */

/* Through memcpy: the area may be shared memory or a buffer of any
 * alignment. */
static void
section_close(llm_request_writer_t *w)
{
    if (w->section >= LLM_SEC_MAX) {
        return;
    }

    llm_section_t s = { .off = w->start, .len = w->len - w->start };

    memcpy(w->area + offsetof(llm_request_t, section) + w->section * sizeof(s),
           &s, sizeof(s));

    w->section = LLM_SEC_MAX;
}


void
llm_request_begin(llm_request_writer_t *w, uint8_t *area, uint32_t cap,
                  uint32_t kind, uint32_t flags, const llm_params_t *params)
{
    llm_request_t req;

    memset(&req, 0, sizeof(req));
    req.kind = kind;
    req.flags = flags;
    req.turn = (llm_turn_t){ .n_choices = 1, .weight = 1 };
    req.params = *params;

    w->area = area;
    w->cap = cap;
    w->len = 0;
    w->overflow = false;
    w->section = LLM_SEC_MAX;
    w->start = 0;
    w->seen = 0;

    if (cap < sizeof(req)) {
        w->overflow = true;
        return;
    }

    memcpy(area, &req, sizeof(req));
    w->len = sizeof(req);
}


void
llm_request_turn(llm_request_writer_t *w, const llm_turn_t *turn)
{
    if (!w->overflow) {
        memcpy(w->area + offsetof(llm_request_t, turn), turn, sizeof(*turn));
    }
}


void
llm_request_section(llm_request_writer_t *w, uint32_t sec)
{
    if (w->overflow) {
        return;
    }

    section_close(w);

    uint32_t pad = -w->len & (SECTION_ALIGN - 1);

    if (sec >= LLM_SEC_MAX || (w->seen & (1u << sec)) || pad > w->cap - w->len)
    {
        w->overflow = true;
        return;
    }

    memset(w->area + w->len, 0, pad);
    w->len += pad;

    w->section = sec;
    w->seen |= 1u << sec;
    w->start = w->len;
}


void
llm_request_add(llm_request_writer_t *w, const void *bytes, size_t len)
{
    if (w->overflow) {
        return;
    }

    if (w->section >= LLM_SEC_MAX || len > w->cap - w->len) {
        w->overflow = true;
        return;
    }

    if (len > 0) {
        memcpy(w->area + w->len, bytes, len);
        w->len += len;
    }
}


uint32_t
llm_request_end(llm_request_writer_t *w)
{
    if (w->overflow) {
        return 0;
    }

    section_close(w);

    return w->len;
}


/* --- checking a request --- */

/* A NaN fails both comparisons, an infinity one of them. */
static bool
in_range(float x, float least, float most)
{
    return x >= least && x <= most;
}


static const char *
check_params(const llm_params_t *p)
{
    const float big = 3.0e38f; /* any finite value */

    if (!in_range(p->temperature, 0, big)) {
        return "temperature must be a number not below 0";
    }

    if (!in_range(p->top_p, 0, 1) || p->top_p == 0) {
        return "top_p must be above 0 and at most 1";
    }

    if (!in_range(p->min_p, 0, 1)) {
        return "min_p must be between 0 and 1";
    }

    if (!in_range(p->repetition_penalty, 0, big) || p->repetition_penalty == 0)
    {
        return "repetition_penalty must be a number above 0";
    }

    if (!in_range(p->presence_penalty, -2, 2)) {
        return "presence_penalty must be between -2 and 2";
    }

    if (!in_range(p->frequency_penalty, -2, 2)) {
        return "frequency_penalty must be between -2 and 2";
    }

    if (p->top_k < 0) {
        return "top_k must not be below 0";
    }

    if (p->max_tokens < -1) {
        return "max_tokens must not be below -1";
    }

    if (p->min_tokens < 0) {
        return "min_tokens must not be below 0";
    }

    if (p->top_logprobs < 0 || p->top_logprobs > LLM_TOP_MAX) {
        return "top_logprobs must be between 0 and 20";
    }

    return NULL;
}


static const char *
check_turn(const llm_turn_t *turn)
{
    /* a NaN fails both comparisons */
    if (!(turn->weight >= LLM_WEIGHT_MIN && turn->weight <= LLM_WEIGHT_MAX)) {
        return "the tenant's weight is out of range";
    }

    return NULL;
}


static const char *
check_sections(const llm_request_t *req, uint32_t len)
{
    for (int i = 0; i < LLM_SEC_MAX; i++) {
        const llm_section_t *s = &req->section[i];

        if (s->off == 0 && s->len == 0) {
            continue; /* absent */
        }

        if (s->off < sizeof(llm_request_t) || s->off > len
            || s->len > len - s->off) {
            return "a section lies outside the request";
        }

        if (s->off % SECTION_ALIGN != 0) {
            return "a section is not aligned";
        }
    }

    return NULL;
}


static const char *
check_stops(const uint8_t *sec, uint32_t sec_len)
{
    uint32_t pos = 0;
    uint32_t len;
    const char *text;

    while (llm_stop_next(sec, sec_len, &pos, &text, &len)) {
        if (len == 0) {
            return "a stop string is empty";
        }
    }

    return pos == sec_len ? NULL : "the stop strings do not parse";
}


static const char *
check_bias(const uint8_t *sec, uint32_t sec_len)
{
    llm_bias_t bias;

    if (sec_len % sizeof(bias) != 0) {
        return "the logit bias is not whole";
    }

    for (uint32_t pos = 0; pos < sec_len; pos += sizeof(bias)) {
        memcpy(&bias, sec + pos, sizeof(bias));

        if (!isfinite(bias.bias)) {
            return "a logit bias is not a finite number";
        }
    }

    return NULL;
}


static const char *
check_contents(const uint8_t *area, const llm_request_t *req)
{
    const llm_section_t *s = req->section;
    const char *why;

    switch (req->kind) {
    case LLM_REQ_CHAT:
    case LLM_REQ_TOKENIZE_CHAT:
        if (s[LLM_SEC_MESSAGES].len == 0) {
            return "the messages are missing";
        }
        break;

    case LLM_REQ_TOKENS:
    case LLM_REQ_DETOKENIZE:
        if (s[LLM_SEC_PROMPT].len % sizeof(int32_t) != 0) {
            return "the prompt tokens are not whole";
        }
        break;

    default:
        break;
    }

    if (s[LLM_SEC_STOP_TOKENS].len % sizeof(int32_t) != 0) {
        return "the stop tokens are not whole";
    }

    if (s[LLM_SEC_TENANT].len > LLM_TENANT_MAX) {
        return "the tenant's name is too long";
    }

    why = check_stops(area + s[LLM_SEC_STOP].off, s[LLM_SEC_STOP].len);

    if (why == NULL) {
        why = check_bias(area + s[LLM_SEC_LOGIT_BIAS].off,
                         s[LLM_SEC_LOGIT_BIAS].len);
    }

    return why;
}


int
llm_request_decode(const uint8_t *area, uint32_t len, const llm_request_t **req,
                   const char **why)
{
    if (len < sizeof(llm_request_t)) {
        *why = "the request is too short";
        return -1;
    }

    if ((uintptr_t) area % SECTION_ALIGN != 0) {
        *why = "the request's buffer is not aligned";
        return -1;
    }

    const llm_request_t *r = (const llm_request_t *) (const void *) area;

    *why = NULL;

    if (r->kind < LLM_REQ_CHAT || r->kind > LLM_REQ_DETOKENIZE) {
        *why = "the kind of request is unknown";

    } else if (r->flags & ~(uint32_t) LLM_F_ALL) {
        *why = "a flag of the request is unknown";
    }

    if (*why == NULL) {
        *why = check_params(&r->params);
    }

    if (*why == NULL) {
        *why = check_turn(&r->turn);
    }

    if (*why == NULL) {
        *why = check_sections(r, len);
    }

    if (*why == NULL) {
        *why = check_contents(area, r);
    }

    if (*why != NULL) {
        return -1;
    }

    *req = r;

    return 0;
}


bool
llm_stop_next(const uint8_t *sec, uint32_t sec_len, uint32_t *pos,
              const char **text, uint32_t *len)
{
    uint32_t n;

    if (*pos > sec_len || sec_len - *pos < sizeof(n)) {
        return false;
    }

    memcpy(&n, sec + *pos, sizeof(n));

    if (n > sec_len - *pos - sizeof(n)) {
        return false;
    }

    *text = (const char *) sec + *pos + sizeof(n);
    *len = n;
    *pos += sizeof(n) + n;

    return true;
}
