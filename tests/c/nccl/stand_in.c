/* A stand-in for NCCL with its ABI: moves bytes between processes or threads over host memory, and
 * checks the rules of use.
 *
 * A communicator is a piece of shared memory with a ring of slots per rank. A collective is copied
 * into a slot when there is room, and done when all ranks have theirs there; both happen only
 * while somebody asks (ncclCommGetAsyncError, fc_stand_in_is_idle), so that nothing runs beside the
 * test. A rank that dies stops all others, which NCCL does not report either.
 */
#define _GNU_SOURCE /* memfd_create */

#include "nccl_stand_in.h"

#include "kernels/kernels.h"
#include "transport/nccl_api.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

#define RANKS 8
#define SLOTS 4
#define SLOT_BYTES (256 << 10)
#define SPLITS 16
#define GROUP_COMMS 16

typedef struct deed {
    uint64_t bytes; /* that this rank gives */
    int kind, type;
} deed;

typedef struct slot {
    deed what;
    char data[SLOT_BYTES];
} slot;

typedef struct split_entry {
    _Atomic int state; /* 1: color and key are there; 2: and the new memory */
    int color, key;
    int pid, fd;
} split_entry;

typedef struct world_rank {
    _Atomic uint64_t posted, consumed;
    _Atomic int has_joined, is_final;
    split_entry splits[SPLITS];
    slot slots[SLOTS];
} world_rank;

typedef struct world {
    world_rank ranks[RANKS];
} world;

enum {
    GATHER,
    SCATTER,
    REDUCE,
    WINDOW
};

typedef struct work {
    struct work *next;
    deed what;
    const void *from;
    void *to;
    void *stream;
    uint64_t sequence;
    size_t count;
} work;

typedef struct comm {
    struct comm *next; /* all of this process, so that stale handles are known */
    world *shared;
    int rank, n_ranks;
    int polls_left;
    bool is_ready, is_final, is_dead;
    int error;
    int n_splits;
    void **split_out; /* a split is under way */
    split_entry *split_mine;
    bool split_blocks;
    work *first;
    uint64_t n_posted; /* collectives so far */
    int n_windows;
} comm;

static stand_in control = {.version = 23007};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static comm *comms;
static _Thread_local int depth;
static _Thread_local comm *in_group[GROUP_COMMS];
static _Thread_local int n_in_group;

API stand_in *fc_stand_in_control(void);
API bool fc_stand_in_is_idle(void *stream);

API stand_in *fc_stand_in_control(void)
{
    return &control;
}

static int fault(const char *format, ...) __attribute__((format(printf, 1, 2)));

static int fault(const char *format, ...)
{
    va_list args;

    if (control.n_faults++ == 0) {
        va_start(args, format);
        (void)vsnprintf(control.fault, sizeof(control.fault), format, args);
        va_end(args);
    }
    return FC_NCCL_INVALID_USAGE;
}

/* ---- shared memory ---- */

static world *map_world(int fd)
{
    void *memory = mmap(NULL, sizeof(world), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

/* A descriptor that stays open: others come to it through /proc. */
static int make_world(void)
{
    int fd = memfd_create("nccl stand-in", MFD_CLOEXEC);

    return fd >= 0 && ftruncate(fd, (off_t)sizeof(world)) == 0 ? fd : -1;
}

static world *open_world(int pid, int number)
{
    char path[64];
    world *shared;
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, number);
    fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    shared = map_world(fd);
    (void)close(fd);
    return shared;
}

static comm *make_comm(world *shared, int rank, int n_ranks)
{
    comm *c = calloc(1, sizeof(*c));

    if (c != NULL) {
        c->shared = shared;
        c->rank = rank;
        c->n_ranks = n_ranks;
        c->polls_left = control.polls;
        c->next = comms;
        comms = c;
        control.n_live++;
        atomic_store(&shared->ranks[rank].has_joined, 1);
    }
    return c;
}

static comm *find(void *handle)
{
    comm *c = comms;

    while (c != NULL && (void *)c != handle) {
        c = c->next;
    }
    if (c == NULL || c->is_dead) {
        (void)fault("a call on a communicator that does not exist or was ended");
        return NULL;
    }
    return c;
}

static void bury(comm *c)
{
    while (c->first != NULL) {
        work *next = c->first->next;

        free(c->first);
        c->first = next;
    }
    (void)munmap(c->shared, sizeof(world));
    c->is_dead = true;
    control.n_live--;
}

/* ---- going on ---- */

static bool all_are(const comm *c, size_t at)
{
    for (int r = 0; r < c->n_ranks; r++) {
        const char *rank = (const char *)&c->shared->ranks[r];

        if (atomic_load((const _Atomic int *)(const void *)(rank + at)) == 0) {
            return false;
        }
    }
    return true;
}

static bool publish(comm *c, const work *w)
{
    world_rank *mine = &c->shared->ranks[c->rank];
    slot *s = &mine->slots[w->sequence % SLOTS];

    if (atomic_load(&mine->posted) >= w->sequence) {
        return true;
    }
    for (int r = 0; r < c->n_ranks; r++) {
        if (atomic_load(&c->shared->ranks[r].consumed) + SLOTS < w->sequence) {
            return false;
        }
    }
    s->what = w->what;
    if (w->from != NULL) {
        memcpy(s->data, w->from, w->what.bytes);
    }
    atomic_store(&mine->posted, w->sequence);
    return true;
}

static fc_dtype dtype_of(int type)
{
    switch (type) {
    case FC_NCCL_INT8:
        return FC_I8;
    case FC_NCCL_UINT8:
        return FC_U8;
    case FC_NCCL_INT32:
        return FC_I32;
    case FC_NCCL_INT64:
        return FC_I64;
    case FC_NCCL_FLOAT16:
        return FC_F16;
    case FC_NCCL_FLOAT32:
        return FC_F32;
    case FC_NCCL_FLOAT64:
        return FC_F64;
    case FC_NCCL_BFLOAT16:
        return FC_BF16;
    default:
        return FC_DTYPE_COUNT;
    }
}

static void perform(const comm *c, const work *w)
{
    const void *sources[RANKS];
    size_t at =
        w->what.kind == SCATTER ? (size_t)c->rank * (w->what.bytes / (size_t)c->n_ranks) : 0;
    fc_dtype dtype = dtype_of(w->what.type);

    for (int r = 0; r < c->n_ranks; r++) {
        sources[r] = c->shared->ranks[r].slots[w->sequence % SLOTS].data + at;
    }
    if (w->what.kind == GATHER) {
        for (int r = 0; r < c->n_ranks; r++) {
            memcpy((char *)w->to + (size_t)r * w->what.bytes, sources[r], w->what.bytes);
        }
    } else if (w->what.kind != WINDOW) {
        fc_kern_reduce(dtype, dtype)(w->to, sources, (size_t)c->n_ranks, w->count, 1.0, false);
    }
}

static bool do_first(comm *c)
{
    work *w = c->first;

    if (control.hangs || !publish(c, w)) {
        return false;
    }
    for (int r = 0; r < c->n_ranks; r++) {
        world_rank *theirs = &c->shared->ranks[r];
        const deed *what = &theirs->slots[w->sequence % SLOTS].what;

        if (atomic_load(&theirs->posted) < w->sequence) {
            return false;
        }
        if (what->kind != w->what.kind || what->type != w->what.type ||
            what->bytes != w->what.bytes) {
            (void)fault("collective %d: rank %d's kind %d with %d bytes meets rank %d's kind %d",
                        (int)w->sequence, r, what->kind, (int)what->bytes, c->rank, w->what.kind);
            c->error = FC_NCCL_INTERNAL_ERROR;
            return false;
        }
    }
    perform(c, w);
    atomic_store(&c->shared->ranks[c->rank].consumed, w->sequence);
    c->first = w->next;
    free(w);
    return true;
}

/* The memory of the ranks of one color is made by the first of them in order of keys. */
static bool go_on_splitting(comm *c)
{
    split_entry *mine = c->split_mine;
    int number = (int)(mine - c->shared->ranks[c->rank].splits), leader = -1, place = 0, n = 0;

    for (int r = 0; r < c->n_ranks; r++) {
        split_entry *e = &c->shared->ranks[r].splits[number];

        if (atomic_load(&e->state) == 0) {
            return false;
        }
        if (e->color == mine->color) {
            leader =
                leader < 0 || e->key < c->shared->ranks[leader].splits[number].key ? r : leader;
            place += e->key < mine->key;
            n++;
        }
    }
    if (mine->color != FC_NCCL_NO_COLOR) {
        split_entry *first = &c->shared->ranks[leader].splits[number];

        if (leader == c->rank && atomic_load(&mine->state) == 1) {
            mine->pid = getpid();
            mine->fd = make_world();
            atomic_store(&mine->state, 2);
        }
        if (atomic_load(&first->state) != 2) {
            return false;
        }
        *c->split_out = make_comm(open_world(first->pid, first->fd), place, n);
    }
    c->split_out = NULL;
    return true;
}

static void go_on(comm *c)
{
    if (!c->is_ready) {
        c->is_ready = !control.hangs_in_init && all_are(c, offsetof(world_rank, has_joined));
    }
    if (c->split_out != NULL) {
        (void)go_on_splitting(c);
    }
    while (c->is_ready && c->error == 0 && c->first != NULL && do_first(c)) {
    }
    if (c->is_final && c->first == NULL) {
        atomic_store(&c->shared->ranks[c->rank].is_final, 1);
    }
}

static bool is_busy(const comm *c)
{
    return !c->is_ready || (c->polls_left > 0 && control.polls > 0) || c->split_out != NULL ||
           (c->is_final && !all_are(c, offsetof(world_rank, is_final)));
}

/* What a call that does not block answers. */
static int answer(comm *c)
{
    c->polls_left = control.polls;
    go_on(c);
    return is_busy(c) ? FC_NCCL_IN_PROGRESS : FC_NCCL_SUCCESS;
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

static int check_config(const fc_nccl_config *config)
{
    if (config->magic != FC_NCCL_MAGIC || config->blocking != 0 ||
        config->version > (unsigned)control.version || config->size < 20 ||
        config->size > sizeof(fc_nccl_config)) {
        return fault("a config of %d bytes, version %u, blocking %d", (int)config->size,
                     config->version, config->blocking);
    }
    if (config->size > offsetof(fc_nccl_config, max_ctas)) {
        control.max_ctas = config->max_ctas;
    }
    control.policy = config->size > offsetof(fc_nccl_config, cta_policy) ? config->cta_policy : -1;
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

    (void)pthread_mutex_lock(&lock);
    c = find(handle);
    if (c == NULL) {
        result = FC_NCCL_INVALID_ARGUMENT;
    } else {
        go_on(c);
        *error = c->error != 0 ? c->error : is_busy(c) ? FC_NCCL_IN_PROGRESS : FC_NCCL_SUCCESS;
        c->polls_left -= c->polls_left > 0;
    }
    (void)pthread_mutex_unlock(&lock);
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
    if (c != NULL && c->n_windows > 0) {
        result = fault("ncclCommFinalize with %d windows", c->n_windows);
    } else if (c != NULL) {
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

static int append(comm *c, const work *what)
{
    work **link = &c->first, *w = malloc(sizeof(*w));

    if (w == NULL || (what->from != NULL && what->what.bytes > SLOT_BYTES)) {
        free(w);
        return FC_NCCL_INTERNAL_ERROR;
    }
    *w = *what;
    w->next = NULL;
    w->sequence = ++c->n_posted;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = w;
    return FC_NCCL_SUCCESS;
}

/* A call outside of groups is a group of its own. */
static int enqueue(void *handle, const char *call, const work *what)
{
    comm *c;
    int result = FC_NCCL_INVALID_USAGE;

    if (control.fail_calls != 0) {
        return control.fail_calls;
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

static size_t bytes_of(size_t count, int type)
{
    fc_dtype dtype = dtype_of(type);

    return dtype == FC_DTYPE_COUNT ? 0 : count * fc_dtype_bytes(dtype);
}

/* Ranks of a communicator, without its rules. */
static size_t ranks_of(void *handle)
{
    size_t n = 0;

    (void)pthread_mutex_lock(&lock);
    for (comm *c = comms; c != NULL; c = c->next) {
        n = (void *)c == handle ? (size_t)c->n_ranks : n;
    }
    (void)pthread_mutex_unlock(&lock);
    return n;
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
    if (op != FC_NCCL_SUM) {
        return fault("ncclReduceScatter with operation %d", op);
    }
    return enqueue(handle, "ncclReduceScatter",
                   &(work){.what = {ranks_of(handle) * bytes_of(count, type), SCATTER, type},
                           .from = from,
                           .to = to,
                           .stream = stream,
                           .count = count});
}

API int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *handle,
                      void *stream)
{
    if (op != FC_NCCL_SUM) {
        return fault("ncclAllReduce with operation %d", op);
    }
    return enqueue(handle, "ncclAllReduce",
                   &(work){.what = {bytes_of(count, type), REDUCE, type},
                           .from = from,
                           .to = to,
                           .stream = stream,
                           .count = count});
}

/* ---- what older versions lack ---- */

#ifndef STAND_IN_OLD

/* Memory of ncclMemAlloc. */
typedef struct block {
    struct block *next;
    char *at;
    size_t bytes;
} block;

static block *blocks;

API int ncclCommSplit(void *handle, int color, int key, void **out, fc_nccl_config *config);
API int ncclMemAlloc(void **out, size_t bytes);
API int ncclMemFree(void *memory);
API int ncclCommWindowRegister(void *handle, void *memory, size_t bytes, void **window, int flags);
API int ncclCommWindowDeregister(void *handle, void *window);

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

API int ncclMemAlloc(void **out, size_t bytes)
{
    size_t rounded = (bytes + FC_NCCL_WINDOW_ALIGN - 1) / FC_NCCL_WINDOW_ALIGN;
    block *b = malloc(sizeof(*b));

    if (b == NULL) {
        return FC_NCCL_SYSTEM_ERROR;
    }
    b->bytes = rounded * FC_NCCL_WINDOW_ALIGN;
    b->at = aligned_alloc(FC_NCCL_WINDOW_ALIGN, b->bytes);
    if (b->at == NULL) {
        free(b);
        return FC_NCCL_CUDA_ERROR;
    }
    (void)pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    (void)pthread_mutex_unlock(&lock);
    *out = b->at;
    return FC_NCCL_SUCCESS;
}

API int ncclMemFree(void *memory)
{
    block **link = &blocks, *b;

    (void)pthread_mutex_lock(&lock);
    while (*link != NULL && (*link)->at != memory) {
        link = &(*link)->next;
    }
    b = *link;
    if (b != NULL) {
        *link = b->next;
    }
    (void)pthread_mutex_unlock(&lock);
    if (b == NULL) {
        return fault("ncclMemFree of memory that ncclMemAlloc did not give");
    }
    free(b->at);
    free(b);
    return FC_NCCL_SUCCESS;
}

/* Where memory begins in what ncclMemAlloc gave; false: it is other memory. */
static bool place_of(const char *memory, size_t bytes, size_t *out)
{
    for (const block *b = blocks; b != NULL; b = b->next) {
        if (memory >= b->at && memory + bytes <= b->at + b->bytes) {
            *out = (size_t)(memory - b->at);
            return true;
        }
    }
    return false;
}

/* Memory of another kind gives success and no window, as NCCL does where it cannot. */
API int ncclCommWindowRegister(void *handle, void *memory, size_t bytes, void **window, int flags)
{
    size_t at = 0;
    comm *c;
    int result = FC_NCCL_INVALID_USAGE;

    (void)pthread_mutex_lock(&lock);
    *window = NULL;
    c = at_rest(handle, "ncclCommWindowRegister");
    if (c != NULL && ((flags & FC_NCCL_WINDOW_SYMMETRIC) == 0 ||
                      (uintptr_t)memory % FC_NCCL_WINDOW_ALIGN != 0)) {
        result = fault("ncclCommWindowRegister with flags %d", flags);
    } else if (c != NULL) {
        if (!control.no_windows && place_of(memory, bytes, &at)) {
            *window = memory;
            c->n_windows++;
            control.n_windows++;
        }
        result = append(c, &(work){.what = {bytes + at, WINDOW, FC_NCCL_INT8}, .stream = c});
    }
    if (result == FC_NCCL_SUCCESS) {
        result = answer(c);
    }
    (void)pthread_mutex_unlock(&lock);
    return result;
}

API int ncclCommWindowDeregister(void *handle, void *window)
{
    comm *c;

    (void)pthread_mutex_lock(&lock);
    c = find(handle);
    if (c != NULL && window != NULL) {
        c->n_windows--;
        control.n_windows--;
    }
    (void)pthread_mutex_unlock(&lock);
    return c == NULL || window == NULL ? FC_NCCL_INVALID_ARGUMENT : FC_NCCL_SUCCESS;
}

#endif
