/* Hosts of several and of different numbers of ranks, which are processes; rails between them are
 * sockets. What collectives over rails give is held to plain loops, bit for bit. */
#ifndef RAILS_WORLD_H
#define RAILS_WORLD_H

#define RANKS_MAX 6

#include "ranks.h"

#include "base/alloc.h"
#include "comm/rails.h"
#include "kernels/kernels.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        const fc_status st_ = (call);                                                              \
        CHECK_MSG(st_ == FC_OK, "%s: %s", #call, fc_last_message());                               \
    } while (0)

#define TIMEOUT_NS (30 * FC_NS_PER_S)
#define KIB ((size_t)1 << 10)
#define QUEUE_MAX 4096
/* ---- rails over sockets ---- */

typedef struct message {
    char *data;
    size_t bytes, done; /* `done` counts the length, which travels first */
    uint64_t length;
} message;

typedef struct queue {
    message messages[QUEUE_MAX];
    size_t n, n_awaited;
} queue;

typedef struct wires {
    int rank, n_ranks;
    int fds[RANKS_MAX];
    queue out[RANKS_MAX], in[RANKS_MAX];
    bool is_dead[RANKS_MAX];
    int n_dropped, n_released;
    pthread_mutex_t lock;
    pthread_t mover; /* messages arrive whether somebody waits for them or not */
    _Atomic bool ends, is_interrupted;
} wires;

static int pairs[RANKS_MAX][RANKS_MAX]; /* made before the ranks are forked */

static inline void put(queue *q, char *data, size_t bytes)
{
    CHECK_OR_EXIT(q->n - q->n_awaited < QUEUE_MAX);
    q->messages[q->n++ % QUEUE_MAX] = (message){data, bytes, 0, bytes};
}

/* Moves what can be moved at once; false: the other side has ended. */
static inline bool move(int fd, queue *q, bool is_out)
{
    for (size_t i = q->n_awaited; i < q->n; i++) {
        message *m = &q->messages[i % QUEUE_MAX];

        while (m->done < sizeof(m->length) + m->bytes) {
            const bool is_length = m->done < sizeof(m->length);
            char *at =
                is_length ? (char *)&m->length + m->done : m->data + m->done - sizeof(m->length);
            const size_t left = (is_length ? 0 : m->bytes) + sizeof(m->length) - m->done;
            const ssize_t n = is_out ? send(fd, at, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                                     : recv(fd, at, left, MSG_DONTWAIT);

            if (n <= 0) {
                return n < 0 && (errno == EAGAIN || errno == EINTR);
            }
            m->done += (size_t)n;
            if (m->done >= sizeof(m->length) && m->length != m->bytes) {
                return false; /* as a group that knows no such message ends */
            }
        }
    }
    return true;
}

static inline bool is_idle(const queue *q)
{
    const message *last = &q->messages[(q->n - 1) % QUEUE_MAX];

    return q->n == q->n_awaited || last->done == sizeof(last->length) + last->bytes;
}

/* Moves what can be moved at once, then waits for a millisecond, or until more can be. */
static inline void move_some(wires *w)
{
    struct pollfd polled[RANKS_MAX];
    nfds_t n = 0;

    CHECK_EQ(pthread_mutex_lock(&w->lock), 0);
    for (int r = 0; r < w->n_ranks; r++) {
        int events;

        if (r != w->rank && !w->is_dead[r]) {
            w->is_dead[r] =
                !move(w->fds[r], &w->out[r], true) || !move(w->fds[r], &w->in[r], false);
        }
        events = (is_idle(&w->out[r]) ? 0 : POLLOUT) | (is_idle(&w->in[r]) ? 0 : POLLIN);
        if (r != w->rank && !w->is_dead[r] && events != 0) {
            polled[n++] = (struct pollfd){.fd = w->fds[r], .events = (short)events};
        }
    }
    CHECK_EQ(pthread_mutex_unlock(&w->lock), 0);
    (void)poll(polled, n, 1);
}

static inline void *move_all(void *arg)
{
    wires *w = arg;

    while (!atomic_load(&w->ends)) {
        move_some(w);
    }
    return NULL;
}

static inline fc_status await(wires *w, queue *q, int peer)
{
    const int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);
    bool is_done = false, is_dead = false;

    while (!is_done && !is_dead) {
        CHECK_EQ(pthread_mutex_lock(&w->lock), 0);
        const message *m = &q->messages[q->n_awaited % QUEUE_MAX];

        CHECK(q->n_awaited < q->n);
        w->is_dead[peer] = w->is_dead[peer] || !move(w->fds[peer], q, q == &w->out[peer]);
        is_done = m->done == sizeof(m->length) + m->bytes;
        is_dead = w->is_dead[peer];
        q->n_awaited += is_done;
        CHECK_EQ(pthread_mutex_unlock(&w->lock), 0);
        if (!is_done && atomic_load(&w->is_interrupted)) {
            return fc_fail(FC_ERR_PEER, "the wait was interrupted");
        }
        if (fc_now_ns() > deadline_ns) {
            return fc_fail(FC_ERR_TIMEOUT, "nothing came");
        }
        if (!is_done && !is_dead) {
            struct pollfd polled = {.fd = w->fds[peer],
                                    .events = q == &w->out[peer] ? POLLOUT : POLLIN};

            (void)poll(&polled, 1, 1);
        }
    }
    return is_done ? FC_OK : fc_fail(FC_ERR_PEER, "the line is dead");
}

static inline fc_status begin(wires *w, queue *q, int peer, const void *data, size_t bytes)
{
    CHECK(bytes > 0);
    CHECK_EQ(pthread_mutex_lock(&w->lock), 0);
    put(q, (char *)(uintptr_t)data, bytes);
    if (q == &w->out[peer]) {
        (void)move(w->fds[peer], q, true); /* what is said last is sent before the line ends */
    }
    CHECK_EQ(pthread_mutex_unlock(&w->lock), 0);
    return FC_OK;
}

static inline fc_status wires_send(void *context, int rank, uint32_t key, const void *data,
                                   size_t bytes)
{
    (void)key;
    return begin(context, &((wires *)context)->out[rank], rank, data, bytes);
}

static inline fc_status wires_receive(void *context, int rank, uint32_t key, void *data,
                                      size_t bytes)
{
    (void)key;
    return begin(context, &((wires *)context)->in[rank], rank, data, bytes);
}

static inline fc_status wires_await_sent(void *context, int rank)
{
    return await(context, &((wires *)context)->out[rank], rank);
}

static inline fc_status wires_await_received(void *context, int rank)
{
    return await(context, &((wires *)context)->in[rank], rank);
}

static inline void wires_interrupt(void *context)
{
    atomic_store(&((wires *)context)->is_interrupted, true);
}

static inline void wires_drop(void *context)
{
    wires *w = context;

    CHECK_EQ(pthread_mutex_lock(&w->lock), 0);
    for (int r = 0; r < w->n_ranks; r++) {
        w->out[r].n_awaited = w->out[r].n;
        w->in[r].n_awaited = w->in[r].n;
    }
    w->n_dropped++;
    CHECK_EQ(pthread_mutex_unlock(&w->lock), 0);
}

static inline void wires_release(void *context)
{
    ((wires *)context)->n_released++;
}

static inline fc_status own_all_to_all(void *context, void *recv, const size_t *recv_bytes,
                                       const void *send, const size_t *send_bytes)
{
    (void)context, (void)recv, (void)recv_bytes, (void)send, (void)send_bytes;
    return fc_fail(FC_ERR_GROUP, "all_to_all of the group");
}

/* ---- a world ---- */

typedef struct world {
    int n_ranks;
    int hosts[RANKS_MAX];
} world;

static const world worlds[] = {
    {2, {0, 1}},    {4, {0, 0, 1, 1}},       {4, {0, 0, 1, 2}},
    {3, {0, 0, 1}}, {4, {0, 1, 0, 1}}, /* numbered across hosts */
    {3, {0, 1, 2}}, {6, {0, 0, 1, 1, 2, 2}}, {4, {0, 0, 0, 1}},
};

#define N_WORLDS (sizeof(worlds) / sizeof(worlds[0]))

static inline int n_on(const world *w, int host)
{
    int n = 0;

    for (int r = 0; r < w->n_ranks; r++) {
        n += w->hosts[r] == host;
    }
    return n;
}

static inline int n_hosts_of(const world *w)
{
    int n = 0;

    while (n_on(w, n) > 0) {
        n++;
    }
    return n;
}

static inline int place_on_host(const world *w, int rank)
{
    int n = 0;

    for (int r = 0; r < rank; r++) {
        n += w->hosts[r] == w->hosts[rank];
    }
    return n;
}

typedef struct member {
    const world *world;
    int rank;
    ranks_host host;
    fc_transport *local;
    wires *wires;
    fc_message_ops ops;
} member;

static inline void make_lines(int n_ranks)
{
    for (int a = 0; a < n_ranks; a++) {
        for (int b = a + 1; b < n_ranks; b++) {
            int ends[2];

            CHECK_OR_EXIT(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
            pairs[a][b] = ends[0];
            pairs[b][a] = ends[1];
        }
    }
}

static inline void close_lines(int n_ranks, int keeper)
{
    for (int a = 0; a < n_ranks; a++) {
        for (int b = 0; b < n_ranks; b++) {
            if (a != b && a != keeper) {
                (void)close(pairs[a][b]);
            }
        }
    }
}

static inline fc_status create(member *m, const world *w, int rank)
{
    static const int global_ranks[RANKS_MAX] = {10, 11, 12, 13, 14, 15};
    static const char *const names[] = {"ape", "bee", "cow"};
    const int n_local = n_on(w, w->hosts[rank]);
    fc_rails_config config = {.rank = rank,
                              .n_ranks = w->n_ranks,
                              .global_ranks = global_ranks,
                              .hosts = w->hosts,
                              .names = names,
                              .rails = {.send = wires_send,
                                        .receive = wires_receive,
                                        .await_sent = wires_await_sent,
                                        .await_received = wires_await_received,
                                        .interrupt = wires_interrupt,
                                        .drop = wires_drop,
                                        .release = wires_release},
                              .group = {.all_to_all = own_all_to_all, .release = wires_release}};

    *m = (member){.world = w, .rank = rank, .wires = fc_alloc(1, sizeof(wires))};
    CHECK_OR_EXIT(m->wires != NULL);
    m->wires->rank = rank;
    m->wires->n_ranks = w->n_ranks;
    memcpy(m->wires->fds, pairs[rank], sizeof(m->wires->fds));
    CHECK_EQ(pthread_mutex_init(&m->wires->lock, NULL), 0);
    CHECK_OR_EXIT(pthread_create(&m->wires->mover, NULL, move_all, m->wires) == 0);
    config.rails.context = config.group.context = m->wires;
    if (n_local > 1) {
        const fc_transport_config local =
            ranks_config(&m->host, w->hosts[rank], place_on_host(w, rank), n_local, TIMEOUT_NS);

        CHECK_OK(fc_shm_create(&local, &m->local));
        config.local = m->local;
    }
    return fc_rails_create(&config, &m->ops);
}

static inline void destroy(member *m)
{
    atomic_store(&m->wires->ends, true);
    CHECK_EQ(pthread_join(m->wires->mover, NULL), 0);
    m->ops.release(m->ops.context);
    CHECK_EQ(m->wires->n_released, 2); /* rails and group */
    fc_transport_destroy(m->local);
    fc_free(m->wires);
}

/* ---- plain computations ---- */

static inline float value_of(int rank, size_t i, int salt)
{
    const uint32_t x = (uint32_t)(i * 2654435761u) ^ (uint32_t)(rank * 40503 + salt * 977);

    return (float)((int)(x >> 8 & 0xffff) - 32768) / 1000.0f;
}

static inline void write_value(char *at, fc_dtype dtype, float value)
{
    if (dtype == FC_F32) {
        memcpy(at, &value, sizeof(value));
    } else {
        fc_kern_cast(FC_F32, dtype)(at, &value, 1);
    }
}

static inline void fill(char *data, size_t numel, fc_dtype dtype, int rank, int salt)
{
    for (size_t i = 0; i < numel; i++) {
        write_value(data + i * fc_dtype_bytes(dtype), dtype, value_of(rank, i, salt));
    }
}

/* Element i: sums of hosts, each rounded, in their order. */
static inline void plain_sum(const world *w, fc_dtype dtype, size_t i, int salt, char *out)
{
    char values[RANKS_MAX][8], sums[RANKS_MAX][8];
    const void *sources[RANKS_MAX];
    const int n_hosts = n_hosts_of(w);

    for (int h = 0; h < n_hosts; h++) {
        size_t n = 0;

        for (int r = 0; r < w->n_ranks; r++) {
            if (w->hosts[r] == h) {
                write_value(values[n], dtype, value_of(r, i, salt));
                sources[n] = values[n];
                n++;
            }
        }
        fc_kern_reduce(dtype, dtype)(sums[h], sources, n, 1, 1.0, false);
    }
    for (int h = 0; h < n_hosts; h++) {
        sources[h] = sums[h];
    }
    fc_kern_reduce(dtype, dtype)(out, sources, (size_t)n_hosts, 1, 1.0, false);
}

/* Of many every seventh, which is one of each cache line, and both ends. */
static inline size_t n_different(const world *w, const char *got, fc_dtype dtype, size_t from,
                                 size_t numel, int salt)
{
    const size_t item = fc_dtype_bytes(dtype), ends = 512;
    size_t n = 0;

    for (size_t i = 0; i < numel; i += i < ends || i + ends > numel ? 1 : 7) {
        char expected[8];

        plain_sum(w, dtype, from + i, salt, expected);
        n += memcmp(got + i * item, expected, item) != 0;
    }
    return n;
}

/* ---- each collective ---- */

/* Without a period: a piece in the place of another one is seen. */
static inline char byte_of(size_t i, int rank, int salt)
{
    return (char)((i + (size_t)(rank * 31 + salt)) * UINT64_C(0x9e3779b97f4a7c15) >> 56);
}

static inline void check_all_gather(member *m, size_t bytes, int salt, bool in_place)
{
    const size_t n = (size_t)m->world->n_ranks;
    char *recv = malloc(n * bytes + 1), *own = malloc(bytes + 1);
    const char *send = in_place ? recv + (size_t)m->rank * bytes : own;

    memset(recv, 0x11, n * bytes);
    for (size_t i = 0; i < bytes; i++) {
        ((char *)(uintptr_t)send)[i] = byte_of(i, m->rank, salt);
    }
    CHECK_OK(m->ops.all_gather(m->ops.context, recv, send, bytes));
    for (size_t r = 0; r < n; r++) {
        size_t n_wrong = 0;

        for (size_t i = 0; i < bytes; i++) {
            n_wrong += recv[r * bytes + i] != byte_of(i, (int)r, salt);
        }
        CHECK_MSG(n_wrong == 0, "all_gather of %zu bytes: %zu of rank %zu are wrong", bytes,
                  n_wrong, r);
    }
    free(own);
    free(recv);
}

static inline void check_reduce_scatter(member *m, size_t numel, fc_dtype dtype, int salt)
{
    const size_t n = (size_t)m->world->n_ranks, item = fc_dtype_bytes(dtype);
    char *send = malloc(n * numel * item + 1), *recv = malloc(numel * item + 1);

    fill(send, n * numel, dtype, m->rank, salt);
    CHECK_OK(m->ops.reduce_scatter(m->ops.context, recv, send, numel, dtype));
    CHECK_EQ(n_different(m->world, recv, dtype, (size_t)m->rank * numel, numel, salt), 0);
    free(recv);
    free(send);
}

static inline void check_all_reduce(member *m, size_t numel, fc_dtype dtype, int salt)
{
    char *data = malloc(numel * fc_dtype_bytes(dtype) + 1);

    fill(data, numel, dtype, m->rank, salt);
    CHECK_OK(m->ops.all_reduce(m->ops.context, data, numel, dtype));
    CHECK_EQ(n_different(m->world, data, dtype, 0, numel, salt), 0);
    free(data);
}

static inline void check_broadcast(member *m, size_t bytes, int root)
{
    char *data = malloc(bytes + 1);
    size_t n_wrong = 0;

    for (size_t i = 0; i < bytes; i++) {
        data[i] = m->rank == root ? byte_of(i, root, 0) : (char)-1;
    }
    CHECK_OK(m->ops.broadcast(m->ops.context, data, bytes, root));
    for (size_t i = 0; i < bytes; i++) {
        n_wrong += data[i] != byte_of(i, root, 0);
    }
    CHECK_EQ(n_wrong, 0);
    free(data);
}

/* Ranks of one world. */
static inline void check_world(const world *of, ranks_body body)
{
    world w = *of;

    make_lines(w.n_ranks);
    ranks_check(w.n_ranks, body, &w);
    close_lines(w.n_ranks, -1);
}

static inline void check_worlds(ranks_body body)
{
    for (size_t i = 0; i < N_WORLDS; i++) {
        check_world(&worlds[i], body);
    }
}

#endif
