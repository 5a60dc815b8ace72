/* Inside of a domain, shared by the files of this folder only. */
#ifndef FC_ENGINE_DOMAIN_PRIVATE_H
#define FC_ENGINE_DOMAIN_PRIVATE_H

#include "base/alloc.h"
#include "engine/batch.h"
#include "engine/domain.h"
#include "engine/layout.h"
#include "engine/reduction.h"
#include "engine/unsharding.h"
#include "engine/waits.h"

enum {
    PHASE_OPEN = 0,
    PHASE_CLOSED = 1
};
#define PHASE_SHIFT 8
#define STEP_SHIFT 24
#define PHASE_MASK ((UINT64_C(1) << (STEP_SHIFT - PHASE_SHIFT)) - 1)
#define STATE_MASK ((UINT64_C(1) << PHASE_SHIFT) - 1)
/* The clock of a rank that has left: later than every phase, and closed. */
#define CLOCK_LEFT UINT64_MAX

/* What one rank says about its phases. Written by that rank alone. */
typedef struct clock_line {
    fc_word clock;
    fc_word failed;    /* the last phase that it left by an exception */
    fc_word completed; /* the last phase that all ranks closed; plain store, nobody waits for it */
    fc_word stuck;     /* odd while it waits for room in its arena */
    fc_word refused;   /* calls that failed because some ranks had left and others had not */
    fc_word turn;      /* step << STEP_SHIFT | turns in that step's forward */
    /* Of even and odd steps, since a peer is at most one step ahead while this rank has not closed
     * its own: step << STEP_SHIFT | opener << OPENER_SHIFT | fc_phase that it began with, and what
     * its shards had seen then. Plain stores before clock's. */
    fc_word began[2];
    fc_word updates[2];
    fc_word before;  /* the phase before this one; plain store before clock's */
    fc_word accused; /* the phase that it failed << ACCUSED_SHIFT | rank that had skipped it */
    fc_word met;     /* meeting_of(phase) | collectives of messages begun in it */
    fc_word what[2]; /* of even and odd ones: a meeting's; plain stores before met's */
} clock_line;

#define OPENER_SHIFT 8
#define OPENER_MAX ((UINT64_C(1) << (STEP_SHIFT - OPENER_SHIFT)) - 1)
#define ACCUSED_SHIFT 11
#define ACCUSED_ALL ((uint64_t)FC_MAX_RANKS) /* in the place of a rank */

/* Why a rank failed a phase, in its own words; written before `failed`. */
#define REASON_BYTES 760
typedef struct reason {
    uint64_t phase;
    char text[REASON_BYTES];
} reason;

/* What one rank publishes about one unit's reduction. Written by that rank alone; peers read. */
typedef struct lane {
    fc_word tag;       /* phase | number of the post in it; published last */
    uint64_t stage_at; /* bytes, in that rank's arena */
    uint64_t part_bytes;
    uint64_t wire; /* fc_wire */
    uint64_t
        accumulated_in; /* tag's phase in which this rank kept its gradients (no synchronisation) */
    /* fc_word consumed[n_ranks]: tag up to which this rank has read rank r's posts
     * uint64_t mask[mask_words]: parameters present */
} lane;

/* A rank's post for this rank that was copied away to let the poster go on; see exchange.c. */
typedef struct spilled {
    struct spilled *next; /* newer */
    uint64_t tag;
    fc_wire wire;
    size_t capacity;  /* words that follow */
    uint64_t words[]; /* mask, then part */
} spilled;

struct fc_unit {
    /* Constant after create. */
    fc_domain *domain; /* borrowed */
    size_t index;
    char *name;        /* owned */
    uint32_t shown_as; /* its name in the window */
    fc_param *params;  /* owned */
    fc_layout layout;
    size_t full_at; /* bytes, in the region */
    /* Its reductions; set by fc_reduction_attach. */
    fc_reduction *reduction; /* borrowed; NULL: nobody's */
    void *owner;             /* whom they are for */
    /* Its parameters; set by fc_unsharding_create. */
    fc_unsharding *unsharding; /* borrowed; NULL: nobody's */
    /* Reduction of this rank. */
    uint64_t posted;   /* tag of the last post */
    uint64_t finished; /* tag up to which reductions are done */
    uint64_t *mask;    /* owned; the post under construction */
    spilled **spilled; /* owned; a list per rank, oldest first */
    spilled *spare;    /* owned; for reuse */
    bool is_finished;  /* nothing of it is left for the end of its backward; root.h */
    /* Over messages: some rank wants its gradients at once, by the unit's last gather. */
    bool is_observed;
    bool was_observed;    /* by the gather that runs */
    bool has_other_order; /* some rank tells another one with it; order.h */
    bool has_other_backward;
};

/* A post's room in this rank's arena; a queue, oldest first. */
typedef struct ring_entry {
    size_t at, bytes;
    size_t unit;
    uint64_t tag;
} ring_entry;

/* Units, as they were used in a phase. */
typedef struct order_list {
    fc_unit **units; /* owned; of this domain */
    size_t n, capacity;
    uint64_t print; /* of which they are; 0: none */
} order_list;

/* Of one kind of phase; order.c. */
typedef struct order {
    order_list now, last; /* of the phase that runs, and of the one before */
    size_t at;            /* in the one before: behind the unit that was used last */
} order;

struct fc_domain {
    /* Constant after create. */
    fc_transport *transport; /* borrowed */
    fc_domain_kind kind;
    int rank, n_ranks;
    bool is_mapped;
    bool is_packed; /* others look at what its sums or its collectives bring: see fc_param */
    fc_unit *units; /* owned */
    size_t n_units;
    fc_region *region; /* owned; NULL over messages */
    /* The clock: in the region, or over messages in one of its own. NULL without. */
    fc_transport *watch;     /* borrowed */
    char *clocks;            /* clock lines, then reasons */
    fc_region *clock_region; /* owned; NULL unless over messages */
    char **openers;          /* owned */
    size_t n_openers;
    size_t lanes_at, lane_bytes, arenas_at, arena_bytes;
    size_t spares_at, spare_bytes; /* behind the arenas: [Note: a spare arena] in exchange.c */
    /* This rank's phase. */
    uint64_t clock;
    uint64_t left_after; /* the last clock before CLOCK_LEFT */
    uint64_t refused_in; /* the last phase that failed because a peer had left */
    bool is_ready;
    uint64_t n_met;    /* collectives of messages in this phase */
    uint64_t n_left;   /* of replicas without a clock: phases left by exceptions since they met */
    uint64_t before;   /* the phase before this one */
    uint64_t admitted; /* this rank has raised that ranks are out of step in that phase */
    uint64_t began, updates;    /* as in the clock line */
    char verdict[REASON_BYTES]; /* why ranks are out of step; empty: they are not */
    /* This rank's arena. */
    ring_entry *ring; /* owned; entry of sequence s at s % ring_capacity */
    size_t ring_capacity;
    size_t oldest, newest;  /* sequences: entries in use are [oldest, newest) */
    size_t unfinished;      /* this rank has finished all entries before it */
    size_t next_at;         /* bytes; where the next post goes */
    size_t cursor;          /* where the search for finishable units goes on */
    bool is_spread;         /* posts may lie in the spare arena, until all are over */
    int haste;              /* how often the wait before they may is halved */
    fc_domain *next;        /* of the same root, in a ring */
    fc_reduction *borrower; /* borrowed; has gradients that are read later; NULL: none has */
    uint64_t n_reused;      /* finished units that were used again; root.h */
    /* This rank's waits; waits.c. */
    fc_waits *waits;    /* owned; units, then the ends of phases, by fc_wait_kind */
    uint64_t *wait_ns;  /* owned; by peer */
    uint64_t phases[2]; /* forwards, backwards */
    /* Over messages; batch.c. */
    size_t batch_limit;
    fc_batch *batch; /* owned; NULL before the first post that waits */
    size_t n_observed;
    /* Over messages; order.c. */
    order orders[2];                    /* of forwards, of backwards */
    bool is_order_told, is_order_alike; /* this forward's first gather has, and all have one */
    bool is_backward_other;             /* some rank would follow another order in backward */
    bool is_written;                    /* a shard was, within this forward */
    size_t n_ahead;                     /* units that were gathered and not used yet */
    /* Over messages, see [Note: what travels meanwhile]; NULL: none. */
    fc_unsharding *gathering; /* borrowed; its gather has begun */
    void *gathering_pack;     /* from its slots */
    fc_reduction *summing;    /* borrowed; its sum has begun */
};

static inline clock_line *domain_clock(const fc_domain *domain, int rank)
{
    return (clock_line *)(void *)(domain->clocks + (size_t)rank * FC_CACHE_LINE);
}

/* Whether a rank has left a phase by an exception. Who failed a later one did so behind it if it
 * had completed this one before; over messages who failed this one may have completed a later one
 * since, without this rank. */
static inline bool clock_has_failed(const clock_line *line, uint64_t phase)
{
    const uint64_t failed = fc_word_load(&line->failed); /* before `completed` */

    return (failed == phase && phase != 0) ||
           (failed > phase && fc_word_load(&line->completed) < phase);
}

static inline reason *domain_reason(const fc_domain *domain, int rank)
{
    return (reason *)(void *)(domain->clocks + (size_t)domain->n_ranks * FC_CACHE_LINE +
                              (size_t)rank * sizeof(reason));
}

static inline size_t clocks_bytes(int n_ranks)
{
    return (size_t)n_ranks * (FC_CACHE_LINE + sizeof(reason));
}

static inline lane *domain_lane(const fc_domain *domain, int rank, size_t unit)
{
    size_t row = (size_t)rank * domain->n_units + unit;

    return (lane *)(void *)(domain->region->shared + domain->lanes_at + row * domain->lane_bytes);
}

static inline fc_word *lane_consumed(lane *l, int of_rank)
{
    return (fc_word *)(void *)(l + 1) + of_rank;
}

static inline uint64_t *lane_mask(const fc_domain *domain, lane *l)
{
    return (uint64_t *)(void *)((fc_word *)(void *)(l + 1) + domain->n_ranks);
}

static inline char *domain_arena(const fc_domain *domain, int rank)
{
    return domain->region->shared + domain->arenas_at + (size_t)rank * domain->arena_bytes;
}

/* Where a post is; it lies in the arena, or behind it in the spare one. */
static inline char *domain_post(const fc_domain *domain, int rank, size_t at)
{
    return at < domain->arena_bytes
               ? domain_arena(domain, rank) + at
               : domain->region->shared + domain->spares_at + (size_t)rank * domain->spare_bytes +
                     (at - domain->arena_bytes);
}

/* The part of a tag or clock that names the phase. */
static inline uint64_t phase_of(uint64_t word)
{
    return word >> PHASE_SHIFT;
}

static inline ring_entry *domain_entry(const fc_domain *domain, size_t sequence)
{
    return &domain->ring[sequence % domain->ring_capacity];
}

/* True if `peer` left the phase that this rank is in by an exception; then FC_ERR_PEER. */
bool domain_has_failed(const fc_domain *domain, int peer);
fc_status domain_check_peer(fc_domain *domain, int peer, const char *op, const char *unit);

/* Ranks out of step; apart.c. */
void apart_begin(fc_domain *domain, const fc_opening *opening);
/* FC_ERR_MISMATCH if `peer` began this step otherwise. */
fc_status apart_check_opening(fc_domain *domain, int peer, const fc_unit *unit);
/* FC_ERR_MISMATCH if `peer` has gone past this rank's phase without it. */
bool apart_has_skipped(const fc_domain *domain, int peer);
fc_status apart_check_skipped(fc_domain *domain, int peer, const fc_unit *unit);
/* The same for who is about to read alone: shards of a peer that has not stepped are what they
 * were, so that it may leave out a backward in which nothing is added up. */
fc_status apart_check_read(fc_domain *domain, int peer, const fc_unit *unit);
/* FC_ERR_MISMATCH with the sentence, which all ranks of this phase get, and `peer` in a later one.
 */
fc_status apart_accuse(fc_domain *domain, int peer, const char *sentence);
/* And all of them in a later one, or, between hosts, in their next collective. */
fc_status apart_accuse_all(fc_domain *domain, const char *sentence);
/* The domain of the root in which a peer has failed a phase because this rank had passed it over,
 * or NULL; its words, once. */
typedef struct apart_accusation {
    fc_domain *in; /* NULL: none */
    int peer;
} apart_accusation;

apart_accusation apart_find_accused(fc_domain *domain);
fc_status apart_admit(apart_accusation accusation);
/* Over messages without a clock: the same checks by a word of each rank's. Once a phase. */
fc_status apart_exchange(fc_unit *unit);
/* Shows why this rank fails its phase, if ranks are out of step; before `failed`. */
void apart_tell(fc_domain *domain);
/* FC_ERR_MISMATCH with the words of a peer that has failed this rank's phase, FC_OK: it has none.
 */
fc_status apart_told_by(fc_domain *domain, int peer);

/* What fc_domain_ready does, whatever the transport; clock.c. */
fc_status clock_ready(fc_domain *domain, const fc_unit *unit);

/* Meetings before collectives of messages; meet.c. `n_units` travel in it, from this one on. */
fc_status meet(fc_unit *unit, size_t n_units, const char *op, uint64_t detail);

/* Waits and counts it; `unit` may be NULL. waits.c. */
fc_status waits_init(fc_domain *domain);
fc_status waits_await(fc_domain *domain, const fc_unit *unit, fc_wait_kind kind, int peer,
                      fc_ready_fn ready, void *arg, const fc_wait_info *info);
/* Collectives of a message transport, for a unit and those after it, `n_units` in all. */
/* `recv` has room for what all ranks send; none where the transport hands on what comes. */
bool waits_takes_gathers(const fc_domain *domain);
fc_status waits_gather(fc_unit *unit, size_t n_units, char *recv, const void *send,
                       size_t send_bytes, const fc_gathered *to);
fc_status waits_reduce_scatter(fc_unit *unit, size_t n_units, void *recv, void *send,
                               size_t recv_numel, fc_dtype dtype, uint64_t detail);
/* Of one unit; as fc_message_ops says. */
fc_status waits_gather_begin(fc_unit *unit, const void *send, size_t send_bytes);
fc_status waits_gather_end(fc_unit *unit, const fc_gathered *to);
fc_status waits_sum_begin(fc_unit *unit, void *send, size_t recv_numel, fc_dtype dtype,
                          bool *is_lent_out);
fc_status waits_sum_end(fc_unit *unit, void *recv);

static inline fc_wait_kind waits_gather_kind(const fc_domain *domain)
{
    return (phase_of(domain->clock) & PHASE_MASK) != 0 ? FC_WAIT_BACKWARD : FC_WAIT_FORWARD;
}

/* Collects what peers have read from this rank's arena; exchange.c. */
void exchange_reclaim(fc_domain *domain);

/* Before each unit's shards in a gather over messages, unless they travel alone; batch.c. */
#define BATCH_NOTE_BYTES FC_ALIGN

/* Forgets the posts that wait in a batch, or frees its memory, too; batch.c. */
void batch_drop(fc_domain *domain);
void batch_trim(fc_domain *domain);

/* A phase begins, or fails; order.c. */
void order_turn(fc_domain *domain);
void order_drop(fc_domain *domain);
/* In a forward, what its first gather tells peers: of the order that this rank would follow, or in
 * the backward behind it. 0: none. */
uint64_t order_told(const fc_domain *domain, bool of_backward);
/* That gather has come: whether all ranks tell the same. */
void order_heard(fc_domain *domain, bool is_alike, bool is_backward_alike);
/* Whether the unit may be gathered ahead. */
bool order_is_small(const fc_unit *unit);
void order_fini(fc_domain *domain);
/* Whether its gather may begin before it is asked for; unsharding_messages.c. */
bool unsharding_may_begin(const fc_unsharding *unsharding);

/* Gives borrowed gradients of a phase that has ended back unread; reduction.c. */
void reduction_forget_borrowed(fc_domain *domain);
/* The sum that was begun ends without a use; reduction_begun.c. */
void reduction_drop_begun(fc_domain *domain);

/* Drops the copies of posts up to `tag`; exchange.c. */
void exchange_drop_spilled(fc_unit *unit, uint64_t tag);

#endif
