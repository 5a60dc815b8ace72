/* A stand-in for the library of GPU kernels: it has no more than a version, which is another one in
 * the stand-in for old libraries. */
#include "kernels/cuda/kern_cuda.h"

#define API __attribute__((visibility("default")))

API const fc_cuda_kernels *fc_cuda_kernels_v1(void);

API const fc_cuda_kernels *fc_cuda_kernels_v1(void)
{
#ifdef STAND_IN_OLD
    static const fc_cuda_kernels kernels = {.version = FC_CUDA_VERSION - 1};
#else
    static const fc_cuda_kernels kernels = {.version = FC_CUDA_VERSION};
#endif
    return &kernels;
}
