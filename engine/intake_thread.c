/*
 * The thread that prepares requests, and the two lines before and behind it.
 *
 * Whose a request is: the loop's, but for what prepare.h names of it, which is
 * the thread's while the request stands in the first line or is worked on.
 * The mutex guards the lines and hands this over.  The slot of the request
 * never is: the thread sees a private copy, so a client may leave, a worker
 * may die and the slot may carry another request meanwhile.
 */

#include "engine/intake_thread.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/intake.h"
#include "engine/prepare.h"

enum {
    /* Measured: the hand-over costs 6 us where both threads are awake, 25 to
     * 75 where they are not, a millisecond and more where all cores are busy;
     * tokenizing so many bytes takes a quarter of one. */
    SHORT_BYTES = 8192,
    STACK_BYTES = 8 << 20, /* a template's nesting is measured against this */
    NICE = 5, /* where cores are short, steps go first, but not for ever: the
                 99th percentile of a stream's gaps fell from 40 ms to 25 */
};

struct intake_thread_s {
    engine_t *engine;
    void (*wake)(void);
    pthread_t id;

    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t given;
    list_t waiting; /* not yet prepared */
    list_t ready;   /* prepared */
    request_t *current;
    bool dropped; /* current is to be freed */
    bool stop;
};


/* The next one to prepare, or NULL: leave.  The mutex is held. */
static request_t *
next_request(intake_thread_t *thread)
{
    while (!thread->stop && list_empty(&thread->waiting)) {
        pthread_cond_wait(&thread->given, &thread->mutex);
    }

    if (thread->stop) {
        return NULL;
    }

    request_t *req = list_entry(thread->waiting.next, request_t, turn);

    list_remove(&req->turn);
    thread->current = req;
    thread->dropped = false;

    return req;
}


static void *
thread_main(void *data)
{
    intake_thread_t *thread = data;
    engine_t *engine = thread->engine;
    request_t *req;

    /* Linux: of this thread alone */
    if (nice(NICE) == -1) {
        /* it competes with the steps, then */
    }

    pthread_mutex_lock(&thread->mutex);

    while ((req = next_request(thread)) != NULL) {
        pthread_mutex_unlock(&thread->mutex);
        prepare_request(engine, &engine->prompt, req);
        pthread_mutex_lock(&thread->mutex);

        const bool dropped = thread->dropped;

        thread->current = NULL;

        if (!dropped) {
            list_push_back(&thread->ready, &req->turn);
        }

        pthread_mutex_unlock(&thread->mutex);

        if (dropped) {
            request_free(req);
        } else if (thread->wake != NULL) {
            thread->wake();
        }

        pthread_mutex_lock(&thread->mutex);
    }

    pthread_mutex_unlock(&thread->mutex);

    return NULL;
}


/* Signals are the business of the loop thread. */
static int
start(intake_thread_t *thread)
{
    pthread_attr_t attr;
    sigset_t all, old;

    if (pthread_attr_init(&attr) != 0) {
        return -1;
    }

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_attr_setstacksize(&attr, STACK_BYTES);

    const int rc = pthread_create(&thread->id, &attr, thread_main, thread);

    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);

    if (rc == 0) {
        pthread_setname_np(thread->id, "llm-intake");
    }

    return rc;
}


int
intake_thread_start(engine_t *engine, void (*wake)(void), llm_err_t *err)
{
    intake_thread_t *thread = calloc(1, sizeof(*thread));

    if (thread == NULL) {
        return llm_err_set(err, LLM_NOMEM, NULL, "no memory");
    }

    thread->engine = engine;
    thread->wake = wake;
    list_init(&thread->waiting);
    list_init(&thread->ready);
    pthread_mutex_init(&thread->mutex, NULL);
    pthread_cond_init(&thread->given, NULL);

    const int rc = start(thread);

    if (rc != 0) {
        pthread_cond_destroy(&thread->given);
        pthread_mutex_destroy(&thread->mutex);
        free(thread);
        return llm_err_set(err, LLM_ERROR, NULL,
                           "cannot start the intake thread: %s", strerror(rc));
    }

    engine->intake = thread;

    return LLM_OK;
}


void
intake_thread_stop(engine_t *engine)
{
    intake_thread_t *thread = engine->intake;

    if (thread == NULL) {
        return;
    }

    pthread_mutex_lock(&thread->mutex);
    thread->stop = true;
    pthread_cond_signal(&thread->given);
    pthread_mutex_unlock(&thread->mutex);
    pthread_join(thread->id, NULL);

    llm_assert(list_empty(&thread->waiting) && list_empty(&thread->ready));
    pthread_cond_destroy(&thread->given);
    pthread_mutex_destroy(&thread->mutex);
    free(thread);
    engine->intake = NULL;
}


bool
intake_thread_wants(intake_thread_t *thread, uint32_t len)
{
    if (thread == NULL) {
        return false;
    }

    pthread_mutex_lock(&thread->mutex);

    const bool idle = thread->current == NULL && list_empty(&thread->waiting)
                      && list_empty(&thread->ready);

    pthread_mutex_unlock(&thread->mutex);

    return !idle || len > SHORT_BYTES;
}


void
intake_thread_give(intake_thread_t *thread, request_t *req)
{
    req->preparer = thread;
    pthread_mutex_lock(&thread->mutex);
    list_push_back(&thread->waiting, &req->turn);
    pthread_cond_signal(&thread->given);
    pthread_mutex_unlock(&thread->mutex);
}


request_t *
intake_thread_take(intake_thread_t *thread)
{
    request_t *req = NULL;

    if (thread == NULL) {
        return NULL;
    }

    pthread_mutex_lock(&thread->mutex);

    if (!list_empty(&thread->ready)) {
        req = list_entry(thread->ready.next, request_t, turn);
        list_remove(&req->turn);
        req->preparer = NULL;
    }

    pthread_mutex_unlock(&thread->mutex);

    return req;
}


bool
intake_thread_drop(intake_thread_t *thread, request_t *req)
{
    pthread_mutex_lock(&thread->mutex);

    const bool busy = thread->current == req;

    if (busy) {
        thread->dropped = true;
    } else {
        list_remove(&req->turn);
    }

    pthread_mutex_unlock(&thread->mutex);

    return !busy;
}
