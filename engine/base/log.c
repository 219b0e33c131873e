/* Log lines in nginx's format. */

#include "engine/base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/status.h"


static const char *const log_names[] = { "",       "emerg", "alert",
                                         "crit",   "error", "warn",
                                         "notice", "info",  "debug" };

static int log_fd = STDERR_FILENO;
static int log_max = LOG_NOTICE;
static char log_path[1024];


int
log_open(const char *path, int level)
{
    log_max = level;

    if (path == NULL || path[0] == '\0') {
        log_fd = STDERR_FILENO;
        log_path[0] = '\0';
        return LLM_OK;
    }

    snprintf(log_path, sizeof(log_path), "%s", path);

    return log_reopen();
}


int
log_reopen(void)
{
    if (log_path[0] == '\0') {
        return LLM_OK;
    }

    const int fd =
        open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd == -1) {
        return LLM_ERROR;
    }

    if (log_fd != STDERR_FILENO) {
        close(log_fd);
    }

    log_fd = fd;

    return LLM_OK;
}


int
log_level(const char *name)
{
    for (int i = LOG_EMERG; i <= LOG_DEBUG; i++) {
        if (strcmp(name, log_names[i]) == 0) {
            return i;
        }
    }

    return -1;
}


void
log_write(int level, const char *fmt, ...)
{
    char line[2048];
    struct tm tm;

    if (level > log_max) {
        return;
    }

    const int saved = errno;
    const time_t now = time(NULL);
    localtime_r(&now, &tm);

    const int pid = (int) getpid();
    size_t n = strftime(line, sizeof(line), "%Y/%m/%d %H:%M:%S", &tm);
    n += (size_t) snprintf(line + n, sizeof(line) - n,
                           " [%s] %d#%d: ", log_names[level], pid, pid);

    va_list args;
    va_start(args, fmt);
    const int len = vsnprintf(line + n, sizeof(line) - n - 1, fmt, args);
    va_end(args);

    const size_t room = sizeof(line) - n - 2;
    const size_t end = n + ((size_t) len < room ? (size_t) len : room);

    for (size_t i = n; i < end; i++) {
        if ((unsigned char) line[i] < 0x20) {
            line[i] = ' ';
        }
    }

    line[end] = '\n';

    if (write(log_fd, line, end + 1) == -1) {
        /* there is nowhere left to say so */
    }

    errno = saved;
}
