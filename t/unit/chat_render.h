/*
 * A case for the chat template: one JSON object with the template's text and
 * what it is rendered with, as t/chat_jinja.t writes it.  Shared by chat_test
 * and the fuzz target.
 */

#ifndef T_UNIT_CHAT_RENDER_H
#define T_UNIT_CHAT_RENDER_H

#include <string.h>

#include "engine/chat/template.h"


static inline const char *
case_text(const cJSON *json, const char *name)
{
    return cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, name));
}


static inline bool
case_true(const cJSON *json, const char *name)
{
    return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, name));
}


static inline chat_input_t
case_input(const cJSON *json)
{
    const cJSON *tools = cJSON_GetObjectItemCaseSensitive(json, "tools");

    return (chat_input_t){
        .messages = cJSON_GetObjectItemCaseSensitive(json, "messages"),
        .tools = cJSON_IsNull(tools) ? NULL : tools,
        .kwargs = cJSON_GetObjectItemCaseSensitive(json, "kwargs"),
        .add_generation_prompt = case_true(json, "add_generation_prompt"),
        .continue_final = case_true(json, "continue_final"),
        .bos_token = case_text(json, "bos_token"),
        .eos_token = case_text(json, "eos_token"),
    };
}


/* Parses and renders the case "template"; out as for chat_template_render. */
static inline int
case_render(const cJSON *json, chat_output_t *out, llm_err_t *err)
{
    const char *source = case_text(json, "template");
    const chat_input_t in = case_input(json);
    chat_template_t *tmpl;
    int code;

    if (source != NULL) {
        code = chat_template_create(source, strlen(source), &tmpl, err);

    } else {
        code = chat_template_builtin(case_text(json, "builtin"), &tmpl, err);
    }

    if (code != LLM_OK) {
        return code;
    }

    code = chat_template_render(tmpl, &in, out, err);
    chat_template_destroy(tmpl);

    return code;
}

#endif /* T_UNIT_CHAT_RENDER_H */
