/*
 * The cache of repacked weights: found, refused when stale or damaged, written
 * whole or not at all; and whatever happens, the logits are those of a model
 * without one, bit for bit.
 */

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/log.h"
#include "engine/model/repack_cache.h"
#include "t/unit/model_tiny.h"

enum { TOKENS = 12, WEIGHTS = 9, DATA_AT = 2 << 20 };

static char dir[64], model[128], cache[160], temp[192];
static tiny_t shape;
static float want[TOKENS * 4096];


/* --- files --- */

static void
spew(const char *path, const void *data, size_t len)
{
    FILE *f = fopen(path, "wb");

    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, len, f), len);
    assert_int_equal(fclose(f), 0);
}


static uint8_t *
slurp(const char *path, size_t *len)
{
    llm_err_t err;
    char *data;

    if (file_read(path, 64 << 20, &data, len, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return (uint8_t *) data;
}


static bool
exists(const char *path)
{
    return access(path, F_OK) == 0;
}


/* Changes one byte of the cache. */
static void
flip(size_t at)
{
    const int fd = open(cache, O_RDWR);
    uint8_t byte;

    assert_int_equal(pread(fd, &byte, 1, (off_t) at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t) at), 1);
    close(fd);
}


/* Long enough for the times of files to tell. */
static void
settle(void)
{
    usleep(250 * 1000);
}


int __real_clock_gettime(clockid_t id, struct timespec *t);
int __wrap_clock_gettime(clockid_t id, struct timespec *t);

static struct timespec stands_at; /* 0: the clock goes */


int
__wrap_clock_gettime(clockid_t id, struct timespec *t)
{
    if (id == CLOCK_REALTIME && stands_at.tv_sec != 0) {
        *t = stands_at;
        return 0;
    }

    return __real_clock_gettime(id, t);
}


/* The clock stands so long after the last change of the model. */
static void
stand_after(long ms)
{
    struct stat st;

    assert_int_equal(stat(model, &st), 0);
    stands_at = st.st_ctim;
    stands_at.tv_nsec += ms * 1000000;

    if (stands_at.tv_nsec >= 1000000000) {
        stands_at.tv_sec++;
        stands_at.tv_nsec -= 1000000000;
    }
}


/* --- models --- */

/* Loads the model with a cache at `path`, and its logits; how many weights
 * came from the cache. */
static int
run_with(const char *path, const char *backend, float *logits)
{
    int32_t tokens[TOKENS];
    int32_t *table = run_table(how.n_pages);
    run_how_t h = how;
    gguf_t *gguf;
    llm_err_t err;
    run_t run;

    h.backend = backend;
    h.open.threads = 2;
    h.repack_cache = path;
    h.path = model;

    if (gguf_open(model, &gguf, &err) != LLM_OK
        || run_open(&run, gguf, &h, &err) != LLM_OK)
    {
        fail_msg("%s", err.text);
    }

    gguf_close(gguf);

    for (int i = 0; i < TOKENS; i++) {
        tokens[i] = (i * 7 + 3) % run.n_vocab;
    }

    const int n = model_cached_weights(run.model);

    run_sequence(&run, tokens, TOKENS, 5, table, logits);
    run_close(&run);
    free(table);

    return n;
}


/* The number of cached weights; the logits must be the model's. */
static int
check(void)
{
    static float is[TOKENS * 4096];
    const int n = run_with(cache, "cpu", is);

    assert_memory_equal(
        is, want, (size_t) TOKENS * (size_t) shape.n_vocab * sizeof(float));
    assert_false(exists(temp));

    return n;
}


static void
write_model(const tiny_t *t)
{
    build_t b = { 0 };

    shape = *t;
    tiny_build(&b, t);

    buf_t file = build_finish(&b);

    spew(model, file.data, file.len);
    buf_fini(&file);
    run_with(NULL, "cpu", want);
}


static int
setup(void **state)
{
    (void) state;
    stands_at.tv_sec = 0;
    unlink(cache);
    unlink(temp);
    write_model(&tiny);
    settle();

    return 0;
}


/* --- tests --- */

static void
test_miss_hit(void **state)
{
    struct stat st;

    (void) state;
    assert_int_equal(chmod(model, 0640), 0);
    settle();
    assert_int_equal(check(), 0);
    assert_int_equal(stat(cache, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0640);
    assert_true(st.st_size > DATA_AT);

    const ino_t first = st.st_ino;

    assert_int_equal(check(), WEIGHTS);
    assert_int_equal(check(), WEIGHTS);
    assert_int_equal(stat(cache, &st), 0);
    assert_int_equal(st.st_ino, first);
}


/* Every way in which the model can be another one. */
static void
test_stale(void **state)
{
    struct timespec times[2];
    struct stat st;
    tiny_t other = tiny;

    (void) state;
    check();

    /* same size, same shapes, and the time of modification put back */
    assert_int_equal(stat(model, &st), 0);
    times[0] = times[1] = st.st_mtim;
    other.seed = 8;
    write_model(&other);
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    settle();
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);

    /* one byte of one tensor, away from the samples' beginnings */
    size_t len;
    uint8_t *bytes = slurp(model, &len);

    bytes[len - 1000] ^= 1;
    spew(model, bytes, len);
    free(bytes);
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    run_with(NULL, "cpu", want);
    settle();
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);

    /* another type: other weights in the same places */
    other.dtype = OP_Q4_1;
    write_model(&other);
    settle();
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
}


/* A big model: its middle is between the samples, so the hash of all of it
 * decides. */
static void
test_stale_between_samples(void **state)
{
    struct timespec times[2];
    struct stat st;
    tiny_t big = tiny;
    size_t len;

    (void) state;
    big.n_embd = 512;
    big.n_ff = 1024;
    big.n_vocab = 2048;
    big.head_dim = 128;
    write_model(&big);
    settle();
    check();
    assert_int_equal(check(), WEIGHTS);
    assert_int_equal(stat(model, &st), 0);
    times[0] = times[1] = st.st_mtim;

    uint8_t *bytes = slurp(model, &len);

    for (int i = 1; i < 40; i++) {
        bytes[len - (size_t) i * 997] ^= 1;
    }

    spew(model, bytes, len);
    free(bytes);
    assert_int_equal(utimensat(AT_FDCWD, model, times, 0), 0);
    run_with(NULL, "cpu", want);
    settle();
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
}


/* New times alone do not make another model. */
static void
test_touched(void **state)
{
    struct stat before, after;
    char link_path[192];

    (void) state;
    check();
    assert_int_equal(stat(cache, &before), 0);
    snprintf(link_path, sizeof(link_path), "%s.link", model);
    assert_int_equal(link(model, link_path), 0);
    unlink(link_path);
    assert_int_equal(utimensat(AT_FDCWD, model, NULL, 0), 0);
    settle();
    assert_int_equal(check(), WEIGHTS);

    /* and are written down */
    assert_int_equal(stat(cache, &after), 0);
    assert_int_not_equal(before.st_ino, after.st_ino);
    assert_int_equal(check(), WEIGHTS);
    assert_int_equal(stat(cache, &before), 0);
    assert_int_equal(before.st_ino, after.st_ino);
}


/* Too fresh for its times to be sure: for a tenth of a second, however long
 * this machine takes to get there. */
static void
test_fresh_model(void **state)
{
    (void) state;
    write_model(&tiny);
    assert_int_equal(utimensat(AT_FDCWD, model, NULL, 0), 0);
    stand_after(100);
    check();
    assert_false(exists(cache));
    stand_after(101);
    check();
    assert_true(exists(cache));
    stands_at.tv_sec = 0;
}


static void
test_damaged(void **state)
{
    size_t len;

    (void) state;
    check();
    free(slurp(cache, &len));

    /* each byte of the header and of the table */
    for (size_t at = 0; at < 136 + WEIGHTS * 24; at += 5) {
        flip(at);
        if (check() != 0) {
            fail_msg("byte %zu does not matter", at);
        }
        assert_int_equal(check(), WEIGHTS);
    }

    /* of the weights: the one that is damaged is repacked */
    for (size_t at = DATA_AT; at < len; at += 9973) {
        flip(at);
        if (check() != WEIGHTS - 1) {
            fail_msg("byte %zu does not matter", at);
        }
        assert_int_equal(check(), WEIGHTS);
    }

    flip(DATA_AT);
    flip(len - 1);
    assert_int_equal(check(), WEIGHTS - 2);
    assert_int_equal(check(), WEIGHTS);
}


static void
test_truncated(void **state)
{
    const size_t cuts[] = { 1, 7, 100, 135, 136, 300, 4096, DATA_AT - 1 };
    size_t len;

    (void) state;
    check();

    uint8_t *bytes = slurp(cache, &len);

    for (size_t i = 0; i < sizeof(cuts) / sizeof(cuts[0]); i++) {
        spew(cache, bytes, cuts[i]);
        assert_int_equal(check(), 0);
        assert_int_equal(check(), WEIGHTS);
        spew(cache, bytes, len - cuts[i] > DATA_AT ? len - cuts[i] : DATA_AT);
        assert_int_equal(check(), 0);
        assert_int_equal(check(), WEIGHTS);
    }

    /* no content, other content, too much */
    spew(cache, bytes, 0);
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
    memset(bytes, 0xff, len);
    spew(cache, bytes, len);
    assert_int_equal(check(), 0);

    uint8_t *more = slurp(cache, &len);

    more = realloc(more, len + 64);
    memset(more + len, 0, 64);
    spew(cache, more, len + 64);
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
    free(more);
    free(bytes);
}


/* A file that others could have made is not believed. */
static void
test_owner(void **state)
{
    (void) state;
    check();
    assert_int_equal(chmod(cache, 0646), 0);
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
    assert_int_equal(chmod(cache, 0664), 0);
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);

    if (geteuid() == 0) {
        assert_int_equal(chown(cache, 12345, 12345), 0);
        assert_int_equal(check(), 0);
        assert_int_equal(check(), WEIGHTS);
    }
}


static void
test_unwritable(void **state)
{
    char path[224];
    static float is[TOKENS * 4096];

    (void) state;

    /* no such folder, and a folder in its place */
    snprintf(path, sizeof(path), "%s/none/x.repack", dir);
    assert_int_equal(run_with(path, "cpu", is), 0);
    assert_int_equal(run_with(dir, "cpu", is), 0);
    assert_int_equal(mkdir(temp, 0700), 0);
    assert_int_equal(run_with(cache, "cpu", is), 0);
    rmdir(temp);
    assert_false(exists(cache));

    /* a disk that is full after 1 MiB */
    struct rlimit limit, small;

    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
    small = limit;
    small.rlim_cur = 1 << 20;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_int_equal(check(), 0);
    assert_false(exists(cache));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);

    /* what a killed writer left */
    spew(temp, "half", 4);
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
}


static void
test_another_writer(void **state)
{
    static float is[TOKENS * 4096];

    (void) state;

    const int fd = open(temp, O_WRONLY | O_CREAT, 0600);

    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_int_equal(run_with(cache, "cpu", is), 0);
    assert_false(exists(cache));
    assert_true(exists(temp));
    close(fd);
    unlink(temp);
}


/* Many starts at once, with no cache and with one that is damaged. */
static void
test_concurrent(void **state)
{
    enum { STARTS = 8, ROUNDS = 6 };

    (void) state;

    for (int round = 0; round < ROUNDS; round++) {
        pid_t pids[STARTS];

        if (round % 2 == 0) {
            unlink(cache);
        } else {
            flip(round % 3 == 0 ? 40 : DATA_AT + 5);
        }

        for (int i = 0; i < STARTS; i++) {
            pids[i] = fork();
            if (pids[i] == 0) {
                static float is[TOKENS * 4096];

                run_with(cache, "cpu", is);
                _exit(memcmp(is, want,
                             (size_t) TOKENS * (size_t) shape.n_vocab
                                 * sizeof(float))
                              == 0
                          ? 0
                          : 1);
            }
        }

        for (int i = 0; i < STARTS; i++) {
            int status;

            assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
            assert_true(WIFEXITED(status));
            assert_int_equal(WEXITSTATUS(status), 0);
        }

        assert_int_equal(check(), WEIGHTS);
    }
}


static const char *
other_form(const op_dev_t *dev)
{
    (void) dev;

    return "cpu lanes16 v2";
}


/* Weights of another version of the kernels. */
static void
test_form(void **state)
{
    op_table_t other = *backend_find("cpu");
    const op_open_t open_how = { .threads = 1 };
    op_err_t op_err;
    op_dev_t *dev = other.open(&open_how, &op_err);
    const model_load_t load_how = { .ops = &other,
                                    .dev = dev,
                                    .max_rows = 8,
                                    .max_seqs = 1,
                                    .max_out = 1,
                                    .max_len = 64,
                                    .repack_cache = cache,
                                    .path = model };
    gguf_t *gguf;
    llm_err_t err;
    model_t *m;

    (void) state;
    check();
    other.weight_form = other_form;

    for (int i = 0; i < 2; i++) {
        assert_int_equal(gguf_open(model, &gguf, &err), LLM_OK);
        assert_int_equal(model_load(gguf, &load_how, &m, &err), LLM_OK);
        assert_int_equal(model_cached_weights(m), i == 0 ? 0 : WEIGHTS);
        gguf_close(gguf);
        model_free(m);
    }

    other.close(dev);
    assert_int_equal(check(), 0);
    assert_int_equal(check(), WEIGHTS);
}


/* A backend that keeps the file's own blocks. */
static void
test_ref(void **state)
{
    static float is[TOKENS * 4096];

    (void) state;
    assert_int_equal(run_with(cache, "ref", is), 0);
    assert_false(exists(cache));
}


/* Where the mapping has small pages only: memory that is no file's. */
static void
test_copied(void **state)
{
    static float is[TOKENS * 4096];
    char path[64];
    tiny_t big = tiny;

    (void) state;
    snprintf(path, sizeof(path), "/dev/shm/llm-cache-%d.repack", getpid());
    big.n_embd = 512;
    big.n_ff = 1024;
    big.n_vocab = 2048;
    big.head_dim = 128;
    write_model(&big);
    settle();
    unlink(path);
    run_with(path, "cpu", is);

    for (int i = 0; i < 2; i++) {
        assert_int_equal(run_with(path, "cpu", is), WEIGHTS);
        assert_memory_equal(
            is, want, (size_t) TOKENS * (size_t) shape.n_vocab * sizeof(float));
    }

    unlink(path);
}


static void
test_path(void **state)
{
    (void) state;
    assert_null(repack_cache_path(NULL, "/m/a.gguf"));
    assert_null(repack_cache_path("off", "/m/a.gguf"));

    char *next = repack_cache_path("on", "/m/a.gguf");
    char *one = repack_cache_path("/c", "/m/a.gguf");
    char *two = repack_cache_path("/c", "/n/a.gguf");
    char *bare = repack_cache_path("/c", "a.gguf");

    assert_string_equal(next, "/m/a.gguf.repack");
    assert_memory_equal(one, "/c/a.gguf-", 10);
    assert_memory_equal(bare, "/c/a.gguf-", 10);
    assert_int_equal(strlen(one), 10 + 16 + 7);
    assert_string_not_equal(one, two);
    free(next);
    free(one);
    free(two);
    free(bare);
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_miss_hit, setup),
        cmocka_unit_test_setup(test_stale, setup),
        cmocka_unit_test_setup(test_stale_between_samples, setup),
        cmocka_unit_test_setup(test_touched, setup),
        cmocka_unit_test_setup(test_fresh_model, setup),
        cmocka_unit_test_setup(test_damaged, setup),
        cmocka_unit_test_setup(test_truncated, setup),
        cmocka_unit_test_setup(test_owner, setup),
        cmocka_unit_test_setup(test_unwritable, setup),
        cmocka_unit_test_setup(test_another_writer, setup),
        cmocka_unit_test_setup(test_concurrent, setup),
        cmocka_unit_test_setup(test_form, setup),
        cmocka_unit_test_setup(test_ref, setup),
        cmocka_unit_test_setup(test_copied, setup),
        cmocka_unit_test(test_path),
    };
    int rc;

    snprintf(dir, sizeof(dir), "/tmp/llm-cache-XXXXXX");
    if (mkdtemp(dir) == NULL) {
        return 1;
    }

    snprintf(model, sizeof(model), "%s/m.gguf", dir);
    snprintf(cache, sizeof(cache), "%s.repack", model);
    snprintf(temp, sizeof(temp), "%s.tmp", cache);
    log_open("/dev/null", LOG_EMERG);

    cmocka_set_message_output(CM_OUTPUT_TAP);
    rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(model);
    unlink(cache);
    unlink(temp);
    rmdir(dir);

    return rc;
}
