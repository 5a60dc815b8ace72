/* Units of a schedule: how they are made and leave, and what memory they take and when. */
#include "one_rank_world.h"

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

/* Of parameters that are trained, gradients move, whatever they are reduced in. */
static void test_gradients_of_some_parameters_move(int n_ranks)
{
    enum {
        N = FC_FLOAT_COUNT + 2
    };
    const size_t all = 16 * 16, own = all / (size_t)n_ranks;
    fc_param params[N];
    fc_layout layout;
    fc_schedule_unit *unit = NULL;
    world w;

    make_world(&w, &staged);
    for (int i = 0; i < N; i++) {
        params[i] = (fc_param){.outer = 1, .rows = 16, .inner = 16};
        params[i].reduce = i < FC_FLOAT_COUNT ? (fc_dtype)i : FC_F32;
        params[i].has_grad = i != N - 1;
        params[i].trainable = i != N - 2;
    }
    MUST(fc_layout_init(&layout, params, N, 0, n_ranks, false));
    w.options.name = "unit";
    w.options.layout = &layout;
    MUST(fc_schedule_add(w.schedule, &w.options, &unit));
    /* Pack and copy-out of all; stage, finish and add of these; at once if it is alone. */
    CHECK_EQ(take().planned, N * (own + all) + FC_FLOAT_COUNT * (all + own + own) +
                                 (n_ranks == 1 ? FC_FLOAT_COUNT * own : 0));
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
    w.options.layout = &w.layouts[1];
    MUST(fc_schedule_add(w.schedule, &w.options, &w.units[1])); /* maybe in its memory */
    fc_schedule_set_shards(w.units[1], w.shards);
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
    CHECK_STR(take().gathered, "c");
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

/* The least that a slot may have, as others look at it. */
static void test_a_unit_of_one_byte(void)
{
    const kind k = {.n_ranks = 1};
    fc_param param = {
        .outer = 1, .rows = 1, .inner = 1, .orig = FC_U8, .compute = FC_U8, .is_packed = true};
    fc_schedule_unit *unit = NULL;
    fc_layout layout;
    world w;

    make_world(&w, &k);
    MUST(fc_layout_init(&layout, &param, 1, 0, 1, false));
    w.options.name = "unit";
    w.options.layout = &layout;
    MUST(fc_schedule_add(w.schedule, &w.options, &unit));
    fc_schedule_set_shards(unit, w.shards);
    for (int i = 0; i < 3; i++) {
        begin(&w);
        if (i == 2) {
            fc_sim_fail_alloc(w.device, 0);
            CHECK_EQ(fc_schedule_start(unit), FC_ERR_NOMEM);
            fc_sim_fail_alloc(w.device, -1);
        }
        (void)take();
        MUST(fc_schedule_start(unit));
        CHECK_EQ(take().allocs, 1);
        end(&w);
    }
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

/* What an unshard has left outside of an iteration binds nobody, but what it has made does: who
 * comes in another stream is a guest then. */
static void test_unshards_between_iterations(const kind *k)
{
    world w;

    make_world(&w, k);
    await_all(&w);
    CHECK(fc_schedule_bound_to(w.schedule) == NULL);
    MUST(fc_schedule_read_shards(w.schedule, w.streams[5]));
    unshard(&w, 0);
    CHECK(fc_schedule_bound_to(w.schedule) == w.streams[5]);
    MUST(fc_schedule_read_shards(w.schedule, w.streams[0]));
    unshard(&w, 1);
    CHECK(fc_schedule_bound_to(w.schedule) == w.streams[5]);
    fc_schedule_reshard(w.units[0]);
    fc_schedule_reshard(w.units[1]);
    CHECK(fc_schedule_bound_to(w.schedule) == NULL);
    MUST(fc_schedule_read_shards(w.schedule, w.streams[0]));
    CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
    MUST(fc_schedule_begin(w.schedule, w.streams[0], NULL));
    unshard(&w, 0);
    CHECK(fc_schedule_bound_to(w.schedule) == w.streams[0]);
    fc_schedule_reshard(w.units[0]);
    CHECK(fc_schedule_bound_to(w.schedule) == w.streams[0]); /* by slots, which the next one uses */
    end(&w);
    CHECK(fc_schedule_bound_to(w.schedule) == NULL);
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
    MUST(fc_schedule_read_shards(w.schedule, w.streams[5])); /* a guest */
    CHECK(post(&w, 0, NULL, FC_SYNC_ALL));
    end(&w);
    await_all(&w);
    MUST(fc_schedule_begin(w.schedule, w.streams[5], NULL));
    CHECK(post(&w, 0, w.grads, FC_SYNC_ALL)); /* staged in memory of that stream */
    end(&w);
    unmake(&w);
}

/* A guest in the place of another: compute behind both of them, copy-in behind the new one. */
static void test_a_guest_that_cannot_come(void)
{
    world w;

    make_world(&w, &staged);
    begin(&w);
    for (int n = 0; n < 3; n++) {
        MUST(fc_schedule_read_shards(w.schedule, w.streams[5]));
        (void)take();
        waits_left = n;
        waits_fail = true;
        CHECK_EQ(fc_schedule_read_shards(w.schedule, w.streams[4]), FC_ERR_SYSTEM);
        waits_fail = false;
        CHECK_EQ(take().waits, n + 1);
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
    /* Of one rank also from where the gradients are. */
    test_a_unit_is_made_or_not(&(kind){.n_ranks = 1}, 6 * all);
    test_gradients_of_some_parameters_move(1);
    test_gradients_of_some_parameters_move(2);
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
    test_a_unit_of_one_byte();
    test_compute_stays_where_it_is(&staged, false);
    test_compute_stays_where_it_is(&direct, true);
    test_unshards_between_iterations(&staged);
    test_unshards_between_iterations(&direct);
    test_compute_stays_with_held_gradients(FC_SYNC_NONE);
    test_compute_stays_with_held_gradients(FC_SYNC_SCATTER);
    test_a_guest_that_cannot_come();
    return check_result();
}
