/*
 * The engine's settings: `key=value` words as nginx's llm_engine block and the
 * command line give them.
 */

#ifndef ENGINE_CONF_H
#define ENGINE_CONF_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/spec/choose.h"

typedef enum {
    DRAFT_NGRAM = 0, /* what followed the same tokens in the sequence */
    DRAFT_SUFFIX     /* or in other recent ones */
} conf_draft_t;

/* One way to guess at tokens. */
typedef struct {
    conf_draft_t kind;
    int min; /* tokens that must be the same; of ngram */
    int max; /* that are looked at */
} conf_drafter_t;

typedef struct {
    const char *name;  /* of the llm_engine block */
    const char *model; /* path of a GGUF file */
    const char *alias; /* the name clients use; default: the file's name */
    const char *device;
    bool deterministic; /* off: faster and looser products of float weights */
    const char *isa;    /* instruction set override, or NULL */
    const char *repack_cache;  /* "on", "off", a folder, or NULL: off */
    const char *chat_template; /* path of a Jinja file, or NULL */
    const char *log;           /* path, or NULL: standard error */
    int log_level;
    int max_model_len; /* 0: auto */
    int block_size;    /* 16 */
    int max_num_seqs;
    int max_num_batched_tokens;
    int long_prefill_token_threshold; /* 0: the adaptive share alone */
    int inter_token_target; /* of a step with decodes, ms; 0: no limit */
    bool chunked_prefill;
    bool prefix_caching;
    bool reservation; /* to compare with: pages for max_model_len tokens each */
    double gpu_memory_utilization; /* 0.05 … 1; 0: the default */
    uint64_t kv_cache_memory;      /* bytes; 0: by the utilization */
    bool kv_cache_prefault;        /* touch the cache at start */
    int kv_cache_dtype;            /* an op_dtype_t: OP_F16 or OP_Q8_0 */
    conf_drafter_t drafters[SPEC_DRAFTERS]; /* in the order they are tried */
    int n_drafters;
    const char *speculative_model; /* path of a GGUF file, or NULL */
    int num_speculative_tokens;    /* 0: auto */
    int threads;                   /* 0: auto */
    int reserved_cpus;             /* not counted by threads auto */
    bool cpu_affinity;
    int workers; /* worker indexes of the segment */

    /* for tests, no settings: sched_conf_t's; a drafter tried before others,
     * which returns how many tokens it wrote; and see ahead.h */
    double output_ratio;
    int (*test_drafter)(const int32_t *tokens, int n_tokens, int n,
                        int32_t *draft);
    int ahead_after; /* steps without drafts before any rows are computed ahead;
                        0: ahead.c's own, < 0: none are */
} engine_conf_t;


/* Fills *conf with the defaults. */
void engine_conf_init(engine_conf_t *conf);

/* Applies one word, "key=value"; strings are borrowed.  LLM_BADREQ with key,
 * value and remedy. */
int engine_conf_set(engine_conf_t *conf, const char *word, llm_err_t *err);

/* What must hold once all words are applied. */
int engine_conf_check(const engine_conf_t *conf, llm_err_t *err);

#endif /* ENGINE_CONF_H */
