/* Status texts and the last message of each thread. */
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char last_message[FC_MESSAGE_BYTES];

fc_status fc_fail(fc_status status, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(last_message, sizeof(last_message), format, args);
    va_end(args);
    return status;
}

fc_status fc_fail_errno(fc_status status, int code, const char *format, ...)
{
    char reason[128];
    size_t used;
    va_list args;

    va_start(args, format);
    (void)vsnprintf(last_message, sizeof(last_message), format, args);
    va_end(args);
    if (strerror_r(code, reason, sizeof(reason)) != 0) {
        (void)snprintf(reason, sizeof(reason), "errno %d", code);
    }
    used = strlen(last_message);
    (void)snprintf(last_message + used, sizeof(last_message) - used, ": %s", reason);
    return status;
}

const char *fc_last_message(void)
{
    return last_message;
}

const char *fc_status_text(fc_status status)
{
    switch (status) {
#define FC_STATUS_CASE(name, value, text)                                                          \
    case FC_##name:                                                                                \
        return text;
        FC_STATUS_MAP(FC_STATUS_CASE)
#undef FC_STATUS_CASE
    }
    return "unknown status";
}
