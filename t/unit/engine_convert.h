/*
 * What the tests of quantize and trim share: a folder of their own with an
 * input and an output, and tiny models in it.
 */

#ifndef T_UNIT_ENGINE_CONVERT_H
#define T_UNIT_ENGINE_CONVERT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <dirent.h>
#include <stdlib.h>
#include <unistd.h>

#include "engine/base/file.h"
#include "engine/convert.h"
#include "engine/model/gguf_file.h"
#include "t/unit/gguf_build.h"

static char dir[64];
static char in[128];
static char out[128];
static convert_done_t done;
static llm_err_t err;


static inline void
put_file(build_t *b)
{
    buf_t file = build_finish(b);
    FILE *f = fopen(in, "wb");

    assert_non_null(f);
    assert_false(file.failed);
    assert_int_equal(fwrite(file.data, 1, file.len, f), file.len);
    fclose(f);
    buf_fini(&file);
}


static inline void
put_tiny(const tiny_t *t, op_dtype_t dtype)
{
    build_t b = { 0 };
    tiny_t with = *t;

    with.dtype = dtype;
    tiny_build(&b, &with);
    build_kv_u32(&b, "general.file_type", 99);
    put_file(&b);
}


static inline gguf_t *
opened(const char *path)
{
    gguf_t *gguf;

    if (gguf_open(path, &gguf, &err) != LLM_OK) {
        fail_msg("%s", err.text);
    }

    return gguf;
}


static inline int
files_in_dir(void)
{
    DIR *d = opendir(dir);
    int n = 0;

    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        n += e->d_name[0] != '.';
    }
    closedir(d);

    return n;
}


static inline size_t
bytes_of(const op_tensor_t *t)
{
    return op_row_bytes((int) t->dtype, t->n_in) * (size_t) t->n_out;
}


/* The folder; false when there is none. */
static inline bool
convert_begin(void)
{
    strcpy(dir, "/tmp/engine-convert-XXXXXX");

    if (mkdtemp(dir) == NULL) {
        return false;
    }

    snprintf(in, sizeof(in), "%s/in.gguf", dir);
    snprintf(out, sizeof(out), "%s/out.gguf", dir);

    return true;
}


static inline void
convert_end(void)
{
    unlink(in);
    unlink(out);
    rmdir(dir);
}

#endif /* T_UNIT_ENGINE_CONVERT_H */
