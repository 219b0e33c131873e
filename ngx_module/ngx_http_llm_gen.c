/*
 * What one engine process needs and keeps over crashes: the shared segment,
 * the eventfds in both directions, the lifeline, its command line.
 */

#include "ngx_module/ngx_http_llm_gen.h"

#include <sys/eventfd.h>
#include <sys/mman.h>


/* sparse: only what is touched takes memory */
#define NGX_HTTP_LLM_REQUEST_BYTES  (4 * 1024 * 1024)
#define NGX_HTTP_LLM_OUT_BYTES      (32 * 1024)
#define NGX_HTTP_LLM_LOG_TOKENS     262144

#define NGX_HTTP_LLM_ARGS           40


static ngx_int_t ngx_http_llm_gen_open(ngx_cycle_t *cycle,
    ngx_http_llm_gen_t *gen, ngx_http_llm_engine_t *engine);


static ngx_uint_t
ngx_http_llm_n_workers(ngx_core_conf_t *ccf)
{
    ngx_uint_t  n;

    /* old and new workers overlap in a reload, and again in the next one */
    n = ngx_max(32, 8 * (ngx_uint_t) ngx_max(ccf->worker_processes, 1));

    return ngx_min(n, LLM_MAX_WORKERS);
}


char *
ngx_http_llm_gen_key(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine)
{
    char             *key;
    int               n;
    ngx_core_conf_t  *ccf;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

#define llm_str(s)  (int) (s).len, (char *) (s).data

    n = asprintf(&key, "%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s"
                 "|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s"
                 "|%lu|%lu|%lu|%lu|%lu|%lu|%lu|%lu|%lu|%lld|%ld|%ld",
                 llm_str(engine->name), llm_str(engine->model),
                 llm_str(engine->alias), llm_str(engine->device),
                 llm_str(engine->deterministic),
                 llm_str(engine->chat_template), llm_str(engine->program),
                 llm_str(engine->log), llm_str(engine->log_level),
                 llm_str(engine->prefix_caching),
                 llm_str(engine->chunked_prefill),
                 llm_str(engine->inter_token_target),
                 llm_str(engine->reservation),
                 llm_str(engine->gpu_memory_utilization),
                 llm_str(engine->kv_cache_prefault),
                 llm_str(engine->kv_cache_dtype),
                 llm_str(engine->repack_cache),
                 llm_str(engine->cpu_affinity),
                 llm_str(engine->speculative),
                 llm_str(engine->speculative_model),
                 (unsigned long) engine->block_size,
                 (unsigned long) engine->max_model_len,
                 (unsigned long) engine->max_num_seqs,
                 (unsigned long) engine->max_num_batched_tokens,
                 (unsigned long) engine->long_prefill_token_threshold,
                 (unsigned long) engine->threads,
                 (unsigned long) engine->reserved_cpus,
                 (unsigned long) engine->num_speculative_tokens,
                 (unsigned long) engine->slots,
                 (long long) engine->kv_cache_memory,
                 (long) ccf->user, (long) ccf->group);

#undef llm_str

    return n < 0 ? NULL : key;
}


static char **
ngx_http_llm_gen_argv(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine,
    ngx_uint_t n_workers)
{
    char                   **argv;
    ngx_uint_t               i, n;
    struct {
        const char          *name;
        ngx_str_t           *text;
        ngx_uint_t           number;
    } args[] = {
        { "name", &engine->name, 0 },
        { "model", &engine->model, 0 },
        { "alias", &engine->alias, 0 },
        { "device", &engine->device, 0 },
        { "deterministic", &engine->deterministic, 0 },
        { "chat_template", &engine->chat_template, 0 },
        { "log_level", &engine->log_level, 0 },
        { "max_model_len", NULL, engine->max_model_len },
        { "max_num_seqs", NULL, engine->max_num_seqs },
        { "max_num_batched_tokens", NULL, engine->max_num_batched_tokens },
        { "long_prefill_token_threshold", NULL,
          engine->long_prefill_token_threshold },
        { "inter_token_target", &engine->inter_token_target, 0 },
        { "chunked_prefill", &engine->chunked_prefill, 0 },
        { "prefix_caching", &engine->prefix_caching, 0 },
        { "reservation", &engine->reservation, 0 },
        { "gpu_memory_utilization", &engine->gpu_memory_utilization, 0 },
        { "kv_cache_prefault", &engine->kv_cache_prefault, 0 },
        { "kv_cache_memory", NULL, (ngx_uint_t) engine->kv_cache_memory },
        { "kv_cache_dtype", &engine->kv_cache_dtype, 0 },
        { "repack_cache", &engine->repack_cache, 0 },
        { "speculative", &engine->speculative, 0 },
        { "speculative_model", &engine->speculative_model, 0 },
        { "num_speculative_tokens", NULL, engine->num_speculative_tokens },
        { "threads", NULL, engine->threads },
        { "reserved_cpus", NULL, engine->reserved_cpus },
        { "cpu_affinity", &engine->cpu_affinity, 0 },
        { "workers", NULL, n_workers },
        { NULL, NULL, 0 }
    };

    argv = calloc(NGX_HTTP_LLM_ARGS, sizeof(char *));
    if (argv == NULL) {
        return NULL;
    }

    argv[0] = strndup((char *) engine->program.data, engine->program.len);
    argv[1] = strdup("serve");
    n = 2;

    for (i = 0; args[i].name; i++) {

        if (args[i].text && args[i].text->len) {
            if (asprintf(&argv[n++], "%s=%.*s", args[i].name,
                         (int) args[i].text->len, args[i].text->data)
                < 0)
            {
                return NULL;
            }

        } else if (args[i].number) {
            if (asprintf(&argv[n++], "%s=%lu", args[i].name,
                         (unsigned long) args[i].number)
                < 0)
            {
                return NULL;
            }
        }
    }

    return argv;
}


ngx_http_llm_gen_t *
ngx_http_llm_gen_create(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine,
    char *key)
{
    ngx_core_conf_t     *ccf;
    ngx_http_llm_gen_t  *gen;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

    gen = calloc(1, sizeof(ngx_http_llm_gen_t));
    if (gen == NULL) {
        free(key);
        return NULL;
    }

    gen->key = key;
    gen->name = strndup((char *) engine->name.data, engine->name.len);
    gen->uid = ccf->user;
    gen->gid = ccf->group;
    gen->shm.fd = -1;
    gen->doorbell = -1;
    gen->lifeline[0] = -1;
    gen->lifeline[1] = -1;

    if (ccf->username) {
        gen->user = strdup(ccf->username);
    }

    if (engine->log.len) {
        gen->log = strndup((char *) engine->log.data, engine->log.len);
    }

    if (gen->name == NULL
        || ngx_http_llm_gen_open(cycle, gen, engine) != NGX_OK)
    {
        ngx_http_llm_gen_destroy(gen);
        return NULL;
    }

    return gen;
}


static ngx_int_t
ngx_http_llm_gen_open(ngx_cycle_t *cycle, ngx_http_llm_gen_t *gen,
    ngx_http_llm_engine_t *engine)
{
    char              err[256];
    ngx_uint_t        i;
    llm_geometry_t    geo;
    ngx_core_conf_t  *ccf;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

    ngx_memzero(&geo, sizeof(llm_geometry_t));

    geo.n_workers = ngx_http_llm_n_workers(ccf);
    geo.slots_per_worker = engine->slots;
    geo.request_bytes = NGX_HTTP_LLM_REQUEST_BYTES;
    geo.out_bytes = NGX_HTTP_LLM_OUT_BYTES;
    geo.log_tokens = NGX_HTTP_LLM_LOG_TOKENS;

    if (llm_shm_create(&geo, &gen->shm, err, sizeof(err)) != 0) {
        ngx_log_error(NGX_LOG_EMERG, cycle->log, 0,
                      "llm: shared memory for engine \"%V\": %s",
                      &engine->name, err);
        gen->shm.fd = -1;
        gen->shm.base = NULL;
        return NGX_ERROR;
    }

    gen->wake = malloc(geo.n_workers * sizeof(int));
    gen->argv = ngx_http_llm_gen_argv(cycle, engine, geo.n_workers);

    if (gen->wake == NULL || gen->argv == NULL) {
        return NGX_ERROR;
    }

    gen->launch = mmap(NULL, sizeof(ngx_http_llm_launch_t),
                       PROT_READ|PROT_WRITE, MAP_SHARED|MAP_ANONYMOUS, -1, 0);
    if (gen->launch == MAP_FAILED) {
        gen->launch = NULL;
        return NGX_ERROR;
    }

    ngx_memset(gen->wake, 0xff, geo.n_workers * sizeof(int));

    for (i = 0; i < geo.n_workers; i++) {
        gen->wake[i] = eventfd(0, EFD_CLOEXEC|EFD_NONBLOCK);
        if (gen->wake[i] == -1) {
            return NGX_ERROR;
        }
    }

    gen->doorbell = eventfd(0, EFD_CLOEXEC|EFD_NONBLOCK);

    if (gen->doorbell == -1 || pipe2(gen->lifeline, O_CLOEXEC) == -1) {
        return NGX_ERROR;
    }

    return NGX_OK;
}


void
ngx_http_llm_gen_destroy(ngx_http_llm_gen_t *gen)
{
    int         fds[4];
    ngx_uint_t  i;

    if (gen->wake) {
        for (i = 0; i < gen->shm.geo.n_workers; i++) {
            if (gen->wake[i] != -1) {
                (void) close(gen->wake[i]);
            }
        }

        free(gen->wake);
    }

    fds[0] = gen->doorbell;
    fds[1] = gen->lifeline[0];
    fds[2] = gen->lifeline[1];
    fds[3] = gen->shm.fd;

    if (gen->shm.base) {
        llm_shm_detach(&gen->shm);
    }

    for (i = 0; i < 4; i++) {
        if (fds[i] != -1) {
            (void) close(fds[i]);
        }
    }

    if (gen->launch) {
        (void) munmap(gen->launch, sizeof(ngx_http_llm_launch_t));
    }

    if (gen->argv) {
        for (i = 0; gen->argv[i]; i++) {
            free(gen->argv[i]);
        }

        free(gen->argv);
    }

    free(gen->log);
    free(gen->user);
    free(gen->name);
    free(gen->key);
    free(gen);
}
