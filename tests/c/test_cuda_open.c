/* The library of GPU kernels is opened once; what is none, or one of another version, is told. */
#define _GNU_SOURCE /* dladdr */
#include "check.h"
#include "library_path.h"

#include "kernels/cuda/kern_cuda.h"

#include <dlfcn.h>

static void check_refused(const char *path, const char *why)
{
    const fc_cuda_kernels *kernels = NULL;

    CHECK_EQ(fc_cuda_open(path, &kernels), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), why);
    CHECK(kernels == NULL);
}

static void check_not_open(const char *path)
{
    CHECK(dlopen(path, RTLD_NOW | RTLD_NOLOAD) == NULL);
}

int main(void)
{
    const fc_cuda_kernels *first = NULL, *second = NULL;
    char path[PATH_MAX], old[PATH_MAX];
    Dl_info c_library;

    library_path("libnccl_stand_in.so", path);
    library_path("libnccl_stand_in_old.so", old);
    CHECK_OR_EXIT(dladdr(dlsym(RTLD_DEFAULT, "qsort"), &c_library) != 0);
    check_refused("/nowhere/kernels.so", "there are no GPU kernels at /nowhere/kernels.so: nvcc");
    check_refused("/proc/self/exe", "the GPU kernels cannot be opened: ");
    check_refused(c_library.dli_fname, "holds GPU kernels of another version of fsdp_c");
    check_refused(old, "holds GPU kernels of another version of fsdp_c");
    check_not_open(old);
    CHECK_EQ(fc_cuda_open(path, &first), FC_OK);
    CHECK_OR_EXIT(first != NULL);
    CHECK_EQ(first->version, FC_CUDA_VERSION);
    CHECK_EQ(fc_cuda_open("/nowhere/kernels.so", &second), FC_OK);
    CHECK(second == first);
    return check_result();
}
