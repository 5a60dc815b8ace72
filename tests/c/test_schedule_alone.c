/* What the schedule asks of a device for units of one rank alone, and of those among them whose
 * shards are used where they lie. */
#include "base/alloc.h"
#include "check.h"
#include "device/sim/sim.h"
#include "engine/schedule.h"

#include <stdbool.h>

#define MUST(call) CHECK_EQ(call, FC_OK)
#define UNITS 2
#define PARAMS 2
#define STREAMS 5

/* Calls of the device's functions, in a part of a step. */
typedef struct calls {
    int allocs, frees, records, waits, moves, gathers, reductions;
} calls;

static calls now;
static const fc_device_ops *simulated;

static fc_status count_alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                             void **out)
{
    now.allocs++;
    return simulated->alloc(device, stream, label, bytes, out);
}

static void count_free(fc_device *device, void *memory)
{
    now.frees += memory != NULL;
    simulated->free(device, memory);
}

static fc_status count_record(fc_device *device, fc_event *event, fc_stream *stream)
{
    now.records++;
    return simulated->record(device, event, stream);
}

static fc_status count_wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    now.waits++;
    return simulated->wait(device, stream, event);
}

static fc_status count_move(fc_device *device, fc_stream *stream, fc_label label,
                            const fc_move *move)
{
    now.moves++;
    return simulated->move(device, stream, label, move);
}

static fc_status count_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                              fc_label label, void *buffer, size_t part_bytes)
{
    now.gathers++;
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static fc_status count_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                               fc_label label, void *to, const void *from, size_t numel,
                               fc_dtype dtype)
{
    now.reductions++;
    return simulated->reduce_scatter(device, comm, stream, label, to, from, numel, dtype);
}

/* What has been called since the last time. */
static calls take(void)
{
    calls taken = now;

    now = (calls){0};
    return taken;
}

/* ---- a rank with two units ---- */

typedef struct world {
    fc_sim *sim;
    fc_device *device;
    fc_device_ops counting;
    fc_stream *streams[STREAMS]; /* compute first */
    fc_schedule *schedule;
    fc_schedule_unit *units[UNITS];
    fc_param params[UNITS][PARAMS];
    fc_layout layouts[UNITS];
    char *shards[UNITS]; /* as in the unsharded buffer */
    const void *at[UNITS][PARAMS];
    void *grads[PARAMS];
    fc_dtype types[PARAMS]; /* of gradients */
    void *out;
} world;

static void *memory(world *w, size_t bytes)
{
    void *made = NULL;

    MUST(
        simulated->alloc(w->device, w->streams[0], (fc_label){"world", "memory", 0}, bytes, &made));
    return made;
}

static void make_unit(world *w, int i, fc_device_comm *comm, const fc_param *like, bool is_resident)
{
    const fc_schedule_unit_options options = {.name = i == 0 ? "first" : "second",
                                              .layout = &w->layouts[i],
                                              .gather = comm,
                                              .reduce = comm,
                                              .reshard_after_forward = true,
                                              .n_post_ranks = 1,
                                              .post_gather = comm,
                                              .pre_divisor = 1,
                                              .divisor = 1};
    int j;

    for (j = 0; j < PARAMS; j++) {
        w->params[i][j] = *like;
    }
    MUST(fc_layout_init(&w->layouts[i], w->params[i], PARAMS, 0, 1, false));
    MUST(fc_schedule_add(w->schedule, &options, &w->units[i]));
    w->shards[i] = memory(w, w->layouts[i].full_bytes);
    for (j = 0; j < PARAMS; j++) {
        w->at[i][j] = w->shards[i] + w->params[i][j].full_at;
    }
    fc_schedule_set_shards(w->units[i], w->at[i]);
    MUST(fc_schedule_set_resident(w->units[i], is_resident ? w->shards[i] : NULL));
}

static void make_world(world *w, const fc_param *like, bool is_resident)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all-reduce"};
    const int ranks[1] = {0};
    fc_device_comm *comm = NULL;
    int i;

    *w = (world){.sim = NULL};
    MUST(fc_sim_create(1, 1, &w->sim));
    w->device = fc_sim_device(w->sim, 0);
    simulated = w->device->ops;
    w->counting = *simulated;
    w->counting.alloc = count_alloc;
    w->counting.free = count_free;
    w->counting.record = count_record;
    w->counting.wait = count_wait;
    w->counting.move = count_move;
    w->counting.all_gather = count_gather;
    w->counting.reduce_scatter = count_scatter;
    w->device->ops = &w->counting;
    for (i = 0; i < STREAMS; i++) {
        MUST(fc_sim_stream_create(w->sim, 0, names[i], &w->streams[i]));
    }
    MUST(fc_sim_comm_create(w->sim, "comm", ranks, 1, &comm));
    MUST(fc_schedule_create(&(fc_schedule_options){w->device, w->streams[1], w->streams[2],
                                                   w->streams[3], w->streams[4], 1, 0, 0},
                            &w->schedule));
    for (i = 0; i < UNITS; i++) {
        make_unit(w, i, comm, like, is_resident);
    }
    for (i = 0; i < PARAMS; i++) {
        w->grads[i] = memory(w, 1024);
        w->types[i] = like->compute;
    }
    w->out = memory(w, 1024);
    (void)take();
}

/* What is left of the device's work is done; the shards are still there. */
static void unmake(world *w)
{
    fc_event *event = NULL;
    int i;

    for (i = 0; i < UNITS; i++) {
        simulated->free(w->device, w->shards[i]);
    }
    MUST(simulated->event_create(w->device, &event));
    for (i = 0; i < STREAMS; i++) {
        MUST(simulated->record(w->device, event, w->streams[i]));
        MUST(simulated->synchronize(w->device, event));
    }
    simulated->event_destroy(w->device, event);
    fc_schedule_destroy(w->schedule);
    CHECK_MSG(fc_sim_faults(w->sim) == 0, "%s", fc_sim_fault(w->sim, 0));
    fc_sim_destroy(w->sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void begin(world *w)
{
    MUST(fc_schedule_begin(w->schedule, w->streams[0], NULL));
}

static void forward(world *w, void **full)
{
    int i;

    for (i = 0; i < UNITS; i++) {
        MUST(fc_schedule_pre_forward(w->units[i], full));
        MUST(fc_schedule_post_forward(w->units[i]));
    }
}

static bool post(world *w, int unit, fc_schedule_grads given)
{
    const void *full[PARAMS] = {w->grads[0], w->grads[1]};
    bool is_reduced = false;

    given.full = full;
    given.types = w->types;
    given.out = w->out;
    MUST(fc_schedule_post_backward(w->units[unit], &given, &is_reduced));
    return is_reduced;
}

static const fc_param plain = {
    .outer = 1, .rows = 4, .inner = 4, .has_grad = true, .trainable = true};

/* ---- what a step asks for ---- */

typedef struct step_calls {
    calls begin, forward, pre_backward, post_backward, end;
} step_calls;

/* Of the second step: the first one makes what steps use again. */
static step_calls count_step(bool is_resident)
{
    step_calls c = {{0}, {0}, {0}, {0}, {0}};
    void *full;
    world w;
    int i, unit;

    make_world(&w, &plain, is_resident);
    for (i = 0; i < 2; i++) {
        c = (step_calls){{0}, {0}, {0}, {0}, {0}};
        begin(&w);
        c.begin = take();
        forward(&w, &full);
        c.forward = take();
        for (unit = UNITS; unit-- > 0;) {
            MUST(fc_schedule_pre_backward(w.units[unit], &full));
        }
        c.pre_backward = take();
        for (unit = UNITS; unit-- > 0;) {
            CHECK(post(&w, unit, (fc_schedule_grads){.sync = FC_SYNC_ALL}));
        }
        c.post_backward = take();
        MUST(fc_schedule_end_backward(w.schedule, true));
        c.end = take();
    }
    unmake(&w);
    return c;
}

static void check_no_calls(calls c)
{
    CHECK_EQ(c.allocs, 0);
    CHECK_EQ(c.frees, 0);
    CHECK_EQ(c.records, 0);
    CHECK_EQ(c.waits, 0);
    CHECK_EQ(c.moves, 0);
    CHECK_EQ(c.gathers, 0);
    CHECK_EQ(c.reductions, 0);
}

/* One launch for the gradients of each unit, and nothing else: no memory, no event. */
static void test_resident_units_ask_for_a_launch_each(void)
{
    step_calls c = count_step(true);

    check_no_calls(c.forward);
    check_no_calls(c.pre_backward);
    CHECK_EQ(c.post_backward.moves, UNITS);
    c.post_backward.moves = 0;
    check_no_calls(c.post_backward);
    check_no_calls(c.end);
    CHECK_EQ(c.begin.records, 1); /* for units that are not */
    CHECK_EQ(c.begin.waits, 0);
    c.begin.records = 0;
    check_no_calls(c.begin);
}

/* Others are gathered twice, the second time from the slice that the reshard keeps. */
static void test_other_units_are_gathered(void)
{
    step_calls c = count_step(false);

    CHECK_EQ(c.forward.gathers, UNITS);
    CHECK_EQ(c.forward.moves, 3 * UNITS); /* pack, copy-out and slice */
    CHECK_EQ(c.pre_backward.gathers, UNITS);
    CHECK_EQ(c.pre_backward.moves, UNITS);
    CHECK(c.forward.allocs >= 2 * UNITS && c.pre_backward.allocs >= UNITS);
    CHECK(c.forward.records > 0 && c.forward.waits > 0);
    CHECK_EQ(c.post_backward.moves, UNITS);
    CHECK_EQ(c.post_backward.reductions, 0);
    CHECK_EQ(c.post_backward.records, 0);
    CHECK_EQ(c.post_backward.waits, 0);
}

/* ---- where gradients are staged ---- */

/* Moves of one backward, behind another one that holds its gradients if `is_held`. */
static int moves_of(fc_param like, fc_dtype type, double pre_divisor, bool is_held)
{
    fc_schedule_grads given = {.pre_divisor = pre_divisor, .divisor = 3};
    void *full;
    world w;
    int n;

    make_world(&w, &like, true);
    w.types[0] = type;
    begin(&w);
    forward(&w, &full);
    if (is_held) {
        CHECK(!post(&w, 0, given));
    }
    (void)take();
    given.sync = FC_SYNC_ALL;
    given.accumulate = true;
    CHECK(post(&w, 0, given));
    n = now.moves;
    CHECK_EQ(now.records + now.waits + now.reductions, 0);
    MUST(fc_schedule_end_backward(w.schedule, true));
    unmake(&w);
    return n;
}

static fc_param typed(fc_dtype compute, fc_dtype reduce)
{
    fc_param like = plain;

    like.orig = like.compute = like.grad = compute;
    like.reduce = reduce;
    return like;
}

/* A launch more where it changes bits: where the reduce type rounds, where its sums are wider, and
 * where there is a sum that is held. */
static void test_gradients_are_staged_where_it_changes_bits(void)
{
    CHECK_EQ(moves_of(typed(FC_F32, FC_F32), FC_F32, 1, false), 1);
    CHECK_EQ(moves_of(typed(FC_F32, FC_F32), FC_BF16, 1, false), 1);
    CHECK_EQ(moves_of(typed(FC_F32, FC_F32), FC_F64, 1, false), 2);
    CHECK_EQ(moves_of(typed(FC_BF16, FC_F32), FC_BF16, 1, false), 1);
    CHECK_EQ(moves_of(typed(FC_BF16, FC_BF16), FC_BF16, 1, false), 1);
    CHECK_EQ(moves_of(typed(FC_F32, FC_BF16), FC_F32, 1, false), 2);
    CHECK_EQ(moves_of(typed(FC_F16, FC_BF16), FC_F16, 1, false), 2);
    CHECK_EQ(moves_of(typed(FC_F32, FC_F64), FC_F32, 1, false), 2);
    CHECK_EQ(moves_of(typed(FC_F64, FC_F64), FC_F32, 1, false), 1);
    CHECK_EQ(moves_of(typed(FC_F16, FC_F16), FC_F16, 2, false), 2);
    CHECK_EQ(moves_of(typed(FC_F32, FC_F32), FC_F32, 1, true), 2);
}

/* ---- whose memory it is ---- */

/* Residence begins and ends between iterations, and the memory stays its owner's: on a reset, in a
 * smaller group, when the unit leaves or the schedule does while it is unsharded. */
static void test_resident_memory_is_borrowed(void)
{
    void *full = NULL, *other;
    size_t bytes;
    world w;

    make_world(&w, &plain, true);
    bytes = fc_sim_bytes(w.device);
    begin(&w);
    forward(&w, &full);
    CHECK(full == w.shards[1]);
    CHECK_EQ(fc_sim_bytes(w.device), bytes); /* no slice */
    MUST(fc_schedule_start(w.units[0]));
    MUST(fc_schedule_pre_backward(w.units[0], &full));
    CHECK(full == w.shards[0]);
    CHECK_EQ(fc_schedule_set_resident(w.units[0], NULL), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'first': set_resident while it is unsharded");
    MUST(fc_schedule_reset(w.schedule));
    MUST(fc_schedule_set_resident(w.units[0], NULL));
    begin(&w);
    MUST(fc_schedule_unshard(w.units[0], &other));
    CHECK(other != full);
    CHECK(fc_sim_bytes(w.device) > bytes);
    fc_schedule_reshard(w.units[0]);
    MUST(fc_schedule_end_backward(w.schedule, true));
    CHECK_EQ(fc_sim_bytes(w.device), bytes);
    MUST(fc_schedule_set_resident(w.units[0], full));
    MUST(fc_schedule_unshard(w.units[0], &other));
    CHECK(other == full);
    fc_schedule_remove(w.units[0]);
    CHECK_EQ(fc_sim_bytes(w.device), bytes);
    MUST(fc_schedule_unshard(w.units[1], &other));
    unmake(&w);
}

int main(void)
{
    test_resident_units_ask_for_a_launch_each();
    test_other_units_are_gathered();
    test_gradients_are_staged_where_it_changes_bits();
    test_resident_memory_is_borrowed();
    return check_result();
}
