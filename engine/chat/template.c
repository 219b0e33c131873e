/*
 * Messages → prompt text: sets up a run of the Jinja interpreter, takes its
 * output, and knows the formats to fall back on.
 *
 * The environment is the one Hugging Face's apply_chat_template gives to a
 * template: messages, tools, documents, add_generation_prompt, the special
 * tokens, raise_exception, strftime_now.
 */

#include "engine/chat/template.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "engine/base/arena.h"
#include "engine/chat/jinja_eval.h"
#include "engine/chat/jinja_parse.h"
#include "engine/chat/jinja_text.h"

enum { BLOCK_BYTES = 64 * 1024 };

struct chat_template_s {
    arena_t *arena;
    node_t *root;
    uint64_t seed;
};

/* What a message says, be it text, a list of parts, or nothing. */
#define TEXT_MACRO                                            \
    "{% macro text(content) %}"                               \
    "{% if content is string %}{{ content }}"                 \
    "{% elif content is iterable %}{% for part in content %}" \
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}"  \
    "{% endfor %}{% endif %}{% endmacro %}"

static const struct {
    const char *name;
    const char *source;
} builtins[] = {
    { "chatml", TEXT_MACRO "{% for message in messages %}"
                           "{{ '<|im_start|>' + message.role + '\\n' }}"
                           "{{ text(message.content) + '<|im_end|>\\n' }}"
                           "{% endfor %}"
                           "{% if add_generation_prompt %}"
                           "{{ '<|im_start|>assistant\\n' }}"
                           "{% endif %}" },
    { "llama3", TEXT_MACRO
      "{{ bos_token }}"
      "{% for message in messages %}"
      "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}"
      "{{ text(message.content) | trim + '<|eot_id|>' }}"
      "{% endfor %}"
      "{% if add_generation_prompt %}"
      "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
      "{% endif %}" },
    { "gemma", TEXT_MACRO
      "{{ bos_token }}"
      "{% set ns = namespace(system='', rest=messages) %}"
      "{% if messages and messages[0].role == 'system' %}"
      "{% set ns.system = text(messages[0].content) | trim + '\\n\\n' %}"
      "{% set ns.rest = messages[1:] %}"
      "{% endif %}"
      "{% for message in ns.rest %}"
      "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
      "{{ raise_exception('Conversation roles must alternate "
      "user/assistant/user/assistant') }}"
      "{% endif %}"
      "{% set role = 'model' if message.role == 'assistant' "
      "else message.role %}"
      "{{ '<start_of_turn>' + role + '\\n' }}"
      "{{ ns.system if loop.first }}"
      "{{ text(message.content) | trim + '<end_of_turn>\\n' }}"
      "{% endfor %}"
      "{% if add_generation_prompt %}"
      "{{ '<start_of_turn>model\\n' }}"
      "{% endif %}" },
};


int
chat_template_create(const char *source, size_t len, chat_template_t **tmpl,
                     llm_err_t *err)
{
    arena_t *arena = arena_create(BLOCK_BYTES);
    chat_template_t *made =
        arena != NULL ? arena_calloc(arena, sizeof(*made)) : NULL;

    *tmpl = NULL;

    if (made == NULL) {
        arena_destroy(arena);
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "no memory for the chat template");
    }

    const int code = jinja_parse(arena, source, len, &made->root, err);

    if (code != LLM_OK) {
        arena_destroy(arena);
        return code;
    }

    /* without randomness the hashes are merely easier to collide */
    if (getrandom(&made->seed, sizeof(made->seed), GRND_NONBLOCK) < 0) {
        made->seed = (uintptr_t) made;
    }

    made->arena = arena;
    *tmpl = made;

    return LLM_OK;
}


int
chat_template_builtin(const char *name, chat_template_t **tmpl, llm_err_t *err)
{
    for (size_t i = 0; i < sizeof(builtins) / sizeof(builtins[0]); i++) {
        if (strcmp(builtins[i].name, name != NULL ? name : "chatml") == 0) {
            return chat_template_create(builtins[i].source,
                                        strlen(builtins[i].source), tmpl, err);
        }
    }

    *tmpl = NULL;
    return llm_err_set(err, LLM_BADREQ, "chat_template",
                       "there is no built-in chat template \"%.60s\"", name);
}


void
chat_template_destroy(chat_template_t *tmpl)
{
    if (tmpl != NULL) {
        arena_destroy(tmpl->arena);
    }
}


static void
set_variable(jinja_t *run, const char *name, jv_t value)
{
    jdict_set(run, run->globals, jv_const(run, name), value);
}


static bool
has_variable(jinja_t *run, const char *name)
{
    return run->globals != NULL
           && jdict_find(run, run->globals, name, strlen(name)) != NULL;
}


/* A role of the protocol's own is as good as the template's text: templates
 * build control tokens out of it, '<|' + role + '|>'. */
static void
trust_roles(jinja_t *run, const jv_t *messages)
{
    static const char *const roles[] = { "system",    "developer", "user",
                                         "assistant", "tool",      "function",
                                         "ipython" };

    for (size_t i = 0; run->code == LLM_OK && i < messages->list->n; i++) {
        const jv_t *message = &messages->list->items[i];
        const jv_t *role = message->kind == JV_DICT
                               ? jdict_find(run, message->dict, "role", 4)
                               : NULL;

        for (size_t k = 0; k < sizeof(roles) / sizeof(roles[0]); k++) {
            if (role != NULL && role->kind == JV_STR
                && jstr_is(role->str, roles[k])) {
                role->str->uniform = 1;
            }
        }
    }
}


/* The client's keywords first: they cannot replace what follows. */
static void
set_variables(jinja_t *run, const chat_input_t *in)
{
    const cJSON *kwarg;

    run->globals = jdict_create(run);

    cJSON_ArrayForEach(kwarg, in->kwargs)
    {
        const char *name = kwarg->string != NULL ? kwarg->string : "";

        jdict_set(run, run->globals, jv_text(run, name, strlen(name), 0),
                  jv_from_json(run, kwarg, 0));
    }

    const jv_t messages = jv_from_json(run, in->messages, 0);

    if (run->code != LLM_OK) {
        return;
    }

    trust_roles(run, &messages);
    set_variable(run, "messages", messages);
    set_variable(run, "add_generation_prompt",
                 jv_bool(in->add_generation_prompt && !in->continue_final));

    if (in->tools != NULL) {
        set_variable(run, "tools", jv_from_json(run, in->tools, 0));

    } else if (!has_variable(run, "tools")) {
        set_variable(run, "tools", jv_none());
    }

    if (!has_variable(run, "documents")) {
        set_variable(run, "documents", jv_none());
    }

    if (in->bos_token != NULL) {
        set_variable(run, "bos_token", jv_const(run, in->bos_token));
    }

    if (in->eos_token != NULL) {
        set_variable(run, "eos_token", jv_const(run, in->eos_token));
    }
}


/* The text of the last message: its content, or the last text among its
 * parts; NULL if it has none. */
static const char *
last_text(const cJSON *messages)
{
    const int n = cJSON_GetArraySize(messages);
    const cJSON *content = cJSON_GetObjectItemCaseSensitive(
        n > 0 ? cJSON_GetArrayItem(messages, n - 1) : NULL, "content");
    const char *text = cJSON_GetStringValue(content);
    const cJSON *part;

    if (!cJSON_IsArray(content)) {
        return text;
    }

    cJSON_ArrayForEach(part, content)
    {
        const char *more = cJSON_GetStringValue(
            cJSON_GetObjectItemCaseSensitive(part, "text"));

        text = more != NULL ? more : text;
    }

    return text;
}


/* Is text what the client wrote, at this place of the output? */
static bool
stands_at(jinja_t *run, size_t at, const jstr_t *text)
{
    const jbuf_t *out = run->out;

    if (text->len > out->len - at || out->data[at] != text->data[0]
        || out->data[at + text->len - 1] != text->data[text->len - 1]
        || !jinja_step_text(run, text->len))
    {
        return false;
    }

    return memcmp(out->data + at, text->data, text->len) == 0
           && memchr(out->marks + at, 1, text->len) == NULL;
}


/* Cuts the output behind the last message's text, so that the model goes on
 * with it.  Only bytes of the client's count as that text: a message "end"
 * is not found in "<|im_end|>". */
static void
cut_final(jinja_t *run, const chat_input_t *in)
{
    const char *raw = last_text(in->messages);
    const jv_t text =
        jv_text(run, raw != NULL ? raw : "", raw != NULL ? strlen(raw) : 0, 0);

    if (run->code != LLM_OK) {
        return;
    }

    const jv_t left = text_strip(run, text.str, NULL, TEXT_LEFT);
    const jv_t bare = text_strip(run, text.str, NULL, TEXT_LEFT | TEXT_RIGHT);

    if (run->code != LLM_OK) {
        return;
    }

    if (bare.str->len == 0) {
        jv_abort(run, LLM_BADREQ,
                 "the last message has no text to be continued");
        return;
    }

    for (size_t at = run->out->len; run->code == LLM_OK && at-- > 0;) {
        if (!stands_at(run, at, bare.str)) {
            continue;
        }

        /* a template may keep the space at the end, or not */
        const bool whole = stands_at(run, at, left.str);

        run->out->len = at + (whole ? left.str->len : bare.str->len);
        return;
    }

    jv_abort(run, LLM_BADREQ,
             "the last message cannot be continued: the chat template "
             "does not show its text as it is");
}


static void
take_output(jinja_t *run, chat_output_t *out)
{
    if (run->code == LLM_OK && run->out->len > 0) {
        buf_add(&out->text, run->out->data, run->out->len);
        buf_add(&out->trusted, run->out->marks, run->out->len);
    }

    if (out->text.failed || out->trusted.failed) {
        jv_abort(run, LLM_NOMEM, "no memory to render the chat template");
    }
}


int
chat_template_render(const chat_template_t *tmpl, const chat_input_t *in,
                     chat_output_t *out, llm_err_t *err)
{
    if (!cJSON_IsArray(in->messages)) {
        return llm_err_set(err, LLM_BADREQ, "messages",
                           "messages must be an array");
    }

    jinja_t run = { .arena = arena_create(BLOCK_BYTES),
                    .err = err,
                    .steps = JINJA_MAX_STEPS,
                    .seed = tmpl->seed,
                    .line = tmpl->root->line };

    if (run.arena == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "no memory to render the chat template");
    }

    run.out = jbuf_create(&run);
    set_variables(&run, in);

    if (run.code == LLM_OK) {
        jinja_exec(&run, tmpl->root);
    }

    if (run.code == LLM_OK && in->continue_final) {
        cut_final(&run, in);
    }

    take_output(&run, out);
    arena_destroy(run.arena);

    return run.code;
}
