/* Collectives against sums and copies made in plain loops, on 1 to 4 ranks, over both kinds of
 * transport. */
#define _GNU_SOURCE

#include "ranks.h"

#include "base/alloc.h"
#include "comm/comm.h"
#include "kernels/kernels.h"

#define TIMEOUT_NS (30 * FC_NS_PER_S)
#define GUARD_BYTES 64
#define MIB ((size_t)1 << 20)

static size_t n_cells; /* of a row of a table of all_to_all */
static const size_t sizes[] = {0, 1, 7, 1000, MIB / 4 + 3};

#define N_SIZES (sizeof(sizes) / sizeof(sizes[0]))

/* ---- a message transport whose collectives are those of a mapped one ---- */

static fc_status forward_all_gather(void *context, void *recv, const void *send, size_t send_bytes)
{
    return fc_comm_all_gather(context, recv, send, send_bytes);
}

static fc_status forward_reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                                        fc_dtype dtype)
{
    fc_status st = fc_comm_reduce_scatter(context, recv, send, recv_numel, dtype, 1.0);

    /* It may overwrite what it was given. */
    memset(send, 0x55, recv_numel * fc_dtype_bytes(dtype));
    return st;
}

static fc_status forward_all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    return fc_comm_all_reduce(context, data, numel, dtype, 1.0);
}

static fc_status forward_broadcast(void *context, void *data, size_t bytes, int root)
{
    return fc_comm_broadcast(context, data, bytes, root);
}

typedef struct blocks_of {
    fc_comm_block blocks[RANKS_MAX];
    fc_comm_piece pieces[RANKS_MAX][3];
} blocks_of;

/* Blocks in rank order, one after another, as long as a row or column of the table says. */
static void lay_out(blocks_of *out, const void *data, const size_t *bytes, size_t n, size_t step)
{
    char *at = (char *)(uintptr_t)data;

    for (size_t r = 0; r < n; r++) {
        out->pieces[r][0] = (fc_comm_piece){.data = at, .row_bytes = bytes[r * step], .n_rows = 1};
        out->blocks[r] = (fc_comm_block){.pieces = out->pieces[r], .n_pieces = 1};
        at += bytes[r * step];
    }
}

static fc_status all_to_all(fc_comm *comm, int rank, int n, void *recv, const void *send,
                            const size_t *table)
{
    blocks_of in, out;

    lay_out(&in, recv, table + rank, (size_t)n, (size_t)n);
    lay_out(&out, send, table + rank * n, (size_t)n, 1);
    return fc_comm_all_to_all(comm, in.blocks, out.blocks, table);
}

#define ROW_BYTES 7
#define PITCH 11

/* The same in rows with gaps, nothing, and what is left; `data` has room for SPREAD(bytes). */
#define SPREAD(bytes) ((bytes) * 2 + RANKS_MAX * PITCH)

static void spread_out(blocks_of *out, char *data, const size_t *bytes, size_t n, size_t step)
{
    for (size_t r = 0; r < n; r++) {
        const size_t n_rows = bytes[r * step] / ROW_BYTES;
        fc_comm_piece *p = out->pieces[r];

        p[0] = (fc_comm_piece){data, ROW_BYTES, n_rows, PITCH};
        p[1] = (fc_comm_piece){NULL, 0, 3, 0};
        data += n_rows * PITCH;
        p[2] = (fc_comm_piece){data, bytes[r * step] % ROW_BYTES, 1, 0};
        data += ROW_BYTES;
        out->blocks[r] = (fc_comm_block){.pieces = p, .n_pieces = 3};
    }
}

/* Flat bytes into the blocks, one by one. */
static void fill_spread(const blocks_of *spread, size_t n, const char *flat)
{
    for (size_t r = 0; r < n; r++) {
        for (size_t k = 0; k < spread->blocks[r].n_pieces; k++) {
            const fc_comm_piece *p = &spread->pieces[r][k];

            for (size_t i = 0; i < p->n_rows * p->row_bytes; i++, flat++) {
                char *byte = p->data + i / p->row_bytes * p->pitch + i % p->row_bytes;

                *byte = *flat;
            }
        }
    }
}

/* The table is the same on all ranks only if it is made of all rows: gathered first. */
static fc_status forward_all_to_all(void *context, void *recv, const size_t *recv_bytes,
                                    const void *send, const size_t *send_bytes)
{
    size_t table[RANKS_MAX * RANKS_MAX];
    blocks_of in, out;

    FC_TRY(fc_comm_all_gather(context, table, send_bytes, n_cells * sizeof(size_t)));
    lay_out(&in, recv, recv_bytes, n_cells, 1);
    lay_out(&out, send, send_bytes, n_cells, 1);
    return fc_comm_all_to_all(context, in.blocks, out.blocks, table);
}

static fc_status forward_barrier(void *context)
{
    return fc_comm_barrier(context);
}

static void forward_release(void *context)
{
    fc_comm_destroy(context);
}

typedef struct fixture {
    ranks_host host;
    fc_transport *mapped;
    fc_transport *message; /* over a communicator of `mapped`; NULL if not asked for */
    fc_comm *comm;
} fixture;

static void open_fixture(fixture *f, int board, int rank, int n_ranks, bool is_message)
{
    fc_transport_config config = ranks_config(&f->host, board, rank, n_ranks, TIMEOUT_NS);
    fc_message_ops ops = {.all_gather = forward_all_gather,
                          .reduce_scatter = forward_reduce_scatter,
                          .all_reduce = forward_all_reduce,
                          .broadcast = forward_broadcast,
                          .all_to_all = forward_all_to_all,
                          .barrier = forward_barrier,
                          .release = forward_release};

    f->message = NULL;
    CHECK_OR_EXIT(fc_shm_create(&config, &f->mapped) == FC_OK);
    CHECK_OR_EXIT(fc_comm_create(f->mapped, &f->comm) == FC_OK);
    if (is_message) {
        ops.context = f->comm;
        CHECK_OR_EXIT(fc_callback_create(&config, &ops, &f->message) == FC_OK);
        CHECK(!fc_transport_is_mapped(f->message));
        CHECK(fc_transport_messages(f->message) != NULL);
        CHECK_OR_EXIT(fc_comm_create(f->message, &f->comm) == FC_OK);
    }
}

static void close_fixture(fixture *f)
{
    fc_comm_destroy(f->comm);
    fc_transport_destroy(f->message);
    fc_transport_destroy(f->mapped);
    CHECK_EQ(fc_alloc_live(), 0);
    CHECK_EQ(count_segments(), 0);
}

/* ---- values: small integers, so that sums and halves are exact in every type ---- */

#define PERIOD 13 /* of values by index */

static double value_of(int rank, size_t i)
{
    return (double)((i * 7 + (size_t)rank * 5) % PERIOD) * 2.0;
}

static void store(char *to, fc_dtype dtype, size_t i, double value)
{
    char *at = to + i * fc_dtype_bytes(dtype);
    int64_t integer = (int64_t)value;

    if (fc_dtype_is_float(dtype)) {
        fc_kern_cast(FC_F64, dtype)(at, &value, 1);
    } else {
        memcpy(at, &integer, fc_dtype_bytes(dtype)); /* little-endian */
    }
}

/* What `n` ranks from `first` on have at the indices from `from` on, added up. The first ones are
 * cast and the others copied from those, which is most of this program's work. */
static void store_sums(char *to, fc_dtype dtype, size_t numel, int first, int n, size_t from,
                       double divisor)
{
    const size_t bytes = numel * fc_dtype_bytes(dtype);

    for (size_t i = 0; i < numel && i < PERIOD; i++) {
        double sum = 0;

        for (int r = first; r < first + n; r++) {
            sum += value_of(r, from + i);
        }
        store(to, dtype, i, sum / divisor);
    }
    for (size_t done = PERIOD * fc_dtype_bytes(dtype); done < bytes; done *= 2) {
        memcpy(to + done, to, done < bytes - done ? done : bytes - done);
    }
}

/* A buffer with guards on both sides, `offset` bytes away from alignment. */
typedef struct buffer {
    char *memory;
    char *data;
    size_t bytes;
} buffer;

static buffer make_buffer(size_t bytes, size_t offset)
{
    buffer b = {.memory = fc_alloc(1, bytes + 2 * GUARD_BYTES + offset), .bytes = bytes};

    CHECK_OR_EXIT(b.memory != NULL);
    memset(b.memory, 0xab, bytes + 2 * GUARD_BYTES + offset);
    b.data = b.memory + GUARD_BYTES + offset;
    return b;
}

static bool is_filled(const char *data, size_t bytes, char value)
{
    for (size_t i = 0; i < bytes; i++) {
        if (data[i] != value) {
            return false;
        }
    }
    return true;
}

static void drop_buffer(buffer *b)
{
    CHECK(is_filled(b->data - GUARD_BYTES, GUARD_BYTES, (char)0xab));
    CHECK(is_filled(b->data + b->bytes, GUARD_BYTES, (char)0xab));
    fc_free(b->memory);
}

static void check_same(const char *what, const char *got, const char *expected, size_t bytes,
                       size_t numel, fc_dtype dtype)
{
    CHECK_MSG(bytes == 0 || memcmp(got, expected, bytes) == 0, "%s of %zu %s", what, numel,
              fc_dtype_name(dtype));
}

/* Without a period: a piece in the place of another one is seen. */
static char byte_of(size_t i, int key)
{
    return (char)((i + (size_t)key) * UINT64_C(0x9e3779b97f4a7c15) >> 56);
}

static void check_all_gather(fc_comm *comm, int rank, int n, size_t bytes, bool in_place)
{
    buffer recv = make_buffer(bytes * (size_t)n, 3);
    buffer send = make_buffer(bytes, 1);
    buffer expected = make_buffer(bytes * (size_t)n, 0);
    char *from = in_place ? recv.data + (size_t)rank * bytes : send.data;

    for (int r = 0; r < n; r++) {
        for (size_t i = 0; i < bytes; i++) {
            expected.data[(size_t)r * bytes + i] = byte_of(i, r * 101);
        }
    }
    if (bytes > 0) {
        memcpy(from, expected.data + (size_t)rank * bytes, bytes);
    }
    CHECK_EQ(fc_comm_all_gather(comm, recv.data, from, bytes), FC_OK);
    check_same("all_gather", recv.data, expected.data, recv.bytes, bytes, FC_U8);
    drop_buffer(&recv);
    drop_buffer(&send);
    drop_buffer(&expected);
}

static void check_reduce_scatter(fc_comm *comm, int rank, int n, size_t numel, fc_dtype dtype,
                                 double divisor, bool in_place)
{
    size_t bytes = numel * fc_dtype_bytes(dtype);
    buffer send = make_buffer(bytes * (size_t)n, 2);
    buffer recv = make_buffer(bytes, 0);
    buffer expected = make_buffer(bytes, 0);
    char *to = in_place ? send.data + (size_t)rank * bytes : recv.data;

    store_sums(send.data, dtype, numel * (size_t)n, rank, 1, 0, 1.0);
    store_sums(expected.data, dtype, numel, 0, n, (size_t)rank * numel, divisor);
    CHECK_EQ(fc_comm_reduce_scatter(comm, to, send.data, numel, dtype, divisor), FC_OK);
    check_same("reduce_scatter", to, expected.data, bytes, numel, dtype);
    drop_buffer(&recv);
    drop_buffer(&send);
    drop_buffer(&expected);
}

static void check_all_reduce(fc_comm *comm, int rank, int n, size_t numel, fc_dtype dtype,
                             double divisor)
{
    size_t bytes = numel * fc_dtype_bytes(dtype);
    buffer data = make_buffer(bytes, 4);
    buffer expected = make_buffer(bytes, 0);

    store_sums(data.data, dtype, numel, rank, 1, 0, 1.0);
    store_sums(expected.data, dtype, numel, 0, n, 0, divisor);
    CHECK_EQ(fc_comm_all_reduce(comm, data.data, numel, dtype, divisor), FC_OK);
    check_same("all_reduce", data.data, expected.data, bytes, numel, dtype);
    drop_buffer(&data);
    drop_buffer(&expected);
}

static void check_broadcast(fc_comm *comm, int rank, size_t bytes, int root)
{
    buffer data = make_buffer(bytes, 1);
    buffer expected = make_buffer(bytes, 1);

    for (size_t i = 0; i < bytes; i++) {
        expected.data[i] = byte_of(i, root);
        data.data[i] = rank == root ? expected.data[i] : 1;
    }
    CHECK_EQ(fc_comm_broadcast(comm, data.data, bytes, root), FC_OK);
    check_same("broadcast", data.data, expected.data, bytes, bytes, FC_U8);
    drop_buffer(&data);
    drop_buffer(&expected);
}

static size_t block_of(size_t bytes, int from, int to)
{
    return (from + to) % 3 == 2 ? 0 : bytes + (size_t)(from * 5 + to);
}

/* What is sent and received lies in rows; gaps stay as they were. */
static void check_spread(fc_comm *comm, int rank, int n, const size_t *table, const buffer *send,
                         const buffer *expected)
{
    buffer from = make_buffer(SPREAD(send->bytes), 1);
    buffer to = make_buffer(SPREAD(expected->bytes), 5);
    buffer wanted = make_buffer(SPREAD(expected->bytes), 0);
    blocks_of sent, received, copies;

    spread_out(&sent, from.data, table + rank * n, (size_t)n, 1);
    spread_out(&received, to.data, table + rank, (size_t)n, (size_t)n);
    spread_out(&copies, wanted.data, table + rank, (size_t)n, (size_t)n);
    fill_spread(&sent, (size_t)n, send->data);
    fill_spread(&copies, (size_t)n, expected->data);
    CHECK_EQ(fc_comm_all_to_all(comm, received.blocks, sent.blocks, table), FC_OK);
    check_same("all_to_all in rows", to.data, wanted.data, to.bytes, expected->bytes, FC_U8);
    drop_buffer(&from);
    drop_buffer(&to);
    drop_buffer(&wanted);
}

static void check_all_to_all(fc_comm *comm, int rank, int n, size_t bytes)
{
    size_t table[RANKS_MAX * RANKS_MAX];
    size_t sent = 0, received = 0, at = 0;
    buffer recv, send, expected;

    for (int s = 0; s < n; s++) {
        for (int r = 0; r < n; r++) {
            table[s * n + r] = block_of(bytes, s, r);
            sent += s == rank ? table[s * n + r] : 0;
            received += r == rank ? table[s * n + r] : 0;
        }
    }
    recv = make_buffer(received, 3);
    send = make_buffer(sent, 1);
    expected = make_buffer(received, 0);
    for (int r = 0; r < n; r++) {
        for (size_t i = 0; i < table[rank * n + r]; i++) {
            send.data[at++] = byte_of(i, rank * 16 + r);
        }
    }
    at = 0;
    for (int s = 0; s < n; s++) {
        for (size_t i = 0; i < table[s * n + rank]; i++) {
            expected.data[at++] = byte_of(i, s * 16 + rank);
        }
    }
    n_cells = (size_t)n;
    CHECK_EQ(all_to_all(comm, rank, n, recv.data, send.data, table), FC_OK);
    check_same("all_to_all", recv.data, expected.data, received, bytes, FC_U8);
    if (bytes < MIB) { /* it goes byte by byte */
        check_spread(comm, rank, n, table, &send, &expected);
    }
    drop_buffer(&recv);
    drop_buffer(&send);
    drop_buffer(&expected);
}

static void body_matrix(int rank, int n, void *arg)
{
    bool is_message = *(const bool *)arg;
    fixture f;

    open_fixture(&f, 0, rank, n, is_message);
    for (size_t s = 0; s < N_SIZES; s++) {
        check_all_gather(f.comm, rank, n, sizes[s], false);
        check_all_gather(f.comm, rank, n, sizes[s], true);
        for (int dtype = 0; dtype <= FC_I64; dtype++) {
            double divisor = fc_dtype_is_float((fc_dtype)dtype) ? 2.0 : 1.0;

            check_reduce_scatter(f.comm, rank, n, sizes[s], (fc_dtype)dtype, 1.0, false);
            check_reduce_scatter(f.comm, rank, n, sizes[s], (fc_dtype)dtype, divisor, true);
            check_all_reduce(f.comm, rank, n, sizes[s], (fc_dtype)dtype, divisor);
        }
        for (int root = 0; root < n; root++) {
            check_broadcast(f.comm, rank, sizes[s], root);
        }
        check_all_to_all(f.comm, rank, n, sizes[s]);
        CHECK_EQ(fc_comm_barrier(f.comm), FC_OK);
    }
    close_fixture(&f);
}

/* Beyond one staging slot: several steps. */
static void body_large(int rank, int n, void *arg)
{
    fixture f;

    (void)arg;
    open_fixture(&f, 0, rank, n, false);
    check_all_gather(f.comm, rank, n, 33 * MIB + 5, true);
    check_all_gather(f.comm, rank, n, 33 * MIB + 5, false);
    check_all_gather(f.comm, rank, n, 5 * MIB, false);
    check_reduce_scatter(f.comm, rank, n, (17 * MIB + 12) / 4, FC_F32, 2.0, false);
    check_all_reduce(f.comm, rank, n, (33 * MIB + 8) / 4, FC_F32, 1.0);
    check_broadcast(f.comm, rank, 33 * MIB + 1, n - 1);
    check_all_to_all(f.comm, rank, n, 17 * MIB + 1);
    close_fixture(&f);
}

/* Sums that round: added in rank order, so every rank has the bits of the plain loop. */
static void body_order(int rank, int n, void *arg)
{
    static const size_t numels[] = {1001, 100003};
    fixture f;

    (void)arg;
    open_fixture(&f, 0, rank, n, false);
    for (int k = 0; k < 2; k++) {
        size_t numel = numels[k];
        float *data = fc_alloc(numel, sizeof(float));
        float *expected = fc_alloc(numel, sizeof(float));

        CHECK_OR_EXIT(data != NULL && expected != NULL);
        for (int r = 0; r < n; r++) {
            for (size_t i = 0; i < numel; i++) {
                float value = (float)((i * 2654435761U + (size_t)r * 40503U) % 100003U) / 977.0F;

                expected[i] = r == 0 ? value : expected[i] + value;
                if (r == rank) {
                    data[i] = value;
                }
            }
        }
        for (size_t i = 0; i < numel; i++) {
            expected[i] = expected[i] / 3.0F;
        }
        CHECK_EQ(fc_comm_all_reduce(f.comm, data, numel, FC_F32, 3.0), FC_OK);
        CHECK(memcmp(data, expected, numel * sizeof(float)) == 0);
        fc_free(data);
        fc_free(expected);
    }
    close_fixture(&f);
}

/* A grid of 2 x 2: each rank is in a row, a column and the whole, and uses them in turn. */
static void body_grid(int rank, int n, void *arg)
{
    fixture whole;
    fixture row;
    fixture column;

    (void)arg;
    open_fixture(&whole, 0, rank, n, false);
    open_fixture(&row, 1 + rank / 2, rank % 2, 2, false);
    for (int i = 0; i < 100; i++) {
        check_all_reduce(row.comm, rank % 2, 2, 10, FC_F32, 1.0);
        check_all_gather(whole.comm, rank, n, 100, false);
        check_reduce_scatter(row.comm, rank % 2, 2, 50, FC_BF16, 2.0, false);
    }
    /* The columns meet on one board after the other: a board holds one group at a time. */
    for (int c = 0; c < 2; c++) {
        if (rank % 2 == c) {
            open_fixture(&column, 3, rank / 2, 2, false);
            check_all_reduce(column.comm, rank / 2, 2, 10, FC_F32, 1.0);
            fc_comm_destroy(column.comm);
            fc_transport_destroy(column.mapped);
        }
        CHECK_EQ(fc_comm_barrier(whole.comm), FC_OK);
    }
    fc_comm_destroy(row.comm);
    fc_transport_destroy(row.mapped);
    close_fixture(&whole);
}

/* The last rank calls something else: all learn of it, nobody's memory is written. */
enum {
    OTHER_SIZE,
    OTHER_GROWTH,
    OTHER_LARGE,
    OTHER_OP,
    OTHER_DTYPE,
    OTHER_DIVISOR,
    OTHER_ROOT,
    OTHER_TABLE,
    OTHER_COUNT
};

static fc_status call_differently(fc_comm *comm, int kind, int rank, int n, char *out, char *in)
{
    const bool is_other = rank == n - 1;
    size_t table[RANKS_MAX * RANKS_MAX] = {0};

    switch (kind) {
    case OTHER_SIZE:
        return fc_comm_all_gather(comm, out, in, is_other ? 16 : 8);
    case OTHER_GROWTH:
        return fc_comm_all_gather(comm, out, in, is_other ? MIB : 8);
    case OTHER_LARGE: /* the slots are large enough: nothing but the call itself can tell */
        return fc_comm_all_gather(comm, out, in, is_other ? MIB + 64 : MIB);
    case OTHER_OP:
        return is_other ? fc_comm_barrier(comm) : fc_comm_all_gather(comm, out, in, 8);
    case OTHER_DTYPE:
        return fc_comm_reduce_scatter(comm, out, in, 8, is_other ? FC_I32 : FC_F32, 1.0);
    case OTHER_DIVISOR:
        return fc_comm_all_reduce(comm, out, 8, FC_F32, is_other ? 2.0 : 1.0);
    case OTHER_TABLE: /* the same bytes in all, for another rank, of the last one */
        table[(n - 1) * n + is_other] = 8;
        return all_to_all(comm, rank, n, out, in, table);
    default:
        return fc_comm_broadcast(comm, out, 8, is_other ? 0 : 1);
    }
}

static void body_mismatch(int rank, int n, void *arg)
{
    int kind = *(const int *)arg;
    buffer out = make_buffer((size_t)n * 2 * MIB, 0);
    buffer in = make_buffer((size_t)n * 2 * MIB, 0);
    char text[FC_MESSAGE_BYTES];
    fixture f;

    open_fixture(&f, 0, rank, n, false);
    check_all_gather(f.comm, rank, n, kind == OTHER_LARGE ? 2 * MIB : 100, false);
    CHECK_EQ(call_differently(f.comm, kind, rank, n, out.data, in.data), FC_ERR_MISMATCH);
    (void)snprintf(text, sizeof(text), "%s", fc_last_message());
    CHECK_HAS(text, "rank 10");
    CHECK_HAS(text, n == 2 ? "rank 11" : n == 3 ? "rank 12" : "rank 13");
    CHECK_HAS(text, "call different collectives");
    CHECK(is_filled(out.data, out.bytes, (char)0xab));
    /* Broken for good, and it says why. */
    CHECK_EQ(fc_comm_barrier(f.comm), FC_ERR_BROKEN);
    CHECK_HAS(fc_last_message(), "call different collectives");
    drop_buffer(&out);
    drop_buffer(&in);
    close_fixture(&f);
}

/* A child made by fork may neither use nor disturb the communicator. */
static void body_fork(int rank, int n, void *arg)
{
    fixture f;
    int status;
    pid_t child;

    (void)arg;
    open_fixture(&f, 0, rank, n, false);
    check_all_gather(f.comm, rank, n, 100, false);
    child = fork();
    if (child == 0) {
        CHECK_EQ(fc_comm_barrier(f.comm), FC_ERR_STATE);
        CHECK_HAS(fc_last_message(), "forked child");
        CHECK_EQ(fc_transport_abort(f.mapped, FC_ERR_PEER, "not for the parent"), FC_ERR_PEER);
        close_fixture(&f);
        _exit(check_result());
    }
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    check_all_gather(f.comm, rank, n, 1000, false);
    CHECK_EQ(fc_comm_barrier(f.comm), FC_OK);
    close_fixture(&f);
}

/* Growth of the staging memory fails on one rank: all say so, and smaller calls go on. */
static void body_no_memory(int rank, int n, void *arg)
{
    char in[8] = {0};
    char *out;
    fixture f;

    (void)arg;
    open_fixture(&f, 0, rank, n, false);
    check_all_gather(f.comm, rank, n, 100, false);
    out = calloc((size_t)n, MIB);
    CHECK_OR_EXIT(out != NULL);
    fc_alloc_fail_after(rank == n - 1 ? 0 : -1);
    CHECK_EQ(fc_comm_all_gather(f.comm, out, out + (size_t)rank * MIB, MIB), FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    CHECK_EQ(fc_comm_all_gather(f.comm, out, in, sizeof(in)), FC_OK);
    check_all_gather(f.comm, rank, n, MIB, false);
    free(out);
    close_fixture(&f);
}

static void body_invalid(int rank, int n, void *arg)
{
    static const size_t too_much[RANKS_MAX * RANKS_MAX] = {SIZE_MAX};
    static const fc_comm_block nothing[RANKS_MAX];
    size_t more[RANKS_MAX * RANKS_MAX];
    float data[8] = {0};
    fixture f;

    (void)arg;
    open_fixture(&f, 0, rank, n, false);
    CHECK_EQ(fc_comm_all_reduce(f.comm, data, 8, FC_RAW4, 1.0), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_all_reduce(f.comm, data, 8, FC_I32, 2.0), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_all_reduce(f.comm, data, 8, FC_F32, 0.0), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_all_reduce(f.comm, data, SIZE_MAX / 2, FC_F32, 1.0), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_all_reduce(f.comm, data, 8, (fc_dtype)99, 1.0), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_broadcast(f.comm, data, 8, n), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_broadcast(f.comm, data, 8, -1), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_all_gather(f.comm, data, data, SIZE_MAX), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_all_to_all(f.comm, nothing, nothing, too_much), FC_ERR_INVALID);
    for (size_t i = 0; i < sizeof(more) / sizeof(more[0]); i++) {
        more[i] = 1;
    }
    CHECK_EQ(fc_comm_all_to_all(f.comm, nothing, nothing, more), FC_ERR_INVALID);
    CHECK_EQ(fc_comm_barrier(f.comm), FC_OK);
    close_fixture(&f);
}

int main(void)
{
    bool kinds[] = {false, true};

    for (int n = 1; n <= RANKS_MAX; n++) {
        ranks_check(n, body_matrix, &kinds[0]);
        ranks_check(n, body_matrix, &kinds[1]);
        ranks_check(n, body_order, NULL);
        ranks_check(n, body_fork, NULL);
        ranks_check(n, body_no_memory, NULL);
        ranks_check(n, body_invalid, NULL);
    }
    ranks_check(2, body_large, NULL);
    ranks_check(4, body_grid, NULL);
    for (int n = 2; n <= RANKS_MAX; n++) {
        for (int kind = 0; kind < OTHER_COUNT; kind++) {
            ranks_check(n, body_mismatch, &kind);
        }
    }
    return check_result();
}
