/* What the files of the schedule share. */
#ifndef FC_ENGINE_SCHEDULE_PRIVATE_H
#define FC_ENGINE_SCHEDULE_PRIVATE_H

#include "engine/schedule.h"

/* Device memory that outlives one use. Its event marks the end of the newest use. */
typedef struct fc_stream_slot {
    void *memory; /* owned, on `home`'s stream */
    size_t bytes;
    fc_event *event;      /* owned */
    fc_stream *last;      /* where the event was recorded; NULL: never */
    uint64_t released_at; /* the pool's clock; the oldest is reused first */
    bool is_used;
    bool is_kept; /* for longer than a gather: it is an unsharded buffer */
    bool is_old;  /* in use when the others were freed */
    struct fc_stream_slot *next;
} fc_stream_slot;

typedef struct fc_stream_pool {
    const char *what; /* for labels */
    size_t n_spare;   /* so many may exist before one is reused */
    fc_schedule_wait reuse, drop;
    fc_stream *home;       /* who acquires and frees */
    fc_stream_slot *first; /* owned */
    size_t n_free, n_used; /* used ones that are kept are not counted */
    uint64_t clock;
} fc_stream_pool;

typedef enum fc_schedule_state {
    FC_STATE_SHARDED,
    FC_STATE_GATHERING,
    FC_STATE_UNSHARDED
} fc_schedule_state;

/* Entry of the order of forwards; the same unit's entry before it, or -1. */
typedef struct fc_schedule_entry {
    fc_schedule_unit *unit;
    ptrdiff_t before;
} fc_schedule_entry;

typedef struct fc_schedule_list {
    fc_schedule_unit **units; /* owned */
    size_t n_units;
    bool is_set;
} fc_schedule_list;

struct fc_schedule {
    fc_schedule_options options;
    const fc_device_ops *ops;
    fc_stream *compute; /* NULL before the first begin */
    fc_stream *guest;   /* it uses what is unsharded as well; NULL: nobody but compute does */
    fc_event *event;    /* owned; recorded and waited for in one go */
    fc_event *begun;    /* owned; where shards may be read from in this iteration */
    bool owes_wait;     /* copy-in has not waited for it, since nothing was gathered since */
    fc_stream_pool gathers, inputs, outputs;
    fc_schedule_unit *units;  /* owned */
    fc_schedule_entry *order; /* owned */
    size_t n_order, order_capacity;
    size_t n_gathering;
    bool is_open;      /* between a beginning and the end of what began */
    bool has_resident; /* units, or had */
    bool is_reducing, is_all_reducing, has_uploads, has_downloads; /* since the last end of one */
};

/* What moves gradients of some types. */
typedef struct fc_schedule_staging {
    fc_dtype *types;  /* owned */
    bool is_straight; /* to the reduced gradients */
    fc_moves *moves;  /* owned */
    struct fc_schedule_staging *next;
} fc_schedule_staging;

struct fc_schedule_unit {
    fc_schedule *schedule;
    fc_schedule_unit_options options;
    char *name;                                    /* owned */
    fc_moves *pack, *unpack, *slice, *post_unpack; /* owned */
    fc_moves *stage, *straight, *finish, *add;     /* owned */
    fc_schedule_staging *stagings;                 /* owned; of types that came later */
    size_t n_mixed;                                /* of these, for all types of a call */
    fc_dtype *type_of_each;                        /* owned; one for all, of one launch */
    uint64_t *addresses;                           /* owned; of one launch */
    const void **uploaded; /* owned; offloaded shards on the device, for one launch */
    const void **of_type;  /* owned; gradients of one type, for one launch */
    fc_layout post;        /* of the smaller group; post_params is NULL without one */
    fc_param *post_params; /* owned */
    size_t *staging_at;    /* owned; offloaded shards on the device */
    size_t staging_bytes;
    fc_gather *gathers;           /* owned; direct ones of one call */
    bool is_packed;               /* a direct gather has something to pack */
    const void *const *shards;    /* borrowed */
    fc_schedule_maker maker;      /* of some of them; may be empty */
    fc_schedule_list prefetch[2]; /* forward, backward */
    fc_schedule_state state;
    bool is_from_slice;       /* what was gathered last */
    bool is_asked;            /* a gather that the caller has started */
    fc_stream_slot *gathered; /* while GATHERING; of a direct gather while UNSHARDED, too */
    void *resident;           /* borrowed; the shards, as `full` */
    void *full;               /* while UNSHARDED; owned unless it is a slot or resident */
    void *kept;               /* slice of a reshard to a smaller group */
    fc_event *kept_event;     /* owned; the slice is there */
    fc_stream_slot *waiting;  /* staged gradients not yet reduced */
    fc_stream_slot *partial;  /* scattered, not yet all-reduced */
    ptrdiff_t last_entry;     /* in the order of forwards; -1: none is left */
    bool is_reached;          /* by a backward, since its newest forward or gather */
    fc_schedule_unit *next;
};

/* Compute finishes its gradients, which nobody else has or looks at. */
static inline bool fc_schedule_is_alone(const fc_schedule_unit *unit)
{
    return unit->options.layout->n_ranks == 1 && unit->options.replicas == NULL &&
           !unit->options.is_offloaded && !fc_layout_is_packed(unit->options.layout);
}

static inline fc_label fc_schedule_label(const fc_schedule_unit *unit, const char *what)
{
    return (fc_label){unit->name, what, 0};
}

/* ---- schedule_slots.c ---- */

/* `stream` goes on only after what was recorded last, unless that wait is left out. */
FC_MUST_CHECK fc_status fc_schedule_order(fc_schedule *schedule, fc_schedule_wait wait,
                                          fc_stream *stream, fc_event *event);
/* `second` waits for all that is in `first` now. */
FC_MUST_CHECK fc_status fc_schedule_chain(fc_schedule *schedule, fc_schedule_wait wait,
                                          fc_stream *first, fc_stream *second);
/* The host waits for an event. */
FC_MUST_CHECK fc_status fc_schedule_host_wait(fc_schedule *schedule, fc_schedule_wait wait,
                                              fc_event *event);
/* A slot that the pool's home may write. */
FC_MUST_CHECK fc_status fc_stream_pool_acquire(fc_schedule *schedule, fc_stream_pool *pool,
                                               fc_label label, size_t bytes, fc_stream_slot **out);
/* Its event says: up to here in `stream`. */
FC_MUST_CHECK fc_status fc_stream_slot_mark(fc_schedule *schedule, fc_stream_slot *slot,
                                            fc_stream *stream);
/* The slot stays in use, but leaves its place to another one. */
void fc_stream_pool_keep(fc_stream_pool *pool, fc_stream_slot *slot);
void fc_stream_pool_release(fc_stream_pool *pool, fc_stream_slot *slot);
/* Frees the memory of a slot that is not in use. */
FC_MUST_CHECK fc_status fc_stream_slot_drop(fc_schedule *schedule, const fc_stream_pool *pool,
                                            fc_stream_slot *slot);
/* The same for all of them. Slots and their events stay: a step makes none. */
FC_MUST_CHECK fc_status fc_stream_pool_drop(fc_schedule *schedule, fc_stream_pool *pool);
bool fc_stream_pool_has_memory(const fc_stream_pool *pool);
void fc_stream_pool_destroy(fc_schedule *schedule, fc_stream_pool *pool);

/* ---- schedule_moves.c ---- */

/* The pieces of all that a unit moves; undone by fc_schedule_moves_destroy, on failure too. */
FC_MUST_CHECK fc_status fc_schedule_moves_create(fc_schedule_unit *unit);
void fc_schedule_moves_destroy(fc_schedule_unit *unit);
/* Whether a direct gather takes a parameter's shard from where it is. */
bool fc_schedule_is_sent_as_is(const fc_schedule_unit *unit, const fc_param *param);
/* Where this rank's chunk of a parameter lies in the unsharded buffer: bytes. */
size_t fc_schedule_own_at(const fc_schedule_unit *unit, const fc_param *param);
/* What one launch of a unit's plan works on. */
typedef struct fc_schedule_launch {
    fc_moves *moves;
    const void *wire;          /* a slot, or a part of it */
    const void *unit;          /* the unsharded buffer, or the gradient buffer */
    const void *const *params; /* shards, or full gradients; NULL: none of them */
    double divisor;
    bool accumulate;
} fc_schedule_launch;
FC_MUST_CHECK fc_status fc_schedule_move(fc_schedule_unit *unit, fc_stream *stream,
                                         const char *what, const fc_schedule_launch *launch);
/* Stages full gradients of these types (NULL: all of type `compute`) in compute; straight: finishes
 * them at once. The plan is the types'. */
FC_MUST_CHECK fc_status fc_schedule_move_grads(fc_schedule_unit *unit, const fc_dtype *types,
                                               bool is_straight, const fc_schedule_launch *launch);

/* ---- schedule.c ---- */

/* NULL is fine. */
FC_MUST_CHECK fc_status fc_schedule_meet(fc_unit *unit, const char *op, uint64_t detail);
FC_MUST_CHECK fc_status fc_schedule_unit_fail(const fc_schedule_unit *unit, const char *call);
/* A gather that nobody waits for any more. */
FC_MUST_CHECK fc_status fc_schedule_drop_gather(fc_schedule_unit *unit);
/* An unsharded buffer that is no slot. */
void fc_schedule_free_full(fc_schedule_unit *unit);

#endif
