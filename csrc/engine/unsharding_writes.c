/* Shards: where peers read them, and writes to them while peers may. */
#include "engine/unsharding_private.h"

#include "engine/order.h"

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
    size_t changed;

    if (u->state == FC_UNIT_AHEAD) {
        changed = u->ops->find_changed(u->owner, u->marks, 0);
        if (changed < u->n_params) { /* peers have read the value before */
            fc_unsharding_drop_ahead(u);
            return u->ops->tell_of_write(u->owner, changed, FC_WRITTEN_IN_BACKWARD);
        }
        fc_order_set_ahead(u->unit, false);
    }
    unsharding_turn(u, FC_UNIT_ASK);
    return FC_OK;
}
