/* Optimizer arithmetic over a file's vectors; included by kern_vector.h, which says what they need.
 *
 * Beside that: sub_f32, sqrt_f32, fma_f32(a, b, c) = a * b + c rounded once, and v8, an array of
 * eight floats in one or several registers, with load_v8, zero_v8, add_v8, mul_v8 and store_v8.
 */
#ifndef FC_KERNELS_KERN_OPTIM_VECTOR_H
#define FC_KERNELS_KERN_OPTIM_VECTOR_H

#include "kernels/kern_optim_scalar.h"

INLINE vf lerp(vf from, vf to, vf weight, bool is_small)
{
    vf way = sub_f32(to, from);

    return is_small ? fma_f32(weight, way, from) : fma_f32(weight, way, to);
}

INLINE void adam_moments_of(const fc_adam *a, bool has_l2, const float *param, const float *grad,
                            float *exp_avg, float *exp_avg_sq, float *squares, size_t numel)
{
    const bool is_small = fabsf(a->weight1) < 0.5f;
    const vf weight1 = set_f32(is_small ? a->weight1 : a->weight1 - 1.0f);
    const vf weight2 = set_f32(a->weight2);
    const vf beta2 = set_f32(a->beta2);
    const vf l2 = set_f32(a->l2);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        vf g = load_f32(grad + i);
        vf square = mul_f32(load_f32(exp_avg_sq + i), beta2);

        if (has_l2) {
            g = fma_f32(load_f32(param + i), l2, g);
        }
        square = fma_f32(mul_f32(weight2, g), g, square);
        store_f32(exp_avg + i, lerp(load_f32(exp_avg + i), g, weight1, is_small), false);
        store_f32(exp_avg_sq + i, square, false);
        store_f32(squares + i, square, false);
    }
    for (; i < numel; i++) {
        adam_moments_one(a, param, grad, exp_avg, exp_avg_sq, squares, i);
    }
}

static void adam_moments(const fc_adam *a, const float *param, const float *grad, float *exp_avg,
                         float *exp_avg_sq, float *squares, size_t numel)
{
    if (a->l2 == 0.0f) {
        adam_moments_of(a, false, param, grad, exp_avg, exp_avg_sq, squares, numel);
    } else {
        adam_moments_of(a, true, param, grad, exp_avg, exp_avg_sq, squares, numel);
    }
}

static void adam_update(const fc_adam *a, float *param, const float *exp_avg, const float *roots,
                        size_t numel)
{
    const vf correction = set_f32(a->correction);
    const vf step_size = set_f32(a->step_size);
    const vf decay = set_f32(a->decay);
    const vf eps = set_f32(a->eps);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        vf denominator = add_f32(div_f32(load_f32(roots + i), correction), eps);
        vf way = div_f32(mul_f32(step_size, load_f32(exp_avg + i)), denominator);

        store_f32(param + i, add_f32(mul_f32(load_f32(param + i), decay), way), false);
    }
    for (; i < numel; i++) {
        adam_update_one(a, param, exp_avg, roots, i);
    }
}

INLINE void adam_fused_of(const fc_adam *a, bool has_l2, float *param, const float *grad,
                          float *exp_avg, float *exp_avg_sq, size_t numel, size_t n_tail)
{
    const bool is_small = fabsf(a->weight1) < 0.5f;
    const vf weight1 = set_f32(is_small ? a->weight1 : a->weight1 - 1.0f);
    const vf weight2 = set_f32(a->weight2);
    const vf beta2 = set_f32(a->beta2);
    const vf l2 = set_f32(a->l2);
    const vf correction = set_f32(a->correction);
    const vf step_size = set_f32(a->step_size);
    const vf decay = set_f32(a->decay);
    const vf eps = set_f32(a->eps);
    size_t i = 0;

    for (; i + LANES + n_tail <= numel; i += LANES) {
        vf p = mul_f32(load_f32(param + i), decay);
        vf g = has_l2 ? fma_f32(p, l2, load_f32(grad + i)) : load_f32(grad + i);
        vf m = lerp(load_f32(exp_avg + i), g, weight1, is_small);
        vf v = mul_f32(load_f32(exp_avg_sq + i), beta2);
        vf denominator;

        v = fma_f32(mul_f32(weight2, g), g, v);
        store_f32(exp_avg + i, m, false);
        store_f32(exp_avg_sq + i, v, false);
        denominator = add_f32(div_f32(sqrt_f32(v), correction), eps);
        store_f32(param + i, add_f32(p, div_f32(mul_f32(step_size, m), denominator)), false);
    }
    for (; i < numel; i++) {
        adam_fused_one(a, i + n_tail >= numel, param, grad, exp_avg, exp_avg_sq, i);
    }
}

static void adam_fused(const fc_adam *a, float *param, const float *grad, float *exp_avg,
                       float *exp_avg_sq, size_t numel, size_t n_tail)
{
    if (a->l2 == 0.0f) {
        adam_fused_of(a, false, param, grad, exp_avg, exp_avg_sq, numel, n_tail);
    } else {
        adam_fused_of(a, true, param, grad, exp_avg, exp_avg_sq, numel, n_tail);
    }
}

INLINE void sgd_of(const fc_sgd *s, bool has_decay, bool has_buffer, bool is_nesterov, float *param,
                   const float *grad, float *buffer, size_t numel)
{
    const vf decay = set_f32(s->decay);
    const vf momentum = set_f32(s->momentum);
    const vf weight = set_f32(s->weight);
    const vf step_size = set_f32(s->step_size);
    size_t i = 0;

    for (; i + LANES <= numel; i += LANES) {
        vf p = load_f32(param + i);
        vf g = load_f32(grad + i);

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
        sgd_one(s, param, grad, buffer, i);
    }
}

static void sgd(const fc_sgd *s, float *param, const float *grad, float *buffer, size_t numel)
{
    const bool has_decay = s->decay != 0.0f;

    if (buffer == NULL) {
        sgd_of(s, has_decay, false, false, param, grad, buffer, numel);
    } else if (s->is_nesterov) {
        sgd_of(s, has_decay, true, true, param, grad, buffer, numel);
    } else {
        sgd_of(s, has_decay, true, false, param, grad, buffer, numel);
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
    for (; i < numel; i++) {
        norm_add_one(partial, x[i]);
    }
    return sqrtf(partial[0]);
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
