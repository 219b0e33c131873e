/*
 * What the commands share: their options, and requests to an engine in this
 * process.  Private to cli*.c.
 */

#ifndef ENGINE_CLI_TOOL_H
#define ENGINE_CLI_TOOL_H

#include <stdbool.h>

#include "engine/engine.h"

enum { REQUEST_CAP = 8 << 20 };

typedef struct {
    engine_conf_t conf;
    const char *prompt;
    const char *chat;
    const char *file;
    llm_params_t params;
    bool ignore_eos;
    int chunk;
    int prompt_tokens;
    int gen;
    int batch;
    int depth;
    int repeat;
    uint8_t *area; /* REQUEST_CAP bytes */
    engine_t *engine;
} cli_t;


/* Submits a prompt of the given kind; NULL, and said why, when that cannot be.
 * The engine owns the request. */
request_t *cli_submit(cli_t *cli, uint32_t kind, uint32_t flags,
                      const void *prompt, size_t len);

/* The next record a request has written; false when there is none yet. */
bool cli_record(request_t *req, llm_record_t *record);

/* The ids of --prompt or of --file; the caller frees. */
int cli_encode(cli_t *cli, int flags, tok_ids_t *ids);

/* Says that an option's value is wrong and what to use; LLM_BADREQ. */
int cli_complain(const char *name, const char *value, const char *use);

/* An option's value as a type of weights that can be written. */
int cli_dtype(const char *name, const char *value, op_dtype_t *out);

/* The commands; they return the exit status. */
int cli_perplexity(cli_t *cli);
int cli_bench(cli_t *cli);

#endif /* ENGINE_CLI_TOOL_H */
