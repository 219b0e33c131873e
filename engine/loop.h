/* The engine's main loop: serve requests from nginx. */

#ifndef ENGINE_LOOP_H
#define ENGINE_LOOP_H

#include "engine/conf.h"


/* Runs until told to leave.  The process's exit status: 0, or 2 when it could
 * not start (nginx then does not try again). */
int loop_serve(const engine_conf_t *conf);

#endif /* ENGINE_LOOP_H */
