/* Names → backends. */

#ifndef KERNELS_BACKEND_H
#define KERNELS_BACKEND_H

#include "kernels/op/op.h"


/* "auto", "cpu" or "ref"; NULL for a name that is not known. */
const op_table_t *backend_find(const char *name);

#endif /* KERNELS_BACKEND_H */
