/* Queues of simulated streams, and the scheduler that picks what runs next. */
#include "device/sim/sim_private.h"

#include "base/alloc.h"

#include <string.h>

/* splitmix64 */
uint64_t fc_sim_draw(fc_sim *sim, uint64_t below)
{
    uint64_t x = sim->random += UINT64_C(0x9e3779b97f4a7c15);

    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (x ^ (x >> 31)) % below;
}

/* ---- what comes before what ---- */

void fc_sim_clock_join(fc_sim_clock *clock, const fc_sim_clock *other)
{
    int i;

    for (i = 0; i < FC_SIM_STREAMS; i++) {
        if (other->seen[i] > clock->seen[i]) {
            clock->seen[i] = other->seen[i];
        }
    }
}

void fc_sim_tick(fc_stream *stream)
{
    fc_sim_clock_join(&stream->clock, &stream->device->streams[FC_SIM_HOST]->clock);
    stream->clock.seen[stream->index]++;
}

/* ---- operations ---- */

fc_status fc_sim_op_create(fc_sim_kind kind, fc_label label, fc_sim_op **out)
{
    fc_sim_op *op = fc_alloc(1, sizeof(*op));

    if (op == NULL) {
        return fc_fail(FC_ERR_NOMEM, "simulator: operation");
    }
    op->kind = kind;
    op->label = label;
    *out = op;
    return FC_OK;
}

void fc_sim_mark_release(fc_sim_mark *mark)
{
    if (mark != NULL && --mark->n_holders == 0) {
        fc_free(mark);
    }
}

void fc_sim_op_destroy(fc_sim_op *op)
{
    fc_sim_mark_release(op->mark);
    fc_free(op->args);
    fc_free(op);
}

void fc_sim_enqueue(fc_stream *stream, fc_sim_op *op)
{
    if (stream->last == NULL) {
        stream->first = op;
    } else {
        stream->last->next = op;
    }
    stream->last = op;
}

fc_status fc_sim_kernel_enqueue(fc_stream *stream, fc_label label, fc_sim_kernel kernel,
                                const void *args, size_t args_bytes)
{
    fc_sim_op *op = NULL;

    FC_TRY(fc_sim_op_create(FC_SIM_KERNEL, label, &op));
    op->kernel = kernel;
    op->args = fc_alloc(1, args_bytes ? args_bytes : 1);
    if (op->args == NULL) {
        fc_sim_op_destroy(op);
        return fc_fail(FC_ERR_NOMEM, "simulator: %zu bytes of arguments", args_bytes);
    }
    if (args_bytes > 0) {
        memcpy(op->args, args, args_bytes);
    }
    fc_sim_enqueue(stream, op);
    return FC_OK;
}

/* ---- running ---- */

/* True if the head of the stream's queue got further. */
static bool advance(fc_stream *stream)
{
    fc_sim_op *op = stream->first;
    bool is_over = true;

    switch (op->kind) {
    case FC_SIM_KERNEL:
        op->kernel(op->args);
        break;
    case FC_SIM_RECORD:
        op->mark->is_done = true;
        break;
    case FC_SIM_WAIT:
        if (!op->mark->is_done) {
            return false;
        }
        break;
    case FC_SIM_COLLECTIVE:
        if (!fc_sim_meet(stream->device, op, &is_over)) {
            return false;
        }
        break;
    }
    if (is_over) {
        stream->first = op->next;
        if (stream->first == NULL) {
            stream->last = NULL;
        }
        fc_sim_op_destroy(op);
    }
    return true;
}

/* One round over all streams from a random one on; lazy ones are passed over if `may_pass`. */
static bool step_round(fc_sim *sim, bool may_pass)
{
    int n = sim->n_ranks * FC_SIM_STREAMS;
    int i, start = (int)fc_sim_draw(sim, (uint64_t)n);

    for (i = 0; i < n; i++) {
        int at = (start + i) % n;
        fc_sim_rank *device = &sim->devices[at / FC_SIM_STREAMS];
        fc_stream *stream = device->streams[at % FC_SIM_STREAMS];

        if (stream == NULL || stream->first == NULL ||
            (may_pass && fc_sim_draw(sim, 8) < stream->laziness)) {
            continue;
        }
        if (advance(stream)) {
            return true;
        }
    }
    return false;
}

bool fc_sim_step(fc_sim *sim)
{
    return step_round(sim, true) || step_round(sim, false);
}
