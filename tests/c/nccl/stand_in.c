/* A stand-in for NCCL with its ABI: NCCL's functions over an engine, with a check of their rules.
 */
#include "nccl/engine.h"

#include "transport/nccl_api.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define GROUP_COMMS 16

static _Thread_local int depth;
static _Thread_local comm *in_group[GROUP_COMMS];
static _Thread_local int n_in_group;

API stand_in *fc_stand_in_control(void);
API bool fc_stand_in_is_idle(void *stream);

API stand_in *fc_stand_in_control(void)
{
    return &control;
}

API bool fc_stand_in_is_idle(void *stream)
{
    bool is_idle = true;

    (void)pthread_mutex_lock(&lock);
    for (comm *c = comms; c != NULL; c = c->next) {
        if (c->is_dead) {
            continue;
        }
        go_on(c);
        for (work *w = c->first; w != NULL; w = w->next) {
            is_idle = is_idle && w->stream != stream;
        }
    }
    (void)pthread_mutex_unlock(&lock);
    return is_idle;
}

/* ---- NCCL's functions ---- */

API int ncclGetVersion(int *version);
API const char *ncclGetErrorString(int error);
API const char *ncclGetLastError(void *handle);
API int ncclGetUniqueId(fc_nccl_id *id);
API int ncclCommInitRankConfig(void **out, int n_ranks, fc_nccl_id id, int rank,
                               fc_nccl_config *config);
API int ncclCommGetAsyncError(void *handle, int *error);
API int ncclCommFinalize(void *handle);
API int ncclCommDestroy(void *handle);
API int ncclCommAbort(void *handle);
API int ncclGroupStart(void);
API int ncclGroupEnd(void);
API int ncclAllGather(const void *from, void *to, size_t count, int type, void *handle,
                      void *stream);
API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *handle,
                          void *stream);
API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *handle,
                      void *stream);

API int ncclGetVersion(int *version)
{
    *version = control.version;
    return FC_NCCL_SUCCESS;
}

API const char *ncclGetErrorString(int error)
{
    static const char *const texts[] = {
        "no error",         "unhandled cuda error", "unhandled system error", "internal error",
        "invalid argument", "invalid usage",        "remote process exited",  "in progress"};

    return error >= 0 && error <= FC_NCCL_IN_PROGRESS ? texts[error] : "unknown result code";
}

API const char *ncclGetLastError(void *handle)
{
    (void)handle;
    return control.n_faults > 0 ? control.fault : "";
}

API int ncclGetUniqueId(fc_nccl_id *id)
{
    int place[2] = {getpid(), make_world()};

    memset(id, 0, sizeof(*id));
    memcpy(id->bytes, place, sizeof(place));
    return place[1] < 0 ? FC_NCCL_SYSTEM_ERROR : FC_NCCL_SUCCESS;
}

/* As 2.28 reads one: by its size alone, zero channels refused. */
static int check_config(const fc_nccl_config *config)
{
    if (control.version >= 22800 && config->size > offsetof(fc_nccl_config, nvls_ctas) &&
        config->nvls_ctas == 0) {
        return fault("Invalid config nvlsCTAs attribute value %d", config->nvls_ctas);
    }
    if (config->magic != FC_NCCL_MAGIC || config->blocking != 0 ||
        config->version > (unsigned)control.version || config->size < 20 ||
        config->size > sizeof(fc_nccl_config)) {
        return fault("a config of %d bytes, version %u, blocking %d", (int)config->size,
                     config->version, config->blocking);
    }
    control.config_bytes = (int)config->size;
    return FC_NCCL_SUCCESS;
}

API int ncclCommInitRankConfig(void **out, int n_ranks, fc_nccl_id id, int rank,
                               fc_nccl_config *config)
{
    int place[2], result;
    world *shared;
    comm *c;

    if (depth > 0 || rank < 0 || rank >= n_ranks || n_ranks > RANKS) {
        return fault("the set-up of rank %d of %d at depth %d", rank, n_ranks, depth);
    }
    result = check_config(config);
    memcpy(place, id.bytes, sizeof(place));
    shared = result == FC_NCCL_SUCCESS ? open_world(place[0], place[1]) : NULL;
    if (shared == NULL) {
        return result == FC_NCCL_SUCCESS ? FC_NCCL_SYSTEM_ERROR : result;
    }
    if (control.dies_in_init) {
        (void)raise(SIGKILL);
    }
    (void)pthread_mutex_lock(&lock);
    control.n_inits++;
    c = make_comm(shared, rank, n_ranks);
    *out = c;
    result = c == NULL ? FC_NCCL_SYSTEM_ERROR : answer(c);
    (void)pthread_mutex_unlock(&lock);
    return result;
}

API int ncclCommGetAsyncError(void *handle, int *error)
{
    comm *c;
    int result = FC_NCCL_SUCCESS;

    enter(handle, "ncclCommGetAsyncError");
    (void)pthread_mutex_lock(&lock);
    c = find(handle);
    if (c == NULL) {
        result = FC_NCCL_INVALID_ARGUMENT;
    } else {
        go_on(c);
        *error = c->error != 0       ? c->error
                 : is_in_progress(c) ? FC_NCCL_IN_PROGRESS
                                     : FC_NCCL_SUCCESS;
        c->polls_left -= c->polls_left > 0;
    }
    (void)pthread_mutex_unlock(&lock);
    leave(handle);
    return result;
}

/* The communicator of a call that needs it at rest. */
static comm *at_rest(void *handle, const char *call)
{
    comm *c = find(handle);

    if (c == NULL) {
        return NULL;
    }
    if (is_busy(c) || c->is_final) {
        (void)fault("%s while the communicator is in progress or final", call);
        return NULL;
    }
    return c;
}

API int ncclCommFinalize(void *handle)
{
    comm *c;
    int result = FC_NCCL_INVALID_USAGE;

    (void)pthread_mutex_lock(&lock);
    c = at_rest(handle, "ncclCommFinalize");
    if (c != NULL) {
        c->is_final = true;
        result = answer(c);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

API int ncclCommDestroy(void *handle)
{
    comm *c;
    int result = FC_NCCL_SUCCESS;

    (void)pthread_mutex_lock(&lock);
    c = find(handle);
    if (c == NULL || !c->is_final || is_busy(c)) {
        result = fault("ncclCommDestroy before the communicator was final");
    } else {
        control.n_destroyed++;
        bury(c);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

API int ncclCommAbort(void *handle)
{
    comm *c;

    (void)pthread_mutex_lock(&lock);
    c = find(handle);
    if (c != NULL) {
        control.n_aborts++;
        bury(c);
    }
    (void)pthread_mutex_unlock(&lock);
    return c == NULL ? FC_NCCL_INVALID_ARGUMENT : FC_NCCL_SUCCESS;
}

API int ncclGroupStart(void)
{
    depth++;
    return FC_NCCL_SUCCESS;
}

API int ncclGroupEnd(void)
{
    int result = FC_NCCL_SUCCESS;

    if (depth == 0) {
        return fault("ncclGroupEnd without ncclGroupStart");
    }
    if (--depth > 0) {
        return FC_NCCL_SUCCESS;
    }
    (void)pthread_mutex_lock(&lock);
    control.n_groups++;
    for (int i = 0; i < n_in_group; i++) {
        if (answer(in_group[i]) == FC_NCCL_IN_PROGRESS) {
            result = FC_NCCL_IN_PROGRESS;
        }
    }
    n_in_group = 0;
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static void remember(comm *c)
{
    for (int i = 0; i < n_in_group; i++) {
        if (in_group[i] == c) {
            return;
        }
    }
    if (n_in_group < GROUP_COMMS) {
        in_group[n_in_group++] = c;
    }
}

static bool is_ended(void *handle)
{
    bool answer = true;

    (void)pthread_mutex_lock(&lock);
    for (comm *c = comms; c != NULL; c = c->next) {
        answer = answer && ((void *)c != handle || c->is_dead);
    }
    (void)pthread_mutex_unlock(&lock);
    return answer;
}

/* As where the device's queue is full. False: the communicator has ended meanwhile. */
static bool await_room(void *handle)
{
    bool has_ended = false;

    atomic_fetch_add(&control.n_blocked, 1);
    while (atomic_load(&control.blocks) && !has_ended) {
        (void)usleep(500);
        has_ended = is_ended(handle);
    }
    atomic_fetch_sub(&control.n_blocked, 1);
    return !has_ended;
}

/* A call outside of groups is a group of its own. */
static int enqueue_now(void *handle, const char *call, const work *what)
{
    comm *c;
    int result = FC_NCCL_INVALID_USAGE;

    if (control.fail_calls != 0) {
        return control.fail_calls;
    }
    if (atomic_load(&control.blocks) && !await_room(handle)) {
        return FC_NCCL_INTERNAL_ERROR;
    }
    (void)pthread_mutex_lock(&lock);
    c = at_rest(handle, call);
    if (c != NULL && dtype_of(what->what.type) == FC_DTYPE_COUNT) {
        result = fault("%s of type %d", call, what->what.type);
    } else if (c != NULL) {
        result = append(c, what);
        control.n_collectives++;
        if (control.n_collectives == control.error_at) {
            c->error = control.error;
        }
    }
    if (result == FC_NCCL_SUCCESS && depth > 0) {
        remember(c);
    } else if (result == FC_NCCL_SUCCESS) {
        result = answer(c);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

static int enqueue(void *handle, const char *call, const work *what)
{
    int result;

    enter(handle, call);
    result = enqueue_now(handle, call, what);
    leave(handle);
    return result;
}

API int ncclAllGather(const void *from, void *to, size_t count, int type, void *handle,
                      void *stream)
{
    return enqueue(handle, "ncclAllGather",
                   &(work){.what = {bytes_of(count, type), GATHER, type},
                           .from = from,
                           .to = to,
                           .stream = stream,
                           .count = count});
}

API int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, void *handle,
                          void *stream)
{
    const int kind = op == FC_NCCL_AVG ? SCATTER_MEANS : SCATTER;

    if (op != FC_NCCL_SUM && op != FC_NCCL_AVG) {
        return fault("ncclReduceScatter with operation %d", op);
    }
    return enqueue(handle, "ncclReduceScatter",
                   &(work){.what = {ranks_of(handle) * bytes_of(count, type), kind, type},
                           .from = from,
                           .to = to,
                           .stream = stream,
                           .count = count});
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *handle,
                      void *stream)
{
    const int kind = op == FC_NCCL_AVG ? REDUCE_MEANS : REDUCE;

    if (op != FC_NCCL_SUM && op != FC_NCCL_AVG) {
        return fault("ncclAllReduce with operation %d", op);
    }
    return enqueue(handle, "ncclAllReduce",
                   &(work){.what = {bytes_of(count, type), kind, type},
                           .from = from,
                           .to = to,
                           .stream = stream,
                           .count = count});
}

/* ---- what older versions lack ---- */

#ifndef STAND_IN_OLD

API int ncclCommSplit(void *handle, int color, int key, void **out, fc_nccl_config *config);

/* The new handle appears when the parent's call has ended, as in NCCL. */
API int ncclCommSplit(void *handle, int color, int key, void **out, fc_nccl_config *config)
{
    comm *c;
    int result = check_config(config);

    if (result != FC_NCCL_SUCCESS) {
        return result;
    }
    (void)pthread_mutex_lock(&lock);
    result = FC_NCCL_INVALID_USAGE;
    c = at_rest(handle, "ncclCommSplit");
    if (c != NULL && (c->n_splits == SPLITS || depth > 0)) {
        result = fault("ncclCommSplit number %d at depth %d", c->n_splits, depth);
    } else if (c != NULL) {
        control.n_splits++;
        c->split_mine = &c->shared->ranks[c->rank].splits[c->n_splits++];
        c->split_mine->color = color;
        c->split_mine->key = key;
        c->split_out = out;
        *out = NULL;
        atomic_store(&c->split_mine->state, 1);
        result = answer(c);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

#endif
