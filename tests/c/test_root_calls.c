/* What a root asks of its caller in each part of a step, in which order, and what of it is left
 * out. */
#define _GNU_SOURCE

#include "root_calls.h"

#include "engine/reduction_private.h"
#include "engine/unsharding_private.h"
#include "refused_messages.h"

static void test_usual_steps(void)
{
    make_world();
    CHECK(w.course.publishes); /* nobody has looked yet */
    CHECK(w.domains[0]->next == w.domains[1] && w.domains[1]->next == w.domains[0]);
    CHECK_EQ(w.course.backward, 1);
    for (uint64_t step = 1; step < 4; step++) {
        check_usual_step();
        CHECK_EQ(w.course.backward, step + 1);
        CHECK_EQ(w.course.n_finished, N_UNITS);
    }
    unmake_world();
}

/* Shards that are not where peers read them are brought there, and again if they were written. */
static void test_published(void)
{
    make_world();
    w.owners[1].publishes = w.owners[1].is_stale = true;
    w.owners[2].is_stale = true; /* nobody asks */
    CHECK_OK(forward(true));
    CHECK(w.course.publishes);
    CHECK_ASKED(TAKEN "publish0 publish1 publish2 publish3 " ENTERED CHECKED);
    CHECK_OK(backward(0));
    CHECK_ASKED("stale1 publish1 note1 " FINISHED);
    w.owners[1].is_stale = false;
    w.owners[0].publishes = true;
    w.owners[1].publishes = false;
    CHECK_OK(forward(true));
    asked[0] = '\0';
    CHECK_OK(backward(0));
    CHECK_ASKED("stale0 " FINISHED);
    w.owners[0].publishes = false;
    check_usual_step();
    unmake_world();
    make_world(); /* a backward of a forward that ran in another root */
    w.owners[1].publishes = w.owners[1].is_stale = true;
    CHECK_OK(reach(1));
    CHECK_ASKED("stale1 publish1 note1 await unshard1 defer1! ");
    unmake_world();
}

/* Shards that have gone elsewhere are looked for no further, nor are those behind them. */
static void test_damaged(void)
{
    bool intact = true;

    make_world();
    w.is_damaged = true;
    w.modules[1].is_grouped = true;
    CHECK_OK(fc_root_take_shards(&w.course, &intact));
    CHECK(!intact && w.course.has_grouped);
    CHECK_ASKED("intact0 note0 intact1 ");
    w.is_damaged = w.modules[1].is_grouped = false;
    CHECK_OK(fc_root_take_shards(&w.course, &intact));
    CHECK(intact && !w.course.has_grouped && w.course.n_units == N_UNITS);
    CHECK_ASKED(TAKEN);
    unmake_world();
}

/* What is kept, needed or recomputed is not resharded. */
static void test_left(void)
{
    static const struct {
        bool recomputes, stays, is_needed, is_kept, was_entered;
        const char *asks;
    } cases[] = {{false, false, false, false, true, "shard1! end1 "},
                 {false, false, false, false, false, "shard1 "},
                 {true, false, false, false, true, ""},
                 {false, true, false, false, true, "end1 "},
                 {false, true, false, false, false, "shard1 "},
                 {false, false, true, false, true, "end1 "},
                 {false, false, false, true, true, "end1 "},
                 {false, false, false, true, false, "shard1 "}};

    make_world();
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fc_root_unit *unit = &w.owners[1].course;

        unit->training = cases[i].was_entered ? FC_TRAINING_FORWARD : FC_TRAINING_POST_BACKWARD;
        w.owners[1].is_kept = cases[i].is_kept;
        CHECK_OK(fc_root_leave_unit(&w.course, unit, cases[i].recomputes, cases[i].stays,
                                    cases[i].is_needed));
        CHECK_ASKED(cases[i].asks);
        CHECK_EQ(unit->training, FC_TRAINING_IDLE);
    }
    w.owners[1].is_kept = false;
    w.owners[2].is_kept = true;
    CHECK_OK(forward(true));
    CHECK_ASKED(TAKEN "shard0! end0 shard1! end1 end2 shard3! end3 "
                      "check0 check1 check2 keep2 check3 ");
    unmake_world();
}

/* Who has no gradient sends zeros, if the unit has ever been used. */
static void test_unused(void)
{
    make_world();
    w.owners[1].course.reduce_unused = w.owners[2].course.reduce_unused = true;
    w.owners[3].course.reduce_unused = true;
    w.owners[1].course.past.unshards = 1;
    w.owners[2].course.unshard_in_backward = false;
    CHECK_OK(forward(true));
    asked[0] = '\0';
    CHECK_OK(backward(0));
    CHECK_ASKED("await without2 defer2! unshard3 defer3! "
                "passed3 reshard3! submit3+ undefer3 graph3 " PASSED(
                    2) "unshard1 defer1! passed1 reshard1! submit1+ undefer1 graph1 "
                       "unshard0 defer0! " PASSED(0));
    unmake_world();
}

/* Gradients that are lent and large are given back as their unit was passed; others stay. */
static void test_lent(void)
{
    static const fc_gradient none = {.data = NULL};

    for (size_t more = 0; more < 2; more++) {
        make_world();
        CHECK_OK(forward(true));
        CHECK_OK(reach(2));
        n_released = 0;
        w.owners[3].reduction->borrowed =
            (borrowed){.grads = &none, .memory = &w, .bytes = FC_BORROWED_BYTES_MAX + more};
        w.domains[0]->borrower = w.owners[3].reduction;
        CHECK_OK(pass(3));
        CHECK_EQ(n_released, more);
        CHECK_OK(fc_root_reset(&w.course, true));
        CHECK_EQ(n_released, 1);
        unmake_world();
    }
}

/* No later backward can begin inside of a unit that was reached and passed with all gradients. */
static void test_end_of_graph(void)
{
    for (int i = 0; i < 5; i++) {
        owner *o = &w.owners[3];

        make_world();
        CHECK_OK(forward(true));
        CHECK_OK(reach(2));
        o->is_awaited = i != 1;
        o->lacks_gradients = i == 2;
        w.keeps_graph = i == 3;
        o->course.n_entered = i == 4 ? 2 : 1;
        asked[0] = '\0';
        CHECK_OK(pass(3));
        CHECK_EQ(strstr(asked, "graph3") != NULL, i == 0);
        CHECK_EQ(strstr(asked, "submit3") != NULL, i != 4);
        CHECK_EQ(o->course.defers_hooks, i == 4);
        unmake_world();
    }
}

#define LOOKED_AT(u) "keep" #u " drop" #u " "

/* A unit that ran twice is reduced when it was passed twice, or at the end. */
static void test_repeated(void)
{
    fc_root_unit *unit = &w.owners[1].course;

    for (int n_passed = 1; n_passed <= 2; n_passed++) {
        make_world();
        CHECK_OK(forward(true));
        unit->n_entered = 2;
        CHECK_OK(reach(2));
        CHECK_OK(pass(3));
        CHECK_OK(pass(2));
        CHECK_OK(reach(1));
        asked[0] = '\0';
        CHECK_OK(pass(1));
        CHECK_ASKED("passed1 reshard1! undefer1 ");
        if (n_passed == 2) {
            CHECK_OK(reach(1));
            w.owners[1].has_held = true; /* which goes ahead; but it goes anyway */
            CHECK_OK(pass(1));
            CHECK_ASKED("unshard1 defer1! " PASSED(1));
        }
        CHECK_OK(reach(0));
        CHECK_OK(pass(0));
        asked[0] = '\0';
        CHECK_OK(end_backward());
        if (n_passed == 1) {
            CHECK_ASKED("forget0 " LOOKED_AT(0) "forget1 reshard1 submit1 undefer1 " LOOKED_AT(
                1) "forget2 " LOOKED_AT(3) LOOKED_AT(2) "hooks3 hooks2 hooks1 hooks0 ");
        } else {
            CHECK_ASKED("hooks3 hooks2 hooks1 hooks0 ");
        }
        CHECK(!unit->defers_hooks);
        check_usual_step();
        unmake_world();
    }
    make_world();
    CHECK_OK(forward(true));
    unit->n_entered = 2;
    w.owners[1].has_held = true;
    CHECK_OK(reach(1));
    asked[0] = '\0';
    CHECK_OK(pass(1));
    CHECK_ASKED("passed1 reshard1! submit1 undefer1 ");
    unmake_world();
}

/* What came after a unit was passed is found at the end, which looks at all units then. */
static void test_late(void)
{
    make_world();
    CHECK_OK(forward(true));
    w.owners[2].is_unsettled = w.owners[2].has_more = true;
    w.owners[1].course.reshard_after_backward = false;
    CHECK_OK(reach(2));
    CHECK_OK(pass(3));
    CHECK_OK(pass(2));
    CHECK_EQ(w.course.n_finished, 1);
    CHECK_OK(reach(1));
    asked[0] = '\0';
    CHECK_OK(pass(1));
    CHECK_ASKED("passed1 submit1 undefer1 graph1 ");
    CHECK_OK(reach(0));
    CHECK_OK(pass(0));
    CHECK_OK(unshard(&w.owners[3])); /* a hook reads it */
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_ASKED("forget0 " LOOKED_AT(0) "forget1 " LOOKED_AT(
        1) "forget2 passed3 reshard3! submit3 undefer3 " LOOKED_AT(3) "reshard2 submit2 "
                                                                      "undefer2 " LOOKED_AT(2));
    w.owners[2].is_unsettled = w.owners[2].has_more = false;
    w.owners[1].course.reshard_after_backward = true;
    check_usual_step();
    CHECK_OK(forward(true)); /* passed again: it was finished in vain */
    CHECK_OK(reach(2));
    CHECK_OK(pass(2));
    CHECK_EQ(w.course.n_finished, 1);
    CHECK_OK(pass(2));
    CHECK_EQ(w.course.n_finished, 1);
    CHECK_OK(unshard(&w.owners[2]));
    CHECK_OK(pass(3));
    CHECK_OK(reach(1));
    CHECK_OK(pass(1));
    CHECK_OK(reach(0));
    CHECK_OK(pass(0));
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_HAS(asked, "keep2");
    for (size_t d = 0; d < N_DOMAINS; d++) { /* or one of any domain was used again */
        CHECK_OK(forward(true));
        CHECK_OK(reach(0));
        w.domains[d]->n_reused++;
        w.course.n_finished = w.course.n_units;
        asked[0] = '\0';
        CHECK_OK(end_backward());
        CHECK_HAS(asked, "keep2");
    }
    unmake_world();
}

/* Gradients that are kept for a later backward; of units that were passed, or not. */
static void test_accumulated(void)
{
    make_world();
    set(false);
    CHECK_OK(forward(true));
    asked[0] = '\0';
    CHECK_OK(reach(2));
    CHECK_OK(pass(3));
    CHECK_ASKED("await unshard2 defer2 unshard3 defer3 "
                "passed3 reshard3! accumulate3! undefer3 graph3 ");
    CHECK_EQ(w.course.n_finished, 0);
    w.owners[3].has_more = true;
    CHECK_OK(end_backward());
    w.owners[3].has_more = false;
    CHECK_ASKED("forget0 passed0 reshard0! accumulate0! undefer0 " LOOKED_AT(
        0) "forget1 passed1 reshard1! accumulate1! undefer1 " LOOKED_AT(1) "forget2 reshard3 "
                                                                           "accumulate3 "
                                                                           "undefer3"
                                                                           " " LOOKED_AT(
                                                                               3) "pa"
                                                                                  "ss"
                                                                                  "ed"
                                                                                  "2 "
                                                                                  "re"
                                                                                  "sh"
                                                                                  "ar"
                                                                                  "d2"
                                                                                  "! "
                                                                                  "ac"
                                                                                  "cu"
                                                                                  "mu"
                                                                                  "la"
                                                                                  "te"
                                                                                  "2!"
                                                                                  " u"
                                                                                  "nd"
                                                                                  "ef"
                                                                                  "er"
                                                                                  "2 "
                                                                                  "gr"
                                                                                  "ap"
                                                                                  "h2"
                                                                                  " " LOOKED_AT(2));
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK(w.owners[u].course.is_pending);
    }
    for (size_t m = 0; m < N_MODULES; m++) { /* for whoever has it next, too */
        CHECK_EQ(fc_root_module_training(&w.modules[m], NULL), FC_TRAINING_IDLE);
    }
    CHECK(fc_root_is_between_steps(&w.course)); /* but for what the caller has */
    w.owners[1].has_more = true;
    CHECK(!fc_root_is_between_steps(&w.course));
    w.owners[1].has_more = false;
    for (size_t u = 0; u < N_UNITS; u++) {
        w.owners[u].course.n_entered = 1;
        CHECK(!fc_root_is_between_steps(&w.course));
        w.owners[u].course.n_entered = 0;
    }
    set(true);
    check_usual_step();
    CHECK(!w.owners[1].course.is_pending);
    unmake_world();
}

/* Backwards that end by hand leave what was not passed, until they are finalized. */
static void test_manual(void)
{
    make_world();
    w.context.ends_manually = true;
    w.owners[1].course.reduce_grads = false;
    w.owners[0].course.reshard_after_backward = false;
    CHECK_OK(forward(true));
    asked[0] = '\0';
    CHECK_OK(backward(3));
    CHECK_ASKED(REACHED PASSED(3) "forget0 keep0 "
                                  "forget1 passed1 reshard1! accumulate1! undefer1 keep1 "
                                  "forget2 keep3 keep2 ");
    CHECK_EQ(w.context.ending, FC_ENDING_MANUAL);
    CHECK(w.context.is_unfinalized && !w.context.awaits_end);
    CHECK(w.owners[2].course.is_pending && !w.owners[3].course.is_pending);
    w.owners[1].course.reduce_grads = true;
    w.owners[0].course.is_pending = false; /* its gradients were dropped */
    CHECK_OK(ended(fc_root_finalize_backward(&w.course)));
    CHECK_ASKED("reshard3 drop3 passed2 reshard2! submit2 undefer2 graph2 drop2 "
                "passed1 reshard1! submit1 undefer1 drop1 drop0 ");
    CHECK(!w.context.is_unfinalized && !fc_root_is_open(&w.course));
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK(w.owners[u].course.n_passed == 0 && !w.owners[u].course.is_pending);
        CHECK_EQ(w.owners[u].course.training, FC_TRAINING_IDLE);
    }
    w.context.ends_manually = false; /* as its caller does between two steps */
    w.context.ending = FC_ENDING_OPEN;
    w.owners[0].course.reshard_after_backward = true;
    check_usual_step();
    unmake_world();
}

/* Of several backwards the last one ends the step. */
static void test_not_the_last(void)
{
    make_world();
    w.context.is_last_backward = false;
    CHECK_OK(forward(true));
    CHECK_OK(backward(0));
    CHECK_EQ(w.context.ending, FC_ENDING_AUTOMATIC);
    w.context.ends_manually = true; /* from the next step on */
    w.context.is_last_backward = true;
    CHECK_OK(backward(0));
    CHECK_EQ(w.context.ending, FC_ENDING_OPEN);
    unmake_world();
}

/* A root whose module alone has parameters, or none has. */
static void test_few_units(void)
{
    make_world();
    for (size_t m = 1; m < N_MODULES; m++) {
        fc_root_module_join(&w.modules[m], NULL, false);
    }
    CHECK_OK(forward(true));
    CHECK_EQ(w.course.n_units, 1);
    CHECK_OK(reach(0));
    CHECK_OK(pass(0));
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_ASKED("");
    fc_root_module_join(&w.modules[0], NULL, false);
    CHECK_OK(forward(true));
    CHECK_OK(fc_root_begin_backward(&w.course));
    fc_root_note_awaited(&w.course);
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_ASKED("forget0 forget1 forget2 ");
    unmake_world();
}

/* What was gathered ahead and not used is given up as a phase begins, and as it ends. */
static void test_ahead(void)
{
    make_world();
    w.domains[0]->n_ahead = 1;
    CHECK_OK(fc_root_open_forward(&w.course, &w.modules[0], true, 0));
    CHECK_HAS(asked, "ahead0 ahead1 ahead2 ahead3 ");
    asked[0] = '\0';
    w.domains[0]->n_ahead = 1;
    CHECK_OK(fc_root_end_forward(&w.course, true));
    CHECK_ASKED(CHECKED "ahead0 ahead1 ahead2 ahead3 ");
    CHECK_OK(fc_root_end_forward(&w.course, true)); /* which is over */
    CHECK_ASKED("");
    CHECK_OK(fc_root_open_forward(&w.course, &w.modules[0], true, 0));
    w.domains[1]->n_ahead = 1;
    asked[0] = '\0';
    CHECK_OK(fc_root_end_forward(&w.course, true));
    CHECK_ASKED(CHECKED "ahead0 ahead1 ahead2 ahead3 ");
    CHECK_OK(reach(0));
    asked[0] = '\0';
    CHECK_OK(fc_root_end_forward(&w.course, true)); /* of what runs again in a backward */
    CHECK_ASKED("");
    CHECK(fc_root_in_backward(&w.course));
    w.domains[0]->n_ahead = 1;
    fc_root_unit_bind(&w.owners[1].course, NULL, NULL); /* its module is gone */
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_HAS(asked, "keep2 drop2 ahead0 ahead2 ahead3 ");
    w.domains[0]->n_ahead = 1;
    w.domains[0]->n_units = 2; /* units behind them are none of its own */
    asked[0] = '\0';
    CHECK_OK(fc_root_open_forward(&w.course, &w.modules[0], true, 0));
    CHECK_HAS(asked, "ahead0 ");
    CHECK(strstr(asked, "ahead2") == NULL);
    w.domains[0]->n_units = N_UNITS;
    w.domains[0]->n_ahead = 0;
    unmake_world();
}

/* ---- resets ---- */

#define RESET(u) "reshard" #u " drop" #u " clear" #u " "
#define ALL_RESET "forget0 " RESET(0) "forget1 " RESET(1) "forget2 " RESET(2) RESET(3)

static void leave_things(void)
{
    CHECK_OK(forward(true));
    CHECK_OK(reach(2));
    CHECK_OK(pass(3));
    for (size_t u = 0; u < N_UNITS; u++) {
        w.owners[u].course.is_pending = w.owners[u].course.defers_hooks = true;
    }
    w.context.is_unfinalized = w.context.is_failed = true;
    w.course.opener = &w.modules[0];
    w.course.has_raised = true;
    w.domains[0]->n_ahead = 1;
    asked[0] = '\0';
}

static void check_reset(bool drops_gradients)
{
    CHECK(!fc_root_is_open(&w.course) && !fc_domain_is_open(w.domains[1]));
    CHECK(!w.context.awaits_end && !w.context.is_failed);
    CHECK(w.course.opener == NULL && !w.course.has_raised);
    CHECK_EQ(w.context.is_unfinalized, !drops_gradients);
    CHECK_EQ(w.context.ending, drops_gradients ? FC_ENDING_OPEN : FC_ENDING_AUTOMATIC);
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_root_unit *unit = &w.owners[u].course;

        CHECK_EQ(unit->training, FC_TRAINING_IDLE);
        CHECK(unit->n_entered == 0 && unit->n_passed == 0 && !unit->defers_hooks);
        CHECK(!w.owners[u].is_awaited);
        CHECK_EQ(unit->is_pending, !drops_gradients);
    }
    for (size_t m = 0; m < N_MODULES; m++) {
        CHECK_EQ(w.modules[m].training, FC_TRAINING_IDLE);
    }
}

static void test_reset(void)
{
    make_world();
    leave_things();
    CHECK_OK(fc_root_reset(&w.course, true));
    CHECK_ASKED("ahead0 ahead1 ahead2 ahead3 " ALL_RESET);
    check_reset(true);
    w.owners[1].has_own_memory = true;
    leave_things();
    CHECK_OK(fc_root_reset(&w.course, false));
    CHECK_ASKED("ahead0 ahead1 ahead2 ahead3 forget0 reshard0 drop0 forget1 "
                "forget2 reshard2 drop2 reshard3 drop3 ");
    check_reset(false);
    w.context.is_failed = true; /* a backward of what is left begins anew */
    CHECK_OK(reach(1));
    CHECK_ASKED(ALL_RESET "await unshard1 defer1! ");
    CHECK(!w.owners[2].course.is_pending);
    unmake_world();
}

/* A forward that was left by an exception: who began it tells peers, and finds out later. */
static void test_raised(void)
{
    make_world();
    for (size_t m = 0; m < N_MODULES; m++) {
        fc_root_module *module = &w.modules[m];

        CHECK(!fc_root_was_left(&w.course, module));
        CHECK_OK(fc_root_open_forward(&w.course, module, true, 0));
        CHECK_EQ(fc_root_was_left(&w.course, module), m == 0);
        module->training = FC_TRAINING_FORWARD;
        for (size_t other = 0; other < N_MODULES; other++) {
            CHECK_EQ(fc_root_was_left(&w.course, &w.modules[other]), other == 0 || other == m);
            if (other != m) {
                fc_root_note_raised(&w.course, &w.modules[other]);
            }
        }
        module->is_grouped = true;
        CHECK(!fc_root_was_left(&w.course, module));
        module->is_grouped = false;
        CHECK(fc_root_is_open(&w.course) && !w.course.has_raised);
        fc_root_note_raised(&w.course, module);
        CHECK(!fc_root_is_open(&w.course) && !fc_domain_is_open(w.domains[1]));
        CHECK(w.course.has_raised);
        CHECK_EQ(fc_window()->now.phase, FC_WINDOW_FAILED);
        CHECK_OK(fc_root_reset(&w.course, false));
        module->training = FC_TRAINING_FORWARD;
        CHECK(!fc_root_was_left(&w.course, module));
        module->training = FC_TRAINING_IDLE;
    }
    CHECK_OK(reach(0));
    w.course.opener = &w.modules[0];
    fc_root_note_raised(&w.course, &w.modules[0]); /* what runs again in a backward */
    CHECK(fc_root_is_open(&w.course) && !w.course.has_raised);
    w.course.opener = NULL;
    unmake_world();
}

/* A root without modules or domains. */
static void test_empty(void)
{
    fc_root_context context = {.awaits_end = true};
    fc_root_course empty = {.ops = &ops, .context = &context};

    CHECK_OK(fc_root_init(&empty, NULL, 0, NULL, 0));
    CHECK(!fc_root_is_open(&empty) && !fc_root_in_backward(&empty));
    CHECK(!fc_root_is_visible(&empty) && fc_root_is_between_steps(&empty));
    fc_root_fail(&empty);
    CHECK(context.is_failed && !context.awaits_end);
    CHECK_OK(fc_root_reset(&empty, true));
    CHECK(!context.is_failed);
    fc_root_fini(&empty);
    CHECK(empty.n_domains == 0 && empty.n_modules == 0);
    fc_root_fini(&empty);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* What a unit is bound to works for it alone, and was not finished yet. */
static void test_binding(void)
{
    fc_root_unit *unit = &w.owners[1].course;
    fc_unit *shard;

    make_world();
    shard = fc_domain_unit(w.domains[0], 1);
    CHECK(fc_unit_owner(shard) == &w.owners[1]);
    fc_reduction_traffic(w.owners[1].reduction)->unshards = 3;
    shard->is_finished = true;
    fc_root_unit_bind(unit, NULL, NULL);
    CHECK(fc_unit_owner(shard) == NULL && unit->reduction == NULL && unit->owner == NULL);
    CHECK_EQ(unit->past.unshards, 3);
    fc_root_unit_bind(unit, w.owners[1].reduction, &w.owners[1]);
    CHECK(fc_unit_owner(shard) == &w.owners[1] && !shard->is_finished);
    fc_reduction_traffic(w.owners[1].reduction)->unshards = 1;
    fc_root_unit_bind(unit, w.owners[1].reduction, &w.owners[1]);
    CHECK_EQ(unit->past.unshards, 4);
    unmake_world();
}

/* A forward tells peers what the shards of all units have seen, bound or not. */
static void test_updates(void)
{
    fc_step_counter *counter = NULL;
    bool is_news = false;

    make_world();
    CHECK_OK(fc_step_counter_create(&counter));
    CHECK_OK(fc_updates_follow(&w.owners[3].course.updates, counter, &is_news));
    fc_step_counter_count(counter);
    for (uint64_t n = 1; n < 5; n++) {
        if (n == 2) {
            fc_updates_load(&w.unbound.updates);
        }
        CHECK_OK(fc_root_open_forward(&w.course, &w.modules[0], true, n < 3 ? 5 : 3 + n));
        CHECK_EQ(fc_updates_count(&w.course.updates), n < 3 ? n : n + 1); /* looks again */
        CHECK_OK(fc_root_end_forward(&w.course, true));
        fc_step_counter_count(counter);
    }
    fc_step_counter_release(counter);
    fc_root_unit_fini(&w.unbound);
    unmake_world();
}

/* ---- over messages ---- */

static int n_dropped;

static void drop_gather(void *context)
{
    (void)context;
    n_dropped++;
}

static fc_status no_exchange(void *context, const char *what, const void *mine, size_t bytes,
                             void *all_out)
{
    (void)context, (void)what, (void)mine, (void)bytes, (void)all_out;
    return FC_ERR_UNSUPPORTED;
}

static fc_transport *messages;
static fc_domain *by_messages;

static void make_messages(bool is_packed)
{
    static const int ranks[2] = {0, 1};
    const fc_transport_config config = {.name = "messages",
                                        .n_ranks = 2,
                                        .global_ranks = ranks,
                                        .timeout_ns = DOMAINS_TIMEOUT_NS,
                                        .host = {.exchange = no_exchange}};
    fc_message_ops transport_ops = refused_messages;
    fc_param param = make_param(1, 2, 2, FC_F32, true);
    const fc_unit_desc unit = {"first", &param, 1};

    param.is_packed = is_packed;
    transport_ops.gather_drop = drop_gather;
    CHECK_OK(fc_callback_create(&config, &transport_ops, &messages));
    CHECK_OK(fc_domain_create(messages, FC_DOMAIN_SHARD, &unit, 1, 0, 2, &by_messages));
}

static void unmake_messages(void)
{
    fc_domain_destroy(by_messages);
    fc_transport_destroy(messages);
}

/* Others look at what one of its domains sends, whichever it is; and divide for themselves. */
static void test_visible(void)
{
    fc_reduction *reduction = NULL;
    fc_root_unit unit;

    make_world();
    CHECK(!fc_root_is_visible(&w.course));
    for (int i = 0; i < 4; i++) {
        fc_root_context context = {.awaits_end = false};
        fc_root_course root = {.ops = &ops, .context = &context};
        fc_domain *domains[2] = {w.domains[0], w.domains[0]};

        make_messages(i % 2 != 0);
        domains[i / 2] = by_messages;
        CHECK_OK(fc_root_init(&root, domains, 2, NULL, 0));
        CHECK_EQ(fc_root_is_visible(&root), i % 2 != 0);
        CHECK_OK(fc_reduction_create(fc_domain_unit(by_messages, 0), NULL, w.slots, &no_reductions,
                                     &reduction));
        fc_root_unit_init(&unit);
        fc_root_unit_bind(&unit, reduction, &unit);
        CHECK_EQ(fc_root_unit_options(&unit, 0).divisor, i % 2 != 0 ? 1 : 2);
        CHECK_EQ(fc_root_unit_options(&unit, 4).divisor, i % 2 != 0 ? 1 : 4);
        fc_root_unit_bind(&unit, NULL, NULL);
        fc_reduction_destroy(reduction);
        fc_root_fini(&root);
        unmake_messages();
    }
    unmake_world();
}

/* A gather that has begun and is not used is given up as a phase begins, and as it ends. */
static void test_begun(void)
{
    fc_root_context context = {.is_last_backward = true};
    fc_root_course root = {.ops = &ops, .context = &context, .owner = &w};
    fc_root_module module = {.training = FC_TRAINING_IDLE}, *modules[1] = {&module};
    fc_unsharding begun;

    make_world();
    make_messages(false);
    begun = (fc_unsharding){.slots = w.slots, .domain = by_messages};
    CHECK_OK(fc_root_init(&root, &by_messages, 1, modules, 1));
    n_dropped = 0;
    for (int i = 0; i < 4; i++) {
        CHECK_OK(fc_slots_acquire(w.slots, 1, &by_messages->gathering_pack));
        by_messages->gathering = &begun;
        if (i == 0) {
            CHECK_OK(fc_root_open_forward(&root, &module, true, 0));
        } else if (i == 1) {
            CHECK_OK(fc_root_end_forward(&root, true));
        } else if (i == 2) {
            CHECK_OK(fc_root_begin_backward(&root));
        } else {
            CHECK_OK(fc_root_end_backward(&root));
        }
        CHECK(by_messages->gathering == NULL);
        CHECK_EQ(n_dropped, i + 1);
    }
    fc_root_fini(&root);
    unmake_messages();
    unmake_world();
}

/* ---- on a device ---- */

#define RELEASED "release0 release1 release2 release3 "

/* A gather that nobody uses. */
static void start_gather(void)
{
    CHECK_OK(fc_schedule_start(w.on_device));
    n_freed = 0;
}

static void test_device(void)
{
    make_world();
    make_device();
    CHECK_OK(forward(true));
    CHECK_ASKED(TAKEN RELEASED "begin " ENTERED CHECKED);
    start_gather();
    CHECK_OK(backward(0));
    CHECK_ASKED("resume " RELEASED FINISHED);
    CHECK(n_freed > 0);
    w.context.is_last_backward = false;
    CHECK_OK(forward(true));
    start_gather();
    CHECK_OK(backward(0));
    CHECK_EQ(n_freed, 0); /* it may be used yet */
    w.context.is_last_backward = w.context.ends_manually = true;
    w.context.ending = FC_ENDING_OPEN;
    CHECK_OK(backward(0));
    CHECK_EQ(n_freed, 0);
    CHECK_OK(ended(fc_root_finalize_backward(&w.course)));
    CHECK(n_freed > 0);
    w.context.ends_manually = false;
    w.context.ending = FC_ENDING_OPEN;
    for (int keeps = 0; keeps < 2; keeps++) {
        CHECK_OK(fc_root_open_forward(&w.course, &w.modules[0], keeps != 0, 0));
        start_gather();
        CHECK_OK(fc_root_end_forward(&w.course, keeps != 0));
        CHECK_EQ(n_freed > 0, keeps == 0);
        CHECK_OK(fc_root_reset(&w.course, keeps != 0));
        CHECK(n_freed > 0);
    }
    unmake_world();
    make_world();
    make_device();
    w.forgets_to_begin = true;
    CHECK_OK(forward(true));
    CHECK_EQ(backward(0), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "before an iteration has begun");
    CHECK_OK(fc_root_reset(&w.course, true));
    unmake_world();
}

int main(void)
{
    ranks_init();
    test_usual_steps();
    test_published();
    test_damaged();
    test_left();
    test_unused();
    test_lent();
    test_end_of_graph();
    test_repeated();
    test_late();
    test_accumulated();
    test_manual();
    test_not_the_last();
    test_few_units();
    test_ahead();
    test_reset();
    test_raised();
    test_empty();
    test_binding();
    test_updates();
    test_visible();
    test_begun();
    test_device();
    return check_result();
}
