/* What the engine takes from a GGUF besides the weights. */

#ifndef ENGINE_LOAD_H
#define ENGINE_LOAD_H

#include "engine/engine.h"
#include "engine/model/gguf.h"


/* Tokenizer, special token texts, chat template (conf->chat_template, else the
 * file's, else ChatML). */
int load_text(engine_t *engine, const gguf_t *gguf, llm_err_t *err);

#endif /* ENGINE_LOAD_H */
