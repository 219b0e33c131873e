/*
 * From a fork of nginx's master to the engine program: waits when the engine
 * keeps crashing, arranges the descriptors, gives up root, execs.
 *
 * nginx calls ngx_http_llm_launch in the child, for the first start and for
 * every respawn.  Exit code 2 tells nginx not to try again.
 */

#include "ngx_module/ngx_http_llm_process.h"
#include "ngx_module/ngx_http_llm_gen.h"

#include <ngx_channel.h>

#include <grp.h>
#include <poll.h>
#include <sys/syscall.h>


/* descriptors of the engine: 3 segment, 4 doorbell, 5 lifeline, 6 channel,
 * 7 and up: the workers' eventfds */
#define NGX_HTTP_LLM_FD_FIRST      3
#define NGX_HTTP_LLM_FD_WAKE       7
#define NGX_HTTP_LLM_FD_HIGH       300

/* an engine that lived shorter than this (ns) died young */
#define NGX_HTTP_LLM_YOUNG         10000000000ULL
#define NGX_HTTP_LLM_BACKOFF_MAX   30

/* without a master: how often (ms) to look whether the engine died */
#define NGX_HTTP_LLM_WATCH         200

#define NGX_HTTP_LLM_FATAL         2


static void ngx_http_llm_launch_wait(ngx_cycle_t *cycle,
    ngx_http_llm_gen_t *gen);
static void ngx_http_llm_launch_sleep(ngx_cycle_t *cycle,
    ngx_uint_t seconds);
static void ngx_http_llm_launch_log(ngx_cycle_t *cycle,
    ngx_http_llm_gen_t *gen);
static void ngx_http_llm_launch_fail(ngx_http_llm_gen_t *gen,
    const char *what);
static void ngx_http_llm_watch_handler(ngx_event_t *ev);


static ngx_event_t  ngx_http_llm_watch;


static uint64_t
ngx_http_llm_now(void)
{
    struct timespec  ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);

    return (uint64_t) ts.tv_sec * 1000000000 + ts.tv_nsec;
}


void
ngx_http_llm_launch(ngx_cycle_t *cycle, void *data)
{
    ngx_http_llm_gen_t *gen = data;

    int         fds[NGX_HTTP_LLM_FD_WAKE + LLM_MAX_WORKERS];
    int         i, n;
    sigset_t    set;

    n = NGX_HTTP_LLM_FD_WAKE + gen->shm.geo.n_workers;

    ngx_http_llm_launch_wait(cycle, gen);
    ngx_http_llm_launch_log(cycle, gen);

    fds[3] = gen->shm.fd;
    fds[4] = gen->doorbell;
    fds[5] = gen->lifeline[0];
    fds[6] = ngx_processes[ngx_process_slot].channel[1];

    for (i = NGX_HTTP_LLM_FD_WAKE; i < n; i++) {
        fds[i] = gen->wake[i - NGX_HTTP_LLM_FD_WAKE];
    }

    /* first out of the way of each other, then into place */

    for (i = NGX_HTTP_LLM_FD_FIRST; i < n; i++) {
        fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, NGX_HTTP_LLM_FD_HIGH);
        if (fds[i] == -1) {
            ngx_http_llm_launch_fail(gen, "fcntl(F_DUPFD_CLOEXEC)");
        }
    }

    for (i = NGX_HTTP_LLM_FD_FIRST; i < n; i++) {
        if (dup2(fds[i], i) == -1) {
            ngx_http_llm_launch_fail(gen, "dup2()");
        }
    }

    /* nginx's listening sockets are inherited by exec: close all others */

    if (syscall(SYS_close_range, n, ~0U, 0) == -1) {
        for (i = n; i < (int) sysconf(_SC_OPEN_MAX); i++) {
            (void) close(i);
        }
    }

    /* the master blocks most signals */

    sigemptyset(&set);
    sigprocmask(SIG_SETMASK, &set, NULL);

    if (geteuid() == 0 && gen->user) {
        if (setgid(gen->gid) == -1
            || initgroups(gen->user, gen->gid) == -1
            || setuid(gen->uid) == -1)
        {
            ngx_http_llm_launch_fail(gen, "setuid()");
        }
    }

    /* no parent-death signal: workers may still drain when the master has
     * been killed; the lifeline tells when all of nginx has gone */

    execv(gen->argv[0], gen->argv);

    ngx_http_llm_launch_fail(gen, "execv()");
}


/*
 * After a crash the workers hear of it at once; an engine that keeps dying
 * young is started later and later.  The wait listens to the master.
 */

static void
ngx_http_llm_launch_wait(ngx_cycle_t *cycle, ngx_http_llm_gen_t *gen)
{
    uint64_t                now;
    ngx_uint_t              i, delay;
    llm_header_t           *header;
    ngx_http_llm_launch_t  *launch;

    header = gen->shm.header;
    launch = gen->launch;
    delay = 0;
    now = ngx_http_llm_now();

    /* it may have died before it could write its pid */

    if (launch->started_ns != 0) {

        atomic_store(&header->state, LLM_ENGINE_ABSENT);
        atomic_fetch_add(&header->crashes, 1);

        for (i = 0; i < gen->shm.geo.n_workers; i++) {
            ngx_http_llm_process_ring(gen->wake[i]);
        }

        if (now - launch->started_ns < NGX_HTTP_LLM_YOUNG) {
            launch->quick++;

        } else {
            launch->quick = 0;
        }

        /* the first one at once, then 1, 2, 4 … seconds */

        if (launch->quick > 1) {
            delay = 1 << ngx_min(launch->quick - 2, 5);
            delay = ngx_min(delay, NGX_HTTP_LLM_BACKOFF_MAX);
        }
    }

    if (delay) {
        ngx_log_error(NGX_LOG_ERR, cycle->log, 0,
                      "llm: engine died young %uD times, "
                      "starting it again in %ui s", launch->quick, delay);

        ngx_http_llm_launch_sleep(cycle, delay);
    }

    launch->started_ns = ngx_http_llm_now();

    atomic_store(&launch->pid, ngx_pid);
    atomic_store(&header->state, LLM_ENGINE_LOADING);
}


static void
ngx_http_llm_launch_sleep(ngx_cycle_t *cycle, ngx_uint_t seconds)
{
    uint64_t          now, until;
    ngx_int_t         rc;
    ngx_uint_t        i;
    ngx_channel_t     ch;
    ngx_listening_t  *ls;
    struct pollfd     pfd;

    now = ngx_http_llm_now();
    until = now + (uint64_t) seconds * 1000000000;

    /* a master killed meanwhile must not leave its ports with us */

    ls = cycle->listening.elts;

    for (i = 0; i < cycle->listening.nelts; i++) {
        (void) close(ls[i].fd);
    }

    pfd.fd = ngx_processes[ngx_process_slot].channel[1];
    pfd.events = POLLIN;

    while (now < until) {

        if (poll(&pfd, 1, (int) ((until - now) / 1000000 + 1)) > 0) {

            rc = ngx_read_channel(pfd.fd, &ch, sizeof(ngx_channel_t),
                                  cycle->log);

            if (rc == NGX_ERROR) {
                _exit(0);
            }

            if (rc > 0 && (ch.command == NGX_CMD_QUIT
                           || ch.command == NGX_CMD_TERMINATE))
            {
                _exit(0);
            }

            if (rc > 0 && ch.command == NGX_CMD_OPEN_CHANNEL) {
                (void) close(ch.fd);
            }
        }

        now = ngx_http_llm_now();
    }
}


/*
 * The engine's standard error is its log.  As nginx does when it reopens log
 * files, the file is given to the user the engine runs as; only then is its
 * path passed on, so that the engine can reopen it too.
 */

static void
ngx_http_llm_launch_log(ngx_cycle_t *cycle, ngx_http_llm_gen_t *gen)
{
    int           fd, n;
    char         *path;
    struct stat   st;

    path = gen->log;

    if (path == NULL && cycle->log->file && cycle->log->file->name.len) {
        path = (char *) cycle->log->file->name.data;
    }

    if (path == NULL) {
        return;
    }

    fd = open(path, O_WRONLY|O_APPEND|O_CREAT|O_CLOEXEC, 0644);

    if (fd == -1) {
        ngx_log_error(NGX_LOG_ALERT, cycle->log, ngx_errno,
                      "llm: open() \"%s\" failed", path);
        return;
    }

    if (dup2(fd, STDERR_FILENO) == -1 || fstat(fd, &st) == -1
        || !S_ISREG(st.st_mode))
    {
        (void) close(fd);
        return;
    }

    if (geteuid() == 0 && gen->user && st.st_uid != gen->uid
        && fchown(fd, gen->uid, -1) == -1)
    {
        (void) close(fd);
        return;
    }

    (void) close(fd);

    for (n = 0; gen->argv[n]; n++) { /* void */ }

    (void) asprintf(&gen->argv[n], "log=%s", path);
}


static void
ngx_http_llm_launch_fail(ngx_http_llm_gen_t *gen, const char *what)
{
    llm_header_t  *header;
    ngx_err_t      err;

    err = ngx_errno;

    /* nginx's log descriptors may be gone: standard error is the log */

    (void) dprintf(STDERR_FILENO, "%s [emerg] %d#0: llm: %s failed for \"%s\" "
                   "(%d: %s)\n", ngx_cached_err_log_time.data, (int) getpid(),
                   what, gen->argv[0], err, strerror(err));

    header = gen->shm.header;

    strcpy(header->reason, "the engine program could not be started");
    atomic_store(&header->state, LLM_ENGINE_FAILED);

    _exit(NGX_HTTP_LLM_FATAL);
}


void
ngx_http_llm_process_kick(ngx_cycle_t *cycle)
{
    if (ngx_process == NGX_PROCESS_WORKER) {

        /* any byte from a worker interrupts the master's sigsuspend() */

        if (write(ngx_channel, "", 1) == -1) {
            ngx_log_error(NGX_LOG_ALERT, cycle->log, ngx_errno,
                          "llm: write() to the master failed");
        }

        return;
    }

    ngx_http_llm_watch.handler = ngx_http_llm_watch_handler;
    ngx_http_llm_watch.log = cycle->log;
    ngx_http_llm_watch.data = cycle;
    ngx_http_llm_watch.cancelable = 1;

    ngx_http_llm_watch_handler(&ngx_http_llm_watch);
}


/* master_process off: nobody reaps children, so this timer respawns them */

static void
ngx_http_llm_watch_handler(ngx_event_t *ev)
{
    ngx_cycle_t *cycle = ev->data;

    ngx_int_t                  s;
    ngx_uint_t                 i;
    ngx_process_t             *p;
    ngx_http_llm_gen_t        *gen;
    ngx_http_llm_engine_t    **engines;
    ngx_http_llm_main_conf_t  *lmcf;

    lmcf = ngx_http_cycle_get_module_main_conf(cycle, ngx_http_llm_module);
    engines = lmcf->engines.elts;

    for (i = 0; i < lmcf->engines.nelts; i++) {
        gen = engines[i]->gen;

        if (gen == NULL) {
            continue;
        }

        for (s = 0; s < ngx_last_process; s++) {
            if (ngx_processes[s].data == gen) {
                break;
            }
        }

        if (s == ngx_last_process) {
            (void) ngx_spawn_process(cycle, ngx_http_llm_launch, gen,
                                     strdup("llm engine"),
                                     NGX_PROCESS_RESPAWN);
            continue;
        }

        p = &ngx_processes[s];

        if (p->exited && p->respawn) {
            ngx_close_channel(p->channel, cycle->log);
            (void) ngx_spawn_process(cycle, ngx_http_llm_launch, gen, p->name,
                                     s);
        }
    }

    ngx_add_timer(ev, NGX_HTTP_LLM_WATCH);
}
