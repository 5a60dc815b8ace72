/* Ranks with a root of a few units: what it asks of its caller, and what a caller does in a step.
 */
#ifndef ROOT_WORLD_H
#define ROOT_WORLD_H

#include "domains.h"

#include "engine/root.h"
#include "window/window.h"

#define N_UNITS 3
#define N_MODULES (N_UNITS + 1) /* the root has no parameters */
#define ROWS 8
#define COLUMNS 500
#define NUMEL (ROWS * COLUMNS)

typedef struct world world;

/* One unit of one rank, as the caller has it. */
typedef struct owner {
    fc_root_unit course;
    world *world;
    fc_reduction *reduction;
    fc_unit *shard;
    float sum[NUMEL]; /* the shard's gradient */
    bool has_sum, has_deferred;
    float accumulated[NUMEL];
    bool has_accumulated;
    int fresh; /* what backward has left is of this seed; 0: nothing */
    bool is_unsharded, is_awaited, had_gradient;
} owner;

struct world {
    fc_root_course course;
    fc_root_context context;
    ranks_host hosts[2];
    fc_transport *transports[2];
    fc_domain *domains[2], *crossed[2];
    size_t n_domains;
    fc_slots *slots;
    owner owners[N_UNITS];
    fc_root_module modules[N_MODULES];
    int rank, n_ranks, n_shards;
    bool in_backward;              /* the caller's */
    size_t fails_in;               /* the unit whose submission fails; N_UNITS: none */
    size_t fails_to_assign;        /* and whose sum is refused */
    int n_kept, n_asked, n_passed; /* calls of `keep`, `await_end`, `note_passed` */
    char events[256];              /* what units did, in order */
};

static inline void note(owner *o, const char *what)
{
    world *w = o->world;
    const size_t used = strlen(w->events);

    (void)snprintf(w->events + used, sizeof(w->events) - used, "%s%td ", what, o - w->owners);
}

/* Both have happened, in this order; sums of other units may come in between. */
static inline bool comes_before(const world *w, const char *first, const char *second)
{
    const char *found = strstr(w->events, first);

    return found != NULL && strstr(found, second) != NULL;
}

/* ---- reductions ---- */

static inline fc_status get_options(void *of, fc_reduce_options *out)
{
    const owner *o = of;

    *out = (fc_reduce_options){1, o->course.all_reduce_grads, o->course.defers_hooks, false};
    return FC_OK;
}

static inline fc_status get_flat(void *of, void **out)
{
    (void)of;
    *out = NULL;
    return FC_OK;
}

static inline fc_status assign(void *of, size_t param, const fc_reduce_options *options)
{
    owner *o = of;

    (void)param;
    if (o->world->fails_to_assign == (size_t)(o - o->world->owners)) {
        return fc_fail(FC_ERR_INTERRUPTED, "the caller refuses");
    }
    o->has_sum = true;
    o->has_deferred = options->defer_hooks;
    note(o, options->defer_hooks ? "sum" : "hook");
    return FC_OK;
}

static inline fc_status assign_flat(void *of, const fc_reduce_options *options)
{
    return assign(of, 0, options);
}

static inline fc_status do_nothing(void *of)
{
    (void)of;
    return FC_OK;
}

static inline fc_status get_target(void *of, size_t param, void **out, bool *accumulate)
{
    owner *o = of;

    (void)param;
    *out = o->sum;
    *accumulate = o->has_sum;
    return FC_OK;
}

static inline void wait_for_room(void *of, bool begins)
{
    (void)of, (void)begins;
}

static inline size_t find_frozen(void *of, size_t from)
{
    (void)of, (void)from;
    return SIZE_MAX;
}

static const fc_reduction_ops reduction_ops = {get_options, get_flat, assign_flat, do_nothing,
                                               get_target,  assign,   free,        wait_for_room,
                                               find_frozen, NULL};

/* ---- what the root asks of the caller ---- */

static inline bool is_in_backward(void *root)
{
    return ((world *)root)->in_backward;
}

static inline fc_status await_end(void *root)
{
    world *w = root;

    w->n_asked++;
    fc_root_note_awaited(&w->course);
    return FC_OK;
}

static inline bool answer_no(void *of)
{
    (void)of;
    return false;
}

static inline void forget_members(void *module)
{
    (void)module;
}

static inline fc_status find_intact(void *of, bool *out)
{
    (void)of;
    *out = true;
    return FC_OK;
}

static inline fc_status find_unwritten(void *of, bool *out)
{
    (void)of;
    *out = false;
    return FC_OK;
}

static inline fc_status unshard(void *of)
{
    owner *o = of;

    fc_root_note_use(o->shard);
    o->is_unsharded = true;
    return fc_domain_ready(o->world->domains[0], o->shard);
}

static inline fc_status reshard(void *of, bool is_news)
{
    owner *o = of;

    if (o->is_unsharded) {
        note(o, is_news ? "reshard" : "quiet");
    }
    o->is_unsharded = false;
    return FC_OK;
}

static inline fc_status reshard_after_forward(void *of, bool in_forward)
{
    (void)in_forward;
    ((owner *)of)->is_unsharded = false;
    return FC_OK;
}

static inline fc_status keep(void *of)
{
    ((owner *)of)->world->n_kept++;
    return FC_OK;
}

static inline bool is_unsharded(void *of)
{
    return ((owner *)of)->is_unsharded;
}

static inline void await_gradients(void *of)
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

static inline fc_status defer_upcasts(void *of, bool reduces)
{
    (void)of, (void)reduces;
    return FC_OK;
}

/* Whole numbers, so that sums do not depend on their order. */
static inline float value_of(int seed, int rank, ptrdiff_t unit, size_t index)
{
    return (float)((seed * 5 + rank * 3 + (int)unit * 2 + (int)(index % 97)) % 64);
}

static inline fc_status note_passed(void *of)
{
    ((owner *)of)->world->n_passed++;
    return FC_OK;
}

static inline fc_status accumulate(void *of, bool is_news)
{
    owner *o = of;

    (void)is_news;
    note(o, "accumulate");
    for (size_t i = 0; o->fresh != 0 && i < NUMEL; i++) {
        o->accumulated[i] = (o->has_accumulated ? o->accumulated[i] : 0) +
                            value_of(o->fresh, o->world->rank, o - o->world->owners, i);
    }
    o->had_gradient = o->fresh != 0;
    o->has_accumulated = o->has_accumulated || o->fresh != 0;
    o->fresh = 0;
    return FC_OK;
}

/* The list lies behind the numbers, and goes with them. */
static inline fc_status submit(void *of, bool with_unused)
{
    owner *o = of;
    const bool has_accumulated = o->has_accumulated;
    char *memory = malloc(NUMEL * sizeof(float) + sizeof(fc_gradient));
    float *full = (float *)(void *)memory;
    fc_gradient grad = {full, FC_F32, true, true};
    fc_reduce_options options;

    CHECK_OR_EXIT(memory != NULL);
    o->had_gradient = o->fresh != 0 && !has_accumulated;
    if ((o->fresh == 0 && !has_accumulated && !with_unused) ||
        o->world->fails_in == (size_t)(o - o->world->owners)) {
        free(memory);
        return o->fresh == 0 ? FC_OK : fc_fail(FC_ERR_INTERRUPTED, "the caller fails");
    }
    for (size_t i = 0; i < NUMEL; i++) {
        full[i] = (has_accumulated ? o->accumulated[i] : 0) +
                  (o->fresh != 0 ? value_of(o->fresh, o->world->rank, o - o->world->owners, i) : 0);
    }
    note(o, "submit");
    o->fresh = 0;
    o->has_accumulated = false;
    memcpy(memory + NUMEL * sizeof(float), &grad, sizeof(grad));
    FC_TRY(get_options(o, &options));
    return fc_reduction_submit(o->reduction,
                               (const fc_gradient *)(const void *)(memory + NUMEL * sizeof(float)),
                               memory, &options);
}

static inline bool has_accumulated(void *of)
{
    const owner *o = of;

    return o->has_accumulated || o->fresh != 0 || fc_reduction_has_sums(o->reduction);
}

static inline bool has_held(void *of)
{
    return ((owner *)of)->has_accumulated;
}

static inline bool had_gradient(void *of)
{
    return ((owner *)of)->had_gradient;
}

static inline bool is_settled(void *of)
{
    const owner *o = of;

    return o->had_gradient && !o->is_unsharded && !fc_reduction_has_sums(o->reduction);
}

static inline fc_status end_graph(void *of)
{
    note(of, "through");
    return FC_OK;
}

static inline fc_status run_deferred_hooks(void *of)
{
    owner *o = of;

    if (o->has_deferred) {
        note(o, "hook");
    }
    o->has_deferred = false;
    return FC_OK;
}

static inline fc_status drop_gradients(void *of)
{
    owner *o = of;

    o->has_accumulated = o->has_deferred = false;
    o->fresh = 0;
    fc_reduction_drop_sums(o->reduction);
    return FC_OK;
}

static const fc_root_ops root_ops = {
    .is_in_backward = is_in_backward,
    .await_end = await_end,
    .keeps_graph = answer_no,
    .begin = do_nothing,
    .resume = do_nothing,
    .forget_members = forget_members,
    .publishes = answer_no,
    .publish = do_nothing,
    .is_intact = find_intact,
    .note_shards = do_nothing,
    .is_stale = find_unwritten,
    .check_unwritten = do_nothing,
    .unshard = unshard,
    .make_unavailable = do_nothing,
    .reshard = reshard,
    .reshard_after_forward = reshard_after_forward,
    .is_kept_after_forward = answer_no,
    .end_forward = do_nothing,
    .keep = keep,
    .is_unsharded = is_unsharded,
    .has_own_memory = answer_no,
    .drop_pending = do_nothing,
    .drop_ahead = do_nothing,
    .await_gradients = await_gradients,
    .end_awaiting = end_awaiting,
    .defer_upcasts = defer_upcasts,
    .end_deferral = do_nothing,
    .note_passed = note_passed,
    .accumulate = accumulate,
    .submit = submit,
    .has_accumulated = has_accumulated,
    .has_held = has_held,
    .has_all_gradients = had_gradient,
    .is_settled = is_settled,
    .end_graph = end_graph,
    .run_deferred_hooks = run_deferred_hooks,
    .drop_gradients = drop_gradients,
    .release_unused = do_nothing,
};

/* ---- the world ---- */

/* Two meshes of shards over all ranks, in another order on odd ranks; the second one's units are
 * nobody's. */
static bool has_crossed_meshes;

static inline void join_domain(world *w, size_t d, const fc_unit_desc *units)
{
    /* Ranks that follow one another share a unit; boards 0 and 1, then 2 and 3. */
    const int n_replicas = w->n_ranks / w->n_shards;
    const int board = (int)d * 2 + (d == 0 ? w->rank / w->n_shards : w->rank % w->n_shards);
    const bool is_shard = d == 0 || has_crossed_meshes;
    const int place = is_shard ? w->rank % w->n_shards : w->rank / w->n_shards;
    fc_transport_config config =
        ranks_config(&w->hosts[d], has_crossed_meshes ? (int)d * 2 : board, place,
                     is_shard ? w->n_shards : n_replicas, DOMAINS_TIMEOUT_NS);

    CHECK_OK(fc_shm_create(&config, &w->transports[d]));
    CHECK_OK(fc_domain_create(w->transports[d], is_shard ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE,
                              units, N_UNITS, w->rank % w->n_shards, w->n_shards, &w->domains[d]));
}

static inline world *join(int rank, int n_ranks, int n_shards)
{
    fc_param param = make_param(1, ROWS, COLUMNS, FC_F32, true);
    const fc_unit_desc units[N_UNITS] = {
        {"first", &param, 1}, {"second", &param, 1}, {"third", &param, 1}};
    fc_root_module *modules[N_MODULES];
    world *w = calloc(1, sizeof(*w));

    CHECK_OR_EXIT(w != NULL);
    (void)alarm(DOMAINS_WATCHDOG_S);
    w->rank = rank;
    w->n_ranks = n_ranks;
    w->n_shards = n_shards;
    w->n_domains = n_ranks > n_shards || has_crossed_meshes ? 2 : 1;
    w->fails_in = w->fails_to_assign = N_UNITS;
    CHECK_OK(fc_slots_create(&w->slots));
    for (size_t d = 0; d < w->n_domains; d++) {
        join_domain(w, d, units);
    }
    for (size_t i = 0; i < N_MODULES; i++) {
        owner *o = i == 0 ? NULL : &w->owners[i - 1];

        modules[i] = &w->modules[i];
        w->modules[i].training = FC_TRAINING_IDLE;
        if (o != NULL) {
            o->world = w;
            o->shard = fc_domain_unit(w->domains[0], i - 1);
            CHECK_OK(fc_reduction_create(
                o->shard, n_ranks > n_shards ? fc_domain_unit(w->domains[1], i - 1) : NULL,
                w->slots, &reduction_ops, &o->reduction));
            fc_root_unit_init(&o->course);
            fc_root_unit_bind(&o->course, o->reduction, o);
        }
        fc_root_module_join(&w->modules[i], o != NULL ? &o->course : NULL, false);
    }
    w->context.is_last_backward = true;
    w->course.owner = w;
    w->course.ops = &root_ops;
    w->course.context = &w->context;
    w->crossed[0] = w->domains[1];
    w->crossed[1] = w->domains[0];
    CHECK_OK(fc_root_init(&w->course, has_crossed_meshes && rank % 2 != 0 ? w->crossed : w->domains,
                          w->n_domains, modules, N_MODULES));
    return w;
}

static inline void leave(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_root_unit_bind(&w->owners[u].course, NULL, NULL);
        fc_reduction_destroy(w->owners[u].reduction);
    }
    fc_root_fini(&w->course);
    for (size_t d = w->n_domains; d-- > 0;) {
        fc_domain_destroy(w->domains[d]);
        fc_transport_destroy(w->transports[d]);
    }
    fc_slots_destroy(w->slots);
    free(w);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- what a caller does ---- */

static inline void enter(world *w, size_t u)
{
    owner *o = &w->owners[u];

    (void)fc_training_move(&w->modules[u + 1].training, FC_TRAINING_ENTERED);
    (void)fc_training_move(&o->course.training, FC_TRAINING_ENTERED);
    CHECK_OK(unshard(o));
    o->course.n_entered++;
    CHECK_OK(fc_root_leave_unit(&w->course, &o->course, false, false, false));
    (void)fc_training_move(&w->modules[u + 1].training, FC_TRAINING_LEFT);
}

/* The root's, without a graph that is thrown away. `again`: a unit that runs twice. */
static inline void forward(world *w, size_t again)
{
    bool is_intact;

    CHECK_OK(fc_root_take_shards(&w->course, &is_intact));
    CHECK(is_intact);
    CHECK_OK(fc_root_open_forward(&w->course, &w->modules[0], true, 0));
    CHECK(fc_root_is_open(&w->course) && !fc_root_is_between_steps(&w->course));
    CHECK_EQ(fc_window()->now.phase, FC_WINDOW_FORWARD);
    for (size_t u = 0; u < N_UNITS; u++) {
        enter(w, u);
        if (u == again) {
            enter(w, u);
        }
    }
    CHECK_OK(fc_root_end_forward(&w->course, true));
    w->events[0] = '\0';
}

static inline fc_status reach(world *w, size_t u)
{
    bool is_news;

    w->in_backward = true;
    FC_TRY(fc_root_reach(&w->course, &w->modules[u + 1], &is_news));
    CHECK_EQ(fc_root_module_training(&w->modules[u + 1], &w->course), FC_TRAINING_PRE_BACKWARD);
    return is_news ? fc_root_enter_backward(&w->course, &w->owners[u].course) : FC_OK;
}

static inline fc_status pass(world *w, size_t u, int seed)
{
    owner *o = &w->owners[u];

    o->fresh = seed;
    FC_TRY(fc_root_pass(&w->course, &o->course));
    fc_root_finish(&w->course, &o->course);
    return FC_OK;
}

static inline fc_status end(world *w)
{
    w->in_backward = false;
    return fc_root_end_backward(&w->course);
}

/* All units from the last one on, but those from `missing` down. */
static inline fc_status backward(world *w, int seed, size_t n_missing)
{
    for (size_t u = N_UNITS; u-- > n_missing;) {
        FC_TRY(reach(w, u));
        FC_TRY(pass(w, u, seed));
    }
    return end(w);
}

/* The shard's sum of backwards `from` to `to`; then the optimizer drops it. */
static inline void check_sum(world *w, size_t u, int from, int to)
{
    owner *o = &w->owners[u];
    const fc_param *p = &fc_unit_layout(o->shard)->params[0];
    const size_t first = (size_t)(w->rank % w->n_shards) * p->chunk_rows * p->inner;

    CHECK(o->has_sum);
    o->has_sum = false;
    for (size_t i = 0; i < p->own_rows * p->inner; i++) {
        float wanted = 0;

        for (int seed = from; seed <= to; seed++) {
            for (int r = 0; r < w->n_ranks; r++) {
                wanted += value_of(seed, r, (ptrdiff_t)u, first + i);
            }
        }
        if (o->sum[i] != wanted) {
            CHECK_MSG(false, "rank %d unit %zu [%zu]: %g, not %g", w->rank, u, i, (double)o->sum[i],
                      (double)wanted);
            return;
        }
    }
}

static inline void check_sums(world *w, int from, int to)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        check_sum(w, u, from, to);
    }
    CHECK(fc_root_is_between_steps(&w->course));
}

static inline void set(world *w, bool reduce_grads, bool all_reduce_grads)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        w->owners[u].course.reduce_grads = reduce_grads;
        w->owners[u].course.all_reduce_grads = all_reduce_grads;
    }
}

#endif
