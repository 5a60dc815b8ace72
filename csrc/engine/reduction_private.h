/* Inside of a reduction: what its way over the shard group and between replicas share. */
#ifndef FC_ENGINE_REDUCTION_PRIVATE_H
#define FC_ENGINE_REDUCTION_PRIVATE_H

#include "engine/domain_private.h"
#include "engine/reduction.h"
#include "engine/unit.h"

/* Gradients whose part for this rank itself is not written; `memory` NULL: none. */
typedef struct borrowed {
    const fc_gradient *grads;
    void *memory; /* owned, see `release` */
    size_t bytes;
    fc_wire wire;
    char *parts; /* where the submission lies */
    size_t part_bytes;
} borrowed;

/* A part with its mask in scratch memory, zeros. */
typedef struct scratch_part {
    char *data;
    uint64_t *mask;
} scratch_part;

/* Over messages: a submission whose sum travels. */
typedef struct begun_sum {
    scratch_part sum, parts; /* `parts` NULL: they are read */
    fc_reduce_options options;
} begun_sum;

/* Takes a submission on its way. True in `is_borrowed`: `memory` has found an owner. */
typedef fc_status (*submit_fn)(fc_reduction *r, const fc_gradient *grads, void *memory,
                               const fc_reduce_options *options, bool *is_borrowed);

struct fc_reduction {
    /* Constant after create. */
    fc_unit *shard, *replicate; /* borrowed */
    fc_slots *scratch;          /* borrowed */
    const fc_reduction_ops *ops;
    submit_fn submit; /* by the kind of the shard group's domain */
    /* State. */
    borrowed borrowed;
    begun_sum begun;   /* of the domain's `summing` */
    bool moves_frozen; /* the last submission's collectives do */
    bool keeps_frozen; /* it left sums to the replicas, of which some may have frozen ones */
    bool is_submitted; /* a submission of this backward carries the partial sums */
    char *partial;     /* owned; a part, NULL before the first sum that waits */
    uint64_t *mask;    /* owned; of `partial`, or of sums on a device */
    fc_traffic traffic;
};

static inline void set_bit(uint64_t *mask, size_t i)
{
    mask[i / 64] |= UINT64_C(1) << (i % 64);
}

static inline bool has_bit(const uint64_t *mask, size_t i)
{
    return (mask[i / 64] >> (i % 64) & 1) != 0;
}

static inline void *owner_of(const fc_reduction *r)
{
    return r->shard->owner;
}

FC_MUST_CHECK fc_status reduction_scratch(fc_reduction *r, size_t bytes, scratch_part *out);
void reduction_give_back(fc_reduction *r, scratch_part *part);

/* Casts a gradient into a submission. */
void reduction_stage(fc_reduction *r, fc_unit *unit, size_t param, const fc_gradient *grad,
                     fc_wire wire, fc_receivers receivers, char *parts, size_t part_bytes);
/* The type in which to send gradients: their own where all are alike and the reduction allows it.
 */
fc_wire reduction_wire(const fc_layout *layout, const fc_gradient *grads);
/* A fingerprint of the parameters in a mask. */
uint64_t reduction_print(const fc_reduction *r, const uint64_t *mask);
/* Room for a submission; finishes and spills others until there is some. */
FC_MUST_CHECK fc_status reduction_reserve(fc_reduction *r, fc_unit *unit, size_t part_bytes,
                                          fc_wire wire, char **parts_out);
/* Adds sums up, divides them and writes them to the shards' gradients. */
FC_MUST_CHECK fc_status reduction_write(fc_reduction *r, fc_unit *unit, const fc_source *sources,
                                        int n_sources, const fc_reduce_options *options);

/* ---- sums that travel; reduction_begun.c ---- */

/* Takes `parts` if they are still read. FC_AGAIN: its sum has to be made at once. */
FC_MUST_CHECK fc_status reduction_begin_sum(fc_reduction *r, scratch_part *parts,
                                            const fc_reduce_options *options);
/* The one that the domain has begun is there, and is written to its gradients. */
FC_MUST_CHECK fc_status reduction_end_begun(fc_domain *domain);

/* ---- between replicas; reduction_replicas.c ---- */

/* Gradients of one rank in the shard group go where the replicas read them. */
FC_MUST_CHECK fc_status replicas_submit(fc_reduction *r, const fc_gradient *grads);
/* Adds the shard group's sums to what earlier backwards kept, and keeps them or hands them on. */
FC_MUST_CHECK fc_status replicas_reduce(fc_reduction *r, const fc_source *sources, int n_sources,
                                        const fc_reduce_options *options);
/* The same for one sum in memory that may be written. */
FC_MUST_CHECK fc_status replicas_reduce_part(fc_reduction *r, const scratch_part *sum,
                                             const fc_reduce_options *options);

#endif
