/* Posting, finding and releasing reductions; see exchange.h for the protocol. */
#include "group/exchange.h"

#include "group/domain_private.h"

#include <string.h>

#define NUMBER_MASK STATE_MASK /* a tag is phase << 8 | number of the post, from 1 */

/* ---- tags ---- */

/* The last tag of `rank` for this unit, if it belongs to the current phase, else 0. */
static uint64_t tag_of(const fc_domain *domain, int rank, size_t unit)
{
    uint64_t tag = rank == domain->rank ? domain->units[unit].posted
                                        : fc_word_load(&domain_lane(domain, rank, unit)->tag);

    return phase_of(tag) == phase_of(domain->clock) ? tag : 0;
}

static bool has_left_phase(const fc_domain *domain, int rank)
{
    return fc_word_load(&domain_clock(domain, rank)->clock) >= (domain->clock | PHASE_CLOSED);
}

/* The tag of the unit's next reduction in this phase. */
static uint64_t next_tag(const fc_unit *unit)
{
    uint64_t first = phase_of(unit->domain->clock) << PHASE_SHIFT;

    return (unit->finished > first ? unit->finished : first) + 1;
}

/* ---- the arena ---- */

/* True when rank r != own has read this rank's post `tag` of a unit, or never will: a phase that
 * was left by an exception leaves posts unread. */
static bool has_read(const fc_domain *domain, int r, size_t unit, uint64_t tag)
{
    return fc_word_load(lane_consumed(domain_lane(domain, r, unit), domain->rank)) >= tag ||
           fc_word_load(&domain_clock(domain, r)->clock) >= (tag | STATE_MASK);
}

/* A peer that has yet to read a post of this rank; -1 if none. */
static int slowest_reader(const fc_domain *domain, size_t unit, uint64_t tag)
{
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        if (r != domain->rank && !has_read(domain, r, unit, tag)) {
            return r;
        }
    }
    return -1;
}

/* True when nobody needs the entry's room; this rank's own part lies there too. */
static bool is_released(const fc_domain *domain, const ring_entry *entry)
{
    const fc_unit *unit = &domain->units[entry->unit];

    return (unit->finished >= entry->tag || unit->drained[domain->rank].tag == entry->tag) &&
           slowest_reader(domain, entry->unit, entry->tag) < 0;
}

void exchange_reclaim(fc_domain *domain)
{
    while (domain->oldest < domain->newest &&
           is_released(domain, domain_entry(domain, domain->oldest))) {
        domain->oldest++;
    }
    if (domain->unfinished < domain->oldest) {
        domain->unfinished = domain->oldest;
    }
    if (domain->oldest == domain->newest) {
        domain->next_at = 0;
    }
}

/* Finds room between the newest and the oldest entry; false if there is none. */
static bool find_room(const fc_domain *domain, size_t bytes, size_t *at_out)
{
    size_t oldest_at;

    if (bytes > domain->arena_bytes || domain->newest - domain->oldest == domain->ring_capacity) {
        return false;
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

/* True when the unit's lane may carry a new post: it has one header, so the last post must be over.
 */
static bool is_lane_free(const fc_unit *unit)
{
    return unit->finished >= unit->posted &&
           slowest_reader(unit->domain, unit->index, unit->posted) < 0;
}

fc_status fc_exchange_reserve(fc_unit *unit, size_t part_bytes, char **parts_out)
{
    fc_domain *domain = unit->domain;
    lane *own = domain_lane(domain, domain->rank, unit->index);
    size_t copies = domain->kind == FC_DOMAIN_SHARD ? (size_t)domain->n_ranks : 1;
    size_t bytes = fc_round_up(copies * part_bytes, FC_ALIGN);
    size_t at;

    FC_TRY(fc_transport_check(domain->transport));
    if ((unit->posted & NUMBER_MASK) == NUMBER_MASK &&
        tag_of(domain, domain->rank, unit->index) != 0) {
        return fc_fail(FC_ERR_STATE, "unit %s was reduced 255 times in one backward", unit->name);
    }
    exchange_reclaim(domain);
    if (!is_lane_free(unit) || !find_room(domain, bytes, &at)) {
        return FC_AGAIN;
    }
    own->stage_at = at;
    own->part_bytes = part_bytes;
    *parts_out = domain_arena(domain, domain->rank) + at;
    return FC_OK;
}

void fc_exchange_set_present(fc_unit *unit, size_t param)
{
    unit->mask[param / 64] |= UINT64_C(1) << (param % 64);
}

bool fc_exchange_is_present(const fc_unit *unit, size_t param)
{
    return (unit->mask[param / 64] >> (param % 64) & 1) != 0;
}

void fc_exchange_commit(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    lane *own = domain_lane(domain, domain->rank, unit->index);
    size_t copies = domain->kind == FC_DOMAIN_SHARD ? (size_t)domain->n_ranks : 1;
    size_t bytes = fc_round_up(copies * own->part_bytes, FC_ALIGN);
    uint64_t previous = tag_of(domain, domain->rank, unit->index);
    uint64_t first = phase_of(domain->clock) << PHASE_SHIFT;

    if (previous == 0) {
        previous = unit->finished > first ? unit->finished : first;
    }
    memcpy(lane_mask(domain, own), unit->mask, unit->layout.mask_words * sizeof(uint64_t));
    memset(unit->mask, 0, unit->layout.mask_words * sizeof(uint64_t));
    unit->posted = previous + 1;
    *domain_entry(domain, domain->newest) =
        (ring_entry){own->stage_at, bytes, unit->index, unit->posted};
    domain->newest++;
    domain->next_at = own->stage_at + bytes;
    fc_transport_publish(domain->transport, &own->tag, unit->posted);
}

void fc_exchange_hold(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    lane *own = domain_lane(domain, domain->rank, unit->index);

    __atomic_store_n(&own->is_held, phase_of(domain->clock), __ATOMIC_RELEASE);
}

/* ---- finishing ---- */

/* What keeps the unit's next reduction from being finished. */
typedef enum readiness {
    NOTHING_POSTED,
    NOT_YET,
    READY
} readiness;

static readiness look_at(fc_domain *domain, size_t index, int *missing_out)
{
    const fc_unit *unit = &domain->units[index];
    uint64_t wanted = next_tag(unit);
    bool any = tag_of(domain, domain->rank, index) >= wanted;
    bool own_done = any || !fc_domain_is_open(domain);
    int r, missing = -1;

    for (r = 0; r < domain->n_ranks; r++) {
        if (r == domain->rank) {
            continue;
        }
        /* In this order: a peer posts before it leaves, so having left it shows its last tag. */
        if (has_left_phase(domain, r)) {
            any = any || tag_of(domain, r, index) >= wanted;
        } else if (tag_of(domain, r, index) >= wanted) {
            any = true;
        } else {
            missing = r;
        }
    }
    *missing_out = missing;
    if (missing >= 0) {
        return any || !fc_domain_is_open(domain) ? NOT_YET : NOTHING_POSTED;
    }
    if (!any) {
        return NOTHING_POSTED;
    }
    return own_done ? READY : NOT_YET;
}

/* A peer that keeps its gradients while others reduce theirs is a mistake of the script. */
static fc_status check_held(const fc_domain *domain, const fc_unit *unit)
{
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        lane *l = domain_lane(domain, r, unit->index);

        if (__atomic_load_n(&l->is_held, __ATOMIC_ACQUIRE) == phase_of(domain->clock)) {
            return fc_fail(
                FC_ERR_MISMATCH,
                "rank %d keeps the gradients of unit %s for a later backward "
                "(set_requires_gradient_sync(False)) while other ranks reduce them in step %llu; "
                "call it with the same value on every rank",
                fc_transport_global_rank(domain->transport, r), unit->name,
                (unsigned long long)(domain->clock >> STEP_SHIFT));
        }
    }
    for (r = 0; r < domain->n_ranks; r++) {
        if (r != domain->rank) {
            FC_TRY(domain_check_peer(domain, r, "reduce-scatter", unit->name));
        }
    }
    return FC_OK;
}

typedef struct post_wait {
    fc_domain *domain;
    size_t unit;
    int peer;
} post_wait;

static bool peer_answered(void *arg)
{
    const post_wait *wait = arg;
    const fc_unit *unit = &wait->domain->units[wait->unit];

    return has_left_phase(wait->domain, wait->peer) ||
           tag_of(wait->domain, wait->peer, wait->unit) >= next_tag(unit);
}

/* Among this rank's unfinished posts, the first that can be finished. */
static fc_status next_own(fc_domain *domain, bool oldest_only, fc_unit **unit_out)
{
    size_t s;
    int missing;

    *unit_out = NULL;
    for (s = domain->unfinished; s < domain->newest; s++) {
        const ring_entry *entry = domain_entry(domain, s);
        fc_unit *unit = &domain->units[entry->unit];

        if (unit->finished >= entry->tag) {
            domain->unfinished += s == domain->unfinished;
            continue;
        }
        if (look_at(domain, entry->unit, &missing) == READY) {
            *unit_out = unit;
            return check_held(domain, unit);
        }
        if (oldest_only) {
            break;
        }
    }
    return FC_OK;
}

/* Among all units, the next that can be finished; waits as long as one is not settled. */
static fc_status next_of_all(fc_domain *domain, fc_unit **unit_out)
{
    size_t looked_at = 0;

    *unit_out = NULL;
    while (looked_at < domain->n_units) {
        size_t n, blocked = SIZE_MAX;
        int missing, blocking_peer = -1;

        for (n = looked_at; n < domain->n_units; n++) {
            size_t i = (domain->cursor + n) % domain->n_units;
            readiness ready = look_at(domain, i, &missing);

            if (ready == READY) {
                domain->cursor = i;
                *unit_out = &domain->units[i];
                return check_held(domain, *unit_out);
            }
            if (ready == NOT_YET && blocked == SIZE_MAX) {
                blocked = i;
                blocking_peer = missing;
            }
        }
        if (blocked == SIZE_MAX) {
            return FC_OK;
        } else {
            post_wait arg = {domain, blocked, blocking_peer};
            const fc_wait_info info = {"reduce-scatter", domain->units[blocked].name,
                                       domain->clock >> STEP_SHIFT};

            FC_TRY(fc_transport_wait(domain->transport, blocking_peer, peer_answered, &arg, &info));
            FC_TRY(domain_check_peer(domain, blocking_peer, info.op, info.unit));
            domain->cursor = blocked;
            looked_at = 0;
        }
    }
    return FC_OK;
}

fc_status fc_exchange_next(fc_domain *domain, fc_search search, fc_unit **unit_out)
{
    if (domain->n_ranks == 1) {
        *unit_out = NULL;
        return FC_OK;
    }
    if (search == FC_SEARCH_ALL) {
        return next_of_all(domain, unit_out);
    }
    return next_own(domain, search == FC_SEARCH_OLDEST, unit_out);
}

fc_status fc_exchange_await(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    const fc_wait_info info = {"reduce-scatter", unit->name, domain->clock >> STEP_SHIFT};
    int missing;

    while (look_at(domain, unit->index, &missing) == NOT_YET) {
        post_wait arg = {domain, unit->index, missing};

        FC_TRY(fc_transport_wait(domain->transport, missing, peer_answered, &arg, &info));
        FC_TRY(domain_check_peer(domain, missing, info.op, info.unit));
    }
    return check_held(domain, unit);
}

/* Where this rank's part of a post of `rank` lies. */
static const char *part_in_arena(const fc_domain *domain, int rank, const lane *l)
{
    size_t offset = domain->kind == FC_DOMAIN_SHARD ? (size_t)domain->rank * l->part_bytes : 0;

    return domain_arena(domain, rank) + l->stage_at + offset;
}

void fc_exchange_sources(fc_unit *unit, fc_source *sources_out)
{
    fc_domain *domain = unit->domain;
    uint64_t wanted = next_tag(unit);
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        lane *l = domain_lane(domain, r, unit->index);
        const drained *away = &unit->drained[r];

        sources_out[r] = (fc_source){NULL, NULL};
        if (tag_of(domain, r, unit->index) < wanted) {
            continue;
        }
        if (away->tag == wanted) {
            sources_out[r].part = away->bytes + unit->layout.mask_words * sizeof(uint64_t);
            sources_out[r].mask = (const uint64_t *)(const void *)away->bytes;
        } else {
            sources_out[r].part = part_in_arena(domain, r, l);
            sources_out[r].mask = lane_mask(domain, l);
        }
    }
}

void fc_exchange_consume(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    lane *own = domain_lane(domain, domain->rank, unit->index);
    uint64_t tag = next_tag(unit);
    int r;

    unit->finished = tag;
    for (r = 0; r < domain->n_ranks; r++) {
        if (r != domain->rank) {
            fc_transport_publish(domain->transport, lane_consumed(own, r), tag);
        }
    }
}

/* ---- a full arena ---- */

/* Copies a post's part for this rank away, so that its poster can go on. The poster may be this
 * rank. */
static fc_status drain(fc_unit *unit, int rank)
{
    fc_domain *domain = unit->domain;
    lane *l = domain_lane(domain, rank, unit->index);
    lane *own = domain_lane(domain, domain->rank, unit->index);
    drained *away = &unit->drained[rank];
    size_t mask_bytes = unit->layout.mask_words * sizeof(uint64_t);
    size_t bytes = mask_bytes + l->part_bytes;
    uint64_t tag = tag_of(domain, rank, unit->index);

    if (away->capacity < bytes) {
        char *memory = fc_alloc(1, bytes);

        if (memory == NULL) {
            return fc_fail(FC_ERR_NOMEM, "unit %s: %zu bytes to copy rank %d's gradients away",
                           unit->name, bytes, fc_transport_global_rank(domain->transport, rank));
        }
        fc_free(away->bytes);
        away->bytes = memory;
        away->capacity = bytes;
    }
    memcpy(away->bytes, lane_mask(domain, l), mask_bytes);
    memcpy(away->bytes + mask_bytes, part_in_arena(domain, rank, l), l->part_bytes);
    away->tag = tag;
    if (rank != domain->rank) {
        fc_transport_publish(domain->transport, lane_consumed(own, rank), tag);
    }
    return FC_OK;
}

/* The first post of a peer that this rank could copy away. */
static bool find_drainable(const fc_domain *domain, size_t *unit_out, int *rank_out)
{
    size_t i;
    int r;

    for (i = 0; i < domain->n_units; i++) {
        const fc_unit *unit = &domain->units[i];

        for (r = 0; r < domain->n_ranks; r++) {
            if (r != domain->rank && tag_of(domain, r, i) == next_tag(unit) &&
                unit->drained[r].tag != next_tag(unit)) {
                *unit_out = i;
                *rank_out = r;
                return true;
            }
        }
    }
    return false;
}

typedef struct way_wait {
    fc_domain *domain;
    const fc_unit *unit; /* whose busy lane is waited for; NULL if it is free */
} way_wait;

static bool way_was_made(void *arg)
{
    const way_wait *wait = arg;
    fc_domain *domain = wait->domain;
    size_t s, unit, before = domain->oldest;
    int rank, missing;

    exchange_reclaim(domain);
    if (domain->oldest > before || find_drainable(domain, &unit, &rank) ||
        (wait->unit != NULL && is_lane_free(wait->unit))) {
        return true;
    }
    for (s = domain->unfinished; s < domain->newest; s++) {
        const ring_entry *entry = domain_entry(domain, s);

        if (domain->units[entry->unit].finished < entry->tag &&
            look_at(domain, entry->unit, &missing) == READY) {
            return true;
        }
    }
    return false;
}

/* Whom the unit's busy lane waits for: a reader of its last post, or who has not posted yet; -1 if
 * it is free. */
static int lane_blocker(fc_unit *unit)
{
    int reader = slowest_reader(unit->domain, unit->index, unit->posted);
    int missing = -1;

    if (unit->finished < unit->posted) {
        (void)look_at(unit->domain, unit->index, &missing);
    }
    return missing >= 0 ? missing : reader;
}

fc_status fc_exchange_make_way(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    way_wait wait = {domain, unit};
    const fc_wait_info info = {"reduce-scatter", unit->name, domain->clock >> STEP_SHIFT};
    size_t other;
    int rank;

    if (find_drainable(domain, &other, &rank)) {
        return drain(&domain->units[other], rank);
    }
    rank = lane_blocker(unit);
    if (rank < 0) {
        const ring_entry *oldest = domain_entry(domain, domain->oldest);

        wait.unit = NULL;
        if (domain->oldest == domain->newest) {
            return fc_fail(FC_ERR_STATE,
                           "unit %s: its reduction does not fit an arena of %zu bytes", unit->name,
                           domain->arena_bytes);
        }
        rank = slowest_reader(domain, oldest->unit, oldest->tag);
        if (rank < 0) {
            return drain(&domain->units[oldest->unit], domain->rank);
        }
    }
    if (!way_was_made(&wait)) {
        FC_TRY(fc_transport_wait(domain->transport, rank, way_was_made, &wait, &info));
    }
    return domain_check_peer(domain, rank, info.op, info.unit);
}

void fc_exchange_reset(fc_domain *domain)
{
    size_t i;

    for (i = 0; i < domain->n_units; i++) {
        fc_unit *unit = &domain->units[i];

        unit->finished = unit->posted > unit->finished ? unit->posted : unit->finished;
        memset(unit->mask, 0, unit->layout.mask_words * sizeof(uint64_t));
    }
    if (domain->is_mapped && domain->n_ranks > 1) {
        exchange_reclaim(domain);
    }
}
