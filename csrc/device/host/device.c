/* The table of functions of host devices: each does its work and returns. What goes to the host
 * arrives when somebody waits for it. */
#include "device/host/host.h"

#include "base/alloc.h"
#include "device/host/moves.h"

#include <string.h>

/* A copy to the host that is on its way. */
typedef struct parcel {
    struct parcel *next;
    void *to;
    size_t bytes;
    char data[];
} parcel;

typedef struct host_device {
    fc_called_device base;
    parcel *first, **end; /* owned; the oldest first */
} host_device;

struct fc_moves {
    fc_runs plan; /* owned */
};

/* ---- events ---- */

static fc_status event_create(fc_device *device, fc_event **out)
{
    *out = (fc_event *)device; /* a name: nothing is ever behind */
    return FC_OK;
}

static void event_destroy(fc_device *device, fc_event *event)
{
    (void)device;
    (void)event;
}

static fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    (void)device;
    (void)event;
    (void)stream;
    return FC_OK;
}

static fc_status wait_event(fc_device *device, fc_stream *stream, fc_event *event)
{
    return record(device, event, stream);
}

static void drop_first(host_device *d)
{
    parcel *p = d->first;

    d->first = p->next;
    fc_free(p);
}

static void arrive(fc_device *device)
{
    host_device *d = (host_device *)device;

    while (d->first != NULL) {
        memcpy(d->first->to, d->first->data, d->first->bytes);
        drop_first(d);
    }
    d->end = &d->first;
}

static fc_status synchronize(fc_device *device, fc_event *event)
{
    (void)event;
    arrive(device);
    return FC_OK;
}

/* ---- copies and moves ---- */

/* NaN until it arrives. */
static fc_status send(fc_device *device, fc_label label, void *to, const void *from, size_t bytes)
{
    host_device *d = (host_device *)device;
    parcel *p = fc_alloc(1, sizeof(*p) + bytes);

    if (p == NULL) {
        return fc_fail(FC_ERR_NOMEM, "'%s' of '%s'", label.what, label.unit);
    }
    p->to = to;
    p->bytes = bytes;
    memcpy(p->data, from, bytes);
    memset(to, 0xff, bytes);
    *d->end = p;
    d->end = &p->next;
    return FC_OK;
}

static fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                      const void *from, size_t bytes, fc_way way)
{
    (void)stream;
    if (way == FC_TO_HOST) {
        return send(device, label, to, from, bytes);
    }
    if (way == FC_TO_DEVICE) { /* it may come behind a copy to the same place */
        arrive(device);
    }
    memcpy(to, from, bytes);
    return FC_OK;
}

static fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    fc_moves *moves = fc_alloc(1, sizeof(*moves));

    (void)device;
    if (moves == NULL) {
        return fc_fail(FC_ERR_NOMEM, "plan of %zu runs", plan->n_runs);
    }
    moves->plan = *plan;
    fc_runs_init(plan);
    *out = moves;
    return FC_OK;
}

static void moves_destroy(fc_device *device, fc_moves *moves)
{
    (void)device;
    if (moves != NULL) {
        fc_runs_clear(&moves->plan);
        fc_free(moves);
    }
}

static fc_status move(fc_device *device, fc_stream *stream, fc_label label, const fc_move *move)
{
    (void)device;
    (void)stream;
    (void)label;
    fc_host_move(&move->moves->plan, move->addresses, move->divisor, move->accumulate);
    return FC_OK;
}

static const fc_device_ops host_ops = {
    .name = "host",
    .alloc = fc_called_alloc,
    .free = fc_called_free,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .record = record,
    .wait = wait_event,
    .synchronize = synchronize,
    .copy = copy,
    .moves_create = moves_create,
    .moves_destroy = moves_destroy,
    .move = move,
    .all_gather = fc_called_all_gather,
    .reduce_scatter = fc_called_reduce_scatter,
    .all_reduce = fc_called_all_reduce,
    .all_gather_each = fc_called_all_gather_each,
};

fc_status fc_host_device_create(const fc_device_caller *caller, fc_device **out)
{
    host_device *d = fc_alloc(1, sizeof(*d));

    if (d == NULL) {
        return fc_fail(FC_ERR_NOMEM, "host device");
    }
    d->base = (fc_called_device){.base.ops = &host_ops, .caller = *caller};
    d->end = &d->first;
    *out = &d->base.base;
    return FC_OK;
}

void fc_host_device_destroy(fc_device *device)
{
    host_device *d = (host_device *)device;

    while (d != NULL && d->first != NULL) {
        drop_first(d);
    }
    fc_free(d);
}
