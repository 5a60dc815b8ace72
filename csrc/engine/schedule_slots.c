/* Waits between streams, and device memory that is reused behind the event of its last use. */
#include "engine/schedule_private.h"

#include "base/alloc.h"

static bool is_left_out(const fc_schedule *schedule, fc_schedule_wait wait)
{
    return (schedule->options.without >> wait & 1) != 0;
}

fc_status fc_schedule_order(fc_schedule *schedule, fc_schedule_wait wait, fc_stream *stream,
                            fc_event *event)
{
    if (is_left_out(schedule, wait)) {
        return FC_OK;
    }
    return schedule->ops->wait(schedule->options.device, stream, event);
}

fc_status fc_schedule_chain(fc_schedule *schedule, fc_schedule_wait wait, fc_stream *first,
                            fc_stream *second)
{
    FC_TRY(schedule->ops->record(schedule->options.device, schedule->event, first));
    return fc_schedule_order(schedule, wait, second, schedule->event);
}

fc_status fc_schedule_host_wait(fc_schedule *schedule, fc_schedule_wait wait, fc_event *event)
{
    if (is_left_out(schedule, wait)) {
        return FC_OK;
    }
    return schedule->ops->synchronize(schedule->options.device, event);
}

/* The free slot whose last use is longest ago. */
static fc_stream_slot *oldest(const fc_stream_pool *pool)
{
    fc_stream_slot *s, *best = NULL;

    for (s = pool->first; s != NULL; s = s->next) {
        if (!s->is_used && (best == NULL || s->released_at < best->released_at)) {
            best = s;
        }
    }
    return best;
}

static fc_status slot_create(fc_schedule *schedule, fc_stream_pool *pool, fc_stream_slot **out)
{
    fc_stream_slot *slot = fc_alloc(1, sizeof(*slot));
    fc_status st;

    if (slot == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%s", pool->what);
    }
    st = schedule->ops->event_create(schedule->options.device, &slot->event);
    if (st != FC_OK) {
        fc_free(slot);
        return st;
    }
    slot->next = pool->first;
    pool->first = slot;
    pool->n_free++;
    *out = slot;
    return FC_OK;
}

/* The pool's home comes after the slot's last use. */
static fc_status order_after(fc_schedule *schedule, const fc_stream_pool *pool,
                             fc_schedule_wait wait, const fc_stream_slot *slot)
{
    if (slot->last == NULL || slot->last == pool->home) {
        return FC_OK;
    }
    return fc_schedule_order(schedule, wait, pool->home, slot->event);
}

fc_status fc_stream_pool_acquire(fc_schedule *schedule, fc_stream_pool *pool, fc_label label,
                                 size_t bytes, fc_stream_slot **out)
{
    fc_device *device = schedule->options.device;
    fc_stream_slot *slot = oldest(pool);
    void *memory;

    if (slot == NULL || pool->n_free + pool->n_used < pool->n_spare) {
        FC_TRY(slot_create(schedule, pool, &slot));
    }
    FC_TRY(order_after(schedule, pool, pool->reuse, slot));
    if (slot->bytes < bytes) {
        label.what = pool->what;
        schedule->ops->free(device, slot->memory);
        slot->memory = NULL;
        slot->bytes = 0;
        FC_TRY(schedule->ops->alloc(device, pool->home, label, bytes, &memory));
        slot->memory = memory;
        slot->bytes = bytes;
    }
    slot->is_used = true;
    slot->is_old = false;
    pool->n_free--;
    pool->n_used++;
    *out = slot;
    return FC_OK;
}

fc_status fc_stream_slot_mark(fc_schedule *schedule, fc_stream_slot *slot, fc_stream *stream)
{
    FC_TRY(schedule->ops->record(schedule->options.device, slot->event, stream));
    slot->last = stream;
    return FC_OK;
}

void fc_stream_pool_keep(fc_stream_pool *pool, fc_stream_slot *slot)
{
    slot->is_kept = true;
    pool->n_used--;
}

void fc_stream_pool_release(fc_stream_pool *pool, fc_stream_slot *slot)
{
    if (!slot->is_kept) {
        pool->n_used--;
    }
    slot->is_used = slot->is_kept = false;
    slot->released_at = ++pool->clock;
    pool->n_free++;
}

static void slot_destroy(fc_schedule *schedule, fc_stream_slot *slot)
{
    schedule->ops->free(schedule->options.device, slot->memory);
    schedule->ops->event_destroy(schedule->options.device, slot->event);
    fc_free(slot);
}

bool fc_stream_pool_has_memory(const fc_stream_pool *pool)
{
    const fc_stream_slot *slot = pool->first;

    while (slot != NULL && (slot->memory == NULL || slot->is_kept)) {
        slot = slot->next;
    }
    return slot != NULL;
}

fc_status fc_stream_slot_drop(fc_schedule *schedule, const fc_stream_pool *pool,
                              fc_stream_slot *slot)
{
    if (slot->memory == NULL) {
        return FC_OK;
    }
    FC_TRY(order_after(schedule, pool, pool->drop, slot));
    schedule->ops->free(schedule->options.device, slot->memory);
    slot->memory = NULL;
    slot->bytes = 0;
    slot->last = NULL;
    return FC_OK;
}

fc_status fc_stream_pool_drop(fc_schedule *schedule, fc_stream_pool *pool)
{
    fc_stream_slot *slot;

    for (slot = pool->first; slot != NULL; slot = slot->next) {
        slot->is_old = slot->is_used;
        if (!slot->is_used) {
            FC_TRY(fc_stream_slot_drop(schedule, pool, slot));
        }
    }
    return FC_OK;
}

void fc_stream_pool_destroy(fc_schedule *schedule, fc_stream_pool *pool)
{
    while (pool->first != NULL) {
        fc_stream_slot *next = pool->first->next;

        slot_destroy(schedule, pool->first);
        pool->first = next;
    }
}
