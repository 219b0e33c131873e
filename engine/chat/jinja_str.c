/*
 * Strings of a running template: borrowed or built, each byte with its mark.
 */

#include "engine/chat/jinja_value.h"

#include <string.h>


jv_t
jv_text(jinja_t *run, const char *data, size_t len, uint8_t mark)
{
    jstr_t *s = jinja_alloc(run, sizeof(jstr_t));

    if (s == NULL) {
        return jv_undefined();
    }

    *s = (jstr_t){
        .data = data, .len = len, .n_chars = SIZE_MAX, .uniform = mark
    };

    return (jv_t){ .kind = JV_STR, .str = s };
}


jv_t
jv_const(jinja_t *run, const char *text)
{
    return jv_text(run, text, strlen(text), 1);
}


jv_t
jv_sub(jinja_t *run, const jstr_t *s, size_t from, size_t to)
{
    const jv_t v = jv_text(run, s->data + from, to - from, s->uniform);

    if (v.kind == JV_STR && s->marks != NULL) {
        v.str->marks = s->marks + from;
    }

    return v;
}


uint8_t
jstr_mark(const jstr_t *s, size_t at)
{
    return s->marks != NULL ? s->marks[at] : s->uniform;
}


bool
jstr_trusted(const jstr_t *s)
{
    if (s->marks == NULL) {
        return s->uniform != 0 || s->len == 0;
    }

    return s->len == 0 || memchr(s->marks, 0, s->len) == NULL;
}


bool
jstr_is(const jstr_t *s, const char *text)
{
    return strlen(text) == s->len && memcmp(text, s->data, s->len) == 0;
}


size_t
jstr_chars(jstr_t *s)
{
    if (s->n_chars == SIZE_MAX) {
        size_t n = 0;

        for (size_t i = 0; i < s->len; i++) {
            n += ((uint8_t) s->data[i] & 0xc0) != 0x80;
        }

        s->n_chars = n;
    }

    return s->n_chars;
}


size_t
jstr_offset(jstr_t *s, size_t at)
{
    size_t i = 0;

    if (jstr_chars(s) == s->len) {
        return at;
    }

    while (i < s->len) {
        if (((uint8_t) s->data[i] & 0xc0) != 0x80 && at-- == 0) {
            break;
        }
        i++;
    }

    return i;
}


jbuf_t *
jbuf_create(jinja_t *run)
{
    jbuf_t *buf = jinja_alloc(run, sizeof(jbuf_t));

    if (buf != NULL) {
        buf->run = run;
    }

    return buf;
}


static bool
buf_reserve(jbuf_t *buf, size_t more)
{
    if (buf == NULL || buf->run->code != LLM_OK) {
        return false;
    }

    if (more > JINJA_MAX_TEXT || buf->len > JINJA_MAX_TEXT - more) {
        jv_fail(buf->run, "a text is longer than %d MB", JINJA_MAX_TEXT >> 20);
        return false;
    }

    if (buf->cap - buf->len >= more) {
        return true;
    }

    size_t cap = buf->cap < 32 ? 64 : buf->cap * 2;

    if (cap < buf->len + more) {
        cap = buf->len + more;
    }

    /* text and marks side by side */
    char *data = jinja_alloc(buf->run, 2 * cap);

    if (data == NULL) {
        return false;
    }

    if (buf->len > 0) {
        memcpy(data, buf->data, buf->len);
        memcpy(data + cap, buf->marks, buf->len);
    }

    buf->data = data;
    buf->marks = (uint8_t *) data + cap;
    buf->cap = cap;

    return true;
}


void
jbuf_add(jbuf_t *buf, const char *data, size_t len, uint8_t mark)
{
    if (len == 0 || !buf_reserve(buf, len)) {
        return;
    }

    memcpy(buf->data + buf->len, data, len);
    memset(buf->marks + buf->len, mark, len);
    buf->len += len;
}


void
jbuf_part(jbuf_t *buf, const jstr_t *s, size_t from, size_t len)
{
    if (s->marks == NULL) {
        jbuf_add(buf, s->data + from, len, s->uniform);
        return;
    }

    if (len == 0 || !buf_reserve(buf, len)) {
        return;
    }

    memcpy(buf->data + buf->len, s->data + from, len);
    memcpy(buf->marks + buf->len, s->marks + from, len);
    buf->len += len;
}


jv_t
jbuf_string(jbuf_t *buf)
{
    if (buf == NULL || buf->run->code != LLM_OK) {
        return jv_undefined();
    }

    const jv_t v = jv_text(buf->run, buf->len ? buf->data : "", buf->len, 1);

    if (v.kind == JV_STR && buf->len > 0) {
        v.str->marks = buf->marks;
        v.str->grow = buf;
    }

    return v;
}


jv_t
jv_concat(jinja_t *run, const jstr_t *a, const jstr_t *b)
{
    jbuf_t *buf = a->grow;

    if (b->len == 0 || a->len == 0) {
        const jstr_t *s = b->len == 0 ? a : b;
        return (jv_t){ .kind = JV_STR, .str = (jstr_t *) s };
    }

    if (!jinja_step_text(run, b->len)) {
        return jv_undefined();
    }

    if (buf == NULL || buf->data != a->data || buf->len != a->len) {
        buf = jbuf_create(run);

        if (!jinja_step_text(run, a->len) || !buf_reserve(buf, a->len + b->len))
        {
            return jv_undefined();
        }

        jbuf_part(buf, a, 0, a->len);
    }

    jbuf_part(buf, b, 0, b->len);
    return jbuf_string(buf);
}
