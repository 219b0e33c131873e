/*
 * Records: what is encoded is what is decoded, and whatever is not well-formed
 * is refused.  Buffers lie on the heap in their exact size, so that a
 * sanitizer sees any read past the end.
 */

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "engine/ipc/msg.h"

static uint64_t random_state;


static uint32_t
random_below(uint32_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407;
    return (uint32_t) (random_state >> 33) % n;
}


static int
decode_record(const uint8_t *payload, uint32_t len, llm_record_t *record)
{
    static uint8_t *copy;

    free(copy);
    copy = malloc(len > 0 ? len : 1);
    assert_non_null(copy);
    memcpy(copy, payload, len);

    return llm_record_decode(copy, len, record);
}


/* Every shorter and every longer form must be refused. */
static void
only_whole(const uint8_t *payload, uint32_t len)
{
    uint8_t more[LLM_RECORD_MAX + 1];
    llm_record_t record;

    for (uint32_t i = 0; i < len; i++) {
        assert_int_equal(decode_record(payload, i, &record), -1);
    }

    memcpy(more, payload, len);
    more[len] = 0;
    assert_int_equal(decode_record(more, len + 1, &record), -1);
    assert_int_equal(decode_record(payload, len, &record), 0);
}


static void
record_start_done(void **state)
{
    const llm_start_t start = { 11, 8, 4096 };
    const llm_done_t done = { .finish = LLM_FINISH_LENGTH,
                              .stop_kind = LLM_STOP_STRING,
                              .stop_value = -7,
                              .prompt_tokens = 1,
                              .completion_tokens = 2,
                              .cached_tokens = 3,
                              .queue_us = 4,
                              .ttft_us = 5,
                              .total_us = 6,
                              .preemptions = UINT32_MAX,
                              .drafted_tokens = 9,
                              .accepted_tokens = 8 };
    uint8_t out[256];
    llm_record_t record;
    uint32_t len;

    (void) state;

    len = llm_encode_start(out, sizeof(out), &start);
    assert_int_equal(len, 16);
    only_whole(out, len);
    assert_int_equal(decode_record(out, len, &record), 0);
    assert_int_equal(record.type, LLM_REC_START);
    assert_memory_equal(&record.u.start, &start, sizeof(start));
    assert_int_equal(llm_encode_start(out, 15, &start), 0);

    len = llm_encode_done(out, sizeof(out), &done);
    assert_int_equal(len, 52);
    only_whole(out, len);
    assert_int_equal(decode_record(out, len, &record), 0);
    assert_int_equal(record.type, LLM_REC_DONE);
    assert_memory_equal(&record.u.done, &done, sizeof(done));
    assert_int_equal(llm_encode_done(out, 51, &done), 0);

    out[48] = 9; /* all drafts right */
    assert_int_equal(decode_record(out, len, &record), 0);
    assert_int_equal(record.u.done.accepted_tokens, 9);
    out[48] = 10;
    assert_int_equal(decode_record(out, len, &record), -1);
    out[48] = 8;

    out[4] = LLM_FINISH_MAX;
    assert_int_equal(decode_record(out, len, &record), -1);
    out[4] = LLM_FINISH_STOP;
    out[8] = LLM_STOP_STRING + 1;
    assert_int_equal(decode_record(out, len, &record), -1);
    out[0] = 77;
    assert_int_equal(decode_record(out, len, &record), -1);
}


static void
record_fail(void **state)
{
    llm_fail_t fail = { .fail = LLM_FAIL_CONTEXT,
                        .retry_after = 599,
                        .param = "messages",
                        .text = "This prompt has too many tokens." };
    uint8_t out[LLM_RECORD_MAX];
    llm_record_t record;
    uint32_t len = llm_encode_fail(out, sizeof(out), &fail);

    (void) state;

    assert_int_equal(len, 20 + 8 + 32);
    only_whole(out, len);
    assert_int_equal(decode_record(out, len, &record), 0);
    assert_int_equal(record.type, LLM_REC_ERROR);
    assert_int_equal(record.u.fail.fail, LLM_FAIL_CONTEXT);
    assert_int_equal(record.u.fail.retry_after, 599);
    assert_string_equal(record.u.fail.param, "messages");
    assert_string_equal(record.u.fail.text, fail.text);

    out[22] = '\0'; /* inside param */
    assert_int_equal(decode_record(out, len, &record), -1);
    out[22] = 's';
    out[4] = 0;
    assert_int_equal(decode_record(out, len, &record), -1);
    out[4] = LLM_FAIL_DRAINING + 1;
    assert_int_equal(decode_record(out, len, &record), -1);

    /* fields without their final zero are cut, not read past */
    memset(fail.param, 'p', sizeof(fail.param));
    memset(fail.text, 't', sizeof(fail.text));
    len = llm_encode_fail(out, sizeof(out), &fail);
    assert_int_equal(len, 20 + 31 + 479);
    assert_int_equal(decode_record(out, len, &record), 0);
    assert_int_equal(strlen(record.u.fail.param), 31);
    assert_int_equal(strlen(record.u.fail.text), 479);

    /* a name that would fill its field to the brim, all else in order */
    out[12] = 32;
    out[16] = 478 & 0xff;
    assert_int_equal(decode_record(out, len, &record), -1);
}


static llm_logprob_t
big_entry(const uint8_t *bytes)
{
    llm_logprob_t e = { .chosen = { 7, -0.25f, bytes, LLM_TOKEN_BYTES_MAX },
                        .n_top = LLM_TOP_MAX };

    for (int i = 0; i < LLM_TOP_MAX; i++) {
        e.top[i] = (llm_token_logprob_t){ i, -1.0f * (float) i, bytes + i,
                                          (uint32_t) i };
    }

    return e;
}


static void
record_delta(void **state)
{
    uint8_t bytes[LLM_TOKEN_BYTES_MAX + 1];
    uint8_t logprobs[LLM_RECORD_MAX];
    uint8_t out[LLM_RECORD_MAX];
    llm_record_t record;
    llm_logprob_t entry;
    uint32_t n, len, pos = 0;

    (void) state;

    for (size_t i = 0; i < sizeof(bytes); i++) {
        bytes[i] = (uint8_t) i;
    }

    entry = (llm_logprob_t){ .chosen = { 42, NAN, bytes, 0 }, .n_top = 0 };
    n = llm_encode_logprob(logprobs, sizeof(logprobs), &entry);
    assert_int_equal(n, 16);

    entry = big_entry(bytes);
    n += llm_encode_logprob(logprobs + n, sizeof(logprobs) - n, &entry);
    assert_int_equal(n, 16 + 4 + 21 * 12 + 256 + 190);

    llm_delta_t delta = { .kind = LLM_DELTA_PROMPT,
                          .n_tokens = 2,
                          .text = (const uint8_t *) "h\xc3\xa9",
                          .text_len = 3,
                          .n_logprobs = 2,
                          .logprobs = logprobs,
                          .logprobs_len = n };

    len = llm_encode_delta(out, sizeof(out), &delta);
    assert_int_equal(len, 24 + 3 + n);
    assert_int_equal(llm_encode_delta(out, len - 1, &delta), 0);
    only_whole(out, len);

    assert_int_equal(decode_record(out, len, &record), 0);
    assert_int_equal(record.type, LLM_REC_DELTA);
    assert_int_equal(record.u.delta.kind, LLM_DELTA_PROMPT);
    assert_int_equal(record.u.delta.n_tokens, 2);
    assert_int_equal(record.u.delta.text_len, 3);
    assert_memory_equal(record.u.delta.text, "h\xc3\xa9", 3);
    assert_int_equal(record.u.delta.n_logprobs, 2);

    assert_true(llm_logprob_next(&record.u.delta, &pos, &entry));
    assert_int_equal(entry.chosen.token, 42);
    assert_true(isnan(entry.chosen.logprob));
    assert_int_equal(entry.n_top, 0);
    assert_true(llm_logprob_next(&record.u.delta, &pos, &entry));
    assert_int_equal(entry.chosen.token, 7);
    assert_true(entry.chosen.logprob == -0.25f);
    assert_int_equal(entry.chosen.len, LLM_TOKEN_BYTES_MAX);
    assert_memory_equal(entry.chosen.bytes, bytes, LLM_TOKEN_BYTES_MAX);
    assert_int_equal(entry.n_top, LLM_TOP_MAX);
    assert_int_equal(entry.top[19].token, 19);
    assert_true(entry.top[19].logprob == -19.0f);
    assert_memory_equal(entry.top[19].bytes, bytes + 19, 19);
    assert_false(llm_logprob_next(&record.u.delta, &pos, &entry));

    /* a count that is not the number of entries */
    for (uint32_t k = 0; k < 5; k++) {
        out[16] = (uint8_t) k;
        assert_int_equal(decode_record(out, len, &record), k == 2 ? 0 : -1);
    }
}


static void
record_limits(void **state)
{
    static uint8_t text[LLM_RECORD_MAX + 64];
    static uint8_t out[LLM_RECORD_MAX + 64];
    uint8_t bytes[LLM_TOKEN_BYTES_MAX + 1] = { 0 };
    llm_delta_t delta = { .text = text, .text_len = LLM_RECORD_MAX - 24 };
    llm_record_t record;
    llm_logprob_t entry;

    (void) state;

    /* never above LLM_RECORD_MAX, even where the buffer is larger */
    assert_int_equal(llm_encode_delta(out, sizeof(out), &delta),
                     LLM_RECORD_MAX);
    only_whole(out, LLM_RECORD_MAX);
    delta.text_len++;
    assert_int_equal(llm_encode_delta(out, sizeof(out), &delta), 0);

    /* an empty delta is a record */
    delta = (llm_delta_t){ .n_tokens = 1 };
    assert_int_equal(llm_encode_delta(out, sizeof(out), &delta), 24);
    assert_int_equal(decode_record(out, 24, &record), 0);
    assert_int_equal(record.u.delta.text_len, 0);
    out[4] = LLM_DELTA_PROMPT + 1;
    assert_int_equal(decode_record(out, 24, &record), -1);

    entry = big_entry(bytes);
    entry.n_top = LLM_TOP_MAX + 1;
    assert_int_equal(llm_encode_logprob(out, sizeof(out), &entry), 0);
    entry.n_top = 0;
    entry.chosen.len = LLM_TOKEN_BYTES_MAX + 1;
    assert_int_equal(llm_encode_logprob(out, sizeof(out), &entry), 0);

    /* the same, made by hand: all adds up but the token is too long */
    delta = (llm_delta_t){ .n_logprobs = 1,
                           .logprobs = text,
                           .logprobs_len = 16 + LLM_TOKEN_BYTES_MAX + 1 };
    memset(text, 0, sizeof(text));
    memcpy(text + 12, &entry.chosen.len, sizeof(uint32_t));
    uint32_t len = llm_encode_delta(out, sizeof(out), &delta);
    assert_int_equal(decode_record(out, len, &record), -1);
    entry.chosen.len--;
    delta.logprobs_len--;
    memcpy(text + 12, &entry.chosen.len, sizeof(uint32_t));
    len = llm_encode_delta(out, sizeof(out), &delta);
    assert_int_equal(decode_record(out, len, &record), 0);

    /* one token with all its alternatives always fits, and text beside it */
    entry = big_entry(bytes);
    for (int i = 0; i < LLM_TOP_MAX; i++) {
        entry.top[i].bytes = bytes;
        entry.top[i].len = LLM_TOKEN_BYTES_MAX;
    }
    assert_int_equal(llm_encode_logprob(out, sizeof(out), &entry),
                     4 + 21 * (12 + 256));
}


/* Spoiled records: refused, or what they claim lies inside the buffer. */
static void
record_random(void **state)
{
    uint8_t bytes[LLM_TOKEN_BYTES_MAX] = { 0 };
    uint8_t logprobs[2048];
    uint8_t out[4096];
    llm_logprob_t entry = big_entry(bytes);
    llm_record_t record;
    uint32_t refused = 0;

    (void) state;

    entry.chosen.len = 5;
    entry.n_top = 3;
    uint32_t n = llm_encode_logprob(logprobs, sizeof(logprobs), &entry);
    llm_delta_t delta = { .text = bytes,
                          .text_len = 9,
                          .n_logprobs = 1,
                          .logprobs = logprobs,
                          .logprobs_len = n };

    for (int i = 0; i < 100000; i++) {
        uint32_t len = llm_encode_delta(out, sizeof(out), &delta);
        uint32_t pos = 0, sum = 0;

        for (uint32_t k = random_below(4); k > 0; k--) {
            out[random_below(len)] = (uint8_t) random_below(256);
        }

        if (random_below(8) == 0) {
            len = random_below(len);
        }

        if (decode_record(out, len, &record) != 0) {
            refused++;
            continue;
        }

        if (record.type == LLM_REC_DELTA) {
            for (uint32_t k = 0; k < record.u.delta.text_len; k++) {
                sum += record.u.delta.text[k];
            }
            while (llm_logprob_next(&record.u.delta, &pos, &entry)) {
                sum += entry.chosen.len;
            }
            assert_true(sum < 100000);
        }
    }

    assert_in_range(refused, 1000, 99000);
}


int
main(void)
{
    const char *seed = getenv("LLM_TEST_SEED");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(record_start_done), cmocka_unit_test(record_fail),
        cmocka_unit_test(record_delta),      cmocka_unit_test(record_limits),
        cmocka_unit_test(record_random),
    };

    random_state =
        seed != NULL ? strtoull(seed, NULL, 0) : (uint64_t) time(NULL);
    printf("# LLM_TEST_SEED=%llu\n", (unsigned long long) random_state);

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
