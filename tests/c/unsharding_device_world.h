/* Ranks with units on simulated devices: ranks of one process that do the same, one after the
 * other.
 */
#ifndef UNSHARDING_DEVICE_WORLD_H
#define UNSHARDING_DEVICE_WORLD_H

#define ROWS 5
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
    bool has_moved; /* what is gathered lies elsewhere, which nobody knows yet */
    char *home;     /* owned; where it resides */
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
    bool fails_to_record;
    size_t rest_bytes;
} device_rank;

/* How the units of a world are. */
typedef struct kind {
    bool is_narrowed; /* the second parameter */
    bool is_extended, is_offloaded, is_empty, has_slices, has_all, can_reside;
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

static inline fc_status read_shards(void *of)
{
    tensors *t = of;

    if (t->fails_to_read) {
        return fc_fail(FC_ERR_INTERRUPTED, "shards cannot be read");
    }
    t->n_read++;
    return fc_schedule_read_shards(t->rank->schedule, t->rank->streams[0]);
}

static inline size_t find_written_there(void *of, size_t from, bool maybe)
{
    return maybe && ((tensors *)of)->maybe_written ? from : find_written(of, from, maybe);
}

static inline fc_status tell(void *of, size_t param, fc_written what)
{
    tensors *t = of;

    t->told_of = param;
    t->base.told = what;
    t->base.n_told++;
    return t->warns;
}

static inline bool can_reside(void *of)
{
    ((tensors *)of)->n_asked++;
    return ((tensors *)of)->can_reside;
}

typedef struct write_args {
    const tensors *tensors;
    int step;
} write_args;

static inline void write_values(const void *of)
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

static inline fc_label named(const char *what)
{
    return (fc_label){"world", what, 0};
}

static inline void write_on_device(tensors *t)
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

static inline fc_status reside(void *of, void **home_out)
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
static inline fc_status make_there(void *of)
{
    if (((tensors *)of)->base.fails_to_make) {
        return fc_fail(FC_ERR_INTERRUPTED, "the first method fails");
    }
    ((tensors *)of)->base.n_made++;
    ((tensors *)of)->has_moved = true;
    return FC_OK;
}

static inline void get_shards_there(void *of, const void **out)
{
    ((tensors *)of)->has_moved = false;
    get_shards(of, out);
}

static inline fc_status fill_there(void *of)
{
    CHECK(((tensors *)of)->base.shown != NULL);
    if (((tensors *)of)->base.fails_to_fill) {
        return fc_fail(FC_ERR_INTERRUPTED, "the second method fails");
    }
    ((tensors *)of)->base.n_filled++;
    return FC_OK;
}

static inline void forget_there(void *of)
{
    ((tensors *)of)->base.n_forgotten++;
}

static const fc_unsharding_ops device_ops = {.show = show,
                                             .hide = hide,
                                             .withhold = withhold,
                                             .enter = enter,
                                             .leave = leave,
                                             .leave_slices = leave_slices,
                                             .shards = get_shards_there,
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

static inline device_rank *rank_of(fc_device *device)
{
    return (device_rank *)(void *)((char *)(uintptr_t)(const void *)device->ops -
                                   offsetof(device_rank, counting));
}

static inline fc_status count_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                     fc_label label, void *buffer, size_t part_bytes)
{
    rank_of(device)->n_gathers++;
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK(!rank_of(device)->tensors[u].has_moved);
    }
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static inline fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    return rank_of(device)->fails_to_record ? fc_fail(FC_ERR_SYSTEM, "no event")
                                            : simulated->record(device, event, stream);
}

static inline void make_tensors(device_rank *r, size_t u, fc_device_comm *comm,
                                fc_device_comm *alone)
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

static inline void make_rank(device_world *w, int rank, fc_device_comm *comm)
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
    r->counting.record = record;
    r->device->ops = &r->counting;
    for (size_t i = 0; i < STREAMS; i++) {
        CHECK_OK(fc_sim_stream_create(w->sim, rank, names[i], &r->streams[i]));
    }
    CHECK_OK(fc_sim_comm_create(w->sim, "alone", &rank, 1, &alone));
    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = make_param(1, w->kind.is_empty ? 0 : ROWS, COLUMNS, FC_F32, true);
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
static inline void step_shards(device_world *w)
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

static inline void make_device_world(device_world *w, int n_ranks, kind k)
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

static inline void await_all(device_world *w)
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

static inline void unmake_device_world(device_world *w)
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

static inline void open_there(device_world *w, fc_phase phase)
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

static inline void close_there(device_world *w, bool is_last)
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

static inline void gather_there(device_world *w, size_t u)
{
    EACH(w, r)
    {
        CHECK_OK(fc_unsharding_gather(r->tensors[u].base.unsharding));
    }
}

static inline void use_there(device_world *w, size_t u)
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

static inline void reshard_there(device_world *w, size_t u, bool to_slice)
{
    EACH(w, r)
    {
        CHECK_OK(fc_unsharding_reshard(r->tensors[u].base.unsharding, to_slice));
    }
}

/* Its forward ends. */
static inline void pass(device_world *w, size_t u)
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

static inline void look(const void *of)
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
static inline void check_values_there(device_world *w, size_t u)
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
static inline void check_gathers(device_world *w, int expected)
{
    EACH(w, r)
    {
        CHECK_EQ(r->n_gathers, expected);
        r->n_gathers = 0;
    }
}

static inline void check_state(device_world *w, size_t u, fc_unsharding_state expected)
{
    EACH(w, r)
    {
        CHECK_EQ(fc_unsharding_state_of(r->tensors[u].base.unsharding), expected);
    }
}

#endif
