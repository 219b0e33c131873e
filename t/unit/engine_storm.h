/*
 * 48 requests with overlapping prefixes, in groups of one, two or four equal
 * prompts whose seeds differ, sampled in many ways; each run alone without a
 * cache, then all together, and the answers compared bit for bit.
 *
 * With few pages the clients are slow, too: sequences are parked and unparked
 * by chance, so that they lose their pages whatever the scheduler's policy is.
 */

#ifndef T_UNIT_ENGINE_STORM_H
#define T_UNIT_ENGINE_STORM_H

#include "t/unit/engine_answers.h"
#include "t/unit/random.h"

enum {
    N_REQUESTS = 48,
    CYCLE = 8, /* requests in four groups: 4, 2, 1, 1 */
    MAX_LEN = 192,
    SHORT_LEN = 64,
    FEW_PAGES = 16,
    FEW_SHORT_PAGES = 8
};

static answer_t alone[2][N_REQUESTS];
static int n_requests = N_REQUESTS;
static uint64_t n_preemptions = 100; /* at least, see least_preemptions */


/* What prompts are made of: three beginnings of which each continues the one
 * before, and questions; and where answers stop. */
typedef struct {
    const char *parts[3];
    const char *questions[5];
    const char *stops[3];
} storm_texts_t;

static storm_texts_t texts = {
    .parts = {
        "You are a helpful assistant. Answer briefly and politely, and say so "
        "when you do not know. ",
        "The user lives in Oslo and is interested in mountains, trains, old "
        "maps and the history of science. Dates are written day first. ",
        "Today the museum is closed, the library opens at nine, and the train "
        "to Bergen leaves at half past ten from platform four. Coffee is "
        "served at the seats. ",
    },
    .questions = {
        "Where is the station?",
        "What is a fjord?",
        "Who was Newton? Begin with the year of his birth.",
        "1 + 1 =",
        "When?",
    },
    .stops = { ".", ",", " the" },
};

/* called after each step of a storm, or NULL */
static void (*watch)(const engine_t *engine);


static inline int
group_of(int i)
{
    static const int in_cycle[CYCLE] = { 0, 0, 0, 0, 1, 1, 2, 3 };

    return i / CYCLE * 4 + in_cycle[i % CYCLE];
}


static inline int
first_of(int group)
{
    static const int in_cycle[4] = { 0, 4, 6, 7 };

    return group / 4 * CYCLE + in_cycle[group % 4];
}


static inline bool
is_short(int i)
{
    return i / CYCLE % 2 == 0;
}


static inline bool
takes_part(const setup_t *setup, int i)
{
    return i < n_requests && (setup->max_len >= MAX_LEN || is_short(i));
}


static inline llm_params_t
params_of(int i)
{
    const int g = group_of(i);

    return (llm_params_t){
        .temperature = g % 5 == 3 ? 0.0f : 0.8f + 0.03f * (float) g,
        .top_p = g % 4 == 1 ? 0.9f : 1.0f,
        .min_p = g % 7 == 4 ? 0.05f : 0.0f,
        .top_k = g % 3 == 2 ? 40 : 0,
        .repetition_penalty = g % 5 == 1 ? 1.2f : 1.0f,
        .presence_penalty = g % 6 == 4 ? 0.5f : 0.0f,
        .frequency_penalty = g % 6 == 2 ? 0.4f : 0.0f,
        .max_tokens = 6 + g * 5 % 15,
        .min_tokens = g % 7 == 1 ? 3 : 0,
        .top_logprobs = TOP,

        /* as the module numbers the choices of one request */
        .seed = 770 + 10 * (uint64_t) g + (uint64_t) (i - first_of(g)),
    };
}


/* A beginning, then a question that some share. */
static inline request_t *
submit_one(engine_t *engine, int i)
{
    const int g = group_of(i);
    const int n_parts = is_short(i) ? g % 4 < 3 : 1 + g % 3;
    char prompt[2048];
    size_t n = 0;

    for (int k = 0; k < n_parts; k++) {
        n += (size_t) snprintf(prompt + n, sizeof(prompt) - n, "%s",
                               texts.parts[k]);
    }

    n += (size_t) snprintf(prompt + n, sizeof(prompt) - n, "%s",
                           texts.questions[g % 5]);

    return submit(
        engine, &(order_t){ .kind = LLM_REQ_TEXT,
                            .flags = g % 2 ? LLM_F_STREAM : 0,
                            .prompt = prompt,
                            .len = n,
                            .stop = g % 3 == 1 ? texts.stops[g % 9 / 3] : NULL,
                            .params = params_of(i) });
}


static inline void
run_alone(op_dtype_t dtype, answer_t *answers)
{
    const setup_t plain = {
        .chunked = true, .budget = 512, .max_len = MAX_LEN, .dtype = dtype
    };
    engine_t *engine = open_engine(&plain);
    int n_short = 0, n_fit = 0, n_stopped = 0, n_same = 0, n_tokens = 0;

    for (int i = 0; i < n_requests; i++) {
        const int cap = (int) params_of(i).max_tokens;
        const answer_t *before = &answers[i > 0 ? i - 1 : 0];

        finish(engine, submit_one(engine, i), &answers[i]);
        assert_int_equal(answers[i].cached, 0);
        assert_true(answers[i].n <= cap);
        n_tokens += answers[i].n;
        n_short += is_short(i);

        if ((int) answers[i].prompt + cap <= SHORT_LEN) {
            n_fit += is_short(i);
        } else {
            assert_false(is_short(i));
        }

        n_stopped += answers[i].finish == LLM_FINISH_STOP;
        n_same += params_of(i).temperature > 0 && i > first_of(group_of(i))
                  && memcmp(before, &answers[i], sizeof(*before)) == 0;
    }

    printf("# alone: %d tokens, %d stopped, %d like the one before\n", n_tokens,
           n_stopped, n_same);

    /* seeds matter, and not everything runs to its limit */
    assert_true(n_fit == n_short && n_short >= n_requests / 2);
    assert_true(n_tokens > 5 * n_requests);
    assert_true(n_stopped >= n_requests / 16);
    assert_true(6 * n_same < n_requests);
    assert_int_equal(llm_stats_get(&engine->stats->prefix_hits), 0);
    close_idle(engine);
}


/* Where pages are few; with a cache, where they cost less, twice as many. */
static inline uint64_t
least_preemptions(const setup_t *setup)
{
    return n_preemptions * (1 + setup->caching);
}


/* Parks and unparks by chance, until there have been enough preemptions. */
static inline void
park_some(engine_t *engine, uint64_t least, random_t *random)
{
    const bool enough = sched_preemptions(engine->sched) >= least;

    for (list_t *l = engine->requests.next; l != &engine->requests; l = l->next)
    {
        seq_t *seq = &list_entry(l, request_t, link)->seq;

        if (seq->parked) {
            seq->parked = !enough && random_below(random, 2) == 0;
        } else if (seq->state == SEQ_RUNNING && !enough) {
            seq->parked = random_below(random, 3) > 0;
        }
    }
}


/* False: all have finished. */
static inline bool
storm_step(engine_t *engine, const setup_t *setup, random_t *random)
{
    if (setup->pages > 0) {
        park_some(engine, least_preemptions(setup), random);
    }

    const bool ran = engine_step(engine);

    sched_check(engine->sched);

    if (watch != NULL) {
        watch(engine);
    }

    return ran || sched_running(engine->sched) > 0
           || sched_waiting(engine->sched) > 0;
}


/* Each group together, after some more steps. */
static inline void
storm(engine_t *engine, const setup_t *setup, random_t *random,
      request_t **reqs)
{
    for (int i = 0; i < n_requests; i++) {
        reqs[i] = takes_part(setup, i) ? submit_one(engine, i) : NULL;

        for (int k = 0; group_of(i) != group_of(i + 1) && k < i % 4; k++) {
            storm_step(engine, setup, random);
        }
    }

    while (storm_step(engine, setup, random)) {
    }
}


static inline void
check_counts(const engine_t *engine, const setup_t *setup)
{
    const sched_hits_t *hits = sched_hits(engine->sched);
    const uint64_t preemptions = sched_preemptions(engine->sched);

    printf("# caching %-3s chunked %-3s budget %4d pages %3d %s: %u of %u "
           "tokens hit, %u of %u again, %u copies, %u preemptions, %u steps\n",
           setup->caching ? "on" : "off", setup->chunked ? "on" : "off",
           setup->budget, kv_pool_pages(engine->pool),
           op_dtype_name((int) setup->dtype), (unsigned) hits->hits,
           (unsigned) hits->queries, (unsigned) hits->again_hits,
           (unsigned) hits->again_queries, (unsigned) hits->forks,
           (unsigned) preemptions,
           (unsigned) llm_stats_get(&engine->stats->steps));

    if (setup->caching) {
        assert_true(hits->hits * 3 > hits->queries);
        assert_true(hits->forks > 0);
    } else {
        assert_int_equal(hits->queries + hits->forks, 0);
    }

    if (setup->pages > 0) {
        assert_true(preemptions >= least_preemptions(setup));
    } else {
        assert_int_equal(preemptions, 0);
    }
}


/* Everything once, and the answers compared. */
static inline void
run_round(engine_t *engine, const setup_t *setup, random_t *random)
{
    request_t *reqs[N_REQUESTS];
    int n = 0;

    storm(engine, setup, random, reqs);

    for (int i = 0; i < n_requests; i++) {
        answer_t answer;

        if (reqs[i] != NULL) {
            take_answer(reqs[i], &answer);
            same_answer(&alone[setup->dtype == OP_Q8_0][i], &answer, i, setup);
            n++;
        }
    }

    assert_int_equal(n,
                     setup->max_len == SHORT_LEN ? n_requests / 2 : n_requests);
}


/* With few pages as often as it takes to have enough preemptions. */
static inline void
run_together(const setup_t *setup, random_t *random)
{
    engine_t *engine = open_engine(setup);
    int rounds = 0;

    do {
        run_round(engine, setup, random);
        rounds++;
    } while (setup->pages > 0 && rounds < 8
             && sched_preemptions(engine->sched) < least_preemptions(setup));

    check_counts(engine, setup);
    close_idle(engine);
}


#endif /* T_UNIT_ENGINE_STORM_H */
