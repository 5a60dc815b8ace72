/* Optimizer arithmetic on one element, and as plain loops: the reference of kern_optim_vector.h.
 *
 * Where a product and a sum are rounded once (fmaf) and where twice is part of the result.
 */
#ifndef FC_KERNELS_KERN_OPTIM_SCALAR_H
#define FC_KERNELS_KERN_OPTIM_SCALAR_H

#include "kernels/kern_both.h"
#include "kernels/kernels.h"

#include <math.h>

#define NORM_LANES 8 /* partial sums of a norm, whatever the width of a vector */

FC_BOTH float lerp_one(float from, float to, float weight)
{
    float way = to - from;

    return fabsf(weight) < 0.5f ? fmaf(weight, way, from) : fmaf(weight - 1.0f, way, to);
}

/* With the decay that is part of it. */
FC_BOTH float gradient_one(float grad, bool is_maximized, float param, float decay)
{
    float g = is_maximized ? -grad : grad;

    return decay == 0.0f ? g : fmaf(param, decay, g);
}

/* The second number where the first is no larger; a NaN if one of them is. */
FC_BOTH float larger_one(float x, float y)
{
    return x > y || x != x ? x : y;
}

/* Returns what it puts into exp_avg_sq, or into `largest` if that is not null. `is_tail`: torch's
 * fused kernel rounds otherwise in what is left after its last vector. */
FC_BOTH float adam_moments_one(const fc_adam *a, bool is_tail, const float *param,
                               const float *grad, float *exp_avg, float *exp_avg_sq, float *largest,
                               size_t i)
{
    float g = gradient_one(grad[i], a->is_maximized, param[i], a->l2);
    float scaled = a->weight2 * g;
    float square = is_tail ? fmaf(exp_avg_sq[i], a->beta2, scaled * g)
                           : fmaf(scaled, g, exp_avg_sq[i] * a->beta2);

    exp_avg[i] = lerp_one(exp_avg[i], g, a->weight1);
    exp_avg_sq[i] = square;
    if (largest != NULL) {
        square = largest[i] = larger_one(largest[i], square);
    }
    return square;
}

FC_BOTH void adam_update_one(const fc_adam *a, float *param, const float *exp_avg, float root,
                             size_t i)
{
    float denominator = root / a->correction + a->eps;

    param[i] = param[i] * a->decay + a->step_size * exp_avg[i] / denominator;
}

FC_BOTH void sgd_one(const fc_sgd *s, bool is_tail, float *param, const float *grad, float *buffer,
                     size_t i)
{
    float g = gradient_one(grad[i], s->is_maximized, param[i], s->decay);

    if (buffer != NULL) {
        buffer[i] = is_tail ? fmaf(buffer[i], s->momentum, g * s->weight)
                            : fmaf(g, s->weight, buffer[i] * s->momentum);
        g = s->is_nesterov ? fmaf(buffer[i], s->momentum, g) : buffer[i];
    }
    param[i] = fmaf(g, s->step_size, param[i]);
}

/* Adds the squares of the fewer than NORM_LANES elements after the last whole vector. PyTorch's
 * compiler squares four of them at once, if there are, and fuses the others with the sum. */
FC_BOTH float norm_add_rest(float sum, const float *x, size_t numel)
{
    size_t n_squared = numel >= 4 ? 4 : 0;

    for (size_t i = 0; i < n_squared; i++) {
        sum += x[i] * x[i];
    }
    for (size_t i = n_squared; i < numel; i++) {
        sum = fmaf(x[i], x[i], sum);
    }
    return sum;
}

#endif
