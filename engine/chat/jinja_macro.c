/* Macros: their definition, their parameters, calls with a block. */

#include <string.h>

#include "engine/chat/jinja_eval.h"


jv_t
jinja_make_macro(jinja_t *run, const node_t *node)
{
    jmacro_t *macro = jinja_alloc(run, sizeof(jmacro_t));

    if (macro == NULL) {
        return jv_undefined();
    }

    *macro = (jmacro_t){ node, run->scope };
    return (jv_t){ .kind = JV_MACRO, .trusted = 1, .macro = macro };
}


/* The block is one more keyword, `caller`. */
jv_t
jinja_call_with_block(jinja_t *run, const node_t *node)
{
    const jv_t callee = jinja_eval(run, node->a->a);
    jargs_t args;

    if (run->code != LLM_OK || !jinja_args(run, node->a, &args)) {
        return jv_undefined();
    }

    jkwarg_t *kw = jinja_alloc(run, (args.n_kw + 1) * sizeof(jkwarg_t));

    if (kw == NULL) {
        return jv_undefined();
    }

    if (args.n_kw > 0) {
        memcpy(kw, args.kw, args.n_kw * sizeof(jkwarg_t));
    }

    kw[args.n_kw++] = (jkwarg_t){ "caller", strlen("caller"),
                                  jinja_make_macro(run, node->b) };
    args.kw = kw;

    return jinja_call(run, &callee, &args);
}


/* Is keyword number `at` one of the macro's parameters, or its caller? */
static bool
is_param(const node_t *macro, const jkwarg_t *kw)
{
    for (size_t i = 0; i < macro->n_kids; i++) {
        const jstr_t *name = &macro->kids[i]->name->text;

        if (name->len == kw->len && memcmp(name->data, kw->name, kw->len) == 0)
        {
            return true;
        }
    }

    return kw->len == strlen("caller")
           && memcmp(kw->name, "caller", kw->len) == 0;
}


/* Arguments beyond the parameters: varargs and kwargs, or a mistake. */
static void
bind_rest(jinja_t *run, const node_t *node, const jargs_t *args)
{
    jlist_t *rest = jlist_create(run, 0);
    jdict_t *named = jdict_create(run);
    const jv_t *caller = jarg(args, SIZE_MAX, "caller");

    for (size_t i = node->n_kids; i < args->n; i++) {
        jlist_add(run, rest, args->pos[i]);
    }

    for (size_t i = 0; i < args->n_kw; i++) {
        const jkwarg_t *kw = &args->kw[i];

        if (!is_param(node, kw)) {
            jdict_set(run, named, jv_text(run, kw->name, kw->len, 1),
                      kw->value);
        }
    }

    if (run->code != LLM_OK) {
        return;
    }

    if (!node->flag && (rest->n > 0 || named->n > 0)) {
        jv_fail(run, "the macro '%.*s' has no such parameters",
                node->name->text.len < 60 ? (int) node->name->text.len : 60,
                node->name->text.data);
        return;
    }

    jinja_bind(run, node->c->name, jv_list(JV_TUPLE, rest, 1));
    jinja_bind(run, node->d->name, jv_dict(named, 1));

    if (caller != NULL) {
        jinja_bind(run, node->e->name, *caller);
    }
}


static void
bind_params(jinja_t *run, const node_t *node, const jargs_t *args)
{
    for (size_t i = 0; i < node->n_kids && run->code == LLM_OK; i++) {
        const node_t *param = node->kids[i];
        jstr_t *name = &param->name->text;
        jv_t value = { .kind = JV_UNDEFINED, .str = name };

        if (i < args->n) {
            value = args->pos[i];

        } else {
            const jv_t *given = NULL;

            for (size_t k = 0; k < args->n_kw; k++) {
                if (args->kw[k].len == name->len
                    && memcmp(args->kw[k].name, name->data, name->len) == 0)
                {
                    given = &args->kw[k].value;
                }
            }

            if (given != NULL) {
                value = *given;

            } else if (param->a != NULL) {
                value = jinja_eval(run, param->a);
            }
        }

        jinja_bind(run, param->name, value);
    }
}


jv_t
jinja_call_macro(jinja_t *run, const jmacro_t *macro, const jargs_t *args)
{
    const node_t *node = macro->node;
    const uint32_t line = run->line;
    jscope_t *before = jinja_scope_enter(run, macro->scope);
    jv_t text = jv_undefined();

    bind_rest(run, node, args);
    bind_params(run, node, args);

    if (run->code == LLM_OK) {
        text = jinja_capture(run, node->b);
    }

    run->scope = before;
    run->line = line;

    return text;
}
