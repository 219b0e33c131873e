/*
 * The engine's ties to nginx outside the segment: doorbell, lifeline, channel,
 * the workers' bells, signals.  The launcher passes the descriptors.
 */

#ifndef ENGINE_PORT_FD_H
#define ENGINE_PORT_FD_H

#include <stdbool.h>

#include "engine/base/status.h"

enum {
    PORT_FD_SEGMENT = 3,
    PORT_FD_DOORBELL = 4, /* eventfd, rung by workers when the engine sleeps,
                             and by the intake thread */
    PORT_FD_LIFELINE = 5, /* pipe: end of file when all of nginx is gone */
    PORT_FD_CHANNEL = 6,  /* nginx's channel: quit, terminate, reopen */
    PORT_FD_BELLS = 7,    /* one eventfd a worker index */
};

/* What they have said so far. */
typedef struct {
    bool lifeline; /* still there */
    bool channel;
    bool quit;      /* leave when drained */
    bool terminate; /* leave now */
} port_fd_t;


/* Catches the signals; err says which descriptor is not open. */
int port_fd_open(port_fd_t *fds, int n_workers, llm_err_t *err);

/* Waits until one of them stirs, timeout_ms at most, and hears it. */
void port_fd_poll(port_fd_t *fds, int timeout_ms);

/* Rings the engine's own doorbell, from another thread of it. */
void port_fd_wake(void);

void port_fd_ring(int worker);
void port_fd_ring_all(int n_workers);

#endif /* ENGINE_PORT_FD_H */
