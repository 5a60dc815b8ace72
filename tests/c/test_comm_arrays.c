/* Arrays as people hand them in: what is refused, and where their bytes lie. */
#define _GNU_SOURCE

#include "ranks.h"

#include "base/alloc.h"
#include "comm/comm.h"

#define TIMEOUT_NS (30 * FC_NS_PER_S)

typedef struct fixture {
    ranks_host host;
    fc_transport *transport;
    fc_comm *comm;
} fixture;

static void open_fixture(fixture *f, int rank, int n)
{
    const fc_transport_config config = ranks_config(&f->host, 0, rank, n, TIMEOUT_NS);

    CHECK_OR_EXIT(fc_shm_create(&config, &f->transport) == FC_OK);
    CHECK_OR_EXIT(fc_comm_create(f->transport, &f->comm) == FC_OK);
}

static void close_fixture(fixture *f)
{
    fc_comm_destroy(f->comm);
    fc_transport_destroy(f->transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void body_agree(int rank, int n, void *arg)
{
    bool is_agreed = false;
    fixture f;

    (void)arg;
    open_fixture(&f, rank, n);
    CHECK_EQ(fc_comm_all_agree(f.comm, true, &is_agreed), FC_OK);
    CHECK(is_agreed);
    CHECK_EQ(fc_comm_all_agree(f.comm, rank != n - 1, &is_agreed), FC_OK);
    CHECK(!is_agreed);
    close_fixture(&f);
}

static void refuse(fc_status st, const char *text)
{
    CHECK_EQ(st, FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), text);
}

/* Local: the ranks check each for itself. */
static void body_arrays(int rank, int n, void *arg)
{
    static float whole_data[RANKS_MAX * 4], other_data[4];
    const size_t part_bytes = sizeof(other_data), shift = sizeof(float);
    fc_comm_array whole = {
        "output", "Float", (char *)whole_data, 4 * (size_t)n, part_bytes * (size_t)n, FC_F32};
    fc_comm_array part = {"input", "Float", (char *)other_data, 4, part_bytes, FC_F32};
    fc_comm_array own = part;
    fixture f;

    (void)arg;
    open_fixture(&f, rank, n);
    own.data = whole.data + (size_t)rank * part_bytes;
    CHECK_EQ(fc_comm_check_parts(f.comm, &whole, &part), FC_OK);
    CHECK_EQ(fc_comm_check_parts(f.comm, &whole, &own), FC_OK);
    own.data = rank == 0 ? own.data + shift : own.data - shift;
    refuse(fc_comm_check_parts(f.comm, &whole, &own),
           "input overlaps output, but is not this rank's part of it");
    part.type = "Int";
    refuse(fc_comm_check_parts(f.comm, &whole, &part), "of Float for 4 of Int");
    part.type = "Float";
    part.numel = 3;
    refuse(fc_comm_check_parts(f.comm, &whole, &part),
           "x the elements of input and the same dtype");
    close_fixture(&f);
}

/* Rank s sends s + 1 bytes to each rank. */
static void body_split(int rank, int n, void *arg)
{
    char sent[RANKS_MAX * RANKS_MAX], received[RANKS_MAX * RANKS_MAX];
    size_t table[RANKS_MAX * RANKS_MAX], n_sent = (size_t)(n * (rank + 1)), n_received = 0, at = 0;
    fc_comm_array send = {"input", "Byte", sent, n_sent, n_sent, FC_U8};
    fc_comm_array recv = {"output", "Byte", received, 0, 0, FC_U8};
    fc_comm_piece pieces[2 * RANKS_MAX];
    fc_comm_block blocks[2 * RANKS_MAX];
    fixture f;

    (void)arg;
    open_fixture(&f, rank, n);
    for (int i = 0; i < n * n; i++) {
        table[i] = (size_t)(i / n + 1);
        n_received += i % n == rank ? table[i] : 0;
    }
    recv.numel = recv.bytes = n_received;
    memset(sent, rank, sizeof(sent));
    CHECK_EQ(fc_comm_split(f.comm, &recv, &send, table, pieces, blocks), FC_OK);
    CHECK_EQ(fc_comm_all_to_all(f.comm, blocks, blocks + n, table), FC_OK);
    for (int s = 0; s < n; s++, at += (size_t)s) {
        for (int i = 0; i <= s; i++) {
            CHECK_EQ(received[at + (size_t)i], s);
        }
    }
    recv.data = sent + n_sent - 1;
    refuse(fc_comm_split(f.comm, &recv, &send, table, pieces, blocks), "output overlaps input");
    recv.bytes++;
    refuse(fc_comm_split(f.comm, &recv, &send, table, pieces, blocks),
           "this rank's column and row of counts");
    close_fixture(&f);
}

static void body_table(int rank, int n, void *arg)
{
    size_t table[RANKS_MAX * RANKS_MAX] = {0}, n_counts = (size_t)(n * n);
    fixture f;

    (void)arg;
    open_fixture(&f, rank, n);
    table[0] = 3;
    table[n_counts - 1] = (size_t)rank + 3;
    CHECK_EQ(fc_comm_table(f.comm, table, n_counts, 4), FC_OK);
    CHECK_EQ(table[n_counts - 1], 4 * ((size_t)rank + 3));
    refuse(fc_comm_table(f.comm, table, n_counts - 1, 4), "numbers");
    refuse(fc_comm_table(f.comm, table, n_counts, 0), "counts must be");
    table[0] = (size_t)PTRDIFF_MAX / 4 + 1;
    refuse(fc_comm_table(f.comm, table, n_counts, 4), "counts must be");
    close_fixture(&f);
}

/* In the order of the indices: as many rows as there have to be, and no more. */
static void check_rows(size_t n_dims, const int64_t *shape, const int64_t *strides, size_t n_pieces)
{
    static int16_t data[64];
    const fc_comm_strided array = {(char *)data, sizeof(data[0]), n_dims, shape, strides};
    fc_comm_piece pieces[16];
    size_t n = 99, i = 0, n_elements = 1;

    for (size_t d = 0; d < n_dims; d++) {
        n_elements *= (size_t)shape[d];
    }
    CHECK_EQ(fc_comm_rows_of(&array, NULL, &n), FC_OK);
    CHECK_EQ(n, n_pieces);
    CHECK_EQ(fc_comm_rows_of(&array, pieces, &n), FC_OK);
    for (size_t p = 0; p < n; p++) {
        for (size_t b = 0; b < pieces[p].n_rows * pieces[p].row_bytes; b += sizeof(data[0]), i++) {
            const char *got = pieces[p].data + b / pieces[p].row_bytes * pieces[p].pitch +
                              b % pieces[p].row_bytes;
            size_t rest = i;
            int64_t at = 0;

            for (size_t d = n_dims; d-- > 0; rest /= (size_t)shape[d]) {
                at += (int64_t)(rest % (size_t)shape[d]) * strides[d];
            }
            CHECK(got == (const char *)(data + at));
        }
    }
    CHECK_EQ(i, n_elements);
}

/* The four by their names. */
static void body_collect(int rank, int n, void *arg)
{
    float whole[RANKS_MAX] = {0}, ones[RANKS_MAX] = {1, 1, 1, 1}, own = (float)rank, part = 0;
    const size_t count = (size_t)n, bytes = count * sizeof(float);
    const fc_comm_array all = {"output", "Float", (char *)whole, count, bytes, FC_F32};
    const fc_comm_array summands = {"input", "Float", (char *)ones, count, bytes, FC_F32};
    const fc_comm_array mine = {"input", "Float", (char *)&own, 1, sizeof(own), FC_F32};
    const fc_comm_array to = {"output", "Float", (char *)&part, 1, sizeof(part), FC_F32};
    fc_comm_array odd = {"tensor", "ComplexFloat", (char *)whole, 1, 8, FC_RAW1};
    fixture f;

    (void)arg;
    open_fixture(&f, rank, n);
    CHECK_EQ(fc_comm_check_arrays(f.comm, "all_gather", &all, &mine), FC_OK);
    CHECK_EQ(fc_comm_collect(f.comm, "all_gather", &all, &mine, 1, 0), FC_OK);
    CHECK_EQ(fc_comm_check_arrays(f.comm, "reduce_scatter", &to, &summands), FC_OK);
    CHECK_EQ(fc_comm_collect(f.comm, "reduce_scatter", &to, &summands, 2, 0), FC_OK);
    for (int r = 0; r < n; r++) {
        CHECK(whole[r] == (float)r);
    }
    CHECK(part == (float)n / 2);
    CHECK_EQ(fc_comm_check_arrays(f.comm, "all_reduce", &mine, &mine), FC_OK);
    CHECK_EQ(fc_comm_collect(f.comm, "all_reduce", &mine, &mine, 1, 0), FC_OK);
    CHECK(own == (float)(n * (n - 1) / 2));
    own = (float)rank + 1;
    CHECK_EQ(fc_comm_check_arrays(f.comm, "broadcast", &mine, &mine), FC_OK);
    CHECK_EQ(fc_comm_collect(f.comm, "broadcast", &mine, &mine, 1, n - 1), FC_OK);
    CHECK(own == (float)n);
    CHECK_EQ(fc_comm_check_arrays(f.comm, "broadcast", &odd, &odd), FC_OK);
    refuse(fc_comm_check_arrays(f.comm, "all_reduce", &odd, &odd),
           "tensors of type ComplexFloat cannot be added");
    refuse(fc_comm_check_arrays(f.comm, "all_gather", &all, &odd), "the same dtype");
    refuse(fc_comm_check_arrays(f.comm, "reduce_scatter", &all, &odd), "the same dtype");
    refuse(fc_comm_check_arrays(f.comm, "gather", &all, &mine), "no collective is called gather");
    close_fixture(&f);
}

#define ROWS(n_pieces, sizes, ...)                                                                 \
    check_rows(sizeof((int64_t[])sizes) / sizeof(int64_t), (int64_t[])sizes,                       \
               (int64_t[])__VA_ARGS__, n_pieces)
#define DIMS(...) {__VA_ARGS__}

static void test_rows(void)
{
    static const int64_t many[65] = {0};
    const fc_comm_strided too_many = {NULL, 2, 65, many, many};
    size_t n;

    check_rows(0, NULL, NULL, 1);       /* a number */
    ROWS(1, DIMS(3, 4), {4, 1});        /* all of it */
    ROWS(1, DIMS(3, 4), {8, 1});        /* the left half of a matrix */
    ROWS(4, DIMS(4, 3), {1, 4});        /* transposed: an element at a time */
    ROWS(2, DIMS(2, 3, 4), {16, 5, 1}); /* planes */
    ROWS(1, DIMS(2, 3, 4), {12, 4, 1}); /* all of it again */
    ROWS(1, DIMS(2, 1, 4), {8, 77, 1}); /* a dimension of one */
    ROWS(6, DIMS(2, 3, 2, 2), {24, 7, 3, 1});
    ROWS(1, DIMS(0, 4), {4, 1}); /* nothing */
    CHECK_EQ(fc_comm_rows_of(&too_many, NULL, &n), FC_ERR_INVALID);
}

int main(void)
{
    test_rows();
    for (int n = 1; n <= RANKS_MAX; n++) {
        ranks_check(n, body_agree, NULL);
        ranks_check(n, body_collect, NULL);
        ranks_check(n, body_split, NULL);
        ranks_check(n, body_table, NULL);
    }
    ranks_check(2, body_arrays, NULL);
    return check_result();
}
