// Kernels and launches: each __global__ function runs its body for one thread.
#include "kernels/cuda/bodies.h"
#include "kernels/cuda/kern_cuda.h"

#include <cuda_runtime.h>

namespace {

constexpr unsigned block_threads = 128;
constexpr unsigned block_warps = block_threads / FC_WARP;
// Blocks on a processor at a time. Said to the compiler, since it otherwise takes fewer registers
// and loads one vector after the other.
constexpr unsigned blocks_at_once = 8;
constexpr unsigned finishing_at_once = 6;

__device__ __forceinline__ fc_thread this_thread(const fc_table &table)
{
    const unsigned thread = blockIdx.x * block_threads + threadIdx.x;

    return {thread % FC_WARP, table.first_stretch + thread / FC_WARP};
}

// Brings tables into the L2 while a warp waits for the number of its run: that would be a second
// wait for memory otherwise.
__device__ __forceinline__ void fetch_ahead(const fc_table &table, fc_thread thread)
{
    constexpr unsigned line = 64;
    const unsigned warp = thread.stretch - table.first_stretch;
    const unsigned at = warp * (line / sizeof(*table.stretches));
    const void *next = nullptr;

    if (thread.lane < sizeof(fc_run) / line && warp < table.n_runs) {
        next = reinterpret_cast<const char *>(&table.runs[table.first_run + warp]) +
               thread.lane * line;
    } else if (thread.lane == FC_WARP - 1 && at < table.end_stretch - table.first_stretch) {
        next = &table.stretches[table.first_stretch + at];
    }
    if (next != nullptr) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(next));
    }
}

// The tree of fc_tree, over a warp; the sum is lane 0's.
__device__ __forceinline__ double warp_sum(double x)
{
    for (unsigned distance = FC_WARP / 2; distance > 0; distance /= 2) {
        x += __shfl_down_sync(0xffffffffu, x, distance);
    }
    return x;
}

__global__ void __launch_bounds__(block_threads, blocks_at_once)
    move_kernel(fc_table table, const __grid_constant__ fc_bases bases)
{
    fetch_ahead(table, this_thread(table));
    fc_move_thread(&table, &bases, nullptr, this_thread(table));
}

__global__ void __launch_bounds__(block_threads, finishing_at_once)
    finish_kernel(fc_table table, const __grid_constant__ fc_bases bases, fc_sum sum)
{
    fetch_ahead(table, this_thread(table));
    fc_move_thread(&table, &bases, &sum, this_thread(table));
}

__global__ void __launch_bounds__(block_threads, blocks_at_once)
    squares_kernel(fc_table table, const __grid_constant__ fc_bases bases, double *parts)
{
    const fc_thread thread = this_thread(table);

    fetch_ahead(table, thread);
    if (thread.stretch >= table.end_stretch) {
        return;
    }
    fc_stretch stretch = fc_stretch_at(&table, thread.stretch);
    while (stretch.tile < stretch.end_tile) {
        double *part = parts + fc_part_at(stretch.run->slot, thread.stretch);
        const double sum = warp_sum(fc_squares_part(&bases, &stretch, thread.lane));

        if (thread.lane == 0) {
            *part = sum;
        }
    }
}

// A block per slot, of a power of two of threads.
__global__ void __launch_bounds__(FC_SLOT_THREADS_MAX)
    slots_kernel(const fc_slot *slots, uint32_t stretch_tiles, const double *parts, double *sums)
{
    __shared__ double warps[FC_SLOT_THREADS_MAX / FC_WARP];
    const unsigned lane = threadIdx.x % FC_WARP, warp = threadIdx.x / FC_WARP;
    const unsigned n_warps = blockDim.x / FC_WARP;
    double sum = warp_sum(
        fc_slot_part(slots[blockIdx.x], blockIdx.x, stretch_tiles, parts, threadIdx.x, blockDim.x));

    if (lane == 0) {
        warps[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        sum = warp_sum(lane < n_warps ? warps[lane] : 0);
        if (lane == 0) {
            sums[blockIdx.x] = sum;
        }
    }
}

__global__ void __launch_bounds__(block_threads, blocks_at_once)
    adam_kernel(fc_table table, const __grid_constant__ fc_bases bases, fc_adam numbers)
{
    fetch_ahead(table, this_thread(table));
    fc_adam_thread(&table, &bases, &numbers, this_thread(table));
}

// Calls start(blocks, table, bases) for every batch of the plan.
template <typename Start> int launch_batches(const fc_cuda_launch *launch, Start start)
{
    const fc_runs *plan = launch->plan;

    for (size_t i = 0; i < plan->n_batches; i++) {
        const fc_batch &batch = plan->batches[i];
        const fc_table table = fc_batch_table(plan, &batch, launch->runs, launch->stretches);
        fc_bases bases;

        fc_batch_bases(plan, &batch, launch->addresses, &bases);
        start((table.end_stretch - table.first_stretch - 1) / block_warps + 1, table, bases);
        const cudaError_t error = cudaGetLastError();
        if (error != cudaSuccess) {
            return error;
        }
    }
    return cudaSuccess;
}

const char *error_text(int error)
{
    return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int move(const fc_cuda_launch *launch)
{
    const auto stream = static_cast<cudaStream_t>(launch->stream);

    return launch_batches(launch, [&](unsigned blocks, fc_table table, const fc_bases &bases) {
        move_kernel<<<blocks, block_threads, 0, stream>>>(table, bases);
    });
}

int finish(const fc_cuda_launch *launch, double divisor, bool accumulate)
{
    const auto stream = static_cast<cudaStream_t>(launch->stream);

    if (launch->plan->has_raw) {
        return cudaErrorInvalidValue;
    }
    return launch_batches(launch, [&](unsigned blocks, fc_table table, const fc_bases &bases) {
        finish_kernel<<<blocks, block_threads, 0, stream>>>(table, bases,
                                                            fc_sum{divisor, accumulate});
    });
}

int sum_squares(const fc_cuda_launch *launch, double *parts, double *sums)
{
    const auto stream = static_cast<cudaStream_t>(launch->stream);
    const auto n_slots = static_cast<unsigned>(launch->plan->n_slots);
    const int error =
        launch_batches(launch, [&](unsigned blocks, fc_table table, const fc_bases &bases) {
            squares_kernel<<<blocks, block_threads, 0, stream>>>(table, bases, parts);
        });

    if (error != cudaSuccess || n_slots == 0) {
        return error;
    }
    slots_kernel<<<n_slots, fc_slot_threads(launch->plan), 0, stream>>>(
        launch->slots, launch->plan->stretch_tiles, parts, sums);
    return cudaGetLastError();
}

int adam(const fc_cuda_launch *launch, const fc_adam *numbers)
{
    const auto stream = static_cast<cudaStream_t>(launch->stream);

    return launch_batches(launch, [&](unsigned blocks, fc_table table, const fc_bases &bases) {
        adam_kernel<<<blocks, block_threads, 0, stream>>>(table, bases, *numbers);
    });
}

const fc_cuda_kernels table_of_functions = {FC_CUDA_VERSION, error_text,  move,
                                            finish,          sum_squares, adam};

} // namespace

__attribute__((visibility("default"))) const fc_cuda_kernels *fc_cuda_kernels_v1()
{
    return &table_of_functions;
}
