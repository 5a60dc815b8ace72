/* The orders of forward and backward, as lists of units; see [Note: gathers ahead]. */
#include "engine/order.h"

#include "engine/domain_private.h"
#include "engine/unit.h"

#include <string.h>

static order *order_of(const fc_domain *domain)
{
    return (order *)&domain->orders[fc_domain_in_backward(domain)];
}

fc_status fc_order_note(fc_unit *unit)
{
    order *o = order_of(unit->domain);
    order_list *now = &o->now;
    size_t at = o->at;

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
        now->units = units;
        now->capacity = capacity;
    }
    now->units[now->n++] = unit;
    now->print = fc_fingerprint(now->print, unit->index + 1);
    while (at < o->last.n && o->last.units[at] != unit) {
        at++;
    }
    if (at < o->last.n) {
        o->at = at + 1;
    }
    return FC_OK;
}

static void forget(order_list *list)
{
    list->n = 0;
    list->print = 0;
}

/* ---- whether it is followed ---- */

bool fc_order_is_followed(const fc_domain *domain)
{
    return fc_domain_in_backward(domain)
               ? domain->n_observed == 0 && !domain->is_backward_other
               : fc_domain_is_open(domain) && domain->n_ranks > 1 && domain->is_order_alike;
}

bool fc_order_is_learnt(const fc_domain *domain)
{
    return domain->batch_limit > 0 && domain->orders[0].last.n == 0;
}

void fc_order_note_written(fc_domain *domain)
{
    domain->is_written = true;
}

uint64_t order_told(const fc_domain *domain, bool of_backward)
{
    return domain->batch_limit > 0 ? domain->orders[of_backward].last.print : 0;
}

void order_heard(fc_domain *domain, bool is_alike, bool is_backward_alike)
{
    if (!domain->is_order_told) {
        domain->is_order_told = true;
        domain->is_order_alike = is_alike && order_told(domain, false) != 0;
        domain->is_backward_other = !is_backward_alike;
    }
}

/* ---- who follows ---- */

fc_order_walk fc_order_after(const fc_unit *unit)
{
    const fc_domain *domain = unit->domain;
    const order *o = order_of(domain);
    size_t at = o->at;

    while (at < o->last.n && o->last.units[at] != unit) {
        at++;
    }
    /* Who is not found is followed by nobody. */
    return (fc_order_walk){domain, at + 1, fc_order_is_followed(domain) ? domain->batch_limit : 0};
}

bool order_is_small(const fc_unit *unit)
{
    const fc_layout *layout = &unit->layout;

    return layout->full_bytes <= FC_BATCH_UNIT_BYTES &&
           (size_t)layout->n_ranks * layout->pack_bytes <= FC_BATCH_UNIT_BYTES;
}

fc_unit *fc_order_next(fc_order_walk *walk)
{
    const order_list *last = &order_of(walk->domain)->last;

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

bool fc_order_may_take(const fc_unit *unit)
{
    return comes_along(unit) || waits_takes_gathers(unit->domain);
}

fc_unsharding *fc_order_next_large(const fc_domain *domain)
{
    const order *o = order_of(domain);

    if (!fc_order_is_followed(domain) || domain->batch_limit == 0) {
        return NULL;
    }
    for (size_t at = o->at; at < o->last.n; at++) {
        fc_unit *unit = o->last.units[at];

        if (!comes_along(unit) && unsharding_may_begin(unit->unsharding)) {
            return unit->unsharding;
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
    for (int i = 0; i < 2; i++) {
        order *o = &domain->orders[i];
        const order_list last = o->last;

        if (o->now.n > 0) {
            o->last = o->now;
            o->now = last;
        }
        forget(&o->now);
        o->at = 0;
    }
    if (domain->is_written) {
        forget(&domain->orders[0].last);
    }
    domain->is_order_told = domain->is_order_alike = domain->is_written = false;
}

void order_drop(fc_domain *domain)
{
    for (int i = 0; i < 2; i++) {
        forget(&domain->orders[i].now);
    }
    forget(&domain->orders[0].last);
}

void order_fini(fc_domain *domain)
{
    for (int i = 0; i < 2; i++) {
        fc_free(domain->orders[i].now.units);
        fc_free(domain->orders[i].last.units);
    }
}
