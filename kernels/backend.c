/* Names → backends.  Called once, at start. */

#include "kernels/backend.h"

#include <stddef.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/ref/ref.h"

#ifdef LLM_CUDA
#include "kernels/cuda/cuda_ops.h"
#endif

static const char cuda_name[] = "cuda";

enum { CUDA_LEN = sizeof(cuda_name) - 1, DEVICES_MAX = 64 };


/* The number of "cuda:N", −1 of "cuda", −2 of anything else. */
static int
cuda_number(const char *name)
{
    int n = 0;

    if (strncmp(name, cuda_name, CUDA_LEN) != 0) {
        return -2;
    }

    name += CUDA_LEN;

    if (*name == '\0') {
        return -1;
    }

    if (*name++ != ':' || *name == '\0') {
        return -2;
    }

    for (; *name >= '0' && *name <= '9' && n < DEVICES_MAX; name++) {
        n = 10 * n + (*name - '0');
    }

    return *name == '\0' && n < DEVICES_MAX ? n : -2;
}


int
backend_device(const char *name)
{
    const int n = cuda_number(name);

    return n >= 0 ? n : -1;
}


const op_table_t *
backend_find(const char *name)
{
#ifdef LLM_CUDA
    if (strcmp(name, "auto") == 0 || cuda_number(name) >= -1) {
        return &cuda_ops;
    }
#endif

    if (strcmp(name, "auto") == 0 || strcmp(name, "cpu") == 0) {
        return &cpu_ops;
    }

    if (strcmp(name, "ref") == 0) {
        return &ref_ops;
    }

    return NULL;
}
