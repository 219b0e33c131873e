/*
 * engine/base towards the system: log lines, error texts, files, old and new,
 * the clock, and the list.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/file.h"
#include "engine/base/file_new.h"
#include "engine/base/list.h"
#include "engine/base/log.h"
#include "engine/base/status.h"
#include "engine/base/utf8.h"


static void
read_log(const char *path, char *text, size_t size)
{
    char *data;
    size_t len;

    assert_int_equal(file_read(path, size - 1, &data, &len, NULL), LLM_OK);
    memcpy(text, data, len + 1);
    free(data);
}


static void
test_log(void **state)
{
    (void) state;
    char path[] = "/tmp/base_test.XXXXXX";
    char moved[64];
    char text[8192], long_text[4000];
    regex_t re;

    close(mkstemp(path));
    assert_int_equal(log_open(path, LOG_WARN), LLM_OK);
    errno = 77;
    log_write(LOG_WARN, "kv: %d pages\nand \ttab", 12);
    assert_int_equal(errno, 77);
    log_write(LOG_NOTICE, "dropped");
    log_write(LOG_EMERG, "bad");

    read_log(path, text, sizeof(text));
    assert_int_equal(
        regcomp(&re,
                "^[0-9]{4}/[0-9]{2}/[0-9]{2} "
                "[0-9]{2}:[0-9]{2}:[0-9]{2} "
                "\\[warn\\] [0-9]+#[0-9]+: "
                "kv: 12 pages and  tab\n"
                "[0-9/]+ [0-9:]+ \\[emerg\\] [0-9]+#[0-9]+: bad\n$",
                REG_EXTENDED),
        0);
    assert_int_equal(regexec(&re, text, 0, NULL, 0), 0);
    regfree(&re);

    /* after a rotation the old file gets no more */
    snprintf(moved, sizeof(moved), "%s.1", path);
    assert_int_equal(rename(path, moved), 0);
    log_write(LOG_ERR, "old");
    assert_int_equal(log_reopen(), LLM_OK);
    memset(long_text, 'x', sizeof(long_text));
    long_text[sizeof(long_text) - 1] = '\0';
    log_write(LOG_ERR, "%s", long_text);

    read_log(moved, text, sizeof(text));
    assert_non_null(strstr(text, ": old\n"));
    read_log(path, text, sizeof(text));
    assert_null(strstr(text, "old"));

    /* a line too long is cut and still ends */
    assert_true(strlen(text) > 1900 && strlen(text) <= 2048);
    assert_int_equal(text[strlen(text) - 1], '\n');

    assert_int_equal(log_open("/nonexistent/x", LOG_WARN), LLM_ERROR);
    assert_int_equal(log_open(NULL, LOG_NOTICE), LLM_OK);
    assert_int_equal(log_reopen(), LLM_OK);

    assert_int_equal(log_level("emerg"), LOG_EMERG);
    assert_int_equal(log_level("debug"), LOG_DEBUG);
    assert_int_equal(log_level("error"), LOG_ERR);
    assert_int_equal(log_level("loud"), -1);
    assert_int_equal(log_level(""), -1);

    unlink(path);
    unlink(moved);
}


static void
test_status(void **state)
{
    (void) state;
    llm_err_t err;
    char long_text[1000];

    assert_int_equal(llm_err_set(&err, LLM_BADREQ, "top_p", "is\n%d\r", 3),
                     LLM_BADREQ);
    assert_int_equal(err.code, LLM_BADREQ);
    assert_string_equal(err.param, "top_p");
    assert_string_equal(err.text, "is 3 ");

    memset(long_text, 'y', sizeof(long_text));
    long_text[999] = '\0';
    llm_err_set(&err, LLM_LIMIT, long_text, "%s", long_text);
    assert_int_equal(strlen(err.param), sizeof(err.param) - 1);
    assert_int_equal(strlen(err.text), sizeof(err.text) - 1);

    /* a character is cut off whole */
    for (size_t i = 0; i < 999; i += 3) {
        memcpy(long_text + i, "\xe2\x82\xac", 3);
    }
    llm_err_set(&err, LLM_LIMIT, NULL, ".%s", long_text);
    assert_int_equal(strlen(err.text), 478);
    assert_true(utf8_valid((uint8_t *) err.text, 478));

    llm_err_set(&err, LLM_ERROR, NULL, "x");
    assert_string_equal(err.param, "");
    assert_int_equal(llm_err_set(NULL, LLM_NOMEM, NULL, "x"), LLM_NOMEM);

    for (int code = LLM_OK; code >= LLM_CANCELED; code--) {
        assert_non_null(llm_code_name(code));
        for (int other = LLM_OK; other > code; other--) {
            assert_string_not_equal(llm_code_name(code), llm_code_name(other));
        }
    }
    assert_non_null(llm_code_name(-99));
}


static void
test_file(void **state)
{
    (void) state;
    char path[] = "/tmp/base_test.XXXXXX";
    const int fd = mkstemp(path);
    file_map_t map;
    llm_err_t err = { 0 };
    char *data;
    size_t len;

    assert_int_equal(write(fd, "12345", 5), 5);
    assert_int_equal(file_map(path, &map, &err), LLM_OK);
    assert_int_equal(map.len, 5);
    assert_memory_equal(map.data, "12345", 5);
    file_unmap(&map);

    assert_int_equal(file_read(path, 5, &data, &len, &err), LLM_OK);
    assert_int_equal(len, 5);
    assert_string_equal(data, "12345");
    free(data);
    assert_int_equal(file_read(path, 4, &data, &len, &err), LLM_LIMIT);

    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(file_read(path, 5, &data, &len, &err), LLM_OK);
    assert_string_equal(data, "");
    free(data);

    close(fd);
    unlink(path);
    assert_int_not_equal(file_map(path, &map, &err), LLM_OK);
    assert_non_null(strstr(err.text, path));
    assert_int_not_equal(file_read(path, 5, &data, &len, &err), LLM_OK);
    assert_non_null(strstr(err.text, path));
    assert_int_not_equal(file_map("/tmp", &map, &err), LLM_OK);
    assert_int_equal(file_read("/tmp", 5, &data, &len, &err), LLM_ERROR);
}


static uint64_t
fixed_clock(void)
{
    return 42;
}


static void
test_clock_and_list(void **state)
{
    (void) state;
    const uint64_t a = clock_now_ns();

    clock_replace(fixed_clock);
    assert_int_equal(clock_now_ns(), 42);
    clock_replace(NULL);
    assert_true(clock_now_ns() >= a);

    struct {
        int value;
        list_t link;
    } item[3] = { { .value = 1 }, { .value = 2 }, { .value = 3 } };
    list_t head;
    int seen = 0;

    list_init(&head);
    assert_true(list_empty(&head));
    list_push_back(&head, &item[1].link);
    list_push_back(&head, &item[2].link);
    list_push_front(&head, &item[0].link);

    for (list_t *l = head.next; l != &head; l = l->next) {
        seen = seen * 10 + list_entry(l, __typeof__(item[0]), link)->value;
    }
    assert_int_equal(seen, 123);

    list_remove(&item[1].link);
    assert_true(list_empty(&item[1].link));
    list_remove(&item[1].link);
    assert_ptr_equal(item[0].link.next, &item[2].link);
    list_remove(&item[0].link);
    list_remove(&item[2].link);
    assert_true(list_empty(&head));
}


/* Room that cannot be is refused at once; room that is promised is no size. */
static void
test_reserve(void **state)
{
    char path[] = "/tmp/base_new.XXXXXX";
    file_new_t file;
    llm_err_t err;
    char *data;
    size_t len;

    (void) state;
    close(mkstemp(path));
    assert_int_equal(file_new_open(&file, path, 0644, &err), LLM_OK);
    assert_int_equal(file_new_reserve(&file, UINT64_MAX, &err), LLM_ERROR);
    assert_non_null(strstr(err.text, "cannot write \"/tmp/base_new."));
    assert_int_equal(file_new_reserve(&file, 1ull << 60, &err), LLM_ERROR);
    assert_non_null(strstr(err.text, ": it needs 1152921504606.8 MB"));
    assert_int_equal(file_new_reserve(&file, 0, &err), LLM_OK);
    assert_int_equal(file_new_reserve(&file, 1 << 20, &err), LLM_OK);
    assert_int_equal(file_new_write(&file, "abc", 3, &err), LLM_OK);
    assert_int_equal(file_new_commit(&file, &err), LLM_OK);
    assert_int_equal(file_read(path, 100, &data, &len, &err), LLM_OK);
    assert_int_equal(len, 3);
    assert_memory_equal(data, "abc", 3);
    free(data);
    unlink(path);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_log),
        cmocka_unit_test(test_status),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_reserve),
        cmocka_unit_test(test_clock_and_list),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    return cmocka_run_group_tests(tests, NULL, NULL);
}
