/* Ranks on rails that end, fall silent, are interrupted, or call something else. */
#define _GNU_SOURCE
#include "rails_world.h"

/* Rank 3 of two hosts ends: its rail and its host's other rank notice, and what they tell reaches
 * those that wait for them. */
static void body_killed(int rank, int n_ranks, void *arg)
{
    member m;
    char data[4 * 100];
    fc_status st = FC_OK;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, 100, 1, false);
    if (rank == 3) {
        for (int r = 0; r < rank; r++) { /* the test's own process holds these, too */
            CHECK_EQ(shutdown(pairs[rank][r], SHUT_RDWR), 0);
        }
        (void)kill(getpid(), SIGKILL);
    }
    for (int i = 0; i < 3 && st == FC_OK; i++) {
        st = m.ops.all_gather(m.ops.context, data, "x", 1);
    }
    CHECK(st != FC_OK);
    if (rank == 1) {
        CHECK_EQ(st, FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "waited in vain for rank 13 (host bee): the line is dead");
    }
    CHECK_EQ(m.wires->n_dropped, 1);
    CHECK_EQ(m.ops.all_gather(m.ops.context, data, "x", 1), FC_ERR_BROKEN);
    destroy(&m);
}

static void test_killed(void)
{
    world w = worlds[1];
    int statuses[RANKS_MAX];

    make_lines(w.n_ranks);
    ranks_run(w.n_ranks, body_killed, &w, statuses);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(statuses[r], 0);
    }
    close_lines(w.n_ranks, -1);
}

/* Ends the first wait for another host that lasts. */
static void *interrupt(void *arg)
{
    const member *m = arg;
    fc_rails_wait wait = {0};

    while (!fc_rails_waits(&m->ops, &wait) || fc_now_ns() - wait.since_ns < FC_NS_PER_S / 5) {
        (void)usleep(1000);
    }
    CHECK_EQ(wait.rank, m->rank + 2);
    fc_rails_interrupt(&m->ops, "nothing is heard of host bee");
    fc_rails_interrupt(&m->ops, "the first one counts");
    return NULL;
}

#define LARGE (10 * KIB) /* each rank talks to its rail; of less one rank speaks for its host */

static size_t silent_bytes;

/* A host that is silent, whose lines do not end. */
static void body_silent(int rank, int n_ranks, void *arg)
{
    static char data[4 * LARGE];
    const bool waits = rank == 1 || silent_bytes == LARGE;
    member m;
    pthread_t thread;
    fc_rails_wait wait;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, 100, 1, false);
    CHECK(!fc_rails_waits(&m.ops, &wait));
    if (rank < 2) {
        CHECK_OR_EXIT(!waits || pthread_create(&thread, NULL, interrupt, &m) == 0);
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, data, silent_bytes), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "waited in vain for rank 1");
        CHECK_HAS(fc_last_message(), "(host bee): nothing is heard of host bee");
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, data, silent_bytes), FC_ERR_BROKEN);
        CHECK(!waits || pthread_join(thread, NULL) == 0);
        CHECK(!fc_rails_waits(&m.ops, &wait));
    } else { /* rank 3 would wait for rank 1, which has nothing more to say than what failed */
        (void)usleep(600 * 1000);
    }
    destroy(&m);
}

static void test_silent(void)
{
    static const size_t sizes[] = {1, LARGE};

    for (size_t i = 0; i < 2; i++) {
        silent_bytes = sizes[i];
        check_world(&worlds[1], body_silent);
    }
}

/* Also where nobody waits at that moment, and of operations that are no rails. */
static void body_interrupted_early(int rank, int n_ranks, void *arg)
{
    member m;
    char data[2];
    fc_rails_wait wait;
    const fc_message_ops none = {.kind = "other"};

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    fc_rails_interrupt(&none, "?");
    CHECK(!fc_rails_waits(&none, &wait));
    CHECK(!fc_rails_waits(NULL, &wait));
    fc_rails_interrupt(&m.ops, "enough");
    CHECK_EQ(m.ops.all_gather(m.ops.context, data, "x", 1), FC_ERR_PEER);
    CHECK_HAS(fc_last_message(), "enough");
    destroy(&m);
}

static void test_interrupted_early(void)
{
    check_world(&worlds[0], body_interrupted_early);
}

/* Ranks that leave a phase all alike go on. One that leaves it alone is named: by its host's
 * others, by those who hear of them, and by its rail, which is told. */
#define SECOND_PHASE 0x200 /* that has been opened */
#define LEFT(rank, by) "rank " rank " left its forward or backward by an exception while rank " by

static void *hear(void *arg)
{
    const member *m = arg;
    const uint64_t phase = SECOND_PHASE, after = 4;
    const fc_rails_failure failures[] = {
        {phase - 1, after - 1}, /* an older phase */
        {phase, after + 1},     /* it took part in what is waited for, and failed then */
        {0, 0},
    };
    fc_rails_wait wait = {0};

    while (!fc_rails_waits(&m->ops, &wait)) {
        (void)usleep(1000);
    }
    CHECK_EQ(wait.rank, 1);
    for (size_t i = 0; i < 3; i++) {
        fc_rails_hear(&m->ops, 1, failures[i]);
    }
    fc_rails_hear(&m->ops, 2, (fc_rails_failure){phase, after}); /* not whom it waits for */
    (void)usleep(50 * 1000);
    CHECK(fc_rails_waits(&m->ops, &wait));
    fc_rails_hear(&m->ops, 1, (fc_rails_failure){phase, after});
    return NULL;
}

static void body_left(int rank, int n_ranks, void *arg)
{
    static char data[4 * LARGE];
    member m;
    pthread_t thread;
    fc_rails_failure failed;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, 100, 1, false);
    m.ops.open_phase(m.ops.context);
    check_all_gather(&m, 100, 2, false);
    CHECK_EQ(fc_rails_failed(&m.ops).phase, 0);
    m.ops.fail_phase(m.ops.context); /* on all */
    check_all_gather(&m, 100, 3, false);
    m.ops.open_phase(m.ops.context);
    check_all_gather(&m, LARGE, 4, false);
    if (rank == 1) {
        m.ops.fail_phase(m.ops.context);
        failed = fc_rails_failed(&m.ops);
        CHECK_EQ(failed.phase, SECOND_PHASE);
        CHECK_EQ(failed.after, 4);
        m.ops.open_phase(m.ops.context); /* later failures do not hide it */
        m.ops.fail_phase(m.ops.context);
        (void)usleep(500 * 1000);
        CHECK(m.ops.all_gather(m.ops.context, data, data, 1) != FC_OK); /* by either's words */
    } else {
        CHECK_OR_EXIT(rank != 3 || pthread_create(&thread, NULL, hear, &m) == 0);
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, data, LARGE), FC_ERR_PEER);
        CHECK(strstr(fc_last_message(), LEFT("11", "10")) != NULL ||
              strstr(fc_last_message(), LEFT("11", "13")) != NULL);
        CHECK(rank != 3 || pthread_join(thread, NULL) == 0);
        failed = fc_rails_failed(&m.ops); /* in that collective, whatever it has sent */
        CHECK_EQ(failed.phase, UINT64_MAX);
        CHECK_EQ(failed.after, 4);
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, data, 1), FC_ERR_BROKEN);
    }
    destroy(&m);
}

/* It goes on to another collective, of a host without others. */
static void body_left_and_went_on(int rank, int n_ranks, void *arg)
{
    char data[2 * 100];
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    m.ops.open_phase(m.ops.context);
    m.ops.fail_phase(m.ops.context); /* all: nobody is blamed for it */
    check_all_gather(&m, 100, 1, false);
    if (rank == 0) {
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, data, 100), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), LEFT("11", "10"));
    } else {
        m.ops.fail_phase(m.ops.context);
        CHECK(m.ops.all_gather(m.ops.context, data, data, 64) != FC_OK);
    }
    destroy(&m);
}

/* Whoever comes to a collective later is told why, on its host and on the others. */
static void body_gave_up(int rank, int n_ranks, void *arg)
{
    static char data[4 * 100];
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    m.ops.open_phase(m.ops.context);
    check_all_gather(&m, 100, 1, false);
    if (rank == 1) {
        m.ops.give_up(m.ops.context, "parameter 'w' is frozen");
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, data, 100), FC_ERR_BROKEN);
    } else {
        m.ops.open_phase(m.ops.context);
        CHECK(m.ops.all_gather(m.ops.context, data, data, 100) != FC_OK);
    }
    CHECK_HAS(fc_last_message(), "parameter 'w' is frozen");
    destroy(&m);
}

/* Who has left a phase at its end, which nobody has noticed, counts phases as the others do again
 * from the next one on: failures of either are heard by the other. */
static void body_left_at_the_end(int rank, int n_ranks, void *arg)
{
    uint64_t failed[2], mine;
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    m.ops.open_phase(m.ops.context);
    if (rank == 1) {
        m.ops.fail_phase(m.ops.context);
    }
    check_all_gather(&m, 100, 1, false);
    m.ops.open_phase(m.ops.context);
    check_all_gather(&m, 100, 2, false);
    m.ops.fail_phase(m.ops.context);
    mine = fc_rails_failed(&m.ops).phase;
    CHECK_OK(m.ops.all_gather(m.ops.context, failed, &mine, sizeof(mine)));
    CHECK_EQ(failed[0], failed[1]);
    destroy(&m);
}

static void test_left_phases(void)
{
    const fc_message_ops none = {.kind = "other"};

    check_world(&worlds[1], body_left);
    check_world(&worlds[0], body_left_and_went_on);
    check_world(&worlds[0], body_left_at_the_end);
    check_world(&worlds[0], body_gave_up);
    check_world(&worlds[1], body_gave_up);
    CHECK_EQ(fc_rails_failed(&none).phase, 0);
    CHECK_EQ(fc_rails_failed(NULL).phase, 0);
    fc_rails_hear(&none, 0, (fc_rails_failure){1, 1});
}

static int differ_case;

/* Ranks of two hosts that call different collectives, or of different sizes: one of them, or all of
 * its host. */
static void body_differ(int rank, int n_ranks, void *arg)
{
    static const size_t sizes_of_case[][2] = {
        {100, 200}, {4000, 3000}, {4000, 4000}, {4000, LARGE}, {LARGE, 100}};
    const bool is_other = differ_case >= 5 ? 2 * rank >= n_ranks : rank == n_ranks - 1;
    const size_t bytes = sizes_of_case[differ_case % 5][is_other];
    static char data[4 * LARGE], part[LARGE];
    member m;
    fc_status st;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    if (differ_case % 5 == 2 && is_other) {
        st = m.ops.reduce_scatter(m.ops.context, part, data, bytes / 4, FC_F32);
    } else {
        st = m.ops.all_gather(m.ops.context, data, part, bytes);
    }
    CHECK(st == FC_ERR_MISMATCH || st == FC_ERR_PEER); /* or who has heard of it */
    CHECK_HAS(fc_last_message(), "call different collectives: rank 1");
    destroy(&m);
}

static void test_ranks_that_differ(void)
{
    for (size_t i = 0; i < 2; i++) {
        for (differ_case = 0; differ_case < 2 * 5; differ_case++) {
            check_world(&worlds[i], body_differ);
        }
    }
}

static void test_arguments(void)
{
    static const int hosts[] = {0, 2}, ranks[] = {0, 1};
    static const char *const names[] = {"ape", "bee"};
    wires w = {0};
    fc_message_ops out;
    const fc_rails_config config = {.n_ranks = 2,
                                    .global_ranks = ranks,
                                    .hosts = hosts,
                                    .names = names,
                                    .rails = {.context = &w, .release = wires_release},
                                    .group = {.context = &w, .release = wires_release}};

    CHECK_EQ(fc_rails_create(&config, &out), FC_ERR_INVALID);
    CHECK_EQ(w.n_released, 2);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_arguments();
    test_ranks_that_differ();
    test_killed();
    test_silent();
    test_interrupted_early();
    test_left_phases();
    return check_result();
}
