/* Gathers of several units whose bytes come in pieces: where they go, what is read of each unit's
 * note, and of parts without notes.
 */
#include "check.h"
#include "guarded.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "engine/batch.h"
#include "engine/order.h"
#include "engine/unit.h"
#include "kernels/kernels.h"

#define N_UNITS 3
#define N_PARAMS 2
#define N_RANKS 2
#include "alike_ranks.h"
#define ROWS 5
#define COLUMNS 7
#define LIMIT ((size_t)1 << 20)
#define NOTE_BYTES FC_ALIGN
#define BYTES_MAX 8192

/* Words of a note. */
enum {
    PRINT,
    BATCH_LIMIT,
    IS_OBSERVED,
    ORDER,
    BACKWARD,
    NOTE_WORDS
};

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        const fc_status check_status_ = (call);                                                    \
        CHECK_MSG(check_status_ == FC_OK, "%s: %s", #call, fc_last_message());                     \
    } while (0)

/* ---- two ranks in one process: what the second sends is recorded before the first gathers ---- */

static char sent[N_RANKS][BYTES_MAX];
static size_t sent_bytes;
static size_t piece_bytes;
static bool is_own_last;       /* of the ranks whose bytes come */
static const void *begun_send; /* NULL: none is */

static fc_status gather(void *context, const void *send, size_t bytes, const fc_gathered *to)
{
    const int rank = *(const int *)context;

    CHECK_OR_EXIT(bytes <= BYTES_MAX);
    memcpy(sent[rank], send, bytes);
    if (rank == 1) {
        sent_bytes = bytes;
        return fc_fail(FC_ERR_GROUP, "recorded");
    }
    CHECK_EQ(bytes, sent_bytes);
    for (size_t at = 0; at < bytes; at += piece_bytes) {
        const size_t n = bytes - at < piece_bytes ? bytes - at : piece_bytes;

        for (int i = 0; i < N_RANKS && at == 0; i++) {
            const int r = is_own_last ? N_RANKS - 1 - i : i;
            char first[BYTES_MAX] = {0}; /* the rest has not come */

            memcpy(first, sent[r], n);
            FC_TRY(to->look(to->context, r, first, n));
        }
        for (int i = 0; i < N_RANKS; i++) {
            const int r = is_own_last ? N_RANKS - 1 - i : i;
            char *piece = guarded_create(n);
            fc_status st;

            memcpy(piece, sent[r] + at, n);
            st = to->take(to->context, r, at, piece, n);
            guarded_destroy(piece, n);
            FC_TRY(st);
        }
    }
    return FC_OK;
}

static fc_status gather_begin(void *context, const void *send, size_t bytes)
{
    (void)context, (void)bytes;
    begun_send = send;
    return FC_OK;
}

static fc_status gather_end(void *context, const fc_gathered *to)
{
    return gather(context, begun_send, sent_bytes, to);
}

typedef struct member {
    int rank;
    fc_transport *transport;
    fc_domain *domain;
    fc_batch_gather gathers[N_UNITS];
    float shards[N_UNITS][N_PARAMS][2 * ROWS * COLUMNS];
    const void *of[N_UNITS][N_PARAMS];
    char full[N_UNITS][BYTES_MAX];
} member;

static float value_of(size_t unit, size_t param, size_t index)
{
    return (float)(unit * 100 + param * 50 + index);
}

/* `is_packed`: without notes. */
static void join(member *m, int rank, bool is_packed)
{
    static const int ranks[N_RANKS] = {0, 1}, global_ranks[N_RANKS] = {10, 11};
    static const char *const names[N_UNITS] = {"first", "second", "third"};
    const fc_transport_config config = {.name = "test group",
                                        .rank = rank,
                                        .n_ranks = N_RANKS,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    fc_message_ops ops = refused_messages;
    fc_param params[N_PARAMS];
    fc_unit_desc units[N_UNITS];

    memset(m, 0, sizeof(*m));
    m->rank = rank;
    ops.context = (void *)(uintptr_t)&ranks[rank];
    ops.all_gather = all_gather;
    ops.gather = gather;
    ops.gather_begin = gather_begin;
    ops.gather_end = gather_end;
    CHECK_OR_EXIT(fc_callback_create(&config, &ops, &m->transport) == FC_OK);
    for (size_t i = 0; i < N_PARAMS; i++) {
        params[i] = (fc_param){.outer = is_packed ? 1 : i + 1,
                               .rows = ROWS,
                               .inner = COLUMNS,
                               .orig = FC_F32,
                               .compute = FC_F32,
                               .reduce = FC_F32,
                               .grad = FC_F32,
                               .has_grad = true,
                               .trainable = true,
                               .is_packed = is_packed};
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        units[u] = (fc_unit_desc){.name = names[u], .params = params, .n_params = N_PARAMS};
    }
    CHECK_OR_EXIT(fc_domain_create(m->transport, FC_DOMAIN_SHARD, units, N_UNITS, rank, N_RANKS,
                                   &m->domain) == FC_OK);
    fc_batch_limit(m->domain, LIMIT);
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_layout *l = fc_unit_layout(fc_domain_unit(m->domain, u));

        for (size_t i = 0; i < N_PARAMS; i++) {
            const fc_param *p = &l->params[i];
            float *shard = m->shards[u][i];

            for (size_t o = 0; o < p->outer; o++) {
                const size_t first = (o * ROWS + (size_t)rank * p->chunk_rows) * COLUMNS;

                for (size_t k = 0; k < p->own_rows * COLUMNS; k++) {
                    *shard++ = value_of(u, i, first + k);
                }
            }
            m->of[u][i] = m->shards[u][i];
        }
        m->gathers[u] = (fc_batch_gather){
            .unit = fc_domain_unit(m->domain, u), .shards = m->of[u], .dst = m->full[u]};
    }
}

static void leave(member *m)
{
    fc_domain_destroy(m->domain);
    fc_transport_destroy(m->transport);
}

/* What a rank sends for these units; bytes of each note and pack. */
static size_t send_bytes(const member *m, size_t n_units)
{
    size_t bytes = 0;

    for (size_t u = 0; u < n_units; u++) {
        bytes += (fc_domain_is_packed(m->domain) ? 0 : NOTE_BYTES) +
                 fc_unit_layout(m->gathers[u].unit)->pack_bytes;
    }
    return bytes;
}

static fc_status gather_all(member *m)
{
    const size_t bytes = fc_batch_pack_bytes(m->gathers, N_UNITS);
    char *pack = malloc(bytes);
    fc_status st;

    CHECK_OR_EXIT(pack != NULL);
    CHECK_EQ(bytes, send_bytes(m, N_UNITS)); /* alone: the transport hands on what comes */
    memset(pack, 0x5a, bytes);
    st = fc_batch_all_gather(m->gathers, N_UNITS, pack);
    free(pack);
    return st;
}

static void record(member *m)
{
    CHECK_EQ(gather_all(m), FC_ERR_GROUP);
}

static bool is_whole(const member *m, size_t u)
{
    const fc_layout *l = fc_unit_layout(m->gathers[u].unit);

    for (size_t i = 0; i < N_PARAMS; i++) {
        const fc_param *p = &l->params[i];
        const float *full = (const float *)(const void *)(m->full[u] + p->full_at);

        for (size_t k = 0; k < p->outer * ROWS * COLUMNS; k++) {
            if (full[k] != value_of(u, i, k)) {
                return false;
            }
        }
    }
    return true;
}

static bool is_zero(const char *bytes, size_t n)
{
    while (n > 0 && bytes[n - 1] == 0) {
        n--;
    }
    return n == 0;
}

/* A word of a unit's note, as that rank sends it. */
static uint64_t *word_of(const member *m, size_t u, size_t word)
{
    return (uint64_t *)(void *)(sent[1] + send_bytes(m, u)) + word;
}

/* ---- tests ---- */

static void test_pieces(bool is_packed)
{
    static member m, peer;
    const size_t sizes[] = {FC_ALIGN, 2 * FC_ALIGN, 5 * FC_ALIGN, 13 * FC_ALIGN, BYTES_MAX};

    join(&peer, 1, is_packed);
    join(&m, 0, is_packed);
    record(&peer);
    for (size_t k = 0; k < sizeof(sizes) / sizeof(sizes[0]); k++) {
        piece_bytes = sizes[k];
        memset(m.full, 0, sizeof(m.full));
        CHECK_OK(gather_all(&m));
        for (size_t u = 0; u < N_UNITS; u++) {
            CHECK_MSG(is_whole(&m, u), "unit %zu in pieces of %zu", u, piece_bytes);
        }
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_layout *l = fc_unit_layout(peer.gathers[u].unit);
        const char *unit = sent[1] + send_bytes(&peer, u);

        if (is_packed) { /* up to the chunk of a rank with all rows */
            const fc_param *p = &l->params[0];
            const size_t own = p->own_rows * COLUMNS * sizeof(float);

            CHECK(is_zero(unit + own, p->chunk_numel * sizeof(float) - own));
        } else {
            CHECK(is_zero(unit + NOTE_WORDS * 8, NOTE_BYTES - NOTE_WORDS * 8));
        }
    }
    leave(&m);
    leave(&peer);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A note that differs is an error, in whatever piece it comes. */
static void test_notes(void)
{
    static member m, peer;

    join(&peer, 1, false);
    join(&m, 0, false);
    record(&peer);
    for (size_t u = 0; u < N_UNITS; u++) {
        for (piece_bytes = FC_ALIGN; piece_bytes <= BYTES_MAX; piece_bytes *= 4) {
            static const char *const names[N_UNITS] = {"'first'", "'second'", "'third'"};

            *word_of(&m, u, PRINT) ^= 1;
            CHECK_EQ(gather_all(&m), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "rank 10 gathers FSDP unit ");
            CHECK_HAS(fc_last_message(), names[u]);
            CHECK_HAS(fc_last_message(), "rank 11 another one");
            *word_of(&m, u, PRINT) ^= 1;

            *word_of(&m, u, BATCH_LIMIT) ^= 1;
            CHECK_EQ(gather_all(&m), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "up to 1048576 bytes on rank 10 and 1048577 on rank 11");
            *word_of(&m, u, BATCH_LIMIT) ^= 1;

            *word_of(&m, u, IS_OBSERVED) = 1;
            CHECK_OK(gather_all(&m));
            for (size_t k = 0; k < N_UNITS; k++) {
                CHECK_EQ(fc_batch_admits(m.gathers[k].unit), k != u);
            }
            *word_of(&m, u, IS_OBSERVED) = 0;
        }
    }
    CHECK_OK(gather_all(&m));
    for (size_t k = 0; k < N_UNITS; k++) { /* nobody looks any more */
        CHECK(fc_batch_admits(m.gathers[k].unit));
    }
    fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
    CHECK(fc_order_is_followed(m.domain));
    fc_domain_fail(m.domain);
    leave(&m);
    leave(&peer);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A forward that uses a unit, so that the next one has an order to tell. */
static void begin_forward(const member *m)
{
    fc_domain_open(m->domain, (fc_opening){.phase = FC_PHASE_FORWARD});
    CHECK_OK(fc_order_note(m->gathers[0].unit));
    CHECK_OK(fc_domain_close(m->domain));
    fc_domain_open(m->domain, (fc_opening){.phase = FC_PHASE_FORWARD});
}

/* All ranks follow an order that all of them have told. */
static void test_orders(void)
{
    static member m, peer;

    piece_bytes = FC_ALIGN;
    for (int is_packed = 0; is_packed < 2; is_packed++) {
        for (int is_alike = 0; is_alike < 2; is_alike++) {
            join(&peer, 1, is_packed != 0);
            join(&m, 0, is_packed != 0);
            begin_forward(&peer);
            record(&peer);
            begin_forward(&m);
            if (!is_alike && !is_packed) {
                *word_of(&m, 0, ORDER) ^= 1;
                *word_of(&m, 0, BACKWARD) ^= 1;
            }
            CHECK(!fc_order_is_followed(m.domain));
            CHECK_OK(gather_all(&m));
            CHECK_EQ(fc_order_is_followed(m.domain), is_alike && !is_packed);
            CHECK_OK(fc_domain_close(m.domain));
            fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
            CHECK_EQ(fc_order_is_followed(m.domain), is_alike || is_packed);
            if (!is_alike && !is_packed) { /* it counts until the next forward */
                *word_of(&m, 0, ORDER) ^= 1;
                *word_of(&m, 0, BACKWARD) ^= 1;
                CHECK_OK(fc_domain_close(m.domain));
                fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_FORWARD});
                CHECK_OK(gather_all(&m));
                CHECK(fc_order_is_followed(m.domain));
                CHECK_OK(fc_domain_close(m.domain));
                fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
                CHECK(fc_order_is_followed(m.domain));
            }
            fc_domain_fail(m.domain);
            fc_domain_fail(peer.domain);
            leave(&m);
            leave(&peer);
        }
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

/* One that is begun reads the same of it. */
static void test_begun(void)
{
    static member m, peer;
    char pack[BYTES_MAX];

    piece_bytes = 2 * FC_ALIGN;
    join(&peer, 1, false);
    join(&m, 0, false);
    CHECK_EQ(fc_batch_all_gather(&peer.gathers[2], 1, pack), FC_ERR_GROUP);
    for (uint64_t is_observed = 0; is_observed < 2; is_observed++) {
        ((uint64_t *)(void *)sent[1])[IS_OBSERVED] = is_observed;
        CHECK_OR_EXIT(fc_batch_pack_bytes(&m.gathers[2], 1) <= sizeof(pack));
        CHECK_OK(fc_batch_begin_gather(&m.gathers[2], pack));
        CHECK_OK(fc_batch_end_gather(&m.gathers[2]));
        CHECK(is_whole(&m, 2));
        CHECK_EQ(fc_batch_admits(m.gathers[2].unit), is_observed == 0);
    }
    leave(&m);
    leave(&peer);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_pieces(false);
    test_pieces(true);
    for (int i = 0; i < 2; i++) {
        is_own_last = i == 1;
        test_notes();
        test_orders();
        test_begun();
    }
    return check_result();
}
