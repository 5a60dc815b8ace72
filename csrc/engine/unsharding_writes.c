/* Shards: where peers read them, and writes to them while peers may. */
#include "engine/unsharding_private.h"

#include "base/sum.h"
#include "engine/order.h"

/* ---- over messages ---- */

/* Owners of extended units make what is gathered: their shards say nothing of it. */
static bool may_go_ahead(const fc_unsharding *u)
{
    return u->kind == &gathering_messages && u->n_ranks > 1 && !u->is_extended;
}

/* Of a shard: of what it holds. Versions of tensors say less: not all that writes changes them. */
static uint64_t sum_of(const fc_unsharding *u, size_t param)
{
    const fc_param *p = &u->layout->params[param];
    const size_t numel = p->outer * p->own_rows * p->inner;

    return fc_sum_bytes(u->shards[param], numel * fc_dtype_bytes(p->orig));
}

static void note_sums(fc_unsharding *u)
{
    u->ops->shards(u->owner, u->shards);
    for (size_t i = 0; i < u->n_params; i++) {
        u->sums[i] = sum_of(u, i);
    }
}

/* The first parameter whose shard is another one than noted, or their number. */
static size_t find_written(fc_unsharding *u)
{
    size_t i = 0;

    u->ops->shards(u->owner, u->shards);
    while (i < u->n_params && u->sums[i] == sum_of(u, i)) {
        i++;
    }
    return i;
}

void unsharding_note_ahead(fc_unsharding *u)
{
    if (fc_domain_in_backward(u->domain)) {
        u->ops->mark(u->owner, u->marks);
    } else {
        note_sums(u);
    }
}

fc_status unsharding_check_ahead(fc_unsharding *u)
{
    const bool in_backward = fc_domain_in_backward(u->domain);
    const size_t changed =
        in_backward ? u->ops->find_changed(u->owner, u->marks, 0) : find_written(u);

    if (changed == u->n_params) {
        return FC_OK;
    }
    if (!in_backward) {
        fc_order_note_written(u->domain);
    }
    return u->ops->tell_of_write(u->owner, changed,
                                 in_backward ? FC_WRITTEN_IN_BACKWARD : FC_WRITTEN_AHEAD);
}

void unsharding_look_for_writes(fc_unsharding *u)
{
    /* A write may leave the same bytes this time, or go around the counters. */
    if (u->is_summed && (u->ops->find_changed(u->owner, u->marks, 0) < u->n_params ||
                         find_written(u) < u->n_params)) {
        fc_order_note_written(u->domain);
    }
}

/* ---- in shared memory ---- */

bool fc_unsharding_publishes(const fc_unsharding *u)
{
    return u->publish_bytes > 0 || u->is_extended;
}

fc_status fc_unsharding_publish(fc_unsharding *u)
{
    return u->kind->publish != NULL ? u->kind->publish(u) : FC_OK;
}

void fc_unsharding_note_shards(fc_unsharding *u)
{
    u->is_read = false;
    if (u->is_watched) {
        u->ops->mark(u->owner, u->marks);
    }
    u->is_summed = may_go_ahead(u) && fc_order_is_learnt(u->domain) && fc_order_may_take(u->unit);
    if (u->is_summed) {
        u->ops->mark(u->owner, u->marks);
        note_sums(u);
    }
}

bool fc_unsharding_was_written(const fc_unsharding *u)
{
    return u->is_watched && u->ops->find_changed(u->owner, u->marks, 0) < u->n_params;
}

bool fc_unsharding_is_stale(const fc_unsharding *u)
{
    return fc_unsharding_was_written(u) ||
           (u->has_extension && u->is_read && u->state == FC_UNIT_SHARDED);
}

fc_status fc_unsharding_check_unwritten(fc_unsharding *u)
{
    size_t i;

    if (!u->is_read || u->n_ranks == 1) {
        return FC_OK;
    }
    for (i = u->ops->find_changed(u->owner, u->marks, 0); i < u->n_params;
         i = u->ops->find_changed(u->owner, u->marks, i + 1)) {
        if (u->layout->params[i].is_aliased) { /* peers read it where it was written */
            fc_domain_fail(u->domain);
            return u->ops->tell_of_write(u->owner, i, FC_WRITTEN_IN_FORWARD);
        }
    }
    return FC_OK;
}

fc_status unsharding_renew_written(fc_unsharding *u)
{
    fc_status st;

    if (!fc_unsharding_was_written(u)) {
        return FC_OK;
    }
    FC_TRY(fc_unsharding_check_unwritten(u));
    st = fc_domain_turn(u->domain, u->unit);
    if (st == FC_OK && fc_unsharding_publishes(u)) {
        /* Nobody reads now, and nobody does before all have. */
        st = fc_unsharding_publish(u);
        st = st == FC_OK ? fc_domain_turn(u->domain, u->unit) : st;
    }
    if (st != FC_OK) {
        fc_domain_fail(u->domain);
        return st;
    }
    fc_unsharding_note_shards(u);
    return FC_OK;
}

fc_status unsharding_claim(fc_unsharding *u)
{
    if (u->state == FC_UNIT_AHEAD) {
        const fc_status st = unsharding_check_ahead(u);

        if (st != FC_OK) { /* peers have read the value before */
            fc_unsharding_drop_ahead(u);
            return st;
        }
        fc_order_set_ahead(u->unit, false);
    }
    unsharding_turn(u, FC_UNIT_ASK);
    return FC_OK;
}
