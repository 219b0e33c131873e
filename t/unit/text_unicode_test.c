/*
 * engine/text and Unicode: how the families cut a text, normalization, and
 * decoding of tokens that are no whole characters.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <utf8proc.h>

#include "engine/text/detok.h"
#include "engine/text/nfc.h"
#include "engine/text/pretok.h"
#include "t/unit/mini_vocab.h"

enum { MB = 1 << 20 };

static mini_vocab_t mini;
static uint64_t seed = 20240612;


static uint32_t
rnd(uint32_t below)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;

    return (uint32_t) (seed >> 33) % below;
}


static tok_t *
mini_tok(const char *pre)
{
    tok_spec_t spec = mini_spec(&mini, pre);
    tok_t *tok = NULL;

    assert_int_equal(tok_create(&spec, &tok, NULL), LLM_OK);

    return tok;
}


typedef struct {
    char joined[512]; /* words with '|' between them */
    size_t n;
} words_t;


static int
collect(void *data, const char *word, size_t len)
{
    words_t *words = data;

    assert_true(words->n + len + 2 < sizeof(words->joined));
    memcpy(words->joined + words->n, word, len);
    words->n += len;
    words->joined[words->n++] = '|';
    words->joined[words->n] = '\0';

    return LLM_OK;
}


/* Made by Hugging Face's tokenizers 0.23.3 with the families' own
 * pre-tokenizer settings. */
static const struct {
    const char *pre;
    const char *text;
    const char *words;
} splits[] = {
    { "smollm", "Hello, world!  It's 12345 x",
      "Hello|,| world|!| | It|'s| |1|2|3|4|5| x|" },
    { "gpt-2", "Hello, world!  It's 12345 x",
      "Hello|,| world|!| | It|'s| 12345| x|" },
    { "llama-bpe", "Hello, world!  It's 12345 x",
      "Hello|,| world|!| | It|'s| |123|45| x|" },
    { "qwen2", "Hello, world!  It's 12345 x",
      "Hello|,| world|!| | It|'s| |1|2|3|4|5| x|" },
    { "smollm",
      "a  b\x09\x09"
      "c \x0a\x0a d\x0d\x0a",
      "a| | b|\x09|\x09|c| \x0a\x0a| d|\x0d\x0a|" },
    { "gpt-2",
      "a  b\x09\x09"
      "c \x0a\x0a d\x0d\x0a",
      "a| | b|\x09|\x09|c| \x0a\x0a| d|\x0d\x0a|" },
    { "llama-bpe",
      "a  b\x09\x09"
      "c \x0a\x0a d\x0d\x0a",
      "a| | b|\x09|\x09"
      "c| \x0a\x0a| d|\x0d\x0a|" },
    { "qwen2",
      "a  b\x09\x09"
      "c \x0a\x0a d\x0d\x0a",
      "a| | b|\x09|\x09"
      "c| \x0a\x0a| d|\x0d\x0a|" },
    { "smollm", "I'LL we'Ve 'S '\xc5\xbf x",
      "I|'|LL| we|'|Ve| '|S| '|\xc5\xbf| x|" },
    { "gpt-2", "I'LL we'Ve 'S '\xc5\xbf x",
      "I|'|LL| we|'|Ve| '|S| '|\xc5\xbf| x|" },
    { "llama-bpe", "I'LL we'Ve 'S '\xc5\xbf x",
      "I|'LL| we|'Ve| '|S| '|\xc5\xbf| x|" },
    { "qwen2", "I'LL we'Ve 'S '\xc5\xbf x",
      "I|'LL| we|'Ve| '|S| '|\xc5\xbf| x|" },
    { "smollm", "\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa4 \xe2\x85\xa3\xe2\x91\xa0",
      "\xd9\xa1|\xd9\xa2|\xd9\xa3|\xd9\xa4| |\xe2\x85\xa3|\xe2\x91\xa0|" },
    { "gpt-2", "\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa4 \xe2\x85\xa3\xe2\x91\xa0",
      "\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa4| \xe2\x85\xa3\xe2\x91\xa0|" },
    { "llama-bpe", "\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa4 \xe2\x85\xa3\xe2\x91\xa0",
      "\xd9\xa1\xd9\xa2\xd9\xa3|\xd9\xa4| |\xe2\x85\xa3\xe2\x91\xa0|" },
    { "qwen2", "\xd9\xa1\xd9\xa2\xd9\xa3\xd9\xa4 \xe2\x85\xa3\xe2\x91\xa0",
      "\xd9\xa1|\xd9\xa2|\xd9\xa3|\xd9\xa4| |\xe2\x85\xa3|\xe2\x91\xa0|" },
    { "smollm", "x \xe1\xa0\x8e!y\xc2\xa0z\xe2\x80\x83w",
      "x| \xe1\xa0\x8e!|y|\xc2\xa0|z|\xe2\x80\x83|w|" },
    { "gpt-2", "x \xe1\xa0\x8e!y\xc2\xa0z\xe2\x80\x83w",
      "x| \xe1\xa0\x8e!|y|\xc2\xa0|z|\xe2\x80\x83|w|" },
    { "llama-bpe", "x \xe1\xa0\x8e!y\xc2\xa0z\xe2\x80\x83w",
      "x| \xe1\xa0\x8e!|y|\xc2\xa0z|\xe2\x80\x83w|" },
    { "qwen2", "x \xe1\xa0\x8e!y\xc2\xa0z\xe2\x80\x83w",
      "x| \xe1\xa0\x8e!|y|\xc2\xa0z|\xe2\x80\x83w|" },
    { "smollm", "e\xcc\x81 \xc3\xa9 \xe1\x84\x80\xe1\x85\xa1",
      "e|\xcc\x81| \xc3\xa9| \xe1\x84\x80\xe1\x85\xa1|" },
    { "gpt-2", "e\xcc\x81 \xc3\xa9 \xe1\x84\x80\xe1\x85\xa1",
      "e|\xcc\x81| \xc3\xa9| \xe1\x84\x80\xe1\x85\xa1|" },
    { "llama-bpe", "e\xcc\x81 \xc3\xa9 \xe1\x84\x80\xe1\x85\xa1",
      "e|\xcc\x81| \xc3\xa9| \xe1\x84\x80\xe1\x85\xa1|" },
    { "qwen2", "e\xcc\x81 \xc3\xa9 \xe1\x84\x80\xe1\x85\xa1",
      "\xc3\xa9| \xc3\xa9| \xea\xb0\x80|" },
    { "smollm", "  lead trail  ", " | lead| trail|  |" },
    { "gpt-2", "  lead trail  ", " | lead| trail|  |" },
    { "llama-bpe", "  lead trail  ", " | lead| trail|  |" },
    { "qwen2", "  lead trail  ", " | lead| trail|  |" },
    { "smollm", "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!\x0a\x0a?",
      "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!|\x0a|\x0a|?|" },
    { "gpt-2", "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!\x0a\x0a?",
      "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!|\x0a|\x0a|?|" },
    { "llama-bpe", "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!\x0a\x0a?",
      "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!\x0a\x0a|?|" },
    { "qwen2", "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!\x0a\x0a?",
      "\xf0\x9f\x98\x80\xf0\x9f\x91\x8d!!\x0a\x0a|?|" },
    { "smollm",
      "a\xcd\xb8"
      "b \xe2\x80\x8b",
      "a|\xcd\xb8|b| \xe2\x80\x8b|" },
    { "gpt-2",
      "a\xcd\xb8"
      "b \xe2\x80\x8b",
      "a|\xcd\xb8|b| \xe2\x80\x8b|" },
    { "llama-bpe",
      "a\xcd\xb8"
      "b \xe2\x80\x8b",
      "a|\xcd\xb8"
      "b| \xe2\x80\x8b|" },
    { "qwen2",
      "a\xcd\xb8"
      "b \xe2\x80\x8b",
      "a|\xcd\xb8"
      "b| \xe2\x80\x8b|" },
};


static void
test_pretok(void **state)
{
    (void) state;

    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]); i++) {
        pretok_t *pretok;
        pretok_scratch_t *scratch = pretok_scratch_create();
        words_t words = { 0 };

        assert_non_null(scratch);
        assert_int_equal(pretok_create(splits[i].pre, &pretok, NULL), LLM_OK);
        assert_int_equal(pretok_run(pretok, scratch, splits[i].text,
                                    strlen(splits[i].text), collect, &words),
                         LLM_OK);
        assert_string_equal(words.joined, splits[i].words);

        pretok_scratch_destroy(scratch);
        pretok_destroy(pretok);
    }
}


static int
refuse(void *data, const char *word, size_t len)
{
    (void) word;
    (void) len;

    return ++*(int *) data == 3 ? LLM_LIMIT : LLM_OK;
}


static void
test_pretok_stops(void **state)
{
    (void) state;
    pretok_t *pretok;
    pretok_scratch_t *scratch = pretok_scratch_create();
    int calls = 0;

    assert_int_equal(pretok_create("smollm", &pretok, NULL), LLM_OK);
    assert_int_equal(
        pretok_run(pretok, scratch, "1 2 3 4 5", 9, refuse, &calls), LLM_LIMIT);
    assert_int_equal(calls, 3);

    pretok_scratch_destroy(scratch);
    pretok_destroy(pretok);
}


/* Compares our NFC with utf8proc's own. */
static void
check_nfc(const char *text, size_t len)
{
    buf_t out = { 0 };
    utf8proc_uint8_t *want = NULL;
    const utf8proc_ssize_t n =
        utf8proc_map((const utf8proc_uint8_t *) text, (utf8proc_ssize_t) len,
                     &want, UTF8PROC_STABLE | UTF8PROC_COMPOSE);

    assert_true(n >= 0);
    assert_int_equal(nfc(text, len, &out), LLM_OK);
    assert_int_equal(out.len, n);

    if (n > 0) {
        assert_memory_equal(out.data, want, (size_t) n);
    }

    if (nfc_quick(text, len)) {
        assert_int_equal(len, n);
        assert_memory_equal(text, want, len);
    }

    free(want);
    buf_fini(&out);
}


static void
test_nfc(void **state)
{
    (void) state;
    char text[256];

    check_nfc("", 0);

    /* every character there is, alone and between others */
    for (uint32_t cp = 1; cp < 0x110000; cp++) {
        if (cp >= 0xd800 && cp < 0xe000) {
            continue;
        }

        size_t n = (size_t) utf8_encode(cp, (uint8_t *) text);
        check_nfc(text, n);

        /* e + character + acute: composes, reorders or neither */
        text[0] = 'e';
        n = 1 + (size_t) utf8_encode(cp, (uint8_t *) text + 1);
        memcpy(text + n, "\xcc\x81", 2);
        check_nfc(text, n + 2);
    }

    /* runs of marks, Hangul pieces and starters */
    for (int round = 0; round < 20000; round++) {
        size_t n = 0;

        for (uint32_t k = rnd(24) + 1; k > 0; k--) {
            static const uint32_t from[] = { 0x300,  0x1100, 0x1161, 0x11a8,
                                             0x61,   0xe0,   0x1e00, 0x591,
                                             0xac00, 0x9be,  0x1d165 };
            static const uint32_t count[] = { 0x70, 19,   21,    27, 26, 32,
                                              256,  0x2d, 11172, 2,  14 };
            const uint32_t i = rnd(11);

            n += (size_t) utf8_encode(from[i] + rnd(count[i]),
                                      (uint8_t *) text + n);
        }

        check_nfc(text, n);
    }
}


/* U+11A7 is no final consonant, though it sits where one would. */
static void
test_nfc_hangul(void **state)
{
    (void) state;
    static const char *const pairs[][2] = {
        { "\xea\xb0\x80\xe1\x86\xa7", "\xea\xb0\x80\xe1\x86\xa7" },
        { "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa7", "\xea\xb0\x80\xe1\x86\xa7" },
        { "\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81" },
        { "\xe1\x86\xa7\xcc\xa3\xcc\x81", "\xe1\x86\xa7\xcc\xa3\xcc\x81" },
    };

    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        buf_t out = { 0 };

        assert_int_equal(nfc(pairs[i][0], strlen(pairs[i][0]), &out), LLM_OK);
        buf_addc(&out, '\0');
        assert_string_equal(out.data, pairs[i][1]);
        buf_fini(&out);
    }
}


static void
test_nfc_is_linear(void **state)
{
    (void) state;
    buf_t text = { 0 };
    buf_t out = { 0 };

    /* classes 230 and 220 in turn: half of them have to move far */
    buf_adds(&text, "e");
    while (text.len < MB) {
        buf_adds(&text, "\xcc\x81\xcc\xa3");
    }

    const clock_t start = clock();

    assert_int_equal(nfc(text.data, text.len, &out), LLM_OK);
    assert_true(clock() - start < 5 * CLOCKS_PER_SEC); /* of processor time */

    /* "ẹ" takes the first dot below, the others follow in order */
    assert_memory_equal(out.data, "\xe1\xba\xb9\xcc\xa3", 5);

    buf_fini(&text);
    buf_fini(&out);
}


static void
test_nfc_where_asked(void **state)
{
    (void) state;
    static const char decomposed[] = "[U]e\xcc\x81 x";

    for (int qwen = 0; qwen < 2; qwen++) {
        tok_t *tok = mini_tok(qwen ? "qwen2" : "gpt-2");
        tok_ids_t ids = { 0 };
        buf_t text = { 0 };

        assert_int_equal(tok_encode(tok, decomposed, strlen(decomposed), NULL,
                                    0, INT_MAX, &ids, NULL),
                         LLM_OK);
        assert_int_equal(tok_decode(tok, ids.ids, ids.n, false, &text), LLM_OK);
        buf_addc(&text, '\0');
        assert_string_equal(text.data, qwen ? "[U]\xc3\xa9 x" : decomposed);

        buf_fini(&text);
        tok_ids_fini(&ids);
        tok_destroy(tok);
    }
}


static void
check_decode(const tok_t *tok, const int32_t *ids, int n, bool keep,
             const char *want)
{
    buf_t text = { 0 };

    assert_int_equal(tok_decode(tok, ids, n, keep, &text), LLM_OK);
    buf_addc(&text, '\0');
    assert_string_equal(text.data, want);
    buf_fini(&text);
}

#define IDS(...)                        \
    ((const int32_t[]){ __VA_ARGS__ }), \
        (int) (sizeof((const int32_t[]){ __VA_ARGS__ }) / sizeof(int32_t))


static void
test_decode(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");

    check_decode(tok, NULL, 0, false, "");
    check_decode(tok, IDS('h', MINI_A, ' ', MINI_USER, MINI_UNUSED), false,
                 "h [U]");
    check_decode(tok, IDS('h', MINI_A, ' ', MINI_USER, MINI_UNK), true,
                 "h<|a|> [U]<unk>");

    /* a control token that is left out does not part a character */
    check_decode(tok, IDS(0xc3, MINI_A, 0xa9), false, "\xc3\xa9");
    check_decode(tok, IDS(0xc3, MINI_A, 0xa9), true,
                 "\xef\xbf\xbd<|a|>\xef\xbf\xbd");

    /* one replacement for each maximal subpart (Unicode 3.9, table 3-8) */
    check_decode(tok,
                 IDS('a', 0xf1, 0x80, 0x80, 0xe1, 0x80, 0xc2, 'b', 0x80, 'c',
                     0x80, 0xbf, 'd'),
                 false,
                 "a\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                 "b\xef\xbf\xbd"
                 "c\xef\xbf\xbd\xef\xbf\xbd"
                 "d");
    check_decode(tok, IDS(0xed, 0xa0, 0x80), false,
                 "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
    check_decode(tok, IDS('x', 0xf0, 0x9f, 0x98), false, "x\xef\xbf\xbd");

    buf_t text = { 0 };
    assert_int_equal(tok_decode(tok, IDS('x', MINI_N), false, &text),
                     LLM_BADREQ);
    assert_int_equal(tok_decode(tok, IDS('x', -1), false, &text), LLM_BADREQ);
    assert_int_equal(text.len, 0);
    buf_fini(&text);

    tok_destroy(tok);
}


/* Whatever the tokens: what has come out so far is valid, is never taken back,
 * and is in the end what decoding at once gives. */
static void
test_stream_equals_whole(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");
    int32_t ids[40];

    for (int round = 0; round < 20000; round++) {
        const int n = (int) rnd(40);
        const bool keep = rnd(2);
        buf_t whole = { 0 };
        buf_t stream = { 0 };
        detok_t detok = { 0 };

        for (int i = 0; i < n; i++) {
            /* half of them bytes that begin or continue characters */
            ids[i] = (int32_t) (rnd(2) ? 0x80 + rnd(0x80) : rnd(MINI_N));
        }

        assert_int_equal(tok_decode(tok, ids, n, keep, &whole), LLM_OK);

        for (int i = 0; i < n; i++) {
            detok_push(&detok, tok, ids[i], keep, &stream);
            assert_true(utf8_valid((uint8_t *) stream.data, stream.len));
            assert_true(detok.n_held < 4);
        }

        detok_finish(&detok, &stream);
        assert_int_equal(stream.len, whole.len);

        if (whole.len > 0) {
            assert_memory_equal(stream.data, whole.data, whole.len);
        }

        buf_fini(&whole);
        buf_fini(&stream);
    }

    tok_destroy(tok);
}


/* The same bytes, cut into tokens in two ways. */
static void
test_cuts_do_not_matter(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");

    for (int round = 0; round < 20000; round++) {
        int32_t bytes[200], ids[24];
        int n_bytes = 0;
        const int n = (int) rnd(24);
        buf_t a = { 0 };
        buf_t b = { 0 };

        for (int i = 0; i < n; i++) {
            size_t len;

            ids[i] = (int32_t) (rnd(2) ? 0xc0 + rnd(0x40) : rnd(MINI_USER));
            const char *p = tok_bytes(tok, ids[i], &len);

            for (size_t k = 0; k < len; k++) {
                bytes[n_bytes++] = (uint8_t) p[k];
            }
        }

        assert_int_equal(tok_decode(tok, ids, n, true, &a), LLM_OK);
        assert_int_equal(tok_decode(tok, bytes, n_bytes, true, &b), LLM_OK);
        assert_int_equal(a.len, b.len);

        if (a.len > 0) {
            assert_memory_equal(a.data, b.data, a.len);
        }

        buf_fini(&a);
        buf_fini(&b);
    }

    tok_destroy(tok);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pretok),
        cmocka_unit_test(test_pretok_stops),
        cmocka_unit_test(test_nfc),
        cmocka_unit_test(test_nfc_hangul),
        cmocka_unit_test(test_nfc_is_linear),
        cmocka_unit_test(test_nfc_where_asked),
        cmocka_unit_test(test_decode),
        cmocka_unit_test(test_stream_equals_whole),
        cmocka_unit_test(test_cuts_do_not_matter),
    };

    mini_init(&mini);
    printf("# seed %llu\n", (unsigned long long) seed);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
