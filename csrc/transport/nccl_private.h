/* What the files of NCCL share: libraries, groups, communicators, the board of a host's ranks. */
#ifndef FC_TRANSPORT_NCCL_PRIVATE_H
#define FC_TRANSPORT_NCCL_PRIVATE_H

#include "transport/nccl.h"
#include "transport/nccl_api.h"
#include "transport/nccl_board.h"
#include "transport/transport_impl.h"

#define FC_NCCL_TEXT_BYTES 1024

struct fc_nccl {
    struct fc_nccl *next; /* libraries of this process */
    void *library;
    int version;
    fc_nccl_functions call;
    char text[FC_NCCL_TEXT_BYTES];
};

/* What fc_device_comm points to. */
typedef struct fc_nccl_comm {
    fc_nccl_group *group; /* borrowed */
    void *handle;         /* owned; NULL: none */
    int number;           /* in the group: its place on the board */
    uint64_t sequence;    /* collectives so far */
    bool is_pending;      /* a call has not ended yet: no other may be made */
} fc_nccl_comm;

struct fc_nccl_group {
    fc_transport *base; /* owned; identity, host, and what broke the group */
    const fc_nccl *nccl;
    fc_nccl_options options;
    fc_nccl_board *board; /* owned */
    fc_nccl_comm comms[FC_NCCL_COMMS];
    int n_comms;
    bool is_closed;
    bool has_averages; /* reductions are, of floating-point numbers */
    char text[FC_NCCL_TEXT_BYTES];
};

/* "2.27.3" */
void fc_nccl_version_text(int version, char *out, size_t bytes);

/* What a call came to: waits while it is in progress. Any other result but success breaks the
 * group.
 */
FC_MUST_CHECK fc_status fc_nccl_settle(fc_nccl_comm *comm, int result, const fc_wait_info *info);

/* fc_nccl_watch, with a name for what this rank does. */
FC_MUST_CHECK fc_status fc_nccl_look(fc_nccl_group *group, const fc_wait_info *info);

/* Aborts all communicators: local, once. */
void fc_nccl_abort_comms(fc_nccl_group *group);

#endif
