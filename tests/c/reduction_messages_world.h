/* Units whose gradients are reduced over messages: packed or counted, in batches or not, of several
 * types, with a frozen parameter; in a shard group and in replicas, of which one may be in shared
 * memory. Their owners and collectives may be told to fail.
 */
#ifndef REDUCTION_MESSAGES_WORLD_H
#define REDUCTION_MESSAGES_WORLD_H
#include "domains.h"
#include "guarded.h"
#include "refused_messages.h"

#include "engine/batch.h"
#include "engine/reduction.h"

#define N_UNITS 3 /* two alike, and one whose parameters are reduced in two types */
#define MIXED 2
#define N_PARAMS 3 /* the last one is frozen at set-up */
#define FROZEN 2
#define NUMEL ((size_t)24)
#define DIVISOR 2
#define N_STEPS 6

static const size_t rows_of[N_PARAMS] = {8, 5, 3};
static const size_t inner_of[N_PARAMS] = {3, 3, 2};

/* What a test's ranks have alike. */
typedef struct setup {
    int n_shards;
    bool shards_are_mapped; /* else all collectives are messages */
    bool is_packed;
    size_t batch_limit;
    bool has_replica; /* one alone, where there are no others */
} setup;

/* Collectives of one domain. */
typedef struct channel {
    ranks_host host;
    int n_sums, n_all_sums; /* reduce-scatters, all-reduces */
    size_t sent;            /* elements of these */
} channel;

typedef struct owner {
    fc_reduction *reduction;
    fc_unit *shard;
    float sums[N_PARAMS][NUMEL];
    bool has[N_PARAMS];
} owner;

typedef struct world {
    const setup *of;
    channel channels[2];
    fc_transport *transports[2], *watches[2];
    fc_domain *domains[2];
    size_t n_domains;
    fc_slots *slots;
    owner owners[N_UNITS];
    int rank, n_ranks, n_shards;
    bool all_reduce;
} world;

static int n_submitted, n_released;
static int calls_left = -1; /* of owners and collectives until one fails; negative: none does */
static bool has_failed;

/* ---- messages ---- */

/* FC_ERR_INTERRUPTED if it is this call's turn to fail. Nothing comes behind a failure. */
static inline fc_status take_turn(void)
{
    CHECK(!has_failed);
    if (calls_left == 0) {
        has_failed = true;
        return fc_fail(FC_ERR_INTERRUPTED, "it fails");
    }
    calls_left -= calls_left > 0;
    return FC_OK;
}

static inline fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    return ranks_exchange(&((channel *)context)->host, "all-gather", send, bytes, recv);
}

/* The sum of all ranks' elements from `first` on. */
static inline fc_status sum_up(channel *c, void *recv, const void *send, size_t send_numel,
                               size_t first, size_t numel, fc_dtype dtype)
{
    const size_t item = fc_dtype_bytes(dtype);
    char *all = malloc((size_t)c->host.n_ranks * send_numel * item + 1);
    const void *rows[RANKS_MAX];
    fc_status st;

    CHECK_OR_EXIT(all != NULL);
    c->sent += send_numel;
    for (int r = 0; r < c->host.n_ranks; r++) {
        rows[r] = all + ((size_t)r * send_numel + first) * item;
    }
    st = take_turn();
    if (st == FC_OK) {
        st = ranks_exchange(&c->host, "sum", send, send_numel * item, all);
    }
    if (st == FC_OK) {
        fc_kern_reduce(dtype, dtype)(recv, rows, (size_t)c->host.n_ranks, numel, 1, false);
    }
    free(all);
    return st;
}

static inline fc_status reduce_scatter(void *context, void *recv, void *send, size_t numel,
                                       fc_dtype dtype)
{
    channel *c = context;

    c->n_sums++;
    return sum_up(c, recv, send, (size_t)c->host.n_ranks * numel, (size_t)c->host.rank * numel,
                  numel, dtype);
}

static inline fc_status all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    channel *c = context;

    c->n_all_sums++;
    return sum_up(c, data, data, numel, 0, numel, dtype);
}

/* ---- the owner ---- */

static world *here;

static inline fc_status get_options(void *of, fc_reduce_options *out)
{
    (void)of;
    *out = (fc_reduce_options){DIVISOR, here->all_reduce, false, false};
    return take_turn();
}

static inline fc_status no_flat(void *of, void **out)
{
    (void)of;
    *out = NULL;
    return take_turn();
}

static inline fc_status refuse_flat(void *of, const fc_reduce_options *options)
{
    (void)of, (void)options;
    CHECK(false);
    return FC_OK;
}

static inline fc_status prepare(void *of)
{
    (void)of;
    return take_turn();
}

static inline fc_status get_target(void *of, size_t param, void **out, bool *accumulate)
{
    owner *o = of;

    *out = o->sums[param];
    *accumulate = o->has[param];
    return take_turn();
}

static inline fc_status assign(void *of, size_t param, const fc_reduce_options *options)
{
    CHECK(options->all_reduce == here->all_reduce);
    FC_TRY(take_turn());
    ((owner *)of)->has[param] = true;
    return FC_OK;
}

static inline void release(void *memory)
{
    n_released++;
    guarded_destroy(memory, N_PARAMS * sizeof(fc_gradient));
}

static inline void refuse_to_wait(void *of, bool begins)
{
    (void)of, (void)begins;
    CHECK(false);
}

static inline size_t find_frozen(void *of, size_t from)
{
    (void)of, (void)from;
    return SIZE_MAX;
}

static const fc_reduction_ops ops = {get_options, no_flat, refuse_flat,    prepare,     get_target,
                                     assign,      release, refuse_to_wait, find_frozen, NULL};

/* ---- the world ---- */

static inline void join_domain(world *w, size_t d, const fc_unit_desc *units)
{
    /* Ranks that follow one another share a unit; boards 0 and 1, then 2 and 3. */
    const int n_shards = w->n_shards;
    const int board = (int)d * 2 + (d == 0 ? w->rank / n_shards : w->rank % n_shards);
    const int place = d == 0 ? w->rank % n_shards : w->rank / n_shards;
    const int n = d == 0 ? n_shards : w->n_ranks / n_shards;
    const fc_transport_config config =
        ranks_config(&w->channels[d].host, board, place, n, DOMAINS_TIMEOUT_NS);
    fc_message_ops messages = refused_messages;

    messages.context = &w->channels[d];
    messages.all_gather = all_gather;
    messages.reduce_scatter = reduce_scatter;
    messages.all_reduce = all_reduce;
    CHECK_OK(d == 0 && w->of->shards_are_mapped
                 ? fc_shm_create(&config, &w->transports[d])
                 : fc_callback_create(&config, &messages, &w->transports[d]));
    CHECK_OK(fc_domain_create(w->transports[d], d == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE,
                              units, N_UNITS, w->rank % n_shards, n_shards, &w->domains[d]));
    if (w->of->is_packed &&
        !fc_domain_is_mapped(w->domains[d])) { /* so that ranks with other gradients are told */
        CHECK_OK(fc_shm_create(&config, &w->watches[d]));
        CHECK_OK(fc_domain_watch(w->domains[d], w->watches[d]));
    }
}

static inline void join(world *w, int rank, int n_ranks, const setup *of)
{
    fc_param params[N_UNITS][N_PARAMS];
    fc_unit_desc units[N_UNITS] = {
        {"first", params[0], N_PARAMS}, {"second", params[1], N_PARAMS}, {"mixed", params[2], 3}};

    (void)alarm(DOMAINS_WATCHDOG_S);
    *w = (world){.of = of, .rank = rank, .n_ranks = n_ranks, .n_shards = of->n_shards};
    w->n_domains = n_ranks > of->n_shards || of->has_replica ? 2 : 1;
    here = w;
    n_submitted = n_released = 0;
    CHECK_OK(fc_slots_create(&w->slots));
    for (size_t u = 0; u < N_UNITS; u++) {
        for (size_t i = 0; i < N_PARAMS; i++) {
            params[u][i] = make_param(1, rows_of[i], inner_of[i],
                                      u == MIXED && i == 1 ? FC_BF16 : FC_F32, i != FROZEN);
            params[u][i].is_packed = of->is_packed;
            params[u][i].is_counted = !of->is_packed;
        }
    }
    for (size_t d = 0; d < w->n_domains; d++) {
        join_domain(w, d, units);
    }
    fc_domain_link(w->domains, w->n_domains);
    fc_batch_limit(w->domains[0], of->batch_limit);
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w->owners[u];

        o->shard = fc_domain_unit(w->domains[0], u);
        CHECK_OK(fc_reduction_create(o->shard,
                                     w->n_domains > 1 ? fc_domain_unit(w->domains[1], u) : NULL,
                                     w->slots, &ops, &o->reduction));
        fc_reduction_attach(o->reduction, o);
    }
}

static inline void leave(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_reduction_destroy(w->owners[u].reduction);
    }
    for (size_t d = w->n_domains; d-- > 0;) {
        fc_domain_destroy(w->domains[d]);
        fc_transport_destroy(w->transports[d]);
        fc_transport_destroy(w->watches[d]);
    }
    fc_slots_trim(w->slots);
    CHECK_EQ(fc_slots_bytes(w->slots), 0); /* all were given back */
    fc_slots_destroy(w->slots);
    CHECK_EQ(n_released, n_submitted);
    CHECK_EQ(fc_alloc_live(), 0);
}

static inline void open(world *w, fc_phase phase)
{
    for (size_t d = 0; d < w->n_domains; d++) {
        fc_domain_open(w->domains[d], (fc_opening){.phase = phase});
    }
}

static inline void close_all(world *w)
{
    for (size_t d = 0; d < w->n_domains; d++) {
        fc_domain_mark_closed(w->domains[d]);
    }
    for (size_t d = 0; d < w->n_domains; d++) {
        CHECK_OK(fc_domain_close(w->domains[d]));
    }
}

/* ---- gradients ---- */

/* Small whole numbers: every type holds their sums. */
static inline float value_of(int seed, int rank, size_t unit, size_t param, size_t index)
{
    return (float)((seed * 5 + rank * 3 + (int)unit * 2 + (int)param + (int)index) % 16);
}

static inline bool is_trained(int seed, size_t param)
{
    return param != FROZEN || seed % 3 == 0;
}

/* Ranks have different parameters, if somebody counts who has which. */
static inline bool is_missing(const world *w, int seed, int rank, size_t param)
{
    if (!is_trained(seed, param) || param == 0) {
        return param != 0;
    }
    if (w->of->is_packed) {
        return seed % 2 == 1 && param == 1;
    }
    return param == FROZEN ? rank > 0
           : seed % 4 == 1 ? rank % 2 == 1
           : seed % 4 == 2 ? rank > 0
                           : seed % 4 == 3;
}

static inline fc_status submit(world *w, size_t u, int seed)
{
    const fc_reduce_options options = {DIVISOR, w->all_reduce, false, false};
    float *full = malloc(N_PARAMS * NUMEL * sizeof(float));
    fc_gradient *grads = guarded_create(N_PARAMS * sizeof(*grads));
    fc_status st;

    CHECK_OR_EXIT(full != NULL);
    for (size_t i = 0; i < N_PARAMS; i++) {
        for (size_t k = 0; k < rows_of[i] * inner_of[i]; k++) {
            full[i * NUMEL + k] = value_of(seed, w->rank, u, i, k);
        }
        grads[i] = (fc_gradient){.dtype = FC_F32, .is_wanted = is_trained(seed, i)};
        grads[i].data = is_missing(w, seed, w->rank, i) ? NULL : full + i * NUMEL;
    }
    n_submitted++;
    st = fc_reduction_submit(w->owners[u].reduction, grads, grads, &options);
    CHECK_EQ(n_released, n_submitted); /* whatever came of it */
    free(full);
    return st;
}

static inline void check_sum(const world *w, size_t u, size_t param, int from, int to)
{
    const owner *o = &w->owners[u];
    const fc_param *p = &fc_unit_layout(o->shard)->params[param];
    const size_t first = (size_t)(w->rank % w->n_shards) * p->chunk_rows * p->inner;
    bool is_there = false;

    for (size_t k = 0; k < p->own_rows * p->inner; k++) {
        float wanted = 0;

        for (int seed = from; seed <= to; seed++) {
            for (int r = 0; r < w->n_ranks; r++) {
                if (!is_missing(w, seed, r, param)) {
                    is_there = true;
                    wanted += value_of(seed, r, u, param, first + k);
                }
            }
        }
        if (is_there && o->sums[param][k] != wanted / DIVISOR) {
            CHECK_MSG(false, "rank %d unit %zu param %zu [%zu]: %g, not %g", w->rank, u, param, k,
                      (double)o->sums[param][k], (double)(wanted / DIVISOR));
            return;
        }
    }
    CHECK_MSG(o->has[param] == is_there || p->own_rows == 0, "rank %d unit %zu param %zu", w->rank,
              u, param);
}

/* Sums of the backwards `from` to `to`; then they are dropped. */
static inline void check_sums(world *w, int from, int to)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        for (size_t i = 0; i < N_PARAMS; i++) {
            check_sum(w, u, i, from, to);
        }
        memset(w->owners[u].has, 0, sizeof(w->owners[u].has));
    }
}

static inline fc_status backward(world *w, int seed, bool all_reduce)
{
    open(w, FC_PHASE_BACKWARD);
    w->all_reduce = all_reduce;
    for (size_t u = 0; u < N_UNITS; u++) {
        FC_TRY(submit(w, u, seed));
    }
    return fc_reduction_finish_all(w->domains, w->n_domains);
}

static inline void forward(world *w)
{
    open(w, FC_PHASE_FORWARD);
    close_all(w);
}

#endif
