/* Collectives over rails against plain loops, bit for bit: hosts of several and of different
 * numbers of ranks, which are processes; rails are sockets. */
#define _GNU_SOURCE
#define RANKS_MAX 6

#include "ranks.h"

#include "base/alloc.h"
#include "comm/rails.h"
#include "kernels/kernels.h"

#include <errno.h>
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

static void put(queue *q, char *data, size_t bytes)
{
    CHECK_OR_EXIT(q->n - q->n_awaited < QUEUE_MAX);
    q->messages[q->n++ % QUEUE_MAX] = (message){data, bytes, 0, bytes};
}

/* Moves what can be moved at once; false: the other side has ended. */
static bool move(int fd, queue *q, bool is_out)
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

static void *move_all(void *arg)
{
    wires *w = arg;

    while (!atomic_load(&w->ends)) {
        CHECK_EQ(pthread_mutex_lock(&w->lock), 0);
        for (int r = 0; r < w->n_ranks; r++) {
            if (r != w->rank && !w->is_dead[r]) {
                w->is_dead[r] =
                    !move(w->fds[r], &w->out[r], true) || !move(w->fds[r], &w->in[r], false);
            }
        }
        CHECK_EQ(pthread_mutex_unlock(&w->lock), 0);
        (void)usleep(50);
    }
    return NULL;
}

static fc_status await(wires *w, queue *q, int peer)
{
    const int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);
    bool is_done = false, is_dead = false;

    while (!is_done && !is_dead) {
        CHECK_EQ(pthread_mutex_lock(&w->lock), 0);
        const message *m = &q->messages[q->n_awaited % QUEUE_MAX];

        CHECK(q->n_awaited < q->n);
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
        (void)sched_yield();
    }
    return is_done ? FC_OK : fc_fail(FC_ERR_PEER, "the line is dead");
}

static fc_status begin(wires *w, queue *q, int peer, const void *data, size_t bytes)
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

static fc_status wires_send(void *context, int rank, uint32_t key, const void *data, size_t bytes)
{
    (void)key;
    return begin(context, &((wires *)context)->out[rank], rank, data, bytes);
}

static fc_status wires_receive(void *context, int rank, uint32_t key, void *data, size_t bytes)
{
    (void)key;
    return begin(context, &((wires *)context)->in[rank], rank, data, bytes);
}

static fc_status wires_await_sent(void *context, int rank)
{
    return await(context, &((wires *)context)->out[rank], rank);
}

static fc_status wires_await_received(void *context, int rank)
{
    return await(context, &((wires *)context)->in[rank], rank);
}

static void wires_interrupt(void *context)
{
    atomic_store(&((wires *)context)->is_interrupted, true);
}

static void wires_drop(void *context)
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

static void wires_release(void *context)
{
    ((wires *)context)->n_released++;
}

static fc_status own_all_to_all(void *context, void *recv, const size_t *recv_bytes,
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

static int n_on(const world *w, int host)
{
    int n = 0;

    for (int r = 0; r < w->n_ranks; r++) {
        n += w->hosts[r] == host;
    }
    return n;
}

static int n_hosts_of(const world *w)
{
    int n = 0;

    while (n_on(w, n) > 0) {
        n++;
    }
    return n;
}

static int place_on_host(const world *w, int rank)
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

static void make_lines(int n_ranks)
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

static void close_lines(int n_ranks, int keeper)
{
    for (int a = 0; a < n_ranks; a++) {
        for (int b = 0; b < n_ranks; b++) {
            if (a != b && a != keeper) {
                (void)close(pairs[a][b]);
            }
        }
    }
}

static fc_status create(member *m, const world *w, int rank)
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

static void destroy(member *m)
{
    atomic_store(&m->wires->ends, true);
    CHECK_EQ(pthread_join(m->wires->mover, NULL), 0);
    m->ops.release(m->ops.context);
    CHECK_EQ(m->wires->n_released, 2); /* rails and group */
    fc_transport_destroy(m->local);
    fc_free(m->wires);
}

/* With a gather under way. */
static void destroy_begun(member *m, char *send)
{
    m->ops.release(m->ops.context);
    CHECK_EQ(m->wires->n_dropped, 1);
    atomic_store(&m->wires->ends, true);
    CHECK_EQ(pthread_join(m->wires->mover, NULL), 0);
    fc_transport_destroy(m->local);
    fc_free(m->wires);
    free(send);
}

/* ---- plain computations ---- */

static float value_of(int rank, size_t i, int salt)
{
    const uint32_t x = (uint32_t)(i * 2654435761u) ^ (uint32_t)(rank * 40503 + salt * 977);

    return (float)((int)(x >> 8 & 0xffff) - 32768) / 1000.0f;
}

static void write_value(char *at, fc_dtype dtype, float value)
{
    if (dtype == FC_F32) {
        memcpy(at, &value, sizeof(value));
    } else {
        fc_kern_cast(FC_F32, dtype)(at, &value, 1);
    }
}

static void fill(char *data, size_t numel, fc_dtype dtype, int rank, int salt)
{
    for (size_t i = 0; i < numel; i++) {
        write_value(data + i * fc_dtype_bytes(dtype), dtype, value_of(rank, i, salt));
    }
}

/* Element i: sums of hosts, each rounded, in their order. */
static void plain_sum(const world *w, fc_dtype dtype, size_t i, int salt, char *out)
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

static size_t n_different(const world *w, const char *got, fc_dtype dtype, size_t from,
                          size_t numel, int salt)
{
    const size_t item = fc_dtype_bytes(dtype);
    size_t n = 0;

    for (size_t i = 0; i < numel; i++) {
        char expected[8];

        plain_sum(w, dtype, from + i, salt, expected);
        n += memcmp(got + i * item, expected, item) != 0;
    }
    return n;
}

/* ---- each collective ---- */

static void check_all_gather(member *m, size_t bytes, int salt, bool in_place)
{
    const size_t n = (size_t)m->world->n_ranks;
    char *recv = malloc(n * bytes + 1), *own = malloc(bytes + 1);
    const char *send = in_place ? recv + (size_t)m->rank * bytes : own;

    memset(recv, 0x11, n * bytes);
    for (size_t i = 0; i < bytes; i++) {
        ((char *)(uintptr_t)send)[i] = (char)(i * 7 + (size_t)(m->rank * 31 + salt));
    }
    CHECK_OK(m->ops.all_gather(m->ops.context, recv, send, bytes));
    for (size_t r = 0; r < n; r++) {
        size_t n_wrong = 0;

        for (size_t i = 0; i < bytes; i++) {
            n_wrong += recv[r * bytes + i] != (char)(i * 7 + (r * 31 + (size_t)salt));
        }
        CHECK_MSG(n_wrong == 0, "all_gather of %zu bytes: %zu of rank %zu are wrong", bytes,
                  n_wrong, r);
    }
    free(own);
    free(recv);
}

/* ---- what comes piece by piece ---- */

typedef struct taken {
    size_t bytes; /* of a rank */
    size_t at[RANKS_MAX];
    int salt;
    size_t n_wrong;
    int n_seen;
    int refuses; /* a rank; -1: none */
} taken;

static fc_status take(void *context, int rank, size_t at, const char *data, size_t bytes)
{
    taken *t = context;

    if (rank == t->refuses) {
        return fc_fail(FC_ERR_STATE, "not wanted");
    }
    CHECK_EQ(at, t->at[rank]); /* in order */
    t->at[rank] = at + bytes;
    for (size_t i = 0; i < bytes; i++) {
        t->n_wrong += data[i] != (char)((at + i) * 7 + (size_t)(rank * 31 + t->salt));
    }
    return FC_OK;
}

/* All ranks are seen before anything is taken. */
static fc_status look(void *context, int rank, const char *data, size_t bytes)
{
    taken *t = context;

    CHECK(bytes > 0 && bytes <= t->bytes);
    for (int r = 0; r < RANKS_MAX; r++) {
        CHECK_EQ(t->at[r], 0);
    }
    t->n_seen += 1 + (data[0] != (char)(rank * 31 + t->salt));
    return FC_OK;
}

static char *chunk_of(const member *m, size_t bytes, int salt)
{
    char *send = malloc(bytes + 1);

    for (size_t i = 0; i < bytes; i++) {
        send[i] = (char)(i * 7 + (size_t)(m->rank * 31 + salt));
    }
    return send;
}

static void check_taken(const member *m, const taken *t)
{
    for (int r = 0; r < m->world->n_ranks; r++) {
        CHECK_EQ(t->at[r], t->bytes);
    }
    CHECK_EQ(t->n_seen, t->bytes > 0 ? m->world->n_ranks : 0);
    CHECK_EQ(t->n_wrong, 0);
}

static void check_gather(member *m, size_t bytes, int salt)
{
    char *send = chunk_of(m, bytes, salt);
    taken t = {.bytes = bytes, .salt = salt, .refuses = -1};
    const fc_gathered to = {&t, look, take};

    CHECK_OK(m->ops.gather(m->ops.context, send, bytes, &to));
    check_taken(m, &t);
    free(send);
}

static char *begin_gather(member *m, size_t bytes, int salt)
{
    char *send = chunk_of(m, bytes, salt);

    CHECK_OK(m->ops.gather_begin(m->ops.context, send, bytes));
    return send;
}

static void end_gather(member *m, char *send, size_t bytes, int salt)
{
    taken t = {.bytes = bytes, .salt = salt, .refuses = -1};
    const fc_gathered to = {&t, look, take};

    CHECK_OK(m->ops.gather_end(m->ops.context, &to));
    check_taken(m, &t);
    free(send);
}

static void check_reduce_scatter(member *m, size_t numel, fc_dtype dtype, int salt)
{
    const size_t n = (size_t)m->world->n_ranks, item = fc_dtype_bytes(dtype);
    char *send = malloc(n * numel * item + 1), *recv = malloc(numel * item + 1);

    fill(send, n * numel, dtype, m->rank, salt);
    CHECK_OK(m->ops.reduce_scatter(m->ops.context, recv, send, numel, dtype));
    CHECK_EQ(n_different(m->world, recv, dtype, (size_t)m->rank * numel, numel, salt), 0);
    free(recv);
    free(send);
}

static void check_all_reduce(member *m, size_t numel, fc_dtype dtype, int salt)
{
    char *data = malloc(numel * fc_dtype_bytes(dtype) + 1);

    fill(data, numel, dtype, m->rank, salt);
    CHECK_OK(m->ops.all_reduce(m->ops.context, data, numel, dtype));
    CHECK_EQ(n_different(m->world, data, dtype, 0, numel, salt), 0);
    free(data);
}

static void check_broadcast(member *m, size_t bytes, int root)
{
    char *data = malloc(bytes + 1);
    size_t n_wrong = 0;

    for (size_t i = 0; i < bytes; i++) {
        data[i] = m->rank == root ? (char)(i * 3 + (size_t)root) : (char)-1;
    }
    CHECK_OK(m->ops.broadcast(m->ops.context, data, bytes, root));
    for (size_t i = 0; i < bytes; i++) {
        n_wrong += data[i] != (char)(i * 3 + (size_t)root);
    }
    CHECK_EQ(n_wrong, 0);
    free(data);
}

static char *begin_sum(member *m, size_t numel, fc_dtype dtype, int salt)
{
    const size_t n = (size_t)m->world->n_ranks;
    char *send = malloc(n * numel * fc_dtype_bytes(dtype) + 1);
    bool is_lent = false;

    fill(send, n * numel, dtype, m->rank, salt);
    CHECK_OK(m->ops.sum_begin(m->ops.context, send, numel, dtype, &is_lent));
    CHECK_EQ(is_lent, m->local == NULL);
    if (!is_lent) {
        memset(send, 0x11, n * numel * fc_dtype_bytes(dtype));
    }
    return send;
}

static void end_sum(member *m, char *send, size_t numel, fc_dtype dtype, int salt)
{
    char *recv = malloc(numel * fc_dtype_bytes(dtype) + 1);

    CHECK_OK(m->ops.sum_end(m->ops.context, recv));
    CHECK_EQ(n_different(m->world, recv, dtype, (size_t)m->rank * numel, numel, salt), 0);
    free(recv);
    free(send);
}

static const size_t sizes[] = {0, 1, 3, 1000, 200 * KIB + 7};

#define N_SIZES (sizeof(sizes) / sizeof(sizes[0]))

static void body_collectives(int rank, int n_ranks, void *arg)
{
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    for (size_t i = 0; i < N_SIZES; i++) {
        check_all_gather(&m, sizes[i], (int)i, i % 2 != 0);
        check_gather(&m, sizes[i], (int)i);
        check_reduce_scatter(&m, sizes[i], FC_F32, (int)i);
        check_reduce_scatter(&m, sizes[i], FC_BF16, (int)i);
        check_all_reduce(&m, sizes[i], FC_F32, (int)i);
        check_broadcast(&m, sizes[i], (int)i % n_ranks);
        CHECK_OK(m.ops.barrier(m.ops.context));
    }
    check_all_gather(&m, 1300 * KIB, 5, false); /* three pieces */
    check_gather(&m, 1300 * KIB, 5);
    check_reduce_scatter(&m, 400 * KIB, FC_F32, 6);
    CHECK_EQ(m.ops.all_to_all(m.ops.context, NULL, NULL, NULL, NULL), FC_ERR_GROUP);
    destroy(&m);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_collectives(void)
{
    for (size_t i = 0; i < N_WORLDS; i++) {
        world w = worlds[i];

        make_lines(w.n_ranks);
        ranks_check(w.n_ranks, body_collectives, &w);
        close_lines(w.n_ranks, -1);
    }
}

/* What was begun ends among others: in the order in which it was begun, and in another one. */
static void check_begun(member *m, size_t numel, int salt)
{
    const size_t bytes = 4 * numel;
    char *gather = begin_gather(m, bytes, salt), *sum = begin_sum(m, numel, FC_F32, salt + 1);

    end_gather(m, gather, bytes, salt);
    gather = begin_gather(m, bytes + 5, salt + 2);
    check_all_gather(m, bytes, salt + 3, false);
    end_sum(m, sum, numel, FC_F32, salt + 1);
    sum = begin_sum(m, numel, FC_BF16, salt + 4);
    check_all_reduce(m, numel, FC_F32, salt + 5);
    end_sum(m, sum, numel, FC_BF16, salt + 4);
    sum = begin_sum(m, numel, FC_F32, salt + 6);
    check_reduce_scatter(m, numel, FC_F32, salt + 7);
    check_broadcast(m, bytes, 0);
    end_gather(m, gather, bytes + 5, salt + 2);
    gather = begin_gather(m, bytes, salt + 8);
    check_gather(m, bytes, salt + 9);
    end_gather(m, gather, bytes, salt + 8);
    end_sum(m, sum, numel, FC_F32, salt + 6);
    sum = begin_sum(m, numel, FC_F32, salt + 10);
    gather = begin_gather(m, bytes, salt + 11);
    end_gather(m, gather, bytes, salt + 11); /* the younger one first */
    end_sum(m, sum, numel, FC_F32, salt + 10);
}

/* Ends without a use, and nothing of it is left for the next one. */
static void check_dropped(member *m, char *send)
{
    char *sum = begin_sum(m, 20 * KIB, FC_F32, 1);
    bool is_lent;

    CHECK_EQ(m->ops.sum_begin(m->ops.context, sum, 1, FC_F32, &is_lent), FC_AGAIN);
    m->ops.gather_drop(m->ops.context);
    m->ops.gather_drop(m->ops.context); /* nothing any more */
    m->ops.sum_drop(m->ops.context);
    free(sum);
    free(send);
    check_begun(m, 1000, 20);
}

static void body_begun(int rank, int n_ranks, void *arg)
{
    static const size_t numels[] = {0, 1, 100, 50 * KIB + 3, 300 * KIB};
    taken t = {.bytes = 100, .refuses = 0};
    const fc_gathered to = {&t, look, take};
    member m;
    char *send;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    for (size_t i = 0; i < sizeof(numels) / sizeof(numels[0]); i++) {
        check_begun(&m, numels[i], (int)i);
    }
    send = begin_gather(&m, 100, 0); /* who does not want it gets its own error, and goes on */
    CHECK_EQ(m.ops.gather_end(m.ops.context, &to), FC_ERR_STATE);
    memset(t.at, 0, sizeof(t.at));
    CHECK_EQ(m.ops.gather(m.ops.context, send, 100, &to), FC_ERR_STATE);
    free(send);
    check_all_gather(&m, 100, 1, false);
    send = begin_gather(&m, 100 * KIB, 1);
    CHECK_EQ(m.ops.gather_begin(m.ops.context, send, 1), FC_AGAIN);
    check_dropped(&m, send);
    send = begin_gather(&m, 100 * KIB, 1);
    CHECK_EQ(m.wires->n_dropped, 0);
    check_broadcast(&m, 8, 0); /* nobody ends while a peer waits */
    destroy_begun(&m, send);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_begun(void)
{
    for (size_t i = 0; i < N_WORLDS; i++) {
        world w = worlds[i];

        make_lines(w.n_ranks);
        ranks_check(w.n_ranks, body_begun, &w);
        close_lines(w.n_ranks, -1);
    }
}

/* Each rank sends its share to one rank of each other host, whatever their number of ranks. */
static void body_bytes(int rank, int n_ranks, void *arg)
{
    const world *w = arg;
    const size_t bytes = 100 * KIB;
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, bytes, 1, false);
    CHECK_EQ(fc_rails_n_hosts(&m.ops), n_hosts_of(w));
    for (int h = 0; h < n_hosts_of(w); h++) {
        CHECK_EQ(fc_rails_count(&m.ops, h).bytes, h == w->hosts[rank] ? 0 : bytes);
    }
    check_reduce_scatter(&m, bytes / 4, FC_F32, 1);
    for (int h = 0; h < n_hosts_of(w); h++) {
        uint64_t n_served = 0;

        for (int q = 0; h != w->hosts[rank] && q < n_ranks; q++) {
            n_served += w->hosts[q] == h &&
                        place_on_host(w, q) % n_on(w, w->hosts[rank]) == place_on_host(w, rank);
        }
        CHECK_EQ(fc_rails_count(&m.ops, h).bytes, h == w->hosts[rank] ? 0 : (1 + n_served) * bytes);
    }
    destroy(&m);
}

static void test_bytes(void)
{
    for (size_t i = 0; i < N_WORLDS; i++) {
        world w = worlds[i];

        make_lines(w.n_ranks);
        ranks_check(w.n_ranks, body_bytes, &w);
        close_lines(w.n_ranks, -1);
    }
}

/* Rank 3 of two hosts ends: its rail and its host's other rank notice, and what they tell reaches
 * those that wait for them. */
static void body_killed(int rank, int n_ranks, void *arg)
{
    member m;
    char data[4 * 100];
    fc_status st = FC_OK;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, 100, 1, false);
    if (rank == 3) {
        for (int r = 0; r < rank; r++) { /* the test's own process holds these, too */
            CHECK_EQ(shutdown(pairs[rank][r], SHUT_RDWR), 0);
        }
        (void)kill(getpid(), SIGKILL);
    }
    for (int i = 0; i < 3 && st == FC_OK; i++) {
        st = m.ops.all_gather(m.ops.context, data, "x", 1);
    }
    CHECK(st != FC_OK);
    if (rank == 1) {
        CHECK_EQ(st, FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "waited in vain for rank 13 (host bee): the line is dead");
    }
    CHECK_EQ(m.wires->n_dropped, 1);
    CHECK_EQ(m.ops.all_gather(m.ops.context, data, "x", 1), FC_ERR_BROKEN);
    destroy(&m);
}

static void test_killed(void)
{
    world w = worlds[1];
    int statuses[RANKS_MAX];

    make_lines(w.n_ranks);
    ranks_run(w.n_ranks, body_killed, &w, statuses);
    for (int r = 0; r < 3; r++) {
        CHECK_EQ(statuses[r], 0);
    }
    close_lines(w.n_ranks, -1);
}

/* Ends the first wait for another host that lasts. */
static void *interrupt(void *arg)
{
    const member *m = arg;
    fc_rails_wait wait = {0};

    while (!fc_rails_waits(&m->ops, &wait) || fc_now_ns() - wait.since_ns < FC_NS_PER_S / 5) {
        (void)usleep(1000);
    }
    CHECK_EQ(wait.rank, m->rank + 2);
    fc_rails_interrupt(&m->ops, "nothing is heard of host bee");
    fc_rails_interrupt(&m->ops, "the first one counts");
    return NULL;
}

/* A host that is silent, whose lines do not end. */
static void body_silent(int rank, int n_ranks, void *arg)
{
    member m;
    pthread_t thread;
    char data[4 * 100];
    fc_rails_wait wait;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, 100, 1, false);
    CHECK(!fc_rails_waits(&m.ops, &wait));
    if (rank < 2) {
        CHECK_OR_EXIT(pthread_create(&thread, NULL, interrupt, &m) == 0);
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, "x", 1), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "waited in vain for rank 1");
        CHECK_HAS(fc_last_message(), "(host bee): nothing is heard of host bee");
        CHECK_EQ(m.ops.all_gather(m.ops.context, data, "x", 1), FC_ERR_BROKEN);
        CHECK_EQ(pthread_join(thread, NULL), 0);
        CHECK(!fc_rails_waits(&m.ops, &wait));
    } else { /* rank 3 would wait for rank 1, which has nothing more to say than what failed */
        (void)usleep(600 * 1000);
    }
    destroy(&m);
}

static void test_silent(void)
{
    world w = worlds[1];

    make_lines(w.n_ranks);
    ranks_check(w.n_ranks, body_silent, &w);
    close_lines(w.n_ranks, -1);
}

/* Also where nobody waits at that moment, and of operations that are no rails. */
static void body_interrupted_early(int rank, int n_ranks, void *arg)
{
    member m;
    char data[2];
    fc_rails_wait wait;
    const fc_message_ops none = {.kind = "other"};

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    fc_rails_interrupt(&none, "?");
    CHECK(!fc_rails_waits(&none, &wait));
    CHECK(!fc_rails_waits(NULL, &wait));
    fc_rails_interrupt(&m.ops, "enough");
    CHECK_EQ(m.ops.all_gather(m.ops.context, data, "x", 1), FC_ERR_PEER);
    CHECK_HAS(fc_last_message(), "enough");
    destroy(&m);
}

static void test_interrupted_early(void)
{
    world w = worlds[0];

    make_lines(w.n_ranks);
    ranks_check(w.n_ranks, body_interrupted_early, &w);
    close_lines(w.n_ranks, -1);
}

static int differ_case;

/* Ranks of two hosts that call different collectives, or of different sizes. */
static void body_differ(int rank, int n_ranks, void *arg)
{
    static const size_t sizes_of_case[][2] = {{100, 200}, {4000, 3000}, {4000, 4000}};
    const bool is_other = rank == n_ranks - 1;
    const size_t bytes = sizes_of_case[differ_case][is_other];
    char data[4 * 4000] = {0}, part[4000] = {0};
    member m;
    fc_status st;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    if (differ_case == 2 && is_other) {
        st = m.ops.reduce_scatter(m.ops.context, part, data, bytes / 4, FC_F32);
    } else {
        st = m.ops.all_gather(m.ops.context, data, part, bytes);
    }
    CHECK(st == FC_ERR_MISMATCH || st == FC_ERR_PEER); /* or who has heard of it */
    CHECK_HAS(fc_last_message(), "call different collectives: rank 1");
    destroy(&m);
}

static void test_ranks_that_differ(void)
{
    for (size_t i = 0; i < 2; i++) {
        for (differ_case = 0; differ_case < 3; differ_case++) {
            world w = worlds[i];

            make_lines(w.n_ranks);
            ranks_check(w.n_ranks, body_differ, &w);
            close_lines(w.n_ranks, -1);
        }
    }
}

static void test_arguments(void)
{
    static const int hosts[] = {0, 2}, ranks[] = {0, 1};
    static const char *const names[] = {"ape", "bee"};
    wires w = {0};
    fc_message_ops out;
    const fc_rails_config config = {.n_ranks = 2,
                                    .global_ranks = ranks,
                                    .hosts = hosts,
                                    .names = names,
                                    .rails = {.context = &w, .release = wires_release},
                                    .group = {.context = &w, .release = wires_release}};

    CHECK_EQ(fc_rails_create(&config, &out), FC_ERR_INVALID);
    CHECK_EQ(w.n_released, 2);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_arguments();
    test_collectives();
    test_begun();
    test_bytes();
    test_ranks_that_differ();
    test_killed();
    test_silent();
    test_interrupted_early();
    return check_result();
}
