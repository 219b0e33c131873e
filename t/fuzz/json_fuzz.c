/*
 * Fuzz target: the module's strict JSON entry and its escape writer.
 *
 * Built with nginx's headers but without nginx: the three functions that the
 * code needs from there are below.  What the entry accepts must be UTF-8
 * without NUL, must print and parse again, and the writer must turn any bytes
 * into a JSON string that parses back.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ngx_module/ngx_http_llm_json.h"

static ngx_pool_cleanup_t cleanup;
static char written[1 << 20];
static size_t n_written;


ngx_pool_cleanup_t *
ngx_pool_cleanup_add(ngx_pool_t *pool, size_t size)
{
    (void) pool;
    (void) size;

    return &cleanup;
}


void *
ngx_pnalloc(ngx_pool_t *pool, size_t size)
{
    (void) pool;

    return malloc(size);
}


void
ngx_http_llm_out_write(ngx_http_llm_out_t *out, const void *data, size_t len)
{
    (void) out;

    if (n_written + len < sizeof(written)) {
        memcpy(written + n_written, data, len);
        n_written += len;
    }
}


/* Any bytes become a string that parses. */
static void
check_writer(const uint8_t *data, size_t size)
{
    n_written = 0;
    ngx_http_llm_json_string(NULL, data, size);
    written[n_written] = '\0';

    cJSON *item = cJSON_ParseWithLength(written, n_written);

    if (!cJSON_IsString(item)) {
        abort();
    }

    cJSON_Delete(item);
}


int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);


int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ngx_http_llm_json_t json, again;
    const char *why = NULL;
    int64_t n;

    /* an exact copy, so that reading past the end is seen */
    u_char *copy = malloc(size > 0 ? size : 1);
    ngx_str_t text = { size, copy };

    memcpy(copy, data, size);

    if (ngx_http_llm_json_parse(NULL, &text, &json, &why) == NGX_OK) {
        ngx_str_t printed = ngx_http_llm_json_print(NULL, json.root);

        if (memchr(copy, '\0', size) != NULL
            || ngx_http_llm_json_parse(NULL, &printed, &again, &why)
                   != NGX_OK)
        {
            abort();
        }

        ngx_http_llm_json_int(json.root, &n);
        ngx_http_llm_json_get(json.root, "seed");
        ngx_http_llm_json_free(&again);
        free(printed.data);

    } else if (why == NULL) {
        abort();
    }

    ngx_http_llm_json_free(&json);
    check_writer(copy, size);
    ngx_http_llm_json_chars(copy, size);
    free(copy);

    return 0;
}
