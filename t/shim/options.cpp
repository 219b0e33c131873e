/*
 * Settings from the environment, failures on demand, counters.
 */

#include "t/shim/options.h"

#include <atomic>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

shim_stats_t shim_stats;
shim_live_t shim_live;

static std::atomic<uint64_t> countdown[SHIM_FAIL_KINDS];


static uint64_t
number(const char *name, uint64_t without)
{
    const char *text = getenv(name);
    char *end;

    if (text == NULL || *text == '\0') {
        return without;
    }

    const uint64_t value = strtoull(text, &end, 0);

    if (*end != '\0') {
        fprintf(stderr, "cuda-shim: %s=%s is no number\n", name, text);
        exit(2);
    }

    return value;
}


/* malloc:3,async:7 */
static void
read_failures(const char *text)
{
    static const char *const kinds[] = { "malloc", "host",   "launch",
                                         "async",  "cublas", "call",
                                         "stream", "event",  "graph" };

    while (text != NULL && *text != '\0') {
        const size_t len = strcspn(text, ":");
        bool known = false;

        for (int i = 0; i < SHIM_FAIL_KINDS; i++) {
            if (strlen(kinds[i]) == len && strncmp(text, kinds[i], len) == 0
                && text[len] == ':')
            {
                countdown[i] = strtoull(text + len + 1, NULL, 10);
                known = true;
            }
        }

        if (!known) {
            fprintf(stderr, "cuda-shim: LLM_SHIM_FAIL: %s?\n", text);
            exit(2);
        }

        text = strchr(text, ',');
        text = text == NULL ? NULL : text + 1;
    }
}


static shim_options_t
read_all(void)
{
    shim_options_t options = {};
    const char *cublas = getenv("LLM_SHIM_CUBLAS");
    const char *device = getenv("LLM_SHIM_DEVICE");

    options.seed = number("LLM_SHIM_SEED", 0);
    options.workers = number("LLM_SHIM_WORKERS", 1);
    options.protect = number("LLM_SHIM_PROTECT", 0) != 0;
    options.apart = number("LLM_SHIM_APART", 0) != 0;
    options.memory = number("LLM_SHIM_MEMORY", (uint64_t) 2 << 30);
    options.kernel_memory = number("LLM_SHIM_KERNEL_MEMORY", 0);
    options.node_memory = number("LLM_SHIM_NODE_MEMORY", 0);
    options.device = device == NULL || *device == '\0' ? "80" : device;
    options.no_cublas = cublas != NULL && strcmp(cublas, "none") == 0;
    options.trace = getenv("LLM_SHIM_TRACE");
    read_failures(getenv("LLM_SHIM_FAIL"));

    return options;
}


shim_options_t *
shim_options(void)
{
    static shim_options_t options = read_all();

    return &options;
}


void
shim_fail_at(shim_fail_t kind, uint64_t n)
{
    shim_options();
    countdown[kind] = n;
}


bool
shim_fails(shim_fail_t kind)
{
    shim_options();

    return countdown[kind] != 0 && --countdown[kind] == 0;
}


bool
shim_will_fail(shim_fail_t kind)
{
    return countdown[kind] != 0;
}


void
shim_trace(const char *name)
{
    static FILE *file;

    if (shim_options()->trace == NULL) {
        return;
    }

    if (file == NULL) {
        file = fopen(shim_options()->trace, "w");
    }

    if (file == NULL) {
        fprintf(stderr, "cuda-shim: cannot write %s\n",
                shim_options()->trace);
        exit(2);
    }

    fprintf(file, "%s\n", name);
    fflush(file);
}
