/* Units in shared memory: the unsharded unit is there for all ranks while a phase is open.
 *
 * Bytes: a gather moves none, and slices lie where the unit does. Outside of a phase, where a
 * unit's memory is its own, and with an extension, each rank copies the unit once. What an owner
 * makes is published as a phase opens, as casts are; that of an extension in a backward once more.
 */
#include "engine/unsharding_private.h"

#include "engine/domain_private.h"
#include "window/window.h"

#include <string.h>

static void publish_shards(fc_unsharding *u)
{
    u->traffic->copied += u->publish_bytes;
    u->ops->shards(u->owner, u->shards);
    fc_unit_publish(u->unit, u->shards);
}

/* What is there is used on: by an unshard from before the phase, or after a failure. */
static bool is_published(const fc_unsharding *u)
{
    const bool is_there = unsharding_is_shown(u) || unsharding_is_gathered(u) || u->is_refilled;

    return is_there && u->made_at == u->ops->n_steps(u->owner);
}

static fc_status publish(fc_unsharding *u)
{
    if (!u->is_extended) {
        if (u->publish_bytes > 0) {
            publish_shards(u);
        }
        return FC_OK;
    }
    if (u->has_extension && is_published(u)) {
        return FC_OK;
    }
    FC_TRY(unsharding_make(u));
    publish_shards(u);
    u->ops->forget(u->owner);
    return FC_OK;
}

static void copy_out(fc_unsharding *u)
{
    fc_unit_copy_out(u->unit, u->memory);
    u->traffic->copied += u->bytes;
}

/* A phase of its own, for a copy. */
static fc_status gather_copy(fc_unsharding *u)
{
    fc_status st;

    FC_TRY(publish(u));
    fc_window_enter(FC_WINDOW_UNSHARD, u->domain->clock >> STEP_SHIFT);
    fc_domain_open(u->domain, (fc_opening){FC_PHASE_UNSHARD, 0, FC_UPDATES_UNKNOWN});
    st = fc_domain_ready(u->domain, u->unit);
    if (st != FC_OK) {
        fc_domain_fail(u->domain);
        return st;
    }
    copy_out(u);
    FC_TRY(fc_domain_close(u->domain));
    fc_window_enter(FC_WINDOW_BETWEEN, u->domain->clock >> STEP_SHIFT);
    return FC_OK;
}

static fc_status gather(fc_unsharding *u)
{
    const bool had_memory = u->memory != NULL;
    fc_status st;

    if (fc_domain_is_open(u->domain)) {
        unsharding_turn(u, FC_UNIT_ASK);
        return FC_OK;
    }
    FC_TRY(unsharding_take_slot(u));
    st = gather_copy(u);
    if (st == FC_OK) {
        unsharding_turn(u, FC_UNIT_GATHER);
    } else if (!had_memory) {
        unsharding_release_slot(u);
    }
    return st;
}

static bool is_outdated(const fc_unsharding *u)
{
    (void)u;
    return false;
}

static fc_status take(fc_unsharding *u, void **memory_out, bool *is_kept_out)
{
    if (u->state == FC_UNIT_GATHERED && fc_domain_is_open(u->domain)) {
        if (!u->keeps_memory) {
            unsharding_release_slot(u);
        }
        unsharding_turn(u, FC_UNIT_OUTDATE); /* shards may have been written since */
    }
    *is_kept_out = u->state == FC_UNIT_GATHERED;
    if (*is_kept_out) {
        *memory_out = u->memory;
        return FC_OK;
    }
    FC_TRY(fc_domain_ready(u->domain, u->unit));
    if (u->keeps_memory || u->has_extension) {
        FC_TRY(unsharding_take_slot(u));
        copy_out(u);
        *memory_out = u->memory;
    } else {
        *memory_out = u->view;
    }
    return FC_OK;
}

static fc_status renew(fc_unsharding *u)
{
    if (u->has_extension && !u->is_made) {
        return FC_OK;
    }
    if (u->keeps_memory || u->has_extension) {
        copy_out(u);
        FC_TRY(unsharding_fill(u));
    } else {
        u->ops->show(u->owner, u->view);
        unsharding_release_slot(u);
    }
    unsharding_turn(u, FC_UNIT_RENEW);
    return FC_OK;
}

static fc_status keep(fc_unsharding *u)
{
    if (u->memory != NULL) {
        return FC_OK;
    }
    FC_TRY(fc_domain_ready(u->domain, u->unit));
    FC_TRY(unsharding_take_slot(u));
    memcpy(u->memory, u->view, u->bytes); /* with this rank's own writes */
    u->traffic->copied += u->bytes;
    unsharding_discard_writes(u);
    u->ops->show(u->owner, u->memory);
    return FC_OK;
}

static fc_status slice(fc_unsharding *u, void **slices_out)
{
    *slices_out = u->view;
    return FC_OK;
}

static void count(fc_unsharding *u)
{
    u->traffic->gathers += u->n_ranks > 1;
    u->traffic->gathered += u->gather_bytes;
}

const gathering gathering_mapped = {.makes_copies = false,
                                    .gather = gather,
                                    .is_outdated = is_outdated,
                                    .take = take,
                                    .renew = renew,
                                    .keep = keep,
                                    .slice = slice,
                                    .publish = publish,
                                    .count = count};
