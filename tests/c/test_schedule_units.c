/* Units of a schedule: how they are made and leave, what memory they take and when, and gradients
 * that are held. One rank of two; its peer is played by nobody.
 */
#include "base/alloc.h"
#include "check.h"
#include "device/sim/sim.h"
#include "engine/schedule.h"

#include <stdbool.h>
#include <string.h>

#define MUST(call) CHECK_EQ(call, FC_OK)
#define UNITS 5
#define PARAMS 2
#define STREAMS 6 /* compute first; the last one is another one to compute in */

/* What the device was asked for since the last time. */
typedef struct calls {
    int events, allocs, frees, moves;
    size_t planned; /* elements of all plans */
    char gathered[32];
} calls;

static calls now;
static const fc_device_ops *simulated;

static fc_status count_event(fc_device *device, fc_event **out)
{
    now.events++;
    return simulated->event_create(device, out);
}

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

static fc_status count_plan(fc_device *device, fc_runs *plan, fc_moves **out)
{
    for (size_t i = 0; i < plan->n_runs; i++) {
        now.planned += (size_t)plan->runs[i].n_lines * plan->runs[i].line_numel;
    }
    return simulated->moves_create(device, plan, out);
}

static fc_status count_move(fc_device *device, fc_stream *stream, fc_label label,
                            const fc_move *move)
{
    now.moves++;
    return simulated->move(device, stream, label, move);
}

static fc_status note_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                             fc_label label, void *buffer, size_t part_bytes)
{
    (void)strncat(now.gathered, label.unit, sizeof(now.gathered) - strlen(now.gathered) - 1);
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static calls take(void)
{
    calls taken = now;

    now = (calls){0};
    return taken;
}

/* ---- a rank and its units ---- */

typedef struct kind {
    bool is_direct, has_replicas, has_slices;
    fc_dtype types[PARAMS]; /* in which they compute; shards are FC_F32 */
    double pre_divisor;     /* 0: 1 */
    int n_ranks;            /* 0: 2 */
} kind;

typedef struct world {
    fc_sim *sim;
    fc_device *device;
    fc_device_ops counting;
    fc_stream *streams[STREAMS];
    fc_device_comm *comm;
    fc_schedule *schedule;
    fc_schedule_unit *units[UNITS];
    fc_param params[UNITS][PARAMS];
    fc_layout layouts[UNITS];
    fc_schedule_unit_options options;
    const void *shards[PARAMS], *grads[PARAMS + 1];
    void *out;
    size_t rest_bytes;
} world;

static void *memory(world *w)
{
    const fc_label label = {"world", "memory", 0};
    void *made = NULL;

    MUST(simulated->alloc(w->device, w->streams[0], label, 4096, &made));
    return made;
}

/* Of so many rows. */
static void lay_out(world *w, const kind *k, int i, size_t rows)
{
    for (int j = 0; j < PARAMS; j++) {
        w->params[i][j] = (fc_param){.outer = 1,
                                     .rows = rows,
                                     .inner = 16,
                                     .compute = k->types[j],
                                     .has_grad = true,
                                     .trainable = true};
    }
    MUST(fc_layout_init(&w->layouts[i], w->params[i], PARAMS, 0, k->n_ranks == 0 ? 2 : k->n_ranks,
                        false));
}

static void make_world(world *w, const kind *k)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all", "other"};
    const int ranks[1] = {0};

    *w = (world){.sim = NULL};
    MUST(fc_sim_create(1, 1, &w->sim));
    w->device = fc_sim_device(w->sim, 0);
    simulated = w->device->ops;
    w->counting = *simulated;
    w->counting.event_create = count_event;
    w->counting.alloc = count_alloc;
    w->counting.free = count_free;
    w->counting.moves_create = count_plan;
    w->counting.move = count_move;
    w->counting.all_gather = note_gather;
    w->device->ops = &w->counting;
    for (int i = 0; i < STREAMS; i++) {
        MUST(fc_sim_stream_create(w->sim, 0, names[i], &w->streams[i]));
    }
    MUST(fc_sim_comm_create(w->sim, "comm", ranks, 1, &w->comm));
    MUST(fc_schedule_create(&(fc_schedule_options){w->device, w->streams[1], w->streams[2],
                                                   w->streams[3], w->streams[4], 1, 0, 0},
                            &w->schedule));
    w->options = (fc_schedule_unit_options){.gather = w->comm,
                                            .reduce = w->comm,
                                            .replicas = k->has_replicas ? w->comm : NULL,
                                            .reshard_after_forward = true,
                                            .n_post_ranks = k->has_slices,
                                            .post_gather = w->comm,
                                            .is_direct = k->is_direct,
                                            .pre_divisor = k->pre_divisor == 0 ? 1 : k->pre_divisor,
                                            .divisor = 1};
    for (int j = 0; j < PARAMS; j++) {
        w->shards[j] = memory(w);
        w->grads[j] = memory(w);
    }
    w->out = memory(w);
    for (int i = 0; i < UNITS; i++) {
        lay_out(w, k, i, i == UNITS - 1 ? 32 : 16); /* the last one is larger */
        w->options.name = (const char *const[]){"a", "b", "c", "d", "e"}[i];
        w->options.layout = &w->layouts[i];
        MUST(fc_schedule_add(w->schedule, &w->options, &w->units[i]));
        fc_schedule_set_shards(w->units[i], w->shards);
    }
    w->rest_bytes = fc_sim_bytes(w->device);
    (void)take();
}

static void await_all(world *w)
{
    fc_event *event = NULL;

    MUST(simulated->event_create(w->device, &event));
    for (int i = 0; i < STREAMS; i++) {
        MUST(simulated->record(w->device, event, w->streams[i]));
        MUST(simulated->synchronize(w->device, event));
    }
    simulated->event_destroy(w->device, event);
}

static void unmake(world *w)
{
    await_all(w);
    fc_schedule_destroy(w->schedule);
    CHECK_EQ(fc_sim_bytes(w->device), w->rest_bytes);
    CHECK_MSG(fc_sim_faults(w->sim) == 0, "%s", fc_sim_fault(w->sim, 0));
    fc_sim_destroy(w->sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void begin(world *w)
{
    MUST(fc_schedule_begin(w->schedule, w->streams[0], NULL));
}

static void end(world *w)
{
    MUST(fc_schedule_end_backward(w->schedule, true));
}

static void unshard(world *w, int unit)
{
    void *full = NULL;

    MUST(fc_schedule_unshard(w->units[unit], &full));
    CHECK(full != NULL);
}

/* True if something was reduced. */
static bool post(world *w, int unit, const void *const *full, fc_schedule_sync sync)
{
    bool is_reduced = true;

    MUST(fc_schedule_post_backward(w->units[unit],
                                   &(fc_schedule_grads){.full = full, .out = w->out, .sync = sync},
                                   &is_reduced));
    return is_reduced;
}

static const kind staged = {.is_direct = false}, direct = {.is_direct = true},
                  replicated = {.has_replicas = true},
                  sliced = {.has_slices = true, .types = {FC_F32, FC_BF16}},
                  direct_casts = {.is_direct = true, .types = {FC_F32, FC_BF16}};

/* ---- set-up ---- */

/* Whichever request for memory fails, there is no unit; or it is as if none had. */
static void test_a_unit_is_made_or_not(const kind *k, size_t planned)
{
    fc_schedule_unit *unit = NULL;
    int64_t live, n;
    world w;

    make_world(&w, k);
    w.options.name = "unit";
    w.options.layout = &w.layouts[0];
    live = fc_alloc_live();
    MUST(fc_schedule_add(w.schedule, &w.options, &unit));
    CHECK_EQ(take().planned, planned);
    live = fc_alloc_live() - live;
    for (n = 0; n < 200; n++) {
        fc_status st;

        unit = NULL;
        (void)take();
        fc_alloc_fail_after(n);
        st = fc_schedule_add(w.schedule, &w.options, &unit);
        if (st == FC_OK) {
            break;
        }
        CHECK(st == FC_ERR_NOMEM && unit == NULL);
    }
    fc_alloc_fail_after(-1);
    CHECK(n >= live && n < 200);
    CHECK_EQ(take().planned, planned);
    unmake(&w);
}

static void test_aliased_parameters_are_refused(void)
{
    world w;
    fc_schedule_unit *unit = NULL;

    make_world(&w, &staged);
    w.params[0][0].compute = FC_BF16;
    MUST(fc_layout_init(&w.layouts[0], w.params[0], PARAMS, 0, 2, true));
    w.options.layout = &w.layouts[0];
    w.options.name = "unit";
    CHECK_EQ(fc_schedule_add(w.schedule, &w.options, &unit), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), "unit 'unit': parameter 1 is aliased");
    unmake(&w);
}

/* What is unsharded, kept or held as a schedule ends goes with it. */
static void test_a_schedule_takes_its_memory_along(const kind *k)
{
    world w;

    make_world(&w, k);
    begin(&w);
    for (int i = 0; i < 3; i++) {
        unshard(&w, i);
    }
    MUST(fc_schedule_post_forward(w.units[1]));
    MUST(fc_schedule_post_forward(w.units[2]));
    MUST(fc_schedule_start(w.units[2]));
    (void)post(&w, 3, w.grads, FC_SYNC_NONE);
    (void)post(&w, 4, w.grads, FC_SYNC_SCATTER);
    unmake(&w);
}

/* ---- units that leave ---- */

/* Nobody prefetches it any more, and what it had is free at the end of the iteration. */
static void test_a_unit_leaves(const kind *k)
{
    world w;

    make_world(&w, k);
    fc_schedule_remove(NULL);
    begin(&w);
    unshard(&w, 0);
    unshard(&w, 1);
    MUST(fc_schedule_post_forward(w.units[1]));
    MUST(fc_schedule_start(w.units[1]));
    (void)post(&w, 2, w.grads, FC_SYNC_NONE);
    (void)post(&w, 3, w.grads, FC_SYNC_SCATTER);
    for (int i = 0; i < 4; i++) {
        fc_schedule_remove(w.units[i]);
    }
    CHECK(!post(&w, 4, w.grads, FC_SYNC_NONE));
    CHECK(post(&w, 4, NULL, FC_SYNC_ALL));
    end(&w);
    CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
    unmake(&w);
}

static void test_nobody_prefetches_who_left(void)
{
    world w;
    void *full;

    make_world(&w, &staged);
    MUST(fc_schedule_set_prefetch(w.units[0], false,
                                  (fc_schedule_unit *const[]){w.units[2], w.units[1]}, 2));
    MUST(fc_schedule_set_prefetch(w.units[0], true,
                                  (fc_schedule_unit *const[]){w.units[1], w.units[2]}, 2));
    begin(&w);
    unshard(&w, 3);
    MUST(fc_schedule_post_forward(w.units[3]));
    unshard(&w, 4);
    MUST(fc_schedule_post_forward(w.units[4]));
    fc_schedule_remove(w.units[1]);
    (void)take();
    MUST(fc_schedule_pre_forward(w.units[0], &full));
    CHECK_STR(take().gathered, "ac");
    unshard(&w, 2);
    MUST(fc_schedule_post_forward(w.units[2]));
    MUST(fc_schedule_post_forward(w.units[0]));
    MUST(fc_schedule_pre_backward(w.units[0], &full));
    CHECK_STR(take().gathered, "ac");
    unshard(&w, 2);
    fc_schedule_reshard(w.units[2]);
    /* The forwards of before are forgotten, too: nothing comes before this one. */
    MUST(fc_schedule_pre_backward(w.units[2], &full));
    MUST(fc_schedule_pre_backward(w.units[3], &full));
    CHECK_STR(take().gathered, "cd");
    end(&w);
    unmake(&w);
}

/* ---- slots ---- */

static void check_made(int events, int allocs, int frees)
{
    const calls c = take();

    CHECK_EQ(c.events, events);
    CHECK_EQ(c.allocs, allocs);
    CHECK_EQ(c.frees, frees);
}

/* Two of them take turns. Their memory is free at the end of an iteration, and they stay. */
static void test_slots_are_used_again(void)
{
    world w;

    make_world(&w, &staged);
    begin(&w);
    MUST(fc_schedule_start(w.units[0]));
    check_made(1, 1, 0);
    MUST(fc_schedule_start(w.units[1]));
    check_made(1, 1, 0);
    unshard(&w, 0);
    check_made(0, 1, 0);
    MUST(fc_schedule_start(w.units[2])); /* in the place of the first one */
    check_made(0, 0, 0);
    unshard(&w, 1);
    unshard(&w, 2);
    check_made(0, 2, 0);
    MUST(fc_schedule_start(w.units[4])); /* larger; in the place of the second one */
    check_made(0, 1, 1);
    unshard(&w, 4);
    fc_schedule_reshard(w.units[0]);
    fc_schedule_reshard(w.units[4]);
    check_made(0, 1, 2);
    MUST(fc_schedule_start(w.units[0])); /* the third one's, whose use is longest ago */
    check_made(0, 0, 0);
    MUST(fc_schedule_start(w.units[4]));
    check_made(0, 0, 0);
    end(&w);
    check_made(0, 0, 2);
    begin(&w);
    MUST(fc_schedule_start(w.units[0]));
    MUST(fc_schedule_start(w.units[3]));
    check_made(0, 2, 0);
    end(&w);
    unmake(&w);
}

/* Those that are unsharded buffers leave their place to others. */
static void test_kept_slots_do_not_count(void)
{
    world w;

    make_world(&w, &direct);
    begin(&w);
    for (int i = 0; i < 3; i++) {
        unshard(&w, i);
        check_made(1, 1, 0);
    }
    fc_schedule_reshard(w.units[0]);
    check_made(0, 0, 0);
    MUST(fc_schedule_start(w.units[3])); /* a spare one: nobody waits for a use of the first */
    check_made(1, 1, 0);
    MUST(fc_schedule_start(w.units[0]));
    check_made(0, 0, 0);
    for (int i = 0; i < 4; i++) {
        fc_schedule_reshard(w.units[i]);
    }
    end(&w);
    check_made(0, 0, 4);
    unmake(&w);
}

/* One that got no memory is still there for the next gather. */
static void test_a_slot_without_memory(void)
{
    world w;

    make_world(&w, &staged);
    begin(&w);
    fc_sim_fail_alloc(w.device, 0);
    CHECK_EQ(fc_schedule_start(w.units[0]), FC_ERR_NOMEM);
    fc_sim_fail_alloc(w.device, -1);
    check_made(1, 1, 0);
    MUST(fc_schedule_start(w.units[0]));
    check_made(1, 1, 0);
    MUST(fc_schedule_start(w.units[1]));
    check_made(0, 1, 0);
    end(&w);
    unmake(&w);
}

/* Between the end of an iteration and the next one compute may be another stream; not before. */
static void test_compute_stays_where_it_is(const kind *k, bool may_go)
{
    world w;
    fc_status st;

    make_world(&w, k);
    begin(&w);
    unshard(&w, 0);
    fc_schedule_reshard(w.units[0]);
    end(&w);
    await_all(&w);
    MUST(fc_schedule_begin(w.schedule, w.streams[5], NULL));
    unshard(&w, 0);
    if (may_go) { /* an unsharded buffer, of a direct gather: the caller's, whatever comes */
        await_all(&w);
    }
    st = fc_schedule_begin(w.schedule, w.streams[0], NULL);
    CHECK_EQ(st, may_go ? FC_OK : FC_ERR_STATE);
    if (!may_go) {
        CHECK_STR(fc_last_message(),
                  "an iteration begins on another stream than the one before it, whose last "
                  "backward has not ended");
        MUST(fc_schedule_begin(w.schedule, w.streams[5], NULL));
    }
    fc_schedule_reshard(w.units[0]);
    end(&w);
    unmake(&w);
}

/* Nor while gradients are held. */
static void test_compute_stays_with_held_gradients(fc_schedule_sync sync)
{
    world w;

    make_world(&w, &replicated);
    begin(&w);
    (void)post(&w, 0, w.grads, sync);
    CHECK_EQ(fc_schedule_begin(w.schedule, w.streams[5], NULL), FC_ERR_STATE);
    CHECK_EQ(fc_schedule_read_shards(w.schedule, w.streams[5]), FC_ERR_STATE);
    CHECK(post(&w, 0, NULL, FC_SYNC_ALL));
    end(&w);
    MUST(fc_schedule_begin(w.schedule, w.streams[5], NULL));
    end(&w);
    unmake(&w);
}

/* ---- gradients ---- */

/* Of parameters that take part; whatever lies behind them. */
static void test_some_gradient_is_needed(bool is_alone)
{
    const kind k = {.n_ranks = is_alone ? 1 : 2};
    const void *full[PARAMS + 1] = {NULL};
    world w;

    make_world(&w, &k);
    begin(&w);
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    full[PARAMS] = w.grads[0]; /* nobody's */
    CHECK(!post(&w, 0, full, FC_SYNC_ALL));
    full[1] = w.grads[0];
    CHECK(post(&w, 0, full, FC_SYNC_ALL));
    w.params[0][1].trainable = false;
    CHECK(!post(&w, 0, full, FC_SYNC_ALL));
    w.params[0][1].trainable = true;
    w.params[0][1].has_grad = false;
    CHECK(!post(&w, 0, full, FC_SYNC_ALL));
    w.params[0][1].has_grad = true;
    end(&w);
    unmake(&w);
}

/* What is dropped is not reduced later, and its memory is free. */
static void test_held_gradients_are_dropped(void)
{
    world w;

    make_world(&w, &replicated);
    begin(&w);
    CHECK(!post(&w, 0, w.grads, FC_SYNC_NONE));
    fc_schedule_drop_partial_sum(w.units[0]); /* there is none */
    CHECK(post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_NONE));
    fc_schedule_drop_gradients(w.units[0]);
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
    CHECK(!post(&w, 0, NULL, FC_SYNC_SCATTER)); /* it is held still */
    CHECK(post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
    fc_schedule_drop_partial_sum(w.units[0]);
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_NONE));
    fc_schedule_drop_gradients(w.units[0]); /* both */
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 1, w.grads, FC_SYNC_SCATTER));
    fc_schedule_move_partial_sum(w.units[1], w.units[2]);
    CHECK(!post(&w, 1, NULL, FC_SYNC_ALL));
    CHECK(post(&w, 2, NULL, FC_SYNC_ALL));
    end(&w);
    CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
    unmake(&w);
}

/* What the caller gives stands for the unit's own divisor, 1 too, which staging is in vain for. */
static void test_the_given_divisor_counts(void)
{
    const kind k = {.n_ranks = 1, .pre_divisor = 2};
    fc_schedule_grads given = {.sync = FC_SYNC_ALL};
    bool is_reduced;
    world w;

    make_world(&w, &k);
    given.full = w.grads;
    given.out = w.out;
    begin(&w);
    for (int divisor = 0; divisor < 3; divisor++) {
        given.pre_divisor = divisor;
        (void)take();
        MUST(fc_schedule_post_backward(w.units[0], &given, &is_reduced));
        CHECK(is_reduced);
        CHECK_EQ(take().moves, divisor == 1 ? 1 : 2);
    }
    end(&w);
    unmake(&w);
}

int main(void)
{
    const size_t own = 8 * 16 * PARAMS, all = 2 * own;

    /* Pack and copy-out, stage and finish, add. */
    test_a_unit_is_made_or_not(&staged, own + all + all + own + own);
    /* And the slice, which is all of it for one rank, and its copy-out. */
    test_a_unit_is_made_or_not(&sliced, own + all + all + own + own + all + all);
    test_a_unit_is_made_or_not(&direct, all + all + own + own);
    test_a_unit_is_made_or_not(&direct_casts, own / 2 + all + all + own + own);
    test_aliased_parameters_are_refused();
    test_a_schedule_takes_its_memory_along(&staged);
    test_a_schedule_takes_its_memory_along(&sliced);
    test_a_schedule_takes_its_memory_along(&direct);
    test_a_schedule_takes_its_memory_along(&replicated);
    test_a_unit_leaves(&staged);
    test_a_unit_leaves(&sliced);
    test_a_unit_leaves(&direct);
    test_a_unit_leaves(&replicated);
    test_nobody_prefetches_who_left();
    test_slots_are_used_again();
    test_kept_slots_do_not_count();
    test_a_slot_without_memory();
    test_compute_stays_where_it_is(&staged, false);
    test_compute_stays_where_it_is(&direct, true);
    test_compute_stays_with_held_gradients(FC_SYNC_NONE);
    test_compute_stays_with_held_gradients(FC_SYNC_SCATTER);
    test_some_gradient_is_needed(true);
    test_some_gradient_is_needed(false);
    test_held_gradients_are_dropped();
    test_the_given_divisor_counts();
    return check_result();
}
