/*
 * A start on the emulated GPU of which one thing is refused: the nth piece of
 * the device's memory or of pinned memory, the nth stream, event or launch, the
 * nth call of all, for n = 1, 2, 3 … until nothing is refused.  Each time the
 * engine says what is missing, gives everything back, and the next start is as
 * if nothing had been; with device auto it is on the CPU instead.
 *
 * LLM_TEST_LONG refuses every one, and looks closely at all.
 */

#include "t/unit/cuda_ask.h"

#include "t/shim/options.h"

enum { MOST = 2000 };

static bool more;

/* An engine that is tried, and what it must answer. */
typedef struct {
    const char *what;
    op_dtype_t dtype;
    bool loose; /* cuBLAS for float weights */
    bool drafts;
    int asked; /* which request: cuBLAS is for more than a few rows */
    char path[64];
    buf_t want;
    buf_t plain; /* without cuBLAS */
} start_t;

static start_t starts[] = {
    { "quantised weights", OP_Q8_0, false, false, 2, "", { 0 }, { 0 } },
    { "cuBLAS and a draft model", OP_F16, true, true, 1, "", { 0 }, { 0 } },
};

enum { N_STARTS = sizeof(starts) / sizeof(starts[0]) };

/* The kinds of refusals at a start: what is said for each, or else. */
static const struct {
    shim_fail_t kind;
    const char *name;
    const char *says;
    const char *or_else;
    int least; /* so many at the least, of any start */
    int step;  /* from one that is tried to the next, */
    int each;  /* and to the next that is looked at closely */
} kinds[] = {
    { SHIM_FAIL_MALLOC, "memory", "no memory on the GPU",
      "GPU 0 (CPU emulation of sm_80) has no memory left", 20, 1, 4 },
    { SHIM_FAIL_HOST, "pinned memory", "no pinned memory on the host", NULL, 4,
      1, 1 },
    { SHIM_FAIL_STREAM, "streams", "GPU 0 cannot be opened: out of memory",
      NULL, 1, 1, 1 },
    { SHIM_FAIL_EVENT, "events", "GPU 0: creating an event: out of memory",
      NULL, 60, 5, 40 },
    { SHIM_FAIL_LAUNCH, "launches",
      "does not run: too many resources requested", NULL, 1, 1, 1 },
    { SHIM_FAIL_CALL, "calls", "unknown error", NULL, 200, 5, 40 },
};

enum { N_KINDS = sizeof(kinds) / sizeof(kinds[0]) };


static int
try_open(const start_t *start, const char *device, engine_t **engine,
         llm_err_t *err)
{
    engine_conf_t conf;

    engine_conf_init(&conf);
    conf.model = start->path;
    conf.device = device;
    conf.threads = 1;
    conf.max_model_len = TINY_CTX;
    conf.max_num_seqs = 8;
    conf.max_num_batched_tokens = 64;
    conf.kv_cache_memory = 1 << 20;
    conf.deterministic = !start->loose;

    if (start->drafts) {
        conf.speculative_model = start->path;
        conf.num_speculative_tokens = 2;
    }

    *engine = NULL;
    *err = (llm_err_t){ .code = LLM_OK };

    return engine_open(&conf, engine, err);
}


static void
assert_nothing_left(void)
{
    static const shim_live_t nothing;

    assert_memory_equal(&shim_live, &nothing, sizeof(nothing));
}


/* What it answers, and everything is given back. */
static void
ask_and_close(engine_t *engine, int i, buf_t *out)
{
    request_t *req = submit(engine, i);

    run_all(engine);
    answer_of(req, out);
    request_destroy(req);
    engine_close(engine);
    assert_nothing_left();
}


static void
assert_answers(engine_t *engine, int i, const buf_t *want)
{
    buf_t got = { 0 };

    ask_and_close(engine, i, &got);
    assert_memory_equal(got.data, want->data, want->len);
    buf_fini(&got);
}


static engine_t *
open_well(const start_t *start, const char *device)
{
    engine_t *engine;
    llm_err_t err;

    if (try_open(start, device, &engine, &err) != LLM_OK) {
        fail_msg("%s: %s", start->what, err.text);
    }

    return engine;
}


static void
assert_says(const llm_err_t *err, int kind)
{
    const char *says = kinds[kind].says, *or_else = kinds[kind].or_else;

    if (strstr(err->text, says) == NULL
        && (or_else == NULL || strstr(err->text, or_else) == NULL))
    {
        fail_msg("\"%s\" does not say \"%s\"", err->text, says);
    }

    assert_null(strchr(err->text, '\n'));
    assert_true(strncmp(err->text, "device cuda", 11) == 0);
    assert_true(strlen(err->text) < sizeof(err->text) - 1);
}


/* The nth of its kind is refused.  False: there is no nth. */
static bool
refuse(const start_t *start, int kind, int n)
{
    engine_t *engine;
    llm_err_t err;

    shim_fail_at(kinds[kind].kind, (uint64_t) n);

    const int rc = try_open(start, "cuda", &engine, &err);
    const bool refused = !shim_will_fail(kinds[kind].kind);

    shim_fail_at(kinds[kind].kind, 0);

    if (rc != LLM_OK) {
        assert_true(refused);
        assert_null(engine);
        assert_says(&err, kind);
        assert_nothing_left();

        if (more || (n - 1) % kinds[kind].each == 0) {
            assert_answers(open_well(start, "cuda"), start->asked,
                           &start->want);
        }

        return true;
    }

    if (refused && !start->loose) {
        fail_msg("%s: without %s %d all is well", start->what, kinds[kind].name,
                 n);
    }

    if (refused) {
        assert_non_null(
            strstr(engine->ops->describe(engine->dev), "without cuBLAS"));
    }

    assert_answers(engine, start->asked,
                   refused ? &start->plain : &start->want);

    return refused;
}


static void
test_refused(void **unused)
{
    (void) unused;

    for (int s = 0; s < N_STARTS; s++) {
        for (int kind = 0; kind < N_KINDS; kind++) {
            const int step = more ? 1 : kinds[kind].step;
            int n = 1;

            while (refuse(&starts[s], kind, n)) {
                n += step;
                assert_true(n < MOST);
            }

            /* and the last ones, behind which nothing else would notice */
            for (int i = 1; i < step; i++) {
                refuse(&starts[s], kind, n - i);
            }

            print_message("# %s: fewer than %d %s, refused in turn\n",
                          starts[s].what, n, kinds[kind].name);
            assert_true(n > kinds[kind].least);
        }
    }
}


/* Whether the log has a line that begins so. */
static bool
logged(const char *path, const char *line)
{
    static char text[1 << 14];
    FILE *f = fopen(path, "r");

    assert_non_null(f);

    const size_t n = fread(text, 1, sizeof(text) - 1, f);

    text[n] = '\0';
    fclose(f);
    assert_int_equal(truncate(path, 0), 0);

    const char *at = strstr(text, line);

    return at != NULL && strstr(at + 1, line) == NULL;
}


/* auto is the CPU wherever cuda would have been an error, and one line says
 * so. */
static void
test_auto(void **unused)
{
    const start_t *start = &starts[0];
    char log[] = "/tmp/cuda-open-XXXXXX";
    buf_t want = { 0 };
    int n_cpu = 0;

    (void) unused;
    ask_and_close(open_well(start, "cpu"), start->asked, &want);
    close(mkstemp(log));
    assert_int_equal(log_open(log, LOG_NOTICE), LLM_OK);

    for (int kind = 0; kind < N_KINDS; kind++) {
        bool refused = true;

        for (int n = 1; refused; n += more ? 1 : kinds[kind].each) {
            shim_fail_at(kinds[kind].kind, (uint64_t) n);

            engine_t *engine = open_well(start, "auto");

            refused = !shim_will_fail(kinds[kind].kind);
            shim_fail_at(kinds[kind].kind, 0);
            assert_true(refused
                        == logged(log, "device auto: using the CPU, because "));
            assert_string_equal(engine->ops->name, refused ? "cpu" : "cuda");
            assert_answers(engine, start->asked,
                           refused ? &want : &start->want);
            n_cpu += refused;
        }
    }

    print_message("# %d times the CPU\n", n_cpu);
    assert_true(n_cpu > 20);
    assert_int_equal(log_open(NULL, LOG_WARN), LLM_OK);
    unlink(log);
    buf_fini(&want);
}


/* Graphs are made in steps: without one, launches do as well. */
static void
test_graphs(void **unused)
{
    (void) unused;

    for (uint64_t n = 1;; n++) {
        engine_t *engine = open_well(&starts[0], "cuda");

        shim_fail_at(SHIM_FAIL_GRAPH, n);
        assert_answers(engine, starts[0].asked, &starts[0].want);

        const bool refused = !shim_will_fail(SHIM_FAIL_GRAPH);

        shim_fail_at(SHIM_FAIL_GRAPH, 0);

        if (!refused) {
            assert_true(n > 1);
            break;
        }
    }
}


static int
make_starts(void **unused)
{
    (void) unused;
    log_open(NULL, LOG_WARN);
    n_wanted = 6;

    for (int s = 0; s < N_STARTS; s++) {
        tiny_dtype = starts[s].dtype;
        tiny_head_dim = 32;
        tiny_file(starts[s].path);
        ask_and_close(open_well(&starts[s], "cuda"), starts[s].asked,
                      &starts[s].want);
        shim_options()->no_cublas = true;
        ask_and_close(open_well(&starts[s], "cuda"), starts[s].asked,
                      &starts[s].plain);
        shim_options()->no_cublas = false;
    }

    return 0;
}


static int
drop_starts(void **unused)
{
    (void) unused;

    for (int s = 0; s < N_STARTS; s++) {
        unlink(starts[s].path);
        buf_fini(&starts[s].want);
        buf_fini(&starts[s].plain);
    }

    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_auto),
        cmocka_unit_test(test_graphs),
    };

    more = getenv("LLM_TEST_LONG") != NULL;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    more = false;
#endif

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, make_starts, drop_starts);
}
