/*
 * An engine on the emulated GPU that computes decodes ahead: when it does, that
 * the device has work whenever the host waits or writes, and that no answer
 * depends on it, whatever ends, is cancelled, waits for its client, loses its
 * pages or comes in between.
 */

#include "t/unit/engine_tiny.h"

#include "engine/draw.h"
#include "engine/sched/share.h"
#include "engine/sched/victim.h"
#include "t/shim/options.h"
#include "t/unit/random.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { N_ASKED = 14 };
#else
enum { N_ASKED = 28 };
#endif

enum { N_WANTED = 40, N_CROWD = 80, N_DRAWS = 4096 };

/* of the runtime: errors that stay go with it */
int cudaDeviceReset(void);

typedef struct {
    const char *words[6];
    bool drafts;
    uint64_t seed; /* of the shim */
    int workers;
} setup_t;

/* What the host did, and how many kernels had run then. */
static struct {
    op_table_t ops;
    const op_table_t *real;
    int n_draws;
    int n_waits;
    uint64_t ran_after; /* the last wait */
    int place_of[N_DRAWS];
    uint64_t most_behind; /* draws asked for after the one waited for */
    uint64_t least_behind;
    bool idle; /* nothing ran between two waits */
} spy;


static uint64_t
rows_ahead(const engine_t *engine)
{
    return llm_stats_get(&engine->stats->rows_ahead);
}


static uint64_t
rows_used(const engine_t *engine)
{
    return llm_stats_get(&engine->stats->rows_ahead_used);
}


/* --- requests --- */

/* Ways to end: by length, by a stop string, by a stop token, by the end of
 * generation, which some like; or all of N_WANTED tokens. */
static request_t *
submit(engine_t *engine, int i, bool to_the_end)
{
    static const char *const stops[] = { "e", "th", "0", NULL };
    static const char text[] = "the cat sat on the mat and then it left for "
                               "one two three four more";
    const uint32_t logprobs = i % 3 == 0 ? LLM_F_LOGPROBS : 0;
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | logprobs
                                    | (i % 5 == 4 ? 0 : LLM_F_IGNORE_EOS));

    a.params.seed = 10 + (uint64_t) i;
    a.params.temperature = i % 4 == 0 ? 0.0f : 0.8f + 0.1f * (float) (i % 4);
    a.params.max_tokens = i % 8 == 7 ? 1 : 9 + i * 7 % (N_WANTED - 9);
    a.params.min_tokens = i % 6 == 1 ? 5 : 0;

    if (to_the_end) {
        a.params.max_tokens = a.params.min_tokens = N_WANTED;
    }

    a.params.top_logprobs = i % 2 == 0 ? 3 : 0;
    a.params.repetition_penalty = i % 16 == 13 ? 1.1f : 1.0f;

    ask_begin(&a);

    /* four have the whole prompt in common, and all some of it */
    ask_section(&a, LLM_SEC_PROMPT, text, (size_t) (8 + i / 4 * 5 % 40));

    if (i % 3 == 1) {
        ask_stop(&a, stops);
    }

    if (i % 5 == 4) {
        const llm_bias_t bias = { MINI_IM_END, 3.0f };

        llm_request_section(&a.w, LLM_SEC_LOGIT_BIAS);
        llm_request_add(&a.w, &bias, sizeof(bias));
    }

    request_t *req = ask_send(engine, &a);

    assert_non_null(req);

    return req;
}


/* Tokens, log-probabilities, text, and how it ended. */
static void
answer_of(request_t *req, buf_t *out)
{
    reply_t reply = { 0 };

    tokens_of(req, out);
    reply_read(&reply, req);
    assert_int_equal(reply.n_done, 1);
    buf_add(out, reply.content.data, reply.content.len);
    buf_add(out, &reply.done.finish, sizeof(reply.done.finish));
    buf_add(out, &reply.done.stop_kind, sizeof(reply.done.stop_kind));
    reply_fini(&reply);
}


static void
run_alone(int i, bool no_ahead, buf_t *answer)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         NULL };

    tiny_ahead_after = no_ahead ? -1 : 0;

    engine_t *engine = tiny_engine(words);
    request_t *req = submit(engine, i, false);

    tiny_ahead_after = 0;
    run_all(engine);
    answer_of(req, answer);
    assert_true(no_ahead
                    ? rows_ahead(engine) == 0
                    : rows_ahead(engine) > 0 || i % 8 == 7 || i % 16 == 13);
    request_destroy(req);
    assert_int_equal(pages_used(engine), 0);
    engine_close(engine);
}


static void
same(const buf_t *got, const buf_t *want, int i)
{
    if (got->len != want->len || memcmp(got->data, want->data, want->len) != 0)
    {
        fail_msg("request %d has another answer", i);
    }
}


/* --- a storm --- */

/* Who loses the pages when all but the last token's are full comes back with
 * one row to compute, as if nothing had happened. */
static int
preempt(engine_t *engine, request_t *const *reqs, int n)
{
    int n_preempted = 0;

    for (int i = 0; i < n; i++) {
        seq_t *seq = reqs[i] != NULL ? &reqs[i]->seq : NULL;

        if (seq == NULL || seq->state != SEQ_RUNNING || !seq->ahead
            || seq->n_tokens % KV_PAGE != 1 || engine->prefix == NULL)
        {
            continue;
        }

        share_publish(engine->prefix, seq, seq->n_tokens);
        victim_preempt(engine->sched, seq);
        n_preempted++;
    }

    return n_preempted;
}


/* Between two steps: some come, some are cancelled, some clients are slow. */
static void
disturb(engine_t *engine, request_t **reqs, int *n_sent, random_t *dice)
{
    const int at = random_below(dice, N_ASKED);
    request_t *req = at < *n_sent ? reqs[at] : NULL;

    while (*n_sent < N_ASKED && random_below(dice, 3) == 0) {
        reqs[*n_sent] = submit(engine, *n_sent, false);
        (*n_sent)++;
    }

    for (int i = 0; i < *n_sent; i++) {
        if (reqs[i] != NULL && random_below(dice, 4) == 0) {
            reqs[i]->seq.parked = random_below(dice, 12) == 0;
        }
    }

    if (req != NULL && at % 7 == 3 && random_below(dice, 4) == 0) {
        emit_abort(engine, req);
        request_destroy(req);
        reqs[at] = NULL;
    }
}


static bool
is_busy(request_t *const *reqs)
{
    for (int i = 0; i < N_ASKED; i++) {
        if (reqs[i] != NULL && !reqs[i]->finished) {
            return true;
        }
    }

    return false;
}


/* What happened in all storms. */
static struct {
    int preempted; /* for want of pages, */
    int forced;    /* or by preempt() */
    int in_vain;   /* rows */
} storms;


static void
run_storm(const setup_t *setup, random_t *dice, const buf_t *want)
{
    engine_t *engine = tiny_engine(setup->words);
    request_t *reqs[N_ASKED] = { NULL };
    int n_sent = 0, n_preempted = 0;

    while (n_sent < N_ASKED || is_busy(reqs)) {
        disturb(engine, reqs, &n_sent, dice);
        n_preempted += preempt(engine, reqs, n_sent);
        engine_step(engine);
        assert_false(engine->failed);
        sched_check(engine->sched);
    }

    for (int i = 0; i < N_ASKED; i++) {
        buf_t got = { 0 };

        if (reqs[i] == NULL) {
            continue;
        }

        answer_of(reqs[i], &got);
        same(&got, &want[i], i);
        request_destroy(reqs[i]);
        buf_fini(&got);
    }

    print_message("# %s %s: %d rows ahead, %d of them taken, %d preemptions, "
                  "%d of %d drafts right\n",
                  setup->words[1], setup->words[2], (int) rows_ahead(engine),
                  (int) rows_used(engine),
                  (int) sched_preemptions(engine->sched),
                  (int) llm_stats_get(&engine->stats->spec_accepted),
                  (int) llm_stats_get(&engine->stats->spec_draft_tokens));
    assert_true(rows_used(engine) > 0
                && rows_ahead(engine) >= rows_used(engine));
    assert_true(!setup->drafts
                || llm_stats_get(&engine->stats->spec_draft_tokens) > 0);
    assert_int_equal(pages_used(engine), 0);
    storms.preempted += (int) sched_preemptions(engine->sched) - n_preempted;
    storms.forced += n_preempted;
    storms.in_vain += (int) (rows_ahead(engine) - rows_used(engine));
    engine_close(engine);
}


static void
test_storm(void **unused)
{
    static const setup_t setups[] = {
        { { "device=cuda", "kv_cache_memory=1m", "max_num_batched_tokens=64" },
          .workers = 1 },
        { { "device=cuda", "kv_cache_memory=88k", "max_num_batched_tokens=24",
            "max_model_len=96" },
          .seed = 1,
          .workers = 2 },
        { { "device=cuda", "kv_cache_memory=88k", "prefix_caching=off",
            "max_model_len=96" },
          .seed = 2,
          .workers = 1 },
        { { "device=cuda", "kv_cache_memory=256k", "speculative=ngram:1:3" },
          .drafts = true,
          .seed = 3,
          .workers = 1 },
        { { "device=cuda", "kv_cache_memory=88k", "speculative=ngram:2:3",
            "num_speculative_tokens=2", "max_model_len=96" },
          .drafts = true,
          .workers = 1 },
    };
    static buf_t want[N_ASKED];
    shim_options_t *shim = shim_options();
    random_t dice = random_start("storm");

    (void) unused;

    for (int i = 0; i < N_ASKED; i++) {
        buf_t again = { 0 };

        run_alone(i, true, &want[i]);
        run_alone(i, false, &again);
        same(&again, &want[i], i);
        buf_fini(&again);
    }

    tiny_output_ratio = -1; /* or few would be preempted */
    tiny_ahead_after = 1;   /* or drafts would come in between too rarely */

    for (int k = 0; k < 5; k++) {
        shim->seed = setups[k].seed;
        shim->workers = setups[k].workers;
        run_storm(&setups[k], &dice, want);
    }

    /* one storm in twelve is too mild for that */
    for (int i = 0; i < 10 && storms.preempted == 0; i++) {
        run_storm(&setups[2], &dice, want);
    }

    assert_true(storms.preempted > 0 && storms.forced > 0);
    assert_true(storms.in_vain > 0);
    tiny_output_ratio = 0;
    tiny_ahead_after = 0;
    shim->seed = 0;
    shim->workers = 1;

    for (int i = 0; i < N_ASKED; i++) {
        buf_fini(&want[i]);
    }
}


/* --- what the host waits for --- */

static void
spy_draw(op_dev_t *dev, const op_draw_job_t *job)
{
    spy.place_of[spy.n_draws % N_DRAWS] = job->first;
    spy.n_draws++;
    spy.real->draw(dev, job);
}


/* How many draws have been asked for since the one that is waited for; and has
 * anything run since the last wait? */
static void
spy_drawn(op_dev_t *dev, op_drawn_t *results, int first, int n)
{
    uint64_t behind = 0;

    /* what is not found was asked for before anybody looked */
    while ((int) behind < spy.n_draws
           && spy.place_of[(spy.n_draws - 1 - (int) behind) % N_DRAWS] != first)
    {
        behind++;
    }

    spy.least_behind = behind < spy.least_behind ? behind : spy.least_behind;
    spy.most_behind = behind > spy.most_behind ? behind : spy.most_behind;
    spy.idle &= spy.n_waits == 0 || shim_stats.launches == spy.ran_after;
    spy.real->drawn(dev, results, first, n);
    spy.ran_after = shim_stats.launches;
    spy.n_waits++;
}


static void
spy_on(engine_t *engine)
{
    memset(&spy, 0, sizeof(spy));
    spy.real = engine->ops;
    spy.ops = *engine->ops;
    spy.ops.draw = spy_draw;
    spy.ops.drawn = spy_drawn;
    spy.least_behind = UINT64_MAX;
    spy.idle = true;
    engine->ops = &spy.ops;
}


/* With two sequences that decode: one step is asked for while the one before it
 * runs, and nothing makes the host wait but the results of that one; each step
 * launches as many kernels as without. */
static void
test_overlap(void **unused)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         NULL };
    uint64_t launches[2];

    (void) unused;

    for (int ahead = 0; ahead < 2; ahead++) {
        tiny_ahead_after = ahead == 0 ? -1 : 0;

        engine_t *engine = tiny_engine(words);
        request_t *reqs[] = { submit(engine, 3, true),
                              submit(engine, 15, true) };

        for (int i = 0; i < 5; i++) {
            engine_step(engine);
        }

        spy_on(engine);
        spy.n_waits = 0;
        engine_step(engine);

        const uint64_t before = shim_stats.launches;

        for (int i = 0; i < 10; i++) {
            engine_step(engine);
        }

        launches[ahead] = shim_stats.launches - before;
        assert_int_equal(spy.n_draws, 11);
        assert_int_equal(spy.n_waits, 11);
        assert_int_equal(spy.most_behind, (uint64_t) ahead);
        assert_int_equal(spy.least_behind, (uint64_t) ahead);
        assert_true(spy.idle);
        assert_true(reqs[0]->n_output >= 15 && !reqs[0]->finished);
        engine->ops = spy.real;
        run_all(engine);

        for (int i = 0; i < 2; i++) {
            assert_int_equal(reqs[i]->n_output, N_WANTED);
            request_destroy(reqs[i]);
        }

        engine_close(engine);
    }

    tiny_ahead_after = 0;
    assert_int_equal(launches[0], launches[1]);
}


/* More sequences than rows of logits that are computed at once. */
static void
test_crowd(void **unused)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=4m",
                                         "max_num_seqs=80",
                                         "max_num_batched_tokens=128", NULL };
    static buf_t want[N_CROWD];

    (void) unused;

    for (int ahead = 0; ahead < 2; ahead++) {
        tiny_ahead_after = ahead == 0 ? -1 : 0;

        engine_t *engine = tiny_engine(words);
        request_t *reqs[N_CROWD];

        assert_true(engine->max_out < N_CROWD);

        for (int i = 0; i < N_CROWD; i++) {
            reqs[i] = submit(engine, i % 16 == 13 ? 14 : i, false);
        }

        run_all(engine);
        assert_true(ahead == 0 ? rows_ahead(engine) == 0
                               : rows_used(engine) > 4 * N_CROWD);

        for (int i = 0; i < N_CROWD; i++) {
            buf_t got = { 0 };

            answer_of(reqs[i], &got);
            request_destroy(reqs[i]);

            if (ahead == 0) {
                want[i] = got;
            } else {
                same(&got, &want[i], i);
                buf_fini(&got);
                buf_fini(&want[i]);
            }
        }

        assert_int_equal(pages_used(engine), 0);
        engine_close(engine);
    }
}


/* The answers so far are those of a device that works; all of them, if it went
 * on. */
static void
check_failed(engine_t *engine, request_t *const *reqs, const buf_t *want)
{
    for (int i = 0; i < 2; i++) {
        const seq_t *seq = &reqs[i]->seq;

        assert_true(engine->failed || reqs[i]->finished);
        assert_memory_equal(seq->tokens, want[i].data,
                            (size_t) seq->n_tokens * sizeof(int32_t));
    }
}


/* Whatever fails, and whenever: nobody gets a token that was computed on a
 * device that had failed, or from one. */
static void
test_failures(void **unused)
{
    static const char *const words[] = { "device=cuda", "kv_cache_memory=1m",
                                         NULL };
    static const shim_fail_t kinds[] = { SHIM_FAIL_LAUNCH, SHIM_FAIL_ASYNC,
                                         SHIM_FAIL_CALL };
    buf_t want[2] = { { 0 } };
    int n_failed = 0;

    (void) unused;
    run_alone(18, true, &want[0]);
    run_alone(27, true, &want[1]);

    for (int k = 0; k < 3; k++) {
        for (uint64_t at = 1; at <= 240; at += 13) {
            engine_t *engine = tiny_engine(words);
            request_t *reqs[] = { submit(engine, 18, false),
                                  submit(engine, 27, false) };
            int steps = 0;

            shim_options()->seed = at % 3;
            shim_fail_at(kinds[k], at);

            while (engine_step(engine)) {
                assert_true(++steps < 100);
            }

            shim_fail_at(kinds[k], 0);
            shim_options()->seed = 0;
            n_failed += engine->failed;
            check_failed(engine, reqs, want);
            engine_close(engine);
            cudaDeviceReset();
        }
    }

    print_message("# the device failed %d times\n", n_failed);
    assert_true(n_failed > 20);
    buf_fini(&want[0]);
    buf_fini(&want[1]);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_crowd),
        cmocka_unit_test(test_storm),
        cmocka_unit_test(test_failures),
    };

    log_open(NULL, LOG_EMERG);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
