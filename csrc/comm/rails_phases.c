/* Ranks that leave a phase by an exception while others wait; see [Note: left phases]. */
#include "comm/rails_impl.h"

#include <stdio.h>

static uint64_t load(const _Atomic uint64_t *word)
{
    return atomic_load_explicit(word, memory_order_acquire);
}

static void store(_Atomic uint64_t *word, uint64_t value)
{
    atomic_store_explicit(word, value, memory_order_release);
}

/* A phase is known by how many have begun, which all ranks count alike, and by how often this rank
 * has left one since: who left one that the others completed counts with them again from the next
 * one on. */
#define LEFT_BITS 8

void rails_enter_phase(rails *r, uint64_t phase)
{
    store(&r->phase, phase);
    if (r->local != NULL) {
        r->local->phase = phase;
    }
}

void rails_open_phase(void *context)
{
    rails *r = context;

    rails_enter_phase(r, ((load(&r->phase) >> LEFT_BITS) + 1) << LEFT_BITS);
}

/* Of what was begun nobody knows yet whether it arrives. The last one may be what broke these. */
static uint64_t collectives_ended(const rails *r)
{
    uint64_t n = r->is_broken && r->sequence > 0 ? r->sequence - 1 : r->sequence;

    for (int k = RAILS_AT_ONCE + 1; k < RAILS_N_KINDS; k++) {
        const rails_call *call = &r->calls[k];

        if (call->is_open && !call->has_arrived && call->header.sequence <= n) {
            n = call->header.sequence - 1;
        }
    }
    return n;
}

void rails_tell_broken(rails *r)
{
    store(&r->failed_after, collectives_ended(r));
    store(&r->failed, RAILS_BROKEN);
}

void rails_fail_phase(void *context)
{
    rails *r = context;
    const uint64_t phase = load(&r->phase);

    if (r->is_broken) {
        return; /* all that wait hear of that */
    }
    /* In this order: who reads the phase finds no fewer collectives than belong to it. */
    store(&r->failed_after, collectives_ended(r));
    store(&r->failed, phase);
    if (r->local != NULL) {
        fc_comm_fail_phase(r->local, phase);
    }
    rails_enter_phase(r, phase + 1);
}

void rails_give_up(void *context, const char *text)
{
    (void)rails_break(context, FC_ERR_MISMATCH, text);
}

bool rails_has_left(const rails *r, const rails_header *theirs)
{
    return theirs->failed != 0 && (int32_t)(theirs->failed - (uint32_t)load(&r->phase)) >= 0;
}

void rails_tell_left(const rails *r, int peer, char *out, size_t bytes)
{
    fc_comm_tell_left(out, bytes, r->global_ranks[peer], r->global_ranks[r->rank]);
}

fc_rails_failure fc_rails_failed(const fc_message_ops *ops)
{
    const rails *r = rails_in(ops);
    fc_rails_failure failure = {0};

    if (r != NULL) {
        failure.phase = load(&r->failed);
        failure.after = load(&r->failed_after);
    }
    return failure;
}

void fc_rails_hear(const fc_message_ops *ops, int rank, fc_rails_failure failure)
{
    const rails *r = rails_in(ops);
    fc_rails_wait wait;
    char text[FC_MESSAGE_BYTES / 2];

    if (r != NULL && fc_rails_waits(ops, &wait) && wait.rank == rank &&
        failure.phase >= load(&r->phase) && failure.after < load(&r->awaited_in)) {
        if (failure.phase == RAILS_BROKEN) {
            (void)snprintf(text, sizeof(text), "rank %d has failed, as its own error says",
                           r->global_ranks[rank]);
        } else {
            rails_tell_left(r, rank, text, sizeof(text));
        }
        fc_rails_interrupt(ops, text);
    }
}
