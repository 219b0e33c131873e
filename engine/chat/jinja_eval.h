/*
 * Evaluation of a template's tree: expressions (jinja_eval.c), statements
 * (jinja_exec.c) and macros (jinja_macro.c).
 */

#ifndef ENGINE_CHAT_JINJA_EVAL_H
#define ENGINE_CHAT_JINJA_EVAL_H

#include "engine/chat/jinja_parse.h"
#include "engine/chat/jinja_value.h"

typedef struct {
    const jname_t *name;
    jv_t value;
} jbinding_t;

/* Names set in a template, a loop's round or a macro; a few each. */
struct jscope_s {
    jscope_t *parent;
    jbinding_t *items;
    size_t n;
    size_t cap;
};

struct jmacro_s {
    const node_t *node; /* N_MACRO */
    jscope_t *scope;    /* where it was defined */
};

/* A running loop.  Items that pass the loop's "if" are found one ahead, as
 * the body asks for them, because the condition may depend on the body. */
struct jloop_s {
    const node_t *node; /* N_FOR */
    jscope_t *scope;    /* outside the loop */
    jlist_t *source;
    size_t source_at;
    jlist_t *kept; /* the items that pass, so far */
    size_t at;     /* the current one */
    uint32_t nesting;
    jv_t changed; /* what loop.changed() saw last */
};


/* Runs the whole template; its text goes to run->out. */
void jinja_exec(jinja_t *run, const node_t *root);

jv_t jinja_eval(jinja_t *run, const node_t *node);
jv_t jinja_call(jinja_t *run, const jv_t *callee, const jargs_t *args);

/* The arguments of a call, filter or test; false: the run has failed. */
bool jinja_args(jinja_t *run, const node_t *node, jargs_t *args);

/* Enters a new scope inside `parent`; returns the one to go back to. */
jscope_t *jinja_scope_enter(jinja_t *run, jscope_t *parent);

/* Sets a name in the current scope. */
void jinja_bind(jinja_t *run, const jname_t *name, jv_t value);

/* Runs body with its output caught; returns it as a string. */
jv_t jinja_capture(jinja_t *run, const node_t *body);

jv_t jinja_make_macro(jinja_t *run, const node_t *node);

/* node is a N_CALLBLOCK. */
jv_t jinja_call_with_block(jinja_t *run, const node_t *node);
jv_t jinja_call_macro(jinja_t *run, const jmacro_t *macro, const jargs_t *args);

/* loop.name; false if there is no such attribute. */
bool jinja_loop_attr(jinja_t *run, jloop_t *loop, const jstr_t *name,
                     jv_t *value);

#endif /* ENGINE_CHAT_JINJA_EVAL_H */
