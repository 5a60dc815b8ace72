/* The course of a root's steps: order of phases, when units are reduced, what the end of a backward
 * finds, endings by hand, failures, resets.
 */
#define _GNU_SOURCE

#include "root_world.h"

/* Micro-batches that keep gradients, or sums of the shard group; then all of them. */
static void body_steps(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    for (int step = 1; step < 5; step++) {
        forward(w, N_UNITS);
        set(w, step % 2 == 0, false);
        CHECK_OK(backward(w, step, 0));
        CHECK(!w->owners[0].has_sum || (step % 2 == 0 && w->n_domains == 1));
        CHECK(!fc_root_is_between_steps(&w->course) || w->owners[0].has_sum);
        CHECK_EQ(w->owners[1].course.is_pending, step % 2 == 1);
        forward(w, N_UNITS);
        set(w, true, true);
        CHECK_OK(backward(w, step + 1, 0));
        CHECK_EQ(w->context.ending, FC_ENDING_OPEN);
        check_sums(w, step, step + 1);
    }
    leave(w);
}

/* Units of which nothing is left are not looked at, unless one is used again. */
static void body_finished(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);
    int n_kept;

    for (int step = 1; step < 4; step++) {
        n_kept = w->n_kept;
        forward(w, N_UNITS);
        CHECK_OK(backward(w, step, 0));
        CHECK_EQ(w->n_kept, n_kept);
        check_sums(w, step, step);
        CHECK_EQ(w->n_asked, step);
    }
    n_kept = w->n_kept;
    forward(w, N_UNITS);
    for (size_t u = N_UNITS; u-- > 0;) {
        CHECK_OK(reach(w, u));
        CHECK_OK(pass(w, u, 4));
    }
    CHECK_OK(unshard(&w->owners[1])); /* a hook reads it */
    w->events[0] = '\0';
    CHECK_OK(end(w));
    CHECK_EQ(w->n_kept, n_kept + N_UNITS);
    CHECK(strstr(w->events, "reshard1") != NULL);
    check_sums(w, 4, 4);
    leave(w);
}

/* A module that ran twice is reduced once, after its second backward, and its hooks run last; where
 * ranks share memory all do, in one order. */
static void body_repeated(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);
    const char *hooks = n_ranks > 1 ? "hook2 hook1 hook0 " : "hook1 ";

    forward(w, 1);
    CHECK_OK(reach(w, 2));
    CHECK_OK(pass(w, 2, 1));
    CHECK_OK(reach(w, 1));
    w->events[0] = '\0';
    CHECK_OK(pass(w, 1, 1)); /* autograd adds up on the leaf, here nothing */
    CHECK(strstr(w->events, "submit") == NULL && w->owners[1].course.defers_hooks);
    CHECK_OK(reach(w, 1));
    CHECK_OK(pass(w, 1, 1));
    CHECK(strstr(w->events, "submit1") != NULL && strstr(w->events, "hook1") == NULL);
    CHECK_OK(reach(w, 0));
    CHECK_OK(pass(w, 0, 1));
    CHECK_OK(end(w));
    CHECK_STR(strstr(w->events, hooks) != NULL ? strstr(w->events, hooks) : w->events, hooks);
    CHECK(!w->owners[1].course.defers_hooks);
    check_sums(w, 1, 1);
    leave(w);
}

/* What was held for a module that runs twice goes ahead of what this backward brings. */
static void body_held(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    set(w, false, true);
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 1, 0));
    set(w, true, true);
    forward(w, 1);
    CHECK_OK(reach(w, 2));
    CHECK_OK(pass(w, 2, 2));
    CHECK_OK(reach(w, 1));
    w->events[0] = '\0';
    CHECK_OK(pass(w, 1, 0));
    CHECK(strstr(w->events, "submit1") != NULL);
    CHECK_OK(reach(w, 1));
    w->events[0] = '\0';
    CHECK_OK(pass(w, 1, 2));
    CHECK(strstr(w->events, "submit1") != NULL);
    CHECK_OK(reach(w, 0));
    CHECK_OK(pass(w, 0, 2));
    CHECK_OK(end(w));
    check_sums(w, 1, 2);
    leave(w);
}

/* Inputs that need no gradient: the end of backward passes the unit; and one that came later. */
static void body_late(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    forward(w, N_UNITS);
    for (size_t u = N_UNITS; u-- > 0;) {
        CHECK_OK(reach(w, u));
        if (u == 1) {
            CHECK_OK(pass(w, u, 1));
        }
        w->owners[u].fresh = u == 1 ? 0 : 1;
    }
    w->events[0] = '\0';
    CHECK_OK(end(w));
    CHECK(strstr(w->events, "submit1") == NULL);
    CHECK_EQ(w->n_passed, N_UNITS); /* the one that was finished not again */
    CHECK(comes_before(w, "reshard0", "submit0"));
    CHECK(comes_before(w, "reshard2", "submit2"));
    check_sums(w, 1, 1);
    leave(w);
}

/* A backward that ends by hand leaves what was not passed. */
static void body_manual(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    w->context.ends_manually = true;
    forward(w, N_UNITS);
    for (size_t u = N_UNITS; u-- > 0;) {
        CHECK_OK(reach(w, u));
        CHECK_EQ(w->context.ending, FC_ENDING_MANUAL);
        if (u > 0) {
            CHECK_OK(pass(w, u, 3));
        }
    }
    w->owners[0].fresh = 3;
    CHECK_OK(end(w));
    CHECK(w->context.is_unfinalized && w->owners[0].course.is_pending && !w->owners[0].has_sum);
    CHECK(w->owners[0].is_unsharded && !fc_root_is_open(&w->course));
    w->context.ends_manually = false; /* it is settled */
    CHECK_OK(fc_root_finalize_backward(&w->course));
    CHECK(!w->context.is_unfinalized && !w->owners[0].course.is_pending);
    CHECK(!w->owners[0].is_unsharded);
    for (size_t u = 0; u < N_UNITS; u++) {
        w->owners[u].course.n_entered = 0; /* as the next forward of the caller does */
        check_sum(w, u, 3, 3);
    }
    w->context.ending = FC_ENDING_OPEN;
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 4, 0));
    check_sums(w, 4, 4);
    leave(w);
}

/* One rank's caller fails: all have to begin anew, and what was kept is dropped. */
static void body_failing(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    forward(w, N_UNITS);
    set(w, false, true);
    CHECK_OK(backward(w, 1, 0));
    set(w, true, true);
    forward(w, N_UNITS);
    if (rank == 0) {
        w->fails_in = 1;
        CHECK_EQ(backward(w, 2, 0), FC_ERR_INTERRUPTED);
        w->fails_in = N_UNITS;
    } else {
        CHECK_EQ(backward(w, 2, 0), FC_ERR_PEER);
    }
    CHECK(w->context.is_failed && !w->context.awaits_end && !fc_root_is_open(&w->course));
    CHECK_OK(fc_root_reset(&w->course, true));
    CHECK(!w->context.is_failed && fc_root_is_between_steps(&w->course));
    CHECK_OK(ranks_exchange(&w->hosts[0], "reset", &rank, sizeof(rank), NULL));
    if (rank == 1) { /* nobody reads any more what the failed one has not read */
        CHECK_EQ(fc_domain_trim(w->domains[0]), fc_domain_arena_bytes(w->domains[0]));
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK(!fc_reduction_is_submitted(w->owners[u].reduction));
        CHECK(!w->owners[u].is_unsharded && !w->owners[u].has_accumulated);
        w->owners[u].has_sum = false;
    }
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 3, 0));
    check_sums(w, 3, 3);
    leave(w);
}

/* A forward that was left by an exception is noticed when it is entered again, and leaves
 * gradients alone. */
static void body_left(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    forward(w, N_UNITS);
    set(w, false, true);
    CHECK_OK(backward(w, 1, 0));
    set(w, true, true);
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
    enter(w, 0);
    CHECK_OK(unshard(&w->owners[1])); /* it raises in there */
    fc_root_note_raised(&w->course, &w->modules[1]);
    CHECK(!w->course.has_raised);
    fc_root_note_raised(&w->course, &w->modules[0]);
    CHECK(w->course.has_raised);
    CHECK(!fc_root_was_left(&w->course, &w->modules[1]));
    CHECK(fc_root_was_left(&w->course, &w->modules[0]));
    CHECK_OK(fc_root_reset(&w->course, false));
    CHECK(!w->owners[1].is_unsharded);
    CHECK(!fc_root_was_left(&w->course, &w->modules[0]));
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 2, 0));
    check_sums(w, 1, 2);
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
    CHECK_EQ(fc_reduction_is_submitted(w->owners[0].reduction), w->n_domains == 1);
    fc_root_note_raised(&w->course, &w->modules[0]);
    CHECK_OK(fc_root_reset(&w->course, false));
    CHECK(!fc_reduction_is_submitted(w->owners[0].reduction));
    leave(w);
}

/* Sums are divided by the ranks that add to them, unless the caller says by what. */
static void body_divided(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);
    fc_root_unit *unit = &w->owners[0].course;

    unit->all_reduce_grads = false;
    CHECK_EQ(fc_root_unit_options(unit, 0).divisor, n_ranks);
    CHECK(!fc_root_unit_options(unit, 0).all_reduce);
    unit->all_reduce_grads = unit->defers_hooks = true;
    CHECK_EQ(fc_root_unit_options(unit, 2.5).divisor, 2.5);
    CHECK(fc_root_unit_options(unit, 0).all_reduce && fc_root_unit_options(unit, 0).defer_hooks);
    CHECK(!fc_root_unit_options(unit, 0).is_sum);
    unit->force_sum = true;
    CHECK(fc_root_unit_options(unit, 0).is_sum);
    unit->force_sum = unit->defers_hooks = false;
    leave(w);
}

/* The first backward shows what a unit's input is, each time that it comes to the unit. */
static void check_input(void)
{
    fc_root_course root = {.backward = 7};
    fc_root_module module = {0};
    fc_root_unit unit = {0};

    CHECK(fc_root_asks_for_input(&root, &unit));
    fc_root_note_input(&root, &unit, true);
    CHECK(unit.owns_input && fc_root_asks_for_input(&root, &unit));
    fc_root_note_input(&root, &unit, false);
    fc_root_note_input(&root, &unit, true);
    CHECK(!unit.owns_input);
    root.backward++;
    CHECK(!fc_root_asks_for_input(&root, &unit));
    root.backward = 7; /* of another root */
    module.training = FC_TRAINING_PRE_BACKWARD;
    module.backward = 7;
    CHECK_EQ(fc_root_module_training(&module, &root), FC_TRAINING_PRE_BACKWARD);
    fc_root_module_join(&module, &unit, false);
    CHECK(!fc_root_asks_for_input(&root, &unit));
    root.backward = 1;
    CHECK_EQ(fc_root_module_training(&module, &root), FC_TRAINING_IDLE);
    CHECK_EQ(fc_root_module_training(&module, NULL), FC_TRAINING_PRE_BACKWARD);
    unit.finished_in = 1;
    unit.input_seen_in = 0;
    fc_root_module_join(&module, &unit, true);
    CHECK(module.is_grouped && unit.finished_in == 0);
    CHECK(fc_root_asks_for_input(&root, &unit));
    root.backward = 7;
    CHECK(fc_root_asks_for_input(&root, &unit)); /* nobody has seen it */
}

static void check_training(void)
{
    static const fc_training_event events[] = {
        FC_TRAINING_ENTERED, FC_TRAINING_ENTERED, FC_TRAINING_LEFT,   FC_TRAINING_REACHED,
        FC_TRAINING_REACHED, FC_TRAINING_PASSED,  FC_TRAINING_PASSED, FC_TRAINING_REACHED,
        FC_TRAINING_LEFT,    FC_TRAINING_ENDED};
    static const struct {
        fc_training to;
        bool is_news;
    } expected[] = {{FC_TRAINING_FORWARD, true},        {FC_TRAINING_FORWARD, false},
                    {FC_TRAINING_IDLE, true},           {FC_TRAINING_PRE_BACKWARD, true},
                    {FC_TRAINING_PRE_BACKWARD, false},  {FC_TRAINING_POST_BACKWARD, true},
                    {FC_TRAINING_POST_BACKWARD, false}, {FC_TRAINING_PRE_BACKWARD, true},
                    {FC_TRAINING_IDLE, false},          {FC_TRAINING_IDLE, false}};
    fc_training training = FC_TRAINING_IDLE;

    for (size_t i = 0; i < sizeof(events) / sizeof(events[0]); i++) {
        CHECK_EQ(fc_training_move(&training, events[i]), expected[i].is_news);
        CHECK_EQ(training, expected[i].to);
    }
    for (fc_training from = FC_TRAINING_FORWARD; from < FC_TRAINING_IDLE; from++) {
        training = from;
        CHECK(fc_training_move(&training, FC_TRAINING_ENDED));
        CHECK_EQ(training, FC_TRAINING_IDLE);
    }
}

/* Two units of one module: reached in order, and left to the end, which passes the last one first.
 */
static void body_several(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);
    bool is_news;

    w->owners[1].course.next = &w->owners[2].course;
    fc_root_module_join(&w->modules[2], &w->owners[1].course, false);
    fc_root_module_join(&w->modules[3], NULL, false);
    for (int step = 1; step < 3; step++) {
        forward(w, N_UNITS);
        CHECK_EQ(w->course.n_units, N_UNITS);
        CHECK_OK(reach(w, 1));
        CHECK_OK(fc_root_reach(&w->course, &w->modules[2], &is_news));
        CHECK(is_news); /* for the second one */
        CHECK_OK(fc_root_enter_backward(&w->course, &w->owners[2].course));
        CHECK_OK(fc_root_reach(&w->course, &w->modules[2], &is_news));
        CHECK(!is_news);
        w->owners[1].fresh = w->owners[2].fresh = step;
        CHECK_OK(reach(w, 0));
        CHECK_OK(pass(w, 0, step));
        w->events[0] = '\0';
        CHECK_OK(end(w));
        CHECK(comes_before(w, "submit2", "submit1"));
        CHECK(!w->owners[1].is_unsharded && !w->owners[2].is_unsharded);
        check_sums(w, step, step);
    }
    forward(w, N_UNITS);
    w->owners[2].fresh = 3; /* of a backward that was left by an exception */
    CHECK_OK(fc_root_reset(&w->course, true));
    CHECK(w->owners[2].fresh == 0 && fc_root_is_between_steps(&w->course));
    leave(w);
}

enum {
    SUBMITTED /* in ranks_common */
};

/* Rank 1 refuses a sum as it passes its unit, or rank 0 while it passes the next one or at the end.
 */
static void body_refusing(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    for (int i = 0; i < 3; i++) {
        const bool refuses = rank == (i == 0 ? 1 : 0);

        forward(w, N_UNITS);
        CHECK_OK(reach(w, 2));
        w->fails_to_assign = refuses ? 2 : N_UNITS;
        if (rank == 0) {
            CHECK_OK(pass(w, 2, 1));
            atomic_fetch_add(&ranks_common->values[SUBMITTED], 1);
            CHECK(ranks_await(SUBMITTED, 2 * (i + 1)));
        } else {
            CHECK(ranks_await(SUBMITTED, 2 * i + 1));
            CHECK_EQ(pass(w, 2, 1), refuses ? FC_ERR_INTERRUPTED : FC_OK);
            atomic_fetch_add(&ranks_common->values[SUBMITTED], 1);
        }
        w->events[0] = '\0';
        if (i == 1 && refuses) {
            CHECK_EQ(pass(w, 1, 1), FC_ERR_INTERRUPTED);
            CHECK(strstr(w->events, "submit1") == NULL); /* nothing comes behind it */
        } else if (i == 2 && refuses) {
            CHECK_EQ(end(w), FC_ERR_INTERRUPTED);
        } else if (!refuses) {
            CHECK_EQ(end(w), FC_ERR_PEER);
        }
        CHECK_HAS(fc_last_message(), refuses ? "the caller refuses" : "left the backward");
        CHECK(w->context.is_failed && !fc_root_is_open(&w->course));
        CHECK_EQ(fc_window()->now.phase, FC_WINDOW_FAILED);
        w->fails_to_assign = N_UNITS;
        CHECK_OK(fc_root_reset(&w->course, true));
        for (size_t u = 0; u < N_UNITS; u++) {
            w->owners[u].has_sum = false;
        }
    }
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 3, 0));
    check_sums(w, 3, 3);
    leave(w);
}

/* Rank 0 refuses a sum that comes when nothing but sums is left; the other one has its own. */
static void body_refusing_last(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    forward(w, N_UNITS);
    if (rank == 0) {
        for (size_t u = N_UNITS; u-- > 0;) {
            CHECK_OK(reach(w, u));
            CHECK_OK(pass(w, u, 1));
        }
        w->fails_to_assign = 1;
        atomic_store(&ranks_common->values[SUBMITTED], 1);
        CHECK_EQ(end(w), FC_ERR_INTERRUPTED);
        CHECK_HAS(fc_last_message(), "the caller refuses");
        CHECK(w->context.is_failed && !fc_root_is_open(&w->course));
        w->fails_to_assign = N_UNITS;
        CHECK_OK(fc_root_reset(&w->course, true));
        for (size_t u = 0; u < N_UNITS; u++) {
            w->owners[u].has_sum = false;
        }
    } else {
        CHECK_OK(fc_root_begin_backward(&w->course)); /* for which rank 0 waits */
        CHECK(ranks_await(SUBMITTED, 1));
        CHECK_OK(backward(w, 1, 0));
        check_sums(w, 1, 1);
    }
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 2, 0));
    check_sums(w, 2, 2);
    leave(w);
}

/* No rank goes on before all of those with which it shares something have ended the forward. */
static void body_together(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    for (int late = 0; late < n_ranks; late++) {
        const bool waits = rank != late && (rank / w->n_shards == late / w->n_shards ||
                                            rank % w->n_shards == late % w->n_shards);

        CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
        if (rank == late) {
            (void)usleep(2000);
            atomic_store(&ranks_common->values[1 + late], 1);
        }
        CHECK_OK(fc_root_end_forward(&w->course, true));
        CHECK(!waits || atomic_load(&ranks_common->values[1 + late]) == 1);
    }
    leave(w);
}

/* Who leaves a forward late is heard of by all, those too that share no group with it: none goes on
 * into the backward. */
static void body_closing(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
    if (rank == 0) {
        for (int ms = 0; ms < 100 && atomic_load(&ranks_common->values[1]) == 0; ms++) {
            (void)usleep(1000); /* for a rank that goes on without this one */
        }
        fc_root_fail(&w->course);
    } else {
        const fc_status st = fc_root_end_forward(&w->course, true);

        (void)atomic_fetch_add(&ranks_common->values[1], 1);
        CHECK_EQ(st, FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "left the forward of step 1");
    }
    CHECK(w->context.is_failed && !fc_root_is_open(&w->course));
    CHECK_OK(fc_root_reset(&w->course, true));
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 2, 0));
    leave(w);
}

/* A rank that waits for one mesh keeps none of another one waiting. */
static void body_crossed(int rank, int n_ranks, void *arg)
{
    world *w;

    (void)arg;
    has_crossed_meshes = true;
    w = join(rank, n_ranks, n_ranks);
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
    CHECK_OK(fc_root_end_forward(&w->course, true));
    CHECK_OK(fc_root_begin_backward(&w->course));
    CHECK_OK(end(w));
    leave(w);
}

/* The last rank leaves the forward that the others go on from. */
static void body_leaving(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
    if (rank == n_ranks - 1) {
        fc_root_fail(&w->course);
    } else {
        CHECK_EQ(fc_root_begin_backward(&w->course), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "left the forward of step 1");
    }
    CHECK(w->context.is_failed && !fc_root_is_open(&w->course));
    CHECK_OK(fc_root_reset(&w->course, true));
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 2, 0));
    check_sums(w, 2, 2);
    leave(w);
}

/* Who leaves a backward whose sums are complete is noticed at its end. */
static void body_gone(int rank, int n_ranks, void *arg)
{
    world *w = join(rank, n_ranks, *(const int *)arg);

    forward(w, N_UNITS);
    CHECK_OK(fc_root_begin_backward(&w->course));
    if (rank == n_ranks - 1) {
        fc_root_fail(&w->course);
        atomic_store(&ranks_common->values[1], 1);
    } else {
        CHECK(ranks_await(1, 1));
        CHECK_EQ(end(w), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "left the backward of step 1");
    }
    CHECK(w->context.is_failed && !fc_root_is_open(&w->course));
    CHECK_OK(fc_root_reset(&w->course, true));
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 2, 0));
    check_sums(w, 2, 2);
    leave(w);
}

/* Forwards that begin at another module, or with shards that have seen less, are told apart. */
static void body_apart(int rank, int n_ranks, void *arg)
{
    static const char *const openers[N_MODULES] = {"root", "a", "b", "c"};
    world *w = join(rank, n_ranks, *(const int *)arg);
    const bool is_other = rank == n_ranks - 1;

    CHECK_OK(fc_domain_name_openers(w->domains[0], openers, N_MODULES));
    forward(w, N_UNITS);
    CHECK_OK(backward(w, 1, 0));
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[is_other ? 3 : 2], true, 0));
    CHECK_EQ(fc_root_end_forward(&w->course, true), FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "in the forward of b on rank 10");
    CHECK_HAS(fc_last_message(), "and of c on rank 11");
    CHECK(w->context.is_failed);
    CHECK_OK(fc_root_reset(&w->course, true));
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[is_other ? 1 : 0], true, 0));
    CHECK_EQ(fc_root_end_forward(&w->course, true), FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "in the forward of root on rank 10");
    CHECK_HAS(fc_last_message(), "and of a on rank 11");
    CHECK_OK(fc_root_reset(&w->course, true));
    if (is_other) {
        fc_updates_load(&w->owners[2].course.updates);
    }
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 1));
    CHECK_EQ(fc_root_end_forward(&w->course, true), FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "after 0 optimizer steps (and loads) over the shards of rank 10");
    CHECK_HAS(fc_last_message(), "after 1 over those of rank 11");
    CHECK_OK(fc_root_reset(&w->course, true));
    leave(w);
}

int main(void)
{
    static int one = 1, two = 2, three = 3;
    static const ranks_body bodies[] = {body_steps, body_finished, body_repeated,
                                        body_held,  body_late,     body_manual,
                                        body_left,  body_divided,  body_several};

    check_training();
    check_input();
    for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
        ranks_check(1, bodies[i], &one);
        ranks_check(2, bodies[i], &two);
        ranks_check(3, bodies[i], &three);
        ranks_check(2, bodies[i], &one); /* replicas alone */
        ranks_check(4, bodies[i], &two);
    }
    ranks_check(2, body_failing, &two);
    ranks_check(4, body_failing, &two);
    ranks_check(2, body_together, &two);
    ranks_check(2, body_together, &one);
    ranks_check(4, body_together, &two);
    ranks_check(4, body_closing, &two);
    ranks_check(2, body_crossed, NULL);
    ranks_check(2, body_refusing, &two);
    ranks_check(2, body_refusing_last, &two);
    ranks_check(2, body_leaving, &two);
    ranks_check(3, body_leaving, &three);
    ranks_check(2, body_gone, &two);
    ranks_check(2, body_apart, &two);
    return check_result();
}
