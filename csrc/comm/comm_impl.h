/* Inside of a communicator: its steps, and the collectives of each kind of transport.
 *
 * [Note: steps] A collective over mapped memory is one or more *steps*. In a step every rank stages
 * bytes in its slot, publishes a header that describes the call, waits until all peers have
 * published theirs, compares, and pulls from the peers' slots. Slots and headers exist twice and
 * alternate. That is enough: who writes in step k + 2 has seen all headers of step k + 1, and a
 * rank publishes those only after it has read all of step k.
 */
#ifndef FC_COMM_IMPL_H
#define FC_COMM_IMPL_H

#include "base/alloc.h"
#include "comm/comm.h"
#include "comm/pieces.h"
#include "kernels/kernels.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum fc_comm_op {
    FC_COMM_ALL_GATHER,
    FC_COMM_REDUCE_SCATTER,
    FC_COMM_ALL_REDUCE,
    FC_COMM_BROADCAST,
    FC_COMM_ALL_TO_ALL,
    FC_COMM_BARRIER,
    FC_COMM_OP_COUNT
} fc_comm_op;

/* What all ranks must agree on before data moves. Travels between processes. */
typedef struct fc_comm_call {
    uint64_t sequence; /* of the collective */
    uint64_t bytes; /* all_gather: of one block; reduce_scatter: of the result; all_to_all: of all
                       blocks of all ranks; else of the data */
    double divisor;
    uint32_t op;
    uint32_t dtype;
    int32_t root;   /* -1 if none */
    uint32_t table; /* all_to_all: digest of the table of bytes; else 0 */
} fc_comm_call;

typedef struct fc_comm_ops {
    fc_status (*all_gather)(fc_comm *comm, void *recv, const void *send, size_t send_bytes);
    fc_status (*reduce_scatter)(fc_comm *comm, void *recv, const void *send, size_t recv_numel,
                                fc_dtype dtype, double divisor);
    fc_status (*all_reduce)(fc_comm *comm, void *data, size_t numel, fc_dtype dtype,
                            double divisor);
    fc_status (*broadcast)(fc_comm *comm, void *data, size_t bytes, int root);
    fc_status (*all_to_all)(fc_comm *comm, const fc_comm_block *recv, const fc_comm_block *send,
                            const size_t *bytes);
    fc_status (*barrier)(fc_comm *comm);
} fc_comm_ops;

struct fc_comm {
    /* Constant after create. */
    const fc_comm_ops *ops;
    int rank;
    int n_ranks;

    /* Owned. */
    fc_region *headers;   /* mapped kind: one line per rank */
    fc_region *staging;   /* mapped kind: two slots per rank; NULL until data moves */
    const void **sources; /* n_ranks entries of scratch for the reduction */
    size_t *columns;      /* n_ranks entries of scratch for what all_to_all receives */
    fc_cursor *cursors; /* scratch of all_to_all: n_ranks for what is sent, n_ranks for the rest */
    char *scratch;      /* message kind: what the process group may overwrite */
    size_t scratch_bytes;

    /* Borrowed from the creator until destroy. */
    fc_transport *transport;

    /* Serialized like the calls. */
    uint64_t sequence; /* collectives started */
    uint64_t step;     /* steps published */
    uint64_t phase;    /* of the caller, counted alike on all ranks; 0: there are none */
    size_t slot_bytes; /* of each staging slot; equal on all ranks */
};

extern const fc_comm_ops fc_comm_mapped_ops;
extern const fc_comm_ops fc_comm_message_ops;

/* The description of the next collective. */
fc_comm_call fc_comm_start(fc_comm *comm, fc_comm_op op, size_t bytes, fc_dtype dtype,
                           double divisor, int root);

/* Makes slots of at least `bytes`, at most FC_COMM_SLOT_MAX; costs a step and a mapping when they
 * must grow. */
#define FC_COMM_SLOT_MAX ((size_t)32 << 20)
FC_MUST_CHECK fc_status fc_comm_reserve(fc_comm *comm, const fc_comm_call *call, size_t bytes);

/* A rank's slot in the step that fc_comm_meet opens next, or has opened last. */
char *fc_comm_next_slot(const fc_comm *comm);
const char *fc_comm_slot(const fc_comm *comm, int rank);

/* Publishes what was staged, waits for all ranks and compares their calls. A failure breaks the
 * transport. */
FC_MUST_CHECK fc_status fc_comm_meet(fc_comm *comm, const fc_comm_call *call);

/* Mapped kind: peers that are in the phase, or come to it, do not wait for this rank any more. */
void fc_comm_fail_phase(fc_comm *comm, uint64_t phase);
/* The words for it: two ranks as the world numbers them. */
void fc_comm_tell_left(char *out, size_t bytes, int left, int waiting);

#endif
