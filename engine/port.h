/* The engine's end of the shared segment. */

#ifndef ENGINE_PORT_H
#define ENGINE_PORT_H

#include <stdbool.h>

#include "engine/engine.h"
#include "engine/ipc/shm.h"
#include "engine/port_fd.h"

typedef struct port_s port_t;

struct port_s {
    llm_shm_t shm;
    int n_workers;
    port_fd_t fds;
    int live;    /* workers alive at the last look */
    bool *dirty; /* [n_workers]: the bell must be rung */
    request_t **by_slot;
    uint64_t checked_ns; /* last look at the descriptors and the workers */
};


/* Maps the segment, becomes its engine: epoch + 1, state LOADING.  err says
 * what is wrong with the descriptors. */
int port_attach(port_t *port, int n_workers, llm_err_t *err);
void port_detach(port_t *port);

/* READY: fills the card and wakes all workers. */
void port_ready(port_t *port, engine_t *engine);

/* The engine could not start: leaves the reason for /health and errors. */
void port_failed(port_t *port, const char *reason);

/* Takes submissions, cancellations and room notices, and what the intake
 * thread has prepared. */
void port_intake(port_t *port, engine_t *engine);

/* Moves records into the slots, frees finished requests, rings the bells. */
void port_flush(port_t *port, engine_t *engine);

/* Looks at the descriptors; with nothing to do, sleeps until one stirs. */
void port_wait(port_t *port, engine_t *engine, bool busy);

/* True when the engine should leave. */
bool port_done(const port_t *port, const engine_t *engine);

#endif /* ENGINE_PORT_H */
