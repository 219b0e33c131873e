/*
 * The engine's end of the segment with honest workers: rounds, slow readers,
 * cancellations, and the ways to be told to leave.
 */

#include "engine/base/clock.h"
#include "t/unit/engine_poll.h"
#include "t/unit/engine_port.h"

/* nginx's ngx_channel_t */
typedef struct {
    uint64_t command;
    int32_t pid;
    int64_t slot;
    int32_t fd;
} channel_t;


/* --- honest --- */

static void
test_round(void **state)
{
    const llm_card_t *card = &shm.header->card;
    uint64_t count = 0;

    (void) state;
    assert_int_equal(atomic_load(&shm.header->state), LLM_ENGINE_READY);
    assert_int_equal(atomic_load(&shm.header->epoch), 1);
    assert_int_equal(atomic_load(&shm.header->pid), getpid());
    assert_string_equal(card->alias, "engine-tiny.gguf");
    assert_string_equal(card->root, "tiny");
    assert_int_equal(card->max_model_len, TINY_CTX);
    assert_int_equal(card->n_vocab, TINY_VOCAB);
    assert_int_equal(card->has_chat_template, 1);

    drain_ready(1);
    const uint32_t t = submit_text(1, 3, 7);

    turn();
    assert_int_equal(read(PORT_FD_BELLS + 1, &count, sizeof(count)), 8);
    assert_int_equal(count, 1);
    assert_int_equal(llm_stats_get(&shm.stats->slots_used), 1);
    run_until_done(1, 3, t);
    assert_int_equal(reply.n_tokens, 7);
    assert_int_equal(reply.done.completion_tokens, 7);
    assert_int_equal(atomic_load(&slot_at(1, 3)->log_len), 7);
    assert_true(rung[1][3] >= 5 && rung[0][3] == 0);
    assert_int_equal(llm_stats_get(&shm.stats->slots_used), 0);
    assert_int_equal(llm_stats_get(&shm.stats->generation_tokens), 7);
    assert_true(atomic_load(&shm.header->heartbeat_ns) > 0);
    assert_int_equal(atomic_load(&shm.header->retry_after), 1);
    assert_false(turn());
}


/* The token log of /tokenize ends where the log does. */
static void
test_token_log(void **state)
{
    ask_t a = ask(LLM_REQ_TOKENIZE, 0);
    char text[101];

    (void) state;

    for (int n = LOG_TOKENS - 1; n <= 100; n += LOG_TOKENS / 2 + 4) {
        memset(text, 'q', sizeof(text));
        ask_begin(&a);
        ask_section(&a, LLM_SEC_PROMPT, text, (size_t) n);
        const uint32_t t = fill(0, 0, &a);

        /* nobody's, and not to be touched */
        llm_shm_log(&shm, 0, 0)[LOG_TOKENS] = 4711;
        push(0, LLM_OP_SUBMIT, 0);
        run_until_done(0, 0, t);
        assert_int_equal(reply.done.completion_tokens, n);
        assert_int_equal(atomic_load(&slot_at(0, 0)->log_len),
                         n < LOG_TOKENS ? n : LOG_TOKENS);
        assert_int_equal(llm_shm_log(&shm, 0, 0)[LOG_TOKENS - 2], 'q');
        assert_int_equal(llm_shm_log(&shm, 0, 0)[LOG_TOKENS], 4711);
        reply_fini(&reply);
    }
}


/* --- a slow reader --- */

static void
test_parked(void **state)
{
    const uint32_t slow = submit_detokenize(0, 1, 400); /* 120 000 bytes */
    const uint32_t other = submit_text(0, 2, 3);

    (void) state;

    for (int i = 0; i < 20; i++) {
        turn();
    }

    /* the other one has finished meanwhile, and nothing spins */
    assert_true(done(0, 2, other));
    assert_false(done(0, 1, slow));
    assert_int_equal(llm_stats_get(&shm.stats->parked), 1);
    assert_int_equal(atomic_load(&slot_at(0, 1)->want_space), 1);
    assert_false(turn());

    /* record by record: each makes room for a little more */
    for (int i = 0; i < 200 && !done(0, 1, slow); i++) {
        collect(0, 1, 1);
        turn();
    }

    assert_true(done(0, 1, slow));
    collect(0, 1, 1000);
    assert_int_equal(reply.n_done, 1);
    assert_int_equal(reply.content.len, 400 * LONG_BYTES);

    for (int i = 0; i < 400; i++) {
        assert_int_equal(reply.content.data[i * LONG_BYTES], 'a' + i % N_LONG);
    }

    assert_int_equal(llm_stats_get(&shm.stats->parked), 0);
}


/* A sequence is left out of steps while its reader sleeps, and goes on. */
static void
test_parked_sequence(void **state)
{
    ask_t a = ask(LLM_REQ_TEXT, LLM_F_STREAM | LLM_F_IGNORE_EOS | LLM_F_LOGPROBS
                                    | LLM_F_ECHO);
    const llm_bias_t bias = { TOK_LONG + 2, 10000 };
    char prompt[100];

    (void) state;
    memset(prompt, 'q', sizeof(prompt));
    a.params.max_tokens = 100;
    a.params.top_logprobs = 20;
    ask_begin(&a);
    ask_section(&a, LLM_SEC_PROMPT, prompt, sizeof(prompt));
    ask_section(&a, LLM_SEC_LOGIT_BIAS, &bias, sizeof(bias));
    const uint32_t t = fill(0, 4, &a);

    push(0, LLM_OP_SUBMIT, 4);

    while (turn()) {
    }

    const request_t *req = port.by_slot[4];

    assert_true(req->seq.parked);
    const int n = req->n_output;

    assert_true(n < 100);
    assert_false(turn());
    assert_int_equal(req->n_output, n);

    /* cut off in the middle of it: a notice of room that was none */
    push(0, LLM_OP_SPACE, 4);
    assert_false(turn());
    assert_true(req->seq.parked);

    run_until_done(0, 4, t);
    assert_int_equal(reply.n_prompt_logprobs, 100);
    assert_int_equal(reply.prompt.len, 100);
    assert_int_equal(reply.n_logprobs, 100);
    assert_int_equal(reply.content.len, 100 * LONG_BYTES);
    assert_int_equal(reply.done.completion_tokens, 100);
}


/* --- cancel --- */

static void
test_cancel(void **state)
{
    (void) state;

    /* in the same breath: not even looked at */
    const uint32_t early = submit_text(0, 0, 100);
    const uint64_t tokens = llm_stats_get(&shm.stats->prompt_tokens);

    cancel(0, 0, early);
    turn();
    assert_true(done(0, 0, early));
    assert_int_equal(llm_stats_get(&shm.stats->prompt_tokens), tokens);
    assert_int_equal(llm_stats_get(&shm.stats->finished[LLM_FINISH_ABORT]), 1);

    /* after each of the first steps */
    for (int steps = 0; steps < 6; steps++) {
        const uint32_t t = submit_text(0, 0, 100);

        for (int i = 0; i < steps; i++) {
            turn();
        }

        cancel(0, 0, t);
        turn();
        assert_true(done(0, 0, t));
        assert_null(port.by_slot[0]);
        assert_int_equal(pages_used(engine), 0);
    }

    /* parked; finished with records that nobody fetched */
    for (int n = 20; n <= 400; n += 380) {
        const uint32_t t = submit_detokenize(0, 0, n);

        turn();
        turn();
        cancel(0, 0, t);
        turn();
        assert_true(done(0, 0, t));
        assert_null(port.by_slot[0]);
    }

    /* not this ticket; nobody there; an empty slot */
    const uint32_t t = submit_text(0, 0, 5);

    turn();
    cancel(0, 0, t - 1);
    cancel(0, 7, t);
    cancel(1, 0, t);
    turn();
    assert_false(done(0, 0, t));
    assert_false(done(0, 7, t));
    run_until_done(0, 0, t);
    assert_int_equal(reply.done.completion_tokens, 5);
    reply_fini(&reply);

    /* too late */
    cancel(0, 0, t);
    turn();
    still_serves(0, 0);
}


/* --- leaving --- */

static void
tell(uint64_t command)
{
    const channel_t msg = { .command = command, .pid = 1, .fd = -1 };

    assert_int_equal(write(channel, &msg, sizeof(msg)), sizeof(msg));
}


static void
test_quit(void **state)
{
    const uint32_t t = submit_text(0, 0, 30);

    (void) state;
    turn();
    assert_false(port_done(&port, engine));
    tell(3);
    turn();
    assert_true(port.fds.quit);

    /* workers live, requests run: not yet; new ones are still taken */
    assert_false(port_done(&port, engine));
    const uint32_t late = submit_text(1, 0, 30);

    run_until_done(0, 0, t);
    reply_fini(&reply);
    run_until_done(1, 0, late);
    assert_false(port_done(&port, engine));

    llm_worker_release(&shm, 0);
    turn();
    assert_false(port_done(&port, engine));
    llm_worker_release(&shm, 1);
    turn();
    assert_int_equal(port.live, 0);
    assert_true(port_done(&port, engine));
}


static void
test_terminate(void **state)
{
    (void) state;
    submit_text(0, 0, 30);
    turn();
    tell(4);
    turn();
    assert_true(port_done(&port, engine));
}


static void
test_lifeline(void **state)
{
    (void) state;
    submit_text(0, 0, 30);
    turn();
    assert_int_equal(write(lifeline, "x", 1), 1);
    turn();
    turn();
    assert_false(port_done(&port, engine));
    close(lifeline);
    turn();
    assert_true(port_done(&port, engine));
    lifeline = dup(0);
}


/* The channel closes when the master is replaced; that alone is no reason. */
static void
test_channel(void **state)
{
    char control[CMSG_SPACE(sizeof(int))] = { 0 };
    const channel_t msg = { .command = 1, .pid = 1, .fd = 0 };
    struct iovec iov = { (void *) &msg, sizeof(msg) };
    struct msghdr head = { .msg_iov = &iov,
                           .msg_iovlen = 1,
                           .msg_control = control,
                           .msg_controllen = sizeof(control) };
    struct cmsghdr *c = CMSG_FIRSTHDR(&head);
    const int zero = open("/dev/null", O_RDONLY);

    (void) state;

    /* announcements of new workers carry descriptors: none may stay open */
    const int before = dup(0);

    close(before);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &zero, sizeof(zero));

    for (int i = 0; i < 5; i++) {
        assert_int_equal(sendmsg(channel, &head, 0), sizeof(msg));
        turn();
    }

    const int after = dup(0);

    assert_int_equal(after, before);
    close(after);
    close(zero);

    /* nothing that it knows, half a message, reopen */
    tell(99);
    turn();
    tell(5);
    turn();
    assert_int_equal(write(channel, "abc", 3), 3);
    turn();
    assert_false(port_done(&port, engine));

    close(channel);
    turn();
    assert_false(port.fds.channel);
    assert_false(port_done(&port, engine));
    channel = dup(0);
    still_serves(0, 0);
}


static uint64_t
now_ms(void)
{
    return clock_now_ns() / 1000000;
}


/* Asleep on the doorbell; awake when it rings. */
static void
test_sleep(void **state)
{
    const uint64_t one = 1;
    const uint64_t start = now_ms();

    (void) state;
    port_wait(&port, engine, false);
    assert_true(now_ms() - start >= 900);
    assert_int_equal(poll_found, 0);
    assert_int_equal(atomic_load(&shm.header->idle), 0);

    assert_int_equal(write(PORT_FD_DOORBELL, &one, sizeof(one)), 8);
    port_wait(&port, engine, false);
    assert_true(poll_ms > 0);
    assert_int_equal(poll_found, 1);

    /* work that came without a ring */
    submit_text(0, 0, 5);
    port_wait(&port, engine, false);
    assert_int_equal(poll_ms, 0);
    run_until_done(0, 0, ticket);
}


/* In a child, because the flags of a signal stay. */
static void
test_signals(void **state)
{
    static const int signals[] = { SIGTERM, SIGINT, SIGQUIT };

    (void) state;

    for (int i = 0; i < 3; i++) {
        int status;
        const pid_t pid = fork();

        if (pid == 0) {
            raise(signals[i]);
            turn();
            const bool quit = signals[i] == SIGQUIT;
            _exit(port.fds.quit == quit && port.fds.terminate == !quit ? 0 : 1);
        }

        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        port_test(test_round),     port_test(test_token_log),
        port_test(test_parked),    port_test(test_parked_sequence),
        port_test(test_cancel),    port_test(test_quit),
        port_test(test_terminate), port_test(test_lifeline),
        port_test(test_channel),   port_test(test_sleep),
        port_test(test_signals),
    };

    log_open(NULL, LOG_CRIT);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, finish);
}
