/* Reductions keyed by unit: each rank posts what it has, everybody adds up what was posted.
 *
 * A post copies the receivers' parts into this rank's arena and publishes a tag in the unit's lane.
 * A reduction can be finished once every peer has posted the unit in this phase or has closed the
 * phase without it (then it counts as zero). So ranks may post units in any order, and skip some,
 * without waiting for one another; only a full arena waits, and while it does, peers' posts are
 * finished or copied away (spilled), so that two ranks with opposite orders cannot block each
 * other.
 *
 * Steps: reserve (until it no longer says FC_AGAIN), write the parts, commit; next, sources,
 * consume for each reduction. Bytes per rank: a post writes every part once; finishing reads
 * n_ranks parts. Threading: serialized.
 */
#ifndef FC_ENGINE_EXCHANGE_H
#define FC_ENGINE_EXCHANGE_H

#include "base/status.h"
#include "engine/domain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Room for the unit's parts in this rank's arena: one part per receiver (or one for all),
 * part_bytes apart, in the types of `wire`. FC_AGAIN when there is none yet: finish what
 * fc_exchange_next(OWN) offers, fc_exchange_make_way, and try again. */
FC_MUST_CHECK fc_status fc_exchange_reserve(fc_unit *unit, size_t part_bytes, fc_wire wire,
                                            char **parts_out);

/* The parameters present in the post under construction. Cleared by commit. */
void fc_exchange_set_present(fc_unit *unit, size_t param);
bool fc_exchange_is_present(const fc_unit *unit, size_t param);

/* Publishes the post; after reserve and the writes. The part for this rank itself may be written
 * later, up to the next reserve in this domain, or never if fc_exchange_next offers the reduction
 * before that: then the source's `grads` take its place. */
void fc_exchange_commit(fc_unit *unit);

/* Says that this rank keeps the unit's gradients for a later backward: a peer that reduces it now
 * gets an error. */
void fc_exchange_accumulate(fc_unit *unit);

/* Where fc_exchange_next looks. */
typedef enum fc_search {
    FC_SEARCH_OLDEST, /* this rank's oldest unfinished post */
    FC_SEARCH_OWN,    /* all of this rank's unfinished posts */
    FC_SEARCH_ALL /* whatever any rank posted in this phase; waits. After fc_domain_mark_closed */
} fc_search;

/* The next unit with a reduction to finish, or NULL: none yet (OLDEST, OWN), or none left (ALL).
 * One that a peer has not posted which has left the phase by an exception is not found, and an
 * error of ALL when no other one is left. */
FC_MUST_CHECK fc_status fc_exchange_next(fc_domain *domain, fc_search search, fc_unit **unit_out);

/* Waits until the unit's last post of this rank can be finished. A peer that has left the phase by
 * an exception without a post of its own is an error. */
FC_MUST_CHECK fc_status fc_exchange_await(fc_unit *unit);

/* Progress towards reserving room for `unit`: copies a peer's post away, or waits for a peer to
 * read ours. */
FC_MUST_CHECK fc_status fc_exchange_make_way(fc_unit *unit);

/* A gradient of a whole parameter, laid out as the parameter is. */
typedef struct fc_gradient {
    const void *data; /* NULL: none */
    fc_dtype dtype;
    bool is_exclusive; /* nobody else can write to it: it may be read later */
    bool is_wanted;    /* the parameter is trained now */
} fc_gradient;

/* What one rank posted for this rank. Borrowed until fc_exchange_consume. */
typedef struct fc_source {
    const char *part;     /* NULL: it posted nothing, which counts as zero */
    const uint64_t *mask; /* the parameters present in it */
    fc_wire wire;
    /* NULL, or by parameter this rank's full gradients in the wire's types, read instead of the
     * part. Set by the caller. */
    const fc_gradient *grads;
} fc_source;
/* FC_ERR_MISMATCH: what a rank says of its post cannot be. */
FC_MUST_CHECK fc_status fc_exchange_sources(fc_unit *unit, fc_source *sources_out);

/* Lets the posters reuse their room. */
void fc_exchange_consume(fc_unit *unit);

/* Forgets this rank's unfinished posts of a failed phase. */
void fc_exchange_reset(fc_domain *domain);

#ifdef __cplusplus
}
#endif
#endif
