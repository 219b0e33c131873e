/*
 * Where the memory of an engine goes: weights, activations, the rest of the
 * process, and KV pages in what gpu_memory_utilization leaves.
 *
 * Called by engine.c while it opens an engine.  On the CPU the base is the
 * memory that the process may use.  Everything big is reserved here and in
 * model_load(), so an engine that has started does not run out of memory; what
 * would not fit is an error before the kernel has a reason to kill anybody.
 */

#include "engine/budget.h"

#include "engine/ahead.h"
#include "engine/base/log.h"
#include "engine/kv/store.h"
#include "engine/kv/table.h"
#include "engine/speculate.h"


size_t
budget_weight_bytes(const gguf_t *gguf)
{
    size_t bytes = 0;

    for (int i = 0; i < gguf_n_tensors(gguf); i++) {
        gguf_str_t name;
        op_tensor_t t;

        gguf_tensor_at(gguf, i, &name, &t);

        bytes += t.n_out > 1 ? sizing_matrix_bytes(t.dtype, t.n_in, t.n_out)
                             : (size_t) t.n_in * sizeof(float);
    }

    return bytes;
}


size_t
budget_record_bytes(bool prefix_caching)
{
    const size_t count = sizeof(int32_t); /* the scheduler's */

    return kv_pool_record_bytes() + count
           + (prefix_caching ? kv_prefix_record_bytes() : 0);
}


size_t
budget_step_bytes(const sizing_step_t *step, int max_seqs, int n_vocab)
{
    return batch_bytes(step->max_rows, max_seqs) + ahead_bytes(max_seqs)
           + (size_t) max_seqs * sizeof(plan_row_t)
           + (size_t) step->samplers * samp_bytes(n_vocab)
           + (size_t) step->max_out * sizeof(samp_result_t);
}


/* What the device has: memory of its own, of which nothing of ours is mapped
 * that is not taken, or the host's. */
static void
read_memory(const engine_t *engine, kv_memory_t *memory)
{
    if (engine->ops->host) {
        kv_memory_read("", memory);
        return;
    }

    const op_memory_t device = engine->ops->memory(engine->dev);

    memory->total = device.total;
    memory->free = device.free;
    memory->space = SIZE_MAX;
    memory->own = 0;
    memory->mapped = 0;
}


/* Memory of a GPU is there to be used: without a directive, too. */
static double
utilization(const engine_t *engine)
{
    const double given = engine->conf.gpu_memory_utilization;

    return given > 0 || engine->ops->host ? given : KV_UTILIZATION;
}


int
budget_check(engine_t *engine, const gguf_t *gguf, const model_config_t *config,
             llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    kv_memory_t *memory = &engine->memory;

    read_memory(engine, memory);

    const size_t room =
        memory->free < memory->space ? memory->free : memory->space;

    if (conf->kv_cache_memory == 0 && utilization(engine) > 0) {
        const int rc = kv_store_check(memory->total, room + memory->own,
                                      utilization(engine), err);

        if (rc != LLM_OK) {
            return rc;
        }
    }

    const sizing_shape_t shape = sizing_shape(config, false);
    const sizing_step_t step = { .max_rows = conf->max_num_batched_tokens,
                                 .max_out = engine->max_out,
                                 .max_len = engine->max_model_len };
    const size_t weights = budget_weight_bytes(gguf);
    const size_t activations = sizing_activation_bytes(&shape, &step);

    if (weights + activations > room) {
        return llm_err_set(err, LLM_LIMIT, NULL,
                           "the model needs %s for weights and %s for "
                           "activations, but only %s of memory are free: use a "
                           "smaller model, lower max_num_batched_tokens, or "
                           "end what else uses the memory",
                           kv_amount(weights).text, kv_amount(activations).text,
                           kv_amount(room).text);
    }

    return LLM_OK;
}


/* What the process holds once the engine is open: what it held before, what
 * has been mapped since, and what a step takes.  Activations are mapped but
 * not yet touched, so resident memory does not show them; the model's own
 * account does not show the backend's scratch.  The larger of the two views
 * counts.  Weights mapped from a cache are no private memory, and the kernel
 * calls them free; but without them every step would read the disk. */
static void
take_stock_host(const engine_t *engine, kv_ask_t *ask)
{
    const kv_memory_t *before = &engine->memory;
    const sizing_step_t step = {
        .max_rows = engine->conf.max_num_batched_tokens,
        .max_out = engine->max_out,
        .samplers = engine->n_samplers,
    };
    const size_t account = model_weight_bytes(engine->model)
                           + model_activation_bytes(engine->model)
                           + speculate_model_bytes(engine);
    kv_memory_t now;

    kv_memory_read("", &now);

    const size_t mapped =
        (now.mapped > before->mapped ? now.mapped - before->mapped : 0)
        + model_mapped_bytes(engine->model);

    ask->total = now.total;
    ask->held = before->own + (mapped > account ? mapped : account)
                + budget_step_bytes(&step, engine->conf.max_num_seqs,
                                    model_config(engine->model)->n_vocab);

    /* promised, but not yet taken from what the kernel calls free */
    const size_t promised = ask->held > now.own ? ask->held - now.own : 0;

    ask->free = now.free > promised ? now.free - promised : 0;

    if (ask->free > now.space) {
        ask->free = now.space;
    }
}


/* A device's own memory is taken when it is asked for, so what is missing since
 * the engine was about to load is the engine's, and what the device says it
 * will take itself; what was missing before is others', and utilization is a
 * share of the whole. */
static void
take_stock(const engine_t *engine, kv_ask_t *ask)
{
    if (engine->ops->host) {
        take_stock_host(engine, ask);
        return;
    }

    const op_memory_t now = engine->ops->memory(engine->dev);
    const size_t before = engine->memory.free;
    const size_t asked = now.later + speculate_later_bytes(engine);
    const size_t later = asked < now.free ? asked : now.free;

    ask->total = now.total;
    ask->held = (before > now.free ? before - now.free : 0) + later;
    ask->free = now.free - later;
}


static int
reserve(engine_t *engine, size_t page_bytes, llm_err_t *err)
{
    int rc = kv_store_create(engine->ops, engine->dev, &engine->kv, err);

    if (rc == LLM_OK && engine->conf.kv_cache_prefault && engine->ops->host) {
        rc = kv_store_prefault(engine->kv.base,
                               (size_t) engine->kv.n_pages * page_bytes, err);
    }

    return rc;
}


int
budget_pages(engine_t *engine, llm_err_t *err)
{
    const engine_conf_t *conf = &engine->conf;
    kv_size_t size;
    kv_ask_t ask = {
        .page_bytes = model_page_bytes(engine->model, conf->kv_cache_dtype)
                      + speculate_page_bytes(engine),
        .record_bytes =
            engine->ops->host ? budget_record_bytes(conf->prefix_caching) : 0,
        .kv_cache_memory = conf->kv_cache_memory,
        .utilization = utilization(engine),
        .max_seqs = conf->max_num_seqs,
        .max_len = engine->max_model_len,
        .auto_len = conf->max_model_len == 0,
    };

    take_stock(engine, &ask);

    int rc = kv_store_size(&ask, &size, err);

    if (rc != LLM_OK) {
        return rc;
    }

    if (size.max_len < engine->max_model_len) {
        log_write(LOG_WARN,
                  "kv: max_model_len auto: %d tokens instead of %d, because "
                  "no more fit the KV cache",
                  size.max_len, engine->max_model_len);
        engine->max_model_len = size.max_len;
    }

    engine->kv.n_pages = size.n_pages;
    rc = reserve(engine, model_page_bytes(engine->model, conf->kv_cache_dtype),
                 err);

    if (rc != LLM_OK) {
        return rc;
    }

    log_write(LOG_NOTICE,
              "kv: cache of %d tokens (%d pages, %s, %s); maximum concurrency "
              "for %d tokens per request: %.2fx",
              size.n_pages * KV_PAGE, size.n_pages,
              op_dtype_name(conf->kv_cache_dtype),
              kv_amount((size_t) size.n_pages * ask.page_bytes).text,
              size.max_len, (double) size.n_pages / kv_pages_for(size.max_len));
    log_write(LOG_INFO,
              "kv: of %s, %s are held by weights, activations and the "
              "process; %s are free",
              kv_amount(ask.total).text, kv_amount(ask.held).text,
              kv_amount(ask.free).text);

    return LLM_OK;
}
