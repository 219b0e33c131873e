/* Text functions that filters and methods share. */

#include "engine/chat/jinja_text.h"

#include <string.h>

#include <utf8proc.h>

#include "engine/base/utf8.h"
#include "engine/chat/jinja_ops.h"


bool
text_is_space(uint32_t cp)
{
    return cp == ' ' || (cp >= 0x09 && cp <= 0x0d) || (cp >= 0x1c && cp <= 0x1f)
           || cp == 0x85 || cp == 0xa0 || cp == 0x1680
           || (cp >= 0x2000 && cp <= 0x200a) || cp == 0x2028 || cp == 0x2029
           || cp == 0x202f || cp == 0x205f || cp == 0x3000;
}


/* The character at byte `at`; returns its length. */
static size_t
char_at(const jstr_t *s, size_t at, uint32_t *cp)
{
    const int n = utf8_decode((const uint8_t *) s->data + at, s->len - at, cp);

    if (n > 0) {
        return (size_t) n;
    }

    *cp = (uint8_t) s->data[at];
    return 1;
}


static size_t
char_before(const jstr_t *s, size_t at, uint32_t *cp)
{
    size_t from = at - 1;

    while (from > 0 && at - from < 4
           && ((uint8_t) s->data[from] & 0xc0) == 0x80) {
        from--;
    }

    const size_t n = char_at(s, from, cp);

    return from + n == at ? n : 1;
}


static bool
strips(const jstr_t *chars, uint32_t cp)
{
    if (chars == NULL) {
        return text_is_space(cp);
    }

    for (size_t i = 0; i < chars->len;) {
        uint32_t other;

        i += char_at(chars, i, &other);
        if (other == cp) {
            return true;
        }
    }

    return false;
}


jv_t
text_strip(jinja_t *run, const jstr_t *s, const jstr_t *chars, int sides)
{
    size_t from = 0, to = s->len;
    uint32_t cp;

    while ((sides & TEXT_LEFT) && from < to) {
        const size_t n = char_at(s, from, &cp);

        if (!strips(chars, cp)) {
            break;
        }
        from += n;
    }

    while ((sides & TEXT_RIGHT) && to > from) {
        const size_t n = char_before(s, to, &cp);

        if (!strips(chars, cp)) {
            break;
        }
        to -= n;
    }

    jinja_step(run, 1 + (s->len - (to - from)) / 64);
    return jv_sub(run, s, from, to);
}


static bool
is_cased(uint32_t cp)
{
    const utf8proc_category_t category =
        utf8proc_category((utf8proc_int32_t) cp);

    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL
           || category == UTF8PROC_CATEGORY_LT;
}


/* Does a new word begin behind prev? */
static bool
begins_word(text_case_t how, uint32_t prev)
{
    if (how == TEXT_TITLE) {
        return !is_cased(prev);
    }

    return text_is_space(prev)
           || (prev < 0x80 && prev != 0 && strchr("-({[<", (int) prev));
}


static void
add_case(jbuf_t *buf, uint32_t cp, int to, uint8_t mark)
{
    uint8_t text[4];

    if (cp == 0xdf && to != TEXT_LOWER) {
        jbuf_add(buf, to == TEXT_UPPER ? "SS" : "Ss", 2, mark);
        return;
    }

    const utf8proc_int32_t c = (utf8proc_int32_t) cp;
    const utf8proc_int32_t mapped = to == TEXT_UPPER   ? utf8proc_toupper(c)
                                    : to == TEXT_LOWER ? utf8proc_tolower(c)
                                                       : utf8proc_totitle(c);

    jbuf_add(buf, (const char *) text,
             (size_t) utf8_encode((uint32_t) mapped, text), mark);
}


jv_t
text_case(jinja_t *run, jstr_t *s, text_case_t how)
{
    jbuf_t *buf = jbuf_create(run);
    bool first = true;

    if (!jinja_step(run, 1 + s->len / 64)) {
        return jv_undefined();
    }

    for (size_t i = 0; i < s->len && run->code == LLM_OK;) {
        uint32_t cp;
        const uint8_t mark = jstr_mark(s, i);
        int to = how;

        i += char_at(s, i, &cp);

        if (how >= TEXT_CAPITALIZE) {
            /* the filter upper-cases, the others title-case */
            to = !first                    ? TEXT_LOWER
                 : how == TEXT_JINJA_TITLE ? TEXT_UPPER
                                           : TEXT_TITLE;
            first = how != TEXT_CAPITALIZE && begins_word(how, cp);
        }

        add_case(buf, cp, to, mark);
    }

    return jbuf_string(buf);
}


/* An empty needle stands before every character and at the end. */
static jv_t
replace_empty(jinja_t *run, const jstr_t *s, const jstr_t *to, int64_t count)
{
    jbuf_t *buf = jbuf_create(run);

    for (size_t i = 0; i <= s->len && run->code == LLM_OK;) {
        uint32_t cp;

        if (count-- != 0 && jinja_step(run, 1)) {
            jbuf_part(buf, to, 0, to->len);
        }

        if (i == s->len) {
            break;
        }

        const size_t n = char_at(s, i, &cp);

        jbuf_part(buf, s, i, n);
        i += n;
    }

    return jbuf_string(buf);
}


jv_t
text_replace(jinja_t *run, const jstr_t *s, const jstr_t *from,
             const jstr_t *to, int64_t count)
{
    size_t at = 0, hit;

    if (from->len == 0) {
        return replace_empty(run, s, to, count);
    }

    if (!jinja_step_text(run, s->len) || count == 0
        || jinja_find(s, from, 0) == SIZE_MAX)
    {
        return jv_sub(run, s, 0, s->len);
    }

    jbuf_t *buf = jbuf_create(run);

    while (run->code == LLM_OK && count-- != 0
           && (hit = jinja_find(s, from, at)) != SIZE_MAX)
    {
        jinja_step_text(run, from->len + to->len);
        jbuf_part(buf, s, at, hit - at);
        jbuf_part(buf, to, 0, to->len);
        at = hit + from->len;
    }

    jbuf_part(buf, s, at, s->len - at);
    return jbuf_string(buf);
}


static jv_t
split_space(jinja_t *run, const jstr_t *s, int64_t max)
{
    jlist_t *list = jlist_create(run, 0);
    size_t at = 0;
    uint32_t cp;

    for (;;) {
        while (at < s->len) {
            const size_t n = char_at(s, at, &cp);

            if (!text_is_space(cp)) {
                break;
            }
            at += n;
        }

        if (at >= s->len || !jinja_step(run, 1)) {
            break;
        }

        size_t end = at;

        if (max >= 0 && list != NULL && (int64_t) list->n == max) {
            jlist_add(run, list, jv_sub(run, s, at, s->len));
            break;
        }

        while (end < s->len) {
            const size_t n = char_at(s, end, &cp);

            if (text_is_space(cp)) {
                break;
            }
            end += n;
        }

        jlist_add(run, list, jv_sub(run, s, at, end));
        at = end;
    }

    return jv_list(JV_LIST, list, 1);
}


jv_t
text_split(jinja_t *run, const jstr_t *s, const jstr_t *sep, int64_t max)
{
    size_t at = 0, hit;

    if (!jinja_step_text(run, s->len)) {
        return jv_undefined();
    }

    if (sep == NULL) {
        return split_space(run, s, max);
    }

    if (sep->len == 0) {
        return jv_fail(run, "empty separator");
    }

    jlist_t *list = jlist_create(run, 0);

    while (max-- != 0 && jinja_step_text(run, sep->len)
           && (hit = jinja_find(s, sep, at)) != SIZE_MAX)
    {
        jlist_add(run, list, jv_sub(run, s, at, hit));
        at = hit + sep->len;
    }

    jlist_add(run, list, jv_sub(run, s, at, s->len));
    return jv_list(JV_LIST, list, 1);
}


jv_t
text_rsplit(jinja_t *run, const jstr_t *s, const jstr_t *sep, int64_t max)
{
    if (max < 0 || sep == NULL) {
        return text_split(run, s, sep, max);
    }

    if (sep->len == 0) {
        return jv_fail(run, "empty separator");
    }

    jlist_t *back = jlist_create(run, 0);
    size_t end = s->len, hit;

    while (max-- > 0 && (hit = jinja_find_last(run, s, sep, end)) != SIZE_MAX) {
        jlist_add(run, back, jv_sub(run, s, hit + sep->len, end));
        end = hit;
    }

    jlist_add(run, back, jv_sub(run, s, 0, end));

    if (run->code != LLM_OK) {
        return jv_undefined();
    }

    for (size_t i = 0; i < back->n / 2; i++) {
        const jv_t swap = back->items[i];

        back->items[i] = back->items[back->n - 1 - i];
        back->items[back->n - 1 - i] = swap;
    }

    return jv_list(JV_LIST, back, 1);
}


jv_t
text_lines(jinja_t *run, const jstr_t *s)
{
    jlist_t *list = jlist_create(run, 0);
    size_t from = 0;

    if (!jinja_step_text(run, s->len)) {
        return jv_undefined();
    }

    for (size_t i = 0; i < s->len; i++) {
        if (s->data[i] != '\n' && s->data[i] != '\r') {
            continue;
        }

        if (!jlist_add(run, list, jv_sub(run, s, from, i))) {
            return jv_undefined();
        }

        i += s->data[i] == '\r' && i + 1 < s->len && s->data[i + 1] == '\n';
        from = i + 1;
    }

    if (from < s->len) {
        jlist_add(run, list, jv_sub(run, s, from, s->len));
    }

    return jv_list(JV_LIST, list, 1);
}
