/* Finds NCCL's functions in a library, and says what the library cannot do. */
#define _GNU_SOURCE /* dladdr is not in POSIX's list */

#include "transport/nccl_private.h"

#include "base/alloc.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static fc_nccl *libraries; /* never freed: communicators and torch use them */

void fc_nccl_version_text(int version, char *out, size_t bytes)
{
    int major = version < 10000 ? version / 1000 : version / 10000;
    int rest = version < 10000 ? version % 1000 : version % 10000;

    (void)snprintf(out, bytes, "%d.%d.%d", major, rest / 100, rest % 100);
}

/* Stores the address of `symbol` at `member`, which is a pointer to a function. */
static bool find(void *library, const char *symbol, void *member)
{
    void *address = dlsym(library, symbol);

    memcpy(member, &address, sizeof(address));
    return address != NULL;
}

static fc_status find_needed(fc_nccl *nccl, const char *path)
{
#define NEED(name, symbol, since, parameters)                                                      \
    if (!find(nccl->library, symbol, &nccl->call.name)) {                                          \
        return fc_fail(FC_ERR_UNSUPPORTED, "%s cannot be used as NCCL: it lacks %s", path,         \
                       symbol);                                                                    \
    }
    FC_NCCL_NEEDED(NEED)
#undef NEED
    if (!find(nccl->library, "ncclGetErrorString", &nccl->call.error_text)) {
        return fc_fail(FC_ERR_UNSUPPORTED, "%s cannot be used as NCCL: it lacks ncclGetErrorString",
                       path);
    }
    return FC_OK;
}

/* A function that the version should not have is not trusted to be what we declare. */
static void find_optional(fc_nccl *nccl)
{
#define WANT(name, symbol, since, parameters)                                                      \
    if (nccl->version >= (since)) {                                                                \
        (void)find(nccl->library, symbol, &nccl->call.name);                                       \
    }
    FC_NCCL_OPTIONAL(WANT)
#undef WANT
    (void)find(nccl->library, "ncclGetLastError", &nccl->call.last_error);
}

static void say(fc_nccl *nccl, bool lacks, const char *sentence)
{
    size_t used = strlen(nccl->text);

    if (lacks) {
        (void)snprintf(nccl->text + used, sizeof(nccl->text) - used, "; %s", sentence);
    }
}

static void describe(fc_nccl *nccl, const char *path)
{
    const fc_nccl_functions *call = &nccl->call;
    Dl_info info;
    char version[32];
    void *address;

    memcpy(&address, &call->get_version, sizeof(address));
    if (dladdr(address, &info) != 0 && info.dli_fname != NULL) {
        path = info.dli_fname;
    }
    fc_nccl_version_text(nccl->version, version, sizeof(version));
    (void)snprintf(nccl->text, sizeof(nccl->text), "NCCL %s (%s)", version, path);
    say(nccl, call->comm_split == NULL,
        "no ncclCommSplit (2.18): each communicator has a set-up of its own");
    say(nccl, nccl->version < FC_NCCL_MANY_RANKS, "no two ranks on one GPU (2.30.3)");
}

static fc_status look_at(fc_nccl *nccl, const char *path)
{
    char version[32];
    int result;

    FC_TRY(find_needed(nccl, path));
    result = nccl->call.get_version(&nccl->version);
    if (result != FC_NCCL_SUCCESS) {
        return fc_fail(FC_ERR_UNSUPPORTED, "%s does not tell its version: %s", path,
                       nccl->call.error_text(result));
    }
    if (nccl->version < FC_NCCL_OLDEST) {
        fc_nccl_version_text(nccl->version, version, sizeof(version));
        return fc_fail(FC_ERR_UNSUPPORTED,
                       "%s is NCCL %s; communicators that can be aborted need 2.14", path, version);
    }
    find_optional(nccl);
    describe(nccl, path);
    return FC_OK;
}

static fc_nccl *known(const void *library)
{
    fc_nccl *nccl = libraries;

    while (nccl != NULL && nccl->library != library) {
        nccl = nccl->next;
    }
    return nccl;
}

static fc_status open_locked(const char *path, bool is_loaded, const fc_nccl **out)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | (is_loaded ? RTLD_NOLOAD : 0));
    fc_nccl *nccl;
    fc_status st;

    if (library == NULL && is_loaded) {
        return fc_fail(FC_ERR_UNSUPPORTED, "%s has not been loaded by this process", path);
    }
    if (library == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "NCCL cannot be opened: %s", dlerror());
    }
    nccl = known(library);
    if (nccl != NULL) {
        (void)dlclose(library); /* counted twice */
        *out = nccl;
        return FC_OK;
    }
    nccl = fc_alloc(1, sizeof(*nccl));
    if (nccl == NULL) {
        (void)dlclose(library);
        return fc_fail(FC_ERR_NOMEM, "NCCL's functions");
    }
    nccl->library = library;
    st = look_at(nccl, path);
    if (st != FC_OK) {
        (void)dlclose(library);
        fc_free(nccl);
        return st;
    }
    nccl->next = libraries;
    libraries = nccl;
    *out = nccl;
    return FC_OK;
}

fc_status fc_nccl_open(const char *path, bool is_loaded, const fc_nccl **out)
{
    fc_status st;

    (void)pthread_mutex_lock(&lock);
    st = open_locked(path, is_loaded, out);
    (void)pthread_mutex_unlock(&lock);
    return st;
}

int fc_nccl_version(const fc_nccl *nccl)
{
    return nccl->version;
}

const char *fc_nccl_describe(const fc_nccl *nccl)
{
    return nccl->text;
}
