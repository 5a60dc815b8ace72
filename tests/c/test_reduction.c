/* Reductions: sums over shards and replicas, those that wait, borrowed gradients, failing owners.
 */
#define _GNU_SOURCE

#include "reduction_world.h"

#include "engine/domain_private.h"

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

/* Of one that is made in another type, which lies elsewhere. */
static void check_inherited_wider(const world *w, size_t u)
{
    const fc_reduction *former = w->owners[u].reduction;
    fc_unit wider = *w->owners[u].shard;
    fc_reduction *r = NULL;
    fc_param params[N_PARAMS];

    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = wider.params[i];
        params[i].reduce = FC_F64;
    }
    CHECK_OK(fc_layout_init(&wider.layout, params, N_PARAMS, wider.layout.rank,
                            wider.layout.n_ranks, false));
    wider.params = params;
    CHECK_OK(fc_reduction_create(&wider, fc_domain_unit(w->domains[1], u), w->slots, &ops, &r));
    CHECK_OK(fc_reduction_inherit(r, former));
    for (size_t i = 0; i < N_PARAMS; i++) {
        const double *now = fc_reduction_sum(r, i);
        const float *before = fc_reduction_sum(former, i);

        CHECK((now != NULL) == (before != NULL));
        for (size_t k = 0; now != NULL && k < params[i].own_rows * params[i].inner; k++) {
            CHECK(now[k] == (double)before[k]);
        }
    }
    fc_reduction_destroy(r);
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

        check_inherited_wider(&w, u);
        attach(&w, u);
        CHECK_EQ(fc_reduction_sum_bytes(w.owners[u].reduction), 0);
        fc_alloc_fail_after(0);
        CHECK_EQ(fc_reduction_inherit(w.owners[u].reduction, former), FC_ERR_NOMEM);
        CHECK_HAS(fc_last_message(), "bytes for partial sums of unit");
        CHECK(!fc_reduction_has_sums(w.owners[u].reduction));
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

static void await_all(int n_ranks)
{
    static int n_met;

    atomic_fetch_add(&ranks_common->values[0], 1);
    CHECK(ranks_await(0, ++n_met * n_ranks));
}

static world *of_threads;

static void submit_second(void)
{
    CHECK_OK(submit(of_threads, 1, 0, true));
}

/* What another thread lends while a submission waits for room is written before that takes its
 * place. */
static void body_lent_meanwhile(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    of_threads = &w;
    for (int step = 0; step < 4; step++) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        CHECK_OK(submit(&w, 0, 0, false));
        await_all(n_ranks);
        (void)usleep(rank == step % n_ranks ? 0 : 5000); /* one of them comes first */
        meanwhile = submit_second;
        CHECK_OK(submit(&w, 0, 1, true));
        CHECK(meanwhile == NULL);
        CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
        CHECK_EQ(n_released, n_submitted);
        close_all(&w);
        check_sums(&w, 0, 0, 1, n_ranks, 0.5F);
        check_sums(&w, 1, 0, 0, n_ranks, 0.5F);
        forget(&w);
    }
    leave(&w);
}

/* What fails while a submission waits for room is told, and nothing is asked for after it. */
static void body_no_room(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    for (int n = 0; n <= 4; n++) {
        const bool is_memory = n == 4; /* else an owner fails, at whatever it is asked for */

        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        /* A peer's other unit can be copied away, or the unit's last submission finished. */
        CHECK_OK(submit(&w, is_memory && rank > 0 ? 1 : 0, 0, false));
        await_all(n_ranks);
        if (rank == 0) {
            calls_left = is_memory ? -1 : n;
            fc_alloc_fail_after(is_memory ? 0 : -1);
            CHECK_EQ(submit(&w, 0, 1, false), is_memory ? FC_ERR_NOMEM : FC_ERR_INTERRUPTED);
            CHECK_HAS(fc_last_message(),
                      is_memory ? "bytes to copy rank 11's gradients away" : "the owner fails");
            CHECK_EQ(has_failed, !is_memory);
            CHECK(!w.owners[0].is_waiting);
            calls_left = -1;
            has_failed = false;
            fc_alloc_fail_after(-1);
        }
        await_all(n_ranks);
        for (size_t d = 0; d < w.n_domains; d++) {
            fc_domain_fail(w.domains[d]);
        }
        forget(&w);
    }
    CHECK_EQ(w.owners[0].n_waits, rank == 0 ? 5 : 0);
    leave(&w);
}

/* The same of sums that were kept: replicas whose sums this one keeps fail. */
static void body_no_room_for_kept(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 0, 0, false));
    await_all(n_ranks);
    if (rank == 0) {
        set_all_reduce(&w, false);
        CHECK_OK(submit(&w, 0, 1, false));
        set_all_reduce(&w, true);
        CHECK_EQ(submit(&w, 0, 2, false), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "rank 10 keeps the gradients of unit first");
        CHECK(fc_reduction_has_sums(w.owners[0].reduction));
    }
    await_all(n_ranks);
    leave(&w);
}

/* A submission without any gradient, whatever its peers submit: parameters may have no elements. */
static void body_nothing(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    for (int n_without = 1; n_without <= n_ranks; n_without++) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        if (rank < n_without) {
            const fc_reduce_options options = {w.owners[0].divisor, true, false, false};
            char *memory = guarded_create(SUBMITTED_BYTES);

            n_submitted++;
            CHECK_OK(fc_reduction_submit(w.owners[0].reduction,
                                         (fc_gradient *)(void *)(memory + NUMBERS_BYTES), memory,
                                         &options));
        } else {
            CHECK_OK(submit(&w, 0, 0, false));
        }
        CHECK_OK(submit(&w, 1, 0, false));
        CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
        close_all(&w);
        CHECK_EQ(w.owners[0].has[0], n_without < n_ranks);
        check_sums(&w, 1, 0, 0, n_ranks, 0.5F);
        forget(&w);
    }
    leave(&w);
}

/* What a peer says of its gradients has changed: nothing is made of it. */
static void body_changed(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 0, 0, false));
    await_all(n_ranks);
    if (rank == 0) {
        domain_lane(w.domains[0], 1, 0)->part_bytes++;
        CHECK_EQ(fc_reduction_finish_all(w.domains, 1), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "what rank 11 says of its gradients");
        CHECK(!w.owners[0].has[0]);
    }
    await_all(n_ranks);
    leave(&w);
}

/* A reduction that goes takes its own borrowed gradients along, and no others. */
static void body_gone(int rank, int n_ranks, void *arg)
{
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 0, 0, true));
    for (size_t u = N_UNITS; u-- > 0;) {
        CHECK_EQ(n_released, 0);
        fc_reduction_attach(w.owners[u].reduction, NULL);
        fc_reduction_destroy(w.owners[u].reduction);
        w.owners[u].reduction = NULL;
    }
    CHECK_EQ(n_released, 1);
    await_all(n_ranks);
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

/* Rank 1 does not train what it has no gradient of and its peers have one. */
static void body_frozen(int rank, int n_ranks, void *arg)
{
    fc_status st;
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    for (int step = 0; step < 3; step++) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        /* Rank 1 has a gradient of it; it has none, and trains it; it does not. */
        w.owners[1].is_frozen[1] = rank == 1 && (step == 2 || (step == 0 && w.n_domains == 1));
        st = backward(&w, step == 0 ? 2 : 1, step == 2);
        if (step < 2) {
            CHECK_OK(st);
            check_sums(&w, 1, step == 0 ? 2 : 1, step == 0 ? 2 : 1, n_ranks, 0.5F);
        } else if (rank == 1) {
            CHECK_EQ(st, FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "parameter 'p1' of unit second is frozen "
                                         "(requires_grad=False) on rank 1");
            CHECK_HAS(fc_last_message(), "has a gradient of it in step 3");
            CHECK_HAS(fc_last_message(), ", and rank 1");
        } else {
            CHECK(st == FC_OK || st == FC_ERR_MISMATCH);
        }
        forget(&w);
    }
    await_all(n_ranks);
    leave(&w);
}

/* A backward that closes and is never finished gives back what it has borrowed as the next phase
 * opens. */
static void body_unfinished(int rank, int n_ranks, void *arg)
{
    world w;

    (void)arg;
    join(&w, rank, n_ranks, n_ranks);
    set_all_reduce(&w, true);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    open(&w, FC_PHASE_BACKWARD);
    CHECK_OK(submit(&w, 0, 2, true));
    close_all(&w);
    CHECK_EQ(n_released, 0);
    open(&w, FC_PHASE_FORWARD);
    CHECK_EQ(n_released, 1);
    close_all(&w);
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
    ranks_check(1, body_repeated, &one);
    ranks_check(2, body_repeated, &one);
    ranks_check(3, body_repeated, &three);
    ranks_check(2, body_lent_meanwhile, &two);
    ranks_check(3, body_lent_meanwhile, &three);
    ranks_check(2, body_no_room, &two);
    ranks_check(2, body_no_room, &one);
    ranks_check(2, body_no_room_for_kept, &one);
    ranks_check(1, body_nothing, &one);
    ranks_check(2, body_nothing, &one);
    ranks_check(4, body_nothing, &two);
    ranks_check(2, body_changed, &two);
    ranks_check(2, body_gone, &two);
    ranks_check(2, body_accumulated, &two);
    ranks_check(2, body_frozen, &two);
    ranks_check(2, body_frozen, &one);
    ranks_check(3, body_frozen, &three);
    ranks_check(4, body_frozen, &two);
    ranks_check(2, body_unfinished, NULL);
    ranks_check(2, body_kept_sums, &one);
    ranks_check(4, body_kept_sums, &two);
    ranks_check(2, body_copies, &two);
    ranks_check(3, body_copies, &three);
    return check_result();
}
