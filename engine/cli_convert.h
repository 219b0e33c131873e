/* llm-engine quantize and trim: model files from model files. */

#ifndef ENGINE_CLI_CONVERT_H
#define ENGINE_CLI_CONVERT_H


/* argv[0]: the command.  Their exit status; the cause of a failure has been
 * printed. */
int cli_quantize(int argc, char **argv);
int cli_trim(int argc, char **argv);

#endif /* ENGINE_CLI_CONVERT_H */
