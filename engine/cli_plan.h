/* llm-engine plan: what a machine could serve, without loading anything. */

#ifndef ENGINE_CLI_PLAN_H
#define ENGINE_CLI_PLAN_H


/* argv[0]: "plan".  Its exit status; the cause of a failure has been
 * printed. */
int cli_plan(int argc, char **argv);

#endif /* ENGINE_CLI_PLAN_H */
