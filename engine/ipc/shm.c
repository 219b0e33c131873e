/*
 * The shared segment, see shm.h: created by nginx's master, attached by the
 * engine, inherited by the workers.
 *
 * The geometry is turned into offsets once, with arithmetic that notices an
 * overflow, and only ever from the checked private copy.  Seals keep the
 * file's size as it is: nobody can shrink it under the other processes.
 */

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/ipc/msg.h"
#include "engine/ipc/shm.h"

#define SHM_MAGIC 0x316d68736d6c6c6eull /* "nllmshm1" */
#define SHM_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Areas begin on pages, so that each can be given back alone. */
enum { AREA_ALIGN = 4096, LINE = 64 };

/* Above these a 32-bit offset or length could wrap. */
enum {
    AREA_MAX = 1 << 30,
    LOG_MAX = 1 << 28,
    OUT_MIN = 16384, /* a power of two that holds a record of any length */
};

_Static_assert(OUT_MIN >= LLM_RECORD_MAX + 4, "a record fits");
_Static_assert(sizeof(_Atomic uint32_t) == 4, "atomics are plain words");
_Static_assert(sizeof(_Atomic uint64_t) == 8, "atomics are plain words");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "locks do not work between processes");


static int fail(char *err, size_t err_len, const char *format, ...)
    __attribute__((format(printf, 3, 4)));


static int
fail(char *err, size_t err_len, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(err, err_len, format, args);
    va_end(args);

    return -1;
}


/* --- layout --- */

/* A running total that remembers an overflow. */
typedef struct {
    size_t at;
    bool overflow;
} sum_t;


static void
sum_add(sum_t *s, size_t n, size_t bytes)
{
    size_t more;

    if (__builtin_mul_overflow(n, bytes, &more)
        || __builtin_add_overflow(s->at, more, &s->at))
    {
        s->overflow = true;
    }
}


static size_t
sum_align(sum_t *s, size_t align)
{
    sum_add(s, 1, -s->at & (align - 1));
    return s->at;
}


static size_t
area_round(size_t bytes)
{
    return (bytes + AREA_ALIGN - 1) & ~((size_t) AREA_ALIGN - 1);
}


/* Bytes of all areas of one slot; each area is padded to pages. */
static size_t
slot_stride(const llm_geometry_t *geo)
{
    return area_round(geo->request_bytes) + area_round(geo->out_bytes)
           + area_round(geo->log_tokens * sizeof(int32_t));
}


static bool
power_of_two(uint32_t x)
{
    return x != 0 && (x & (x - 1)) == 0;
}


static const char *
geometry_fault(const llm_geometry_t *geo)
{
    if (geo->n_workers < 1 || geo->n_workers > LLM_MAX_WORKERS) {
        return "the number of workers is not within 1 and 256";
    }

    if (!power_of_two(geo->slots_per_worker)
        || geo->slots_per_worker > LLM_MAX_SLOTS)
    {
        return "the slots per worker are not a power of two up to 4096";
    }

    if (geo->request_bytes < sizeof(llm_request_t)
        || geo->request_bytes > AREA_MAX) {
        return "the request area is too small or above 1 GiB";
    }

    if (!power_of_two(geo->out_bytes) || geo->out_bytes < OUT_MIN
        || geo->out_bytes > AREA_MAX)
    {
        return "the output ring is not a power of two from 16 KiB to 1 GiB";
    }

    if (geo->log_tokens < 1 || geo->log_tokens > LOG_MAX) {
        return "the token log is empty or too long";
    }

    return NULL;
}


/* Sets geo, size and offsets of shm. */
static int
lay_out(const llm_geometry_t *geo, llm_shm_t *shm, char *err, size_t err_len)
{
    const char *fault = geometry_fault(geo);

    if (fault != NULL) {
        return fail(err, err_len, "shared segment: %s", fault);
    }

    size_t n_slots = (size_t) geo->n_workers * geo->slots_per_worker;
    sum_t s = { 0, false };

    shm->geo = *geo;

    sum_add(&s, 1, sizeof(llm_header_t));
    sum_align(&s, LINE);
    sum_add(&s, 1, sizeof(llm_stats_t));
    shm->off_workers = sum_align(&s, LINE);
    sum_add(&s, geo->n_workers, sizeof(llm_worker_t));
    shm->off_cells = sum_align(&s, LINE);
    sum_add(&s, geo->n_workers,
            sizeof(uint64_t)
                * (llm_shm_submit_cap(shm) + llm_shm_ready_cap(shm)));
    shm->off_slots = sum_align(&s, LINE);
    sum_add(&s, n_slots, sizeof(llm_slot_t));
    shm->off_areas = sum_align(&s, AREA_ALIGN);
    sum_add(&s, n_slots, slot_stride(geo));

    /* a file's size is signed */
    if (s.overflow || s.at > (size_t) INT64_MAX) {
        return fail(err, err_len, "shared segment: its size overflows");
    }

    shm->size = s.at;

    return 0;
}


/* Mixed from this build's idea of the structs, so that a forgotten change of
 * LLM_SHM_ABI is noticed, and from the geometry. */
static uint32_t
layout_print(const llm_geometry_t *geo)
{
    const size_t parts[] = {
        sizeof(llm_header_t),
        sizeof(llm_stats_t),
        sizeof(llm_worker_t),
        sizeof(llm_slot_t),
        sizeof(llm_card_t),
        sizeof(llm_request_t),
        geo->n_workers,
        geo->slots_per_worker,
        geo->request_bytes,
        geo->out_bytes,
        geo->log_tokens,
        offsetof(llm_header_t, card),
        offsetof(llm_header_t, idle),
        offsetof(llm_slot_t, done),
        offsetof(llm_slot_t, out),
    };
    uint32_t print = 0;

    for (size_t i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
        print = print * 31 + (uint32_t) parts[i];
    }

    return print;
}


static int
map(int fd, llm_shm_t *shm, char *err, size_t err_len)
{
    void *base =
        mmap(NULL, shm->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (base == MAP_FAILED) {
        return fail(err, err_len, "shared segment: mmap of %zu bytes: %s",
                    shm->size, strerror(errno));
    }

    size_t off_stats = (sizeof(llm_header_t) + LINE - 1) & ~(LINE - 1ul);

    shm->fd = fd;
    shm->base = base;
    shm->header = base;
    shm->stats = (llm_stats_t *) (void *) ((char *) base + off_stats);

    return 0;
}


int
llm_shm_create(const llm_geometry_t *geo, llm_shm_t *shm, char *err,
               size_t err_len)
{
    memset(shm, 0, sizeof(*shm));
    shm->fd = -1;

    if (lay_out(geo, shm, err, err_len) != 0) {
        return -1;
    }

    int fd = memfd_create("llm", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd == -1) {
        return fail(err, err_len, "shared segment: memfd_create: %s",
                    strerror(errno));
    }

    if (ftruncate(fd, (off_t) shm->size) != 0
        || fcntl(fd, F_ADD_SEALS, SHM_SEALS) != 0)
    {
        fail(err, err_len, "shared segment: a size of %zu bytes: %s", shm->size,
             strerror(errno));
        close(fd);
        return -1;
    }

    if (map(fd, shm, err, err_len) != 0) {
        close(fd);
        return -1;
    }

    /* the rest is zero and stays untouched: rings empty, indexes free */
    shm->header->magic = SHM_MAGIC;
    shm->header->abi = LLM_SHM_ABI;
    shm->header->geo_bytes = sizeof(llm_geometry_t);
    shm->header->layout = layout_print(geo);
    shm->header->geo = *geo;

    return 0;
}


/* Copies what the creator wrote: read once, then checked. */
static int
read_header(int fd, llm_header_t *header, size_t *size, char *err,
            size_t err_len)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);

    if (fstat(fd, &st) != 0) {
        return fail(err, err_len, "shared segment: fstat: %s", strerror(errno));
    }

    if (seals == -1
        || (seals & (F_SEAL_SHRINK | F_SEAL_GROW))
               != (F_SEAL_SHRINK | F_SEAL_GROW))
    {
        return fail(err, err_len, "shared segment: not a sealed memfd");
    }

    if (pread(fd, header, sizeof(*header), 0) != (ssize_t) sizeof(*header)) {
        return fail(err, err_len, "shared segment: shorter than its header");
    }

    *size = (size_t) st.st_size;

    return 0;
}


int
llm_shm_attach(int fd, llm_shm_t *shm, char *err, size_t err_len)
{
    llm_header_t header;
    size_t size = 0;

    memset(shm, 0, sizeof(*shm));
    shm->fd = -1;

    if (read_header(fd, &header, &size, err, err_len) != 0) {
        return -1;
    }

    if (header.magic != SHM_MAGIC) {
        return fail(err, err_len, "shared segment: wrong magic number");
    }

    if (header.abi != LLM_SHM_ABI || header.geo_bytes != sizeof(llm_geometry_t)
        || header.layout != layout_print(&header.geo))
    {
        return fail(err, err_len,
                    "shared segment: made by another version (ABI %u, ours "
                    "is %u): install module and engine of one build",
                    (unsigned) header.abi, (unsigned) LLM_SHM_ABI);
    }

    if (lay_out(&header.geo, shm, err, err_len) != 0) {
        return -1;
    }

    if (shm->size != size) {
        return fail(err, err_len,
                    "shared segment: %zu bytes where its geometry needs %zu",
                    size, shm->size);
    }

    return map(fd, shm, err, err_len);
}


void
llm_shm_detach(llm_shm_t *shm)
{
    if (shm->base != NULL) {
        munmap(shm->base, shm->size);
    }

    memset(shm, 0, sizeof(*shm));
    shm->fd = -1;
}


/* --- where things are --- */

static void *
at(const llm_shm_t *shm, size_t off)
{
    return (char *) shm->base + off;
}


llm_worker_t *
llm_shm_worker(const llm_shm_t *shm, uint32_t worker)
{
    return at(shm, shm->off_workers + worker * sizeof(llm_worker_t));
}


uint32_t
llm_shm_submit_cap(const llm_shm_t *shm)
{
    return 4 * shm->geo.slots_per_worker;
}


uint32_t
llm_shm_ready_cap(const llm_shm_t *shm)
{
    return 2 * shm->geo.slots_per_worker;
}


uint64_t *
llm_shm_submit_cells(const llm_shm_t *shm, uint32_t worker)
{
    size_t cells = (size_t) llm_shm_submit_cap(shm) + llm_shm_ready_cap(shm);

    return at(shm, shm->off_cells + worker * cells * sizeof(uint64_t));
}


uint64_t *
llm_shm_ready_cells(const llm_shm_t *shm, uint32_t worker)
{
    return llm_shm_submit_cells(shm, worker) + llm_shm_submit_cap(shm);
}


static size_t
slot_number(const llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    return (size_t) worker * shm->geo.slots_per_worker + slot;
}


llm_slot_t *
llm_shm_slot(const llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    return at(shm, shm->off_slots
                       + slot_number(shm, worker, slot) * sizeof(llm_slot_t));
}


uint8_t *
llm_shm_request(const llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    return at(shm,
              shm->off_areas
                  + slot_number(shm, worker, slot) * slot_stride(&shm->geo));
}


uint8_t *
llm_shm_out(const llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    return llm_shm_request(shm, worker, slot)
           + area_round(shm->geo.request_bytes);
}


int32_t *
llm_shm_log(const llm_shm_t *shm, uint32_t worker, uint32_t slot)
{
    return (int32_t *) (void *) (llm_shm_out(shm, worker, slot)
                                 + area_round(shm->geo.out_bytes));
}


void
llm_slot_trim(llm_shm_t *shm, uint32_t worker, uint32_t slot, uint32_t keep)
{
    long page = sysconf(_SC_PAGESIZE);
    size_t mask = (page > 0 ? (size_t) page : AREA_ALIGN) - 1;
    size_t area =
        (size_t) (llm_shm_request(shm, worker, slot) - (uint8_t *) shm->base);
    size_t from = (area + keep + mask) & ~mask;
    size_t to = (area + area_round(shm->geo.request_bytes)) & ~mask;

    /* failing keeps the memory, and harms nothing else */
    if (from < to) {
        (void) madvise(at(shm, from), to - from, MADV_REMOVE);
    }
}
