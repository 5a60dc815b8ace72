/* A step of the schedule while its stream is captured into a CUDA graph, with gathers of all kinds.
 */
#include "base/alloc.h"
#include "capture.h"
#include "engine/schedule.h"

#define MUST(call) CHECK_EQ(call, FC_OK)
#define UNITS 3
#define RANKS 2
#define BYTES 1024 /* of a shard, a gradient; more than they need */

typedef enum gather_kind {
    STAGED,
    DIRECT,      /* from the shards */
    DIRECT_CASTS /* of what is packed to its place */
} gather_kind;

typedef struct kind {
    gather_kind gathers;
    bool has_replicas, is_offloaded, keeps_slices;
    bool stays_unsharded; /* after backward, until the next forward gathers anew */
    int n_micros;         /* backwards; before the last one sums are held */
    int n_micros_before;  /* in the step before the captured one; 0: as many */
    bool is_alone;        /* one rank */
    bool is_resident;     /* and its shards are used where they lie */
    bool goes_straight;   /* staging would round no gradient */
    uint64_t without;
} kind;

/* What a rank runs. */
typedef struct world {
    kind kind;
    fc_device *device;
    fc_schedule *schedule;
    fc_schedule_unit *units[UNITS];
    fc_param params[UNITS][PARAMS];
    fc_layout layouts[UNITS];
    const void *shards[PARAMS];
    void *resident; /* what the shards lie in */
    void *grads, *out[UNITS];
} world;

/* What the ranks share. */
typedef struct scene {
    kind kind;
    fc_stream *streams[RANKS][STREAMS];
    fc_device_comm *comm, *replicas, *few[RANKS];
    char breach[RANKS][128];
} scene;

/* New ones on a device, as where somebody keeps those of the step before; of who finishes them. */
static void *gradients(world *w, int unit)
{
    fc_stream *stream = now.streams[w->kind.is_alone ? 0 : 3];

    if (!w->kind.is_offloaded) {
        if (!w->kind.is_alone) {
            MUST(fc_schedule_enter_reduce(w->schedule));
        }
        w->device->ops->free(w->device, w->out[unit]);
        MUST(w->device->ops->alloc(w->device, stream, (fc_label){"unit", "gradients", 0}, BYTES,
                                   &w->out[unit]));
    }
    return w->out[unit];
}

static void forward(world *w)
{
    void *full;
    int i;

    MUST(fc_schedule_begin(w->schedule, now.streams[0], NULL));
    for (i = 0; i < UNITS; i++) {
        if (w->kind.stays_unsharded) {
            fc_schedule_reshard(w->units[i]);
        }
        MUST(fc_schedule_pre_forward(w->units[i], &full));
        MUST(fc_schedule_post_forward(w->units[i]));
    }
}

static void backward(world *w, bool is_last)
{
    const void *full_grads[PARAMS] = {w->grads, w->grads};
    fc_schedule_grads given = {.full = full_grads,
                               .sync = is_last            ? FC_SYNC_ALL
                                       : w->kind.is_alone ? FC_SYNC_NONE
                                                          : FC_SYNC_SCATTER,
                               .keep_unsharded = w->kind.stays_unsharded};
    bool is_reduced;
    void *full;
    int i;

    for (i = UNITS; i-- > 0;) {
        MUST(fc_schedule_pre_backward(w->units[i], &full));
        given.out = gradients(w, i);
        MUST(fc_schedule_post_backward(w->units[i], &given, &is_reduced));
    }
    MUST(fc_schedule_end_backward(w->schedule, is_last));
}

static void step(world *w, int n_micros)
{
    int micro;

    for (micro = 1; micro <= n_micros; micro++) {
        forward(w);
        backward(w, micro == n_micros);
    }
}

static void make_unit(world *w, const scene *c, int rank, int i)
{
    const kind *k = &w->kind;
    fc_schedule_unit_options options = {.name = "unit",
                                        .layout = &w->layouts[i],
                                        .gather = c->comm,
                                        .reduce = c->comm,
                                        .replicas = k->has_replicas ? c->replicas : NULL,
                                        .reshard_after_forward = true,
                                        .n_post_ranks = k->keeps_slices ? 1 : 0,
                                        .post_gather = c->few[rank],
                                        .is_direct = k->gathers != STAGED,
                                        .is_offloaded = k->is_offloaded,
                                        .pre_divisor = 1,
                                        .divisor = 1};
    int j;

    for (j = 0; j < PARAMS; j++) {
        w->params[i][j] =
            (fc_param){.outer = 1,
                       .rows = 4,
                       .inner = 4,
                       .orig = FC_F32,
                       .compute = k->gathers == DIRECT_CASTS && j == 0 ? FC_BF16 : FC_F32,
                       .reduce = j == 0 || k->goes_straight ? FC_F32 : FC_BF16,
                       .has_grad = true,
                       .trainable = true};
    }
    MUST(
        fc_layout_init(&w->layouts[i], w->params[i], PARAMS, rank, k->is_alone ? 1 : RANKS, false));
    MUST(fc_schedule_add(w->schedule, &options, &w->units[i]));
    for (j = 0; j < PARAMS; j++) {
        w->shards[j] = (char *)w->resident + w->params[i][j].full_at;
    }
    fc_schedule_set_shards(w->units[i], w->shards);
    MUST(fc_schedule_set_resident(w->units[i], k->is_resident ? w->resident : NULL));
}

static void *memory(world *w, bool is_host)
{
    const fc_label label = {"world", "memory", 0};
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

static void make_world(world *w, const scene *c, int rank)
{
    int i;

    MUST(fc_schedule_create(&(fc_schedule_options){w->device, now.streams[1], now.streams[2],
                                                   now.streams[3], now.streams[4], 1, 0,
                                                   w->kind.without},
                            &w->schedule));
    w->resident = memory(w, w->kind.is_offloaded);
    w->grads = memory(w, false);
    for (i = 0; i < UNITS; i++) {
        make_unit(w, c, rank, i);
        w->out[i] = w->kind.is_offloaded ? memory(w, true) : NULL;
    }
}

/* A step that is captured, behind one that is not, and before another. */
static fc_status run_rank(fc_device *device, int rank, void *arg)
{
    const fc_device_ops ops = capturing_ops();
    scene *c = arg;
    world w = {.kind = c->kind, .device = device};

    memset(&now, 0, sizeof(now));
    memcpy(now.streams, c->streams[rank], sizeof(now.streams));
    device->ops = &ops;
    make_world(&w, c, rank);
    step(&w, w.kind.n_micros_before > 0 ? w.kind.n_micros_before : w.kind.n_micros);
    begin_capture();
    step(&w, w.kind.n_micros);
    end_capture();
    step(&w, 1);
    drain(device);
    memcpy(c->breach[rank], now.breach, sizeof(now.breach));
    now = (capture){.n_events = 0}; /* what the graph holds ends with it */
    fc_schedule_destroy(w.schedule);
    device->ops = simulated;
    return FC_OK;
}

static void make_scene(scene *c, fc_sim *sim, int n_ranks)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all-reduce"};
    int rank, i;

    MUST(fc_sim_comm_create(sim, "comm", (const int[]){0, 1}, n_ranks, &c->comm));
    MUST(fc_sim_comm_create(sim, "replicas", (const int[]){0, 1}, n_ranks, &c->replicas));
    for (rank = 0; rank < n_ranks; rank++) {
        MUST(fc_sim_comm_create(sim, "few", &rank, 1, &c->few[rank]));
        for (i = 0; i < STREAMS; i++) {
            MUST(fc_sim_stream_create(sim, rank, names[i], &c->streams[rank][i]));
        }
    }
}

/* What a captured step breaks; empty: nothing. */
static const char *breach_of(kind k)
{
    static scene c;
    int n_ranks = k.is_alone ? 1 : RANKS;
    fc_sim *sim = NULL;

    c = (scene){.kind = k};
    MUST(fc_sim_create(n_ranks, 1, &sim));
    simulated = fc_sim_device(sim, 0)->ops;
    make_scene(&c, sim, n_ranks);
    MUST(fc_sim_run(sim, run_rank, &c));
    if (k.without == 0) {
        CHECK_MSG(fc_sim_faults(sim) == 0, "%s", fc_sim_fault(sim, 0));
    }
    fc_sim_destroy(sim);
    CHECK_EQ(fc_alloc_live(), 0);
    CHECK_STR(c.breach[n_ranks - 1], c.breach[0]);
    return c.breach[0];
}

static void test_a_step_can_be_captured(gather_kind gathers)
{
    CHECK_STR(breach_of((kind){gathers, .n_micros = 1}), "");
    CHECK_STR(breach_of((kind){gathers, .n_micros = 2}), "");
    CHECK_STR(breach_of((kind){gathers, .n_micros = 1, .keeps_slices = true}), "");
    CHECK_STR(breach_of((kind){gathers, .n_micros = 1, .stays_unsharded = true}), "");
    CHECK_STR(breach_of((kind){gathers, .n_micros = 2, .stays_unsharded = true}), "");
    CHECK_STR(breach_of((kind){gathers, .n_micros = 1, .has_replicas = true}), "");
    CHECK_STR(breach_of((kind){gathers, .n_micros = 3, .has_replicas = true}), "");
}

/* Gradients are finished straight or staged, and held or not, after a step of the same kind or of
 * the other one. */
static void test_a_step_of_one_rank_can_be_captured(gather_kind gathers, bool is_resident)
{
    int i;

    for (i = 0; i < 8; i++) {
        kind k = {gathers, .n_micros = 1 + i % 2, .is_alone = true, .is_resident = is_resident};

        k.n_micros_before = i / 2 % 2 == 0 ? k.n_micros : 3 - k.n_micros;
        k.goes_straight = i / 4 == 0;
        CHECK_STR(breach_of(k), "");
    }
}

/* The host waits for offloaded gradients, as under torch. */
static void test_an_offloaded_step_cannot(gather_kind gathers)
{
    CHECK_HAS(breach_of((kind){gathers, .n_micros = 1, .is_offloaded = true}), "the host waits");
}

/* Waits that bring streams into the capture, and back to compute. */
static void test_missing_waits_are_found(gather_kind gathers)
{
    static const fc_schedule_wait needed[] = {
        FC_ORDER_OPTIMIZER, FC_ORDER_PACKED,  FC_ORDER_GATHERED,   FC_ORDER_STAGED,
        FC_ORDER_SCATTERED, FC_ORDER_REDUCED, FC_ORDER_ALL_REDUCED};
    size_t i;

    for (i = 0; i < sizeof(needed) / sizeof(needed[0]); i++) {
        kind k = {gathers, .n_micros = 1, .without = UINT64_C(1) << needed[i]};

        k.has_replicas = needed[i] == FC_ORDER_SCATTERED || needed[i] == FC_ORDER_ALL_REDUCED;
        CHECK_MSG(breach_of(k)[0] != 0, "nobody misses %s", fc_schedule_wait_name(needed[i]));
    }
}

int main(void)
{
    int gathers;

    for (gathers = STAGED; gathers <= DIRECT_CASTS; gathers++) {
        test_a_step_can_be_captured((gather_kind)gathers);
        test_a_step_of_one_rank_can_be_captured((gather_kind)gathers, false);
        test_an_offloaded_step_cannot((gather_kind)gathers);
        test_missing_waits_are_found((gather_kind)gathers);
    }
    test_a_step_of_one_rank_can_be_captured(STAGED, true);
    return check_result();
}
