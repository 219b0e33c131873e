/*
 * The tokenizer as the engine sees it: special tokens are cut out first, the
 * text between them goes through the pre-tokenizer, each word through the
 * merges.
 */

#include "engine/text/tokenizer.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/arena.h"
#include "engine/base/utf8.h"
#include "engine/text/bpe.h"
#include "engine/text/detok.h"
#include "engine/text/pretok.h"
#include "engine/text/vocab.h"

enum { ARENA_BLOCK = 64 * 1024 };

struct tok_s {
    arena_t *arena;
    vocab_t vocab;
    bpe_t bpe;
    pretok_t *pretok;
    int32_t bos; /* -1: not added */
    int32_t eos;
    int32_t *eog;
    int n_eog;
};

/* One call of tok_encode. */
typedef struct {
    const tok_t *tok;
    const uint8_t *trusted; /* of the whole text, or NULL */
    bool control;
    int max_ids;
    tok_ids_t *ids;
    pretok_scratch_t *pretok;
    bpe_scratch_t bpe;
} encode_t;


static int
set_eog(tok_t *tok, const tok_spec_t *spec, llm_err_t *err)
{
    vocab_t *vocab = &tok->vocab;
    const int32_t named[] = { spec->bos, spec->eos, spec->eot };

    for (int i = 0; i < 3; i++) {
        if (named[i] < -1 || named[i] >= vocab->n) {
            return llm_err_set(err, LLM_ERROR, NULL,
                               "tokenizer: %s token %d is not one of %d",
                               i == 0   ? "BOS"
                               : i == 1 ? "EOS"
                                        : "EOT",
                               named[i], vocab->n);
        }

        if (i > 0 && named[i] >= 0) {
            vocab->flags[named[i]] |= VOCAB_EOG;
        }
    }

    for (int i = 0; i < vocab->n; i++) {
        tok->n_eog += vocab->flags[i] & VOCAB_EOG ? 1 : 0;
    }

    tok->eog =
        arena_alloc(tok->arena, ((size_t) tok->n_eog + 1) * sizeof(int32_t));
    if (tok->eog == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "tokenizer: no memory");
    }

    for (int i = 0, n = 0; i < vocab->n; i++) {
        if (vocab->flags[i] & VOCAB_EOG) {
            tok->eog[n++] = i;
        }
    }

    tok->bos = spec->add_bos ? spec->bos : -1;
    tok->eos = spec->add_eos ? spec->eos : -1;

    return LLM_OK;
}


static int
build(tok_t *tok, const tok_spec_t *spec, llm_err_t *err)
{
    map_bytes_t by_text = { 0 };

    int rc = pretok_create(spec->pre ? spec->pre : "", &tok->pretok, err);

    if (rc == LLM_OK) {
        rc = vocab_init(&tok->vocab, spec, tok->arena, &by_text, err);
    }

    if (rc == LLM_OK) {
        rc = bpe_init(&tok->bpe, spec, &tok->vocab, tok->arena, &by_text, err);
    }

    map_bytes_fini(&by_text);

    if (rc == LLM_OK) {
        rc = bpe_index_words(&tok->bpe, pretok_whole_words(tok->pretok));

        if (rc != LLM_OK) {
            llm_err_set(err, rc, NULL, "tokenizer: no memory for the words");
        }
    }

    if (rc == LLM_OK) {
        rc = set_eog(tok, spec, err);
    }

    return rc;
}


int
tok_create(const tok_spec_t *spec, tok_t **tok, llm_err_t *err)
{
    const char *model = spec->model ? spec->model : "";

    if (strcmp(model, "gpt2") != 0) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "tokenizer: unknown tokenizer.ggml.model "
                           "\"%.80s\", known is gpt2",
                           model);
    }

    arena_t *arena = arena_create(ARENA_BLOCK);
    tok_t *t = arena ? arena_calloc(arena, sizeof(tok_t)) : NULL;

    if (t == NULL) {
        arena_destroy(arena);
        return llm_err_set(err, LLM_NOMEM, NULL, "tokenizer: no memory");
    }

    t->arena = arena;

    const int rc = build(t, spec, err);

    if (rc != LLM_OK) {
        tok_destroy(t);
        return rc;
    }

    *tok = t;

    return LLM_OK;
}


void
tok_destroy(tok_t *tok)
{
    if (tok == NULL) {
        return;
    }

    bpe_fini(&tok->bpe);
    vocab_fini(&tok->vocab);
    pretok_destroy(tok->pretok);
    arena_destroy(tok->arena);
}


static int
encode_word(void *data, const char *word, size_t len)
{
    encode_t *e = data;

    return bpe_encode(&e->tok->bpe, &e->bpe, word, len, e->max_ids, e->ids);
}


static int
encode_plain(encode_t *e, const char *text, size_t len)
{
    if (len == 0) {
        return LLM_OK;
    }

    return pretok_run(e->tok->pretok, e->pretok, text, len, encode_word, e);
}


static int
encode_text(encode_t *e, const char *text, size_t len)
{
    const vocab_t *vocab = &e->tok->vocab;
    size_t plain = 0; /* where the plain text before `at` begins */
    size_t at = 0;

    if (!e->control && vocab->n_user == 0) {
        return encode_plain(e, text, len);
    }

    while (at < len) {
        const uint8_t *trusted = e->trusted ? e->trusted + at : NULL;
        vocab_match_t match;

        if (!vocab->first[(uint8_t) text[at]]
            || !vocab_special(vocab, text + at, len - at, trusted, e->control,
                              &match))
        {
            at++;
            continue;
        }

        int rc = encode_plain(e, text + plain, at - plain);

        if (rc == LLM_OK) {
            rc = bpe_push(e->ids, match.id, e->max_ids);
        }

        if (rc != LLM_OK) {
            return rc;
        }

        at += match.len;
        plain = at;
    }

    return encode_plain(e, text + plain, len - plain);
}


static int
encode_all(encode_t *e, const char *text, size_t len, bool add_special)
{
    const tok_t *tok = e->tok;
    int rc = LLM_OK;

    e->pretok = pretok_scratch_create();
    if (e->pretok == NULL) {
        return LLM_NOMEM;
    }

    if (add_special && tok->bos >= 0) {
        rc = bpe_push(e->ids, tok->bos, e->max_ids);
    }

    if (rc == LLM_OK) {
        rc = encode_text(e, text, len);
    }

    if (rc == LLM_OK && add_special && tok->eos >= 0) {
        rc = bpe_push(e->ids, tok->eos, e->max_ids);
    }

    pretok_scratch_destroy(e->pretok);
    bpe_scratch_fini(&e->bpe);

    return rc;
}


int
tok_encode(const tok_t *tok, const char *text, size_t len,
           const uint8_t *trusted, int flags, int max_ids, tok_ids_t *ids,
           llm_err_t *err)
{
    if (!utf8_valid((const uint8_t *) text, len)) {
        return llm_err_set(err, LLM_BADREQ, NULL, "text is not valid UTF-8");
    }

    encode_t e = {
        .tok = tok,
        .trusted = trusted,
        .control = flags & TOK_PARSE_SPECIAL,
        .max_ids = max_ids,
        .ids = ids,
    };

    const int rc = encode_all(&e, text, len, flags & TOK_ADD_SPECIAL);

    switch (rc) {
    case LLM_OK:
        return LLM_OK;

    case LLM_LIMIT:
        return llm_err_set(err, rc, NULL, "text is longer than %d tokens",
                           max_ids);

    case LLM_NOMEM:
        return llm_err_set(err, rc, NULL, "no memory to tokenize %zu bytes",
                           len);

    default:
        return llm_err_set(err, rc, NULL, "the text could not be tokenized");
    }
}


void
tok_ids_fini(tok_ids_t *ids)
{
    free(ids->ids);
    *ids = (tok_ids_t){ 0 };
}


int
tok_n_vocab(const tok_t *tok)
{
    return tok->vocab.n;
}


const char *
tok_bytes(const tok_t *tok, int32_t id, size_t *len)
{
    return vocab_bytes(&tok->vocab, id, len);
}


bool
tok_is_control(const tok_t *tok, int32_t id)
{
    llm_assert(id >= 0 && id < tok->vocab.n);

    return tok->vocab.flags[id] & VOCAB_CONTROL;
}


bool
tok_is_eog(const tok_t *tok, int32_t id)
{
    llm_assert(id >= 0 && id < tok->vocab.n);

    return tok->vocab.flags[id] & VOCAB_EOG;
}


const int32_t *
tok_eog(const tok_t *tok, int *n)
{
    *n = tok->n_eog;

    return tok->eog;
}


int
tok_decode(const tok_t *tok, const int32_t *ids, int n, bool keep_special,
           buf_t *out)
{
    detok_t detok = { 0 };

    for (int i = 0; i < n; i++) {
        if (ids[i] < 0 || ids[i] >= tok->vocab.n) {
            return LLM_BADREQ;
        }
    }

    for (int i = 0; i < n; i++) {
        detok_push(&detok, tok, ids[i], keep_special, out);
    }

    detok_finish(&detok, out);

    return out->failed ? LLM_NOMEM : LLM_OK;
}
