/*
 * The prompt of a request as token ids.
 *
 * Messages go through the chat template, which marks what is its own text:
 * only there do special tokens count.  Called by prepare.c.
 */

#include "engine/prompt.h"

#include <stdlib.h>
#include <string.h>

#include <cjson/cJSON.h>


/* A JSON section, or NULL when it is absent or null; LLM_BADREQ when it is
 * broken or of another type. */
static int
json_section(const request_t *req, int sec, const char *param, cJSON **json,
             llm_err_t *err)
{
    uint32_t len;
    const char *text = request_section(req, sec, &len);
    const bool object = sec == LLM_SEC_KWARGS;

    *json = len > 0 ? cJSON_ParseWithLength(text, len) : NULL;

    if (len > 0 && *json == NULL) {
        return llm_err_set(err, LLM_BADREQ, param, "%s is not valid JSON.",
                           param);
    }

    if (cJSON_IsNull(*json)) {
        cJSON_Delete(*json);
        *json = NULL;
    }

    if (*json != NULL
        && (object ? !cJSON_IsObject(*json) : !cJSON_IsArray(*json))) {
        return llm_err_set(err, LLM_BADREQ, param, "%s must be %s.", param,
                           object ? "an object" : "an array");
    }

    return LLM_OK;
}


/* OpenAI carries the arguments of a tool call as a JSON string; templates want
 * the object. */
static void
parse_arguments(cJSON *messages)
{
    cJSON *message, *call;

    cJSON_ArrayForEach(message, messages)
    {
        cJSON *calls = cJSON_GetObjectItemCaseSensitive(message, "tool_calls");

        cJSON_ArrayForEach(call, calls)
        {
            cJSON *function =
                cJSON_GetObjectItemCaseSensitive(call, "function");
            cJSON *text =
                cJSON_GetObjectItemCaseSensitive(function, "arguments");
            cJSON *object =
                cJSON_IsString(text) ? cJSON_Parse(text->valuestring) : NULL;

            if (!cJSON_IsObject(object)
                || !cJSON_ReplaceItemInObjectCaseSensitive(function,
                                                           "arguments", object))
            {
                cJSON_Delete(object);
            }
        }
    }
}


/* Chat: messages → text with trust marks. */
static int
render_chat(const engine_t *engine, chat_output_t *out, const request_t *req,
            llm_err_t *err)
{
    cJSON *messages = NULL, *tools = NULL, *kwargs = NULL;
    const uint32_t flags = req->msg->flags;

    int rc = json_section(req, LLM_SEC_MESSAGES, "messages", &messages, err);

    if (rc == LLM_OK) {
        rc = json_section(req, LLM_SEC_TOOLS, "tools", &tools, err);
    }

    if (rc == LLM_OK) {
        rc = json_section(req, LLM_SEC_KWARGS, "chat_template_kwargs", &kwargs,
                          err);
    }

    if (rc == LLM_OK && cJSON_GetArraySize(messages) == 0) {
        rc = llm_err_set(err, LLM_BADREQ, "messages",
                         "messages must hold at least one message.");
    }

    if (rc == LLM_OK) {
        parse_arguments(messages);

        const chat_input_t in = {
            .messages = messages,
            .tools = tools,
            .kwargs = kwargs,
            .add_generation_prompt = (flags & LLM_F_GENERATION_PROMPT) != 0,
            .continue_final = (flags & LLM_F_CONTINUE_FINAL) != 0,
            .bos_token = engine->bos_text,
            .eos_token = engine->eos_text,
        };

        buf_clear(&out->text);
        buf_clear(&out->trusted);
        rc = chat_template_render(engine->tmpl, &in, out, err);
    }

    cJSON_Delete(messages);
    cJSON_Delete(tools);
    cJSON_Delete(kwargs);

    return rc;
}


int
prompt_encode(const engine_t *engine, prompt_t *prompt, const request_t *req,
              int max_ids, llm_err_t *err)
{
    const uint32_t flags = req->msg->flags;
    const bool chat = req->msg->kind == LLM_REQ_CHAT
                      || req->msg->kind == LLM_REQ_TOKENIZE_CHAT;
    const uint8_t *trusted = NULL;
    const char *text;
    uint32_t n;
    size_t len;
    int rc;

    int how = (flags & LLM_F_ADD_SPECIAL) ? TOK_ADD_SPECIAL : 0;

    if (chat) {
        rc = render_chat(engine, &prompt->text, req, err);

        if (rc != LLM_OK) {
            return rc;
        }

        text = prompt->text.text.data;
        len = prompt->text.text.len;
        trusted = (const uint8_t *) prompt->text.trusted.data;
        how |= TOK_PARSE_SPECIAL;
    } else {
        text = request_section(req, LLM_SEC_PROMPT, &n);
        len = n;
        how |= (flags & LLM_F_PARSE_SPECIAL) ? TOK_PARSE_SPECIAL : 0;
    }

    return tok_encode(engine->tok, len > 0 ? text : "", len, trusted, how,
                      max_ids, &prompt->ids, err);
}


int
prompt_copy(const engine_t *engine, prompt_t *prompt, const request_t *req,
            int max_ids, llm_err_t *err)
{
    uint32_t len;
    const int32_t *ids = request_section(req, LLM_SEC_PROMPT, &len);
    const int n = (int) (len / sizeof(int32_t));
    const int n_vocab = tok_n_vocab(engine->tok);
    tok_ids_t *out = &prompt->ids;

    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            return llm_err_set(err, LLM_BADREQ, "prompt",
                               "Token id %d is out of vocabulary: it has "
                               "%d tokens.",
                               (int) ids[i], n_vocab);
        }
    }

    if (n > out->cap) {
        int32_t *grown = realloc(out->ids, (size_t) n * sizeof(int32_t));

        if (grown == NULL) {
            return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
        }

        out->ids = grown;
        out->cap = n;
    }

    if (n > 0) {
        memcpy(out->ids, ids, (size_t) n * sizeof(int32_t));
    }

    out->n = n;

    return n > max_ids ? LLM_LIMIT : LLM_OK;
}
