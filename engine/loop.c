/*
 * The engine on one page:
 *
 *   intake   what workers submitted → template → tokens → queue; for all but
 *            short prompts a thread does the middle of it (intake_thread.h)
 *   step     schedule → run the model over the mixed batch → sample → emit
 *   flush    records → slots, bells
 *   wait     sleep on the doorbell when there is nothing to do
 */

#include "engine/loop.h"

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/engine.h"
#include "engine/intake_thread.h"
#include "engine/port.h"
#include "engine/tally.h"

enum { EXIT_FAILED = 1, EXIT_NO_RESPAWN = 2 };


int
loop_serve(const engine_conf_t *conf)
{
    llm_err_t err = { .text = "" };
    engine_t *engine = NULL;
    port_t port;

    if (port_attach(&port, conf->workers, &err) != LLM_OK) {
        log_write(LOG_EMERG, "llm_engine \"%s\": %s", conf->name, err.text);
        return EXIT_NO_RESPAWN;
    }

    if (engine_open(conf, &engine, &err) != LLM_OK
        || intake_thread_start(engine, port_fd_wake, &err) != LLM_OK)
    {
        log_write(LOG_EMERG, "llm_engine \"%s\": %s", conf->name, err.text);
        port_failed(&port, err.text);
        engine_close(engine);
        port_detach(&port);
        return EXIT_NO_RESPAWN;
    }

    port_ready(&port, engine);

    while (!port_done(&port, engine)) {
        uint64_t since = clock_now_ns();

        port_intake(&port, engine);
        tally_phase(engine, LLM_PHASE_INTAKE, &since);

        const bool busy = engine_step(engine);

        /* without tidying up: a device that has failed may not answer, and
         * what the step's sequences hold is void */
        if (engine->failed) {
            return EXIT_FAILED;
        }

        since = clock_now_ns();
        port_flush(&port, engine);
        tally_phase(engine, LLM_PHASE_FLUSH, &since);
        port_wait(&port, engine, busy);
    }

    log_write(LOG_NOTICE, "llm_engine \"%s\": leaving%s", conf->name,
              port.fds.terminate ? ", terminated" : "");

    engine_close(engine);
    port_detach(&port);

    return 0;
}
