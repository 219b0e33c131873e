/*
 * engine/text with a real vocabulary: ids equal to the reference
 * implementation's, text that comes back unchanged, no quadratic case.
 *
 * The model file is read here by a few lines of the test's own, so that the
 * folder is proved to need nothing but engine/base.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <cjson/cJSON.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/utf8.h"
#include "engine/text/detok.h"
#include "engine/text/tokenizer.h"

#define GOLDEN "t/golden/tokens.json"

enum { MB = 1 << 20, GGUF_STRING = 8, GGUF_ARRAY = 9 };

typedef struct {
    const char *text;
    size_t len;
} str_t;

typedef struct {
    const uint8_t *at;
    str_t *tokens;
    str_t *merges;
    const uint8_t *types; /* int32, not aligned */
    int n_tokens;
    int n_merges;
} model_t;

static file_map_t file;
static model_t model;
static tok_t *tok;
static uint64_t seed = 20240613;


static uint32_t
rnd(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;

    return (uint32_t) (seed >> 33) % below;
}


static uint64_t
number(model_t *m, size_t bytes)
{
    uint64_t n = 0;

    memcpy(&n, m->at, bytes);
    m->at += bytes;

    return n;
}


static str_t
string(model_t *m)
{
    const size_t len = (size_t) number(m, 8);
    const str_t s = { (const char *) m->at, len };

    m->at += len;

    return s;
}


/* Walks over an array; returns its strings, if it has strings. */
static str_t *
array(model_t *m, int *n, const uint8_t **first)
{
    static const size_t sizes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
    const size_t type = (size_t) number(m, 4);
    str_t *strings = NULL;

    *n = (int) number(m, 8);
    *first = m->at;

    if (type != GGUF_STRING) {
        m->at += sizes[type] * (size_t) *n;
        return NULL;
    }

    strings = calloc((size_t) *n, sizeof(str_t));
    for (int i = 0; i < *n; i++) {
        strings[i] = string(m);
    }

    return strings;
}


static bool
is_key(str_t key, const char *name)
{
    return key.len == strlen(name) && memcmp(key.text, name, key.len) == 0;
}


static void
read_model(model_t *m)
{
    m->at = file.data + 16;

    for (uint64_t n_kv = number(m, 8); n_kv > 0; n_kv--) {
        static const size_t sizes[] = { 1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8 };
        const str_t key = string(m);
        const size_t type = (size_t) number(m, 4);
        const uint8_t *first;
        int n;

        if (type == GGUF_STRING) {
            string(m);
        } else if (type != GGUF_ARRAY) {
            m->at += sizes[type];
        } else {
            str_t *strings = array(m, &n, &first);

            if (is_key(key, "tokenizer.ggml.tokens")) {
                m->tokens = strings;
                m->n_tokens = n;
            } else if (is_key(key, "tokenizer.ggml.merges")) {
                m->merges = strings;
                m->n_merges = n;
            } else {
                m->types =
                    is_key(key, "tokenizer.ggml.token_type") ? first : m->types;
                free(strings);
            }
        }
    }
}


static bool
model_token(void *source, int i, const char **text, size_t *len, int *type)
{
    const model_t *m = source;
    int32_t value;

    memcpy(&value, m->types + 4 * i, 4);
    *text = m->tokens[i].text;
    *len = m->tokens[i].len;
    *type = value;

    return true;
}


static bool
model_merge(void *source, int i, const char **text, size_t *len)
{
    const model_t *m = source;

    *text = m->merges[i].text;
    *len = m->merges[i].len;

    return true;
}


static tok_t *
create(const char *pre)
{
    const tok_spec_t spec = {
        .model = "gpt2",
        .pre = pre,
        .n_tokens = model.n_tokens,
        .n_merges = model.n_merges,
        .source = &model,
        .token = model_token,
        .merge = model_merge,
        .bos = 1,
        .eos = 2,
        .eot = -1,
    };
    tok_t *t = NULL;
    llm_err_t err = { 0 };

    if (tok_create(&spec, &t, &err) != LLM_OK) {
        printf("Bail out! %s\n", err.text);
        exit(1);
    }

    return t;
}


static void
check_ids(const char *text, size_t len, int flags, const cJSON *want)
{
    tok_ids_t ids = { 0 };
    const cJSON *item;
    int n = 0;

    assert_int_equal(
        tok_encode(tok, text, len, NULL, flags, INT_MAX, &ids, NULL), LLM_OK);
    assert_int_equal(ids.n, cJSON_GetArraySize(want));

    cJSON_ArrayForEach(item, want)
    {
        assert_int_equal(ids.ids[n], (int) item->valuedouble);
        n++;
    }

    tok_ids_fini(&ids);
}


/* cJSON ends a string at \u0000: the test reads \ue000 in its place. */
static void
escape_zero(char *json)
{
    for (char *p = json; (p = strstr(p, "\\u0000")) != NULL;) {
        p[2] = 'e';
    }
}


static size_t
unescape_zero(char *text)
{
    char *to = text;

    for (char *p = text; *p;) {
        if (strncmp(p, "\xee\x80\x80", 3) == 0) {
            *to++ = '\0';
            p += 3;
        } else {
            *to++ = *p++;
        }
    }

    return (size_t) (to - text);
}


/* A piece is a string or, where it is no whole characters, an array of
 * bytes. */
static void
check_pieces(const cJSON *ids, const cJSON *pieces)
{
    const cJSON *piece = pieces->child;
    const cJSON *id;

    cJSON_ArrayForEach(id, ids)
    {
        size_t len, n = 0;
        const char *bytes = tok_bytes(tok, (int32_t) id->valuedouble, &len);

        assert_non_null(piece);

        if (cJSON_IsString(piece)) {
            assert_int_equal(unescape_zero(piece->valuestring), len);
            assert_memory_equal(piece->valuestring, bytes, len);
        } else {
            const cJSON *byte;

            cJSON_ArrayForEach(byte, piece)
            {
                assert_true(n < len);
                assert_int_equal((uint8_t) bytes[n++], (int) byte->valuedouble);
            }

            assert_int_equal(n, len);
        }

        piece = piece->next;
    }

    assert_null(piece);
}


static void
test_golden(void **state)
{
    (void) state;
    char *data;
    size_t data_len;
    const cJSON *entry;

    assert_int_equal(file_read(GOLDEN, MB, &data, &data_len, NULL), LLM_OK);
    escape_zero(data);

    cJSON *golden = cJSON_Parse(data);
    assert_int_equal(cJSON_GetArraySize(golden), 38);

    cJSON_ArrayForEach(entry, golden)
    {
        char *text =
            cJSON_GetObjectItemCaseSensitive(entry, "text")->valuestring;
        const cJSON *plain = cJSON_GetObjectItemCaseSensitive(entry, "plain");
        const size_t len = unescape_zero(text);

        check_ids(text, len, 0, plain);
        check_ids(text, len, TOK_ADD_SPECIAL | TOK_PARSE_SPECIAL,
                  cJSON_GetObjectItemCaseSensitive(
                      entry, "add_special_parse_special"));
        check_pieces(plain, cJSON_GetObjectItemCaseSensitive(entry, "pieces"));
    }

    cJSON_Delete(golden);
    free(data);
}


static void
test_eog(void **state)
{
    (void) state;
    int n;
    const int32_t *eog = tok_eog(tok, &n);
    const int32_t want[] = { 0, 2, 4 };

    assert_int_equal(n, 3);
    assert_memory_equal(eog, want, sizeof(want));
    assert_int_equal(tok_n_vocab(tok), 49152);
}


/* Random text of many scripts.  This vocabulary lacks the tokens of some
 * bytes: a few control characters, and two that begin the characters from
 * U+40000 to U+BFFFF, of which none is assigned. */
static size_t
random_text(char *text, size_t chars)
{
    static const uint32_t from[] = { 0x20,   0x20,   0x09,   0xa0,
                                     0x400,  0x600,  0xe00,  0x2000,
                                     0x3000, 0x4e00, 0xac00, 0x1f300 };
    static const uint32_t count[] = { 0x5f, 0x5f, 2,    0x260, 0x80,  0xff,
                                      0x5b, 0x70, 0xff, 9000,  11172, 0x5ff };
    size_t n = 0;

    while (chars-- > 0) {
        const uint32_t i = rnd(12);
        const uint32_t cp = from[i] + rnd(count[i]);

        n += (size_t) utf8_encode(cp, (uint8_t *) text + n);
    }

    return n;
}


static void
check_round_trip(const tok_t *t, const char *text, size_t len)
{
    tok_ids_t ids = { 0 };
    buf_t out = { 0 };

    assert_int_equal(tok_encode(t, text, len, NULL, 0, INT_MAX, &ids, NULL),
                     LLM_OK);
    assert_int_equal(tok_decode(t, ids.ids, ids.n, false, &out), LLM_OK);
    assert_int_equal(out.len, len);
    assert_memory_equal(out.data, text, len);

    tok_ids_fini(&ids);
    buf_fini(&out);
}


static void
test_round_trip(void **state)
{
    (void) state;
    static const char *const names[] = { "smollm", "gpt-2", "llama-bpe" };
    char text[4 * 128];

    for (int i = 0; i < 3; i++) {
        tok_t *t = create(names[i]);

        for (int round = 0; round < 1000; round++) {
            check_round_trip(t, text, random_text(text, 1 + rnd(127)));
        }

        tok_destroy(t);
    }
}


static void
test_stream(void **state)
{
    (void) state;

    for (int round = 0; round < 2000; round++) {
        int32_t ids[64];
        buf_t whole = { 0 };
        buf_t stream = { 0 };
        detok_t detok = { 0 };

        for (int i = 0; i < 64; i++) {
            /* the low ids are single bytes */
            ids[i] = (int32_t) (rnd(2) ? rnd(260) : rnd(49152));
            detok_push(&detok, tok, ids[i], round % 2, &stream);
            assert_true(utf8_valid((uint8_t *) stream.data, stream.len));
        }

        detok_finish(&detok, &stream);
        assert_int_equal(tok_decode(tok, ids, 64, round % 2, &whole), LLM_OK);
        assert_int_equal(whole.len, stream.len);
        assert_memory_equal(whole.data, stream.data, whole.len);

        buf_fini(&whole);
        buf_fini(&stream);
    }
}


static void
check_large(const char *what, const char *text, size_t len)
{
    tok_ids_t ids = { 0 };
    const clock_t start = clock();

    assert_int_equal(tok_encode(tok, text, len, NULL, TOK_PARSE_SPECIAL,
                                INT_MAX, &ids, NULL),
                     LLM_OK);

    const clock_t spent = clock() - start;

    printf("# %s: %zu bytes, %d tokens, %.1f ms\n", what, len, ids.n,
           1e3 * (double) spent / CLOCKS_PER_SEC);

    /* of processor time, quadratic would be minutes, sanitizers cost seconds */
    assert_true(spent < 10 * CLOCKS_PER_SEC);

    /* where all may not fit it ends early */
    const int full = ids.n;
    ids.n = 0;
    assert_int_equal(tok_encode(tok, text, len, NULL, TOK_PARSE_SPECIAL,
                                full - 1, &ids, NULL),
                     LLM_LIMIT);
    assert_true(ids.n <= full - 1);

    tok_ids_fini(&ids);
}


static void
test_large(void **state)
{
    (void) state;
    static const char *const runs[] = {
        "a",         " ",          "\n", "-",  "1", "\xe4\xb8\xad",
        "<|im_end|", "<|im_end|>", "<",  " a", "' "
    };
    char *text = malloc(MB + 64);

    assert_non_null(text);

    for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
        size_t len = 0;

        while (len < MB) {
            memcpy(text + len, runs[i], strlen(runs[i]));
            len += strlen(runs[i]);
        }

        check_large(runs[i][0] == '\n' ? "newlines" : runs[i], text, len);
    }

    /* one word of random letters */
    for (size_t i = 0; i < MB; i++) {
        text[i] = (char) ('a' + rnd(26));
    }
    check_large("random letters", text, MB);

    check_large("random text", text, random_text(text, MB / 4));
    free(text);
}


enum { N_THREADS = 4 };

typedef struct {
    pthread_t thread;
    char text[4000];
    size_t len;
    tok_ids_t ids;
} worker_t;


static void *
work(void *data)
{
    worker_t *w = data;

    for (int i = 0; i < 20; i++) {
        w->ids.n = 0;
        tok_encode(tok, w->text, w->len, NULL, TOK_PARSE_SPECIAL, INT_MAX,
                   &w->ids, NULL);
    }

    return NULL;
}


static void
test_threads(void **state)
{
    (void) state;
    static worker_t workers[N_THREADS];

    for (int i = 0; i < N_THREADS; i++) {
        workers[i].len = random_text(workers[i].text, 1000);
        assert_int_equal(
            pthread_create(&workers[i].thread, NULL, work, &workers[i]), 0);
    }

    for (int i = 0; i < N_THREADS; i++) {
        tok_ids_t ids = { 0 };

        pthread_join(workers[i].thread, NULL);
        assert_int_equal(tok_encode(tok, workers[i].text, workers[i].len, NULL,
                                    TOK_PARSE_SPECIAL, INT_MAX, &ids, NULL),
                         LLM_OK);
        assert_int_equal(ids.n, workers[i].ids.n);
        assert_memory_equal(ids.ids, workers[i].ids.ids,
                            (size_t) ids.n * sizeof(int32_t));
        tok_ids_fini(&ids);
        tok_ids_fini(&workers[i].ids);
    }
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),     cmocka_unit_test(test_eog),
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_stream),
        cmocka_unit_test(test_large),      cmocka_unit_test(test_threads),
    };
    const char *path = getenv("LLM_TEST_MODEL");

    if (path == NULL || file_map(path, &file, NULL) != LLM_OK) {
        printf("1..0 # SKIP LLM_TEST_MODEL is not set to a readable model\n");
        return 0;
    }

    read_model(&model);

    const uint64_t start = clock_now_ns();
    tok = create("smollm");
    printf("# seed %llu, created in %.1f ms\n", (unsigned long long) seed,
           (double) (clock_now_ns() - start) / 1e6);

    cmocka_set_message_output(CM_OUTPUT_TAP);
    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    tok_destroy(tok);
    free(model.tokens);
    free(model.merges);
    file_unmap(&file);

    return rc;
}
