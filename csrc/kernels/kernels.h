/* Memory in, memory out: copy, cast, reduce and optimizer arithmetic over flat arrays.
 *
 * One table per instruction set; fc_kern() is the best one that this CPU runs, chosen once.
 * Kernels allocate nothing, keep no state and never fail; sources and destination do not overlap.
 * No alignment is required. Threading: multi.
 */
#ifndef FC_KERNELS_KERNELS_H
#define FC_KERNELS_KERNELS_H

#include "base/dtype.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* dst[i] = src[i] rounded to nearest even; NaN stays NaN, denormals are kept. */
typedef void (*fc_cast_fn)(void *dst, const void *src, size_t numel);

/* dst[i] = (accumulate ? dst[i] : 0) + (srcs[0][i] + srcs[1][i] + ...) / divisor
 *
 * Sources are added in index order, in float for F32, BF16 and F16 and in double for F64 (whenever
 * source or destination is F64); integers wrap and ignore the divisor. The result is rounded once.
 * n_srcs >= 1. divisor 1 means no division. Without accumulate nothing is added to the quotient: a
 * sum of -0 stays -0. Tables agree bit by bit, but for the payload of a NaN made of several NaN. */
typedef void (*fc_reduce_fn)(void *dst, const void *const *srcs, size_t n_srcs, size_t numel,
                             double divisor, bool accumulate);

/* One step of Adam, over F32. PyTorch's element-wise operations round as these kernels do. */
typedef struct fc_adam {
    float decay;   /* multiplies the parameter first; 1: nothing */
    float l2;      /* times the parameter is added to the gradient; 0: nothing */
    float weight1; /* 1 - beta1 */
    float beta2;
    float weight2;    /* 1 - beta2 */
    float correction; /* square root of 1 - beta2^step */
    float eps;
    float step_size;   /* -lr / (1 - beta1^step) */
    bool is_maximized; /* steps along the gradient: it is taken with its sign turned */
} fc_adam;

typedef struct fc_adam_options {
    double lr, beta1, beta2, eps, weight_decay;
    bool is_decoupled; /* AdamW: the decay is not part of the gradient */
    bool is_maximized;
} fc_adam_options;

/* How square roots are taken. */
typedef enum fc_root {
    FC_ROOT_NEAREST,
    FC_ROOT_ESTIMATED, /* one step of refinement from AVX-512's estimate, as MKL does: one in two
                        * hundred is the second nearest number */
    FC_ROOT_REFINED,   /* two steps from SSE's estimate with every product rounded, as MKL does on
                        * CPUs that are not Intel's: one in five is the second nearest number */
    FC_ROOT_COUNT
} fc_root;

/* The numbers of step `step`, counted from 1. */
void fc_adam_set(fc_adam *adam, const fc_adam_options *options, double step);

typedef struct fc_sgd {
    float decay;     /* times the parameter is added to the gradient; 0: nothing is */
    float momentum;  /* of the buffer */
    float weight;    /* of the gradient in the buffer: 1 - dampening */
    float step_size; /* -lr */
    bool is_nesterov;
    bool is_maximized; /* as of Adam */
} fc_sgd;

typedef struct fc_kern_table {
    const char *name; /* "ref", "avx2", "avx512", "avx512_bf16" */
    /* Streams past the cache where that is faster (large sizes). */
    void (*copy)(void *dst, const void *src, size_t bytes);
    /* The same for a destination that this core does not read soon: streams from smaller sizes on.
     */
    void (*copy_away)(void *dst, const void *src, size_t bytes);
    fc_cast_fn cast[FC_FLOAT_COUNT][FC_FLOAT_COUNT];     /* [from][to]; all set, same type copies */
    fc_reduce_fn reduce[FC_FLOAT_COUNT][FC_FLOAT_COUNT]; /* [source][destination]; all set */
    fc_reduce_fn reduce_int[FC_DTYPE_COUNT]; /* U8..I64: source type == destination type */

    /* exp_avg = lerp(exp_avg, grad, weight1);
     * squares = exp_avg_sq = beta2 * exp_avg_sq + weight2 * grad^2.
     * `largest` (of AMSGrad, else null) = squares = the larger one of itself and exp_avg_sq.
     * The caller takes the square roots of `squares` before it calls adam_update: the way where
     * those of PyTorch are none of fc_root. */
    void (*adam_moments)(const fc_adam *adam, const float *param, const float *grad, float *exp_avg,
                         float *exp_avg_sq, float *largest, float *squares, size_t numel);
    /* param = decay * param + step_size * exp_avg / (roots / correction + eps) */
    void (*adam_update)(const fc_adam *adam, float *param, const float *exp_avg, const float *roots,
                        size_t numel);
    /* Both in one pass. In the last `n_tail` elements PyTorch's fused kernel rounds otherwise. */
    void (*adam)(const fc_adam *adam, fc_root root, float *param, const float *grad, float *exp_avg,
                 float *exp_avg_sq, float *largest, size_t numel, size_t n_tail);
    /* x[i] = root of x[i]; false: this table has no such root, and nothing was done. */
    bool (*roots)(fc_root root, float *x, size_t numel);
    /* buffer = momentum * buffer + weight * grad; param += step_size * buffer, or with Nesterov's
     * look ahead. Without momentum `buffer` is null. `n_tail`: as of Adam. */
    void (*sgd)(const fc_sgd *sgd, float *param, const float *grad, float *buffer, size_t numel,
                size_t n_tail);
    /* out[i] = square root of the sum of squares of xs[i], added up in eight lanes as PyTorch does.
     * Fastest where neighbours are equally long. */
    void (*norms)(float *out, const float *const *xs, const size_t *numels, size_t n);
    void (*multiply)(float *x, float by, size_t numel); /* x[i] *= by */
} fc_kern_table;

/* The table in use. */
const fc_kern_table *fc_kern(void);

/* Every table that this CPU can run, the plain C reference first. */
size_t fc_kern_tables(const fc_kern_table *const **tables_out);

/* Uses the table called `name` from now on; false if this CPU lacks it. For tests and
 * FSDP_C_KERNELS. */
bool fc_kern_use(const char *name);

/* The kernel from table fc_kern(), or NULL where the pair of types has none. Same types copy. */
fc_cast_fn fc_kern_cast(fc_dtype from, fc_dtype to);
fc_reduce_fn fc_kern_reduce(fc_dtype src, fc_dtype dst);

#ifdef __cplusplus
}
#endif
#endif
