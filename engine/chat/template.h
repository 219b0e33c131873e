/*
 * Messages → prompt text, by the model's own chat template (Jinja) or a named
 * fallback.
 *
 * Every output byte is marked trusted (it was written in the template's text)
 * or not (it came out of a message, a tool, a keyword argument).  Only trusted
 * bytes may become control tokens.
 */

#ifndef ENGINE_CHAT_TEMPLATE_H
#define ENGINE_CHAT_TEMPLATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cjson/cJSON.h>

#include "engine/base/buf.h"
#include "engine/base/status.h"

typedef struct chat_template_s chat_template_t;

typedef struct {
    const cJSON *messages; /* array of objects */
    const cJSON *tools;    /* array or NULL */
    const cJSON *kwargs;   /* object or NULL: more top-level variables */
    bool add_generation_prompt;
    bool continue_final;   /* leave the last message open */
    const char *bos_token; /* text, may be "" */
    const char *eos_token;
} chat_input_t;

typedef struct {
    buf_t text;
    buf_t trusted; /* one byte per byte of text: 1 or 0 */
} chat_output_t;


/* Parses source (copied).  err carries line and cause. */
int chat_template_create(const char *source, size_t len, chat_template_t **tmpl,
                         llm_err_t *err);

/* "chatml", "llama3", "gemma"; NULL name: chatml. */
int chat_template_builtin(const char *name, chat_template_t **tmpl,
                          llm_err_t *err);
void chat_template_destroy(chat_template_t *tmpl);

/* Renders into *out (zeroed, or reused after buf_clear of both).  LLM_BADREQ
 * with the template's own words for raise_exception, or when a limit on steps,
 * depth or output is exceeded, or the template fails on these messages. */
int chat_template_render(const chat_template_t *tmpl, const chat_input_t *in,
                         chat_output_t *out, llm_err_t *err);

#endif /* ENGINE_CHAT_TEMPLATE_H */
