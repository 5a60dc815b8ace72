/* The reference: every kernel in plain portable C, one element after the other.
 *
 * Without accumulate the quotient is stored as it is, so that a sum of -0 stays -0. Where several
 * terms of one sum are NaN, the result is a NaN, but whose payload it has is left to the compiler.
 */
#include "kernels/kern_int.h"
#include "kernels/kern_optim_scalar.h"
#include "kernels/kern_scalar.h"
#include "kernels/kern_tables.h"

#define BLOCK 256 /* elements summed at a time: they stay in the first-level cache */

/* What is in memory, as the type that holds its bits. */
#define DEFINE_ACCESS(name, type)                                                                  \
    static inline type read_##name(const void *memory, size_t i)                                   \
    {                                                                                              \
        type value;                                                                                \
                                                                                                   \
        memcpy(&value, (const char *)memory + i * sizeof(value), sizeof(value));                   \
        return value;                                                                              \
    }                                                                                              \
                                                                                                   \
    static inline void write_##name(void *memory, size_t i, type value)                            \
    {                                                                                              \
        memcpy((char *)memory + i * sizeof(value), &value, sizeof(value));                         \
    }

DEFINE_ACCESS(f32, float)
DEFINE_ACCESS(f64, double)
DEFINE_ACCESS(bits16, uint16_t)

#define LOAD_F32(memory, i) read_f32(memory, i)
#define LOAD_F64(memory, i) read_f64(memory, i)
#define LOAD_BF16(memory, i) f32_from_bf16(read_bits16(memory, i))
#define LOAD_F16(memory, i) f32_from_f16(read_bits16(memory, i))

/* STORE_<type>_<accumulator>: rounds once. */
#define STORE_F32_float(memory, i, x) write_f32(memory, i, x)
#define STORE_F64_float(memory, i, x) write_f64(memory, i, (double)(x))
#define STORE_BF16_float(memory, i, x) write_bits16(memory, i, bf16_from_f32(x))
#define STORE_F16_float(memory, i, x) write_bits16(memory, i, f16_from_f32(x))
#define STORE_F32_double(memory, i, x) write_f32(memory, i, (float)(x))
#define STORE_F64_double(memory, i, x) write_f64(memory, i, x)
#define STORE_BF16_double(memory, i, x) write_bits16(memory, i, bf16_from_f32(f32_odd_from_f64(x)))
#define STORE_F16_double(memory, i, x) write_bits16(memory, i, f16_from_f32(f32_odd_from_f64(x)))

#define DEFINE_CAST(from, to, sum_type)                                                            \
    static void cast_##from##_##to(void *dst, const void *src, size_t numel)                       \
    {                                                                                              \
        for (size_t i = 0; i < numel; i++) {                                                       \
            STORE_##to##_##sum_type(dst, i, LOAD_##from(src, i));                                  \
        }                                                                                          \
    }

#define DEFINE_REDUCE(from, to, sum_type)                                                          \
    static void reduce_##from##_##to(void *dst, const void *const *srcs, size_t n_srcs,            \
                                     size_t numel, double divisor, bool accumulate)                \
    {                                                                                              \
        sum_type sum[BLOCK];                                                                       \
                                                                                                   \
        for (size_t start = 0; start < numel; start += BLOCK) {                                    \
            size_t n = numel - start < BLOCK ? numel - start : BLOCK;                              \
                                                                                                   \
            for (size_t k = 0; k < n; k++) {                                                       \
                sum[k] = (sum_type)LOAD_##from(srcs[0], start + k);                                \
            }                                                                                      \
            for (size_t s = 1; s < n_srcs; s++) {                                                  \
                for (size_t k = 0; k < n; k++) {                                                   \
                    sum[k] += (sum_type)LOAD_##from(srcs[s], start + k);                           \
                }                                                                                  \
            }                                                                                      \
            for (size_t k = 0; k < n && divisor != 1; k++) {                                       \
                sum[k] /= (sum_type)divisor;                                                       \
            }                                                                                      \
            for (size_t k = 0; k < n && accumulate; k++) {                                         \
                sum[k] = (sum_type)LOAD_##to(dst, start + k) + sum[k];                             \
            }                                                                                      \
            for (size_t k = 0; k < n; k++) {                                                       \
                STORE_##to##_##sum_type(dst, start + k, sum[k]);                                   \
            }                                                                                      \
        }                                                                                          \
    }

static void copy(void *dst, const void *src, size_t bytes)
{
    if (bytes != 0) { /* empty ranges may come as null pointers */
        memcpy(dst, src, bytes);
    }
}

#define DEFINE_SAME(name, bytes)                                                                   \
    static void cast_##name##_##name(void *dst, const void *src, size_t numel)                     \
    {                                                                                              \
        copy(dst, src, (bytes) * numel);                                                           \
    }

DEFINE_SAME(F32, 4)
DEFINE_SAME(F64, 8)
DEFINE_SAME(BF16, 2)
DEFINE_SAME(F16, 2)

DEFINE_CAST(F32, F64, float)
DEFINE_CAST(F32, BF16, float)
DEFINE_CAST(F32, F16, float)
DEFINE_CAST(F64, F32, double)
DEFINE_CAST(F64, BF16, double)
DEFINE_CAST(F64, F16, double)
DEFINE_CAST(BF16, F32, float)
DEFINE_CAST(BF16, F64, float)
DEFINE_CAST(BF16, F16, float)
DEFINE_CAST(F16, F32, float)
DEFINE_CAST(F16, F64, float)
DEFINE_CAST(F16, BF16, float)

DEFINE_REDUCE(F32, F32, float)
DEFINE_REDUCE(F32, F64, double)
DEFINE_REDUCE(F32, BF16, float)
DEFINE_REDUCE(F32, F16, float)
DEFINE_REDUCE(F64, F32, double)
DEFINE_REDUCE(F64, F64, double)
DEFINE_REDUCE(F64, BF16, double)
DEFINE_REDUCE(F64, F16, double)
DEFINE_REDUCE(BF16, F32, float)
DEFINE_REDUCE(BF16, F64, double)
DEFINE_REDUCE(BF16, BF16, float)
DEFINE_REDUCE(BF16, F16, float)
DEFINE_REDUCE(F16, F32, float)
DEFINE_REDUCE(F16, F64, double)
DEFINE_REDUCE(F16, BF16, float)
DEFINE_REDUCE(F16, F16, float)

static void adam_moments(const fc_adam *a, const float *param, const float *grad, float *exp_avg,
                         float *exp_avg_sq, float *largest, float *squares, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        squares[i] = adam_moments_one(a, false, param, grad, exp_avg, exp_avg_sq, largest, i);
    }
}

static void adam_update(const fc_adam *a, float *param, const float *exp_avg, const float *roots,
                        size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        adam_update_one(a, param, exp_avg, roots[i], i);
    }
}

static void adam(const fc_adam *a, fc_root root, float *param, const float *grad, float *exp_avg,
                 float *exp_avg_sq, float *largest, size_t numel, size_t n_tail)
{
    (void)root; /* there is one */
    for (size_t i = 0; i < numel; i++) {
        bool is_tail = i + n_tail >= numel;
        float square = adam_moments_one(a, is_tail, param, grad, exp_avg, exp_avg_sq, largest, i);

        adam_update_one(a, param, exp_avg, sqrtf(square), i);
    }
}

static bool roots(fc_root root, float *x, size_t numel)
{
    for (size_t i = 0; i < numel && root == FC_ROOT_NEAREST; i++) {
        x[i] = sqrtf(x[i]);
    }
    return root == FC_ROOT_NEAREST;
}

static void sgd(const fc_sgd *s, float *param, const float *grad, float *buffer, size_t numel,
                size_t n_tail)
{
    for (size_t i = 0; i < numel; i++) {
        sgd_one(s, i + n_tail >= numel, param, grad, buffer, i);
    }
}

static float norm(const float *x, size_t numel)
{
    float partial[NORM_LANES] = {0};
    size_t whole = numel - numel % NORM_LANES;

    for (size_t i = 0; i < whole; i++) {
        partial[i % NORM_LANES] += x[i] * x[i];
    }
    for (size_t k = 1; k < NORM_LANES; k++) {
        partial[0] += partial[k];
    }
    return sqrtf(norm_add_rest(partial[0], x + whole, numel - whole));
}

static void norms(float *out, const float *const *xs, const size_t *numels, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        out[i] = norm(xs[i], numels[i]);
    }
}

static void multiply(float *x, float by, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        x[i] *= by;
    }
}

#define ROW(op, from)                                                                              \
    {                                                                                              \
        [FC_F32] = op##_##from##_F32,                                                              \
        [FC_F64] = op##_##from##_F64,                                                              \
        [FC_BF16] = op##_##from##_BF16,                                                            \
        [FC_F16] = op##_##from##_F16,                                                              \
    }

static const fc_kern_table table = {
    .name = "ref",
    .copy = copy,
    .copy_away = copy,
    .cast = {[FC_F32] = ROW(cast, F32),
             [FC_F64] = ROW(cast, F64),
             [FC_BF16] = ROW(cast, BF16),
             [FC_F16] = ROW(cast, F16)},
    .reduce = {[FC_F32] = ROW(reduce, F32),
               [FC_F64] = ROW(reduce, F64),
               [FC_BF16] = ROW(reduce, BF16),
               [FC_F16] = ROW(reduce, F16)},
    .reduce_int = REDUCE_INT_TABLE,
    .adam_moments = adam_moments,
    .adam_update = adam_update,
    .adam = adam,
    .roots = roots,
    .sgd = sgd,
    .norms = norms,
    .multiply = multiply,
};

const fc_kern_table *fc_kern_table_ref(void)
{
    return &table;
}
