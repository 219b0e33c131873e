/*
 * The engine process as nginx's master sees it: one generation per distinct
 * llm_engine block, with its segment, descriptors and place in nginx's process
 * table.  Generations are heap memory: they outlive the cycle that made them.
 */

#ifndef NGX_HTTP_LLM_PROCESS_H
#define NGX_HTTP_LLM_PROCESS_H

#include "ngx_module/ngx_http_llm_module.h"
#include "engine/ipc/shm.h"


/* lives in anonymous shared memory: each launch is a new child */
typedef struct {
    uint64_t                 started_ns;  /* last launch */
    uint32_t                 quick;       /* launches that died young */
    _Atomic int32_t          pid;         /* of the last launch, before the
                                             engine says so itself */
} ngx_http_llm_launch_t;


struct ngx_http_llm_gen_s {
    ngx_http_llm_gen_t      *next;

    char                    *key;         /* everything that, when changed,
                                             needs another engine */
    char                   **argv;
    char                    *log;         /* file for stderr, or NULL */
    char                    *user;
    uid_t                    uid;
    gid_t                    gid;

    llm_shm_t                shm;
    int                      doorbell;    /* workers ring, the engine waits */
    int                     *wake;        /* [n_workers], the other way */
    int                      lifeline[2]; /* EOF: all of nginx has gone */

    ngx_http_llm_launch_t   *launch;
    ngx_cycle_t             *cycle;       /* the last one that uses it */
};


/* init_module: adopts, starts and retires generations. */
ngx_int_t ngx_http_llm_process_init(ngx_cycle_t *cycle);

/* init_process of a worker: wakes the master so that it forks what is armed;
 * without a master starts the engines itself and watches them. */
void ngx_http_llm_process_kick(ngx_cycle_t *cycle);

/* In the forked child: becomes the engine.  Does not return. */
void ngx_http_llm_launch(ngx_cycle_t *cycle, void *data);

/* Writes 1 to an eventfd. */
void ngx_http_llm_process_ring(int fd);

#endif /* NGX_HTTP_LLM_PROCESS_H */
