/* What a root asks of its caller in each part of a step, in which order, and what of it is left
 * out: one rank, whose caller writes down what it is asked, and fails at each place in turn.
 */
#define _GNU_SOURCE

#include "domains.h"

#include "device/sim/sim.h"
#include "engine/domain_private.h"
#include "engine/root.h"
#include "window/window.h"

#define N_UNITS 4 /* of the root, of the first module below it, and two of the second */
#define N_MODULES 3
#define N_DOMAINS 2
#define N_STREAMS 5

typedef struct owner {
    fc_root_unit course;
    fc_reduction *reduction;
    bool publishes, is_stale, is_kept, has_own_memory;
    bool is_awaited, is_unsharded, has_held, has_more, lacks_gradients, is_unsettled;
} owner;

typedef struct world {
    ranks_host hosts[N_DOMAINS];
    fc_transport *transports[N_DOMAINS];
    fc_domain *domains[N_DOMAINS];
    fc_slots *slots;
    fc_root_course course;
    fc_root_context context;
    owner owners[N_UNITS];
    fc_root_unit unbound; /* of the first module, before the one that is bound */
    fc_root_module modules[N_MODULES];
    bool in_backward, keeps_graph, is_damaged;
    /* A device's. */
    fc_sim *sim;
    fc_device *device;
    fc_stream *streams[N_STREAMS];
    fc_schedule *schedule;
    fc_schedule_unit *on_device;
    fc_param param;
    fc_layout layout;
    void *memory;
    const void *shards[1]; /* there */
} world;

static world w;
static char asked[2048];
static int calls_left = -1; /* until one fails; negative: none does */
static bool has_failed;

/* ---- the caller ---- */

/* Nothing is asked for behind a failure. */
static fc_status take(const char *what, const owner *o, const char *how)
{
    const size_t used = strlen(asked);

    CHECK_MSG(!has_failed, "%s", what);
    CHECK_OR_EXIT(used + 40 < sizeof(asked));
    if (o != NULL) {
        (void)snprintf(asked + used, sizeof(asked) - used, "%s%td%s ", what, o - w.owners, how);
    } else {
        (void)snprintf(asked + used, sizeof(asked) - used, "%s%s ", what, how);
    }
    if (calls_left == 0) {
        has_failed = true;
        return fc_fail(FC_ERR_INTERRUPTED, "it fails");
    }
    calls_left -= calls_left > 0;
    return FC_OK;
}

/* What was asked since the last time. */
#define CHECK_ASKED(expected)                                                                      \
    do {                                                                                           \
        CHECK_STR(asked, expected);                                                                \
        asked[0] = '\0';                                                                           \
    } while (0)

#define OPERATION(name)                                                                            \
    static fc_status name(void *of)                                                                \
    {                                                                                              \
        return take(#name, of, "");                                                                \
    }
#define OPERATION_OF_ROOT(name)                                                                    \
    static fc_status name(void *of)                                                                \
    {                                                                                              \
        CHECK(of == &w);                                                                           \
        return take(#name, NULL, "");                                                              \
    }
#define ANSWER(name, answer)                                                                       \
    static bool name(void *of)                                                                     \
    {                                                                                              \
        const owner *o = of;                                                                       \
                                                                                                   \
        return answer;                                                                             \
    }

OPERATION_OF_ROOT(resume)
OPERATION(publish)
OPERATION(note)
OPERATION(check)
OPERATION(end)
OPERATION(keep)
OPERATION(drop)
OPERATION(undefer)
OPERATION(passed)
OPERATION(graph)
OPERATION(hooks)
OPERATION(clear)
OPERATION(release)
ANSWER(publishes, o->publishes)
ANSWER(is_kept, o->is_kept)
ANSWER(is_unsharded, o->is_unsharded)
ANSWER(has_own_memory, o->has_own_memory)
ANSWER(has_accumulated, o->has_more)
ANSWER(has_held, o->has_held)
ANSWER(has_all_gradients, !o->lacks_gradients)
ANSWER(is_settled, !o->is_unsettled)

static fc_status begin(void *root)
{
    CHECK(root == &w);
    FC_TRY(take("begin", NULL, ""));
    return fc_schedule_begin(w.schedule, w.streams[0], NULL);
}

static bool is_in_backward(void *root)
{
    CHECK(root == &w);
    return w.in_backward;
}

static bool keeps_graph(void *root)
{
    CHECK(root == &w);
    return w.keeps_graph;
}

static fc_status await(void *root)
{
    CHECK(root == &w);
    FC_TRY(take("await", NULL, ""));
    fc_root_note_awaited(&w.course);
    return FC_OK;
}

static void forget(void *module)
{
    const size_t used = strlen(asked);

    (void)snprintf(asked + used, sizeof(asked) - used, "forget%td ",
                   (fc_root_module *)module - w.modules);
}

static fc_status is_intact(void *of, bool *out)
{
    *out = !w.is_damaged || of != &w.owners[1];
    return take("intact", of, "");
}

static fc_status is_stale(void *of, bool *out)
{
    *out = ((const owner *)of)->is_stale;
    return take("stale", of, "");
}

static fc_status unshard(void *of)
{
    owner *o = of;

    fc_root_note_use(fc_domain_unit(w.domains[0], (size_t)(o - w.owners)));
    FC_TRY(take("unshard", o, ""));
    fc_reduction_traffic(o->reduction)->unshards++;
    o->is_unsharded = true;
    return FC_OK;
}

OPERATION(without)

static fc_status reshard(void *of, bool is_news)
{
    FC_TRY(take("reshard", of, is_news ? "!" : ""));
    ((owner *)of)->is_unsharded = false;
    return FC_OK;
}

static fc_status reshard_after_forward(void *of, bool in_forward)
{
    FC_TRY(take("shard", of, in_forward ? "!" : ""));
    ((owner *)of)->is_unsharded = false;
    return FC_OK;
}

static fc_status drop_ahead(void *of)
{
    if (of == &w.owners[N_UNITS - 1]) {
        w.domains[0]->n_ahead = 0;
    }
    return take("ahead", of, "");
}

static void expect(void *of)
{
    ((owner *)of)->is_awaited = true;
}

static bool end_awaiting(void *of)
{
    owner *o = of;
    const bool was_awaited = o->is_awaited;

    o->is_awaited = false;
    return was_awaited;
}

static fc_status defer(void *of, bool reduces)
{
    return take("defer", of, reduces ? "!" : "");
}

static fc_status accumulate(void *of, bool is_news)
{
    return take("accumulate", of, is_news ? "!" : "");
}

static fc_status submit(void *of, bool with_unused)
{
    FC_TRY(take("submit", of, with_unused ? "+" : ""));
    ((owner *)of)->has_held = false;
    return FC_OK;
}

static const fc_root_ops ops = {
    .is_in_backward = is_in_backward,
    .await_end = await,
    .keeps_graph = keeps_graph,
    .begin = begin,
    .resume = resume,
    .forget_members = forget,
    .publishes = publishes,
    .publish = publish,
    .is_intact = is_intact,
    .note_shards = note,
    .is_stale = is_stale,
    .check_unwritten = check,
    .unshard = unshard,
    .make_unavailable = without,
    .reshard = reshard,
    .reshard_after_forward = reshard_after_forward,
    .is_kept_after_forward = is_kept,
    .end_forward = end,
    .keep = keep,
    .is_unsharded = is_unsharded,
    .has_own_memory = has_own_memory,
    .drop_pending = drop,
    .drop_ahead = drop_ahead,
    .await_gradients = expect,
    .end_awaiting = end_awaiting,
    .defer_upcasts = defer,
    .end_deferral = undefer,
    .note_passed = passed,
    .accumulate = accumulate,
    .submit = submit,
    .has_accumulated = has_accumulated,
    .has_held = has_held,
    .has_all_gradients = has_all_gradients,
    .is_settled = is_settled,
    .end_graph = graph,
    .run_deferred_hooks = hooks,
    .drop_gradients = clear,
    .release_unused = release,
};

/* Its reductions are the caller's. */
static const fc_reduction_ops no_reductions = {.options = NULL};

/* ---- the world ---- */

static void make_units(void)
{
    static const size_t module_of[N_UNITS] = {0, 1, 2, 2};

    fc_root_unit_init(&w.unbound);
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w.owners[u];

        CHECK_OK(fc_reduction_create(fc_domain_unit(w.domains[0], u), NULL, w.slots, &no_reductions,
                                     &o->reduction));
        fc_root_unit_init(&o->course);
        fc_root_unit_bind(&o->course, o->reduction, o);
    }
    w.unbound.next = &w.owners[1].course;
    w.owners[2].course.next = &w.owners[3].course;
    for (size_t u = N_UNITS - 1; u-- > 0;) {
        w.modules[module_of[u]] =
            (fc_root_module){.owner = &w.modules[module_of[u]], .training = FC_TRAINING_IDLE};
        fc_root_module_join(&w.modules[module_of[u]], u == 1 ? &w.unbound : &w.owners[u].course,
                            false);
    }
}

static void make_world(void)
{
    fc_root_module *modules[N_MODULES];
    fc_param params[N_UNITS];
    fc_unit_desc units[N_UNITS];
    static const char *const unit_names[N_UNITS] = {"first", "second", "third", "fourth"};

    (void)alarm(DOMAINS_WATCHDOG_S);
    w = (world){.sim = NULL};
    asked[0] = '\0';
    for (size_t u = 0; u < N_UNITS; u++) {
        params[u] = make_param(1, 2, 2, FC_F32, true);
        units[u] = (fc_unit_desc){unit_names[u], &params[u], 1};
    }
    CHECK_OK(fc_slots_create(&w.slots));
    for (size_t d = 0; d < N_DOMAINS; d++) {
        fc_transport_config config = ranks_config(&w.hosts[d], (int)d, 0, 1, DOMAINS_TIMEOUT_NS);

        CHECK_OK(fc_shm_create(&config, &w.transports[d]));
        CHECK_OK(fc_domain_create(w.transports[d], d == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE,
                                  units, N_UNITS, 0, 1, &w.domains[d]));
    }
    make_units();
    w.context.is_last_backward = true;
    w.course.owner = &w;
    w.course.ops = &ops;
    w.course.context = &w.context;
    for (size_t i = 0; i < N_MODULES; i++) {
        modules[i] = &w.modules[i];
    }
    CHECK_OK(fc_root_init(&w.course, w.domains, N_DOMAINS, modules, N_MODULES));
}

/* What is freed on the device. */
static int n_freed;
static const fc_device_ops *simulated;

static void count_free(fc_device *device, void *memory)
{
    n_freed += memory != NULL;
    simulated->free(device, memory);
}

static void make_device(void)
{
    static fc_device_ops counting;
    static const char *const stream_names[N_STREAMS] = {"compute", "copy-in", "gather", "reduce",
                                                        "all-reduce"};
    static const int ranks[1] = {0};
    fc_device_comm *comm = NULL;
    void *memory = NULL;
    fc_schedule_unit_options options = {.name = "first",
                                        .layout = &w.layout,
                                        .reshard_after_forward = true,
                                        .n_post_ranks = 1,
                                        .pre_divisor = 1,
                                        .divisor = 1};

    CHECK_OK(fc_sim_create(1, 1, &w.sim));
    w.device = fc_sim_device(w.sim, 0);
    simulated = w.device->ops;
    counting = *simulated;
    counting.free = count_free;
    w.device->ops = &counting;
    for (int i = 0; i < N_STREAMS; i++) {
        CHECK_OK(fc_sim_stream_create(w.sim, 0, stream_names[i], &w.streams[i]));
    }
    CHECK_OK(fc_sim_comm_create(w.sim, "comm", ranks, 1, &comm));
    options.gather = options.reduce = options.post_gather = comm;
    CHECK_OK(fc_schedule_create(&(fc_schedule_options){w.device, w.streams[1], w.streams[2],
                                                       w.streams[3], w.streams[4], 1, 0, 0},
                                &w.schedule));
    w.param = make_param(1, 2, 2, FC_F32, true);
    w.param.compute = FC_BF16; /* so that it is gathered */
    CHECK_OK(fc_layout_init(&w.layout, &w.param, 1, 0, 1, false));
    CHECK_OK(fc_schedule_add(w.schedule, &options, &w.on_device));
    CHECK_OK(w.device->ops->alloc(w.device, w.streams[0], (fc_label){"world", "memory", 0}, 64,
                                  &memory));
    w.shards[0] = w.memory = memory;
    fc_schedule_set_shards(w.on_device, w.shards);
    w.course.schedule = w.schedule;
}

static void unmake_device(void)
{
    fc_event *event = NULL;

    CHECK_OK(w.device->ops->event_create(w.device, &event));
    for (int i = 0; i < 2 * N_STREAMS; i++) {
        if (i == N_STREAMS) { /* nothing reads it any more */
            w.device->ops->free(w.device, w.memory);
        }
        CHECK_OK(w.device->ops->record(w.device, event, w.streams[i % N_STREAMS]));
        CHECK_OK(w.device->ops->synchronize(w.device, event));
    }
    w.device->ops->event_destroy(w.device, event);
    fc_schedule_destroy(w.schedule);
    CHECK_MSG(fc_sim_faults(w.sim) == 0, "%s", fc_sim_fault(w.sim, 0));
    fc_sim_destroy(w.sim);
}

static void unmake_world(void)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_root_unit_bind(&w.owners[u].course, NULL, NULL);
        fc_root_unit_fini(&w.owners[u].course);
        fc_reduction_destroy(w.owners[u].reduction);
    }
    fc_root_fini(&w.course);
    for (size_t d = N_DOMAINS; d-- > 0;) {
        fc_domain_destroy(w.domains[d]);
        fc_transport_destroy(w.transports[d]);
    }
    fc_slots_destroy(w.slots);
    if (w.sim != NULL) {
        unmake_device();
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- what a caller does ---- */

/* A failure here ends the phase, for the peers too. */
static fc_status ended(fc_status st)
{
    if (st != FC_OK) {
        CHECK(w.context.is_failed && !w.context.awaits_end && !fc_root_is_open(&w.course));
        CHECK(!fc_domain_is_open(w.domains[1]));
        CHECK_EQ(fc_window()->now.phase, FC_WINDOW_FAILED);
    }
    return st;
}

static fc_status enter(size_t u)
{
    owner *o = &w.owners[u];

    (void)fc_training_move(&o->course.training, FC_TRAINING_ENTERED);
    fc_root_note_use(fc_domain_unit(w.domains[0], u));
    o->course.n_entered++;
    return fc_root_leave_unit(&w.course, &o->course, false, false, false);
}

static fc_status forward(bool with_graph)
{
    bool intact;

    FC_TRY(fc_root_take_shards(&w.course, &intact));
    FC_TRY(fc_root_open_forward(&w.course, &w.modules[0], with_graph, 0));
    CHECK(fc_domain_is_open(w.domains[0]) && fc_domain_is_open(w.domains[1]));
    CHECK_EQ(fc_window()->now.phase, with_graph ? FC_WINDOW_FORWARD : FC_WINDOW_FORWARD_NO_GRAD);
    CHECK(w.course.opener == &w.modules[0]);
    for (size_t u = 0; u < N_UNITS; u++) {
        FC_TRY(enter(u));
    }
    FC_TRY(ended(fc_root_end_forward(&w.course, with_graph)));
    CHECK(!fc_domain_is_open(w.domains[0]) && !fc_domain_is_open(w.domains[1]));
    CHECK_EQ(fc_window()->now.phase, FC_WINDOW_BETWEEN);
    return FC_OK;
}

static fc_status reach(size_t module)
{
    bool is_news;

    w.in_backward = true;
    FC_TRY(fc_root_reach(&w.course, &w.modules[module], &is_news));
    CHECK_EQ(fc_window()->now.phase, FC_WINDOW_BACKWARD);
    CHECK_EQ(fc_window()->now.step, w.domains[0]->clock >> STEP_SHIFT);
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w.owners[u];

        if ((u < 2 ? u : 2) == module && o->course.training != FC_TRAINING_PRE_BACKWARD) {
            CHECK(is_news);
            FC_TRY(fc_root_enter_backward(&w.course, &o->course));
        }
    }
    return FC_OK;
}

static fc_status pass(size_t u)
{
    FC_TRY(ended(fc_root_pass(&w.course, &w.owners[u].course)));
    CHECK_EQ(w.owners[u].course.training, FC_TRAINING_POST_BACKWARD);
    fc_root_finish(&w.course, &w.owners[u].course);
    return FC_OK;
}

static fc_status end_backward(void)
{
    w.in_backward = false;
    return ended(fc_root_end_backward(&w.course));
}

/* Of the units above `n_missing`. */
static fc_status backward(size_t n_missing)
{
    for (size_t m = N_MODULES; m-- > (n_missing < 2 ? n_missing : 2);) {
        FC_TRY(reach(m));
        for (size_t u = m == 2 ? 4 : m + 1; u-- > m && u + 1 > n_missing;) {
            FC_TRY(pass(u));
        }
    }
    FC_TRY(end_backward());
    CHECK(!fc_domain_is_open(w.domains[0]) && !fc_domain_is_open(w.domains[1]));
    CHECK_EQ(fc_window()->now.phase, FC_WINDOW_BETWEEN);
    for (size_t m = 0; m < N_MODULES; m++) {
        CHECK_EQ(fc_root_module_training(&w.modules[m], &w.course), FC_TRAINING_IDLE);
    }
    return FC_OK;
}

static void set(bool reduce_grads)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        w.owners[u].course.reduce_grads = reduce_grads;
    }
}

/* ---- what is asked ---- */

#define TAKEN "intact0 note0 intact1 note1 intact2 note2 intact3 note3 "
#define ENTERED "shard0! end0 shard1! end1 shard2! end2 shard3! end3 "
#define CHECKED "check0 check1 check2 check3 "
#define REACHED "await unshard2 defer2! unshard3 defer3! "
#define PASSED(u) "passed" #u " reshard" #u "! submit" #u " undefer" #u " graph" #u " "
#define FINISHED                                                                                   \
    REACHED PASSED(3) PASSED(2) "unshard1 defer1! " PASSED(1) "unshard0 defer0! " PASSED(0)

/* A step in which each unit is finished when it is passed. */
static void check_usual_step(void)
{
    CHECK_OK(forward(true));
    CHECK_ASKED(TAKEN ENTERED CHECKED);
    CHECK_OK(backward(0));
    CHECK_ASKED(FINISHED);
    CHECK_EQ(w.context.ending, FC_ENDING_OPEN);
    CHECK(fc_root_is_between_steps(&w.course));
}

static void test_usual_steps(void)
{
    make_world();
    CHECK(w.course.publishes); /* nobody has looked yet */
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
                1) "forget2 " LOOKED_AT(3) LOOKED_AT(2) "hooks0 hooks1 hooks2 hooks3 ");
        } else {
            CHECK_ASKED("hooks0 hooks1 hooks2 hooks3 ");
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
    CHECK_OK(pass(3));
    CHECK_OK(reach(1));
    CHECK_OK(pass(1));
    CHECK_OK(reach(0));
    CHECK_OK(pass(0));
    CHECK_EQ(w.course.n_finished, N_UNITS);
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_HAS(asked, "keep2");
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
    CHECK(fc_root_is_between_steps(&w.course)); /* but for what the caller has */
    w.owners[1].has_more = true;
    CHECK(!fc_root_is_between_steps(&w.course));
    w.owners[1].has_more = false;
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
    CHECK_OK(reach(0));
    w.domains[0]->n_ahead = 1;
    fc_root_unit_bind(&w.owners[1].course, NULL, NULL); /* its module is gone */
    asked[0] = '\0';
    CHECK_OK(end_backward());
    CHECK_HAS(asked, "keep2 drop2 ahead0 ahead2 ahead3 ");
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
    fc_root_fini(&empty);
    CHECK_EQ(fc_alloc_live(), 0);
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
}

/* ---- whatever fails ---- */

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
    w.context.ends_manually = true;
    FC_TRY(forward(true));
    FC_TRY(backward(2));
    return ended(fc_root_finalize_backward(&w.course));
}

/* Without being reached. */
static fc_status play_passed(void)
{
    FC_TRY(forward(true));
    FC_TRY(ended(fc_root_begin_backward(&w.course)));
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
    test_usual_steps();
    test_published();
    test_damaged();
    test_left();
    test_unused();
    test_end_of_graph();
    test_repeated();
    test_late();
    test_accumulated();
    test_manual();
    test_not_the_last();
    test_few_units();
    test_ahead();
    test_reset();
    test_empty();
    test_device();
    test_failures();
    test_trace();
    return check_result();
}
