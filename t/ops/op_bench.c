/*
 * How fast linear() is, on the shapes of SmolLM2-135M.
 *
 *   op_bench [isa]        (baseline, avx2, avx512, amx; default: the best)
 *
 * For 1 and 2 threads: each product at several row counts, in GB/s of weight
 * bytes and GOP/s, over as many distinct weights as the model has; a pure
 * read of as many bytes, for the ratio; then all products of the model in
 * order, as tokens per second.  Other programs disturb a run, so each figure
 * is the best of several.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/backend.h"
#include "kernels/cpu/cpu.h"
#include "kernels/op/op.h"

enum { LAYERS = 30, SHAPES = 5, HEAD = 4, MAX_ROWS = 512, REPEATS = 7 };

typedef struct {
    const char *name;
    int n_in;
    int n_out;
    op_dtype_t dtype;
    int count; /* distinct weights */
} shape_t;

static const shape_t shapes[SHAPES] = {
    { "qkv 576x960 Q4_1", 576, 960, OP_Q4_1, LAYERS },
    { "out 576x576 Q4_1", 576, 576, OP_Q4_1, LAYERS },
    { "gate_up 576x3072 Q4_1", 576, 3072, OP_Q4_1, LAYERS },
    { "down 1536x576 Q4_1", 1536, 576, OP_Q4_1, LAYERS },
    { "head 576x49152 Q8_0", 576, 49152, OP_Q8_0, 1 },
};

typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    op_weight_t *w[SHAPES][LAYERS];
    float *x;
    float *y;
    size_t bytes; /* of all weights */
    uint8_t *buffer;
} bench_t;


static double
now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}


static uint32_t
draw(void)
{
    static uint64_t s = 88172645463325252u;

    s ^= s << 13;
    s ^= s >> 7;
    s ^= s << 17;
    return (uint32_t) (s >> 32);
}


static op_weight_t *
random_weight(bench_t *b, const shape_t *shape)
{
    size_t row = op_row_bytes((int) shape->dtype, shape->n_in);
    int block = op_dtype_bytes((int) shape->dtype);
    size_t bytes = row * (size_t) shape->n_out;
    uint8_t *data = malloc(bytes);
    op_tensor_t part = { data, shape->dtype, shape->n_in, shape->n_out };
    op_err_t err;
    op_weight_t *w;

    if (data == NULL) {
        return NULL;
    }

    for (size_t i = 0; i < bytes; i++) {
        data[i] = (uint8_t) draw();
    }

    for (size_t i = 0; i < bytes; i += (size_t) block) {
        data[i + 1] = 0x1c; /* a scale near 0.005 */

        if (shape->dtype == OP_Q4_1) {
            data[i + 3] = 0xa8;
        }
    }

    w = b->ops->weight(b->dev, &part, 1, &err);
    free(data);

    return w;
}


typedef uint64_t lane_t __attribute__((vector_size(64)));

static volatile uint64_t sink;


/* One stream and a prefetch: what linear() does for one row. */
static void
read_run(void *arg, int thread, int n_threads)
{
    const bench_t *b = arg;
    size_t share = b->bytes / (size_t) n_threads / 256 * 256;
    const uint8_t *p = b->buffer + (size_t) thread * share;
    lane_t s[4] = { { 0 } };

    for (const uint8_t *end = p + share; p < end; p += 256) {
        for (int k = 0; k < 4; k++) {
            __builtin_prefetch(p + 64 * k + 4096);
            s[k] ^= *(const lane_t *) (p + 64 * k);
        }
    }

    s[0] ^= s[1] ^ s[2] ^ s[3];
    sink = s[0][0] ^ s[0][7];
}


/* GB/s of reading as many bytes as the model has. */
static double
read_speed(bench_t *b)
{
    double best = 1e9;

    for (int i = 0; i < REPEATS; i++) {
        double t = now();

        cpu_pool_run(b->dev->pool, read_run, b);
        t = now() - t;
        best = t < best ? t : best;
    }

    return (double) b->bytes / best / 1e9;
}


/* Seconds for all weights of one shape at n rows. */
static double
shape_time(bench_t *b, int s, int rows)
{
    const shape_t *shape = &shapes[s];
    int count = shape->count;
    double best = 1e9;

    if (rows > 16 && count > 8) {
        count = 8;
    }

    for (int i = 0; i < REPEATS; i++) {
        double t = now();

        for (int k = 0; k < count; k++) {
            b->ops->linear(b->dev, b->y, shape->n_out, b->x, rows, b->w[s][k],
                           OP_SET);
        }

        t = (now() - t) / count;
        best = t < best ? t : best;

        if (best * count * (i + 1) > 1.0) {
            break;
        }
    }

    return best;
}


static double
model_time(bench_t *b, int rows)
{
    int head_rows = rows > 32 ? 1 : rows; /* a prompt wants one row */
    double best = 1e9;

    for (int i = 0; i < REPEATS; i++) {
        double t = now();

        for (int layer = 0; layer < LAYERS; layer++) {
            for (int s = 0; s < HEAD; s++) {
                b->ops->linear(b->dev, b->y, shapes[s].n_out, b->x, rows,
                               b->w[s][layer], s % 2 == 0 ? OP_SET : OP_ADD);
            }
        }

        b->ops->linear(b->dev, b->y, shapes[HEAD].n_out, b->x, head_rows,
                       b->w[HEAD][0], OP_SET);
        t = now() - t;
        best = t < best ? t : best;
    }

    return best;
}


static int
bench_open(bench_t *b, int threads, const char *isa)
{
    op_open_t params = { .threads = threads, .isa = isa };
    op_limits_t limits = { MAX_ROWS, 1, 16, 1536, 9, 3, 64 };
    op_err_t err = { "" };

    memset(b, 0, sizeof(*b));
    b->ops = backend_find("cpu");
    b->dev = b->ops->open(&params, &err);

    if (b->dev == NULL || b->ops->prepare(b->dev, &limits, &err) != 0) {
        fprintf(stderr, "op_bench: %s\n", err.text);
        return -1;
    }

    for (int s = 0; s < SHAPES; s++) {
        for (int k = 0; k < shapes[s].count; k++) {
            b->w[s][k] = random_weight(b, &shapes[s]);

            if (b->w[s][k] == NULL) {
                return -1;
            }

            b->bytes += b->ops->weight_bytes(b->w[s][k]);
        }
    }

    b->x = b->ops->alloc(b->dev, sizeof(float) * MAX_ROWS * 1536);
    b->y = b->ops->alloc(b->dev, sizeof(float) * MAX_ROWS * 49152);
    b->buffer = b->ops->alloc(b->dev, b->bytes + 4096);

    if (b->x == NULL || b->y == NULL || b->buffer == NULL) {
        return -1;
    }

    memset(b->buffer, 1, b->bytes);

    for (int i = 0; i < MAX_ROWS * 1536; i++) {
        b->x[i] = (float) draw() * 0x1p-31f - 1.0f;
    }

    return 0;
}


static void
bench_close(bench_t *b)
{
    for (int s = 0; s < SHAPES; s++) {
        for (int k = 0; k < shapes[s].count; k++) {
            b->ops->weight_free(b->dev, b->w[s][k]);
        }
    }

    b->ops->free(b->dev, b->x, sizeof(float) * MAX_ROWS * 1536);
    b->ops->free(b->dev, b->y, sizeof(float) * MAX_ROWS * 49152);
    b->ops->free(b->dev, b->buffer, b->bytes + 4096);
    b->ops->close(b->dev);
}


int
main(int argc, char **argv)
{
    static const int rows[] = { 1, 4, 16, 32, 128, 512 };
    static bench_t b;

    for (int threads = 1; threads <= 2; threads++) {
        if (bench_open(&b, threads, argc > 1 ? argv[1] : NULL) != 0) {
            return 1;
        }

        printf("%s, %.1f MB of weights, read %.1f GB/s\n",
               b.ops->describe(b.dev), (double) b.bytes / 1e6, read_speed(&b));

        for (int s = 0; s < SHAPES; s++) {
            double bytes = (double) b.ops->weight_bytes(b.w[s][0]);
            double ops = 2.0 * shapes[s].n_in * shapes[s].n_out;

            printf("  %-22s", shapes[s].name);

            for (int i = 0; i < 6; i++) {
                double t = shape_time(&b, s, rows[i]);

                if (i == 0) {
                    printf(" M=1 %.1f GB/s", bytes / t / 1e9);
                } else {
                    printf("  %d: %.0f", rows[i], ops * rows[i] / t / 1e9);
                }
            }

            puts(" GOP/s");
        }

        for (int i = 0; i < 6; i++) {
            double t = model_time(&b, rows[i]);

            printf("  model M=%d: %.0f tok/s (%.2f ms, %.1f GB/s)\n", rows[i],
                   rows[i] / t, 1e3 * t, (double) b.bytes / t / 1e9);
        }

        fflush(stdout);
        bench_close(&b);
    }

    return 0;
}
