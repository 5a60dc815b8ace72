/* Making and unmaking schedules and their units. */
#include "engine/schedule_private.h"

#include "base/alloc.h"
#include "engine/gathers.h"
#include "engine/layout_runs.h"

#include <string.h>

fc_status fc_schedule_create(const fc_schedule_options *options, fc_schedule **out)
{
    fc_schedule *s = fc_alloc(1, sizeof(*s));
    fc_status st;

    if (s == NULL) {
        return fc_fail(FC_ERR_NOMEM, "schedule");
    }
    s->options = *options;
    s->ops = options->device->ops;
    s->gathers = (fc_stream_pool){.what = "gather slot",
                                  .n_spare = 2,
                                  .reuse = FC_ORDER_GATHER_SLOT,
                                  .drop = FC_ORDER_DROP_GATHER,
                                  .home = options->copy_in};
    s->inputs = (fc_stream_pool){.what = "reduce input",
                                 .n_spare = options->n_reduce_inputs,
                                 .reuse = FC_ORDER_REDUCE_INPUT,
                                 .drop = FC_ORDER_REDUCED};
    s->outputs = (fc_stream_pool){.what = "reduce output",
                                  .n_spare = 1,
                                  .reuse = FC_ORDER_REDUCE_OUTPUT,
                                  .drop = FC_ORDER_DROP_OUTPUT,
                                  .home = options->reduce};
    st = s->ops->event_create(options->device, &s->event);
    if (st == FC_OK) {
        st = s->ops->event_create(options->device, &s->begun);
    }
    if (st != FC_OK) {
        s->ops->event_destroy(options->device, s->event);
        fc_free(s);
        return st;
    }
    *out = s;
    return FC_OK;
}

static void unit_destroy(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;

    if (unit->gathered == NULL) {
        fc_schedule_free_full(unit);
    }
    s->ops->free(s->options.device, unit->kept);
    s->ops->event_destroy(s->options.device, unit->kept_event);
    fc_schedule_moves_destroy(unit);
    fc_free(unit->post_params);
    fc_free(unit->addresses);
    fc_free(unit->uploaded);
    fc_free(unit->of_type);
    fc_free(unit->type_of_each);
    fc_free(unit->staging_at);
    fc_free(unit->gathers);
    fc_free(unit->prefetch[0].units);
    fc_free(unit->prefetch[1].units);
    fc_free(unit->name);
    fc_free(unit);
}

void fc_schedule_destroy(fc_schedule *s)
{
    if (s == NULL) {
        return;
    }
    fc_stream_pool_destroy(s, &s->gathers);
    fc_stream_pool_destroy(s, &s->inputs);
    fc_stream_pool_destroy(s, &s->outputs);
    while (s->units != NULL) {
        fc_schedule_unit *next = s->units->next;

        unit_destroy(s->units);
        s->units = next;
    }
    s->ops->event_destroy(s->options.device, s->event);
    s->ops->event_destroy(s->options.device, s->begun);
    fc_free(s->order);
    fc_free(s);
}

static fc_status check(const fc_schedule_unit_options *o)
{
    const fc_layout *l = o->layout;
    size_t i;

    if (o->is_direct && !fc_gathers_fit(l)) {
        return fc_fail(FC_ERR_INVALID, "unit '%s' cannot be gathered into its parameters", o->name);
    }
    for (i = 0; i < l->n_params; i++) {
        if (l->params[i].is_aliased) {
            return fc_fail(FC_ERR_INVALID, "unit '%s': parameter %zu is aliased", o->name, i);
        }
    }
    return FC_OK;
}

/* Where offloaded shards lie on the device, and whether anything is packed. */
static void measure(fc_schedule_unit *unit)
{
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; i < l->n_entries; i++) {
        const fc_param *p = &l->params[i];
        size_t bytes = p->outer * p->own_rows * p->inner * fc_dtype_bytes(p->orig);

        if (!fc_layout_is_gathered(p)) {
            continue;
        }
        unit->is_packed = unit->is_packed || !fc_schedule_is_sent_as_is(unit, p);
        if (!p->is_made) { /* else it is made there */
            unit->staging_at[i] = unit->staging_bytes;
            unit->staging_bytes = fc_round_up(unit->staging_bytes + bytes, FC_ALIGN);
        }
    }
}

/* The layout of the smaller group; it fills the same unsharded buffer. */
static fc_status lay_out_post(fc_schedule_unit *unit)
{
    const fc_layout *l = unit->options.layout;
    size_t i;

    if (unit->options.n_post_ranks == 0) {
        return FC_OK;
    }
    unit->post_params = fc_alloc(l->n_params, sizeof(fc_param));
    if (unit->post_params == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s'", unit->name);
    }
    for (i = 0; i < l->n_params; i++) {
        unit->post_params[i] = l->params[i];
        unit->post_params[i].orig = l->params[i].compute;
    }
    FC_TRY(fc_layout_init(&unit->post, unit->post_params, l->n_params, unit->options.post_rank,
                          unit->options.n_post_ranks, false));
    for (i = 0; i < l->n_params; i++) {
        unit->post_params[i].full_at = l->params[i].full_at;
    }
    return FC_OK;
}

/* Everything but the name. */
static fc_status fill(fc_schedule_unit *unit)
{
    fc_schedule *s = unit->schedule;
    size_t n = unit->options.layout->n_entries;

    unit->addresses = fc_alloc(FC_BASE_PARAMS + n, sizeof(*unit->addresses));
    unit->uploaded = fc_alloc(n, sizeof(*unit->uploaded));
    unit->of_type = fc_alloc(n, sizeof(*unit->of_type));
    unit->type_of_each = fc_alloc(n, sizeof(*unit->type_of_each));
    unit->staging_at = fc_alloc(n, sizeof(*unit->staging_at));
    unit->gathers = fc_alloc(n, sizeof(*unit->gathers));
    if (unit->addresses == NULL || unit->uploaded == NULL || unit->of_type == NULL ||
        unit->type_of_each == NULL || unit->staging_at == NULL || unit->gathers == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s'", unit->name);
    }
    measure(unit);
    FC_TRY(lay_out_post(unit));
    FC_TRY(s->ops->event_create(s->options.device, &unit->kept_event));
    return fc_schedule_moves_create(unit);
}

fc_status fc_schedule_add(fc_schedule *s, const fc_schedule_unit_options *options,
                          fc_schedule_unit **out)
{
    size_t name_bytes = strlen(options->name) + 1;
    fc_schedule_unit *unit;
    fc_status st;

    FC_TRY(check(options));
    unit = fc_alloc(1, sizeof(*unit));
    if (unit == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s'", options->name);
    }
    unit->schedule = s;
    unit->options = *options;
    unit->last_entry = -1;
    unit->name = fc_alloc(1, name_bytes);
    if (unit->name == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "unit '%s'", options->name);
        goto destroy_unit;
    }
    memcpy(unit->name, options->name, name_bytes);
    unit->options.name = unit->name;
    st = fill(unit);
    if (st != FC_OK) {
        goto destroy_unit;
    }
    if (options->replicas != NULL) {
        s->outputs.n_spare = 2; /* one is scattered while another is all-reduced */
    }
    unit->next = s->units;
    s->units = unit;
    *out = unit;
    return FC_OK;

destroy_unit:
    unit_destroy(unit);
    return st;
}

static void leave_out(fc_schedule_list *list, const fc_schedule_unit *gone)
{
    size_t i, n = 0;

    for (i = 0; i < list->n_units; i++) {
        if (list->units[i] != gone) {
            list->units[n++] = list->units[i];
        }
    }
    list->n_units = n;
}

/* Lists of prefetches and entries of the order of forwards name units. */
static void forget(fc_schedule *s, const fc_schedule_unit *gone)
{
    fc_schedule_unit *u;

    for (u = s->units; u != NULL; u = u->next) {
        leave_out(&u->prefetch[0], gone);
        leave_out(&u->prefetch[1], gone);
        u->last_entry = -1;
    }
    s->n_order = 0;
}

void fc_schedule_remove(fc_schedule_unit *unit)
{
    fc_schedule_unit **link;

    if (unit == NULL) {
        return;
    }
    fc_schedule_drop_gradients(unit);
    if (unit->state == FC_STATE_GATHERING && fc_schedule_drop_gather(unit) != FC_OK) {
        unit->kept = NULL; /* who reads it is not known to compute: it stays where it is */
    }
    fc_schedule_reshard(unit);
    for (link = &unit->schedule->units; *link != unit;) {
        link = &(*link)->next;
    }
    *link = unit->next;
    forget(unit->schedule, unit);
    unit_destroy(unit);
}

void fc_schedule_set_shards(fc_schedule_unit *unit, const void *const *shards)
{
    unit->shards = shards;
}

void fc_schedule_set_maker(fc_schedule_unit *unit, const fc_schedule_maker *maker)
{
    unit->maker = *maker;
}

void fc_schedule_set_reduce(fc_schedule_unit *unit, fc_device_comm *reduce)
{
    unit->options.reduce = reduce;
}

fc_status fc_schedule_set_prefetch(fc_schedule_unit *unit, bool in_backward,
                                   fc_schedule_unit *const *units, size_t n_units)
{
    fc_schedule_list *list = &unit->prefetch[in_backward ? 1 : 0];
    fc_schedule_unit **copy = fc_alloc(n_units, sizeof(fc_schedule_unit *));
    size_t n = 0;

    if (copy == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s': list of %zu units to prefetch", unit->name,
                       n_units);
    }
    for (size_t i = 0; i < n_units; i++) {
        if (units[i]->schedule == unit->schedule) {
            copy[n++] = units[i];
        }
    }
    fc_free(list->units);
    *list = (fc_schedule_list){copy, n, n > 0};
    return FC_OK;
}
