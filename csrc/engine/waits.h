/* How often and how long this rank waited for its peers, by unit and by what it waited for.
 *
 * Counted where a wait really happens: who finds its peers there reads no clock. Over messages each
 * collective counts as a wait for all ranks. Threading: serialized per domain.
 */
#ifndef FC_ENGINE_WAITS_H
#define FC_ENGINE_WAITS_H

#include "base/status.h"
#include "engine/domain.h"
#include "engine/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fc_wait_kind {
    FC_WAIT_FORWARD,  /* for shards to read in forward; without a unit: for the end of forward */
    FC_WAIT_BACKWARD, /* the same of backward */
    FC_WAIT_REDUCE,   /* for gradients to add up, or for room to post them */
    FC_WAIT_KIND_COUNT
} fc_wait_kind;

typedef struct fc_waits {
    uint64_t n;
    uint64_t ns;
    uint64_t longest_ns;
    int longest_peer; /* whom the longest was for; -1: nobody in particular */
} fc_waits;

/* Since the domain was made or last reset. unit NULL: those for the ends of phases. */
fc_waits fc_waits_of(const fc_domain *domain, const fc_unit *unit, fc_wait_kind kind);
/* Nanoseconds that this rank waited for `peer`. */
uint64_t fc_waits_for(const fc_domain *domain, int peer);
/* Phases that were opened since then. */
uint64_t fc_waits_phases(const fc_domain *domain, bool is_backward);
void fc_waits_reset(fc_domain *domain);

/* What collectives move of a part; equal on all ranks. */
typedef struct fc_present {
    const fc_layout *layout; /* of the shard: where parameters lie */
    const uint64_t *mask;    /* parts are packed, and have gradients of these; NULL: all travels */
    bool frozen;             /* with parameters that were frozen at set-up */
    uint64_t print;          /* of the mask, where no element of the parts counts ranks; or 0 */
} fc_present;

/* Collectives of a message transport, timed: one for each section of the unit's part, in order,
 * whatever gradients a rank has. In `parts` those of all ranks lie next to each other in each
 * section, which begins at n_ranks times its place in a part. */
FC_MUST_CHECK fc_status fc_waits_reduce_scatter(fc_unit *unit, void *part, void *parts,
                                                const fc_present *present);
/* In place; nothing on one rank, unless others look at it. */
FC_MUST_CHECK fc_status fc_waits_all_reduce(fc_unit *unit, void *part, const fc_present *present);

#ifdef __cplusplus
}
#endif
#endif
