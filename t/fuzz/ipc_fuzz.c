/*
 * libFuzzer target over everything in engine/ipc that reads what the other
 * process wrote.  The first byte chooses:
 *
 *   0  a request area                      llm_request_decode, llm_stop_next
 *   1  a record                            llm_record_decode, llm_logprob_next
 *   2  head, tail, out_cap, ring bytes     llm_record_read, llm_record_write
 *   3  log-probabilities not yet checked   llm_logprob_next
 *
 * Inputs are copied to the heap in their exact size, and every byte that a
 * decoder vouches for is read.  What was accepted is encoded again and must
 * give the same bytes.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/ipc/msg.h"
#include "engine/ipc/ring.h"

static volatile uint32_t sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);


static void
must(bool x)
{
    if (!x) {
        abort();
    }
}


static void
touch(const uint8_t *p, uint32_t len)
{
    for (uint32_t i = 0; i < len; i++) {
        sink += p[i];
    }
}


static void
try_request(const uint8_t *area, uint32_t len)
{
    const llm_request_t *req = NULL;
    const char *why = NULL;

    if (llm_request_decode(area, len, &req, &why) != 0) {
        must(why != NULL);
        return;
    }

    must(req->params.top_p > 0 && req->params.top_p <= 1);
    must(req->params.top_logprobs <= LLM_TOP_MAX);

    for (int i = 0; i < LLM_SEC_MAX; i++) {
        const llm_section_t *s = &req->section[i];

        must(s->len == 0 || s->off >= sizeof(*req));
        touch(area + s->off, s->len);
    }

    const llm_section_t *stop = &req->section[LLM_SEC_STOP];
    uint32_t pos = 0, n;
    const char *text;

    while (llm_stop_next(area + stop->off, stop->len, &pos, &text, &n)) {
        touch((const uint8_t *) text, n);
    }

    must(pos == stop->len);
}


/* Reads all entries; each must encode to the bytes it came from when same is
 * set. */
static uint32_t
walk_logprobs(const llm_delta_t *delta, bool same)
{
    static uint8_t again[LLM_RECORD_MAX];
    llm_logprob_t entry;
    uint32_t pos = 0, was = 0, n = 0;

    while (llm_logprob_next(delta, &pos, &entry)) {
        touch(entry.chosen.bytes, entry.chosen.len);

        for (uint32_t i = 0; i < entry.n_top; i++) {
            touch(entry.top[i].bytes, entry.top[i].len);
        }

        if (same) {
            must(llm_encode_logprob(again, sizeof(again), &entry) == pos - was);
            must(memcmp(again, delta->logprobs + was, pos - was) == 0);
        }

        was = pos;
        n++;
    }

    return n;
}


static void
try_record(const uint8_t *payload, uint32_t len)
{
    static uint8_t again[LLM_RECORD_MAX];
    llm_record_t record;
    uint32_t again_len = 0;

    if (llm_record_decode(payload, len, &record) != 0) {
        return;
    }

    switch (record.type) {
    case LLM_REC_START:
        again_len = llm_encode_start(again, sizeof(again), &record.u.start);
        break;

    case LLM_REC_DELTA:
        touch(record.u.delta.text, record.u.delta.text_len);
        must(walk_logprobs(&record.u.delta, true) == record.u.delta.n_logprobs);
        again_len = llm_encode_delta(again, sizeof(again), &record.u.delta);
        break;

    case LLM_REC_DONE:
        again_len = llm_encode_done(again, sizeof(again), &record.u.done);
        break;

    case LLM_REC_ERROR:
        again_len = llm_encode_fail(again, sizeof(again), &record.u.fail);
        break;

    default:
        abort();
    }

    must(again_len == len);
    must(memcmp(again, payload, len) == 0);
}


static void
try_ring(const uint8_t *data, uint32_t size)
{
    uint32_t head, tail, len = 0;
    uint32_t cap = 4;
    llm_ring_t ring;

    if (size < 9 + 4) {
        return;
    }

    memcpy(&head, data, 4);
    memcpy(&tail, data + 4, 4);

    uint32_t out_cap = data[8];

    data += 9;
    size -= 9;

    while (cap * 2 <= size) {
        cap *= 2;
    }

    uint8_t *bytes = malloc(cap);
    uint8_t *out = malloc(out_cap + 1);

    must(bytes != NULL && out != NULL);
    memcpy(bytes, data, cap);
    atomic_init(&ring.head, head);
    atomic_init(&ring.tail, tail);

    must(llm_record_space(&ring, cap) <= cap);

    while (llm_record_read(&ring, bytes, cap, out, out_cap, &len)
           == LLM_RING_OK) {
        must(len <= out_cap && len + 4 <= cap);
        touch(out, len);
    }

    /* a write where there is room is read back */
    uint32_t used = head - atomic_load(&ring.tail);

    if (llm_record_write(&ring, bytes, cap, out, out_cap) == LLM_RING_OK) {
        must(used <= cap && out_cap + 4 <= cap - used);
    }

    free(bytes);
    free(out);
}


int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size < 1 || size > 65536) {
        return 0;
    }

    uint32_t len = (uint32_t) size - 1;
    uint8_t *copy = malloc(len > 0 ? len : 1);

    must(copy != NULL);
    memcpy(copy, data + 1, len);

    switch (data[0]) {
    case 0:
        try_request(copy, len);
        break;

    case 1:
        try_record(copy, len);
        break;

    case 2:
        try_ring(copy, len);
        break;

    case 3:
        walk_logprobs(&(llm_delta_t){ .logprobs = copy, .logprobs_len = len },
                      false);
        break;

    default:
        break;
    }

    free(copy);

    return 0;
}
