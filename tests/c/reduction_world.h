/* Two units of one rank with their reductions, and who owns these; their gradients, which every
 * rank can compute. */
#ifndef REDUCTION_WORLD_H
#define REDUCTION_WORLD_H

#include "domains.h"
#include "guarded.h"

#include "engine/reduction.h"

#define N_UNITS 2
#define N_PARAMS 2
#define ROWS 9
#define COLUMNS 4000
#define NUMEL (ROWS * COLUMNS)
#define N_STEPS 6
/* A submission: its numbers, and behind them the list. */
#define NUMBERS_BYTES (N_PARAMS * NUMEL * sizeof(float))
#define SUBMITTED_BYTES (NUMBERS_BYTES + N_PARAMS * sizeof(fc_gradient))

static const size_t rows_of[N_PARAMS] = {ROWS, 5};
static const size_t inner_of[N_PARAMS] = {COLUMNS, 3};

/* One unit of one rank; what owns its reductions. */
typedef struct owner {
    fc_reduction *reduction;
    fc_unit *shard;
    float sums[N_PARAMS][NUMEL]; /* the shards' gradients */
    bool has[N_PARAMS], is_frozen[N_PARAMS];
    float *flat; /* owned */
    bool all_reduce, is_waiting;
    double divisor;
    int n_waits;
} owner;

typedef struct world {
    ranks_host hosts[2];
    fc_transport *transports[2];
    fc_domain *domains[2];
    size_t n_domains;
    fc_slots *slots;
    owner owners[N_UNITS];
    int rank, n_shards;
} world;

static int n_submitted, n_released;
static int calls_left = -1; /* of owners until one fails; negative: none does */
static bool has_failed;
static void (*meanwhile)(void); /* what another thread does while the next one waits for room */

/* ---- the owner ---- */

/* Nothing is asked for behind a failure. */
static inline fc_status take_turn(void)
{
    CHECK(!has_failed);
    if (calls_left == 0) {
        has_failed = true;
        return fc_fail(FC_ERR_INTERRUPTED, "the owner fails");
    }
    calls_left -= calls_left > 0;
    return FC_OK;
}

static inline fc_status get_options(void *of, fc_reduce_options *out)
{
    const owner *o = of;

    *out = (fc_reduce_options){o->divisor, o->all_reduce, false, false};
    return take_turn();
}

static inline fc_status get_flat(void *of, void **out)
{
    owner *o = of;

    *out = o->has[0] || o->has[1] ? NULL : o->flat;
    return take_turn();
}

static inline fc_status assign(void *of, size_t param, const fc_reduce_options *options)
{
    owner *o = of;

    CHECK(options->divisor == o->divisor && options->all_reduce == o->all_reduce);
    FC_TRY(take_turn());
    o->has[param] = true;
    return FC_OK;
}

static inline fc_status assign_flat(void *of, const fc_reduce_options *options)
{
    owner *o = of;
    const fc_layout *layout = fc_unit_layout(o->shard);

    CHECK(!o->has[0] && !o->has[1]);
    for (size_t i = 0; i < N_PARAMS; i++) {
        memcpy(o->sums[i], (char *)o->flat + layout->params[i].grad_at,
               layout->params[i].chunk_numel * sizeof(float));
        FC_TRY(assign(of, i, options));
    }
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

static inline void release(void *memory)
{
    n_released++;
    guarded_destroy(memory, SUBMITTED_BYTES);
}

static inline void wait_for_room(void *of, bool begins)
{
    owner *o = of;
    void (*const other)(void) = meanwhile;

    CHECK(o->is_waiting != begins);
    o->is_waiting = begins;
    o->n_waits += begins;
    meanwhile = NULL;
    if (other != NULL) {
        other();
    }
}

static inline size_t find_frozen(void *of, size_t from)
{
    const owner *o = of;

    while (from < N_PARAMS && !o->is_frozen[from]) {
        from++;
    }
    return from;
}

static inline void name_param(void *of, size_t param, char *out, size_t bytes)
{
    (void)of;
    (void)snprintf(out, bytes, "p%zu", param);
}

static const fc_reduction_ops ops = {get_options, get_flat, assign_flat,   prepare,     get_target,
                                     assign,      release,  wait_for_room, find_frozen, name_param};

/* ---- the world ---- */

static inline void attach(world *w, size_t u)
{
    owner *o = &w->owners[u];

    CHECK_OK(fc_reduction_create(o->shard,
                                 w->n_domains > 1 ? fc_domain_unit(w->domains[1], u) : NULL,
                                 w->slots, &ops, &o->reduction));
    fc_reduction_attach(o->reduction, o);
}

/* `n_shards` negative: so many, with a replica even where there is no other one. */
static inline void join(world *w, int rank, int n_ranks, int of)
{
    const int n_shards = of < 0 ? -of : of;
    fc_param params[N_PARAMS];
    fc_unit_desc units[N_UNITS] = {{"first", params, N_PARAMS}, {"second", params, N_PARAMS}};
    const int n_replicas = n_ranks / n_shards;

    (void)alarm(DOMAINS_WATCHDOG_S);
    *w = (world){.rank = rank, .n_shards = n_shards, .n_domains = n_replicas > 1 || of < 0 ? 2 : 1};
    n_submitted = n_released = 0;
    CHECK_OK(fc_slots_create(&w->slots));
    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = make_param(1, rows_of[i], inner_of[i], FC_F32, true);
    }
    for (size_t d = 0; d < w->n_domains; d++) {
        /* Ranks that follow one another share a unit; boards 0 and 1, then 2 and 3. */
        const int board = (int)d * 2 + (d == 0 ? rank / n_shards : rank % n_shards);
        const int place = d == 0 ? rank % n_shards : rank / n_shards;
        fc_transport_config config = ranks_config(
            &w->hosts[d], board, place, d == 0 ? n_shards : n_replicas, DOMAINS_TIMEOUT_NS);

        CHECK_OK(fc_shm_create(&config, &w->transports[d]));
        CHECK_OK(fc_domain_create(w->transports[d], d == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE,
                                  units, N_UNITS, rank % n_shards, n_shards, &w->domains[d]));
    }
    fc_domain_link(w->domains, w->n_domains);
    for (size_t u = 0; u < N_UNITS; u++) {
        owner *o = &w->owners[u];

        o->shard = fc_domain_unit(w->domains[0], u);
        o->flat = malloc(fc_unit_layout(o->shard)->grad_bytes);
        o->divisor = 2;
        CHECK_OR_EXIT(o->flat != NULL);
        attach(w, u);
    }
}

static inline void leave(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_reduction_destroy(w->owners[u].reduction);
        free(w->owners[u].flat);
    }
    for (size_t d = w->n_domains; d-- > 0;) {
        fc_domain_destroy(w->domains[d]);
        fc_transport_destroy(w->transports[d]);
    }
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

/* Whole numbers, so that sums do not depend on their order. */
static inline float value_of(int seed, int rank, size_t unit, size_t param, size_t index)
{
    return (float)((seed * 5 + rank * 3 + (int)unit * 2 + (int)param + (int)(index % 97)) % 64);
}

/* Rank 1 has no gradient of the second parameter in odd backwards. */
static inline bool is_missing(int seed, int rank, size_t param)
{
    return seed % 2 == 1 && rank == 1 && param == 1;
}

/* The list lies behind the numbers, and goes with them. `types`: of the gradients, NULL: all of
 * type float32. */
static inline fc_status submit_of(world *w, size_t u, int seed, bool is_exclusive,
                                  const fc_dtype *types)
{
    const owner *o = &w->owners[u];
    const fc_reduce_options options = {o->divisor, o->all_reduce, false, false};
    char *memory = guarded_create(SUBMITTED_BYTES);
    fc_gradient *grads = (fc_gradient *)(void *)(memory + NUMBERS_BYTES);
    static float full[NUMEL];

    for (size_t i = 0; i < N_PARAMS; i++) {
        const size_t numel = rows_of[i] * inner_of[i];
        char *data = memory + i * NUMEL * sizeof(float);

        for (size_t k = 0; k < numel; k++) {
            full[k] = value_of(seed, w->rank, u, i, k);
        }
        grads[i] = (fc_gradient){.dtype = types != NULL ? types[i] : FC_F32,
                                 .is_exclusive = is_exclusive,
                                 .is_wanted = true};
        if (!is_missing(seed, w->rank, i)) {
            fc_kern_cast(FC_F32, grads[i].dtype)(data, full, numel);
            grads[i].data = data;
        }
    }
    n_submitted++;
    return fc_reduction_submit(o->reduction, grads, memory, &options);
}

static inline fc_status submit(world *w, size_t u, int seed, bool is_exclusive)
{
    return submit_of(w, u, seed, is_exclusive, NULL);
}

/* Sums of the backwards `from` to `to`, times `scale`. */
static inline void check_sums(const world *w, size_t u, int from, int to, int n_ranks, float scale)
{
    const owner *o = &w->owners[u];

    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_param *p = &fc_unit_layout(o->shard)->params[i];
        const size_t first = (size_t)(w->rank % w->n_shards) * p->chunk_rows * p->inner;

        for (size_t k = 0; k < p->own_rows * p->inner; k++) {
            float wanted = 0;

            for (int seed = from; seed <= to; seed++) {
                for (int r = 0; r < n_ranks; r++) {
                    wanted += is_missing(seed, r, i) ? 0 : value_of(seed, r, u, i, first + k);
                }
            }
            if (o->sums[i][k] != wanted * scale) {
                CHECK_MSG(false, "rank %d unit %zu param %zu [%zu]: %g, not %g", w->rank, u, i, k,
                          (double)o->sums[i][k], (double)(wanted * scale));
                return;
            }
        }
    }
}

/* Both units; gradients are let go at the end at the latest. */
static inline fc_status backward(world *w, int seed, bool is_exclusive)
{
    open(w, FC_PHASE_BACKWARD);
    for (size_t u = 0; u < N_UNITS; u++) {
        const bool is_borrowed = is_exclusive && w->n_shards > 1;

        FC_TRY(submit(w, u, seed, is_exclusive));
        CHECK_EQ(n_released, n_submitted - is_borrowed); /* the next one returns the last */
    }
    FC_TRY(fc_reduction_finish_all(w->domains, w->n_domains));
    CHECK_EQ(n_released, n_submitted);
    close_all(w);
    return FC_OK;
}

static inline void forget(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        memset(w->owners[u].has, 0, sizeof(w->owners[u].has));
    }
}

static inline void set_all_reduce(world *w, bool all_reduce)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        w->owners[u].all_reduce = all_reduce;
    }
}

#endif
