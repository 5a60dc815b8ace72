/* Norms and multiplication of many tensors; see clip.h. */
#define _GNU_SOURCE /* qsort_r */

#include "optim/clip.h"

#include "kernels/kernels.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static int compare(const void *a, const void *b, void *numels)
{
    const size_t i = *(const size_t *)a, j = *(const size_t *)b;
    const size_t *of = numels;

    if (of[i] != of[j]) {
        return of[i] > of[j] ? -1 : 1;
    }
    return i < j ? -1 : 1;
}

void fc_clip_order(const size_t *numels, size_t n, size_t *order_out)
{
    for (size_t i = 0; i < n; i++) {
        order_out[i] = i;
    }
    qsort_r(order_out, n, sizeof(*order_out), compare, (void *)numels);
}

/* Up to FC_CLIP_GRAIN of them. PyTorch squares nothing where there is only one element. */
static void some_norms(const fc_clip_tensors *all, const size_t *numbers, size_t n, float *norms)
{
    const float *data[FC_CLIP_GRAIN];
    size_t numels[FC_CLIP_GRAIN];
    float found[FC_CLIP_GRAIN];

    for (size_t i = 0; i < n; i++) {
        data[i] = all->data[numbers[i]];
        numels[i] = all->numels[numbers[i]];
    }
    fc_kern()->norms(found, data, numels, n);
    for (size_t i = 0; i < n; i++) {
        norms[numbers[i]] = numels[i] == 1 ? fabsf(*data[i]) : found[i];
    }
}

void fc_clip_norms(const fc_clip_tensors *all, size_t begin, size_t end, float *norms)
{
    for (size_t n; begin < end; begin += n) {
        n = end - begin < FC_CLIP_GRAIN ? end - begin : FC_CLIP_GRAIN;
        some_norms(all, all->order + begin, n, norms);
    }
}

void fc_clip_multiply(const fc_clip_tensors *all, size_t begin, size_t end, float factor)
{
    while (end-- > begin) {
        const size_t number = all->order[end];

        fc_kern()->multiply(all->data[number], factor, all->numels[number]);
    }
}

/* As PyTorch's operators round it: a number's product with a reciprocal. */
float fc_clip_factor_of(float max_norm, float norm)
{
    const float reciprocal = 1.0f / (norm + 1e-6f);
    const float factor = reciprocal * max_norm;

    return factor > 1.0f ? 1.0f : factor;
}

bool fc_clip_flushes_denormals(void)
{
    volatile float least = FLT_TRUE_MIN, one = 1.0f;

    return least * one == 0.0f;
}
