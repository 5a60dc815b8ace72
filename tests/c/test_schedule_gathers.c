/* Gathers of a unit: what they move and wait for, and which of them an iteration keeps. */
#include "one_rank_world.h"

static const kind staged = {.is_direct = false}, alone = {.n_ranks = 1};

/* ---- what is moved ---- */

/* A unit of one byte, of nothing, and of a parameter in whose place an input is. */
static void add_odd_unit(world *w, fc_param *params, fc_layout *layout, bool is_direct,
                         bool is_offloaded, fc_schedule_unit **out)
{
    params[0] = (fc_param){
        .outer = 1, .rows = 1, .inner = 1, .orig = FC_U8, .compute = FC_U8, .is_made = false};
    params[1] = params[2] = params[3] = params[0];
    params[1].rows = 0;
    params[2].n_inputs = 1;
    MUST(fc_layout_init(layout, params, 3, 0, 1, false));
    CHECK_EQ(layout->n_entries, 4);
    w->options.name = "odd";
    w->options.layout = layout;
    w->options.is_direct = is_direct;
    w->options.is_offloaded = is_offloaded;
    MUST(fc_schedule_add(w->schedule, &w->options, out));
}

/* What is empty, or not gathered, is not moved. */
static void test_what_is_there_is_moved(bool is_direct, bool is_offloaded)
{
    const fc_label label = {"world", "shard", 0};
    fc_schedule_unit *unit = NULL;
    const void *shards[4];
    fc_param params[4];
    fc_layout layout;
    world w;
    void *full = NULL;

    make_world(&w, &alone);
    add_odd_unit(&w, params, &layout, is_direct, is_offloaded, &unit);
    for (int i = 0; i < 4; i++) {
        void *shard = NULL;

        MUST(is_offloaded ? fc_sim_host_alloc(w.device, label, 1, &shard)
                          : simulated->alloc(w.device, w.streams[0], label, 1, &shard));
        *(char *)shard = (char)(10 + i);
        shards[i] = shard;
    }
    w.rest_bytes = fc_sim_bytes(w.device);
    fc_schedule_set_shards(unit, shards);
    begin(&w);
    (void)take();
    MUST(fc_schedule_start(unit));
    CHECK_EQ(now.copies, is_offloaded ? 2 : 0);
    CHECK_EQ(take().pieces, is_direct ? 2 : 0);
    MUST(fc_schedule_unshard(unit, &full));
    await_all(&w);
    CHECK_EQ(((char *)full)[params[0].full_at], 10);
    CHECK_EQ(((char *)full)[params[3].full_at], 13);
    CHECK_EQ(fc_schedule_gathered_bytes(unit), 0);
    fc_schedule_reshard(unit);
    end(&w);
    unmake(&w);
}

/* Of what comes from others: parameters in the types in which they compute, and inputs. */
static void test_gathered_bytes(void)
{
    fc_schedule_unit *unit = NULL;
    fc_param params[3];
    fc_layout layout;
    world w;

    make_world(&w, &staged);
    params[0] = (fc_param){.outer = 2, .rows = 5, .inner = 3, .compute = FC_BF16};
    params[1] = (fc_param){.outer = 1, .rows = 9, .inner = 7, .n_inputs = 1};
    params[2] = (fc_param){.outer = 1, .rows = 3, .inner = 4, .compute = FC_F64};
    MUST(fc_layout_init(&layout, params, 2, 0, 2, false));
    w.options.name = "unit";
    w.options.layout = &layout;
    MUST(fc_schedule_add(w.schedule, &w.options, &unit));
    CHECK_EQ(fc_schedule_gathering_ranks(unit), 2);
    CHECK_EQ(fc_schedule_gathered_bytes(unit), 2 * 2 * 3 * 2 + 1 * 4 * 8);
    unmake(&w);
}

/* ---- what is waited for ---- */

/* copy-in comes behind the beginning once, with the first gather. */
static void test_the_beginning_is_waited_for_once(void)
{
    fc_event *optimizer = NULL;
    world w;

    make_world(&w, &staged);
    MUST(simulated->event_create(w.device, &optimizer));
    MUST(simulated->record(w.device, optimizer, w.streams[0]));
    begin(&w);
    CHECK_EQ(take().waits, 0);
    for (int i = 0; i < 2; i++) { /* and gather behind copy-in */
        MUST(fc_schedule_start(w.units[i]));
        CHECK_EQ(take().waits, i == 0 ? 2 : 1);
    }
    end(&w);
    begin(&w);
    (void)take();
    MUST(fc_schedule_begin(w.schedule, w.streams[0], optimizer)); /* which stands for compute */
    CHECK_EQ(take().waits, 1);
    MUST(fc_schedule_start(w.units[0]));
    CHECK_EQ(take().waits, 1);
    end(&w);
    begin(&w);
    (void)take();
    MUST(fc_schedule_read_shards(w.schedule, w.streams[0]));
    CHECK_EQ(take().waits, 1);
    MUST(fc_schedule_start(w.units[0]));
    CHECK_EQ(take().waits, 1);
    end(&w);
    simulated->event_destroy(w.device, optimizer);
    unmake(&w);
}

/* Compute itself reads shards that it uses where they lie; once it does no more, copy-in comes
 * behind what it did to them. */
static void test_residence_and_waits(void)
{
    fc_event *optimizer = NULL;
    world w;

    make_world(&w, &alone);
    MUST(simulated->event_create(w.device, &optimizer));
    MUST(simulated->record(w.device, optimizer, w.streams[0]));
    MUST(fc_schedule_set_resident(w.units[0], NULL));
    MUST(fc_schedule_begin(w.schedule, w.streams[0], optimizer));
    CHECK_EQ(take().waits, 1);
    MUST(fc_schedule_set_resident(w.units[0], NULL)); /* it was not */
    MUST(fc_schedule_set_resident(w.units[0], w.out));
    CHECK_EQ(take().records, 0);
    MUST(fc_schedule_begin(w.schedule, w.streams[0], optimizer));
    CHECK_EQ(take().waits, 2);
    waits_left = 0;
    waits_fail = true;
    CHECK_EQ(fc_schedule_begin(w.schedule, w.streams[0], optimizer), FC_ERR_SYSTEM);
    CHECK_EQ(take().waits, 1);
    waits_fail = false;
    MUST(fc_schedule_start(w.units[1]));
    (void)take();
    MUST(fc_schedule_set_resident(w.units[0], NULL));
    CHECK_EQ(take().records, 1);
    MUST(fc_schedule_start(w.units[0]));
    CHECK_EQ(take().waits, 2);
    end(&w);
    MUST(fc_schedule_set_resident(w.units[0], w.out));
    (void)take();
    MUST(fc_schedule_set_resident(w.units[0], NULL)); /* the next iteration waits anyway */
    CHECK_EQ(take().records, 0);
    simulated->event_destroy(w.device, optimizer);
    unmake(&w);
}

/* ---- which gathers are kept ---- */

static void test_a_gather_that_fails_leaves_nothing(void)
{
    world w;

    make_world(&w, &staged);
    begin(&w);
    gathers_fail = true;
    CHECK_EQ(fc_schedule_start(w.units[0]), FC_ERR_SYSTEM);
    gathers_fail = false;
    check_bytes_after_end(&w);
    begin(&w);
    unshard(&w, 0);
    CHECK_STR(take().gathered, "a");
    fc_schedule_reshard(w.units[0]);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* Of gathers in flight an iteration keeps what somebody has asked for since its last use. */
static void test_an_iteration_drops_prefetches(void)
{
    void *full;
    world w;

    make_world(&w, &staged);
    MUST(fc_schedule_set_prefetch(w.units[1], false, &w.units[0], 1));
    begin(&w);
    MUST(fc_schedule_start(w.units[0]));
    MUST(fc_schedule_start(w.units[2]));
    begin(&w);
    unshard(&w, 0);
    unshard(&w, 2);
    CHECK_STR(take().gathered, "ac");
    fc_schedule_reshard(w.units[0]);
    MUST(fc_schedule_pre_forward(w.units[1], &full));
    CHECK_STR(take().gathered, "ba");
    begin(&w);
    unshard(&w, 0);
    CHECK_STR(take().gathered, "a");
    end(&w);
    unmake(&w);
}

/* A slice whose rows do not fill its chunk, as others see it: zeros behind them. */
static void test_padding_of_a_slice(void)
{
    static const char zeros[16 * sizeof(float)];
    fc_schedule_unit *unit = NULL;
    fc_param params[PARAMS];
    fc_layout layout;
    world w;

    make_world(&w, &staged);
    for (int i = 0; i < PARAMS; i++) {
        params[i] = (fc_param){.outer = 1, .rows = 3, .inner = 16, .is_packed = true};
    }
    MUST(fc_layout_init(&layout, params, PARAMS, 0, 2, false));
    w.options.name = "unit";
    w.options.layout = &layout;
    w.options.n_post_ranks = 2;
    w.options.post_rank = 1;
    MUST(fc_schedule_add(w.schedule, &w.options, &unit));
    fc_schedule_set_shards(unit, w.shards);
    begin(&w);
    MUST(fc_schedule_unshard(unit, &(void *){NULL}));
    MUST(fc_schedule_post_forward(unit));
    (void)take();
    MUST(fc_schedule_start(unit));
    await_all(&w);
    for (size_t i = 0; i < PARAMS; i++) { /* two rows each, the second one of none */
        CHECK(memcmp(now.gathered_at + (2 * (PARAMS + i) + 1) * sizeof(zeros), zeros,
                     sizeof(zeros)) == 0);
    }
    end(&w);
    unmake(&w);
}

/* A slice is gone once it was gathered from. */
static void test_a_slice_is_used_once(void)
{
    const kind sliced = {.has_slices = true};
    world w;

    make_world(&w, &sliced);
    begin(&w);
    unshard(&w, 0);
    MUST(fc_schedule_post_forward(w.units[0]));
    (void)take();
    MUST(fc_schedule_reshard_after_forward(w.units[0])); /* it has been */
    CHECK_EQ(take().allocs, 0);
    MUST(fc_schedule_start(w.units[0]));
    (void)take();
    fc_schedule_reshard(w.units[0]); /* copy-in may read it still */
    CHECK_EQ(take().frees, 0);
    unshard(&w, 0);
    CHECK_EQ(take().frees, 1);
    CHECK_EQ(fc_schedule_gathering_ranks(w.units[0]), 1);
    fc_schedule_reshard(w.units[0]);
    unshard(&w, 0);
    CHECK_EQ(fc_schedule_gathering_ranks(w.units[0]), 2);
    fc_schedule_reshard(w.units[0]);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* One that could not be kept is none: the whole is gathered again. */
static void test_a_slice_that_is_not_there(void)
{
    const kind sliced = {.has_slices = true};
    world w;

    make_world(&w, &sliced);
    begin(&w);
    unshard(&w, 0);
    records_left = 0;
    records_fail = true;
    CHECK_EQ(fc_schedule_reshard_after_forward(w.units[0]), FC_ERR_SYSTEM);
    records_fail = false;
    MUST(fc_schedule_reshard_after_forward(w.units[0]));
    fc_schedule_reshard(w.units[0]);
    unshard(&w, 0);
    CHECK_EQ(fc_schedule_gathering_ranks(w.units[0]), 2);
    records_left = 0;
    records_fail = true;
    CHECK_EQ(fc_schedule_post_forward(w.units[0]), FC_ERR_SYSTEM);
    records_fail = false;
    await_all(&w);
    fc_schedule_destroy(w.schedule);
    w.schedule = NULL;
    unmake(&w);
}

/* What is resharded after the end of an iteration is free at once. */
static void test_reshard_after_the_end(bool is_direct)
{
    const kind k = {.is_direct = is_direct};

    for (int is_forward = 0; is_forward < 2; is_forward++) {
        world w;

        make_world(&w, &k);
        begin(&w);
        unshard(&w, 0);
        MUST(is_forward ? fc_schedule_end_forward(w.schedule)
                        : fc_schedule_end_backward(w.schedule, true));
        CHECK(fc_sim_bytes(w.device) > w.rest_bytes);
        fc_schedule_reshard(w.units[0]);
        CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
        if (is_direct) { /* staged ones leave their slot to the next gather */
            MUST(fc_schedule_read_shards(w.schedule, w.streams[0]));
            unshard(&w, 0);
            fc_schedule_reshard(w.units[0]);
            CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
        }
        unmake(&w);
    }
}

/* A slot whose memory has outlived an iteration is as any other one with the next gather. */
static void test_a_slot_outlives_an_iteration(void)
{
    world w;

    make_world(&w, &(kind){.is_direct = true});
    begin(&w);
    unshard(&w, 0);
    end(&w);
    begin(&w);
    (void)take();
    fc_schedule_reshard(w.units[0]);
    CHECK_EQ(take().frees, 1);
    for (int i = 0; i < 2; i++) { /* a new slot, then that one */
        unshard(&w, 1);
        (void)take();
        fc_schedule_reshard(w.units[1]);
        CHECK_EQ(take().frees, 0);
    }
    end(&w);
    unmake(&w);
}

/* A unit whose shards are in the host's memory. */
static fc_schedule_unit *add_offloaded(world *w, fc_label label, void **memory_out)
{
    static const void *shards[PARAMS]; /* borrowed */
    fc_schedule_unit *unit = NULL;

    w->options.name = "unit";
    w->options.layout = &w->layouts[0];
    w->options.is_offloaded = true;
    MUST(fc_schedule_add(w->schedule, &w->options, &unit));
    MUST(fc_sim_host_alloc(w->device, label, 4096, memory_out));
    shards[0] = shards[1] = *memory_out;
    fc_schedule_set_shards(unit, shards);
    w->rest_bytes = fc_sim_bytes(w->device);
    return unit;
}

/* Gradients come to the host from two streams, each of which may fail. */
static void test_gradients_do_not_come(int failing)
{
    const fc_label label = {"world", "memory", 0};
    fc_schedule_unit *unit;
    void *out = NULL;
    bool is_reduced;
    world w;

    make_world(&w, &(kind){.has_replicas = true});
    unit = add_offloaded(&w, label, &out);
    begin(&w);
    n_syncs = 0;
    MUST(fc_schedule_await_gradients(w.schedule)); /* there are none */
    CHECK_EQ(n_syncs, 0);
    MUST(fc_schedule_post_backward(
        unit, &(fc_schedule_grads){.full = w.grads, .out = out, .sync = FC_SYNC_ALL}, &is_reduced));
    failing_sync = failing;
    CHECK_EQ(fc_schedule_await_gradients(w.schedule), failing < 2 ? FC_ERR_SYSTEM : FC_OK);
    failing_sync = -1;
    n_syncs = 0;
    MUST(fc_schedule_await_gradients(w.schedule));
    CHECK_EQ(n_syncs, failing < 2 ? 2 : 0);
    end(&w);
    unmake(&w);
}

/* Shards come to the device before a gather that fails. */
static void test_shards_of_a_gather_that_fails(void)
{
    const fc_label label = {"world", "shard", 0};
    fc_schedule_unit *unit;
    void *shard = NULL;
    world w;

    make_world(&w, &staged);
    unit = add_offloaded(&w, label, &shard);
    begin(&w);
    waits_left = 1; /* for copy-in */
    waits_fail = true;
    CHECK_EQ(fc_schedule_start(unit), FC_ERR_SYSTEM);
    waits_fail = false;
    MUST(fc_schedule_await_shards(w.schedule));
    fc_sim_host_access(w.device, label, (fc_sim_range){shard, 4096, true});
    end(&w);
    unmake(&w);
}

/* A forward that no backward follows leaves neither slices nor gathers in flight. */
static void test_a_forward_ends(void)
{
    const kind sliced = {.has_slices = true};
    world w;

    make_world(&w, &sliced);
    MUST(fc_schedule_end_forward(w.schedule)); /* none has begun */
    begin(&w);
    unshard(&w, 0);
    MUST(fc_schedule_post_forward(w.units[0]));
    MUST(fc_schedule_start(w.units[1]));
    waits_left = 0;
    waits_fail = true;
    CHECK_EQ(fc_schedule_end_forward(w.schedule), FC_ERR_SYSTEM);
    waits_fail = false;
    await_all(&w); /* what compute does not wait for */
    MUST(fc_schedule_start(w.units[1]));
    MUST(fc_schedule_end_forward(w.schedule));
    CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
    unmake(&w);
}

/* The order of forwards, however many there are. */
static void test_many_forwards(void)
{
    enum {
        N = 150
    };
    void *full;
    world w;

    make_world(&w, &staged);
    begin(&w);
    unshard(&w, 2);
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_schedule_post_forward(w.units[2]), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_STR(fc_last_message(), "order of 64 units");
    fc_schedule_reshard(w.units[2]);
    for (int i = 0; i < N; i++) {
        MUST(fc_schedule_pre_forward(w.units[i % 3 == 0], &full));
        MUST(fc_schedule_post_forward(w.units[i % 3 == 0]));
        (void)take();
    }
    unshard(&w, (N - 1) % 3 == 0);
    for (int i = N - 1; i >= 0; i--) {
        const int own = i % 3 == 0, before = (i + 2) % 3 == 0;

        (void)take();
        MUST(fc_schedule_pre_backward(w.units[own], &full));
        CHECK_STR(now.gathered, i == 0 || own == before ? "" : before ? "b" : "a");
        fc_schedule_reshard(w.units[own]);
        unshard(&w, before);
    }
    fc_schedule_reshard(w.units[0]);
    fc_schedule_reshard(w.units[1]);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* Of another schedule nothing is gathered with a unit of this one. */
static void test_units_of_others_are_not_prefetched(void)
{
    fc_schedule_unit *theirs = NULL;
    fc_schedule *other = NULL;
    void *full;
    world w;

    make_world(&w, &staged);
    MUST(fc_schedule_create(&(fc_schedule_options){w.device, w.streams[1], w.streams[2],
                                                   w.streams[3], w.streams[4], 1, 0, 0},
                            &other));
    w.options.name = "theirs";
    w.options.layout = &w.layouts[0];
    MUST(fc_schedule_add(other, &w.options, &theirs));
    fc_schedule_set_shards(theirs, w.shards);
    MUST(fc_schedule_set_prefetch(w.units[0], false,
                                  (fc_schedule_unit *const[]){theirs, w.units[1]}, 2));
    begin(&w);
    MUST(fc_schedule_begin(other, w.streams[0], NULL));
    (void)take();
    MUST(fc_schedule_pre_forward(w.units[0], &full));
    CHECK_STR(take().gathered, "ab");
    fc_schedule_reshard(w.units[0]);
    MUST(fc_schedule_end_backward(other, true));
    fc_schedule_destroy(other);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* A unit that stays unsharded is reached anew by the backward of each of its forwards. */
static void test_a_unit_that_stays(void)
{
    void *full;
    world w;

    make_world(&w, &staged);
    begin(&w);
    for (int i = 0; i < 2; i++) {
        unshard(&w, 0);
        MUST(fc_schedule_post_forward(w.units[0]));
        unshard(&w, 1);
        MUST(fc_schedule_note_forward(w.units[1]));
        (void)take();
        MUST(fc_schedule_pre_backward(w.units[1], &full));
        CHECK_STR(take().gathered, "a");
        unshard(&w, 0);
        fc_schedule_reshard(w.units[0]);
    }
    fc_schedule_reshard(w.units[1]);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* Forwards are counted back for a unit with a list of its own, too. */
static void test_a_list_is_taken_away(void)
{
    static const int forwards[] = {0, 1, 2, 1};
    void *full;
    world w;

    make_world(&w, &staged);
    begin(&w);
    for (int i = 0; i < 4; i++) {
        unshard(&w, forwards[i]);
        MUST(fc_schedule_post_forward(w.units[forwards[i]]));
    }
    MUST(fc_schedule_set_prefetch(w.units[1], true, &w.units[3], 1));
    (void)take();
    MUST(fc_schedule_pre_backward(w.units[1], &full));
    CHECK_STR(take().gathered, "bd");
    fc_schedule_reshard(w.units[1]);
    MUST(fc_schedule_set_prefetch(w.units[1], true, NULL, 0));
    MUST(fc_schedule_pre_backward(w.units[1], &full));
    CHECK_STR(take().gathered, "ba");
    fc_schedule_reshard(w.units[1]);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* With an iteration, the order of its forwards ends. */
static void test_an_order_ends(void)
{
    void *full;
    world w;

    make_world(&w, &staged);
    begin(&w);
    for (int i = 0; i < 2; i++) {
        unshard(&w, i);
        MUST(fc_schedule_post_forward(w.units[i]));
    }
    end(&w);
    begin(&w);
    unshard(&w, 2);
    MUST(fc_schedule_post_forward(w.units[2]));
    (void)take();
    MUST(fc_schedule_pre_backward(w.units[1], &full));
    CHECK_STR(take().gathered, "b");
    fc_schedule_reshard(w.units[1]);
    check_bytes_after_end(&w);
    unmake(&w);
}

/* After a reset nothing is unsharded, in flight or held; it says so if it cannot be. */
static void test_a_reset(void)
{
    bool is_reduced;
    world w;

    make_world(&w, &staged);
    MUST(fc_schedule_reset(w.schedule)); /* nothing has begun */
    begin(&w);
    unshard(&w, 0);
    MUST(fc_schedule_start(w.units[1]));
    MUST(fc_schedule_post_backward(w.units[2], &(fc_schedule_grads){.full = w.grads}, &is_reduced));
    await_all(&w); /* what waits that fail would have been for */
    for (waits_left = 0; waits_left < 2; waits_left++) {
        const int n = waits_left;

        waits_fail = true;
        CHECK_EQ(fc_schedule_reset(w.schedule), FC_ERR_SYSTEM);
        waits_fail = false;
        waits_left = n;
    }
    waits_left = 0;
    MUST(fc_schedule_reset(w.schedule));
    CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
    begin(&w);
    MUST(fc_schedule_post_backward(w.units[2], &(fc_schedule_grads){.sync = FC_SYNC_ALL},
                                   &is_reduced));
    CHECK(!is_reduced);
    end(&w);
    unmake(&w);
}

int main(void)
{
    for (int i = 0; i < 4; i++) {
        test_what_is_there_is_moved(i & 1, i & 2);
    }
    test_gathered_bytes();
    test_the_beginning_is_waited_for_once();
    test_residence_and_waits();
    test_a_gather_that_fails_leaves_nothing();
    test_an_iteration_drops_prefetches();
    test_padding_of_a_slice();
    test_a_slice_is_used_once();
    test_a_slice_that_is_not_there();
    test_reshard_after_the_end(true);
    test_reshard_after_the_end(false);
    test_a_slot_outlives_an_iteration();
    for (int failing = 0; failing < 3; failing++) {
        test_gradients_do_not_come(failing);
    }
    test_shards_of_a_gather_that_fails();
    test_a_forward_ends();
    test_many_forwards();
    test_units_of_others_are_not_prefetched();
    test_a_unit_that_stays();
    test_a_list_is_taken_away();
    test_an_order_ends();
    test_a_reset();
    return check_result();
}
