/* llm-engine synth: a model file of a given shape, with weights from a seed. */

#ifndef ENGINE_CLI_SYNTH_H
#define ENGINE_CLI_SYNTH_H


/* argv[0]: "synth".  Its exit status; the cause of a failure has been
 * printed. */
int cli_synth(int argc, char **argv);

#endif /* ENGINE_CLI_SYNTH_H */
