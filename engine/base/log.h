/*
 * Log lines in nginx's format, so that the engine's lines and nginx's read in
 * one order:  2026/11/29 18:28:20 [notice] 812#812: kv: 512 pages
 *
 * One writer at a time (a line is one write(2)).  Never prompt text above
 * LOG_DEBUG.
 */

#ifndef ENGINE_BASE_LOG_H
#define ENGINE_BASE_LOG_H

/* nginx's levels and numbers */
enum {
    LOG_EMERG = 1,
    LOG_ALERT = 2,
    LOG_CRIT = 3,
    LOG_ERR = 4,
    LOG_WARN = 5,
    LOG_NOTICE = 6,
    LOG_INFO = 7,
    LOG_DEBUG = 8,
};


/* Opens path for appending (NULL or "": standard error).  level: lines above
 * it are dropped.  LLM_OK, or LLM_ERROR with errno set. */
int log_open(const char *path, int level);

/* Opens the same path again, after a rotation. */
int log_reopen(void);

/* "warn" → LOG_WARN; -1 for an unknown name. */
int log_level(const char *name);

/* One line; a newline inside the text becomes a space. */
void log_write(int level, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

#endif /* ENGINE_BASE_LOG_H */
