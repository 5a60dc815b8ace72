/* Optimizer arithmetic over a file's vectors; included by kern_vector.h, which says what they need.
 *
 * Beside that: sub_f32, larger_f32 (as larger_one), sqrt_f32, fma_f32(a, b, c) = a * b + c rounded
 * once, HAS_ESTIMATED_ROOT and estimated_root(x) (anything where there is none),
 * sse_inverse_root(x), what rsqrtps says, all_between(x, least, most), where_between(x, least,
 * most, inside, outside), and v8, an array of eight floats in one or several registers, with
 * load_v8, zero_v8, add_v8, mul_v8 and store_v8.
 */
#ifndef FC_KERNELS_KERN_OPTIM_VECTOR_H
#define FC_KERNELS_KERN_OPTIM_VECTOR_H

#include "kernels/kern_optim_scalar.h"

INLINE vf lerp(vf from, vf to, vf weight, bool is_small)
{
    vf way = sub_f32(to, from);

    return is_small ? fma_f32(weight, way, from) : fma_f32(weight, way, to);
}

/* Memory is waited for, not arithmetic: the next lines of an array are asked for so many bytes
 * ahead, across pages, where the CPU's own look ahead ends. */
#define AHEAD 1024

INLINE void fetch(const float *x)
{
    __builtin_prefetch((const void *)((uintptr_t)x + AHEAD));
}

typedef struct adam_numbers {
    bool has_l2, is_small, is_maximized;
    vf decay, l2, weight1, beta2, weight2, correction, eps, step_size;
} adam_numbers;

INLINE adam_numbers adam_numbers_of(const fc_adam *a, bool has_l2)
{
    const bool is_small = fabsf(a->weight1) < 0.5f;

    return (adam_numbers){.has_l2 = has_l2,
                          .is_small = is_small,
                          .is_maximized = a->is_maximized,
                          .decay = set_f32(a->decay),
                          .l2 = set_f32(a->l2),
                          .weight1 = set_f32(is_small ? a->weight1 : a->weight1 - 1.0f),
                          .beta2 = set_f32(a->beta2),
                          .weight2 = set_f32(a->weight2),
                          .correction = set_f32(a->correction),
                          .eps = set_f32(a->eps),
                          .step_size = set_f32(a->step_size)};
}

INLINE vf turned(vf x)
{
    return sub_f32(set_f32(-0.0f), x);
}

INLINE float *at(float *x, size_t i)
{
    return x == NULL ? NULL : x + i;
}

/* Returns what it puts into exp_avg_sq, or into `largest` if that is not null. */
INLINE vf adam_moments_at(const adam_numbers *a, const float *param, const float *grad,
                          float *exp_avg, float *exp_avg_sq, float *largest)
{
    vf g = a->is_maximized ? turned(load_f32(grad)) : load_f32(grad);
    vf square = mul_f32(load_f32(exp_avg_sq), a->beta2);

    fetch(grad);
    fetch(exp_avg);
    fetch(exp_avg_sq);
    if (a->has_l2) {
        g = fma_f32(load_f32(param), a->l2, g);
    }
    square = fma_f32(mul_f32(a->weight2, g), g, square);
    store_f32(exp_avg, lerp(load_f32(exp_avg), g, a->weight1, a->is_small), false);
    store_f32(exp_avg_sq, square, false);
    if (largest != NULL) {
        fetch(largest);
        square = larger_f32(load_f32(largest), square);
        store_f32(largest, square, false);
    }
    return square;
}

INLINE void adam_update_at(const adam_numbers *a, float *param, const float *exp_avg, vf root)
{
    vf denominator = add_f32(div_f32(root, a->correction), a->eps);
    vf way = div_f32(mul_f32(a->step_size, load_f32(exp_avg)), denominator);

    fetch(param);
    store_f32(param, add_f32(mul_f32(load_f32(param), a->decay), way), false);
}

static void adam_moments(const fc_adam *a, const float *param, const float *grad, float *exp_avg,
                         float *exp_avg_sq, float *largest, float *squares, size_t numel)
{
    const adam_numbers numbers = adam_numbers_of(a, a->l2 != 0.0f);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        vf square = adam_moments_at(&numbers, param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                                    at(largest, i));

        store_f32(squares + i, square, false);
    }
    for (; i < numel; i++) {
        squares[i] = adam_moments_one(a, false, param, grad, exp_avg, exp_avg_sq, largest, i);
    }
}

static void adam_update(const fc_adam *a, float *param, const float *exp_avg, const float *roots,
                        size_t numel)
{
    const adam_numbers numbers = adam_numbers_of(a, a->l2 != 0.0f);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        adam_update_at(&numbers, param + i, exp_avg + i, load_f32(roots + i));
    }
    for (; i < numel; i++) {
        adam_update_one(a, param, exp_avg, roots[i], i);
    }
}

/* What is refined: normal numbers but for the very largest. */
#define LEAST_REFINED 0x1p-126f
#define MOST_REFINED 0x1.ffep127f

static __attribute__((noinline)) vf unusual_refined_root(vf x, vf refined)
{
    vf none = set_f32(__builtin_nanf(""));
    vf nearest = where_between(x, -__builtin_inff(), -0x1p-149f, none, sqrt_f32(x));

    return where_between(x, LEAST_REFINED, MOST_REFINED, refined, nearest);
}

/* Goldschmidt's iteration, then a step by what is left of x. */
INLINE vf refined_root(vf x)
{
    const vf half = set_f32(0.5f);
    vf inverse = sse_inverse_root(x);
    vf root = mul_f32(x, inverse);
    vf half_inverse = mul_f32(inverse, half);
    vf error = sub_f32(half, mul_f32(root, half_inverse));
    vf rest;

    root = add_f32(mul_f32(root, error), root);
    half_inverse = add_f32(mul_f32(half_inverse, error), half_inverse);
    rest = sub_f32(x, mul_f32(root, root));
    root = add_f32(mul_f32(rest, half_inverse), root);
    if (__builtin_expect(!all_between(x, LEAST_REFINED, MOST_REFINED), 0)) {
        return unusual_refined_root(x, root);
    }
    return root;
}

INLINE vf root_of(fc_root root, vf x)
{
    return root == FC_ROOT_NEAREST     ? sqrt_f32(x)
           : root == FC_ROOT_ESTIMATED ? estimated_root(x)
                                       : refined_root(x);
}

INLINE float root_of_one(fc_root root, float x)
{
    const vf same = root_of(root, set_f32(x));
    float one;

    memcpy(&one, &same, sizeof(one));
    return one;
}

INLINE void adam_of(const fc_adam *a, fc_root root, bool has_l2, float *param, const float *grad,
                    float *exp_avg, float *exp_avg_sq, float *largest, size_t numel, size_t n_tail)
{
    const adam_numbers numbers = adam_numbers_of(a, has_l2);
    size_t i = 0;

    for (; i + LANES + n_tail <= numel; i += LANES) {
        vf square = adam_moments_at(&numbers, param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                                    at(largest, i));

        adam_update_at(&numbers, param + i, exp_avg + i, root_of(root, square));
    }
    for (; i < numel; i++) {
        bool is_tail = i + n_tail >= numel;
        float square = adam_moments_one(a, is_tail, param, grad, exp_avg, exp_avg_sq, largest, i);

        adam_update_one(a, param, exp_avg, root_of_one(root, square), i);
    }
}

INLINE void adam_with(const fc_adam *a, fc_root root, float *param, const float *grad,
                      float *exp_avg, float *exp_avg_sq, float *largest, size_t numel,
                      size_t n_tail)
{
    if (a->l2 == 0.0f) {
        adam_of(a, root, false, param, grad, exp_avg, exp_avg_sq, largest, numel, n_tail);
    } else {
        adam_of(a, root, true, param, grad, exp_avg, exp_avg_sq, largest, numel, n_tail);
    }
}

static void adam(const fc_adam *a, fc_root root, float *param, const float *grad, float *exp_avg,
                 float *exp_avg_sq, float *largest, size_t numel, size_t n_tail)
{
    if (root == FC_ROOT_NEAREST) {
        adam_with(a, FC_ROOT_NEAREST, param, grad, exp_avg, exp_avg_sq, largest, numel, n_tail);
    } else if (root == FC_ROOT_ESTIMATED) {
        adam_with(a, FC_ROOT_ESTIMATED, param, grad, exp_avg, exp_avg_sq, largest, numel, n_tail);
    } else {
        adam_with(a, FC_ROOT_REFINED, param, grad, exp_avg, exp_avg_sq, largest, numel, n_tail);
    }
}

static bool roots(fc_root root, float *x, size_t numel)
{
    size_t i = 0;

    if (root == FC_ROOT_ESTIMATED && !HAS_ESTIMATED_ROOT) {
        return false;
    }
    for (; i + LANES <= numel; i += LANES) {
        store_f32(x + i, root_of(root, load_f32(x + i)), false);
    }
    for (; i < numel; i++) {
        x[i] = root_of_one(root, x[i]);
    }
    return true;
}

INLINE void sgd_of(const fc_sgd *s, bool has_decay, bool has_buffer, bool is_nesterov, float *param,
                   const float *grad, float *buffer, size_t numel, size_t n_tail)
{
    const vf decay = set_f32(s->decay);
    const vf momentum = set_f32(s->momentum);
    const vf weight = set_f32(s->weight);
    const vf step_size = set_f32(s->step_size);
    size_t i = 0;

    for (; i + LANES + n_tail <= numel; i += LANES) {
        vf p = load_f32(param + i);
        vf g = s->is_maximized ? turned(load_f32(grad + i)) : load_f32(grad + i);

        if (has_decay) {
            g = fma_f32(p, decay, g);
        }
        if (has_buffer) {
            vf b = fma_f32(g, weight, mul_f32(load_f32(buffer + i), momentum));

            store_f32(buffer + i, b, false);
            g = is_nesterov ? fma_f32(b, momentum, g) : b;
        }
        store_f32(param + i, fma_f32(g, step_size, p), false);
    }
    for (; i < numel; i++) {
        sgd_one(s, i + n_tail >= numel, param, grad, buffer, i);
    }
}

static void sgd(const fc_sgd *s, float *param, const float *grad, float *buffer, size_t numel,
                size_t n_tail)
{
    const bool has_decay = s->decay != 0.0f;

    if (buffer == NULL) {
        sgd_of(s, has_decay, false, false, param, grad, buffer, numel, n_tail);
    } else if (s->is_nesterov) {
        sgd_of(s, has_decay, true, true, param, grad, buffer, numel, n_tail);
    } else {
        sgd_of(s, has_decay, true, false, param, grad, buffer, numel, n_tail);
    }
}

/* The norm of x, of which `sums` holds the first `start` elements. */
static float norm_from(v8 sums, const float *x, size_t start, size_t numel)
{
    float partial[NORM_LANES];
    size_t i = start;

    for (; i + NORM_LANES <= numel; i += NORM_LANES) {
        v8 values = load_v8(x + i);

        sums = add_v8(sums, mul_v8(values, values));
    }
    store_v8(partial, sums);
    for (size_t k = 1; k < NORM_LANES; k++) {
        partial[0] += partial[k];
    }
    return sqrtf(norm_add_rest(partial[0], x + i, numel - i));
}

/* Additions of one norm wait for each other; those of several do not. */
#define NORM_PACK 4

static void norms_of_pack(float *out, const float *const *xs, const size_t *numels)
{
    v8 sums[NORM_PACK];
    size_t common = numels[0];
    size_t i = 0;

    for (size_t k = 0; k < NORM_PACK; k++) {
        sums[k] = zero_v8();
        common = numels[k] < common ? numels[k] : common;
    }
    for (; i + NORM_LANES <= common; i += NORM_LANES) {
        for (size_t k = 0; k < NORM_PACK; k++) {
            v8 values = load_v8(xs[k] + i);

            sums[k] = add_v8(sums[k], mul_v8(values, values));
        }
    }
    for (size_t k = 0; k < NORM_PACK; k++) {
        out[k] = norm_from(sums[k], xs[k], i, numels[k]);
    }
}

static void norms(float *out, const float *const *xs, const size_t *numels, size_t n)
{
    size_t i = 0;

    for (; i + NORM_PACK <= n; i += NORM_PACK) {
        norms_of_pack(out + i, xs + i, numels + i);
    }
    for (; i < n; i++) {
        out[i] = norm_from(zero_v8(), xs[i], 0, numels[i]);
    }
}

static void multiply(float *x, float by, size_t numel)
{
    const vf factor = set_f32(by);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        store_f32(x + i, mul_f32(load_f32(x + i), factor), false);
    }
    for (; i < numel; i++) {
        x[i] *= by;
    }
}

#endif
