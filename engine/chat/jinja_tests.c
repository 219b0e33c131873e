/* Tests ("x is defined") and globals ("range(3)"). */

#include <string.h>
#include <time.h>

#include "engine/chat/jinja_filters.h"
#include "engine/chat/jinja_lex.h"
#include "engine/chat/jinja_ops.h"


static jv_t
test_defined(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind != JV_UNDEFINED);
}


static jv_t
test_undefined(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_UNDEFINED);
}


static jv_t
test_none(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_NONE);
}


static jv_t
test_string(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_STR);
}


static jv_t
test_mapping(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_DICT);
}


static bool
has_length(const jv_t *v)
{
    return v->kind == JV_STR || v->kind == JV_LIST || v->kind == JV_TUPLE
           || v->kind == JV_DICT || v->kind == JV_UNDEFINED;
}


static jv_t
test_iterable(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(has_length(&self) || self.kind == JV_GEN);
}


static jv_t
test_sequence(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(has_length(&self));
}


static jv_t
test_number(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(jv_is_number(&self));
}


static jv_t
test_integer(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_INT);
}


static jv_t
test_float(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_FLOAT);
}


static jv_t
test_boolean(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_BOOL);
}


static jv_t
test_true(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_BOOL && self.b);
}


static jv_t
test_false(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_BOOL && !self.b);
}


static jv_t
test_callable(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_MACRO || self.kind == JV_FUNC
                   || self.kind == JV_METHOD);
}


/* self op argument */
static jv_t
compared(jinja_t *run, const jv_t *self, const jargs_t *args, int op)
{
    const jv_t *other = jarg(args, 0, NULL);

    if (other == NULL) {
        return jv_fail(run, "a test lacks its argument");
    }

    return jv_bool(jinja_compare(run, op, self, other));
}


static jv_t
test_eq(jinja_t *run, jv_t self, const jargs_t *args)
{
    return compared(run, &self, args, JT_EQ);
}


static jv_t
test_ne(jinja_t *run, jv_t self, const jargs_t *args)
{
    return compared(run, &self, args, JT_NE);
}


static jv_t
test_lt(jinja_t *run, jv_t self, const jargs_t *args)
{
    return compared(run, &self, args, JT_LT);
}


static jv_t
test_le(jinja_t *run, jv_t self, const jargs_t *args)
{
    return compared(run, &self, args, JT_LE);
}


static jv_t
test_gt(jinja_t *run, jv_t self, const jargs_t *args)
{
    return compared(run, &self, args, JT_GT);
}


static jv_t
test_ge(jinja_t *run, jv_t self, const jargs_t *args)
{
    return compared(run, &self, args, JT_GE);
}


static jv_t
test_in(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *other = jarg(args, 0, NULL);

    if (other == NULL) {
        return jv_fail(run, "a test lacks its argument");
    }

    return jv_bool(jinja_in(run, &self, other));
}


static jv_t
test_sameas(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *other = jarg(args, 0, NULL);

    return jv_bool(other != NULL && other->kind == self.kind
                   && jv_equal(run, &self, other));
}


static jv_t
remainder_is(jinja_t *run, const jv_t *self, const jv_t *by, int64_t rest)
{
    const jv_t left = jinja_binary(run, JT_MOD, self, by);
    const jv_t wanted = jv_int(rest);

    return jv_bool(run->code == LLM_OK && jv_equal(run, &left, &wanted));
}


static jv_t
test_odd(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t two = jv_int(2);

    (void) args;
    return remainder_is(run, &self, &two, 1);
}


static jv_t
test_even(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t two = jv_int(2);

    (void) args;
    return remainder_is(run, &self, &two, 0);
}


static jv_t
test_divisibleby(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *by = jarg(args, 0, "num");

    if (by == NULL) {
        return jv_fail(run, "a test lacks its argument");
    }

    return remainder_is(run, &self, by, 0);
}


/* lower and upper: the method of the same name on the text. */
static jv_t
by_method(jinja_t *run, const jv_t *self, const char *name)
{
    const jv_t text = jv_string(run, self);
    const jargs_t none = { 0 };

    if (run->code != LLM_OK) {
        return text;
    }

    return jinja_method(JV_STR, name, strlen(name))->call(run, text, &none);
}


static jv_t
test_lower(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return by_method(run, &self, "islower");
}


static jv_t
test_upper(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) args;
    return by_method(run, &self, "isupper");
}


static jv_t
test_filter(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_STR
                   && jinja_filter(self.str->data, self.str->len) != NULL);
}


static jv_t
test_test(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) run;
    (void) args;
    return jv_bool(self.kind == JV_STR
                   && jinja_test(self.str->data, self.str->len) != NULL);
}


static const jrow_t tests[] = {
    { "defined", test_defined },
    { "undefined", test_undefined },
    { "none", test_none },
    { "string", test_string },
    { "mapping", test_mapping },
    { "iterable", test_iterable },
    { "sequence", test_sequence },
    { "number", test_number },
    { "integer", test_integer },
    { "float", test_float },
    { "boolean", test_boolean },
    { "true", test_true },
    { "false", test_false },
    { "callable", test_callable },
    { "equalto", test_eq },
    { "eq", test_eq },
    { "==", test_eq },
    { "ne", test_ne },
    { "!=", test_ne },
    { "lt", test_lt },
    { "lessthan", test_lt },
    { "<", test_lt },
    { "le", test_le },
    { "<=", test_le },
    { "gt", test_gt },
    { "greaterthan", test_gt },
    { ">", test_gt },
    { "ge", test_ge },
    { ">=", test_ge },
    { "in", test_in },
    { "sameas", test_sameas },
    { "odd", test_odd },
    { "even", test_even },
    { "divisibleby", test_divisibleby },
    { "lower", test_lower },
    { "upper", test_upper },
    { "filter", test_filter },
    { "test", test_test },
    { NULL, NULL },
};


const jrow_t *
jinja_test(const char *name, size_t len)
{
    return jinja_row(tests, name, len);
}


static jv_t
global_range(jinja_t *run, jv_t self, const jargs_t *args)
{
    int64_t part[3] = { 0, 0, 1 };

    (void) self;

    if (args->n < 1 || args->n > 3) {
        return jv_fail(run, "range takes one to three integers");
    }

    for (size_t i = 0; i < args->n; i++) {
        part[args->n == 1 ? 1 : i] = jv_to_int(run, &args->pos[i]);
    }

    const int64_t step = part[2];

    if (step == 0) {
        return jv_fail(run, "range's step cannot be zero");
    }

    jlist_t *list = jlist_create(run, 0);
    uint8_t trusted = 1;

    for (size_t i = 0; i < args->n; i++) {
        trusted &= args->pos[i].trusted;
    }

    for (int64_t i = part[0]; step > 0 ? i < part[1] : i > part[1];) {
        jv_t v = jv_int(i);

        v.trusted = trusted;

        if (!jinja_step(run, 1) || !jlist_add(run, list, v)) {
            return jv_undefined();
        }

        if (list->n > JINJA_MAX_RANGE) {
            return jv_fail(run, "a range is longer than %d", JINJA_MAX_RANGE);
        }

        if (__builtin_add_overflow(i, step, &i)) {
            break;
        }
    }

    return jv_list(JV_LIST, list, trusted);
}


/* A dict out of a mapping or pairs, and keywords. */
static jdict_t *
make_dict(jinja_t *run, const jargs_t *args)
{
    jdict_t *dict = jdict_create(run);

    if (args->n > 0 && args->pos[0].kind == JV_DICT) {
        const jdict_t *from = args->pos[0].dict;

        for (size_t i = 0; i < from->n && jinja_step(run, 1); i++) {
            jdict_set(run, dict, from->keys[i], from->values[i]);
        }

    } else if (args->n > 0) {
        const jlist_t *pairs = jv_items(run, &args->pos[0]);

        for (size_t i = 0; pairs != NULL && i < pairs->n; i++) {
            const jv_t *pair = &pairs->items[i];

            if (!jv_is_seq(pair) || pair->list->n != 2) {
                jv_fail(run, "a mapping needs pairs");
                break;
            }

            if (!jinja_step(run, 1)
                || !jdict_set(run, dict, pair->list->items[0],
                              pair->list->items[1]))
            {
                break;
            }
        }
    }

    for (size_t i = 0; i < args->n_kw; i++) {
        jdict_set(run, dict, jv_text(run, args->kw[i].name, args->kw[i].len, 1),
                  args->kw[i].value);
    }

    return dict;
}


static jv_t
global_dict(jinja_t *run, jv_t self, const jargs_t *args)
{
    (void) self;
    return jv_dict(make_dict(run, args), 1);
}


static jv_t
global_namespace(jinja_t *run, jv_t self, const jargs_t *args)
{
    jv_t v = jv_dict(make_dict(run, args), 1);

    (void) self;

    if (v.kind == JV_DICT) {
        v.kind = JV_NAMESPACE;
    }

    return v;
}


static jv_t
global_raise(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *message = jarg(args, 0, "message");
    const jv_t text =
        message != NULL ? jv_string(run, message) : jv_const(run, "");

    (void) self;

    if (run->code != LLM_OK) {
        return text;
    }

    return jv_abort(run, LLM_BADREQ, "%.*s",
                    text.str->len < 400 ? (int) text.str->len : 400,
                    text.str->data);
}


static jv_t
global_strftime_now(jinja_t *run, jv_t self, const jargs_t *args)
{
    const jv_t *format = jarg(args, 0, "format");
    const time_t now = time(NULL);
    char text[256], copy[128];
    struct tm local;

    (void) self;

    if (format == NULL || format->kind != JV_STR
        || format->str->len >= sizeof(copy)
        || memchr(format->str->data, '\0', format->str->len) != NULL)
    {
        return jv_fail(run, "strftime_now needs a short format");
    }

    memcpy(copy, format->str->data, format->str->len);
    copy[format->str->len] = '\0';
    localtime_r(&now, &local);

    const size_t len = strftime(text, sizeof(text), copy, &local);
    jbuf_t *buf = jbuf_create(run);

    jbuf_add(buf, text, len, jstr_trusted(format->str));
    return jbuf_string(buf);
}


static const jrow_t globals[] = {
    { "range", global_range },
    { "dict", global_dict },
    { "namespace", global_namespace },
    { "raise_exception", global_raise },
    { "strftime_now", global_strftime_now },
    { NULL, NULL },
};


const jrow_t *
jinja_global(const char *name, size_t len)
{
    return jinja_row(globals, name, len);
}
