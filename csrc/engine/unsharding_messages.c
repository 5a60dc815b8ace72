/* Units over messages: each rank gathers a copy for each use.
 *
 * Bytes: a gather writes this rank's pack once and the whole unit once. It brings small units
 * along, see [Note: gathers ahead] in order.h. Where forward reshards to a smaller group each rank
 * copies its slice, and backward gathers slices between the ranks of that group alone. A forward
 * gathers shards: they may have been written since.
 */
#include "engine/unsharding_private.h"

#include "engine/batch.h"
#include "engine/domain_private.h"
#include "engine/order.h"
#include "engine/root.h"

static bool reads_slices(const fc_unsharding *u)
{
    return u->slices != NULL && fc_domain_in_backward(u->domain);
}

/* Whether both are gathered between the same ranks. */
static bool is_alike(const fc_unsharding *u, const fc_unsharding *other)
{
    return reads_slices(u) ? reads_slices(other) && u->sliced->domain == other->sliced->domain
                           : !reads_slices(other);
}

/* Small units that followed this one in the backward before, and still have to be gathered: a list
 * from `u` on, of `*n_out` with it. */
static void find_followers(fc_unsharding *u, size_t *n_out)
{
    fc_order_walk walk = fc_order_after(u->unit);
    fc_unsharding *last = u;
    fc_unit *unit;

    *n_out = 1;
    u->next = u; /* the last one names itself: it is in the list */
    if (!fc_order_is_followed(u->domain)) {
        return;
    }
    while ((unit = fc_order_next(&walk)) != NULL) {
        fc_unsharding *next = unit->unsharding;

        if (next == NULL || next->next != NULL ||
            !fc_unsharding_is_away((fc_unsharding_state)next->state) || next->keeps_memory ||
            !is_alike(u, next) || (next->is_extended && !fc_domain_in_backward(u->domain))) {
            continue;
        }
        fc_order_take(&walk, unit);
        last->next = next;
        last = next;
        last->next = last;
        ++*n_out;
    }
}

/* Ends the list; with `keeps`, all go on with the memory that they were given. */
static void end_list(fc_unsharding *u, const fc_unsharding *until, bool keeps)
{
    while (u != NULL) {
        fc_unsharding *next = u->next != u ? u->next : NULL;

        if (!keeps && u != until) {
            unsharding_release_slot(u);
        }
        u->next = NULL;
        u = next;
    }
}

/* What this rank sends of it. */
static fc_batch_gather sends(fc_unsharding *u)
{
    u->is_from_slices = reads_slices(u);
    if (u->is_from_slices) {
        for (size_t i = 0; i < u->n_params; i++) {
            u->shards[i] = (const char *)u->slices + u->sliced->params[i].pack_at;
        }
    } else {
        u->ops->shards(u->owner, u->shards);
    }
    return (fc_batch_gather){u->is_from_slices ? u->sliced : u->unit, u->shards, u->memory,
                             u->ops->is_observed(u->owner)};
}

/* In one collective, whose parts they take to their slots. */
static fc_status gather_list(fc_unsharding *first, fc_batch_gather *gathers, size_t n)
{
    fc_unsharding *u = first;
    void *pack = NULL;
    fc_status st;

    for (size_t i = 0; i < n; i++, u = u->next) {
        FC_TRY(unsharding_take_slot(u));
        if (!reads_slices(u)) {
            FC_TRY(unsharding_make(u));
        }
        gathers[i] = sends(u);
    }
    FC_TRY(fc_slots_acquire(first->slots, fc_batch_pack_bytes(gathers, n), &pack));
    st = fc_batch_all_gather(gathers, n, pack);
    fc_slots_release(first->slots, pack);
    return st;
}

static uint64_t moved_bytes(const fc_unsharding *u)
{
    return u->is_from_slices ? u->sliced_gather_bytes : u->gather_bytes;
}

/* Gathered with another unit, and there until it is used. */
static void come_along(fc_unsharding *u)
{
    fc_root_note_use(u->unit);
    unsharding_note_ahead(u);
    u->traffic->gathered += moved_bytes(u);
    u->came_along = true;
    unsharding_turn(u, FC_UNIT_COME_ALONG);
    fc_order_set_ahead(u->unit, true);
}

static void note_gathered(fc_unsharding *u, const fc_unsharding *first, size_t n)
{
    for (size_t i = 0; i < n; i++, u = u->next) {
        u->gathered_at = u->ops->n_steps(u->owner);
        u->traffic->copied +=
            (u->is_from_slices ? u->sliced->layout.pack_bytes : u->layout->pack_bytes) + u->bytes;
        if (u != first) {
            come_along(u);
        }
    }
}

/* ---- gathers that begin before they are asked for ---- */

bool unsharding_may_begin(const fc_unsharding *u)
{
    return u != NULL && fc_unsharding_is_away((fc_unsharding_state)u->state) && u->memory == NULL &&
           !u->keeps_memory && !u->is_extended && !reads_slices(u);
}

static fc_status begin_gather(fc_unsharding *u)
{
    const fc_batch_gather one = sends(u);
    void *pack = NULL;
    fc_status st;

    FC_TRY(fc_slots_acquire(u->slots, fc_batch_pack_bytes(&one, 1), &pack));
    st = fc_batch_begin_gather(&one, pack);
    if (st != FC_OK) {
        fc_slots_release(u->slots, pack);
        return st == FC_AGAIN ? FC_OK : st;
    }
    unsharding_note_ahead(u);
    u->domain->gathering = u;
    u->domain->gathering_pack = pack;
    return FC_OK;
}

/* A unit is used: the next one's shards travel while it computes. */
static fc_status begin_next(const fc_unsharding *u)
{
    const fc_domain *domain = u->domain;
    fc_unsharding *next;

    if (domain->gathering != NULL || !waits_takes_gathers(domain)) {
        return FC_OK;
    }
    next = fc_order_next_large(domain);
    return next != NULL ? begin_gather(next) : FC_OK;
}

static void give_pack_back(fc_domain *domain)
{
    fc_slots_release(domain->gathering->slots, domain->gathering_pack);
    domain->gathering = NULL;
}

void fc_unsharding_drop_begun(fc_domain *domain)
{
    if (domain->gathering != NULL) {
        const fc_message_ops *messages = fc_transport_messages(domain->transport);

        messages->gather_drop(messages->context);
        give_pack_back(domain);
    }
}

static fc_status end_gather(fc_unsharding *u)
{
    fc_batch_gather one;
    fc_status st;

    FC_TRY(unsharding_take_slot(u));
    one = (fc_batch_gather){.unit = u->unit, .dst = u->memory};
    st = fc_batch_end_gather(&one);
    give_pack_back(u->domain);
    if (st == FC_OK) { /* peers got the value before */
        st = unsharding_check_ahead(u);
    }
    if (st != FC_OK) {
        unsharding_release_slot(u);
        return st;
    }
    note_gathered(u, u, 1);
    return FC_OK;
}

/* ---- gathers at once ---- */

/* A failure leaves all of them as they were. */
static fc_status fetch_now(fc_unsharding *u)
{
    const fc_unsharding *with_memory = u->memory != NULL ? u : NULL;
    fc_batch_gather one, *gathers = &one;
    fc_status st;
    size_t n;

    if (fc_domain_is_open(u->domain) && !fc_domain_in_backward(u->domain)) {
        unsharding_look_for_writes(u);
    }
    find_followers(u, &n);
    if (n > 1) {
        gathers = fc_alloc(n, sizeof(*gathers));
    }
    st = gathers == NULL ? fc_fail(FC_ERR_NOMEM, "a gather of %zu units", n)
                         : gather_list(u, gathers, n);
    if (st == FC_OK) {
        note_gathered(u, u, n);
    }
    end_list(u, with_memory, st == FC_OK);
    if (n > 1) {
        fc_free(gathers);
    }
    return st;
}

static fc_status fetch(fc_unsharding *u)
{
    return u->domain->gathering == u ? end_gather(u) : fetch_now(u);
}

static fc_status gather(fc_unsharding *u)
{
    FC_TRY(fetch(u));
    unsharding_turn(u, FC_UNIT_GATHER);
    return FC_OK;
}

/* An optimizer has stepped since, in a forward or before it. */
static bool is_outdated(const fc_unsharding *u)
{
    return !fc_domain_in_backward(u->domain) && u->gathered_at != u->ops->n_steps(u->owner);
}

static fc_status take(fc_unsharding *u, void **memory_out, bool *is_kept_out)
{
    if (fc_domain_is_open(u->domain)) {
        FC_TRY(fc_order_note(u->unit));
        FC_TRY(begin_next(u));
    }
    *memory_out = u->memory;
    *is_kept_out = !fc_domain_is_open(u->domain);
    return FC_OK;
}

static fc_status use_again(fc_unsharding *u)
{
    return begin_next(u);
}

static fc_status renew(fc_unsharding *u)
{
    if (is_outdated(u)) {
        FC_TRY(fetch(u));
        unsharding_count(u);
    } else if (!u->is_refilled) {
        return FC_OK;
    }
    return unsharding_fill(u);
}

static fc_status slice(fc_unsharding *u, void **slices_out)
{
    if (u->sliced == NULL) {
        return FC_OK;
    }
    FC_TRY(fc_slots_acquire(u->slots, u->sliced->layout.pack_bytes, &u->slices));
    fc_unit_slice(u->sliced, u->memory, u->slices);
    u->traffic->copied += u->sliced->layout.pack_bytes;
    *slices_out = u->slices;
    return FC_OK;
}

static void count(fc_unsharding *u)
{
    if (!u->came_along) {
        u->traffic->gathers += u->n_ranks > 1;
        u->traffic->gathered += moved_bytes(u);
    }
    u->came_along = false;
}

const gathering gathering_messages = {.makes_copies = true,
                                      .gather = gather,
                                      .is_outdated = is_outdated,
                                      .take = take,
                                      .use_again = use_again,
                                      .renew = renew,
                                      .slice = slice,
                                      .count = count};
