/*
 * Sampled tokens → records.
 *
 * Text leaves as soon as it cannot be the beginning of a stop string any more;
 * a request that does not stream may hold it longer, to save wake-ups.  What
 * ends a request is looked at in this order: end-of-generation and stop
 * tokens, stop strings, length.
 */

#include "engine/emit.h"

#include <math.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/utf8.h"
#include "engine/speculate.h"
#include "engine/tally.h"

enum {
    HOLD_BYTES = 2048,    /* text a request that does not stream may hold */
    LOGPROB_BYTES = 2048, /* log-probabilities that force a delta */
    TEXT_BYTES = 4096,    /* text of one record without log-probabilities */
    TEXT_WITH_LOGPROBS = 256,
};


/* Whole or not at all: whoever reads the length goes by it. */
static void
emit_record(request_t *req, const uint8_t *payload, uint32_t len)
{
    if (buf_room(&req->out, sizeof(len) + len) != NULL) {
        buf_add(&req->out, &len, sizeof(len));
        buf_add(&req->out, payload, len);
    }
}


/* Has something been lost for want of memory?  Then the request fails: an
 * answer with a hole is worse than none. */
static bool
emit_starved(engine_t *engine, request_t *req)
{
    if (!req->out.failed && !req->text.failed && !req->logprobs.failed) {
        return false;
    }

    emit_fail(engine, req, LLM_FAIL_INTERNAL, NULL,
              "The server has no memory for this response.");

    return true;
}


static void
emit_delta(request_t *req, const llm_delta_t *delta)
{
    uint8_t payload[LLM_RECORD_MAX];

    const uint32_t len = llm_encode_delta(payload, sizeof(payload), delta);

    llm_assert(len > 0);
    emit_record(req, payload, len);
}


/* Text at once, cut into records at character boundaries. */
static void
emit_text(request_t *req, uint32_t kind, const char *text, size_t len)
{
    while (len > 0) {
        size_t n = len < TEXT_BYTES ? len : TEXT_BYTES;

        if (n < len) {
            n = utf8_complete((const uint8_t *) text, n);
        }

        emit_delta(req, &(llm_delta_t){ .kind = kind,
                                        .text = (const uint8_t *) text,
                                        .text_len = (uint32_t) n });
        text += n;
        len -= n;
    }
}


/* Sends the safe text and the log-probabilities that wait. */
static void
emit_flush(request_t *req, uint32_t kind)
{
    size_t len = req->text_safe;
    const char *text = req->text.data;

    if ((len == 0 && req->n_logprobs == 0) || req->logprobs.failed) {
        return;
    }

    const size_t max = req->n_logprobs > 0 ? TEXT_WITH_LOGPROBS : TEXT_BYTES;

    if (len > max) {
        const size_t head = utf8_complete((const uint8_t *) text, len - max);
        emit_text(req, kind, text, head);
        text += head;
        len -= head;
    }

    emit_delta(req,
               &(llm_delta_t){ .kind = kind,
                               .n_tokens = req->n_pending,
                               .text = (const uint8_t *) text,
                               .text_len = (uint32_t) len,
                               .n_logprobs = req->n_logprobs,
                               .logprobs = (uint8_t *) req->logprobs.data,
                               .logprobs_len = (uint32_t) req->logprobs.len });

    if (req->text_safe > 0) {
        buf_consume(&req->text, req->text_safe);
    }

    buf_clear(&req->logprobs);
    req->text_safe = 0;
    req->n_logprobs = 0;
    req->n_pending = 0;
}


static void
fill_logprob(const tok_t *tok, int32_t token, float logprob,
             llm_token_logprob_t *out)
{
    size_t len;
    const char *bytes = tok_bytes(tok, token, &len);

    *out = (llm_token_logprob_t){
        .token = token,
        .logprob = logprob,
        .bytes = (const uint8_t *) bytes,
        .len =
            (uint32_t) (len < LLM_TOKEN_BYTES_MAX ? len : LLM_TOKEN_BYTES_MAX),
    };
}


static void
add_logprob(engine_t *engine, request_t *req, const samp_result_t *result)
{
    uint8_t bytes[LLM_RECORD_MAX];
    llm_logprob_t entry = { .n_top = (uint32_t) result->n_top };

    if (!(req->msg->flags & LLM_F_LOGPROBS)) {
        return;
    }

    fill_logprob(engine->tok, result->token, result->logprob, &entry.chosen);

    for (int i = 0; i < result->n_top; i++) {
        fill_logprob(engine->tok, result->top[i].token, result->top[i].logprob,
                     &entry.top[i]);
    }

    const uint32_t len = llm_encode_logprob(bytes, sizeof(bytes), &entry);

    llm_assert(len > 0);
    buf_add(&req->logprobs, bytes, len);
    req->n_logprobs++;
}


/* One token of an echoed prompt, as a delta of its own. */
static void
emit_prompt_token(engine_t *engine, request_t *req, const samp_result_t *result)
{
    detok_push(&req->detok, engine->tok, result->token, true, &req->text);
    req->text_safe = req->text.len;
    add_logprob(engine, req, result);
    emit_flush(req, LLM_DELTA_PROMPT);
    req->n_scored++;
}


/* START and the echoed prompt; written with the first result, so that what
 * fails earlier still has a status of its own. */
static void
emit_begin(engine_t *engine, request_t *req)
{
    uint8_t payload[LLM_RECORD_MAX];

    if (req->echoed) {
        return;
    }

    req->echoed = true;

    if (req->scheduled_ns != 0) {
        tally_prompt(engine, req);
    }

    const llm_start_t start = {
        .prompt_tokens = (uint32_t) req->seq.n_prompt,
        .cached_tokens = (uint32_t) req->seq.cached,
        .max_tokens = (uint32_t) req->max_tokens,
    };

    emit_record(req, payload,
                llm_encode_start(payload, sizeof(payload), &start));

    if (!(req->msg->flags & LLM_F_ECHO)) {
        return;
    }

    if (req->seq.want_prompt) {
        const samp_result_t first = { .token = req->seq.tokens[0],
                                      .logprob = NAN };
        emit_prompt_token(engine, req, &first);
        return;
    }

    buf_t text = { 0 };

    if (tok_decode(engine->tok, req->seq.tokens, req->seq.n_prompt, true, &text)
        == LLM_OK)
    {
        emit_text(req, LLM_DELTA_PROMPT, text.data, text.len);
    }

    req->out.failed |= text.failed;
    buf_fini(&text);
}


void
emit_prompt_score(engine_t *engine, request_t *req, int position,
                  const samp_result_t *result)
{
    if (req->finished) {
        return;
    }

    emit_begin(engine, req);

    /* a preempted sequence computes its prompt again */
    if (position >= req->n_scored) {
        emit_prompt_token(engine, req, result);
    }

    emit_starved(engine, req);
}


static bool
is_stop_token(const engine_t *engine, const request_t *req, int32_t token)
{
    for (int i = 0; i < req->n_stop_tokens; i++) {
        if (req->stop_tokens[i] == token) {
            return true;
        }
    }

    return !(req->msg->flags & LLM_F_IGNORE_EOS)
           && tok_is_eog(engine->tok, token);
}


/* How many bytes at the end of text may begin the stop string. */
static size_t
stop_begun(const stop_string_t *stop, const char *text, size_t len)
{
    size_t n = stop->len - 1 < len ? stop->len - 1 : len;

    while (n > 0 && memcmp(text + len - n, stop->text, n) != 0) {
        n--;
    }

    return n;
}


/* The earliest stop string in the held text: its index, or -1.  Otherwise
 * text_safe is set to what no stop string can reach back into.  What was safe
 * before is not looked at again: a request that does not stream still holds
 * it, and text from before min_tokens must not stop it later. */
static int
find_stop(request_t *req, size_t *at)
{
    const size_t from = req->text_safe, len = req->text.len - from;
    size_t begun = 0;
    int found = -1;

    req->text_safe = req->text.len;

    if (len == 0 || req->n_output < req->samp.min_tokens) {
        return -1;
    }

    const char *text = req->text.data + from;

    for (int i = 0; i < req->n_stops; i++) {
        const stop_string_t *stop = &req->stops[i];
        const char *hit = memmem(text, len, stop->text, stop->len);

        if (hit != NULL && (found == -1 || (size_t) (hit - text) < *at - from))
        {
            found = i;
            *at = from + (size_t) (hit - text);
        }
    }

    for (int i = 0; found == -1 && i < req->n_stops; i++) {
        const size_t n = stop_begun(&req->stops[i], text, len);

        begun = n > begun ? n : begun;
    }

    req->text_safe -= begun;

    return found;
}


static void
count_token(engine_t *engine, request_t *req, int32_t token)
{
    llm_assert(req->seq.n_tokens < req->seq.cap_tokens);

    req->seq.tokens[req->seq.n_tokens++] = token;
    req->n_output++;
    req->n_pending++;

    if (req->samp_state != NULL) {
        samp_state_add(req->samp_state, token, true);
    }

    tally_token(engine, req);

    if (engine->on_tokens != NULL) {
        engine->on_tokens(engine, req, &token, 1);
    }
}


void
emit_token(engine_t *engine, request_t *req, const samp_result_t *result)
{
    const int32_t token = result->token;
    const bool keep = (req->msg->flags & LLM_F_KEEP_SPECIAL) != 0;
    const bool include = (req->msg->flags & LLM_F_INCLUDE_STOP) != 0;
    size_t at = 0;

    if (req->finished) {
        return;
    }

    emit_begin(engine, req);
    count_token(engine, req, token);

    if (is_stop_token(engine, req, token)) {
        if (include) {
            detok_push(&req->detok, engine->tok, token, keep, &req->text);
            add_logprob(engine, req, result);
        }

        emit_finish(engine, req, LLM_FINISH_STOP, LLM_STOP_TOKEN, token);
        return;
    }

    detok_push(&req->detok, engine->tok, token, keep, &req->text);
    add_logprob(engine, req, result);

    const int stop = find_stop(req, &at);

    if (stop >= 0) {
        req->text.len = at + (include ? req->stops[stop].len : 0);
        req->detok = (detok_t){ 0 };
        emit_finish(engine, req, LLM_FINISH_STOP, LLM_STOP_STRING, stop);
        return;
    }

    if (req->n_output >= req->max_tokens) {
        emit_finish(engine, req, LLM_FINISH_LENGTH, LLM_STOP_NONE, 0);
        return;
    }

    if ((req->msg->flags & LLM_F_STREAM) || req->text_safe >= HOLD_BYTES
        || req->logprobs.len >= LOGPROB_BYTES)
    {
        emit_flush(req, LLM_DELTA_CONTENT);
    }

    emit_starved(engine, req);
}


static uint32_t
elapsed_us(uint64_t from, uint64_t to)
{
    const uint64_t us = to > from ? (to - from) / 1000 : 0;

    return us < UINT32_MAX ? (uint32_t) us : UINT32_MAX;
}


/* The end of every request: out of the scheduler, into the statistics. */
static void
emit_end(engine_t *engine, request_t *req, uint32_t finish)
{
    speculate_end(engine, req);

    if (req->queued) {
        sched_remove(engine->sched, &req->seq);
        req->queued = false;
    }

    engine->n_fresh -= req->fresh;
    engine->n_preparing -= req->preparer != NULL && !req->textual;
    req->fresh = false;

    req->finished = true;
    tally_end(engine, req, finish);
}


void
emit_finish(engine_t *engine, request_t *req, uint32_t finish,
            uint32_t stop_kind, int32_t stop_value)
{
    uint8_t payload[LLM_RECORD_MAX];

    if (req->finished) {
        return;
    }

    emit_begin(engine, req);
    detok_finish(&req->detok, &req->text);
    req->text_safe = req->text.len;
    emit_flush(req, LLM_DELTA_CONTENT);

    if (emit_starved(engine, req)) {
        return;
    }

    const llm_done_t done = {
        .finish = finish,
        .stop_kind = stop_kind,
        .stop_value = stop_value,
        .prompt_tokens = (uint32_t) req->seq.n_prompt,
        .completion_tokens = (uint32_t) req->n_output,
        .cached_tokens = (uint32_t) req->seq.cached,
        .queue_us = elapsed_us(req->from.submit_ns, req->scheduled_ns),
        .ttft_us = elapsed_us(req->from.submit_ns, req->first_ns),
        .total_us = elapsed_us(req->from.submit_ns, clock_now_ns()),
        .preemptions = (uint32_t) req->seq.preemptions,
        .drafted_tokens = req->n_drafted,
        .accepted_tokens = req->n_accepted,
    };

    emit_record(req, payload, llm_encode_done(payload, sizeof(payload), &done));

    if (!emit_starved(engine, req)) {
        emit_end(engine, req, finish);
    }
}


void
emit_fail(engine_t *engine, request_t *req, uint32_t fail, const char *param,
          const char *text)
{
    uint8_t payload[LLM_RECORD_MAX];
    llm_fail_t record = { .fail = fail };

    if (fail == LLM_FAIL_BUSY) {
        record.retry_after = rate_wait_s(&engine->rate, engine->n_fresh);
    }

    if (req->finished) {
        return;
    }

    strncpy(record.param, param ? param : "", sizeof(record.param) - 1);
    strncpy(record.text, text, sizeof(record.text) - 1);

    const uint32_t len = llm_encode_fail(payload, sizeof(payload), &record);

    emit_record(req, payload, len);

    /* what has not left gives way: intake reserved room for this record */
    if (req->out.failed) {
        buf_clear(&req->out);
        req->out_pos = 0;
        emit_record(req, payload, len);
    }

    emit_end(engine, req, LLM_FINISH_ERROR);
}


void
emit_abort(engine_t *engine, request_t *req)
{
    if (!req->finished) {
        emit_end(engine, req, LLM_FINISH_ABORT);
    }

    buf_clear(&req->out);
    req->out_pos = 0;
}
