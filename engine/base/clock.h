/* Monotonic time in nanoseconds; a test may put its own clock in its place. */

#ifndef ENGINE_BASE_CLOCK_H
#define ENGINE_BASE_CLOCK_H

#include <stdint.h>


uint64_t clock_now_ns(void);

/* NULL: the real clock again. */
void clock_replace(uint64_t (*now_ns)(void));

#endif /* ENGINE_BASE_CLOCK_H */
