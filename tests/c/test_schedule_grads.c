/* Gradients of a unit: which of them are reduced, held or dropped, and by what plans. */
#include "kernels/kernels.h"
#include "one_rank_world.h"

/* Of parameters that take part; whatever lies behind them. */
static void test_some_gradient_is_needed(bool is_alone)
{
    const kind k = {.n_ranks = is_alone ? 1 : 2};
    const void *full[PARAMS + 1] = {NULL};
    world w;

    make_world(&w, &k);
    begin(&w);
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    full[PARAMS] = w.grads[0]; /* nobody's */
    CHECK(!post(&w, 0, full, FC_SYNC_ALL));
    full[1] = w.grads[0];
    CHECK(post(&w, 0, full, FC_SYNC_ALL));
    w.params[0][1].trainable = false;
    CHECK(!post(&w, 0, full, FC_SYNC_ALL));
    w.params[0][1].trainable = true;
    w.params[0][1].has_grad = false;
    CHECK(!post(&w, 0, full, FC_SYNC_ALL));
    w.params[0][1].has_grad = true;
    end(&w);
    unmake(&w);
}

/* What is dropped is not reduced later, and its memory is free. */
static void test_held_gradients_are_dropped(void)
{
    world w;

    make_world(&w, &(kind){.has_replicas = true});
    begin(&w);
    CHECK(!post(&w, 0, w.grads, FC_SYNC_NONE));
    fc_schedule_drop_partial_sum(w.units[0]); /* there is none */
    CHECK(post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_NONE));
    fc_schedule_drop_gradients(w.units[0]);
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
    CHECK(!post(&w, 0, NULL, FC_SYNC_SCATTER)); /* it is held still */
    CHECK(post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
    fc_schedule_drop_partial_sum(w.units[0]);
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
    CHECK(!post(&w, 0, w.grads, FC_SYNC_NONE));
    fc_schedule_drop_gradients(w.units[0]); /* both */
    CHECK(!post(&w, 0, NULL, FC_SYNC_ALL));
    CHECK(!post(&w, 1, w.grads, FC_SYNC_SCATTER));
    fc_schedule_move_partial_sum(w.units[1], w.units[2]);
    CHECK(!post(&w, 1, NULL, FC_SYNC_ALL));
    CHECK(post(&w, 2, NULL, FC_SYNC_ALL));
    end(&w);
    CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
    unmake(&w);
}

/* With replicas one sum is scattered while another one is added up. */
static void test_sums_that_overlap(bool has_replicas)
{
    world w;

    make_world(&w, &(kind){.has_replicas = has_replicas});
    begin(&w);
    CHECK(post(&w, 0, w.grads, FC_SYNC_ALL));
    (void)take();
    CHECK(post(&w, 1, w.grads, FC_SYNC_ALL));
    CHECK_EQ(take().allocs, has_replicas ? 1 : 0);
    end(&w);
    unmake(&w);
}

/* Memory whose last use could not be marked is not used again, and the caller is told. */
static void test_marks_of_a_held_sum_fail(void)
{
    bool has_failed = true;
    int n = 0;

    for (; has_failed; n++) {
        fc_schedule_grads given = {.sync = FC_SYNC_ALL};
        bool is_reduced;
        world w;
        fc_status st;

        make_world(&w, &(kind){.has_replicas = true});
        given.full = w.grads;
        given.out = w.out;
        begin(&w);
        CHECK(!post(&w, 0, w.grads, FC_SYNC_SCATTER));
        records_left = n;
        records_fail = true;
        st = fc_schedule_post_backward(w.units[0], &given, &is_reduced);
        records_fail = false;
        has_failed = records_left < 0;
        CHECK_EQ(st, has_failed ? FC_ERR_SYSTEM : FC_OK);
        CHECK_EQ(is_reduced, !has_failed);
        if (has_failed) { /* nor is it freed before that use */
            MUST(fc_schedule_reset(w.schedule));
            CHECK_EQ(fc_sim_bytes(w.device), w.rest_bytes);
        }
        unmake(&w);
    }
    CHECK(n > 3); /* of the input, the held sum, the new one */
}

/* What the caller gives stands for the unit's own divisor, 1 too, which staging is in vain for. */
static void test_the_given_divisor_counts(void)
{
    const kind k = {.n_ranks = 1, .pre_divisor = 2};
    fc_schedule_grads given = {.sync = FC_SYNC_ALL};
    bool is_reduced;
    world w;

    make_world(&w, &k);
    given.full = w.grads;
    given.out = w.out;
    begin(&w);
    for (int divisor = 0; divisor < 3; divisor++) {
        given.pre_divisor = divisor;
        (void)take();
        MUST(fc_schedule_post_backward(w.units[0], &given, &is_reduced));
        CHECK(is_reduced);
        CHECK_EQ(take().moves, divisor == 1 ? 1 : 2);
    }
    end(&w);
    unmake(&w);
}

/* A plan for each combination of types, made when it is first needed. */
static void test_plans_are_made_once(int n_ranks)
{
    static const fc_dtype computed[] = {FC_F32, FC_F32, FC_BF16 /* nobody's */},
                          narrow[] = {FC_BF16, FC_F32}, other[] = {FC_BF16, FC_F16};
    const struct {
        const fc_dtype *types;
        fc_schedule_sync sync;
        bool is_made; /* a plan */
    } cases[] = {
        {NULL, FC_SYNC_ALL, false},
        {computed, FC_SYNC_ALL, false},
        {narrow, FC_SYNC_ALL, true},
        {other, FC_SYNC_ALL, true},
        {narrow, FC_SYNC_ALL, false},
        {other, FC_SYNC_ALL, false},
        {NULL, FC_SYNC_NONE, false},
        {computed, FC_SYNC_ALL, false},
        /* Alone, those above were finished at once, and these are held first. */
        {narrow, FC_SYNC_NONE, n_ranks == 1},
        {narrow, FC_SYNC_ALL, false},
    };
    const kind k = {.n_ranks = n_ranks};
    world w;

    make_world(&w, &k);
    begin(&w);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool is_reduced;

        (void)take();
        MUST(fc_schedule_post_backward(
            w.units[0],
            &(fc_schedule_grads){
                .full = w.grads, .types = cases[i].types, .out = w.out, .sync = cases[i].sync},
            &is_reduced));
        CHECK_EQ(is_reduced, cases[i].sync == FC_SYNC_ALL);
        CHECK_MSG((take().planned > 0) == cases[i].is_made, "case %zu", i);
    }
    end(&w);
    unmake(&w);
}

#define ROW 256 /* elements of a parameter */

static const fc_dtype types_of_four[] = {FC_F32, FC_F64, FC_BF16, FC_F16};

/* `which` of the pairs of types; without the second gradient if there is only one. */
static void post_pair(world *w, int which, bool has_both, fc_schedule_sync sync, bool accumulate)
{
    const fc_dtype pair[PARAMS] = {types_of_four[which % 4], types_of_four[which / 4]};
    const void *full[PARAMS] = {w->grads[0], has_both ? w->grads[1] : NULL};
    const fc_schedule_grads given = {
        .full = full, .types = pair, .out = w->out, .sync = sync, .accumulate = accumulate};
    float values[ROW];
    bool is_reduced;

    for (int j = 0; j < PARAMS; j++) {
        for (int i = 0; i < ROW; i++) {
            values[i] = (float)(i % 64 + j + 1);
        }
        fc_kern_cast(FC_F32, pair[j])((void *)(uintptr_t)w->grads[j], values, ROW);
    }
    MUST(fc_schedule_post_backward(w->units[0], &given, &is_reduced));
    await_all(w);
}

static void check_sums(const world *w, bool has_both, int n)
{
    for (int j = 0; j < PARAMS; j++) {
        const float *sums = (const float *)((const char *)w->out + w->params[0][j].grad_at);

        for (int i = 0; i < ROW; i++) {
            CHECK_EQ(sums[i], j == 0 || has_both ? (float)(n * (i % 64 + j + 1)) : 0);
        }
    }
}

/* However many combinations come, as of experts that are used or not; and sums are the same. */
static void test_plans_are_few(int n_ranks)
{
    const kind k = {.n_ranks = n_ranks};
    size_t planned = 0;
    world w;

    make_world(&w, &k);
    begin(&w);
    for (int n = 0; n < 64; n++) {
        const int which = n / 4;
        const bool has_both = n % 2 == 0, is_held = n % 4 > 1;

        if (is_held) {
            post_pair(&w, which, has_both, FC_SYNC_NONE, false);
        }
        post_pair(&w, which, has_both, FC_SYNC_ALL, false);
        if (n_ranks == 1) {
            check_sums(&w, has_both, is_held ? 2 : 1);
            post_pair(&w, which, has_both, FC_SYNC_ALL, true);
            check_sums(&w, has_both, is_held ? 3 : 2);
        }
        planned += take().planned;
    }
    CHECK(planned / (PARAMS * ROW) > 8);
    CHECK(planned / (PARAMS * ROW) <= 8 + 3 * 2); /* several types at once; the others each */
    end(&w);
    unmake(&w);
}

int main(void)
{
    test_some_gradient_is_needed(true);
    test_some_gradient_is_needed(false);
    test_held_gradients_are_dropped();
    test_sums_that_overlap(true);
    test_sums_that_overlap(false);
    test_marks_of_a_held_sum_fail();
    test_the_given_divisor_counts();
    test_plans_are_made_once(1);
    test_plans_are_made_once(2);
    test_plans_are_few(1);
    test_plans_are_few(2);
    return check_result();
}
