/*
 * Requests for a tiny model on the emulated GPU, and their tokens and
 * log-probabilities, for the tests that compare bits.
 */

#ifndef T_UNIT_CUDA_ASK_H
#define T_UNIT_CUDA_ASK_H

#include "t/unit/engine_tiny.h"

enum { N_ASKED = 6, N_WANTED = 24 };

static const char *const asked[N_ASKED] = {
    "a",   "the cat sat on the mat and then",
    "b c", "one two three four five six seven eight nine ten eleven",
    "zz",  "the cat sat on the mat and left"
};


static int n_wanted = N_WANTED; /* tokens of each answer */


static inline request_t *
submit(engine_t *engine, int i)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_LOGPROBS | LLM_F_STREAM);

    a.params.temperature = i % 2 == 0 ? 0.0f : 1.0f;
    a.params.seed = 10 + (uint64_t) i;
    a.params.max_tokens = n_wanted;
    a.params.min_tokens = n_wanted;

    return ask_text(engine, &a, asked[i]);
}


/* Tokens and log-probabilities, one after the other. */
static inline void
answer_of(const request_t *req, buf_t *out)
{
    llm_record_t record;

    assert_true(req->finished);

    for (size_t pos = 0; next_record(req, &pos, &record);) {
        llm_logprob_t entry;
        uint32_t at = 0;

        while (record.type == LLM_REC_DELTA
               && llm_logprob_next(&record.u.delta, &at, &entry))
        {
            buf_add(out, &entry.chosen.token, sizeof(entry.chosen.token));
            buf_add(out, &entry.chosen.logprob, sizeof(entry.chosen.logprob));
        }
    }

    assert_int_equal(out->len, n_wanted * 8);
}


/* The request has answered what is wanted, and goes. */
static inline void
assert_answer(request_t *req, const buf_t *want)
{
    buf_t got = { 0 };

    answer_of(req, &got);
    assert_memory_equal(got.data, want->data, want->len);
    buf_fini(&got);
    request_destroy(req);
}


/* A start on the device, with one more setting or NULL, that fails, as *err
 * says. */
static inline void
refused(const char *device, const char *setting, llm_err_t *err)
{
    char path[64];
    engine_conf_t conf;
    engine_t *engine = NULL;

    tiny_file(path);
    engine_conf_init(&conf);
    conf.model = path;
    conf.device = device;
    conf.max_model_len = TINY_CTX;

    if (setting != NULL) {
        assert_int_equal(engine_conf_set(&conf, setting, err), LLM_OK);
    }

    assert_int_not_equal(engine_open(&conf, &engine, err), LLM_OK);
    assert_null(engine);
    unlink(path);
}

#endif /* T_UNIT_CUDA_ASK_H */
