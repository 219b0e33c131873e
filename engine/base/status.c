/* Result codes: names and the formatted error. */

#include "engine/base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/utf8.h"


int
llm_err_set(llm_err_t *err, int code, const char *param, const char *fmt, ...)
{
    va_list args;

    if (err == NULL) {
        return code;
    }

    err->code = code;
    snprintf(err->param, sizeof(err->param), "%s", param ? param : "");

    va_start(args, fmt);
    vsnprintf(err->text, sizeof(err->text), fmt, args);
    va_end(args);

    /* a text too long must not end inside a character */
    err->text[utf8_complete((uint8_t *) err->text, strlen(err->text))] = '\0';

    for (char *p = err->text; *p; p++) {
        if (*p == '\n' || *p == '\r') {
            *p = ' ';
        }
    }

    return code;
}


const char *
llm_code_name(int code)
{
    switch (code) {
    case LLM_OK:
        return "ok";
    case LLM_ERROR:
        return "error";
    case LLM_AGAIN:
        return "again";
    case LLM_NOMEM:
        return "no memory";
    case LLM_LIMIT:
        return "limit";
    case LLM_BADREQ:
        return "bad request";
    case LLM_CANCELED:
        return "canceled";
    default:
        return "unknown";
    }
}
