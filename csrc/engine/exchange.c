/* Posting, finding and releasing reductions; see exchange.h for the protocol. */
#include "engine/exchange.h"

#include "engine/exchange_private.h"
#include "engine/unit.h"

#include <stdio.h>
#include <string.h>

#define NUMBER_MASK STATE_MASK /* a tag is phase << 8 | number of the post, from 1 */

fc_status fc_exchange_reserve(fc_unit *unit, size_t part_bytes, fc_wire wire, char **parts_out)
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
    if (!exchange_is_lane_free(unit) || !arena_find_room(domain, bytes, &at)) {
        return FC_AGAIN;
    }
    own->stage_at = at;
    own->part_bytes = part_bytes;
    own->wire = (uint64_t)wire;
    *parts_out = domain_post(domain, domain->rank, at);
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
    const uint64_t previous = tag_of(domain, domain->rank, unit->index);

    memcpy(lane_mask(domain, own), unit->mask, unit->layout.mask_words * sizeof(uint64_t));
    memset(unit->mask, 0, unit->layout.mask_words * sizeof(uint64_t));
    unit->posted = previous != 0 ? previous + 1 : next_tag(unit);
    arena_take(unit, own->stage_at, bytes);
    fc_transport_publish(domain->transport, &own->tag, unit->posted);
}

void fc_exchange_accumulate(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    lane *own = domain_lane(domain, domain->rank, unit->index);

    __atomic_store_n(&own->accumulated_in, phase_of(domain->clock), __ATOMIC_RELEASE);
}

static bool has_left_phase(const fc_domain *domain, int rank)
{
    return fc_word_load(&domain_clock(domain, rank)->clock) >= (domain->clock | PHASE_CLOSED);
}

/* Where a rank's lane says that its post lies. It is memory that any process of the run can write
 * to: what lies nowhere is an error, and nothing is read there. */
fc_status exchange_find_part(const fc_unit *unit, int rank, part *out)
{
    const fc_domain *domain = unit->domain;
    lane *l = domain_lane(domain, rank, unit->index);
    const uint64_t at = __atomic_load_n(&l->stage_at, __ATOMIC_RELAXED);
    const uint64_t bytes = __atomic_load_n(&l->part_bytes, __ATOMIC_RELAXED);
    const uint64_t wire = __atomic_load_n(&l->wire, __ATOMIC_RELAXED);
    const size_t copies = domain->kind == FC_DOMAIN_SHARD ? (size_t)domain->n_ranks : 1;
    const size_t before = domain->kind == FC_DOMAIN_SHARD ? (size_t)domain->rank : 0;

    if (wire > FC_WIRE_F16 ||
        bytes != fc_unit_bytes_of(unit, lane_mask(domain, l), (fc_wire)wire) ||
        at % FC_ALIGN != 0 || !arena_is_place(domain, at, copies * bytes)) {
        return fc_fail(FC_ERR_MISMATCH,
                       "unit %s: what rank %d says of its gradients in shared memory is not what "
                       "it wrote: something else writes there",
                       unit->name, fc_transport_global_rank(domain->transport, rank));
    }
    *out = (part){domain_post(domain, rank, at) + before * bytes, bytes, (fc_wire)wire};
    return FC_OK;
}

/* ---- finishing ---- */

/* What keeps the unit's next reduction from being finished. */
typedef enum readiness {
    NOTHING_POSTED,
    MAY_COME, /* nothing posted, but this rank has left the phase and a peer has not */
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
            any = any || has_posted(unit, r, wanted);
        } else if (has_posted(unit, r, wanted)) {
            any = true;
        } else {
            missing = r;
        }
    }
    *missing_out = missing;
    if (missing >= 0) {
        if (any) {
            return NOT_YET;
        }
        return fc_domain_is_open(domain) ? NOTHING_POSTED : MAY_COME;
    }
    if (!any) {
        return NOTHING_POSTED;
    }
    return own_done ? READY : NOT_YET;
}

/* A peer that has left the phase by an exception; -1 if none. */
static int find_failed(const fc_domain *domain)
{
    int r;

    for (r = 0; r < domain->n_ranks; r++) { /* this rank has not */
        if (domain_has_failed(domain, r)) {
            return r;
        }
    }
    return -1;
}

/* A peer that has left the phase by an exception without a post for the unit's next reduction; -1
 * if none. One that posted before took part in it, whatever it did later. */
static int find_lost(const fc_unit *unit)
{
    const fc_domain *domain = unit->domain;
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        if (domain_has_failed(domain, r) && !has_posted(unit, r, next_tag(unit))) {
            return r;
        }
    }
    return -1;
}

/* A peer that keeps its gradients while others reduce theirs, or that has gone on without them, is
 * a mistake of the script. */
static fc_status check_accumulated(fc_domain *domain, const fc_unit *unit)
{
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        lane *l = domain_lane(domain, r, unit->index);

        if (__atomic_load_n(&l->accumulated_in, __ATOMIC_ACQUIRE) == phase_of(domain->clock)) {
            char text[REASON_BYTES];

            (void)snprintf(
                text, sizeof(text),
                "rank %d keeps the gradients of unit %s for a later backward "
                "(set_requires_gradient_sync(False)) while other ranks reduce them in step %llu; "
                "call it with the same value on every rank",
                fc_transport_global_rank(domain->transport, r), unit->name,
                (unsigned long long)(domain->clock >> STEP_SHIFT));
            return apart_accuse(domain, r, text);
        }
        if (r != domain->rank) {
            FC_TRY(apart_check_skipped(domain, r, unit));
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

    return has_left_phase(wait->domain, wait->peer) || has_posted(unit, wait->peer, next_tag(unit));
}

/* Not while a peer is missing that has failed: an error at the end, since this rank may be about to
 * raise the same. Looked at in this order: who has failed posts no more. */
static bool is_whole(fc_domain *domain, size_t index)
{
    int missing;

    return look_at(domain, index, &missing) == READY && find_lost(&domain->units[index]) < 0;
}

fc_unit *exchange_find_own(fc_domain *domain, bool oldest_only)
{
    size_t s, i;

    for (s = domain->unfinished; s < domain->newest; s++) {
        const ring_entry *entry = domain_entry(domain, s);

        if (domain->units[entry->unit].finished >= entry->tag) {
            domain->unfinished += s == domain->unfinished;
            continue;
        }
        if (is_whole(domain, entry->unit)) {
            return &domain->units[entry->unit];
        }
        if (oldest_only) {
            return NULL;
        }
    }
    /* A post that was copied away by everybody has left the arena. */
    for (i = 0; i < domain->n_units && !oldest_only; i++) {
        if (domain->units[i].finished < domain->units[i].posted && is_whole(domain, i)) {
            return &domain->units[i];
        }
    }
    return NULL;
}

/* The next unit whose reduction can be finished, those last that a peer has failed without; else
 * wait_out names the first that is not settled, of those that somebody posted if there is one, and
 * whom it waits for, -1 if all are. */
static fc_unit *find_ready(fc_domain *domain, post_wait *wait_out)
{
    readiness awaited = NOTHING_POSTED;
    fc_unit *lost = NULL;
    size_t n;
    int missing;

    *wait_out = (post_wait){domain, 0, -1};
    for (n = 0; n < domain->n_units; n++) {
        size_t i = (domain->cursor + n) % domain->n_units;
        readiness ready = look_at(domain, i, &missing);

        if (ready == READY && find_lost(&domain->units[i]) < 0) {
            domain->cursor = i;
            return &domain->units[i];
        }
        if (ready == READY && lost == NULL) {
            lost = &domain->units[i];
        }
        if (ready != READY && ready > awaited) {
            awaited = ready;
            wait_out->unit = i;
            wait_out->peer = missing;
        }
    }
    return lost;
}

/* Any unit will do: a peer with a full arena may wait for this rank to read another one first. */
static bool any_progress(void *arg)
{
    const post_wait *wait = arg;
    post_wait ignored;
    drainable post;

    return peer_answered(arg) || find_failed(wait->domain) >= 0 ||
           find_ready(wait->domain, &ignored) != NULL ||
           (exchange_is_a_peer_stuck(wait->domain) && exchange_find_drainable(wait->domain, &post));
}

/* Among all units, the next that can be finished; waits as long as one is not settled. A peer that
 * has failed is an error when no unit is left that all have posted: hooks of those sums may raise
 * here what they have raised there. */
static fc_status next_of_all(fc_domain *domain, fc_unit **unit_out)
{
    for (;;) {
        /* Before units are looked at: all have posted by then whatever it has added up. */
        const int failed = find_failed(domain);
        post_wait wait;
        drainable post;

        *unit_out = find_ready(domain, &wait);
        if (*unit_out != NULL && find_lost(*unit_out) < 0) {
            return check_accumulated(domain, *unit_out);
        }
        if (*unit_out == NULL && wait.peer < 0) {
            return FC_OK;
        }
        if (failed >= 0) {
            const fc_unit *at = *unit_out != NULL ? *unit_out : &domain->units[wait.unit];

            FC_TRY(domain_check_peer(domain, failed, "reduce-scatter", at->name));
        }
        if (*unit_out != NULL) {
            continue; /* a peer has failed since */
        }
        if (exchange_is_a_peer_stuck(domain) && exchange_find_drainable(domain, &post)) {
            FC_TRY(exchange_drain(post.unit, post.rank));
        } else {
            const fc_wait_info info = {"reduce-scatter", domain->units[wait.unit].name,
                                       domain->clock >> STEP_SHIFT};

            FC_TRY(waits_await(domain, &domain->units[wait.unit], FC_WAIT_REDUCE, wait.peer,
                               any_progress, &wait, &info));
        }
    }
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
    *unit_out = exchange_find_own(domain, search == FC_SEARCH_OLDEST);
    return *unit_out != NULL ? check_accumulated(domain, *unit_out) : FC_OK;
}

/* Or another one than the peer will not. */
static bool peer_answered_or_lost(void *arg)
{
    const post_wait *wait = arg;

    return peer_answered(arg) || find_lost(&wait->domain->units[wait->unit]) >= 0;
}

fc_status fc_exchange_await(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    const fc_wait_info info = {"reduce-scatter", unit->name, domain->clock >> STEP_SHIFT};

    for (;;) {
        int missing, lost;
        const bool is_awaited = look_at(domain, unit->index, &missing) == NOT_YET;
        post_wait arg = {domain, unit->index, missing};

        lost = find_lost(unit);
        if (lost >= 0) {
            FC_TRY(domain_check_peer(domain, lost, info.op, info.unit));
        }
        if (!is_awaited) {
            break;
        }
        FC_TRY(
            waits_await(domain, unit, FC_WAIT_REDUCE, missing, peer_answered_or_lost, &arg, &info));
    }
    return check_accumulated(domain, unit);
}

fc_status fc_exchange_sources(fc_unit *unit, fc_source *sources_out)
{
    fc_domain *domain = unit->domain;
    uint64_t wanted = next_tag(unit);
    int r;

    for (r = 0; r < domain->n_ranks; r++) {
        lane *l = domain_lane(domain, r, unit->index);
        const spilled *copy = find_spilled(unit, r, wanted);

        sources_out[r] = (fc_source){.part = NULL};
        if (copy != NULL) {
            sources_out[r].part = (const char *)(copy->words + unit->layout.mask_words);
            sources_out[r].mask = copy->words;
            sources_out[r].wire = copy->wire;
        } else if (tag_of(domain, r, unit->index) >= wanted) {
            part post;

            FC_TRY(exchange_find_part(unit, r, &post));
            sources_out[r].part = post.data;
            sources_out[r].mask = lane_mask(domain, l);
            sources_out[r].wire = post.wire;
        }
    }
    return FC_OK;
}

void fc_exchange_consume(fc_unit *unit)
{
    fc_domain *domain = unit->domain;
    lane *own = domain_lane(domain, domain->rank, unit->index);
    uint64_t tag = next_tag(unit);
    int r;

    unit->finished = tag;
    exchange_drop_spilled(unit, tag);
    for (r = 0; r < domain->n_ranks; r++) {
        /* A later post may have been copied away already. */
        if (r != domain->rank && fc_word_load(lane_consumed(own, r)) < tag) {
            fc_transport_publish(domain->transport, lane_consumed(own, r), tag);
        }
    }
}

void fc_exchange_reset(fc_domain *domain)
{
    size_t i;

    if (domain->n_ranks == 1) {
        return; /* nothing was posted */
    }
    for (i = 0; i < domain->n_units; i++) {
        fc_unit *unit = &domain->units[i];

        unit->finished = unit->posted > unit->finished ? unit->posted : unit->finished;
        exchange_drop_spilled(unit, UINT64_MAX);
        memset(unit->mask, 0, unit->layout.mask_words * sizeof(uint64_t));
    }
}
