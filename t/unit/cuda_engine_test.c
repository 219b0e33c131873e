/*
 * The engine over the CUDA backend, emulated (or a GPU's: TEST_CUDA=gpu), with
 * a real model: four requests alone, then all at once with a shared prefix and
 * so few pages that one is preempted.  Tokens and log-probabilities must be
 * the same bit for bit.  Beside it, how near the CPU backend is.
 *
 * Needs LLM_TEST_MODEL.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "engine/base/log.h"
#include "engine/emit.h"
#include "engine/engine.h"
#include "engine/intake.h"

enum { N_REQUESTS = 4, N_TOKENS = 16, MAX_LEN = 64 };

typedef struct {
    int n;
    int32_t token[N_TOKENS];
    float logprob[N_TOKENS];
} answer_t;

/* more than a page of 16 tokens, then what is each one's own */
static const char prefix[] = "The old lighthouse keeper looked out over the "
                             "grey sea and counted, one by one, the small "
                             "wooden ships that";

static const char *const tails[N_REQUESTS] = {
    " came home", " were lost in the storm of", " sailed", " had never"
};

static uint8_t area[4096];
static answer_t alone[N_REQUESTS], together[N_REQUESTS], cpu[N_REQUESTS];


static uint32_t
write_request(int i)
{
    llm_request_writer_t w;
    const llm_params_t params = {
        .temperature = i % 2 == 0 ? 0.0f : 0.8f,
        .top_p = 1.0f,
        .repetition_penalty = 1.0f,
        .max_tokens = N_TOKENS,
        .min_tokens = N_TOKENS,
        .top_logprobs = 1,
        .seed = 7 + (uint64_t) i,
    };

    llm_request_begin(&w, area, sizeof(area), LLM_REQ_TEXT,
                      LLM_F_LOGPROBS | LLM_F_STREAM | LLM_F_ADD_SPECIAL,
                      &params);
    llm_request_section(&w, LLM_SEC_PROMPT);
    llm_request_add(&w, prefix, sizeof(prefix) - 1);
    llm_request_add(&w, tails[i], strlen(tails[i]));

    return llm_request_end(&w);
}


static void
read_answer(request_t *req, answer_t *answer)
{
    memset(answer, 0, sizeof(*answer));

    for (size_t pos = 0; pos < req->out.len;) {
        llm_record_t record;
        llm_logprob_t entry;
        uint32_t len, at = 0;

        memcpy(&len, req->out.data + pos, sizeof(len));
        assert_int_equal(
            llm_record_decode((uint8_t *) req->out.data + pos + sizeof(len),
                              len, &record),
            0);
        pos += sizeof(len) + len;
        assert_int_not_equal(record.type, LLM_REC_ERROR);

        while (record.type == LLM_REC_DELTA
               && llm_logprob_next(&record.u.delta, &at, &entry))
        {
            assert_true(answer->n < N_TOKENS);
            answer->token[answer->n] = entry.chosen.token;
            answer->logprob[answer->n++] = entry.chosen.logprob;
        }
    }

    assert_int_equal(answer->n, N_TOKENS);
}


static engine_t *
open_engine(const char *device, const char *memory)
{
    engine_conf_t conf;
    engine_t *engine;
    llm_err_t err;
    char word[64];

    engine_conf_init(&conf);
    conf.model = getenv("LLM_TEST_MODEL");
    conf.device = (char *) (uintptr_t) device;
    conf.max_num_batched_tokens = MAX_LEN;
    conf.max_num_seqs = N_REQUESTS;
    conf.max_model_len = MAX_LEN;
    conf.output_ratio = -1; /* or nobody would be preempted */
    conf.log_level = LOG_WARN;
    snprintf(word, sizeof(word), "kv_cache_memory=%s", memory);
    assert_int_equal(engine_conf_set(&conf, word, &err), LLM_OK);

    if (engine_open(&conf, &engine, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return engine;
}


static request_t *
submit(engine_t *engine, int i)
{
    const request_origin_t from = { .submit_ns = 1 };
    request_t *req = intake_request(engine, area, write_request(i), &from);

    assert_non_null(req);

    return req;
}


static void
run_alone(const char *device, answer_t *answers)
{
    for (int i = 0; i < N_REQUESTS; i++) {
        engine_t *engine = open_engine(device, "4m");
        request_t *req = submit(engine, i);

        while (!req->finished) {
            assert_true(engine_step(engine));
        }

        read_answer(req, &answers[i]);
        request_destroy(req);
        engine_close(engine);
    }
}


static void
test_together(void **unused)
{
    /* 6 pages: the prefix has one, each request begins with one or two more,
     * and each wants a third */
    engine_t *engine = open_engine("cuda", "2200k");
    request_t *reqs[N_REQUESTS];

    (void) unused;

    for (int i = 0; i < N_REQUESTS; i++) {
        reqs[i] = submit(engine, i);
        engine_step(engine);
    }

    while (engine_step(engine)) {
        sched_check(engine->sched);
    }

    for (int i = 0; i < N_REQUESTS; i++) {
        assert_true(reqs[i]->finished);
        read_answer(reqs[i], &together[i]);
        request_destroy(reqs[i]);
    }

    print_message("# %d preemptions\n",
                  (int) sched_preemptions(engine->sched));
    assert_true(sched_preemptions(engine->sched) > 0);
    engine_close(engine);
    run_alone("cuda", alone);

    for (int i = 0; i < N_REQUESTS; i++) {
        for (int k = 0; k < N_TOKENS; k++) {
            assert_int_equal(alone[i].token[k], together[i].token[k]);
        }

        assert_memory_equal(&alone[i], &together[i], sizeof(answer_t));
    }
}


/* Both round activations to the same int8; the order of float additions is
 * not the same, so neither are all bits. */
static void
test_near_the_cpu(void **unused)
{
    int same = 0;

    (void) unused;
    run_alone("cpu", cpu);

    for (int i = 0; i < N_REQUESTS; i++) {
        double worst = 0.0;
        int k = 0;

        for (; k < N_TOKENS && alone[i].token[k] == cpu[i].token[k]; k++) {
            worst = fmax(worst,
                         fabs((double) alone[i].logprob[k] - cpu[i].logprob[k]));
        }

        same += k;
        print_message("# request %d: %d of %d tokens are the CPU's, "
                      "log-probabilities within %.4f\n",
                      i, k, N_TOKENS, worst);
        assert_true(worst < 0.2);
    }

    assert_true(same >= N_REQUESTS * N_TOKENS / 2);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_near_the_cpu),
    };

    if (getenv("LLM_TEST_MODEL") == NULL) {
        printf("1..0 # SKIP LLM_TEST_MODEL names no model\n");
        return 0;
    }

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
