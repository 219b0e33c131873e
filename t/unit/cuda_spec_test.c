/*
 * Speculative decoding on the emulated GPU changes no answer: the requests of
 * engine_storm.h for a tiny model, with each way to draft and any number of
 * drafts, with few pages and many; each must answer bit for bit what it
 * answered alone without drafts.  Rows that are verified must have been beside
 * rows that are decoded by padded graphs, or all of this proves little.
 *
 * LLM_TEST_LONG runs twice as much of the matrix.
 */

#include <fcntl.h>

#include "t/unit/engine_drafts.h"
#include "t/unit/engine_tiny.h"

#include "t/shim/options.h"

enum { TINY_HEAD = 32, PATH = 64 };

/* Steps of the main model. */
typedef struct {
    uint64_t steps;  /* counted so far, of this engine */
    uint64_t graphs; /* launched so far */
    uint64_t ahead;  /* rows computed ahead so far, of this engine */

    uint64_t verified;
    uint64_t beside; /* of these, with a chunk of a prompt in them, too */
    uint64_t drafted_by_graphs; /* of these, by a draft model's graphs */
    uint64_t replayed;          /* decode by a graph */
    uint64_t padded;            /* of these, with padding rows */
} passes_t;

static passes_t passes;
static bool more;
static int first_count; /* of drafts, in counts */


static void
count_pass(const engine_t *engine)
{
    const op_batch_t *op = &engine->batch.op;
    const uint64_t steps = llm_stats_get(&engine->stats->steps);
    const uint64_t graphs = shim_stats.graph_launches - passes.graphs;
    const int ahead =
        (int) (llm_stats_get(&engine->stats->rows_ahead) - passes.ahead);
    bool verified = false;

    passes.graphs += graphs;
    passes.ahead += (uint64_t) ahead;

    if (steps == passes.steps) {
        return; /* nothing could run */
    }

    passes.steps = steps;

    for (int i = 0; i < op->n_out; i++) {
        verified |= engine->batch.outs[i].verify;
    }

    if (verified) {
        passes.verified++;
        passes.beside += op->n_rows > op->n_out;
        passes.drafted_by_graphs += graphs > 0;
        assert_true(graphs == 0 || engine->conf.speculative_model != NULL);

    } else if (graphs > 0 && engine->conf.speculative_model == NULL) {
        const int n = ahead > 0 ? ahead : op->n_rows;

        assert_true(graphs == 1
                    || (graphs == 2 && ahead > 0 && op->n_rows > 0));
        assert_true(ahead > 0 || (n == op->n_seqs && n == op->n_out));
        passes.replayed++;
        passes.padded += (n & (n - 1)) != 0 && n % 8 != 0;
    }
}


/* A model's file that needs no name: a path of [PATH] to it. */
static void
tiny_path(char *path, op_dtype_t dtype)
{
    tiny_dtype = dtype;
    tiny_file(path);

    const int fd = open(path, O_RDONLY);

    assert_int_not_equal(fd, -1);
    unlink(path);
    snprintf(path, PATH, "/proc/self/fd/%d", fd);
}


static const setup_t setups[] = {
    { .caching = true,
      .chunked = true,
      .budget = 64,
      .max_len = MAX_LEN,
      .pages = FEW_PAGES,
      .dtype = OP_F16 },
    { .caching = true,
      .chunked = true,
      .budget = 512,
      .max_len = MAX_LEN,
      .dtype = OP_Q8_0 },
    { .chunked = false,
      .budget = 512,
      .max_len = MAX_LEN,
      .pages = FEW_PAGES,
      .dtype = OP_Q8_0 },
    { .chunked = true, .budget = 256, .max_len = MAX_LEN, .dtype = OP_F16 },
};


static void
test_without_drafts(void **state)
{
    random_t random = random_start("the emulated GPU without speculation");
    drafter_t none = { .name = "none" };

    (void) state;
    run_alone(OP_F16, alone[0]);
    run_alone(OP_Q8_0, alone[1]);
    watch = count_pass;

    for (int s = 0; s < 4; s++) {
        passes = (passes_t){ .graphs = shim_stats.graph_launches };
        run_with(setups[s], &none, "3", &random);
        assert_int_equal(none.tokens + passes.verified, 0);
        assert_true(passes.replayed > passes.padded && passes.padded > 0);
    }
}


static void
test_same_answers(void **state)
{
    static const char *const counts[] = { NULL, "1", "3", "7" };
    random_t random = random_start("speculation on the emulated GPU");

    (void) state;
    noise = random;
    passes = (passes_t){ 0 };

    for (int i = 0; i < 4 * N_DRAFTERS * 4; i++) {
        const int s = i % 4, d = i / 4 % N_DRAFTERS, k = i / 4 / N_DRAFTERS;

        /* each drafter and number with one setting, or with two */
        const int differs = (d + k + s) % 4;

        if (k >= first_count && (differs == 0 || (more && differs == 2))) {
            passes.steps = 0;
            passes.ahead = 0;
            passes.graphs = shim_stats.graph_launches;
            run_with(setups[s], &drafters[d], counts[k], &random);
        }
    }

    printf("# steps: %u verified, %u of them beside a chunk, %u drafted by "
           "graphs; %u decoded by a graph, %u of them padded\n",
           (unsigned) passes.verified, (unsigned) passes.beside,
           (unsigned) passes.drafted_by_graphs, (unsigned) passes.replayed,
           (unsigned) passes.padded);
    check_drafters(first_count == 0);
    assert_true(passes.beside > 0 && passes.drafted_by_graphs > 0);
    assert_true(passes.replayed > 0 && passes.padded > 0);
}


int
main(void)
{
    static char model[PATH], draft[PATH];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_drafts),
        cmocka_unit_test(test_same_answers),
    };

    tiny_head_dim = TINY_HEAD;
    tiny_path(model, OP_Q8_0);
    tiny_path(draft, OP_F16); /* nearly the same */

    subject = (subject_t){ .model = model,
                           .draft = draft,
                           .device = "cuda",
                           .n_vocab = TINY_VOCAB,
                           .seqs = 8,
                           .kv_values = 2 * 2 * 2 * TINY_HEAD };
    texts = (storm_texts_t){
        .parts = { "the cat sat on the wall ",
                   "and a dog was there, it ran away to the sea. ",
                   "one two three four five six seven eight nine. " },
        .questions = { "where?", "what then?", "who was it in 19",
                       "1 + 1 =", "oh" },
        .stops = { "a", "e", "1" },
    };

    more = getenv("LLM_TEST_LONG") != NULL;
    shim_options()->memory = (size_t) 256 << 20;
    n_requests = 16;
    rounds_of_suffix = 2;
    n_preemptions = 4;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    more = false;
    first_count = 3;
#endif

    log_open(NULL, LOG_WARN);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
