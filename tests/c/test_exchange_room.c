/* Full arenas step by step: what makes way for what, and who is stuck. */
#define _GNU_SOURCE

#include "exchange_world.h"

/* Peers' posts are copied away first, one at a time, then this rank's own part. Copies are used
 * again, unless they are large. */
static void body_copies(int rank, int n_ranks, void *arg)
{
    const bool is_large = arg != NULL;
    const size_t mine = rank == 0 ? 0 : 2, theirs = 2 - mine;
    const float value = rank == 0 ? 10 : 20;
    int64_t live;
    world w;

    (void)n_ranks;
    join(&w, rank, 1, is_large ? LARGE : USUAL);
    live = fc_alloc_live();
    for (int phase = 0; phase < 3; phase++) {
        CHECK(put(&w, mine, value) >= 0);
        CHECK(put(&w, mine + 1, value) >= 0);
        CHECK_EQ(put(&w, mine, value + 5), FC_AGAIN);
        meet_all(&w);
        for (uint64_t n = 0; n < 2; n++) {
            CHECK_EQ(has_read(&w, 0, theirs + n), 0);
            if (phase == 0) {
                fc_alloc_fail_after(0);
                CHECK_EQ(make_way(&w, 0, mine), FC_ERR_NOMEM);
                fc_alloc_fail_after(-1);
                CHECK_HAS(fc_last_message(), rank == 0 ? "copy rank 11's" : "copy rank 10's");
                CHECK_HAS(fc_last_message(), names[theirs + n]);
            }
            fc_alloc_fail_after(phase == 0 || is_large ? -1 : 0);
            CHECK_OK(make_way(&w, 0, mine));
            fc_alloc_fail_after(-1);
            CHECK_EQ(has_read(&w, 0, theirs + n), 1);
        }
        CHECK_EQ(put(&w, mine, value + 5), FC_AGAIN);
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, mine));
        CHECK_EQ(fc_alloc_live() - live, 3);
        meet_all(&w);
        CHECK_EQ(put(&w, mine, value + 5) > 0, is_large); /* of which more fit in */
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        meet_all(&w);
        take_all(&w, 0, 0, (float[N_UNITS][N_RANKS]){{10, 0}, {10, 0}, {0, 20}, {0, 20}},
                 (float[N_UNITS][N_RANKS]){{15, 0}, {0}, {0, 25}, {0}});
        CHECK_EQ(fc_alloc_live() - live, is_large ? 0 : 3);
        CHECK_OK(fc_domain_close(w.domains[0]));
        meet_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        meet_all(&w);
    }
    (void)fc_domain_trim(w.domains[0]);
    CHECK_EQ(fc_alloc_live(), live);
    leave(&w);
}

/* What was copied away of a phase that fails is not kept. */
static void body_dropped(int rank, int n_ranks, void *arg)
{
    int64_t live;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, LARGE);
    live = fc_alloc_live();
    if (rank == 0) {
        CHECK_EQ(put(&w, 0, 10), 0);
        meet_all(&w);
    } else {
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, 1));
        CHECK_EQ(fc_alloc_live(), live + 1);
    }
    fc_domain_fail(w.domains[0]);
    fc_exchange_reset(w.domains[0]);
    CHECK_EQ(fc_alloc_live(), live);
    leave(&w);
}

/* A post that everybody has copied away is offered all the same, though not as the oldest one. */
static void body_left_arena(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 0) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(put(&w, 1, 20), HALF);
        meet_all(&w);
        meet_all(&w); /* the other one has copied both away */
        CHECK_OK(make_way(&w, 0, 2));
        CHECK_EQ(put(&w, 2, 30), 0);
        CHECK_OK(make_way(&w, 0, 3));
        CHECK_EQ(put(&w, 3, 40), HALF);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        for (size_t u = 2; u-- > 0;) {
            meet_all(&w);
            meet_all(&w); /* and has posted this one */
            CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
            CHECK_EQ(next(&w, FC_SEARCH_OWN), u);
            take(&w, 0, u, 10 * (float)(u + 1), 50);
        }
    } else {
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, 0));
        CHECK_OK(make_way(&w, 0, 0));
        meet_all(&w);
        for (size_t u = 2; u-- > 0;) {
            meet_all(&w);
            CHECK(put(&w, u, 50) >= 0);
            meet_all(&w);
        }
    }
    meet_all(&w);
    fc_domain_mark_closed(w.domains[0]);
    take_all(&w, 0, rank == 0 ? 2 : 0,
             (float[N_UNITS][N_RANKS]){{10, 50}, {20, 50}, {30, 0}, {40, 0}}, NULL);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* Who waits for room in one domain copies away what waits in another one of the root. */
static void body_two_domains(int rank, int n_ranks, void *arg)
{
    const size_t mine = (size_t)rank, other = 1 - mine;
    float values[N_UNITS][N_RANKS] = {{0}};
    size_t u;
    int n_taken = 0;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 2, USUAL);
    CHECK_EQ(put_in(&w, mine, 0, 10), 0);
    CHECK_EQ(put_in(&w, mine, 1, 20), HALF);
    CHECK_EQ(put_in(&w, mine, 2, 30), FC_AGAIN);
    meet_all(&w);
    for (u = 0; u < 2; u++) {
        CHECK_EQ(has_read(&w, other, u), 0);
        CHECK_OK(make_way(&w, mine, 2));
        CHECK_EQ(has_read(&w, other, u), 1);
    }
    meet_all(&w);
    CHECK_OK(make_way(&w, mine, 2)); /* its own part */
    meet_all(&w);
    CHECK_EQ(put_in(&w, mine, 2, 30), 0);
    for (size_t d = 0; d < 2; d++) {
        fc_domain_mark_closed(w.domains[d]);
    }
    for (size_t d = 0; d < 2; d++) {
        for (u = 0; u < 3; u++) {
            values[u][d] = 10 * (float)(u + 1);
            values[u][1 - d] = 0;
        }
        while ((u = next_in(&w, d, FC_SEARCH_ALL)) < N_UNITS) {
            take(&w, d, u, values[u][0], values[u][1]);
            n_taken++;
        }
    }
    CHECK_EQ(n_taken, 2 * 3);
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

/* No wait ends because posts may go to the spare arena. */
static void without_spare(fc_domain *domain)
{
    domain->spare_bytes = 0;
    domain->is_spread = true;
}

typedef struct stuck {
    size_t in;
    int rank;
} stuck;

/* Who is at the end of one domain reads for a peer that is stuck in another one. */
static void body_stuck(int rank, int n_ranks, void *arg)
{
    const stuck *peer = arg;
    float values[N_UNITS][N_RANKS] = {{0}};
    world w;

    (void)n_ranks;
    join(&w, rank, 2, USUAL);
    if (rank != peer->rank) {
        fc_domain_mark_closed(w.domains[0]);
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        values[u][peer->rank] = 10 * (float)(u + 1);
        while (rank == peer->rank && put_in(&w, peer->in, u, values[u][rank]) == FC_AGAIN) {
            CHECK_EQ(fc_word_load(&domain_clock(w.domains[peer->in], rank)->stuck) % 2, 0);
            without_spare(w.domains[peer->in]);
            CHECK_OK(make_way(&w, peer->in, u));
        }
    }
    fc_domain_mark_closed(w.domains[0]);
    for (size_t d = 0; d < 2; d++) {
        fc_domain_mark_closed(w.domains[d]);
        take_all(&w, d, d == peer->in ? 0 : N_UNITS, values, NULL);
    }
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

/* Who waits at the end of one domain leaves what waits in another one where it lies, unless a peer
 * is stuck. */
static void body_not_stuck(int rank, int n_ranks, void *arg)
{
    int64_t n_waits;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 2, USUAL);
    if (rank == 1) {
        CHECK_EQ(put_in(&w, 1, 0, 10), 0);
    }
    meet_all(&w);
    n_waits = atomic_load(&ranks_common->values[0]);
    meet_all(&w);
    if (rank == 1) {
        CHECK(ranks_await(0, n_waits + 1));
    }
    fc_domain_mark_closed(w.domains[0]);
    CHECK_EQ(next_in(&w, 0, FC_SEARCH_ALL), N_UNITS);
    CHECK_EQ(has_read(&w, 1, 0), 0);
    fc_domain_mark_closed(w.domains[1]);
    CHECK_EQ(next_in(&w, 1, FC_SEARCH_ALL), 0);
    take(&w, 1, 0, 0, 10);
    CHECK_EQ(next_in(&w, 1, FC_SEARCH_ALL), N_UNITS);
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

/* What cannot lie where a stuck peer says is an error of whoever would copy it away. */
static void body_stuck_with_changed_lane(int rank, int n_ranks, void *arg)
{
    fc_unit *unit = NULL;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 2, USUAL);
    for (size_t u = 0; u < 2 && rank == 1; u++) {
        CHECK_EQ(put_in(&w, 1, u, 10), (int64_t)u * HALF);
    }
    meet_all(&w);
    if (rank == 0) {
        lane *theirs = domain_lane(w.domains[1], 1, 0);

        theirs->stage_at++;
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_ALL, &unit), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "unit first: what rank 11 says of its gradients");
        theirs->stage_at--;
    } else {
        CHECK_OK(make_way(&w, 1, 2));
        fc_domain_mark_closed(w.domains[0]);
    }
    CHECK_EQ(next_in(&w, 0, FC_SEARCH_ALL), N_UNITS);
    fc_domain_mark_closed(w.domains[1]);
    take_two(&w, 1, 0, (float[]){0, 0}, (float[]){10, 10});
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

/* Way is made, too, by what this rank can finish, the oldest post or another one. */
static void body_finishable(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 1) {
        CHECK_EQ(put(&w, 1, 10), 0);
        meet_all(&w);
    } else {
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, 2));
        CHECK_EQ(has_read(&w, 0, 1), 1);
        CHECK_EQ(put(&w, 0, 20), 0);
        CHECK_EQ(put(&w, 1, 30), HALF);
        without_spare(w.domains[0]);
        CHECK_OK(make_way(&w, 0, 2));
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 1);
        take(&w, 0, 1, 30, 10);
    }
    meet_all(&w);
    fc_domain_mark_closed(w.domains[0]);
    if (rank == 1) {
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 1);
        take(&w, 0, 1, 30, 10);
    }
    CHECK_EQ(next(&w, FC_SEARCH_ALL), 0);
    take(&w, 0, 0, 20, 0);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* A peer that reads nothing, since it waits elsewhere, holds nobody up: posts go behind the arena,
 * and that memory is given back when they are over. */
static void body_spare(int rank, int n_ranks, void *arg)
{
    const int poster = *(const int *)arg;
    float values[N_UNITS][N_RANKS] = {{0}};
    fc_domain *domain;
    world w;

    (void)n_ranks;
    join(&w, rank, 1, USUAL);
    domain = w.domains[0];
    for (size_t u = 0; u < N_UNITS; u++) {
        values[u][poster] = 10 * (float)(u + 1);
    }
    values[2][1 - poster] = 50;
    CHECK_EQ(domain->spare_bytes, 2 * FC_PAGE); /* one of each unit */
    if (rank == poster) {
        char *memory = domain_post(domain, rank, domain->arena_bytes);
        const float *spare = (const float *)(const void *)memory;
        const int64_t at = memory - domain_arena(domain, rank);

        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(put(&w, 1, 20), HALF);
        CHECK_EQ(put(&w, 2, 30), FC_AGAIN);
        CHECK_OK(make_way(&w, 0, 2));
        CHECK_EQ(put(&w, 2, 30), at);
        CHECK_EQ(put(&w, 3, 40), at + HALF);
        meet_all(&w);
        CHECK(*spare == 30);
        fc_domain_mark_closed(domain);
        take_all(&w, 0, 0, values, NULL);
        CHECK_OK(fc_domain_close(domain));
        meet_all(&w); /* the other one has read all */
        exchange_reclaim(domain);
        CHECK_EQ(*spare, 0);
        CHECK(!domain->is_spread);
        CHECK(domain->haste > 0);
    } else {
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, 0));
        CHECK_EQ(put(&w, 2, 50), 0);
        fc_domain_mark_closed(domain);
        take_all(&w, 0, 0, values, NULL);
        CHECK_OK(fc_domain_close(domain));
        meet_all(&w);
    }
    leave(&w);
}

int main(void)
{
    static bool yes = true;

    ranks_check(N_RANKS, body_copies, NULL);
    ranks_check(N_RANKS, body_copies, &yes);
    ranks_check(N_RANKS, body_dropped, NULL);
    ranks_check(N_RANKS, body_left_arena, NULL);
    ranks_check(N_RANKS, body_finishable, NULL);
    ranks_check(N_RANKS, body_two_domains, NULL);
    for (int i = 0; i < 4; i++) {
        stuck peer = {(size_t)i / 2, i % 2};

        ranks_check(N_RANKS, body_stuck, &peer);
    }
    ranks_check(N_RANKS, body_not_stuck, NULL);
    for (int poster = 0; poster < N_RANKS; poster++) {
        ranks_check(N_RANKS, body_spare, &poster);
    }
    ranks_check(N_RANKS, body_stuck_with_changed_lane, NULL);
    return check_result();
}
