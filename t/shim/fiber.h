/*
 * Fibers: one stack for each thread of a CUDA block.  exec.cpp switches between
 * them; the sanitizers are told about every switch, so that ASan knows which
 * stack is in use and TSan takes each CUDA thread for a thread of its own.
 */

#ifndef T_SHIM_FIBER_H
#define T_SHIM_FIBER_H

#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SHIM_ASAN 1
#endif
#endif

#if defined(__SANITIZE_ADDRESS__) && !defined(SHIM_ASAN)
#define SHIM_ASAN 1
#endif

/* the shim itself is compiled without TSan and is told by -DSHIM_TSAN */
#if defined(__SANITIZE_THREAD__) && !defined(SHIM_TSAN)
#define SHIM_TSAN 1
#endif

typedef struct {
    void *sp; /* where it stopped */
    const char *stack;
    size_t size;
    void *context; /* of ucontext, where there is no assembly */
    void *tsan;
} shim_fiber_t;

/* A fiber that begins in entry when it is first switched to.  entry must call
 * shim_fiber_enter first, and never return. */
void shim_fiber_init(shim_fiber_t *fiber, void (*entry)(void));

/* Of a fiber that does not run, nor will. */
void shim_fiber_fini(shim_fiber_t *fiber);

/* Describes the stack of the calling OS thread. */
void shim_fiber_main(shim_fiber_t *fiber);

void shim_fiber_enter(void);
void shim_fiber_switch(shim_fiber_t *from, shim_fiber_t *to);

/* happens-before of TSan; nothing without it */
void shim_acquire(void *token);
void shim_release(void *token);

#endif
