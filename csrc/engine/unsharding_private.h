/* Inside of an unsharding: what the kinds of domains share, and the table of what each does. */
#ifndef FC_ENGINE_UNSHARDING_PRIVATE_H
#define FC_ENGINE_UNSHARDING_PRIVATE_H

#include "engine/layout.h"
#include "engine/unit.h"
#include "engine/unsharding.h"

/* How the units of a kind of domain are gathered. */
typedef struct gathering {
    /* Every gather makes a copy; else the phase has one for all ranks, which follows the shards. */
    bool makes_copies;
    /* What a backward leaves of a unit is given back at its end. */
    bool ends_late;
    /* Asked for, and not shown: gathers it, or leaves it to `take`. Failure leaves it as it was. */
    fc_status (*gather)(fc_unsharding *u);
    /* Whether what was gathered and not shown has to be gathered again. */
    bool (*is_outdated)(const fc_unsharding *u);
    /* It is shown next: where it lies, and whether that outlives the phase. */
    fc_status (*take)(fc_unsharding *u, void **memory_out, bool *is_kept_out);
    /* It is used again in a phase, and shown already; NULL: nothing is to be done. */
    fc_status (*use_again)(fc_unsharding *u);
    /* A forward uses it that was shown before, and nobody has written to it. */
    fc_status (*renew)(fc_unsharding *u);
    /* The phase ends and it stays shown; NULL: its memory is its own. */
    fc_status (*keep)(fc_unsharding *u);
    /* It is resharded to a smaller group: where its slices lie; NULL: nobody sees any. */
    fc_status (*slice)(fc_unsharding *u, void **slices_out);
    /* Gives its memory back; NULL: it is a slot. */
    fc_status (*release)(fc_unsharding *u, bool to_slice);
    /* A phase opens; NULL: peers get the shards with a gather. */
    fc_status (*publish)(fc_unsharding *u);
    /* It is shown: counts what came from peers. */
    void (*count)(fc_unsharding *u);
    /* A forward has used it, or it was resharded; NULL: nothing is to be done. */
    fc_status (*end_forward)(fc_unsharding *u);
    fc_status (*end_use)(fc_unsharding *u);
} gathering;

extern const gathering gathering_mapped, gathering_messages, gathering_device;

struct fc_unsharding {
    /* What every step needs comes first. */
    const gathering *kind;
    const fc_unsharding_ops *ops;
    void *owner;
    fc_unit *unit;
    fc_domain *domain;
    const fc_layout *layout;
    void *memory; /* from the slots, or the device's; NULL: none */
    void *view;   /* of the shared unit; NULL without one */
    uint8_t state;
    bool keeps_memory, stays_unsharded, has_graph, is_withheld;
    bool is_resident, may_reside, is_watched, is_read, came_along, has_slices;
    bool is_extended, has_extension, is_made, is_refilled;
    fc_traffic *traffic;
    uint64_t *marks; /* owned; of the shards, when they were noted */
    uint64_t *sums;  /* behind them: of what the shards held then */
    size_t n_params, bytes;
    int n_ranks;
    uint64_t gather_bytes, publish_bytes; /* that a gather brings, a publish writes */
    uint64_t gathered_at; /* in steps of optimizers; elsewhere than in shared memory */
    uint64_t made_at;     /* of an extended unit */
    const void **shards;  /* owned; of all entries of the layout */
    fc_slots *slots;
    fc_unsharding *next; /* in the gather that is being made */
    fc_unit *sliced;     /* in the domain of a smaller group; NULL: none */
    void *slices;        /* from the slots */
    uint64_t sliced_gather_bytes;
    bool is_from_slices; /* what was gathered last */
    bool is_summed;      /* marks and sums are of when the forward opened */
    fc_schedule *schedule;
    fc_schedule_unit *on_device;
};

/* What happens to the unit must be able to. */
void unsharding_turn(fc_unsharding *u, fc_unsharding_event event);
/* Memory from the slots, unless it has some; and back. */
FC_MUST_CHECK fc_status unsharding_take_slot(fc_unsharding *u);
void unsharding_release_slot(fc_unsharding *u);
/* The same for slices, which are no longer shown. */
void unsharding_end_slices(fc_unsharding *u);
/* Takes back what this rank has written to the shared unit. */
void unsharding_discard_writes(fc_unsharding *u);
/* A shown unit was gathered; counts what came from peers. */
void unsharding_count(fc_unsharding *u);
/* Of an extended unit, nothing for others: before a gather reads its shards, and after it. */
FC_MUST_CHECK fc_status unsharding_make(fc_unsharding *u);
FC_MUST_CHECK fc_status unsharding_fill(fc_unsharding *u);

/* ---- writes to shards; unsharding_writes.c ---- */

/* Before a forward reads it: what was written since the forward began is read when all ranks have
 * written theirs. */
FC_MUST_CHECK fc_status unsharding_renew_written(fc_unsharding *u);
/* What came along is used. */
FC_MUST_CHECK fc_status unsharding_claim(fc_unsharding *u);

static inline bool unsharding_is_shown(const fc_unsharding *u)
{
    return fc_unsharding_is_shown((fc_unsharding_state)u->state);
}

/* It goes ahead: notes what peers get of it. */
void unsharding_note_ahead(fc_unsharding *u);
/* What went ahead is asked for: an error of the owner if a shard was written since. */
FC_MUST_CHECK fc_status unsharding_check_ahead(fc_unsharding *u);
/* It is gathered in a forward: notes whether it was written since that opened. */
void unsharding_look_for_writes(fc_unsharding *u);

static inline bool unsharding_is_gathered(const fc_unsharding *u)
{
    return u->state == FC_UNIT_GATHERED || u->state == FC_UNIT_AHEAD;
}

/* Its whole parameters are copies, which are there while it is unsharded. */
static inline bool unsharding_is_copied(const fc_unsharding *u)
{
    return u->kind->makes_copies || u->has_extension;
}

/* Reshard leaves its memory. */
static inline bool unsharding_stays(const fc_unsharding *u)
{
    return u->keeps_memory && u->memory != NULL;
}

#endif
