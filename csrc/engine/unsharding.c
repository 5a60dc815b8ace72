/* A unit is unsharded and resharded: what is decided alike for all kinds of domains. */
#include "engine/unsharding_private.h"

#include "engine/domain_private.h"
#include "engine/order.h"
#include "engine/root.h"
#include "window/window.h"

#include <string.h>

/* ---- life ---- */

static const gathering *kind_of(const fc_unsharding_options *options)
{
    return options->on_device != NULL         ? &gathering_device
           : options->unit->domain->is_mapped ? &gathering_mapped
                                              : &gathering_messages;
}

static void measure(fc_unsharding *u)
{
    for (size_t i = 0; i < u->layout->n_entries; i++) {
        const fc_param *p = &u->layout->params[i];
        const size_t row = p->outer * p->inner * fc_dtype_bytes(p->compute);

        if (fc_layout_is_gathered(p)) {
            u->gather_bytes += (p->rows - p->own_rows) * row;
            u->publish_bytes += p->is_aliased ? 0 : p->own_rows * row;
        }
        if (u->sliced != NULL) {
            u->sliced_gather_bytes += (p->rows - u->sliced->params[i].own_rows) * row;
        }
    }
    if (u->sliced != NULL) {
        fc_unit_place_slices(u->sliced, u->unit);
    }
}

fc_status fc_unsharding_create(const fc_unsharding_options *options, fc_unsharding **out)
{
    fc_unit *unit = options->unit;
    const size_t n_params = unit->layout.n_params;
    fc_unsharding *u = fc_alloc(1, sizeof(*u));
    uint64_t *marks = fc_alloc(2 * n_params, sizeof(*marks));
    const void **shards = fc_alloc(unit->layout.n_entries, sizeof(*shards));

    if (u == NULL || marks == NULL || shards == NULL) {
        fc_free(u);
        fc_free(marks);
        fc_free(shards);
        return fc_fail(FC_ERR_NOMEM, "no memory for unsharding unit '%s'", unit->name);
    }
    *u = (fc_unsharding){.kind = kind_of(options),
                         .ops = options->ops,
                         .owner = options->owner,
                         .unit = unit,
                         .sliced = options->sliced,
                         .domain = unit->domain,
                         .layout = &unit->layout,
                         .n_ranks = unit->domain->n_ranks,
                         .view = unit->domain->is_mapped ? fc_unit_view(unit) : NULL,
                         .state = FC_UNIT_SHARDED,
                         .traffic = options->traffic,
                         .marks = marks,
                         .sums = marks + n_params,
                         .n_params = n_params,
                         .bytes = unit->layout.full_bytes,
                         .shards = shards,
                         .slots = options->slots,
                         .schedule = options->schedule,
                         .on_device = options->on_device,
                         .is_extended = options->ops->make != NULL,
                         .has_extension = options->ops->fill != NULL};
    measure(u);
    /* Else reads are of the shards themselves. */
    u->is_watched =
        !u->kind->makes_copies && (unit->domain->n_ranks > 1 || fc_unsharding_publishes(u));
    u->may_reside = options->has_all && u->bytes > 0 && u->ops->can_reside(u->owner);
    unit->unsharding = u;
    *out = u;
    return u->kind->makes_copies ? fc_unsharding_publish(u) : FC_OK; /* of devices: cannot fail */
}

void fc_unsharding_detach(fc_unsharding *u)
{
    if (u->domain->gathering == u) {
        fc_unsharding_drop_begun(u->domain);
    }
    if (u->unit->unsharding == u) {
        u->unit->unsharding = NULL;
    }
}

/* ---- what the parameters show ---- */

static void hide(fc_unsharding *u, bool keeps_size)
{
    if (u->is_withheld) {
        u->is_withheld = false;
        u->ops->withhold(u->owner, false);
    }
    u->ops->hide(u->owner, keeps_size);
}

/* The unsharded parameters of a unit in shared memory stay as they are until an optimizer steps, so
 * a backward may begin anywhere inside of it. */
static void leave_to_graph(fc_unsharding *u)
{
    if (!u->has_graph) {
        hide(u, false);
    } else if (!unsharding_is_copied(u)) {
        if (u->is_withheld) {
            hide(u, false);
        }
        u->ops->show(u->owner, u->view);
    } else if (!u->is_resident) {
        hide(u, true); /* else a graph's views fail without a name */
    }
}

static fc_status release(fc_unsharding *u, bool to_slice)
{
    if (u->kind->release != NULL) {
        return u->kind->release(u, to_slice);
    }
    unsharding_release_slot(u);
    return FC_OK;
}

void fc_unsharding_destroy(fc_unsharding *u)
{
    if (u == NULL) {
        return;
    }
    fc_unsharding_drop_ahead(u);
    fc_unsharding_detach(u);
    hide(u, false);
    (void)release(u, false);
    unsharding_end_slices(u);
    fc_free(u->marks);
    fc_free(u->shards);
    fc_free(u);
}

void fc_unsharding_withhold(fc_unsharding *u)
{
    if (!unsharding_is_shown(u) && !unsharding_stays(u)) {
        u->ops->withhold(u->owner, true);
        u->is_withheld = true;
    }
}

void fc_unsharding_set_graph(fc_unsharding *u, bool has_graph)
{
    u->has_graph = has_graph;
    if (!has_graph && !unsharding_is_shown(u) && !unsharding_stays(u)) {
        hide(u, false);
    }
}

/* ---- memory ---- */

fc_status unsharding_take_slot(fc_unsharding *u)
{
    return u->memory != NULL ? FC_OK : fc_slots_acquire(u->slots, u->bytes, &u->memory);
}

void unsharding_release_slot(fc_unsharding *u)
{
    if (u->memory != NULL) {
        fc_slots_release(u->slots, u->memory);
        u->memory = NULL;
    }
}

void unsharding_end_slices(fc_unsharding *u)
{
    if (u->slices != NULL) {
        fc_slots_release(u->slots, u->slices);
        u->slices = NULL;
    }
    u->has_slices = false;
}

void fc_unsharding_keep_memory(fc_unsharding *u, bool keeps)
{
    u->keeps_memory = keeps;
    if (!keeps && !unsharding_is_shown(u) && !unsharding_is_gathered(u) && u->memory != NULL) {
        leave_to_graph(u);
        (void)release(u, false);
    }
}

/* ---- unsharding ---- */

/* Between phases a gather has one of its own: ranks may have left the one before by exceptions, and
 * after different numbers of collectives. */
static fc_status gather_between(fc_unsharding *u)
{
    fc_status st;

    fc_domain_open(u->domain, (fc_opening){FC_PHASE_UNSHARD, 0, FC_UPDATES_UNKNOWN});
    fc_domain_mark_closed(u->domain);
    fc_window_enter(FC_WINDOW_UNSHARD, u->domain->clock >> STEP_SHIFT);
    st = u->kind->gather(u);
    if (st != FC_OK) {
        fc_domain_fail(u->domain);
        return st;
    }
    FC_TRY(fc_domain_close(u->domain));
    fc_window_enter(FC_WINDOW_BETWEEN, u->domain->clock >> STEP_SHIFT);
    return FC_OK;
}

fc_status fc_unsharding_gather(fc_unsharding *u)
{
    if (unsharding_is_shown(u)) {
        return FC_OK;
    }
    if (u->state == FC_UNIT_AHEAD || (u->state == FC_UNIT_GATHERED && !u->kind->is_outdated(u))) {
        return unsharding_claim(u);
    }
    fc_root_note_use(u->unit);
    return u->kind->makes_copies && !fc_domain_is_open(u->domain) ? gather_between(u)
                                                                  : u->kind->gather(u);
}

fc_status fc_unsharding_begin_use(fc_unsharding *u, bool *is_shown_out)
{
    const bool is_open = fc_domain_is_open(u->domain);
    const bool in_forward = is_open && !fc_domain_in_backward(u->domain);

    fc_window_use_unit(u->unit->shown_as);
    *is_shown_out = unsharding_is_shown(u);
    if (u->is_watched && in_forward && u->state != FC_UNIT_UNSHARDED) {
        FC_TRY(unsharding_renew_written(u));
        u->is_read = true;
    }
    if (!*is_shown_out || !is_open) {
        return FC_OK;
    }
    FC_TRY(fc_domain_ready(u->domain, u->unit));
    if (u->kind->use_again != NULL) {
        FC_TRY(u->kind->use_again(u));
    }
    /* Writes to an unsharded parameter last until it is resharded. */
    return in_forward && u->state == FC_UNIT_KEPT &&
                   u->ops->find_written(u->owner, 0, false) == u->n_params
               ? u->kind->renew(u)
               : FC_OK;
}

void unsharding_count(fc_unsharding *u)
{
    u->traffic->unshards++;
    u->kind->count(u);
}

/* What a failed use has left is used again. */
fc_status unsharding_make(fc_unsharding *u)
{
    const uint64_t n_steps = u->is_extended ? u->ops->n_steps(u->owner) : 0;

    if (!u->is_extended || (u->is_refilled && u->made_at == n_steps)) {
        return FC_OK;
    }
    FC_TRY(u->ops->make(u->owner));
    u->is_made = true;
    u->is_refilled = false;
    u->made_at = n_steps;
    return FC_OK;
}

fc_status unsharding_fill(fc_unsharding *u)
{
    if (!u->is_extended) {
        return FC_OK;
    }
    if (u->has_extension) {
        u->is_refilled = true;
        FC_TRY(u->ops->fill(u->owner));
    }
    u->is_refilled = u->is_made = false;
    u->ops->forget(u->owner);
    return FC_OK;
}

void unsharding_discard_writes(fc_unsharding *u)
{
    size_t i;

    for (i = u->ops->find_written(u->owner, 0, true); i < u->n_params;
         i = u->ops->find_written(u->owner, i + 1, true)) {
        fc_unit_discard_writes(u->unit, i);
    }
}

/* What was written to slices that lie in the shared unit. */
static void discard_slices(fc_unsharding *u)
{
    size_t i;

    if (!u->has_slices || u->kind->makes_copies) {
        return;
    }
    for (i = u->ops->find_written_slice(u->owner, 0); i < u->n_params;
         i = u->ops->find_written_slice(u->owner, i + 1)) {
        fc_unit_discard_writes(u->unit, i);
    }
}

fc_status fc_unsharding_show(fc_unsharding *u)
{
    void *memory;
    bool is_kept;
    fc_status st;

    FC_TRY(u->kind->take(u, &memory, &is_kept));
    unsharding_count(u);
    discard_slices(u);
    u->ops->show(u->owner, memory);
    st = unsharding_fill(u);
    if (st != FC_OK) { /* it is gathered still */
        u->ops->hide(u->owner, false);
        return st;
    }
    unsharding_turn(u, is_kept ? FC_UNIT_SHOW_COPY : FC_UNIT_SHOW);
    FC_TRY(u->ops->enter(u->owner));
    if (u->has_slices) {
        unsharding_end_slices(u);
    }
    return FC_OK;
}

/* The shards stand in their place again. */
static fc_status leave_slices(fc_unsharding *u)
{
    if (!u->has_slices) {
        return FC_OK;
    }
    discard_slices(u);
    FC_TRY(u->ops->leave_slices(u->owner));
    unsharding_end_slices(u);
    if (u->state == FC_UNIT_SLICED) {
        unsharding_turn(u, FC_UNIT_RESHARD);
    }
    return FC_OK;
}

/* It is shown no longer: shards or slices are. */
static fc_status leave(fc_unsharding *u, bool to_slice)
{
    void *slices = NULL;
    fc_status st;

    if (to_slice && u->kind->slice != NULL) {
        FC_TRY(u->kind->slice(u, &slices));
    }
    st = u->ops->leave(u->owner, slices);
    u->has_slices = st == FC_OK && slices != NULL;
    if (st != FC_OK && slices != NULL) {
        unsharding_end_slices(u);
    }
    return st;
}

fc_status fc_unsharding_reshard(fc_unsharding *u, bool to_slice)
{
    u->stays_unsharded = false;
    if (!unsharding_is_shown(u)) {
        if (u->is_withheld && !unsharding_stays(u)) {
            leave_to_graph(u);
        }
        return to_slice ? FC_OK : leave_slices(u);
    }
    FC_TRY(leave(u, to_slice));
    if (!u->kind->makes_copies && u->memory == NULL) {
        unsharding_discard_writes(u); /* which last until here */
    }
    if (!unsharding_stays(u)) {
        leave_to_graph(u);
        FC_TRY(release(u, to_slice));
    }
    unsharding_turn(u, u->has_slices ? FC_UNIT_RESHARD_TO_SLICE : FC_UNIT_RESHARD);
    return u->kind->end_use != NULL ? u->kind->end_use(u) : FC_OK;
}

fc_status fc_unsharding_keep(fc_unsharding *u)
{
    if (!unsharding_is_shown(u)) {
        return FC_OK;
    }
    if (u->kind->keep != NULL) {
        FC_TRY(u->kind->keep(u));
    }
    unsharding_turn(u, FC_UNIT_KEEP);
    return FC_OK;
}

void fc_unsharding_drop(fc_unsharding *u)
{
    if (unsharding_is_shown(u)) {
        return;
    }
    if (u->state == FC_UNIT_AHEAD) {
        fc_order_set_ahead(u->unit, false);
    }
    u->came_along = false;
    unsharding_turn(u, u->has_slices ? FC_UNIT_DROP_TO_SLICE : FC_UNIT_DROP);
    if (!unsharding_stays(u)) {
        (void)release(u, false);
    }
}

void fc_unsharding_drop_ahead(fc_unsharding *u)
{
    if (u->state == FC_UNIT_AHEAD) {
        fc_unsharding_drop(u);
    }
}

fc_status fc_unsharding_end_forward(fc_unsharding *u)
{
    return u->kind->end_forward != NULL ? u->kind->end_forward(u) : FC_OK;
}

bool fc_unsharding_is_settled(const fc_unsharding *u)
{
    return u->state == FC_UNIT_SHARDED && (!u->kind->ends_late || u->is_resident);
}

/* ---- flags ---- */

fc_unsharding_state fc_unsharding_state_of(const fc_unsharding *u)
{
    return (fc_unsharding_state)u->state;
}

bool fc_unsharding_has_slices(const fc_unsharding *u)
{
    return u->has_slices;
}

void fc_unsharding_stay_unsharded(fc_unsharding *u)
{
    u->stays_unsharded = true;
}

bool fc_unsharding_stays_unsharded(const fc_unsharding *u)
{
    return u->stays_unsharded;
}

bool fc_unsharding_is_resident(const fc_unsharding *u)
{
    return u->is_resident;
}

bool fc_unsharding_makes_copies(const fc_unsharding *u)
{
    return unsharding_is_copied(u);
}

bool fc_unsharding_has_own_memory(const fc_unsharding *u)
{
    return unsharding_is_copied(u) ? u->state == FC_UNIT_KEPT : u->memory != NULL;
}

bool fc_unsharding_is_read_apart(const fc_unsharding *u)
{
    return unsharding_is_copied(u) && !u->is_resident && !unsharding_stays(u);
}

bool fc_unsharding_moves(const fc_unsharding *u)
{
    return u->n_ranks > 1;
}
