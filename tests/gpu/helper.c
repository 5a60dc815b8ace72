/* For tests/gpu/gpu_check.py: plans and launches by plain numbers, and the kernels run on the host.
 */
#include "../c/emulated_cuda.h"

#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT const fc_cuda_kernels *check_emulated(void);
EXPORT fc_runs *check_plan_new(void);
EXPORT void check_plan_free(fc_runs *plan);
EXPORT int check_plan_block(fc_runs *plan, const uint64_t *n);
EXPORT int check_plan_flat(fc_runs *plan, int type, size_t numel, size_t n, const uint32_t *bases,
                           const size_t *ats);
EXPORT const void *check_plan_runs(const fc_runs *plan, size_t *bytes_out);
EXPORT const void *check_plan_stretches(const fc_runs *plan, size_t *bytes_out);
EXPORT const void *check_plan_slots(const fc_runs *plan, size_t *bytes_out);
EXPORT uint32_t check_plan_parts(const fc_runs *plan);
EXPORT const fc_cuda_kernels *check_open(const char *path);
EXPORT const char *check_error_text(const fc_cuda_kernels *kernels, int error);
EXPORT const char *check_message(void);
EXPORT int check_move(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch);
EXPORT int check_finish(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch,
                        double divisor, int accumulate);
EXPORT int check_sum_squares(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch,
                             double *parts, double *sums);
EXPORT int check_adam(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch, double step,
                      const double *options);

const fc_cuda_kernels *check_emulated(void)
{
    return &emulated_kernels;
}

fc_runs *check_plan_new(void)
{
    fc_runs *plan = malloc(sizeof(*plan));

    if (plan != NULL) {
        fc_runs_init(plan);
    }
    return plan;
}

void check_plan_free(fc_runs *plan)
{
    fc_runs_clear(plan);
    free(plan);
}

/* planes, lines, numel; then of `to` and of `from`: base, type, at, line stride, plane stride. */
int check_plan_block(fc_runs *plan, const uint64_t *n)
{
    const fc_block block = {n[0],
                            n[1],
                            n[2],
                            {(uint32_t)n[3], (fc_dtype)n[4], n[5], n[6], n[7]},
                            {(uint32_t)n[8], (fc_dtype)n[9], n[10], n[11], n[12]}};

    return fc_runs_add(plan, &block);
}

int check_plan_flat(fc_runs *plan, int type, size_t numel, size_t n, const uint32_t *bases,
                    const size_t *ats)
{
    return fc_runs_add_flat(plan, (fc_dtype)type, numel, n, bases, ats);
}

const void *check_plan_runs(const fc_runs *plan, size_t *bytes_out)
{
    *bytes_out = plan->n_runs * sizeof(*plan->runs);
    return plan->runs;
}

const void *check_plan_stretches(const fc_runs *plan, size_t *bytes_out)
{
    *bytes_out = plan->n_stretches * sizeof(*plan->stretches);
    return plan->stretches;
}

const void *check_plan_slots(const fc_runs *plan, size_t *bytes_out)
{
    *bytes_out = plan->n_slots * sizeof(*plan->slots);
    return plan->slots;
}

/* What sums of squares need of scratch memory, in numbers. */
uint32_t check_plan_parts(const fc_runs *plan)
{
    return (uint32_t)(plan->n_slots + plan->n_stretches);
}

/* As the core opens it; NULL if that fails. */
const fc_cuda_kernels *check_open(const char *path)
{
    const fc_cuda_kernels *kernels = NULL;

    return fc_cuda_open(path, &kernels) == FC_OK ? kernels : NULL;
}

const char *check_error_text(const fc_cuda_kernels *kernels, int error)
{
    return kernels->error_text(error);
}

const char *check_message(void)
{
    return fc_last_message();
}

int check_move(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch)
{
    return kernels->move(launch);
}

int check_finish(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch, double divisor,
                 int accumulate)
{
    return kernels->finish(launch, divisor, accumulate != 0);
}

int check_sum_squares(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch, double *parts,
                      double *sums)
{
    return kernels->sum_squares(launch, parts, sums);
}

/* options: lr, beta1, beta2, eps, weight_decay, and whether the decay is decoupled. */
int check_adam(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch, double step,
               const double *options)
{
    const fc_adam_options set = {options[0], options[1],      options[2], options[3],
                                 options[4], options[5] != 0, false};
    fc_adam numbers;

    fc_adam_set(&numbers, &set, step);
    return kernels->adam(launch, &numbers);
}
