/* Ranks with units whose parameters are unsharded, over shared memory or messages: what has their
 * tensors, and what a caller does. */
#ifndef UNSHARDING_WORLD_H
#define UNSHARDING_WORLD_H

#include "domains.h"
#include "refused_messages.h"

#include "engine/batch.h"
#include "engine/order.h"
#include "engine/unsharding.h"

#define N_UNITS 3
#define N_PARAMS 2
#ifndef ROWS
#define ROWS 25 /* so that slices of a smaller group lie elsewhere in their whole */
#endif
#define COLUMNS 3
#define N_STEPS 3
#define INPUT_BYTES 20
#define BATCH_LIMIT ((size_t)1 << 20)
#define SLICE_RANKS 2

/* Shards of the first parameter lie in shared memory where there is some; the second is narrowed.
 */
static fc_dtype computed[N_PARAMS] = {FC_F32, FC_BF16};

/* What has the tensors of one unit of one rank. */
typedef struct owner {
    fc_unsharding *unsharding;
    const fc_layout *layout;
    fc_traffic traffic;
    float memory[N_PARAMS][ROWS * COLUMNS];
    float *shards[N_PARAMS];
    uint64_t writes[N_PARAMS]; /* to shards */
    bool is_written[N_PARAMS]; /* the unsharded parameter */
    bool may_be_written[N_PARAMS];
    const char *shown;  /* NULL: nothing */
    const char *slices; /* NULL: the shards are shown, or the whole */
    bool is_slice_written[N_PARAMS];
    bool keeps_size, is_withheld, is_entered, is_observed;
    int n_shown, n_hidden, n_withheld; /* calls */
    bool fails;                        /* the next call that can */
    fc_written told;
    size_t told_param;
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
    ranks_host clock_host;
    fc_transport *clock;
    fc_slots *slots;
    owner owners[N_UNITS];
    int rank;
    bool is_mapped;
} world;

static uint64_t n_steps;
static bool messages_fail;
static bool has_clock; /* over messages: the worlds that are made next, as ranks of one host do */

/* ---- the owner ---- */

static inline void show(void *of, void *memory)
{
    ((owner *)of)->shown = memory;
    ((owner *)of)->n_shown++;
}

static inline void hide(void *of, bool keeps_size)
{
    ((owner *)of)->shown = NULL;
    ((owner *)of)->keeps_size = keeps_size;
    ((owner *)of)->n_hidden++;
}

static inline void withhold(void *of, bool is_withheld)
{
    ((owner *)of)->is_withheld = is_withheld;
    ((owner *)of)->n_withheld++;
}

static inline fc_status move(owner *o, bool is_entered, const char *slices)
{
    if (o->fails) {
        o->fails = false;
        return fc_fail(FC_ERR_INTERRUPTED, "the owner fails");
    }
    memset(o->is_written, 0, sizeof(o->is_written));
    memset(o->may_be_written, 0, sizeof(o->may_be_written));
    o->is_entered = is_entered;
    o->slices = slices;
    memset(o->is_slice_written, 0, sizeof(o->is_slice_written));
    return FC_OK;
}

static inline fc_status enter(void *of)
{
    return move(of, true, NULL);
}

static inline fc_status leave(void *of, void *slices)
{
    owner *o = of;
    const owner before = *o;

    FC_TRY(move(o, false, slices));
    memcpy(o->is_written, before.is_written, sizeof(o->is_written));
    memcpy(o->may_be_written, before.may_be_written, sizeof(o->may_be_written));
    return FC_OK;
}

static inline fc_status leave_slices(void *of)
{
    CHECK(((owner *)of)->slices != NULL);
    return move(of, false, NULL);
}

static inline void get_shards(void *of, const void **out)
{
    memcpy(out, ((owner *)of)->shards, sizeof(((owner *)of)->shards));
}

static inline void mark(void *of, uint64_t *out)
{
    memcpy(out, ((owner *)of)->writes, sizeof(((owner *)of)->writes));
}

static inline size_t find_changed(void *of, const uint64_t *marks, size_t from)
{
    while (from < N_PARAMS && marks[from] == ((owner *)of)->writes[from]) {
        from++;
    }
    return from;
}

static inline size_t find_written(void *of, size_t from, bool maybe)
{
    const owner *o = of;

    while (from < N_PARAMS && !o->is_written[from] && !(maybe && o->may_be_written[from])) {
        from++;
    }
    return from;
}

static inline size_t find_written_slice(void *of, size_t from)
{
    while (from < N_PARAMS && !((owner *)of)->is_slice_written[from]) {
        from++;
    }
    return from;
}

static inline fc_status tell_of_write(void *of, size_t param, fc_written what)
{
    ((owner *)of)->told = what;
    ((owner *)of)->told_param = param;
    ((owner *)of)->n_told++;
    return fc_fail(FC_ERR_INTERRUPTED, "a write at the wrong time");
}

static inline bool is_observed(void *of)
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

static inline char input_of(int rank, int n_made, size_t index)
{
    return (char)(rank * 50 + n_made * 7 + (int)index);
}

static inline fc_status make(void *of)
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

static inline fc_status fill(void *of)
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

static inline void forget(void *of)
{
    owner *o = of;

    o->n_forgotten++;
    memset(o->input, 0, sizeof(o->input));
}

static inline void get_inputs(void *of, const void **out)
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
/* The worlds that are made next: of extended units, or of units of one byte, which is cast. */
static bool is_extended, is_tiny;

/* ---- the world ---- */

static inline fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    if (messages_fail) {
        return fc_fail(FC_ERR_GROUP, "nobody is there");
    }
    return ranks_exchange(context, "all-gather", send, bytes, recv);
}

static fc_status (*gathers_by)(void *context, void *recv, const void *send,
                               size_t bytes) = all_gather;

/* What a transport does that can begin gathers; counted. */
static bool can_begin; /* the worlds that are made next */
static int n_begun, n_ended, n_dropped;
static const void *begun_send; /* NULL: none is under way */
static size_t begun_bytes;

static inline fc_status gather(void *context, const void *send, size_t bytes, const fc_gathered *to)
{
    char *recv = malloc(RANKS_MAX * bytes);
    fc_status st = gathers_by(context, recv, send, bytes);
    const int n_ranks = ((ranks_host *)context)->n_ranks;

    for (int r = 0; r < n_ranks && st == FC_OK; r++) {
        st = to->look(to->context, r, recv + (size_t)r * bytes, bytes);
    }
    for (int r = 0; r < n_ranks && st == FC_OK; r++) {
        st = to->take(to->context, r, 0, recv + (size_t)r * bytes, bytes / 2);
        st = st == FC_OK ? to->take(to->context, r, bytes / 2, recv + (size_t)r * bytes + bytes / 2,
                                    bytes - bytes / 2)
                         : st;
    }
    free(recv);
    return st;
}

static inline fc_status gather_begin(void *context, const void *send, size_t bytes)
{
    (void)context;
    if (begun_send != NULL) {
        return FC_AGAIN;
    }
    if (messages_fail) {
        return fc_fail(FC_ERR_GROUP, "nobody is there");
    }
    n_begun++;
    begun_send = send;
    begun_bytes = bytes;
    return FC_OK;
}

static inline fc_status gather_end(void *context, const fc_gathered *to)
{
    const void *send = begun_send;

    n_ended++;
    begun_send = NULL;
    return gather(context, send, begun_bytes, to);
}

static inline void gather_drop(void *context)
{
    (void)context;
    n_dropped += begun_send != NULL;
    begun_send = NULL;
}

static inline fc_status barrier(void *context)
{
    char own = 0, all[RANKS_MAX];

    return ranks_exchange(context, "barrier", &own, 1, all);
}

static inline float value_of(int step, size_t unit, size_t param, size_t index)
{
    return (float)((step * 7 + (int)unit * 3 + (int)param + (int)index) % 64);
}

/* As an optimizer does, between phases. */
static inline void write_shards(world *w, int step)
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

static inline void create(world *w, size_t u)
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

static inline fc_status connect_by_messages(fc_transport_config *config, ranks_host *host,
                                            fc_transport **out)
{
    fc_message_ops messages = refused_messages;

    messages.context = host;
    messages.all_gather = gathers_by;
    messages.barrier = barrier;
    messages.gather = can_begin ? gather : NULL;
    messages.gather_begin = gather_begin;
    messages.gather_end = gather_end;
    messages.gather_drop = gather_drop;
    return fc_callback_create(config, &messages, out);
}

/* A domain of each group of SLICE_RANKS, to which forward reshards over messages. */
static inline void join_small(world *w, int rank, int n_ranks)
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

static inline void join(world *w, int rank, int n_ranks, bool is_mapped)
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
    if (is_tiny) {
        params[0] = make_param(1, 1, 1, FC_F32, false);
        params[0].orig = FC_U8;
        params[0].compute = FC_I8;
        params[0].has_grad = false;
        params[1].rows = 0;
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
    if (has_clock && !is_mapped) {
        config = ranks_config(&w->clock_host, 3, rank, n_ranks, DOMAINS_TIMEOUT_NS);
        CHECK_OK(fc_shm_create(&config, &w->clock));
        CHECK_OK(fc_domain_watch(w->domain, w->clock));
    }
    join_small(w, rank, n_ranks);
    fc_domain_link(&w->domain, 1);
    fc_batch_limit(w->domain, BATCH_LIMIT);
    for (size_t u = 0; u < N_UNITS; u++) {
        create(w, u);
    }
}

static inline void leave_world(world *w)
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
    fc_transport_destroy(w->clock);
    fc_slots_destroy(w->slots);
    CHECK_EQ(fc_alloc_live(), 0);
}

static inline void open(world *w, fc_phase phase)
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

static inline void close_phase(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_unsharding_drop_ahead(w->owners[u].unsharding);
    }
    CHECK_OK(fc_domain_close(w->domain));
    if (w->small != NULL) {
        CHECK_OK(fc_domain_close(w->small));
    }
}

static inline fc_status unshard(world *w, size_t u)
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

static inline fc_status reshard(world *w, size_t u)
{
    return fc_unsharding_reshard(w->owners[u].unsharding, false);
}

#define CHECK_STATE(w, u, name)                                                                    \
    CHECK_EQ(fc_unsharding_state_of((w)->owners[u].unsharding), FC_UNIT_##name)

static inline void check_values(const world *w, size_t u, int step)
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

#endif
