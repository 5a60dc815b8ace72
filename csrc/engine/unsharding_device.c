/* Units on a device: the schedule of their root gathers them. One rank that has all of a unit uses
 * its shards where they lie, after a first forward that did not write to them.
 */
#include "engine/unsharding_private.h"

#include "engine/schedule.h"

static bool is_outdated(const fc_unsharding *u)
{
    (void)u; /* what was asked for is kept as an iteration begins */
    return false;
}

static fc_status start(fc_unsharding *u)
{
    u->gathered_at = u->ops->n_steps(u->owner);
    return fc_schedule_start(u->on_device);
}

static fc_status gather(fc_unsharding *u)
{
    if (!fc_domain_is_open(u->domain)) {
        fc_schedule_reshard(u->on_device); /* a slice may be out of date */
        FC_TRY(u->ops->read_shards(u->owner));
    }
    FC_TRY(start(u));
    unsharding_turn(u, FC_UNIT_GATHER);
    return FC_OK;
}

/* In a phase it brings prefetches with it. */
static fc_status use(fc_unsharding *u, void **memory_out)
{
    if (fc_domain_is_open(u->domain)) {
        return fc_domain_in_backward(u->domain) ? fc_schedule_pre_backward(u->on_device, memory_out)
                                                : fc_schedule_pre_forward(u->on_device, memory_out);
    }
    FC_TRY(fc_schedule_unshard(u->on_device, memory_out));
    return fc_schedule_await_shards(u->schedule); /* nothing tells of the end of what began here */
}

static fc_status take(fc_unsharding *u, void **memory_out, bool *is_kept_out)
{
    FC_TRY(use(u, memory_out));
    u->memory = *memory_out;
    *is_kept_out = !fc_domain_is_open(u->domain);
    return FC_OK;
}

static fc_status use_again(fc_unsharding *u)
{
    void *memory;

    return use(u, &memory);
}

static fc_status renew(fc_unsharding *u)
{
    if (u->gathered_at == u->ops->n_steps(u->owner)) {
        return FC_OK;
    }
    fc_schedule_reshard(u->on_device);
    FC_TRY(start(u));
    FC_TRY(use(u, &u->memory));
    u->ops->show(u->owner, u->memory);
    return unsharding_fill(u);
}

static fc_status release(fc_unsharding *u, bool to_slice)
{
    if (to_slice) {
        FC_TRY(fc_schedule_reshard_after_forward(u->on_device));
    } else {
        fc_schedule_reshard(u->on_device);
    }
    u->memory = NULL;
    return FC_OK;
}

static fc_status make_shards(void *context)
{
    fc_unsharding *u = context;

    FC_TRY(unsharding_make(u));
    u->ops->shards(u->owner, u->shards);
    return FC_OK;
}

static fc_status publish(fc_unsharding *u)
{
    if (u->is_extended) {
        fc_schedule_set_maker(u->on_device,
                              &(fc_schedule_maker){.context = u, .make = make_shards});
    }
    if (!u->is_resident) {
        u->ops->shards(u->owner, u->shards);
        fc_schedule_set_shards(u->on_device, u->shards);
    }
    return FC_OK;
}

static void count(fc_unsharding *u)
{
    u->traffic->gathers += fc_schedule_gathering_ranks(u->on_device) > 1;
    u->traffic->gathered += fc_schedule_gathered_bytes(u->on_device);
}

/* The first forward has a copy. A module that writes to its own parameters (an embedding with a
 * largest norm, a scale that is clamped) does it in every forward: such a unit keeps to copies,
 * where writes do not last. */
static fc_status end_forward(fc_unsharding *u)
{
    const bool is_shown = unsharding_is_shown(u);
    void *home;

    if (!u->may_reside) {
        return FC_OK;
    }
    u->may_reside = false;
    if (u->ops->find_written(u->owner, 0, true) < u->n_params || !u->ops->can_reside(u->owner)) {
        return FC_OK;
    }
    if (is_shown) {
        fc_schedule_reshard(u->on_device);
    }
    FC_TRY(u->ops->reside(u->owner, &home));
    FC_TRY(publish(u));
    FC_TRY(fc_schedule_set_resident(u->on_device, home));
    u->is_resident = true;
    if (is_shown) {
        FC_TRY(fc_schedule_unshard(u->on_device, &u->memory));
        u->ops->show(u->owner, u->memory);
    } else if (u->has_graph) {
        u->ops->show(u->owner, home);
    }
    return FC_OK;
}

/* A write to an unsharded parameter that is its shard cannot be taken back, as it would be from a
 * copy. */
static fc_status end_use(fc_unsharding *u)
{
    size_t i;

    if (!u->is_resident || u->ops->find_written(u->owner, 0, true) == u->n_params) {
        return FC_OK;
    }
    u->is_resident = false;
    FC_TRY(fc_schedule_set_resident(u->on_device, NULL));
    i = u->ops->find_written(u->owner, 0, false);
    return i < u->n_params ? u->ops->tell_of_write(u->owner, i, FC_WRITTEN_RESIDENT) : FC_OK;
}

const gathering gathering_device = {.makes_copies = true,
                                    .ends_late = true,
                                    .gather = gather,
                                    .is_outdated = is_outdated,
                                    .take = take,
                                    .use_again = use_again,
                                    .renew = renew,
                                    .release = release,
                                    .publish = publish,
                                    .count = count,
                                    .end_forward = end_forward,
                                    .end_use = end_use};
