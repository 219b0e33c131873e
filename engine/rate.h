/*
 * How fast a queue moves: the mean time between two requests that are
 * scheduled for the first time, measured while others wait.  A pure function
 * of the times it is told.
 */

#ifndef ENGINE_RATE_H
#define ENGINE_RATE_H

#include <stdbool.h>
#include <stdint.h>

enum { RATE_WAIT_MAX_S = 600 };

/* Zero: nothing measured yet. */
typedef struct {
    bool queue;       /* somebody was left waiting by the last step */
    uint64_t step_ns; /* when that was */
    double open_s;    /* of waiting since the last one was scheduled */
    double time_s;    /* sums over those scheduled, older ones count less */
    double count;
} rate_t;


/* After each step: n of those that had never run were scheduled by it, waiting
 * of them are left.  now_ns does not go back. */
void rate_step(rate_t *rate, uint64_t now_ns, int n, int waiting);

/* Seconds until `waiting` requests have been scheduled, rounded up, 1 …
 * RATE_WAIT_MAX_S; 1 when nothing is known. */
uint32_t rate_wait_s(const rate_t *rate, int waiting);

#endif /* ENGINE_RATE_H */
