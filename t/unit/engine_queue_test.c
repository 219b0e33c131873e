/*
 * llm_queue at intake: who is refused, that all slots of one request fare
 * alike, who counts as waiting, and what Retry-After says.  Tenant and
 * priority reach the sequence.
 */

#include "t/unit/engine_tiny.h"
#include "t/unit/random.h"

enum { STORM = 60 };

static engine_t *engine;


/* One slot of a request of n choices; 0: not the first one. */
static request_t *
submit(uint32_t worker, uint32_t max_queue, uint32_t n, const char *prompt)
{
    const request_origin_t from = { .worker = worker, .submit_ns = 1 };
    const llm_turn_t turn = { .max_queue = max_queue,
                              .n_choices = n,
                              .weight = 1 };
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_IGNORE_EOS);

    a.params.max_tokens = 48;
    ask_begin(&a);
    llm_request_turn(&a.w, &turn);
    ask_section(&a, LLM_SEC_PROMPT, prompt, strlen(prompt));

    request_t *req =
        intake_request(engine, tiny_area, llm_request_end(&a.w), &from);

    assert_non_null(req);

    return req;
}


static bool
taken(const request_t *req)
{
    return req->queued && !req->finished;
}


/* Was it refused for the queue?  The record is consumed. */
static bool
refused(request_t *req)
{
    reply_t reply = { 0 };

    if (!req->finished) {
        return false;
    }

    reply_read(&reply, req);

    const bool busy = reply.n_fail == 1 && reply.fail.fail == LLM_FAIL_BUSY;

    if (busy) {
        assert_int_equal(reply.n_start + reply.n_delta, 0);
        assert_in_range(reply.fail.retry_after, 1, RATE_WAIT_MAX_S);
        assert_non_null(strstr(reply.fail.text, "requests waiting"));
    }

    reply_fini(&reply);

    return busy;
}


static uint64_t
rejected(void)
{
    return llm_stats_get(&engine->stats->rejected);
}


/* Ends all there are. */
static void
clear(void)
{
    while (!list_empty(&engine->requests)) {
        request_t *req = list_entry(engine->requests.next, request_t, link);

        emit_abort(engine, req);
        request_destroy(req);
    }

    assert_int_equal(engine->n_fresh, 0);
    assert_int_equal(pages_used(engine), 0);
}


static int
setup_one(void **state)
{
    static const char *const words[] = { "max_num_seqs=1", NULL };

    (void) state;
    engine = tiny_engine(words);

    return 0;
}


static int
teardown(void **state)
{
    (void) state;
    clear();
    engine_close(engine);

    return 0;
}


static void
test_limit(void **state)
{
    const uint64_t before = rejected();

    (void) state;
    request_t *first = submit(0, 2, 1, "hello");

    assert_true(taken(first));
    assert_true(taken(submit(0, 2, 1, "hello")));
    assert_true(refused(submit(0, 2, 1, "hello")));
    assert_true(refused(submit(1, 2, 1, "hello")));
    assert_int_equal(rejected(), before + 2);
    assert_int_equal(engine->n_fresh, 2);

    /* refused before anything else is looked at */
    assert_true(refused(submit(1, 2, 1, "a\xff")));

    /* another location's limit, or none */
    assert_true(taken(submit(0, 3, 1, "hello")));
    assert_true(taken(submit(0, 0, 1, "hello")));
    assert_true(refused(submit(0, 4, 1, "hello")));
    assert_int_equal(rejected(), before + 4);
    assert_int_equal(engine->n_fresh, 4);

    /* one runs, and does not count any more, not even without pages */
    assert_true(engine_step(engine));
    assert_int_equal(engine->n_fresh, 3);
    assert_true(taken(submit(0, 4, 1, "hello")));
    assert_true(refused(submit(0, 4, 1, "hello")));

    /* one that waits is canceled, then the one that runs */
    emit_abort(engine, list_entry(engine->requests.prev, request_t, link));
    assert_int_equal(engine->n_fresh, 4);

    for (list_t *l = engine->requests.next; l != &engine->requests; l = l->next)
    {
        request_t *req = list_entry(l, request_t, link);

        if (taken(req) && req != first) {
            emit_abort(engine, req);
            break;
        }
    }

    assert_int_equal(engine->n_fresh, 3);
    emit_abort(engine, first);
    assert_int_equal(engine->n_fresh, 3);
    assert_true(taken(submit(0, 4, 1, "hello")));
    clear();
}


/* What is not generated does not wait, and a mistake takes no place. */
static void
test_others(void **state)
{
    (void) state;
    assert_true(taken(submit(0, 1, 1, "hello")));
    assert_true(refused(submit(0, 1, 1, "hello")));

    const llm_turn_t turn = { .max_queue = 1, .n_choices = 1, .weight = 1 };
    ask_t a = ask(LLM_REQ_TOKENIZE, 0);

    ask_begin(&a);
    llm_request_turn(&a.w, &turn);
    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    request_t *req = ask_send(engine, &a);

    assert_true(req->finished);
    assert_false(refused(req));
    clear();

    req = submit(0, 1, 1, "a\xff");
    assert_true(req->finished);
    assert_false(refused(req));
    assert_int_equal(engine->n_fresh, 0);
    assert_true(taken(submit(0, 1, 1, "hello")));
    clear();
}


/* n choices: all or none, whatever other workers do in between. */
static void
test_choices(void **state)
{
    const uint64_t before = rejected();

    (void) state;

    /* nobody waits: more than the queue holds, or they never could */
    for (uint32_t i = 0; i < 4; i++) {
        assert_true(taken(submit(0, 2, i == 0 ? 4 : 0, "hello")));
        assert_true(refused(submit(1, 1, 1, "hello")));
    }

    assert_int_equal(engine->n_fresh, 4);
    clear();

    /* one waits: there is room for one of two, but not for both */
    assert_true(taken(submit(1, 2, 1, "hello")));

    for (uint32_t i = 0; i < 2; i++) {
        assert_true(refused(submit(0, 2, i == 0 ? 2 : 0, "hello")));
        clear();
    }

    /* even where the queue empties after the first one was refused */
    assert_true(taken(submit(1, 4, 1, "hello")));
    assert_true(refused(submit(0, 4, 4, "hello")));
    clear();
    assert_true(refused(submit(0, 4, 0, "hello")));
    assert_true(refused(submit(0, 4, 0, "hello")));
    assert_true(taken(submit(0, 4, 1, "hello")));

    /* exactly full */
    assert_true(taken(submit(2, 4, 3, "hello")));
    assert_true(taken(submit(2, 4, 0, "hello")));
    assert_true(taken(submit(2, 4, 0, "hello")));
    assert_true(refused(submit(0, 4, 1, "hello")));
    assert_true(refused(submit(0, UINT32_MAX, UINT32_MAX, "hello")));

    /* a client's request counts once */
    assert_int_equal(rejected(), before + 4 + 1 + 1 + 2);
    clear();
}


/* Few pages: many are preempted, and these wait without being counted. */
static void
test_fresh(void **state)
{
    random_t seed = random_start("fresh");
    uint64_t n_taken = 0, n_refused = 0;

    (void) state;

    for (int i = 0; i < STORM * 40; i++) {
        const int what = random_below(&seed, 10);

        if (what < 3) {
            request_t *req = submit((uint32_t) random_below(&seed, 4),
                                    (uint32_t) (1 + random_below(&seed, 6)), 1,
                                    "hello hello hello hello");

            *(taken(req) ? &n_taken : &n_refused) += 1;

        } else if (what == 3 && !list_empty(&engine->requests)) {
            emit_abort(engine,
                       list_entry(engine->requests.next, request_t, link));

        } else {
            engine_step(engine);
        }

        int fresh = 0;

        for (list_t *l = engine->requests.next, *next; l != &engine->requests;
             l = next) {
            request_t *req = list_entry(l, request_t, link);

            next = l->next;

            if (req->finished) {
                request_destroy(req);
            } else {
                fresh += !req->seq.admitted;
            }
        }

        assert_int_equal(engine->n_fresh, fresh);
        assert_true(fresh <= 6);
    }

    assert_true(n_taken > 50 && n_refused > 50);
    assert_true(sched_preemptions(engine->sched) > 0);
    clear();
}


/* Retry-After: the more wait, and the slower they get on, the longer. */
static void
test_retry(void **state)
{
    reply_t reply = { 0 };

    (void) state;
    engine->rate = (rate_t){ .count = 10, .time_s = 25 };

    for (int i = 0; i < 4; i++) {
        assert_true(taken(submit(0, 4, 1, "hello")));
    }

    request_t *req = submit(0, 4, 1, "hello");

    reply_read(&reply, req);
    assert_int_equal(reply.n_fail, 1);
    assert_int_equal(reply.fail.retry_after, 10);
    assert_string_equal(reply.fail.text,
                        "The engine has 4 requests waiting and takes no more "
                        "at present, try again later.");
    reply_fini(&reply);
    engine->rate = (rate_t){ .count = 0.001, .time_s = 100 };
    req = submit(0, 4, 1, "hello");
    reply_read(&reply, req);
    assert_int_equal(reply.fail.retry_after, RATE_WAIT_MAX_S);
    reply_fini(&reply);

    /* a mistake is not cured by waiting */
    req = submit(0, 0, 1, "a\xff");
    reply_read(&reply, req);
    assert_int_equal(reply.fail.fail, LLM_FAIL_BADREQ);
    assert_int_equal(reply.fail.retry_after, 0);
    reply_fini(&reply);
    clear();
}


static void
test_tenant(void **state)
{
    ask_t a = ask(LLM_REQ_TEXT, 0);
    const llm_turn_t turn = { .n_choices = 1, .weight = 2.5 };

    (void) state;
    request_t *req = ask_text(engine, &a, "hello");

    const tenant_t *nameless = req->seq.tenant;

    assert_true(taken(req));
    assert_int_equal(req->seq.priority, 0);

    a.params.priority = INT32_MIN;
    ask_begin(&a);
    llm_request_turn(&a.w, &turn);
    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    ask_section(&a, LLM_SEC_TENANT, "acme", 4);
    req = ask_send(engine, &a);
    assert_true(taken(req));
    assert_int_equal(req->seq.priority, INT32_MIN);
    assert_ptr_not_equal(req->seq.tenant, nameless);
    assert_ptr_equal(req->seq.tenant,
                     sched_tenant(engine->sched, "acme", 4, 2.5));

    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, "hello", 5);
    ask_section(&a, LLM_SEC_TENANT, "", 0);
    req = ask_send(engine, &a);
    assert_true(taken(req));
    assert_ptr_equal(req->seq.tenant, nameless);
    clear();
}


static int
setup_few(void **state)
{
    static const char *const words[] = { "max_num_seqs=8",
                                         "kv_cache_memory=64k",
                                         "prefix_caching=off", NULL };

    (void) state;
    engine = tiny_engine(words);

    return 0;
}


int
main(void)
{
#define ONE(test) cmocka_unit_test_setup_teardown(test, setup_one, teardown)
#define FEW(test) cmocka_unit_test_setup_teardown(test, setup_few, teardown)
    const struct CMUnitTest tests[] = {
        ONE(test_limit), ONE(test_others), ONE(test_choices),
        ONE(test_retry), ONE(test_tenant), FEW(test_fresh),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
