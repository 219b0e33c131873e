/*
 * Records, see msg.h: the engine writes them to a slot's output ring, the
 * module copies them out and decodes them.
 *
 * A record is its type followed by 32-bit words and bytes in the order of the
 * encode functions, unaligned, in the machine's byte order: both processes run
 * on the same machine.  A decoder accepts exactly what an encoder can write:
 * a length that does not add up, or a value out of its range, is an error.
 */

#include <string.h>

#include "engine/ipc/msg.h"

_Static_assert(sizeof(float) == sizeof(uint32_t), "floats travel as words");


/* --- a cursor over words and bytes, for writing and for reading --- */

typedef struct {
    uint8_t *p;
    uint32_t left;
    bool bad; /* it did not fit */
} out_t;

typedef struct {
    const uint8_t *p;
    uint32_t left;
    bool bad; /* it ended early */
} in_t;


static void
put_bytes(out_t *o, const void *bytes, uint32_t len)
{
    if (o->bad || len > o->left) {
        o->bad = true;
        return;
    }

    if (len > 0) {
        memcpy(o->p, bytes, len);
        o->p += len;
        o->left -= len;
    }
}


static void
put_u32(out_t *o, uint32_t x)
{
    put_bytes(o, &x, sizeof(x));
}


/* Points at the next len bytes, or at nothing when the buffer ends early. */
static const uint8_t *
get_bytes(in_t *in, uint32_t len)
{
    const uint8_t *p = in->p;

    if (in->bad || len > in->left) {
        in->bad = true;
        return NULL;
    }

    in->p += len;
    in->left -= len;

    return p;
}


static uint32_t
get_u32(in_t *in)
{
    uint32_t x = 0;
    const uint8_t *p = get_bytes(in, sizeof(x));

    if (p != NULL) {
        memcpy(&x, p, sizeof(x));
    }

    return x;
}


static out_t
out_over(uint8_t *out, uint32_t cap)
{
    return (out_t){ out, cap < LLM_RECORD_MAX ? cap : LLM_RECORD_MAX, false };
}


static uint32_t
out_len(const out_t *o, const uint8_t *start)
{
    return o->bad ? 0 : (uint32_t) (o->p - start);
}


/* --- writing records --- */

uint32_t
llm_encode_start(uint8_t *out, uint32_t out_cap, const llm_start_t *start)
{
    out_t o = out_over(out, out_cap);

    put_u32(&o, LLM_REC_START);
    put_u32(&o, start->prompt_tokens);
    put_u32(&o, start->cached_tokens);
    put_u32(&o, start->max_tokens);

    return out_len(&o, out);
}


uint32_t
llm_encode_delta(uint8_t *out, uint32_t out_cap, const llm_delta_t *delta)
{
    out_t o = out_over(out, out_cap);

    put_u32(&o, LLM_REC_DELTA);
    put_u32(&o, delta->kind);
    put_u32(&o, delta->n_tokens);
    put_u32(&o, delta->text_len);
    put_u32(&o, delta->n_logprobs);
    put_u32(&o, delta->logprobs_len);
    put_bytes(&o, delta->text, delta->text_len);
    put_bytes(&o, delta->logprobs, delta->logprobs_len);

    return out_len(&o, out);
}


uint32_t
llm_encode_done(uint8_t *out, uint32_t out_cap, const llm_done_t *done)
{
    out_t o = out_over(out, out_cap);

    put_u32(&o, LLM_REC_DONE);
    put_u32(&o, done->finish);
    put_u32(&o, done->stop_kind);
    put_u32(&o, (uint32_t) done->stop_value);
    put_u32(&o, done->prompt_tokens);
    put_u32(&o, done->completion_tokens);
    put_u32(&o, done->cached_tokens);
    put_u32(&o, done->queue_us);
    put_u32(&o, done->ttft_us);
    put_u32(&o, done->total_us);
    put_u32(&o, done->preemptions);
    put_u32(&o, done->drafted_tokens);
    put_u32(&o, done->accepted_tokens);

    return out_len(&o, out);
}


uint32_t
llm_encode_fail(uint8_t *out, uint32_t out_cap, const llm_fail_t *fail)
{
    out_t o = out_over(out, out_cap);
    uint32_t param_len = strnlen(fail->param, sizeof(fail->param) - 1);
    uint32_t text_len = strnlen(fail->text, sizeof(fail->text) - 1);

    put_u32(&o, LLM_REC_ERROR);
    put_u32(&o, fail->fail);
    put_u32(&o, fail->retry_after);
    put_u32(&o, param_len);
    put_u32(&o, text_len);
    put_bytes(&o, fail->param, param_len);
    put_bytes(&o, fail->text, text_len);

    return out_len(&o, out);
}


static void
put_token(out_t *o, const llm_token_logprob_t *t)
{
    uint32_t bits;

    memcpy(&bits, &t->logprob, sizeof(bits));

    put_u32(o, (uint32_t) t->token);
    put_u32(o, bits);
    put_u32(o, t->len);
    put_bytes(o, t->bytes, t->len);

    if (t->len > LLM_TOKEN_BYTES_MAX) {
        o->bad = true;
    }
}


uint32_t
llm_encode_logprob(uint8_t *out, uint32_t out_cap, const llm_logprob_t *entry)
{
    out_t o = out_over(out, out_cap);

    if (entry->n_top > LLM_TOP_MAX) {
        return 0;
    }

    put_u32(&o, entry->n_top);
    put_token(&o, &entry->chosen);

    for (uint32_t i = 0; i < entry->n_top; i++) {
        put_token(&o, &entry->top[i]);
    }

    return out_len(&o, out);
}


/* --- reading records --- */

static void
get_token(in_t *in, llm_token_logprob_t *t)
{
    uint32_t bits;

    t->token = (int32_t) get_u32(in);
    bits = get_u32(in);
    t->len = get_u32(in);

    memcpy(&t->logprob, &bits, sizeof(bits));

    if (t->len > LLM_TOKEN_BYTES_MAX) {
        in->bad = true;
    }

    t->bytes = get_bytes(in, t->len);
}


bool
llm_logprob_next(const llm_delta_t *delta, uint32_t *pos, llm_logprob_t *entry)
{
    if (*pos >= delta->logprobs_len) {
        return false;
    }

    in_t in = { delta->logprobs + *pos, delta->logprobs_len - *pos, false };

    entry->n_top = get_u32(&in);

    if (in.bad || entry->n_top > LLM_TOP_MAX) {
        return false;
    }

    get_token(&in, &entry->chosen);

    for (uint32_t i = 0; i < entry->n_top; i++) {
        get_token(&in, &entry->top[i]);
    }

    if (in.bad) {
        return false;
    }

    *pos = delta->logprobs_len - in.left;

    return true;
}


/* Exactly n_logprobs entries, and nothing after them. */
static bool
logprobs_whole(const llm_delta_t *delta)
{
    llm_logprob_t entry;
    uint32_t pos = 0;
    uint32_t n = 0;

    while (llm_logprob_next(delta, &pos, &entry)) {
        n++;
    }

    return pos == delta->logprobs_len && n == delta->n_logprobs;
}


static bool
decode_delta(in_t *in, llm_delta_t *delta)
{
    delta->kind = get_u32(in);
    delta->n_tokens = get_u32(in);
    delta->text_len = get_u32(in);
    delta->n_logprobs = get_u32(in);
    delta->logprobs_len = get_u32(in);
    delta->text = get_bytes(in, delta->text_len);
    delta->logprobs = get_bytes(in, delta->logprobs_len);

    return !in->bad && delta->kind <= LLM_DELTA_PROMPT && logprobs_whole(delta);
}


static bool
decode_done(in_t *in, llm_done_t *done)
{
    done->finish = get_u32(in);
    done->stop_kind = get_u32(in);
    done->stop_value = (int32_t) get_u32(in);
    done->prompt_tokens = get_u32(in);
    done->completion_tokens = get_u32(in);
    done->cached_tokens = get_u32(in);
    done->queue_us = get_u32(in);
    done->ttft_us = get_u32(in);
    done->total_us = get_u32(in);
    done->preemptions = get_u32(in);
    done->drafted_tokens = get_u32(in);
    done->accepted_tokens = get_u32(in);

    return !in->bad && done->finish < LLM_FINISH_MAX
           && done->stop_kind <= LLM_STOP_STRING
           && done->accepted_tokens <= done->drafted_tokens;
}


/* Copies a string of len bytes into to[cap] and terminates it; it must fit and
 * hold no zero byte. */
static bool
get_string(in_t *in, uint32_t len, char *to, uint32_t cap)
{
    const uint8_t *p = get_bytes(in, len);

    if (p == NULL || len >= cap || memchr(p, 0, len) != NULL) {
        return false;
    }

    memcpy(to, p, len);
    to[len] = '\0';

    return true;
}


static bool
decode_fail(in_t *in, llm_fail_t *fail)
{
    uint32_t param_len, text_len;

    fail->fail = get_u32(in);
    fail->retry_after = get_u32(in);
    param_len = get_u32(in);
    text_len = get_u32(in);

    return get_string(in, param_len, fail->param, sizeof(fail->param))
           && get_string(in, text_len, fail->text, sizeof(fail->text))
           && fail->fail >= LLM_FAIL_BADREQ && fail->fail <= LLM_FAIL_DRAINING;
}


int
llm_record_decode(const uint8_t *payload, uint32_t len, llm_record_t *record)
{
    in_t in = { payload, len, len > LLM_RECORD_MAX };
    bool good = false;

    record->type = get_u32(&in);

    switch (record->type) {
    case LLM_REC_START:
        record->u.start.prompt_tokens = get_u32(&in);
        record->u.start.cached_tokens = get_u32(&in);
        record->u.start.max_tokens = get_u32(&in);
        good = true;
        break;

    case LLM_REC_DELTA:
        good = decode_delta(&in, &record->u.delta);
        break;

    case LLM_REC_DONE:
        good = decode_done(&in, &record->u.done);
        break;

    case LLM_REC_ERROR:
        good = decode_fail(&in, &record->u.fail);
        break;

    default:
        break;
    }

    return good && !in.bad && in.left == 0 ? 0 : -1;
}
