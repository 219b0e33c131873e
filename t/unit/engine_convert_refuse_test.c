/*
 * What quantize and trim refuse: the words, the cause that is told, and that
 * nothing is left behind or written over.
 */

#include "t/unit/engine_convert.h"

#include <math.h>
#include <signal.h>
#include <sys/resource.h>

#include "engine/cli_convert.h"

static const tiny_t small = { .n_layers = 3,
                              .n_embd = 64,
                              .n_ff = 96,
                              .n_heads = 2,
                              .n_kv_heads = 2,
                              .head_dim = 32,
                              .n_vocab = 40,
                              .dtype = OP_F32,
                              .seed = 3 };


static const char *
path_of(const char *name)
{
    static char path[2][256];
    static int next;

    next = !next;
    snprintf(path[next], sizeof(path[next]), "%s/%s", dir, name);

    return path[next];
}


static void
says(int rc, int code, const char *text)
{
    if (rc != code || strstr(err.text, text) == NULL) {
        fail_msg("%d \"%s\" instead of %d \"%s\"", rc, err.text, code, text);
    }
}


/* --- values --- */

/* One value of one tensor is x. */
static int
quantize_with(float x, op_dtype_t dtype)
{
    const uint64_t ne[2] = { 64, 2 };
    build_t b = { 0 };
    float values[128] = { 0 };

    values[99] = x;
    tiny_build(&b, &small);
    build_info(&b, "the.odd.one", 2, ne, OP_F32);
    buf_add(&b.data, values, sizeof(values));
    put_file(&b);

    return convert_quantize(in, out, dtype, OP_F16, &done, &err);
}


static void
test_values(void **state)
{
    static const op_dtype_t halves[] = { OP_F16,  OP_Q8_0, OP_Q5_1,
                                         OP_Q5_0, OP_Q4_1, OP_Q4_0 };

    (void) state;
    for (size_t i = 0; i < sizeof(halves) / sizeof(halves[0]); i++) {
        static const float bad[] = { NAN, INFINITY, -INFINITY, 65520, -1e38f };

        for (size_t k = 0; k < sizeof(bad) / sizeof(bad[0]); k++) {
            says(quantize_with(bad[k], halves[i]), LLM_ERROR,
                 "tensor \"the.odd.one\" has a value of");
            assert_int_equal(files_in_dir(), 1);
        }

        says(quantize_with(-65519, halves[i]), LLM_OK, "");
        unlink(out);
    }

    says(quantize_with(3.4e38f, OP_BF16), LLM_ERROR,
         "a value of 3.4e+38, which BF16 cannot hold");
    says(quantize_with(NAN, OP_BF16), LLM_ERROR, "a value of");
    says(quantize_with(1e38f, OP_BF16), LLM_OK, "");
    says(quantize_with(3.4e38f, OP_F32), LLM_OK, "");
    unlink(out);
}


/* Rows that are no whole blocks, but of halves. */
static void
test_rows(void **state)
{
    static const op_dtype_t blocks[] = { OP_Q8_0, OP_Q5_1, OP_Q5_0, OP_Q4_1,
                                         OP_Q4_0 };
    tiny_t t = small;

    (void) state;
    t.n_ff = 80;
    put_tiny(&t, OP_F32);

    for (size_t i = 0; i < sizeof(blocks) / sizeof(blocks[0]); i++) {
        says(convert_quantize(in, out, blocks[i], OP_F16, &done, &err),
             LLM_ERROR,
             "tensor \"blk.0.ffn_down.weight\" has rows of 80 values, not a "
             "multiple of the 32 of a block of ");
        assert_int_equal(files_in_dir(), 1);
    }

    t = small;
    t.n_embd = 48;
    put_tiny(&t, OP_F32);
    says(convert_quantize(in, out, OP_F16, OP_Q8_0, &done, &err), LLM_ERROR,
         "tensor \"token_embd.weight\" has rows of 48 values");
    says(convert_quantize(in, out, OP_F16, OP_F16, &done, &err), LLM_OK, "");
    unlink(out);
}


/* --- files --- */

static void
refused_for(const char *model, const char *to, int code, const char *text)
{
    says(convert_quantize(model, to, OP_F16, OP_F16, &done, &err), code, text);
    says(convert_trim(model, to, "2", &done, &err), code, text);
}


/* However the two names of one file differ. */
static void
test_same_file(void **state)
{
    const char *over = "would write over the model that is read";
    char *data, *after;
    size_t len, len_after;
    char dotted[256], temp[256];

    (void) state;
    put_tiny(&small, OP_F32);
    assert_int_equal(file_read(in, 1 << 24, &data, &len, &err), LLM_OK);

    refused_for(in, in, LLM_BADREQ, over);
    snprintf(dotted, sizeof(dotted), "%s/./in.gguf", dir);
    refused_for(in, dotted, LLM_BADREQ, over);
    assert_int_equal(symlink(in, path_of("soft")), 0);
    refused_for(in, path_of("soft"), LLM_BADREQ, over);
    refused_for(path_of("soft"), in, LLM_BADREQ, over);
    assert_int_equal(link(in, path_of("hard")), 0);
    refused_for(in, path_of("hard"), LLM_BADREQ, over);

    /* the temporary file of the output is the input */
    snprintf(temp, sizeof(temp), "%s.tmp", out);
    assert_int_equal(link(in, temp), 0);
    refused_for(temp, out, LLM_BADREQ, over);
    unlink(temp);

    assert_int_equal(file_read(in, 1 << 24, &after, &len_after, &err), LLM_OK);
    assert_int_equal(len, len_after);
    assert_memory_equal(data, after, len);
    free(data);
    free(after);
    unlink(path_of("soft"));
    unlink(path_of("hard"));
    assert_int_equal(files_in_dir(), 1);
}


static void
test_files(void **state)
{
    build_t b = { 0 };
    tiny_t t = small;
    char longest[4400];

    (void) state;
    put_tiny(&small, OP_F32);
    refused_for(path_of("none"), out, LLM_ERROR, "No such file");
    refused_for("/etc/passwd", out, LLM_ERROR, "not a GGUF file");
    refused_for(in, path_of("no/dir.gguf"), LLM_ERROR, "No such file");
    refused_for(in, "/dev/full", LLM_ERROR, "it is there and not a file");
    refused_for(in, dir, LLM_ERROR, "it is there and not a file");
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    refused_for(in, longest, LLM_BADREQ, "too long a path");

    /* not the whole of a model, or none that is known */
    tiny_build(&b, &t);
    build_kv_u32(&b, "split.count", 2);
    put_file(&b);
    refused_for(in, out, LLM_BADREQ, "is one of 2 parts");

    t.skip = "llama.block_count";
    put_tiny(&t, OP_F32);
    refused_for(in, out, LLM_ERROR, "\"llama.block_count\" is missing");

    put_tiny(&small, OP_F32);
    assert_int_equal(truncate(in, 20000), 0);
    refused_for(in, out, LLM_ERROR, "reaches past the end of the file");
    assert_int_equal(files_in_dir(), 1);
}


/* A file that is there already stays as it is when its successor fails, and a
 * disk that fills leaves nothing else. */
static void
test_no_room(void **state)
{
    struct rlimit old, limit;
    char *data;
    size_t len;

    (void) state;
    put_tiny(&small, OP_F32);

    FILE *f = fopen(out, "w");

    fputs("older", f);
    fclose(f);

    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    limit = old;
    limit.rlim_cur = 8192;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);

    const int rc = convert_quantize(in, out, OP_F16, OP_F16, &done, &err);

    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    says(rc, LLM_ERROR, "out.gguf\": File too large");
    assert_int_equal(files_in_dir(), 2);
    assert_int_equal(file_read(out, 100, &data, &len, &err), LLM_OK);
    assert_string_equal(data, "older");
    free(data);
    unlink(out);
}


/* --- words --- */

static void
test_layers(void **state)
{
    static const char *const bad[] = {
        "0",
        "4",
        "-1",
        "",
        "x",
        "2x",
        "1.5",
        " 2",
        "0-3",
        "2-1",
        "1,1",
        "1,0",
        "0-",
        "-",
        ",",
        "0,",
        ",1",
        "0,,1",
        "0-1-2",
        "0 1",
        "0,3",
        "0-1,1",
        "1-2,0",
        "99999999999999999999",
        "0-99999999999999999999",
        "+1",
        "0,+1",
        "0, 1",
    };

    (void) state;
    put_tiny(&small, OP_F32);

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        says(convert_trim(in, out, bad[i], &done, &err), LLM_BADREQ,
             ": use a number from 1 to 3, or an ascending list of layers 0 to "
             "2 such as 0-2,2");
        assert_int_equal(files_in_dir(), 1);
    }
}


/* The words of a command, separated by '|', with "@i" and "@o" for the files;
 * its status, and what it printed on one of its streams. */
static int
run(int (*command)(int, char **), const char *words, int fd, char *said,
    size_t size)
{
    char copy[512];
    char *argv[16];
    char *save = NULL;
    int argc = 0;
    FILE *file = tmpfile();
    const int saved = dup(fd);

    snprintf(copy, sizeof(copy), "%s", words);
    for (char *p = strtok_r(copy, "|", &save); p != NULL;
         p = strtok_r(NULL, "|", &save))
    {
        argv[argc++] = strcmp(p, "@i") == 0 ? in : strcmp(p, "@o") ? p : out;
    }

    fflush(stdout);
    dup2(fileno(file), fd);

    const int rc = command(argc, argv);

    fflush(stdout);
    dup2(saved, fd);
    close(saved);
    rewind(file);
    said[fread(said, 1, size - 1, file)] = '\0';
    fclose(file);

    return rc;
}


static void
expect(int (*command)(int, char **), const char *words, int rc,
       const char *text)
{
    char said[2048];
    const int got = run(command, words, rc == 0 ? 1 : 2, said, sizeof(said));

    if (got != rc || strstr(said, text) == NULL) {
        fail_msg("%s: %d \"%s\" instead of %d \"%s\"", words, got, said, rc,
                 text);
    }

    assert_int_equal(files_in_dir(), rc == 0 ? 2 : 1);
    unlink(out);
}


static void
test_words(void **state)
{
    (void) state;
    put_tiny(&small, OP_F32);

    expect(cli_quantize, "quantize", 1, "quantize needs --model");
    expect(cli_quantize, "quantize|--model|@i", 1, "quantize needs --out");
    expect(cli_quantize, "quantize|--model|@i|--out|@o", 1,
           "quantize needs --type");
    expect(cli_quantize, "quantize|--model|@i|--out", 1,
           "\"--out\" needs the form --name value");
    expect(cli_quantize, "quantize|@i|@o", 1, "needs the form --name value");
    expect(cli_quantize, "quantize|--model|@i|--out|@o|--type|q3_k", 1,
           "--type q3_k: use f32, f16,");
    expect(cli_quantize, "quantize|--model|@i|--out|@o|--type|f16|--head|q9", 1,
           "--head q9: use f32, f16,");
    expect(cli_quantize, "quantize|--model|@i|--out|@o|--layers|2", 1,
           "--layers 2: use an option that quantize has");
    expect(cli_quantize, "quantize|--model|@i|--out|@i|--type|f16", 1,
           "use another name");
    expect(cli_trim, "trim|--model|@i|--out|@o", 1, "trim needs --layers");
    expect(cli_trim, "trim|--model|@i|--out|@o|--layers|9", 1,
           "--layers 9: use a number from 1 to 3");
    expect(cli_trim, "trim|--model|@i|--out|@o|--type|f16", 1,
           "--type f16: use an option that trim has");

    expect(cli_quantize, "quantize|--model|@i|--out|@o|--type|q4_0", 0,
           ": 29 tensors, Q4_0, head Q8_0, ");
    expect(cli_quantize, "quantize|--model|@i|--out|@o|--type|Q5_1", 0,
           ": 29 tensors, Q5_1, head Q8_0, ");
    expect(cli_quantize, "quantize|--model|@i|--out|@o|--type|bf16", 0,
           ": 29 tensors, BF16, head BF16, ");
    expect(cli_quantize, "quantize|--head|q4_1|--type|q4_0|--model|@i|--out|@o",
           0, ": 29 tensors, Q4_0, head Q4_1, ");
    expect(cli_trim, "trim|--model|@i|--out|@o|--layers|2", 0,
           ": 2 of 3 layers, 20 tensors, ");
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),    cmocka_unit_test(test_rows),
        cmocka_unit_test(test_same_file), cmocka_unit_test(test_files),
        cmocka_unit_test(test_no_room),   cmocka_unit_test(test_layers),
        cmocka_unit_test(test_words),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);

    if (!convert_begin()) {
        return 1;
    }

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    convert_end();

    return rc;
}
