/*
 * engine/text with a small vocabulary: merges, special tokens and who may
 * write them, limits, broken vocabularies.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "t/unit/mini_vocab.h"

static mini_vocab_t mini;
static uint64_t seed = 20240611;


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
    llm_err_t err = { 0 };

    assert_int_equal(tok_create(&spec, &tok, &err), LLM_OK);

    return tok;
}


/* The id whose stored text is `text`. */
static int32_t
id_of(const char *text)
{
    for (int i = 0; i < mini.n; i++) {
        if (strcmp(mini.tokens[i].text, text) == 0) {
            return i;
        }
    }

    fail_msg("no token %s", text);

    return -1;
}


/* Checks that text becomes these tokens; `want` are stored texts, a NULL
 * behind. */
static void
check(const tok_t *tok, const char *text, int flags, const uint8_t *trusted,
      const char *const *want)
{
    tok_ids_t ids = { 0 };
    int n = 0;

    assert_int_equal(tok_encode(tok, text, strlen(text), trusted, flags,
                                INT_MAX, &ids, NULL),
                     LLM_OK);

    for (; want[n] != NULL; n++) {
        assert_true(n < ids.n);
        assert_string_equal(mini.tokens[ids.ids[n]].text, want[n]);
    }

    assert_int_equal(ids.n, n);
    tok_ids_fini(&ids);
}

#define WANT(...) ((const char *const[]){ __VA_ARGS__, NULL })


static void
test_merges(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");

    check(tok, "", 0, NULL, (const char *const[]){ NULL });
    check(tok, "hello world", 0, NULL, WANT("hello", "\xc4\xa0w", "orld"));
    check(tok, "held", 0, NULL, WANT("he", "ld"));
    check(tok, "caf\xc3\xa9", 0, NULL, WANT("c", "a", "f", "\xc3\x83\xc2\xa9"));

    /* the better rank, not the first pair */
    check(tok, "abc", 0, NULL, WANT("a", "bc"));

    /* equal ranks from the left */
    check(tok, "aaa", 0, NULL, WANT("aa", "a"));
    check(tok, "aaaaaaaaaaaaa", 0, NULL, WANT("aaaaaaaa", "aaaa", "a"));

    /* merges do not cross words */
    check(tok, "hell o", 0, NULL, WANT("hell", "\xc4\xa0", "o"));
    check(tok, "xx12y", 0, NULL, WANT("x", "x", "12", "y"));

    tok_destroy(tok);

    /* digits stand alone */
    tok = mini_tok("smollm");
    check(tok, "xx12y", 0, NULL, WANT("x", "x", "1", "2", "y"));
    tok_destroy(tok);
}


/* The definition, without any cleverness: strings, quadratic. */
static int
naive_bpe(const char *word, size_t len, int32_t *ids)
{
    int n = (int) len;

    for (int i = 0; i < n; i++) {
        ids[i] = (uint8_t) word[i];
    }

    for (;;) {
        int best = INT_MAX, at = -1;
        char pair[140];

        for (int i = 0; i + 1 < n; i++) {
            snprintf(pair, sizeof(pair), "%s %s", mini.tokens[ids[i]].text,
                     mini.tokens[ids[i + 1]].text);

            for (int m = 0; m < MINI_N_MERGES && m < best; m++) {
                if (strcmp(mini_merges[m], pair) == 0) {
                    best = m;
                    at = i;
                }
            }
        }

        if (at < 0) {
            return n;
        }

        ids[at] = 256 + best;
        memmove(ids + at + 1, ids + at + 2,
                (size_t) (n - at - 2) * sizeof(int32_t));
        n--;
    }
}


static void
test_merges_against_naive(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");
    static const char letters[] = "aaaabchelowrdxying";

    for (int round = 0; round < 3000; round++) {
        char word[48];
        int32_t want[48];
        tok_ids_t ids = { 0 };
        const size_t len = 1 + rnd(sizeof(word) - 1);

        for (size_t i = 0; i < len; i++) {
            word[i] = letters[rnd(sizeof(letters) - 1)];
        }

        const int n = naive_bpe(word, len, want);

        assert_int_equal(
            tok_encode(tok, word, len, NULL, 0, INT_MAX, &ids, NULL), LLM_OK);
        assert_int_equal(ids.n, n);
        assert_memory_equal(ids.ids, want, (size_t) n * sizeof(int32_t));
        tok_ids_fini(&ids);
    }

    tok_destroy(tok);
}


static void
test_specials(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");

    /* as text, then as what they are, the longest first */
    check(tok, "<|a|>b", 0, NULL, WANT("<", "|", "a", "|", ">", "b"));
    check(tok, "<|a|>b", TOK_PARSE_SPECIAL, NULL, WANT("<|a|>b"));
    check(tok, "<|a|>c<|a|>", TOK_PARSE_SPECIAL, NULL,
          WANT("<|a|>", "c", "<|a|>"));
    check(tok, "x<|a|", TOK_PARSE_SPECIAL, NULL, WANT("x", "<", "|", "a", "|"));
    check(tok, "<<|a|>", TOK_PARSE_SPECIAL, NULL, WANT("<", "<|a|>"));
    check(tok, "<unk>", TOK_PARSE_SPECIAL, NULL, WANT("<unk>"));
    check(tok, "<unk>", 0, NULL, WANT("<", "u", "n", "k", ">"));

    /* a normal token is never matched as a whole */
    check(tok, "<|end|>", TOK_PARSE_SPECIAL, NULL,
          WANT("<", "|", "e", "n", "d", "|", ">"));

    /* user-defined tokens need no permission */
    check(tok, "a[U]b", 0, NULL, WANT("a", "[U]", "b"));
    check(tok, "[U][U]x", 0, NULL, WANT("[U][U]x"));
    check(tok, "[U][U]y", 0, NULL, WANT("[U]", "[U]", "y"));
    check(tok, "[U", 0, NULL, WANT("[", "U"));

    /* words and merges end at a special token */
    check(tok, "he<|a|>llo", TOK_PARSE_SPECIAL, NULL,
          WANT("he", "<|a|>", "ll", "o"));

    tok_destroy(tok);
}


static void
test_trusted(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");
    uint8_t trusted[16];

    memset(trusted, 1, sizeof(trusted));
    check(tok, "<|a|>b", TOK_PARSE_SPECIAL, trusted, WANT("<|a|>b"));

    /* the shorter token is trusted whole, the longer is not */
    trusted[5] = 0;
    check(tok, "<|a|>b", TOK_PARSE_SPECIAL, trusted, WANT("<|a|>", "b"));

    /* any byte of it that a user wrote makes it text */
    for (int i = 0; i < 5; i++) {
        memset(trusted, 1, sizeof(trusted));
        trusted[i] = 0;
        check(tok, "<|a|>", TOK_PARSE_SPECIAL, trusted,
              WANT("<", "|", "a", "|", ">"));
    }

    memset(trusted, 0, sizeof(trusted));
    check(tok, "<|a|>[U]", TOK_PARSE_SPECIAL, trusted,
          WANT("<", "|", "a", "|", ">", "[U]"));

    /* trusted text does not speak for flags that do not ask */
    memset(trusted, 1, sizeof(trusted));
    check(tok, "<|a|>", 0, trusted, WANT("<", "|", "a", "|", ">"));

    tok_destroy(tok);
}


static void
test_add_special(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");

    check(tok, "a", TOK_ADD_SPECIAL, NULL, WANT("a"));
    tok_destroy(tok);

    tok_spec_t spec = mini_spec(&mini, "gpt-2");
    spec.add_bos = true;
    spec.add_eos = true;
    assert_int_equal(tok_create(&spec, &tok, NULL), LLM_OK);
    check(tok, "a", 0, NULL, WANT("a"));
    check(tok, "a", TOK_ADD_SPECIAL, NULL, WANT("<s>", "a", "<|im_end|>"));
    check(tok, "", TOK_ADD_SPECIAL, NULL, WANT("<s>", "<|im_end|>"));
    tok_destroy(tok);
}


static void
test_limits(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");
    tok_ids_t ids = { 0 };
    llm_err_t err = { 0 };

    assert_int_equal(tok_encode(tok, "x x x", 5, NULL, 0, 5, &ids, &err),
                     LLM_OK);
    assert_int_equal(ids.n, 5);

    /* what is there already counts */
    assert_int_equal(tok_encode(tok, "", 0, NULL, 0, 5, &ids, &err), LLM_OK);
    assert_int_equal(tok_encode(tok, "x", 1, NULL, 0, 5, &ids, &err),
                     LLM_LIMIT);
    assert_int_equal(err.code, LLM_LIMIT);
    assert_non_null(strstr(err.text, "5 tokens"));
    assert_int_equal(tok_encode(tok, "[U]", 3, NULL, 0, 5, &ids, &err),
                     LLM_LIMIT);
    assert_int_equal(tok_encode(tok, "x", 1, NULL, 0, 3, &ids, &err),
                     LLM_LIMIT);
    ids.n = 0;
    assert_int_equal(tok_encode(tok, "xyaaa", 5, NULL, 0, 3, &ids, &err),
                     LLM_OK);
    ids.n = 0;
    assert_int_equal(tok_encode(tok, "xyaaa", 5, NULL, 0, 2, &ids, &err),
                     LLM_LIMIT);
    ids.n = 0;
    assert_int_equal(tok_encode(tok, "x", 1, NULL, 0, 0, &ids, &err),
                     LLM_LIMIT);
    assert_int_equal(tok_encode(tok, "x", 1, NULL, 0, -1, &ids, &err),
                     LLM_LIMIT);

    static const char *const bad[] = { "\xff", "a\xc3", "\xed\xa0\x80",
                                       "\xf4\x90\x80\x80", "\xc0\x80" };

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_int_equal(
            tok_encode(tok, bad[i], strlen(bad[i]), NULL, 0, 100, &ids, &err),
            LLM_BADREQ);
    }

    assert_int_equal(ids.n, 0);
    tok_ids_fini(&ids);
    tok_destroy(tok);
}


static void
refused(const tok_spec_t *spec, const char *why)
{
    tok_t *tok = NULL;
    llm_err_t err = { 0 };

    assert_int_equal(tok_create(spec, &tok, &err), LLM_ERROR);
    assert_null(tok);

    if (strstr(err.text, why) == NULL) {
        fail_msg("\"%s\" lacks \"%s\"", err.text, why);
    }
}


static bool
no_token(void *source, int i, const char **text, size_t *len, int *type)
{
    return i != 200 && mini_token(source, i, text, len, type);
}


static bool
lone_merge(void *source, int i, const char **text, size_t *len)
{
    static const char *const lone[] = { "ab", "a ", " a", "", "a b" };

    (void) source;
    *text = lone[i % 4];
    *len = strlen(*text);

    return true;
}


static bool
foreign_merge(void *source, int i, const char **text, size_t *len)
{
    (void) source;
    (void) i;
    *text = "q z";
    *len = 3;

    return true;
}


static bool
long_merge(void *source, int i, const char **text, size_t *len)
{
    static char text_long[5000];

    (void) source;
    (void) i;
    memset(text_long, 'a', sizeof(text_long));
    text_long[2500] = ' ';
    *text = text_long;
    *len = sizeof(text_long);

    return true;
}


static void
test_refused(void **state)
{
    (void) state;
    tok_spec_t spec = mini_spec(&mini, "deepseek-x");
    refused(&spec, "\"deepseek-x\", known are smollm, gpt-2, llama-bpe, qwen2");

    spec = mini_spec(&mini, NULL);
    refused(&spec, "tokenizer.ggml.pre \"\"");

    spec = mini_spec(&mini, "gpt-2");
    spec.model = "llama";
    refused(&spec, "tokenizer.ggml.model \"llama\"");
    spec.model = NULL;
    refused(&spec, "tokenizer.ggml.model \"\"");

    spec = mini_spec(&mini, "gpt-2");
    spec.n_tokens = 0;
    refused(&spec, "0 tokens");
    spec.n_tokens = INT_MAX;
    refused(&spec, "tokens");

    spec = mini_spec(&mini, "gpt-2");
    spec.n_merges = -1;
    refused(&spec, "merges");

    spec = mini_spec(&mini, "gpt-2");
    spec.eos = MINI_N;
    refused(&spec, "EOS");
    spec = mini_spec(&mini, "gpt-2");
    spec.bos = -2;
    refused(&spec, "BOS");

    spec = mini_spec(&mini, "gpt-2");
    spec.n_tokens = MINI_IM_END;
    refused(&spec, "BOS"); /* the last of the specials is gone */

    spec = mini_spec(&mini, "gpt-2");
    spec.token = no_token;
    refused(&spec, "token 200 is missing");

    spec = mini_spec(&mini, "gpt-2");
    spec.merge = foreign_merge;
    refused(&spec, "merge 0, \"q z\"");
    spec.merge = long_merge;
    refused(&spec, "merge 0");

    spec = mini_spec(&mini, "gpt-2");
    spec.merge = lone_merge;
    refused(&spec, "merge 0 is not two");

    mini_vocab_t broken = mini;
    strcpy(broken.tokens[MINI_A].text, "<\xff>");
    spec = mini_spec(&broken, "gpt-2");
    refused(&spec, "not UTF-8");
}


static void
test_no_memory(void **state)
{
    (void) state;
    tok_spec_t spec = mini_spec(&mini, "gpt-2");
    tok_t *tok = NULL;
    int rc = LLM_NOMEM;

    for (long n = 1; rc != LLM_OK; n++) {
        arena_fail_after(n);
        rc = tok_create(&spec, &tok, NULL);
        arena_fail_after(0);
        assert_true(rc == LLM_OK || (rc == LLM_NOMEM && n < 100));
    }

    tok_destroy(tok);
    tok_destroy(NULL);
}


/* A control token that merges would make, a byte without a token, a byte
 * token, a text outside the alphabet, equal texts. */
static void
test_odd_vocabulary(void **state)
{
    (void) state;
    mini_vocab_t odd = mini;
    tok_spec_t spec = mini_spec(&odd, "gpt-2");
    tok_t *tok;
    tok_ids_t ids = { 0 };

    odd.tokens[id_of("he")].type = TOK_CONTROL;
    strcpy(odd.tokens['q'].text, "\xe2\x82\xac"); /* € */
    odd.tokens['z'] = (mini_token_t){ .text = "<0x7A>", .type = TOK_BYTE };
    odd.tokens['j'] = (mini_token_t){ .text = "<0x7a>", .type = TOK_BYTE };

    assert_int_equal(tok_create(&spec, &tok, NULL), LLM_OK);
    assert_int_equal(
        tok_encode(tok, "heqzxqyj", 8, NULL, 0, INT_MAX, &ids, NULL), LLM_OK);

    const int32_t want[] = { 'h', 'e', 'z', 'x', 'y' };

    assert_int_equal(ids.n, 5);
    assert_memory_equal(ids.ids, want, sizeof(want));

    size_t len;
    assert_memory_equal(tok_bytes(tok, 'q', &len), "\xe2\x82\xac", 3);
    assert_int_equal(len, 3);
    assert_memory_equal(tok_bytes(tok, 'z', &len), "z", 1);
    assert_int_equal(len, 1);
    tok_bytes(tok, MINI_UNUSED, &len);
    assert_int_equal(len, 0);

    tok_ids_fini(&ids);
    tok_destroy(tok);
}


static void
test_whole_words(void **state)
{
    (void) state;
    mini_vocab_t odd = mini;
    tok_spec_t spec = mini_spec(&odd, "gpt-2");
    tok_t *tok;

    /* "xyz" is a token that no merge makes */
    odd.tokens[MINI_END_TEXT] =
        (mini_token_t){ .text = "xyz", .type = TOK_NORMAL };

    for (int llama = 0; llama < 2; llama++) {
        tok_ids_t ids = { 0 };

        spec.pre = llama ? "llama-bpe" : "gpt-2";
        assert_int_equal(tok_create(&spec, &tok, NULL), LLM_OK);
        assert_int_equal(
            tok_encode(tok, "xyz", 3, NULL, 0, INT_MAX, &ids, NULL), LLM_OK);
        assert_int_equal(ids.n, llama ? 1 : 2);
        assert_int_equal(ids.ids[0], llama ? MINI_END_TEXT : id_of("xy"));
        tok_ids_fini(&ids);
        tok_destroy(tok);
    }
}


static void
test_eog(void **state)
{
    (void) state;
    tok_t *tok = mini_tok("gpt-2");
    int n;
    const int32_t *eog = tok_eog(tok, &n);

    assert_int_equal(n, 2);
    assert_int_equal(eog[0], MINI_IM_END);
    assert_int_equal(eog[1], MINI_EOT_NAMED);
    assert_true(tok_is_eog(tok, MINI_IM_END));
    assert_false(tok_is_eog(tok, MINI_BOS));
    assert_false(tok_is_eog(tok, MINI_END_TEXT));
    assert_true(tok_is_control(tok, MINI_UNK));
    assert_false(tok_is_control(tok, MINI_USER));
    assert_int_equal(tok_n_vocab(tok), MINI_N);
    tok_destroy(tok);

    tok_spec_t spec = mini_spec(&mini, "gpt-2");
    spec.eot = 'x';
    assert_int_equal(tok_create(&spec, &tok, NULL), LLM_OK);
    eog = tok_eog(tok, &n);
    assert_int_equal(n, 3);
    assert_int_equal(eog[0], 'x');
    tok_destroy(tok);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_merges),
        cmocka_unit_test(test_merges_against_naive),
        cmocka_unit_test(test_specials),
        cmocka_unit_test(test_trusted),
        cmocka_unit_test(test_add_special),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_odd_vocabulary),
        cmocka_unit_test(test_whole_words),
        cmocka_unit_test(test_eog),
    };

    mini_init(&mini);
    printf("# seed %llu\n", (unsigned long long) seed);
    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
