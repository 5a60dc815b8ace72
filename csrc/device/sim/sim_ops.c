/* The table of functions of simulated devices: what each call enqueues and what it touches. */
#include "device/sim/sim_private.h"

#include "base/alloc.h"
#include "kernels/kernels.h"

#include <string.h>

struct fc_moves {
    fc_piece *pieces; /* owned */
    size_t n_pieces;
    size_t n_to, n_from; /* addresses of a launch */
    size_t n_queued;     /* launches that have not run */
    fc_moves *next;
};

/* Arguments of a move; the addresses follow, those of `to` first. */
typedef struct move_args {
    fc_moves *moves;
    double divisor;
    bool accumulate;
    const void *addresses[];
} move_args;

typedef struct span {
    void *to;
    const void *from;
    size_t bytes;
} span;

/* ---- memory ---- */

fc_status fc_sim_host_alloc(fc_device *device, fc_label label, size_t bytes, void **out)
{
    return fc_sim_block_take(((fc_sim_rank *)device)->streams[FC_SIM_HOST], label, bytes, out);
}

static fc_status device_alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                              void **out)
{
    fc_sim_rank *rank = (fc_sim_rank *)device;

    fc_sim_pause(rank);
    if (rank->allocs_left >= 0 && rank->allocs_left-- == 0) {
        return fc_fail(FC_ERR_NOMEM, "simulated device %d: no %zu bytes for '%s' of '%s'",
                       rank->rank, bytes, label.what, label.unit);
    }
    return fc_sim_block_take(stream, label, bytes, out);
}

void fc_sim_fail_alloc(fc_device *device, int64_t n)
{
    ((fc_sim_rank *)device)->allocs_left = n;
}

static void poison(const void *args)
{
    const span *s = args;

    fc_sim_poison(s->to, s->bytes);
}

static void device_free(fc_device *base, void *memory)
{
    fc_sim_rank *device = (fc_sim_rank *)base;
    fc_sim_block *block = memory != NULL ? fc_sim_block_at(device, memory) : NULL;

    if (memory == NULL) {
        return;
    }
    fc_sim_pause(device);
    if (block == NULL || !block->is_live) {
        fc_sim_report(device->sim, "rank %d frees what is not allocated", device->rank);
        return;
    }
    fc_sim_block_give(block);
    if (block->stream->index == FC_SIM_HOST) {
        fc_sim_poison(block->memory, block->bytes);
    } else if (fc_sim_kernel_enqueue(block->stream, block->label, poison,
                                     &(span){block->memory, NULL, block->bytes},
                                     sizeof(span)) != FC_OK) {
        fc_sim_report(device->sim, "%s", fc_last_message());
    }
}

/* ---- events ---- */

static fc_status event_create(fc_device *device, fc_event **out)
{
    fc_event *event = fc_alloc(1, sizeof(*event));

    (void)device;
    if (event == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: event");
    }
    *out = event;
    return FC_OK;
}

static void event_destroy(fc_device *device, fc_event *event)
{
    (void)device;
    if (event != NULL) {
        fc_sim_mark_release(event->mark);
        fc_free(event);
    }
}

static fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    fc_sim_mark *mark;
    fc_sim_op *op = NULL;

    fc_sim_pause((fc_sim_rank *)device);
    mark = fc_alloc(1, sizeof(*mark));
    if (mark == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: record");
    }
    mark->n_holders = 1;
    if (fc_sim_op_create(FC_SIM_RECORD, (fc_label){"", "record"}, &op) != FC_OK) {
        fc_sim_mark_release(mark);
        return FC_ERR_NOMEM;
    }
    fc_sim_tick(stream);
    mark->clock = stream->clock;
    mark->n_holders++;
    op->mark = mark;
    fc_sim_mark_release(event->mark);
    event->mark = mark;
    fc_sim_enqueue(stream, op);
    return FC_OK;
}

static fc_status wait_event(fc_device *device, fc_stream *stream, fc_event *event)
{
    fc_sim_op *op = NULL;

    fc_sim_pause((fc_sim_rank *)device);
    if (event->mark == NULL) {
        return FC_OK;
    }
    FC_TRY(fc_sim_op_create(FC_SIM_WAIT, (fc_label){"", "wait"}, &op));
    op->mark = event->mark;
    op->mark->n_holders++;
    fc_sim_clock_join(&stream->clock, &op->mark->clock);
    fc_sim_enqueue(stream, op);
    return FC_OK;
}

static fc_status synchronize(fc_device *base, fc_event *event)
{
    fc_sim_rank *device = (fc_sim_rank *)base;

    fc_sim_pause(device);
    return event->mark == NULL ? FC_OK : fc_sim_await(device, event->mark);
}

/* ---- copies and moves ---- */

static void copy_bytes(const void *args)
{
    const span *s = args;

    memcpy(s->to, s->from, s->bytes);
}

fc_status fc_sim_launch(fc_device *device, fc_stream *stream, fc_label label,
                        const fc_sim_range *ranges, size_t n_ranges, fc_sim_kernel kernel,
                        const void *args, size_t args_bytes)
{
    size_t i;

    fc_sim_pause((fc_sim_rank *)device);
    fc_sim_tick(stream);
    for (i = 0; i < n_ranges; i++) {
        fc_sim_touch(stream, label, ranges[i]);
    }
    return fc_sim_kernel_enqueue(stream, label, kernel, args, args_bytes);
}

static fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                      const void *from, size_t bytes)
{
    const fc_sim_range ranges[2] = {{from, bytes, false}, {to, bytes, true}};

    return fc_sim_launch(device, stream, label, ranges, 2, copy_bytes, &(span){to, from, bytes},
                         sizeof(span));
}

static fc_status moves_create(fc_device *device, const fc_piece *pieces, size_t n_pieces,
                              fc_moves **out)
{
    fc_sim *sim = ((fc_sim_rank *)device)->sim;
    fc_moves *moves = fc_alloc(1, sizeof(*moves));
    size_t i;

    if (moves == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: moves");
    }
    moves->pieces = fc_alloc(n_pieces ? n_pieces : 1, sizeof(*pieces));
    if (moves->pieces == NULL) {
        fc_free(moves);
        return fc_fail(FC_ERR_NOMEM, "simulator: %zu pieces", n_pieces);
    }
    for (i = 0; i < n_pieces; i++) {
        const fc_piece *p = &pieces[i];

        moves->pieces[i] = *p;
        moves->n_to = p->to_base >= moves->n_to ? p->to_base + 1 : moves->n_to;
        moves->n_from = p->from_base >= moves->n_from ? p->from_base + 1 : moves->n_from;
    }
    moves->n_pieces = n_pieces;
    moves->next = sim->moves;
    sim->moves = moves;
    *out = moves;
    return FC_OK;
}

/* Queues may still hold launches: the pieces live as long as the simulation. */
static void moves_destroy(fc_device *base, fc_moves *moves)
{
    fc_sim_rank *device = (fc_sim_rank *)base;

    if (moves != NULL && moves->n_queued > 0 && !device->sim->is_stuck) {
        fc_sim_report(device->sim, "rank %d destroys moves that %zu launches still need",
                      device->rank, moves->n_queued);
    }
}

void fc_sim_moves_free(fc_moves *moves)
{
    while (moves != NULL) {
        fc_moves *next = moves->next;

        fc_free(moves->pieces);
        fc_free(moves);
        moves = next;
    }
}

static void move_run(const fc_piece *p, const move_args *m, char *to, const char *from)
{
    bool is_plain = m->divisor == 1.0 && !m->accumulate;
    const void *source = from;

    if (from == NULL) {
        if (!m->accumulate) {
            memset(to, 0, p->run_numel * fc_dtype_bytes(p->to));
        }
    } else if (!fc_dtype_is_float(p->to) || !fc_dtype_is_float(p->from)) {
        memcpy(to, from, p->run_numel * fc_dtype_bytes(p->to));
    } else if (is_plain) {
        fc_kern_cast(p->from, p->to)(to, from, p->run_numel);
    } else {
        fc_kern_reduce(p->from, p->to)(to, &source, 1, p->run_numel, m->divisor, m->accumulate);
    }
}

static void move_pieces(const void *args)
{
    const move_args *m = args;
    size_t i, run;

    m->moves->n_queued--;
    for (i = 0; i < m->moves->n_pieces; i++) {
        const fc_piece *p = &m->moves->pieces[i];
        const char *from = m->addresses[m->moves->n_to + p->from_base];
        const void *address = m->addresses[p->to_base];
        char *to;

        memcpy(&to, &address, sizeof(to));
        for (run = 0; run < p->n_runs; run++) {
            size_t to_at = p->to_at + run * p->to_step * fc_dtype_bytes(p->to);
            size_t from_at = p->from_at + run * p->from_step * fc_dtype_bytes(p->from);

            move_run(p, m, to + to_at, from == NULL ? NULL : from + from_at);
        }
    }
}

/* From the beginning of the first run to the end of the last. */
static size_t extent(const fc_piece *p, size_t step, fc_dtype dtype)
{
    bool is_empty = p->n_runs == 0 || p->run_numel == 0;

    return is_empty ? 0 : ((p->n_runs - 1) * step + p->run_numel) * fc_dtype_bytes(dtype);
}

static void touch_pieces(fc_stream *stream, fc_label label, const fc_move *move)
{
    size_t i;

    fc_sim_tick(stream);
    for (i = 0; i < move->pieces->n_pieces; i++) {
        const fc_piece *p = &move->pieces->pieces[i];
        const char *from = move->from[p->from_base];
        const char *to = move->to[p->to_base];

        if (from != NULL) {
            fc_sim_touch(
                stream, label,
                (fc_sim_range){from + p->from_at, extent(p, p->from_step, p->from), false});
        }
        fc_sim_touch(stream, label,
                     (fc_sim_range){to + p->to_at, extent(p, p->to_step, p->to), true});
    }
}

static fc_status move(fc_device *device, fc_stream *stream, fc_label label, const fc_move *move)
{
    fc_moves *moves = move->pieces;
    size_t bytes = sizeof(move_args) + (moves->n_to + moves->n_from) * sizeof(void *);
    move_args *args;
    fc_status st;

    fc_sim_pause((fc_sim_rank *)device);
    args = fc_alloc(1, bytes);
    if (args == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: arguments of a move");
    }
    args->moves = moves;
    args->divisor = move->divisor;
    args->accumulate = move->accumulate;
    memcpy(args->addresses, move->to, moves->n_to * sizeof(void *));
    memcpy(args->addresses + moves->n_to, move->from, moves->n_from * sizeof(void *));
    touch_pieces(stream, label, move);
    st = fc_sim_kernel_enqueue(stream, label, move_pieces, args, bytes);
    moves->n_queued += st == FC_OK;
    fc_free(args);
    return st;
}

const fc_device_ops fc_sim_ops = {
    .name = "simulator",
    .alloc = device_alloc,
    .free = device_free,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .record = record,
    .wait = wait_event,
    .synchronize = synchronize,
    .copy = copy,
    .moves_create = moves_create,
    .moves_destroy = moves_destroy,
    .move = move,
    .all_gather = fc_sim_all_gather,
    .reduce_scatter = fc_sim_reduce_scatter,
    .all_reduce = fc_sim_all_reduce,
};
