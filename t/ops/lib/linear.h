/*
 * What the tests of linear() and of weights share: the devices to compare,
 * random tensors of every type, and the documented arithmetic step by step.
 */

#ifndef T_OPS_LIB_LINEAR_H
#define T_OPS_LIB_LINEAR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/backend.h"
#include "kernels/op/op.h"
#include "kernels/op/quant.h"

enum { MAX_ROWS = 130, MAX_IN = 1536, MAX_DEVS = 9, N_DTYPES = 11 };

/* Orders of additions: one sum a row of W; or, for the CUDA backend, 16
 * classes of blocks and a tree (cuda_linear.h). */
enum { IN_ONE = 0, IN_CLASSES = 1, N_ORDERS };

typedef struct {
    const op_table_t *ops;
    op_dev_t *dev;
    int order;
} device_t;

/* Float types first. */
extern const op_dtype_t dtypes[N_DTYPES];

/* Every instruction set this machine has, best first, with 1 and with 2
 * threads (small set: 2); the CUDA backend last; and the oracle. */
extern device_t devices[MAX_DEVS];
extern int n_devices;
extern device_t ref;

extern uint64_t seed; /* printed; SEED in the environment sets it */


/* Takes the seed from SEED or the clock and prints it. */
void start_random(void);

/* start_random() and all devices.  0, or -1: nothing to test. */
int open_devices(void);
void close_devices(void);

void *take(size_t bytes);
float *random_rows(int rows, int n);

/* Data to be freed by the caller. */
op_tensor_t random_tensor(op_dtype_t dtype, int n_in, int n_out);

op_weight_t *make_weight(const device_t *d, const op_tensor_t *parts,
                         int n_parts);

/* False: tensor cores of a GPU add up as they like (cuda_dense.cu), and only
 * the emulation's bits are known. */
bool is_expected(int order, const op_tensor_t *t);

/* Output o for one row, in the order that is documented. */
float expected(int order, const op_tensor_t *t, int o, const float *x);

/* linear() into a frame of guard values, which must stay as they were;
 * [rows][n_out], all finite, to be freed. */
float *run_linear(const device_t *d, const op_weight_t *w, int n_out,
                  const float *x, int rows);

/* n values bit for bit, all finite. */
void check_same(const float *a, const float *b, int n, const char *what,
                int dtype);

#endif /* T_OPS_LIB_LINEAR_H */
