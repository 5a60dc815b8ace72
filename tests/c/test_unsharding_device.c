/* Units on devices: what is gathered when, slices, and shards that are used where they lie. */
#define _GNU_SOURCE

#include "unsharding_device_world.h"

/* ---- outside of a phase ---- */

/* An unshard reads the shards as they are now, and keeps a copy. */
static void test_between_phases(int n_ranks)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_narrowed = true});
    gather_there(&w, 0);
    gather_there(&w, 0); /* it was asked for */
    check_gathers(&w, 1);
    check_state(&w, 0, FC_UNIT_GATHERED);
    use_there(&w, 0);
    use_there(&w, 0);
    check_gathers(&w, 0);
    check_state(&w, 0, FC_UNIT_KEPT);
    check_values_there(&w, 0);
    EACH(&w, r)
    {
        const tensors *t = &r->tensors[0];
        const size_t theirs = n_ranks == 1 ? 0 : r->rank == 0 ? 2 : 3;

        CHECK_EQ(t->n_read, 1);
        CHECK_EQ(t->base.traffic.gathers, n_ranks > 1);
        CHECK_EQ(t->base.traffic.gathered, theirs * COLUMNS * (4 + 2));
        CHECK_EQ(t->base.traffic.unshards, 1);
        CHECK(fc_unsharding_has_own_memory(t->base.unsharding));
        CHECK(fc_sim_bytes(r->device) > r->rest_bytes);
    }
    reshard_there(&w, 0, false);
    check_state(&w, 0, FC_UNIT_SHARDED);
    EACH(&w, r)
    {
        CHECK(!fc_unsharding_has_own_memory(r->tensors[0].base.unsharding));
        CHECK(!fc_unsharding_is_settled(r->tensors[0].base.unsharding));
        CHECK(r->tensors[0].base.shown == NULL);
    }
    step_shards(&w);
    use_there(&w, 0);
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    EACH(&w, r)
    {
        r->tensors[1].fails_to_read = true;
        CHECK_EQ(fc_unsharding_gather(r->tensors[1].base.unsharding), FC_ERR_INTERRUPTED);
        r->tensors[1].fails_to_read = false;
    }
    check_state(&w, 1, FC_UNIT_SHARDED);
    gather_there(&w, 1);
    EACH(&w, r)
    {
        fc_unsharding_drop(r->tensors[1].base.unsharding);
        CHECK_OK(fc_schedule_end_forward(r->schedule));
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* Nothing tells of the end of what began outside of a phase: the host may write shards at once. */
static void test_offloaded_shards_are_free_at_once(void)
{
    device_world w;

    make_device_world(&w, 1, (kind){.is_offloaded = true});
    use_there(&w, 0);
    step_shards(&w);
    w.step--;
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    unmake_device_world(&w);
}

/* ---- in a phase ---- */

/* What is used brings the gathers that are to come with it: of a list in forward, of the forwards'
 * order in backward; also where it was shown already. */
static void test_uses_bring_prefetches(int n_ranks)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_narrowed = true});
    EACH(&w, r)
    {
        CHECK_OK(
            fc_schedule_set_prefetch(r->tensors[0].on_device, false, &r->tensors[1].on_device, 1));
    }
    gather_there(&w, 0);
    check_gathers(&w, 1);
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0); /* the gather from before is still good */
    check_gathers(&w, 1);
    check_state(&w, 0, FC_UNIT_UNSHARDED);
    check_state(&w, 1, FC_UNIT_SHARDED); /* as far as callers go */
    check_values_there(&w, 0);
    pass(&w, 0);
    reshard_there(&w, 0, false);
    use_there(&w, 1);
    check_gathers(&w, 0);
    pass(&w, 1);
    reshard_there(&w, 1, false);
    use_there(&w, 2);
    check_gathers(&w, 1);
    pass(&w, 2);
    close_there(&w, false);
    check_state(&w, 2, FC_UNIT_KEPT);

    open_there(&w, FC_PHASE_BACKWARD);
    use_there(&w, 2);
    check_gathers(&w, 1);
    check_values_there(&w, 2);
    reshard_there(&w, 2, false);
    use_there(&w, 1);
    check_gathers(&w, 1);
    check_values_there(&w, 1);
    reshard_there(&w, 1, false);
    use_there(&w, 0);
    check_gathers(&w, 0);
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    EACH(&w, r)
    {
        CHECK_EQ(r->tensors[0].n_read, 1);
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* A forward gathers what was kept anew after a step alone. */
static void test_a_kept_copy_follows_its_shards(int n_ranks, bool has_methods)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_extended = has_methods});
    use_there(&w, 0);
    check_gathers(&w, 1);
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0);
    check_gathers(&w, 0);
    check_values_there(&w, 0);
    close_there(&w, true);
    step_shards(&w);
    EACH(&w, r)
    {
        r->tensors[0].base.shown = NULL;
    }
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0);
    check_gathers(&w, 1);
    check_values_there(&w, 0);
    use_there(&w, 0);
    check_gathers(&w, 0);
    EACH(&w, r)
    {
        CHECK_EQ(r->tensors[0].base.n_made, has_methods ? 2 : 0);
        CHECK_EQ(r->tensors[0].base.n_filled, has_methods ? 2 : 0);
        CHECK_EQ(r->tensors[0].base.n_forgotten, has_methods ? 2 : 0);
    }
    /* What somebody has written to it lasts. */
    close_there(&w, true);
    step_shards(&w);
    EACH(&w, r)
    {
        r->tensors[0].base.is_written[0] = true;
    }
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0);
    check_gathers(&w, 0);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    EACH(&w, r)
    {
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* A reshard to a smaller group, of this rank alone: backward gathers what it kept, and nobody else
 * does after the phase. */
static void test_slices(int n_ranks)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_narrowed = true, .has_slices = true});
    open_there(&w, FC_PHASE_FORWARD);
    for (size_t u = 0; u < 2; u++) {
        use_there(&w, u);
        pass(&w, u);
        reshard_there(&w, u, true);
    }
    check_state(&w, 0, FC_UNIT_SHARDED);
    close_there(&w, false);
    open_there(&w, FC_PHASE_BACKWARD);
    use_there(&w, 0);
    check_values_there(&w, 0);
    EACH(&w, r)
    {
        CHECK_EQ(r->tensors[0].base.traffic.unshards, 2);
        CHECK_EQ(r->tensors[0].base.traffic.gathers, n_ranks > 1);
        CHECK_EQ(r->tensors[0].base.traffic.gathered,
                 n_ranks == 1 ? 0 : (r->rank == 0 ? 2 : 3) * COLUMNS * (4 + 2));
    }
    reshard_there(&w, 0, false);
    close_there(&w, false); /* and the second one has its slice */
    step_shards(&w);
    use_there(&w, 1);
    check_values_there(&w, 1);
    reshard_there(&w, 1, false);
    EACH(&w, r)
    {
        CHECK_OK(fc_schedule_end_backward(r->schedule, true));
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* What is given up elsewhere than behind a forward leaves no slice: it is gathered from all ranks
 * again. */
static void test_no_slices_of_what_is_given_up(void)
{
    device_world w;

    make_device_world(&w, 2, (kind){.is_extended = true, .has_slices = true});
    open_there(&w, FC_PHASE_FORWARD);
    EACH(&w, r)
    {
        fc_unsharding_keep_memory(r->tensors[0].base.unsharding, true);
    }
    use_there(&w, 0);
    reshard_there(&w, 0, false);
    EACH(&w, r)
    {
        fc_unsharding_keep_memory(r->tensors[0].base.unsharding, false); /* which has waited */
    }
    gather_there(&w, 1);
    EACH(&w, r)
    {
        owner *second = &r->tensors[1].base;

        second->fails_to_fill = true;
        CHECK_EQ(fc_unsharding_show(second->unsharding), FC_ERR_INTERRUPTED);
        second->fails_to_fill = false;
        fc_unsharding_drop(second->unsharding);
    }
    close_there(&w, true);
    step_shards(&w); /* what was made of them is made anew */
    open_there(&w, FC_PHASE_FORWARD);
    for (size_t u = 0; u < 2; u++) {
        use_there(&w, u);
        EACH(&w, r)
        {
            CHECK_EQ(r->tensors[u].base.n_made, 2);
            CHECK_EQ(r->tensors[u].base.traffic.gathers, 2);
        }
        check_values_there(&w, u);
        reshard_there(&w, u, false);
    }
    EACH(&w, r)
    {
        const size_t bytes = fc_sim_bytes(r->device);
        owner *first = &r->tensors[0].base;
        bool is_shown;

        CHECK_OK(fc_unsharding_begin_use(first->unsharding, &is_shown));
        CHECK_OK(fc_unsharding_gather(first->unsharding));
        CHECK_OK(fc_unsharding_show(first->unsharding));
        fc_unsharding_destroy(first->unsharding);
        first->unsharding = NULL;
        CHECK_EQ(fc_sim_bytes(r->device), bytes);
    }
    unmake_device_world(&w);
}

/* ---- one rank that uses its shards where they lie ---- */

static const kind alone = {.has_all = true, .can_reside = true};

/* A forward of the first unit, up to its end. */
static tensors *begin_forward(device_world *w)
{
    open_there(w, FC_PHASE_FORWARD);
    use_there(w, 0);
    return &w->ranks[0].tensors[0];
}

static bool is_resident(const tensors *t)
{
    return fc_unsharding_is_resident(t->base.unsharding);
}

static void test_residence_begins_behind_the_first_forward(bool is_shown, bool has_graph)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    fc_unsharding_set_graph(t->base.unsharding, has_graph);
    CHECK(!is_resident(t) && t->base.shown != t->home);
    CHECK(fc_unsharding_is_read_apart(t->base.unsharding));
    check_gathers(&w, 1);
    if (!is_shown) {
        reshard_there(&w, 0, false);
    }
    pass(&w, 0);
    CHECK(is_resident(t));
    CHECK_EQ(t->n_resided, 1);
    CHECK(t->base.shown == (is_shown || has_graph ? t->home : NULL));
    if (is_shown) {
        check_values_there(&w, 0);
        reshard_there(&w, 0, false);
    }
    CHECK(t->base.shown == (has_graph ? t->home : NULL));
    CHECK(fc_unsharding_is_settled(t->base.unsharding));
    close_there(&w, false);
    open_there(&w, FC_PHASE_BACKWARD);
    use_there(&w, 0);
    check_values_there(&w, 0);
    CHECK(t->base.shown == t->home);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    step_shards(&w);
    (void)begin_forward(&w);
    check_gathers(&w, 0);
    CHECK(t->base.shown == t->home);
    check_values_there(&w, 0);
    pass(&w, 0);
    CHECK_EQ(t->n_resided, 1);
    reshard_there(&w, 0, false);
    CHECK(is_resident(t) && t->base.n_told == 0);
    close_there(&w, true);
    unmake_device_world(&w);
}

/* Who writes to its own parameters, or may have, keeps to copies; so does who cannot move. Nor does
 * what has no memory. */
static void test_residence_does_not_begin(void)
{
    for (int why = 0; why < 6; why++) {
        device_world w;
        kind k = alone;
        tensors *t;

        k.has_all = why != 0;
        k.is_empty = why == 5;
        make_device_world(&w, 1, k);
        t = begin_forward(&w);
        CHECK_EQ(t->n_asked, k.has_all && !k.is_empty);
        t->base.is_written[0] = why == 1;
        t->base.is_written[1] = why == 2;
        t->maybe_written = why == 3;
        t->can_reside = why != 4;
        pass(&w, 0);
        reshard_there(&w, 0, false);
        t->base.is_written[0] = t->base.is_written[1] = t->maybe_written = false;
        t->can_reside = true;
        close_there(&w, true);
        (void)begin_forward(&w); /* the first one has decided */
        pass(&w, 0);
        CHECK(!is_resident(t));
        CHECK_EQ(t->n_resided, 0);
        reshard_there(&w, 0, false);
        close_there(&w, true);
        unmake_device_world(&w);
    }
}

static void test_residence_fails(void)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    reshard_there(&w, 0, false);
    t->fails_to_reside = true;
    CHECK_EQ(fc_unsharding_end_forward(t->base.unsharding), FC_ERR_INTERRUPTED);
    CHECK(!is_resident(t));
    use_there(&w, 0);
    CHECK(t->base.shown != NULL && t->base.shown != t->home);
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    unmake_device_world(&w);
}

/* A write that reached the shards ends it, and is told of if it is known. */
static void test_residence_ends_with_a_write(size_t param, bool is_counted, fc_status warns)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    pass(&w, 0);
    t->base.is_written[param] = is_counted;
    t->maybe_written = !is_counted;
    t->warns = warns;
    CHECK_EQ(fc_unsharding_reshard(t->base.unsharding, false), is_counted ? warns : FC_OK);
    CHECK(!is_resident(t));
    check_state(&w, 0, FC_UNIT_SHARDED);
    CHECK_EQ(t->base.n_told, is_counted);
    if (is_counted) {
        CHECK_EQ(t->told_of, param);
        CHECK_EQ(t->base.told, FC_WRITTEN_RESIDENT);
    }
    t->base.is_written[param] = t->maybe_written = false;
    use_there(&w, 0);
    CHECK(t->base.shown != NULL && t->base.shown != t->home);
    check_values_there(&w, 0);
    t->base.is_written[0] = true; /* to a copy: no matter */
    reshard_there(&w, 0, false);
    CHECK_EQ(t->base.n_told, is_counted);
    close_there(&w, true);
    unmake_device_world(&w);
}

static void test_residence_cannot_end(void)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    pass(&w, 0);
    t->base.is_written[0] = true;
    w.ranks[0].fails_to_record = true;
    CHECK_EQ(fc_unsharding_reshard(t->base.unsharding, false), FC_ERR_SYSTEM);
    CHECK_EQ(t->base.n_told, 0);
    w.ranks[0].fails_to_record = false;
    close_there(&w, true);
    unmake_device_world(&w);
}

/* ---- failures ---- */

/* The device has no memory at the `n`-th request from now. */
static fc_status without_memory(tensors *t, int64_t n, fc_status (*act)(fc_unsharding *))
{
    fc_status st;

    fc_sim_fail_alloc(t->rank->device, n);
    st = act(t->base.unsharding);
    fc_sim_fail_alloc(t->rank->device, -1);
    return st;
}

static fc_status use_once(fc_unsharding *u)
{
    bool is_shown;

    FC_TRY(fc_unsharding_begin_use(u, &is_shown));
    return is_shown ? FC_OK : fc_unsharding_show(u);
}

static fc_status to_slice(fc_unsharding *u)
{
    return fc_unsharding_reshard(u, true);
}

/* What fails leaves the unit as it was, and may be tried again. */
static void test_failures(void)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, (kind){.is_extended = true, .has_slices = true});
    t = &w.ranks[0].tensors[0];
    for (int in_phase = 0; in_phase < 2; in_phase++) {
        if (in_phase) {
            CHECK_OK(fc_schedule_end_forward(w.ranks[0].schedule));
            open_there(&w, FC_PHASE_FORWARD);
        }
        t->base.fails_to_make = true;
        CHECK_EQ(fc_unsharding_gather(t->base.unsharding), FC_ERR_INTERRUPTED);
        t->base.fails_to_make = false;
        CHECK_EQ(without_memory(t, 0, fc_unsharding_gather), FC_ERR_NOMEM);
        check_state(&w, 0, FC_UNIT_SHARDED);
        gather_there(&w, 0);
        CHECK_EQ(without_memory(t, 0, use_once), FC_ERR_NOMEM);
        check_state(&w, 0, FC_UNIT_GATHERED);
        CHECK(t->base.shown == NULL);
        use_there(&w, 0);
        check_values_there(&w, 0);
        if (in_phase) {
            CHECK_EQ(without_memory(t, 0, to_slice), FC_ERR_NOMEM);
        }
        reshard_there(&w, 0, false);
    }
    close_there(&w, true);
    for (int n = 0; n < 2; n++) { /* of the gather, of the copy */
        use_there(&w, 0);
        step_shards(&w);
        open_there(&w, FC_PHASE_FORWARD);
        CHECK_EQ(without_memory(t, n, use_once), FC_ERR_NOMEM);
        reshard_there(&w, 0, false);
        use_there(&w, 0);
        check_values_there(&w, 0);
        reshard_there(&w, 0, false);
        close_there(&w, true);
    }
    CHECK_EQ(fc_sim_bytes(w.ranks[0].device), w.ranks[0].rest_bytes);
    unmake_device_world(&w);
}

int main(void)
{
    for (int n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++) {
        test_between_phases(n_ranks);
        test_uses_bring_prefetches(n_ranks);
        test_a_kept_copy_follows_its_shards(n_ranks, false);
        test_a_kept_copy_follows_its_shards(n_ranks, true);
        test_slices(n_ranks);
    }
    test_offloaded_shards_are_free_at_once();
    for (int how = 0; how < 4; how++) {
        test_residence_begins_behind_the_first_forward(how & 1, how & 2);
    }
    test_no_slices_of_what_is_given_up();
    test_residence_does_not_begin();
    test_residence_fails();
    test_residence_ends_with_a_write(0, true, FC_OK);
    test_residence_ends_with_a_write(1, true, FC_ERR_INTERRUPTED);
    test_residence_ends_with_a_write(0, false, FC_OK);
    test_residence_cannot_end();
    test_failures();
    return check_result();
}
