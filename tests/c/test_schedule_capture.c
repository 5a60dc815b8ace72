/* A step of the schedule while its stream is captured into a CUDA graph, by CUDA's rules.
 *
 * A stream is in the capture once it has waited for a record of a stream that is. Work and memory
 * of other streams would not be in the graph; the host may wait for nothing; an event means what
 * was captured, or what was not; and at the end compute comes behind all that the others were
 * given.
 */
#include "check.h"
#include "device/sim/sim.h"
#include "group/schedule.h"

#include <stdbool.h>

#define MUST(call) CHECK_EQ(call, FC_OK)
#define STREAMS 5
#define EVENTS 64
#define UNITS 3
#define BYTES 1024 /* of a shard, a gradient; more than they need */

typedef struct capture {
    fc_stream *streams[STREAMS]; /* compute first */
    bool is_captured[STREAMS];
    int seen[STREAMS][STREAMS]; /* of each stream's work, what comes before the next; own: all */
    struct {
        fc_event *event;
        bool is_recorded, is_captured;
        int seen[STREAMS];
    } events[EVENTS];
    int n_events;
    bool is_on;
    char breach[128]; /* the first one */
} capture;

static capture now;
static const fc_device_ops *simulated;

static void breach(const char *what, fc_label label)
{
    if (now.breach[0] == 0) {
        (void)snprintf(now.breach, sizeof(now.breach), "%s: %s of %s", what, label.what,
                       label.unit);
    }
}

static int index_of(const fc_stream *stream)
{
    int i;

    for (i = 0; i < STREAMS && now.streams[i] != stream; i++) {
    }
    CHECK_OR_EXIT(i < STREAMS);
    return i;
}

static int event_of(fc_event *event)
{
    int i;

    for (i = 0; i < now.n_events && now.events[i].event != event; i++) {
    }
    CHECK_OR_EXIT(i < EVENTS);
    if (i == now.n_events) {
        now.events[now.n_events++].event = event;
    }
    return i;
}

static void work(const fc_stream *stream, fc_label label)
{
    int s = index_of(stream);

    now.seen[s][s]++;
    if (now.is_on && !now.is_captured[s]) {
        breach("outside of the capture", label);
    }
}

static fc_status alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                       void **out)
{
    if (now.is_on && !now.is_captured[index_of(stream)]) {
        breach("memory of a stream outside", label);
    }
    return simulated->alloc(device, stream, label, bytes, out);
}

static fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    int e = event_of(event), s = index_of(stream);

    now.events[e].is_recorded = true;
    now.events[e].is_captured = now.is_captured[s];
    memcpy(now.events[e].seen, now.seen[s], sizeof(now.seen[s]));
    return simulated->record(device, event, stream);
}

static fc_status wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    int e = event_of(event), s = index_of(stream), i;

    if (now.events[e].is_recorded && now.events[e].is_captured != now.is_captured[s]) {
        if (!now.events[e].is_captured) {
            breach("a wait for what was not captured", (fc_label){"a stream", "wait"});
        }
        now.is_captured[s] = true;
    }
    for (i = 0; i < STREAMS; i++) {
        if (now.seen[s][i] < now.events[e].seen[i]) {
            now.seen[s][i] = now.events[e].seen[i];
        }
    }
    return simulated->wait(device, stream, event);
}

static fc_status synchronize(fc_device *device, fc_event *event)
{
    if (now.is_on) {
        breach("the host waits", (fc_label){"the host", "wait"});
    }
    return simulated->synchronize(device, event);
}

static fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    if (now.is_on) {
        breach("a table is copied to the device", (fc_label){"a unit", "plan"});
    }
    return simulated->moves_create(device, plan, out);
}

static fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                      const void *from, size_t bytes, fc_way way)
{
    work(stream, label);
    return simulated->copy(device, stream, label, to, from, bytes, way);
}

static fc_status move(fc_device *device, fc_stream *stream, fc_label label, const fc_move *given)
{
    work(stream, label);
    return simulated->move(device, stream, label, given);
}

static fc_status all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t part_bytes)
{
    work(stream, label);
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static fc_status reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                fc_label label, void *to, const void *from, size_t numel,
                                fc_dtype dtype)
{
    work(stream, label);
    return simulated->reduce_scatter(device, comm, stream, label, to, from, numel, dtype);
}

static fc_status all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    work(stream, label);
    return simulated->all_reduce(device, comm, stream, label, buffer, numel, dtype);
}

static fc_device_ops capturing_ops(void)
{
    fc_device_ops ops = *simulated;

    ops.alloc = alloc;
    ops.record = record;
    ops.wait = wait;
    ops.synchronize = synchronize;
    ops.moves_create = moves_create;
    ops.copy = copy;
    ops.move = move;
    ops.all_gather = all_gather;
    ops.reduce_scatter = reduce_scatter;
    ops.all_reduce = all_reduce;
    return ops;
}

static void begin_capture(void)
{
    now.is_on = now.is_captured[0] = true;
}

static void end_capture(void)
{
    int s;

    for (s = 1; s < STREAMS; s++) {
        if (now.is_captured[s] && now.seen[0][s] < now.seen[s][s]) {
            breach("unjoined", (fc_label){"a stream", "work"});
        }
        now.is_captured[s] = false;
    }
    now.is_on = now.is_captured[0] = false;
}

/* ---- steps ---- */

typedef struct kind {
    bool has_replicas, is_offloaded, keeps_slices;
    int n_micros; /* backwards; before the last one sums are held */
    uint64_t without;
} kind;

typedef struct world {
    fc_device *device;
    fc_schedule *schedule;
    fc_schedule_unit *units[UNITS];
    fc_param params[UNITS][1];
    fc_layout layouts[UNITS];
    void *shard, *grads, *out[UNITS];
    bool is_offloaded;
} world;

/* New ones on a device, as where somebody keeps those of the step before. */
static void *gradients(world *w, int unit)
{
    if (!w->is_offloaded) {
        MUST(fc_schedule_enter_reduce(w->schedule));
        w->device->ops->free(w->device, w->out[unit]);
        MUST(w->device->ops->alloc(w->device, now.streams[3], (fc_label){"unit", "gradients"},
                                   BYTES, &w->out[unit]));
    }
    return w->out[unit];
}

static void step(world *w, int n_micros)
{
    const void *full_grads[1] = {w->grads};
    void *full;
    int micro, i;

    for (micro = 1; micro <= n_micros; micro++) {
        fc_schedule_grads given = {.full = full_grads};
        bool is_last = micro == n_micros, is_reduced;

        given.sync = is_last ? FC_SYNC_ALL : FC_SYNC_SCATTER;
        MUST(fc_schedule_begin(w->schedule, now.streams[0], NULL));
        for (i = 0; i < UNITS; i++) {
            MUST(fc_schedule_pre_forward(w->units[i], &full));
            MUST(fc_schedule_post_forward(w->units[i]));
        }
        for (i = UNITS; i-- > 0;) {
            MUST(fc_schedule_pre_backward(w->units[i], &full));
            given.out = gradients(w, i);
            MUST(fc_schedule_post_backward(w->units[i], &given, &is_reduced));
        }
        MUST(fc_schedule_end_backward(w->schedule, is_last));
    }
}

static void make_unit(world *w, const kind *k, fc_device_comm *comm, int i)
{
    static const void *shards[1];
    fc_schedule_unit_options options = {.name = "unit",
                                        .layout = &w->layouts[i],
                                        .gather = comm,
                                        .reduce = comm,
                                        .replicas = k->has_replicas ? comm : NULL,
                                        .reshard_after_forward = true,
                                        .n_post_ranks = k->keeps_slices ? 1 : 0,
                                        .post_gather = comm,
                                        .is_offloaded = k->is_offloaded,
                                        .pre_divisor = 1,
                                        .divisor = 1};

    w->params[i][0] = (fc_param){
        .outer = 1, .rows = 4, .inner = 4, .has_grad = true, .trainable = true, .orig = FC_F32};
    MUST(fc_layout_init(&w->layouts[i], w->params[i], 1, 0, 1, false));
    MUST(fc_schedule_add(w->schedule, &options, &w->units[i]));
    shards[0] = w->shard;
    fc_schedule_set_shards(w->units[i], shards);
}

static void *memory(world *w, bool is_host)
{
    const fc_label label = {"world", "memory"};
    void *made = NULL;

    MUST(is_host ? fc_sim_host_alloc(w->device, label, BYTES, &made)
                 : simulated->alloc(w->device, now.streams[0], label, BYTES, &made));
    return made;
}

/* All that was given to the device is done. */
static void drain(fc_device *device)
{
    fc_event *event = NULL;
    int i;

    MUST(simulated->event_create(device, &event));
    for (i = 0; i < STREAMS; i++) {
        MUST(simulated->record(device, event, now.streams[i]));
        MUST(simulated->synchronize(device, event));
    }
    simulated->event_destroy(device, event);
}

/* What a captured step breaks, behind one that was not captured; empty: nothing. */
static const char *breach_of(kind k)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all-reduce"};
    fc_device_comm *comm = NULL;
    fc_device_ops ops;
    fc_sim *sim = NULL;
    world w = {0};
    int i;

    memset(&now, 0, sizeof(now));
    MUST(fc_sim_create(1, 1, &sim));
    w.device = fc_sim_device(sim, 0);
    simulated = w.device->ops;
    ops = capturing_ops();
    w.device->ops = &ops;
    for (i = 0; i < STREAMS; i++) {
        MUST(fc_sim_stream_create(sim, 0, names[i], &now.streams[i]));
    }
    MUST(fc_sim_comm_create(sim, "comm", (const int[]){0}, 1, &comm));
    MUST(fc_schedule_create(&(fc_schedule_options){w.device, now.streams[1], now.streams[2],
                                                   now.streams[3], now.streams[4], 1, 0, k.without},
                            &w.schedule));
    w.is_offloaded = k.is_offloaded;
    w.shard = memory(&w, k.is_offloaded);
    w.grads = memory(&w, false);
    for (i = 0; i < UNITS; i++) {
        make_unit(&w, &k, comm, i);
        w.out[i] = k.is_offloaded ? memory(&w, true) : NULL;
    }
    step(&w, k.n_micros);
    begin_capture();
    step(&w, k.n_micros);
    end_capture();
    step(&w, 1);
    drain(w.device);
    if (k.without == 0) {
        CHECK_MSG(fc_sim_faults(sim) == 0, "%s", fc_sim_fault(sim, 0));
    }
    fc_schedule_destroy(w.schedule);
    fc_sim_destroy(sim);
    return now.breach;
}

static void test_a_step_can_be_captured(void)
{
    CHECK_STR(breach_of((kind){.n_micros = 1}), "");
    CHECK_STR(breach_of((kind){.n_micros = 2}), "");
    CHECK_STR(breach_of((kind){.n_micros = 1, .keeps_slices = true}), "");
    CHECK_STR(breach_of((kind){.n_micros = 1, .has_replicas = true}), "");
    CHECK_STR(breach_of((kind){.n_micros = 3, .has_replicas = true}), "");
}

/* The host waits for offloaded gradients, as under torch. */
static void test_an_offloaded_step_cannot(void)
{
    CHECK_HAS(breach_of((kind){.n_micros = 1, .is_offloaded = true}), "the host waits");
}

/* Waits that bring streams into the capture, and back to compute. */
static void test_missing_waits_are_found(void)
{
    static const fc_schedule_wait needed[] = {FC_ORDER_OPTIMIZER, FC_ORDER_PACKED,
                                              FC_ORDER_STAGED,    FC_ORDER_SCATTERED,
                                              FC_ORDER_REDUCED,   FC_ORDER_ALL_REDUCED};
    size_t i;

    for (i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
        kind k = {.n_micros = 1, .without = UINT64_C(1) << needed[i]};

        k.has_replicas = needed[i] == FC_ORDER_SCATTERED || needed[i] == FC_ORDER_ALL_REDUCED;
        CHECK_MSG(breach_of(k)[0] != 0, "nobody misses %s", fc_schedule_wait_name(needed[i]));
    }
}

int main(void)
{
    test_a_step_can_be_captured();
    test_an_offloaded_step_cannot();
    test_missing_waits_are_found();
    return check_result();
}
