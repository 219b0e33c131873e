/*
 * The strongest test of a model: four sequences alone, then together in
 * batches that a seed cuts at random, over pages in any order.  Every row's
 * logits must be the same bits.
 */

#ifndef T_TOOLS_MODEL_STORM_H
#define T_TOOLS_MODEL_STORM_H

#include <time.h>

#include "t/tools/model_run.h"

enum { STORM_SEQS = 4 };

typedef struct {
    int n[STORM_SEQS];    /* tokens */
    int done[STORM_SEQS]; /* of them run in this round */
    int32_t *tokens[STORM_SEQS];
    int32_t *table[STORM_SEQS]; /* parts of one shuffled pool */
    float *alone[STORM_SEQS];
    int32_t *pool;
    uint32_t seed;
} storm_t;


static inline uint32_t
storm_random(storm_t *s, uint32_t below)
{
    s->seed ^= s->seed << 13;
    s->seed ^= s->seed >> 17;
    s->seed ^= s->seed << 5;

    return (s->seed >> 4) % below;
}


static inline void
storm_shuffle(storm_t *s, int n_pages)
{
    for (int i = n_pages - 1; i > 0; i--) {
        const int j = (int) storm_random(s, (uint32_t) i + 1);
        const int32_t page = s->pool[i];

        s->pool[i] = s->pool[j];
        s->pool[j] = page;
    }
}


/* One batch of random pieces; 0, or −1 with a sentence. */
static inline int
storm_step(storm_t *s, run_t *run, int max_rows, char *why)
{
    int32_t tokens[512], pos[512], rows[512], start[STORM_SEQS + 1] = { 0 };
    int who[512];
    const int32_t *tables[STORM_SEQS];
    int n = 0, seqs = 0;

    for (int q = 0; q < STORM_SEQS; q++) {
        const int room = max_rows - n;
        int left = s->n[q] - s->done[q];

        left = left < room ? left : room;
        if (left == 0 || storm_random(s, 3) == 0) {
            continue;
        }
        if (storm_random(s, 2) == 0) {
            left = 1 + (int) storm_random(s, (uint32_t) left);
        } else if (storm_random(s, 2) == 0) {
            left = 1;
        }

        for (int i = 0; i < left; i++, n++) {
            pos[n] = s->done[q] + i;
            tokens[n] = s->tokens[q][pos[n]];
            rows[n] = n;
            who[n] = q;
        }
        s->done[q] += left;
        tables[seqs++] = s->table[q];
        start[seqs] = n;
    }

    if (n == 0) {
        return 0;
    }

    const op_batch_t batch = { n, seqs, tokens, pos, start, tables, n, rows };
    const size_t v = (size_t) run->n_vocab;

    model_forward(run->model, &batch, &run->kv);

    const float *logits = model_logits(run->model, 0, n);

    for (int i = 0; i < n; i++) {
        if (memcmp(logits + (size_t) i * v,
                   s->alone[who[i]] + (size_t) pos[i] * v, v * sizeof(float))
            != 0)
        {
            snprintf(why, 200,
                     "sequence %d, position %d, in a batch of %d rows", who[i],
                     pos[i], n);
            return -1;
        }
    }

    return 0;
}


/* The reference: each sequence alone, in one batch where it fits. */
static inline void
storm_alone(storm_t *s, run_t *run, int n_pages, int max_rows)
{
    int at = 0;

    for (int i = 0; i < n_pages; i++) {
        s->pool[i] = i;
    }

    for (int q = 0; q < STORM_SEQS; q++) {
        s->tokens[q] = malloc((size_t) s->n[q] * sizeof(int32_t));
        s->alone[q] =
            malloc((size_t) s->n[q] * (size_t) run->n_vocab * sizeof(float));
        for (int i = 0; i < s->n[q]; i++) {
            s->tokens[q][i] =
                (int32_t) storm_random(s, (uint32_t) run->n_vocab);
        }
        s->table[q] = s->pool + at;
        at += (s->n[q] + OP_PAGE - 1) / OP_PAGE;
        run_sequence(run, s->tokens[q], s->n[q], max_rows, s->table[q],
                     s->alone[q]);
    }
}


/* Token by token, then random rounds.  longest: tokens of the first sequence;
 * the four need 2 * longest tokens of pages.  max_rows ≤ 512. */
static inline int
storm(run_t *run, int n_pages, int max_rows, int longest, char *why)
{
    const char *given = getenv("LLM_TEST_SEED");
    storm_t s = { .n = { longest, longest / 2, 17, 1 } };
    int rc = 0;

    s.seed = given != NULL ? (uint32_t) atoi(given) : (uint32_t) time(NULL);
    s.seed |= 1;
    printf("# seed %u\n", s.seed);
    s.pool = malloc((size_t) n_pages * sizeof(int32_t));
    storm_alone(&s, run, n_pages, max_rows);

    for (int round = 0; round < 4 && rc == 0; round++) {
        const int rows = round == 0 ? 1 : max_rows;
        int left = 1;

        storm_shuffle(&s, n_pages);
        memset(s.done, 0, sizeof(s.done));
        while (left > 0 && rc == 0) {
            rc = storm_step(&s, run, rows, why);
            left = 0;
            for (int q = 0; q < STORM_SEQS; q++) {
                left += s.n[q] - s.done[q];
            }
        }
    }

    for (int q = 0; q < STORM_SEQS; q++) {
        free(s.tokens[q]);
        free(s.alone[q]);
    }
    free(s.pool);

    return rc;
}

#endif /* T_TOOLS_MODEL_STORM_H */
