/*
 * An engine on the emulated GPU whose requests sample in every way: what the
 * device draws is what the host draws from the same logits, and what each
 * request gets alone, with drafts or without.
 */

#include "t/unit/engine_tiny.h"

#include "engine/draw.h"
#include "t/shim/options.h"

enum { N_ASKED = 10, N_WANTED = 24, N_SETUPS = 4, MANY = OP_BIAS_MAX + 5 };

/* A tiny model: its words are noise, and at temperature 0 it repeats itself. */
static const char *const texts[N_ASKED] = {
    "a",
    "the cat sat on the mat and then the cat sat on the mat",
    "b c",
    "one two one two one two one two",
    "zz",
    "the cat sat on the mat and left",
    "once more, once more, once more",
    "x",
    "echo this",
    "0123456789"
};

typedef struct {
    const char *budget;
    const char *drafts; /* or NULL */
    bool host;          /* tokens are drawn on the host */
} setup_t;


/* Bias for n tokens, some of them again. */
static void
add_bias(ask_t *a, int n)
{
    llm_request_section(&a->w, LLM_SEC_LOGIT_BIAS);

    for (int i = 0; i < n; i++) {
        const llm_bias_t bias = { (i * 7) % 90, (float) (i % 13) * 0.25f };

        llm_request_add(&a->w, &bias, sizeof(bias));
    }
}


static void
set_params(llm_params_t *p, int i)
{
    p->seed = 10 + (uint64_t) i;
    p->max_tokens = N_WANTED;
    p->min_tokens = N_WANTED;
    p->top_logprobs = i % 3 == 0 ? 0 : i % 3 == 1 ? 5 : 20;

    switch (i) {
    case 0: /* the largest */
        break;
    case 1:
        p->temperature = 1.0f;
        break;
    case 2:
        p->temperature = 0.7f;
        p->top_p = 0.9f;
        break;
    case 3:
        p->temperature = 0.2f;
        p->top_k = 10;
        p->repetition_penalty = 1.05f;
        break;
    case 4:
        p->temperature = 1.5f;
        p->min_p = 0.02f;
        p->top_k = 100;
        p->top_p = 0.95f;
        break;
    case 5:
        p->presence_penalty = 0.5f;
        p->frequency_penalty = 0.5f;
        break;
    case 6:
        p->temperature = 0.1f;
        p->frequency_penalty = -0.3f;
        break;
    default:
        p->temperature = 0.9f;
        p->min_tokens = N_WANTED / 2;
        p->repetition_penalty = i == 9 ? 1.2f : 1.0f;
    }
}


static request_t *
submit(engine_t *engine, int i)
{
    const uint32_t echo = i == 8 ? LLM_F_ECHO : 0;
    const uint32_t logprobs = i == 4 ? 0 : LLM_F_LOGPROBS;
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | echo | logprobs);

    set_params(&a.params, i);
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, texts[i], strlen(texts[i]));

    if (i == 2 || i == 7 || i == 9) {
        add_bias(&a, i == 2 ? 30 : i == 7 ? MANY : OP_BIAS_MAX);
    }

    return ask_send(engine, &a);
}


static engine_t *
open_as(const setup_t *setup)
{
    static op_table_t host_draws;
    const char *const words[] = {
        "device=cuda", "kv_cache_memory=1m",       setup->budget,
        setup->drafts, "num_speculative_tokens=4", NULL
    };
    engine_t *engine = tiny_engine(words);

    assert_true(draw_is_remote(engine));

    if (setup->host) {
        host_draws = *engine->ops;
        host_draws.draw = NULL;
        engine->ops = &host_draws;
        assert_false(draw_is_remote(engine));
    }

    return engine;
}


static void
run_together(const setup_t *setup, buf_t *answers)
{
    engine_t *engine = open_as(setup);
    request_t *reqs[N_ASKED];

    for (int i = 0; i < N_ASKED; i++) {
        reqs[i] = submit(engine, i);
        assert_non_null(reqs[i]);
        engine_step(engine);
    }

    run_all(engine);

    for (int i = 0; i < N_ASKED; i++) {
        tokens_of(reqs[i], &answers[i]);
        request_destroy(reqs[i]);
    }

    print_message("# %s, %s, %s: %d of %d drafts right\n", setup->budget,
                  setup->drafts != NULL ? setup->drafts : "no drafts",
                  setup->host ? "host" : "device",
                  (int) llm_stats_get(&engine->stats->spec_accepted),
                  (int) llm_stats_get(&engine->stats->spec_draft_tokens));
    assert_true(setup->drafts == NULL
                || llm_stats_get(&engine->stats->spec_accepted) > 0);
    engine_close(engine);
}


static void
run_alone(int i, buf_t *answer)
{
    const setup_t setup = { .budget = "max_num_batched_tokens=64" };
    engine_t *engine = open_as(&setup);
    request_t *req = submit(engine, i);

    assert_non_null(req);
    run_all(engine);
    tokens_of(req, answer);
    request_destroy(req);
    engine_close(engine);
}


static void
test_same(void **unused)
{
    static const setup_t setups[N_SETUPS] = {
        { .budget = "max_num_batched_tokens=24" },
        { .budget = "max_num_batched_tokens=24", .host = true },
        { .budget = "max_num_batched_tokens=64",
          .drafts = "speculative=ngram:1:3" },
        { .budget = "max_num_batched_tokens=64",
          .drafts = "speculative=ngram:1:3",
          .host = true },
    };
    static buf_t alone[N_ASKED];

    (void) unused;

    for (int i = 0; i < N_ASKED; i++) {
        run_alone(i, &alone[i]);
        assert_true(alone[i].len >= N_WANTED * sizeof(int32_t) / 2);
    }

    for (int k = 0; k < N_SETUPS; k++) {
        static buf_t together[N_ASKED];

        shim_options()->seed = (uint64_t) k;
        run_together(&setups[k], together);

        for (int i = 0; i < N_ASKED; i++) {
            assert_int_equal(together[i].len, alone[i].len);
            assert_memory_equal(together[i].data, alone[i].data, alone[i].len);
            buf_fini(&together[i]);
            together[i] = (buf_t){ 0 };
        }
    }

    for (int i = 0; i < N_ASKED; i++) {
        buf_fini(&alone[i]);
    }
}


/* Logits stay where they are: a step copies what was drawn. */
static void
test_copies(void **unused)
{
    const setup_t setup = { .budget = "max_num_batched_tokens=64" };
    engine_t *engine = open_as(&setup);
    request_t *req = submit(engine, 1);

    (void) unused;
    engine_step(engine);
    engine_step(engine);

    const uint64_t before = shim_stats.copies;

    engine_step(engine);
    /* the step, the draws, the results */
    assert_int_equal(shim_stats.copies - before, 3);
    run_all(engine);
    request_destroy(req);
    engine_close(engine);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same),
        cmocka_unit_test(test_copies),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
