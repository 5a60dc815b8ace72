/* Units on simulated devices whose parameters are unsharded: ranks of one process that do the same,
 * one after the other.
 */
#define _GNU_SOURCE

#include "unsharding_world.h"

#include "device/sim/sim.h"
#include "engine/schedule.h"

#define STREAMS 5 /* compute first */
#define MAX_RANKS 2

/* What has the tensors of a unit, as the functions of unsharding_world.h know it, on a device. */
typedef struct tensors {
    owner base; /* first */
    struct device_rank *rank;
    size_t unit;
    fc_schedule_unit *on_device;
    bool maybe_written; /* uncounted */
    fc_status warns;    /* what telling of a write gives back */
    size_t told_of;
    int n_read, n_asked, n_resided;
    bool fails_to_read, fails_to_reside, can_reside;
    char *home; /* owned; where it resides */
} tensors;

typedef struct device_rank {
    struct device_world *world;
    int rank;
    fc_device *device;
    fc_device_ops counting;
    fc_stream *streams[STREAMS];
    ranks_host host;
    fc_transport *transport;
    fc_domain *domain;
    fc_slots *slots;
    fc_schedule *schedule;
    tensors tensors[N_UNITS];
    int n_gathers; /* that the device was asked for */
    size_t rest_bytes;
} device_rank;

/* How the units of a world are. */
typedef struct kind {
    bool is_narrowed; /* the second parameter */
    bool is_extended, is_offloaded, has_slices, has_all, can_reside;
} kind;

typedef struct device_world {
    fc_sim *sim;
    kind kind;
    int n_ranks, step;
    device_rank ranks[MAX_RANKS];
} device_world;

static const fc_device_ops *simulated;

#define EACH(w, r) for (device_rank *r = (w)->ranks; r < (w)->ranks + (w)->n_ranks; r++)

/* ---- the owner ---- */

static fc_status read_shards(void *of)
{
    tensors *t = of;

    if (t->fails_to_read) {
        return fc_fail(FC_ERR_INTERRUPTED, "shards cannot be read");
    }
    t->n_read++;
    return fc_schedule_read_shards(t->rank->schedule, t->rank->streams[0]);
}

static size_t find_written_there(void *of, size_t from, bool maybe)
{
    return maybe && ((tensors *)of)->maybe_written ? from : find_written(of, from, maybe);
}

static fc_status tell(void *of, size_t param, fc_written what)
{
    tensors *t = of;

    t->told_of = param;
    t->base.told = what;
    t->base.n_told++;
    return t->warns;
}

static bool can_reside(void *of)
{
    ((tensors *)of)->n_asked++;
    return ((tensors *)of)->can_reside;
}

typedef struct write_args {
    const tensors *tensors;
    int step;
} write_args;

static void write_values(const void *of)
{
    const write_args *args = of;
    const owner *o = &args->tensors->base;

    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_param *p = &o->layout->params[i];
        const size_t first = (size_t)o->layout->rank * p->chunk_rows * p->inner;

        for (size_t k = 0; k < p->own_rows * p->inner; k++) {
            o->shards[i][k] = value_of(args->step, args->tensors->unit, i, first + k);
        }
    }
}

static fc_label named(const char *what)
{
    return (fc_label){"world", what, 0};
}

static void write_on_device(tensors *t)
{
    const write_args args = {t, t->rank->world->step};
    fc_sim_range ranges[N_PARAMS];

    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_param *p = &t->base.layout->params[i];

        ranges[i] = (fc_sim_range){t->base.shards[i], p->own_rows * p->inner * sizeof(float), true};
        if (t->rank->world->kind.is_offloaded) {
            fc_sim_host_access(t->rank->device, named("write by the host"), ranges[i]);
        }
    }
    if (t->rank->world->kind.is_offloaded) {
        write_values(&args);
        return;
    }
    CHECK_OK(fc_sim_launch(t->rank->device, t->rank->streams[0], named("write"), ranges, N_PARAMS,
                           write_values, &args, sizeof(args)));
}

static fc_status reside(void *of, void **home_out)
{
    tensors *t = of;

    if (t->fails_to_reside) {
        return fc_fail(FC_ERR_INTERRUPTED, "there is no home");
    }
    t->n_resided++;
    for (size_t i = 0; i < N_PARAMS; i++) {
        simulated->free(t->rank->device, t->base.shards[i]);
        t->base.shards[i] = (float *)(void *)(t->home + t->base.layout->params[i].full_at);
    }
    write_on_device(t);
    *home_out = t->home;
    return FC_OK;
}

/* Of an extended unit: its second parameter is gathered as its shard is, and made of that. */
static fc_status make_there(void *of)
{
    ((tensors *)of)->base.n_made++;
    return FC_OK;
}

static fc_status fill_there(void *of)
{
    CHECK(((tensors *)of)->base.shown != NULL);
    ((tensors *)of)->base.n_filled++;
    return FC_OK;
}

static void forget_there(void *of)
{
    ((tensors *)of)->base.n_forgotten++;
}

static const fc_unsharding_ops device_ops = {.show = show,
                                             .hide = hide,
                                             .withhold = withhold,
                                             .enter = enter,
                                             .leave = leave,
                                             .leave_slices = leave_slices,
                                             .shards = get_shards,
                                             .mark = mark,
                                             .find_changed = find_changed,
                                             .find_written = find_written_there,
                                             .find_written_slice = find_written_slice,
                                             .tell_of_write = tell,
                                             .is_observed = is_observed,
                                             .n_steps = count_steps,
                                             .read_shards = read_shards,
                                             .can_reside = can_reside,
                                             .reside = reside};

/* ---- the world ---- */

static device_rank *rank_of(fc_device *device)
{
    return (device_rank *)(void *)((char *)(uintptr_t)(const void *)device->ops -
                                   offsetof(device_rank, counting));
}

static fc_status count_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                              fc_label label, void *buffer, size_t part_bytes)
{
    rank_of(device)->n_gathers++;
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static void make_tensors(device_rank *r, size_t u, fc_device_comm *comm, fc_device_comm *alone)
{
    const kind *k = &r->world->kind;
    tensors *t = &r->tensors[u];
    fc_unit *unit = fc_domain_unit(r->domain, u);
    static fc_unsharding_ops extended;

    *t = (tensors){.rank = r, .unit = u, .can_reside = k->can_reside};
    t->base.layout = fc_unit_layout(unit);
    CHECK_OK(fc_schedule_add(r->schedule,
                             &(fc_schedule_unit_options){.name = fc_unit_name(unit),
                                                         .layout = t->base.layout,
                                                         .gather = comm,
                                                         .reduce = comm,
                                                         .n_post_ranks = k->has_slices,
                                                         .post_gather = alone,
                                                         .is_offloaded = k->is_offloaded,
                                                         .pre_divisor = 1,
                                                         .divisor = 1},
                             &t->on_device));
    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_param *p = &t->base.layout->params[i];
        const size_t bytes = p->chunk_numel * sizeof(float);
        void *shard = NULL;

        CHECK_OK(k->is_offloaded
                     ? fc_sim_host_alloc(r->device, named("shard"), bytes, &shard)
                     : simulated->alloc(r->device, r->streams[0], named("shard"), bytes, &shard));
        t->base.shards[i] = shard;
    }
    if (k->can_reside) {
        void *home = NULL;

        CHECK_OK(simulated->alloc(r->device, r->streams[0], named("home"),
                                  t->base.layout->full_bytes, &home));
        t->home = home;
    }
    extended = device_ops;
    extended.make = make_there;
    extended.fill = fill_there;
    extended.forget = forget_there;
    CHECK_OK(fc_unsharding_create(
        &(fc_unsharding_options){.unit = unit,
                                 .slots = r->slots,
                                 .traffic = &t->base.traffic,
                                 .ops = k->is_extended ? &extended : &device_ops,
                                 .owner = t,
                                 .schedule = r->schedule,
                                 .on_device = t->on_device,
                                 .has_all = k->has_all},
        &t->base.unsharding));
}

static void make_rank(device_world *w, int rank, fc_device_comm *comm)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all-reduce"};
    device_rank *r = &w->ranks[rank];
    fc_param params[N_PARAMS];
    const fc_unit_desc units[N_UNITS] = {
        {"first", params, N_PARAMS}, {"second", params, N_PARAMS}, {"third", params, N_PARAMS}};
    fc_transport_config config;
    fc_device_comm *alone = NULL;

    *r = (device_rank){.world = w, .rank = rank, .device = fc_sim_device(w->sim, rank)};
    simulated = r->device->ops;
    r->counting = *simulated;
    r->counting.all_gather = count_gather;
    r->device->ops = &r->counting;
    for (size_t i = 0; i < STREAMS; i++) {
        CHECK_OK(fc_sim_stream_create(w->sim, rank, names[i], &r->streams[i]));
    }
    CHECK_OK(fc_sim_comm_create(w->sim, "alone", &rank, 1, &alone));
    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = make_param(1, ROWS, COLUMNS, FC_F32, true);
    }
    params[1].compute = w->kind.is_narrowed ? FC_BF16 : FC_F32;
    config = ranks_config(&r->host, 0, rank, w->n_ranks, DOMAINS_TIMEOUT_NS);
    CHECK_OK(fc_callback_create(&config, &refused_messages, &r->transport));
    CHECK_OK(fc_domain_create(r->transport, FC_DOMAIN_SHARD, units, N_UNITS, rank, w->n_ranks,
                              &r->domain));
    CHECK_OK(fc_slots_create(&r->slots));
    CHECK_OK(fc_schedule_create(&(fc_schedule_options){.device = r->device,
                                                       .copy_in = r->streams[1],
                                                       .gather = r->streams[2],
                                                       .reduce = r->streams[3],
                                                       .all_reduce = r->streams[4]},
                                &r->schedule));
    for (size_t u = 0; u < N_UNITS; u++) {
        make_tensors(r, u, comm, alone);
    }
    r->rest_bytes = fc_sim_bytes(r->device);
}

/* As an optimizer does. */
static void step_shards(device_world *w)
{
    w->step++;
    n_steps++;
    EACH(w, r)
    {
        for (size_t u = 0; u < N_UNITS; u++) {
            write_on_device(&r->tensors[u]);
        }
    }
}

static void make_device_world(device_world *w, int n_ranks, kind k)
{
    static const int ranks[] = {0, 1};
    fc_device_comm *comm = NULL;

    ranks_init();
    *w = (device_world){.n_ranks = n_ranks, .kind = k};
    n_steps = 0;
    CHECK_OK(fc_sim_create(n_ranks, 3, &w->sim));
    CHECK_OK(fc_sim_comm_create(w->sim, "all", ranks, n_ranks, &comm));
    for (int rank = 0; rank < n_ranks; rank++) {
        make_rank(w, rank, comm);
    }
    step_shards(w);
}

static void await_all(device_world *w)
{
    EACH(w, r)
    {
        for (size_t i = 0; i < STREAMS; i++) {
            fc_event *event = NULL;

            CHECK_OK(simulated->event_create(r->device, &event));
            CHECK_OK(simulated->record(r->device, event, r->streams[i]));
            CHECK_OK(simulated->synchronize(r->device, event));
            simulated->event_destroy(r->device, event);
        }
    }
}

static void unmake_device_world(device_world *w)
{
    await_all(w);
    EACH(w, r)
    {
        for (size_t u = 0; u < N_UNITS; u++) {
            fc_unsharding_destroy(r->tensors[u].base.unsharding);
            fc_schedule_remove(r->tensors[u].on_device);
        }
        fc_schedule_destroy(r->schedule);
        fc_domain_destroy(r->domain);
        fc_transport_destroy(r->transport);
        fc_slots_destroy(r->slots);
    }
    CHECK_MSG(fc_sim_faults(w->sim) == 0, "%s", fc_sim_fault(w->sim, 0));
    fc_sim_destroy(w->sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- what a caller does, on all ranks ---- */

static void open_there(device_world *w, fc_phase phase)
{
    EACH(w, r)
    {
        for (size_t u = 0; phase != FC_PHASE_BACKWARD && u < N_UNITS; u++) {
            CHECK_OK(fc_unsharding_publish(r->tensors[u].base.unsharding));
        }
        fc_domain_open(r->domain, (fc_opening){phase, 0, FC_UPDATES_UNKNOWN});
        if (phase != FC_PHASE_BACKWARD) {
            CHECK_OK(fc_schedule_begin(r->schedule, r->streams[0], NULL));
        }
    }
}

static void close_there(device_world *w, bool is_last)
{
    EACH(w, r)
    {
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK_OK(fc_unsharding_keep(r->tensors[u].base.unsharding));
        }
        CHECK_OK(fc_domain_close(r->domain));
        if (is_last) {
            CHECK_OK(fc_schedule_end_backward(r->schedule, true));
        }
    }
}

static void gather_there(device_world *w, size_t u)
{
    EACH(w, r)
    {
        CHECK_OK(fc_unsharding_gather(r->tensors[u].base.unsharding));
    }
}

static void use_there(device_world *w, size_t u)
{
    EACH(w, r)
    {
        fc_unsharding *unsharding = r->tensors[u].base.unsharding;
        bool is_shown;

        CHECK_OK(fc_unsharding_begin_use(unsharding, &is_shown));
        if (!is_shown) {
            CHECK_OK(fc_unsharding_gather(unsharding));
            CHECK_OK(fc_unsharding_show(unsharding));
        }
    }
}

static void reshard_there(device_world *w, size_t u, bool to_slice)
{
    EACH(w, r)
    {
        CHECK_OK(fc_unsharding_reshard(r->tensors[u].base.unsharding, to_slice));
    }
}

/* Its forward ends. */
static void pass(device_world *w, size_t u)
{
    EACH(w, r)
    {
        CHECK_OK(fc_schedule_note_forward(r->tensors[u].on_device));
        CHECK_OK(fc_unsharding_end_forward(r->tensors[u].base.unsharding));
    }
}

typedef struct look_args {
    const tensors *tensors;
    const char *shown;
    int step;
} look_args;

static int n_looked;

static void look(const void *of)
{
    const look_args *args = of;
    const fc_layout *layout = args->tensors->base.layout;

    n_looked++;
    for (size_t i = 0; i < N_PARAMS; i++) {
        float full[ROWS * COLUMNS];

        fc_kern_cast(layout->params[i].compute,
                     FC_F32)(full, args->shown + layout->params[i].full_at, ROWS * COLUMNS);
        for (size_t k = 0; k < ROWS * COLUMNS; k++) {
            CHECK_EQ(full[k], value_of(args->step, args->tensors->unit, i, k));
        }
    }
}

/* Of compute: what is shown is what all ranks have in this step. */
static void check_values_there(device_world *w, size_t u)
{
    n_looked = 0;
    EACH(w, r)
    {
        const tensors *t = &r->tensors[u];
        const look_args args = {t, t->base.shown, w->step};
        const fc_sim_range range = {args.shown, t->base.layout->full_bytes, false};

        CHECK(args.shown != NULL && t->base.is_entered);
        if (args.shown != NULL) {
            CHECK_OK(fc_sim_launch(r->device, r->streams[0], named("use"), &range, 1, look, &args,
                                   sizeof(args)));
        }
    }
    await_all(w);
    CHECK_EQ(n_looked, w->n_ranks);
}

/* Since the last time, of each rank. */
static void check_gathers(device_world *w, int expected)
{
    EACH(w, r)
    {
        CHECK_EQ(r->n_gathers, expected);
        r->n_gathers = 0;
    }
}

static void check_state(device_world *w, size_t u, fc_unsharding_state expected)
{
    EACH(w, r)
    {
        CHECK_EQ(fc_unsharding_state_of(r->tensors[u].base.unsharding), expected);
    }
}

/* ---- outside of a phase ---- */

/* An unshard reads the shards as they are now, and keeps a copy. */
static void test_between_phases(int n_ranks)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_narrowed = true});
    gather_there(&w, 0);
    gather_there(&w, 0); /* it was asked for */
    check_gathers(&w, 1);
    check_state(&w, 0, FC_UNIT_GATHERED);
    use_there(&w, 0);
    use_there(&w, 0);
    check_gathers(&w, 0);
    check_state(&w, 0, FC_UNIT_KEPT);
    check_values_there(&w, 0);
    EACH(&w, r)
    {
        const tensors *t = &r->tensors[0];
        const size_t theirs = n_ranks == 1 ? 0 : r->rank == 0 ? 2 : 3;

        CHECK_EQ(t->n_read, 1);
        CHECK_EQ(t->base.traffic.gathers, n_ranks > 1);
        CHECK_EQ(t->base.traffic.gathered, theirs * COLUMNS * (4 + 2));
        CHECK_EQ(t->base.traffic.unshards, 1);
        CHECK(fc_unsharding_has_own_memory(t->base.unsharding));
        CHECK(fc_sim_bytes(r->device) > r->rest_bytes);
    }
    reshard_there(&w, 0, false);
    check_state(&w, 0, FC_UNIT_SHARDED);
    EACH(&w, r)
    {
        CHECK(!fc_unsharding_has_own_memory(r->tensors[0].base.unsharding));
        CHECK(!fc_unsharding_is_settled(r->tensors[0].base.unsharding));
        CHECK(r->tensors[0].base.shown == NULL);
    }
    step_shards(&w);
    use_there(&w, 0);
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    EACH(&w, r)
    {
        r->tensors[1].fails_to_read = true;
        CHECK_EQ(fc_unsharding_gather(r->tensors[1].base.unsharding), FC_ERR_INTERRUPTED);
        r->tensors[1].fails_to_read = false;
    }
    check_state(&w, 1, FC_UNIT_SHARDED);
    gather_there(&w, 1);
    EACH(&w, r)
    {
        fc_unsharding_drop(r->tensors[1].base.unsharding);
        CHECK_OK(fc_schedule_end_forward(r->schedule));
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* Nothing tells of the end of what began outside of a phase: the host may write shards at once. */
static void test_offloaded_shards_are_free_at_once(void)
{
    device_world w;

    make_device_world(&w, 1, (kind){.is_offloaded = true});
    use_there(&w, 0);
    step_shards(&w);
    w.step--;
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    unmake_device_world(&w);
}

/* ---- in a phase ---- */

/* What is used brings the gathers that are to come with it: of a list in forward, of the forwards'
 * order in backward; also where it was shown already. */
static void test_uses_bring_prefetches(int n_ranks)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_narrowed = true});
    EACH(&w, r)
    {
        CHECK_OK(
            fc_schedule_set_prefetch(r->tensors[0].on_device, false, &r->tensors[1].on_device, 1));
    }
    gather_there(&w, 0);
    check_gathers(&w, 1);
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0); /* the gather from before is still good */
    check_gathers(&w, 1);
    check_state(&w, 0, FC_UNIT_UNSHARDED);
    check_state(&w, 1, FC_UNIT_SHARDED); /* as far as callers go */
    check_values_there(&w, 0);
    pass(&w, 0);
    reshard_there(&w, 0, false);
    use_there(&w, 1);
    check_gathers(&w, 0);
    pass(&w, 1);
    reshard_there(&w, 1, false);
    use_there(&w, 2);
    check_gathers(&w, 1);
    pass(&w, 2);
    close_there(&w, false);
    check_state(&w, 2, FC_UNIT_KEPT);

    open_there(&w, FC_PHASE_BACKWARD);
    use_there(&w, 2);
    check_gathers(&w, 1);
    check_values_there(&w, 2);
    reshard_there(&w, 2, false);
    use_there(&w, 1);
    check_gathers(&w, 1);
    check_values_there(&w, 1);
    reshard_there(&w, 1, false);
    use_there(&w, 0);
    check_gathers(&w, 0);
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    EACH(&w, r)
    {
        CHECK_EQ(r->tensors[0].n_read, 1);
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* A forward gathers what was kept anew after a step alone. */
static void test_a_kept_copy_follows_its_shards(int n_ranks, bool has_methods)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_extended = has_methods});
    use_there(&w, 0);
    check_gathers(&w, 1);
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0);
    check_gathers(&w, 0);
    check_values_there(&w, 0);
    close_there(&w, true);
    step_shards(&w);
    EACH(&w, r)
    {
        r->tensors[0].base.shown = NULL;
    }
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0);
    check_gathers(&w, 1);
    check_values_there(&w, 0);
    use_there(&w, 0);
    check_gathers(&w, 0);
    EACH(&w, r)
    {
        CHECK_EQ(r->tensors[0].base.n_made, has_methods ? 2 : 0);
        CHECK_EQ(r->tensors[0].base.n_filled, has_methods ? 2 : 0);
        CHECK_EQ(r->tensors[0].base.n_forgotten, has_methods ? 2 : 0);
    }
    /* What somebody has written to it lasts. */
    close_there(&w, true);
    step_shards(&w);
    EACH(&w, r)
    {
        r->tensors[0].base.is_written[0] = true;
    }
    open_there(&w, FC_PHASE_FORWARD);
    use_there(&w, 0);
    check_gathers(&w, 0);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    EACH(&w, r)
    {
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* A reshard to a smaller group, of this rank alone: backward gathers what it kept, and nobody else
 * does after the phase. */
static void test_slices(int n_ranks)
{
    device_world w;

    make_device_world(&w, n_ranks, (kind){.is_narrowed = true, .has_slices = true});
    open_there(&w, FC_PHASE_FORWARD);
    for (size_t u = 0; u < 2; u++) {
        use_there(&w, u);
        pass(&w, u);
        reshard_there(&w, u, true);
    }
    check_state(&w, 0, FC_UNIT_SHARDED);
    close_there(&w, false);
    open_there(&w, FC_PHASE_BACKWARD);
    use_there(&w, 0);
    check_values_there(&w, 0);
    EACH(&w, r)
    {
        CHECK_EQ(r->tensors[0].base.traffic.unshards, 2);
        CHECK_EQ(r->tensors[0].base.traffic.gathers, n_ranks > 1);
        CHECK_EQ(r->tensors[0].base.traffic.gathered,
                 n_ranks == 1 ? 0 : (r->rank == 0 ? 2 : 3) * COLUMNS * (4 + 2));
    }
    reshard_there(&w, 0, false);
    close_there(&w, false); /* and the second one has its slice */
    step_shards(&w);
    use_there(&w, 1);
    check_values_there(&w, 1);
    reshard_there(&w, 1, false);
    EACH(&w, r)
    {
        CHECK_OK(fc_schedule_end_backward(r->schedule, true));
        CHECK_EQ(fc_sim_bytes(r->device), r->rest_bytes);
    }
    unmake_device_world(&w);
}

/* ---- one rank that uses its shards where they lie ---- */

static const kind alone = {.has_all = true, .can_reside = true};

/* A forward of the first unit, up to its end. */
static tensors *begin_forward(device_world *w)
{
    open_there(w, FC_PHASE_FORWARD);
    use_there(w, 0);
    return &w->ranks[0].tensors[0];
}

static bool is_resident(const tensors *t)
{
    return fc_unsharding_is_resident(t->base.unsharding);
}

static void test_residence_begins_behind_the_first_forward(bool is_shown, bool has_graph)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    fc_unsharding_set_graph(t->base.unsharding, has_graph);
    CHECK(!is_resident(t) && t->base.shown != t->home);
    CHECK(fc_unsharding_is_read_apart(t->base.unsharding));
    check_gathers(&w, 1);
    if (!is_shown) {
        reshard_there(&w, 0, false);
    }
    pass(&w, 0);
    CHECK(is_resident(t));
    CHECK_EQ(t->n_resided, 1);
    CHECK(t->base.shown == (is_shown || has_graph ? t->home : NULL));
    if (is_shown) {
        check_values_there(&w, 0);
        reshard_there(&w, 0, false);
    }
    CHECK(t->base.shown == (has_graph ? t->home : NULL));
    CHECK(fc_unsharding_is_settled(t->base.unsharding));
    close_there(&w, false);
    open_there(&w, FC_PHASE_BACKWARD);
    use_there(&w, 0);
    check_values_there(&w, 0);
    CHECK(t->base.shown == t->home);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    step_shards(&w);
    (void)begin_forward(&w);
    check_gathers(&w, 0);
    CHECK(t->base.shown == t->home);
    check_values_there(&w, 0);
    pass(&w, 0);
    CHECK_EQ(t->n_resided, 1);
    reshard_there(&w, 0, false);
    CHECK(is_resident(t) && t->base.n_told == 0);
    close_there(&w, true);
    unmake_device_world(&w);
}

/* Who writes to its own parameters, or may have, keeps to copies; so does who cannot move. */
static void test_residence_does_not_begin(void)
{
    for (int why = 0; why < 5; why++) {
        device_world w;
        kind k = alone;
        tensors *t;

        k.has_all = why != 0;
        make_device_world(&w, 1, k);
        t = begin_forward(&w);
        CHECK_EQ(t->n_asked, why != 0);
        t->base.is_written[0] = why == 1;
        t->base.is_written[1] = why == 2;
        t->maybe_written = why == 3;
        t->can_reside = why != 4;
        pass(&w, 0);
        reshard_there(&w, 0, false);
        t->base.is_written[0] = t->base.is_written[1] = t->maybe_written = false;
        t->can_reside = true;
        close_there(&w, true);
        (void)begin_forward(&w); /* the first one has decided */
        pass(&w, 0);
        CHECK(!is_resident(t));
        CHECK_EQ(t->n_resided, 0);
        reshard_there(&w, 0, false);
        close_there(&w, true);
        unmake_device_world(&w);
    }
}

static void test_residence_fails(void)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    reshard_there(&w, 0, false);
    t->fails_to_reside = true;
    CHECK_EQ(fc_unsharding_end_forward(t->base.unsharding), FC_ERR_INTERRUPTED);
    CHECK(!is_resident(t));
    use_there(&w, 0);
    CHECK(t->base.shown != NULL && t->base.shown != t->home);
    check_values_there(&w, 0);
    reshard_there(&w, 0, false);
    close_there(&w, true);
    unmake_device_world(&w);
}

/* A write that reached the shards ends it, and is told of if it is known. */
static void test_residence_ends_with_a_write(bool is_counted, fc_status warns)
{
    device_world w;
    tensors *t;

    make_device_world(&w, 1, alone);
    t = begin_forward(&w);
    pass(&w, 0);
    t->base.is_written[1] = is_counted;
    t->maybe_written = true;
    t->warns = warns;
    CHECK_EQ(fc_unsharding_reshard(t->base.unsharding, false), is_counted ? warns : FC_OK);
    CHECK(!is_resident(t));
    check_state(&w, 0, FC_UNIT_SHARDED);
    CHECK_EQ(t->base.n_told, is_counted);
    if (is_counted) {
        CHECK_EQ(t->told_of, 1);
        CHECK_EQ(t->base.told, FC_WRITTEN_RESIDENT);
    }
    t->base.is_written[1] = t->maybe_written = false;
    use_there(&w, 0);
    CHECK(t->base.shown != NULL && t->base.shown != t->home);
    check_values_there(&w, 0);
    t->base.is_written[0] = true; /* to a copy: no matter */
    reshard_there(&w, 0, false);
    CHECK_EQ(t->base.n_told, is_counted);
    close_there(&w, true);
    unmake_device_world(&w);
}

int main(void)
{
    for (int n_ranks = 1; n_ranks <= MAX_RANKS; n_ranks++) {
        test_between_phases(n_ranks);
        test_uses_bring_prefetches(n_ranks);
        test_a_kept_copy_follows_its_shards(n_ranks, false);
        test_a_kept_copy_follows_its_shards(n_ranks, true);
        test_slices(n_ranks);
    }
    test_offloaded_shards_are_free_at_once();
    for (int how = 0; how < 4; how++) {
        test_residence_begins_behind_the_first_forward(how & 1, how & 2);
    }
    test_residence_does_not_begin();
    test_residence_fails();
    test_residence_ends_with_a_write(true, FC_OK);
    test_residence_ends_with_a_write(true, FC_ERR_INTERRUPTED);
    test_residence_ends_with_a_write(false, FC_OK);
    return check_result();
}
