/* Over messages: which units another one's gather brings along or begins, and what fails then. */
#define _GNU_SOURCE

#include "unsharding_world.h"

#include "engine/domain_private.h"

static size_t used_bytes(const world *w)
{
    fc_slots_trim(w->slots);
    return fc_slots_bytes(w->slots);
}

static void use(world *w, size_t u)
{
    CHECK_OK(unshard(w, u));
    check_values(w, u, 0);
    CHECK_OK(reshard(w, u));
}

/* A phase that uses these units, in this order; `n` of them. */
static void run_phase(world *w, fc_phase phase, const size_t *units, size_t n)
{
    open(w, phase);
    for (size_t i = 0; i < n; i++) {
        use(w, units[i]);
    }
    fc_unsharding_drop_begun(w->domain);
    close_phase(w);
}

/* Shards of step 0; the first forward follows no order, and no gather of it brings others. */
static void join_and_begin(world *w, int rank, int n_ranks)
{
    join(w, rank, n_ranks, false);
    write_shards(w, 0);
    open(w, FC_PHASE_FORWARD);
    close_phase(w);
}

static const size_t all_units[] = {0, 1, 2};

/* ---- along ---- */

/* Each that followed comes once, if it is away and its memory its gather's. */
static void body_followers(int rank, int n_ranks, void *arg)
{
    static const size_t with_two_uses[] = {0, 1, 2, 1};
    world w;
    uint64_t copied;
    size_t unit_bytes;

    (void)arg;
    join_and_begin(&w, rank, n_ranks);
    unit_bytes = w.owners[0].layout->full_bytes + w.owners[0].layout->pack_bytes;
    run_phase(&w, FC_PHASE_BACKWARD, with_two_uses, 4);

    open(&w, FC_PHASE_BACKWARD);
    copied = w.owners[1].traffic.copied;
    fc_domain_unit(w.domain, 0)->is_finished = true; /* so that its use is one anew */
    fc_domain_unit(w.domain, 1)->is_finished = true;
    use(&w, 0);
    CHECK_STATE(&w, 1, AHEAD);
    CHECK_STATE(&w, 2, AHEAD);
    CHECK_EQ(fc_order_n_ahead(w.domain), 2);
    CHECK_EQ(w.owners[1].traffic.copied - copied, unit_bytes);
    CHECK_EQ(w.domain->n_reused, 2);
    CHECK(!fc_domain_unit(w.domain, 0)->is_finished);
    CHECK(!fc_domain_unit(w.domain, 1)->is_finished);
    use(&w, 1);
    use(&w, 2);
    CHECK_EQ(fc_order_n_ahead(w.domain), 0);
    close_phase(&w);

    open(&w, FC_PHASE_BACKWARD); /* one is in use, or keeps its memory */
    CHECK_OK(unshard(&w, 1));
    CHECK_STATE(&w, 2, AHEAD);
    fc_unsharding_drop_ahead(w.owners[2].unsharding);
    fc_unsharding_keep_memory(w.owners[2].unsharding, true);
    use(&w, 0);
    CHECK_STATE(&w, 1, UNSHARDED);
    CHECK_STATE(&w, 2, SHARDED);
    CHECK_EQ(fc_order_n_ahead(w.domain), 0);
    CHECK_OK(reshard(&w, 1));
    fc_unsharding_keep_memory(w.owners[2].unsharding, false);
    use(&w, 2);
    close_phase(&w);

    /* What came along and was dropped is gathered, and counted, by itself. */
    run_phase(&w, FC_PHASE_BACKWARD, all_units, N_UNITS);
    open(&w, FC_PHASE_BACKWARD);
    use(&w, 0);
    CHECK_STATE(&w, 1, AHEAD);
    CHECK_EQ(used_bytes(&w), 2 * w.owners[0].layout->full_bytes);
    fc_unsharding_drop(w.owners[1].unsharding);
    CHECK_EQ(used_bytes(&w), w.owners[0].layout->full_bytes);
    {
        const uint64_t gathers = w.owners[1].traffic.gathers;

        use(&w, 1);
        CHECK_EQ(w.owners[1].traffic.gathers, gathers + 1);
    }
    use(&w, 2);
    close_phase(&w);

    /* As many as the limit lets through. */
    fc_batch_limit(w.domain, 2 * w.owners[1].layout->full_bytes - 1);
    open(&w, FC_PHASE_BACKWARD);
    use(&w, 0);
    CHECK_STATE(&w, 1, AHEAD);
    CHECK_STATE(&w, 2, SHARDED);
    use(&w, 1);
    use(&w, 2);
    close_phase(&w);
    fc_batch_limit(w.domain, BATCH_LIMIT);

    /* Whose module is gone comes along no more. */
    fc_unsharding_detach(w.owners[1].unsharding);
    open(&w, FC_PHASE_BACKWARD);
    use(&w, 0);
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_STATE(&w, 2, AHEAD);
    use(&w, 2);
    close_phase(&w);
    leave_world(&w);
}

/* The order of a forward outlives what is written and gathered behind it. */
static void body_written_between(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    run_phase(&w, FC_PHASE_FORWARD, all_units, 2);
    write_shards(&w, 1);
    CHECK_OK(fc_unsharding_gather(w.owners[2].unsharding));
    fc_unsharding_drop(w.owners[2].unsharding);
    open(&w, FC_PHASE_FORWARD);
    CHECK(!fc_order_is_learnt(w.domain));
    close_phase(&w);
    leave_world(&w);
}

/* Failures behind a gather leave the unit gathered; those of one that is shown, shown. */
static void body_failing(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    uint64_t gathers, unshards;

    (void)arg;
    join(&w, rank, n_ranks, false);
    fc_batch_limit(w.domain, 0);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_unsharding_show(o->unsharding), FC_ERR_NOMEM); /* the order has no room */
    fc_alloc_fail_after(-1);
    CHECK_STATE(&w, 0, GATHERED);
    CHECK(o->shown == NULL);
    CHECK_OK(fc_unsharding_show(o->unsharding));
    check_values(&w, 0, 0);
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    close_phase(&w);

    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    open(&w, FC_PHASE_FORWARD);
    gathers = o->traffic.gathers;
    unshards = o->traffic.unshards;
    messages_fail = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_GROUP);
    messages_fail = false;
    CHECK_STATE(&w, 0, KEPT);
    CHECK_EQ(o->traffic.unshards, unshards);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 1);
    CHECK_EQ(o->traffic.unshards, unshards + 1);
    CHECK_EQ(o->traffic.gathers, gathers + 1);
    CHECK_OK(unshard(&w, 0)); /* as it is */
    CHECK_EQ(o->traffic.unshards, unshards + 1);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* ---- begun ---- */

static void check_begun(int begun, int ended, int dropped)
{
    CHECK_EQ(n_begun, begun);
    CHECK_EQ(n_ended, ended);
    CHECK_EQ(n_dropped, dropped);
}

/* Large units, which have been used in a backward in their order. */
static void join_large(world *w, int rank, int n_ranks)
{
    n_begun = n_ended = n_dropped = 0;
    join_and_begin(w, rank, n_ranks);
    fc_batch_limit(w->domain, 1);
    run_phase(w, FC_PHASE_BACKWARD, all_units, N_UNITS);
}

/* Who is away, and whose memory is its gather's. */
static void body_may_begin(int rank, int n_ranks, void *arg)
{
    world w;
    uint64_t copied;

    (void)arg;
    can_begin = true;
    join_large(&w, rank, n_ranks);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(unshard(&w, 1));
    check_begun(1, 0, 0); /* the third one */
    copied = w.owners[2].traffic.copied;
    use(&w, 2);
    CHECK_EQ(w.owners[2].traffic.copied - copied,
             w.owners[2].layout->full_bytes + w.owners[2].layout->pack_bytes);
    CHECK_OK(reshard(&w, 1));
    close_phase(&w);
    run_phase(&w, FC_PHASE_BACKWARD, all_units, N_UNITS);
    n_begun = n_ended = n_dropped = 0;

    open(&w, FC_PHASE_BACKWARD); /* the second one is used already, the third keeps its memory */
    fc_unsharding_keep_memory(w.owners[2].unsharding, true);
    CHECK_OK(unshard(&w, 1));
    check_begun(0, 0, 0);
    use(&w, 0);
    check_begun(0, 0, 0);
    CHECK_OK(reshard(&w, 1));
    use(&w, 2);
    fc_unsharding_keep_memory(w.owners[2].unsharding, false);
    close_phase(&w);

    run_phase(&w, FC_PHASE_BACKWARD, all_units, N_UNITS);
    n_begun = n_ended = n_dropped = 0;
    fc_unsharding_detach(w.owners[1].unsharding); /* its module is gone: the one behind it */
    open(&w, FC_PHASE_BACKWARD);
    use(&w, 0);
    check_begun(1, 0, 0);
    use(&w, 2);
    check_begun(1, 1, 0);
    close_phase(&w);
    leave_world(&w);
    can_begin = false;
}

/* Of transports that cannot, nothing is begun. */
static void body_cannot_begin(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join_large(&w, rank, n_ranks);
    run_phase(&w, FC_PHASE_BACKWARD, all_units, N_UNITS);
    check_begun(0, 0, 0);
    leave_world(&w);
}

/* A gather that cannot begin, or does not end, leaves its unit as it was; one that waits for
 * another group's is made when it is asked for. */
static void body_begun_failing(int rank, int n_ranks, void *arg)
{
    static const char of_another_group;
    world w;
    size_t one;

    (void)arg;
    can_begin = true;
    join_large(&w, rank, n_ranks);
    one = w.owners[0].layout->full_bytes;
    n_begun = n_ended = n_dropped = 0;

    open(&w, FC_PHASE_BACKWARD);
    begun_send = &of_another_group;
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(used_bytes(&w), one);
    begun_send = NULL;
    check_begun(0, 0, 0);
    CHECK_OK(fc_unsharding_gather(w.owners[1].unsharding));
    check_begun(0, 0, 0);
    CHECK_OK(reshard(&w, 0));
    messages_fail = true;
    CHECK_EQ(fc_unsharding_show(w.owners[1].unsharding), FC_ERR_GROUP);
    messages_fail = false;
    CHECK_STATE(&w, 1, GATHERED);
    CHECK(w.owners[1].shown == NULL);
    CHECK_EQ(used_bytes(&w), one);
    CHECK_OK(fc_unsharding_show(w.owners[1].unsharding));
    check_values(&w, 1, 0);
    check_begun(1, 0, 0);
    CHECK_OK(reshard(&w, 1));

    messages_fail = true;
    CHECK_EQ(unshard(&w, 2), FC_ERR_GROUP);
    messages_fail = false;
    check_begun(1, 1, 0);
    CHECK_STATE(&w, 2, SHARDED);
    CHECK_EQ(used_bytes(&w), 0);
    use(&w, 2);
    close_phase(&w);

    run_phase(&w, FC_PHASE_BACKWARD, all_units, N_UNITS);
    open(&w, FC_PHASE_BACKWARD);
    w.owners[1].writes[0]++; /* before its gather begins: peers get what was written */
    use(&w, 0);
    CHECK_OK(unshard(&w, 1));
    messages_fail = true; /* a use of what is shown begins the next, too */
    fc_unsharding_drop_begun(w.domain);
    CHECK_EQ(unshard(&w, 1), FC_ERR_GROUP);
    messages_fail = false;
    CHECK_STATE(&w, 1, UNSHARDED);
    CHECK_OK(unshard(&w, 1));
    CHECK_OK(reshard(&w, 1));
    (void)used_bytes(&w);
    fc_alloc_fail_after(0); /* memory that is short when it ends */
    CHECK_EQ(unshard(&w, 2), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_STATE(&w, 2, SHARDED);
    CHECK_OK(unshard(&w, 2));
    check_values(&w, 2, 0);
    CHECK_OK(reshard(&w, 2));
    close_phase(&w);

    /* Short when it begins. */
    run_phase(&w, FC_PHASE_BACKWARD, all_units, N_UNITS);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(fc_unsharding_gather(w.owners[0].unsharding));
    (void)used_bytes(&w);
    CHECK_OK(fc_order_note(fc_domain_unit(w.domain, 0))); /* has room from now on */
    n_begun = 0;
    for (int n = 0; n < 2; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_unsharding_show(w.owners[0].unsharding), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK_STATE(&w, 0, GATHERED);
        CHECK_EQ(n_begun, 0);
        CHECK_EQ(used_bytes(&w), one);
    }
    fc_unsharding_drop(w.owners[0].unsharding);
    fc_domain_fail(w.domain);
    leave_world(&w);
    can_begin = false;
}

int main(void)
{
    for (int n_ranks = 2; n_ranks <= 3; n_ranks++) {
        ranks_check(n_ranks, body_followers, NULL);
        ranks_check(n_ranks, body_written_between, NULL);
        ranks_check(n_ranks, body_failing, NULL);
        ranks_check(n_ranks, body_may_begin, NULL);
        ranks_check(n_ranks, body_cannot_begin, NULL);
        ranks_check(n_ranks, body_begun_failing, NULL);
    }
    return check_result();
}
