/*
 * libFuzzer: a chat template and what it is rendered with.
 *
 * Input: template text, a zero byte, then JSON: an array of messages, or an
 * object with messages, tools, kwargs and the switches (see chat_render.h).
 * Whatever comes, the output is valid UTF-8 with as many marks as bytes, twice
 * the same, and an error has a text.
 */

#include <stdlib.h>

#include "engine/base/utf8.h"
#include "t/unit/chat_render.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

#define CHECK(x)     \
    do {             \
        if (!(x)) {  \
            abort(); \
        }            \
    } while (0)


static int
render(const chat_template_t *tmpl, const chat_input_t *in, chat_output_t *out)
{
    llm_err_t err = { 0 };
    const int code = chat_template_render(tmpl, in, out, &err);

    CHECK(code == LLM_OK || (code == err.code && err.text[0] != '\0'));
    CHECK(code == LLM_OK || code == LLM_BADREQ);
    CHECK(code == LLM_OK || out->text.len == 0);
    CHECK(out->text.len == out->trusted.len);
    CHECK(utf8_valid((const uint8_t *) out->text.data, out->text.len));

    for (size_t i = 0; i < out->trusted.len; i++) {
        CHECK((uint8_t) out->trusted.data[i] <= 1);
    }

    return code;
}


/* The client's strings must be UTF-8, as the module sees to. */
static void
render_twice(const chat_template_t *tmpl, const cJSON *json)
{
    chat_output_t one = { 0 }, two = { 0 };
    chat_input_t in = case_input(json);

    if (cJSON_IsArray(json)) {
        in.messages = json;
        in.add_generation_prompt = true;
        in.bos_token = "<s>";
    }

    const int code = render(tmpl, &in, &one);

    CHECK(render(tmpl, &in, &two) == code);
    CHECK(one.text.len == two.text.len
          && (one.text.len == 0
              || (memcmp(one.text.data, two.text.data, one.text.len) == 0
                  && memcmp(one.trusted.data, two.trusted.data, one.text.len)
                         == 0)));
    buf_fini(&one.text);
    buf_fini(&one.trusted);
    buf_fini(&two.text);
    buf_fini(&two.trusted);
}


int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    const uint8_t *zero = len > 0 ? memchr(data, 0, len) : NULL;
    const size_t n = zero != NULL ? (size_t) (zero - data) : len;
    const char *rest = zero != NULL ? (const char *) zero + 1 : "[]";
    const size_t n_rest = zero != NULL ? len - n - 1 : 2;
    chat_template_t *tmpl;
    llm_err_t err = { 0 };

    if (!utf8_valid((const uint8_t *) rest, n_rest)) {
        return 0;
    }

    const int code = chat_template_create((const char *) data, n, &tmpl, &err);

    CHECK(code == err.code && (code == LLM_OK) == (tmpl != NULL));

    if (tmpl == NULL) {
        return 0;
    }

    cJSON *json = cJSON_ParseWithLength(rest, n_rest);

    render_twice(tmpl, json);
    cJSON_Delete(json);
    chat_template_destroy(tmpl);

    return 0;
}
