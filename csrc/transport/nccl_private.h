/* What the files of NCCL share: libraries, groups, communicators, the board of a host's ranks. */
#ifndef FC_TRANSPORT_NCCL_PRIVATE_H
#define FC_TRANSPORT_NCCL_PRIVATE_H

#include "transport/nccl.h"
#include "transport/nccl_api.h"
#include "transport/nccl_board.h"
#include "transport/transport_impl.h"

#include <pthread.h>
#include <stdatomic.h>

#define FC_NCCL_TEXT_BYTES 1024
#define FC_NCCL_MARKS 128 /* collectives of a communicator that are under way, each with a mark */
#define FC_NCCL_WATCHER_NAME "fsdp_c nccl" /* of the thread, for ps and debuggers */

struct fc_nccl {
    struct fc_nccl *next; /* libraries of this process */
    void *library;
    int version;
    fc_nccl_functions call;
    char text[FC_NCCL_TEXT_BYTES];
};

/* A collective that was enqueued, with an event of the device behind it. */
typedef struct fc_nccl_mark {
    void *event; /* owned */
    int64_t enqueued_ns;
    uint64_t sequence; /* of the communicator */
    const char *op;    /* static */
    char unit[FC_NCCL_UNIT_BYTES];
} fc_nccl_mark;

/* Those of a communicator, a ring of events that are used again. Who enqueues puts in, who looks
 * takes out what was reached: the two meet in two counters, without a lock. */
typedef struct fc_nccl_marks {
    fc_nccl_mark *ring; /* owned; FC_NCCL_MARKS of them. NULL: no deadlines on the device */
    _Atomic uint64_t n_put, n_reached;
    pthread_mutex_t looking; /* who takes out; who enqueues only where the ring is full */
} fc_nccl_marks;

/* What fc_device_comm points to. */
typedef struct fc_nccl_comm {
    fc_nccl_group *group; /* borrowed */
    void *handle;         /* owned; NULL: none */
    int number;           /* in the group: its place on the board */
    uint64_t sequence;    /* collectives so far */
    int64_t began_ns;     /* the newest of them */
    bool is_pending;      /* a call has not ended yet: no other may be made */
    fc_nccl_marks marks;
} fc_nccl_comm;

/* Who ended a group. */
enum {
    FC_NCCL_GOES_ON,
    FC_NCCL_ENDED,     /* who called it: `base` says why */
    FC_NCCL_WRITES,    /* the watching thread is about to say why */
    FC_NCCL_WAS_ENDED, /* it has: `end` holds it */
};

typedef struct fc_nccl_end {
    fc_status status;
    bool is_known; /* to the ranks of this host */
    char text[FC_MESSAGE_BYTES];
} fc_nccl_end;

struct fc_nccl_group {
    fc_transport *base; /* owned; identity, host, and what broke the group */
    const fc_nccl *nccl;
    fc_nccl_options options;
    fc_events events;     /* of the options; without functions if there are none */
    fc_nccl_board *board; /* owned */
    fc_nccl_comm comms[FC_NCCL_COMMS];
    int n_comms;
    bool is_closed;
    bool has_averages; /* reductions are, of floating-point numbers */
    char text[FC_NCCL_TEXT_BYTES];

    /* Held in each call of NCCL on a communicator, of which there may be one at a time, and where
     * handles are taken away: none is aborted within a call. */
    pthread_mutex_t calling;
    _Atomic int64_t call_began_ns; /* 0: no call is under way */
    _Atomic int caller;            /* the number of its communicator */
    fc_nccl_group *next_watched;
    int64_t timeout_ns; /* of the config, whatever a wait was given since */
    _Atomic int state;
    fc_nccl_end end;
};

/* "2.27.3" */
void fc_nccl_version_text(int version, char *out, size_t bytes);

/* Around a call of NCCL: no other one of the group runs, and the interpreter goes on meanwhile. An
 * error: it has been ended, nothing may be called, and there is nothing to leave. */
FC_MUST_CHECK fc_status fc_nccl_enter(fc_nccl_comm *comm);
void fc_nccl_leave(fc_nccl_comm *comm);

/* For a call, by who is in `calling`. Who aborts within a call that hangs takes it away meanwhile.
 */
static inline void *fc_nccl_handle(const fc_nccl_comm *comm)
{
    return __atomic_load_n(&comm->handle, __ATOMIC_ACQUIRE);
}

/* What a call came to: waits while it is in progress. Any other result but success breaks the
 * group.
 */
FC_MUST_CHECK fc_status fc_nccl_settle(fc_nccl_comm *comm, int result, const fc_wait_info *info);

/* fc_nccl_watch, with a name for what this rank does. */
FC_MUST_CHECK fc_status fc_nccl_look(fc_nccl_group *group, const fc_wait_info *info);

/* FC_OK while the group may be used. What the watching thread has found becomes the group's error
 * here, and is returned as it is the first time. */
FC_MUST_CHECK fc_status fc_nccl_check(fc_nccl_group *group);

/* ncclCommGetAsyncError's answer; in progress where the communicator is gone. */
int fc_nccl_async_error(fc_nccl_comm *comm);
/* The same for who is in `calling` already. */
int fc_nccl_ask(const fc_nccl_comm *comm);
/* Whether it is neither a success nor in progress. */
bool fc_nccl_is_error(int result);

/* The sentences of a failure: what NCCL answers, and `found` with the place that this rank was in.
 */
fc_status fc_nccl_tell_result(const fc_nccl_comm *comm, int result, char *out, size_t bytes);
void fc_nccl_tell_place(const fc_nccl_group *group, const fc_wait_info *info, const char *found,
                        char *out, size_t bytes);

/* Takes the handles of all communicators, as many as it returns. By who is in `calling`. */
int fc_nccl_take_handles(fc_nccl_group *group, void *handles[FC_NCCL_COMMS]);

/* Aborts all communicators: local, once. */
void fc_nccl_abort_comms(fc_nccl_group *group);

/* ---- deadlines on the device ---- */

FC_MUST_CHECK fc_status fc_nccl_marks_create(fc_nccl_comm *comm);
void fc_nccl_marks_destroy(fc_nccl_comm *comm);

/* Behind the collective that was enqueued last. */
FC_MUST_CHECK fc_status fc_nccl_marks_put(fc_nccl_comm *comm, fc_stream *stream,
                                          const fc_wait_info *info);

/* Copies the oldest that was not reached; false: there is none. By any thread. */
FC_MUST_CHECK fc_status fc_nccl_marks_oldest(fc_nccl_comm *comm, fc_nccl_mark *out, bool *is_there);

/* From now on a thread looks after the group, until it is told not to; the group is not touched
 * from there on. Nothing to do without events. */
FC_MUST_CHECK fc_status fc_nccl_watch_over(fc_nccl_group *group);
void fc_nccl_stop_watching(fc_nccl_group *group);

#endif
