/* The optimizers' arithmetic in every kernel table: by hand, in parts, against the reference. */
#include "check.h"
#include "kernel_values.h"

#include "kernels/kernels.h"

enum {
    PARAM,
    GRAD,
    EXP_AVG,
    EXP_AVG_SQ,
    LARGEST,
    SQUARES,
    N_ARRAYS
};

typedef float optim_arrays[N_ARRAYS][MAX_NUMEL + 2];

static void fill_optim(optim_arrays arrays)
{
    for (size_t a = 0; a < N_ARRAYS; a++) {
        for (size_t i = 0; i < MAX_NUMEL + 2; i++) {
            arrays[a][i] = (float)ordinary();
            if (a >= EXP_AVG_SQ) {
                arrays[a][i] = fabsf(arrays[a][i]);
            }
        }
    }
}

/* Of all arrays, in different lengths, into places that are else unused. */
static void run_norms(const fc_kern_table *table, optim_arrays x, size_t numel)
{
    const float *xs[2 * N_ARRAYS];
    size_t lengths[2 * N_ARRAYS];
    float found[2 * N_ARRAYS];

    for (size_t i = 0; i < COUNT(xs); i++) {
        xs[i] = x[i % N_ARRAYS];
        lengths[i] = i % 3 == 2 ? numel / 2 : numel;
    }
    table->norms(found, xs, lengths, COUNT(xs));
    for (size_t i = 0; i < N_ARRAYS; i++) {
        x[i][MAX_NUMEL] = found[i];
        x[i][MAX_NUMEL + 1] = found[N_ARRAYS + i];
    }
}

static void run_optim(const fc_kern_table *table, const fc_adam *adam, optim_arrays x, size_t numel,
                      size_t n_tail)
{
    for (int round = 0; round < 2; round++) {
        float *largest = round == 0 ? NULL : x[LARGEST];

        table->adam_moments(adam, x[PARAM], x[GRAD], x[EXP_AVG], x[EXP_AVG_SQ], largest, x[SQUARES],
                            numel);
        table->adam_update(adam, x[PARAM], x[EXP_AVG], x[SQUARES], numel);
        table->adam(adam, FC_ROOT_NEAREST, x[PARAM], x[GRAD], x[EXP_AVG], x[EXP_AVG_SQ], largest,
                    numel, n_tail);
    }
    CHECK(table->roots(FC_ROOT_NEAREST, x[SQUARES], numel));
    for (int kind = 0; kind < 6; kind++) {
        const fc_sgd sgd = {kind % 2 == 0 ? 0.0f : 0.1f, 0.9f, 0.7f, -0.01f, kind < 2, kind > 2};

        table->sgd(&sgd, x[PARAM], x[GRAD], kind < 4 ? x[EXP_AVG] : NULL, numel, n_tail);
    }
    table->multiply(x[GRAD], 0.3f, numel);
    run_norms(table, x, numel);
}

static void test_optim(const fc_kern_table *ref, const fc_kern_table *table)
{
    static optim_arrays start;
    static optim_arrays wanted;
    static optim_arrays found;
    fc_adam_options options = {0.01, 0.9, 0.999, 1e-8, 0.1, true, false};
    fc_adam adam;

    for (size_t n = 0; n < COUNT(numels); n++) {
        size_t numel = numels[n] < MAX_NUMEL ? numels[n] : MAX_NUMEL - 1;

        for (int round = 0; round < 4; round++) {
            options.is_decoupled = round % 2 == 0;
            options.is_maximized = round % 3 == 0;
            options.beta1 = round < 2 ? 0.9 : 0.3; /* both forms of the interpolation */
            fc_adam_set(&adam, &options, 3);
            fill_optim(start);
            memcpy(wanted, start, sizeof(start));
            memcpy(found, start, sizeof(start));
            run_optim(ref, &adam, wanted, numel, numel < 5 ? numel : 5);
            run_optim(table, &adam, found, numel, numel < 5 ? numel : 5);
            CHECK_MSG(memcmp(wanted, found, sizeof(found)) == 0, "%s: %zu elements, round %d",
                      table->name, numel, round);
        }
    }
}

/* The two kernels of one step with `root` between them. */
static void run_in_two(const fc_kern_table *table, const fc_adam *adam, fc_root root,
                       optim_arrays x, size_t numel)
{
    table->adam_moments(adam, x[PARAM], x[GRAD], x[EXP_AVG], x[EXP_AVG_SQ], x[LARGEST], x[SQUARES],
                        numel);
    CHECK(table->roots(root, x[SQUARES], numel));
    table->adam_update(adam, x[PARAM], x[EXP_AVG], x[SQUARES], numel);
}

static void test_adam_with(const fc_kern_table *table, fc_root root)
{
    static optim_arrays wanted;
    static optim_arrays found;
    const fc_adam_options options = {0.01, 0.9, 0.999, 1e-8, 0.1, true, true};
    fc_adam adam;

    fc_adam_set(&adam, &options, 3);
    for (size_t n = 0; n < COUNT(numels); n++) {
        size_t numel = numels[n] < MAX_NUMEL ? numels[n] : MAX_NUMEL - 1;

        fill_optim(wanted);
        memcpy(found, wanted, sizeof(found));
        run_in_two(table, &adam, root, wanted, numel);
        table->adam(&adam, root, found[PARAM], found[GRAD], found[EXP_AVG], found[EXP_AVG_SQ],
                    found[LARGEST], numel, 0);
        CHECK_MSG(memcmp(wanted, found, sizeof(*found) * SQUARES) == 0, "%s: root %d, %zu elements",
                  table->name, (int)root, numel);
    }
}

/* Numbers of every size: one by one as many at once, next to the nearest, and quarters alike. */
static void test_roots(const fc_kern_table *table, fc_root root)
{
    static float x[MAX_NUMEL];
    static float quarters[MAX_NUMEL];

    for (size_t i = 0; i < MAX_NUMEL; i++) {
        x[i] = ldexpf(1 + (float)(i % 4096) / 4096, (int)(i % 270) - 147);
        quarters[i] = x[i] >= 0x1p-120f ? x[i] / 4 : x[i];
    }
    CHECK(table->roots(root, quarters, MAX_NUMEL));
    for (size_t i = 0; i < MAX_NUMEL; i++) {
        float by_itself = x[i];
        float nearest = sqrtf(x[i]);

        CHECK(table->roots(root, &by_itself, 1));
        CHECK_MSG(by_itself == quarters[i] * (x[i] >= 0x1p-120f ? 2 : 1), "%s: %a", table->name,
                  (double)x[i]);
        CHECK_MSG(fabsf(by_itself - nearest) <= nearest * 0x1p-23f, "%s: %a", table->name,
                  (double)x[i]);
    }
}

static void test_unusual_roots(const fc_kern_table *table, fc_root root)
{
    float x[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -1.0f, -0x1p-140f, 4.0f};

    CHECK(table->roots(root, x, COUNT(x)));
    CHECK(x[0] == 0 && !signbit(x[0]) && x[1] == 0 && signbit(x[1]) && x[7] == 2);
    CHECK(isinf(x[2]) && isnan(x[3]) && isnan(x[4]) && isnan(x[5]) && isnan(x[6]));
}

static void test_every_root(const fc_kern_table *table)
{
    for (fc_root root = FC_ROOT_NEAREST; root < FC_ROOT_COUNT; root++) {
        if (table->roots(root, NULL, 0)) {
            test_roots(table, root);
            test_unusual_roots(table, root);
            test_adam_with(table, root);
        }
    }
}

/* Against the gradient, and by the largest square so far, which may be no number. */
static void test_amsgrad_meaning(const fc_kern_table *table, const fc_adam *adam)
{
    fc_adam turned = *adam;
    float x[] = {8, -2, 4, 4, 16, 0};
    float same[2 * 16] = {0}; /* whole vectors */
    float nan[2 * 16];

    turned.is_maximized = true;
    table->adam(&turned, FC_ROOT_NEAREST, &x[PARAM], &x[GRAD], &x[EXP_AVG], &x[EXP_AVG_SQ],
                &x[LARGEST], 1, 0);
    CHECK(x[EXP_AVG] == 3 && x[EXP_AVG_SQ] == 4 && x[LARGEST] == 16);
    CHECK_MSG(x[PARAM] == 7 - 3.0f / 9, "%g", (double)x[PARAM]);
    for (size_t i = 0; i < COUNT(nan); i++) {
        nan[i] = NAN;
    }
    table->adam(&turned, FC_ROOT_NEAREST, same, same, same, same, nan, COUNT(nan), 0);
    for (size_t i = 0; i < COUNT(nan); i++) {
        CHECK(isnan(nan[i]));
    }
}

/* One number after the other, as the formulas say. */
static void test_optim_meaning(const fc_kern_table *table)
{
    const fc_adam_options options = {0.5, 0.5, 0.75, 1.0, 0.25, true, false};
    fc_adam adam;
    float x[] = {8, 2, 4, 4, 0, 0}; /* parameter, gradient, averages, largest, squares */

    fc_adam_set(&adam, &options, 1);
    CHECK(adam.decay == 0.875f && adam.correction == 0.5f && adam.step_size == -1.0f);
    table->adam_moments(&adam, &x[PARAM], &x[GRAD], &x[EXP_AVG], &x[EXP_AVG_SQ], NULL, &x[SQUARES],
                        1);
    CHECK(x[EXP_AVG] == 3 && x[EXP_AVG_SQ] == 4 && x[SQUARES] == 4);
    x[SQUARES] = 2;
    table->adam_update(&adam, &x[PARAM], &x[EXP_AVG], &x[SQUARES], 1);
    CHECK_MSG(x[PARAM] == 7 - 3.0f / 5, "%g", (double)x[PARAM]);
    x[PARAM] = 8;
    x[EXP_AVG] = 4;
    table->adam(&adam, FC_ROOT_NEAREST, &x[PARAM], &x[GRAD], &x[EXP_AVG], &x[EXP_AVG_SQ], NULL, 1,
                0);
    CHECK_MSG(x[PARAM] == 7 - 3.0f / 5, "%g", (double)x[PARAM]);
    test_amsgrad_meaning(table, &adam);
    x[PARAM] = 8;
    x[EXP_AVG] = 4;
    table->sgd(&(const fc_sgd){0.25f, 0.5f, 0.75f, -0.5f, false, false}, &x[PARAM], &x[GRAD],
               &x[EXP_AVG], 1, 0);
    CHECK_MSG(x[EXP_AVG] == 5 && x[PARAM] == 5.5f, "%g %g", (double)x[EXP_AVG], (double)x[PARAM]);
    table->sgd(&(const fc_sgd){0, 0.5f, 1, -0.5f, true, false}, &x[PARAM], &x[GRAD], &x[EXP_AVG], 1,
               1);
    CHECK_MSG(x[EXP_AVG] == 4.5f && x[PARAM] == 3.375f, "%g %g", (double)x[EXP_AVG],
              (double)x[PARAM]);
    table->norms(&x[0], (const float *[]){(const float[]){3, 4}, NULL}, (const size_t[]){2, 0}, 2);
    CHECK(x[0] == 5 && x[1] == 0);
}

int main(void)
{
    const fc_kern_table *const *tables;
    size_t n_tables = fc_kern_tables(&tables);

    for (size_t i = 0; i < n_tables; i++) {
        test_optim_meaning(tables[i]);
        test_every_root(tables[i]);
        if (i > 0) {
            test_optim(tables[0], tables[i]);
        }
    }
    return check_result();
}
