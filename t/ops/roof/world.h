/*
 * The weights that roofline measures: a model's fused matrices, over one memory
 * for all devices.
 */

#ifndef T_OPS_ROOF_WORLD_H
#define T_OPS_ROOF_WORLD_H

#include <stddef.h>
#include <stdint.h>

#include "engine/model/gguf.h"
#include "kernels/op/op.h"
#include "t/ops/roof/peak.h"

enum {
    MATRICES = 5,
    HEAD = 4, /* the last of them, and there is one */
    PARTS = 3,
    LAYERS_MAX = 128,
    THREADS = 2,
    ROWS_MAX = 512,
    HEAD_ROWS = 128 /* the most of the head: sequences in a step, not tokens */
};

/* One fused matrix of every layer. */
typedef struct {
    char name[48];
    int count;
    int n_in;
    int n_out;
    size_t bytes; /* of all layers */
    op_tensor_t parts[LAYERS_MAX][PARTS];
    int n_parts;
    op_weight_t *w[THREADS][LAYERS_MAX]; /* one memory for all threads */
    extent_t extents[LAYERS_MAX];
    int n_extents;
} matrix_t;

typedef struct {
    const char *name;
    matrix_t matrices[MATRICES];
    uint8_t *random[MATRICES]; /* what parts of random weights point to */
    gguf_t *gguf;
    int n_layers;
    size_t x_bytes;
    size_t y_bytes;
    float *x; /* ROWS_MAX rows for any matrix */
    float *y;
} world_t;

extern const op_table_t *ops;
extern op_dev_t *devs[THREADS]; /* opened; device d has d + 1 threads */


/* name: a model whose shapes are known, with random weights, or a GGUF file.
 * Prints why not and returns -1.  Prepares the devices. */
int world_build(world_t *world, const char *name);

/* What was built, even after a failure. */
void world_free(world_t *world);

#endif /* T_OPS_ROOF_WORLD_H */
