/*
 * Strict JSON over cJSON, and the escape writer.
 *
 * cJSON alone would take invalid UTF-8, raw control characters and text after
 * the value, cut strings at \u0000, and round integers beyond 2^53.  So the
 * text is scanned once before it is parsed.
 */

#include "ngx_module/ngx_http_llm_json.h"

#include <math.h>


#define NGX_HTTP_LLM_JSON_DEPTH  128


typedef struct {
    const u_char  *p;
    const u_char  *end;
    ngx_uint_t     depth;
    ngx_str_t     *seed;
    const char    *why;
} ngx_http_llm_json_scan_t;


static void ngx_http_llm_json_cleanup(void *data);
static ngx_int_t ngx_http_llm_json_scan(ngx_http_llm_json_scan_t *scan);
static ngx_int_t ngx_http_llm_json_scan_string(
    ngx_http_llm_json_scan_t *scan);
static ngx_uint_t ngx_http_llm_json_escaped(const u_char *p,
    const u_char *end);
static ngx_int_t ngx_http_llm_json_finite(const cJSON *item);


ngx_int_t
ngx_http_llm_json_parse(ngx_pool_t *pool, ngx_str_t *text,
    ngx_http_llm_json_t *json, const char **why)
{
    const char                *end;
    ngx_pool_cleanup_t        *cln;
    ngx_http_llm_json_scan_t   scan;

    ngx_memzero(&scan, sizeof(ngx_http_llm_json_scan_t));

    scan.p = text->data;
    scan.end = text->data + text->len;
    scan.seed = &json->seed;

    json->root = NULL;
    ngx_str_null(&json->seed);

    if (ngx_http_llm_json_scan(&scan) != NGX_OK) {
        *why = scan.why;
        return NGX_ERROR;
    }

    cln = ngx_pool_cleanup_add(pool, 0);
    if (cln == NULL) {
        *why = "out of memory";
        return NGX_ERROR;
    }

    json->root = cJSON_ParseWithLengthOpts((char *) text->data, text->len,
                                           &end, 0);
    cln->handler = ngx_http_llm_json_cleanup;
    cln->data = json;

    if (json->root == NULL) {
        *why = "the body is not valid JSON";
        return NGX_ERROR;
    }

    while (end < (char *) text->data + text->len
           && (*end == ' ' || *end == '\n' || *end == '\r' || *end == '\t'))
    {
        end++;
    }

    if (end != (char *) text->data + text->len) {
        *why = "there is text after the JSON value";
        return NGX_ERROR;
    }

    if (ngx_http_llm_json_finite(json->root) != NGX_OK) {
        *why = "a number is out of range";
        return NGX_ERROR;
    }

    return NGX_OK;
}


void
ngx_http_llm_json_free(ngx_http_llm_json_t *json)
{
    cJSON_Delete(json->root);
    json->root = NULL;
}


static void
ngx_http_llm_json_cleanup(void *data)
{
    ngx_http_llm_json_free(data);
}


/* --- the scan --- */


/* length of the well-formed UTF-8 sequence at p, 0 if there is none (RFC
 * 3629: no overlong forms, no surrogates, nothing above U+10FFFF) */

static ngx_uint_t
ngx_http_llm_utf8_len(const u_char *p, const u_char *end)
{
    u_char      c, low, high;
    ngx_uint_t  i, n;

    c = *p;
    low = 0x80;
    high = 0xbf;

    if (c < 0x80) {
        return 1;
    }

    if (c >= 0xc2 && c <= 0xdf) {
        n = 2;

    } else if (c >= 0xe0 && c <= 0xef) {
        n = 3;
        low = (c == 0xe0) ? 0xa0 : 0x80;
        high = (c == 0xed) ? 0x9f : 0xbf;

    } else if (c >= 0xf0 && c <= 0xf4) {
        n = 4;
        low = (c == 0xf0) ? 0x90 : 0x80;
        high = (c == 0xf4) ? 0x8f : 0xbf;

    } else {
        return 0;
    }

    if ((size_t) (end - p) < n || p[1] < low || p[1] > high) {
        return 0;
    }

    for (i = 2; i < n; i++) {
        if (p[i] < 0x80 || p[i] > 0xbf) {
            return 0;
        }
    }

    return n;
}


static void
ngx_http_llm_json_scan_space(ngx_http_llm_json_scan_t *scan)
{
    while (scan->p < scan->end
           && (*scan->p == ' ' || *scan->p == '\t' || *scan->p == '\n'
               || *scan->p == '\r'))
    {
        scan->p++;
    }
}


static void
ngx_http_llm_json_scan_seed(ngx_http_llm_json_scan_t *scan)
{
    ngx_http_llm_json_scan_space(scan);

    if (scan->p == scan->end || *scan->p != ':') {
        return;
    }

    scan->p++;

    ngx_http_llm_json_scan_space(scan);

    scan->seed->data = (u_char *) scan->p;
    scan->seed->len = scan->end - scan->p;
}


static ngx_int_t
ngx_http_llm_json_scan(ngx_http_llm_json_scan_t *scan)
{
    u_char         c;
    const u_char  *start;

    while (scan->p < scan->end) {
        c = *scan->p;

        if (c == '"') {
            start = scan->p;

            if (ngx_http_llm_json_scan_string(scan) != NGX_OK) {
                return NGX_ERROR;
            }

            /* a key of the outermost object whose number a double cannot
             * hold exactly */

            if (scan->depth == 1 && scan->seed->data == NULL
                && scan->p - start == 6
                && ngx_strncmp(start, "\"seed\"", 6) == 0)
            {
                ngx_http_llm_json_scan_seed(scan);
            }

            continue;
        }

        if (c == '{' || c == '[') {
            if (++scan->depth > NGX_HTTP_LLM_JSON_DEPTH) {
                scan->why = "the JSON is nested too deeply";
                return NGX_ERROR;
            }

        } else if ((c == '}' || c == ']') && scan->depth) {
            scan->depth--;

        } else if (c >= 0x80
                   || (c < 0x20 && c != '\n' && c != '\r' && c != '\t'))
        {
            scan->why = "the body is not valid JSON";
            return NGX_ERROR;
        }

        scan->p++;
    }

    return NGX_OK;
}


/* length of the escape sequence at p, 0 if it is none (RFC 8259, section 7).
 * cJSON 1.7.15 takes \u with anything behind it, as zero. */

static ngx_uint_t
ngx_http_llm_json_escaped(const u_char *p, const u_char *end)
{
    ngx_uint_t  i;

    if (end - p < 2) {
        return 0;
    }

    if (p[1] != 'u') {
        return p[1] && strchr("\"\\/bfnrt", p[1]) ? 2 : 0;
    }

    if (end - p < 6) {
        return 0;
    }

    for (i = 2; i < 6; i++) {
        if (!((p[i] >= '0' && p[i] <= '9') || (p[i] >= 'a' && p[i] <= 'f')
              || (p[i] >= 'A' && p[i] <= 'F')))
        {
            return 0;
        }
    }

    return 6;
}


static ngx_int_t
ngx_http_llm_json_scan_string(ngx_http_llm_json_scan_t *scan)
{
    u_char         c;
    ngx_uint_t     n;
    const u_char  *p;

    p = scan->p + 1;

    while (p < scan->end) {
        c = *p;

        if (c == '"') {
            scan->p = p + 1;
            return NGX_OK;
        }

        if (c == '\\') {
            n = ngx_http_llm_json_escaped(p, scan->end);

            if (n == 0) {
                scan->why = "a string contains an invalid escape";
                return NGX_ERROR;
            }

            if (n == 6 && ngx_strncmp(p, "\\u0000", 6) == 0) {
                scan->why = "a string contains \\u0000";
                return NGX_ERROR;
            }

            p += n;
            continue;
        }

        if (c < 0x20) {
            scan->why = "a string contains a control character that is not "
                        "escaped";
            return NGX_ERROR;
        }

        n = ngx_http_llm_utf8_len(p, scan->end);

        if (n == 0) {
            scan->why = "the body is not valid UTF-8";
            return NGX_ERROR;
        }

        p += n;
    }

    scan->why = "the body is not valid JSON";
    return NGX_ERROR;
}


static ngx_int_t
ngx_http_llm_json_finite(const cJSON *item)
{
    const cJSON  *child;

    if (cJSON_IsNumber(item) && !isfinite(item->valuedouble)) {
        return NGX_ERROR;
    }

    /* the depth is bounded by the scan */

    cJSON_ArrayForEach(child, item) {
        if (ngx_http_llm_json_finite(child) != NGX_OK) {
            return NGX_ERROR;
        }
    }

    return NGX_OK;
}


/* --- values --- */


cJSON *
ngx_http_llm_json_get(const cJSON *object, const char *key)
{
    cJSON  *item;

    item = cJSON_GetObjectItemCaseSensitive(object, key);

    return (item == NULL || cJSON_IsNull(item)) ? NULL : item;
}


ngx_int_t
ngx_http_llm_json_int(const cJSON *item, int64_t *n)
{
    double  value;

    if (!cJSON_IsNumber(item)) {
        return NGX_ERROR;
    }

    value = item->valuedouble;

    if (value != floor(value) || fabs(value) > 9007199254740992.0) {
        return NGX_ERROR;
    }

    *n = (int64_t) value;

    return NGX_OK;
}


ngx_str_t
ngx_http_llm_json_print(ngx_pool_t *pool, const cJSON *item)
{
    char       *text;
    ngx_str_t   result;

    ngx_str_null(&result);

    text = cJSON_PrintUnformatted(item);
    if (text == NULL) {
        return result;
    }

    result.len = ngx_strlen(text);
    result.data = ngx_pnalloc(pool, result.len + 1);

    if (result.data == NULL) {
        result.len = 0;

    } else {
        ngx_memcpy(result.data, text, result.len + 1);
    }

    cJSON_free(text);

    return result;
}


/* --- writing --- */


void
ngx_http_llm_json_escape(ngx_http_llm_out_t *out, const void *data, size_t len)
{
    u_char         c, escaped[6];
    size_t         n;
    const u_char  *p, *end, *plain;

    static const u_char  hex[] = "0123456789abcdef";

    p = data;
    end = p + len;
    plain = p;

    while (p < end) {
        c = *p;

        if (c >= 0x20 && c != '"' && c != '\\' && c < 0x7f) {
            p++;
            continue;
        }

        n = (c >= 0x80) ? ngx_http_llm_utf8_len(p, end) : 0;

        if (n) {
            p += n;
            continue;
        }

        ngx_http_llm_out_write(out, plain, p - plain);
        plain = ++p;

        if (c >= 0x80) {
            ngx_http_llm_out_lit(out, "\xef\xbf\xbd");
            continue;
        }

        escaped[0] = '\\';
        n = 2;

        switch (c) {

        case '"':
        case '\\':
            escaped[1] = c;
            break;

        case '\n':
            escaped[1] = 'n';
            break;

        case '\r':
            escaped[1] = 'r';
            break;

        case '\t':
            escaped[1] = 't';
            break;

        default:
            ngx_memcpy(escaped + 1, "u00", 3);
            escaped[4] = hex[c >> 4];
            escaped[5] = hex[c & 0xf];
            n = 6;
        }

        ngx_http_llm_out_write(out, escaped, n);
    }

    ngx_http_llm_out_write(out, plain, p - plain);
}


void
ngx_http_llm_json_string(ngx_http_llm_out_t *out, const void *data, size_t len)
{
    ngx_http_llm_out_lit(out, "\"");
    ngx_http_llm_json_escape(out, data, len);
    ngx_http_llm_out_lit(out, "\"");
}


size_t
ngx_http_llm_json_chars(const void *data, size_t len)
{
    size_t         n, chars;
    const u_char  *p, *end;

    p = data;
    end = p + len;

    for (chars = 0; p < end; chars++) {
        n = ngx_http_llm_utf8_len(p, end);
        p += n ? n : 1;
    }

    return chars;
}
