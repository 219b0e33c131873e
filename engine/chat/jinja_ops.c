/* Operators, attributes and items. */

#include "engine/chat/jinja_ops.h"

#include <math.h>
#include <string.h>

#include "engine/chat/jinja_eval.h"
#include "engine/chat/jinja_filters.h"
#include "engine/chat/jinja_lex.h"
#include "engine/chat/jinja_parse.h"
#include "engine/chat/jinja_text.h"


jv_t
jinja_is_undefined(jinja_t *run, const jv_t *v)
{
    const int len = v->str == NULL     ? 0
                    : v->str->len < 80 ? (int) v->str->len
                                       : 80;
    const char *name = len > 0 ? v->str->data : "";

    if (v->origin == JV_UNDEFINED) {
        return jv_fail(run, "'%.*s' is undefined", len, name);
    }

    const jv_t object = { .kind = v->origin };

    return jv_fail(run, "'%s' has no attribute '%.*s'", jv_type(&object), len,
                   name);
}


static jv_t
mismatch(jinja_t *run, const char *op, const jv_t *a, const jv_t *b)
{
    if (a->kind == JV_UNDEFINED || b->kind == JV_UNDEFINED) {
        return jinja_is_undefined(run, a->kind == JV_UNDEFINED ? a : b);
    }

    return jv_fail(run, "%s does not work between '%s' and '%s'", op,
                   jv_type(a), jv_type(b));
}


static jv_t
too_large(jinja_t *run)
{
    return jv_fail(run, "an integer is too large");
}


static int64_t
integer(const jv_t *v)
{
    return v->kind == JV_BOOL ? v->b : v->i;
}


static jv_t
power(jinja_t *run, int64_t base, int64_t exponent)
{
    int64_t result = 1;
    bool over = false;

    if (exponent < 0) {
        if (base == 0) {
            return jv_fail(run, "division by zero");
        }
        return jv_float(pow((double) base, (double) exponent));
    }

    while (exponent > 0 && !over) {
        if (exponent & 1) {
            over = __builtin_mul_overflow(result, base, &result);
        }

        exponent >>= 1;

        if (exponent > 0 && !over) {
            over = __builtin_mul_overflow(base, base, &base);
        }
    }

    return over ? too_large(run) : jv_int(result);
}


static jv_t
divide(jinja_t *run, int op, int64_t x, int64_t y)
{
    if (y == 0) {
        return jv_fail(run, "division by zero");
    }

    if (op == JT_DIV) {
        return jv_float((double) x / (double) y);
    }

    if (y == -1) { /* the one quotient that may overflow */
        int64_t negated;

        if (op == JT_MOD) {
            return jv_int(0);
        }
        return __builtin_sub_overflow((int64_t) 0, x, &negated)
                   ? too_large(run)
                   : jv_int(negated);
    }

    int64_t quotient = x / y, rest = x % y;

    if (rest != 0 && (rest < 0) != (y < 0)) {
        quotient--;
        rest += y;
    }

    return jv_int(op == JT_MOD ? rest : quotient);
}


static jv_t
integers(jinja_t *run, int op, int64_t x, int64_t y)
{
    int64_t result = 0;
    bool over = false;

    switch (op) {
    case JT_ADD:
        over = __builtin_add_overflow(x, y, &result);
        break;
    case JT_SUB:
        over = __builtin_sub_overflow(x, y, &result);
        break;
    case JT_MUL:
        over = __builtin_mul_overflow(x, y, &result);
        break;
    case JT_POW:
        return power(run, x, y);
    default:
        return divide(run, op, x, y);
    }

    return over ? too_large(run) : jv_int(result);
}


static jv_t
floats(jinja_t *run, int op, double x, double y)
{
    switch (op) {
    case JT_ADD:
        return jv_float(x + y);
    case JT_SUB:
        return jv_float(x - y);
    case JT_MUL:
        return jv_float(x * y);
    case JT_POW:
        return jv_float(pow(x, y));
    default:
        break;
    }

    if (y == 0) {
        return jv_fail(run, "division by zero");
    }

    if (op == JT_DIV) {
        return jv_float(x / y);
    }

    if (op == JT_FLOORDIV) {
        return jv_float(floor(x / y));
    }

    const double rest = fmod(x, y);

    return jv_float(rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest);
}


static jv_t
join_lists(jinja_t *run, const jv_t *a, const jv_t *b)
{
    const size_t n = a->list->n + b->list->n;
    jlist_t *list = jinja_step(run, n) ? jlist_create(run, n) : NULL;

    for (size_t i = 0; list != NULL && i < n; i++) {
        jlist_add(run, list,
                  i < a->list->n ? a->list->items[i]
                                 : b->list->items[i - a->list->n]);
    }

    return jv_list(a->kind, list, a->trusted & b->trusted);
}


/* A string or a list, n times. */
static jv_t
repeat(jinja_t *run, const jv_t *v, int64_t n)
{
    if (n < 0) {
        n = 0;
    }

    if (v->kind == JV_STR) {
        const jstr_t *s = v->str;
        jbuf_t *buf = jbuf_create(run);

        for (int64_t i = 0; i < n && s->len > 0; i++) {
            if (!jinja_step_text(run, s->len)) {
                return jv_undefined();
            }
            jbuf_part(buf, s, 0, s->len);
        }

        return jbuf_string(buf);
    }

    jlist_t *list = jlist_create(run, 0);

    for (int64_t i = 0; i < n && v->list->n > 0; i++) {
        for (size_t k = 0; k < v->list->n; k++) {
            if (!jinja_step(run, 1) || !jlist_add(run, list, v->list->items[k]))
            {
                return jv_undefined();
            }
        }
    }

    return jv_list(v->kind, list, v->trusted);
}


static bool
repeatable(const jv_t *v)
{
    return v->kind == JV_STR || v->kind == JV_LIST || v->kind == JV_TUPLE;
}


static bool
countable(const jv_t *v)
{
    return v->kind == JV_INT || v->kind == JV_BOOL;
}


jv_t
jinja_binary(jinja_t *run, int op, const jv_t *a, const jv_t *b)
{
    if (op == JT_TILDE) {
        const jv_t x = jv_string(run, a), y = jv_string(run, b);

        return run->code == LLM_OK ? jv_concat(run, x.str, y.str) : x;
    }

    if (jv_is_number(a) && jv_is_number(b)) {
        jv_t v = a->kind == JV_FLOAT || b->kind == JV_FLOAT
                     ? floats(run, op, jv_double(a), jv_double(b))
                     : integers(run, op, integer(a), integer(b));

        v.trusted = a->trusted & b->trusted;
        return v;
    }

    if (op == JT_ADD && a->kind == JV_STR && b->kind == JV_STR) {
        return jv_concat(run, a->str, b->str);
    }

    if (op == JT_ADD && a->kind == b->kind
        && (a->kind == JV_LIST || a->kind == JV_TUPLE))
    {
        return join_lists(run, a, b);
    }

    if (op == JT_MUL && repeatable(a) && countable(b)) {
        return repeat(run, a, integer(b));
    }

    if (op == JT_MUL && repeatable(b) && countable(a)) {
        return repeat(run, b, integer(a));
    }

    if (op == JT_MOD && a->kind == JV_STR) {
        return text_percent(run, a->str, b);
    }

    return mismatch(run, jinja_token_name((jtok_kind_t) op), a, b);
}


jv_t
jinja_negate(jinja_t *run, const jv_t *a)
{
    if (a->kind == JV_FLOAT) {
        jv_t v = jv_float(-a->f);
        v.trusted = a->trusted;
        return v;
    }

    if (!countable(a)) {
        return mismatch(run, "-", a, a);
    }

    const jv_t zero = jv_int(0);

    return jinja_binary(run, JT_SUB, &zero, a);
}


size_t
jinja_find(const jstr_t *s, const jstr_t *needle, size_t at)
{
    if (at > s->len || needle->len > s->len - at) {
        return SIZE_MAX;
    }

    if (needle->len == 0) {
        return at;
    }

    const char *p =
        memmem(s->data + at, s->len - at, needle->data, needle->len);

    return p == NULL ? SIZE_MAX : (size_t) (p - s->data);
}


size_t
jinja_find_last(jinja_t *run, const jstr_t *s, const jstr_t *needle, size_t end)
{
    /* comparing at every place costs up to one length times the other */
    if (!jinja_step(run, (1 + end / 1024) * (1 + needle->len / 64))) {
        return SIZE_MAX;
    }

    for (size_t at = end; at >= needle->len; at--) {
        if (memcmp(s->data + at - needle->len, needle->data, needle->len) == 0)
        {
            return at - needle->len;
        }

        if (at == 0) {
            break;
        }
    }

    return SIZE_MAX;
}


bool
jinja_in(jinja_t *run, const jv_t *a, const jv_t *b)
{
    if (b->kind == JV_STR) {
        if (a->kind != JV_STR) {
            mismatch(run, "in", a, b);
            return false;
        }

        return jinja_step_text(run, b->str->len)
               && jinja_find(b->str, a->str, 0) != SIZE_MAX;
    }

    if (b->kind == JV_DICT) {
        return jdict_get(run, b->dict, a) != NULL;
    }

    const jlist_t *list = jv_items(run, b);

    for (size_t i = 0; list != NULL && i < list->n; i++) {
        if (!jinja_step(run, 1)) {
            return false;
        }

        if (jv_equal(run, a, &list->items[i])) {
            return true;
        }
    }

    return false;
}


bool
jinja_compare(jinja_t *run, int op, const jv_t *a, const jv_t *b)
{
    switch (op) {
    case JT_EQ:
        return jv_equal(run, a, b);
    case JT_NE:
        return !jv_equal(run, a, b);
    case OP_IN:
        return jinja_in(run, a, b);
    case OP_NOT_IN:
        return !jinja_in(run, a, b);
    default:
        break;
    }

    if (a->kind == JV_UNDEFINED || b->kind == JV_UNDEFINED) {
        mismatch(run, "order", a, b);
        return false;
    }

    /* a comparison with not-a-number is false, whichever */
    if ((a->kind == JV_FLOAT && isnan(a->f))
        || (b->kind == JV_FLOAT && isnan(b->f)))
    {
        return false;
    }

    const int order = jv_compare(run, a, b);

    switch (op) {
    case JT_LT:
        return order < 0;
    case JT_LE:
        return order <= 0;
    case JT_GT:
        return order > 0;
    default:
        return order >= 0;
    }
}


static jv_t
bound(jinja_t *run, const jv_t *object, const jrow_t *row)
{
    jmethod_t *method = jinja_alloc(run, sizeof(jmethod_t));

    if (method == NULL) {
        return jv_undefined();
    }

    *method = (jmethod_t){ *object, row };
    return (jv_t){ .kind = JV_METHOD, .trusted = 1, .method = method };
}


jv_t
jinja_attr(jinja_t *run, const jv_t *object, jstr_t *name)
{
    const jrow_t *row;
    const jv_t *v;

    if (object->kind == JV_UNDEFINED) {
        return jinja_is_undefined(run, object);
    }

    if (object->kind == JV_LOOP) {
        jv_t attribute;

        if (jinja_loop_attr(run, object->loop, name, &attribute)) {
            return attribute;
        }
    }

    if (object->kind == JV_MACRO && jstr_is(name, "name")) {
        return (jv_t){ .kind = JV_STR,
                       .str = &object->macro->node->name->text };
    }

    row = jinja_method((jv_kind_t) object->kind, name->data, name->len);

    if (row != NULL) {
        return bound(run, object, row);
    }

    if (object->kind == JV_DICT || object->kind == JV_NAMESPACE) {
        v = jdict_find(run, object->dict, name->data, name->len);

        if (v != NULL) {
            return *v;
        }
    }

    return jv_missing(object, name);
}


/* An index counted from the end when negative; SIZE_MAX: outside. */
static size_t
position(int64_t at, size_t n)
{
    if (at < 0) {
        at += (int64_t) n;
    }

    return at < 0 || at >= (int64_t) n ? SIZE_MAX : (size_t) at;
}


static jv_t
item_at(jinja_t *run, const jv_t *object, const jv_t *key)
{
    const size_t n =
        object->kind == JV_STR ? jstr_chars(object->str) : object->list->n;
    const size_t at = position(integer(key), n);

    if (at == SIZE_MAX) {
        const jv_t name = jv_string(run, key);

        return jv_missing(object, name.kind == JV_STR ? name.str : NULL);
    }

    if (object->kind != JV_STR) {
        return object->list->items[at];
    }

    if (!jinja_step(run, n == object->str->len ? 1 : 1 + n / 128)) {
        return jv_undefined();
    }

    const size_t from = jstr_offset(object->str, at);
    const size_t to =
        at + 1 == n ? object->str->len : jstr_offset(object->str, at + 1);

    return jv_sub(run, object->str, from, to);
}


jv_t
jinja_item(jinja_t *run, const jv_t *object, const jv_t *key)
{
    if (object->kind == JV_UNDEFINED) {
        return jinja_is_undefined(run, object);
    }

    if (object->kind == JV_DICT) {
        const jv_t *v = jdict_get(run, object->dict, key);

        if (v != NULL) {
            return *v;
        }

    } else if (countable(key)
               && (object->kind == JV_STR || object->kind == JV_LIST
                   || object->kind == JV_TUPLE))
    {
        return item_at(run, object, key);
    }

    if (key->kind == JV_STR) {
        return jinja_attr(run, object, key->str);
    }

    const jv_t name = jv_string(run, key);

    return jv_missing(object, name.kind == JV_STR ? name.str : NULL);
}
