/*
 * What kernels/cuda/prim.cuh includes in place of CUDA's headers when
 * LLM_CUDA_EMU is set.
 */

#ifndef T_SHIM_CUDA_SHIM_H
#define T_SHIM_CUDA_SHIM_H

#include "t/shim/device.h"
#include "t/shim/formats.h"
#include "t/shim/library.h"
#include "t/shim/matrix.h"
#include "t/shim/runtime.h"

#endif
