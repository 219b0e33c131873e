/*
 * The command line: exit statuses and what is said, for good and bad words.
 * Commands run in this process with stdout and stderr in files.
 */

#include "t/unit/engine_tiny.h"

#include <fcntl.h>

#include "engine/cli.h"

enum { ARGS_MAX = 200, SAID_MAX = 1 << 16 };

static char model[64];
static char text[64]; /* a file of words */
static char out[SAID_MAX];
static char err[SAID_MAX];


/* Redirects fd to an empty file; its former self. */
static int
redirect(int fd, FILE *file)
{
    const int saved = dup(fd);

    assert_int_not_equal(saved, -1);
    assert_int_equal(dup2(fileno(file), fd), fd);

    return saved;
}


static void
restore(int fd, int saved, FILE *file, char *said)
{
    dup2(saved, fd);
    close(saved);
    rewind(file);
    said[fread(said, 1, SAID_MAX - 1, file)] = '\0';
    fclose(file);
}


/* words: separated by '|'; "@m" and "@f" stand for model and text file. */
static int
run(const char *words)
{
    static char copy[16384];
    char *argv[ARGS_MAX];
    int argc = 0;
    char *save = NULL;

    snprintf(copy, sizeof(copy), "%s", words);

    for (char *p = strtok_r(copy, "|", &save); p != NULL;
         p = strtok_r(NULL, "|", &save))
    {
        assert_true(argc < ARGS_MAX - 1);
        argv[argc++] = strcmp(p, "@m") == 0   ? model
                       : strcmp(p, "@f") == 0 ? text
                       : strcmp(p, "@") == 0  ? (char *) ""
                                              : p;
    }

    argv[argc] = NULL;
    fflush(stdout);

    FILE *file[2] = { tmpfile(), tmpfile() };
    const int saved[2] = { redirect(1, file[0]), redirect(2, file[1]) };
    const int rc = cli_main(argc, argv);

    fflush(stdout);
    restore(1, saved[0], file[0], out);
    restore(2, saved[1], file[1], err);

    return rc;
}


static void
expect(const char *words, int rc, const char *says)
{
    const int got = run(words);
    const char *said = rc == 0 ? out : err;

    if (got != rc || strstr(said, says) == NULL) {
        fail_msg("%.200s: %d \"%.300s\" \"%.300s\" instead of %d \"%s\"", words,
                 got, out, err, rc, says);
    }
}


static void
test_words(void **state)
{
    (void) state;
    expect("nonsense", -1, "no command \"nonsense\"");
    expect("generate", 1, "no model");
    expect("generate|--model|@m", 1, "needs --prompt TEXT or --chat TEXT");
    expect("tokenize|--model|@m", 1, "needs --prompt TEXT or --file FILE");
    expect("perplexity|--model|@m", 1, "needs --prompt TEXT or --file FILE");
    expect("generate|--model|@m|--prompt", 1, "\"--prompt\" needs the form");
    expect("generate|--model|@m|prompt|x", 1, "\"prompt\" needs the form");
    expect("generate|--model|@m|--top-k|1x", 1, "\"1x\" is not a number");
    expect("generate|--model|@m|--max-tokens|-1", 1, "is not a number");
    expect("generate|--model|@m|--temperature|nan", 1, "is not a number");
    expect("generate|--model|@m|--temperature|1e99", 1, "is not a number");
    expect("generate|--model|@m|--seed|-1", 1, "is not a number");
    expect("generate|--model|@m|--seed|18446744073709551616", 1,
           "is not a number");
    expect("generate|--model|@m|--no-such|1", 1, "unknown setting");
    expect("generate|--model|@m|--threads|0", 1, "from 1 to 256, or auto");
    expect("generate|--model|@m|--max-num-seqs|4096", 1, "is below");
    expect("generate|--prompt|x|--model|/nonexistent", 1, "/nonexistent");
    expect("generate|--prompt|x|--model|/etc/passwd", 1, "not a GGUF file");
    expect("generate|--prompt|x|--model|@m|--device|moon", 1, "moon");
    expect("generate|--prompt|x|--model|@m|--isa|moon", 1, "moon");
    expect("generate|--prompt|x|--model|@m|--log|/nonexistent/log", 1,
           "cannot open log");
    expect("generate|--prompt|x|--model|@m|--chat-template|/nonexistent", 1,
           "/nonexistent");
    expect("generate|--prompt|x|--model|@m|--chat-template|/etc/passwd", 0, "");
}


/* Words longer than any storage, and more of them. */
static void
test_long_words(void **state)
{
    static char words[16384];
    char *p = words;

    (void) state;
    p += sprintf(words, "generate|--");
    memset(p, 'k', 5000);
    strcpy(p + 5000, "|x");
    expect(words, 1, "is too long");

    p = words + sprintf(words, "generate|--model|");
    memset(p, 'm', 5000);
    strcpy(p + 5000, "|--prompt|x");
    expect(words, 1, "is too long");

    p = words + sprintf(words, "generate");
    for (int i = 0; i < 70; i++) {
        p += sprintf(p, "|--threads|1");
    }
    expect(words, 1, "more than 64 settings");
}


static void
test_generate(void **state)
{
    (void) state;
    expect("generate|--model|@m|--prompt|hello|--max-tokens|5|--ignore-eos", 0,
           "\n");
    assert_true(strlen(out) > 3);
    expect("generate|--model|@m|--chat|hello|--max-tokens|5", 0, "\n");
    expect("generate|--model|@m|--prompt|hello|--max-tokens|0", 0, "\n");
    expect("generate|--model|@m|--prompt|@", 1, "The prompt is empty");
    expect("generate|--model|@m|--prompt|a\xff", 1, "not valid UTF-8");
    expect("generate|--model|@m|--chat|a\xff", 1, "not valid UTF-8");
    expect("generate|--model|@m|--prompt|x|--temperature|-1", 1,
           "temperature must be");
    expect("generate|--model|@m|--prompt|hello hello hello hello hello hello "
           "hello hello hello hello|--max-model-len|16",
           1, "maximum context length is 16");
}


static void
test_tokenize(void **state)
{
    (void) state;
    expect("tokenize|--model|@m|--prompt|qq", 0, "113 113\n");
    expect("tokenize|--model|@m|--prompt|@", 0, "\n");
    expect("tokenize|--model|@m|--prompt|a\xff", 1, "not valid UTF-8");
    assert_string_equal(out, "");
    expect("tokenize|--model|@m|--file|/nonexistent", 1, "/nonexistent");
    expect("tokenize|--model|@m|--file|/tmp", 1, "directory");
    expect("tokenize|--model|@m|--file|@f", 0, "116 256 ");
}


static void
test_perplexity(void **state)
{
    (void) state;
    expect("perplexity|--model|@m|--file|@f|--chunk|64", 0, "perplexity: ");
    assert_null(strstr(out, "nan"));
    expect("perplexity|--model|@m|--file|@f|--chunk|4", 0, "perplexity: ");
    assert_null(strstr(out, "nan"));
    expect("perplexity|--model|@m|--file|@f|--chunk|0", 1, "--chunk 4 to 512");
    expect("perplexity|--model|@m|--file|@f|--chunk|3", 1, "--chunk 4 to 512");
    expect("perplexity|--model|@m|--file|@f|--chunk|513", 1,
           "--chunk 4 to 512");
    expect("perplexity|--model|@m|--prompt|q", 1, "fewer than one chunk");
}


#define BENCH "bench|--model|@m|--max-num-batched-tokens|128|--repeat|1"


static void
test_bench(void **state)
{
    (void) state;
    expect(BENCH "|--prompt-tokens|20|--gen|4|--batch|3", 0, "prefill 3");
    expect(BENCH "|--prompt-tokens|20|--gen|0", 0, "decode 1");
    expect(BENCH "|--prompt-tokens|20|--gen|4|--batch|128|--kv-cache-memory|1m"
                 "|--max-model-len|64",
           0, "decode 128");
    expect(BENCH "|--repeat|0", 1, "--repeat 1");
    expect(BENCH "|--repeat|101", 1, "--repeat 1");
    expect(BENCH "|--batch|0", 1, "--batch 1");
    expect(BENCH "|--batch|129", 1, "--batch 1");
    expect(BENCH "|--prompt-tokens|0", 1, "--prompt-tokens");
    expect(BENCH "|--prompt-tokens|512", 1, "too short");
    expect(BENCH "|--prompt-tokens|16777216", 1, "too short");
    expect(BENCH "|--prompt-tokens|8|--gen|16777216", 1, "too short");
    expect(BENCH "|--prompt-tokens|8|--depth|500|--gen|12", 1, "too short");
}


int
main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_words),      cmocka_unit_test(test_long_words),
        cmocka_unit_test(test_generate),   cmocka_unit_test(test_tokenize),
        cmocka_unit_test(test_perplexity), cmocka_unit_test(test_bench),
    };

    cmocka_set_message_output(CM_OUTPUT_TAP);
    tiny_file(model);
    strcpy(text, "/tmp/engine-text-XXXXXX");

    FILE *file = fdopen(mkstemp(text), "w");

    for (int i = 0; i < 100; i++) {
        fputs("the words of a text, ", file);
    }

    fclose(file);

    const int rc = cmocka_run_group_tests(tests, NULL, NULL);

    unlink(model);
    unlink(text);

    return rc;
}
