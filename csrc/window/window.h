/* What a process shows of itself to those who look from outside: the step and phase that it is in,
 * whom it waits for, its last error; and, if it traces, when what began and ended.
 *
 * [Note: the window] Every process has a page (page.h) and writes to it as it goes: words of its
 * own, without a system call, an allocation or a lock. Nobody waits for what is written, so stores
 * are ordered and no more. Until the page is opened, and in a child made by fork, it is private
 * memory that nobody sees.
 *
 * Threading: by one thread at a time, as the calls of a rank are; names may be told by any thread,
 * and what fc_window_tell_of tells by another one.
 */
#ifndef FC_WINDOW_WINDOW_H
#define FC_WINDOW_WINDOW_H

#include "base/status.h"
#include "window/page.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_window_config {
    const char *run; /* cut to FC_WINDOW_RUN_BYTES */
    int rank, world;
    uint64_t start_ticks; /* of this process */
    bool traces;
} fc_window_config;

/* Shows this process from now on; nothing if it is shown already. */
FC_MUST_CHECK fc_status fc_window_open(const fc_window_config *config);
/* The page of this process; never NULL. */
fc_window_page *fc_window(void);

/* The number of a text; 0: there is no room for it, or another thread is at it. */
uint32_t fc_window_name(const char *text);

/* A phase begins; FC_WINDOW_BETWEEN and _FAILED: it is over. */
void fc_window_enter(fc_window_phase phase, uint64_t step);

/* What a process waits for. */
typedef struct fc_window_waiting {
    uint64_t since_ns; /* 0: nothing */
    uint64_t rank;     /* global; FC_WINDOW_ALL */
    uint32_t op, unit; /* names */
    uint32_t host;     /* a name; 0: this one, or it is not known */
    uint64_t step;
} fc_window_waiting;

/* What it waits for now. */
fc_window_waiting fc_window_waits(void);
/* From now on; returns what it was before, which is to be told again when this wait is over. */
fc_window_waiting fc_window_wait_for(fc_window_waiting what);
/* Where the one that is waited for is; NULL or empty: not known. */
void fc_window_tell_place(const char *text);
/* What is known of the one that the wait which began at `since_ns` is for. */
void fc_window_tell_of(uint64_t since_ns, const char *text);
/* A wait is over; for the trace alone. */
void fc_window_waited(fc_window_waiting what, int64_t until_ns);

/* What a call of this process has failed with, and is about to be raised. Not what tells callers
 * that something cannot be had, or that a signal came. */
void fc_window_failed(fc_status status, const char *text);

/* ---- units ---- */

extern fc_window_page *fc_window_page_;    /* behind fc_window() */
extern fc_window_event *fc_window_events_; /* NULL: the process does not trace */

void fc_window_record(fc_window_event_kind kind, uint32_t unit);

/* Whether what only the trace shows is wanted. */
static inline bool fc_window_traces(void)
{
    return __builtin_expect(fc_window_events_ != NULL, 0);
}

/* A unit is used, in forward or backward. */
static inline void fc_window_use_unit(uint32_t unit)
{
    __atomic_store_n(&fc_window_page_->use.unit, unit, __ATOMIC_RELAXED);
    if (fc_window_traces()) {
        fc_window_record(FC_WINDOW_EVENT_UNIT, unit);
    }
}

/* FC_WINDOW_EVENT_PASSED and _LEFT; for the trace alone. */
static inline void fc_window_mark(fc_window_event_kind kind, uint32_t unit)
{
    if (fc_window_traces()) {
        fc_window_record(kind, unit);
    }
}

#ifdef __cplusplus
}
#endif
#endif
