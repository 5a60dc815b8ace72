/* Opens the library of GPU kernels when it is first needed. */
#include "kernels/cuda/kern_cuda.h"

#include <dlfcn.h>
#include <unistd.h>

#define SYMBOL "fc_cuda_kernels_v1"

static const fc_cuda_kernels *opened;

fc_status fc_cuda_open(const char *path, const fc_cuda_kernels **kernels_out)
{
    const fc_cuda_kernels *kernels = __atomic_load_n(&opened, __ATOMIC_ACQUIRE);
    const fc_cuda_kernels *(*get)(void) = NULL;
    void *library;

    if (kernels != NULL) {
        *kernels_out = kernels;
        return FC_OK;
    }
    if (access(path, F_OK) != 0) {
        return fc_fail(FC_ERR_UNSUPPORTED,
                       "there are no GPU kernels at %s: nvcc was missing when fsdp_c was built; "
                       "collectives go through the process group",
                       path);
    }
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "the GPU kernels cannot be opened: %s", dlerror());
    }
    *(void **)&get = dlsym(library, SYMBOL);
    kernels = get != NULL ? get() : NULL;
    if (kernels == NULL || kernels->version != FC_CUDA_VERSION) {
        (void)dlclose(library);
        return fc_fail(FC_ERR_UNSUPPORTED,
                       "%s holds GPU kernels of another version of fsdp_c; build fsdp_c again",
                       path);
    }
    __atomic_store_n(&opened, kernels, __ATOMIC_RELEASE);
    *kernels_out = kernels;
    return FC_OK;
}

fc_status fc_cuda_move(const fc_cuda_kernels *kernels, const fc_cuda_launch *launch, double divisor,
                       bool accumulate, const char *what, const char *unit)
{
    const bool is_plain = divisor == 1 && !accumulate;
    const int error =
        is_plain ? kernels->move(launch) : kernels->finish(launch, divisor, accumulate);

    return error == 0 ? FC_OK
                      : fc_fail(FC_ERR_SYSTEM, "kernel of '%s' of '%s': %s", what, unit,
                                kernels->error_text(error));
}
