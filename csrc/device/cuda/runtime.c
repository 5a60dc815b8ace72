/* Finds the CUDA runtime's functions in a library. */
#include "device/cuda/cuda.h"

#include <dlfcn.h>
#include <string.h>

/* Stores the address of `symbol` at `member`, which is a pointer to a function. */
static fc_status find(void *library, const char *path, const char *symbol, void *member)
{
    void *address = dlsym(library, symbol);

    if (address == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "%s is no CUDA runtime that fsdp_c can use: it lacks %s",
                       path, symbol);
    }
    memcpy(member, &address, sizeof(address));
    return FC_OK;
}

static fc_status find_all(void *library, const char *path, fc_cuda_runtime *runtime)
{
#define FIND(name, symbol, parameters) FC_TRY(find(library, path, symbol, &runtime->name));
    FC_CUDA_RUNTIME(FIND)
#undef FIND
    return find(library, path, "cudaGetErrorString", &runtime->error_text);
}

fc_status fc_cuda_runtime_open(const char *path, fc_cuda_runtime *out)
{
    fc_cuda_runtime runtime;
    fc_status st;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "the CUDA runtime cannot be opened: %s", dlerror());
    }
    st = find_all(library, path, &runtime);
    if (st != FC_OK) {
        (void)dlclose(library);
        return st;
    }
    *out = runtime;
    return FC_OK;
}
