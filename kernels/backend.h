/* Names → backends. */

#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/op/op.h"


/* "cpu", "ref", or "cuda" and "cuda:N" in a build that has it; "auto": the
 * first to try, cuda where it is, else cpu.  NULL for a name that is not
 * known. */
const op_table_t *backend_find(const char *name);

/* The N of "cuda:N"; −1: any. */
int backend_device(const char *name);

#endif /* KERNELS_BACKEND_H */
