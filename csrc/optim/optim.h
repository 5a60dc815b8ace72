/* Optimizer steps over many parameters, in blocks that threads share.
 *
 * All elements, one parameter after the other, are cut into blocks of equally many: small
 * parameters share a block, large ones have several. Blocks may run in any order and at once; the
 * result is that of one pass over each parameter. All memory is the caller's. Nothing fails.
 * Threading: multi.
 */
#ifndef FC_OPTIM_OPTIM_H
#define FC_OPTIM_OPTIM_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Elements of a block. Where PyTorch's operator takes the square roots of that many at once, they
 * stay in the second-level cache. */
#define FC_OPTIM_BLOCK ((size_t)1 << 14)

/* A parameter to step. */
typedef struct fc_optim_param {
    float *param;
    const float *grad;
    float *state[3]; /* of Adam exp_avg, exp_avg_sq and, as AMSGrad, the largest of those; of SGD
                      * the buffer of momentum. NULL: there is none */
    size_t numel;
    size_t first; /* elements of those before: set by fc_optim_cut */
    fc_adam adam; /* of Adam */
} fc_optim_param;

/* How many blocks they make. */
size_t fc_optim_cut(fc_optim_param *params, size_t n_params);

/* x[i] = square root of x[i] */
typedef void (*fc_roots_fn)(float *x, size_t numel);

/* How parameters are stepped. */
typedef struct fc_optim_rule {
    bool is_adam; /* else SGD */
    /* How many arrays of state a parameter has: of Adam 2, as AMSGrad 3; of SGD 0 or, with
     * momentum, 1. */
    size_t n_state;
    fc_adam_options adam;
    fc_root root;      /* of Adam; FC_ROOT_COUNT: as `roots` takes them */
    fc_roots_fn roots; /* NULL: not needed */
    fc_sgd sgd;
    /* 0, or how many floats PyTorch's fused kernel takes at a time, for its way of rounding what is
     * left at a parameter's end. */
    size_t fused_lanes;
} fc_optim_rule;

/* The key under which optimizers keep a parameter's state[i]. */
const char *fc_optim_key(const fc_optim_rule *rule, size_t i);

/* One block. */
void fc_optim_step(const fc_optim_param *params, size_t n_params, size_t block,
                   const fc_optim_rule *rule);

/* The root of the kernels in use that gives the bits of `roots`; FC_ROOT_COUNT: none. */
fc_root fc_optim_root_of(fc_roots_fn roots);

#ifdef __cplusplus
}
#endif
#endif
