/* A full arena: peers' posts are copied away, so that they can go on, or this rank waits until its
 * own were read. */
#include "base/clock.h"
#include "engine/exchange_private.h"
#include "engine/unit.h"

#include <string.h>

/* Copies up to here are kept for the next time: larger ones take longer to fill than to allocate,
 * and would add up over the units. */
#define SPARE_BYTES_MAX ((size_t)64 << 10)

/* Room for a copy; the caller links it. */
static spilled *take_spare(fc_unit *unit, size_t words)
{
    spilled *copy = unit->spare;

    if (copy != NULL) {
        unit->spare = copy->next;
        if (copy->capacity >= words) {
            return copy;
        }
        fc_free(copy);
    }
    copy = fc_alloc(1, sizeof(*copy) + words * sizeof(uint64_t));
    if (copy != NULL) {
        copy->capacity = words;
    }
    return copy;
}

fc_status exchange_drain(fc_unit *unit, int rank)
{
    fc_domain *domain = unit->domain;
    lane *l = domain_lane(domain, rank, unit->index);
    lane *own = domain_lane(domain, domain->rank, unit->index);
    size_t mask_words = unit->layout.mask_words;
    spilled **link = &unit->spilled[rank];
    spilled *copy;
    part post;

    FC_TRY(exchange_find_part(unit, rank, &post));
    copy = take_spare(unit, mask_words + post.bytes / sizeof(uint64_t));
    if (copy == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit %s: %zu bytes to copy rank %d's gradients away",
                       unit->name, post.bytes, fc_transport_global_rank(domain->transport, rank));
    }
    memcpy(copy->words, lane_mask(domain, l), mask_words * sizeof(uint64_t));
    memcpy(copy->words + mask_words, post.data, post.bytes);
    copy->tag = tag_of(domain, rank, unit->index);
    copy->wire = post.wire;
    copy->next = NULL;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = copy;
    if (rank != domain->rank) {
        fc_transport_publish(domain->transport, lane_consumed(own, rank), copy->tag);
    }
    return FC_OK;
}

void exchange_drop_spilled(fc_unit *unit, uint64_t tag)
{
    int r;

    for (r = 0; r < unit->domain->n_ranks; r++) {
        while (unit->spilled[r] != NULL && unit->spilled[r]->tag <= tag) {
            spilled *copy = unit->spilled[r];

            unit->spilled[r] = copy->next;
            if (copy->capacity * sizeof(uint64_t) > SPARE_BYTES_MAX) {
                fc_free(copy);
                continue;
            }
            copy->next = unit->spare;
            unit->spare = copy;
        }
    }
}

/* True when this rank could copy the last post of a rank away. */
static bool is_drainable(const fc_unit *unit, int rank)
{
    uint64_t tag = tag_of(unit->domain, rank, unit->index);

    return tag > unit->finished && find_spilled(unit, rank, tag) == NULL;
}

static bool find_drainable_in(const fc_domain *domain, drainable *out)
{
    size_t i;
    int r;

    for (i = 0; i < domain->n_units; i++) {
        for (r = 0; r < domain->n_ranks; r++) {
            if (r != domain->rank && is_drainable(&domain->units[i], r)) {
                *out = (drainable){&domain->units[i], r};
                return true;
            }
        }
    }
    return false;
}

bool exchange_find_drainable(const fc_domain *domain, drainable *out)
{
    const fc_domain *d = domain;

    do {
        if (d->region != NULL && find_drainable_in(d, out)) {
            return true;
        }
        d = d->next;
    } while (d != domain);
    return false;
}

static bool is_a_peer_stuck_in(const fc_domain *domain)
{
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        if (r != domain->rank && (fc_word_load(&domain_clock(domain, r)->stuck) & 1) != 0) {
            return true;
        }
    }
    return false;
}

bool exchange_is_a_peer_stuck(const fc_domain *domain)
{
    const fc_domain *d = domain;

    do {
        if (d->region != NULL && is_a_peer_stuck_in(d)) {
            return true;
        }
        d = d->next;
    } while (d != domain);
    return false;
}

/* ---- making way ---- */

/* Called in pairs: begins and ends this rank's being stuck. */
static void toggle_stuck(fc_domain *domain)
{
    fc_word *word = &domain_clock(domain, domain->rank)->stuck;

    fc_transport_publish(domain->transport, word, fc_word_load(word) + 1);
}

bool exchange_is_lane_free(const fc_unit *unit)
{
    return arena_is_over(unit, unit->posted);
}

/* The post of this rank that is in the way, and who has not read it. */
typedef struct way_wait {
    fc_domain *domain;
    size_t unit;
    uint64_t tag;
    int reader;
    int64_t until_ns; /* posts go to the spare arena then */
} way_wait;

static bool way_was_made(void *arg)
{
    const way_wait *wait = arg;
    drainable post;

    return fc_now_ns() >= wait->until_ns ||
           arena_was_read(wait->domain, wait->reader, wait->unit, wait->tag) ||
           exchange_find_drainable(wait->domain, &post) ||
           exchange_find_own(wait->domain, false) != NULL;
}

fc_status fc_exchange_make_way(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    way_wait wait = {domain, unit->index, unit->posted, -1, INT64_MAX};
    const fc_wait_info info = {"reduce-scatter", unit->name, domain->clock >> STEP_SHIFT};
    drainable post;
    fc_status st;

    if (exchange_find_drainable(domain, &post)) {
        return exchange_drain(post.unit, post.rank);
    }
    if (exchange_is_lane_free(unit)) {
        const ring_entry *oldest = domain_entry(domain, domain->oldest);

        if (domain->oldest == domain->newest) {
            return fc_fail(FC_ERR_STATE,
                           "unit %s: its reduction does not fit an arena of %zu bytes", unit->name,
                           domain->arena_bytes);
        }
        wait.unit = oldest->unit;
        wait.tag = oldest->tag;
        wait.until_ns = arena_wait_until_ns(domain);
    }
    wait.reader = arena_slowest_reader(domain, wait.unit, wait.tag);
    if (wait.reader < 0) {
        /* Only this rank's own part is left in it, if that. */
        return is_drainable(&domain->units[wait.unit], domain->rank)
                   ? exchange_drain(&domain->units[wait.unit], domain->rank)
                   : FC_OK;
    }
    toggle_stuck(domain);
    st = waits_await(domain, unit, FC_WAIT_REDUCE, wait.reader, way_was_made, &wait, &info);
    toggle_stuck(domain);
    if (st == FC_OK) {
        arena_waited(domain, wait.until_ns);
    }
    return st;
}
