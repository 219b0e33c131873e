/*
 * The endpoints and the state of one API request.
 *
 * A request is parsed into a query, which fans out into choices: choice
 * p * n + k is answer k to prompt p, and a slot of its own.  What an endpoint
 * must do differs in the hooks of its row; when and how often they are called
 * is ngx_http_llm_handler.c.
 */

#ifndef NGX_HTTP_LLM_API_H
#define NGX_HTTP_LLM_API_H

#include "ngx_module/ngx_http_llm_error.h"
#include "ngx_module/ngx_http_llm_json.h"
#include "ngx_module/ngx_http_llm_module.h"
#include "ngx_module/ngx_http_llm_ring.h"
#include "ngx_module/ngx_http_llm_sse.h"


#define NGX_HTTP_LLM_MAX_CHOICES  64
#define NGX_HTTP_LLM_MAX_STOPS    4

/* pieces a choice collects for a response that is not streamed: the text, and
 * up to four parallel arrays of log-probabilities */
#define NGX_HTTP_LLM_ARRAYS       4


typedef struct ngx_http_llm_ctx_s     ngx_http_llm_ctx_t;
typedef struct ngx_http_llm_choice_s  ngx_http_llm_choice_t;


typedef struct {
    uint32_t                 kind;       /* LLM_REQ_…; by prompt */
    ngx_str_t                data;       /* text, or int32 ids */
} ngx_http_llm_prompt_t;


typedef struct {
    uint32_t                 kind;       /* LLM_REQ_… */
    uint32_t                 flags;      /* LLM_F_… */
    llm_params_t             params;
    uint32_t                 n;          /* answers to each prompt */

    ngx_array_t              prompts;    /* of ngx_http_llm_prompt_t */
    ngx_str_t                messages;   /* JSON text */
    ngx_str_t                tools;
    ngx_str_t                kwargs;

    ngx_str_t                stops[NGX_HTTP_LLM_MAX_STOPS];
    ngx_uint_t               n_stops;
    ngx_str_t                stop_tokens;    /* int32 ids */
    ngx_str_t                bias;           /* llm_bias_t */
    ngx_str_t                partition;      /* value of llm_cache_salt */
    ngx_str_t                salt;           /* cache_salt of the body */
    ngx_str_t                tenant;         /* value of llm_tenant */
    llm_turn_t               turn;           /* n_choices by slot */

    unsigned                 stream:1;
    unsigned                 include_usage:1;
    unsigned                 continuous_usage:1;
    unsigned                 logprobs:1;
    unsigned                 echo:1;
} ngx_http_llm_query_t;


struct ngx_http_llm_choice_s {
    ngx_http_llm_ctx_t      *ctx;
    ngx_uint_t               index;
    ngx_int_t                seat;       /* -1: none (any more) */
    uint32_t                 request_len;

    uint32_t                 prompt_tokens;
    uint32_t                 cached_tokens;
    uint32_t                 tokens;     /* generated so far */
    size_t                   text_chars; /* of tokens with logprobs */
    llm_done_t               result;     /* when done */

    ngx_http_llm_out_t       text;       /* escaped JSON, not streamed */
    ngx_http_llm_out_t       array[NGX_HTTP_LLM_ARRAYS];

    unsigned                 opened:1;   /* first chunk is out */
    unsigned                 pending:1;  /* has records, client is slow */
    unsigned                 done:1;
};


typedef struct {
    const char              *path;       /* the end of the URI */
    ngx_uint_t               methods;    /* NGX_HTTP_… */
    const char              *allow;
    ngx_uint_t               below;      /* path is followed by a name */

    /* GET: answers at once; returns what ngx_http_finalize_request takes */
    ngx_int_t              (*answer)(ngx_http_llm_ctx_t *ctx);

    /* POST: body → query; NGX_ERROR with ctx->error set */
    ngx_int_t              (*parse)(ngx_http_llm_ctx_t *ctx,
                                    const cJSON *root);

    /* a delta: as a chunk of the stream, or collected */
    void                   (*delta)(ngx_http_llm_choice_t *choice,
                                    const llm_delta_t *delta);

    /* the last chunk of a streamed choice */
    void                   (*finish)(ngx_http_llm_choice_t *choice);

    /* usage at the end of a stream, or the whole JSON of a response */
    void                   (*end)(ngx_http_llm_ctx_t *ctx);

    const char              *id_prefix;
    ngx_uint_t               offline;    /* needs no engine */
} ngx_http_llm_api_t;


struct ngx_http_llm_ctx_s {
    ngx_http_request_t        *request;
    ngx_http_llm_loc_conf_t   *conf;
    ngx_http_llm_ring_t       *ring;
    const ngx_http_llm_api_t  *api;
    ngx_str_t                  name;     /* what follows a path of `below` */

    llm_card_t                *card;
    ngx_str_t                  model;    /* served name, kept for the log */
    ngx_str_t                  id;
    time_t                     created;

    ngx_http_llm_query_t       query;
    ngx_http_llm_json_t        json;     /* until submitted */
    ngx_http_llm_choice_t     *choices;
    ngx_uint_t                 n_choices;
    ngx_uint_t                 n_done;

    ngx_http_llm_out_t         out;
    ngx_http_llm_error_t       error;

    ngx_event_t                ping;     /* keep-alive comments */
    ngx_msec_t                 last_sent;

    unsigned                   keepalive:1;  /* r->keepalive before an error */
    unsigned                   blocked:1;    /* the client is slow */
    unsigned                   released:1;
    unsigned                   answers:1;    /* headers are of an answer */
    unsigned                   replace:1;    /* the filter swaps the body */
    unsigned                   replaced:1;
};


/* The row for a URI, *name set for `below`; NULL: no such endpoint. */
const ngx_http_llm_api_t *ngx_http_llm_api_find(ngx_str_t *uri,
    ngx_str_t *name);

/* Members that every chunk and response shares, up to and including
 * "model":"…"; object: its "object" value. */
void ngx_http_llm_api_head(ngx_http_llm_ctx_t *ctx, const char *object);

/* "usage":{…} of the whole request. */
void ngx_http_llm_api_usage(ngx_http_llm_ctx_t *ctx);

/* The last event of a stream, if it asked for one: no choices, the usage. */
void ngx_http_llm_api_usage_event(ngx_http_llm_ctx_t *ctx,
    const char *object);

/* A chunk of a choice up to the value of its member (,"delta":), and from
 * behind finish_reason, with the usage if it was asked for. */
void ngx_http_llm_api_chunk(ngx_http_llm_choice_t *choice,
    const char *object, const char *member);
void ngx_http_llm_api_chunk_end(ngx_http_llm_choice_t *choice);

/* A response that is not streamed, up to and including its usage; body writes
 * what a choice holds between its index and finish_reason. */
void ngx_http_llm_api_response(ngx_http_llm_ctx_t *ctx, const char *object,
    void (*body)(ngx_http_llm_choice_t *choice));

/* The value of "finish_reason", then ,"stop_reason":… */
void ngx_http_llm_api_finish(ngx_http_llm_choice_t *choice);

/* Clamped log-probability: JSON has no infinity. */
void ngx_http_llm_api_logprob(ngx_http_llm_out_t *out, float logprob);

#endif /* NGX_HTTP_LLM_API_H */
