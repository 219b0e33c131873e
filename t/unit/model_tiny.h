/*
 * The tiny model of the model tests, and loading whatever a test has built.
 */

#ifndef T_UNIT_MODEL_TINY_H
#define T_UNIT_MODEL_TINY_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "t/tools/model_run.h"
#include "t/unit/gguf_build.h"

static const tiny_t tiny = { .n_layers = 2,
                             .n_embd = 64,
                             .n_ff = 96,
                             .n_heads = 4,
                             .n_kv_heads = 2,
                             .head_dim = 16,
                             .n_vocab = 40,
                             .dtype = OP_Q8_0,
                             .seed = 7 };

static const run_how_t how = { .backend = "ref",
                               .max_rows = 64,
                               .max_seqs = 4,
                               .max_len = 128,
                               .n_pages = 40 };


static inline gguf_t *
parse(build_t *b, buf_t *file)
{
    gguf_t *gguf;
    llm_err_t err;

    *file = build_finish(b);
    if (gguf_parse((const uint8_t *) file->data, file->len, &gguf, &err)
        != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return gguf;
}


/* Loads what is in b with `backend`; fills err when that fails. */
static inline int
load(build_t *b, const char *backend, run_t *run, llm_err_t *err)
{
    buf_t file;
    gguf_t *gguf = parse(b, &file);
    run_how_t h = how;

    h.backend = backend;
    memset(err, 0, sizeof(*err));

    const int rc = run_open(run, gguf, &h, err);

    /* a loaded model needs the file no more */
    gguf_close(gguf);
    memset(file.data, 0xee, file.len);
    buf_fini(&file);

    return rc;
}

#endif /* T_UNIT_MODEL_TINY_H */
