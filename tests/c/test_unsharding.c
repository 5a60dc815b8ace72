/* A unit's parameters between shards and the whole: each state, over shared memory and messages. */
#define _GNU_SOURCE

#include "domains.h"

#include "engine/batch.h"
#include "engine/order.h"
#include "engine/unsharding.h"

#define N_UNITS 3
#define N_PARAMS 2
#define ROWS 5
#define COLUMNS 3
#define N_STEPS 3
#define INPUT_BYTES 20
#define BATCH_LIMIT ((size_t)1 << 20)
#define SLICE_RANKS 2

/* Shards of the first parameter lie in shared memory where there is some; the second is narrowed.
 */
static const fc_dtype computed[N_PARAMS] = {FC_F32, FC_BF16};

/* What has the tensors of one unit of one rank. */
typedef struct owner {
    fc_unsharding *unsharding;
    const fc_layout *layout;
    fc_traffic traffic;
    float memory[N_PARAMS][ROWS * COLUMNS];
    float *shards[N_PARAMS];
    uint64_t writes[N_PARAMS]; /* to shards */
    bool is_written[N_PARAMS]; /* the unsharded parameter */
    const char *shown;         /* NULL: nothing */
    const char *slices;        /* NULL: the shards are shown, or the whole */
    bool is_slice_written[N_PARAMS];
    bool keeps_size, is_withheld, is_entered, is_observed;
    bool fails; /* the next call that can */
    fc_written told;
    int n_told;
    /* Of an extended unit. */
    char input[INPUT_BYTES]; /* this rank's, of the last make */
    int n_made, n_filled, n_forgotten;
    bool fails_to_make, fails_to_fill;
} owner;

typedef struct world {
    ranks_host host;
    fc_transport *transport;
    fc_domain *domain;
    /* Of groups of SLICE_RANKS, over messages. */
    ranks_host small_host;
    fc_transport *small_transport;
    fc_domain *small;
    fc_slots *slots;
    owner owners[N_UNITS];
    int rank;
    bool is_mapped;
} world;

static uint64_t n_steps;
static bool messages_fail;

/* ---- the owner ---- */

static void show(void *of, void *memory)
{
    ((owner *)of)->shown = memory;
}

static void hide(void *of, bool keeps_size)
{
    ((owner *)of)->shown = NULL;
    ((owner *)of)->keeps_size = keeps_size;
}

static void withhold(void *of, bool is_withheld)
{
    ((owner *)of)->is_withheld = is_withheld;
}

static fc_status move(owner *o, bool is_entered, const char *slices)
{
    if (o->fails) {
        o->fails = false;
        return fc_fail(FC_ERR_INTERRUPTED, "the owner fails");
    }
    memset(o->is_written, 0, sizeof(o->is_written));
    o->is_entered = is_entered;
    o->slices = slices;
    memset(o->is_slice_written, 0, sizeof(o->is_slice_written));
    return FC_OK;
}

static fc_status enter(void *of)
{
    return move(of, true, NULL);
}

static fc_status leave(void *of, void *slices)
{
    owner *o = of;
    bool was_written[N_PARAMS];

    memcpy(was_written, o->is_written, sizeof(was_written));
    FC_TRY(move(o, false, slices));
    memcpy(o->is_written, was_written, sizeof(was_written));
    return FC_OK;
}

static fc_status leave_slices(void *of)
{
    CHECK(((owner *)of)->slices != NULL);
    return move(of, false, NULL);
}

static void get_shards(void *of, const void **out)
{
    memcpy(out, ((owner *)of)->shards, sizeof(((owner *)of)->shards));
}

static void mark(void *of, uint64_t *out)
{
    memcpy(out, ((owner *)of)->writes, sizeof(((owner *)of)->writes));
}

static size_t find_changed(void *of, const uint64_t *marks, size_t from)
{
    while (from < N_PARAMS && marks[from] == ((owner *)of)->writes[from]) {
        from++;
    }
    return from;
}

static size_t find_written(void *of, size_t from, bool maybe)
{
    (void)maybe;
    while (from < N_PARAMS && !((owner *)of)->is_written[from]) {
        from++;
    }
    return from;
}

static size_t find_written_slice(void *of, size_t from)
{
    while (from < N_PARAMS && !((owner *)of)->is_slice_written[from]) {
        from++;
    }
    return from;
}

static fc_status tell_of_write(void *of, size_t param, fc_written what)
{
    (void)param;
    ((owner *)of)->told = what;
    ((owner *)of)->n_told++;
    return fc_fail(FC_ERR_INTERRUPTED, "a write at the wrong time");
}

static bool is_observed(void *of)
{
    return ((owner *)of)->is_observed;
}

static uint64_t count_steps(void *of)
{
    (void)of;
    return n_steps;
}

static const fc_unsharding_ops ops = {.show = show,
                                      .hide = hide,
                                      .withhold = withhold,
                                      .enter = enter,
                                      .leave = leave,
                                      .leave_slices = leave_slices,
                                      .shards = get_shards,
                                      .mark = mark,
                                      .find_changed = find_changed,
                                      .find_written = find_written,
                                      .find_written_slice = find_written_slice,
                                      .tell_of_write = tell_of_write,
                                      .is_observed = is_observed,
                                      .n_steps = count_steps};

/* ---- the owner of an extended unit, whose second parameter has one input ---- */

static char input_of(int rank, int n_made, size_t index)
{
    return (char)(rank * 50 + n_made * 7 + (int)index);
}

static fc_status make(void *of)
{
    owner *o = of;

    if (o->fails_to_make) {
        return fc_fail(FC_ERR_INTERRUPTED, "the first method fails");
    }
    o->n_made++;
    for (size_t k = 0; k < INPUT_BYTES; k++) {
        o->input[k] = input_of(o->layout->rank, o->n_made, k);
    }
    return FC_OK;
}

static fc_status fill(void *of)
{
    owner *o = of;
    const char *input = o->shown + o->layout->params[N_PARAMS].full_at;

    if (o->fails_to_fill) {
        return fc_fail(FC_ERR_INTERRUPTED, "the second method fails");
    }
    o->n_filled++;
    for (int rank = 0; rank < o->layout->n_ranks; rank++) {
        for (size_t k = 0; k < INPUT_BYTES; k++) {
            CHECK_EQ(*input++, input_of(rank, o->n_made, k));
        }
    }
    return FC_OK;
}

static void forget(void *of)
{
    owner *o = of;

    o->n_forgotten++;
    memset(o->input, 0, sizeof(o->input));
}

static void get_inputs(void *of, const void **out)
{
    owner *o = of;

    out[0] = o->shards[0];
    out[1] = NULL;
    out[2] = o->input;
}

static const fc_unsharding_ops extended_ops = {.show = show,
                                               .hide = hide,
                                               .withhold = withhold,
                                               .enter = enter,
                                               .leave = leave,
                                               .shards = get_inputs,
                                               .make = make,
                                               .fill = fill,
                                               .forget = forget,
                                               .mark = mark,
                                               .find_changed = find_changed,
                                               .find_written = find_written,
                                               .tell_of_write = tell_of_write,
                                               .is_observed = is_observed,
                                               .n_steps = count_steps};
static bool is_extended; /* the worlds that are made next */

/* ---- the world ---- */

static fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    if (messages_fail) {
        return fc_fail(FC_ERR_GROUP, "nobody is there");
    }
    return ranks_exchange(context, "all-gather", send, bytes, recv);
}

static fc_status barrier(void *context)
{
    char own = 0, all[RANKS_MAX];

    return ranks_exchange(context, "barrier", &own, 1, all);
}

/* Nobody reduces here. */
static fc_status no_scatter(void *context, void *recv, void *send, size_t numel, fc_dtype dtype)
{
    (void)context, (void)recv, (void)send, (void)numel, (void)dtype;
    return FC_ERR_UNSUPPORTED;
}

static fc_status no_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    (void)context, (void)data, (void)numel, (void)dtype;
    return FC_ERR_UNSUPPORTED;
}

static fc_status no_broadcast(void *context, void *data, size_t bytes, int root)
{
    (void)context, (void)data, (void)bytes, (void)root;
    return FC_ERR_UNSUPPORTED;
}

static fc_status no_exchange(void *context, void *recv, const size_t *recv_bytes, const void *send,
                             const size_t *send_bytes)
{
    (void)context, (void)recv, (void)recv_bytes, (void)send, (void)send_bytes;
    return FC_ERR_UNSUPPORTED;
}

static float value_of(int step, size_t unit, size_t param, size_t index)
{
    return (float)((step * 7 + (int)unit * 3 + (int)param + (int)index) % 64);
}

/* As an optimizer does, between phases. */
static void write_shards(world *w, int step)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w->owners[u];

        for (size_t i = 0; i < N_PARAMS; i++) {
            const fc_param *p = &o->layout->params[i];
            const size_t first = (size_t)w->rank * p->chunk_rows * p->inner;

            for (size_t k = 0; k < p->own_rows * p->inner; k++) {
                o->shards[i][k] = value_of(step, u, i, first + k);
            }
            o->writes[i]++;
        }
    }
    n_steps++;
}

static void create(world *w, size_t u)
{
    owner *o = &w->owners[u];
    const fc_unsharding_options options = {.unit = fc_domain_unit(w->domain, u),
                                           .sliced = w->small ? fc_domain_unit(w->small, u) : NULL,
                                           .slots = w->slots,
                                           .traffic = &o->traffic,
                                           .ops = is_extended ? &extended_ops : &ops,
                                           .owner = o};

    o->layout = fc_unit_layout(options.unit);
    for (size_t i = 0; i < N_PARAMS; i++) {
        o->shards[i] =
            o->layout->params[i].is_aliased ? fc_unit_shard_storage(options.unit, i) : o->memory[i];
    }
    CHECK_OK(fc_unsharding_create(&options, &o->unsharding));
}

static fc_status connect_by_messages(fc_transport_config *config, ranks_host *host,
                                     fc_transport **out)
{
    const fc_message_ops messages = {.context = host,
                                     .all_gather = all_gather,
                                     .reduce_scatter = no_scatter,
                                     .all_reduce = no_reduce,
                                     .broadcast = no_broadcast,
                                     .all_to_all = no_exchange,
                                     .barrier = barrier};

    return fc_callback_create(config, &messages, out);
}

/* A domain of each group of SLICE_RANKS, to which forward reshards over messages. */
static void join_small(world *w, int rank, int n_ranks)
{
    const int group = rank / SLICE_RANKS, own = rank % SLICE_RANKS;
    fc_param params[N_PARAMS];
    fc_unit_desc units[N_UNITS] = {
        {"first", params, N_PARAMS}, {"second", params, N_PARAMS}, {"third", params, N_PARAMS}};
    fc_transport_config config;

    if (w->is_mapped || n_ranks <= SLICE_RANKS || n_ranks % SLICE_RANKS != 0) {
        return;
    }
    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = make_param(1, ROWS, COLUMNS, FC_F32, true);
        params[i].orig = params[i].compute = computed[i];
    }
    config = ranks_config(&w->small_host, 1 + group, own, SLICE_RANKS, DOMAINS_TIMEOUT_NS);
    CHECK_OK(connect_by_messages(&config, &w->small_host, &w->small_transport));
    CHECK_OK(fc_domain_create(w->small_transport, FC_DOMAIN_SHARD, units, N_UNITS, own, SLICE_RANKS,
                              &w->small));
}

static void join(world *w, int rank, int n_ranks, bool is_mapped)
{
    fc_param params[N_PARAMS + 1];
    fc_unit_desc units[N_UNITS] = {
        {"first", params, N_PARAMS}, {"second", params, N_PARAMS}, {"third", params, N_PARAMS}};
    fc_transport_config config;

    (void)alarm(DOMAINS_WATCHDOG_S);
    *w = (world){.rank = rank, .is_mapped = is_mapped};
    n_steps = 0;
    messages_fail = false;
    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = make_param(1, ROWS, COLUMNS, FC_F32, true);
        params[i].compute = computed[i];
    }
    params[1].is_made = is_extended;
    params[1].n_inputs = is_extended;
    params[N_PARAMS] = make_param(1, (size_t)n_ranks, INPUT_BYTES, FC_F32, false);
    params[N_PARAMS].orig = params[N_PARAMS].compute = FC_RAW1;
    params[N_PARAMS].has_grad = false;
    params[N_PARAMS].is_made = true;
    CHECK_OK(fc_slots_create(&w->slots));
    config = ranks_config(&w->host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    if (is_mapped) {
        CHECK_OK(fc_shm_create(&config, &w->transport));
    } else {
        CHECK_OK(connect_by_messages(&config, &w->host, &w->transport));
    }
    CHECK_OK(
        fc_domain_create(w->transport, FC_DOMAIN_SHARD, units, N_UNITS, rank, n_ranks, &w->domain));
    join_small(w, rank, n_ranks);
    fc_domain_link(&w->domain, 1);
    fc_batch_limit(w->domain, BATCH_LIMIT);
    for (size_t u = 0; u < N_UNITS; u++) {
        create(w, u);
    }
}

static void leave_world(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_unsharding_destroy(w->owners[u].unsharding);
        CHECK(w->owners[u].shown == NULL);
    }
    fc_slots_trim(w->slots);
    CHECK_EQ(fc_slots_bytes(w->slots), 0);
    fc_domain_destroy(w->domain);
    fc_domain_destroy(w->small);
    fc_transport_destroy(w->transport);
    fc_transport_destroy(w->small_transport);
    fc_slots_destroy(w->slots);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void open(world *w, fc_phase phase)
{
    for (size_t u = 0; phase != FC_PHASE_BACKWARD && u < N_UNITS; u++) {
        CHECK_OK(fc_unsharding_publish(w->owners[u].unsharding));
        fc_unsharding_note_shards(w->owners[u].unsharding);
    }
    fc_domain_open(w->domain, (fc_opening){phase, 0, FC_UPDATES_UNKNOWN});
    if (w->small != NULL) {
        fc_domain_open(w->small, (fc_opening){phase, 0, FC_UPDATES_UNKNOWN});
    }
}

static void close_phase(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_unsharding_drop_ahead(w->owners[u].unsharding);
    }
    CHECK_OK(fc_domain_close(w->domain));
    if (w->small != NULL) {
        CHECK_OK(fc_domain_close(w->small));
    }
}

static fc_status unshard(world *w, size_t u)
{
    fc_unsharding *unsharding = w->owners[u].unsharding;
    bool is_shown;

    FC_TRY(fc_unsharding_begin_use(unsharding, &is_shown));
    if (is_shown) {
        return FC_OK;
    }
    FC_TRY(fc_unsharding_gather(unsharding));
    return fc_unsharding_show(unsharding);
}

static fc_status reshard(world *w, size_t u)
{
    return fc_unsharding_reshard(w->owners[u].unsharding, false);
}

#define CHECK_STATE(w, u, name)                                                                    \
    CHECK_EQ(fc_unsharding_state_of((w)->owners[u].unsharding), FC_UNIT_##name)

static void check_values(const world *w, size_t u, int step)
{
    const owner *o = &w->owners[u];

    CHECK(o->shown != NULL && o->is_entered);
    for (size_t i = 0; o->shown != NULL && i < N_PARAMS; i++) {
        float full[ROWS * COLUMNS];

        fc_kern_cast(computed[i], FC_F32)(full, o->shown + o->layout->params[i].full_at,
                                          ROWS * COLUMNS);
        for (size_t k = 0; k < ROWS * COLUMNS; k++) {
            if (full[k] != value_of(step, u, i, k)) {
                CHECK_MSG(false, "rank %d unit %zu param %zu [%zu]: %g, not %g", w->rank, u, i, k,
                          (double)full[k], (double)value_of(step, u, i, k));
                return;
            }
        }
    }
}

/* ---- transitions ---- */

static void test_transitions(void)
{
    static const struct {
        fc_unsharding_event event;
        fc_unsharding_state from, to;
    } legal[] = {
        {FC_UNIT_ASK, FC_UNIT_SHARDED, FC_UNIT_REQUESTED},
        {FC_UNIT_ASK, FC_UNIT_SLICED, FC_UNIT_REQUESTED},
        {FC_UNIT_ASK, FC_UNIT_REQUESTED, FC_UNIT_REQUESTED},
        {FC_UNIT_ASK, FC_UNIT_GATHERED, FC_UNIT_GATHERED},
        {FC_UNIT_ASK, FC_UNIT_AHEAD, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_SHARDED, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_SLICED, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_REQUESTED, FC_UNIT_GATHERED},
        {FC_UNIT_GATHER, FC_UNIT_GATHERED, FC_UNIT_GATHERED},
        {FC_UNIT_COME_ALONG, FC_UNIT_SHARDED, FC_UNIT_AHEAD},
        {FC_UNIT_COME_ALONG, FC_UNIT_SLICED, FC_UNIT_AHEAD},
        {FC_UNIT_OUTDATE, FC_UNIT_GATHERED, FC_UNIT_REQUESTED},
        {FC_UNIT_SHOW, FC_UNIT_REQUESTED, FC_UNIT_UNSHARDED},
        {FC_UNIT_SHOW, FC_UNIT_GATHERED, FC_UNIT_UNSHARDED},
        {FC_UNIT_SHOW_COPY, FC_UNIT_GATHERED, FC_UNIT_KEPT},
        {FC_UNIT_KEEP, FC_UNIT_UNSHARDED, FC_UNIT_KEPT},
        {FC_UNIT_KEEP, FC_UNIT_KEPT, FC_UNIT_KEPT},
        {FC_UNIT_RENEW, FC_UNIT_KEPT, FC_UNIT_UNSHARDED},
        {FC_UNIT_RESHARD, FC_UNIT_SLICED, FC_UNIT_SHARDED},
        {FC_UNIT_RESHARD, FC_UNIT_UNSHARDED, FC_UNIT_SHARDED},
        {FC_UNIT_RESHARD, FC_UNIT_KEPT, FC_UNIT_SHARDED},
        {FC_UNIT_RESHARD_TO_SLICE, FC_UNIT_UNSHARDED, FC_UNIT_SLICED},
        {FC_UNIT_RESHARD_TO_SLICE, FC_UNIT_KEPT, FC_UNIT_SLICED},
        {FC_UNIT_DROP, FC_UNIT_SHARDED, FC_UNIT_SHARDED},
        {FC_UNIT_DROP, FC_UNIT_REQUESTED, FC_UNIT_SHARDED},
        {FC_UNIT_DROP, FC_UNIT_GATHERED, FC_UNIT_SHARDED},
        {FC_UNIT_DROP, FC_UNIT_AHEAD, FC_UNIT_SHARDED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_SLICED, FC_UNIT_SLICED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_REQUESTED, FC_UNIT_SLICED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_GATHERED, FC_UNIT_SLICED},
        {FC_UNIT_DROP_TO_SLICE, FC_UNIT_AHEAD, FC_UNIT_SLICED},
    };
    const size_t n_legal = sizeof(legal) / sizeof(legal[0]);

    for (int event = 0; event < FC_UNIT_EVENT_COUNT; event++) {
        for (int from = 0; from < FC_UNIT_STATE_COUNT; from++) {
            fc_unsharding_state to = FC_UNIT_STATE_COUNT;
            const fc_status st =
                fc_unsharding_next((fc_unsharding_state)from, (fc_unsharding_event)event, &to);
            size_t k = 0;

            while (k < n_legal && ((int)legal[k].event != event || (int)legal[k].from != from)) {
                k++;
            }
            CHECK_EQ(st, k < n_legal ? FC_OK : FC_ERR_STATE);
            CHECK_EQ(to, k < n_legal ? legal[k].to : FC_UNIT_STATE_COUNT);
        }
    }
    CHECK_HAS(fc_last_message(), "a unit that is unsharded since before is dropped without a use, "
                                 "and still has its slice");
}

/* ---- programs; `arg`: whether in shared memory ---- */

static void body_steps(int rank, int n_ranks, void *arg)
{
    static const fc_phase phases[] = {FC_PHASE_FORWARD, FC_PHASE_BACKWARD};
    world w;

    join(&w, rank, n_ranks, *(const bool *)arg);
    for (int step = 0; step < N_STEPS; step++) {
        write_shards(&w, step);
        for (size_t p = 0; p < 2; p++) {
            open(&w, phases[p]);
            for (size_t u = 0; u < N_UNITS; u++) {
                CHECK_OK(fc_unsharding_gather(w.owners[u].unsharding)); /* asked for, then used */
                CHECK_EQ(fc_unsharding_state_of(w.owners[u].unsharding),
                         w.is_mapped ? FC_UNIT_REQUESTED : FC_UNIT_GATHERED);
                CHECK_OK(unshard(&w, u));
                CHECK_STATE(&w, u, UNSHARDED);
                CHECK_OK(unshard(&w, u));
                check_values(&w, u, step);
                CHECK_OK(reshard(&w, u));
                CHECK_STATE(&w, u, SHARDED);
                CHECK(w.owners[u].shown == NULL && !w.owners[u].is_entered);
            }
            close_phase(&w);
        }
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_traffic *t = &w.owners[u].traffic;

        CHECK_EQ(t->unshards, 2 * N_STEPS);
        /* The first backward sees no order, the others gather two units with the first. */
        CHECK_EQ(t->gathers, n_ranks == 1 ? 0 : w.is_mapped || u == 0 ? 2 * N_STEPS : N_STEPS + 1);
        CHECK_EQ(t->gathered % (2 * N_STEPS), 0);
        CHECK_EQ(t->gathered > 0, n_ranks > 1);
    }
    leave_world(&w);
}

/* Outside of phases a unit gets memory of its own, and follows its shards from the next forward on;
 * but for writes to it, which last. */
static void body_explicit(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[1];

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_STATE(&w, 1, GATHERED);
    fc_unsharding_drop(o->unsharding);
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_OK(unshard(&w, 1));
    CHECK_STATE(&w, 1, KEPT);
    CHECK(fc_unsharding_has_own_memory(o->unsharding));
    check_values(&w, 1, 0);
    CHECK_OK(barrier(&w.host)); /* a peer has read the shards */
    write_shards(&w, 1);
    check_values(&w, 1, 0);
    o->is_written[0] = true;
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 0);
    o->is_written[0] = false;
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 1);
    CHECK_EQ(fc_unsharding_state_of(o->unsharding), w.is_mapped ? FC_UNIT_UNSHARDED : FC_UNIT_KEPT);
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    CHECK_STATE(&w, 1, KEPT);
    close_phase(&w);
    write_shards(&w, 2);
    check_values(&w, 1, 1); /* its memory outlives the phase */
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 2);
    CHECK_OK(reshard(&w, 1));
    close_phase(&w);
    /* What was gathered before a phase is of before it. */
    CHECK_OK(fc_unsharding_gather(o->unsharding));
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 0);
    CHECK_STATE(&w, 1, UNSHARDED);
    CHECK_OK(reshard(&w, 1));
    close_phase(&w);
    leave_world(&w);
}

/* What a reshard leaves: memory that stays, a graph that may read, a unit that is withheld. */
static void body_flags(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    const char *memory;

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    fc_unsharding_keep_memory(o->unsharding, true);
    CHECK_OK(unshard(&w, 0));
    memory = o->shown;
    fc_unsharding_stay_unsharded(o->unsharding);
    CHECK(fc_unsharding_stays_unsharded(o->unsharding));
    CHECK_OK(reshard(&w, 0));
    CHECK(!fc_unsharding_stays_unsharded(o->unsharding));
    CHECK(o->shown == memory && !o->is_entered);
    fc_unsharding_withhold(o->unsharding);
    CHECK(!o->is_withheld); /* it can be read */
    CHECK_OK(unshard(&w, 0));
    CHECK(o->shown == memory);
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    fc_unsharding_keep_memory(o->unsharding, false);
    CHECK(o->shown == NULL);

    CHECK_OK(unshard(&w, 0));
    fc_unsharding_set_graph(o->unsharding, true);
    CHECK_OK(reshard(&w, 0));
    CHECK_EQ(o->shown != NULL, w.is_mapped);
    CHECK(w.is_mapped || o->keeps_size);
    CHECK_EQ(fc_unsharding_is_read_apart(o->unsharding), !w.is_mapped);
    fc_unsharding_set_graph(o->unsharding, false);
    CHECK(o->shown == NULL);
    close_phase(&w);

    open(&w, FC_PHASE_BACKWARD);
    fc_unsharding_withhold(o->unsharding);
    CHECK(o->is_withheld);
    CHECK_OK(reshard(&w, 0));
    CHECK(!o->is_withheld && o->shown == NULL);
    close_phase(&w);

    /* Nothing is left of it while it is sharded. */
    open(&w, FC_PHASE_BACKWARD);
    CHECK(fc_unsharding_is_settled(o->unsharding));
    CHECK_OK(unshard(&w, 0));
    CHECK(!fc_unsharding_is_settled(o->unsharding));
    CHECK_OK(reshard(&w, 0));
    CHECK(fc_unsharding_is_settled(o->unsharding));
    close_phase(&w);
    leave_world(&w);
}

/* Shards that are written within a forward are read when all ranks have written theirs; after a
 * read they are an error. */
static void body_written(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, true);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(fc_unsharding_check_unwritten(w.owners[0].unsharding));
    CHECK_OK(barrier(&w.host)); /* for the test: all ranks have seen that */
    write_shards(&w, 1);
    CHECK(fc_unsharding_was_written(w.owners[1].unsharding));
    CHECK_OK(unshard(&w, 1));
    check_values(&w, 1, 1);
    CHECK(!fc_unsharding_was_written(w.owners[1].unsharding));
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(reshard(&w, 1));
    if (n_ranks == 1) {
        CHECK_OK(unshard(&w, 0));
        CHECK_OK(reshard(&w, 0));
    } else {
        CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
        CHECK_STATE(&w, 0, SHARDED);
        CHECK_EQ(w.owners[0].n_told, 1);
        CHECK_EQ(w.owners[0].told, FC_WRITTEN_IN_FORWARD);
        CHECK(!fc_domain_is_open(w.domain));
    }
    fc_domain_fail(w.domain);
    leave_world(&w);
}

static void backward_until(world *w, size_t n)
{
    open(w, FC_PHASE_BACKWARD);
    for (size_t u = 0; u < n; u++) {
        CHECK_OK(unshard(w, u));
        CHECK_OK(reshard(w, u));
    }
}

/* Over messages: units that come along are used, dropped, or found written. */
static void body_ahead(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, false);
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    close_phase(&w);
    backward_until(&w, N_UNITS);
    close_phase(&w);

    backward_until(&w, 1);
    CHECK_STATE(&w, 1, AHEAD);
    CHECK_STATE(&w, 2, AHEAD);
    CHECK_EQ(fc_order_n_ahead(w.domain), 2);
    CHECK(!fc_unsharding_is_settled(w.owners[1].unsharding));
    w.owners[1].writes[1]++;
    CHECK_EQ(unshard(&w, 1), FC_ERR_INTERRUPTED);
    CHECK_EQ(w.owners[1].told, FC_WRITTEN_IN_BACKWARD);
    CHECK_STATE(&w, 1, SHARDED);
    CHECK_OK(fc_unsharding_gather(w.owners[2].unsharding)); /* asked for, and dropped */
    CHECK_STATE(&w, 2, GATHERED);
    CHECK_EQ(fc_order_n_ahead(w.domain), 0);
    fc_unsharding_drop(w.owners[2].unsharding);
    CHECK_OK(unshard(&w, 2)); /* so that the order is as before */
    CHECK_OK(reshard(&w, 2));
    close_phase(&w);

    /* A failure leaves those that were to come along as they were, too. */
    backward_until(&w, N_UNITS);
    close_phase(&w);
    open(&w, FC_PHASE_BACKWARD);
    messages_fail = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_GROUP);
    messages_fail = false;
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_STATE(&w, u, SHARDED);
    }
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    for (int n = 0; n < 40; n++) { /* memory that is short */
        fc_alloc_fail_after(n);
        if (unshard(&w, 0) == FC_OK) {
            break;
        }
        fc_alloc_fail_after(-1);
        CHECK_STATE(&w, 0, SHARDED);
        CHECK_EQ(fc_order_n_ahead(w.domain), 0);
        fc_slots_trim(w.slots);
        CHECK_EQ(fc_slots_bytes(w.slots), 0);
    }
    fc_alloc_fail_after(-1);
    check_values(&w, 0, 0);
    CHECK_STATE(&w, 1, AHEAD);
    /* Whose module is gone comes along no more. */
    fc_unsharding_detach(w.owners[2].unsharding);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    backward_until(&w, 1);
    CHECK_STATE(&w, 2, SHARDED);
    close_phase(&w);
    leave_world(&w);
}

static fc_status reshard_to_slice(world *w, size_t u)
{
    return fc_unsharding_reshard(w->owners[u].unsharding, true);
}

/* This rank's rows of what all ranks had in that step. */
static void check_slices(const world *w, size_t u, int step)
{
    const owner *o = &w->owners[u];
    const size_t chunk = (ROWS + SLICE_RANKS - 1) / SLICE_RANKS;
    const size_t first = (size_t)(w->rank % SLICE_RANKS) * chunk;
    const size_t rows = first + chunk > ROWS ? ROWS - first : chunk;

    CHECK(o->slices != NULL && !o->is_entered);
    for (size_t i = 0; o->slices != NULL && i < N_PARAMS; i++) {
        const fc_param *p =
            &(w->is_mapped ? o->layout : fc_unit_layout(fc_domain_unit(w->small, u)))->params[i];
        const size_t row = COLUMNS * fc_dtype_bytes(computed[i]);
        float own[ROWS * COLUMNS];

        fc_kern_cast(computed[i], FC_F32)(
            own, o->slices + (w->is_mapped ? p->full_at + first * row : p->pack_at),
            rows * COLUMNS);
        for (size_t k = 0; k < rows * COLUMNS; k++) {
            CHECK(own[k] == value_of(step, u, i, first * COLUMNS + k));
        }
    }
}

static void forward_to_slices(world *w, int step)
{
    write_shards(w, step);
    open(w, FC_PHASE_FORWARD);
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_OK(unshard(w, u));
        check_values(w, u, step);
        CHECK_OK(reshard_to_slice(w, u));
        CHECK_STATE(w, u, SLICED);
        CHECK(!fc_unsharding_is_settled(w->owners[u].unsharding));
    }
    close_phase(w);
    for (size_t u = 0; u < N_UNITS; u++) {
        check_slices(w, u, step);
    }
}

/* Each forward leaves slices of a smaller group; backward gathers from them, over messages between
 * the ranks of that group alone. */
static void body_slices(int rank, int n_ranks, void *arg)
{
    world w;
    uint64_t gathered;

    join(&w, rank, n_ranks, *(const bool *)arg);
    for (int step = 0; step < N_STEPS; step++) {
        forward_to_slices(&w, step);
        gathered = w.owners[0].traffic.gathered;
        open(&w, FC_PHASE_BACKWARD);
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK_OK(unshard(&w, u));
            CHECK(!fc_unsharding_has_slices(w.owners[u].unsharding));
            check_values(&w, u, step);
            if (!w.is_mapped && step > 0 && u == 0) { /* those of its group came along */
                CHECK_STATE(&w, 1, AHEAD);
                CHECK(fc_unsharding_has_slices(w.owners[1].unsharding));
            }
            CHECK_OK(reshard(&w, u));
            CHECK_STATE(&w, u, SHARDED);
        }
        close_phase(&w);
        gathered = w.owners[0].traffic.gathered - gathered;
        CHECK(gathered < w.owners[0].traffic.gathered / (2 * (uint64_t)step + 1) || w.is_mapped);
    }
    leave_world(&w);
}

/* Slices are left: by a reshard, by a use in a forward, by nobody at all. */
static void body_slices_end(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    forward_to_slices(&w, 0);
    CHECK_OK(reshard_to_slice(&w, 0)); /* nothing is to be done */
    CHECK_STATE(&w, 0, SLICED);
    o->fails = true;
    CHECK_EQ(reshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, SLICED);
    CHECK_OK(reshard(&w, 0));
    CHECK_STATE(&w, 0, SHARDED);
    CHECK(o->slices == NULL);
    /* Outside of a phase it is the shards that are gathered. */
    CHECK_OK(fc_unsharding_gather(w.owners[1].unsharding));
    CHECK_STATE(&w, 1, GATHERED);
    fc_unsharding_drop(w.owners[1].unsharding);
    CHECK_STATE(&w, 1, SLICED);
    CHECK_OK(unshard(&w, 1));
    CHECK_STATE(&w, 1, KEPT);
    CHECK(!fc_unsharding_has_slices(w.owners[1].unsharding));
    CHECK_OK(reshard(&w, 1));
    /* So in the next forward: they may have been written since. */
    CHECK_OK(barrier(&w.host));
    forward_to_slices(&w, 1);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 1);
    o->fails = true;
    CHECK_EQ(reshard_to_slice(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, UNSHARDED);
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(unshard(&w, 0)); /* from shards, now that the slices are gone */
    check_values(&w, 0, 1);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* What is written to slices in shared memory is not what a backward reads. */
static void body_slices_written(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];
    const fc_param *p;

    join(&w, rank, n_ranks, *(const bool *)arg);
    forward_to_slices(&w, 0);
    p = &o->layout->params[0];
    ((float *)(void *)(o->slices + p->full_at))[0] = 77;
    o->is_slice_written[0] = true;
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* What fails leaves the unit as it was. */
static void body_failing(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    write_shards(&w, 0);
    fc_alloc_fail_after(0);
    CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_STATE(&w, 0, SHARDED);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    if (!w.is_mapped) {
        messages_fail = true;
        CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_GROUP);
        messages_fail = false;
        CHECK_STATE(&w, 0, SHARDED);
    }
    open(&w, FC_PHASE_FORWARD);
    o->fails = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, UNSHARDED); /* so that a reshard puts its parts right */
    o->fails = true;
    CHECK_EQ(reshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, UNSHARDED);
    CHECK_OK(reshard(&w, 0));
    CHECK_OK(unshard(&w, 0));
    check_values(&w, 0, 0);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

/* Its owner is asked once for each phase, or over messages for each gather, and each time makes the
 * whole of what came. */
static void use(world *w, int n_made, int n_filled)
{
    const owner *o = &w->owners[0];

    CHECK_OK(unshard(w, 0));
    CHECK_EQ(o->n_made, n_made);
    CHECK_EQ(o->n_filled, n_filled);
    CHECK_EQ(o->n_forgotten, w->is_mapped ? n_made + n_filled : n_filled);
}

static void begin_backward(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        if (fc_unsharding_is_stale(w->owners[u].unsharding)) {
            CHECK_OK(fc_unsharding_publish(w->owners[u].unsharding));
            fc_unsharding_note_shards(w->owners[u].unsharding);
        }
    }
    open(w, FC_PHASE_BACKWARD);
}

static void body_extended(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0); /* nothing comes along */
    write_shards(&w, 0);
    open(&w, FC_PHASE_FORWARD);
    use(&w, 1, 1);
    CHECK(fc_unsharding_is_read_apart(o->unsharding) &&
          !fc_unsharding_has_own_memory(o->unsharding));
    fc_unsharding_set_graph(o->unsharding, true);
    CHECK_OK(reshard(&w, 0));
    CHECK(o->shown == NULL && o->keeps_size);
    fc_unsharding_set_graph(o->unsharding, false);
    close_phase(&w);
    CHECK_EQ(w.owners[1].n_made, w.is_mapped); /* which nobody uses, and no backward asks for */
    begin_backward(&w);
    use(&w, 2, 2);
    CHECK_EQ(w.owners[1].n_made, w.is_mapped);
    CHECK_OK(fc_unsharding_keep(o->unsharding));
    close_phase(&w);

    /* Kept, it is made anew after a step alone. */
    open(&w, FC_PHASE_FORWARD);
    use(&w, 2, 2);
    CHECK_STATE(&w, 0, KEPT);
    close_phase(&w);
    CHECK_OK(barrier(&w.host));
    write_shards(&w, 1);
    open(&w, FC_PHASE_FORWARD);
    use(&w, 3, 3);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(o->n_made, 4);
    CHECK_STATE(&w, 0, KEPT);
    CHECK_OK(reshard(&w, 0));
    leave_world(&w);
}

/* A failure of either method leaves the unit sharded or gathered; what was made is used again. */
static void body_extended_failing(int rank, int n_ranks, void *arg)
{
    world w;
    owner *o = &w.owners[0];

    join(&w, rank, n_ranks, *(const bool *)arg);
    fc_batch_limit(w.domain, 0);
    write_shards(&w, 0);
    o->fails_to_make = true;
    CHECK_EQ(fc_unsharding_gather(o->unsharding), FC_ERR_INTERRUPTED);
    CHECK_STATE(&w, 0, SHARDED);
    fc_slots_trim(w.slots);
    CHECK_EQ(fc_slots_bytes(w.slots), 0);
    o->fails_to_make = false;
    open(&w, FC_PHASE_FORWARD);
    o->fails_to_fill = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    CHECK(o->shown == NULL && !o->is_entered);
    o->fails_to_fill = false;
    use(&w, 1, 1);
    CHECK_OK(reshard(&w, 0));
    o->fails_to_fill = true;
    CHECK_EQ(unshard(&w, 0), FC_ERR_INTERRUPTED);
    fc_unsharding_drop(o->unsharding);
    CHECK_STATE(&w, 0, SHARDED);
    o->fails_to_fill = false;
    close_phase(&w);
    open(&w, FC_PHASE_FORWARD);
    CHECK_OK(unshard(&w, 0));
    CHECK_EQ(o->n_made, w.is_mapped ? 1 : 2);
    CHECK_EQ(o->n_filled, 2);
    CHECK_OK(reshard(&w, 0));
    close_phase(&w);
    leave_world(&w);
}

int main(void)
{
    static bool kinds[] = {true, false};

    test_transitions();
    for (size_t k = 0; k < 2; k++) {
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
            ranks_check(n_ranks, body_steps, &kinds[k]);
            ranks_check(n_ranks, body_explicit, &kinds[k]);
            ranks_check(n_ranks, body_flags, &kinds[k]);
            ranks_check(n_ranks, body_failing, &kinds[k]);
        }
    }
    for (size_t k = 0; k < 2; k++) {
        ranks_check(4, body_slices, &kinds[k]);
        ranks_check(4, body_slices_end, &kinds[k]);
    }
    ranks_check(4, body_slices_written, &kinds[0]);
    is_extended = true;
    for (size_t k = 0; k < 2; k++) {
        for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
            ranks_check(n_ranks, body_extended, &kinds[k]);
            ranks_check(n_ranks, body_extended_failing, &kinds[k]);
        }
    }
    is_extended = false;
    ranks_check(1, body_written, NULL);
    ranks_check(2, body_written, NULL);
    ranks_check(2, body_ahead, NULL);
    ranks_check(3, body_ahead, NULL);
    return check_result();
}
