/*
 * A small model that drafts for a large one with the same vocabulary.
 *
 * It has K and V of its own, in a store with as many pages as the large
 * model's, and uses the same block tables: page p of the one holds the same
 * tokens as page p of the other.  So it has no allocator, pages found in the
 * prefix cache serve it, too, and a page counts in both stores.  It computes
 * a sequence only when that is to have drafts, and remembers for each page
 * of what tokens it holds K and V: their number, and a hash of them and all
 * before them.  (A wrong match would cost drafts, not answers.)
 *
 * Drafts are sampled as the answer is, with the same noise for a position, so
 * they agree where the models do.
 */

#ifndef ENGINE_SPEC_DRAFT_H
#define ENGINE_SPEC_DRAFT_H

#include "engine/model/gguf.h"
#include "engine/model/model.h"
#include "engine/sample/sampler.h"
#include "engine/sched/seq.h"

typedef struct draft_s draft_t;

typedef struct {
    const gguf_t *gguf;   /* of the small model, */
    const char *path;     /* its path, */
    const gguf_t *target; /* and of the large one */
    const op_table_t *ops;
    op_dev_t *dev; /* of the large one */
    int max_rows;  /* computed at once, ≥ max_seqs */
    int max_seqs;
    int max_len;
    const char *repack_cache; /* see model_load_t */
    op_dtype_t kv_dtype;
} draft_open_t;

/* What the small model knows of a sequence.  Zero: nothing. */
typedef struct {
    uint64_t *hashes; /* [pages] of its tokens to the end of each full page;
                         room for all of them, the owner's */
    int n_hashes;
    int done;      /* tokens computed, draft_missing() says */
    uint64_t hash; /* of these */
} draft_track_t;

/* A sequence that decodes; its pages are there for all of its tokens and
 * drafts. */
typedef struct {
    const seq_t *seq;
    draft_track_t *track;
    uint64_t owner; /* salt of its hashes */
    const samp_params_t *params;
    const samp_state_t *state;
    int n_output;
    int rows;       /* of its missing tokens, that may be computed now */
    int n;          /* drafts wanted; 0: only to catch up */
    int32_t *draft; /* [n] out */
} draft_want_t;


/* err names what is wrong with the model or its vocabulary. */
int draft_open(const draft_open_t *how, draft_t **draft, llm_err_t *err);
void draft_close(draft_t *draft);

size_t draft_weight_bytes(const draft_t *draft);
size_t draft_activation_bytes(const draft_t *draft);
size_t draft_page_bytes(const draft_t *draft);

/* What its device will take for itself: op_memory_t. */
size_t draft_later_bytes(const draft_t *draft);
const char *draft_name(const draft_t *draft);

/* K and V for n_pages pages. */
int draft_reserve(draft_t *draft, int n_pages, llm_err_t *err);

/* Tokens of the sequence that it has yet to compute before it can draft,
 * ≥ 1. */
int draft_missing(const draft_t *draft, const seq_t *seq, uint64_t owner,
                  draft_track_t *track);

/* Computes missing tokens, and drafts for those that have none left.  Rows of
 * all together are at most max_rows. */
void draft_run(draft_t *draft, draft_want_t *wants, int n);

/* What it takes at least to compute `rows` tokens, or to draft one for each of
 * as many sequences; 0: never measured. */
double draft_pass_ns(const draft_t *draft, int rows);

/* n_right of the n_draft drafts of its last run were right. */
void draft_settle(draft_t *draft, const seq_t *seq, uint64_t owner,
                  draft_track_t *track, int n_draft, int n_right);

#endif /* ENGINE_SPEC_DRAFT_H */
