/* The oracle: every op in plain loops and double sums, one thread. */

#ifndef KERNELS_REF_REF_H
#define KERNELS_REF_REF_H

#include "kernels/op/op.h"

extern const op_table_t ref_ops;

#endif /* KERNELS_REF_REF_H */
