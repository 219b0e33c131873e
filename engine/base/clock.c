/* Monotonic clock. */

#include "engine/base/clock.h"

#include <stddef.h>
#include <time.h>

static uint64_t (*replacement)(void);


uint64_t
clock_now_ns(void)
{
    struct timespec ts;

    if (replacement != NULL) {
        return replacement();
    }

    clock_gettime(CLOCK_MONOTONIC, &ts);

    return (uint64_t) ts.tv_sec * 1000000000u + (uint64_t) ts.tv_nsec;
}


void
clock_replace(uint64_t (*now_ns)(void))
{
    replacement = now_ns;
}
