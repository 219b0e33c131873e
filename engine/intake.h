/* Request bytes → a queued request. */

#ifndef ENGINE_INTAKE_H
#define ENGINE_INTAKE_H

#include "engine/engine.h"


/* Takes a private copy of the request area, checks it, renders, tokenizes and
 * queues it.  The request is linked into engine->requests; whatever is wrong
 * with it is already an ERROR record in its out buffer (finished is set).
 * NULL: no memory even for that.  Blocks for the time of tokenizing. */
request_t *intake_request(engine_t *engine, const uint8_t *area, uint32_t len,
                          const request_origin_t *from);

/* Frees a finished request. */
void request_destroy(request_t *req);

#endif /* ENGINE_INTAKE_H */
