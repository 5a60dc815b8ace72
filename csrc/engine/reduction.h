/* A unit's gradients on their way: from what a backward has left to the gradients of its shards.
 *
 * A reduction is submitted once per backward and unit. What it adds up is summed over the shard
 * group, then, if the unit has replicas (HSDP), over these, now or in a later backward: until then
 * the *partial sums* wait here. Gradients that nobody else can write to are *borrowed*: the part
 * for this rank itself is read where autograd left it, unless the next submission comes first.
 *
 * When sums are there they are written through the caller's `fc_reduction_ops`. These may fail:
 * with FC_ERR_INTERRUPTED and an error that the caller keeps. Bytes moved per rank: as in
 * exchange.h in shared memory, as in batch.h and waits.h over messages. Threading: serialized per
 * domain.
 */
#ifndef FC_ENGINE_REDUCTION_H
#define FC_ENGINE_REDUCTION_H

#include "base/status.h"
#include "engine/domain.h"
#include "engine/exchange.h"
#include "engine/slots.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_reduction fc_reduction;

/* Borrowed gradients of more bytes are not kept while backward goes on: they would add to its peak.
 */
#define FC_BORROWED_BYTES_MAX ((size_t)16 << 20)

/* How gradients are divided and where they stop. */
typedef struct fc_reduce_options {
    double divisor;   /* of the sum over all ranks */
    bool all_reduce;  /* false: keep the sum over the shard group (HSDP) */
    bool defer_hooks; /* the caller's: passed on to `assign` */
    bool is_sum;      /* the caller's: of devices whose collectives could scale what they add up */
} fc_reduce_options;

/* What a unit's owner does for its reductions. `owner`: see fc_reduction_attach. */
typedef struct fc_reduction_ops {
    fc_status (*options)(void *owner, fc_reduce_options *options_out);
    /* One buffer for the gradients of all shards, laid out as the layout says; NULL: some shard has
     * a gradient, so that they are written one by one. */
    fc_status (*flat)(void *owner, void **flat_out);
    /* It is filled: those of all trainable parameters. */
    fc_status (*assign_flat)(void *owner, const fc_reduce_options *options);
    /* Gradients are written one by one now. */
    fc_status (*prepare)(void *owner);
    /* Where a parameter's goes: grad_numel elements of the layout's type. */
    fc_status (*target)(void *owner, size_t param, void **target_out, bool *accumulate_out);
    fc_status (*assign)(void *owner, size_t param, const fc_reduce_options *options);
    /* What was submitted is not read any more. */
    void (*release)(void *memory);
    /* A submission waits for room, or does no longer. */
    void (*wait)(void *owner, bool begins);
    /* The first parameter from `from` on that is frozen here, and of which this rank has brought no
     * gradient since it was not; or the number of parameters. */
    size_t (*find_frozen)(void *owner, size_t from);
    /* A parameter's name, for people. */
    void (*name)(void *owner, size_t param, char *out, size_t bytes);
} fc_reduction_ops;

/* Bytes that a unit has moved, since it was made. The payload is what a collective would bring to
 * this rank over any transport; what was copied is what this rank really wrote to move it. */
typedef struct fc_traffic {
    uint64_t gathers, gathered;   /* all-gathers: the peers' chunks, in the compute dtype */
    uint64_t reductions, reduced; /* reduce-scatters: a chunk per peer, in the reduce dtype */
    uint64_t all_reductions, all_reduced; /* between replicas: twice (n-1)/n of the part */
    uint64_t copied;
    uint64_t unshards; /* of which those over several ranks are gathers */
} fc_traffic;
void fc_traffic_add(fc_traffic *to, const fc_traffic *more);

/* Of a unit and its twin between replicas, NULL without any; both outlive it, as `scratch` does. */
FC_MUST_CHECK fc_status fc_reduction_create(fc_unit *shard, fc_unit *replicate, fc_slots *scratch,
                                            const fc_reduction_ops *ops, fc_reduction **out);
/* NULL is fine. */
void fc_reduction_destroy(fc_reduction *reduction);
/* Reductions of the unit are this one's, for `owner`, which fc_unit_owner returns; NULL: nobody's.
 */
void fc_reduction_attach(fc_reduction *reduction, void *owner);
fc_traffic *fc_reduction_traffic(fc_reduction *reduction);

/* ---- submitting ---- */

/* Hands a backward's gradients over, one per parameter. `memory` holds them and goes to `release`,
 * whatever comes of it. Finishes other reductions while it waits for room. */
FC_MUST_CHECK fc_status fc_reduction_submit(fc_reduction *reduction, const fc_gradient *grads,
                                            void *memory, const fc_reduce_options *options);
/* For a unit whose sums are made on a device: counts the submission. True if it is to be summed up
 * to the end, false if partial sums stay. `mask_out`: of the parameters in the sum, those that wait
 * included; `print_out`: a fingerprint of these. */
bool fc_reduction_announce(fc_reduction *reduction, const fc_gradient *grads,
                           const fc_reduce_options *options, uint64_t *mask_out,
                           uint64_t *print_out);
/* This rank keeps the unit's gradients for a later backward: a peer that reduces it now gets an
 * error. */
void fc_reduction_accumulate(fc_reduction *reduction);
/* Whether this backward's sums have been handed to the replicas. */
bool fc_reduction_is_submitted(const fc_reduction *reduction);
/* Submissions of this step were lost. */
void fc_reduction_forget(fc_reduction *reduction);

/* ---- finishing ---- */

/* Finishes what the domain offers; of a message domain its batch, unless only the oldest is asked
 * for. */
FC_MUST_CHECK fc_status fc_reduction_finish_ready(fc_domain *domain, fc_search search);
/* A backward's end, for all domains of a root: sums over shards first, since finishing them submits
 * to the replicas. This rank has left all domains of a kind before it waits in one, whichever its
 * peers wait in. */
FC_MUST_CHECK fc_status fc_reduction_finish_all(fc_domain *const *domains, size_t n_domains);
/* Gives large borrowed gradients back: the backward that goes on needs the memory. */
void fc_reduction_return_large(fc_domain *domain);

/* ---- partial sums ---- */

bool fc_reduction_has_sums(const fc_reduction *reduction);
bool fc_reduction_has_sum(const fc_reduction *reduction, size_t param);
/* chunk_numel elements in the reduce dtype; NULL: none, or on a device. */
const void *fc_reduction_sum(const fc_reduction *reduction, size_t param);
/* Takes those of a unit whose place this one takes; of the same layout but for the reduce dtypes,
 * and for sums on a device for these, too. */
FC_MUST_CHECK fc_status fc_reduction_inherit(fc_reduction *reduction, const fc_reduction *former);
void fc_reduction_drop_sums(fc_reduction *reduction);
/* Gives their memory back unless something waits in it. */
void fc_reduction_trim(fc_reduction *reduction);
size_t fc_reduction_sum_bytes(const fc_reduction *reduction);

#ifdef __cplusplus
}
#endif
#endif
