/* Clipping's passes over the memory of many tensors: norms, and the multiplication, in parts that
 * threads share.
 *
 * Bits are PyTorch's. All memory is the caller's. Nothing fails. Threading: multi.
 */
#ifndef FC_OPTIM_CLIP_H
#define FC_OPTIM_CLIP_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Tensors of a part: enough to be worth a thread. */
#define FC_CLIP_GRAIN ((size_t)64)

typedef struct fc_clip_tensors {
    float *const *data;
    const size_t *numels;
    const size_t *order; /* as fc_clip_order has it */
} fc_clip_tensors;

/* Numbers of the tensors, the largest first, so that those of one length stand together: the
 * kernel takes several of these at once. */
void fc_clip_order(const size_t *numels, size_t n, size_t *order_out);

/* 2-norms of those from `begin` to `end` in the order, each to its number in `norms`. */
void fc_clip_norms(const fc_clip_tensors *all, size_t begin, size_t end, float *norms);

/* The same ones times `factor`, from the end: what norms were taken of last is in the cache. */
void fc_clip_multiply(const fc_clip_tensors *all, size_t begin, size_t end, float factor);

/* What gradients of this norm are multiplied by. NaN stays. */
float fc_clip_factor_of(float max_norm, float norm);

/* Whether multiplying by one changes numbers in this thread (denormals are flushed to zero). */
bool fc_clip_flushes_denormals(void);

#ifdef __cplusplus
}
#endif
#endif
