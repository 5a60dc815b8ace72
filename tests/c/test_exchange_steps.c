/* The exchange step by step: where posts lie, and what is offered when. */
#define _GNU_SOURCE

#include "exchange_world.h"

/* Posts follow one another round the arena; room comes back in their order, when all have read it.
 */
static void body_places(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    for (int phase = 0; phase < 3; phase++) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(put(&w, 0, 10), FC_AGAIN); /* one post of a unit at a time */
        CHECK_EQ(put(&w, 1, 20), HALF);
        CHECK_EQ(put(&w, 2, 30), FC_AGAIN); /* it is full */
        meet_all(&w);
        if (rank == 0) {
            CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 0);
            take(&w, 0, 0, 10, 10);
            CHECK_EQ(put(&w, 2, 30), FC_AGAIN); /* the other rank has not read it */
        }
        meet_all(&w);
        if (rank == 1) {
            CHECK_EQ(next(&w, FC_SEARCH_OWN), 0);
            CHECK_EQ(put(&w, 2, 30), FC_AGAIN); /* this one has not */
            CHECK_EQ(put(&w, 0, 40), FC_AGAIN);
            take(&w, 0, 0, 10, 10);
            CHECK_EQ(put(&w, 2, 30), 0);
        }
        meet_all(&w);
        if (rank == 0) {
            CHECK_EQ(put(&w, 2, 30), 0);
        }
        CHECK_EQ(put(&w, 3, 40), FC_AGAIN); /* in front of the second post is no room left */
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 1);
        take(&w, 0, 1, 20, 20);
        meet_all(&w);
        CHECK_EQ(put(&w, 3, 40), HALF);
        CHECK_EQ(put(&w, 0, 50), FC_AGAIN);
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        take_all(&w, 0, 2, (float[N_UNITS][N_RANKS]){{0}, {0}, {30, 30}, {40, 40}}, NULL);
        CHECK_OK(fc_domain_close(w.domains[0]));
        meet_all(&w);
        open(&w, FC_PHASE_BACKWARD); /* all of it is free */
        meet_all(&w);
    }
    leave(&w);
}

/* What is left between the newest and the oldest post is room to the last byte. */
static void body_gaps(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL / 2);
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_EQ(put(&w, u, 10), (int64_t)u * HALF / 2);
    }
    meet_all(&w);
    for (size_t u = 0; u < 2; u++) {
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), u);
        take(&w, 0, u, 10, 10);
    }
    meet_all(&w);
    CHECK_EQ(put(&w, 0, 20), 0);
    CHECK_EQ(put(&w, 1, 20), HALF / 2);
    fc_domain_mark_closed(w.domains[0]);
    take_all(&w, 0, 0, (float[N_UNITS][N_RANKS]){{20, 20}, {20, 20}, {10, 10}, {10, 10}}, NULL);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* The oldest post alone, all of this rank's, whatever any rank has; and the gaps of who has none.
 */
static void body_searches(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL / 4);
    if (rank == 0) {
        for (size_t u = 0; u < 3; u++) {
            CHECK_EQ(put(&w, u, 10), (int64_t)u * HALF / 4);
        }
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        meet_all(&w); /* the other one has posted the second */
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 1);
        take(&w, 0, 1, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        meet_all(&w); /* and the first */
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 0);
        take(&w, 0, 0, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        meet_all(&w);
        meet_all(&w); /* and the fourth, and has left */
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 2);
        take(&w, 0, 2, 10, 0);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 3);
        take(&w, 0, 3, 0, 20);
    } else {
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS); /* the others' are for the end */
        CHECK_EQ(put(&w, 1, 20), 0);
        meet_all(&w);
        meet_all(&w);
        CHECK_EQ(put(&w, 0, 20), HALF / 4);
        meet_all(&w);
        meet_all(&w);
        CHECK_EQ(put(&w, 3, 20), HALF / 2);
        fc_domain_mark_closed(w.domains[0]);
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 1);
        take(&w, 0, 1, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 0);
        take(&w, 0, 0, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS); /* the third is not its own */
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 2);
        take(&w, 0, 2, 10, 0);
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 3);
        take(&w, 0, 3, 0, 20);
    }
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

static void check_left(int failing)
{
    CHECK_HAS(fc_last_message(), failing == 1 ? "rank 11 left the backward of step 1 by an "
                                                "exception while rank 10 was in reduce-scatter of "
                                                "unit first"
                                              : "rank 10 left the backward of step 1 by an "
                                                "exception while rank 11 was in reduce-scatter of "
                                                "unit first");
}

/* Who posts and leaves the phase by an exception is an error at the end alone, since what it posted
 * is whole: this rank may be about to raise the same exception. What was posted before a reset is
 * never offered. */
static void body_failed(int rank, int n_ranks, void *arg)
{
    const int failing = *(const int *)arg;
    fc_unit *unit = NULL;
    world w;

    (void)n_ranks;
    join(&w, rank, 1, USUAL);
    CHECK_EQ(put(&w, 2, 10), 0);
    fc_exchange_set_present(fc_domain_unit(w.domains[0], 3), 0);
    meet_all(&w);
    if (rank == failing) {
        fc_domain_fail(w.domains[0]);
    }
    meet_all(&w);
    if (rank != failing) {
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 2); /* all are in it */
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 2);
        CHECK_OK(fc_exchange_await(fc_domain_unit(w.domains[0], 2)));
        CHECK_EQ(put(&w, 0, 20), HALF); /* which the other one is not in */
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 2); /* a hook of it may raise the same here */
        take(&w, 0, 2, 10, 10);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_ALL, &unit), FC_ERR_PEER);
        check_left(failing);
        fc_domain_fail(w.domains[0]);
    }
    fc_exchange_reset(w.domains[0]);
    CHECK(!fc_exchange_is_present(fc_domain_unit(w.domains[0], 3), 0));
    meet_all(&w);
    if (rank ==
        failing) { /* who has failed reads no more: the other one has room before it goes on */
        meet_all(&w);
    }
    open(&w, FC_PHASE_BACKWARD);
    CHECK_EQ(put(&w, 2, 30), 0);
    CHECK_EQ(put(&w, 0, 40), HALF);
    if (rank != failing) {
        meet_all(&w);
    }
    meet_all(&w);
    CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 2);
    take(&w, 0, 2, 30, 30);
    fc_domain_mark_closed(w.domains[0]);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), 0);
    take(&w, 0, 0, 40, 40);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* A unit that the one who failed is not in is not offered, and an error for whoever waits for it.
 */
static void body_failed_before(int rank, int n_ranks, void *arg)
{
    const int failing = *(const int *)arg;
    world w;

    (void)n_ranks;
    join(&w, rank, 1, USUAL);
    CHECK_EQ(put(&w, 2, 10), 0);
    if (rank == failing) {
        fc_domain_fail(w.domains[0]);
        meet_all(&w);
    } else {
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 2);
        take(&w, 0, 2, 10, 10);
        CHECK_EQ(put(&w, 0, 20), 0);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        CHECK_EQ(fc_exchange_await(fc_domain_unit(w.domains[0], 0)), FC_ERR_PEER);
        check_left(failing);
        fc_domain_fail(w.domains[0]);
    }
    fc_exchange_reset(w.domains[0]);
    leave(&w);
}

/* Who has gone on without this backward is named by whoever adds up in it. */
static void body_skipped(int rank, int n_ranks, void *arg)
{
    const int skipping = *(const int *)arg;
    fc_unit *unit = NULL;
    char text[192];
    world w;

    (void)n_ranks;
    join(&w, rank, 1, USUAL);
    fc_domain_mark_closed(w.domains[0]);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    open(&w, rank == skipping ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD);
    meet_all(&w);
    if (rank != skipping) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_OWN, &unit), FC_ERR_MISMATCH);
        (void)snprintf(text, sizeof(text),
                       "ranks are out of step at unit first: rank %d went on to the forward of "
                       "step 2 without the backward of step 1 (number 2 of it) that rank %d is in",
                       10 + skipping, 10 + rank);
        CHECK_HAS(fc_last_message(), text);
    }
    meet_all(&w);
    fc_domain_fail(w.domains[0]);
    leave(&w);
}

/* A unit is told apart from others by who keeps its gradients, and in which step. */
static void body_kept(int rank, int n_ranks, void *arg)
{
    fc_unit *unit = NULL;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    CHECK_EQ(put(&w, 0, 10), 0);
    CHECK_EQ(put(&w, 1, 10), HALF);
    if (rank == 1) {
        fc_exchange_accumulate(fc_domain_unit(w.domains[0], 1));
    }
    meet_all(&w);
    CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 0);
    take(&w, 0, 0, 10, 10);
    meet_all(&w);
    if (rank == 1) { /* which hears of it from the other one */
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_ALL, &unit), FC_ERR_MISMATCH);
    } else {
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_OWN, &unit), FC_ERR_MISMATCH);
    }
    CHECK_HAS(fc_last_message(), "rank 11 keeps the gradients of unit second");
    CHECK_HAS(fc_last_message(), "in step 1;");
    if (rank == 0) {
        CHECK_EQ(fc_exchange_await(fc_domain_unit(w.domains[0], 1)), FC_ERR_MISMATCH);
        fc_domain_fail(w.domains[0]);
        meet_all(&w);
    }
    meet_all(&w);
    fc_domain_fail(w.domains[0]);
    fc_exchange_reset(w.domains[0]);
    leave(&w);
}

/* Waits for who has to post, or to leave. */
static void body_awaited(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 1) {
        (void)usleep(2000);
    }
    CHECK_EQ(put(&w, 1, 10), 0);
    CHECK_OK(fc_exchange_await(fc_domain_unit(w.domains[0], 1)));
    take(&w, 0, 1, 10, 10);
    if (rank == 0) {
        CHECK(put(&w, 0, 20) >= 0);
        CHECK_OK(fc_exchange_await(fc_domain_unit(w.domains[0], 0)));
        take(&w, 0, 0, 20, 0);
        fc_domain_mark_closed(w.domains[0]);
    } else {
        (void)usleep(2000);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 0);
        take(&w, 0, 0, 20, 0);
    }
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* A wait at the end counts for the first unit that is not settled. */
static void body_counted(int rank, int n_ranks, void *arg)
{
    int64_t n_waits;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 0) {
        CHECK_EQ(put(&w, 1, 10), 0);
        CHECK_EQ(put(&w, 2, 20), HALF);
    }
    meet_all(&w);
    n_waits = atomic_load(&ranks_common->values[0]);
    meet_all(&w);
    if (rank == 1) {
        CHECK(ranks_await(0, n_waits + 1));
    }
    fc_domain_mark_closed(w.domains[0]);
    take_two(&w, 0, 1, (float[]){10, 20}, (float[]){0, 0});
    for (size_t u = 0; u < N_UNITS && rank == 0; u++) {
        const fc_unit *unit = fc_domain_unit(w.domains[0], u);

        CHECK_EQ(fc_waits_of(w.domains[0], unit, FC_WAIT_REDUCE).n, u == 1);
    }
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* A domain without units has nothing to reduce. */
static void body_no_units(int rank, int n_ranks, void *arg)
{
    fc_unit *unit = NULL;
    member m;

    (void)arg;
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, NULL, 0, rank, n_ranks);
    member_open(&m, true, 1);
    CHECK_OK(fc_exchange_next(m.domain, FC_SEARCH_OWN, &unit));
    CHECK(unit == NULL);
    fc_domain_mark_closed(m.domain);
    CHECK_OK(fc_exchange_next(m.domain, FC_SEARCH_ALL, &unit));
    CHECK(unit == NULL);
    CHECK_OK(fc_domain_close(m.domain));
    member_leave(&m);
}

/* Who waits for a peer that ends is told so. */
static void body_peer_ends(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 1) {
        meet_all(&w);
        (void)raise(SIGKILL);
    }
    CHECK_EQ(put(&w, 0, 10), 0);
    meet_all(&w);
    CHECK_EQ(fc_exchange_await(fc_domain_unit(w.domains[0], 0)), FC_ERR_PEER);
    CHECK_HAS(fc_last_message(), "rank 11 (pid ");
    leave(&w);
}

static void test_peer_ends(void)
{
    int statuses[N_RANKS];

    ranks_run(N_RANKS, body_peer_ends, NULL, statuses);
    CHECK_EQ(statuses[0], 0);
    CHECK_EQ(statuses[1], SIGKILL);
}

int main(void)
{
    ranks_check(N_RANKS, body_places, NULL);
    ranks_check(N_RANKS, body_gaps, NULL);
    ranks_check(N_RANKS, body_searches, NULL);
    for (int failing = 0; failing < N_RANKS; failing++) {
        ranks_check(N_RANKS, body_failed, &failing);
        ranks_check(N_RANKS, body_failed_before, &failing);
        ranks_check(N_RANKS, body_skipped, &failing);
    }
    ranks_check(N_RANKS, body_kept, NULL);
    ranks_check(N_RANKS, body_awaited, NULL);
    ranks_check(N_RANKS, body_counted, NULL);
    ranks_check(N_RANKS, body_no_units, NULL);
    test_peer_ends();
    return check_result();
}
