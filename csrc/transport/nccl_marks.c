/* Marks behind what was enqueued: a ring of events per communicator, made once.
 *
 * A communicator does its collectives in their order, whatever streams they are in: a mark that was
 * reached stands for all before it. So one behind the newest is enough where the ring is full.
 */
#include "transport/nccl_private.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

static const fc_events *events_of(const fc_nccl_comm *comm)
{
    return &comm->group->events;
}

fc_status fc_nccl_marks_create(fc_nccl_comm *comm)
{
    const fc_events *events = events_of(comm);
    fc_nccl_marks *marks = &comm->marks;

    if (events->record == NULL) {
        return FC_OK;
    }
    marks->ring = fc_alloc(FC_NCCL_MARKS, sizeof(*marks->ring));
    if (marks->ring == NULL) {
        return fc_fail(FC_ERR_NOMEM, "NCCL's part of process group %s", comm->group->base->name);
    }
    for (int i = 0; i < FC_NCCL_MARKS; i++) {
        FC_TRY(events->create(events->context, &marks->ring[i].event));
    }
    return FC_OK;
}

/* A forked child has its parent's events, and no device. */
void fc_nccl_marks_destroy(fc_nccl_comm *comm)
{
    const fc_events *events = events_of(comm);
    fc_nccl_mark *ring = comm->marks.ring;

    for (int i = 0; ring != NULL && i < FC_NCCL_MARKS; i++) {
        if (ring[i].event != NULL && !fc_transport_is_forked(comm->group->base)) {
            events->destroy(events->context, ring[i].event);
        }
    }
    fc_free(ring);
    comm->marks.ring = NULL;
}

/* Takes out what the device has come to; in `looking`. */
static fc_status take_reached(fc_nccl_comm *comm)
{
    const fc_events *events = events_of(comm);
    fc_nccl_marks *marks = &comm->marks;
    uint64_t n_put = atomic_load_explicit(&marks->n_put, memory_order_acquire);
    uint64_t n = atomic_load_explicit(&marks->n_reached, memory_order_relaxed);
    bool is_reached = true;
    fc_status st = FC_OK;

    while (st == FC_OK && n < n_put) {
        st = events->is_reached(events->context, marks->ring[n % FC_NCCL_MARKS].event, &is_reached);
        if (st != FC_OK || !is_reached) {
            break;
        }
        n++;
    }
    atomic_store_explicit(&marks->n_reached, n, memory_order_release);
    return st;
}

/* Room for one more: the newest gives its event if all are under way. */
static fc_status make_room(fc_nccl_comm *comm, uint64_t *n_put)
{
    fc_nccl_marks *marks = &comm->marks;
    fc_status st;

    (void)pthread_mutex_lock(&marks->looking);
    st = take_reached(comm);
    if (*n_put - atomic_load(&marks->n_reached) == FC_NCCL_MARKS) {
        atomic_store(&marks->n_put, --*n_put);
    }
    (void)pthread_mutex_unlock(&marks->looking);
    return st;
}

/* Without a lock: `record` may wait for room in the device's queue, and whoever looks must see
 * meanwhile that it is not emptied. */
fc_status fc_nccl_marks_put(fc_nccl_comm *comm, fc_stream *stream, const fc_wait_info *info)
{
    const fc_events *events = events_of(comm);
    fc_nccl_marks *marks = &comm->marks;
    uint64_t before = atomic_load_explicit(&marks->n_put, memory_order_relaxed), n = before;
    fc_nccl_mark *mark;
    fc_status st;

    if (marks->ring == NULL) {
        return FC_OK;
    }
    if (n - atomic_load_explicit(&marks->n_reached, memory_order_acquire) == FC_NCCL_MARKS) {
        FC_TRY(make_room(comm, &n));
    }
    mark = &marks->ring[n % FC_NCCL_MARKS];
    st = events->record(events->context, mark->event, stream);
    if (st != FC_OK) { /* what it was before it still is */
        atomic_store_explicit(&marks->n_put, before, memory_order_release);
        return st == FC_AGAIN ? FC_OK : st; /* a graph runs when it is launched, not now */
    }
    mark->enqueued_ns = comm->began_ns;
    mark->sequence = comm->sequence;
    mark->op = info->op;
    (void)snprintf(mark->unit, sizeof(mark->unit), "%s", info->unit);
    atomic_store_explicit(&marks->n_put, n + 1, memory_order_release);
    return FC_OK;
}

fc_status fc_nccl_marks_oldest(fc_nccl_comm *comm, fc_nccl_mark *out, bool *is_there)
{
    fc_nccl_marks *marks = &comm->marks;
    fc_status st;
    uint64_t n;

    *is_there = false;
    if (marks->ring == NULL) {
        return FC_OK;
    }
    (void)pthread_mutex_lock(&marks->looking);
    st = take_reached(comm);
    n = atomic_load_explicit(&marks->n_reached, memory_order_relaxed);
    *is_there = n < atomic_load_explicit(&marks->n_put, memory_order_acquire);
    if (*is_there) {
        *out = marks->ring[n % FC_NCCL_MARKS];
    }
    (void)pthread_mutex_unlock(&marks->looking);
    return st;
}
