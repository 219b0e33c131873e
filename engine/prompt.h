/* Messages, text or given ids → token ids. */

#ifndef ENGINE_PROMPT_H
#define ENGINE_PROMPT_H

#include "engine/engine.h"


/* Text or messages into prompt->ids.  LLM_LIMIT: there are more than max_ids
 * tokens (tokenizing stopped); otherwise err is set. */
int prompt_encode(const engine_t *engine, prompt_t *prompt,
                  const request_t *req, int max_ids, llm_err_t *err);

/* Ids that the client gave into prompt->ids; LLM_LIMIT as above, but all of
 * them are there. */
int prompt_copy(const engine_t *engine, prompt_t *prompt, const request_t *req,
                int max_ids, llm_err_t *err);

#endif /* ENGINE_PROMPT_H */
