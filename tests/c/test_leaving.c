/* Ranks that leave a domain for other collectives, or a phase by an exception, or that take turns
 * within a forward: who waits for whom, and what it is told. */
#define _GNU_SOURCE

#include "apart_world.h"

#include "engine/waits.h"

#define TEXT_BYTES 1024
#define TURN "the gather of shards that were written within forward"

/* What a rank is told that waits in `op` for rank 1, which has left. */
static void describe_left(char *text, int rank, const char *op)
{
    (void)snprintf(text, TEXT_BYTES,
                   "rank 11 has left the collectives of this model's units for others, and rank %d "
                   "waits for it in %s: hooks, collectives and replaced functions must be set on "
                   "all ranks",
                   10 + rank, op);
}

/* What rank 1 is told, which waits for the others to leave, too. */
static void describe_stayed(char *text, int rank)
{
    (void)snprintf(text, TEXT_BYTES,
                   "rank 11 has left the collectives of this model's units for others, and rank %d "
                   "goes on with them: hooks, collectives and replaced functions must be set on "
                   "all ranks",
                   10 + rank);
}

/* All leave, after a phase or out of one, and wait for one another. */
static void body_all_leave(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    fc_domain_leave(w.domain);
    if (rank == 1) {
        fc_domain_leave(w.domain);
    }
    CHECK_OK(fc_domain_await_left(w.domain));
    CHECK(!fc_domain_is_open(w.domain));
    CHECK_OK(fc_domain_ready(w.domain, unit_of(&w, 0)));
    leave_world(&w);
}

/* One waits until the last one leaves. */
static void body_await_left(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    if (rank == n_ranks - 1) {
        together(&w);
        (void)usleep(20000);
        atomic_store(&ranks_common->values[0], 1);
    } else {
        fc_domain_leave(w.domain);
        together(&w);
    }
    if (rank == n_ranks - 1) {
        fc_domain_leave(w.domain);
    } else {
        CHECK_OK(fc_domain_await_left(w.domain));
        ranks_check_value(0, 1);
    }
    together(&w);
    leave_world(&w);
}

/* Who waits for a rank to leave is told that it has ended. */
static void body_peer_ends(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    together(&w);
    if (rank == 1) {
        (void)raise(SIGKILL);
    }
    fc_domain_leave(w.domain);
    CHECK_EQ(fc_domain_await_left(w.domain), FC_ERR_PEER);
    CHECK_HAS(fc_last_message(), "rank 11 (pid ");
    leave_world(&w);
}

static void test_peer_ends(void)
{
    int statuses[RANKS_MAX];

    ranks_run(2, body_peer_ends, NULL, statuses);
    CHECK_EQ(statuses[0], 0);
    CHECK_EQ(statuses[1], SIGKILL);
}

/* Rank 1 leaves and the others go on: all are told, each time that they try. Then they leave, too.
 */
static void body_one_leaves(int rank, int n_ranks, void *arg)
{
    const bool is_double = *(const int *)arg > 0;
    const int calls = 3;
    char text[TEXT_BYTES];
    world w;

    join(&w, MAPPED, rank, n_ranks, false);
    if (is_double) {
        join_second(&w);
    }
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    if (rank == 1) {
        fc_domain_leave(w.domain);
        if (is_double) {
            fc_domain_leave(w.second);
        }
    }
    together(&w);
    for (int i = 0; i < calls; i++) {
        if (rank != 1) {
            begin(&w, FC_PHASE_FORWARD, 0, 0);
            describe_left(text, rank, "all-gather of unit layers.0");
            /* Once more in the same phase counts once. */
            CHECK_FAILS(read_in(is_double ? w.second : w.domain, 1), FC_ERR_PEER, text);
            CHECK_FAILS(read_unit(&w, 1), FC_ERR_PEER, text);
            describe_left(text, rank, "the end of forward");
            CHECK_FAILS(fc_domain_close(w.domain), FC_ERR_PEER, text);
        }
        together(&w);
        if (rank == 1) {
            describe_stayed(text, 0);
            CHECK_FAILS(fc_domain_await_left(w.domain), FC_ERR_PEER, text);
        }
        together(&w);
    }
    fc_domain_leave(w.domain);
    if (is_double) {
        fc_domain_leave(w.second);
    }
    CHECK_OK(fc_domain_await_left(w.domain));
    leave_world(&w);
}

/* It waits for the first rank that has not left, and hears of a later one's call only there. */
static void body_last_stays(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_BACKWARD, 0, 0);
    if (rank != n_ranks - 1) {
        fc_domain_leave(w.domain);
    }
    together(&w);
    if (rank == n_ranks - 1) {
        begin(&w, FC_PHASE_BACKWARD, 0, 0);
        CHECK_EQ(fc_domain_close(w.domain), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "rank 10 has left");
        CHECK_HAS(fc_last_message(), "waits for it in the end of backward: hooks");
        fc_domain_leave(w.domain);
        atomic_store(&ranks_common->values[0], 1);
    } else {
        /* Told by the call, or by the leaving that came after it. */
        const fc_status st = fc_domain_await_left(w.domain);

        CHECK(st == FC_OK || st == FC_ERR_PEER);
        (void)snprintf(text, sizeof(text), "rank %d has left", 10 + rank);
        if (st != FC_OK) {
            CHECK_HAS(fc_last_message(), text);
            CHECK_OK(fc_domain_await_left(w.domain));
        }
        CHECK(ranks_await(0, 1));
    }
    leave_world(&w);
}

/* Who leaves within a phase has failed it; who leaves after it, and had closed it, has not. */
static void body_leaves_in_phase(int rank, int n_ranks, void *arg)
{
    const bool is_closed = *(const int *)arg > 0;
    char text[TEXT_BYTES];
    world w;

    join(&w, MAPPED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(read_unit(&w, 0));
    together(&w);
    if (is_closed) {
        fc_domain_mark_closed(w.domain);
        together(&w);
        if (rank == 1) {
            end(&w);
            fc_domain_leave(w.domain);
        }
        together(&w);
        if (rank != 1) {
            end(&w);
        }
    } else {
        if (rank == 1) {
            fc_domain_leave(w.domain);
        }
        together(&w);
        if (rank != 1) {
            (void)snprintf(text, sizeof(text),
                           "rank 11 left the forward of step 1 by an exception while rank %d was "
                           "in the end of forward; the gradients of this step are not complete",
                           10 + rank);
            CHECK_FAILS(fc_domain_close(w.domain), FC_ERR_PEER, text);
        }
    }
    together(&w);
    leave_world(&w);
}

/* Who has found all in a phase looks no more; nobody begins one over a transport that is broken. */
static void body_ready(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(read_unit(&w, 0));
    together(&w);
    if (rank == 1) {
        fc_domain_leave(w.domain);
    }
    together(&w);
    CHECK_OK(read_unit(&w, 1));
    together(&w);
    if (rank != 1) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_EQ(fc_transport_abort(w.transport, FC_ERR_SYSTEM, "it is broken"), FC_ERR_SYSTEM);
        CHECK_EQ(read_unit(&w, 1), FC_ERR_BROKEN);
    }
    together(&w);
    leave_world(&w);
}

/* ---- exceptions ---- */

/* Who fails a phase that all have closed has failed nothing; who fails a later one did nothing
 * wrong in the one before. */
static void body_fails_later(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    for (int step = 0; step < 3; step++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK_OK(read_unit(&w, 0));
        if (w.kind == MAPPED) {
            fc_domain_mark_closed(w.domain);
            together(&w);
            if (rank == 1) {
                end(&w);
                fc_domain_fail(w.domain);
                begin(&w, FC_PHASE_BACKWARD, 0, 0);
                fc_domain_fail(w.domain);
            }
            together(&w);
        } else if (rank == 1) {
            end(&w);
        }
        if (rank != 1) {
            end(&w);
        }
        together(&w);
        if (w.kind != MAPPED || rank != 1) {
            begin(&w, FC_PHASE_BACKWARD, 0, 0);
            fc_domain_fail(w.domain);
        }
        together(&w);
    }
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    leave_world(&w);
}

/* Over messages, too, who has ended a forward has not left it by an exception after that. */
static void body_completed(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, WATCHED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(read_unit(&w, 0));
    end(&w);
    if (rank == 1) {
        fc_domain_fail(w.domain);
        CHECK_EQ(w.n_failed, 0);
    }
    together(&w);
    run_phase(&w, FC_PHASE_BACKWARD, 0, 0);
    leave_world(&w);
}

/* To open a phase fails the one that is open. */
static void body_reopened(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(read_unit(&w, 0));
    together(&w);
    if (rank == 1) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        CHECK(fc_domain_is_open(w.domain) && !fc_domain_in_backward(w.domain));
    }
    together(&w);
    if (rank != 1) {
        (void)snprintf(text, sizeof(text),
                       "rank 11 left the forward of step 1 by an exception while rank %d was in "
                       "the end of forward; the gradients of this step are not complete",
                       10 + rank);
        CHECK_FAILS(fc_domain_close(w.domain), FC_ERR_PEER, text);
        begin(&w, FC_PHASE_FORWARD, 0, 0);
    }
    CHECK_OK(read_unit(&w, 0));
    end(&w);
    leave_world(&w);
}

/* ---- turns ---- */

static fc_status turn(world *w)
{
    return fc_domain_turn(w->domain, unit_of(w, 2));
}

/* Nobody is past a turn before all are there. */
static void body_turns(int rank, int n_ranks, void *arg)
{
    world w;
    int64_t n = 0;

    (void)arg;
    join(&w, MAPPED, rank, n_ranks, false);
    for (int step = 0; step < 6; step++) {
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        for (int i = 0; i < step % 3; i++) {
            n++;
            (void)usleep((useconds_t)(mix((uint64_t)n, (uint64_t)rank) % 300));
            atomic_store(&ranks_common->values[rank], n);
            CHECK_OK(turn(&w));
            for (int r = 0; r < n_ranks; r++) {
                CHECK(atomic_load(&ranks_common->values[r]) >= n);
            }
        }
        end(&w);
    }
    leave_world(&w);
}

/* Rank 1 does not come to a turn: it ends the forward, fails it, or leaves. */
static void body_no_turn(int rank, int n_ranks, void *arg)
{
    const int how = *(const int *)arg;
    char text[TEXT_BYTES];
    world w;

    join(&w, MAPPED, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    begin(&w, FC_PHASE_FORWARD, 0, 0);
    CHECK_OK(read_unit(&w, 0));
    CHECK_OK(turn(&w));
    together(&w);
    if (rank == 1) {
        if (how == 0) {
            fc_domain_mark_closed(w.domain);
        } else if (how == 1) {
            fc_domain_fail(w.domain);
        } else {
            fc_domain_leave(w.domain);
        }
        together(&w);
    } else {
        together(&w);
        (void)snprintf(text, sizeof(text),
                       how == 0
                           ? "shards of unit head were written within a forward on rank %d and not "
                             "on rank 11: write them on all ranks alike, or between two forwards"
                           : "rank 11 left the forward of step 2 by an exception while rank %d was "
                             "in " TURN " of unit head; the gradients of this step are not "
                             "complete",
                       10 + rank);
        CHECK_FAILS(turn(&w), FC_ERR_PEER, text);
        fc_domain_fail(w.domain);
    }
    together(&w);
    leave_world(&w);
}

/* Between phases, too, and by who has left; alone and over messages there is nobody to wait for. */
static void body_left_turn(int rank, int n_ranks, void *arg)
{
    char text[TEXT_BYTES];
    world w;

    join(&w, *(const travel *)arg, rank, n_ranks, false);
    run_phase(&w, FC_PHASE_FORWARD, 0, 0);
    if (w.kind != MAPPED || n_ranks == 1) {
        if (rank == 0) {
            CHECK_OK(turn(&w));
        }
    } else if (rank == 1) {
        fc_domain_leave(w.domain);
        together(&w);
    } else {
        together(&w);
        begin(&w, FC_PHASE_FORWARD, 0, 0);
        describe_left(text, rank, TURN " of unit head");
        CHECK_FAILS(turn(&w), FC_ERR_PEER, text);
    }
    together(&w);
    leave_world(&w);
}

int main(void)
{
    for (int n = 2; n <= 3; n++) {
        for (travel kind = MAPPED; kind < N_KINDS; kind++) {
            ranks_check(n, body_all_leave, &kind);
            ranks_check(n, body_fails_later, &kind);
        }
        ranks_check(n, body_await_left, NULL);
        for (int which = 0; which < 2; which++) {
            ranks_check(n, body_one_leaves, &which);
            ranks_check(n, body_leaves_in_phase, &which);
        }
        ranks_check(n, body_last_stays, NULL);
        ranks_check(n, body_ready, NULL);
        ranks_check(n, body_completed, NULL);
        ranks_check(n, body_reopened, NULL);
        ranks_check(n, body_turns, NULL);
        for (int how = 0; how < 3; how++) {
            ranks_check(n, body_no_turn, &how);
        }
    }
    for (int n = 1; n <= 2; n++) {
        for (travel kind = MAPPED; kind < N_KINDS; kind++) {
            ranks_check(n, body_left_turn, &kind);
        }
    }
    test_peer_ends();
    return check_result();
}
