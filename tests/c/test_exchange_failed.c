/* The exchange of three ranks, one of which leaves the phase by an exception. */
#define _GNU_SOURCE
#define N_RANKS 3

#include "exchange_world.h"

/* Rank 1 fails without a post of the first unit, and rank 2 reads nothing and ends. Rank 0, whose
 * arena is full, finds out: its first post is ready but for the one that has failed, which is no
 * progress. */
static void body_full(int rank, int n_ranks, void *arg)
{
    world w;
    fc_status st = FC_OK;
    int i;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, FC_PAGE / 2 / N_RANKS / sizeof(float) / 16 * 16);
    if (rank == 0) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK(put(&w, 1, 20) > 0);
    } else if (rank == 1) {
        fc_domain_fail(w.domains[0]);
    } else {
        CHECK_EQ(put(&w, 0, 30), 0);
    }
    meet_all(&w);
    if (rank == 2) {
        (void)raise(SIGKILL);
    }
    if (rank == 0) {
        for (i = 0; i < 1000 && st == FC_OK; i++) {
            CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
            CHECK_EQ(put(&w, 2, 40), FC_AGAIN);
            st = make_way(&w, 0, 2);
        }
        CHECK_EQ(st, FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "rank 12 (pid ");
        CHECK(i <= 2); /* the post of rank 2 was copied away, and then it was waited for */
    }
    fc_domain_fail(w.domains[0]);
    fc_exchange_reset(w.domains[0]);
    leave(&w);
}

static void test_full(void)
{
    int statuses[N_RANKS];

    ranks_run(N_RANKS, body_full, NULL, statuses);
    CHECK_EQ(statuses[0], 0);
    CHECK_EQ(statuses[1], 0);
    CHECK_EQ(statuses[2], SIGKILL);
}

/* A unit that the one who failed is not in is in nobody's way: the other ones are found. */
static void body_others(int rank, int n_ranks, void *arg)
{
    const int failing = *(const int *)arg;
    fc_unit *unit = NULL;
    char text[64];
    world w;

    (void)n_ranks;
    join(&w, rank, 1, FC_PAGE / 4 / N_RANKS / sizeof(float) / 16 * 16);
    if (rank != failing) {
        CHECK_EQ(put(&w, 0, 10), 0);
    }
    CHECK(put(&w, 3, 20) >= 0);
    meet_all(&w);
    if (rank == failing) {
        fc_domain_fail(w.domains[0]);
    }
    meet_all(&w);
    if (rank != failing) {
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 3);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 3);
        fc_exchange_consume(fc_domain_unit(w.domains[0], 3));
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_ALL, &unit), FC_ERR_PEER);
        (void)snprintf(text, sizeof(text), "rank %d left the backward of step 1 by an exception",
                       10 + failing);
        CHECK_HAS(fc_last_message(), text);
        CHECK_HAS(fc_last_message(), "in reduce-scatter of unit first");
        fc_domain_fail(w.domains[0]);
    }
    meet_all(&w);
    fc_exchange_reset(w.domains[0]);
    leave(&w);
}

int main(void)
{
    test_full();
    for (int failing = 0; failing < 2; failing++) {
        ranks_check(N_RANKS, body_others, &failing);
    }
    return check_result();
}
