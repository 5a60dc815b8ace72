/* Stands between the objects of the extension: kills the process at a state of the protocol, makes
 * the n-th call to the system fail, or changes bits of what ranks tell each other.
 *
 * Only the linker knows of it (`--wrap`): the objects are those that users run, but for being
 * optimized as one, which would take calls away from here. A call within one source does not pass
 * here. One plan at a time, for the process; counts are kept for all kinds.
 */
#define _GNU_SOURCE

#include "comm/comm_impl.h"
#include "comm/rails_impl.h"
#include "engine/domain_private.h"
#include "engine/exchange.h"
#include "snapshot/copier.h"
#include "snapshot/ranks.h"
#include "snapshot/snapshot_private.h"
#include "transport/process.h"
#include "transport/shm_impl.h"
#include "transport/shm_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NAMES_MAX 96
#define NAME_BYTES 48

#define EXPORTED __attribute__((visibility("default")))

void soak_plan(const char *kind, const char *name, long nth, const char *note);
long soak_count(const char *name);
long soak_names(char *out, long bytes);

static struct {
    char kind[16]; /* "kill", "fail", "flip" or "" */
    char name[NAME_BYTES];
    long nth; /* of the name, from 1 on; of flips, one in so many */
    char note[256];
    uint64_t random;
} plan;

static struct {
    char name[NAME_BYTES];
    _Atomic long n;
} counts[NAMES_MAX];
static _Atomic int n_names;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int index_of(const char *name)
{
    int n = atomic_load(&n_names), found = -1;

    for (int i = 0; i < n; i++) {
        if (strcmp(counts[i].name, name) == 0) {
            return i;
        }
    }
    (void)pthread_mutex_lock(&lock);
    n = atomic_load(&n_names);
    for (int i = 0; i < n; i++) {
        found = strcmp(counts[i].name, name) == 0 ? i : found;
    }
    if (found < 0 && n < NAMES_MAX) {
        (void)snprintf(counts[n].name, NAME_BYTES, "%s", name);
        found = n;
        atomic_store(&n_names, n + 1);
    }
    (void)pthread_mutex_unlock(&lock);
    return found;
}

/* Counts; true: it is the planned one. */
static bool is_planned(const char *kind, const char *name)
{
    const int i = index_of(name);
    const long n = i < 0 ? 0 : atomic_fetch_add(&counts[i].n, 1) + 1;

    return strcmp(plan.kind, kind) == 0 && strcmp(plan.name, name) == 0 && n == plan.nth;
}

/* When it died stands in the note. */
static void die(void)
{
    struct timespec now;
    char text[64];
    int n, fd = open(plan.note, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    n = snprintf(text, sizeof(text), "%lld.%09ld", (long long)now.tv_sec, now.tv_nsec);
    if (fd >= 0 && write(fd, text, (size_t)n) == n) {
        (void)close(fd);
    }
    (void)kill(getpid(), SIGKILL);
}

static void reach(const char *name)
{
    if (is_planned("kill", name)) {
        die();
    }
}

EXPORTED void soak_plan(const char *kind, const char *name, long nth, const char *note)
{
    plan.kind[0] = '\0';
    for (int i = 0; i < atomic_load(&n_names); i++) {
        atomic_store(&counts[i].n, 0);
    }
    (void)snprintf(plan.name, sizeof(plan.name), "%s", name);
    (void)snprintf(plan.note, sizeof(plan.note), "%s", note);
    plan.nth = nth;
    plan.random = strtoull(name, NULL, 10) * 2654435761U + 88172645463325252U;
    (void)snprintf(plan.kind, sizeof(plan.kind), "%s", kind);
}

EXPORTED long soak_count(const char *name)
{
    const int i = index_of(name);

    return i < 0 ? 0 : atomic_load(&counts[i].n);
}

/* "name count\n" for each. */
EXPORTED long soak_names(char *out, long bytes)
{
    long at = 0;

    for (int i = 0; i < atomic_load(&n_names) && at < bytes; i++) {
        at += snprintf(out + at, (size_t)(bytes - at), "%s %ld\n", counts[i].name,
                       atomic_load(&counts[i].n));
    }
    return at;
}

/* ---- flipped bits ---- */

static const fc_domain *flipped_domain;
static const fc_comm *flipped_comm;
static const fc_transport *flipped_transport;

static uint64_t draw(uint64_t below)
{
    plan.random ^= plan.random << 13;
    plan.random ^= plan.random >> 7;
    plan.random ^= plan.random << 17;
    return plan.random % below;
}

static void flip_in(void *memory, size_t bytes)
{
    uint8_t *at = (uint8_t *)memory + draw(bytes);

    *(volatile uint8_t *)at = (uint8_t)(*at ^ (1U << draw(8)));
}

/* Words and texts that ranks read of each other, never gradients or shards. */
static void flip_one(void)
{
    const fc_domain *d = flipped_domain;
    const fc_comm *c = flipped_comm;
    const fc_transport *t = flipped_transport;
    const uint64_t where = draw(10);

    if (where < 5 && d != NULL && d->region != NULL && d->n_units > 0) {
        const size_t unit = (size_t)draw(d->n_units);

        flip_in(domain_lane(d, (int)draw((uint64_t)d->n_ranks), unit), d->lane_bytes);
    } else if (where < 8 && d != NULL && d->clocks != NULL) {
        flip_in(d->clocks, clocks_bytes(d->n_ranks));
    } else if (where < 9 && c != NULL && c->headers != NULL) {
        flip_in(c->headers->shared, (size_t)c->n_ranks * FC_CACHE_LINE);
    } else if (t != NULL && t->shm != NULL) {
        flip_in(t->shm->control, t->shm->control_bytes);
    }
}

static void maybe_flip(void)
{
    if (strcmp(plan.kind, "flip") == 0) {
        (void)pthread_mutex_lock(&lock);
        if (draw((uint64_t)plan.nth) == 0) {
            flip_one();
        }
        (void)pthread_mutex_unlock(&lock);
    }
}

/* ---- states of the protocol ---- */

#define STATE(fn, result, parameters, arguments)                                                   \
    result __real_##fn parameters;                                                                 \
    result __wrap_##fn parameters;                                                                 \
    result __wrap_##fn parameters                                                                  \
    {                                                                                              \
        reach(#fn "<");                                                                            \
        result given = __real_##fn arguments;                                                      \
        reach(#fn ">");                                                                            \
        return given;                                                                              \
    }
#define STATE_VOID(fn, parameters, arguments)                                                      \
    void __real_##fn parameters;                                                                   \
    void __wrap_##fn parameters;                                                                   \
    void __wrap_##fn parameters                                                                    \
    {                                                                                              \
        reach(#fn "<");                                                                            \
        __real_##fn arguments;                                                                     \
        reach(#fn ">");                                                                            \
        maybe_flip();                                                                              \
    }

STATE(fc_process_open, fc_status, (const fc_process_id *id, fc_process *out), (id, out))
STATE(fc_segment_create, fc_status,
      (const char *what, size_t bytes, size_t spare, int n_ranks, fc_segment_id *out),
      (what, bytes, spare, n_ranks, out))
STATE(fc_segment_open, fc_status, (const fc_segment_id *id, int *out), (id, out))
STATE(fc_segment_map, fc_status, (int fd, size_t bytes, size_t spare, bool is_private, char **out),
      (fd, bytes, spare, is_private, out))
STATE(fc_transport_map_with_spare, fc_status,
      (fc_transport * transport, const char *what, size_t bytes, size_t spare, uint64_t fingerprint,
       fc_region **out),
      (transport, what, bytes, spare, fingerprint, out))
STATE(fc_domain_ready, fc_status, (fc_domain * domain, const fc_unit *unit), (domain, unit))
STATE(fc_domain_close, fc_status, (fc_domain * domain), (domain))
STATE(fc_exchange_reserve, fc_status, (fc_unit * unit, size_t part_bytes, fc_wire wire, char **out),
      (unit, part_bytes, wire, out))
STATE_VOID(fc_exchange_commit, (fc_unit * unit), (unit))
STATE(fc_exchange_sources, fc_status, (fc_unit * unit, fc_source *out), (unit, out))
STATE_VOID(fc_exchange_consume, (fc_unit * unit), (unit))
STATE_VOID(fc_domain_mark_closed, (fc_domain * domain), (domain))
STATE(fc_copier_start, fc_status, (fc_copier * copier, const fc_snapshot_job *job), (copier, job))
STATE(fc_copier_finish, bool, (fc_copier * copier), (copier))
STATE_VOID(fc_snapshot_commit,
           (void *file, const fc_snapshot_facts *facts, const fc_sums *data, const fc_sums *index),
           (file, facts, data, index))
STATE_VOID(fc_snapshot_clear, (void *file), (file))
STATE_VOID(fc_snapshot_ranks_set_word, (fc_snapshot_ranks * ranks, size_t i, uint64_t value),
           (ranks, i, value))

/* Over messages and over rails. */

STATE(apart_exchange, fc_status, (fc_unit * unit), (unit))
STATE(meet, fc_status, (fc_unit * unit, size_t n_units, const char *op, uint64_t detail),
      (unit, n_units, op, detail))
STATE(waits_gather, fc_status,
      (fc_unit * unit, size_t n_units, char *recv, const void *send, size_t send_bytes,
       const fc_gathered *to),
      (unit, n_units, recv, send, send_bytes, to))
STATE(waits_gather_begin, fc_status, (fc_unit * unit, const void *send, size_t send_bytes),
      (unit, send, send_bytes))
STATE(waits_gather_end, fc_status, (fc_unit * unit, const fc_gathered *to), (unit, to))
STATE(waits_reduce_scatter, fc_status,
      (fc_unit * unit, size_t n_units, void *recv, void *send, size_t recv_numel, fc_dtype dtype,
       uint64_t detail),
      (unit, n_units, recv, send, recv_numel, dtype, detail))
STATE(waits_sum_end, fc_status, (fc_unit * unit, void *recv), (unit, recv))
STATE(fc_waits_all_reduce, fc_status, (fc_unit * unit, void *part, const fc_present *present),
      (unit, part, present))
STATE(rails_send, fc_status,
      (rails * r, const rails_call *call, int peer, const void *data, size_t bytes),
      (r, call, peer, data, bytes))
STATE(rails_receive, fc_status,
      (rails * r, const rails_call *call, int peer, void *data, size_t bytes),
      (r, call, peer, data, bytes))
STATE(rails_await_sent, fc_status, (rails * r, const rails_call *call, int peer, size_t bytes),
      (r, call, peer, bytes))
STATE(rails_await_received, fc_status, (rails * r, const rails_call *call, int peer, size_t bytes),
      (r, call, peer, bytes))

/* Those that tell where shared words lie, too. */

void __real_fc_domain_open(fc_domain *domain, fc_opening opening);
void __wrap_fc_domain_open(fc_domain *domain, fc_opening opening);
void __wrap_fc_domain_open(fc_domain *domain, fc_opening opening)
{
    reach("fc_domain_open<");
    __real_fc_domain_open(domain, opening);
    flipped_domain = domain;
    reach("fc_domain_open>");
    maybe_flip();
}

fc_status __real_fc_comm_meet(fc_comm *comm, const fc_comm_call *call);
fc_status __wrap_fc_comm_meet(fc_comm *comm, const fc_comm_call *call);
fc_status __wrap_fc_comm_meet(fc_comm *comm, const fc_comm_call *call)
{
    fc_status st;

    reach("fc_comm_meet<");
    flipped_comm = comm;
    maybe_flip();
    st = __real_fc_comm_meet(comm, call);
    reach("fc_comm_meet>");
    return st;
}

void __real_fc_transport_publish(fc_transport *transport, fc_word *word, uint64_t value);
void __wrap_fc_transport_publish(fc_transport *transport, fc_word *word, uint64_t value);
void __wrap_fc_transport_publish(fc_transport *transport, fc_word *word, uint64_t value)
{
    reach("fc_transport_publish<");
    flipped_transport = transport;
    __real_fc_transport_publish(transport, word, value);
    reach("fc_transport_publish>");
    maybe_flip();
}

fc_status __real_fc_transport_wait(fc_transport *transport, int peer, fc_ready_fn ready, void *arg,
                                   const fc_wait_info *info);
fc_status __wrap_fc_transport_wait(fc_transport *transport, int peer, fc_ready_fn ready, void *arg,
                                   const fc_wait_info *info);
fc_status __wrap_fc_transport_wait(fc_transport *transport, int peer, fc_ready_fn ready, void *arg,
                                   const fc_wait_info *info)
{
    fc_status st;

    reach("fc_transport_wait<");
    maybe_flip();
    st = __real_fc_transport_wait(transport, peer, ready, arg, info);
    reach("fc_transport_wait>");
    return st;
}

/* ---- calls to the system ---- */

#define FAILS(name, code, failed)                                                                  \
    if (is_planned("fail", name)) {                                                                \
        errno = code;                                                                              \
        return failed;                                                                             \
    }

void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes)
{
    FAILS("calloc", ENOMEM, NULL)
    return __real_calloc(count, bytes);
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    FAILS("mmap", ENOMEM, MAP_FAILED)
    return __real_mmap(at, bytes, protection, flags, fd, offset);
}

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags)
{
    FAILS("memfd_create", EMFILE, -1)
    return __real_memfd_create(name, flags);
}

int __real_ftruncate(int fd, off_t bytes);
int __wrap_ftruncate(int fd, off_t bytes);
int __wrap_ftruncate(int fd, off_t bytes)
{
    FAILS("ftruncate", ENOSPC, -1)
    return __real_ftruncate(fd, bytes);
}

int __real_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t bytes)
{
    FAILS("fallocate", ENOSPC, -1)
    return __real_fallocate(fd, mode, offset, bytes);
}

int __real_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...);
int __wrap_open(const char *path, int flags, ...)
{
    va_list more;
    unsigned mode;

    va_start(more, flags);
    mode = (flags & O_CREAT) != 0 ? va_arg(more, unsigned) : 0;
    va_end(more);
    FAILS("open", EMFILE, -1)
    return __real_open(path, flags, mode);
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
    va_list more;
    long a[6];

    va_start(more, number);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(more, long);
    }
    va_end(more);
    if (number == SYS_pidfd_open) {
        FAILS("pidfd_open", EMFILE, -1)
    }
    return __real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg)
{
    FAILS("pthread_create", EAGAIN, EAGAIN)
    return __real_pthread_create(thread, attributes, start, arg);
}
