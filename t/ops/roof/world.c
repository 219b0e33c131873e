/*
 * A model's matrices, made or read.  Called by roofline.
 *
 * The file's tensors are fused as the model fuses them.  Repacking is done
 * once; the other devices get weights over the same memory.
 */

#include "t/ops/roof/world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model/config.h"
#include "kernels/op/tensor.h"

typedef struct {
    const char *name;
    int n_layers;
    int n_embd;
    int n_q;
    int n_kv;
    int n_ff;
    int n_vocab;
} shape_t;

static const shape_t shapes[] = {
    { "smollm2", 30, 576, 576, 192, 1536, 49152 },
    { "llama-1b", 16, 2048, 2048, 512, 8192, 128256 },
};


static uint32_t
draw(void)
{
    static uint64_t s = 88172645463325252u;

    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return (uint32_t) (s >> 32);
}


/* Random data for the largest part of a matrix; all parts share them. */
static uint8_t *
random_data(op_dtype_t dtype, int n_in, int n_out)
{
    const size_t bytes = op_row_bytes((int) dtype, n_in) * (size_t) n_out;
    const size_t block = (size_t) op_dtype_bytes((int) dtype);
    uint8_t *data = malloc(bytes);

    for (size_t i = 0; data != NULL && i < bytes; i++) {
        data[i] = (uint8_t) draw();
    }

    for (size_t i = 0; data != NULL && i < bytes; i += block) {
        data[i + 1] = 0x1c; /* a scale near 0.005 */

        if (dtype == OP_Q4_1) {
            data[i + 3] = 0xa8;
        }
    }

    return data;
}


static int
world_random(world_t *world, const shape_t *s)
{
    const int sizes[MATRICES][1 + PARTS] = {
        { s->n_embd, s->n_q, s->n_kv, s->n_kv },
        { s->n_q, s->n_embd },
        { s->n_embd, s->n_ff, s->n_ff },
        { s->n_ff, s->n_embd },
        { s->n_embd, s->n_vocab },
    };

    world->name = s->name;
    world->n_layers = s->n_layers;

    for (int m = 0; m < MATRICES; m++) {
        matrix_t *matrix = &world->matrices[m];
        const op_dtype_t dtype = m == HEAD ? OP_Q8_0 : OP_Q4_1;

        world->random[m] = random_data(dtype, sizes[m][0], sizes[m][1]);

        if (world->random[m] == NULL) {
            return -1;
        }

        while (matrix->n_parts < PARTS && sizes[m][1 + matrix->n_parts] > 0) {
            const op_tensor_t part = { world->random[m], dtype, sizes[m][0],
                                       sizes[m][1 + matrix->n_parts] };

            for (int k = 0; k < s->n_layers; k++) {
                matrix->parts[k][matrix->n_parts] = part;
            }

            matrix->n_parts++;
        }
    }

    return 0;
}


static int
world_file(world_t *world, const char *path)
{
    static const char *const names[MATRICES][PARTS] = {
        { "attn_q", "attn_k", "attn_v" },
        { "attn_output" },
        { "ffn_gate", "ffn_up" },
        { "ffn_down" },
        { "output" },
    };
    model_config_t config;
    llm_err_t err;
    char name[64];

    if (gguf_open(path, &world->gguf, &err) != LLM_OK
        || model_config_read(world->gguf, &config, &err) != LLM_OK)
    {
        fprintf(stderr, "roofline: %s\n", err.text);
        return -1;
    }

    world->name = path;
    world->n_layers =
        config.n_layers < LAYERS_MAX ? config.n_layers : LAYERS_MAX;

    for (int i = 0; i < MATRICES * PARTS * world->n_layers; i++) {
        const int m = i % MATRICES, p = i / MATRICES % PARTS;
        const int layer = i / MATRICES / PARTS;
        matrix_t *matrix = &world->matrices[m];

        if (names[m][p] == NULL) {
            continue;
        }

        snprintf(name, sizeof(name), "blk.%d.%s.weight", layer, names[m][p]);

        const char *at = m == HEAD ? strchr(name + 4, '.') + 1 : name;

        /* an embedding may be the head as well */
        if (!gguf_tensor(world->gguf, at, &matrix->parts[layer][p])
            && (m != HEAD
                || !gguf_tensor(world->gguf, "token_embd.weight",
                                &matrix->parts[layer][p])))
        {
            fprintf(stderr, "roofline: %s has no tensor %s\n", path, at);
            return -1;
        }

        matrix->n_parts = p >= matrix->n_parts ? p + 1 : matrix->n_parts;
    }

    return 0;
}


/* Extents that touch are one: a pure read needn't know of layers. */
static void
add_extent(matrix_t *matrix, const uint8_t *data, size_t bytes)
{
    const int n = matrix->n_extents;
    extent_t *last = n > 0 ? &matrix->extents[n - 1] : NULL;

    if (last != NULL && last->data + last->bytes == data) {
        last->bytes += bytes;
        return;
    }

    matrix->extents[matrix->n_extents++] = (extent_t){ data, bytes };
}


/* Repacks by the last device, whose memory all the others use too. */
static int
build_matrix(matrix_t *matrix, int count)
{
    op_err_t err = { "no memory" };

    matrix->count = count;

    for (int k = 0; k < count; k++) {
        const op_tensor_t *parts = matrix->parts[k];
        op_weight_t *w =
            ops->weight(devs[THREADS - 1], parts, matrix->n_parts, &err);

        matrix->w[THREADS - 1][k] = w;

        for (int d = 0; w != NULL && d < THREADS - 1; d++) {
            const op_bytes_t data = { ops->weight_data(w),
                                      ops->weight_bytes(w) };

            matrix->w[d][k] =
                ops->weight_over(devs[d], parts, matrix->n_parts, &data, &err);
            w = matrix->w[d][k] == NULL ? NULL : w;
        }

        if (w == NULL) {
            fprintf(stderr, "roofline: %s\n", err.text);
            return -1;
        }

        matrix->bytes += ops->weight_bytes(w);
        add_extent(matrix, ops->weight_data(w), ops->weight_bytes(w));
    }

    return 0;
}


static void
name_matrix(matrix_t *matrix, int m)
{
    static const char *const names[MATRICES] = { "qkv", "out", "gate_up",
                                                 "down", "head" };
    const op_tensor_t *parts = matrix->parts[0];

    matrix->n_in = (int) parts[0].n_in;

    for (int i = 0; i < matrix->n_parts; i++) {
        matrix->n_out += (int) parts[i].n_out;
    }

    snprintf(matrix->name, sizeof(matrix->name), "%s %dx%d %s", names[m],
             matrix->n_in, matrix->n_out, op_dtype_name((int) parts[0].dtype));
}


static int
larger(int a, int b)
{
    return a > b ? a : b;
}


static int
build(world_t *world)
{
    op_limits_t limits = { ROWS_MAX, 1, 16, 0, 1, 1, 64 };
    op_err_t err = { "no memory" };
    int widest = 0;

    for (int m = 0; m < MATRICES; m++) {
        const int rows = m == HEAD ? HEAD_ROWS : ROWS_MAX;
        matrix_t *matrix = &world->matrices[m];

        name_matrix(matrix, m);
        limits.max_in = larger(limits.max_in, matrix->n_in);
        widest = larger(widest, matrix->n_out * rows / 64);

        if (build_matrix(matrix, m == HEAD ? 1 : world->n_layers) != 0) {
            return -1;
        }
    }

    for (int d = 0; d < THREADS; d++) {
        if (ops->prepare(devs[d], &limits, &err) != 0) {
            fprintf(stderr, "roofline: %s\n", err.text);
            return -1;
        }
    }

    world->x_bytes = sizeof(float) * ROWS_MAX * (size_t) limits.max_in;
    world->y_bytes = sizeof(float) * 64 * ((size_t) widest + 1);
    world->x = ops->alloc(devs[0], world->x_bytes);
    world->y = ops->alloc(devs[0], world->y_bytes);

    if (world->x == NULL || world->y == NULL) {
        fprintf(stderr, "roofline: no memory for %d rows\n", ROWS_MAX);
        return -1;
    }

    for (size_t i = 0; i < world->x_bytes / sizeof(float); i++) {
        world->x[i] = (float) draw() * 0x1p-31f - 1.0f;
    }

    return 0;
}


int
world_build(world_t *world, const char *name)
{
    int rc = 1;

    *world = (world_t){ 0 };

    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        if (strcmp(name, shapes[i].name) == 0) {
            rc = world_random(world, &shapes[i]);
        }
    }

    if (rc > 0) {
        rc = world_file(world, name);
    }

    return rc == 0 ? build(world) : rc;
}


void
world_free(world_t *world)
{
    for (int m = 0; m < MATRICES; m++) {
        for (int d = 0; d < THREADS; d++) {
            for (int k = 0; k < world->matrices[m].count; k++) {
                ops->weight_free(devs[d], world->matrices[m].w[d][k]);
            }
        }

        free(world->random[m]);
    }

    gguf_close(world->gguf);
    ops->free(devs[0], world->x, world->x_bytes);
    ops->free(devs[0], world->y, world->y_bytes);
}
