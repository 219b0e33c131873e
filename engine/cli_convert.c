/*
 * llm-engine quantize and trim: their options, and what they say.
 *
 * Where a model has no smaller sibling of the same vocabulary, these make one:
 * a draft for speculative decoding with fewer bits or fewer layers.
 */

#include "engine/cli_convert.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "engine/cli_tool.h"
#include "engine/convert.h"

typedef struct {
    const char *name;
    const char **value;
    bool optional;
} option_t;


/* Words of the form --name value into rows, which end with a name of NULL. */
static int
parse(const char *command, const option_t *rows, int argc, char **argv)
{
    char use[64];

    snprintf(use, sizeof(use), "an option that %s has (see --help)", command);

    for (int i = 1; i < argc; i += 2) {
        const option_t *row = rows;

        if (strncmp(argv[i], "--", 2) != 0 || i + 1 >= argc) {
            fprintf(stderr, "llm-engine: \"%s\" needs the form --name value\n",
                    argv[i]);
            return LLM_BADREQ;
        }

        while (row->name != NULL && strcmp(row->name, argv[i] + 2) != 0) {
            row++;
        }

        if (row->name == NULL) {
            return cli_complain(argv[i] + 2, argv[i + 1], use);
        }

        *row->value = argv[i + 1];
    }

    for (; rows->name != NULL; rows++) {
        if (*rows->value == NULL && !rows->optional) {
            fprintf(stderr, "llm-engine: %s needs --%s\n", command, rows->name);
            return LLM_BADREQ;
        }
    }

    return LLM_OK;
}


static int
failed(const llm_err_t *err)
{
    fprintf(stderr, "llm-engine: %s\n", err->text);

    return 1;
}


int
cli_quantize(int argc, char **argv)
{
    const char *model = NULL, *out = NULL, *type = NULL, *head = NULL;
    const option_t rows[] = { { "model", &model, false },
                              { "out", &out, false },
                              { "type", &type, false },
                              { "head", &head, true },
                              { NULL, NULL, true } };
    op_dtype_t dtype, head_dtype;
    convert_done_t done;
    llm_err_t err;

    if (parse(argv[0], rows, argc, argv) != LLM_OK
        || cli_dtype("type", type, &dtype) != LLM_OK)
    {
        return 1;
    }

    /* half a byte a weight is too coarse for the head, see convert.c */
    head_dtype = op_dtype_bytes((int) dtype) < op_dtype_bytes(OP_Q8_0)
                         && op_dtype_block((int) dtype) > 1
                     ? OP_Q8_0
                     : dtype;

    if (head != NULL && cli_dtype("head", head, &head_dtype) != LLM_OK) {
        return 1;
    }

    if (convert_quantize(model, out, dtype, head_dtype, &done, &err) != LLM_OK)
    {
        return failed(&err);
    }

    printf("%s: %d tensors, %s, head %s, %.1f MB of %.1f MB, relative error "
           "%.4f %%\n",
           out, done.n_tensors, op_dtype_name((int) dtype),
           op_dtype_name((int) head_dtype), (double) done.bytes_out / 1e6,
           (double) done.bytes_in / 1e6, 100 * done.error);

    return 0;
}


int
cli_trim(int argc, char **argv)
{
    const char *model = NULL, *out = NULL, *layers = NULL;
    const option_t rows[] = { { "model", &model, false },
                              { "out", &out, false },
                              { "layers", &layers, false },
                              { NULL, NULL, true } };
    convert_done_t done;
    llm_err_t err;

    if (parse(argv[0], rows, argc, argv) != LLM_OK) {
        return 1;
    }

    if (convert_trim(model, out, layers, &done, &err) != LLM_OK) {
        return failed(&err);
    }

    printf("%s: %d of %d layers, %d tensors, %.1f MB of %.1f MB\n", out,
           done.n_layers_out, done.n_layers_in, done.n_tensors,
           (double) done.bytes_out / 1e6, (double) done.bytes_in / 1e6);

    return 0;
}
