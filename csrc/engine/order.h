/* The order in which a message domain's units are used in backward, and who is gathered ahead.
 *
 * [Note: gathers ahead] Each backward records its order. In the next one a unit's gather brings
 * small units that followed it along, in the same collective. What they are depends on that order
 * and on layouts, which all ranks have alike: who is used is who would be gathered without this,
 * and that ranks have to do alike over a process group. A backward that failed leaves none, since
 * ranks may have come to different units in it: the order before it stays. One that takes another
 * course than the one before drops what it did not use.
 *
 * Only in backward: a script may write shards within a forward, on some ranks alone, and until a
 * peer has told of it (which is a collective) nobody knows that what came ahead is old. In backward
 * it is hooks of gradients that write, so nothing comes ahead while any rank has some (see
 * [Note: batches]); whatever else writes there gets an error.
 *
 * [Note: what travels meanwhile] Where a transport can begin collectives and end them later
 * (rails), the next unit that is too large to come along begins to be gathered when one is used in
 * backward: shards travel while that one computes, and go to their place when the unit is asked
 * for. The sum of a large unit is begun when it is submitted and ended at the next submission, or
 * at the end of backward: it travels while the unit before computes. One of each at a time. Both as
 * above are decided from what all ranks have alike. What is begun and not used is dropped at the
 * end of the phase, by all ranks alike.
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

/* The unit is used in the backward that runs. */
FC_MUST_CHECK fc_status fc_order_note(fc_unit *unit);

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
