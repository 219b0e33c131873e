/*
 * Expressions: tree → value.  Failure is sticky, so a branch only has to be
 * safe, not right, once the run has failed.
 */

#include "engine/chat/jinja_eval.h"

#include <string.h>

#include "engine/chat/jinja_filters.h"
#include "engine/chat/jinja_ops.h"

/* Names set in the template, then the variables of the run, then globals. */
static jv_t
lookup(jinja_t *run, const node_t *node)
{
    const jname_t *name = node->name;

    for (const jscope_t *s = run->scope; s != NULL; s = s->parent) {
        for (size_t i = s->n; i-- > 0;) {
            if (s->items[i].name == name) {
                return s->items[i].value;
            }
        }
    }

    const jv_t *v =
        jdict_find(run, run->globals, name->text.data, name->text.len);

    if (v != NULL) {
        return *v;
    }

    const jrow_t *row = jinja_global(name->text.data, name->text.len);

    if (row != NULL) {
        return (jv_t){ .kind = JV_FUNC, .trusted = 1, .func = row };
    }

    return (jv_t){ .kind = JV_UNDEFINED,
                   .origin = JV_UNDEFINED,
                   .str = (jstr_t *) &name->text };
}


/* *list or **dict among the arguments. */
static bool
spread(jinja_t *run, const node_t *arg, const jv_t *v, jlist_t *pos,
       jlist_t *kw)
{
    if (arg->kind == N_STAR) {
        const jlist_t *items = jv_items(run, v);

        for (size_t i = 0; items != NULL && i < items->n; i++) {
            jlist_add(run, pos, items->items[i]);
        }

        return run->code == LLM_OK;
    }

    if (v->kind != JV_DICT) {
        jv_fail(run, "'%s' after ** is no mapping", jv_type(v));
        return false;
    }

    for (size_t i = 0; i < v->dict->n; i++) {
        if (v->dict->keys[i].kind != JV_STR) {
            jv_fail(run, "keywords must be strings");
        }

        jlist_add(run, kw, v->dict->keys[i]);
        jlist_add(run, kw, v->dict->values[i]);
    }

    return run->code == LLM_OK;
}


static bool
gather(jinja_t *run, const node_t *node, jlist_t *pos, jlist_t *kw)
{
    for (size_t i = 0; i < node->n_kids; i++) {
        const node_t *arg = node->kids[i];
        const bool wrapped =
            arg->kind == N_ARG || arg->kind == N_STAR || arg->kind == N_STARS;
        const jv_t v = jinja_eval(run, wrapped ? arg->a : arg);

        if (run->code != LLM_OK) {
            return false;
        }

        if (arg->kind == N_ARG) {
            jlist_add(run, kw,
                      (jv_t){ .kind = JV_STR, .str = &arg->name->text });
            jlist_add(run, kw, v);

        } else if (!wrapped) {
            jlist_add(run, pos, v);

        } else if (!spread(run, arg, &v, pos, kw)) {
            return false;
        }
    }

    return run->code == LLM_OK;
}


bool
jinja_args(jinja_t *run, const node_t *node, jargs_t *args)
{
    jlist_t pos = { 0 }, kw = { 0 };

    *args = (jargs_t){ 0 };

    if (node->n_kids == 0) {
        return run->code == LLM_OK;
    }

    if (!gather(run, node, &pos, &kw)) {
        return false;
    }

    args->pos = pos.items;
    args->n = pos.n;
    args->n_kw = kw.n / 2;

    if (kw.n == 0) {
        return true;
    }

    jkwarg_t *named = jinja_alloc(run, args->n_kw * sizeof(jkwarg_t));

    for (size_t i = 0; named != NULL && i < args->n_kw; i++) {
        const jstr_t *name = kw.items[2 * i].str;

        named[i] = (jkwarg_t){ name->data, name->len, kw.items[2 * i + 1] };
    }

    args->kw = named;
    return named != NULL;
}


jv_t
jinja_call(jinja_t *run, const jv_t *callee, const jargs_t *args)
{
    switch (callee->kind) {
    case JV_METHOD:
        return callee->method->row->call(run, callee->method->self, args);
    case JV_FUNC:
        return callee->func->call(run, jv_undefined(), args);
    case JV_MACRO:
        return jinja_call_macro(run, callee->macro, args);
    case JV_UNDEFINED:
        return jinja_is_undefined(run, callee);
    default:
        return jv_fail(run, "'%s' is not callable", jv_type(callee));
    }
}


static jv_t
eval_call(jinja_t *run, const node_t *node)
{
    const jv_t callee = jinja_eval(run, node->a);
    jargs_t args;

    if (run->code != LLM_OK || !jinja_args(run, node, &args)) {
        return jv_undefined();
    }

    return jinja_call(run, &callee, &args);
}


/* A filter or a test. */
static jv_t
eval_row(jinja_t *run, const node_t *node)
{
    const jv_t self = jinja_eval(run, node->a);
    jargs_t args;

    if (run->code != LLM_OK || !jinja_args(run, node, &args)) {
        return jv_undefined();
    }

    if (node->row == NULL) {
        return jv_fail(run, "there is no %s named '%.*s'",
                       node->kind == N_FILTER ? "filter" : "test",
                       node->name->text.len < 60 ? (int) node->name->text.len
                                                 : 60,
                       node->name->text.data);
    }

    return node->row->call(run, self, &args);
}


static jv_t
eval_chain(jinja_t *run, const node_t *node)
{
    jv_t left = jinja_eval(run, node->a);
    bool holds = true;

    for (size_t i = 0; holds && i < node->n_kids; i++) {
        const jv_t right = jinja_eval(run, node->kids[i]->a);

        if (run->code != LLM_OK) {
            return jv_undefined();
        }

        holds = jinja_compare(run, node->kids[i]->op, &left, &right);
        left = right;
    }

    return jv_bool(holds);
}


static jv_t
eval_list(jinja_t *run, const node_t *node)
{
    jlist_t *list = jlist_create(run, node->n_kids);

    for (size_t i = 0; list != NULL && i < node->n_kids; i++) {
        if (!jlist_add(run, list, jinja_eval(run, node->kids[i]))) {
            return jv_undefined();
        }
    }

    return jv_list(node->kind == N_LIST ? JV_LIST : JV_TUPLE, list, 1);
}


static jv_t
eval_dict(jinja_t *run, const node_t *node)
{
    jdict_t *dict = jdict_create(run);

    for (size_t i = 0; dict != NULL && i < node->n_kids; i += 2) {
        const jv_t key = jinja_eval(run, node->kids[i]);
        const jv_t value = jinja_eval(run, node->kids[i + 1]);

        if (!jdict_set(run, dict, key, value)) {
            return jv_undefined();
        }
    }

    return jv_dict(dict, 1);
}


static jv_t
eval_slice(jinja_t *run, const node_t *node)
{
    const jv_t object = jinja_eval(run, node->a);
    const node_t *const parts[] = { node->b, node->c, node->d };
    jv_t part[3];

    for (int i = 0; i < 3; i++) {
        part[i] = parts[i] != NULL ? jinja_eval(run, parts[i]) : jv_none();
    }

    if (run->code != LLM_OK) {
        return jv_undefined();
    }

    return jinja_slice(run, &object, part);
}


static jv_t
eval_binary(jinja_t *run, const node_t *node)
{
    const jv_t a = jinja_eval(run, node->a);
    const jv_t b = jinja_eval(run, node->b);

    if (run->code != LLM_OK) {
        return jv_undefined();
    }

    return node->kind == N_ITEM ? jinja_item(run, &a, &b)
                                : jinja_binary(run, node->op, &a, &b);
}


static jv_t
eval_unary(jinja_t *run, const node_t *node)
{
    const jv_t a = jinja_eval(run, node->a);

    if (run->code != LLM_OK) {
        return jv_undefined();
    }

    switch (node->kind) {
    case N_NOT:
        return jv_bool(!jv_truth(&a));
    case N_NEG:
        return jinja_negate(run, &a);
    case N_POS:
        return jv_is_number(&a)
                   ? a
                   : jv_fail(run, "+ does not work on '%s'", jv_type(&a));
    default:
        return jinja_attr(run, &a, &node->name->text);
    }
}


static jv_t
eval_logic(jinja_t *run, const node_t *node)
{
    if (node->kind == N_IF) {
        const jv_t test = jinja_eval(run, node->b);

        if (run->code != LLM_OK) {
            return jv_undefined();
        }

        if (jv_truth(&test)) {
            return jinja_eval(run, node->a);
        }

        return node->c != NULL ? jinja_eval(run, node->c) : jv_undefined();
    }

    const jv_t a = jinja_eval(run, node->a);

    if (run->code != LLM_OK || jv_truth(&a) == (node->kind == N_OR)) {
        return a;
    }

    return jinja_eval(run, node->b);
}


static jv_t
eval_node(jinja_t *run, const node_t *node)
{
    switch (node->kind) {
    case N_CONST:
        return node->constant;
    case N_CAPTURED:
        return run->captured;
    case N_NAME:
        return lookup(run, node);
    case N_ITEM:
    case N_BINARY:
        return eval_binary(run, node);
    case N_SLICE:
        return eval_slice(run, node);
    case N_CALL:
        return eval_call(run, node);
    case N_FILTER:
    case N_TEST:
        return eval_row(run, node);
    case N_AND:
    case N_OR:
    case N_IF:
        return eval_logic(run, node);
    case N_CHAIN:
        return eval_chain(run, node);
    case N_LIST:
    case N_TUPLE:
        return eval_list(run, node);
    case N_DICT:
        return eval_dict(run, node);
    default:
        return eval_unary(run, node);
    }
}


jv_t
jinja_eval(jinja_t *run, const node_t *node)
{
    if (!jinja_step(run, 1)) {
        return jv_undefined();
    }

    if (++run->depth > JINJA_MAX_DEPTH) {
        jv_fail(run, "the template calls itself too deeply");
        run->depth--;
        return jv_undefined();
    }

    const jv_t v = eval_node(run, node);

    run->depth--;
    return v;
}
