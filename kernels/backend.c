/* Names → backends.  Called once, at start. */

#include "kernels/backend.h"

#include <stddef.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/ref/ref.h"


const op_table_t *
backend_find(const char *name)
{
    if (strcmp(name, "auto") == 0 || strcmp(name, "cpu") == 0) {
        return &cpu_ops;
    }

    if (strcmp(name, "ref") == 0) {
        return &ref_ops;
    }

    return NULL;
}
