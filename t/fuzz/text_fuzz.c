/*
 * libFuzzer: any bytes through the tokenizer and back.
 *
 * The first byte chooses the pre-tokenizer and the flags, the second the
 * trusted mask, the rest is text.  Valid text must come back unchanged (in NFC
 * for qwen2); the bytes as token ids must decode alike in a stream and at
 * once.
 */

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "engine/text/detok.h"
#include "engine/text/nfc.h"
#include "t/unit/mini_vocab.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static const char *const names[] = { "smollm", "gpt-2", "llama-bpe", "qwen2" };
static tok_t *toks[4];

#define CHECK(x)     \
    do {             \
        if (!(x)) {  \
            abort(); \
        }            \
    } while (0)


static void
create(void)
{
    static mini_vocab_t vocab;

    mini_init(&vocab);

    for (int i = 0; i < 4; i++) {
        tok_spec_t spec = mini_spec(&vocab, names[i]);

        CHECK(tok_create(&spec, &toks[i], NULL) == LLM_OK);
    }
}


static void
round_trip(const tok_t *tok, const tok_ids_t *ids, const char *text, size_t len)
{
    buf_t out = { 0 };

    CHECK(tok_decode(tok, ids->ids, ids->n, true, &out) == LLM_OK);
    CHECK(out.len == len && (len == 0 || memcmp(out.data, text, len) == 0));
    buf_fini(&out);
}


static void
encode(uint8_t how, uint8_t mask, const char *text, size_t len)
{
    const tok_t *tok = toks[how & 3];
    const int flags = how >> 2 & 3;
    uint8_t *trusted = how & 16 ? malloc(len + 1) : NULL;
    tok_ids_t ids = { 0 };
    buf_t normal = { 0 };

    for (size_t i = 0; trusted != NULL && i < len; i++) {
        trusted[i] = mask >> i % 8 & 1;
    }

    const int rc =
        tok_encode(tok, text, len, trusted, flags, INT_MAX, &ids, NULL);

    CHECK(rc
          == (utf8_valid((const uint8_t *) text, len) ? LLM_OK : LLM_BADREQ));

    if (rc == LLM_OK) {
        /* specials are ASCII and no mark follows them in NFC alone */
        if ((how & 3) != 3 || nfc_quick(text, len)) {
            round_trip(tok, &ids, text, len);
        }

        const int full = ids.n;
        ids.n = 0;
        CHECK(tok_encode(tok, text, len, trusted, flags, full, &ids, NULL)
              == LLM_OK);
        CHECK(ids.n == full);
        ids.n = 0;
        CHECK(
            full == 0
            || tok_encode(tok, text, len, trusted, flags, full - 1, &ids, NULL)
                   == LLM_LIMIT);

        CHECK(nfc(text, len, &normal) == LLM_OK);
        CHECK(utf8_valid((const uint8_t *) normal.data, normal.len));
    }

    buf_fini(&normal);
    tok_ids_fini(&ids);
    free(trusted);
}


static void
decode(const uint8_t *data, size_t len, bool keep)
{
    detok_t detok = { 0 };
    buf_t stream = { 0 };
    buf_t whole = { 0 };
    int32_t *ids = malloc((len + 1) * sizeof(int32_t));

    CHECK(ids != NULL);

    for (size_t i = 0; i < len; i++) {
        /* ids beyond a byte by the step from one byte to the next */
        ids[i] =
            i > 0 && data[i] < data[i - 1] ? (data[i] + 200) % MINI_N : data[i];
        detok_push(&detok, toks[0], ids[i], keep, &stream);
        CHECK(utf8_valid((const uint8_t *) stream.data, stream.len));
    }

    detok_finish(&detok, &stream);
    CHECK(tok_decode(toks[0], ids, (int) len, keep, &whole) == LLM_OK);
    CHECK(whole.len == stream.len);
    CHECK(whole.len == 0 || memcmp(whole.data, stream.data, whole.len) == 0);

    free(ids);
    buf_fini(&stream);
    buf_fini(&whole);
}


int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    if (toks[0] == NULL) {
        create();
    }

    if (len < 2 || len > 4096) {
        return 0;
    }

    encode(data[0], data[1], (const char *) data + 2, len - 2);
    decode(data + 2, len - 2, data[0] & 1);

    return 0;
}
