/*
 * The families' regular expressions, run by PCRE2.
 *
 * \s is written \p{White_Space} throughout: PCRE2's \s counts U+180E, the
 * tokenizers' does not.  A family may have several passes; each cuts the
 * pieces of the one before, and what no match covers is a piece as well.
 */

#include "engine/text/pretok.h"

#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/base/buf.h"
#include "engine/text/nfc.h"

#define WS "\\p{White_Space}"

#define GPT2_WORDS                                                         \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" WS "\\p{L}\\p{N}]+" \
    "|" WS "+(?!\\P{White_Space})|" WS "+"

#define LLAMA3_WORDS(digits)                                             \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|" digits \
    "| ?[^" WS "\\p{L}\\p{N}]+[\\r\\n]*|" WS "*[\\r\\n]+"                \
    "|" WS "+(?!\\P{White_Space})|" WS "+"

enum { MAX_PASSES = 2 };

typedef struct {
    const char *name;
    const char *pass[MAX_PASSES];
    bool nfc;
    bool whole_words;
} family_t;

struct pretok_s {
    const family_t *family;
    pcre2_code *code[MAX_PASSES];
    int n_passes;
};

struct pretok_scratch_s {
    pcre2_match_data *match[MAX_PASSES]; /* a pass runs inside the last one */
    buf_t normal;
};

/* One call of pretok_run. */
typedef struct {
    const pretok_t *pretok;
    pretok_scratch_t *scratch;
    pretok_word_t word;
    void *data;
} run_t;

static const family_t families[] = {
    { .name = "smollm", .pass = { "\\p{N}", GPT2_WORDS } },
    { .name = "gpt-2", .pass = { GPT2_WORDS } },
    { .name = "llama-bpe",
      .pass = { LLAMA3_WORDS("\\p{N}{1,3}") },
      .whole_words = true },
    { .name = "qwen2", .pass = { LLAMA3_WORDS("\\p{N}") }, .nfc = true },
};

enum { N_FAMILIES = sizeof(families) / sizeof(families[0]) };


static const family_t *
find_family(const char *name)
{
    for (int i = 0; i < N_FAMILIES; i++) {
        if (strcmp(families[i].name, name) == 0) {
            return &families[i];
        }
    }

    return NULL;
}


static int
unknown_family(const char *name, llm_err_t *err)
{
    char known[128] = "";

    for (int i = 0; i < N_FAMILIES; i++) {
        strcat(known, i == 0 ? "" : ", ");
        strcat(known, families[i].name);
    }

    return llm_err_set(err, LLM_ERROR, NULL,
                       "tokenizer: unknown tokenizer.ggml.pre \"%.80s\", "
                       "known are %s",
                       name, known);
}


static int
compile(pretok_t *pretok, const char *pattern, llm_err_t *err)
{
    int code;
    PCRE2_SIZE offset;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR) pattern, PCRE2_ZERO_TERMINATED,
                                   PCRE2_UTF | PCRE2_UCP, &code, &offset, NULL);

    if (re == NULL) {
        PCRE2_UCHAR text[128];

        pcre2_get_error_message(code, text, sizeof(text));
        return llm_err_set(err, LLM_ERROR, NULL,
                           "tokenizer: pre-tokenizer \"%s\": %s at %zu",
                           pretok->family->name, (char *) text, offset);
    }

    /* Where executable memory is forbidden the interpreter does the same. */
    pcre2_jit_compile(re, PCRE2_JIT_COMPLETE);

    pretok->code[pretok->n_passes++] = re;

    return LLM_OK;
}


int
pretok_create(const char *name, pretok_t **pretok, llm_err_t *err)
{
    const family_t *family = find_family(name);

    if (family == NULL) {
        return unknown_family(name, err);
    }

    pretok_t *p = calloc(1, sizeof(pretok_t));
    if (p == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "tokenizer: no memory");
    }

    p->family = family;

    for (int i = 0; i < MAX_PASSES && family->pass[i] != NULL; i++) {
        const int rc = compile(p, family->pass[i], err);

        if (rc != LLM_OK) {
            pretok_destroy(p);
            return rc;
        }
    }

    *pretok = p;

    return LLM_OK;
}


void
pretok_destroy(pretok_t *pretok)
{
    if (pretok == NULL) {
        return;
    }

    for (int i = 0; i < pretok->n_passes; i++) {
        pcre2_code_free(pretok->code[i]);
    }

    free(pretok);
}


bool
pretok_whole_words(const pretok_t *pretok)
{
    return pretok->family->whole_words;
}


pretok_scratch_t *
pretok_scratch_create(void)
{
    pretok_scratch_t *scratch = calloc(1, sizeof(pretok_scratch_t));

    if (scratch == NULL) {
        return NULL;
    }

    for (int i = 0; i < MAX_PASSES; i++) {
        scratch->match[i] = pcre2_match_data_create(1, NULL);

        if (scratch->match[i] == NULL) {
            pretok_scratch_destroy(scratch);
            return NULL;
        }
    }

    return scratch;
}


void
pretok_scratch_destroy(pretok_scratch_t *scratch)
{
    if (scratch == NULL) {
        return;
    }

    for (int i = 0; i < MAX_PASSES; i++) {
        pcre2_match_data_free(scratch->match[i]);
    }

    buf_fini(&scratch->normal);
    free(scratch);
}


static int split(const run_t *run, int pass, const char *text, size_t len);


/* A piece that is ready after `pass` passes. */
static int
piece(const run_t *run, int pass, const char *text, size_t len)
{
    if (len == 0) {
        return LLM_OK;
    }

    if (pass == run->pretok->n_passes) {
        return run->word(run->data, text, len);
    }

    return split(run, pass, text, len);
}


static int
split(const run_t *run, int pass, const char *text, size_t len)
{
    pcre2_match_data *match = run->scratch->match[pass];
    const PCRE2_SIZE *bounds = pcre2_get_ovector_pointer(match);
    size_t at = 0;

    while (at < len) {
        const int n = pcre2_match(run->pretok->code[pass], (PCRE2_SPTR) text,
                                  len, at, PCRE2_NO_UTF_CHECK, match, NULL);

        if (n == PCRE2_ERROR_NOMATCH) {
            break;
        }

        /* no pattern matches the empty text: at grows */
        if (n < 0 || bounds[1] <= at) {
            return n == PCRE2_ERROR_NOMEMORY ? LLM_NOMEM : LLM_ERROR;
        }

        const size_t from = bounds[0], to = bounds[1];
        int rc = piece(run, pass + 1, text + at, from - at);

        if (rc == LLM_OK) {
            rc = piece(run, pass + 1, text + from, to - from);
        }

        if (rc != LLM_OK) {
            return rc;
        }

        at = to;
    }

    return piece(run, pass + 1, text + at, len - at);
}


int
pretok_run(const pretok_t *pretok, pretok_scratch_t *scratch, const char *text,
           size_t len, pretok_word_t word, void *data)
{
    const run_t run = {
        .pretok = pretok, .scratch = scratch, .word = word, .data = data
    };

    if (!pretok->family->nfc || nfc_quick(text, len)) {
        return piece(&run, 0, text, len);
    }

    const int rc = nfc(text, len, &scratch->normal);

    if (rc != LLM_OK) {
        return rc;
    }

    return piece(&run, 0, scratch->normal.data, scratch->normal.len);
}
