/* Units through an iteration: gathers, prefetches, copy-outs, reshards and the ends of phases. */
#include "engine/schedule_private.h"

#include "base/alloc.h"
#include "engine/domain.h"

#include <string.h>

static const char *const state_names[] = {"sharded", "being gathered", "unsharded"};

const char *fc_schedule_wait_name(fc_schedule_wait wait)
{
    static const char *const names[FC_ORDER_COUNT] = {
#define NAME(name, who, what) #name ": " who " waits for " what,
        FC_SCHEDULE_WAITS(NAME)
#undef NAME
    };

    return names[wait];
}

fc_status fc_schedule_meet(fc_unit *unit, const char *op, uint64_t detail)
{
    return unit != NULL ? fc_domain_meet(unit, op, detail) : FC_OK;
}

fc_status fc_schedule_unit_fail(const fc_schedule_unit *unit, const char *call)
{
    if (unit->schedule->compute == NULL) {
        return fc_fail(FC_ERR_STATE, "unit '%s': %s before the iteration has begun", unit->name,
                       call);
    }
    return fc_fail(FC_ERR_STATE, "unit '%s': %s while it is %s", unit->name, call,
                   state_names[unit->state]);
}

/* ---- gathering ---- */

/* Offloaded shards come to the device as they are; *staging_out is freed by the caller. */
static fc_status upload(fc_schedule_unit *unit, void **staging_out)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = unit->options.layout;
    size_t i;

    s->has_uploads = true;
    FC_TRY(s->ops->alloc(s->options.device, s->options.copy_in, fc_schedule_label(unit, "shards"),
                         unit->staging_bytes, staging_out));
    for (i = 0; i < l->n_entries; i++) {
        const fc_param *p = &l->params[i];
        size_t bytes = p->outer * p->own_rows * p->inner * fc_dtype_bytes(p->orig);
        void *to = (char *)*staging_out + unit->staging_at[i];

        unit->uploaded[i] = p->is_made ? unit->shards[i] : to;
        if (bytes > 0 && fc_layout_is_gathered(p) && !p->is_made) {
            FC_TRY(s->ops->copy(s->options.device, s->options.copy_in,
                                fc_schedule_label(unit, "shards to device"), to, unit->shards[i],
                                bytes, FC_TO_DEVICE));
        }
    }
    return FC_OK;
}

static fc_status make_shards(fc_schedule_unit *unit)
{
    return unit->maker.make != NULL ? unit->maker.make(unit->maker.context) : FC_OK;
}

/* This rank's shards, cast, into its part of the slot, or to their places in it. */
static fc_status pack_shards(fc_schedule_unit *unit, fc_stream_slot *slot)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = unit->options.layout;
    fc_schedule_launch launch = {.moves = unit->pack,
                                 .wire = (char *)slot->memory + (size_t)l->rank * l->pack_bytes,
                                 .unit = slot->memory,
                                 .params = unit->shards,
                                 .divisor = 1};
    void *staging = NULL;
    fc_status st = FC_OK;

    if (unit->options.is_direct && !unit->is_packed) {
        return FC_OK;
    }
    FC_TRY(make_shards(unit));
    if (unit->options.is_offloaded) {
        st = upload(unit, &staging);
        launch.params = unit->uploaded;
    }
    if (st == FC_OK) {
        st = fc_schedule_move(unit, s->options.copy_in, "pack", &launch);
    }
    s->ops->free(s->options.device, staging);
    return st;
}

static fc_status pack_slice(fc_schedule_unit *unit, fc_stream_slot *slot)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = &unit->post;

    FC_TRY(fc_schedule_order(s, FC_ORDER_RESHARDED, s->options.copy_in, unit->kept_event));
    return s->ops->copy(s->options.device, s->options.copy_in,
                        fc_schedule_label(unit, "pack of slice"),
                        (char *)slot->memory + (size_t)l->rank * l->pack_bytes, unit->kept,
                        l->pack_bytes, FC_ON_DEVICE);
}

/* A parameter each, to their places in the slot. */
static fc_status gather_each(fc_schedule_unit *unit, const fc_stream_slot *slot)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = unit->options.layout;
    size_t i, n = 0;

    for (i = 0; i < l->n_entries; i++) {
        const fc_param *p = &l->params[i];
        char *full = slot->memory;
        const void *own = fc_schedule_is_sent_as_is(unit, p) ? unit->shards[i]
                                                             : full + fc_schedule_own_at(unit, p);

        if (p->chunk_numel > 0 && fc_layout_is_gathered(p)) {
            unit->gathers[n++] = (fc_gather){.to = full + p->full_at,
                                             .from = own,
                                             .bytes = p->chunk_numel * fc_dtype_bytes(p->compute)};
        }
    }
    return s->ops->all_gather_each(s->options.device, unit->options.gather, s->options.gather,
                                   fc_schedule_label(unit, "all-gather"), unit->gathers, n);
}

static fc_status gather_packs(fc_schedule_unit *unit, const fc_stream_slot *slot)
{
    fc_schedule *s = unit->schedule;

    if (unit->is_from_slice) {
        return s->ops->all_gather(s->options.device, unit->options.post_gather, s->options.gather,
                                  fc_schedule_label(unit, "all-gather"), slot->memory,
                                  unit->post.pack_bytes);
    }
    return s->ops->all_gather(s->options.device, unit->options.gather, s->options.gather,
                              fc_schedule_label(unit, "all-gather"), slot->memory,
                              unit->options.layout->pack_bytes);
}

/* Of what is being gathered, or was. */
static bool is_direct(const fc_schedule_unit *unit)
{
    return unit->options.is_direct && !unit->is_from_slice;
}

static size_t slot_bytes(const fc_schedule_unit *unit)
{
    const fc_layout *l = unit->is_from_slice ? &unit->post : unit->options.layout;

    return is_direct(unit) ? l->full_bytes : l->pack_bytes * (size_t)l->n_ranks;
}

/* copy-in comes behind compute as it is now: with the next gather, so that a capture of units that
 * have none does not reach it. */
static fc_status owe_wait(fc_schedule *s)
{
    s->owes_wait = true;
    return s->ops->record(s->options.device, s->begun, s->compute);
}

static fc_status enter_copy_in(fc_schedule *s)
{
    if (!s->owes_wait) {
        return FC_OK;
    }
    s->owes_wait = false;
    return fc_schedule_order(s, FC_ORDER_OPTIMIZER, s->options.copy_in, s->begun);
}

/* Everything up to the all-gather; the slot's event is behind it. */
static fc_status start_gather(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    fc_stream_slot *slot;
    fc_status st;

    FC_TRY(fc_schedule_meet(unit->options.shard_unit, "all-gather", 0));
    unit->is_from_slice = unit->kept != NULL;
    FC_TRY(enter_copy_in(s));
    FC_TRY(fc_stream_pool_acquire(s, &s->gathers, fc_schedule_label(unit, ""), slot_bytes(unit),
                                  &slot));
    st = unit->is_from_slice ? pack_slice(unit, slot) : pack_shards(unit, slot);
    if (st == FC_OK) {
        st = fc_schedule_chain(s, FC_ORDER_PACKED, s->options.copy_in, s->options.gather);
    }
    if (st == FC_OK) {
        st = is_direct(unit) ? gather_each(unit, slot) : gather_packs(unit, slot);
    }
    if (st == FC_OK) {
        st = fc_stream_slot_mark(s, slot, s->options.gather);
    }
    if (st != FC_OK) {
        fc_stream_pool_release(&s->gathers, slot);
        return st;
    }
    unit->gathered = slot;
    unit->state = FC_STATE_GATHERING;
    s->n_gathering++;
    return FC_OK;
}

static void end_gather(fc_schedule_unit *unit, fc_schedule_state state)
{
    unit->schedule->n_gathering--;
    unit->is_asked = false;
    unit->state = state;
}

static void release_gathered(fc_schedule_unit *unit)
{
    fc_stream_pool_release(&unit->schedule->gathers, unit->gathered);
    unit->gathered = NULL;
}

static void free_kept(fc_schedule_unit *unit)
{
    unit->schedule->ops->free(unit->schedule->options.device, unit->kept);
    unit->kept = NULL;
}

/* compute copies out of the slot. */
static fc_status copy_out(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    fc_stream_slot *slot = unit->gathered;
    const fc_schedule_launch launch = {.moves =
                                           unit->is_from_slice ? unit->post_unpack : unit->unpack,
                                       .wire = slot->memory,
                                       .unit = unit->full,
                                       .divisor = 1};

    FC_TRY(fc_schedule_move(unit, s->compute, "copy-out", &launch));
    return fc_stream_slot_mark(s, slot, s->compute);
}

static fc_status unpack(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    fc_status st;

    FC_TRY(s->ops->alloc(s->options.device, s->compute, fc_schedule_label(unit, "parameters"),
                         unit->options.layout->full_bytes, &unit->full));
    st = copy_out(unit);
    if (st != FC_OK) {
        s->ops->free(s->options.device, unit->full);
        unit->full = NULL;
        return st;
    }
    release_gathered(unit);
    return FC_OK;
}

/* What is unsharded is there for the guest too. */
static fc_status show_guest(fc_schedule *s)
{
    return s->guest == NULL ? FC_OK : fc_schedule_chain(s, FC_ORDER_GUEST, s->compute, s->guest);
}

/* What the guest uses may be written or freed in compute's order. */
static fc_status await_guest(fc_schedule *s)
{
    return s->guest == NULL ? FC_OK
                            : fc_schedule_chain(s, FC_ORDER_GUEST_USE, s->guest, s->compute);
}

static fc_status finish_gather(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;

    FC_TRY(fc_schedule_order(s, FC_ORDER_GATHERED, s->compute, unit->gathered->event));
    if (is_direct(unit)) {
        fc_stream_pool_keep(&s->gathers, unit->gathered);
        unit->full = unit->gathered->memory;
    } else {
        FC_TRY(unpack(unit));
    }
    end_gather(unit, FC_STATE_UNSHARDED);
    free_kept(unit);
    return FC_OK;
}

fc_status fc_schedule_drop_gather(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    fc_status st = fc_schedule_order(s, FC_ORDER_UNUSED_GATHER, s->compute, unit->gathered->event);

    release_gathered(unit);
    end_gather(unit, FC_STATE_SHARDED);
    return st;
}

fc_status fc_schedule_unshard(fc_schedule_unit *unit, void **full_out)
{
    if (unit->schedule->compute == NULL || unit->shards == NULL) {
        return fc_schedule_unit_fail(unit,
                                     unit->shards == NULL ? "unshard without shards" : "unshard");
    }
    if (unit->state == FC_STATE_SHARDED && unit->resident != NULL) {
        unit->full = unit->resident;
        unit->state = FC_STATE_UNSHARDED;
    }
    if (unit->state == FC_STATE_SHARDED) {
        FC_TRY(start_gather(unit));
    }
    if (unit->state == FC_STATE_GATHERING) {
        FC_TRY(finish_gather(unit));
    }
    FC_TRY(show_guest(unit->schedule));
    *full_out = unit->full;
    return FC_OK;
}

fc_status fc_schedule_set_resident(fc_schedule_unit *unit, void *full)
{
    fc_schedule *s = unit->schedule;

    if (unit->state != FC_STATE_SHARDED) {
        return fc_schedule_unit_fail(unit, "set_resident");
    }
    if (full == NULL && unit->resident != NULL && s->is_open) {
        FC_TRY(owe_wait(s)); /* compute may have written to the shards in this iteration */
    }
    unit->resident = full;
    s->has_resident = s->has_resident || full != NULL;
    return FC_OK;
}

fc_status fc_schedule_start(fc_schedule_unit *unit)
{
    if (unit->schedule->compute == NULL || unit->shards == NULL) {
        return fc_schedule_unit_fail(unit,
                                     unit->shards == NULL ? "gather without shards" : "gather");
    }
    if (unit->state == FC_STATE_SHARDED && unit->resident == NULL) {
        FC_TRY(start_gather(unit));
        unit->is_asked = true;
    }
    return FC_OK;
}

/* An unsharded buffer that is a slot. Outside of an iteration nothing gathers into it soon; memory
 * of an iteration before this one must not come into a graph that captures this one. */
static fc_status give_back(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    fc_stream_slot *slot = unit->gathered;

    unit->gathered = NULL;
    FC_TRY(fc_stream_slot_mark(s, slot, s->compute)); /* else nobody gets it: its use has no end */
    fc_stream_pool_release(&s->gathers, slot);
    if (!s->is_open) {
        return fc_stream_pool_drop(s, &s->gathers);
    }
    return slot->is_old ? fc_stream_slot_drop(s, &s->gathers, slot) : FC_OK;
}

void fc_schedule_free_full(fc_schedule_unit *unit)
{
    if (unit->full != unit->resident) {
        unit->schedule->ops->free(unit->schedule->options.device, unit->full);
    }
    unit->full = NULL;
}

static void free_full(fc_schedule_unit *unit)
{
    if (unit->state != FC_STATE_UNSHARDED) {
        return;
    }
    if (await_guest(unit->schedule) != FC_OK) {
        unit->gathered = NULL; /* nobody gets what the guest may read still */
    } else if (unit->gathered == NULL) {
        fc_schedule_free_full(unit);
    } else {
        (void)give_back(unit);
    }
    unit->full = NULL;
    unit->state = FC_STATE_SHARDED;
    unit->is_reached = false;
}

void fc_schedule_reshard(fc_schedule_unit *unit)
{
    free_full(unit);
    if (unit->state != FC_STATE_GATHERING) { /* a gather may read the slice */
        free_kept(unit);
    }
}

static const fc_layout *gathered_layout(const fc_schedule_unit *unit)
{
    return unit->is_from_slice ? &unit->post : unit->options.layout;
}

int fc_schedule_gathering_ranks(const fc_schedule_unit *unit)
{
    return gathered_layout(unit)->n_ranks;
}

size_t fc_schedule_gathered_bytes(const fc_schedule_unit *unit)
{
    const fc_layout *l = gathered_layout(unit);
    size_t i, bytes = 0;

    for (i = 0; i < l->n_entries; i++) {
        const fc_param *p = &l->params[i];

        if (fc_layout_is_gathered(p)) {
            bytes += p->outer * (p->rows - p->own_rows) * p->inner * fc_dtype_bytes(p->compute);
        }
    }
    return bytes;
}

static fc_status prefetch(fc_schedule_unit *unit)
{
    const fc_schedule *s = unit->schedule;
    bool is_full = s->options.max_gathers > 0 && s->n_gathering >= s->options.max_gathers;

    if (unit->state != FC_STATE_SHARDED || unit->shards == NULL || unit->resident != NULL ||
        is_full) {
        return FC_OK;
    }
    return start_gather(unit);
}

static fc_status prefetch_list(const fc_schedule_list *list)
{
    size_t i;

    for (i = 0; i < list->n_units; i++) {
        FC_TRY(prefetch(list->units[i]));
    }
    return FC_OK;
}

/* ---- an iteration ---- */

static fc_status set_guest(fc_schedule *s, fc_stream *guest)
{
    if (s->guest != guest) {
        FC_TRY(await_guest(s));
    }
    s->guest = guest;
    return FC_OK;
}

static bool has_pooled(const fc_schedule *s)
{
    return fc_stream_pool_has_memory(&s->gathers) || fc_stream_pool_has_memory(&s->inputs) ||
           fc_stream_pool_has_memory(&s->outputs);
}

static bool has_used(const fc_schedule *s)
{
    return s->gathers.n_used + s->inputs.n_used + s->outputs.n_used > 0;
}

fc_stream *fc_schedule_bound_to(const fc_schedule *s)
{
    const fc_schedule_unit *u = s->units;

    while (u != NULL && u->kept == NULL && (u->full == NULL || u->full == u->resident)) {
        u = u->next;
    }
    return u != NULL || (s->is_open ? has_pooled(s) : has_used(s)) ? s->compute : NULL;
}

static fc_status drop_free(fc_schedule *s)
{
    FC_TRY(fc_stream_pool_drop(s, &s->gathers));
    FC_TRY(fc_stream_pool_drop(s, &s->inputs));
    return fc_stream_pool_drop(s, &s->outputs);
}

static fc_status set_compute(fc_schedule *s, fc_stream *compute)
{
    if (s->compute != NULL && s->compute != compute && !s->is_open) {
        FC_TRY(drop_free(s)); /* which an unshard has left */
    }
    if (s->compute != NULL && s->compute != compute && has_pooled(s)) {
        return fc_fail(FC_ERR_STATE, "an iteration begins on another stream than the one before it,"
                                     " whose last backward has not ended");
    }
    FC_TRY(set_guest(s, NULL));
    s->compute = compute;
    s->inputs.home = compute;
    return FC_OK;
}

fc_status fc_schedule_begin(fc_schedule *s, fc_stream *compute, fc_event *optimizer)
{
    fc_schedule_unit *u;

    FC_TRY(set_compute(s, compute));
    s->is_open = true;
    /* What was prefetched or kept before may be out of date. */
    for (u = s->units; u != NULL; u = u->next) {
        if (u->state == FC_STATE_GATHERING && (!u->is_asked || u->is_from_slice)) {
            FC_TRY(fc_schedule_drop_gather(u));
        }
        free_kept(u);
    }
    if (optimizer != NULL && s->has_resident) {
        FC_TRY(fc_schedule_order(s, FC_ORDER_RESIDENT, compute, optimizer));
    }
    if (optimizer != NULL) {
        s->owes_wait = false;
        return fc_schedule_order(s, FC_ORDER_OPTIMIZER, s->options.copy_in, optimizer);
    }
    return owe_wait(s);
}

fc_status fc_schedule_read_shards(fc_schedule *s, fc_stream *caller)
{
    if (s->compute != caller && (s->is_open || fc_schedule_bound_to(s) != NULL)) {
        FC_TRY(set_guest(s, caller));
        FC_TRY(await_guest(s)); /* compute may use shards where they lie */
    } else {
        FC_TRY(set_compute(s, caller));
        s->owes_wait = false;
    }
    return fc_schedule_chain(s, FC_ORDER_OPTIMIZER, caller, s->options.copy_in);
}

fc_status fc_schedule_pre_forward(fc_schedule_unit *unit, void **full_out)
{
    FC_TRY(fc_schedule_unshard(unit, full_out));
    return prefetch_list(&unit->prefetch[0]);
}

/* The order of forwards, for the prefetch of backward. */
fc_status fc_schedule_note_forward(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    size_t capacity = s->order_capacity == 0 ? 64 : s->order_capacity * 2;
    fc_schedule_entry *more;

    if (s->n_order == s->order_capacity) {
        more = fc_alloc(capacity, sizeof(*more));
        if (more == NULL) {
            return fc_fail(FC_ERR_NOMEM, "order of %zu units", capacity);
        }
        if (s->n_order > 0) {
            memcpy(more, s->order, s->n_order * sizeof(*more));
        }
        fc_free(s->order);
        s->order = more;
        s->order_capacity = capacity;
    }
    s->order[s->n_order] = (fc_schedule_entry){unit, unit->last_entry};
    unit->last_entry = (ptrdiff_t)s->n_order++;
    unit->is_reached = false;
    return FC_OK;
}

/* Keeps this rank's part of the unsharded buffer in the smaller group. */
static fc_status keep_slice(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    fc_schedule_launch launch = {.moves = unit->slice, .unit = unit->full, .divisor = 1};
    fc_status st;

    FC_TRY(s->ops->alloc(s->options.device, s->compute, fc_schedule_label(unit, "kept slice"),
                         unit->post.pack_bytes, &unit->kept));
    launch.wire = unit->kept;
    st = fc_schedule_move(unit, s->compute, "slice", &launch);
    if (st == FC_OK) {
        st = s->ops->record(s->options.device, unit->kept_event, s->compute);
    }
    if (st != FC_OK) {
        free_kept(unit);
    }
    return st;
}

fc_status fc_schedule_reshard_after_forward(fc_schedule_unit *unit)
{
    if (unit->state == FC_STATE_UNSHARDED && unit->slice != NULL && unit->resident == NULL) {
        FC_TRY(keep_slice(unit));
    }
    free_full(unit);
    return FC_OK;
}

fc_status fc_schedule_post_forward(fc_schedule_unit *unit)
{
    if (unit->schedule->compute == NULL || unit->state != FC_STATE_UNSHARDED) {
        return fc_schedule_unit_fail(unit, "post_forward");
    }
    FC_TRY(fc_schedule_note_forward(unit));
    return unit->options.reshard_after_forward ? fc_schedule_reshard_after_forward(unit) : FC_OK;
}

/* The unit whose forward ended before the newest one of this unit that has no backward yet. Who
 * asks again in the same backward, as replaced methods do, gets none. */
static fc_schedule_unit *unit_before(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    ptrdiff_t entry = unit->last_entry;

    if (entry < 0 || unit->is_reached) {
        return NULL;
    }
    unit->is_reached = true;
    unit->last_entry = s->order[entry].before;
    return entry > 0 ? s->order[entry - 1].unit : NULL;
}

fc_status fc_schedule_pre_backward(fc_schedule_unit *unit, void **full_out)
{
    const fc_schedule_list *list = &unit->prefetch[1];
    fc_schedule_unit *before;

    FC_TRY(fc_schedule_unshard(unit, full_out));
    before = unit_before(unit);
    if (list->is_set) {
        return prefetch_list(list);
    }
    return before != NULL ? prefetch(before) : FC_OK;
}

/* The host comes after all that is in a stream now. */
static fc_status await_stream(fc_schedule *s, fc_schedule_wait wait, fc_stream *stream)
{
    FC_TRY(s->ops->record(s->options.device, s->event, stream));
    return fc_schedule_host_wait(s, wait, s->event);
}

fc_status fc_schedule_await_shards(fc_schedule *s)
{
    if (s->has_uploads) {
        FC_TRY(await_stream(s, FC_ORDER_HOST_SHARDS, s->options.copy_in));
    }
    s->has_uploads = false;
    return FC_OK;
}

fc_status fc_schedule_await_gradients(fc_schedule *s)
{
    if (s->has_downloads && s->is_all_reducing) {
        FC_TRY(await_stream(s, FC_ORDER_HOST_GRADIENTS, s->options.all_reduce));
    }
    if (s->has_downloads) {
        FC_TRY(await_stream(s, FC_ORDER_HOST_GRADIENTS, s->options.reduce));
    }
    s->has_downloads = false;
    return FC_OK;
}

/* Of gathers in flight, nobody needs any. */
static fc_status drop_gathers(fc_schedule *s)
{
    fc_schedule_unit *u;

    s->is_open = false;
    for (u = s->units; u != NULL; u = u->next) {
        if (u->state == FC_STATE_GATHERING) {
            FC_TRY(fc_schedule_drop_gather(u));
        }
    }
    return fc_stream_pool_drop(s, &s->gathers);
}

static void free_slices(fc_schedule *s)
{
    fc_schedule_unit *u;

    for (u = s->units; u != NULL; u = u->next) {
        free_kept(u);
    }
}

fc_status fc_schedule_end_forward(fc_schedule *s)
{
    if (s->compute == NULL) {
        return FC_OK;
    }
    FC_TRY(drop_gathers(s));
    free_slices(s);
    return fc_schedule_await_shards(s);
}

static fc_status drop_slots(fc_schedule *s)
{
    FC_TRY(drop_gathers(s));
    FC_TRY(fc_stream_pool_drop(s, &s->inputs)); /* compute has waited for all reductions */
    return fc_stream_pool_drop(s, &s->outputs);
}

fc_status fc_schedule_end_backward(fc_schedule *s, bool is_last)
{
    fc_schedule_unit *u;

    if (s->compute == NULL) {
        return fc_fail(FC_ERR_STATE, "a backward ends before an iteration has begun");
    }
    if (!is_last) {
        return FC_OK;
    }
    if (s->is_reducing) {
        FC_TRY(fc_schedule_chain(s, FC_ORDER_REDUCED, s->options.reduce, s->compute));
    }
    if (s->is_all_reducing) {
        FC_TRY(fc_schedule_chain(s, FC_ORDER_ALL_REDUCED, s->options.all_reduce, s->compute));
    }
    for (u = s->units; u != NULL; u = u->next) {
        u->last_entry = -1;
    }
    s->n_order = 0;
    FC_TRY(drop_slots(s));
    FC_TRY(fc_schedule_await_shards(s));
    FC_TRY(fc_schedule_await_gradients(s));
    s->is_reducing = s->is_all_reducing = false;
    return FC_OK;
}

/* ---- beside it ---- */

fc_status fc_schedule_reset(fc_schedule *s)
{
    fc_schedule_unit *u;

    if (s->compute == NULL) {
        return FC_OK;
    }
    /* A reduction that failed half-way may have left a slot to the wrong stream. */
    FC_TRY(fc_schedule_chain(s, FC_ORDER_DROP_OUTPUT, s->options.all_reduce, s->options.reduce));
    for (u = s->units; u != NULL; u = u->next) {
        if (u->state == FC_STATE_GATHERING) {
            FC_TRY(fc_schedule_drop_gather(u));
        }
        fc_schedule_reshard(u);
        fc_schedule_drop_gradients(u);
    }
    return fc_schedule_end_backward(s, true);
}
