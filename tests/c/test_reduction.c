/* Reductions: sums over shards and replicas, those that wait, borrowed gradients, failing owners.
 */
#define _GNU_SOURCE

#include "domains.h"

#include "engine/reduction.h"

#define N_UNITS 2
#define N_PARAMS 2
#define ROWS 9
#define COLUMNS 4000
#define NUMEL (ROWS * COLUMNS)
#define N_STEPS 6

static const size_t rows_of[N_PARAMS] = {ROWS, 5};
static const size_t inner_of[N_PARAMS] = {COLUMNS, 3};

/* One unit of one rank; what owns its reductions. */
typedef struct owner {
    fc_reduction *reduction;
    fc_unit *shard;
    float sums[N_PARAMS][NUMEL]; /* the shards' gradients */
    bool has[N_PARAMS];
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

/* ---- the owner ---- */

/* Nothing is asked for behind a failure. */
static fc_status take_turn(void)
{
    CHECK(!has_failed);
    if (calls_left == 0) {
        has_failed = true;
        return fc_fail(FC_ERR_INTERRUPTED, "the owner fails");
    }
    calls_left -= calls_left > 0;
    return FC_OK;
}

static fc_status get_options(void *of, fc_reduce_options *out)
{
    const owner *o = of;

    *out = (fc_reduce_options){o->divisor, o->all_reduce, false, false};
    return take_turn();
}

static fc_status get_flat(void *of, void **out)
{
    owner *o = of;

    *out = o->has[0] || o->has[1] ? NULL : o->flat;
    return take_turn();
}

static fc_status assign(void *of, size_t param, const fc_reduce_options *options)
{
    owner *o = of;

    CHECK(options->divisor == o->divisor && options->all_reduce == o->all_reduce);
    FC_TRY(take_turn());
    o->has[param] = true;
    return FC_OK;
}

static fc_status assign_flat(void *of, const fc_reduce_options *options)
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

static void release(void *memory)
{
    n_released++;
    free(memory);
}

static void wait_for_room(void *of, bool begins)
{
    owner *o = of;

    CHECK(o->is_waiting != begins);
    o->is_waiting = begins;
    o->n_waits += begins;
}

static const fc_reduction_ops ops = {get_options, get_flat, assign_flat, prepare,
                                     get_target,  assign,   release,     wait_for_room};

/* ---- the world ---- */

static void attach(world *w, size_t u)
{
    owner *o = &w->owners[u];

    CHECK_OK(fc_reduction_create(o->shard,
                                 w->n_domains > 1 ? fc_domain_unit(w->domains[1], u) : NULL,
                                 w->slots, &ops, &o->reduction));
    fc_reduction_attach(o->reduction, o);
}

/* `n_shards` negative: so many, with a replica even where there is no other one. */
static void join(world *w, int rank, int n_ranks, int of)
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

static void leave(world *w)
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

/* Whole numbers, so that sums do not depend on their order. */
static float value_of(int seed, int rank, size_t unit, size_t param, size_t index)
{
    return (float)((seed * 5 + rank * 3 + (int)unit * 2 + (int)param + (int)(index % 97)) % 64);
}

/* Rank 1 has no gradient of the second parameter in odd backwards. */
static bool is_missing(int seed, int rank, size_t param)
{
    return seed % 2 == 1 && rank == 1 && param == 1;
}

/* The list lies behind the numbers, and goes with them. `types`: of the gradients, NULL: all of
 * type float32. */
static fc_status submit_of(world *w, size_t u, int seed, bool is_exclusive, const fc_dtype *types)
{
    const owner *o = &w->owners[u];
    const fc_reduce_options options = {o->divisor, o->all_reduce, false, false};
    char *memory = malloc(N_PARAMS * NUMEL * sizeof(float) + N_PARAMS * sizeof(fc_gradient));
    fc_gradient *grads = (fc_gradient *)(void *)(memory + N_PARAMS * NUMEL * sizeof(float));
    static float full[NUMEL];

    CHECK_OR_EXIT(memory != NULL);
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

static fc_status submit(world *w, size_t u, int seed, bool is_exclusive)
{
    return submit_of(w, u, seed, is_exclusive, NULL);
}

/* Sums of the backwards `from` to `to`, times `scale`. */
static void check_sums(const world *w, size_t u, int from, int to, int n_ranks, float scale)
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
static fc_status backward(world *w, int seed, bool is_exclusive)
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

static void forget(world *w)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        memset(w->owners[u].has, 0, sizeof(w->owners[u].has));
    }
}

static void set_all_reduce(world *w, bool all_reduce)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        w->owners[u].all_reduce = all_reduce;
    }
}

/* ---- programs ---- */

/* Backwards that add up, into one another's sums or over replicas that wait for the second. */
static void body_steps(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    for (int step = 0; step < N_STEPS; step++) {
        const bool is_exclusive = step % 3 == 0;

        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        set_all_reduce(&w, false);
        CHECK_OK(backward(&w, step, is_exclusive));
        CHECK_EQ(fc_reduction_has_sums(w.owners[0].reduction), w.n_domains > 1);
        if (w.n_domains > 1) {
            CHECK(!w.owners[0].has[0]); /* nothing is written yet */
        } else {
            check_sums(&w, 0, step, step, n_ranks, 0.5F);
        }
        set_all_reduce(&w, true);
        CHECK_OK(backward(&w, step + 1, is_exclusive));
        CHECK(!fc_reduction_has_sums(w.owners[0].reduction));
        for (size_t u = 0; u < N_UNITS; u++) {
            check_sums(&w, u, step, step + 1, n_ranks, 0.5F);
        }
        forget(&w);
    }
    leave(&w);
}

/* Sums that wait pass to the reduction that comes next, or are dropped. */
static void body_inherit(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    set_all_reduce(&w, false);
    CHECK_OK(backward(&w, 2, false));
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_reduction *former = w.owners[u].reduction;

        attach(&w, u);
        CHECK_EQ(fc_reduction_sum_bytes(w.owners[u].reduction), 0);
        CHECK_OK(fc_reduction_inherit(w.owners[u].reduction, former));
        CHECK(fc_reduction_sum_bytes(w.owners[u].reduction) > 0);
        CHECK(fc_reduction_sum(w.owners[u].reduction, 1) != NULL);
        fc_reduction_destroy(former);
    }
    fc_reduction_drop_sums(w.owners[1].reduction);
    fc_reduction_trim(w.owners[1].reduction);
    fc_reduction_trim(w.owners[0].reduction);
    CHECK_EQ(fc_reduction_sum_bytes(w.owners[1].reduction), 0);
    set_all_reduce(&w, true);
    CHECK_OK(backward(&w, 3, false));
    check_sums(&w, 0, 2, 3, n_ranks, 0.5F);
    check_sums(&w, 1, 3, 3, n_ranks, 0.5F);
    leave(&w);
}

/* An owner that fails ends the phase; nothing is leaked, and the next step is right. */
static void body_failing(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_ERR_INTERRUPTED;
    int n_failures = 0;
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    while (st != FC_OK) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        calls_left = n_failures;
        st = backward(&w, n_failures % 2, true);
        CHECK_EQ(st, has_failed ? FC_ERR_INTERRUPTED : FC_OK);
        calls_left = -1;
        if (has_failed) {
            n_failures++;
            /* Before peers see that this one has left. */
            atomic_fetch_add(&ranks_common->values[0], 1);
            CHECK(ranks_await(0, n_failures * n_ranks));
            for (size_t d = 0; d < w.n_domains; d++) {
                fc_domain_fail(w.domains[d]);
                fc_exchange_reset(w.domains[d]);
            }
            CHECK_EQ(n_released, n_submitted);
        }
        has_failed = false;
        for (size_t u = 0; u < N_UNITS; u++) {
            fc_reduction_drop_sums(w.owners[u].reduction);
        }
        forget(&w);
    }
    CHECK(n_failures >= 4);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    CHECK_OK(backward(&w, 4, true));
    check_sums(&w, 0, 4, 4, n_ranks, 0.5F);
    check_sums(&w, 1, 4, 4, n_ranks, 0.5F);
    leave(&w);
}

/* Whatever memory there is none for is told, and nothing of it is left. */
static void body_no_memory(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_ERR_NOMEM;
    fc_reduction *unmade = NULL;
    int n_failures = 0;
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    for (int n = 0; n < 2; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_reduction_create(w.owners[0].shard, NULL, w.slots, &ops, &unmade),
                 FC_ERR_NOMEM);
        CHECK_HAS(fc_last_message(), "no memory for the reductions of unit 'first'");
    }
    for (int n = 0; st != FC_OK; n++) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        set_all_reduce(&w, false);
        fc_alloc_fail_after(n);
        st = submit_of(&w, 0, 0, false, (fc_dtype[]){FC_BF16, FC_BF16});
        st = st == FC_OK ? fc_reduction_finish_all(w.domains, w.n_domains) : st;
        fc_alloc_fail_after(-1);
        atomic_fetch_add(&ranks_common->values[1], 1);
        CHECK(ranks_await(1, (n + 1) * n_ranks));
        if (st != FC_OK) {
            CHECK_EQ(st, FC_ERR_NOMEM);
            n_failures++;
            for (size_t d = 0; d < w.n_domains; d++) {
                fc_domain_fail(w.domains[d]);
            }
            CHECK_EQ(n_released, n_submitted);
            fc_reduction_drop_sums(w.owners[0].reduction);
        } else {
            close_all(&w);
        }
    }
    CHECK_EQ(n_failures > 0, n_ranks > w.n_shards || w.n_domains > 1);
    set_all_reduce(&w, true);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    forget(&w);
    fc_reduction_drop_sums(w.owners[0].reduction);
    CHECK_OK(backward(&w, 2, false));
    check_sums(&w, 0, 2, 2, n_ranks, 0.5F);
    leave(&w);
}

static fc_status note_flat(void *of, const fc_reduce_options *options)
{
    (void)options;
    ((owner *)of)->has[0] = true;
    return FC_OK;
}

/* Of a unit whose gradients are left in the buffer. */
static const fc_reduction_ops flat_ops = {get_options, get_flat, note_flat, prepare,
                                          get_target,  assign,   release,   wait_for_room};

/* Gradients travel in their own type where all have the same; else in that of the reduction. */
static void body_types(int rank, int n_ranks, void *arg)
{
    static const fc_dtype types[][N_PARAMS] = {
        {FC_F32, FC_F32}, {FC_BF16, FC_BF16}, {FC_BF16, FC_F32}, {FC_F32, FC_BF16}};
    static const size_t item_of[] = {4, 2, 4, 4}; /* as they travel */
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    for (int i = 0; i < 16; i++) {
        const fc_dtype *type = types[i % 4];
        const bool is_exclusive = i >= 8, is_alone = n_ranks == 1;
        const int seed = i / 4;
        const bool is_borrowed =
            is_exclusive && w.n_shards > 1 && (i % 4 < 2 || is_missing(seed, rank, 1));
        const fc_traffic before = *fc_reduction_traffic(w.owners[0].reduction);
        fc_traffic now;
        const size_t n_replicas = (size_t)(n_ranks / w.n_shards);
        size_t copied = 0, reduced = 0, all_reduced = 0;

        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        CHECK_OK(submit_of(&w, 0, seed, is_exclusive, type));
        CHECK_EQ(n_released, n_submitted - is_borrowed);
        CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
        close_all(&w);
        check_sums(&w, 0, seed, seed, n_ranks, 0.5F);
        forget(&w);
        for (size_t k = 0; k < N_PARAMS; k++) {
            const fc_param *p = &fc_unit_layout(w.owners[0].shard)->params[k];
            const size_t rows = p->rows - (is_borrowed ? p->own_rows : 0);
            /* What is missing has no type; alone, what has the reduction's own is not moved. */
            const size_t item = is_missing(seed, rank, 1) && i % 4 == 2 ? 2 : item_of[i % 4];
            const bool stays =
                is_alone && (i % 4 == 0 || (is_missing(seed, rank, 1) && i % 4 == 3));

            /* Of what a rank of its shard group has. */
            if (w.n_shards > 1 || !is_missing(seed, rank, k)) {
                all_reduced += p->own_rows * p->inner * sizeof(float);
            }
            if (!is_missing(seed, rank, k) && !stays) {
                copied += rows * p->inner * (is_alone ? sizeof(float) : item);
            }
            if (!is_missing(seed, rank, k)) {
                reduced += (size_t)(w.n_shards - 1) * p->own_rows * p->inner * sizeof(float);
            }
        }
        now = *fc_reduction_traffic(w.owners[0].reduction);
        if (w.n_domains == 1 || w.n_shards == 1) {
            CHECK_EQ(now.copied - before.copied, copied);
        }
        CHECK_EQ(now.all_reduced - before.all_reduced,
                 n_replicas > 1 ? 2 * (n_replicas - 1) * all_reduced / n_replicas : 0);
        CHECK(!fc_reduction_is_submitted(w.owners[0].reduction) || w.n_domains == 1);
        CHECK_EQ(now.reduced - before.reduced, reduced);
        CHECK_EQ(now.reductions - before.reductions, w.n_shards > 1);
        CHECK_EQ(now.all_reductions - before.all_reductions, n_replicas > 1);
    }
    leave(&w);
}

/* A unit's next submission in a backward waits until the one before it was read; units may be gone
 * by the time that theirs come. */
static void body_repeated(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    for (int step = 0; step < 4; step++) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        for (int seed = 0; seed < 3; seed++) {
            CHECK_OK(submit(&w, 0, seed, step % 2 == 1));
        }
        CHECK_OK(submit(&w, 1, step, step % 2 == 1));
        if (step == 3) {
            fc_reduction_attach(w.owners[1].reduction, NULL);
        }
        CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
        close_all(&w);
        CHECK(!w.owners[0].is_waiting);
        check_sums(&w, 0, 0, 2, n_ranks, 0.5F);
        if (step < 3 || n_ranks == 1) {
            check_sums(&w, 1, step, step, n_ranks, 0.5F);
        } else {
            CHECK(!w.owners[1].has[0]);
        }
        forget(&w);
    }
    CHECK(w.owners[0].n_waits > 0 || n_ranks == 1);
    leave(&w);
}

/* This rank keeps what others reduce: they hear of it. */
static void body_accumulated(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    open(&w, FC_PHASE_BACKWARD);
    if (rank == 0) {
        fc_reduction_accumulate(w.owners[1].reduction);
    } else {
        CHECK_OK(submit(&w, 1, 2, false));
    }
    CHECK_EQ(fc_reduction_finish_all(w.domains, w.n_domains), FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "rank 10 keeps the gradients of unit second");
    leave(&w);
}

/* Backwards of which replica 0 keeps its sums while the others hand theirs on. */
static void body_kept_sums(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, rank >= w.n_shards);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 1, 2, false));
    CHECK_EQ(fc_reduction_finish_all(w.domains, w.n_domains), FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "rank 10 keeps the gradients of unit second");
    leave(&w);
}

/* A borrowed gradient costs no copy of this rank's own part. */
static void body_copies(int rank, int n_ranks, void *arg)
{
    uint64_t copied[2];
    size_t own = 0;
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    for (int i = 0; i < 2; i++) {
        const uint64_t before = fc_reduction_traffic(w.owners[1].reduction)->copied;

        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        CHECK_OK(backward(&w, 2, i == 1));
        copied[i] = fc_reduction_traffic(w.owners[1].reduction)->copied - before;
        forget(&w);
    }
    for (size_t i = 0; i < N_PARAMS; i++) {
        own += fc_unit_layout(w.owners[1].shard)->params[i].own_rows * inner_of[i] * sizeof(float);
    }
    CHECK_EQ(copied[0] - copied[1], own);
    leave(&w);
}

/* Large gradients are given back while backward goes on, small ones never taken. */
static void body_large(int rank, int n_ranks, void *arg)
{
    static const size_t inner_of_case[] = {2048, FC_BORROWED_BYTES_MAX / sizeof(float) / 2,
                                           FC_BORROWED_BYTES_MAX / sizeof(float)};
    const fc_reduce_options options = {1, true, false, false};

    (void)arg;
    for (int i = 0; i < 3; i++) {
        const size_t numel = (size_t)n_ranks * inner_of_case[i];
        fc_param param = make_param(1, (size_t)n_ranks, inner_of_case[i], FC_F32, true);
        const fc_unit_desc desc = {"large", &param, 1};
        static owner o;
        ranks_host host;
        fc_transport_config config = ranks_config(&host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
        fc_transport *transport = NULL;
        fc_domain *domain = NULL;
        fc_slots *slots = NULL;
        float *memory = malloc(numel * sizeof(float) + sizeof(fc_gradient));
        fc_gradient *grad = (fc_gradient *)(void *)(memory + numel);

        CHECK_OR_EXIT(memory != NULL);
        o = (owner){.all_reduce = true, .divisor = 1};
        n_released = 0;
        CHECK_OK(fc_slots_create(&slots));
        CHECK_OK(fc_shm_create(&config, &transport));
        CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, &desc, 1, rank, n_ranks, &domain));
        o.shard = fc_domain_unit(domain, 0);
        o.flat = malloc(fc_unit_layout(o.shard)->grad_bytes);
        CHECK_OR_EXIT(o.flat != NULL);
        CHECK_OK(fc_reduction_create(o.shard, NULL, slots, &flat_ops, &o.reduction));
        fc_reduction_attach(o.reduction, &o);
        fc_domain_open(domain, (fc_opening){.phase = FC_PHASE_FORWARD});
        CHECK_OK(fc_domain_close(domain));
        fc_domain_open(domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
        for (size_t k = 0; k < numel; k++) {
            memory[k] = (float)(k % 97 + (size_t)rank);
        }
        *grad = (fc_gradient){memory, FC_F32, true, true};
        CHECK_OK(fc_reduction_submit(o.reduction, grad, memory, &options));
        CHECK_EQ(n_released, i == 0);
        fc_reduction_return_large(domain);
        CHECK_EQ(n_released, i != 1);
        CHECK_OK(fc_reduction_finish_all(&domain, 1));
        CHECK_EQ(n_released, 1);
        CHECK(o.has[0]);
        for (size_t k = 0; k < inner_of_case[i]; k++) {
            const size_t at = (size_t)rank * inner_of_case[i] + k;
            float wanted = 0;

            for (int r = 0; r < n_ranks; r++) {
                wanted += (float)(at % 97 + (size_t)r);
            }
            if (o.flat[k] != wanted) {
                CHECK_MSG(false, "[%zu]: %g, not %g", k, (double)o.flat[k], (double)wanted);
                break;
            }
        }
        CHECK_OK(fc_domain_close(domain));
        fc_reduction_destroy(o.reduction);
        fc_domain_destroy(domain);
        fc_transport_destroy(transport);
        fc_slots_destroy(slots);
        free(o.flat);
        CHECK_EQ(fc_alloc_live(), 0);
    }
}

int main(void)
{
    static int one = 1, two = 2, three = 3, four = 4, lone_one = -1, lone_two = -2;

    ranks_check(1, body_steps, &one);
    ranks_check(2, body_steps, &two);
    ranks_check(3, body_steps, &three);
    ranks_check(4, body_steps, &four);
    ranks_check(2, body_steps, &one); /* replicas alone */
    ranks_check(4, body_steps, &two);
    ranks_check(2, body_inherit, &one);
    ranks_check(4, body_inherit, &two);
    ranks_check(1, body_failing, &one);
    ranks_check(2, body_failing, &two);
    ranks_check(2, body_failing, &one);
    ranks_check(4, body_failing, &two);
    ranks_check(1, body_steps, &lone_one);
    ranks_check(2, body_steps, &lone_two);
    ranks_check(1, body_no_memory, &lone_one);
    ranks_check(2, body_no_memory, &two);
    ranks_check(2, body_no_memory, &one);
    ranks_check(4, body_no_memory, &two);
    ranks_check(4, body_types, &two);
    ranks_check(2, body_large, NULL);
    ranks_check(1, body_types, &one);
    ranks_check(2, body_types, &one);
    ranks_check(2, body_types, &two);
    ranks_check(3, body_types, &three);
    ranks_check(1, body_repeated, &one);
    ranks_check(2, body_repeated, &one);
    ranks_check(3, body_repeated, &three);
    ranks_check(2, body_accumulated, &two);
    ranks_check(2, body_kept_sums, &one);
    ranks_check(4, body_kept_sums, &two);
    ranks_check(2, body_copies, &two);
    ranks_check(3, body_copies, &three);
    return check_result();
}
