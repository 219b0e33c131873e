/*
 * llm-engine: serve (started by nginx), or one of the commands for people.
 */

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/log.h"
#include "engine/cli.h"
#include "engine/cli_convert.h"
#include "engine/cli_plan.h"
#include "engine/cli_synth.h"
#include "engine/loop.h"

typedef int (*command_t)(int argc, char **argv);

static const char usage[] =
    "usage: llm-engine COMMAND --model FILE [options]\n"
    "\n"
    "  generate    --prompt TEXT | --chat TEXT   print what follows\n"
    "  bench       prefill and decode speed\n"
    "  tokenize    --prompt TEXT | --file FILE   print token ids\n"
    "  perplexity  --file FILE                   of a text\n"
    "  plan        --model FILE | --like NAME    what fits, and how fast\n"
    "  synth       --like NAME --out FILE        a model file from a seed\n"
    "  quantize    --out FILE --type T           a model file of another type\n"
    "  trim        --out FILE --layers K         one of fewer layers\n"
    "  serve       key=value ...                 started by nginx\n"
    "\n"
    "options of all commands: --threads N, --reserved-cpus N,\n"
    "  --deterministic on|off,\n"
    "  --cpu-affinity on|off, --isa baseline|avx2|avx512|amx,\n"
    "  --device auto|cpu|cuda|cuda:N|ref, --max-model-len N,\n"
    "  --max-num-batched-tokens N, --max-num-seqs N,\n"
    "  --gpu-memory-utilization U, --kv-cache-memory SIZE,\n"
    "  --kv-cache-prefault on|off, --kv-cache-dtype f16|q8_0,\n"
    "  --repack-cache on|off|PATH,\n"
    "  --chat-template FILE, --log FILE, --log-level LEVEL\n"
    "generate: --max-tokens N, --temperature T, --top-k N, --top-p P,\n"
    "  --min-p P, --seed N, --ignore-eos\n"
    "bench: --prompt-tokens N, --gen N, --batch N, --depth N, --repeat N\n"
    "perplexity: --chunk N\n"
    "plan: --dtype T, --memory SIZE, --utilization U, --context N,\n"
    "  --mean-tokens N, --kv-cache-dtype f16|q8_0, --bandwidth GB/s,\n"
    "  --max-num-batched-tokens N, --max-num-seqs N\n"
    "synth: --type T, --seed N, --layers N, --vocab N, --context N\n"
    "quantize: --type T, --head T\n"
    "trim: --layers N or a list such as 0-8,29\n";


static bool
wants_help(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }

    return argc >= 2 && strcmp(argv[1], "help") == 0;
}


/* The commands that need no engine; NULL when it is none of them. */
static command_t
command_of(const char *name)
{
    static const struct {
        const char *name;
        command_t run;
    } rows[] = {
        { "plan", cli_plan },
        { "synth", cli_synth },
        { "quantize", cli_quantize },
        { "trim", cli_trim },
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        if (strcmp(name, rows[i].name) == 0) {
            return rows[i].run;
        }
    }

    return NULL;
}


static int
serve(int argc, char **argv)
{
    engine_conf_t conf;
    llm_err_t err;

    engine_conf_init(&conf);

    for (int i = 2; i < argc; i++) {
        if (engine_conf_set(&conf, argv[i], &err) != LLM_OK) {
            log_write(LOG_EMERG, "llm-engine: %s", err.text);
            return 2;
        }
    }

    if (engine_conf_check(&conf, &err) != LLM_OK) {
        log_write(LOG_EMERG, "llm-engine: %s", err.text);
        return 2;
    }

    if (log_open(conf.log, conf.log_level) != LLM_OK) {
        log_write(LOG_EMERG, "llm-engine: cannot open log \"%s\"", conf.log);
        return 2;
    }

    return loop_serve(&conf);
}


int
main(int argc, char **argv)
{
    /* a limit on the size of files is an error like a full disk */
    signal(SIGXFSZ, SIG_IGN);

    if (argc >= 2 && strcmp(argv[1], "serve") == 0) {
        return serve(argc, argv);
    }

    if (wants_help(argc, argv)) {
        fputs(usage, stdout);
        return 0;
    }

    if (argc >= 2) {
        const command_t command = command_of(argv[1]);
        const int rc = command != NULL ? command(argc - 1, argv + 1)
                                       : cli_main(argc - 1, argv + 1);

        if (rc >= 0) {
            return rc;
        }
    }

    fputs(usage, stderr);
    return 1;
}
