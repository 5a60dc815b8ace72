/* Reductions over messages: batches, types and frozen parameters, sums that others look at, and
 * replicas behind shards in shared memory or behind messages.
 */
#define _GNU_SOURCE

#include "domains.h"
#include "refused_messages.h"

#include "engine/batch.h"
#include "engine/reduction.h"
#include "engine/root.h"

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
static fc_status take_turn(void)
{
    CHECK(!has_failed);
    if (calls_left == 0) {
        has_failed = true;
        return fc_fail(FC_ERR_INTERRUPTED, "it fails");
    }
    calls_left -= calls_left > 0;
    return FC_OK;
}

static fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    return ranks_exchange(&((channel *)context)->host, "all-gather", send, bytes, recv);
}

/* The sum of all ranks' elements from `first` on. */
static fc_status sum_up(channel *c, void *recv, const void *send, size_t send_numel, size_t first,
                        size_t numel, fc_dtype dtype)
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

static fc_status reduce_scatter(void *context, void *recv, void *send, size_t numel, fc_dtype dtype)
{
    channel *c = context;

    c->n_sums++;
    return sum_up(c, recv, send, (size_t)c->host.n_ranks * numel, (size_t)c->host.rank * numel,
                  numel, dtype);
}

static fc_status all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    channel *c = context;

    c->n_all_sums++;
    return sum_up(c, data, data, numel, 0, numel, dtype);
}

/* ---- the owner ---- */

static world *here;

static fc_status get_options(void *of, fc_reduce_options *out)
{
    (void)of;
    *out = (fc_reduce_options){DIVISOR, here->all_reduce, false, false};
    return take_turn();
}

static fc_status no_flat(void *of, void **out)
{
    (void)of;
    *out = NULL;
    return take_turn();
}

static fc_status refuse_flat(void *of, const fc_reduce_options *options)
{
    (void)of, (void)options;
    CHECK(false);
    return FC_OK;
}

static fc_status prepare(void *of)
{
    (void)of;
    return take_turn();
}

static fc_status get_target(void *of, size_t param, void **out, bool *accumulate)
{
    owner *o = of;

    *out = o->sums[param];
    *accumulate = o->has[param];
    return take_turn();
}

static fc_status assign(void *of, size_t param, const fc_reduce_options *options)
{
    CHECK(options->all_reduce == here->all_reduce);
    FC_TRY(take_turn());
    ((owner *)of)->has[param] = true;
    return FC_OK;
}

static void release(void *memory)
{
    n_released++;
    free(memory);
}

static void refuse_to_wait(void *of, bool begins)
{
    (void)of, (void)begins;
    CHECK(false);
}

static const fc_reduction_ops ops = {get_options, no_flat, refuse_flat, prepare,
                                     get_target,  assign,  release,     refuse_to_wait};

/* ---- the world ---- */

static void join_domain(world *w, size_t d, const fc_unit_desc *units)
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

static void join(world *w, int rank, int n_ranks, const setup *of)
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

static void leave(world *w)
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

static void open(world *w, fc_phase phase)
{
    for (size_t d = 0; d < w->n_domains; d++) {
        fc_domain_open(w->domains[d], (fc_opening){.phase = phase});
    }
}

static void close_all(world *w)
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
static float value_of(int seed, int rank, size_t unit, size_t param, size_t index)
{
    return (float)((seed * 5 + rank * 3 + (int)unit * 2 + (int)param + (int)index) % 16);
}

static bool is_trained(int seed, size_t param)
{
    return param != FROZEN || seed % 3 == 0;
}

/* Ranks have different parameters, if somebody counts who has which. */
static bool is_missing(const world *w, int seed, int rank, size_t param)
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

static fc_status submit(world *w, size_t u, int seed)
{
    const fc_reduce_options options = {DIVISOR, w->all_reduce, false, false};
    float *full = malloc(N_PARAMS * NUMEL * sizeof(float));
    fc_gradient *grads = calloc(N_PARAMS, sizeof(*grads));
    fc_status st;

    CHECK_OR_EXIT(full != NULL && grads != NULL);
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

static void check_sum(const world *w, size_t u, size_t param, int from, int to)
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
static void check_sums(world *w, int from, int to)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        for (size_t i = 0; i < N_PARAMS; i++) {
            check_sum(w, u, i, from, to);
        }
        memset(w->owners[u].has, 0, sizeof(w->owners[u].has));
    }
}

static fc_status backward(world *w, int seed, bool all_reduce)
{
    open(w, FC_PHASE_BACKWARD);
    w->all_reduce = all_reduce;
    for (size_t u = 0; u < N_UNITS; u++) {
        FC_TRY(submit(w, u, seed));
    }
    return fc_reduction_finish_all(w->domains, w->n_domains);
}

static void forward(world *w)
{
    open(w, FC_PHASE_FORWARD);
    close_all(w);
}

/* ---- tests ---- */

/* Whether a rank of this one's shard group has a gradient of the parameter. */
static bool is_in_group(const world *w, int seed, size_t param)
{
    const int first = w->rank / w->n_shards * w->n_shards;
    bool is_there = false;

    for (int r = first; r < first + w->n_shards; r++) {
        is_there = is_there || !is_missing(w, seed, r, param);
    }
    return is_there;
}

/* What a unit has counted for the backwards `seed`, which left the replicas alone, and the next. */
static void check_traffic(const world *w, size_t u, const fc_traffic *before, int seed)
{
    const fc_traffic *now = fc_reduction_traffic(w->owners[u].reduction);
    const uint64_t n_shards = (uint64_t)w->n_shards;
    const uint64_t n_replicas = (uint64_t)w->n_ranks / n_shards;
    uint64_t reduced = 0, all_reduced = 0, copied = 0;

    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_param *p = &fc_unit_layout(w->owners[u].shard)->params[i];
        const uint64_t item = fc_dtype_bytes(p->reduce);
        const uint64_t own = p->own_rows * p->inner * item, chunk = p->chunk_numel * item;

        for (int s = seed; s <= seed + 1; s++) {
            if (!is_missing(w, s, w->rank, i)) {
                reduced += (n_shards - 1) * own;
                copied += p->rows * p->inner * item;
            }
        }
        all_reduced += is_in_group(w, seed, i) || is_in_group(w, seed + 1, i) ? own : 0;
        if (w->n_domains > 1) { /* kept, and added to the next one */
            copied += is_in_group(w, seed, i) ? 2 * chunk : 0;
            copied += is_in_group(w, seed + 1, i) && w->of->shards_are_mapped ? chunk : 0;
        }
    }
    CHECK_EQ(now->reduced - before->reduced, reduced);
    CHECK_EQ(now->copied - before->copied, copied);
    CHECK_EQ(now->all_reductions - before->all_reductions, n_replicas > 1);
    CHECK_EQ(now->all_reduced - before->all_reduced,
             n_replicas > 1 ? 2 * (n_replicas - 1) * all_reduced / n_replicas : 0);
    if (w->of->batch_limit == 0) {
        CHECK_EQ(now->reductions - before->reductions, n_shards > 1 ? 2 : 0);
    }
}

/* The first backward of two: without the replicas. */
static void take_first(world *w, int seed)
{
    forward(w);
    CHECK_OK(backward(w, seed, false));
    close_all(w);
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_reduction *r = w->owners[u].reduction;

        CHECK_EQ(fc_reduction_has_sums(r), w->n_domains > 1);
        CHECK_EQ(w->owners[u].has[0], w->n_domains == 1); /* else nothing is written yet */
        CHECK(!fc_reduction_is_submitted(r));
        for (size_t i = 0; i < N_PARAMS && w->n_domains > 1; i++) {
            CHECK_EQ(fc_reduction_has_sum(r, i), is_in_group(w, seed, i));
            CHECK_EQ(fc_reduction_sum(r, i) != NULL, is_in_group(w, seed, i));
        }
    }
}

/* Backwards that add up, in one another's sums or between replicas, which wait for the second. */
static void body_steps(int rank, int n_ranks, void *arg)
{
    fc_traffic before[N_UNITS];
    world w;

    join(&w, rank, n_ranks, arg);
    for (int step = 0; step < N_STEPS; step++) {
        const int n_all_sums = w.channels[1].n_all_sums;
        int n_expected = 0;

        for (size_t u = 0; u < N_UNITS; u++) {
            before[u] = *fc_reduction_traffic(w.owners[u].reduction);
            /* What waits of a frozen parameter travels with the next one. */
            n_expected += (u == MIXED ? 2 : 1) + (step % 3 != 1);
        }
        if (rank % 2 == 1) {
            (void)usleep(500); /* the others wait */
        }
        take_first(&w, step);
        CHECK_EQ(w.channels[1].n_all_sums, n_all_sums);
        forward(&w);
        CHECK_OK(backward(&w, step + 1, true));
        close_all(&w);
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK(!fc_reduction_has_sums(w.owners[u].reduction));
            CHECK_EQ(fc_reduction_is_submitted(w.owners[u].reduction), w.n_domains == 1);
            fc_reduction_forget(w.owners[u].reduction);
            CHECK(!fc_reduction_is_submitted(w.owners[u].reduction));
            check_traffic(&w, u, &before[u], step);
        }
        CHECK_EQ(w.channels[1].n_all_sums - n_all_sums,
                 n_ranks > w.n_shards || (w.n_domains > 1 && w.of->is_packed) ? n_expected : 0);
        check_sums(&w, step, step + 1);
    }
    leave(&w);
}

/* Sums that wait pass to the reduction that comes next, or are dropped; with those of parameters
 * that were frozen, which one rank alone has. */
static void body_inherited(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, arg);
    for (int drops = 0; drops < 2; drops++) {
        int n_all_sums;

        take_first(&w, 0);
        for (size_t u = 0; u < N_UNITS; u++) {
            owner *o = &w.owners[u];
            fc_reduction *former = o->reduction;

            CHECK_OK(fc_reduction_create(o->shard, fc_domain_unit(w.domains[1], u), w.slots, &ops,
                                         &o->reduction));
            fc_reduction_attach(o->reduction, o);
            CHECK_OK(fc_reduction_inherit(o->reduction, former));
            fc_reduction_destroy(former);
            if (drops != 0) {
                fc_reduction_drop_sums(o->reduction);
            }
        }
        n_all_sums = w.channels[1].n_all_sums;
        forward(&w);
        CHECK_OK(backward(&w, 1, true));
        close_all(&w);
        /* One of each type, and of each unit's frozen ones. */
        CHECK_EQ(w.channels[1].n_all_sums - n_all_sums, 1 + 1 + 2 + (drops != 0 ? 0 : N_UNITS));
        check_sums(&w, drops, 1);
    }
    leave(&w);
}

/* Small units share a sum until one comes that cannot, or until the end. */
static void body_batches(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, arg);
    w.all_reduce = true;
    forward(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 0, 1));
    CHECK_OK(submit(&w, 1, 1));
    CHECK_OK(fc_reduction_finish_ready(w.domains[0], FC_SEARCH_OLDEST));
    CHECK_EQ(w.channels[0].n_sums, 0);
    CHECK_OK(submit(&w, MIXED, 1));
    CHECK_EQ(w.channels[0].n_sums, 1 + 2); /* of the two, and one for each type */
    CHECK(w.owners[0].has[0] && w.owners[1].has[0] && w.owners[MIXED].has[0]);
    CHECK_OK(submit(&w, 1, 4));
    CHECK_OK(submit(&w, 0, 3)); /* one that is trained now, and was not at first, travels alone */
    CHECK_EQ(w.channels[0].n_sums, 4 + 2);
    CHECK_OK(submit(&w, 1, 2));
    fc_reduction_attach(w.owners[MIXED].reduction, NULL);
    CHECK_OK(fc_reduction_finish_all(w.domains, 1));
    CHECK_EQ(w.channels[0].n_sums, 7);
    close_all(&w);
    check_sum(&w, MIXED, 0, 1, 1);
    for (size_t u = 0; u < N_UNITS; u++) { /* a batch counts for its first unit */
        CHECK_EQ(fc_reduction_traffic(w.owners[u].reduction)->reductions, u == MIXED ? 1 : 2);
    }
    check_sum(&w, 0, FROZEN, 3, 3);
    memset(w.owners[1].has, 0, sizeof(w.owners[1].has));
    forward(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 1, 5));
    fc_reduction_attach(w.owners[1].reduction, NULL); /* its owner goes meanwhile */
    CHECK_OK(submit(&w, 0, 5));
    CHECK_OK(fc_reduction_finish_all(w.domains, 1));
    CHECK(!w.owners[1].has[0]);
    close_all(&w);
    leave(&w);
}

/* Whatever fails first is told, nothing is asked for after it, and the next step is right. */
static void body_failing(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_ERR_INTERRUPTED;
    int n_failures = 0;
    world w;

    join(&w, rank, n_ranks, arg);
    while (st != FC_OK) {
        forward(&w);
        calls_left = n_failures;
        st = backward(&w, 2, false);
        if (st == FC_OK) {
            close_all(&w);
            forward(&w);
            st = backward(&w, 3, true);
        }
        CHECK_EQ(st, has_failed ? FC_ERR_INTERRUPTED : FC_OK);
        calls_left = -1;
        has_failed = false;
        if (st == FC_OK) {
            close_all(&w);
            check_sums(&w, 2, 3);
            continue;
        }
        CHECK_STR(fc_last_message(), "it fails");
        atomic_fetch_add(&ranks_common->values[0], 1); /* before peers see that this one left */
        CHECK(ranks_await(0, (n_failures + 1) * n_ranks));
        for (size_t d = 0; d < w.n_domains; d++) {
            fc_domain_fail(w.domains[d]);
            fc_exchange_reset(w.domains[d]);
        }
        for (size_t u = 0; u < N_UNITS; u++) {
            fc_reduction_drop_sums(w.owners[u].reduction);
            memset(w.owners[u].has, 0, sizeof(w.owners[u].has));
        }
        n_failures++;
    }
    CHECK(n_failures > 20);
    leave(&w);
}

/* Where nobody counts who has which parameters, ranks that differ are told so. */
static void body_differing(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, arg);
    forward(&w);
    open(&w, FC_PHASE_BACKWARD);
    w.all_reduce = true;
    CHECK_OK(submit(&w, 0, 2));
    CHECK_EQ(submit(&w, 1, 2 + rank), FC_ERR_MISMATCH); /* odd ones have no second parameter */
    CHECK_HAS(fc_last_message(), "with gradients of different parameters");
    CHECK_HAS(fc_last_message(),
              w.n_domains > 1 ? "all-reduce of unit second" : "reduce-scatter of unit second");
    leave(&w);
}

/* Every other rank leaves the backward while its peer in shared memory waits for its gradients. */
static void body_left(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, arg);
    forward(&w);
    open(&w, FC_PHASE_BACKWARD);
    if (rank % 2 == 1) {
        (void)usleep(2000);
    } else {
        CHECK_EQ(submit(&w, 1, 2), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "rank 11 left the backward of step 1");
        CHECK_HAS(fc_last_message(), "reduce-scatter of unit second");
    }
    for (size_t d = 0; d < w.n_domains; d++) {
        fc_domain_fail(w.domains[d]);
    }
    leave(&w);
}

/* Sums that a device makes: which parameters are in them, and whether to the end. */
static void body_announced(int rank, int n_ranks, void *arg)
{
    static const float one = 1;
    fc_gradient first[N_PARAMS] = {{.data = &one}, {.data = NULL}};
    fc_gradient second[N_PARAMS] = {{.data = NULL}, {.data = &one}};
    fc_reduce_options options = {DIVISOR, false, false, false};
    uint64_t mask = 0, print = 0, print_of_second = 0, print_of_both = 0;
    const bool has_replicas = n_ranks > ((const setup *)arg)->n_shards;
    fc_reduction *r;
    world w;

    join(&w, rank, n_ranks, arg);
    r = w.owners[0].reduction;
    CHECK_EQ(fc_reduction_announce(r, first, &options, &mask, &print), !has_replicas);
    CHECK_EQ(mask, 1);
    CHECK_EQ(fc_reduction_has_sums(r), has_replicas);
    CHECK(fc_reduction_sum(r, 0) == NULL); /* it lies there */
    CHECK(!fc_reduction_is_submitted(r));
    options.all_reduce = true;
    CHECK(fc_reduction_announce(r, second, &options, &mask, &print_of_both));
    CHECK_EQ(mask, has_replicas ? 3 : 2);
    CHECK(!fc_reduction_has_sums(r) && !fc_reduction_is_submitted(r));
    CHECK(fc_reduction_announce(r, second, &options, &mask, &print_of_second));
    CHECK_EQ(mask, 2);
    CHECK(print_of_second != print && (print_of_second == print_of_both) != has_replicas);
    CHECK_EQ(fc_reduction_traffic(r)->reductions, 3);
    leave(&w);
}

/* More parameters than there are bits in a word. */
static void body_many(int rank, int n_ranks, void *arg)
{
    enum {
        N_MANY = 70
    };
    static const float one = 1;
    const fc_reduce_options keep = {DIVISOR, false, false, false};
    fc_param params[N_MANY];
    const fc_unit_desc desc = {"many", params, N_MANY};
    uint64_t mask[2], other_mask[2], print, other_print;
    fc_transport_config config;
    fc_transport *transport = NULL;
    fc_domain *domains[2] = {NULL};
    fc_reduction *r = NULL, *next = NULL;
    ranks_host host;

    (void)arg;
    config = ranks_config(&host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    CHECK_OK(fc_shm_create(&config, &transport));
    for (size_t i = 0; i < N_MANY; i++) {
        params[i] = make_param(1, 1, 1, FC_F32, true);
    }
    for (int d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_create(transport, d == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE, &desc,
                                  1, 0, 1, &domains[d]));
    }
    CHECK_OK(fc_reduction_create(fc_domain_unit(domains[0], 0), fc_domain_unit(domains[1], 0), NULL,
                                 &ops, &r));
    CHECK_OK(fc_reduction_create(fc_domain_unit(domains[0], 0), fc_domain_unit(domains[1], 0), NULL,
                                 &ops, &next));
    for (size_t i = 0; i < N_MANY; i++) {
        fc_gradient grads[N_MANY] = {{.data = NULL}};

        grads[i].data = &one;
        CHECK(!fc_reduction_announce(r, grads, &keep, mask, &print));
        CHECK(mask[i / 64] == UINT64_C(1) << i % 64 && mask[1 - i / 64] == 0);
        CHECK(fc_reduction_has_sums(r) && fc_reduction_has_sum(r, i));
        CHECK_OK(fc_reduction_inherit(next, r));
        CHECK(fc_reduction_has_sum(next, i) && fc_reduction_sum(next, i) == NULL);
        fc_reduction_drop_sums(r);
        CHECK(!fc_reduction_has_sums(r) && !fc_reduction_has_sum(r, i));
        CHECK_OK(fc_reduction_inherit(next, r)); /* of which there is nothing to take */
        CHECK(fc_reduction_has_sum(next, i));
        grads[i].data = NULL;
        grads[(i + 1) % N_MANY].data = &one;
        CHECK(!fc_reduction_announce(r, grads, &keep, other_mask, &other_print));
        CHECK(print != other_print);
        fc_reduction_drop_sums(r);
    }
    fc_reduction_destroy(r);
    fc_reduction_destroy(next);
    fc_domain_destroy(domains[1]);
    fc_domain_destroy(domains[0]);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A root is visible if any domain is. */
static void body_visible(int rank, int n_ranks, void *arg)
{
    fc_root_course root = {0};
    fc_root_unit unit;
    world w;

    join(&w, rank, n_ranks, arg);
    fc_root_unit_init(&unit);
    unit.reduction = w.owners[0].reduction;
    CHECK_EQ(fc_root_unit_options(&unit, 0).divisor, w.of->is_packed ? 1 : n_ranks);
    root.domains = w.domains;
    CHECK(!fc_root_is_visible(&root));
    for (root.n_domains = 1; root.n_domains <= w.n_domains; root.n_domains++) {
        CHECK_EQ(fc_root_is_visible(&root),
                 w.of->is_packed && (!w.of->shards_are_mapped || root.n_domains > 1));
    }
    leave(&w);
}

int main(void)
{
    static setup pair = {2, false, false, 0, false}, three = {3, false, false, 0, false};
    static setup batched = {2, false, false, 4096, false}, replicas = {1, false, false, 0, false};
    static setup in_memory = {2, true, false, 0, false};
    static setup packed_pair = {2, false, true, 0, false},
                 packed_replicas = {1, false, true, 0, false};
    static setup packed_behind = {2, true, true, 0, false};
    static setup lone = {2, false, false, 0, true}, lone_packed = {2, false, true, 0, true};
    static setup lone_in_memory = {2, true, false, 0, true};
    static const struct {
        int n_ranks;
        setup *of;
    } all[] = {{2, &pair},
               {3, &three},
               {2, &batched},
               {2, &replicas},
               {3, &replicas},
               {4, &pair},
               {4, &in_memory},
               {2, &packed_pair},
               {4, &packed_pair},
               {2, &packed_replicas},
               {1, &packed_replicas},
               {2, &lone},
               {2, &lone_packed},
               {2, &lone_in_memory}};

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        ranks_check(all[i].n_ranks, body_steps, all[i].of);
    }
    ranks_check(2, body_inherited, &replicas);
    ranks_check(4, body_inherited, &pair);
    ranks_check(4, body_inherited, &in_memory);
    ranks_check(2, body_batches, &batched);
    ranks_check(2, body_failing, &pair);
    ranks_check(2, body_failing, &batched);
    ranks_check(2, body_failing, &replicas);
    ranks_check(4, body_failing, &pair);
    ranks_check(4, body_failing, &in_memory);
    ranks_check(2, body_differing, &packed_pair);
    ranks_check(2, body_differing, &packed_replicas);
    ranks_check(4, body_left, &in_memory);
    ranks_check(2, body_announced, &pair);
    ranks_check(4, body_announced, &pair);
    ranks_check(1, body_many, NULL);
    ranks_check(2, body_visible, &pair);
    ranks_check(2, body_visible, &packed_pair);
    ranks_check(4, body_visible, &packed_behind);
    return check_result();
}
