/* Batches: units of a message domain that travel in one collective.
 *
 * [Note: batches] Over a process group a collective of a small unit costs its latency alone, so
 * small units share one. Which do is decided from what all ranks have alike: layouts, the order in
 * which units came, and what peers said of a unit when it was last gathered. What a rank gathers
 * begins with a *note* that names the unit: ranks that gather different ones get an error.
 *
 * A batch of posts is filled until it is full, until another post has to go alone, or to the end of
 * backward. Bytes per rank: a post writes every part once, the batch moves them together once more.
 * Threading: serialized per domain.
 */
#ifndef FC_ENGINE_BATCH_H
#define FC_ENGINE_BATCH_H

#include "base/status.h"
#include "engine/domain.h"
#include "engine/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A unit that moves more bytes than this, on all ranks together, gains nothing in a batch. */
#define FC_BATCH_UNIT_BYTES ((size_t)64 << 10)

/* The most bytes of a batch, on all ranks together; 0 (at first): units travel alone. Equal on all
 * ranks, which is checked when a unit is gathered. */
void fc_batch_limit(fc_domain *domain, size_t bytes);

/* ---- gathers ---- */

/* One unit's shards, a pointer per parameter, and where it goes, laid out as the unsharded buffer.
 */
typedef struct fc_batch_gather {
    fc_unit *unit;
    const void *const *shards;
    void *dst;
    bool is_observed; /* this rank wants to see the unit's gradients as soon as torch shows them */
} fc_batch_gather;

/* Scratch memory for a gather of these units: what this rank sends, and what all do where a
 * transport gathers into memory. */
size_t fc_batch_pack_bytes(const fc_batch_gather *units, size_t n_units);
/* One all-gather. Afterwards a unit that any rank wants to observe joins no batch of posts. A
 * failure leaves units and their buffers as they were. */
FC_MUST_CHECK fc_status fc_batch_all_gather(const fc_batch_gather *units, size_t n_units,
                                            char *pack);

/* The same of one unit, begun and ended later: `pack` lies still until then, `dst` is where it goes
 * in the end. FC_AGAIN: another one is under way. */
FC_MUST_CHECK fc_status fc_batch_begin_gather(const fc_batch_gather *unit, char *pack);
FC_MUST_CHECK fc_status fc_batch_end_gather(const fc_batch_gather *unit);

/* ---- posts ---- */

typedef struct fc_batch fc_batch;

/* Whether the unit's posts may share a collective. */
bool fc_batch_admits(const fc_unit *unit);
/* Whether its next post joins those that wait; else they go first (fc_batch_reduce). */
bool fc_batch_joins(const fc_unit *unit);
/* The domain of the unit's root whose posts wait, or NULL. */
fc_domain *fc_batch_waiting(fc_domain *domain);
/* Room for the post of a unit that is admitted, filled with zeros: a part per rank, `pitch_out`
 * bytes apart, in the reduce dtype. `mask`: the parameters present in it, copied. */
FC_MUST_CHECK fc_status fc_batch_add(fc_unit *unit, char **parts_out, size_t *pitch_out);
/* Takes the domain's batch and sums it up; NULL: nothing waits. The caller gives it back. */
FC_MUST_CHECK fc_status fc_batch_reduce(fc_domain *domain, fc_batch **out);
/* The next unit in it and its sum, borrowed; NULL: none is left. */
fc_unit *fc_batch_next(fc_batch *batch, fc_source *sum_out);
void fc_batch_give_back(fc_batch *batch);

#ifdef __cplusplus
}
#endif
#endif
