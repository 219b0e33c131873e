/*
 * Statements: tree → text.  Scopes, loops and captured blocks.
 *
 * Scopes and loops are taken from the arena, since macros and values may keep
 * pointing to them.
 */

#include "engine/chat/jinja_eval.h"

#include <string.h>

#include "engine/chat/jinja_ops.h"

typedef enum {
    FLOW_NEXT,
    FLOW_BREAK,
    FLOW_CONTINUE,
} flow_t;

static flow_t exec(jinja_t *run, const node_t *node);


jscope_t *
jinja_scope_enter(jinja_t *run, jscope_t *parent)
{
    jscope_t *before = run->scope;
    jscope_t *scope = jinja_alloc(run, sizeof(jscope_t));

    if (scope != NULL) {
        scope->parent = parent;
        run->scope = scope;
    }

    return before;
}


void
jinja_bind(jinja_t *run, const jname_t *name, jv_t value)
{
    jscope_t *scope = run->scope;

    if (run->code != LLM_OK || scope == NULL || name == NULL) {
        return;
    }

    for (size_t i = 0; i < scope->n; i++) {
        if (scope->items[i].name == name) {
            scope->items[i].value = value;
            return;
        }
    }

    if (scope->n == scope->cap) {
        const size_t cap = scope->cap == 0 ? 4 : scope->cap * 2;
        jbinding_t *items = jinja_alloc(run, cap * sizeof(jbinding_t));

        if (items == NULL) {
            return;
        }

        if (scope->n > 0) {
            memcpy(items, scope->items, scope->n * sizeof(jbinding_t));
        }

        scope->items = items;
        scope->cap = cap;
    }

    scope->items[scope->n++] = (jbinding_t){ name, value };
}


static void
set_attribute(jinja_t *run, const node_t *target, const jv_t *value)
{
    const jv_t object = jinja_eval(run, target->a);

    if (run->code != LLM_OK) {
        return;
    }

    if (object.kind != JV_NAMESPACE) {
        jv_fail(run, "cannot assign attribute on non-namespace object");
        return;
    }

    jdict_set(run, object.dict,
              (jv_t){ .kind = JV_STR, .str = &target->name->text }, *value);
}


static void
assign(jinja_t *run, const node_t *target, const jv_t *value)
{
    if (run->code != LLM_OK) {
        return;
    }

    if (target->kind == N_NAME) {
        jinja_bind(run, target->name, *value);
        return;
    }

    if (target->kind == N_ATTR) {
        set_attribute(run, target, value);
        return;
    }

    const jlist_t *items =
        value->kind == JV_UNDEFINED ? NULL : jv_items(run, value);

    if (items == NULL || items->n != target->n_kids) {
        jv_fail(run, "cannot unpack '%s' into %zu names", jv_type(value),
                target->n_kids);
        return;
    }

    for (size_t i = 0; i < target->n_kids; i++) {
        jinja_bind(run, target->kids[i]->name, items->items[i]);
    }
}


jv_t
jinja_capture(jinja_t *run, const node_t *body)
{
    jbuf_t *out = run->out;

    run->out = jbuf_create(run);

    if (run->out != NULL) {
        exec(run, body);
    }

    const jv_t text = jbuf_string(run->out);

    run->out = out;
    return text;
}


/* Looks for the next item that passes the loop's condition. */
static bool
loop_more(jinja_t *run, jloop_t *loop)
{
    const node_t *node = loop->node;

    while (loop->source_at < loop->source->n && jinja_step(run, 1)) {
        const jv_t item = loop->source->items[loop->source_at++];
        jscope_t *before = jinja_scope_enter(run, loop->scope);

        assign(run, node->a, &item);
        const jv_t passes = jinja_eval(run, node->c);
        run->scope = before;

        if (run->code != LLM_OK) {
            return false;
        }

        if (jv_truth(&passes)) {
            return jlist_add(run, loop->kept, item);
        }
    }

    return false;
}


/* Is there an item number at? */
static bool
loop_has(jinja_t *run, jloop_t *loop, size_t at)
{
    while (loop->kept->n <= at) {
        if (loop->kept == loop->source || !loop_more(run, loop)) {
            return false;
        }
    }

    return true;
}


static size_t
loop_length(jinja_t *run, jloop_t *loop)
{
    while (loop->kept != loop->source && loop_more(run, loop)) {
        continue;
    }

    return loop->kept->n;
}


bool
jinja_loop_attr(jinja_t *run, jloop_t *loop, const jstr_t *name, jv_t *value)
{
    const int64_t at = (int64_t) loop->at;

    if (jstr_is(name, "index") || jstr_is(name, "index0")) {
        *value = jv_int(at + jstr_is(name, "index"));

    } else if (jstr_is(name, "first")) {
        *value = jv_bool(at == 0);

    } else if (jstr_is(name, "last")) {
        *value = jv_bool(!loop_has(run, loop, loop->at + 1));

    } else if (jstr_is(name, "length")) {
        *value = jv_int((int64_t) loop_length(run, loop));

    } else if (jstr_is(name, "revindex") || jstr_is(name, "revindex0")) {
        *value = jv_int((int64_t) loop_length(run, loop) - at
                        - jstr_is(name, "revindex0"));

    } else if (jstr_is(name, "previtem")) {
        *value = at > 0 ? loop->kept->items[at - 1] : jv_undefined();

    } else if (jstr_is(name, "nextitem")) {
        *value = loop_has(run, loop, loop->at + 1) ? loop->kept->items[at + 1]
                                                   : jv_undefined();

    } else if (jstr_is(name, "depth") || jstr_is(name, "depth0")) {
        *value = jv_int(jstr_is(name, "depth"));

    } else {
        return false;
    }

    return true;
}


static void
loop_rounds(jinja_t *run, jloop_t *loop)
{
    const node_t *node = loop->node;
    const jv_t self = { .kind = JV_LOOP, .trusted = 1, .loop = loop };

    for (; loop_has(run, loop, loop->at); loop->at++) {
        /* each round has its names for itself */
        jinja_scope_enter(run, loop->scope);
        assign(run, node->a, &loop->kept->items[loop->at]);
        jinja_bind(run, node->name, self);

        if (run->code != LLM_OK || exec(run, node->d) == FLOW_BREAK
            || !jinja_step(run, 1))
        {
            break;
        }
    }
}


static void
exec_for(jinja_t *run, const node_t *node)
{
    jscope_t *before = run->scope;
    const jv_t iterable = jinja_eval(run, node->b);
    jloop_t *loop = jinja_alloc(run, sizeof(jloop_t));
    jlist_t *items = loop != NULL ? jv_items(run, &iterable) : NULL;

    if (items == NULL) {
        return;
    }

    *loop = (jloop_t){ .node = node,
                       .scope = before,
                       .source = items,
                       .changed = { .kind = JV_LOOP } };
    loop->kept = node->c != NULL ? jlist_create(run, 0) : items;

    if (loop->kept == NULL) {
        return;
    }

    loop_rounds(run, loop);
    run->scope = before;

    if (loop->at == 0 && loop->kept->n == 0 && node->e != NULL) {
        jinja_scope_enter(run, before);
        exec(run, node->e);
        run->scope = before;
    }
}


static flow_t
exec_branches(jinja_t *run, const node_t *node)
{
    for (size_t i = 0; i < node->n_kids; i++) {
        const node_t *branch = node->kids[i];
        const jv_t test = jinja_eval(run, branch->a);

        if (run->code != LLM_OK) {
            return FLOW_NEXT;
        }

        if (jv_truth(&test)) {
            return exec(run, branch->b);
        }
    }

    return node->c != NULL ? exec(run, node->c) : FLOW_NEXT;
}


/* Catches a block's text and sends it through its filters. */
static jv_t
capture_filtered(jinja_t *run, const node_t *node)
{
    jscope_t *before = jinja_scope_enter(run, run->scope);
    jv_t text = jinja_capture(run, node->b);

    run->scope = before;

    if (run->code == LLM_OK && node->c != NULL) {
        const jv_t captured = run->captured;

        run->captured = text;
        text = jinja_eval(run, node->c);
        run->captured = captured;
    }

    return text;
}


static void
output(jinja_t *run, const jv_t *v)
{
    if (v->kind == JV_UNDEFINED || run->code != LLM_OK) {
        return;
    }

    const jv_t text = jv_string(run, v);

    if (text.kind == JV_STR) {
        jinja_step_text(run, text.str->len);
        jbuf_part(run->out, text.str, 0, text.str->len);
    }
}


static flow_t
exec_with(jinja_t *run, const node_t *node)
{
    jscope_t *before = run->scope;
    jlist_t *values = jlist_create(run, node->n_kids);

    /* the values do not see one another */
    for (size_t i = 0; i < node->n_kids; i++) {
        jlist_add(run, values, jinja_eval(run, node->kids[i]->b));
    }

    jinja_scope_enter(run, before);

    for (size_t i = 0; i < node->n_kids && run->code == LLM_OK; i++) {
        assign(run, node->kids[i]->a, &values->items[i]);
    }

    const flow_t flow = exec(run, node->b);

    run->scope = before;
    return flow;
}


static flow_t
exec_body(jinja_t *run, const node_t *node)
{
    flow_t flow = FLOW_NEXT;

    for (size_t i = 0;
         i < node->n_kids && flow == FLOW_NEXT && run->code == LLM_OK; i++)
    {
        flow = exec(run, node->kids[i]);
    }

    return flow;
}


static void
exec_simple(jinja_t *run, const node_t *node)
{
    jscope_t *before = run->scope;
    jv_t v;

    switch (node->kind) {
    case N_TEXT:
        jinja_step_text(run, node->text.len);
        jbuf_part(run->out, &node->text, 0, node->text.len);
        break;
    case N_OUTPUT:
        v = jinja_eval(run, node->a);
        output(run, &v);
        break;
    case N_FOR:
        exec_for(run, node);
        break;
    case N_SET:
        v = jinja_eval(run, node->b);
        assign(run, node->a, &v);
        break;
    case N_SETBLOCK:
        v = capture_filtered(run, node);
        assign(run, node->a, &v);
        break;
    case N_MACRO:
        jinja_bind(run, node->name, jinja_make_macro(run, node));
        break;
    case N_CALLBLOCK:
        v = jinja_call_with_block(run, node);
        output(run, &v);
        break;
    case N_FILTERBLOCK:
        v = capture_filtered(run, node);
        output(run, &v);
        break;
    case N_SCOPE:
        jinja_scope_enter(run, before);
        exec(run, node->b);
        run->scope = before;
        break;
    default:
        llm_assert(false);
    }
}


static flow_t
exec(jinja_t *run, const node_t *node)
{
    flow_t flow = FLOW_NEXT;

    if (!jinja_step(run, 1)) {
        return flow;
    }

    if (++run->depth > JINJA_MAX_DEPTH) {
        jv_fail(run, "the template calls itself too deeply");
        run->depth--;
        return flow;
    }

    if (node->kind != N_BODY) {
        run->line = node->line;
    }

    switch (node->kind) {
    case N_BODY:
        flow = exec_body(run, node);
        break;
    case N_BRANCHES:
        flow = exec_branches(run, node);
        break;
    case N_WITH:
        flow = exec_with(run, node);
        break;
    case N_BREAK:
        flow = FLOW_BREAK;
        break;
    case N_CONTINUE:
        flow = FLOW_CONTINUE;
        break;
    default:
        exec_simple(run, node);
    }

    run->depth--;
    return flow;
}


void
jinja_exec(jinja_t *run, const node_t *root)
{
    jinja_scope_enter(run, NULL);

    if (run->code == LLM_OK) {
        exec(run, root);
    }
}
