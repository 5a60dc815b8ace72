/* A rank's arena: where its posts lie until peers have read them, as a queue. */
#include "base/clock.h"
#include "engine/exchange_private.h"

/* [Note: a spare arena] A post that finds no room waits for its peers to read older ones. They may
 * wait for this rank meanwhile, in a collective of the user's that it has yet to come to (of tensor
 * parallel layers, of batch norm); an arena is not large enough for a backward. So nobody waits
 * long: after a while posts go to the spare arena, which holds one of each unit and takes memory as
 * it is written, until the arena is empty again. Once it was needed, it mostly is again: then it is
 * not waited for as long, until waits end by themselves again. */
#define PATIENCE_NS (250 * FC_NS_PER_MS) /* before peers are asked where they are */
#define HASTE_MAX 6                      /* 4 ms then */

/* A phase that was left by an exception leaves posts unread. */
bool arena_was_read(const fc_domain *domain, int r, size_t unit, uint64_t tag)
{
    const clock_line *line = domain_clock(domain, r);

    return fc_word_load(lane_consumed(domain_lane(domain, r, unit), domain->rank)) >= tag ||
           fc_word_load(&line->clock) >= (tag | STATE_MASK) ||
           fc_word_load(&line->failed) >= phase_of(tag);
}

int arena_slowest_reader(const fc_domain *domain, size_t unit, uint64_t tag)
{
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        if (r != domain->rank && !arena_was_read(domain, r, unit, tag)) {
            return r;
        }
    }
    return -1;
}

bool arena_is_over(const fc_unit *unit, uint64_t tag)
{
    const fc_domain *domain = unit->domain;

    return (unit->finished >= tag || find_spilled(unit, domain->rank, tag) != NULL) &&
           arena_slowest_reader(domain, unit->index, tag) < 0;
}

void exchange_reclaim(fc_domain *domain)
{
    while (domain->oldest < domain->newest) {
        const ring_entry *entry = domain_entry(domain, domain->oldest);

        if (!arena_is_over(&domain->units[entry->unit], entry->tag)) {
            break;
        }
        domain->oldest++;
    }
    if (domain->unfinished < domain->oldest) {
        domain->unfinished = domain->oldest;
    }
    if (domain->oldest == domain->newest) {
        domain->next_at = 0;
        if (domain->is_spread) {
            domain->is_spread = false;
            fc_region_give_back(domain->region,
                                domain->spares_at + (size_t)domain->rank * domain->spare_bytes,
                                domain->spare_bytes);
        }
    }
}

bool arena_is_place(const fc_domain *domain, size_t at, size_t bytes)
{
    const size_t end = domain->arena_bytes + (at < domain->arena_bytes ? 0 : domain->spare_bytes);

    return at <= end && bytes <= end - at;
}

static bool is_free(const fc_domain *domain, size_t at, size_t bytes)
{
    bool is_free = arena_is_place(domain, at, bytes);

    for (size_t s = domain->oldest; s < domain->newest && is_free; s++) {
        const ring_entry *entry = domain_entry(domain, s);

        is_free = at + bytes <= entry->at || entry->at + entry->bytes <= at;
    }
    return is_free;
}

/* The lowest place between the entries, and behind them. */
static bool find_room_between(const fc_domain *domain, size_t bytes, size_t *at_out)
{
    size_t lowest = SIZE_MAX;

    for (size_t s = domain->oldest; s < domain->newest; s++) {
        const ring_entry *entry = domain_entry(domain, s);
        const size_t end = entry->at + entry->bytes;

        lowest = end < lowest && is_free(domain, end, bytes) ? end : lowest;
    }
    lowest = is_free(domain, 0, bytes) ? 0 : lowest;
    if (domain->arena_bytes < lowest && is_free(domain, domain->arena_bytes, bytes)) {
        lowest = domain->arena_bytes;
    }
    *at_out = lowest;
    return lowest != SIZE_MAX;
}

/* Between the newest and the oldest entry. */
bool arena_find_room(const fc_domain *domain, size_t bytes, size_t *at_out)
{
    size_t oldest_at;

    if (bytes > domain->arena_bytes || domain->newest - domain->oldest == domain->ring_capacity) {
        return false;
    }
    if (domain->is_spread) {
        return find_room_between(domain, bytes, at_out);
    }
    *at_out = domain->next_at;
    if (domain->oldest == domain->newest) {
        return true; /* next_at is 0 */
    }
    oldest_at = domain_entry(domain, domain->oldest)->at;
    if (domain->next_at <= oldest_at) {
        return oldest_at - domain->next_at >= bytes;
    }
    if (domain->arena_bytes - domain->next_at >= bytes) {
        return true;
    }
    *at_out = 0;
    return oldest_at >= bytes;
}

void arena_take(fc_unit *unit, size_t at, size_t bytes)
{
    fc_domain *domain = unit->domain;

    *domain_entry(domain, domain->newest) = (ring_entry){at, bytes, unit->index, unit->posted};
    domain->newest++;
    domain->next_at = at + bytes;
}

int64_t arena_wait_until_ns(const fc_domain *domain)
{
    return domain->is_spread ? INT64_MAX : fc_deadline_ns(PATIENCE_NS >> domain->haste);
}

void arena_waited(fc_domain *domain, int64_t until_ns)
{
    if (until_ns != INT64_MAX) {
        domain->is_spread = fc_now_ns() >= until_ns;
        domain->haste = domain->is_spread ? HASTE_MAX : domain->haste - (domain->haste > 0);
    }
}
