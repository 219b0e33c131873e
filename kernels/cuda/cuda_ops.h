/* The CUDA backend: NVIDIA GPUs of compute capability 7.5 and up.  Linked in
 * where LLM_CUDA is defined. */

#ifndef KERNELS_CUDA_CUDA_OPS_H
#define KERNELS_CUDA_CUDA_OPS_H

#include "kernels/op/op.h"

extern const op_table_t cuda_ops;

#endif /* KERNELS_CUDA_CUDA_OPS_H */
