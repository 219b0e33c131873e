/*
 * The engine: a model on a device, its pages, its scheduler, its requests.
 *
 * engine_open() reserves everything big; engine_step() is one turn.  How
 * requests arrive and how records leave is somebody else's: the port (shared
 * memory, serve) or the command line.
 */

#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <stdbool.h>

#include "engine/batch.h"
#include "engine/chat/template.h"
#include "engine/conf.h"
#include "engine/ipc/shm.h"
#include "engine/kv/memory.h"
#include "engine/kv/pool.h"
#include "engine/kv/prefix.h"
#include "engine/model/model.h"
#include "engine/rate.h"
#include "engine/request.h"
#include "engine/sample/sampler.h"
#include "engine/sched/sched.h"
#include "engine/text/tokenizer.h"

enum { ENGINE_SAMPLERS_MAX = 8 };

typedef struct engine_s engine_t;
typedef struct speculate_s speculate_t;
typedef struct draw_queue_s draw_queue_t;
typedef struct ahead_s ahead_t;

/* Scratch of whoever prepares a request: one at a time does. */
typedef struct {
    chat_output_t text;
    tok_ids_t ids;
} prompt_t;

struct engine_s {
    engine_conf_t conf;
    const op_table_t *ops;
    op_dev_t *dev;
    model_t *model;
    char model_name[256]; /* general.name of the file */
    tok_t *tok;
    chat_template_t *tmpl;
    bool failed;       /* the device has; there is nothing to do but to leave */
    bool own_template; /* from the file or chat_template, not the fallback */
    char *bos_text;
    char *eos_text;
    int max_model_len;
    int max_out; /* rows of logits computed at once */

    kv_memory_t memory; /* as it was before the model was loaded */
    op_kv_t kv;
    kv_pool_t *pool;
    kv_prefix_t *prefix; /* NULL: prefix_caching off, or reservation */
    sched_t *sched;
    cost_t cost;       /* of a step, learned */
    speculate_t *spec; /* NULL: off */
    batch_t batch;
    int n_samplers; /* threads that draw at once: ≤ the backend's */
    samp_t *samplers[ENGINE_SAMPLERS_MAX];
    samp_result_t *results; /* [max_out] */
    draw_queue_t *draws;    /* NULL: the backend does not draw */
    ahead_t *ahead;         /* NULL: nothing is computed ahead */
    bool in_flight;         /* some rows of the next step */
    uint64_t results_ns;    /* when the last step's results were here */

    list_t requests;
    int n_fresh;     /* of them to be generated and never scheduled yet */
    int n_preparing; /* of these with the intake thread */
    rate_t rate;     /* at which the fresh ones are scheduled */
    bool refused[LLM_MAX_WORKERS]; /* was the last request of this worker */
    prompt_t prompt;
    struct intake_thread_s *intake; /* NULL: all is prepared at once */

    llm_stats_t *stats; /* the segment's, or own_stats */
    llm_stats_t own_stats;

    struct port_s *port; /* for on_tokens */

    /* called with all tokens generated, in order; NULL: nobody listens */
    void (*on_tokens)(engine_t *engine, request_t *req, const int32_t *tokens,
                      int n);
};


/* Loads the model and reserves memory.  err: one sentence with the remedy. */
int engine_open(const engine_conf_t *conf, engine_t **engine, llm_err_t *err);
void engine_close(engine_t *engine);

/* One step: schedule, run, sample, emit.  False when nothing can run now. */
bool engine_step(engine_t *engine);

#endif /* ENGINE_ENGINE_H */
