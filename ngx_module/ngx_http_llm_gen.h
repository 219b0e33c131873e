/*
 * A generation: one engine process and its successors after crashes, as long
 * as its llm_engine block does not change.  Generations are heap memory of the
 * master, inherited by workers and engines: they outlive the cycle that made
 * them.
 */

#ifndef NGX_HTTP_LLM_GEN_H
#define NGX_HTTP_LLM_GEN_H

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
    char                    *name;        /* of the llm_engine block */
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
    ngx_uint_t               retired;     /* its engine drains */
};


/* All that matters of a block, as one string on the heap; NULL: no memory. */
char *ngx_http_llm_gen_key(ngx_cycle_t *cycle, ngx_http_llm_engine_t *engine);

/* Takes key over.  NULL when something could not be created. */
ngx_http_llm_gen_t *ngx_http_llm_gen_create(ngx_cycle_t *cycle,
    ngx_http_llm_engine_t *engine, char *key);
void ngx_http_llm_gen_destroy(ngx_http_llm_gen_t *gen);

#endif /* NGX_HTTP_LLM_GEN_H */
