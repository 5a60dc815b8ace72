/* What tests ask of the stand-in for NCCL and CUDA's driver (tests/c/nccl) and learn from it.
 *
 * Found by dlsym: `fc_stand_in_control()` gives this process's struct,
 * `fc_stand_in_is_idle(stream)` tells whether the work of a stream is done, and goes on with it.
 */
#ifndef FC_TESTS_NCCL_STAND_IN_H
#define FC_TESTS_NCCL_STAND_IN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct stand_in {
    /* Asked for. */
    int version;
    int polls; /* a call stays in progress until it was asked about so often, or this is 0 */
    bool hangs_in_init; /* communicators never get ready */
    bool dies_in_init;  /* SIGKILL */
    _Atomic bool hangs; /* no collective ends */
    int error_at;       /* the collective, from 1, after which `error` is reported; 0: none */
    int error;
    int fail_calls;        /* result of every collective's call; 0: they work */
    bool ends_work;        /* a call is in progress until all work is done: for host memory */
    _Atomic bool blocks;   /* no call of a collective returns before its communicator is ended */
    _Atomic bool captures; /* all streams are being captured */
    int fail_event_at;     /* the new event, from 1, that there is no memory for; 0: none */
    int fail_queries;      /* result of each question about an event; 0: they are answered */

    /* Seen. */
    int n_inits, n_splits, n_collectives, n_groups;
    _Atomic int n_aborts;
    int n_destroyed, n_live;
    int n_events;              /* that live */
    int n_records, n_contexts; /* and contexts that were made current, and still are */
    _Atomic int n_blocked, n_queries;
    int config_bytes; /* of the last communicator */
    int n_faults;
    char fault[256]; /* the first breach of NCCL's rules of use */
} stand_in;

#endif
