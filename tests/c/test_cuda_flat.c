/* GPU kernels over flat runs, thread by thread on the host: sums of squares and the optimizer, each
 * against a plain loop over elements. */
#define _GNU_SOURCE

#include "check.h"
#include "drawn_values.h"
#include "emulated_cuda.h"

#include <math.h>

#define ROUNDS 625

/* ---- sums of squares ---- */

static double value_at(const char *at, fc_dtype type, size_t i)
{
    double x;

    if (type == FC_F64) {
        memcpy(&x, at + i * 8, 8);
    } else {
        fc_kern_cast(type, FC_F64)(&x, at + i * fc_dtype_bytes(type), 1);
    }
    return x;
}

static void check_squares(void)
{
    enum {
        SLOTS = 4
    };
    const fc_dtype type = draw_float();
    const size_t bytes = fc_dtype_bytes(type);
    char *values[SLOTS];
    double expected[SLOTS], sums[SLOTS], again[SLOTS], *parts;
    uint64_t addresses[SLOTS];
    fc_runs plan;

    fc_runs_init(&plan);
    plan.numel_max = draw(3) == 0 ? 64 + draw(700) : FC_RUN_NUMEL_MAX;
    plan.stretches_max = draw(2) == 0 ? 8 + 8 * (uint32_t)draw(4) : FC_STRETCHES_MAX;
    for (uint32_t s = 0; s < SLOTS; s++) {
        const size_t numel = draw(6) == 0 ? 0 : draw_numel(), at = bytes * draw(20);

        values[s] = take(at + numel * bytes);
        fill_numbers(values[s] + at, type, numel);
        if (draw(6) == 0) { /* whose squares are none */
            memset(values[s] + at, 0, numel * bytes);
        }
        addresses[s] = (uintptr_t)values[s];
        expected[s] = 0;
        for (size_t i = 0; i < numel; i++) {
            const double x = value_at(values[s] + at, type, i);

            expected[s] += x * x;
        }
        CHECK_EQ(fc_runs_add_flat(&plan, type, numel, 1, &s, &at), FC_OK);
    }
    parts = take((plan.n_slots + plan.n_stretches) * sizeof(*parts));
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, plan.slots, addresses, NULL};
    CHECK_EQ(emulated_kernels.sum_squares(&launch, parts, sums), 0);
    CHECK_EQ(emulated_kernels.sum_squares(&launch, parts, again), 0);
    CHECK(memcmp(sums, again, sizeof(sums)) == 0);
    for (size_t s = 0; s < SLOTS; s++) {
        /* A lane adds up a few dozen floats; all else is double. */
        const double bound = (type == FC_F64 ? 1e-13 : 5e-6) * expected[s];

        CHECK_MSG(fabs(sums[s] - expected[s]) <= bound, "%.17g, expected %.17g", sums[s],
                  expected[s]);
        free(values[s]);
    }
    free(parts);
    fc_runs_clear(&plan);
}

/* Slots of several runs each in long stretches, at the border of two batches. */
static void check_squares_of_many(void)
{
    enum {
        N = FC_RUNS_BASES + 20,
        NUMEL = 300
    };
    static float values[N][NUMEL];
    static uint64_t addresses[N];
    double sums[N], *parts;
    const size_t at = 0;
    fc_runs plan;

    fc_runs_init(&plan);
    plan.numel_max = 64;
    plan.stretches_max = 8;
    for (uint32_t s = 0; s < N; s++) {
        addresses[s] = (uintptr_t)values[s];
        for (size_t i = 0; i < NUMEL; i++) {
            values[s][i] = (float)(1 + s % 7);
        }
        CHECK_EQ(fc_runs_add_flat(&plan, FC_F32, NUMEL, 1, &s, &at), FC_OK);
    }
    CHECK_EQ(plan.n_batches, 2);
    CHECK(plan.n_stretches <= plan.stretches_max && plan.stretch_tiles > 1);
    parts = take((plan.n_slots + plan.n_stretches) * sizeof(*parts));
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, plan.slots, addresses, NULL};
    CHECK_EQ(emulated_kernels.sum_squares(&launch, parts, sums), 0);
    for (uint32_t s = 0; s < N; s++) {
        CHECK_EQ((int64_t)sums[s], (int64_t)(NUMEL * (1 + s % 7) * (1 + s % 7)));
    }
    free(parts);
    fc_runs_clear(&plan);
}

/* For the slot with the most parts, eight for a thread, in whole warps of at most one block. */
static void check_slot_threads(void)
{
    static const uint32_t cases[][2] = {{1, 32},    {256, 32},    {257, 64},     {512, 64},
                                        {513, 128}, {8192, 1024}, {100000, 1024}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fc_slot slots[] = {{0, 1}, {4, 4 + 4 * cases[i][0]}, {9, 9}};
        const fc_runs plan = {.slots = slots, .n_slots = 3, .stretch_tiles = 4};
        const fc_runs none = {.slots = slots, .n_slots = 1, .stretch_tiles = 4};
        const fc_runs first = {.slots = slots + 1, .n_slots = 2, .stretch_tiles = 4};

        CHECK_EQ(fc_slot_threads(&plan), cases[i][1]);
        CHECK_EQ(fc_slot_threads(&none), FC_WARP);
        CHECK_EQ(fc_slot_threads(&first), cases[i][1]);
    }
}

/* ---- the optimizer ---- */

enum {
    STATES = FC_RUN_OPERANDS
};

/* The optimizer written out once more, beside fc_adam_one. */
static void plain_adam(const fc_adam *a, float *const *x, size_t i)
{
    const float grad = a->is_maximized ? -x[FC_GRAD][i] : x[FC_GRAD][i];
    const float g = fmaf(a->l2, x[FC_PARAM][i], grad);
    const float way = g - x[FC_EXP_AVG][i];
    const float square = g * g;
    const float kept = x[FC_EXP_AVG_SQ][i] * a->beta2;

    x[FC_EXP_AVG][i] =
        a->weight1 < 0.5f ? fmaf(a->weight1, way, x[FC_EXP_AVG][i]) : g - way * (1.0f - a->weight1);
    x[FC_EXP_AVG_SQ][i] = fmaf(a->weight2, square, kept);
    const float root = sqrtf(x[FC_EXP_AVG_SQ][i]) / a->correction;
    const float step = x[FC_EXP_AVG][i] / (root + a->eps);
    const float decayed = x[FC_PARAM][i] * a->decay;

    x[FC_PARAM][i] = fmaf(a->step_size, step, decayed);
}

static void check_adam(void)
{
    const fc_adam_options options = {0.01,        draw(4) == 0 ? 0.25 : 0.9, 0.95,
                                     1e-8,        0.1 * (double)draw(2),     draw(2) == 0,
                                     draw(2) == 0};
    const size_t numel = draw_numel();
    float *values[STATES], *expected[STATES], *cpu[STATES];
    uint32_t bases[STATES];
    const size_t common = draw(4);
    size_t ats[STATES];
    uint64_t addresses[STATES];
    fc_adam adam;
    fc_runs plan;

    fc_adam_set(&adam, &options, 1 + (double)draw(5));
    for (uint32_t s = 0; s < STATES; s++) {
        const size_t shift = draw(6) == 0 ? draw(4) : common; /* mostly all alike */

        values[s] = take((shift + numel) * sizeof(float));
        expected[s] = take((shift + numel) * sizeof(float));
        fill_numbers((char *)values[s], FC_F32, shift + numel);
        for (size_t i = 0; i < shift + numel && s == FC_EXP_AVG_SQ; i++) {
            values[s][i] = fabsf(values[s][i]);
        }
        memcpy(expected[s], values[s], (shift + numel) * sizeof(float));
        bases[s] = s;
        ats[s] = shift * sizeof(float);
        addresses[s] = (uintptr_t)values[s];
        cpu[s] = expected[s] + shift;
    }
    fc_runs_init(&plan);
    plan.numel_max = draw(3) == 0 ? 64 + draw(700) : FC_RUN_NUMEL_MAX;
    plan.stretches_max = draw(2) == 0 ? 8 + 8 * (uint32_t)draw(4) : FC_STRETCHES_MAX;
    CHECK_EQ(fc_runs_add_flat(&plan, FC_F32, numel, STATES, bases, ats), FC_OK);
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, NULL, addresses, NULL};
    CHECK_EQ(emulated_kernels.adam(&launch, &adam), 0);
    for (size_t i = 0; i < numel; i++) {
        plain_adam(&adam, cpu, i);
    }
    for (size_t s = 0; s < STATES; s++) {
        const size_t total = ats[s] + numel * sizeof(float);

        if (adam.weight1 < 0.5f) {
            CHECK_MSG(memcmp(values[s], expected[s], total) == 0, "state %zu", s);
        }
        for (size_t i = 0; i < total / sizeof(float); i++) {
            CHECK(fabsf(values[s][i] - expected[s][i]) <= 1e-5f);
        }
        free(values[s]);
        free(expected[s]);
    }
    fc_runs_clear(&plan);
}

int main(void)
{
    for (int round = 0; round < ROUNDS; round++) {
        check_squares();
        check_adam();
    }
    check_squares_of_many();
    check_slot_threads();
    return check_result();
}
