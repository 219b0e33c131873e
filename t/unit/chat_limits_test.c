/*
 * Chat templates that want too much: time, memory, depth, output; and no
 * memory at all.  Each must end with an error a person can read.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "engine/base/arena.h"
#include "engine/base/clock.h"
#include "t/unit/chat_render.h"

static chat_output_t out;
static llm_err_t err;


/* text, n times; the caller frees it. */
static char *
repeated(const char *text, size_t n)
{
    const size_t len = strlen(text);
    char *p = malloc(n * len + 1);

    assert_non_null(p);

    for (size_t i = 0; i < n; i++) {
        memcpy(p + i * len, text, len);
    }

    p[n * len] = '\0';
    return p;
}


static int
render_tree(const char *source, const cJSON *messages)
{
    const chat_input_t in = { .messages = messages,
                              .bos_token = "<s>",
                              .add_generation_prompt = true };
    chat_template_t *tmpl;

    buf_clear(&out.text);
    buf_clear(&out.trusted);

    int code = chat_template_create(source, strlen(source), &tmpl, &err);

    if (code == LLM_OK) {
        code = chat_template_render(tmpl, &in, &out, &err);
        chat_template_destroy(tmpl);
    }

    return code;
}


static int
render(const char *source)
{
    cJSON *messages = cJSON_Parse("[{\"role\":\"user\",\"content\":\"c\"}]");
    const int code = render_tree(source, messages);

    cJSON_Delete(messages);
    return code;
}


static void
too_much(const char *source, const char *words)
{
    assert_int_equal(render(source), LLM_BADREQ);
    assert_int_equal(out.text.len, 0);

    if (strstr(err.text, words) == NULL) {
        fail_msg("%.60s: \"%s\" lacks: %s", source, err.text, words);
    }
}


static void
test_steps(void **state)
{
    (void) state;
    too_much("{% for a in range(100000) %}{% for b in range(100000) %}"
             "{% endfor %}{% endfor %}",
             "steps");
    too_much("{% for a in range(99999999999) %}{% endfor %}", "range");
    too_much("{% set x = 'a' * 1000000 %}{% for a in range(90000) %}"
             "{% set y = x.find('b') %}{% endfor %}",
             "steps");
    too_much("{% set ns = namespace(x=[1]) %}{% for a in range(100) %}"
             "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x == [1] }}"
             "{% set ns.y = ns.x + [] %}{{ ns.x == ns.y }}",
             "steps");
    too_much("{{ [1] * 99999999999 }}", "steps");
    too_much("{% set x = 'a' * 1000000 %}{{ x.rsplit('a' * 500000 + 'b', 1) }}",
             "steps");
    too_much("{% set x = 'a' * 1000000 %}{{ x.rfind('a' * 500000) }}", "steps");
}


static void
test_output(void **state)
{
    (void) state;
    too_much("{{ 'a' * 99999999 }}", "steps");
    too_much("{% set x = 'a' * 1000000 %}{% for i in range(40) %}{{ x }}"
             "{% endfor %}",
             "longer than 16 MB");
    too_much("{% set ns = namespace(x='ab') %}{% for i in range(100) %}"
             "{% set ns.x = ns.x + ns.x %}{% endfor %}",
             "longer than 16 MB");
    too_much("{% set x = ('a' * 5000).replace('', 'b' * 5000) %}",
             "longer than 16 MB");
    too_much("{{ ['a' * 100000] * 100000 }}", "longer than 16 MB");
}


static void
test_memory(void **state)
{
    (void) state;
    too_much("{% set ns = namespace(l=[]) %}{% for i in range(100000) %}"
             "{% set ns.l = ns.l + [i] %}{% endfor %}",
             "");
    too_much("{% for i in range(1000) %}{% set x = ('a' * 100000).upper() %}"
             "{% endfor %}",
             "");
}


static void
test_recursion(void **state)
{
    (void) state;
    too_much("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "too deeply");
    too_much("{% macro f() %}{{ g() }}{% endmacro %}"
             "{% macro g() %}{% for i in [1] %}{% set x %}{{ f() }}"
             "{% endset %}{% endfor %}{% endmacro %}{{ f() }}",
             "too deeply");
    too_much("{% macro f(x=f()) %}{% endmacro %}{{ f() }}", "too deeply");
    too_much("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
             "deeper than");
    too_much("{% set ns = namespace(x=[]) %}{% for i in range(50000) %}"
             "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
             "deeper than");
    too_much("{% set ns = namespace(x=[]) %}{% for i in range(50000) %}"
             "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
             "deeper than");
    too_much("{% set ns = namespace(x=[], y=[]) %}"
             "{% for i in range(50000) %}{% set ns.x = [ns.x] %}"
             "{% set ns.y = [ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
             "too deeply");
    too_much("{% set ns = namespace(x=[], y=[1]) %}"
             "{% for i in range(50000) %}{% set ns.x = [ns.x] %}"
             "{% set ns.y = [ns.y] %}{% endfor %}{{ ns.x < ns.y }}",
             "too deeply");
}


/* open, n times, middle, close, n times: refused with these words. */
static void
nested(const char *open, const char *middle, const char *close, size_t n,
       const char *words)
{
    char *before = repeated(open, n), *after = repeated(close, n);
    char *source = malloc(strlen(before) + strlen(middle) + strlen(after) + 1);

    assert_non_null(source);
    strcpy(source, before);
    strcat(source, middle);
    strcat(source, after);

    if (words != NULL) {
        too_much(source, words);

    } else {
        assert_int_equal(render(source), LLM_OK);
    }

    free(before);
    free(after);
    free(source);
}


static void
test_depth_of_templates(void **state)
{
    (void) state;
    nested("{% if 1 %}", "x", "{% endif %}", 50, NULL);
    nested("{% if 1 %}", "x", "{% endif %}", 100000, "nested too deeply");
    nested("{% for i in [1] %}", "x", "{% endfor %}", 1000, "too deeply");
    nested("{% macro f() %}", "x", "{% endmacro %}", 1000, "too deeply");

    char *open = repeated("(", 100000);
    char *minus = repeated("-", 100000), *not = repeated("not ", 100000);
    char *plus = repeated("+1", 100000), *dots = repeated(".a", 100000);
    char *filters = repeated("|list", 100000);
    char *maps = repeated("'map',", 100000);
    char *elif = repeated("{% elif x %}", 20000);
    const char *const parts[][3] = {
        { "{{ ", open, "1 }}" },
        { "{{ ", minus, "1 }}" },
        { "{{ ", not, "1 }}" },
        { "{{ 1", plus, " }}" },
        { "{{ messages", dots, " }}" },
        { "{{ 'a'", filters, " }}" },
        { "{{ 'a'|map(", maps, "'x') }}" },
    };

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        char *source = malloc(1000000);

        assert_non_null(source);
        snprintf(source, 1000000, "%s%s%s", parts[i][0], parts[i][1],
                 parts[i][2]);
        too_much(source, "deeply");
        free(source);
    }

    /* many branches side by side are no nesting */
    char *source = malloc(1000000);

    assert_non_null(source);
    snprintf(source, 1000000, "{%% if x %%}%s{%% else %%}y{%% endif %%}", elif);
    assert_int_equal(render(source), LLM_OK);
    assert_int_equal(out.text.len, 1);

    free(source);
    free(open);
    free(minus);
    free(not );
    free(plus);
    free(dots);
    free(filters);
    free(maps);
    free(elif);
}


static void
test_depth_of_json(void **state)
{
    cJSON *root = cJSON_CreateArray(), *at = root;

    (void) state;

    for (int i = 0; i < 500; i++) {
        cJSON *inner = cJSON_CreateArray();

        cJSON_AddItemToArray(at, inner);
        at = inner;
    }

    assert_int_equal(render_tree("x", root), LLM_BADREQ);
    assert_non_null(strstr(err.text, "nested deeper than"));
    cJSON_Delete(root);
}


/* A client's object with very many keys, some twice. */
static void
test_many_keys(void **state)
{
    cJSON *messages = cJSON_CreateArray(), *object = cJSON_CreateObject();
    char name[20];

    (void) state;
    cJSON_AddItemToArray(messages, object);

    for (int i = 0; i < 100000; i++) {
        snprintf(name, sizeof(name), "k%d", i % 60000);
        cJSON_AddNumberToObject(object, name, i);
    }

    assert_int_equal(
        render_tree("{{ messages[0]|length }} {{ messages[0].k7 }} "
                    "{{ messages[0].k59999 }} {{ messages[0].k60000 }}",
                    messages),
        LLM_OK);
    buf_addc(&out.text, '\0');
    assert_string_equal(out.text.data, "60000 60007 59999 ");
    cJSON_Delete(messages);
}


static void
test_appending_is_linear(void **state)
{
    (void) state;
    assert_int_equal(
        render("{% set ns = namespace(t='') %}{% set x = 'abcdefghij' %}"
               "{% for i in range(100000) %}{% set ns.t = ns.t + x %}"
               "{% endfor %}{{ ns.t|length }}"),
        LLM_OK);
    assert_int_equal(out.text.len, 7);
    assert_memory_equal(out.text.data, "1000000", 7);
}


static void
test_long_messages(void **state)
{
    char *text = repeated("A line of text with <b>.\n", 42000);
    cJSON *messages = cJSON_Parse("[{\"role\":\"system\",\"content\":\"s\"}]");
    cJSON *user = cJSON_CreateObject();
    chat_template_t *tmpl;

    (void) state;
    cJSON_AddStringToObject(user, "role", "user");
    cJSON_AddStringToObject(user, "content", text);
    cJSON_AddItemToArray(messages, user);

    const char *const names[] = { "chatml", "llama3", "gemma" };

    for (int i = 0; i < 3; i++) {
        const chat_input_t in = { .messages = messages,
                                  .bos_token = "",
                                  .add_generation_prompt = true };

        buf_clear(&out.text);
        buf_clear(&out.trusted);
        assert_int_equal(chat_template_builtin(names[i], &tmpl, &err), LLM_OK);

        const uint64_t start = clock_now_ns();

        assert_int_equal(chat_template_render(tmpl, &in, &out, &err), LLM_OK);

        const uint64_t spent = clock_now_ns() - start;

        assert_true(out.text.len > strlen(text));
        printf("# %s: %zu bytes in %.2f ms\n", names[i], out.text.len,
               (double) spent / 1e6);
        chat_template_destroy(tmpl);
    }

    cJSON_Delete(messages);
    free(text);
}


static void
test_many_messages(void **state)
{
    cJSON *messages = cJSON_CreateArray();

    (void) state;

    for (int i = 0; i < 10000; i++) {
        cJSON *message = cJSON_CreateObject();

        cJSON_AddStringToObject(message, "role", i % 2 ? "assistant" : "user");
        cJSON_AddStringToObject(message, "content", "A few words.");
        cJSON_AddItemToArray(messages, message);
    }

    const uint64_t start = clock_now_ns();

    assert_int_equal(
        render_tree("{% for m in messages %}{% if m.role == 'user' and "
                    "loop.index0 % 2 == 0 %}{{ '<' + m.role + '>\n' + "
                    "m.content | trim + '</>' }}{% elif m.tools %}x{% else %}"
                    "{{ '<a>' ~ m.content ~ '</a>' }}{% endif %}{% endfor %}",
                    messages),
        LLM_OK);
    printf("# 10000 messages: %zu bytes in %.2f ms\n", out.text.len,
           (double) (clock_now_ns() - start) / 1e6);
    cJSON_Delete(messages);
}


/* Every system allocation fails once: an error, no crash, no leak. */
static void
test_no_memory(void **state)
{
    const char *const source =
        "{% set ns = namespace(t='', l=[]) %}"
        "{% macro m(a, b=2) %}{{ a }}{{ caller() }}{% endmacro %}"
        "{% for k, v in messages[0].items() if v %}"
        "{% set ns.t = ns.t + k + v|string %}{% set ns.l = ns.l + [v] %}"
        "{% call m(v) %}{{ loop.last }}{{ loop.nextitem }}{% endcall %}"
        "{% endfor %}{{ ns.l|sort|join(', ')|upper }}"
        "{{ ns|string|replace('a', 'b')|title|indent }}"
        "{{ messages|tojson(indent=2) }}{{ messages|map(attribute='content')"
        "|select('string')|unique|list }}{{ '%s %d' % ('x', 5) }}"
        "{{ '{} {a}'.format(1, a=2) }}{{ ns.t.split('o')[::-1] }}"
        "{{ 'a\\u00e9'[::-1] ~ dict(a=1)|dictsort }}{{ ('x' * 200000)[:3] }}"
        "{% filter upper %}{{ strftime_now('%Y')|length }}{% endfilter %}";
    cJSON *messages = cJSON_Parse("[{\"role\":\"user\",\"content\":\"tool\"}]");
    long n = 0;
    int code;

    (void) state;
    assert_int_equal(render_tree(source, messages), LLM_OK);

    char *whole = malloc(out.text.len);
    const size_t len = out.text.len;

    assert_non_null(whole);
    memcpy(whole, out.text.data, len);

    do {
        err = (llm_err_t){ 0 };
        arena_fail_after(++n);
        code = render_tree(source, messages);
        arena_fail_after(0);

        if (code != LLM_OK) {
            assert_int_equal(code, LLM_NOMEM);
            assert_int_equal(err.code, LLM_NOMEM);
            assert_int_equal(out.text.len, 0);
        }
    } while (code != LLM_OK);

    assert_in_range(n, 4, 1000);
    assert_int_equal(out.text.len, len);
    assert_memory_equal(out.text.data, whole, len);
    free(whole);
    cJSON_Delete(messages);
}


static int
tear_down(void **state)
{
    (void) state;
    buf_fini(&out.text);
    buf_fini(&out.trusted);
    return 0;
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_output),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_recursion),
        cmocka_unit_test(test_depth_of_templates),
        cmocka_unit_test(test_depth_of_json),
        cmocka_unit_test(test_many_keys),
        cmocka_unit_test(test_appending_is_linear),
        cmocka_unit_test(test_long_messages),
        cmocka_unit_test(test_many_messages),
        cmocka_unit_test(test_no_memory),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);
    return cmocka_run_group_tests(tests, NULL, tear_down);
}
