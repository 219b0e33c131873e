/*
 * The module's configuration: what the directives fill in and every other
 * file of the module reads.
 *
 * An engine conf lives in its cycle's pool.  The process that serves it, its
 * segment and its descriptors are the generation (ngx_http_llm_process.h),
 * which outlives cycles; the worker's end of it is the ring
 * (ngx_http_llm_ring.h).
 */

#ifndef NGX_HTTP_LLM_MODULE_H
#define NGX_HTTP_LLM_MODULE_H

#include <ngx_config.h>
#include <ngx_core.h>
#include <ngx_http.h>


#define NGX_HTTP_LLM_VERSION  "0.1.0"


typedef struct ngx_http_llm_gen_s   ngx_http_llm_gen_t;
typedef struct ngx_http_llm_ring_s  ngx_http_llm_ring_t;


/* one llm_engine block; 0 or an empty string: not set, the engine decides */
typedef struct {
    ngx_str_t                name;
    ngx_str_t                model;
    ngx_str_t                alias;
    ngx_str_t                device;
    ngx_str_t                deterministic;      /* "on" or "off" */
    ngx_str_t                kv_cache_dtype;
    ngx_str_t                chat_template;
    ngx_str_t                program;
    ngx_str_t                log;
    ngx_str_t                log_level;
    ngx_str_t                prefix_caching;     /* "on" or "off" */
    ngx_str_t                chunked_prefill;    /* the same */
    ngx_str_t                inter_token_target; /* milliseconds */
    ngx_str_t                reservation;        /* the same */
    ngx_str_t                gpu_memory_utilization;
    ngx_str_t                kv_cache_prefault;  /* "on" or "off" */
    ngx_str_t                repack_cache;       /* the same, or a folder */
    ngx_str_t                cpu_affinity;       /* "on" or "off" */
    ngx_str_t                speculative;        /* "off", or drafters as the
                                                    engine names them */
    ngx_str_t                speculative_model;

    ngx_uint_t               block_size;
    ngx_uint_t               max_model_len;
    ngx_uint_t               max_num_seqs;
    ngx_uint_t               max_num_batched_tokens;
    ngx_uint_t               long_prefill_token_threshold;
    ngx_uint_t               threads;
    ngx_uint_t               reserved_cpus;
    ngx_uint_t               num_speculative_tokens;
    ngx_uint_t               slots;
    off_t                    kv_cache_memory;

    ngx_uint_t               seen;       /* bit per directive of the block */

    u_char                  *file;       /* where the block opened */
    ngx_uint_t               line;

    ngx_http_llm_gen_t      *gen;        /* set by init_module */
    ngx_http_llm_gen_t      *previous;   /* serves until gen is READY */

    ngx_http_llm_ring_t     *ring;       /* to gen, set by init_process */
    ngx_http_llm_ring_t     *old;        /* to previous */
} ngx_http_llm_engine_t;


typedef struct {
    ngx_array_t              engines;    /* of ngx_http_llm_engine_t * */
} ngx_http_llm_main_conf_t;


/* llm_tenant */
typedef struct {
    ngx_http_complex_value_t   name;
    ngx_http_complex_value_t  *weight;   /* NULL: the number below */
    double                     number;
    ngx_uint_t                 warned;   /* of a weight, once a process */
} ngx_http_llm_tenant_t;


/* llm_priority */
typedef struct {
    ngx_http_complex_value_t   value;
    ngx_uint_t                 warned;   /* likewise */
} ngx_http_llm_priority_t;


typedef struct {
    ngx_str_t                engine_name;
    u_char                  *file;       /* of the llm_pass */
    ngx_uint_t               line;

    ngx_http_llm_engine_t   *engine;
    ngx_msec_t               timeout;
    ngx_msec_t               keepalive;
    ngx_flag_t               strict_context;
    ngx_uint_t               queue;      /* 0: no limit */
    ngx_http_complex_value_t  *cache_salt;
    ngx_http_llm_tenant_t     *tenant;   /* NULL: off */
    ngx_http_llm_priority_t   *priority; /* NULL: the body's counts */
} ngx_http_llm_loc_conf_t;


extern ngx_module_t  ngx_http_llm_module;

#endif /* NGX_HTTP_LLM_MODULE_H */
