/* The kernels for NVIDIA GPUs: what their library offers, and how the core opens it.
 *
 * The library stands alone (its own CUDA runtime, nothing of torch) and is opened when a CUDA
 * device is first used. Functions launch on a stream (a cudaStream_t) of the thread's current
 * device and return at once: 0, or a cudaError_t. They allocate nothing, never wait, and keep no
 * state, so that they may be captured into a graph. The plan, the addresses and the numbers are
 * read during the call; the plan's runs, stretches and slots are also read on the device, from
 * `runs`, `stretches` and `slots`. Threading: multi.
 */
#ifndef FC_KERNELS_CUDA_KERN_CUDA_H
#define FC_KERNELS_CUDA_KERN_CUDA_H

#include "base/status.h"
#include "kernels/cuda/runs.h"
#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FC_CUDA_VERSION 1 /* of this interface; a library of another one is refused */

typedef struct fc_cuda_launch {
    const fc_runs *plan;
    const fc_run *runs;        /* plan->runs in device memory */
    const uint32_t *stretches; /* plan->stretches in device memory */
    const fc_slot *slots;      /* plan->slots in device memory; for sums of squares */
    const uint64_t *addresses; /* of the bases, by the numbers that the plan's maker gave out */
    void *stream;
} fc_cuda_launch;

typedef struct fc_cuda_kernels {
    int version;
    const char *(*error_text)(int error);
    /* dst = src, cast. A source whose base has address 0 is read as zeros. Packs an all-gather's
     * input, takes its output apart, stages gradients. */
    int (*move)(const fc_cuda_launch *launch);
    /* dst = (accumulate ? dst : 0) + src / divisor, as fc_reduce_fn adds one source. */
    int (*finish)(const fc_cuda_launch *launch, double divisor, bool accumulate);
    /* sums[slot] = sum of squares; `parts` is scratch memory on the device, a double per slot and
     * one per stretch of the plan. The same numbers in the same plan give the same bits. */
    int (*sum_squares)(const fc_cuda_launch *launch, double *parts, double *sums);
    /* Operands: parameter, gradient, exp_avg, exp_avg_sq, all float32. Rounds as torch's foreach
     * operators are written to. */
    int (*adam)(const fc_cuda_launch *launch, const fc_adam *adam);
} fc_cuda_kernels;

/* The library's one symbol. */
const fc_cuda_kernels *fc_cuda_kernels_v1(void);

/* Opens the library at `path`, which stays open for good; the second call gives what the first
 * gave. FC_ERR_UNSUPPORTED with a sentence if that is not possible. */
FC_MUST_CHECK fc_status fc_cuda_open(const char *path, const fc_cuda_kernels **kernels_out);

/* `move` or, where something is left to divide or to add to, `finish`. FC_ERR_SYSTEM names what the
 * launch was for and the unit. */
FC_MUST_CHECK fc_status fc_cuda_move(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch,
                                     double divisor, bool accumulate, const char *what,
                                     const char *unit);

#ifdef __cplusplus
}
#endif
#endif
