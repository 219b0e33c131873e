/*
 * A backend with memory of its own, as one whose memory is the host's: every
 * op's arguments are copied there and what it writes is copied back, so that
 * a test written for host memory runs over it unchanged.
 *
 * What an op may write is copied whole, with what lies between its rows, so a
 * write that goes astray there shows.
 */

#ifndef T_OPS_LIB_HOSTED_H
#define T_OPS_LIB_HOSTED_H

#include "kernels/op/op.h"

/* The CUDA backend that this test is linked with: emulated, or a GPU's.  It is
 * prepared for small steps as it is opened. */
extern const op_table_t hosted_cuda;

/* The device behind it, for cuda_ops. */
op_dev_t *hosted_inner(op_dev_t *dev);

#endif /* T_OPS_LIB_HOSTED_H */
