/* A unit's parameters on their way between shards and the whole: what is gathered when, when a copy
 * is out of date, when memory is given back.
 *
 * [Note: states of a unit] One state says where a unit is, and one table (unsharding_states.c)
 * what may become of it. How units are gathered is a table of operations per kind of
 * domain (unsharding_private.h). What does not follow from the state is a flag here:
 *
 *   keeps_memory     the caller's: its memory stays over reshards
 *   stays_unsharded  the caller's: forward leaves it unsharded, until the next reshard
 *   has_graph        code of a graph may look for the parameters while they are sharded
 *   is_withheld      the whole parameters say that a backward does without them
 *   is_resident      one rank's shards on a device are the unsharded buffer
 *   is_read          a forward has read the unit, so that its shards have to stay as they are
 *   came_along       another unit's gather has brought it, and was counted
 *   has_slices       slices stand in the place of its shards; also while it is asked for or
 * gathered
 *   is_extended      the owner makes what is gathered
 *   has_extension    and whole parameters of what was
 *   is_made          what it has made for the next gather is still to be used
 *   is_refilled      the owner could not make parameters of it, and gets it again
 *
 * Tensors, and where they are registered, are the caller's (fc_unsharding_ops). Its calls may fail:
 * with FC_ERR_INTERRUPTED and an error that the caller keeps. Threading: serialized per domain.
 */
#ifndef FC_ENGINE_UNSHARDING_H
#define FC_ENGINE_UNSHARDING_H

#include "base/status.h"
#include "engine/domain.h"
#include "engine/reduction.h"
#include "engine/slots.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_unsharding fc_unsharding;
typedef struct fc_schedule fc_schedule; /* schedule.h */
typedef struct fc_schedule_unit fc_schedule_unit;

/* X(name, for people) */
#define FC_UNSHARDING_STATES(X)                                                                    \
    X(SHARDED, "sharded")                                                                          \
    X(SLICED, "resharded to a smaller group") /* and not asked for since */                        \
    X(REQUESTED, "asked for")         /* and not gathered: an open phase keeps shards still */     \
    X(GATHERED, "gathered")           /* asked for, there, and not shown yet */                    \
    X(AHEAD, "gathered ahead")        /* there, since another unit's gather brought it along */    \
    X(UNSHARDED, "unsharded")         /* shown, as this phase has its shards */                    \
    X(KEPT, "unsharded since before") /* shown, in memory that outlives the phase */

typedef enum fc_unsharding_state {
#define FC_UNSHARDING_STATE(name, text) FC_UNIT_##name,
    FC_UNSHARDING_STATES(FC_UNSHARDING_STATE)
#undef FC_UNSHARDING_STATE
    FC_UNIT_STATE_COUNT
} fc_unsharding_state;

/* X(name, for people) */
#define FC_UNSHARDING_EVENTS(X)                                                                    \
    X(ASK, "is asked for")                                                                         \
    X(GATHER, "is gathered")                                                                       \
    X(COME_ALONG, "comes along with another unit")                                                 \
    X(OUTDATE, "is gathered before the phase that uses it")                                        \
    X(SHOW, "is shown")                                                                            \
    X(SHOW_COPY, "is shown in memory that outlives the phase")                                     \
    X(KEEP, "gets memory that outlives the phase")                                                 \
    X(RENEW, "follows its shards again")                                                           \
    X(RESHARD, "is resharded")                                                                     \
    X(RESHARD_TO_SLICE, "is resharded to a smaller group")                                         \
    X(DROP, "is dropped without a use")                                                            \
    X(DROP_TO_SLICE, "is dropped without a use, and still has its slice")

typedef enum fc_unsharding_event {
#define FC_UNSHARDING_EVENT(name, text) FC_UNIT_##name,
    FC_UNSHARDING_EVENTS(FC_UNSHARDING_EVENT)
#undef FC_UNSHARDING_EVENT
    FC_UNIT_EVENT_COUNT
} fc_unsharding_event;

/* What becomes of a unit; FC_ERR_STATE, and nothing changes: that cannot happen to it. */
FC_MUST_CHECK fc_status fc_unsharding_next(fc_unsharding_state state, fc_unsharding_event event,
                                           fc_unsharding_state *next_out);

/* Writes that an owner is told of. */
typedef enum fc_written {
    FC_WRITTEN_IN_FORWARD,  /* a shard, after this forward had read it: an error */
    FC_WRITTEN_IN_BACKWARD, /* a shard that peers had gathered ahead: an error */
    FC_WRITTEN_AHEAD,       /* the same in a forward */
    FC_WRITTEN_RESIDENT     /* an unsharded parameter that is its shard: the write stays */
} fc_written;

/* What the owner of a unit's tensors does. */
typedef struct fc_unsharding_ops {
    /* The unsharded parameters lie there; or nowhere, and say why: of their size still (for views
     * of them) or of none. */
    void (*show)(void *owner, void *memory);
    void (*hide)(void *owner, bool keeps_size);
    /* They say that a backward does without them, or that they are sharded. */
    void (*withhold)(void *owner, bool is_withheld);
    /* They take the place of the shards, or of slices, with the memory they have now. */
    fc_status (*enter)(void *owner);
    /* The other way about: slices, if there are any: this rank's in a smaller group, which lie
     * there as the layout of their group says, or as in the unsharded buffer. */
    fc_status (*leave)(void *owner, void *slices);
    /* The shards take the place of slices. */
    fc_status (*leave_slices)(void *owner);
    /* The shards, one per entry of the layout; inputs as they were made. */
    void (*shards)(void *owner, const void **shards_out);
    /* Of an extended unit, NULL for others, see [Note: inputs] in layout.h: makes this rank's
     * chunks for a gather; makes the whole parameters of what is shown (NULL: they lie there);
     * frees those chunks. */
    fc_status (*make)(void *owner);
    fc_status (*fill)(void *owner);
    void (*forget)(void *owner);
    /* A number for each that a write changes; the first one from `from` on whose number is another
     * one now, or the number of parameters. */
    void (*mark)(void *owner, uint64_t *marks_out);
    size_t (*find_changed)(void *owner, const uint64_t *marks, size_t from);
    /* The first unsharded parameter from `from` on that was written since `enter`; `maybe`: or
     * could have been, uncounted. */
    size_t (*find_written)(void *owner, size_t from, bool maybe);
    /* The same of slices that stand in the place of the shards. */
    size_t (*find_written_slice)(void *owner, size_t from);
    /* FC_OK: a warning. */
    fc_status (*tell_of_write)(void *owner, size_t param, fc_written what);
    /* Whether this rank wants the unit's gradients at once. */
    bool (*is_observed)(void *owner);
    /* Steps of all optimizers of the process. */
    uint64_t (*n_steps)(void *owner);
    /* On a device, outside of a phase: shards may be read behind what the caller does now. */
    fc_status (*read_shards)(void *owner);
    /* On a device, alone: whether the shards can lie as the unsharded buffer does; they move there.
     */
    bool (*can_reside)(void *owner);
    fc_status (*reside)(void *owner, void **home_out);
} fc_unsharding_ops;

typedef struct fc_unsharding_options {
    fc_unit *unit;
    /* Over messages: the unit, without inputs, in the domain of a smaller group that forward
     * reshards to, laid out in the compute dtypes; else NULL. */
    fc_unit *sliced;
    fc_slots *slots;
    fc_traffic *traffic;
    const fc_unsharding_ops *ops;
    void *owner;
    /* On a device: the unit there, and whether this rank has all of it there; NULL: elsewhere. */
    fc_schedule *schedule;
    fc_schedule_unit *on_device;
    bool has_all;
} fc_unsharding_options;

/* All that the options name is borrowed, and outlives it. The unit is sharded, and this one its
 * unsharding until fc_unsharding_detach. */
FC_MUST_CHECK fc_status fc_unsharding_create(const fc_unsharding_options *options,
                                             fc_unsharding **out);
/* Who still has an unsharded parameter finds nothing there. NULL is fine. */
void fc_unsharding_destroy(fc_unsharding *unsharding);
/* No other unit's gather brings it along any more. */
void fc_unsharding_detach(fc_unsharding *unsharding);

/* ---- unsharding ---- */

/* What an explicit unshard begins: data now, except where an open phase keeps the shards still. */
FC_MUST_CHECK fc_status fc_unsharding_gather(fc_unsharding *unsharding);
/* A use begins. True in `is_shown_out`: it is unsharded, as it has to be; else it is to be gathered
 * and shown. */
FC_MUST_CHECK fc_status fc_unsharding_begin_use(fc_unsharding *unsharding, bool *is_shown_out);
/* After fc_unsharding_gather. */
FC_MUST_CHECK fc_status fc_unsharding_show(fc_unsharding *unsharding);
/* `to_slice`: a rank of a smaller group keeps its slice, from which backward gathers. */
FC_MUST_CHECK fc_status fc_unsharding_reshard(fc_unsharding *unsharding, bool to_slice);
/* At the end of a phase: what stays unsharded gets memory of its own until the next forward, since
 * peers may write their shards then. */
FC_MUST_CHECK fc_status fc_unsharding_keep(fc_unsharding *unsharding);
/* Forgets an unshard that nobody waited for; or what came along and was not used. */
void fc_unsharding_drop(fc_unsharding *unsharding);
void fc_unsharding_drop_ahead(fc_unsharding *unsharding);
/* The gather that the domain has begun and nobody has asked for ends without a use. */
void fc_unsharding_drop_begun(fc_domain *domain);
/* Until the next reshard a backward goes on without it. */
void fc_unsharding_withhold(fc_unsharding *unsharding);
/* After a forward of the unit: from the first one on its shards may be used where they lie. */
FC_MUST_CHECK fc_status fc_unsharding_end_forward(fc_unsharding *unsharding);
/* Whether nothing of it is left for the end of a backward, as far as parameters go. */
bool fc_unsharding_is_settled(const fc_unsharding *unsharding);

/* ---- shards ---- */

/* Whether peers read shards from elsewhere than where they lie. */
bool fc_unsharding_publishes(const fc_unsharding *unsharding);
/* Makes this rank's shards readable by peers; before a phase opens. */
FC_MUST_CHECK fc_status fc_unsharding_publish(fc_unsharding *unsharding);
/* Takes the shards as they are for those that peers will read; as a forward opens. */
void fc_unsharding_note_shards(fc_unsharding *unsharding);
/* True if one was written since then. */
bool fc_unsharding_was_written(const fc_unsharding *unsharding);
/* Before a backward: the same, or its owner makes something for each gather. */
bool fc_unsharding_is_stale(const fc_unsharding *unsharding);
/* Fails if this forward has read the unit and a shard was written after that: a peer may have read
 * either value. */
FC_MUST_CHECK fc_status fc_unsharding_check_unwritten(fc_unsharding *unsharding);

/* ---- flags ---- */

fc_unsharding_state fc_unsharding_state_of(const fc_unsharding *unsharding);
static inline bool fc_unsharding_is_shown(fc_unsharding_state state)
{
    return state >= FC_UNIT_UNSHARDED;
}
/* Nobody has asked for it. */
static inline bool fc_unsharding_is_away(fc_unsharding_state state)
{
    return state <= FC_UNIT_SLICED;
}
/* Slices stand in the place of the shards. */
bool fc_unsharding_has_slices(const fc_unsharding *unsharding);
/* From the next unshard on; false gives the memory back at once if nobody uses it. */
void fc_unsharding_keep_memory(fc_unsharding *unsharding, bool keeps);
void fc_unsharding_stay_unsharded(fc_unsharding *unsharding);
bool fc_unsharding_stays_unsharded(const fc_unsharding *unsharding);
void fc_unsharding_set_graph(fc_unsharding *unsharding, bool has_graph);
bool fc_unsharding_is_resident(const fc_unsharding *unsharding);
/* Whether every gather makes a copy, which steps of optimizers leave behind. */
bool fc_unsharding_makes_copies(const fc_unsharding *unsharding);
/* Whether what is unsharded outlives the phase. */
bool fc_unsharding_has_own_memory(const fc_unsharding *unsharding);
/* Whether a graph can read the parameters only while they are unsharded. */
bool fc_unsharding_is_read_apart(const fc_unsharding *unsharding);
/* Whether an unshard that begins moves anything between ranks. */
bool fc_unsharding_moves(const fc_unsharding *unsharding);

#ifdef __cplusplus
}
#endif
#endif
