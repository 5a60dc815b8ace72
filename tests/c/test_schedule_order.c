/* What the schedule gathers when, how much memory that takes, and what it refuses. */
#include "schedule_world.h"

static program the_program;

/* What was gathered, in order: the last letters of units' names. */
static char gathered[64];
static fc_device_ops tracing_ops;
static const fc_device_ops *real_ops;

static fc_status trace_all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                  fc_label what, void *buffer, size_t part_bytes)
{
    size_t at = strlen(gathered);

    gathered[at] = what.unit[strlen(what.unit) - 1];
    gathered[at + 1] = 0;
    return real_ops->all_gather(device, comm, stream, what, buffer, part_bytes);
}

static void mark(const char *what)
{
    (void)strncat(gathered, what, sizeof(gathered) - strlen(gathered) - 1);
}

/* Four units in a row, forward and backward; marks are where the next unit is entered. `again`: the
 * last one has a forward of its own in between, and backward asks twice for each. */
static const char *order_of(size_t max_gathers, const int lists[2][4], bool again)
{
    static const char *const names[4] = {"a", "b", "c", "d"};
    fc_param params[1] = {{.outer = 1, .rows = 2, .inner = 1, .has_grad = true, .trainable = true}};
    const int ranks[1] = {0};
    fc_schedule_unit *units[4];
    fc_schedule *schedule = NULL;
    fc_device_comm *comm = NULL;
    fc_layout layout;
    fc_sim *sim = NULL;
    fc_stream *s = NULL;
    void *full, *shard = NULL;
    const void *shards[1];
    fc_device *device;
    fc_event *event = NULL;
    int i, k;

    gathered[0] = 0;
    MUST(fc_sim_create(1, 1, &sim));
    device = fc_sim_device(sim, 0);
    real_ops = device->ops;
    tracing_ops = *real_ops;
    tracing_ops.all_gather = trace_all_gather;
    device->ops = &tracing_ops;
    MUST(fc_sim_comm_create(sim, "comm", ranks, 1, &comm));
    MUST(fc_sim_stream_create(sim, 0, "s", &s));
    MUST(fc_schedule_create(&(fc_schedule_options){device, s, s, s, s, 1, max_gathers, 0},
                            &schedule));
    MUST(fc_layout_init(&layout, params, 1, 0, 1, false));
    MUST(device->ops->alloc(device, s, (fc_label){"", "shard", 0}, 8, &shard));
    shards[0] = shard;
    for (i = 0; i < 4; i++) {
        MUST(fc_schedule_add(schedule,
                             &(fc_schedule_unit_options){.name = names[i],
                                                         .layout = &layout,
                                                         .gather = comm,
                                                         .reduce = comm,
                                                         .reshard_after_forward = true,
                                                         .pre_divisor = 1,
                                                         .divisor = 1},
                             &units[i]));
        fc_schedule_set_shards(units[i], shards);
    }
    for (i = 0; i < 4; i++) { /* each takes the next so many in its direction */
        fc_schedule_unit *list[2][4];

        for (k = 0; k < 4; k++) {
            list[0][k] = units[(i + 1 + k) % 4];
            list[1][k] = units[(i + 3 - k) % 4];
        }
        for (k = 0; k < 2; k++) {
            if (lists[k][i] >= 0) {
                MUST(fc_schedule_set_prefetch(units[i], k == 1, list[k], (size_t)lists[k][i]));
            }
        }
    }
    MUST(fc_schedule_begin(schedule, s, NULL));
    for (i = 0; i < 4; i++) {
        MUST(fc_schedule_pre_forward(units[i], &full));
        MUST(fc_schedule_post_forward(units[i]));
        mark(" ");
    }
    mark("| ");
    if (again) {
        MUST(fc_schedule_pre_forward(units[3], &full));
        MUST(fc_schedule_post_forward(units[3]));
        mark(" | ");
    }
    for (i = 3; i >= 0; i--) {
        bool is_reduced;

        MUST(fc_schedule_pre_backward(units[i], &full));
        if (again) {
            MUST(fc_schedule_pre_backward(units[i], &full));
        }
        MUST(fc_schedule_post_backward(units[i], &(fc_schedule_grads){.sync = FC_SYNC_ALL},
                                       &is_reduced));
        mark(" ");
    }
    MUST(fc_schedule_end_backward(schedule, true));
    MUST(device->ops->event_create(device, &event));
    MUST(device->ops->record(device, event, s));
    MUST(device->ops->synchronize(device, event));
    device->ops->event_destroy(device, event);
    fc_schedule_destroy(schedule);
    CHECK_EQ(fc_sim_faults(sim), 0);
    fc_sim_destroy(sim);
    return gathered;
}

static void test_prefetch_order(void)
{
    static const int none[2][4] = {{-1, -1, -1, -1}, {-1, -1, -1, -1}};
    static const int forward_one[2][4] = {{1, 1, 1, 0}, {-1, -1, -1, -1}};
    static const int two[2][4] = {{2, 2, 1, 0}, {0, 1, 2, 2}};
    static const int empty[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};

    CHECK_STR(order_of(0, none, false), "a b c d | dc b a  ");
    CHECK_STR(order_of(0, forward_one, false), "ab c d  | dc b a  ");
    CHECK_STR(order_of(0, two, false), "abc d   | dcb a   ");
    CHECK_STR(order_of(1, two, false), "ab c d  | dc b a  ");
    CHECK_STR(order_of(0, empty, false), "a b c d | dc b a  ");
    CHECK_STR(order_of(0, none, true), "a b c d | d | d cb a  ");
}

/* Equal units one after the other, on two ranks. */
static program *make_row(int n_units)
{
    program *p = &the_program;
    int i;

    memset(p, 0, sizeof(*p));
    p->fail_at = -1;
    p->n_shards = 2;
    p->n_replicas = 1;
    p->n_few = 1;
    p->n_units = n_units;
    p->n_steps = 1;
    p->steps[0].n_micros = 1;
    p->steps[0].micros[0] = (micro_model){.n_calls = n_units, .sync = FC_SYNC_ALL, .is_last = true};
    for (i = 0; i < n_units; i++) {
        unit_model *u = &p->units[i];

        (void)snprintf(u->name, sizeof(u->name), "unit%d", i);
        u->n_params = 1;
        u->reshard = RESHARD_TO_ALL;
        u->pre_divisor = u->divisor = 1;
        u->params[0] = (fc_param){.outer = 1,
                                  .rows = 8,
                                  .inner = 8,
                                  .compute = FC_F32,
                                  .reduce = FC_F32,
                                  .grad = FC_F32,
                                  .orig = FC_F32,
                                  .has_grad = true,
                                  .trainable = true};
        p->steps[0].micros[0].calls[i] = i;
        p->steps[0].micros[0].is_used[i] = true;
    }
    return p;
}

/* ---- direct gathers ---- */

static _Atomic int n_packs, n_copy_outs, n_direct;

static fc_status count_move(fc_device *device, fc_stream *stream, fc_label what,
                            const fc_move *move)
{
    n_packs += strcmp(what.what, "pack") == 0;
    n_copy_outs += strcmp(what.what, "copy-out") == 0;
    return real_ops->move(device, stream, what, move);
}

static fc_status count_gathers(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                               fc_label what, const fc_gather *gathers, size_t n_gathers)
{
    n_direct++;
    return real_ops->all_gather_each(device, comm, stream, what, gathers, n_gathers);
}

static fc_status count_calls(fc_device *simulated, fc_device **out)
{
    real_ops = simulated->ops == &tracing_ops ? real_ops : simulated->ops;
    tracing_ops = *real_ops;
    tracing_ops.move = count_move;
    tracing_ops.all_gather_each = count_gathers;
    simulated->ops = &tracing_ops;
    *out = simulated;
    return FC_OK;
}

static void leave_device(fc_device *device)
{
    (void)device;
}

/* Three units, of which the first stays unsharded: five gathers on each of two ranks. */
static void test_direct_gathers_need_no_kernels(fc_dtype compute, bool is_offloaded, int packs)
{
    char first[512];
    program *p = make_row(3);

    p->wrap = count_calls;
    p->unwrap = leave_device;
    for (int i = 0; i < 3; i++) {
        p->units[i].is_direct = true;
        p->units[i].is_offloaded = is_offloaded;
        p->units[i].params[0].compute = compute;
    }
    p->units[0].reshard = RESHARD_NEVER;
    n_packs = n_copy_outs = n_direct = 0;
    (void)run(p, 1, first, sizeof(first));
    CHECK_EQ(n_direct, 10);
    CHECK_EQ(n_packs, packs);
    CHECK_EQ(n_copy_outs, 0);
}

/* What there is at once does not grow with the number of units. */
static size_t peak_of(int n_units, size_t n_inputs, bool is_direct)
{
    char first[512];
    program *p = make_row(n_units);

    for (int i = 0; i < n_units; i++) {
        p->units[i].is_direct = is_direct;
    }
    p->n_reduce_inputs = n_inputs;
    (void)run(p, 1, first, sizeof(first));
    /* Reduced gradients are the user's. */
    return p->peak_bytes[0] - (size_t)n_units * 8 * 8 * sizeof(float) / 2;
}

static void test_memory_is_flat_in_depth(bool is_direct)
{
    const size_t gather = 8 * 8 * sizeof(float), full = FC_PAGE;
    const size_t slots = 2 * (is_direct ? full : gather);

    CHECK_EQ(peak_of(5, 1, is_direct), peak_of(4, 1, is_direct));
    CHECK_EQ(peak_of(5, 2, is_direct), peak_of(4, 2, is_direct));
    CHECK(peak_of(5, 2, is_direct) > peak_of(5, 1, is_direct)); /* another reduce input */
    /* The root and one more are unsharded; two gather slots, a reduce input, a gradient, and an
     * output of half of it. */
    CHECK(peak_of(5, 1, is_direct) <= 2 * full + slots + gather + gather + gather / 2);
}

/* How many of the seeds end in a deadlock. */
static int deadlocks(bool shares_comm, int n_at_once)
{
    char first[512];
    int seed, n = 0;

    for (seed = 0; seed < 100; seed++) {
        program *p = make_row(5);

        p->may_fail = true;
        p->shares_comm = shares_comm;
        p->n_at_once = n_at_once;
        if (run(p, (uint64_t)seed, first, sizeof(first)) > 0) {
            CHECK_HAS(first, "deadlock; rank 0, stream '");
            n++;
        }
    }
    return n;
}

/* Gathers and reductions in communicators of their own come in any order on a device: it needs room
 * for both. In one communicator they come in the order of the calls. */
static void test_collectives_need_room(void)
{
    CHECK_EQ(deadlocks(true, 1), 0);
    CHECK(deadlocks(false, 1) > 0);
    CHECK_EQ(deadlocks(false, 2), 0);
}

/* Ranks that call units in different orders are told which. */
static void test_ranks_that_disagree(void)
{
    char first[512];
    program *p = make_row(3);

    p->may_fail = true;
    p->turns_around = true;
    CHECK(run(p, 1, first, sizeof(first)) > 0);
    CHECK_HAS(first, "collective 1 of 'gathers': rank ");
    CHECK_HAS(first, "calls all-gather ('all-gather' of 'unit1', 128 bytes)");
    CHECK_HAS(first, "calls all-gather ('all-gather' of 'unit2', 128 bytes)");
}

/* ---- gathers that read a kept slice ---- */

typedef struct slice_world {
    fc_sim *sim;
    fc_device *device;
    fc_schedule *schedule;
    fc_schedule_unit *unit;
    fc_stream *compute;
    fc_layout layout;
    fc_param param;
    const void *shards[1];
} slice_world;

/* A unit that reshards to itself alone, in a forward that has ended, and gathers its slice. */
static void begin_gather_of_slice(slice_world *w)
{
    const int ranks[1] = {0};
    fc_schedule_unit_options options = {.name = "layer",
                                        .layout = &w->layout,
                                        .reshard_after_forward = true,
                                        .n_post_ranks = 1,
                                        .pre_divisor = 1,
                                        .divisor = 1};
    fc_stream *copy_in = NULL, *gather = NULL;
    void *shard = NULL, *full;

    *w = (slice_world){
        .param = {.outer = 1, .rows = 2, .inner = 1, .has_grad = true, .trainable = true}};
    MUST(fc_sim_create(1, 1, &w->sim));
    w->device = fc_sim_device(w->sim, 0);
    MUST(fc_sim_stream_create(w->sim, 0, "compute", &w->compute));
    MUST(fc_sim_stream_create(w->sim, 0, "copy-in", &copy_in));
    MUST(fc_sim_stream_create(w->sim, 0, "gather", &gather));
    MUST(fc_sim_comm_create(w->sim, "comm", ranks, 1, &options.gather));
    options.reduce = options.post_gather = options.gather;
    MUST(fc_schedule_create(
        &(fc_schedule_options){w->device, copy_in, gather, w->compute, w->compute, 1, 0, 0},
        &w->schedule));
    MUST(fc_layout_init(&w->layout, &w->param, 1, 0, 1, false));
    MUST(w->device->ops->alloc(w->device, w->compute, (fc_label){"layer", "shard", 0}, 8, &shard));
    w->shards[0] = shard;
    MUST(fc_schedule_add(w->schedule, &options, &w->unit));
    fc_schedule_set_shards(w->unit, w->shards);
    MUST(fc_schedule_begin(w->schedule, w->compute, NULL));
    MUST(fc_schedule_pre_forward(w->unit, &full));
    MUST(fc_schedule_post_forward(w->unit));
    MUST(fc_schedule_start(w->unit));
}

static void end(slice_world *w)
{
    fc_event *event = NULL;

    MUST(fc_schedule_end_forward(w->schedule));
    MUST(w->device->ops->event_create(w->device, &event));
    MUST(w->device->ops->record(w->device, event, w->compute));
    MUST(w->device->ops->synchronize(w->device, event));
    w->device->ops->event_destroy(w->device, event);
    fc_schedule_destroy(w->schedule);
    CHECK_MSG(fc_sim_faults(w->sim) == 0, "%s", fc_sim_fault(w->sim, 0));
    fc_sim_destroy(w->sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A unit may leave while its slice is read, and an iteration may begin. */
static void test_slices_are_freed_behind_their_gather(void)
{
    slice_world w;
    void *full;

    begin_gather_of_slice(&w);
    fc_schedule_remove(w.unit);
    end(&w);
    begin_gather_of_slice(&w);
    MUST(fc_schedule_begin(w.schedule, w.compute, NULL));
    MUST(fc_schedule_pre_forward(w.unit, &full));
    end(&w);
}

static void test_mistakes_are_named(void)
{
    fc_param params[1] = {
        {.outer = 1, .rows = 2, .inner = 1, .reduce = FC_F32, .has_grad = true, .trainable = true}};
    fc_stream *s = NULL, *t = NULL;
    fc_schedule *schedule = NULL;
    fc_schedule_unit *unit = NULL, *other = NULL;
    const fc_schedule_grads grads = {.sync = FC_SYNC_ALL};
    fc_schedule_unit_options options = {.name = "layer", .pre_divisor = 1, .divisor = 1};
    fc_layout layout;
    fc_sim *sim = NULL;
    bool is_reduced;
    const void *shard = NULL;
    void *full = NULL;

    MUST(fc_sim_create(1, 1, &sim));
    MUST(fc_sim_stream_create(sim, 0, "s", &s));
    MUST(fc_sim_stream_create(sim, 0, "t", &t));
    MUST(fc_schedule_create(&(fc_schedule_options){fc_sim_device(sim, 0), s, s, s, s, 1, 0, 0},
                            &schedule));
    MUST(fc_layout_init(&layout, params, 1, 0, 1, true));
    options.layout = &layout;
    CHECK_EQ(fc_schedule_add(schedule, &options, &unit), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "unit 'layer': parameter 0 is aliased");
    MUST(fc_layout_init(&layout, params, 1, 0, 1, false));
    MUST(fc_schedule_add(schedule, &options, &unit));
    CHECK_EQ(fc_schedule_unshard(unit, &full), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': unshard without shards before the iteration");
    CHECK_EQ(fc_schedule_start(unit), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': gather without shards before the iteration");
    fc_schedule_set_shards(unit, &shard); /* each of the two alone is not enough */
    CHECK_EQ(fc_schedule_unshard(unit, &full), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': unshard before the iteration");
    CHECK_EQ(fc_schedule_start(unit), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': gather before the iteration");
    fc_schedule_set_shards(unit, NULL);
    CHECK_EQ(fc_schedule_post_forward(unit), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': post_forward before the iteration");
    CHECK_EQ(fc_schedule_post_backward(unit, &grads, &is_reduced), FC_ERR_STATE);
    CHECK_EQ(fc_schedule_end_backward(schedule, true), FC_ERR_STATE);
    MUST(fc_schedule_reset(schedule));
    MUST(fc_schedule_begin(schedule, s, NULL));
    CHECK_EQ(fc_schedule_unshard(unit, &full), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': unshard without shards while it is sharded");
    CHECK_EQ(fc_schedule_start(unit), FC_ERR_STATE);
    CHECK_EQ(fc_schedule_post_forward(unit), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "unit 'layer': post_forward while it is sharded");
    MUST(fc_schedule_post_backward(unit, &grads, &is_reduced));
    CHECK(!is_reduced);
    MUST(fc_schedule_begin(schedule, t, NULL)); /* nothing is left on the other stream */
    MUST(fc_schedule_set_prefetch(unit, false, &unit, 1));
    MUST(fc_schedule_set_prefetch(unit, false, NULL, 0));
    for (int64_t n = 0; n < 64; n++) {
        fc_alloc_fail_after(n);
        if (fc_schedule_add(schedule, &options, &other) == FC_OK) {
            break;
        }
        CHECK(other == NULL);
    }
    fc_alloc_fail_after(-1);
    CHECK(other != NULL);
    fc_schedule_destroy(schedule);
    fc_schedule_destroy(NULL);
    CHECK_EQ(fc_sim_faults(sim), 0);
    fc_sim_destroy(sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_prefetch_order();
    test_direct_gathers_need_no_kernels(FC_F32, false, 0);
    test_direct_gathers_need_no_kernels(FC_BF16, false, 10);
    test_direct_gathers_need_no_kernels(FC_F32, true, 10);
    test_memory_is_flat_in_depth(false);
    test_memory_is_flat_in_depth(true);
    test_collectives_need_room();
    test_ranks_that_disagree();
    test_slices_are_freed_behind_their_gather();
    test_mistakes_are_named();
    return check_result();
}
