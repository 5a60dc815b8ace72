/* The order of backward, as lists of units; see [Note: gathers ahead]. */
#include "engine/order.h"

#include "engine/domain_private.h"
#include "engine/unit.h"

#include <string.h>

fc_status fc_order_note(fc_unit *unit)
{
    order *now = &unit->domain->order_now;
    const order *last = &unit->domain->order_last;
    size_t at = unit->domain->order_at;

    if (now->n == now->capacity) {
        const size_t capacity = now->capacity > 0 ? 2 * now->capacity : unit->domain->n_units + 1;
        fc_unit **units = fc_alloc(capacity, sizeof(fc_unit *));

        if (units == NULL) {
            return fc_fail(FC_ERR_NOMEM, "the order of %zu units", capacity);
        }
        if (now->n > 0) {
            memcpy(units, now->units, now->n * sizeof(fc_unit *));
        }
        fc_free(now->units);
        *now = (order){units, now->n, capacity};
    }
    now->units[now->n++] = unit;
    while (at < last->n && last->units[at] != unit) {
        at++;
    }
    if (at < last->n) {
        unit->domain->order_at = at + 1;
    }
    return FC_OK;
}

fc_order_walk fc_order_after(const fc_unit *unit)
{
    const fc_domain *domain = unit->domain;
    const order *last = &domain->order_last;
    size_t at = domain->order_at;

    while (at < last->n && last->units[at] != unit) {
        at++;
    }
    /* Who is not found is followed by nobody. */
    return (fc_order_walk){domain, at + 1, domain->n_observed == 0 ? domain->batch_limit : 0};
}

bool order_is_small(const fc_unit *unit)
{
    const fc_layout *layout = &unit->layout;

    return layout->full_bytes <= FC_BATCH_UNIT_BYTES &&
           (size_t)layout->n_ranks * layout->pack_bytes <= FC_BATCH_UNIT_BYTES;
}

fc_unit *fc_order_next(fc_order_walk *walk)
{
    const order *last = &walk->domain->order_last;

    while (walk->at < last->n) {
        fc_unit *unit = last->units[walk->at++];

        if (order_is_small(unit) && unit->layout.full_bytes <= walk->bytes) {
            return unit;
        }
    }
    return NULL;
}

static bool comes_along(const fc_unit *unit)
{
    return order_is_small(unit) && unit->layout.full_bytes <= unit->domain->batch_limit;
}

fc_unsharding *fc_order_next_large(const fc_domain *domain)
{
    const order *last = &domain->order_last;

    if (domain->n_observed > 0 || domain->batch_limit == 0) {
        return NULL;
    }
    for (size_t at = domain->order_at; at < last->n; at++) {
        if (!comes_along(last->units[at]) && unsharding_may_begin(last->units[at]->unsharding)) {
            return last->units[at]->unsharding;
        }
    }
    return NULL;
}

void fc_order_take(fc_order_walk *walk, const fc_unit *unit)
{
    walk->bytes -= unit->layout.full_bytes;
}

void fc_order_set_ahead(fc_unit *unit, bool is_ahead)
{
    if (is_ahead) {
        unit->domain->n_ahead++;
    } else {
        unit->domain->n_ahead--;
    }
}

size_t fc_order_n_ahead(const fc_domain *domain)
{
    return domain->n_ahead;
}

void order_turn(fc_domain *domain)
{
    const order last = domain->order_last;

    if (domain->order_now.n > 0) {
        domain->order_last = domain->order_now;
        domain->order_now = last;
    }
    domain->order_now.n = domain->order_at = 0;
}

void order_drop(fc_domain *domain)
{
    domain->order_now.n = 0;
}

void order_fini(fc_domain *domain)
{
    fc_free(domain->order_now.units);
    fc_free(domain->order_last.units);
}
