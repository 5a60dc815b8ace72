/* Steps of mapped collectives: headers, comparison, staging memory. [Note: steps] in comm_impl.h.
 */
#include "comm/comm_impl.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#define SLOT_MIN ((size_t)64 << 10)
#define STAGING_FINGERPRINT UINT64_C(0x73746167650001)

/* One per rank, written by that rank alone. */
typedef struct header_line {
    fc_word step;
    fc_word failed; /* the last phase that was left by an exception */
    fc_comm_call calls[2];
} header_line;

static_assert(sizeof(fc_comm_call) == 40, "read by other processes");
static_assert(sizeof(header_line) <= FC_CACHE_LINE, "one line per rank");

static const char *const op_names[FC_COMM_OP_COUNT] = {"all_gather", "reduce_scatter", "all_reduce",
                                                       "broadcast",  "all_to_all",     "barrier"};

typedef struct step_wait {
    const header_line *line; /* of the peer */
    uint64_t step, phase;
} step_wait;

static bool has_failed(const header_line *line, uint64_t phase)
{
    return phase != 0 && fc_word_load(&line->failed) >= phase;
}

static bool has_stepped_or_failed(void *arg)
{
    const step_wait *w = arg;

    return fc_word_load(&w->line->step) >= w->step || has_failed(w->line, w->phase);
}

static header_line *line_of(const fc_comm *comm, int rank)
{
    return (header_line *)(void *)(comm->headers->shared + (size_t)rank * FC_CACHE_LINE);
}

fc_comm_call fc_comm_start(fc_comm *comm, fc_comm_op op, size_t bytes, fc_dtype dtype,
                           double divisor, int root)
{
    comm->sequence++;
    return (fc_comm_call){.sequence = comm->sequence,
                          .bytes = bytes,
                          .divisor = divisor,
                          .op = (uint32_t)op,
                          .dtype = (uint32_t)dtype,
                          .root = root};
}

/* From a peer: every field may hold anything. */
static void describe(char *out, size_t bytes, const fc_comm_call *call)
{
    char extra[64] = "";

    if (call->op == FC_COMM_BROADCAST) {
        (void)snprintf(extra, sizeof(extra), " from rank %d", (int)call->root);
    } else if (call->op == FC_COMM_REDUCE_SCATTER || call->op == FC_COMM_ALL_REDUCE) {
        (void)snprintf(extra, sizeof(extra), " of %s divided by %g",
                       call->dtype < FC_DTYPE_COUNT ? fc_dtype_name((fc_dtype)call->dtype) : "?",
                       call->divisor);
    }
    (void)snprintf(out, bytes, "%s of %llu bytes%s (call %llu)",
                   call->op < FC_COMM_OP_COUNT ? op_names[call->op] : "?",
                   (unsigned long long)call->bytes, extra, (unsigned long long)call->sequence);
}

void fc_comm_tell_left(char *out, size_t bytes, int left, int waiting)
{
    (void)snprintf(out, bytes,
                   "rank %d left its forward or backward by an exception while rank %d waited for "
                   "it; the gradients of this step are not complete",
                   left, waiting);
}

static fc_status fail_left(fc_comm *comm, int peer)
{
    char text[FC_MESSAGE_BYTES];

    fc_comm_tell_left(text, sizeof(text), fc_transport_global_rank(comm->transport, peer),
                      fc_transport_global_rank(comm->transport, comm->rank));
    return fc_transport_abort(comm->transport, FC_ERR_PEER, text);
}

/* All ranks see the same headers, so all find the same first difference. */
static fc_status compare_calls(fc_comm *comm)
{
    const fc_comm_call first = line_of(comm, 0)->calls[comm->step % 2];

    for (int r = 1; r < comm->n_ranks; r++) {
        const fc_comm_call call = line_of(comm, r)->calls[comm->step % 2];

        if (memcmp(&call, &first, sizeof(call)) != 0) {
            char ours[160];
            char theirs[160];
            char text[FC_MESSAGE_BYTES];

            for (int i = 0; i < comm->n_ranks; i++) {
                if (i != comm->rank && has_failed(line_of(comm, i), comm->phase)) {
                    return fail_left(comm, i);
                }
            }
            describe(ours, sizeof(ours), &first);
            describe(theirs, sizeof(theirs), &call);
            (void)snprintf(
                text, sizeof(text),
                "ranks of process group %s call different collectives: rank %d %s, rank %d %s",
                fc_transport_name(comm->transport), fc_transport_global_rank(comm->transport, 0),
                ours, fc_transport_global_rank(comm->transport, r), theirs);
            return fc_transport_abort(comm->transport, FC_ERR_MISMATCH, text);
        }
    }
    return FC_OK;
}

fc_status fc_comm_meet(fc_comm *comm, const fc_comm_call *call)
{
    header_line *mine = line_of(comm, comm->rank);
    fc_wait_info info = {.op = op_names[call->op], .sequence = call->sequence};

    comm->step++;
    mine->calls[comm->step % 2] = *call;
    fc_transport_publish(comm->transport, &mine->step, comm->step);
    for (int i = 1; i < comm->n_ranks; i++) {
        int peer = (comm->rank + i) % comm->n_ranks;
        step_wait w = {.line = line_of(comm, peer), .step = comm->step, .phase = comm->phase};
        fc_status st = fc_transport_wait(comm->transport, peer, has_stepped_or_failed, &w, &info);

        if (st == FC_ERR_INTERRUPTED) {
            /* Out of step with its peers, this rank cannot go on. */
            return fc_transport_abort(comm->transport, st, fc_last_message());
        }
        FC_TRY(st);
        if (fc_word_load(&w.line->step) < w.step) {
            return fail_left(comm, peer);
        }
    }
    return compare_calls(comm);
}

void fc_comm_fail_phase(fc_comm *comm, uint64_t phase)
{
    fc_transport_publish(comm->transport, &line_of(comm, comm->rank)->failed, phase);
}

static char *slot_at(const fc_comm *comm, int rank, uint64_t step)
{
    size_t index = (size_t)rank * 2 + (size_t)(step % 2);

    return comm->staging->shared + index * comm->slot_bytes;
}

char *fc_comm_next_slot(const fc_comm *comm)
{
    return slot_at(comm, comm->rank, comm->step + 1);
}

const char *fc_comm_slot(const fc_comm *comm, int rank)
{
    return slot_at(comm, rank, comm->step);
}

fc_status fc_comm_reserve(fc_comm *comm, const fc_comm_call *call, size_t bytes)
{
    size_t slot_bytes = comm->slot_bytes > 0 ? comm->slot_bytes : SLOT_MIN;
    fc_region *staging;

    assert(bytes <= FC_COMM_SLOT_MAX);
    /* The smallest call asks for the first mapping too: slots exist from then on. */
    if (comm->staging != NULL && bytes <= comm->slot_bytes) {
        return FC_OK;
    }
    while (slot_bytes < bytes) {
        slot_bytes *= 2;
    }
    /* Ranks with different calls may have no need to grow: they must see this call before a mapping
     * begins. */
    FC_TRY(fc_comm_meet(comm, call));
    /* Nobody reads the old slots any more. */
    FC_TRY(fc_transport_map_region(comm->transport, "staging memory",
                                   2 * slot_bytes * (size_t)comm->n_ranks, STAGING_FINGERPRINT,
                                   &staging));
    fc_region_release(comm->staging);
    comm->staging = staging;
    comm->slot_bytes = slot_bytes;
    return FC_OK;
}
