/* A caller that fails at each place of a step in turn; and what a step shows in the trace. */
#define _GNU_SOURCE

#include "root_calls.h"

static fc_status play_usual(void)
{
    FC_TRY(forward(true));
    return backward(0);
}

static fc_status play_published(void)
{
    w.owners[1].publishes = w.owners[1].is_stale = w.owners[2].is_kept = true;
    return play_usual();
}

static fc_status play_accumulated(void)
{
    set(false);
    FC_TRY(forward(true));
    FC_TRY(backward(3));
    set(true);
    w.owners[2].is_unsettled = w.owners[2].has_more = true;
    FC_TRY(forward(true));
    w.owners[2].course.n_entered = 2;
    return backward(1);
}

static fc_status play_manual(void)
{
    w.context.ends_manually = w.owners[1].publishes = true;
    FC_TRY(forward(true));
    FC_TRY(backward(2));
    w.owners[1].is_stale = true;
    return ended(fc_root_finalize_backward(&w.course));
}

/* Without being reached. */
static fc_status play_passed(void)
{
    w.owners[1].publishes = w.owners[1].is_stale = true;
    FC_TRY(forward(true));
    w.in_backward = true;
    FC_TRY(pass(3));
    return end_backward();
}

static fc_status play_ahead(void)
{
    w.domains[0]->n_ahead = 1;
    FC_TRY(fc_root_open_forward(&w.course, &w.modules[0], true, 0));
    w.domains[0]->n_ahead = 1;
    FC_TRY(ended(fc_root_end_forward(&w.course, true)));
    w.domains[0]->n_ahead = 1;
    FC_TRY(reach(0));
    w.domains[0]->n_ahead = 1;
    return end_backward();
}

static fc_status play_reset(void)
{
    w.domains[0]->n_ahead = 1;
    FC_TRY(fc_root_reset(&w.course, true));
    w.context.is_failed = true;
    return reach(0);
}

static fc_status play_device(void)
{
    make_device();
    return play_usual();
}

/* Returns whether it did. */
static bool fail_at(fc_status (*play)(void), int n_calls)
{
    bool did_fail;
    fc_status st;

    make_world();
    calls_left = n_calls;
    st = play();
    did_fail = has_failed;
    has_failed = false;
    calls_left = -1;
    CHECK_EQ(st, did_fail ? FC_ERR_INTERRUPTED : FC_OK);
    CHECK_OK(fc_root_reset(&w.course, true));
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w.owners[u];

        o->publishes = o->is_stale = o->is_kept = o->is_unsettled = o->has_more = false;
    }
    set(true);
    w.context.ends_manually = false;
    asked[0] = '\0';
    if (w.sim == NULL) {
        check_usual_step();
    }
    unmake_world();
    return did_fail;
}

static void test_failures(void)
{
    static fc_status (*const plays[])(void) = {play_usual,  play_published, play_accumulated,
                                               play_manual, play_passed,    play_ahead,
                                               play_reset,  play_device};

    for (size_t i = 0; i < sizeof(plays) / sizeof(plays[0]); i++) {
        int n = 0;

        while (fail_at(plays[i], n)) {
            n++;
        }
        CHECK_MSG(n >= 10, "%zu: %d", i, n);
    }
}

/* Whatever memory there is none for, nothing is left of the root. */
static void test_no_memory(void)
{
    fc_root_module *modules[N_MODULES];
    fc_root_course course = {.ops = &ops};
    fc_step_counter *counter = NULL;
    bool is_news = false;
    const int64_t live = (make_world(), fc_alloc_live());

    for (size_t i = 0; i < N_MODULES; i++) {
        modules[i] = &w.modules[i];
    }
    for (int n = 0; n < 2; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_root_init(&course, w.domains, N_DOMAINS, modules, N_MODULES), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK_HAS(fc_last_message(), "no memory for a root of 3 modules");
        CHECK_EQ(fc_alloc_live(), live);
        CHECK(course.domains == NULL && course.modules == NULL);
    }
    CHECK_OK(fc_step_counter_create(&counter));
    CHECK_OK(fc_updates_follow(&w.owners[0].course.updates, counter, &is_news));
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_root_open_forward(&w.course, &w.modules[0], true, 0), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_OK(fc_root_open_forward(&w.course, &w.modules[0], true, 0)); /* it looks again */
    CHECK_EQ(fc_updates_count(&w.course.updates), fc_updates_count(&w.owners[0].course.updates));
    fc_step_counter_release(counter);
    unmake_world();
}

/* ---- what the trace shows ---- */

static int n_events(uint64_t from, fc_window_event_kind kind, size_t u)
{
    int n = 0;

    for (uint64_t i = from; i < fc_window()->use.n_events; i++) {
        const fc_window_event *event = &fc_window_events_[i % FC_WINDOW_EVENTS];

        n += event->kind == (uint32_t)kind &&
             event->unit == fc_domain_unit(w.domains[0], u)->shown_as;
    }
    return n;
}

static void test_trace(void)
{
    const fc_window_config config = {.run = "a run", .world = 1, .traces = true};
    uint64_t from;

    CHECK_OK(fc_window_open(&config));
    make_world();
    from = fc_window()->use.n_events;
    CHECK_OK(forward(true));
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_EQ(n_events(from, FC_WINDOW_EVENT_LEFT, u), 1);
        CHECK_EQ(n_events(from, FC_WINDOW_EVENT_PASSED, u), 0);
    }
    from = fc_window()->use.n_events;
    CHECK_OK(backward(1)); /* the first one at the end */
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_EQ(n_events(from, FC_WINDOW_EVENT_LEFT, u), 1);
        CHECK_EQ(n_events(from, FC_WINDOW_EVENT_PASSED, u), 1);
    }
    from = fc_window()->use.n_events;
    CHECK_OK(fc_root_leave_unit(&w.course, &w.unbound, true, false, false));
    CHECK_OK(fc_root_pass(&w.course, &w.unbound));
    fc_root_finish(&w.course, &w.unbound);
    CHECK_EQ(fc_window()->use.n_events, from);
    CHECK_EQ(w.unbound.training, FC_TRAINING_POST_BACKWARD);
    unmake_world();
}

int main(void)
{
    ranks_init();
    test_failures();
    test_no_memory();
    test_trace();
    return check_result();
}
