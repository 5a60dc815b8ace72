/* A unit's parameters between shards and the whole: each state, over shared memory and messages. */
#define _GNU_SOURCE

#include "unsharding_world.h"

/* ---- transitions ---- */

static void test_transitions(void)
{
    static const struct {
        fc_unsharding_event event;
        fc_unsharding_state from, to;
    } legal[] = {
        {FC_UNIT_ASK, FC_UNIT_SHARDED, FC_UNIT_REQUESTED},
        {FC_UNIT_ASK, FC_UNIT_SLICED, FC_UNIT_REQUESTED},
        {FC_UNIT_ASK, FC_UNIT_REQUESTED, FC_UNIT_REQUESTED},
        {FC_UNIT_ASK, FC_UNIT_GATHERED, FC_UNIT_GATHERED},
        {FC_UNIT_ASK, FC_UNIT_AHEAD, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_SHARDED, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_SLICED, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_REQUESTED, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_GATHERED, FC_UNIT_GATHERED},
        {FC_UNIT_COME_ALONG, FC_UNIT_SHARDED, FC_UNIT_AHEAD},
        {FC_UNIT_COME_ALONG, FC_UNIT_SLICED, FC_UNIT_AHEAD},
        {FC_UNIT_OUTDATE, FC_UNIT_GATHERED, FC_UNIT_REQUESTED},
        {FC_UNIT_SHOW, FC_UNIT_REQUESTED, FC_UNIT_UNSHARDED},
        {FC_UNIT_SHOW, FC_UNIT_GATHERED, FC_UNIT_UNSHARDED},
        {FC_UNIT_SHOW_COPY, FC_UNIT_GATHERED, FC_UNIT_KEPT},
        {FC_UNIT_KEEP, FC_UNIT_UNSHARDED, FC_UNIT_KEPT},
        {FC_UNIT_KEEP, FC_UNIT_KEPT, FC_UNIT_KEPT},
        {FC_UNIT_RENEW, FC_UNIT_KEPT, FC_UNIT_UNSHARDED},
        {FC_UNIT_RESHARD, FC_UNIT_SLICED, FC_UNIT_SHARDED},
        {FC_UNIT_RESHARD, FC_UNIT_UNSHARDED, FC_UNIT_SHARDED},
        {FC_UNIT_RESHARD, FC_UNIT_KEPT, FC_UNIT_SHARDED},
        {FC_UNIT_RESHARD_TO_SLICE, FC_UNIT_UNSHARDED, FC_UNIT_SLICED},
        {FC_UNIT_RESHARD_TO_SLICE, FC_UNIT_KEPT, FC_UNIT_SLICED},
        {FC_UNIT_DROP, FC_UNIT_SHARDED, FC_UNIT_SHARDED},
        {FC_UNIT_DROP, FC_UNIT_REQUESTED, FC_UNIT_SHARDED},
        {FC_UNIT_DROP, FC_UNIT_GATHERED, FC_UNIT_SHARDED},
        {FC_UNIT_DROP, FC_UNIT_AHEAD, FC_UNIT_SHARDED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_SLICED, FC_UNIT_SLICED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_REQUESTED, FC_UNIT_SLICED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_GATHERED, FC_UNIT_SLICED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_AHEAD, FC_UNIT_SLICED},
    };
    const size_t n_legal = sizeof(legal) / sizeof(legal[0]);

    for (int event = 0; event < FC_UNIT_EVENT_COUNT; event++) {
        for (int from = 0; from < FC_UNIT_STATE_COUNT; from++) {
            fc_unsharding_state to = FC_UNIT_STATE_COUNT;
            const fc_status st =
                fc_unsharding_next((fc_unsharding_state)from, (fc_unsharding_event)event, &to);
            size_t k = 0;

            while (k < n_legal && ((int)legal[k].event != event || (int)legal[k].from != from)) {
                k++;
            }
            CHECK_EQ(st, k < n_legal ? FC_OK : FC_ERR_STATE);
            CHECK_EQ(to, k < n_legal ? legal[k].to : FC_UNIT_STATE_COUNT);
        }
    }
    CHECK_HAS(fc_last_message(), "a unit that is unsharded since before is dropped without a use, "
                                 "and still has its slice");
}

/* ---- programs; `arg`: whether in shared memory ---- */

static void body_steps(int rank, int n_ranks, void *arg)
{
    static const fc_phase phases[] = {FC_PHASE_FORWARD, FC_PHASE_BACKWARD};
    world w;

    join(&w, rank, n_ranks, *(const bool *)arg);
    for (int step = 0; step < N_STEPS; step++) {
        write_shards(&w, step);
        for (size_t p = 0; p < 2; p++) {
            open(&w, phases[p]);
            for (size_t u = 0; u < N_UNITS; u++) {
                CHECK_OK(fc_unsharding_gather(w.owners[u].unsharding)); /* asked for, then used */
                CHECK_EQ(fc_unsharding_state_of(w.owners[u].unsharding),
                         w.is_mapped ? FC_UNIT_REQUESTED : FC_UNIT_GATHERED);
                CHECK_OK(unshard(&w, u));
                CHECK_STATE(&w, u, UNSHARDED);
                CHECK_OK(unshard(&w, u));
                check_values(&w, u, step);
                CHECK_OK(reshard(&w, u));
                CHECK_STATE(&w, u, SHARDED);
                CHECK(w.owners[u].shown == NULL && !w.owners[u].is_entered);
            }
            close_phase(&w);
        }
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_traffic *t = &w.owners[u].traffic;

        CHECK_EQ(t->unshards, 2 * N_STEPS);
        /* The first phases follow no order. Then backward gathers two units with the first, and
         * forward, whose first gather is alone, one with the second. */
        CHECK_EQ(t->gathers, n_ranks == 1            ? 0
                             : w.is_mapped || u == 0 ? 2 * N_STEPS
                             : u == 1                ? N_STEPS + 1
                                                     : 2);
        CHECK_EQ(t->gathered % (2 * N_STEPS), 0);
        CHECK_EQ(t->gathered > 0, n_ranks > 1);
    }
    leave_world(&w);
}

/* Outside of phases a unit gets memory of its own, and follows its shards from the next forward on;
 * but for writes to it, which last. */
static void body_explicit(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[1];

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_STATE(&w, 1, GATHERED);
    fc_unsharding_drop(o->unsharding);
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_OK(unshard(&w, 1));
    CHECK_STATE(&w, 1, KEPT);
    CHECK(fc_unsharding_has_own_memory(o->unsharding));
    check_values(&w, 1, 0);
    CHECK_OK(barrier(&w.host)); /* a peer has read the shards */
    write_shards(&w, 1);
    check_values(&w, 1, 0);
    o->is_written[0] = true;
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 0);
    o->is_written[0] = false;
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 1);
    CHECK_EQ(fc_unsharding_state_of(o->unsharding), w.is_mapped ? FC_UNIT_UNSHARDED : FC_UNIT_KEPT);
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    CHECK_STATE(&w, 1, KEPT);
    close_phase(&w);
    write_shards(&w, 2);
    check_values(&w, 1, 1); /* its memory outlives the phase */
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 2);
    CHECK_OK(reshard(&w, 1));
    close_phase(&w);
    /* What was gathered before a phase is of before it. */
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 0);
    CHECK_STATE(&w, 1, UNSHARDED);
    CHECK_OK(reshard(&w, 1));
    close_phase(&w);
    leave_world(&w);
}

/* What a reshard leaves: memory that stays, a graph that may read, a unit that is withheld. */
static void body_flags(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    const char *memory;

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    fc_unsharding_keep_memory(o->unsharding, true);
    CHECK_OK(unshard(&w, 0));
    memory = o->shown;
    fc_unsharding_stay_unsharded(o->unsharding);
    CHECK(fc_unsharding_stays_unsharded(o->unsharding));
    CHECK_OK(reshard(&w, 0));
    CHECK(!fc_unsharding_stays_unsharded(o->unsharding));
    CHECK(o->shown == memory && !o->is_entered);
    fc_unsharding_withhold(o->unsharding);
    CHECK(!o->is_withheld); /* it can be read */
    CHECK_OK(unshard(&w, 0));
    CHECK(o->shown == memory);
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    fc_unsharding_keep_memory(o->unsharding, false);
    CHECK(o->shown == NULL);

    CHECK_OK(unshard(&w, 0));
    fc_unsharding_set_graph(o->unsharding, true);
    CHECK_OK(reshard(&w, 0));
    CHECK_EQ(o->shown != NULL, w.is_mapped);
    CHECK(w.is_mapped || o->keeps_size);
    CHECK_EQ(fc_unsharding_is_read_apart(o->unsharding), !w.is_mapped);
    fc_unsharding_set_graph(o->unsharding, false);
    CHECK(o->shown == NULL);
    close_phase(&w);

    open(&w, FC_PHASE_BACKWARD);
    fc_unsharding_withhold(o->unsharding);
    CHECK(o->is_withheld);
    CHECK_OK(reshard(&w, 0));
    CHECK(!o->is_withheld && o->shown == NULL);
    close_phase(&w);

    /* Nothing is left of it while it is sharded. */
    open(&w, FC_PHASE_BACKWARD);
    CHECK(fc_unsharding_is_settled(o->unsharding));
    CHECK_OK(unshard(&w, 0));
    CHECK(!fc_unsharding_is_settled(o->unsharding));
    CHECK_OK(reshard(&w, 0));
    CHECK(fc_unsharding_is_settled(o->unsharding));
    close_phase(&w);
    leave_world(&w);
}

/* Shards that are written within a forward are read when all ranks have written theirs; after a
 * read they are an error. */
static void body_written(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, true);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(fc_unsharding_check_unwritten(w.owners[0].unsharding));
    CHECK_OK(barrier(&w.host)); /* for the test: all ranks have seen that */
    write_shards(&w, 1);
    CHECK(fc_unsharding_was_written(w.owners[1].unsharding));
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 1);
    CHECK(!fc_unsharding_was_written(w.owners[1].unsharding));
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(reshard(&w, 1));
    if (n_ranks == 1) {
        CHECK_OK(unshard(&w, 0));
        CHECK_OK(reshard(&w, 0));
    } else {
        CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
        CHECK_STATE(&w, 0, SHARDED);
        CHECK_EQ(w.owners[0].n_told, 1);
        CHECK_EQ(w.owners[0].told, FC_WRITTEN_IN_FORWARD);
        CHECK(!fc_domain_is_open(w.domain));
    }
    fc_domain_fail(w.domain);
    leave_world(&w);
}

static void backward_until(world *w, size_t n)
{
    open(w, FC_PHASE_BACKWARD);
    for (size_t u = 0; u < n; u++) {
        CHECK_OK(unshard(w, u));
        CHECK_OK(reshard(w, u));
    }
}

/* Over messages: units that come along are used, dropped, or found written. */
static void body_ahead(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    close_phase(&w);
    backward_until(&w, N_UNITS);
    close_phase(&w);

    backward_until(&w, 1);
    CHECK_STATE(&w, 1, AHEAD);
    CHECK_STATE(&w, 2, AHEAD);
    CHECK_EQ(fc_order_n_ahead(w.domain), 2);
    CHECK(!fc_unsharding_is_settled(w.owners[1].unsharding));
    w.owners[1].writes[1]++;
    CHECK_EQ(unshard(&w, 1), FC_ERR_INTERRUPTED);
    CHECK_EQ(w.owners[1].told, FC_WRITTEN_IN_BACKWARD);
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_OK(fc_unsharding_gather(w.owners[2].unsharding)); /* asked for, and dropped */
    CHECK_STATE(&w, 2, GATHERED);
    CHECK_EQ(fc_order_n_ahead(w.domain), 0);
    fc_unsharding_drop(w.owners[2].unsharding);
    CHECK_OK(unshard(&w, 2)); /* so that the order is as before */
    CHECK_OK(reshard(&w, 2));
    close_phase(&w);

    /* A failure leaves those that were to come along as they were, too. */
    backward_until(&w, N_UNITS);
    close_phase(&w);
    open(&w, FC_PHASE_BACKWARD);
    messages_fail = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_GROUP);
    messages_fail = false;
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_STATE(&w, u, SHARDED);
    }
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    for (int n = 0; n < 40; n++) { /* memory that is short */
        fc_alloc_fail_after(n);
        if (unshard(&w, 0) == FC_OK) {
            break;
        }
        fc_alloc_fail_after(-1);
        CHECK_STATE(&w, 0, SHARDED);
        CHECK_EQ(fc_order_n_ahead(w.domain), 0);
        fc_slots_trim(w.slots);
        CHECK_EQ(fc_slots_bytes(w.slots), 0);
    }
    fc_alloc_fail_after(-1);
    check_values(&w, 0, 0);
    CHECK_STATE(&w, 1, AHEAD);
    /* Whose module is gone comes along no more. */
    fc_unsharding_detach(w.owners[2].unsharding);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    backward_until(&w, 1);
    CHECK_STATE(&w, 2, SHARDED);
    close_phase(&w);
    leave_world(&w);
}

static void phase_of_all(world *w, fc_phase phase)
{
    open(w, phase);
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_OK(unshard(w, u));
        CHECK_OK(reshard(w, u));
    }
    close_phase(w);
}

static void forward_until(world *w, size_t n)
{
    open(w, FC_PHASE_FORWARD);
    for (size_t u = 0; u < n; u++) {
        CHECK_OK(unshard(w, u));
        CHECK_OK(reshard(w, u));
    }
}

/* Over messages: a forward follows the one before unless some rank has written shards in that. */
static void body_ahead_in_forward(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    forward_until(&w, 1);
    CHECK_STATE(&w, 1, SHARDED);
    for (size_t u = 1; u < N_UNITS; u++) {
        CHECK_OK(unshard(&w, u));
        CHECK_OK(reshard(&w, u));
    }
    close_phase(&w);

    forward_until(&w, 1); /* the first gather is alone */
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_OK(unshard(&w, 1));
    CHECK_STATE(&w, 2, AHEAD);
    w.owners[2].writes[0]++; /* the same bytes: peers have the right ones */
    CHECK_OK(unshard(&w, 2));
    check_values(&w, 2, 0);
    CHECK_OK(reshard(&w, 1));
    CHECK_OK(reshard(&w, 2));
    close_phase(&w);

    /* One rank finds other bytes, and leaves; then nobody goes ahead, and then all do again. */
    forward_until(&w, 2);
    CHECK_STATE(&w, 2, AHEAD);
    if (rank == 0) {
        const fc_param *p = &w.owners[2].layout->params[1];
        float *last = &w.owners[2].shards[1][p->own_rows * p->inner - 1];

        *last += 1; /* around the counters */
        CHECK_EQ(unshard(&w, 2), FC_ERR_INTERRUPTED);
        CHECK_EQ(w.owners[2].told, FC_WRITTEN_AHEAD);
        CHECK_STATE(&w, 2, SHARDED);
        *last -= 1;
        fc_domain_fail(w.domain);
    } else {
        CHECK_OK(unshard(&w, 2));
        CHECK_OK(reshard(&w, 2));
        fc_domain_mark_closed(w.domain);
        CHECK(fc_domain_close(w.domain) != FC_ERR_MISMATCH); /* a peer has left it */
    }
    forward_until(&w, 2);
    CHECK_STATE(&w, 2, SHARDED);
    CHECK_OK(unshard(&w, 2));
    CHECK_OK(reshard(&w, 2));
    close_phase(&w);
    forward_until(&w, 2);
    CHECK_STATE(&w, 2, AHEAD);
    fc_unsharding_drop_ahead(w.owners[2].unsharding);
    close_phase(&w);

    /* A rank that writes in the forward that looks for it keeps all from going ahead. */
    open(&w, FC_PHASE_FORWARD);
    fc_domain_fail(w.domain);
    for (int step = 0; step < 3; step++) {
        open(&w, FC_PHASE_FORWARD);
        CHECK_OK(unshard(&w, 0));
        CHECK_OK(reshard(&w, 0));
        if (rank == n_ranks - 1) {
            w.owners[1].writes[0]++; /* of the same bytes this time */
        }
        CHECK_OK(unshard(&w, 1));
        CHECK_STATE(&w, 2, SHARDED);
        CHECK_OK(unshard(&w, 2));
        CHECK_OK(reshard(&w, 1));
        CHECK_OK(reshard(&w, 2));
        close_phase(&w);
    }
    phase_of_all(&w, FC_PHASE_BACKWARD);
    leave_world(&w);
}

static void check_begun(int begun, int ended, int dropped)
{
    CHECK_EQ(n_begun, begun);
    CHECK_EQ(n_ended, ended);
    CHECK_EQ(n_dropped, dropped);
}

static void end_begun(world *w)
{
    fc_unsharding_drop_begun(w->domain);
    close_phase(w);
}

/* Over messages that can be begun: the next large unit's gather begins when one is used in
 * backward, and is used, dropped, or found written. */
static void body_begun(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    can_begin = true;
    n_begun = n_ended = n_dropped = 0;
    join(&w, rank, n_ranks, false);
    fc_batch_limit(w.domain, 1); /* all are large */
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    backward_until(&w, N_UNITS);
    end_begun(&w);
    check_begun(0, 0, 0); /* neither a forward nor the first backward knows what comes next */

    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(unshard(&w, 0));
    check_begun(1, 0, 0);
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_OK(unshard(&w, 1));
    check_begun(2, 1, 0);
    check_values(&w, 0, 0);
    check_values(&w, 1, 0);
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(reshard(&w, 1));
    CHECK_OK(unshard(&w, 2));
    check_begun(2, 2, 0);
    check_values(&w, 2, 0);
    CHECK_OK(reshard(&w, 2));
    end_begun(&w);

    backward_until(&w, 1); /* another course than the one before */
    CHECK_OK(unshard(&w, 2));
    check_values(&w, 2, 0);
    check_begun(3, 2, 0);
    CHECK_OK(reshard(&w, 2));
    end_begun(&w);
    check_begun(3, 2, 1);

    backward_until(&w, 1); /* of 0 and 2: the order of the last one */
    check_begun(4, 2, 1);
    w.owners[2].writes[1]++;
    CHECK_EQ(unshard(&w, 2), FC_ERR_INTERRUPTED);
    CHECK_EQ(w.owners[2].told, FC_WRITTEN_IN_BACKWARD);
    check_begun(4, 3, 1); /* with its peers */
    CHECK_STATE(&w, 2, SHARDED);
    CHECK_OK(unshard(&w, 2));
    CHECK_OK(reshard(&w, 2));
    end_begun(&w);

    backward_until(&w, 1);
    check_begun(5, 3, 1);
    fc_unsharding_detach(w.owners[2].unsharding); /* its module is gone */
    check_begun(5, 3, 2);
    close_phase(&w);
    leave_world(&w);
    can_begin = false;
}

/* What fails leaves the unit as it was. */
static void body_failing(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_STATE(&w, 0, SHARDED);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    if (!w.is_mapped) {
        messages_fail = true;
        CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_GROUP);
        messages_fail = false;
        CHECK_STATE(&w, 0, SHARDED);
    }
    open(&w, FC_PHASE_FORWARD);
    o->fails = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, UNSHARDED); /* so that a reshard puts its parts right */
    o->fails = true;
    CHECK_EQ(reshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, UNSHARDED);
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

int main(void)
{
    static bool kinds[] = {true, false};

    test_transitions();
    for (size_t k = 0; k < 2; k++) {
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
            ranks_check(n_ranks, body_steps, &kinds[k]);
            ranks_check(n_ranks, body_explicit, &kinds[k]);
            ranks_check(n_ranks, body_flags, &kinds[k]);
            ranks_check(n_ranks, body_failing, &kinds[k]);
        }
    }
    ranks_check(1, body_written, NULL);
    ranks_check(2, body_written, NULL);
    ranks_check(2, body_ahead, NULL);
    ranks_check(3, body_ahead, NULL);
    ranks_check(2, body_ahead_in_forward, NULL);
    ranks_check(3, body_ahead_in_forward, NULL);
    ranks_check(2, body_begun, NULL);
    ranks_check(3, body_begun, NULL);
    return check_result();
}
