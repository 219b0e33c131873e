/*
 * Device memory: an arena of the host for each device, reserved at the first
 * use.  It is made of private mappings of one small file full of 0xff, so that
 * every byte that was never written is part of a NaN, whatever the size of an
 * allocation.  Behind each allocation is a zone that nobody may touch: poisoned
 * under ASan, compared otherwise.  With the option protect, an arena can be
 * touched only while operations of its device's streams run.
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

typedef struct {
    char *base;
    size_t size;
    size_t high; /* nothing was ever allocated behind it */
    size_t used;
    int file; /* full of POISON */
    int depth; /* of shim_memory_open */
    bool closed;
    std::map<char *, size_t> *live;
} arena_t;

static arena_t arenas[SHIM_DEVICES];

static struct sigaction before;


static size_t
round_up(size_t n, size_t unit)
{
    return (n + unit - 1) / unit * unit;
}


/* The one whose address space this is; NULL: none. */
static arena_t *
arena_of(const void *ptr)
{
    const char *at = (const char *) ptr;

    for (arena_t &arena : arenas) {
        if (arena.base != NULL && at >= arena.base
            && at < arena.base + arena.size)
        {
            return &arena;
        }
    }

    return NULL;
}


static void
map_poison(const arena_t *arena, char *at, size_t n_bytes)
{
    while (n_bytes != 0) {
        const size_t n = n_bytes < CHUNK ? n_bytes : CHUNK;

        if (mmap(at, n, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, arena->file, 0)
            == MAP_FAILED)
        {
            perror("cuda-shim: memory of the device");
            abort();
        }

        at += n;
        n_bytes -= n;
    }
}


/* The current device's. */
static arena_t *
arena_here(void)
{
    arena_t *arena = &arenas[shim_device()];

    if (arena->base != NULL) {
        return arena;
    }

    arena->size = round_up(shim_options()->memory, CHUNK) * ROOM;
    arena->live = new std::map<char *, size_t>;
    arena->file = memfd_create("cuda-shim", MFD_CLOEXEC);

    if (arena->file < 0 || ftruncate(arena->file, CHUNK) != 0) {
        perror("cuda-shim: memory of the device");
        abort();
    }

    void *file = mmap(NULL, CHUNK, PROT_READ | PROT_WRITE, MAP_SHARED,
                      arena->file, 0);
    void *base = mmap(NULL, arena->size, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (file == MAP_FAILED || base == MAP_FAILED) {
        perror("cuda-shim: memory of the device");
        abort();
    }

    memset(file, POISON, CHUNK);
    munmap(file, CHUNK);

    arena->base = (char *) base;
    map_poison(arena, arena->base, arena->size);

    return arena;
}


/* Of this many bytes of the current device this many can be had. */
static size_t
room(const arena_t *arena)
{
    const size_t taken = arena->used + shim_options()->others[shim_device()];
    const size_t memory = shim_options()->memory;

    return memory > taken ? memory - taken : 0;
}


/* --- host code keeps out --- */

/* Operations of some device run. */
static bool
any_open(void)
{
    for (const arena_t &arena : arenas) {
        if (arena.depth > 0) {
            return true;
        }
    }

    return false;
}


static void
on_fault(int number, siginfo_t *info, void *context)
{
    const char *at = (const char *) info->si_addr;
    const arena_t *arena = arena_of(at);

    if (arena != NULL && arena->closed) {
        fprintf(stderr, "cuda-shim: %s touches device memory at offset %zu\n",
                any_open() ? "a kernel of another device" : "host code",
                (size_t) (at - arena->base));
        fflush(stderr);
        abort();
    }

    if ((before.sa_flags & SA_SIGINFO) != 0) {
        before.sa_sigaction(number, info, context);
        return;
    }

    /* again, without us */
    signal(number, SIG_DFL);
}


static void
set_closed(arena_t *arena, bool closed)
{
    static bool watched;

    if (closed && !watched) {
        struct sigaction action = {};

        watched = true;
        action.sa_sigaction = on_fault;
        action.sa_flags = SA_SIGINFO;
        sigaction(SIGSEGV, &action, &before);
    }

    if (arena->high != 0) {
        mprotect(arena->base, round_up(arena->high, PAGE),
                 closed ? PROT_NONE : PROT_READ | PROT_WRITE);
    }

    arena->closed = closed;
}


void
shim_memory_open(int device)
{
    arena_t *arena = &arenas[device];

    if (arena->depth++ == 0 && arena->closed) {
        set_closed(arena, false);
    }
}


void
shim_memory_close(int device)
{
    arena_t *arena = &arenas[device];

    if (--arena->depth == 0 && arena->base != NULL
        && shim_options()->protect)
    {
        set_closed(arena, true);
    }
}


/* --- allocations --- */

bool
shim_on_device(const void *ptr)
{
    const arena_t *arena = arena_of(ptr);

    if (arena == NULL) {
        return false;
    }

    shim_owned((int) (arena - arenas), "memory");

    return true;
}


bool
shim_is_allocated(const void *ptr, size_t n_bytes)
{
    if (!shim_on_device(ptr)) {
        return false;
    }

    const arena_t *arena = arena_of(ptr);
    auto next = arena->live->upper_bound((char *) ptr);

    if (next == arena->live->begin()) {
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
find_room(const arena_t *arena, size_t n_bytes)
{
    if (n_bytes <= arena->size - arena->high) {
        return arena->base + arena->high;
    }

    char *at = arena->base;

    for (auto &item : *arena->live) {
        if (n_bytes <= (size_t) (item.first - at)) {
            return at;
        }

        at = item.first + slot_bytes(item.second);
    }

    return n_bytes <= (size_t) (arena->base + arena->size - at) ? at : NULL;
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

    arena_t *arena = arena_here();

    if (shim_fails(SHIM_FAIL_MALLOC) || n_bytes > room(arena)) {
        return shim_error(cudaErrorMemoryAllocation);
    }

    char *at = find_room(arena, slot_bytes(n_bytes));

    if (at == NULL) {
        return shim_error(cudaErrorMemoryAllocation);
    }

    /* what is behind high is open: the next close will include it */
    shim_memory_open(shim_device());
    (*arena->live)[at] = n_bytes;
    arena->used += round_up(n_bytes, ALIGNMENT);
    shim_live.memory++;
    ASAN_UNPOISON_MEMORY_REGION(at, n_bytes);
    ASAN_POISON_MEMORY_REGION(at + n_bytes, slot_bytes(n_bytes) - n_bytes);

    if (at + slot_bytes(n_bytes) > arena->base + arena->high) {
        arena->high = at + slot_bytes(n_bytes) - arena->base;
    }

    shim_memory_close(shim_device());
    *ptr = at;

    return cudaSuccess;
}


bool
shim_memory_take(size_t n_bytes)
{
    arena_t *arena = &arenas[shim_device()];

    if (n_bytes > room(arena)) {
        return false;
    }

    arena->used += n_bytes;

    return true;
}


void
shim_memory_give(int device, size_t n_bytes)
{
    arenas[device].used -= n_bytes;
}


/* kernels that have taken memory of a device */
static std::map<const void *, size_t> loaded_by[SHIM_DEVICES];


bool
shim_memory_load(const void *kernel)
{
    const size_t n_bytes = shim_options()->kernel_memory;
    auto &loaded = loaded_by[shim_device()];

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
    auto &loaded = loaded_by[shim_device()];

    for (const auto &item : loaded) {
        shim_memory_give(shim_device(), item.second);
    }

    loaded.clear();
}


static void
forget(const arena_t *arena, char *at, size_t n_bytes)
{
    char *first = arena->base + round_up(at - arena->base, PAGE);
    char *last = arena->base + (at + n_bytes - arena->base) / PAGE * PAGE;

    if (first < last) {
        memset(at, POISON, first - at);
        memset(last, POISON, at + n_bytes - last);
        map_poison(arena, first, last - first);

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

    arena_t *arena = shim_on_device(ptr) ? arena_of(ptr) : NULL;

    if (arena == NULL || arena->live->count((char *) ptr) == 0) {
        return shim_error(cudaErrorInvalidValue);
    }

    if (shim_breaks_capture()) {
        return shim_error(cudaErrorStreamCaptureUnsupported);
    }

    shim_run_all();

    const size_t n_bytes = (*arena->live)[(char *) ptr];

    shim_memory_open(shim_device());
    shim_memory_check(shim_device(), "cudaFree");
    arena->live->erase((char *) ptr);
    arena->used -= round_up(n_bytes, ALIGNMENT);
    forget(arena, (char *) ptr, n_bytes);
    shim_live.memory--;
    shim_memory_close(shim_device());

    return error;
}


void
shim_memory_check(int device, const char *after)
{
#ifdef SHIM_ASAN
    (void) device;
    (void) after;
#else
    if (arenas[device].base == NULL) {
        return;
    }

    for (auto &item : *arenas[device].live) {
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
    *n_free = room(&arenas[shim_device()]);

    return error;
}
