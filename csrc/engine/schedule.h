/* A rank's units on a device: which work goes into which stream, and what waits for what.
 *
 * Pure scheduling: arithmetic and bytes are the device's. Five streams. *copy-in* packs a rank's
 * shards into a gather slot, *gather* all-gathers it in place, *compute* is the caller's own: it
 * copies out into the unsharded buffer, runs the model and stages gradients. *reduce* scatters and
 * finishes them; with replicas *all-reduce* takes over after the scatter.
 *
 * Units whose gathers are direct (gathers.h) are not copied out: their gather slot is laid out as
 * the unsharded buffer, and is it until the reshard. Shards that need a cast are packed to their
 * place in it, others are sent from where they are.
 *
 * One rank alone has nothing to gather: shards of the parameters' own type may lie where they are
 * used, as the unsharded buffer does (fc_schedule_set_resident). Nor has it anything to scatter:
 * unless they are offloaded, its gradients are finished by compute, from where autograd left them.
 *
 * Order comes from events alone, each of them in FC_SCHEDULE_WAITS. Slots are reused behind the
 * event of their last use; other unsharded buffers are allocated and freed in the order of compute.
 *
 * An iteration is begin, forwards, backwards, end_backward. Between begin and the last end_backward
 * all calls mean one compute stream; a guest, who unshards in between in a stream of its own, comes
 * behind compute, and compute behind it. Every rank makes the same calls in the same order. A
 * failed call leaves the schedule usable after fc_schedule_reset. Threading: serialized.
 */
#ifndef FC_ENGINE_SCHEDULE_H
#define FC_ENGINE_SCHEDULE_H

#include "base/status.h"
#include "device/device.h"
#include "engine/layout.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, who waits, for what) */
#define FC_SCHEDULE_WAITS(X)                                                                       \
    X(OPTIMIZER, "copy-in", "what compute did to the shards before the iteration")                 \
    X(RESIDENT, "compute", "what was done to the shards that it uses where they lie")              \
    X(GUEST, "a guest", "compute, which has unsharded for it")                                     \
    X(GUEST_USE, "compute", "what a guest did with what was unsharded")                            \
    X(PACKED, "gather", "the own part")                                                            \
    X(GATHERED, "compute", "the all-gather, before it copies out or uses it")                      \
    X(GATHER_SLOT, "copy-in", "the last copy-out from the slot, or use of it")                     \
    X(RESHARDED, "copy-in", "the slice that a reshard to a smaller group keeps")                   \
    X(STAGED, "reduce", "the staged gradients")                                                    \
    X(REDUCE_INPUT, "compute", "the scatter that still reads the slot")                            \
    X(SCATTERED, "all-reduce", "the reduce-scatter")                                               \
    X(REDUCE_OUTPUT, "reduce", "the all-reduce that still uses the slot")                          \
    X(REDUCED, "compute", "all gradients, at the end of backward")                                 \
    X(ALL_REDUCED, "compute", "all gradients of replicas, at the end of backward")                 \
    X(UNUSED_GATHER, "compute", "a gather that nobody used, whose shards may change now")          \
    X(DROP_GATHER, "copy-in", "the last use of a slot that is freed")                              \
    X(DROP_OUTPUT, "reduce", "the last use of a slot that is freed")                               \
    X(HOST_GRADIENTS, "the host", "gradients on their way to it")                                  \
    X(HOST_SHARDS, "the host", "offloaded shards that are still read")

typedef enum fc_schedule_wait {
#define FC_SCHEDULE_ENUM(name, who, what) FC_ORDER_##name,
    FC_SCHEDULE_WAITS(FC_SCHEDULE_ENUM)
#undef FC_SCHEDULE_ENUM
    FC_ORDER_COUNT
} fc_schedule_wait;

typedef struct fc_unit fc_unit; /* domain.h */
typedef struct fc_schedule fc_schedule;
typedef struct fc_schedule_unit fc_schedule_unit;

typedef struct fc_schedule_options {
    fc_device *device; /* it and the streams are borrowed */
    fc_stream *copy_in, *gather, *reduce, *all_reduce;
    size_t n_reduce_inputs; /* staged gradients kept at once; 0 stands for 1 */
    size_t max_gathers;     /* prefetches stop at so many gathers in flight; 0: no limit */
    uint64_t without;       /* test aid: bits of waits that are left out */
} fc_schedule_options;

typedef struct fc_schedule_unit_options {
    const char *name;        /* copied */
    const fc_layout *layout; /* borrowed; without aliases */
    fc_device_comm *gather, *reduce;
    fc_device_comm *replicas; /* NULL: there are none */
    bool reshard_after_forward;
    /* A reshard to a smaller group: its size, the place in it, its communicator. 0: to the whole
     * group. */
    int n_post_ranks, post_rank;
    fc_device_comm *post_gather;
    bool is_direct;     /* gathers; the layout must fit */
    bool is_offloaded;  /* shards and reduced gradients are pinned host memory */
    double pre_divisor; /* of gradients before they are added up, for narrow types; else 1 */
    double divisor;     /* of sums */
    /* Whose ranks meet before each of the unit's collectives (fc_domain_meet); borrowed, or NULL.
     */
    fc_unit *shard_unit, *replicate_unit;
} fc_schedule_unit_options;

FC_MUST_CHECK fc_status fc_schedule_create(const fc_schedule_options *options, fc_schedule **out);
/* The device must be idle. NULL is fine; units go too. */
void fc_schedule_destroy(fc_schedule *schedule);
FC_MUST_CHECK fc_status fc_schedule_add(fc_schedule *schedule,
                                        const fc_schedule_unit_options *options,
                                        fc_schedule_unit **out);

/* Shards in the order of the layout's entries, own_rows each; borrowed while they are set. */
void fc_schedule_set_shards(fc_schedule_unit *unit, const void *const *shards);

/* Who makes this rank's part of a gather, where the layout says so. */
typedef struct fc_schedule_maker {
    void *context;
    /* Before each gather, in copy-in: afterwards the shards that are made are set. What they lie
     * in is not needed any more by what comes later in copy-in. NULL: all shards are there. */
    fc_status (*make)(void *context);
} fc_schedule_maker;

void fc_schedule_set_maker(fc_schedule_unit *unit, const fc_schedule_maker *maker);
/* One rank's shards lie in `full` as in the unsharded buffer, which it stands for from the next
 * unshard on; borrowed. NULL: they are packed into a buffer, as before. While the unit is sharded.
 */
FC_MUST_CHECK fc_status fc_schedule_set_resident(fc_schedule_unit *unit, void *full);
/* Local; the unit's memory is freed in the order of compute, and nobody prefetches it any more.
 * NULL is fine. */
void fc_schedule_remove(fc_schedule_unit *unit);
/* Whom to gather after the unit's own copy-out; without, backward takes the unit before it in the
 * order of forwards. `units` is copied; none: as without. */
FC_MUST_CHECK fc_status fc_schedule_set_prefetch(fc_schedule_unit *unit, bool in_backward,
                                                 fc_schedule_unit *const *units, size_t n_units);

/* ---- an iteration ---- */

/* Shards may be read from here on: behind `optimizer`, or behind compute if it is NULL. */
FC_MUST_CHECK fc_status fc_schedule_begin(fc_schedule *schedule, fc_stream *compute,
                                          fc_event *optimizer);
/* Compute, where something lies in its memory still, which a forward without its backward has left,
 * or an unshard: then the next iteration is in that stream, too. NULL: it may be in any. */
fc_stream *fc_schedule_bound_to(const fc_schedule *schedule);
/* The unsharded buffer is there for what compute does next. */
FC_MUST_CHECK fc_status fc_schedule_pre_forward(fc_schedule_unit *unit, void **full_out);
FC_MUST_CHECK fc_status fc_schedule_post_forward(fc_schedule_unit *unit);
/* What it begins with: the unit takes its place in the order of forwards. For callers that reshard
 * by themselves. */
FC_MUST_CHECK fc_status fc_schedule_note_forward(fc_schedule_unit *unit);
/* Gives the unsharded buffer up after a forward; in a smaller group each rank keeps its slice. */
FC_MUST_CHECK fc_status fc_schedule_reshard_after_forward(fc_schedule_unit *unit);
/* Ends a forward that no backward follows: gathers that nobody used are dropped, and their memory,
 * and slices. The host may write offloaded shards. */
FC_MUST_CHECK fc_status fc_schedule_end_forward(fc_schedule *schedule);
FC_MUST_CHECK fc_status fc_schedule_pre_backward(fc_schedule_unit *unit, void **full_out);

typedef enum fc_schedule_sync {
    FC_SYNC_NONE,    /* hold the sum */
    FC_SYNC_SCATTER, /* hold this rank's part of it, before replicas are added */
    FC_SYNC_ALL
} fc_schedule_sync;

typedef struct fc_schedule_grads {
    /* Full gradients, in compute's order; NULL entries: none, taken as zero. NULL: of no parameter.
     */
    const void *const *full;
    const fc_dtype *types;       /* of each; NULL: of type `compute` */
    double pre_divisor, divisor; /* 0: those of the unit */
    void *out;                   /* laid out as the layout's gradient buffer; FC_SYNC_ALL only */
    bool accumulate;
    fc_schedule_sync sync;
    bool keep_unsharded;
    /* A fingerprint of the parameters that are summed up, those held included. All ranks must have
     * the same: who gets a gradient is decided before the sums are there. 0: it is not known. */
    uint64_t present;
} fc_schedule_grads;

/* Nothing is reduced if no gradient is given and none is held; *reduced_out says which. */
FC_MUST_CHECK fc_status fc_schedule_post_backward(fc_schedule_unit *unit,
                                                  const fc_schedule_grads *grads,
                                                  bool *reduced_out);
/* After the last backward compute (and, offloaded, the host) may use all gradients and write
 * shards; before it nothing is waited for. Also ends forwards without a backward. */
FC_MUST_CHECK fc_status fc_schedule_end_backward(fc_schedule *schedule, bool is_last);

/* ---- beside it ---- */

/* Reductions go through another communicator from the next one on. */
void fc_schedule_set_reduce(fc_schedule_unit *unit, fc_device_comm *reduce);
/* The reduce stream comes behind compute: for memory of it that is taken while compute is captured
 * into a graph. */
FC_MUST_CHECK fc_status fc_schedule_enter_reduce(fc_schedule *schedule);
/* The host may read offloaded gradients that were reduced by now. */
FC_MUST_CHECK fc_status fc_schedule_await_gradients(fc_schedule *schedule);
/* The host may write offloaded shards that were gathered by now. */
FC_MUST_CHECK fc_status fc_schedule_await_shards(fc_schedule *schedule);
/* Outside of forward and backward: shards may be read as the caller leaves them by now. Inside of
 * an iteration, and where compute is bound, another stream is a guest, until compute calls or the
 * next one begins; else the caller is compute from here on. */
FC_MUST_CHECK fc_status fc_schedule_read_shards(fc_schedule *schedule, fc_stream *caller);
/* Outside of forward and backward, inside of an iteration or after fc_schedule_read_shards. */
FC_MUST_CHECK fc_status fc_schedule_unshard(fc_schedule_unit *unit, void **full_out);
/* Gathers ahead of fc_schedule_unshard; the beginning of an iteration keeps what was asked for, but
 * for what comes from slices. */
FC_MUST_CHECK fc_status fc_schedule_start(fc_schedule_unit *unit);
void fc_schedule_reshard(fc_schedule_unit *unit);
/* Of the unit's newest gather: how many ranks took part, and bytes that the others brought. */
int fc_schedule_gathering_ranks(const fc_schedule_unit *unit);
size_t fc_schedule_gathered_bytes(const fc_schedule_unit *unit);
/* Forgets what is held for later reductions; or of it what only the replicas have not seen. */
void fc_schedule_drop_gradients(fc_schedule_unit *unit);
void fc_schedule_drop_partial_sum(fc_schedule_unit *unit);
/* The latter now belongs to another unit of the schedule, which has none, with the same layout. */
void fc_schedule_move_partial_sum(fc_schedule_unit *from, fc_schedule_unit *to);
/* After a failure: everything is sharded, nothing is held or in flight. */
FC_MUST_CHECK fc_status fc_schedule_reset(fc_schedule *schedule);

const char *fc_schedule_wait_name(fc_schedule_wait wait);

#ifdef __cplusplus
}
#endif
#endif
