/* The page that a process shows of itself: what lies where, for those who read it from outside.
 *
 * A file in memory (memfd) named FC_WINDOW_NAME, which the process keeps open and others of its
 * user find in /proc/PID/fd. Only the process writes, others never do. fsdp_c/_window/_page.py
 * reads it and knows these numbers, too: another layout is another FC_WINDOW_VERSION.
 *
 *     head, now, use, wait, told, error | names | events, if the process traces
 *
 * Words are 8 bytes, in the machine's order. Blocks that begin with `n_writes` have it odd while
 * their owner writes: who reads takes the block between two looks at the same even number. Names
 * are texts that end with a zero byte, written once and before the first word that tells one: a
 * name is told by the bytes before it in the block of names, and 0 is no name.
 */
#ifndef FC_WINDOW_PAGE_H
#define FC_WINDOW_PAGE_H

#include "base/alloc.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_WINDOW_NAME "window-of-fsdp_c"
#define FC_WINDOW_MAGIC UINT64_C(0x77696e646f776663)
#define FC_WINDOW_VERSION 3

#define FC_WINDOW_RUN_BYTES 128
#define FC_WINDOW_PLACE_BYTES 232
#define FC_WINDOW_ERROR_BYTES 1512
#define FC_WINDOW_TOLD_BYTES 496
#define FC_WINDOW_BEGAN 32 /* beginnings of steps that are kept */
#define FC_WINDOW_NAMES_AT FC_PAGE
#define FC_WINDOW_NAMES_BYTES ((size_t)124 << 10)
#define FC_WINDOW_EVENTS_AT (FC_WINDOW_NAMES_AT + FC_WINDOW_NAMES_BYTES)
#define FC_WINDOW_EVENTS ((uint64_t)1 << 16)

/* Written before the page can be found. */
typedef struct fc_window_head {
    uint64_t magic;
    uint64_t version;
    uint64_t bytes; /* of the file */
    uint64_t names_bytes;
    uint64_t n_events;    /* how many are kept; 0: the process does not trace */
    uint64_t pid;         /* as the process itself sees it */
    uint64_t start_ticks; /* of the process, from /proc/PID/stat */
    uint64_t rank, world;
    uint64_t opened_ns;
    char run[FC_WINDOW_RUN_BYTES];
} fc_window_head;

typedef enum fc_window_phase {
    FC_WINDOW_SETUP,
    FC_WINDOW_FORWARD,
    FC_WINDOW_FORWARD_NO_GRAD,
    FC_WINDOW_UNSHARD,
    FC_WINDOW_BACKWARD,
    FC_WINDOW_BETWEEN, /* a phase is over, and no other one has begun */
    FC_WINDOW_FAILED,  /* the phase was left by an exception */
    FC_WINDOW_PHASE_COUNT
} fc_window_phase;

typedef struct fc_window_now {
    uint64_t n_writes;
    uint64_t phase;
    uint64_t step;
    uint64_t since_ns;
    uint64_t n_began; /* steps; that of number n began at began_ns[n % FC_WINDOW_BEGAN] */
    uint64_t began_ns[FC_WINDOW_BEGAN];
    uint64_t memory[FC_PURPOSE_COUNT]; /* bytes, as the phase began */
} fc_window_now;

/* A word each. */
typedef struct fc_window_use {
    uint64_t unit;     /* the name of the one that was used last */
    uint64_t n_events; /* so far; that of number n is in the place n % head.n_events */
} fc_window_use;

#define FC_WINDOW_ALL UINT64_MAX /* all other ranks, or nobody in particular */

typedef struct fc_window_wait {
    uint64_t n_writes;
    uint64_t is_waiting;
    uint64_t since_ns;
    uint64_t rank; /* global, of who is waited for */
    uint64_t op, unit;
    uint64_t step;
    uint64_t
        host; /* the name of that rank's, if it is another one; 0: it is not, or nobody knows */
    char place[FC_WINDOW_PLACE_BYTES]; /* where the program of that rank is; empty: not known */
} fc_window_wait;

typedef struct fc_window_error {
    uint64_t n_writes;
    uint64_t n_errors;
    uint64_t at_ns;
    char text[FC_WINDOW_ERROR_BYTES]; /* of the last one */
} fc_window_error;

/* What another thread than the one that waits has found out about who is waited for. */
typedef struct fc_window_told {
    uint64_t n_writes;
    uint64_t since_ns; /* of the wait that it is about: of no other one, and of none that is over */
    char text[FC_WINDOW_TOLD_BYTES];
} fc_window_told;

typedef enum fc_window_event_kind {
    FC_WINDOW_EVENT_NONE,
    FC_WINDOW_EVENT_PHASE,  /* began at from_ns: what, fc_window_phase; value, its step */
    FC_WINDOW_EVENT_UNIT,   /* forward or backward entered it at from_ns */
    FC_WINDOW_EVENT_PASSED, /* backward has its gradients, at from_ns */
    FC_WINDOW_EVENT_LEFT,   /* forward or backward left it, at from_ns */
    FC_WINDOW_EVENT_WAIT,   /* from from_ns to value; what, the operation's name */
    FC_WINDOW_EVENT_COUNT
} fc_window_event_kind;

typedef struct fc_window_event {
    uint64_t from_ns;
    uint64_t value;
    uint32_t kind;
    uint32_t what;
    uint32_t unit;
    int32_t rank; /* global, of who was waited for; -1: all others */
} fc_window_event;

typedef struct fc_window_page {
    fc_window_head head;
    char align_now[512 - sizeof(fc_window_head)];
    fc_window_now now;
    char align_use[512 - sizeof(fc_window_now)];
    fc_window_use use;
    char align_wait[512 - sizeof(fc_window_use)];
    fc_window_wait wait;
    char align_told[512 - sizeof(fc_window_wait)];
    fc_window_told told;
    fc_window_error error;
} fc_window_page;

#ifdef __cplusplus
}
#endif
#endif
