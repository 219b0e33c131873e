/*
 * Stacks and the switch between them.  On x86-64 a switch saves six registers
 * and costs about 20 ns; elsewhere ucontext does it, with a system call.
 * Compiled without TSan (its bookkeeping follows __tsan_switch_to_fiber).
 */

#include "t/shim/fiber.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if !defined(__x86_64__) && !defined(SHIM_UCONTEXT)
#define SHIM_UCONTEXT 1
#endif

#ifdef SHIM_UCONTEXT
#include <ucontext.h>
#endif

#if defined(SHIM_ASAN) || defined(SHIM_TSAN)
#define STACK_BYTES ((size_t) 512 << 10)
#else
#define STACK_BYTES ((size_t) 64 << 10)
#endif

#define GUARD_BYTES 4096

#ifdef SHIM_TSAN

extern "C" {
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void *fiber);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *token);
void __tsan_release(void *token);
}

#endif

#ifdef SHIM_ASAN

extern "C" {
void __sanitizer_start_switch_fiber(void **save, const void *stack,
                                    size_t size);
void __sanitizer_finish_switch_fiber(void *save, const void **stack,
                                     size_t *size);
}

#endif

#ifndef SHIM_UCONTEXT

extern "C" void shim_switch_stack(void **save, void *to);

__asm__(".text\n"
        ".globl shim_switch_stack\n"
        ".type shim_switch_stack, @function\n"
        "shim_switch_stack:\n"
        "    push %rbp\n"
        "    push %rbx\n"
        "    push %r12\n"
        "    push %r13\n"
        "    push %r14\n"
        "    push %r15\n"
        "    mov %rsp, (%rdi)\n"
        "    mov %rsi, %rsp\n"
        "    pop %r15\n"
        "    pop %r14\n"
        "    pop %r13\n"
        "    pop %r12\n"
        "    pop %rbx\n"
        "    pop %rbp\n"
        "    ret\n"
        ".size shim_switch_stack, . - shim_switch_stack\n");

#endif


void
shim_fiber_init(shim_fiber_t *fiber, void (*entry)(void))
{
    char *stack = (char *) mmap(NULL, GUARD_BYTES + STACK_BYTES,
                                PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                                -1, 0);

    if (stack == (char *) MAP_FAILED
        || mprotect(stack, GUARD_BYTES, PROT_NONE) != 0)
    {
        perror("cuda-shim: stack of a thread");
        abort();
    }

    fiber->stack = stack + GUARD_BYTES;
    fiber->size = STACK_BYTES;

#ifdef SHIM_UCONTEXT
    ucontext_t *context = (ucontext_t *) calloc(1, sizeof(ucontext_t));

    getcontext(context);
    context->uc_stack.ss_sp = stack + GUARD_BYTES;
    context->uc_stack.ss_size = STACK_BYTES;
    makecontext(context, entry, 0);
    fiber->context = context;
#else
    /* what the switch pops: six registers, then the address to return to;
     * entry finds the stack as after a call, 8 below a multiple of 16 */
    void **sp = (void **) (stack + GUARD_BYTES + STACK_BYTES - 64);

    *--sp = NULL;
    *--sp = (void *) entry;

    for (int i = 0; i < 6; i++) {
        *--sp = NULL;
    }

    fiber->sp = sp;
#endif

#ifdef SHIM_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
}


void
shim_fiber_fini(shim_fiber_t *fiber)
{
#ifdef SHIM_TSAN
    __tsan_destroy_fiber(fiber->tsan);
#endif
    free(fiber->context);
    munmap((char *) fiber->stack - GUARD_BYTES, GUARD_BYTES + STACK_BYTES);
}


void
shim_fiber_main(shim_fiber_t *fiber)
{
    pthread_attr_t attr;
    void *stack = NULL;

    if (fiber->stack == NULL && pthread_getattr_np(pthread_self(), &attr) == 0)
    {
        pthread_attr_getstack(&attr, &stack, &fiber->size);
        pthread_attr_destroy(&attr);
        fiber->stack = (const char *) stack;
    }

#ifdef SHIM_UCONTEXT
    if (fiber->context == NULL) {
        fiber->context = calloc(1, sizeof(ucontext_t));
    }
#endif

#ifdef SHIM_TSAN
    fiber->tsan = __tsan_get_current_fiber();
#endif
}


void
shim_fiber_enter(void)
{
#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
}


void
shim_fiber_switch(shim_fiber_t *from, shim_fiber_t *to)
{
#ifdef SHIM_TSAN
    /* 1: the switch orders nothing */
    __tsan_switch_to_fiber(to->tsan, 1);
#endif

#ifdef SHIM_ASAN
    void *save = NULL;

    __sanitizer_start_switch_fiber(&save, to->stack, to->size);
#endif

#ifdef SHIM_UCONTEXT
    swapcontext((ucontext_t *) from->context, (ucontext_t *) to->context);
#else
    shim_switch_stack(&from->sp, to->sp);
#endif

#ifdef SHIM_ASAN
    __sanitizer_finish_switch_fiber(save, NULL, NULL);
#endif
}


void
shim_acquire(void *token)
{
#ifdef SHIM_TSAN
    __tsan_acquire(token);
#else
    (void) token;
#endif
}


void
shim_release(void *token)
{
#ifdef SHIM_TSAN
    __tsan_release(token);
#else
    (void) token;
#endif
}
