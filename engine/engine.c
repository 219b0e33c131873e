/*
 * Opening and closing an engine, and one turn of it.
 *
 * Start-up order: file, tokenizer, template and shape (cheap, most mistakes
 * show here), device, weights, KV pages.  Whatever fails says so in one
 * sentence; with device auto what fails on a GPU begins again on the CPU.
 */

#include "engine/engine.h"

#include <stdlib.h>
#include <string.h>

#include "engine/ahead.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/budget.h"
#include "engine/draw.h"
#include "engine/emit.h"
#include "engine/intake.h"
#include "engine/intake_thread.h"
#include "engine/kv/store.h"
#include "engine/load.h"
#include "engine/model/repack_cache.h"
#include "engine/runner.h"
#include "engine/speculate.h"
#include "engine/tally.h"
#include "kernels/backend.h"

enum { LOGIT_ROWS_MAX = 64 }; /* rows of logits computed at once */


/* Opens a backend; its device in a sentence of err when it cannot. */
static bool
open_backend(engine_t *engine, const char *name, op_err_t *err)
{
    const op_open_t how = { .threads = engine->conf.threads,
                            .isa = engine->conf.isa,
                            .reserved = engine->conf.reserved_cpus,
                            .pinned = engine->conf.cpu_affinity,
                            .device = backend_device(name),
                            .loose = !engine->conf.deterministic };

    engine->ops = backend_find(name);
    engine->dev = engine->ops->open(&how, err);

    if (engine->dev == NULL) {
        return false;
    }

    engine->n_samplers =
        engine->ops->parallel != NULL ? engine->ops->threads(engine->dev) : 1;

    if (engine->n_samplers > ENGINE_SAMPLERS_MAX) {
        engine->n_samplers = ENGINE_SAMPLERS_MAX;
    }

    return true;
}


/* With "auto" a GPU that cannot be used is no mistake, but one line says why
 * it is not. */
static int
open_device(engine_t *engine, llm_err_t *err)
{
    const char *name = engine->conf.device;
    op_err_t op_err = { .text = "" };

    if (backend_find(name) == NULL) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           strncmp(name, "cuda", 4) == 0
                               ? "device %s is not in this build, which was "
                                 "made without a CUDA compiler, or is no "
                                 "number of a GPU: use auto or cpu"
                               : "device %s is not known: use auto, cpu, cuda "
                                 "or cuda:N",
                           name);
    }

    if (open_backend(engine, name, &op_err)) {
        return LLM_OK;
    }

    if (strcmp(name, "auto") == 0 && engine->ops != backend_find("cpu")) {
        log_write(LOG_NOTICE, "device auto: using the CPU, because %s",
                  op_err.text);

        if (open_backend(engine, "cpu", &op_err)) {
            return LLM_OK;
        }
    }

    return llm_err_set(err, LLM_ERROR, NULL, "device %s: %s", name,
                       op_err.text);
}


/* With max_model_len auto the context is what the model was trained for, or
 * what fits. */
static int
read_config(engine_t *engine, const gguf_t *gguf, model_config_t *config,
            llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    const int rc = model_config_read(gguf, config, err);

    if (rc != LLM_OK) {
        return rc;
    }

    if (config->n_vocab != tok_n_vocab(engine->tok)) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "the file has %d tokens but embeds %d",
                           tok_n_vocab(engine->tok), config->n_vocab);
    }

    memcpy(engine->model_name, config->name, sizeof(engine->model_name));
    engine->model_name[sizeof(engine->model_name) - 1] = '\0';

    if (conf->max_model_len > config->n_ctx) {
        log_write(LOG_WARN,
                  "model: max_model_len %d is beyond the %d tokens that the "
                  "model was trained for",
                  conf->max_model_len, config->n_ctx);
    }

    engine->max_model_len =
        conf->max_model_len > 0 ? conf->max_model_len : config->n_ctx;

    if (!conf->chunked_prefill
        && engine->max_model_len > conf->max_num_batched_tokens)
    {
        log_write(LOG_WARN,
                  "model: max_model_len auto: %d tokens instead of %d, "
                  "because chunked_prefill is off and a step has no more",
                  conf->max_num_batched_tokens, engine->max_model_len);
        engine->max_model_len = conf->max_num_batched_tokens;
    }

    engine->max_out = conf->max_num_seqs < LOGIT_ROWS_MAX ? conf->max_num_seqs
                                                          : LOGIT_ROWS_MAX;

    return LLM_OK;
}


/* Weights, then pages. */
static int
open_model(engine_t *engine, const gguf_t *gguf, const model_config_t *config,
           llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    int rc = budget_check(engine, gguf, config, err);

    if (rc != LLM_OK) {
        return rc;
    }

    char *cache = repack_cache_path(conf->repack_cache, conf->model);
    const model_load_t how = {
        .ops = engine->ops,
        .dev = engine->dev,
        .max_rows = conf->max_num_batched_tokens,
        .max_seqs = conf->max_num_seqs,
        .max_out = engine->max_out,
        .max_len = engine->max_model_len,
        .repack_cache = cache,
        .path = conf->model,
    };

    rc = model_load(gguf, &how, &engine->model, err);
    free(cache);

    if (rc != LLM_OK) {
        return rc;
    }

    engine->kv = (op_kv_t){ .n_layers = config->n_layers,
                            .n_kv_heads = config->n_kv_heads,
                            .head_dim = config->head_dim,
                            .dtype = (op_dtype_t) conf->kv_cache_dtype };

    return LLM_OK;
}


static int
open_sched(engine_t *engine, llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;

    engine->pool = kv_pool_create(engine->kv.n_pages);

    const bool sharing = conf->prefix_caching && !conf->reservation;

    if (engine->pool != NULL && sharing) {
        engine->prefix = kv_prefix_create(engine->pool);
    }

    const sched_conf_t sched_conf = {
        .max_tokens = conf->max_num_batched_tokens,
        .max_seqs = conf->max_num_seqs,
        .prefix = engine->prefix,
        .whole_prompts = !conf->chunked_prefill,
        .long_prefill = conf->long_prefill_token_threshold,
        .output_ratio = conf->output_ratio,
        .cost = &engine->cost,
        .inter_token_ns = 1e6 * conf->inter_token_target,
        .reserve = conf->reservation ? engine->max_model_len : 0,
    };

    if (engine->pool != NULL && (engine->prefix != NULL || !sharing)) {
        engine->sched = sched_create(&sched_conf, engine->pool);
    }

    return engine->sched != NULL
               ? LLM_OK
               : llm_err_set(err, LLM_NOMEM, NULL,
                             "no memory for the records of %d pages",
                             engine->kv.n_pages);
}


static int
open_pages(engine_t *engine, llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    int rc = draw_reserve(engine, err);

    if (rc == LLM_OK) {
        rc = budget_pages(engine, err);
    }

    if (rc != LLM_OK) {
        return rc;
    }

    rc = open_sched(engine, err);

    if (rc == LLM_OK) {
        rc = speculate_reserve(engine, err);
    }

    if (rc != LLM_OK) {
        return rc;
    }

    rc = draw_open(engine, err);

    if (rc != LLM_OK) {
        return rc;
    }

    if (batch_init(&engine->batch, conf->max_num_batched_tokens,
                   conf->max_num_seqs)
        != LLM_OK)
    {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory for the batch");
    }

    rc = ahead_open(engine, err);

    if (rc != LLM_OK) {
        return rc;
    }

    llm_stats_set(&engine->stats->pages_total, (uint64_t) engine->kv.n_pages);

    return LLM_OK;
}


/* Everything is open, or was not to be had on a GPU: which one, and what it
 * says itself.  What a device that has failed lacks, it lacks for that. */
static int
check_device(const engine_t *engine, int rc, llm_err_t *err)
{
    const char *name = engine->conf.device;
    op_err_t op_err = { .text = "" };

    if (engine->dev == NULL) {
        return rc;
    }

    if (engine->ops->check(engine->dev, &op_err) != 0) {
        return llm_err_set(err, LLM_ERROR, NULL, "device %s: %s", name,
                           op_err.text);
    }

    if (rc != LLM_OK && !engine->ops->host) {
        const char *all = engine->ops->describe(engine->dev);
        const llm_err_t cause = *err;

        llm_err_set(err, rc, cause.param, "device %s (%.*s): %s", name,
                    (int) strcspn(all, ","), all, cause.text);
    }

    return rc;
}


/* remote: whether a device was opened that is not the host. */
static int
open_once(const engine_conf_t *conf, engine_t **out, bool *remote,
          llm_err_t *err)
{
    gguf_t *gguf = NULL;
    model_config_t config;
    engine_t *engine = calloc(1, sizeof(engine_t));

    if (engine == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    const uint64_t start = clock_now_ns();

    engine->conf = *conf;
    engine->stats = &engine->own_stats;
    list_init(&engine->requests);

    int rc = gguf_open(conf->model, &gguf, err);

    if (rc == LLM_OK) {
        rc = load_text(engine, gguf, err);
    }

    if (rc == LLM_OK) {
        rc = read_config(engine, gguf, &config, err);
    }

    if (rc == LLM_OK) {
        rc = open_device(engine, err);
    }

    *remote = engine->dev != NULL && !engine->ops->host;

    if (rc == LLM_OK) {
        rc = open_model(engine, gguf, &config, err);
    }

    if (rc == LLM_OK) {
        rc = speculate_open(engine, gguf, err);
    }

    gguf_close(gguf);

    if (rc == LLM_OK) {
        rc = open_pages(engine, err);
    }

    rc = check_device(engine, rc, err);

    if (rc != LLM_OK) {
        engine_close(engine);
        return rc;
    }

    log_write(LOG_NOTICE,
              "model: \"%s\" on %s (%s), weights %.1f MiB, "
              "activations %.1f MiB, ready in %.2f s",
              engine->model_name, engine->ops->name,
              engine->ops->describe(engine->dev),
              (double) model_weight_bytes(engine->model) / 1048576.0,
              (double) model_activation_bytes(engine->model) / 1048576.0,
              (double) (clock_now_ns() - start) / 1e9);

    *out = engine;

    return LLM_OK;
}


int
engine_open(const engine_conf_t *conf, engine_t **out, llm_err_t *err)
{
    bool remote = false;
    const int rc = open_once(conf, out, &remote, err);

    if (rc == LLM_OK || !remote || strcmp(conf->device, "auto") != 0) {
        return rc;
    }

    engine_conf_t other = *conf;

    log_write(LOG_WARN, "device auto: using the CPU, because %s", err->text);
    other.device = "cpu";

    return open_once(&other, out, &remote, err);
}


void
engine_close(engine_t *engine)
{
    if (engine == NULL) {
        return;
    }

    while (!list_empty(&engine->requests)) {
        request_t *req = list_entry(engine->requests.next, request_t, link);

        emit_abort(engine, req);
        request_destroy(req);
    }

    intake_thread_stop(engine);
    speculate_close(engine);
    ahead_close(engine);
    batch_fini(&engine->batch);

    draw_close(engine);
    sched_destroy(engine->sched);
    kv_prefix_destroy(engine->prefix);
    kv_pool_destroy(engine->pool);

    if (engine->kv.base != NULL) {
        kv_store_destroy(engine->ops, engine->dev, &engine->kv);
    }

    model_free(engine->model);

    if (engine->dev != NULL) {
        engine->ops->close(engine->dev);
    }

    chat_template_destroy(engine->tmpl);
    tok_destroy(engine->tok);
    tok_ids_fini(&engine->prompt.ids);
    buf_fini(&engine->prompt.text.text);
    buf_fini(&engine->prompt.text.trusted);
    free(engine->bos_text);
    free(engine->eos_text);
    free(engine);
}


bool
engine_step(engine_t *engine)
{
    const uint64_t start = clock_now_ns();
    const int fresh = engine->n_fresh;
    uint64_t since = start;

    speculate_propose(engine);

    const plan_t *plan = sched_step(engine->sched);

    tally_phase(engine, LLM_PHASE_SCHEDULE, &since);
    speculate_draft(engine, plan);
    tally_phase(engine, LLM_PHASE_FORWARD, &since);

    if (plan->n_rows > 0) {
        const uint64_t ns = runner_step(engine, plan);

        since = clock_now_ns();

        if (ns > 0) {
            cost_observe(&engine->cost, plan_cost(plan), ns);
        }

        speculate_learn(engine, plan);
    }

    rate_step(&engine->rate, start, fresh - engine->n_fresh, engine->n_fresh);
    tally_step(engine, plan);
    tally_phase(engine, LLM_PHASE_EMIT, &since);

#ifdef LLM_DEBUG
    sched_check(engine->sched);
#endif

    return plan->n_rows > 0 && !engine->failed;
}
