/* Request bytes → a queued request. */

#ifndef ENGINE_INTAKE_H
#define ENGINE_INTAKE_H

#include "engine/engine.h"


/* Takes a private copy of the request area, checks it, and has it rendered,
 * tokenized and queued: on the intake thread (then intake_collect() goes on
 * with it), or at once where there is none, or the request is short and no
 * other is there.  The request is linked into engine->requests; what is wrong
 * with it becomes an ERROR record in its out buffer (finished is set).  NULL:
 * no memory even for that. */
request_t *intake_request(engine_t *engine, const uint8_t *area, uint32_t len,
                          const request_origin_t *from);

/* Queues, or answers, those that the intake thread has prepared. */
void intake_collect(engine_t *engine);

/* The end of a finished request, which may still be with the intake thread. */
void request_destroy(request_t *req);

/* Frees its memory: for the intake thread, which nobody else may do it for. */
void request_free(request_t *req);

#endif /* ENGINE_INTAKE_H */
