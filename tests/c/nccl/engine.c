/* The engine of the stand-in for NCCL: shared memory, work and its progress. */
#define _GNU_SOURCE /* memfd_create */

#include "nccl/engine.h"

#include "kernels/kernels.h"
#include "transport/nccl_api.h"

#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

stand_in control = {.version = 23007};
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
comm *comms;
uint64_t n_enqueued;

int fault(const char *format, ...)
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

int make_world(void)
{
    int fd = memfd_create("nccl stand-in", MFD_CLOEXEC);

    return fd >= 0 && ftruncate(fd, (off_t)sizeof(world)) == 0 ? fd : -1;
}

world *open_world(int pid, int number)
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

comm *make_comm(world *shared, int rank, int n_ranks)
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

static comm *known(const void *handle)
{
    comm *c = comms;

    while (c != NULL && (const void *)c != handle) {
        c = c->next;
    }
    return c;
}

comm *find(void *handle)
{
    comm *c = known(handle);

    if (c == NULL || c->is_dead) {
        (void)fault("a call on a communicator that does not exist or was ended");
        return NULL;
    }
    return c;
}

void enter(void *handle, const char *call)
{
    comm *c;

    (void)pthread_mutex_lock(&lock);
    c = known(handle);
    if (c != NULL && c->n_callers++ > 0) {
        (void)fault("%s while another thread is in a call on the communicator", call);
    }
    (void)pthread_mutex_unlock(&lock);
}

void leave(void *handle)
{
    comm *c;

    (void)pthread_mutex_lock(&lock);
    c = known(handle);
    if (c != NULL) {
        c->n_callers--;
    }
    (void)pthread_mutex_unlock(&lock);
}

void bury(comm *c)
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

fc_dtype dtype_of(int type)
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

/* Each is divided before it is added up. */
static void add_means(const comm *c, const work *w, const void *const *sources, fc_dtype dtype)
{
    const size_t bytes = w->count * fc_dtype_bytes(dtype), n = (size_t)c->n_ranks;
    char *parts = malloc(n * bytes);
    const void *divided[RANKS];

    for (size_t r = 0; parts != NULL && r < n; r++) {
        fc_kern_reduce(dtype, dtype)(parts + r * bytes, &sources[r], 1, w->count, (double)n, false);
        divided[r] = parts + r * bytes;
    }
    if (parts != NULL) {
        fc_kern_reduce(dtype, dtype)(w->to, divided, n, w->count, 1.0, false);
    }
    free(parts);
}

static void perform(const comm *c, const work *w)
{
    const void *sources[RANKS];
    const bool is_scatter = w->what.kind == SCATTER || w->what.kind == SCATTER_MEANS;
    size_t at = is_scatter ? (size_t)c->rank * (w->what.bytes / (size_t)c->n_ranks) : 0;
    fc_dtype dtype = dtype_of(w->what.type);

    for (int r = 0; r < c->n_ranks; r++) {
        sources[r] = c->shared->ranks[r].slots[w->sequence % SLOTS].data + at;
    }
    if (w->what.kind == GATHER) {
        for (int r = 0; r < c->n_ranks; r++) {
            memcpy((char *)w->to + (size_t)r * w->what.bytes, sources[r], w->what.bytes);
        }
    } else if (w->what.kind == SCATTER_MEANS || w->what.kind == REDUCE_MEANS) {
        add_means(c, w, sources, dtype);
    } else {
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

void go_on(comm *c)
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

bool is_busy(const comm *c)
{
    return !c->is_ready || (c->polls_left > 0 && control.polls > 0) || c->split_out != NULL ||
           (c->is_final && !all_are(c, offsetof(world_rank, is_final)));
}

bool is_in_progress(const comm *c)
{
    return is_busy(c) || (control.ends_work && c->first != NULL);
}

int answer(comm *c)
{
    c->polls_left = control.polls;
    go_on(c);
    return is_in_progress(c) ? FC_NCCL_IN_PROGRESS : FC_NCCL_SUCCESS;
}

/* ---- work ---- */

int append(comm *c, const work *what)
{
    work **link = &c->first, *w = malloc(sizeof(*w));

    if (w == NULL || (what->from != NULL && what->what.bytes > SLOT_BYTES)) {
        free(w);
        return FC_NCCL_INTERNAL_ERROR;
    }
    *w = *what;
    w->next = NULL;
    w->sequence = ++c->n_posted;
    w->serial = ++n_enqueued;
    while (*link != NULL) {
        link = &(*link)->next;
    }
    *link = w;
    return FC_NCCL_SUCCESS;
}

bool is_done(uint64_t serial)
{
    bool answer = true;

    for (comm *c = comms; c != NULL; c = c->next) {
        if (!c->is_dead) {
            go_on(c);
            answer = answer && (c->first == NULL || c->first->serial > serial);
        }
    }
    return answer;
}

size_t bytes_of(size_t count, int type)
{
    fc_dtype dtype = dtype_of(type);

    return dtype == FC_DTYPE_COUNT ? 0 : count * fc_dtype_bytes(dtype);
}

size_t ranks_of(void *handle)
{
    size_t n = 0;

    (void)pthread_mutex_lock(&lock);
    for (comm *c = comms; c != NULL; c = c->next) {
        n = (void *)c == handle ? (size_t)c->n_ranks : n;
    }
    (void)pthread_mutex_unlock(&lock);
    return n;
}
