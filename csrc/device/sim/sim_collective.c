/* Collectives between simulated ranks: they take place when the queues of all ranks are there. */
#include "device/sim/sim_private.h"

#include "base/alloc.h"
#include "kernels/kernels.h"

#include <string.h>

#define CHUNK_BYTES 512

static int place_of(const fc_device_comm *comm, int rank)
{
    int i;

    for (i = 0; i < comm->n_ranks; i++) {
        if (comm->ranks[i] == rank) {
            return i;
        }
    }
    return -1;
}

static void drop_left(fc_device_comm *comm)
{
    while (comm->first != NULL && comm->first->n_left == comm->n_ranks) {
        fc_sim_meeting *next = comm->first->next;

        fc_free(comm->first);
        comm->first = next;
        comm->n_dropped++;
    }
}

void fc_sim_comm_destroy(fc_device_comm *comm)
{
    while (comm->first != NULL) {
        fc_sim_meeting *next = comm->first->next;

        fc_free(comm->first);
        comm->first = next;
    }
    fc_free(comm);
}

/* ---- moving bytes ---- */

static void gather(const fc_device_comm *comm, const fc_sim_meeting *m)
{
    int to, from;

    for (to = 0; to < comm->n_ranks; to++) {
        for (from = 0; from < comm->n_ranks; from++) {
            size_t at = (size_t)from * m->bytes;

            if ((char *)m->to[to] + at != m->from[from]) {
                memcpy((char *)m->to[to] + at, m->from[from], m->bytes);
            }
        }
    }
}

/* Adds up m->from at `at`, in order of ranks. */
static void sum(const fc_device_comm *comm, const fc_sim_meeting *m, size_t at, size_t bytes,
                void *to)
{
    const void *sources[FC_SIM_RANKS];
    int r;

    for (r = 0; r < comm->n_ranks; r++) {
        sources[r] = (const char *)m->from[r] + at;
    }
    fc_kern_reduce(m->dtype, m->dtype)(to, sources, (size_t)comm->n_ranks,
                                       bytes / fc_dtype_bytes(m->dtype), 1.0, false);
}

static void reduce_scatter(const fc_device_comm *comm, const fc_sim_meeting *m)
{
    int r;

    for (r = 0; r < comm->n_ranks; r++) {
        sum(comm, m, (size_t)r * m->bytes, m->bytes, m->to[r]);
    }
}

static void all_reduce(const fc_device_comm *comm, const fc_sim_meeting *m)
{
    char chunk[CHUNK_BYTES];
    size_t at, bytes;
    int r;

    for (at = 0; at < m->bytes; at += bytes) {
        bytes = m->bytes - at < sizeof(chunk) ? m->bytes - at : sizeof(chunk);
        sum(comm, m, at, bytes, chunk);
        for (r = 0; r < comm->n_ranks; r++) {
            memcpy((char *)m->to[r] + at, chunk, bytes);
        }
    }
}

static const char all_gather_name[] = "all-gather";
static const char reduce_scatter_name[] = "reduce-scatter";
static const char all_reduce_name[] = "all-reduce";

void fc_sim_limit_collectives(fc_sim *sim, int n_at_once)
{
    sim->n_at_once = n_at_once;
}

static bool is_full(const fc_sim_rank *device)
{
    return device->sim->n_at_once > 0 && device->n_collectives >= device->sim->n_at_once;
}

bool fc_sim_meet(fc_sim_rank *device, fc_sim_op *op, bool *is_over)
{
    fc_device_comm *comm = op->comm;
    fc_sim_meeting *m = op->meeting;

    *is_over = false;
    if (op->has_arrived) {
        if (!m->is_done) {
            return false;
        }
        *is_over = true;
        device->n_collectives--;
        m->n_left++;
        drop_left(comm);
        return true;
    }
    /* A communicator does one thing after the other. */
    if (comm->n_done != op->meeting_number || is_full(device)) {
        return false;
    }
    op->has_arrived = true;
    device->n_collectives++;
    if (++m->n_arrived == comm->n_ranks) {
        if (m->kind == all_gather_name) {
            gather(comm, m);
        } else if (m->kind == reduce_scatter_name) {
            reduce_scatter(comm, m);
        } else {
            all_reduce(comm, m);
        }
        m->is_done = true;
        comm->n_done++;
    }
    return true;
}

/* ---- enqueueing ---- */

static bool is_same(const fc_sim_meeting *m, const fc_sim_meeting *mine)
{
    return m->kind == mine->kind && m->bytes == mine->bytes && m->dtype == mine->dtype &&
           strcmp(m->label.unit, mine->label.unit) == 0 &&
           strcmp(m->label.what, mine->label.what) == 0;
}

/* The meeting of this rank's next collective, made if it is the first to come. */
static fc_status join(fc_device_comm *comm, int place, const fc_sim_meeting *mine,
                      fc_sim_meeting **out)
{
    fc_sim_meeting **link = &comm->first, *m;
    uint64_t number = comm->n_joined[place], i;

    for (i = comm->n_dropped; i < number; i++) {
        link = &(*link)->next;
    }
    if (*link == NULL) {
        *link = fc_alloc(1, sizeof(fc_sim_meeting));
        if (*link == NULL) {
            return fc_fail(FC_ERR_NOMEM, "simulator: collective");
        }
        **link = *mine;
    }
    m = *link;
    if (!is_same(m, mine)) {
        fc_sim_report(comm->sim,
                      "collective %llu of '%s': rank %d calls %s ('%s' of '%s', %zu bytes), rank %d"
                      " calls %s ('%s' of '%s', %zu bytes)",
                      (unsigned long long)number, comm->name, m->first_rank, m->kind, m->label.what,
                      m->label.unit, m->bytes, mine->first_rank, mine->kind, mine->label.what,
                      mine->label.unit, mine->bytes);
        return fc_fail(FC_ERR_MISMATCH, "simulator: ranks call different collectives of '%s'",
                       comm->name);
    }
    comm->n_joined[place]++;
    *out = m;
    return FC_OK;
}

static fc_status enqueue(fc_device *base, fc_device_comm *comm, fc_stream *stream,
                         const fc_sim_meeting *mine, const fc_sim_range ranges[2])
{
    fc_sim_rank *device = (fc_sim_rank *)base;
    int i, place = place_of(comm, device->rank);
    fc_sim_meeting *m = NULL;
    fc_sim_op *op = NULL;
    fc_status st;

    if (place < 0) {
        return fc_fail(FC_ERR_INVALID, "simulator: rank %d is not in '%s'", device->rank,
                       comm->name);
    }
    fc_sim_pause(device);
    FC_TRY(fc_sim_op_create(FC_SIM_COLLECTIVE, mine->label, &op));
    op->comm = comm;
    op->meeting_number = comm->n_joined[place];
    st = join(comm, place, mine, &m);
    if (st != FC_OK) {
        fc_sim_op_destroy(op);
        return st;
    }
    op->meeting = m;
    m->to[place] = mine->to[0];
    m->from[place] = mine->from[0];
    fc_sim_tick(stream);
    for (i = 0; i < 2; i++) {
        fc_sim_touch(stream, mine->label, ranges[i]);
    }
    fc_sim_enqueue(stream, op);
    return FC_OK;
}

static fc_status gather_one(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, const fc_gather *gather)
{
    fc_sim_meeting mine = {.kind = all_gather_name,
                           .label = fc_sim_keep(device, label),
                           .first_rank = ((fc_sim_rank *)device)->rank,
                           .bytes = gather->bytes,
                           .to = {gather->to},
                           .from = {gather->from}};
    size_t n = (size_t)comm->n_ranks;

    return enqueue(device, comm, stream, &mine,
                   (fc_sim_range[2]){{gather->to, n * gather->bytes, true},
                                     {gather->from, gather->bytes, false}});
}

fc_status fc_sim_all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t part_bytes)
{
    int place = place_of(comm, ((fc_sim_rank *)device)->rank);
    const char *own = (const char *)buffer + (size_t)(place > 0 ? place : 0) * part_bytes;

    return gather_one(device, comm, stream, label, &(fc_gather){buffer, own, part_bytes});
}

/* One after the other, which no group's work can tell from all at once: they share no bytes. */
fc_status fc_sim_all_gather_each(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    size_t i;

    for (i = 0; i < n_gathers; i++) {
        FC_TRY(gather_one(device, comm, stream, label, &gathers[i]));
    }
    return FC_OK;
}

fc_status fc_sim_reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                fc_label label, void *to, const void *from, size_t numel,
                                fc_dtype dtype)
{
    fc_sim_meeting mine = {.kind = reduce_scatter_name,
                           .label = fc_sim_keep(device, label),
                           .first_rank = ((fc_sim_rank *)device)->rank,
                           .bytes = numel * fc_dtype_bytes(dtype),
                           .dtype = dtype,
                           .to = {to},
                           .from = {from}};
    size_t n = (size_t)comm->n_ranks;

    return enqueue(device, comm, stream, &mine,
                   (fc_sim_range[2]){{to, mine.bytes, true}, {from, n * mine.bytes, false}});
}

fc_status fc_sim_all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    fc_sim_meeting mine = {.kind = all_reduce_name,
                           .label = fc_sim_keep(device, label),
                           .first_rank = ((fc_sim_rank *)device)->rank,
                           .bytes = numel * fc_dtype_bytes(dtype),
                           .dtype = dtype,
                           .to = {buffer},
                           .from = {buffer}};

    return enqueue(device, comm, stream, &mine,
                   (fc_sim_range[2]){{buffer, mine.bytes, true}, {buffer, 0, false}});
}
