/* The commands for people: generate, bench, tokenize, perplexity. */

#ifndef ENGINE_CLI_H
#define ENGINE_CLI_H


/* argv[0]: the command.  Its exit status, or -1 when argv makes no sense (the
 * cause has been printed). */
int cli_main(int argc, char **argv);

#endif /* ENGINE_CLI_H */
