/* The table of functions of simulated devices: what each call enqueues and what it touches. */
#include "device/sim/sim_private.h"

#include "base/alloc.h"
#include "device/host/moves.h"

#include <string.h>

struct fc_moves {
    fc_runs plan;       /* owned */
    size_t n_addresses; /* of a launch */
    fc_moves *next;
};

typedef struct move_args {
    fc_moves *moves;
    double divisor;
    bool accumulate;
    uint64_t addresses[];
} move_args;

typedef struct span {
    void *to;
    const void *from;
    size_t bytes;
} span;

/* ---- memory ---- */

fc_status fc_sim_host_alloc(fc_device *device, fc_label label, size_t bytes, void **out)
{
    return fc_sim_block_take(((fc_sim_rank *)device)->streams[FC_SIM_HOST],
                             fc_sim_keep(device, label), bytes, out);
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
    return fc_sim_block_take(stream, fc_sim_keep(device, label), bytes, out);
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
    if (fc_sim_op_create(FC_SIM_RECORD, (fc_label){"", "record", 0}, &op) != FC_OK) {
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
    FC_TRY(fc_sim_op_create(FC_SIM_WAIT, (fc_label){"", "wait", 0}, &op));
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

    label = fc_sim_keep(device, label);
    fc_sim_pause((fc_sim_rank *)device);
    fc_sim_tick(stream);
    for (i = 0; i < n_ranges; i++) {
        fc_sim_touch(stream, label, ranges[i]);
    }
    return fc_sim_kernel_enqueue(stream, label, kernel, args, args_bytes);
}

static bool is_on_host(fc_device *device, const void *memory)
{
    const fc_sim_block *block = fc_sim_block_at((fc_sim_rank *)device, memory);

    return block != NULL && block->stream == ((fc_sim_rank *)device)->streams[FC_SIM_HOST];
}

static fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                      const void *from, size_t bytes, fc_way way)
{
    const fc_sim_range ranges[2] = {{from, bytes, false}, {to, bytes, true}};

    if (is_on_host(device, from) != (way == FC_TO_DEVICE) ||
        is_on_host(device, to) != (way == FC_TO_HOST)) {
        fc_sim_report(((fc_sim_rank *)device)->sim, "'%s' of '%s' goes another way than it says",
                      label.what, label.unit);
    }
    return fc_sim_launch(device, stream, label, ranges, 2, copy_bytes, &(span){to, from, bytes},
                         sizeof(span));
}

static fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    fc_sim *sim = ((fc_sim_rank *)device)->sim;
    fc_moves *moves = fc_alloc(1, sizeof(*moves));
    size_t i;

    if (moves == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: moves");
    }
    for (i = 0; i < plan->n_bases; i++) {
        size_t n = plan->bases[i] + (size_t)1;

        moves->n_addresses = n > moves->n_addresses ? n : moves->n_addresses;
    }
    moves->plan = *plan;
    fc_runs_init(plan);
    moves->next = sim->moves;
    sim->moves = moves;
    *out = moves;
    return FC_OK;
}

/* Queues may still hold launches: the pieces live as long as the simulation. */
static void moves_destroy(fc_device *device, fc_moves *moves)
{
    (void)device;
    (void)moves;
}

void fc_sim_moves_free(fc_moves *moves)
{
    while (moves != NULL) {
        fc_moves *next = moves->next;

        fc_runs_clear(&moves->plan);
        fc_free(moves);
        moves = next;
    }
}

static void run_move(const void *args)
{
    const move_args *m = args;

    fc_host_move(&m->moves->plan, m->addresses, m->divisor, m->accumulate);
}

typedef struct toucher {
    fc_stream *stream;
    fc_label label;
} toucher;

static void touch_run(const void *arg, const fc_run *run, fc_host_operand to, fc_host_operand from)
{
    const toucher *t = arg;

    (void)run;
    fc_sim_touch(t->stream, t->label, (fc_sim_range){from.first, from.bytes, false});
    fc_sim_touch(t->stream, t->label, (fc_sim_range){to.first, to.bytes, true});
}

fc_status fc_sim_launch_plan(fc_device *device, fc_stream *stream, fc_label label,
                             const fc_runs *plan, const uint64_t *addresses, fc_sim_kernel kernel,
                             const void *args, size_t args_bytes)
{
    const toucher t = {stream, fc_sim_keep(device, label)};

    fc_sim_pause((fc_sim_rank *)device);
    fc_sim_tick(stream);
    fc_host_visit(plan, addresses, touch_run, &t);
    return fc_sim_kernel_enqueue(stream, t.label, kernel, args, args_bytes);
}

static fc_status move(fc_device *device, fc_stream *stream, fc_label label, const fc_move *move)
{
    fc_moves *moves = move->moves;
    size_t bytes = sizeof(move_args) + moves->n_addresses * sizeof(uint64_t);
    move_args *args = fc_alloc(1, bytes);
    fc_status st;

    if (args == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: arguments of a move");
    }
    args->moves = moves;
    args->divisor = move->divisor;
    args->accumulate = move->accumulate;
    memcpy(args->addresses, move->addresses, moves->n_addresses * sizeof(uint64_t));
    st = fc_sim_launch_plan(device, stream, label, &moves->plan, args->addresses, run_move, args,
                            bytes);
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
    .all_gather_each = fc_sim_all_gather_each,
    .reduce_scatter = fc_sim_reduce_scatter,
    .all_reduce = fc_sim_all_reduce,
};
