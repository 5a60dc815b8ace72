/* Writes to shards: who notices them, whose order of a forward they end, what a failure leaves. */
#define _GNU_SOURCE

#include "unsharding_world.h"

static void use(world *w, size_t u, int step)
{
    CHECK_OK(unshard(w, u));
    check_values(w, u, step);
    CHECK_OK(reshard(w, u));
}

/* Another value of one element, on all ranks: behind the first forward unit 0 has it. */
static void write_element(world *w, size_t u, size_t param, float value)
{
    w->owners[u].shards[param][0] = value;
    w->owners[u].writes[param]++;
}

/* ---- over messages ---- */

/* A forward that follows no order learns one unless somebody writes in it; whether it did. */
static bool learns(world *w)
{
    bool does;

    open(w, FC_PHASE_FORWARD);
    does = fc_order_is_learnt(w->domain);
    fc_domain_fail(w->domain);
    return !does;
}

/* Writes before a unit is gathered, and between two gathers of it: each parameter counts. */
static void body_learnt(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    for (size_t i = 0; i < N_PARAMS; i++) {
        for (int is_counted = 0; is_counted < 2; is_counted++) {
            const float before = w.owners[1].shards[i][0];

            open(&w, FC_PHASE_FORWARD);
            use(&w, 0, 0);
            if (is_counted) { /* of the same bytes */
                w.owners[1].writes[i]++;
            } else { /* around the counters */
                w.owners[1].shards[i][0] = 60;
            }
            CHECK_OK(unshard(&w, 1));
            CHECK_OK(reshard(&w, 1));
            w.owners[1].shards[i][0] = before;
            close_phase(&w);
            CHECK_EQ(learns(&w), n_ranks == 1); /* where nothing goes ahead nobody looks */
        }
        open(&w, FC_PHASE_FORWARD); /* in between two uses of it */
        use(&w, 0, 0);
        use(&w, 1, 0);
        w.owners[0].writes[i]++;
        use(&w, 0, 0);
        close_phase(&w);
        CHECK_EQ(learns(&w), n_ranks == 1);
    }
    open(&w, FC_PHASE_FORWARD);
    use(&w, 0, 0);
    use(&w, 1, 0);
    close_phase(&w);
    CHECK(learns(&w));
    leave_world(&w);
}

/* A script that writes between two uses of a unit, in each forward, is never told of an error. */
static void body_written_in_each(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    fc_batch_limit(w.domain, w.owners[0].layout->full_bytes); /* one unit comes along */
    write_shards(&w, 0);
    for (int step = 0; step < 5; step++) {
        static const size_t order[] = {0, 2, 1, 0, 2};

        open(&w, FC_PHASE_FORWARD);
        for (size_t n = 0; n < 5; n++) {
            if (n == 4) {
                write_element(&w, 2, 0, (float)step);
            }
            CHECK_OK(unshard(&w, order[n]));
            CHECK_OK(reshard(&w, order[n]));
        }
        CHECK_EQ(w.owners[2].n_told, 0);
        close_phase(&w);
    }
    leave_world(&w);
}

/* What came ahead in a forward and was written since is an error, and ends the order; who writes
 * before the first gather of a forward does not. */
static void body_written_ahead(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    for (size_t i = 0; i < N_PARAMS; i++) {
        for (int n = 0; n < 3; n++) {
            open(&w, FC_PHASE_FORWARD);
            if (n == 1) {
                w.owners[0].writes[0]++;
            }
            use(&w, 0, 0);
            use(&w, 1, 0);
            CHECK_MSG(fc_unsharding_state_of(w.owners[2].unsharding) ==
                          (n == 0 ? FC_UNIT_SHARDED : FC_UNIT_AHEAD),
                      "forward %d", n);
            use(&w, 2, 0);
            close_phase(&w);
            open(&w, FC_PHASE_BACKWARD);
            close_phase(&w);
        }
        open(&w, FC_PHASE_FORWARD);
        use(&w, 0, 0);
        use(&w, 1, 0);
        w.owners[2].shards[i][0] += 1;
        CHECK_EQ(unshard(&w, 2), FC_ERR_INTERRUPTED);
        CHECK_EQ(w.owners[2].told, FC_WRITTEN_AHEAD);
        CHECK_EQ(w.owners[2].told_param, i);
        CHECK_STATE(&w, 2, SHARDED);
        w.owners[2].shards[i][0] -= 1;
        close_phase(&w); /* an exception that was caught */
        open(&w, FC_PHASE_BACKWARD);
        CHECK(fc_order_is_learnt(w.domain));
        close_phase(&w);
    }
    leave_world(&w);
}

static void body_written_in_backward(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    close_phase(&w);
    for (size_t n = 0; n <= N_PARAMS; n++) {
        open(&w, FC_PHASE_BACKWARD);
        use(&w, 0, 0);
        CHECK_EQ(fc_unsharding_state_of(w.owners[1].unsharding),
                 n == 0 ? FC_UNIT_SHARDED : FC_UNIT_AHEAD);
        if (n > 0) {
            w.owners[1].writes[n - 1]++;
            CHECK_EQ(unshard(&w, 1), FC_ERR_INTERRUPTED);
            CHECK_EQ(w.owners[1].told, FC_WRITTEN_IN_BACKWARD);
            CHECK_EQ(w.owners[1].told_param, n - 1);
        }
        use(&w, 1, 0);
        close_phase(&w);
    }
    leave_world(&w);
}

/* ---- in shared memory ---- */

/* Of what a forward has read, shards that peers read where they lie must not be written. */
static void body_unwritten(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    (void)arg;
    for (size_t aliased = 0; aliased < N_PARAMS; aliased++) {
        computed[aliased] = FC_F32;
        computed[1 - aliased] = FC_BF16;
        join(&w, rank, n_ranks, true);
        write_shards(&w, 0);
        open(&w, FC_PHASE_FORWARD);
        o->writes[aliased]++;
        CHECK_OK(fc_unsharding_check_unwritten(o->unsharding)); /* not read yet */
        o->writes[aliased]--;
        use(&w, 0, 0);
        CHECK_OK(fc_unsharding_check_unwritten(o->unsharding));
        o->writes[1 - aliased]++; /* a copy */
        CHECK_OK(fc_unsharding_check_unwritten(o->unsharding));
        CHECK_EQ(o->n_told, 0);
        CHECK(fc_domain_is_open(w.domain));
        o->writes[aliased]++;
        CHECK_EQ(fc_unsharding_check_unwritten(o->unsharding),
                 n_ranks > 1 ? FC_ERR_INTERRUPTED : FC_OK);
        CHECK_EQ(o->n_told, n_ranks > 1);
        if (n_ranks > 1) {
            CHECK_EQ(o->told, FC_WRITTEN_IN_FORWARD);
            CHECK_EQ(o->told_param, aliased);
            CHECK(!fc_domain_is_open(w.domain));
        }
        fc_domain_fail(w.domain);
        leave_world(&w);
    }
}

/* One rank alone writes before a use within a forward: it is told, and leaves the phase; no peer
 * gets the write. */
static void body_written_alone(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, true);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    use(&w, 0, 0);
    if (rank == 0) {
        w.owners[1].writes[0]++;
        write_element(&w, 1, 1, 60);
        CHECK_EQ(unshard(&w, 1), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "shards of unit second were written within a forward on rank "
                                     "10 and not on rank 11");
        CHECK_STATE(&w, 1, SHARDED);
        CHECK(!fc_domain_is_open(w.domain));
    } else {
        CHECK_OK(unshard(&w, 1));
        CHECK_EQ(fc_domain_close(w.domain), FC_ERR_PEER);
        check_values(&w, 1, 0);
        CHECK_OK(reshard(&w, 1));
    }
    leave_world(&w);
}

int main(void)
{
    for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
        ranks_check(n_ranks, body_learnt, NULL);
        ranks_check(n_ranks, body_unwritten, NULL);
    }
    ranks_check(2, body_written_in_each, NULL);
    ranks_check(2, body_written_ahead, NULL);
    ranks_check(2, body_written_in_backward, NULL);
    ranks_check(2, body_written_alone, NULL);
    return check_result();
}
