/*
 * Device memory: one arena of the host, reserved at the first use.  It is made
 * of private mappings of one small file full of 0xff, so that every byte that
 * was never written is part of a NaN, whatever the size of an allocation.
 * Behind each allocation is a zone that nobody may touch: poisoned under ASan,
 * compared otherwise.  With the option protect, the arena can be touched only
 * while operations of streams run.
 */

#include "t/shim/options.h"
#include "t/shim/stream.h"

#include <map>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef SHIM_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, n_bytes)
#define ASAN_UNPOISON_MEMORY_REGION(at, n_bytes)
#endif

#define POISON 0xff
#define ALIGNMENT 512
#define RED_ZONE 256
#define PAGE 4096
#define CHUNK ((size_t) 8 << 20)

/* freed memory is not used again at once if there is room elsewhere */
#define ROOM 4

static struct {
    char *base;
    size_t size;
    size_t high; /* nothing was ever allocated behind it */
    size_t used;
    int file; /* full of POISON */
    int depth; /* of shim_memory_open */
    bool closed;
    std::map<char *, size_t> *live;
    std::map<const char *, size_t> *pinned;
    struct sigaction before;
} arena;


static size_t
round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}


static void
map_poison(char *at, size_t n_bytes)
{
    while (n_bytes != 0) {
        const size_t n = n_bytes < CHUNK ? n_bytes : CHUNK;

        if (mmap(at, n, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, arena.file, 0)
            == MAP_FAILED)
        {
            perror("cuda-shim: memory of the device");
            abort();
        }

        at += n;
        n_bytes -= n;
    }
}


static void
arena_create(void)
{
    if (arena.base != NULL) {
        return;
    }

    arena.size = round_up(shim_options()->memory, CHUNK) * ROOM;
    arena.live = new std::map<char *, size_t>;
    arena.pinned = new std::map<const char *, size_t>;
    arena.file = memfd_create("cuda-shim", MFD_CLOEXEC);

    if (arena.file < 0 || ftruncate(arena.file, CHUNK) != 0) {
        perror("cuda-shim: memory of the device");
        abort();
    }

    void *file = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED,
                      arena.file, 0);
    void *base = mmap(NULL, arena.size, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (file == MAP_FAILED || base == MAP_FAILED) {
        perror("cuda-shim: memory of the device");
        abort();
    }

    memset(file, POISON, CHUNK);
    munmap(file, CHUNK);

    arena.base = (char *) base;
    map_poison(arena.base, arena.size);
}


/* --- host code keeps out --- */

static void
on_fault(int number, siginfo_t *info, void *context)
{
    const char *at = (const char *) info->si_addr;

    if (arena.closed && at >= arena.base && at < arena.base + arena.size) {
        fprintf(stderr, "cuda-shim: host code touches device memory at "
                "offset %zu\n", (size_t) (at - arena.base));
        fflush(stderr);
        abort();
    }

    if ((arena.before.sa_flags & SA_SIGINFO) != 0) {
        arena.before.sa_sigaction(number, info, context);
        return;
    }

    /* again, without us */
    signal(number, SIG_DFL);
}


static void
set_closed(bool closed)
{
    static bool watched;

    if (closed && !watched) {
        struct sigaction action = {};

        watched = true;
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &action, &arena.before);
    }

    if (arena.high != 0) {
        mprotect(arena.base, round_up(arena.high, PAGE),
                 closed ? PROT_NONE : PROT_READ | PROT_WRITE);
    }

    arena.closed = closed;
}


void
shim_memory_open(void)
{
    if (arena.depth++ == 0 && arena.closed) {
        set_closed(false);
    }
}


void
shim_memory_close(void)
{
    if (--arena.depth == 0 && arena.base != NULL && shim_options()->protect) {
        set_closed(true);
    }
}


/* --- allocations --- */

bool
shim_on_device(const void *ptr)
{
    const char *at = (const char *) ptr;

    return arena.base != NULL && at >= arena.base
           && at < arena.base + arena.size;
}


bool
shim_is_allocated(const void *ptr, size_t n_bytes)
{
    if (!shim_on_device(ptr)) {
        return false;
    }

    auto next = arena.live->upper_bound((char *) ptr);

    if (next == arena.live->begin()) {
        return false;
    }

    --next;

    return (const char *) ptr + n_bytes <= next->first + next->second;
}


bool
shim_is_pinned(const void *ptr, size_t n_bytes)
{
    if (arena.pinned == NULL) {
        return false;
    }

    auto next = arena.pinned->upper_bound((const char *) ptr);

    if (next == arena.pinned->begin()) {
        return false;
    }

    --next;

    return (const char *) ptr + n_bytes <= next->first + next->second;
}


static size_t
slot_bytes(size_t n_bytes)
{
    return round_up(n_bytes + RED_ZONE, ALIGNMENT);
}


/* Behind what was ever used, or else in the first gap that is wide enough. */
static char *
find_room(size_t n_bytes)
{
    if (n_bytes <= arena.size - arena.high) {
        return arena.base + arena.high;
    }

    char *at = arena.base;

    for (auto &item : *arena.live) {
        if (n_bytes <= (size_t) (item.first - at)) {
            return at;
        }

        at = item.first + slot_bytes(item.second);
    }

    return n_bytes <= (size_t) (arena.base + arena.size - at) ? at : NULL;
}


cudaError_t
shim_malloc(void **ptr, size_t n_bytes)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    if (n_bytes == 0) {
        *ptr = NULL;
        return cudaSuccess;
    }

    arena_create();

    if (shim_fails(SHIM_FAIL_MALLOC)
        || n_bytes > shim_options()->memory - arena.used)
    {
        return shim_error(cudaErrorMemoryAllocation);
    }

    char *at = find_room(slot_bytes(n_bytes));

    if (at == NULL) {
        return shim_error(cudaErrorMemoryAllocation);
    }

    /* what is behind high is open: the next close will include it */
    shim_memory_open();
    (*arena.live)[at] = n_bytes;
    arena.used += round_up(n_bytes, ALIGNMENT);
    ASAN_UNPOISON_MEMORY_REGION(at, n_bytes);
    ASAN_POISON_MEMORY_REGION(at + n_bytes, slot_bytes(n_bytes) - n_bytes);

    if (at + slot_bytes(n_bytes) > arena.base + arena.high) {
        arena.high = at + slot_bytes(n_bytes) - arena.base;
    }

    shim_memory_close();
    *ptr = at;

    return cudaSuccess;
}


bool
shim_memory_take(size_t n_bytes)
{
    if (n_bytes > shim_options()->memory - arena.used) {
        return false;
    }

    arena.used += n_bytes;

    return true;
}


void
shim_memory_give(size_t n_bytes)
{
    arena.used -= n_bytes;
}


/* kernels that have taken memory */
static std::map<const void *, size_t> loaded;


bool
shim_memory_load(const void *kernel)
{
    const size_t n_bytes = shim_options()->kernel_memory;

    if (n_bytes == 0 || loaded.count(kernel) != 0) {
        return true;
    }

    if (!shim_memory_take(n_bytes)) {
        return false;
    }

    loaded[kernel] = n_bytes;

    return true;
}


void
shim_memory_unload(void)
{
    for (const auto &item : loaded) {
        arena.used -= item.second;
    }

    loaded.clear();
}


static void
forget(char *at, size_t n_bytes)
{
    char *first = arena.base + round_up(at - arena.base, PAGE);
    char *last = arena.base + (at + n_bytes - arena.base) / PAGE * PAGE;

    if (first < last) {
        memset(at, POISON, first - at);
        memset(last, POISON, at + n_bytes - last);
        map_poison(first, last - first);

    } else {
        memset(at, POISON, n_bytes);
    }

    ASAN_POISON_MEMORY_REGION(at, n_bytes);
}


cudaError_t
cudaFree(void *ptr)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (ptr == NULL) {
        return error;
    }

    if (arena.base == NULL || arena.live->count((char *) ptr) == 0) {
        return shim_error(cudaErrorInvalidValue);
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    shim_run_all();

    const size_t n_bytes = (*arena.live)[(char *) ptr];

    shim_memory_open();
    shim_memory_check("cudaFree");
    arena.live->erase((char *) ptr);
    arena.used -= round_up(n_bytes, ALIGNMENT);
    forget((char *) ptr, n_bytes);
    shim_memory_close();

    return error;
}


void
shim_memory_check(const char *after)
{
#ifdef SHIM_ASAN
    (void) after;
#else
    if (arena.base == NULL) {
        return;
    }

    for (auto &item : *arena.live) {
        const unsigned char *end = (const unsigned char *) item.first
                                   + item.second;
        const size_t n = slot_bytes(item.second) - item.second;

        for (size_t i = 0; i < n; i++) {
            if (end[i] != POISON) {
                fprintf(stderr, "cuda-shim: written %zu bytes behind the end "
                        "of %zu bytes of device memory, found after %s\n", i,
                        item.second, after);
                fflush(stderr);
                abort();
            }
        }
    }
#endif
}


cudaError_t
cudaMemGetInfo(size_t *n_free, size_t *total)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    *total = shim_options()->memory;
    *n_free = *total - arena.used;

    return error;
}


/* --- pinned memory of the host --- */

cudaError_t
shim_host_alloc(void **ptr, size_t n_bytes, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    (void) flags;

    if (error != cudaSuccess) {
        return error;
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    arena_create();

    if (shim_fails(SHIM_FAIL_HOST)
        || posix_memalign(ptr, PAGE, n_bytes) != 0)
    {
        return shim_error(cudaErrorMemoryAllocation);
    }

    memset(*ptr, POISON, n_bytes);
    (*arena.pinned)[(const char *) *ptr] = n_bytes;

    return cudaSuccess;
}


cudaError_t
cudaFreeHost(void *ptr)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    if (ptr == NULL) {
        return error;
    }

    if (arena.pinned == NULL || arena.pinned->erase((const char *) ptr) == 0) {
        return shim_error(cudaErrorInvalidValue);
    }

    shim_run_all();
    free(ptr);

    return error;
}


cudaError_t
cudaHostRegister(void *ptr, size_t n_bytes, unsigned flags)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    (void) flags;

    if (error != cudaSuccess) {
        return error;
    }

    arena_create();

    if (shim_is_pinned(ptr, 1)) {
        return shim_error(cudaErrorHostMemoryAlreadyRegistered);
    }

    (*arena.pinned)[(const char *) ptr] = n_bytes;

    return cudaSuccess;
}


cudaError_t
cudaHostUnregister(void *ptr)
{
    shim_entry_t entry;
    const cudaError_t error = shim_call_begin();

    shim_run_all();

    if (arena.pinned == NULL || arena.pinned->erase((const char *) ptr) == 0) {
        return shim_error(cudaErrorHostMemoryNotRegistered);
    }

    return error;
}
