/* Gathers that are taken piece by piece; gathers and sums that are begun, and ended among others.
 */
#define _GNU_SOURCE
#include "rails_world.h"

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
        t->n_wrong += data[i] != byte_of(at + i, rank, t->salt);
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
    t->n_seen += 1 + (data[0] != byte_of(0, rank, t->salt));
    return FC_OK;
}

static char *chunk_of(const member *m, size_t bytes, int salt)
{
    char *send = malloc(bytes + 1);

    for (size_t i = 0; i < bytes; i++) {
        send[i] = byte_of(i, m->rank, salt);
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

/* What is under way when a phase is left may never come; what has arrived does not count as such.
 */
static void check_left(member *m)
{
    char *gather = begin_gather(m, KIB, 1), *sum;
    const uint64_t before = fc_rails_failed(&m->ops).after;

    m->ops.fail_phase(m->ops.context);
    CHECK_EQ(fc_rails_failed(&m->ops).after, before + 1); /* another one began in between */
    check_all_gather(m, KIB, 2, false);                   /* for which it had to arrive */
    m->ops.fail_phase(m->ops.context);
    CHECK_EQ(fc_rails_failed(&m->ops).after, before + 3);
    sum = begin_sum(m, KIB, FC_F32, 3);
    end_gather(m, gather, KIB, 1);
    gather = begin_gather(m, KIB, 4);
    m->ops.fail_phase(m->ops.context);
    CHECK_EQ(fc_rails_failed(&m->ops).after, before + 3);
    end_gather(m, gather, KIB, 4);
    end_sum(m, sum, KIB, FC_F32, 3);
    m->ops.fail_phase(m->ops.context);
    CHECK_EQ(fc_rails_failed(&m->ops).after, before + 5);
}

static void body_left(int rank, int n_ranks, void *arg)
{
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, 100, 1, false);
    m.ops.open_phase(m.ops.context);
    m.ops.fail_phase(m.ops.context);
    check_all_gather(&m, 100, 1, false);
    check_left(&m);
    destroy(&m);
}

static void body_begun(int rank, int n_ranks, void *arg)
{
    static const size_t numels[] = {0, 1, 100, 50 * KIB + 3, 257 * KIB}; /* up to 3 pieces */
    taken t = {.bytes = 100, .refuses = 0};
    const fc_gathered to = {&t, look, take};
    member m;
    char *send;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    for (size_t i = 0; i < sizeof(numels) / sizeof(numels[0]); i++) {
        check_gather(&m, 4 * numels[i] + 3, (int)i);
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
    check_worlds(body_begun);
    check_world(&worlds[0], body_left);
    check_world(&worlds[1], body_left);
}

int main(void)
{
    test_begun();
    return check_result();
}
