/*
 * Reads the vocabulary once, at start: decodes the byte-level alphabet, finds
 * the token of every single byte, marks what ends a generation and builds the
 * trie of special tokens.
 */

#include "engine/text/vocab.h"

#include <limits.h>
#include <string.h>

#include "engine/base/utf8.h"

/* More is not a vocabulary but a broken file. */
enum { VOCAB_MAX = 1 << 24 };

typedef struct {
    const tok_spec_t *spec;
    buf_t bytes;
    size_t special_bytes;  /* bounds the trie's nodes */
    uint16_t byte_of[512]; /* character of the alphabet → byte + 1 */
} reader_t;

static const char *const eog_names[] = {
    "<|im_end|>",    "<|endoftext|>", "<|eot_id|>", "<|end|>",
    "<end_of_turn>", "</s>",          "<eos>",      "<|end_of_text|>",
    "<|eom_id|>",    "<reponame>",
};


/* GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes
 * follow from U+0100 in order. */
static void
alphabet_init(uint16_t *byte_of)
{
    uint32_t next = 0x100;

    memset(byte_of, 0, 512 * sizeof(uint16_t));

    for (uint32_t b = 0; b < 256; b++) {
        const bool itself =
            (b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae;

        byte_of[itself ? b : next++] = (uint16_t) (b + 1);
    }
}


/* Appends what a normal token's text stands for; false, and nothing appended,
 * where a character is not of the alphabet. */
static bool
alphabet_decode(reader_t *reader, const char *text, size_t len)
{
    const size_t before = reader->bytes.len;
    const uint8_t *p = (const uint8_t *) text;
    uint32_t cp = 0;

    while (len > 0) {
        const int n = utf8_decode(p, len, &cp);

        if (n <= 0 || cp >= 512 || reader->byte_of[cp] == 0) {
            reader->bytes.len = before;
            return false;
        }

        buf_addc(&reader->bytes, (char) (reader->byte_of[cp] - 1));
        p += n;
        len -= (size_t) n;
    }

    return true;
}


/* "<0x0A>" → 10; -1 for any other text. */
static int
byte_name(const char *text, size_t len)
{
    int value = 0;

    if (len != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') {
        return -1;
    }

    for (int i = 3; i < 5; i++) {
        const char c = text[i];

        if (c >= '0' && c <= '9') {
            value = value * 16 + c - '0';
        } else if (c >= 'A' && c <= 'F') {
            value = value * 16 + c - 'A' + 10;
        } else {
            return -1;
        }
    }

    return value;
}


static bool
is_eog_name(const char *text, size_t len)
{
    for (size_t i = 0; i < sizeof(eog_names) / sizeof(eog_names[0]); i++) {
        if (strlen(eog_names[i]) == len && memcmp(eog_names[i], text, len) == 0)
        {
            return true;
        }
    }

    return false;
}


/* One token: its bytes to the buffer, its flags returned. */
static uint8_t
read_token(reader_t *reader, const char *text, size_t len, int type)
{
    int byte;

    switch (type) {
    case TOK_UNUSED:
        return 0;

    case TOK_CONTROL:
    case TOK_UNKNOWN:
        buf_add(&reader->bytes, text, len);
        reader->special_bytes += len;
        return VOCAB_CONTROL | (is_eog_name(text, len) ? VOCAB_EOG : 0);

    case TOK_USER:
        buf_add(&reader->bytes, text, len);
        reader->special_bytes += len;
        return VOCAB_USER;

    case TOK_BYTE:
        byte = byte_name(text, len);
        if (byte >= 0) {
            buf_addc(&reader->bytes, (char) byte);
            return 0;
        }
        break;
    }

    if (alphabet_decode(reader, text, len)) {
        return VOCAB_MERGES;
    }

    /* a text outside the alphabet can only stand for itself */
    buf_add(&reader->bytes, text, len);

    return 0;
}


static int
read_tokens(vocab_t *vocab, reader_t *reader, map_bytes_t *by_text,
            llm_err_t *err)
{
    const tok_spec_t *spec = reader->spec;

    for (int i = 0; i < spec->n_tokens; i++) {
        const char *text;
        size_t len;
        int type;

        if (!spec->token(spec->source, i, &text, &len, &type)) {
            return llm_err_set(err, LLM_ERROR, NULL,
                               "tokenizer: token %d is missing", i);
        }

        /* specials cut the text, which has to stay UTF-8 */
        if (!utf8_valid((const uint8_t *) text, len)) {
            return llm_err_set(err, LLM_ERROR, NULL,
                               "tokenizer: token %d is not UTF-8", i);
        }

        vocab->start[i] = (uint32_t) reader->bytes.len;
        vocab->flags[i] = read_token(reader, text, len, type);

        const size_t n = reader->bytes.len - vocab->start[i];

        vocab->longest = n > vocab->longest ? n : vocab->longest;
        vocab->n_user += type == TOK_USER ? 1 : 0;

        if (reader->bytes.failed || reader->bytes.len > INT_MAX
            || map_bytes_put(by_text, text, len, (uint32_t) i) != LLM_OK)
        {
            return llm_err_set(err, LLM_NOMEM, NULL,
                               "tokenizer: no memory for the vocabulary");
        }

        if (n == 1 && (vocab->flags[i] & VOCAB_MERGES || type == TOK_BYTE)) {
            const uint8_t byte = (uint8_t) reader->bytes.data[vocab->start[i]];

            /* the alphabet's own token goes before a fallback */
            if (vocab->byte[byte] < 0 || vocab->flags[i] & VOCAB_MERGES) {
                vocab->byte[byte] = i;
            }
        }
    }

    vocab->start[spec->n_tokens] = (uint32_t) reader->bytes.len;

    return LLM_OK;
}


static int
build_trie(vocab_t *vocab, const reader_t *reader, arena_t *arena)
{
    uint32_t n_nodes = 1;

    vocab->trie_id =
        arena_alloc(arena, (reader->special_bytes + 1) * sizeof(int32_t));
    if (vocab->trie_id == NULL) {
        return LLM_NOMEM;
    }

    vocab->trie_id[0] = -1;

    for (int i = 0; i < vocab->n; i++) {
        if (!(vocab->flags[i] & (VOCAB_CONTROL | VOCAB_USER))) {
            continue;
        }

        size_t len;
        const uint8_t *p = (const uint8_t *) vocab_bytes(vocab, i, &len);
        uint32_t node = 0;

        if (len == 0) {
            continue;
        }

        vocab->first[p[0]] = true;

        for (size_t k = 0; k < len; k++) {
            const uint64_t key = (uint64_t) node << 8 | p[k];

            if (map_get(&vocab->trie, key, &node)) {
                continue;
            }

            node = n_nodes++;
            vocab->trie_id[node] = -1;

            if (map_put(&vocab->trie, key, node) != LLM_OK) {
                return LLM_NOMEM;
            }
        }

        vocab->trie_id[node] = i;
    }

    return LLM_OK;
}


int
vocab_init(vocab_t *vocab, const tok_spec_t *spec, arena_t *arena,
           map_bytes_t *by_text, llm_err_t *err)
{
    *vocab = (vocab_t){ 0 };

    if (spec->n_tokens < 1 || spec->n_tokens > VOCAB_MAX) {
        return llm_err_set(err, LLM_ERROR, NULL,
                           "tokenizer: %d tokens are no vocabulary",
                           spec->n_tokens);
    }

    const size_t n = (size_t) spec->n_tokens;
    reader_t reader = { .spec = spec };

    alphabet_init(reader.byte_of);
    memset(vocab->byte, 0xff, sizeof(vocab->byte));

    vocab->n = spec->n_tokens;
    vocab->longest = 1;
    vocab->start = arena_alloc(arena, (n + 1) * sizeof(uint32_t));
    vocab->flags = arena_calloc(arena, n);

    if (vocab->start == NULL || vocab->flags == NULL
        || map_bytes_reserve(by_text, n) != LLM_OK)
    {
        return llm_err_set(err, LLM_NOMEM, NULL,
                           "tokenizer: no memory for %d tokens", vocab->n);
    }

    int rc = read_tokens(vocab, &reader, by_text, err);

    if (rc == LLM_OK) {
        vocab->bytes =
            arena_strndup(arena, reader.bytes.data ? reader.bytes.data : "",
                          reader.bytes.len);
        if (vocab->bytes == NULL || build_trie(vocab, &reader, arena) != LLM_OK)
        {
            rc = llm_err_set(err, LLM_NOMEM, NULL,
                             "tokenizer: no memory for the vocabulary");
        }
    }

    buf_fini(&reader.bytes);

    return rc;
}


void
vocab_fini(vocab_t *vocab)
{
    map_fini(&vocab->trie);
}


const char *
vocab_bytes(const vocab_t *vocab, int32_t id, size_t *len)
{
    llm_assert(id >= 0 && id < vocab->n);

    *len = vocab->start[id + 1] - vocab->start[id];

    return vocab->bytes + vocab->start[id];
}


bool
vocab_special(const vocab_t *vocab, const char *text, size_t len,
              const uint8_t *trusted, bool control, vocab_match_t *match)
{
    uint32_t node = 0;
    bool found = false;

    for (size_t i = 0; i < len; i++) {
        const uint64_t key = (uint64_t) node << 8 | (uint8_t) text[i];

        if (!map_get(&vocab->trie, key, &node)) {
            break;
        }

        if (trusted != NULL && trusted[i] == 0) {
            control = false;
        }

        const int32_t id = vocab->trie_id[node];

        if (id >= 0 && (control || vocab->flags[id] & VOCAB_USER)) {
            *match = (vocab_match_t){ .id = id, .len = i + 1 };
            found = true;
        }
    }

    return found;
}
