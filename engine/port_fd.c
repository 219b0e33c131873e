/*
 * Doorbell, lifeline, channel, bells and signals.  Called by port.c.
 *
 * nginx tells its children to leave over the channel; signals mean the same
 * and come from whoever starts the engine by hand.
 */

#include "engine/port_fd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/log.h"

/* nginx's ngx_channel_t and its commands (src/os/unix/ngx_channel.h) */
typedef struct {
    uint64_t command;
    int32_t pid;
    int64_t slot;
    int32_t fd;
} channel_msg_t;

enum { CHANNEL_QUIT = 3, CHANNEL_TERMINATE = 4, CHANNEL_REOPEN = 5 };

static volatile sig_atomic_t signal_quit;
static volatile sig_atomic_t signal_terminate;


static void
on_signal(int signo)
{
    if (signo == SIGQUIT) {
        signal_quit = 1;
    } else {
        signal_terminate = 1;
    }
}


static void
catch_signals(void)
{
    const struct sigaction action = { .sa_handler = on_signal };

    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGQUIT, &action, NULL);
    signal(SIGPIPE, SIG_IGN);
}


int
port_fd_open(port_fd_t *fds, int n_workers, llm_err_t *err)
{
    *fds = (port_fd_t){ .lifeline = true, .channel = true };

    catch_signals();

    /* poll() would return at once for a descriptor that is not open, for
     * ever */
    for (int fd = PORT_FD_SEGMENT; fd < PORT_FD_BELLS + n_workers; fd++) {
        if (fcntl(fd, F_GETFD) == -1) {
            return llm_err_set(err, LLM_ERROR, NULL,
                               "descriptor %d is not open (llm-engine serve "
                               "is started by nginx)",
                               fd);
        }
    }

    return LLM_OK;
}


void
port_fd_ring(int worker)
{
    const uint64_t one = 1;

    if (write(PORT_FD_BELLS + worker, &one, sizeof(one)) == -1) {
        /* a full counter has been rung already */
    }
}


void
port_fd_wake(void)
{
    const uint64_t one = 1;

    if (write(PORT_FD_DOORBELL, &one, sizeof(one)) == -1) {
        /* as above */
    }
}


void
port_fd_ring_all(int n_workers)
{
    for (int w = 0; w < n_workers; w++) {
        port_fd_ring(w);
    }
}


/* Did a read find the other end closed, or the descriptor unusable? */
static bool
is_over(ssize_t n)
{
    return n == 0 || (n == -1 && errno != EAGAIN && errno != EINTR);
}


static void
read_channel(port_fd_t *fds)
{
    channel_msg_t msg;
    char control[CMSG_SPACE(sizeof(int))];
    struct iovec iov = { &msg, sizeof(msg) };
    struct msghdr head = { .msg_iov = &iov,
                           .msg_iovlen = 1,
                           .msg_control = control,
                           .msg_controllen = sizeof(control) };

    const ssize_t n =
        recvmsg(PORT_FD_CHANNEL, &head, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    if (is_over(n)) {
        fds->channel = false;
        return;
    }

    if (n < (ssize_t) sizeof(msg.command)) {
        return;
    }

    /* the master announces each new worker with a descriptor */
    struct cmsghdr *c = CMSG_FIRSTHDR(&head);

    if (c != NULL && c->cmsg_type == SCM_RIGHTS) {
        int fd;
        memcpy(&fd, CMSG_DATA(c), sizeof(fd));
        close(fd);
    }

    switch (msg.command) {
    case CHANNEL_QUIT:
        fds->quit = true;
        break;
    case CHANNEL_TERMINATE:
        fds->terminate = true;
        break;
    case CHANNEL_REOPEN:
        log_reopen();
        break;
    }
}


static void
hear(port_fd_t *fds, int timeout_ms)
{
    uint64_t count;
    char byte;

    struct pollfd poll_fds[3] = {
        { .fd = PORT_FD_DOORBELL, .events = POLLIN },
        { .fd = fds->lifeline ? PORT_FD_LIFELINE : -1, .events = POLLIN },
        { .fd = fds->channel ? PORT_FD_CHANNEL : -1, .events = POLLIN },
    };

    if (poll(poll_fds, 3, timeout_ms) <= 0) {
        return;
    }

    if ((poll_fds[0].revents & POLLIN)
        && read(PORT_FD_DOORBELL, &count, sizeof(count)) == -1)
    {
        /* somebody else's edge */
    }

    if (poll_fds[1].revents && is_over(read(PORT_FD_LIFELINE, &byte, 1))) {
        fds->lifeline = false;
    }

    if (poll_fds[2].revents) {
        read_channel(fds);
    }
}


void
port_fd_poll(port_fd_t *fds, int timeout_ms)
{
    hear(fds, timeout_ms);

    fds->quit |= signal_quit != 0;
    fds->terminate |= signal_terminate != 0;
}
