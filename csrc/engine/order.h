/* The order in which a message domain's units are used in a phase, and who is gathered ahead.
 *
 * [Note: gathers ahead] Each forward and each backward records its order. In the next one a unit's
 * gather brings small units that followed it along, in the same collective. What they are depends
 * on that order and on layouts, which all ranks have alike: who is used is who would be gathered
 * without this, and that ranks have to do alike over a process group. A backward that failed leaves
 * none, since ranks may have come to different units in it: the order before it stays. On ranks
 * that did not fail it another one is left: the first gather of a forward tells that order, too,
 * and if ranks differ nobody follows one in the backward behind it. A phase that takes another
 * course than the one before drops what it did not use.
 *
 * In backward it is hooks of gradients that write shards, so nothing comes ahead while any rank has
 * some (see [Note: batches]); whatever else writes there gets an error.
 *
 * In a forward a script may write shards, on some ranks alone, and who reads what came ahead cannot
 * know. So a rank first looks whether it writes at all: in a forward that follows no order it adds
 * up its shards' bytes as the forward opens and as each unit is gathered, and leaves no order if
 * they differ. The first gather of a forward travels alone, and tells the order that the rank would
 * follow: all follow it if all tell the same, else nobody does. Who then finds that a shard which
 * came ahead has other bytes now gets an error, and leaves no order either; nor does a forward that
 * failed. A script that writes in every forward is so gathered unit by unit, on all ranks.
 *
 * [Note: what travels meanwhile] Where a transport can begin collectives and end them later
 * (rails), the next unit that is too large to come along begins to be gathered when one is used:
 * shards travel while that one computes, and go to their place when the unit is asked for. The sum
 * of a large unit is begun when it is submitted and ended at the next submission, or at the end of
 * backward: it travels while the unit before computes. One of each at a time. Both as above are
 * decided from what all ranks have alike. What is begun and not used is dropped at the end of the
 * phase, by all ranks alike.
 *
 * Threading: serialized per domain.
 */
#ifndef FC_ENGINE_ORDER_H
#define FC_ENGINE_ORDER_H

#include "base/status.h"
#include "engine/domain.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_unsharding fc_unsharding; /* unsharding.h */

/* The unit is used in the phase that runs. */
FC_MUST_CHECK fc_status fc_order_note(fc_unit *unit);

/* Whether units are gathered ahead, in the phase that runs. */
bool fc_order_is_followed(const fc_domain *domain);
/* Whether the next forward looks for writes, as it follows no order. */
bool fc_order_is_learnt(const fc_domain *domain);
/* Whether the unit would ever be gathered ahead: along with others, or begun before its use. */
bool fc_order_may_take(const fc_unit *unit);
/* A shard was written within the forward that runs. */
void fc_order_note_written(fc_domain *domain);

/* A walk along those that followed a unit. */
typedef struct fc_order_walk {
    const fc_domain *domain;
    size_t at;
    size_t bytes; /* of unsharded buffers that may still come along */
} fc_order_walk;

fc_order_walk fc_order_after(const fc_unit *unit);
/* The next one that is small enough, or NULL. */
fc_unit *fc_order_next(fc_order_walk *walk);
/* It comes along. */
void fc_order_take(fc_order_walk *walk, const fc_unit *unit);

/* The next one behind the unit that was used last which is too large to come along, is still to be
 * gathered, and may be before it is asked for; NULL: none. */
fc_unsharding *fc_order_next_large(const fc_domain *domain);

/* The unit came ahead, or is used or dropped. */
void fc_order_set_ahead(fc_unit *unit, bool is_ahead);
/* How many came ahead and were neither yet. */
size_t fc_order_n_ahead(const fc_domain *domain);

#ifdef __cplusplus
}
#endif
#endif
