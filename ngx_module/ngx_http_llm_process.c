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
#include "ngx_module/ngx_http_llm_gen.h"

#include <ngx_channel.h>


/* more than any pid_max: a signal sent before the fork hits nobody */
#define NGX_HTTP_LLM_NO_PID        0x7ffffff0


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

    /* one that has failed is about to exit with code 2: it is not waited for,
     * nor started again when it has gone */

    if (s >= 0 && atomic_load(&gen->shm.header->state) == LLM_ENGINE_FAILED) {
        ngx_processes[s].respawn = 0;
        ngx_processes[s].data = NULL;
        s = -1;
    }

    /* new, or gone: exit code 2, or drained by WINCH and now rolled back */

    if (s < 0 || !ngx_processes[s].respawn) {
        gen->launch->quick = 0;
        gen->launch->started_ns = 0;

        /* the next reload must not take it for the one that has failed */
        atomic_store(&gen->shm.header->state, LLM_ENGINE_ABSENT);

        return ngx_http_llm_slot_arm(cycle, gen);
    }

    ngx_processes[s].just_spawn = 1;
    ngx_processes[s].proc = ngx_http_llm_launch;

    ngx_log_error(NGX_LOG_NOTICE, cycle->log, 0,
                  "llm: engine process %P kept", ngx_processes[s].pid);

    return NGX_OK;
}


/* the generation that this block had before, or a new one */

static ngx_http_llm_gen_t *
ngx_http_llm_process_gen(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine)
{
    char                *key;
    ngx_int_t            s;
    ngx_core_conf_t     *ccf;
    ngx_http_llm_gen_t  *gen;

    ccf = (ngx_core_conf_t *) ngx_get_conf(cycle->conf_ctx, ngx_core_module);

    key = ngx_http_llm_gen_key(cycle, engine);
    if (key == NULL) {
        return NULL;
    }

    for (gen = ngx_http_llm_gens; gen; gen = gen->next) {

        /* a draining engine is left alone: two must not share a segment; and
         * both generations of workers must find an index each */

        s = ngx_http_llm_slot_find(gen);

        if (ngx_strcmp(gen->key, key) == 0 && !gen->retired
            && (s < 0 || !ngx_processes[s].exiting)
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
        return NULL;
    }

    gen->next = ngx_http_llm_gens;
    ngx_http_llm_gens = gen;

    return gen;
}


/*
 * While a new engine loads its model, the engine that the block had before
 * answers: it has got its QUIT, but stays as long as workers are registered
 * with it.
 */

static void
ngx_http_llm_process_previous(ngx_cycle_t *cycle,
    ngx_http_llm_engine_t *engine)
{
    ngx_http_llm_gen_t  *gen;

    if (atomic_load(&engine->gen->shm.header->state) == LLM_ENGINE_READY) {
        return;
    }

    /* the list begins with the youngest */

    for (gen = ngx_http_llm_gens; gen; gen = gen->next) {

        if (gen != engine->gen && gen->cycle != cycle
            && ngx_strlen(gen->name) == engine->name.len
            && ngx_strncmp(gen->name, engine->name.data, engine->name.len) == 0
            && atomic_load(&gen->shm.header->state) == LLM_ENGINE_READY
            && ngx_http_llm_slot_find(gen) >= 0)
        {
            gen->cycle = cycle;
            gen->retired = 1;
            engine->previous = gen;
            return;
        }
    }
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

        gen = ngx_http_llm_process_gen(cycle, engines[i]);

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
            ngx_http_llm_process_previous(cycle, engines[i]);
        }
    }

    cln->handler = ngx_http_llm_gen_retire;
    cln->data = cycle;

    /* what this cycle did not adopt gets the old workers' QUIT and drains */

    for (gen = ngx_http_llm_gens; gen; gen = gen->next) {

        if (gen->cycle == cycle && !gen->retired) {
            continue;
        }

        gen->retired = 1;
        s = ngx_http_llm_slot_find(gen);

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
