// Kernels and launches: each __global__ function runs its body for one thread.
#include "kernels/cuda/bodies.h"
#include "kernels/cuda/kern_cuda.h"

#include <cuda_runtime.h>

namespace {

constexpr unsigned block_threads = 256;
constexpr unsigned block_warps = block_threads / FC_WARP;
// At most: several times what a processor holds, so that none idles for long at the end.
constexpr unsigned blocks_per_processor = 32;

__device__ __forceinline__ fc_thread this_thread()
{
    const unsigned thread = blockIdx.x * block_threads + threadIdx.x;

    return {thread % FC_WARP, thread / FC_WARP, gridDim.x * block_warps};
}

// The tree of fc_tree, over a warp; the sum is lane 0's.
__device__ __forceinline__ double warp_sum(double x)
{
    for (unsigned distance = FC_WARP / 2; distance > 0; distance /= 2) {
        x += __shfl_down_sync(0xffffffffu, x, distance);
    }
    return x;
}

__global__ void __launch_bounds__(block_threads)
    move_kernel(fc_table table, const __grid_constant__ fc_bases bases)
{
    fc_move_thread(&table, &bases, nullptr, this_thread());
}

__global__ void __launch_bounds__(block_threads)
    finish_kernel(fc_table table, const __grid_constant__ fc_bases bases, fc_sum sum)
{
    fc_move_thread(&table, &bases, &sum, this_thread());
}

__global__ void __launch_bounds__(block_threads)
    squares_kernel(fc_table table, const __grid_constant__ fc_bases bases, double *tiles)
{
    const fc_thread thread = this_thread();
    uint32_t known = 0;

    for (uint32_t tile = table.first_tile + thread.warp; tile < table.end_tile;
         tile += thread.n_warps) {
        known = fc_find_run(&table, tile, known);
        const double sum = warp_sum(fc_squares_tile(&table.runs[known], &bases, tile, thread.lane));
        if (thread.lane == 0) {
            tiles[tile] = sum;
        }
    }
}

__global__ void __launch_bounds__(block_threads)
    slots_kernel(const fc_slot *slots, uint32_t n_slots, const double *tiles, double *sums)
{
    const fc_thread thread = this_thread();

    for (uint32_t slot = thread.warp; slot < n_slots; slot += thread.n_warps) {
        const double sum = warp_sum(fc_slot_part(slots[slot], tiles, thread.lane));
        if (thread.lane == 0) {
            sums[slot] = sum;
        }
    }
}

__global__ void __launch_bounds__(block_threads)
    adam_kernel(fc_table table, const __grid_constant__ fc_bases bases, fc_adam numbers)
{
    fc_adam_thread(&table, &bases, &numbers, this_thread());
}

// As many blocks as there is work for, up to what keeps the device busy.
cudaError_t grid_for(uint32_t n_warps, unsigned *blocks_out)
{
    int device = 0, processors = 0;
    cudaError_t error = cudaGetDevice(&device);

    if (error == cudaSuccess) {
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    }
    const unsigned most = static_cast<unsigned>(processors) * blocks_per_processor;
    const unsigned wanted = (n_warps - 1) / block_warps + 1;
    *blocks_out = wanted < most ? wanted : most;
    return error;
}

// Calls start(blocks, table, bases) for every batch of the plan.
template <typename Start> int launch_batches(const fc_cuda_launch *launch, Start start)
{
    const fc_runs *plan = launch->plan;

    for (size_t i = 0; i < plan->n_batches; i++) {
        const fc_batch &batch = plan->batches[i];
        const fc_table table = fc_batch_table(&batch, launch->runs);
        fc_bases bases;
        unsigned blocks = 0;

        fc_batch_bases(plan, &batch, launch->addresses, &bases);
        cudaError_t error = grid_for(batch.end_tile - batch.first_tile, &blocks);
        if (error == cudaSuccess) {
            start(blocks, table, bases);
            error = cudaGetLastError();
        }
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

int sum_squares(const fc_cuda_launch *launch, double *tiles, double *sums)
{
    const auto stream = static_cast<cudaStream_t>(launch->stream);
    const auto n_slots = static_cast<uint32_t>(launch->plan->n_slots);
    int error = launch_batches(launch, [&](unsigned blocks, fc_table table, const fc_bases &bases) {
        squares_kernel<<<blocks, block_threads, 0, stream>>>(table, bases, tiles);
    });
    unsigned blocks = 0;

    if (error == cudaSuccess && n_slots != 0) {
        error = grid_for(n_slots, &blocks);
    }
    if (error != cudaSuccess || n_slots == 0) {
        return error;
    }
    slots_kernel<<<blocks, block_threads, 0, stream>>>(launch->slots, n_slots, tiles, sums);
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
