/* The GPU kernels on the host: every thread of a launch runs its body, one after the other. */
#ifndef FC_TESTS_EMULATED_CUDA_H
#define FC_TESTS_EMULATED_CUDA_H

#include "kernels/cuda/bodies.h"
#include "kernels/cuda/kern_cuda.h"

static const char *emulated_error_text(int error)
{
    return error == 0 ? "no error" : "invalid argument";
}

#define EMULATED_IDLE 3 /* warps of the last block that have nothing to do */

/* Calls run(table, bases, thread, arg) for each thread of each batch. */
typedef void (*emulated_body)(const fc_table *table, const fc_bases *bases, fc_thread thread,
                              void *arg);

static void emulate(const fc_cuda_launch *launch, uint32_t n_lanes, emulated_body body, void *arg)
{
    for (size_t i = 0; i < launch->plan->n_batches; i++) {
        const fc_batch *batch = &launch->plan->batches[i];
        const fc_table table = fc_batch_table(launch->plan, batch, launch->runs, launch->stretches);
        fc_bases bases;
        uint32_t n_warps;

        memset(&bases, 0xa5, sizeof(bases)); /* what a launch does not set */
        fc_batch_bases(launch->plan, batch, launch->addresses, &bases);
        n_warps = table.end_stretch - table.first_stretch + EMULATED_IDLE;
        for (uint32_t t = 0; t < n_warps * n_lanes; t++) {
            body(&table, &bases, (fc_thread){t % n_lanes, table.first_stretch + t / n_lanes}, arg);
        }
    }
}

static void emulated_move_thread(const fc_table *table, const fc_bases *bases, fc_thread thread,
                                 void *arg)
{
    (void)arg;
    fc_move_thread(table, bases, NULL, thread);
}

static int emulated_move(const fc_cuda_launch *launch)
{
    emulate(launch, FC_WARP, emulated_move_thread, NULL);
    return 0;
}

static void emulated_finish_thread(const fc_table *table, const fc_bases *bases, fc_thread thread,
                                   void *arg)
{
    const fc_sum *sum = (const fc_sum *)arg;

    fc_move_thread(table, bases, sum, thread);
}

static int emulated_finish(const fc_cuda_launch *launch, double divisor, bool accumulate)
{
    fc_sum sum = {divisor, accumulate};

    if (launch->plan->has_raw) {
        return 1;
    }
    emulate(launch, FC_WARP, emulated_finish_thread, &sum);
    return 0;
}

/* A warp at a time: its lanes' sums are added up together. */
static void emulated_squares_warp(const fc_table *table, const fc_bases *bases, fc_thread thread,
                                  void *arg)
{
    double *parts = (double *)arg;

    fc_stretch next, stretch;

    if (thread.stretch >= table->end_stretch) {
        return;
    }
    next = stretch = fc_stretch_at(table, thread.stretch);
    for (; stretch.tile < stretch.end_tile; stretch = next) {
        double lanes[FC_WARP];

        for (uint32_t lane = 0; lane < FC_WARP; lane++) {
            next = stretch;
            lanes[lane] = fc_squares_part(bases, &next, lane);
        }
        parts[fc_part_at(stretch.run->slot, thread.stretch)] = fc_tree(lanes);
    }
}

static int emulated_sum_squares(const fc_cuda_launch *launch, double *parts, double *sums)
{
    emulate(launch, 1, emulated_squares_warp, parts);
    for (uint32_t slot = 0; slot < launch->plan->n_slots; slot++) {
        const uint32_t n = fc_slot_threads(launch->plan);
        double warps[FC_WARP] = {0};

        for (uint32_t thread = 0; thread < n; thread += FC_WARP) {
            double lanes[FC_WARP];

            for (uint32_t lane = 0; lane < FC_WARP; lane++) {
                lanes[lane] = fc_slot_part(launch->slots[slot], slot, launch->plan->stretch_tiles,
                                           parts, thread + lane, n);
            }
            warps[thread / FC_WARP] = fc_tree(lanes);
        }
        sums[slot] = fc_tree(warps);
    }
    return 0;
}

static void emulated_adam_thread(const fc_table *table, const fc_bases *bases, fc_thread thread,
                                 void *arg)
{
    const fc_adam *adam = (const fc_adam *)arg;

    fc_adam_thread(table, bases, adam, thread);
}

static int emulated_adam(const fc_cuda_launch *launch, const fc_adam *adam)
{
    fc_adam numbers = *adam;

    emulate(launch, FC_WARP, emulated_adam_thread, &numbers);
    return 0;
}

static const fc_cuda_kernels emulated_kernels = {
    FC_CUDA_VERSION, emulated_error_text,  emulated_move,
    emulated_finish, emulated_sum_squares, emulated_adam,
};

#endif
