/* The optimizers' arithmetic in every kernel table: by hand, in parts, against the reference. */
#include "check.h"
#include "kernel_values.h"

#include "kernels/kernels.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

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

/* ---- Against plain loops: every length, wherever arrays lie ---- */

#define PLAIN_NUMEL_MAX 70

#define PLAIN_ROOM 128

typedef float short_arrays[N_ARRAYS][PLAIN_ROOM];

/* Of one element, as the formulas say. What torch adds to a product in one rounding is fmaf. */
static void plain_adam(const fc_adam *a, bool is_tail, short_arrays x, bool has_largest, size_t i)
{
    float g = a->is_maximized ? -x[GRAD][i] : x[GRAD][i];
    float way, square, step;

    g = a->l2 != 0 ? fmaf(x[PARAM][i], a->l2, g) : g;
    way = g - x[EXP_AVG][i];
    x[EXP_AVG][i] =
        a->weight1 < 0.5f ? fmaf(a->weight1, way, x[EXP_AVG][i]) : fmaf(a->weight1 - 1, way, g);
    square = is_tail ? fmaf(x[EXP_AVG_SQ][i], a->beta2, a->weight2 * g * g)
                     : fmaf(a->weight2 * g, g, x[EXP_AVG_SQ][i] * a->beta2);
    x[EXP_AVG_SQ][i] = square;
    if (has_largest) {
        square = x[LARGEST][i] > square ? x[LARGEST][i] : square;
        x[LARGEST][i] = square;
    }
    step = a->step_size * x[EXP_AVG][i] / (sqrtf(square) / a->correction + a->eps);
    x[PARAM][i] = x[PARAM][i] * a->decay + step;
}

static void plain_sgd(const fc_sgd *s, bool is_tail, short_arrays x, bool has_buffer, size_t i)
{
    float g = s->is_maximized ? -x[GRAD][i] : x[GRAD][i];

    g = s->decay != 0 ? fmaf(x[PARAM][i], s->decay, g) : g;
    if (has_buffer) {
        float b = is_tail ? fmaf(x[EXP_AVG][i], s->momentum, g * s->weight)
                          : fmaf(g, s->weight, x[EXP_AVG][i] * s->momentum);

        x[EXP_AVG][i] = b;
        g = s->is_nesterov ? fmaf(b, s->momentum, g) : b;
    }
    x[PARAM][i] = fmaf(g, s->step_size, x[PARAM][i]);
}

/* Eight lanes; of what is left four are squared together, if there are, and the others fused. */
static float plain_norm(const float *x, size_t numel)
{
    float lanes[8] = {0};
    float sum = 0;
    size_t i = 0;

    for (; i < numel / 8 * 8; i++) {
        float square = x[i] * x[i];

        lanes[i % 8] += square;
    }
    for (size_t k = 0; k < 8; k++) {
        sum = k == 0 ? lanes[0] : sum + lanes[k];
    }
    for (size_t end = numel % 8 < 4 ? i : i + 4; i < end; i++) {
        float square = x[i] * x[i];

        sum += square;
    }
    for (; i < numel; i++) {
        sum = fmaf(x[i], x[i], sum);
    }
    return sqrtf(sum);
}

static short_arrays plain_wanted;
static short_arrays plain_found;

/* An unused decay leaves the gradient as it is, however large the parameter; of equal squares the
 * new one counts. */
static void put_unusual(short_arrays x, size_t at)
{
    x[PARAM][at] = INFINITY;
    x[LARGEST][at + 1] = -0.0f;
    x[GRAD][at + 1] = x[PARAM][at + 1] = x[EXP_AVG_SQ][at + 1] = 0.0f;
    x[GRAD][at + 2] = -0.0f;
    x[EXP_AVG][at + 2] = -0.0f;
}

static void begin_plain(size_t at, bool has_decay)
{
    for (size_t a = 0; a < N_ARRAYS; a++) {
        for (size_t i = 0; i < PLAIN_ROOM; i++) {
            float value = (float)ordinary();

            plain_wanted[a][i] = a >= EXP_AVG_SQ ? fabsf(value) : value;
        }
    }
    if (!has_decay) {
        put_unusual(plain_wanted, at);
        put_unusual(plain_wanted, at + 20);
    }
    memcpy(plain_found, plain_wanted, sizeof(plain_found));
}

static void check_plain(const fc_kern_table *table, const char *what, size_t numel, unsigned kind)
{
    CHECK_MSG(memcmp(plain_wanted, plain_found, sizeof(plain_found)) == 0,
              "%s: %s of %zu elements, kind %u", table->name, what, numel, kind);
}

/* A fused kernel's vectors may be longer than a table's. */
static size_t tail_of(size_t numel, unsigned kind)
{
    static const size_t tails[] = {0, 1, 4, 7, 8, 15};
    const size_t tail = tails[kind % COUNT(tails)];

    return tail < numel ? tail : numel;
}

static void test_plain_adam(const fc_kern_table *table, size_t numel, unsigned kind)
{
    static const double betas[] = {0.9, 0.5, 0.3}; /* both forms of the interpolation */
    const fc_adam_options options = {0.01, betas[kind % 3],   0.999,        1e-8,
                                     0.1,  kind / 3 % 2 != 0, kind / 6 != 0};
    const bool has_largest = (numel + kind) % 2 == 0;
    const size_t at = numel % 17, n_tail = tail_of(numel, kind);
    float (*x)[PLAIN_ROOM] = plain_found;
    fc_adam adam;

    fc_adam_set(&adam, &options, 3);
    begin_plain(at, adam.l2 != 0);
    for (size_t i = 0; i < numel; i++) {
        plain_adam(&adam, i + n_tail >= numel, plain_wanted, has_largest, at + i);
    }
    table->adam(&adam, FC_ROOT_NEAREST, x[PARAM] + at, x[GRAD] + at, x[EXP_AVG] + at,
                x[EXP_AVG_SQ] + at, has_largest ? x[LARGEST] + at : NULL, numel, n_tail);
    check_plain(table, "Adam", numel, kind);
    begin_plain(at, adam.l2 != 0);
    for (size_t i = 0; i < numel; i++) {
        plain_adam(&adam, false, plain_wanted, has_largest, at + i);
        plain_wanted[SQUARES][at + i] =
            sqrtf(plain_wanted[has_largest ? LARGEST : EXP_AVG_SQ][at + i]);
    }
    table->adam_moments(&adam, x[PARAM] + at, x[GRAD] + at, x[EXP_AVG] + at, x[EXP_AVG_SQ] + at,
                        has_largest ? x[LARGEST] + at : NULL, x[SQUARES] + at, numel);
    CHECK(table->roots(FC_ROOT_NEAREST, x[SQUARES] + at, numel));
    table->adam_update(&adam, x[PARAM] + at, x[EXP_AVG] + at, x[SQUARES] + at, numel);
    check_plain(table, "Adam in parts", numel, kind);
}

static void test_plain_sgd(const fc_kern_table *table, size_t numel, unsigned kind)
{
    const bool has_buffer = kind % 3 != 0;
    const fc_sgd sgd = {
        kind / 3 % 2 == 0 ? 0.0f : 0.1f, 0.9f, 0.7f, -0.01f, kind % 3 == 2, kind / 6 != 0};
    const size_t at = numel % 17, n_tail = tail_of(numel, kind);
    float (*x)[PLAIN_ROOM] = plain_found;

    begin_plain(at, sgd.decay != 0);
    for (size_t i = 0; i < numel; i++) {
        plain_sgd(&sgd, i + n_tail >= numel, plain_wanted, has_buffer, at + i);
        plain_wanted[SQUARES][at + i] *= 0.3f;
    }
    table->sgd(&sgd, x[PARAM] + at, x[GRAD] + at, has_buffer ? x[EXP_AVG] + at : NULL, numel,
               n_tail);
    table->multiply(x[SQUARES] + at, 0.3f, numel);
    check_plain(table, "SGD", numel, kind);
}

/* Of `numel` arrays, and as many elements: each a little shorter or longer than its neighbours. */
static void test_plain_norms(const fc_kern_table *table, size_t numel)
{
    const float *xs[PLAIN_NUMEL_MAX] = {NULL};
    size_t lengths[PLAIN_NUMEL_MAX] = {0};
    float found[PLAIN_NUMEL_MAX + 1];

    found[numel] = -1;
    for (size_t i = 0; i < numel; i++) {
        xs[i] = plain_found[i % N_ARRAYS] + i % 9;
        lengths[i] = numel + i * 7 % 23;
    }
    table->norms(found, xs, lengths, numel);
    for (size_t i = 0; i < numel; i++) {
        CHECK_MSG(found[i] == plain_norm(xs[i], lengths[i]), "%s: norm %zu of %zu: %a", table->name,
                  i, numel, (double)found[i]);
    }
    CHECK(found[numel] == -1);
}

static void test_plain(const fc_kern_table *table)
{
    for (size_t numel = 0; numel < PLAIN_NUMEL_MAX; numel++) {
        for (unsigned kind = 0; kind < 12; kind++) {
            test_plain_adam(table, numel, kind);
            test_plain_sgd(table, numel, kind);
        }
        test_plain_norms(table, numel);
    }
}

/* ---- Roots ---- */

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

#ifdef __x86_64__
/* From SSE's estimate, with every product rounded. Denormals and the largest are left. */
static float refined_root(float x)
{
    float inverse = _mm_cvtss_f32(_mm_rsqrt_ss(_mm_set_ss(x)));
    float root = x * inverse;
    float half_inverse = inverse * 0.5f;
    float error = 0.5f - root * half_inverse;

    root = root * error + root;
    half_inverse = half_inverse * error + half_inverse;
    error = x - root * root;
    return x < 0x1p-126f || x > 0x1.ffep127f ? sqrtf(x) : error * half_inverse + root;
}

/* From AVX-512's; small ones as if they were 2^64 times as large. */
static __attribute__((target("avx512f"))) float estimated_root(float x)
{
    const float size = x < 0x1p-60f ? 0x1p32f : 1;
    const float scaled = x * size * size;
    float inverse = _mm_cvtss_f32(_mm_rsqrt14_ss(_mm_setzero_ps(), _mm_set_ss(scaled)));
    float root = scaled * inverse;

    return fmaf(fmaf(-root, root, scaled), inverse * 0.5f, root) / size;
}
#else
#define refined_root sqrtf
#define estimated_root sqrtf
#endif

static float plain_root(fc_root root, float x)
{
    return root == FC_ROOT_NEAREST   ? sqrtf(x)
           : root == FC_ROOT_REFINED ? refined_root(x)
                                     : estimated_root(x);
}

/* Numbers of every size, many at once and one by one: next to the nearest. */
static void test_roots(const fc_kern_table *table, fc_root root)
{
    static float x[MAX_NUMEL];
    static float found[MAX_NUMEL];

    for (size_t i = 0; i < MAX_NUMEL; i++) {
        x[i] = ldexpf(1 + (float)(i % 4096) / 4096, (int)(i % 277) - 149);
    }
    memcpy(found, x, sizeof(found));
    CHECK(table->roots(root, found, MAX_NUMEL));
    for (size_t i = 0; i < MAX_NUMEL; i++) {
        float by_itself = x[i];
        float wanted = plain_root(root, x[i]);
        float nearest = sqrtf(x[i]);

        CHECK(table->roots(root, &by_itself, 1));
        CHECK_MSG(by_itself == wanted && found[i] == wanted, "%s: %d: %a: %a %a, expected %a",
                  table->name, (int)root, (double)x[i], (double)by_itself, (double)found[i],
                  (double)wanted);
        CHECK_MSG(fabsf(wanted - nearest) <= nearest * 0x1p-23f, "%s: %a", table->name,
                  (double)x[i]);
    }
}

/* So many, wherever they lie, and none behind them. */
static void test_some_roots(const fc_kern_table *table, fc_root root)
{
    for (size_t numel = 0; numel < 40; numel++) {
        float x[64];

        for (size_t i = 0; i < COUNT(x); i++) {
            x[i] = 4;
        }
        CHECK(table->roots(root, x + numel % 17, numel));
        for (size_t i = 0; i < COUNT(x); i++) {
            bool is_one = i >= numel % 17 && i < numel % 17 + numel;

            CHECK_MSG(x[i] == (is_one ? 2 : 4), "%s: %zu of %zu", table->name, i, numel);
        }
    }
}

static void test_unusual_roots(const fc_kern_table *table, fc_root root)
{
    float x[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, -1.0f, -0x1p-140f, 4.0f};

    CHECK(table->roots(root, x, COUNT(x)));
    CHECK(x[0] == 0 && !signbit(x[0]) && x[1] == 0 && signbit(x[1]) && x[7] == 2);
    CHECK(isinf(x[2]) && isnan(x[3]) && isnan(x[4]) && isnan(x[5]) && isnan(x[6]));
}

/* Those that its instructions can take. */
static bool has_root(const fc_kern_table *table, fc_root root)
{
    const bool is_ref = strcmp(table->name, "ref") == 0;
    const bool is_avx2 = strcmp(table->name, "avx2") == 0;

    return root == FC_ROOT_NEAREST || (!is_ref && (root == FC_ROOT_REFINED || !is_avx2));
}

static void test_every_root(const fc_kern_table *table)
{
    for (fc_root root = FC_ROOT_NEAREST; root < FC_ROOT_COUNT; root++) {
        float four = 4;

        CHECK_EQ(table->roots(root, &four, 1), has_root(table, root));
        CHECK(four == (has_root(table, root) ? 2 : 4));
        if (has_root(table, root)) {
            test_roots(table, root);
            test_some_roots(table, root);
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
        test_plain(tables[i]);
        test_every_root(tables[i]);
        if (i > 0) {
            test_optim(tables[0], tables[i]);
        }
    }
    return check_result();
}
