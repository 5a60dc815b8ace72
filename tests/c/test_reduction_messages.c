/* Reductions over messages: batches, types and frozen parameters, replicas behind shards in shared
 * memory or behind messages, and ranks that fail or differ.
 */
#define _GNU_SOURCE

#include "reduction_messages_world.h"

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

/* Of one parameter alone, whichever it is, nothing is written of the others; also where one rank
 * has a gradient of it, if somebody counts who has. */
static void body_one_alone(int rank, int n_ranks, void *arg)
{
    static const fc_reduce_options options = {DIVISOR, true, false, false};
    float ones[NUMEL];
    world w;

    join(&w, rank, n_ranks, arg);
    w.all_reduce = true;
    for (size_t k = 0; k < NUMEL; k++) {
        ones[k] = 1;
    }
    for (size_t n = 0; n < (w.of->is_packed ? 1 : 2) * N_PARAMS; n++) {
        const size_t param = n % N_PARAMS;
        const int n_with = n < N_PARAMS ? n_ranks : 1;

        forward(&w);
        open(&w, FC_PHASE_BACKWARD);
        for (size_t u = 0; u < N_UNITS; u++) {
            fc_gradient *grads = guarded_create(N_PARAMS * sizeof(*grads));

            grads[param].is_wanted = true;
            grads[param].data = rank < n_with ? ones : NULL;
            n_submitted++;
            CHECK_OK(fc_reduction_submit(w.owners[u].reduction, grads, grads, &options));
        }
        CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
        close_all(&w);
        for (size_t u = 0; u < N_UNITS; u++) {
            owner *o = &w.owners[u];
            const fc_param *p = &fc_unit_layout(o->shard)->params[param];

            for (size_t i = 0; i < N_PARAMS; i++) {
                CHECK_EQ(o->has[i], i == param);
            }
            for (size_t k = 0; k < p->own_rows * p->inner; k++) {
                CHECK(o->sums[param][k] == (float)n_with / DIVISOR);
            }
            memset(o->has, 0, sizeof(o->has));
        }
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

/* Whatever memory there is none for is told, nothing of it is left, and the next step is right. */
static void body_no_memory(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_ERR_NOMEM;
    int n_failures = 0;
    bool is_whole;
    world w;

    join(&w, rank, n_ranks, arg);
    is_whole = w.n_domains == 1 || w.of->shards_are_mapped; /* else sums stay */
    while (st != FC_OK) {
        forward(&w);
        fc_slots_trim(w.slots);
        (void)fc_domain_trim(w.domains[0]);
        fc_alloc_fail_after(n_failures);
        st = backward(&w, 4, is_whole);
        fc_alloc_fail_after(-1);
        atomic_fetch_add(&ranks_common->values[0], 1);
        CHECK(ranks_await(0, (n_failures + 1) * n_ranks));
        if (st == FC_OK) {
            close_all(&w);
            continue;
        }
        CHECK_EQ(st, FC_ERR_NOMEM);
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
    CHECK(n_failures >= 2);
    if (!is_whole) {
        forward(&w);
        CHECK_OK(backward(&w, 5, true));
        close_all(&w);
    }
    check_sums(&w, 4, is_whole ? 4 : 5);
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

/* Over messages nobody looks who keeps gradients. */
static void body_kept(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, arg);
    forward(&w);
    open(&w, FC_PHASE_BACKWARD);
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_reduction_accumulate(w.owners[u].reduction);
    }
    CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
    close_all(&w);
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

int main(void)
{
    static setup pair = {2, false, false, 0, false}, three = {3, false, false, 0, false};
    static setup batched = {2, false, false, 4096, false}, replicas = {1, false, false, 0, false};
    static setup in_memory = {2, true, false, 0, false};
    static setup packed_pair = {2, false, true, 0, false},
                 packed_replicas = {1, false, true, 0, false};
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
        ranks_check(all[i].n_ranks, body_one_alone, all[i].of);
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
    ranks_check(2, body_no_memory, &pair);
    ranks_check(2, body_no_memory, &batched);
    ranks_check(2, body_no_memory, &replicas);
    ranks_check(4, body_no_memory, &pair);
    ranks_check(4, body_no_memory, &in_memory);
    ranks_check(2, body_differing, &packed_pair);
    ranks_check(2, body_differing, &packed_replicas);
    ranks_check(2, body_kept, &pair);
    ranks_check(4, body_left, &in_memory);
    return check_result();
}
