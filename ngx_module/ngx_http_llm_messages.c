/*
 * Messages and tools: checked here, because the error must name what is wrong
 * in the client's terms, and brought into the one shape that chat templates
 * know.  What they mean is the template's business, in the engine.
 */

#include "ngx_module/ngx_http_llm_messages.h"
#include "ngx_module/ngx_http_llm_params.h"


static ngx_int_t ngx_http_llm_messages_one(ngx_http_llm_ctx_t *ctx,
    cJSON *message, ngx_uint_t i);
static ngx_int_t ngx_http_llm_messages_parts(ngx_http_llm_ctx_t *ctx,
    cJSON *message, cJSON *parts, ngx_uint_t i);
static ngx_int_t ngx_http_llm_messages_calls(ngx_http_llm_ctx_t *ctx,
    cJSON *message, ngx_uint_t i);
static ngx_int_t ngx_http_llm_messages_tools(ngx_http_llm_ctx_t *ctx,
    const cJSON *root);
static ngx_int_t ngx_http_llm_messages_print(ngx_http_llm_ctx_t *ctx,
    const cJSON *item, ngx_str_t *text);


static const char  *ngx_http_llm_roles[] = {
    "system", "developer", "user", "assistant", "tool", NULL
};


ngx_int_t
ngx_http_llm_messages_parse(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    cJSON       *messages, *message, *kwargs;
    ngx_uint_t   i;

    messages = ngx_http_llm_json_get(root, "messages");

    if (messages == NULL) {
        return ngx_http_llm_bad(ctx, "messages", "messages is missing.");
    }

    if (!cJSON_IsArray(messages) || messages->child == NULL) {
        return ngx_http_llm_bad(ctx, "messages", "messages must be an array "
                                "of at least one message.");
    }

    i = 0;

    cJSON_ArrayForEach(message, messages) {
        if (ngx_http_llm_messages_one(ctx, message, i++) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    if (ngx_http_llm_messages_tools(ctx, root) != NGX_OK) {
        return NGX_ERROR;
    }

    kwargs = ngx_http_llm_json_get(root, "chat_template_kwargs");

    if (kwargs) {

        if (!cJSON_IsObject(kwargs)) {
            return ngx_http_llm_bad(ctx, "chat_template_kwargs",
                                    "chat_template_kwargs must be an object.");
        }

        if (ngx_http_llm_messages_print(ctx, kwargs, &ctx->query.kwargs)
            != NGX_OK)
        {
            return NGX_ERROR;
        }
    }

    return ngx_http_llm_messages_print(ctx, messages, &ctx->query.messages);
}


static ngx_int_t
ngx_http_llm_messages_print(ngx_http_llm_ctx_t *ctx, const cJSON *item,
    ngx_str_t *text)
{
    *text = ngx_http_llm_json_print(ctx->request->pool, item);

    if (text->data == NULL) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                               "out of memory");
        return NGX_ERROR;
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_messages_one(ngx_http_llm_ctx_t *ctx, cJSON *message,
    ngx_uint_t i)
{
    cJSON       *role, *content;
    ngx_uint_t   k;

    if (!cJSON_IsObject(message)) {
        return ngx_http_llm_bad(ctx, "messages", "messages[%ui] must be an "
                                "object.", i);
    }

    role = ngx_http_llm_json_get(message, "role");

    if (!cJSON_IsString(role)) {
        return ngx_http_llm_bad(ctx, "messages", "messages[%ui].role must be "
                                "a string.", i);
    }

    for (k = 0; ngx_http_llm_roles[k]; k++) {
        if (ngx_strcmp(role->valuestring, ngx_http_llm_roles[k]) == 0) {
            break;
        }
    }

    if (ngx_http_llm_roles[k] == NULL) {
        return ngx_http_llm_bad(ctx, "messages", "messages[%ui].role \"%s\" "
                                "is none of system, developer, user, "
                                "assistant, tool.", i, role->valuestring);
    }

    content = ngx_http_llm_json_get(message, "content");

    if (content == NULL) {

        if (ngx_strcmp(role->valuestring, "assistant") != 0) {
            return ngx_http_llm_bad(ctx, "messages", "messages[%ui].content "
                                    "is missing.", i);
        }

    } else if (cJSON_IsArray(content)) {

        if (ngx_http_llm_messages_parts(ctx, message, content, i) != NGX_OK) {
            return NGX_ERROR;
        }

    } else if (!cJSON_IsString(content)) {
        return ngx_http_llm_bad(ctx, "messages", "messages[%ui].content must "
                                "be a string or an array of parts.", i);
    }

    return ngx_http_llm_messages_calls(ctx, message, i);
}


/* text parts, joined by newlines, take the place of the array */

static ngx_int_t
ngx_http_llm_messages_parts(ngx_http_llm_ctx_t *ctx, cJSON *message,
    cJSON *parts, ngx_uint_t i)
{
    char    *joined, *p;
    size_t   len;
    cJSON   *part, *type, *text;

    len = 1;

    cJSON_ArrayForEach(part, parts) {

        if (cJSON_IsString(part)) {
            len += ngx_strlen(part->valuestring) + 1;
            continue;
        }

        type = ngx_http_llm_json_get(part, "type");

        if (!cJSON_IsString(type)) {
            return ngx_http_llm_bad(ctx, "messages", "a part of "
                                    "messages[%ui].content has no type.", i);
        }

        if (ngx_strcmp(type->valuestring, "text") != 0) {
            return ngx_http_llm_bad(ctx, "messages", "messages[%ui].content "
                                    "has a part of type \"%s\": only text is "
                                    "supported.", i, type->valuestring);
        }

        text = ngx_http_llm_json_get(part, "text");

        if (!cJSON_IsString(text)) {
            return ngx_http_llm_bad(ctx, "messages", "a part of "
                                    "messages[%ui].content has no text.", i);
        }

        len += ngx_strlen(text->valuestring) + 1;
    }

    joined = malloc(len);
    if (joined == NULL) {
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                               "out of memory");
        return NGX_ERROR;
    }

    p = joined;

    cJSON_ArrayForEach(part, parts) {

        text = cJSON_IsString(part) ? part
                                    : ngx_http_llm_json_get(part, "text");
        if (p != joined) {
            *p++ = '\n';
        }

        len = ngx_strlen(text->valuestring);
        p = (char *) ngx_cpymem(p, text->valuestring, len);
    }

    *p = '\0';

    text = cJSON_CreateString(joined);
    free(joined);

    if (text == NULL
        || !cJSON_ReplaceItemInObjectCaseSensitive(message, "content", text))
    {
        cJSON_Delete(text);
        ngx_http_llm_error_set(&ctx->error, ctx->request->pool,
                               NGX_HTTP_INTERNAL_SERVER_ERROR, NULL,
                               "out of memory");
        return NGX_ERROR;
    }

    return NGX_OK;
}


/* arguments travel as JSON text, templates want the object */

static ngx_int_t
ngx_http_llm_messages_calls(ngx_http_llm_ctx_t *ctx, cJSON *message,
    ngx_uint_t i)
{
    cJSON  *calls, *call, *function, *arguments, *object;

    calls = ngx_http_llm_json_get(message, "tool_calls");

    if (calls == NULL) {
        return NGX_OK;
    }

    if (!cJSON_IsArray(calls)) {
        return ngx_http_llm_bad(ctx, "messages", "messages[%ui].tool_calls "
                                "must be an array.", i);
    }

    cJSON_ArrayForEach(call, calls) {

        function = ngx_http_llm_json_get(call, "function");

        if (!cJSON_IsObject(function)) {
            return ngx_http_llm_bad(ctx, "messages", "a call of "
                                    "messages[%ui].tool_calls has no "
                                    "function.", i);
        }

        arguments = ngx_http_llm_json_get(function, "arguments");

        if (!cJSON_IsString(arguments)) {
            continue;
        }

        object = cJSON_ParseWithOpts(arguments->valuestring, NULL, 1);

        if (!cJSON_IsObject(object)
            || !cJSON_ReplaceItemInObjectCaseSensitive(function, "arguments",
                                                       object))
        {
            /* not JSON: the template gets it as it is */
            cJSON_Delete(object);
        }
    }

    return NGX_OK;
}


static ngx_int_t
ngx_http_llm_messages_tools(ngx_http_llm_ctx_t *ctx, const cJSON *root)
{
    cJSON  *tools, *tool, *choice, *function;

    tools = ngx_http_llm_json_get(root, "tools");
    choice = ngx_http_llm_json_get(root, "tool_choice");

    if (choice) {

        /* replies are not parsed for tool calls, so none can be promised */

        if (cJSON_IsObject(choice)
            || (cJSON_IsString(choice)
                && ngx_strcmp(choice->valuestring, "required") == 0))
        {
            return ngx_http_llm_bad(ctx, "tool_choice", "tool_choice can only "
                                    "be \"auto\" or \"none\" on this "
                                    "server.");
        }

        if (!cJSON_IsString(choice)
            || (ngx_strcmp(choice->valuestring, "auto") != 0
                && ngx_strcmp(choice->valuestring, "none") != 0))
        {
            return ngx_http_llm_bad(ctx, "tool_choice", "tool_choice must be "
                                    "\"auto\" or \"none\".");
        }
    }

    if (tools == NULL) {
        return NGX_OK;
    }

    if (!cJSON_IsArray(tools) || tools->child == NULL) {
        return ngx_http_llm_bad(ctx, "tools", "tools must be an array of at "
                                "least one tool.");
    }

    cJSON_ArrayForEach(tool, tools) {

        function = ngx_http_llm_json_get(tool, "function");

        if (!cJSON_IsObject(function)
            || !cJSON_IsString(ngx_http_llm_json_get(function, "name")))
        {
            return ngx_http_llm_bad(ctx, "tools", "each of tools must be an "
                                    "object with a function that has a "
                                    "name.");
        }
    }

    if (choice && ngx_strcmp(choice->valuestring, "none") == 0) {
        return NGX_OK;
    }

    return ngx_http_llm_messages_print(ctx, tools, &ctx->query.tools);
}
