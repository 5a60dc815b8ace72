/* Inside of an exchange: what exchange.c shares with the arena (exchange_arena.c) and with what is
 * done when it is full (exchange_full.c). */
#ifndef FC_ENGINE_EXCHANGE_PRIVATE_H
#define FC_ENGINE_EXCHANGE_PRIVATE_H

#include "engine/domain_private.h"
#include "engine/exchange.h"

/* ---- tags ---- */

/* The last tag of `rank` for this unit, if it belongs to the current phase, else 0. */
static inline uint64_t tag_of(const fc_domain *domain, int rank, size_t unit)
{
    uint64_t tag = rank == domain->rank ? domain->units[unit].posted
                                        : fc_word_load(&domain_lane(domain, rank, unit)->tag);

    return phase_of(tag) == phase_of(domain->clock) ? tag : 0;
}

/* The copy of a rank's post, or NULL. */
static inline const spilled *find_spilled(const fc_unit *unit, int rank, uint64_t tag)
{
    const spilled *copy = unit->spilled[rank];

    while (copy != NULL && copy->tag != tag) {
        copy = copy->next;
    }
    return copy;
}

/* True when `rank` has posted `wanted` or a later tag of this phase. A post that was copied away
 * may have been followed by one of the next phase. */
static inline bool has_posted(const fc_unit *unit, int rank, uint64_t wanted)
{
    return tag_of(unit->domain, rank, unit->index) >= wanted ||
           find_spilled(unit, rank, wanted) != NULL;
}

/* The tag of the unit's next reduction in this phase. */
static inline uint64_t next_tag(const fc_unit *unit)
{
    uint64_t first = phase_of(unit->domain->clock) << PHASE_SHIFT;

    return (unit->finished > first ? unit->finished : first) + 1;
}

/* ---- this rank's arena; exchange_arena.c ---- */

/* Whether rank r != own has read this rank's post `tag` of a unit, or never will. */
bool arena_was_read(const fc_domain *domain, int r, size_t unit, uint64_t tag);
/* A peer that has yet to read a post of this rank; -1 if none. */
int arena_slowest_reader(const fc_domain *domain, size_t unit, uint64_t tag);
/* Whether nobody needs a post of this rank any more; its own part lies there too. */
bool arena_is_over(const fc_unit *unit, uint64_t tag);
/* Whether that lies within a rank's arena or its spare one. */
bool arena_is_place(const fc_domain *domain, size_t at, size_t bytes);
/* Room for a post, which arena_take takes. False if there is none. */
bool arena_find_room(const fc_domain *domain, size_t bytes, size_t *at_out);
void arena_take(fc_unit *unit, size_t at, size_t bytes);
/* Until when to wait for room before the spare arena is used, and that this was waited for. */
int64_t arena_wait_until_ns(const fc_domain *domain);
void arena_waited(fc_domain *domain, int64_t until_ns);

/* ---- posts of peers; exchange.c ---- */

/* This rank's part of a post. */
typedef struct part {
    const char *data;
    size_t bytes;
    fc_wire wire;
} part;

/* FC_ERR_MISMATCH: what its lane says of it cannot be. */
fc_status exchange_find_part(const fc_unit *unit, int rank, part *out);
/* Among this rank's unfinished posts, the first that can be finished; NULL if none. */
fc_unit *exchange_find_own(fc_domain *domain, bool oldest_only);

/* ---- a full arena; exchange_full.c ---- */

/* Whether the unit's lane, which has one header, may carry a new post. */
bool exchange_is_lane_free(const fc_unit *unit);

/* A peer's post that this rank could copy away. */
typedef struct drainable {
    fc_unit *unit;
    int rank;
} drainable;

/* The first in this domain or another one of its root: where ranks use two domains in different
 * orders, each may wait for room in the one that the other has not come to. */
bool exchange_find_drainable(const fc_domain *domain, drainable *out);
/* Copies a post's part for this rank away, so that its poster can go on. The poster may be this
 * rank. */
fc_status exchange_drain(fc_unit *unit, int rank);
/* Whether one waits for room in its arena, in this domain or another one of its root. */
bool exchange_is_a_peer_stuck(const fc_domain *domain);

#endif
