/*
 * How the port slept: what its last poll() was told and what it said, which
 * no slow machine changes.  Included by the tests of sleeping and waking, which
 * are linked with --wrap for poll.
 */

#ifndef T_UNIT_ENGINE_POLL_H
#define T_UNIT_ENGINE_POLL_H

#include <poll.h>

int __real_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms);

static int poll_ms;
static int poll_found; /* descriptors; 0: the time was up */


int
__wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    poll_ms = timeout_ms;
    poll_found = __real_poll(fds, n, timeout_ms);

    return poll_found;
}

#endif /* T_UNIT_ENGINE_POLL_H */
