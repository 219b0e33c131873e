/*
 * What is rendered by the chat template: messages, tools, keyword arguments.
 */

#ifndef NGX_HTTP_LLM_MESSAGES_H
#define NGX_HTTP_LLM_MESSAGES_H

#include "ngx_module/ngx_http_llm_api.h"


/* Checks "messages", "tools", "tool_choice" and "chat_template_kwargs" and
 * writes them to ctx->query as JSON text in the one shape templates expect:
 * content is a string or null, tool call arguments are objects.  Changes the
 * tree.  NGX_ERROR with ctx->error set. */
ngx_int_t ngx_http_llm_messages_parse(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);

#endif /* NGX_HTTP_LLM_MESSAGES_H */
