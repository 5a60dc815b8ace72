/* NVIDIA GPUs behind the table of device.h.
 *
 * Streams and events are CUDA's own handles, so that torch's can be passed in. The runtime is the
 * one that the process has loaded already, found by dlopen; kernels are those of kernels/cuda;
 * memory and collectives are the caller's (torch's allocator, a communicator), as functions.
 * Work goes to the calling thread's current device. Threading: serialized per device.
 */
#ifndef FC_DEVICE_CUDA_CUDA_H
#define FC_DEVICE_CUDA_CUDA_H

#include "device/caller.h"
#include "kernels/cuda/kern_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name in the table, name in the library, parameters): what is used of the CUDA runtime. Handles
 * are pointers; every function gives a cudaError_t, 0 being success. */
#define FC_CUDA_RUNTIME(X)                                                                         \
    X(event_create, "cudaEventCreateWithFlags", (void **event, unsigned flags))                    \
    X(event_destroy, "cudaEventDestroy", (void *event))                                            \
    X(event_record, "cudaEventRecord", (void *event, void *stream))                                \
    X(event_synchronize, "cudaEventSynchronize", (void *event))                                    \
    X(event_query, "cudaEventQuery", (void *event))                                                \
    X(stream_wait_event, "cudaStreamWaitEvent", (void *stream, void *event, unsigned flags))       \
    X(copy_async, "cudaMemcpyAsync",                                                               \
      (void *to, const void *from, size_t bytes, int kind, void *stream))                          \
    X(copy, "cudaMemcpy", (void *to, const void *from, size_t bytes, int kind))                    \
    X(alloc, "cudaMalloc", (void **memory, size_t bytes))                                          \
    X(free, "cudaFree", (void *memory))

typedef struct fc_cuda_runtime {
#define FC_CUDA_MEMBER(name, symbol, parameters) int(*name) parameters;
    FC_CUDA_RUNTIME(FC_CUDA_MEMBER)
#undef FC_CUDA_MEMBER
    const char *(*error_text)(int error);
} fc_cuda_runtime;

/* Fills the table from the library at `path`, which stays open for good. FC_ERR_UNSUPPORTED with a
 * sentence if it cannot be opened or lacks a function. */
FC_MUST_CHECK fc_status fc_cuda_runtime_open(const char *path, fc_cuda_runtime *out);

/* All three tables are copied. */
FC_MUST_CHECK fc_status fc_cuda_device_create(const fc_cuda_runtime *runtime,
                                              const fc_cuda_kernels *kernels,
                                              const fc_device_caller *caller, fc_device **out);
/* NULL is fine. */
void fc_cuda_device_destroy(fc_device *device);

#ifdef __cplusplus
}
#endif
#endif
