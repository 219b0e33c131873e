/*
 * linear() beside the limits of the machine.
 *
 *   roofline [--isa ISA] [--rounds N] [smollm2 | llama-1b | FILE.gguf]…
 *
 * The weights are the fused matrices of a model: random ones with the shapes
 * of SmolLM2-135M and Llama-3.2-1B unless files are named.  For 1 and 2
 * threads, per matrix (all layers' in turn) and for the whole model: GB/s of a
 * pure read of the very same memory, in the best of several ways; GB/s of
 * linear() with 1, 2 and 4 rows, and the percentage of the read; GOP/s with
 * more rows, and the percentage of products whose operands are in registers.
 *
 * Everything is measured once a round, so that a disturbance falls on both
 * sides; figures are min/median/max, percentages the median of the rounds'.
 */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/backend.h"
#include "kernels/cpu/cpu.h"
#include "kernels/op/op.h"
#include "t/ops/roof/peak.h"
#include "t/ops/roof/world.h"

enum {
    THIN = 3,
    THICK = 7,
    ROUNDS_MAX = 99,
    PASS_BYTES = 96 * 1024 * 1024, /* that a bandwidth is measured over */
    FEW = 4                        /* weights that a rate is measured over */
};

static const int thin[THIN] = { 1, 2, 4 };
static const int thick[THICK] = { 8, 16, 32, 64, 128, 256, ROWS_MAX };

const op_table_t *ops;
op_dev_t *devs[THREADS];

static int rounds = 7;


static double
now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double) t.tv_sec + 1e-9 * (double) t.tv_nsec;
}


/* --- measuring --- */


static double
product_time(int d, const world_t *world, int m, int rows)
{
    const matrix_t *matrix = &world->matrices[m];
    const int count = matrix->count < FEW ? matrix->count : FEW;
    const double start = now();

    for (int k = 0; k < count; k++) {
        ops->linear(devs[d], world->y, matrix->n_out, world->x, rows,
                    matrix->w[d][k], OP_SET);
    }

    return (now() - start) / count;
}


/* A worker that sleeps takes tens of microseconds to come. */
static void
nothing(void *arg, int thread, int n_threads)
{
    (void) arg;
    (void) thread;
    (void) n_threads;
}


static void
wake(int d)
{
    const double until = now() + 2e-4;

    while (now() < until) {
        cpu_pool_run(devs[d]->pool, nothing, NULL);
    }
}


typedef struct {
    int from;
    int to;
} span_t; /* of matrices */


static size_t
span_bytes(const world_t *world, span_t span)
{
    size_t bytes = 0;

    for (int m = span.from; m < span.to; m++) {
        bytes += world->matrices[m].bytes;
    }

    return bytes;
}


/* All products once, in the model's order. */
static void
products(int d, const world_t *world, span_t span, int rows)
{
    const int body = span.to < HEAD ? span.to : HEAD;

    for (int k = 0; k < world->n_layers; k++) {
        for (int m = span.from; m < body; m++) {
            const matrix_t *matrix = &world->matrices[m];

            ops->linear(devs[d], world->y, matrix->n_out, world->x, rows,
                        matrix->w[d][k], OP_SET);
        }
    }

    if (span.to > HEAD) {
        product_time(d, world, HEAD, rows);
    }
}


static double
product_gbps(int d, const world_t *world, span_t span, int rows)
{
    const size_t bytes = span_bytes(world, span);
    const int passes = 1 + (int) (PASS_BYTES / bytes);

    wake(d);

    const double start = now();

    for (int p = 0; p < passes; p++) {
        products(d, world, span, rows);
    }

    return (double) bytes * passes / (now() - start) / 1e9;
}


static double
read_gbps(int d, const world_t *world, span_t span, const read_way_t *way)
{
    const int passes = 1 + (int) (PASS_BYTES / span_bytes(world, span));
    size_t bytes = 0;

    wake(d);

    const double start = now();

    for (int p = 0; p < passes; p++) {
        for (int m = span.from; m < span.to; m++) {
            const matrix_t *matrix = &world->matrices[m];

            bytes +=
                peak_read(devs[d], matrix->extents, matrix->n_extents, way);
        }
    }

    return (double) bytes / (now() - start) / 1e9;
}


static double
peak_gops(int d)
{
    wake(d);

    const double start = now();
    const double n = peak_dots(devs[d]);

    return n / (now() - start) / 1e9;
}


static double
product_gops(int d, const world_t *world, int m, int rows)
{
    const matrix_t *matrix = &world->matrices[m];

    wake(d);

    return 2.0 * matrix->n_in * matrix->n_out * rows
           / product_time(d, world, m, rows) / 1e9;
}


/* --- the report --- */


static int
compare(const void *a, const void *b)
{
    const double u = *(const double *) a, v = *(const double *) b;

    return (u > v) - (u < v);
}


/* Sorted: min, median, max of one value a round. */
static void
spread(const double *v, double out[3])
{
    double sorted[ROUNDS_MAX];

    memcpy(sorted, v, (size_t) rounds * sizeof(double));
    qsort(sorted, (size_t) rounds, sizeof(double), compare);
    out[0] = sorted[0];
    out[1] = sorted[rounds / 2];
    out[2] = sorted[rounds - 1];
}


/* limit: NULL, or what v is a percentage of. */
static void
print_line(const char *what, const double *v, const double *limit,
           const char *unit)
{
    double of[ROUNDS_MAX], s[3], percent[3];

    spread(v, s);
    printf("    %-9s %7.1f %7.1f %7.1f %s", what, s[0], s[1], s[2], unit);

    for (int r = 0; limit != NULL && r < rounds; r++) {
        of[r] = limit[r] > 0 ? 100 * v[r] / limit[r] : 0;
    }

    if (limit != NULL) {
        spread(of, percent);
        printf("  %3.0f %%", percent[1]);
    }
}


/* GOP/s of products that read 1 GB/s of the span's weights with one row. */
static double
span_gops(const world_t *world, span_t span)
{
    double n = 0;

    for (int m = span.from; m < span.to; m++) {
        const matrix_t *matrix = &world->matrices[m];

        n += 2.0 * matrix->n_in * matrix->n_out * matrix->count;
    }

    return n / (double) span_bytes(world, span);
}


/* Few rows have two limits: the lower one is the roof. */
static void
print_thin(const double *v, int rows, const double *read, const double *peak,
           double gops)
{
    double rate[ROUNDS_MAX], percent[3];
    char what[16];

    snprintf(what, sizeof(what), "%d row%s", rows, rows == 1 ? "" : "s");
    print_line(what, v, read, "GB/s");

    for (int r = 0; r < rounds; r++) {
        rate[r] = peak[r] > 0 ? 100 * v[r] * gops * rows / peak[r] : 0;
    }

    spread(rate, percent);

    if (peak[0] > 0) {
        printf(", %.0f %% of registers", percent[1]);
    }

    putchar('\n');
}


static void
report_bandwidth(int d, const world_t *world, span_t span)
{
    static double reads[READ_WAYS][ROUNDS_MAX], v[THIN][ROUNDS_MAX];
    static double peak[ROUNDS_MAX];
    double best = -1, s[3];
    int way = 0;

    for (int r = -1; r < rounds; r++) {
        const int at = r < 0 ? 0 : r; /* one round for the caches */

        peak[at] = peak_gops(d);

        for (int i = 0; i < READ_WAYS; i++) {
            reads[i][at] = read_gbps(d, world, span, &read_ways[i]);

            if (i % (READ_WAYS / THIN) == 0) {
                const int t = i / (READ_WAYS / THIN);

                v[t][at] = product_gbps(d, world, span, thin[t]);
            }
        }
    }

    for (int i = 0; i < READ_WAYS; i++) {
        spread(reads[i], s);

        if (s[1] > best) {
            best = s[1];
            way = i;
        }
    }

    print_line("read", reads[way], NULL, "GB/s");
    printf("  (streams %d, prefetch %d)\n", read_ways[way].streams,
           read_ways[way].ahead);

    for (int t = 0; t < THIN; t++) {
        print_thin(v[t], thin[t], reads[way], peak, span_gops(world, span));
    }
}


static void
report_rate(int d, const world_t *world, int m)
{
    static double peak[ROUNDS_MAX], v[THICK][ROUNDS_MAX];
    const int n = m == HEAD ? THICK - 2 : THICK; /* HEAD_ROWS and below */

    for (int r = 0; r < rounds; r++) {
        peak[r] = peak_gops(d);

        for (int t = 0; t < n; t++) {
            v[t][r] = product_gops(d, world, m, thick[t]);
        }
    }

    if (peak[0] > 0) {
        print_line("registers", peak, NULL, "GOP/s");
        putchar('\n');
    }

    for (int t = 0; t < n; t++) {
        char what[16];

        snprintf(what, sizeof(what), "%d rows", thick[t]);
        print_line(what, v[t], peak[0] > 0 ? peak : NULL, "GOP/s");
        putchar('\n');
    }
}


static void
report(const world_t *world)
{
    const span_t all = { 0, MATRICES };

    printf("%s: %.1f MB of weights; min, median, max of %d\n", world->name,
           (double) span_bytes(world, all) / 1e6, rounds);

    for (int d = 0; d < THREADS; d++) {
        printf("%s, %s\n", world->name, ops->describe(devs[d]));

        for (int m = 0; m < MATRICES; m++) {
            const matrix_t *matrix = &world->matrices[m];

            printf("  %s, %.1f MB\n", matrix->name,
                   (double) matrix->bytes / 1e6);
            report_bandwidth(d, world, (span_t){ m, m + 1 });
            report_rate(d, world, m);
            fflush(stdout);
        }

        printf("  all, %.1f MB\n", (double) span_bytes(world, all) / 1e6);
        report_bandwidth(d, world, all);
        fflush(stdout);
    }
}


static int
run(const char *name)
{
    static world_t world;
    const int rc = world_build(&world, name);

    if (rc == 0) {
        report(&world);
    }

    world_free(&world);

    return rc;
}


static int
open_devices(const char *isa)
{
    op_err_t err;

    ops = backend_find("cpu");

    for (int d = 0; d < THREADS; d++) {
        const op_open_t params = { .threads = d + 1, .isa = isa };

        devs[d] = ops->open(&params, &err);

        if (devs[d] == NULL) {
            fprintf(stderr, "roofline: %s\n", err.text);
            return -1;
        }
    }

    return 0;
}


int
main(int argc, char **argv)
{
    const char *isa = NULL;
    int i = 1, rc;

    for (; i + 1 < argc && strncmp(argv[i], "--", 2) == 0; i += 2) {
        if (strcmp(argv[i], "--isa") == 0) {
            isa = argv[i + 1];
        } else if (strcmp(argv[i], "--rounds") == 0) {
            rounds = atoi(argv[i + 1]);
        } else {
            rounds = 0;
        }
    }

    if (rounds < 1 || rounds > ROUNDS_MAX
        || (i < argc && strncmp(argv[i], "--", 2) == 0))
    {
        fprintf(stderr,
                "usage: roofline [--isa ISA] [--rounds 1…%d] "
                "[smollm2 | llama-1b | FILE.gguf]…\n",
                ROUNDS_MAX);
        return 2;
    }

    rc = open_devices(isa);

    if (rc == 0 && i == argc) {
        rc = run("smollm2") | run("llama-1b");
    }

    for (; rc == 0 && i < argc; i++) {
        rc = run(argv[i]);
    }

    for (int d = 0; d < THREADS; d++) {
        ops->close(devs[d]);
    }

    return rc == 0 ? 0 : 1;
}
