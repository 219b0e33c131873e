/*
 * The engine process seen from nginx's master.
 *
 * At boot the process that reads the configuration is not the one that stays
 * (ngx_daemon forks), so nothing is forked here.  Instead a slot of
 * ngx_processes[] is armed: it looks like a process that died and is to be
 * respawned, and the daemonised master forks it with its regular machinery,
 * at once and after every crash.
 *
 * On reload an engine whose block is unchanged is hidden from the QUIT that
 * the old workers get; a changed one gets it and drains, while its successor
 * starts beside it.
 */

#include "ngx_module/ngx_http_llm_process.h"

#include <ngx_channel.h>

#include <sys/eventfd.h>
#include <sys/mman.h>


/* more than any pid_max: a signal sent before the fork hits nobody */
#define NGX_HTTP_LLM_NO_PID        0x7ffffff0

#define NGX_HTTP_LLM_REQUEST_BYTES (4 * 1024 * 1024)
#define NGX_HTTP_LLM_OUT_BYTES     (32 * 1024)
#define NGX_HTTP_LLM_LOG_TOKENS    262144

#define NGX_HTTP_LLM_ARGS          20


static ngx_http_llm_gen_t *ngx_http_llm_gen_get(ngx_cycle_t *cycle,
    ngx_http_llm_engine_t *engine);
static ngx_http_llm_gen_t *ngx_http_llm_gen_create(ngx_cycle_t *cycle,
    ngx_http_llm_engine_t *engine, char *key);
static ngx_int_t ngx_http_llm_gen_open(ngx_cycle_t *cycle,
    ngx_http_llm_gen_t *gen, ngx_http_llm_engine_t *engine);
static void ngx_http_llm_gen_destroy(ngx_http_llm_gen_t *gen);
static void ngx_http_llm_gen_retire(void *data);


static ngx_http_llm_gen_t  *ngx_http_llm_gens;


void
ngx_http_llm_process_ring(int fd)
{
    uint64_t  one;

    one = 1;

    if (write(fd, &one, sizeof(one)) != sizeof(one)) {
        /* the counter is at its maximum: the other side will wake anyway */
        return;
    }
}


static ngx_uint_t
ngx_http_llm_n_workers(ngx_core_conf_t *ccf)
{
    ngx_uint_t  n;

    /* old and new workers overlap in a reload, and again in the next one */
    n = ngx_max(32, 8 * (ngx_uint_t) ngx_max(ccf->worker_processes, 1));

    return ngx_min(n, LLM_MAX_WORKERS);
}


static ngx_int_t
ngx_http_llm_slot_find(ngx_http_llm_gen_t *gen)
{
    ngx_int_t  i;

    for (i = 0; i < ngx_last_process; i++) {
        if (ngx_processes[i].pid != -1 && ngx_processes[i].data == gen) {
            return i;
        }
    }

    return -1;
}


/*
 * When the armed slot is reaped, the master tells all processes to close their
 * end of its channel.  Workers forked before do not know that channel yet, and
 * would close descriptor 0.
 */

static void
ngx_http_llm_slot_announce(ngx_cycle_t *cycle, ngx_int_t s)
{
    ngx_int_t      i;
    ngx_channel_t  ch;

    ngx_memzero(&ch, sizeof(ngx_channel_t));

    ch.command = NGX_CMD_OPEN_CHANNEL;
    ch.pid = ngx_processes[s].pid;
    ch.slot = s;
    ch.fd = ngx_processes[s].channel[0];

    for (i = 0; i < ngx_last_process; i++) {

        if (i == s || ngx_processes[i].pid == -1
            || ngx_processes[i].exited
            || ngx_processes[i].channel[0] == -1)
        {
            continue;
        }

        (void) ngx_write_channel(ngx_processes[i].channel[0], &ch,
                                 sizeof(ngx_channel_t), cycle->log);
    }
}


static ngx_int_t
ngx_http_llm_slot_arm(ngx_cycle_t *cycle, ngx_http_llm_gen_t *gen)
{
    ngx_int_t         s;
    ngx_process_t    *p;
    ngx_core_conf_t  *ccf;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

    /* a high slot: some modules predict that workers get the first ones */

    s = 4 * ccf->worker_processes + 16;

    while (s < ngx_last_process && ngx_processes[s].pid != -1) {
        s++;
    }

    if (s >= NGX_MAX_PROCESSES) {
        ngx_log_error(NGX_LOG_EMERG, cycle->log, 0,
                      "llm: no room in the process table for an engine");
        return NGX_ERROR;
    }

    p = &ngx_processes[s];

    /* real descriptors: the master closes and writes them */

    if (socketpair(AF_UNIX, SOCK_STREAM|SOCK_CLOEXEC|SOCK_NONBLOCK, 0,
                   p->channel)
        == -1)
    {
        ngx_log_error(NGX_LOG_EMERG, cycle->log, ngx_errno,
                      "llm: socketpair() failed");
        return NGX_ERROR;
    }

    while (ngx_last_process < s) {
        ngx_processes[ngx_last_process++].pid = -1;
    }

    p->pid = NGX_HTTP_LLM_NO_PID;
    p->status = 0;
    p->proc = ngx_http_llm_launch;
    p->data = gen;

    /* never freed: the table may outlive this module's code and data */
    p->name = strdup("llm engine");

    p->respawn = 1;
    p->just_spawn = (ngx_process == NGX_PROCESS_MASTER);
    p->detached = 0;
    p->exiting = 0;
    p->exited = 1;

    if (s == ngx_last_process) {
        ngx_last_process++;
    }

    if (ngx_process == NGX_PROCESS_MASTER) {
        ngx_http_llm_slot_announce(cycle, s);
    }

    ngx_reap = 1;

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_slot_keep(ngx_cycle_t *cycle, ngx_http_llm_gen_t *gen)
{
    ngx_int_t  s;

    s = ngx_http_llm_slot_find(gen);

    /* gone: exit code 2, or drained by WINCH and now rolled back */

    if (s < 0 || ngx_processes[s].exiting || !ngx_processes[s].respawn) {
        gen->launch->quick = 0;
        gen->launch->started_ns = 0;

        return ngx_http_llm_slot_arm(cycle, gen);
    }

    ngx_processes[s].just_spawn = 1;
    ngx_processes[s].proc = ngx_http_llm_launch;

    ngx_log_error(NGX_LOG_NOTICE, cycle->log, 0,
                  "llm: engine process %P kept", ngx_processes[s].pid);

    return NGX_OK;
}


ngx_int_t
ngx_http_llm_process_init(ngx_cycle_t *cycle)
{
    ngx_int_t                  s;
    ngx_uint_t                 i;
    ngx_core_conf_t           *ccf;
    ngx_pool_cleanup_t        *cln;
    ngx_http_llm_gen_t        *gen;
    ngx_http_llm_engine_t    **engines;
    ngx_http_llm_main_conf_t  *lmcf;

    lmcf = ngx_http_cycle_get_module_main_conf(cycle, ngx_http_llm_module);

    if (ngx_test_config || lmcf == NULL) {
        return NGX_OK;
    }

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

    cln = ngx_pool_cleanup_add(cycle->pool, 0);
    if (cln == NULL) {
        return NGX_ERROR;
    }

    engines = lmcf->engines.elts;

    for (i = 0; i < lmcf->engines.nelts; i++) {

        gen = ngx_http_llm_gen_get(cycle, engines[i]);

        if (gen == NULL) {

            /* in a reload an error here would end the running master */

            if (ngx_is_init_cycle(cycle->old_cycle)) {
                return NGX_ERROR;
            }

            continue;
        }

        engines[i]->gen = gen;
        gen->cycle = cycle;

        if (ccf->master) {
            (void) ngx_http_llm_slot_keep(cycle, gen);
        }
    }

    cln->handler = ngx_http_llm_gen_retire;
    cln->data = cycle;

    /* what this cycle did not adopt gets the old workers' QUIT and drains */

    for (gen = ngx_http_llm_gens; gen; gen = gen->next) {

        s = (gen->cycle == cycle) ? -1 : ngx_http_llm_slot_find(gen);

        if (s >= 0) {
            ngx_processes[s].respawn = 0;
            ngx_processes[s].just_spawn = 0;
        }
    }

    return NGX_OK;
}


/*
 * A cycle's pool is being destroyed: the generations that no later cycle has
 * adopted go with it.  It works the same when the module itself has left the
 * configuration, and runs before the module's code is unmapped.
 */

static void
ngx_http_llm_gen_retire(void *data)
{
    ngx_cycle_t *cycle = data;

    ngx_int_t            s;
    ngx_http_llm_gen_t  *gen, **next;

    if (ngx_process != NGX_PROCESS_MASTER) {
        return;
    }

    next = &ngx_http_llm_gens;

    while (*next) {
        gen = *next;

        if (gen->cycle != cycle) {
            next = &gen->next;
            continue;
        }

        s = ngx_http_llm_slot_find(gen);

        if (s >= 0) {
            ngx_processes[s].respawn = 0;
            ngx_processes[s].data = NULL;
        }

        *next = gen->next;
        ngx_http_llm_gen_destroy(gen);
    }
}


static char *
ngx_http_llm_gen_key(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine)
{
    char             *key;
    int               n;
    ngx_core_conf_t  *ccf;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

#define llm_str(s)  (int) (s).len, (char *) (s).data

    n = asprintf(&key, "%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s|%.*s"
                 "|%lu|%lu|%lu|%lu|%lu|%lu|%lld|%ld|%ld",
                 llm_str(engine->name), llm_str(engine->model),
                 llm_str(engine->alias), llm_str(engine->device),
                 llm_str(engine->chat_template), llm_str(engine->program),
                 llm_str(engine->log), llm_str(engine->log_level),
                 (unsigned long) engine->block_size,
                 (unsigned long) engine->max_model_len,
                 (unsigned long) engine->max_num_seqs,
                 (unsigned long) engine->max_num_batched_tokens,
                 (unsigned long) engine->threads,
                 (unsigned long) engine->slots,
                 (long long) engine->kv_cache_memory,
                 (long) ccf->user, (long) ccf->group);

#undef llm_str

    return n < 0 ? NULL : key;
}


static ngx_http_llm_gen_t *
ngx_http_llm_gen_get(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine)
{
    char                *key;
    ngx_core_conf_t     *ccf;
    ngx_http_llm_gen_t  *gen;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

    key = ngx_http_llm_gen_key(cycle, engine);
    if (key == NULL) {
        return NULL;
    }

    for (gen = ngx_http_llm_gens; gen; gen = gen->next) {

        /* both generations of workers must find an index each */

        if (ngx_strcmp(gen->key, key) == 0
            && gen->shm.geo.n_workers
               >= 2 * (ngx_uint_t) ngx_max(ccf->worker_processes, 1))
        {
            free(key);
            return gen;
        }
    }

    gen = ngx_http_llm_gen_create(cycle, engine, key);

    if (gen == NULL) {
        ngx_log_error(NGX_LOG_EMERG, cycle->log, ngx_errno,
                      "llm: no resources for engine \"%V\"", &engine->name);
    }

    return gen;
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
        { "chat_template", &engine->chat_template, 0 },
        { "log_level", &engine->log_level, 0 },
        { "max_model_len", NULL, engine->max_model_len },
        { "max_num_seqs", NULL, engine->max_num_seqs },
        { "max_num_batched_tokens", NULL, engine->max_num_batched_tokens },
        { "kv_cache_memory", NULL, (ngx_uint_t) engine->kv_cache_memory },
        { "threads", NULL, engine->threads },
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


static ngx_http_llm_gen_t *
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

    if (ngx_http_llm_gen_open(cycle, gen, engine) != NGX_OK) {
        ngx_http_llm_gen_destroy(gen);
        return NULL;
    }

    gen->next = ngx_http_llm_gens;
    ngx_http_llm_gens = gen;

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


static void
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
    free(gen->key);
    free(gen);
}
