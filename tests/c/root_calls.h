/* A root of one rank whose caller writes down what it is asked, and may fail at any of it. */
#ifndef ROOT_CALLS_H
#define ROOT_CALLS_H

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
    bool in_backward, keeps_graph, is_damaged, forgets_to_begin;
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
static inline fc_status take(const char *what, const owner *o, const char *how)
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
    static inline fc_status name(void *of)                                                         \
    {                                                                                              \
        return take(#name, of, "");                                                                \
    }
#define OPERATION_OF_ROOT(name)                                                                    \
    static inline fc_status name(void *of)                                                         \
    {                                                                                              \
        CHECK(of == &w);                                                                           \
        return take(#name, NULL, "");                                                              \
    }
#define ANSWER(name, answer)                                                                       \
    static inline bool name(void *of)                                                              \
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

static inline fc_status begin(void *root)
{
    CHECK(root == &w);
    FC_TRY(take("begin", NULL, ""));
    return w.forgets_to_begin ? FC_OK : fc_schedule_begin(w.schedule, w.streams[0], NULL);
}

static inline bool is_in_backward(void *root)
{
    CHECK(root == &w);
    return w.in_backward;
}

static inline bool keeps_graph(void *root)
{
    CHECK(root == &w);
    return w.keeps_graph;
}

static inline fc_status await(void *root)
{
    CHECK(root == &w);
    FC_TRY(take("await", NULL, ""));
    fc_root_note_awaited(&w.course);
    return FC_OK;
}

static inline void forget(void *module)
{
    const size_t used = strlen(asked);

    (void)snprintf(asked + used, sizeof(asked) - used, "forget%td ",
                   (fc_root_module *)module - w.modules);
}

static inline fc_status is_intact(void *of, bool *out)
{
    *out = !w.is_damaged || of != &w.owners[1];
    return take("intact", of, "");
}

static inline fc_status is_stale(void *of, bool *out)
{
    *out = ((const owner *)of)->is_stale;
    return take("stale", of, "");
}

static inline fc_status unshard(void *of)
{
    owner *o = of;

    fc_root_note_use(fc_domain_unit(w.domains[0], (size_t)(o - w.owners)));
    FC_TRY(take("unshard", o, ""));
    fc_reduction_traffic(o->reduction)->unshards++;
    o->is_unsharded = true;
    return FC_OK;
}

OPERATION(without)

static inline fc_status reshard(void *of, bool is_news)
{
    FC_TRY(take("reshard", of, is_news ? "!" : ""));
    ((owner *)of)->is_unsharded = false;
    return FC_OK;
}

static inline fc_status reshard_after_forward(void *of, bool in_forward)
{
    FC_TRY(take("shard", of, in_forward ? "!" : ""));
    ((owner *)of)->is_unsharded = false;
    return FC_OK;
}

static inline fc_status drop_ahead(void *of)
{
    if (of == &w.owners[N_UNITS - 1]) {
        w.domains[0]->n_ahead = w.domains[1]->n_ahead = 0;
    }
    return take("ahead", of, "");
}

static inline void expect(void *of)
{
    ((owner *)of)->is_awaited = true;
}

static inline bool end_awaiting(void *of)
{
    owner *o = of;
    const bool was_awaited = o->is_awaited;

    o->is_awaited = false;
    return was_awaited;
}

static inline fc_status defer(void *of, bool reduces)
{
    return take("defer", of, reduces ? "!" : "");
}

static inline fc_status accumulate(void *of, bool is_news)
{
    return take("accumulate", of, is_news ? "!" : "");
}

static inline fc_status submit(void *of, bool with_unused)
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

static int n_released; /* gradients that were lent */

static inline void count_release(void *memory)
{
    n_released += memory == &w;
}

/* Its reductions are the caller's. */
static const fc_reduction_ops no_reductions = {.release = count_release};

/* ---- the world ---- */

static inline void make_units(void)
{
    static const size_t module_of[N_UNITS] = {0, 1, 2, 2};

    fc_root_unit_init(&w.unbound);
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w.owners[u];

        CHECK_OK(fc_reduction_create(fc_domain_unit(w.domains[0], u),
                                     fc_domain_unit(w.domains[1], u), w.slots, &no_reductions,
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

static inline void make_world(void)
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

static inline void count_free(fc_device *device, void *memory)
{
    n_freed += memory != NULL;
    simulated->free(device, memory);
}

static inline void make_device(void)
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

static inline void unmake_device(void)
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

static inline void unmake_world(void)
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
static inline fc_status ended(fc_status st)
{
    if (st != FC_OK) {
        CHECK(w.context.is_failed && !w.context.awaits_end && !fc_root_is_open(&w.course));
        CHECK(!fc_domain_is_open(w.domains[1]));
        CHECK_EQ(fc_window()->now.phase, FC_WINDOW_FAILED);
    }
    return st;
}

static inline fc_status enter(size_t u)
{
    owner *o = &w.owners[u];

    (void)fc_training_move(&o->course.training, FC_TRAINING_ENTERED);
    fc_root_note_use(fc_domain_unit(w.domains[0], u));
    o->course.n_entered++;
    return fc_root_leave_unit(&w.course, &o->course, false, false, false);
}

static inline fc_status forward(bool with_graph)
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

static inline fc_status reach(size_t module)
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

static inline fc_status pass(size_t u)
{
    FC_TRY(ended(fc_root_pass(&w.course, &w.owners[u].course)));
    CHECK_EQ(w.owners[u].course.training, FC_TRAINING_POST_BACKWARD);
    fc_root_finish(&w.course, &w.owners[u].course);
    return FC_OK;
}

static inline fc_status end_backward(void)
{
    w.in_backward = false;
    return ended(fc_root_end_backward(&w.course));
}

/* Of the units above `n_missing`. */
static inline fc_status backward(size_t n_missing)
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

static inline void set(bool reduce_grads)
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
static inline void check_usual_step(void)
{
    CHECK_OK(forward(true));
    CHECK_ASKED(TAKEN ENTERED CHECKED);
    CHECK_OK(backward(0));
    CHECK_ASKED(FINISHED);
    CHECK_EQ(w.context.ending, FC_ENDING_OPEN);
    CHECK(fc_root_is_between_steps(&w.course));
}

#endif
