/*
 * Results → records: detokenize, look for stop strings, keep the books.
 *
 * Every function may finish the request; what is finished ignores later calls.
 */

#ifndef ENGINE_EMIT_H
#define ENGINE_EMIT_H

#include "engine/engine.h"


/* A token was drawn: appends it to the sequence and emits what is ready. */
void emit_token(engine_t *engine, request_t *req, const samp_result_t *result);

/* Prompt token `position` of an echoed prompt was scored. */
void emit_prompt_score(engine_t *engine, request_t *req, int position,
                       const samp_result_t *result);

/* Ends the request: flushes what is held, frees its pages, writes DONE. */
void emit_finish(engine_t *engine, request_t *req, uint32_t finish,
                 uint32_t stop_kind, int32_t stop_value);

/* Ends it with an ERROR record (LLM_FAIL_…). */
void emit_fail(engine_t *engine, request_t *req, uint32_t fail,
               const char *param, const char *text);

/* The client has gone: no more records, pages freed. */
void emit_abort(engine_t *engine, request_t *req);

#endif /* ENGINE_EMIT_H */
