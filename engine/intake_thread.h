/*
 * The thread on which long requests are prepared, so that nobody's next token
 * waits for the tokens of a prompt.
 *
 * First in, first out: a request that comes while others are being prepared
 * waits behind them, however short it is, so the order of arrival stays the
 * order of submission.  Called by intake.c on the loop thread.
 */

#ifndef ENGINE_INTAKE_THREAD_H
#define ENGINE_INTAKE_THREAD_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/engine.h"

typedef struct intake_thread_s intake_thread_t;


/* Starts engine->intake.  From then on a request that is not short is
 * prepared there, and wake() is called on that thread whenever there is
 * something for intake_collect(); NULL: nobody sleeps. */
int intake_thread_start(engine_t *engine, void (*wake)(void), llm_err_t *err);

/* Waits for the request at hand, if any; all of them are destroyed already.
 * Nothing to do where none was started. */
void intake_thread_stop(engine_t *engine);

/* Is a request of len bytes to be prepared there?  No: it may be prepared at
 * once, on the loop thread and with the same scratch.  thread may be NULL. */
bool intake_thread_wants(intake_thread_t *thread, uint32_t len);

/* Hands req over: until it comes back, what prepare.h names of it is the
 * thread's. */
void intake_thread_give(intake_thread_t *thread, request_t *req);

/* The next that is prepared, or NULL.  thread may be NULL. */
request_t *intake_thread_take(intake_thread_t *thread);

/* Nobody wants req any more.  True: it is the caller's to free; false: it is
 * being worked on, and freed afterwards. */
bool intake_thread_drop(intake_thread_t *thread, request_t *req);

#endif /* ENGINE_INTAKE_THREAD_H */
