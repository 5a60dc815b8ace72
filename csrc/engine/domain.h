/* Units that travel over one process group: their shared memory and their common clock.
 *
 * [Note: the clock] torch waits for its peers three times per unit and step. Here a shard is final
 * once its owner's optimizer is done, so one announcement per *phase* makes every gather of that
 * phase a read without a wait. A phase is one forward or one backward of the root. Each rank has
 * one growing word,
 *
 *     step << 24 | phase << 8 | state        phase 0: forward, 1..: backwards of that step; state:
 * OPEN, CLOSED
 *
 * Opening a phase announces "my shards are final". A rank reads peers' shards in a phase only after
 * every peer has reached it (fc_domain_ready), and closing it waits until every peer has closed it
 * (fc_domain_close), hence has read its last byte: between phases an owner may write its shards. A
 * rank that skips a phase is seen by its later word. A second word names the last phase that an
 * exception ended; peers that were still in it get an error. The largest clock says that the rank
 * has left for good. Shards that are written within a forward after all are read after a *turn*,
 * for which all ranks wait.
 *
 * [Note: out of step] With its clock a rank publishes what the phase is: what for, which module
 * began it, how many optimizer steps its shards have seen, and which phase came before it. Ranks
 * that meet in a phase and differ, or of which one has gone past a phase without it, would add up
 * or read what does not belong together; all of them get one sentence that says who did what.
 *
 * Over a message transport the collectives order the ranks, and end processes or hang where ranks
 * differ. If the ranks share a host the clock is there too (fc_domain_watch): they meet before each
 * collective, which is not begun if they differ. Else they gather a word before the first of a
 * phase.
 *
 * Ownership: the domain owns its units' layouts, borrows the transport. Threading: serialized.
 */
#ifndef FC_ENGINE_DOMAIN_H
#define FC_ENGINE_DOMAIN_H

#include "base/status.h"
#include "engine/layout.h"
#include "transport/transport.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The most ranks whose gradients one unit adds up. */
#define FC_MAX_RANKS 1024

typedef struct fc_domain fc_domain;
typedef struct fc_unit fc_unit;

/* What travels in a reduction: a part per rank (reduce-scatter), or one part for all (all-reduce).
 */
typedef enum fc_domain_kind {
    FC_DOMAIN_SHARD,
    FC_DOMAIN_REPLICATE
} fc_domain_kind;

typedef struct fc_unit_desc {
    const char *name; /* for messages; copied */
    fc_param *params; /* and their inputs, see layout.h; copied */
    size_t n_params;
} fc_unit_desc;

/* Collective over the transport. In a REPLICATE domain the parameters' layouts are those of the
 * shard domain (shard_rank of n_shards): only their parts are used. Failure leaves nothing behind.
 */
FC_MUST_CHECK fc_status fc_domain_create(fc_transport *transport, fc_domain_kind kind,
                                         const fc_unit_desc *units, size_t n_units, int shard_rank,
                                         int n_shards, fc_domain **out);
void fc_domain_destroy(fc_domain *domain); /* local; NULL is fine */

/* Makes them the domains of one root, whose phases open and close together: a rank that waits in
 * one of them copies away what is in its peers' way in the others. Local. */
void fc_domain_link(fc_domain *const *domains, size_t n_domains);

fc_unit *fc_domain_unit(fc_domain *domain, size_t index);
size_t fc_domain_n_units(const fc_domain *domain);
fc_transport *fc_domain_transport(fc_domain *domain);
bool fc_domain_is_mapped(const fc_domain *domain);
bool fc_domain_is_replicate(const fc_domain *domain);
bool fc_domain_is_packed(const fc_domain *domain);  /* see fc_param */
bool fc_domain_is_visible(const fc_domain *domain); /* and its units' collectives are messages */
int fc_domain_rank(const fc_domain *domain);
int fc_domain_n_ranks(const fc_domain *domain);

/* What a phase is for. All but the last begin a new step. */
typedef enum fc_phase {
    FC_PHASE_FORWARD,
    FC_PHASE_FORWARD_NO_GRAD,
    FC_PHASE_UNSHARD, /* outside of forward and backward */
    FC_PHASE_BACKWARD
} fc_phase;

/* What the ranks that meet in a phase must have alike; of a backward the kind alone. */
typedef struct fc_opening {
    fc_phase phase;
    uint32_t opener;  /* the module that began it: its place in fc_domain_name_openers */
    uint64_t updates; /* optimizer steps and loads that this rank's shards have seen */
} fc_opening;

/* `updates` of who does not say. */
#define FC_UPDATES_UNKNOWN UINT64_MAX

/* How the modules that may begin a phase are called; alike on all ranks, copied. The first one is
 * the root. */
FC_MUST_CHECK fc_status fc_domain_name_openers(fc_domain *domain, const char *const *names,
                                               size_t n_names);
/* Collective, once, in a domain of messages: from now on it has a clock in `watch`, a mapped
 * transport over the same ranks (borrowed), and ranks wait for one another before each
 * collective. */
FC_MUST_CHECK fc_status fc_domain_watch(fc_domain *domain, fc_transport *watch);

/* Opens the next step's first phase or the next backward of the current step. An open phase is
 * failed first. */
void fc_domain_open(fc_domain *domain, fc_opening opening);
/* Before a collective of messages that a unit's parameters or gradients need, made elsewhere than
 * in this folder: the ranks meet here first. `op` is "all-gather", "reduce-scatter" or
 * "all-reduce"; `detail` a fingerprint of the parameters whose gradients take part, or 0. */
FC_MUST_CHECK fc_status fc_domain_meet(fc_unit *unit, const char *op, uint64_t detail);
/* Before the first read of peers' shards in a phase; waits once per phase. A peer whose step began
 * otherwise is an error, here or when the phase is closed. */
FC_MUST_CHECK fc_status fc_domain_ready(fc_domain *domain, const fc_unit *unit);
/* Within a forward: waits until every peer has called it as often in this forward as this rank, for
 * shards that were written since it began. A peer that ends the forward instead is an error. */
FC_MUST_CHECK fc_status fc_domain_turn(fc_domain *domain, const fc_unit *unit);
/* Says that this rank reads and posts no more in this phase. */
void fc_domain_mark_closed(fc_domain *domain);
/* Waits until every peer has closed the phase. After fc_domain_mark_closed. */
FC_MUST_CHECK fc_status fc_domain_close(fc_domain *domain);
/* Ends an open phase as failed; local. */
void fc_domain_fail(fc_domain *domain);
/* Says that this rank opens no more phases: who waits for it gets an error instead. Local. */
void fc_domain_leave(fc_domain *domain);
/* After fc_domain_leave: waits until every peer has left too. A peer that goes on instead is an
 * error. */
FC_MUST_CHECK fc_status fc_domain_await_left(fc_domain *domain);
bool fc_domain_is_open(const fc_domain *domain);
bool fc_domain_in_backward(const fc_domain *domain);

/* Bytes of a domain. Over messages only the gradients are not 0. */
typedef struct fc_domain_sizes {
    size_t control; /* shared by all ranks: clocks, lanes */
    size_t full;    /* shared by all ranks: unsharded buffers, with the shards that lie in them */
    size_t aliased; /* shards of one rank that do */
    size_t arena;   /* shared memory for one rank's outgoing gradients */
    size_t grads;   /* gradients of one rank's trainable shards, in pages */
    size_t largest; /* unsharded buffer of the largest unit */
    size_t pack;    /* largest of the units' packs, and of their parts */
    size_t part;
    size_t small; /* unsharded buffers of units that may be gathered ahead, over messages */
    size_t parts; /* of all units that are trained: sums that wait for the replicas */
} fc_domain_sizes;

fc_domain_sizes fc_domain_measure(const fc_domain *domain);
/* What a domain of `n_ranks` would take, of which none has to exist; local. */
FC_MUST_CHECK fc_status fc_domain_plan(fc_domain_kind kind, const fc_unit_desc *units,
                                       size_t n_units, int n_shards, int n_ranks, bool is_mapped,
                                       fc_domain_sizes *out);
/* Gives back what this rank holds for speed alone: copies of posts, and its arena if no peer still
 * reads there. Between phases. Returns the bytes of the arena that may have been in use. */
size_t fc_domain_trim(fc_domain *domain);

/* Bytes of shared memory mapped by this domain: all of it, and the reduce slots of one rank. */
size_t fc_domain_region_bytes(const fc_domain *domain);
size_t fc_domain_arena_bytes(const fc_domain *domain);

#ifdef __cplusplus
}
#endif
#endif
