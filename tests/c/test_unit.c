/* One unit's memory: slices and pieces with an outer dimension, counts of ranks, rounding of sums.
 */
#include "check.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "engine/unit.h"
#include "kernels/kernels.h"

#define RANK 1
#define N_RANKS 2
#define LONG 5000 /* more than a block that is rounded */

static fc_status exchange(void *context, const char *what, const void *mine, size_t bytes,
                          void *all_out)
{
    (void)context, (void)what;
    for (size_t r = 0; r < N_RANKS; r++) {
        memcpy((char *)all_out + r * bytes, mine, bytes);
    }
    return FC_OK;
}

typedef struct world {
    fc_transport *transport;
    fc_domain *domain;
    fc_unit *unit;
    const fc_layout *layout;
} world;

static void join(world *w, fc_param *params, size_t n_params)
{
    static const int global_ranks[N_RANKS] = {10, 11};
    const fc_transport_config config = {.name = "test group",
                                        .rank = RANK,
                                        .n_ranks = N_RANKS,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    const fc_unit_desc unit = {.name = "unit", .params = params, .n_params = n_params};

    CHECK_OR_EXIT(fc_callback_create(&config, &refused_messages, &w->transport) == FC_OK);
    CHECK_OR_EXIT(fc_domain_create(w->transport, FC_DOMAIN_SHARD, &unit, 1, RANK, N_RANKS,
                                   &w->domain) == FC_OK);
    w->unit = fc_domain_unit(w->domain, 0);
    w->layout = fc_unit_layout(w->unit);
}

static void leave(world *w)
{
    fc_domain_destroy(w->domain);
    fc_transport_destroy(w->transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static fc_param param(size_t outer, size_t rows, size_t inner, fc_dtype reduce, fc_dtype grad)
{
    return (fc_param){.outer = outer,
                      .rows = rows,
                      .inner = inner,
                      .orig = FC_F32,
                      .compute = FC_F32,
                      .reduce = reduce,
                      .grad = grad,
                      .has_grad = true,
                      .trainable = true};
}

/* A pack in pieces of so many bytes: what is unpacked are the rank's rows, and nothing else. */
static void check_unpacked(const world *w, const char *pack, const char *full, size_t piece)
{
    char *back = calloc(1, w->layout->full_bytes), *wanted = calloc(1, w->layout->full_bytes);

    CHECK_OR_EXIT(back != NULL && wanted != NULL);
    for (size_t i = 0; i < w->layout->n_params; i++) {
        const fc_param *p = &w->layout->params[i];
        const size_t row = p->inner * sizeof(float);

        for (size_t o = 0; o < p->outer; o++) {
            const size_t at = p->full_at + (o * p->rows + p->chunk_rows) * row;

            memcpy(wanted + at, full + at, p->own_rows * row);
        }
    }
    for (size_t at = 0; at < w->layout->pack_bytes; at += piece) {
        const size_t left = w->layout->pack_bytes - at;

        fc_unit_unpack(w->unit, RANK, at, pack + at, left < piece ? left : piece, back);
    }
    CHECK_MSG(memcmp(back, wanted, w->layout->full_bytes) == 0, "pieces of %zu bytes", piece);
    free(back);
    free(wanted);
}

/* A rank's rows at each outer index, and what lies behind them stays; and back. */
static void test_slices(void)
{
    static const size_t pieces[] = {1, 7, 13, 52, 56, 60, 100, 170, 1 << 20};
    fc_param params[] = {param(1, 4, 2, FC_F32, FC_F32), param(3, 5, 7, FC_F32, FC_F32)};
    world w;
    char *full, *pack, *wanted;

    join(&w, params, 2);
    full = calloc(1, w.layout->full_bytes);
    pack = calloc(1, w.layout->pack_bytes);
    wanted = calloc(1, w.layout->pack_bytes);
    CHECK_OR_EXIT(full != NULL && pack != NULL && wanted != NULL);
    for (size_t i = 0; i < w.layout->full_bytes; i++) {
        full[i] = (char)(1 + i % 127);
    }
    memset(pack, 0x55, w.layout->pack_bytes);
    memset(wanted, 0x55, w.layout->pack_bytes);
    for (size_t i = 0; i < 2; i++) {
        const fc_param *p = &w.layout->params[i];
        const size_t row = p->inner * sizeof(float);

        for (size_t o = 0; o < p->outer; o++) {
            memcpy(wanted + p->pack_at + o * p->own_rows * row,
                   full + p->full_at + (o * p->rows + p->chunk_rows) * row, p->own_rows * row);
        }
    }
    fc_unit_slice(w.unit, full, pack);
    CHECK(memcmp(pack, wanted, w.layout->pack_bytes) == 0);
    for (size_t i = 0; i < sizeof(pieces) / sizeof(pieces[0]); i++) {
        check_unpacked(&w, pack, full, pieces[i]);
    }
    free(full);
    free(pack);
    free(wanted);
    leave(&w);
}

/* Slices of parameters lie where the whole unit has them; inputs have none. */
static void test_inputs(void)
{
    fc_param small[] = {param(1, 4, 2, FC_F32, FC_F32), param(1, 4, 2, FC_F32, FC_F32),
                        param(1, 6, 50, FC_F32, FC_F32)};
    fc_param large[] = {param(1, 4, 90, FC_F32, FC_F32), param(1, 4, 2, FC_F32, FC_F32),
                        param(1, 6, 50, FC_F32, FC_F32)};
    const fc_param *input;
    world w, whole;
    char *full, *pack;
    size_t at;

    small[0].n_inputs = large[1].n_inputs = 1;
    join(&w, small, 2);
    join(&whole, large, 2);
    input = &w.layout->params[2];
    at = input->full_at;
    CHECK(whole.layout->params[2].full_at != at);
    full = malloc(w.layout->full_bytes);
    pack = malloc(w.layout->pack_bytes);
    CHECK_OR_EXIT(full != NULL && pack != NULL);
    memset(full, 0x11, w.layout->full_bytes);
    memset(pack, 0x55, w.layout->pack_bytes);
    fc_unit_slice(w.unit, full, pack);
    for (size_t k = 2 * 2 * sizeof(float); k < w.layout->params[1].pack_at; k++) {
        CHECK_EQ(pack[k], 0x55);
    }
    fc_unit_place_slices(w.unit, whole.unit);
    for (size_t i = 0; i < 2; i++) {
        CHECK_EQ(w.layout->params[i].full_at, whole.layout->params[i].full_at);
    }
    CHECK_EQ(input->full_at, at);
    free(full);
    free(pack);
    fc_domain_destroy(whole.domain);
    fc_transport_destroy(whole.transport);
    leave(&w);
}

/* The count stands behind a chunk, and touches nothing else. Who is not counted is not looked for,
 * nor are inputs. */
static void test_counts(void)
{
    fc_param params[] = {param(1, 4, 2, FC_F32, FC_F32), param(1, 2, 3, FC_BF16, FC_F32),
                         param(1, 4, 4, FC_F32, FC_F32), param(1, 2, 1, FC_F32, FC_F32)};
    world w;
    size_t bytes;
    char *parts, *wanted;

    params[0].is_counted = params[1].is_counted = params[3].is_counted = true;
    params[2].n_inputs = 1;
    join(&w, params, 3);
    CHECK_EQ(w.layout->n_entries, 4);
    bytes = w.layout->part_bytes;
    parts = malloc((N_RANKS + 1) * bytes);
    wanted = malloc((N_RANKS + 1) * bytes);
    CHECK_OR_EXIT(parts != NULL && wanted != NULL);
    for (size_t i = 0; i < 2; i++) {
        const fc_param *p = &w.layout->params[i], *other = &w.layout->params[1 - i];
        const size_t at = p->part_at + p->chunk_numel * fc_dtype_bytes(p->reduce);
        uint64_t mask = 0, none = 0;

        memset(parts, 0x3f, (N_RANKS + 1) * bytes);
        for (size_t r = 0; r < N_RANKS; r++) {
            memset(parts + r * bytes + at, 0, fc_dtype_bytes(p->reduce));
            memset(parts + r * bytes + other->part_at +
                       other->chunk_numel * fc_dtype_bytes(other->reduce),
                   0, fc_dtype_bytes(other->reduce));
        }
        memcpy(wanted, parts, (N_RANKS + 1) * bytes);
        for (size_t r = 0; r < N_RANKS; r++) {
            fc_kern_cast(FC_F32, p->reduce)(wanted + r * bytes + at, &(float){1}, 1);
        }
        fc_unit_count_present(w.unit, i, parts, N_RANKS, bytes);
        CHECK(memcmp(parts, wanted, (N_RANKS + 1) * bytes) == 0);
        fc_unit_read_present(w.unit, parts, bytes, &mask);
        CHECK_EQ(mask, UINT64_C(1) << i);
        fc_unit_read_present(w.unit, parts, at, &none); /* a part that ends before it */
        CHECK_EQ(none, 0);
    }
    memcpy(wanted, parts, (N_RANKS + 1) * bytes);
    fc_unit_count_present(w.unit, 2, parts, N_RANKS, bytes);
    CHECK(memcmp(parts, wanted, (N_RANKS + 1) * bytes) == 0);
    free(parts);
    free(wanted);
    CHECK_EQ(fc_unit_bytes_of(w.unit, &(uint64_t){0}, FC_WIRE_REDUCE), 0);
    CHECK_EQ(fc_unit_bytes_of(w.unit, &(uint64_t){1}, FC_WIRE_REDUCE), FC_ALIGN);
    CHECK_EQ(fc_unit_bytes_of(w.unit, &(uint64_t){8}, FC_WIRE_REDUCE), 0); /* of no parameter */
    leave(&w);
}

static uint16_t narrow(float value, fc_dtype type)
{
    uint16_t out;

    fc_kern_cast(FC_F32, type)(&out, &value, 1);
    return out;
}

/* A sum is rounded to the reduce type, whatever type it goes to; where it is added to a gradient of
 * that type, once. */
static void test_rounding(void)
{
    fc_param params[] = {param(1, (size_t)2 * LONG, 1, FC_BF16, FC_BF16)};
    static uint16_t parts[2][LONG], sum[LONG + 1];
    static float wide[LONG + 1];
    uint64_t mask = 1;
    fc_source sources[2];
    world w;

    join(&w, params, 1);
    for (size_t i = 0; i < LONG; i++) {
        parts[0][i] = narrow(1, FC_BF16);
        parts[1][i] = narrow((float)(i % 2 == 0 ? 1 : 3) / 512, FC_BF16);
    }
    for (size_t r = 0; r < 2; r++) {
        sources[r] = (fc_source){(const char *)parts[r], &mask, FC_WIRE_REDUCE, NULL};
    }
    CHECK_EQ(w.layout->params[0].own_rows, LONG);
    sum[LONG] = 7;
    wide[LONG] = 7;
    CHECK(fc_unit_reduce(w.unit, sources, 2, 0, sum, FC_F16, 1, false));
    CHECK(fc_unit_reduce(w.unit, sources, 2, 0, wide, FC_F32, 1, false));
    for (size_t i = 0; i < LONG; i++) { /* to a multiple of 1 / 128 */
        const float wanted = i % 2 == 0 ? 1 : 1 + 1.0F / 128;

        CHECK_EQ(sum[i], narrow(wanted, FC_F16));
        CHECK(wide[i] == wanted);
    }
    CHECK_EQ(sum[LONG], 7);
    CHECK(wide[LONG] == 7);

    for (size_t i = 0; i < LONG; i++) { /* just above the middle between two that can be told */
        parts[0][i] = narrow(1.0F / 256, FC_BF16);
        parts[1][i] = narrow(1.0F / (1 << 20), FC_BF16);
        sum[i] = narrow(1, FC_BF16);
    }
    CHECK(fc_unit_reduce(w.unit, sources, 2, 0, sum, FC_BF16, 1, true));
    for (size_t i = 0; i < LONG; i++) {
        CHECK_EQ(sum[i], narrow(1 + 1.0F / 128, FC_BF16));
    }
    CHECK_EQ(sum[LONG], 7);
    leave(&w);
}

/* ---- all parameters at once ---- */

#define N_TRAINED 2

/* Whole numbers that every type holds. */
static float value_of(size_t rank, size_t param, size_t index)
{
    return (float)((rank * 31 + param * 7 + index * 3) % 64);
}

/* Gradients of both ranks, and what this one gets of them. */
typedef struct reduction {
    float full[N_RANKS][N_TRAINED][128];
    fc_gradient grads[N_RANKS][N_TRAINED + 1];
    uint64_t masks[N_RANKS];
    fc_source sources[N_RANKS + 1]; /* one that is not added */
    char *parts[N_RANKS];           /* of all receivers */
    float *sums;
} reduction;

static void stage(const world *w, reduction *r, size_t rank, fc_wire wire)
{
    const size_t bytes = w->layout->part_bytes;

    memset(r->parts[rank], 0x3f, N_RANKS * bytes);
    for (size_t i = 0; i < N_TRAINED; i++) {
        fc_unit_stage(w->unit, i, r->full[rank][i], FC_F32, wire, FC_TO_SELF, r->parts[rank],
                      bytes);
    }
    r->masks[rank] = (UINT64_C(1) << N_TRAINED) - 1;
    r->sources[rank] = (fc_source){r->parts[rank] + RANK * bytes, &r->masks[rank], wire, NULL};
}

static void make_reduction(const world *w, reduction *r)
{
    *r = (reduction){.sums = malloc(w->layout->grad_bytes)};
    CHECK_OR_EXIT(r->sums != NULL);
    for (size_t rank = 0; rank < N_RANKS; rank++) {
        r->parts[rank] = malloc(N_RANKS * w->layout->part_bytes);
        CHECK_OR_EXIT(r->parts[rank] != NULL);
        for (size_t i = 0; i < N_TRAINED; i++) {
            for (size_t k = 0; k < 128; k++) {
                r->full[rank][i][k] = value_of(rank, i, k);
            }
            r->grads[rank][i].data = r->full[rank][i];
        }
        stage(w, r, rank, FC_WIRE_REDUCE);
    }
    r->sources[N_RANKS] = (fc_source){r->parts[0], &(uint64_t){0}, FC_WIRE_F16, NULL};
}

/* Halves of what the sources have in sum; nothing behind the last element. */
static void check_reduced(const world *w, reduction *r, size_t first, size_t n_sources)
{
    const size_t numel = w->layout->grad_bytes / sizeof(float);
    size_t end = 0;

    for (size_t k = 0; k < numel; k++) {
        r->sums[k] = -1;
    }
    CHECK(fc_unit_reduce_all(w->unit, r->sources + first, (int)n_sources, r->sums, 2));
    for (size_t i = 0; i < N_TRAINED; i++) {
        const fc_param *p = &w->layout->params[i];
        const size_t at = p->grad_at / sizeof(float), plane = p->own_rows * p->inner;

        for (size_t k = 0; k < p->outer * plane; k++) {
            const size_t index = (k / plane * p->rows + p->chunk_rows) * p->inner + k % plane;
            float wanted = 0;

            for (size_t rank = first; rank < first + n_sources; rank++) {
                wanted += value_of(rank, i, index);
            }
            CHECK_MSG(r->sums[at + k] == wanted / 2, "%zu [%zu]: %g, not %g", i, k,
                      (double)r->sums[at + k], (double)wanted / 2);
        }
        end = at + p->chunk_numel;
    }
    for (size_t k = end; k < numel; k++) {
        CHECK(r->sums[k] == -1);
    }
}

/* What one of them lacks, or has besides, is reduced one by one. */
static void check_refused(const world *w, reduction *r)
{
    const size_t numel = w->layout->grad_bytes / sizeof(float);

    for (size_t k = 0; k < numel; k++) {
        r->sums[k] = -1;
    }
    for (size_t rank = 0; rank < N_RANKS; rank++) {
        for (size_t i = 0; i <= N_TRAINED; i++) { /* the last one is frozen */
            r->masks[rank] ^= UINT64_C(1) << i;
            CHECK(!fc_unit_reduce_all(w->unit, r->sources, N_RANKS, r->sums, 2));
            r->masks[rank] ^= UINT64_C(1) << i;
        }
    }
    for (size_t k = 0; k < numel; k++) {
        CHECK(r->sums[k] == -1);
    }
}

static void test_reduce_all(void)
{
    fc_param params[] = {param(1, 4, 3, FC_F32, FC_F32), param(2, 5, 7, FC_F32, FC_F32),
                         param(1, 2, 3, FC_F32, FC_F32), param(1, 2, 1, FC_F32, FC_F32)};
    reduction r;
    world w;

    params[2].trainable = false;
    params[1].n_inputs = 1;
    join(&w, params, 3);
    make_reduction(&w, &r);
    check_reduced(&w, &r, 0, N_RANKS);
    check_refused(&w, &r);
    stage(&w, &r, 1, FC_WIRE_BF16);
    check_reduced(&w, &r, 0, N_RANKS);
    check_reduced(&w, &r, 1, 1);
    stage(&w, &r, 0, FC_WIRE_BF16);
    check_reduced(&w, &r, 0, N_RANKS);
    for (size_t rank = 0; rank < N_RANKS; rank++) {
        stage(&w, &r, 0, FC_WIRE_REDUCE);
        stage(&w, &r, 1, FC_WIRE_REDUCE);
        memset(r.parts[rank], 0x3f, N_RANKS * w.layout->part_bytes); /* not written */
        r.sources[rank].grads = r.grads[rank];
        check_reduced(&w, &r, 0, N_RANKS);
        check_reduced(&w, &r, rank, 1);
    }
    for (size_t rank = 0; rank < N_RANKS; rank++) {
        free(r.parts[rank]);
    }
    free(r.sums);
    leave(&w);
    params[1].grad = FC_BF16; /* of another type */
    join(&w, params, 3);
    make_reduction(&w, &r);
    check_refused(&w, &r);
    CHECK(!fc_unit_reduce_all(w.unit, r.sources, N_RANKS, r.sums, 2));
    for (size_t rank = 0; rank < N_RANKS; rank++) {
        free(r.parts[rank]);
    }
    free(r.sums);
    leave(&w);
}

/* ---- as many ranks as there may be ---- */

#define MANY_ROWS 4
#define MANY_COLUMNS 10
#define MANY_OUTER 3
#define MANY_OWN (MANY_OUTER * MANY_ROWS / 2 * MANY_COLUMNS)

/* Some send a narrower type, and one reads its gradients where they are. */
static void test_many_sources(void)
{
    fc_param params[] = {param(1, 2, 1, FC_F32, FC_F32),
                         param(MANY_OUTER, MANY_ROWS, MANY_COLUMNS, FC_F32, FC_F32)};
    static float full[MANY_OUTER * MANY_ROWS * MANY_COLUMNS], sums[MANY_OWN + 2];
    static fc_source sources[FC_MAX_RANKS];
    static float all[1024];
    const fc_gradient grads[2] = {{.data = NULL}, {.data = full}};
    uint64_t mask = 3;
    char *parts;
    world w;
    size_t bytes, at;

    join(&w, params, 2);
    bytes = w.layout->part_bytes;
    at = w.layout->params[1].part_at / sizeof(float);
    CHECK_OR_EXIT(w.layout->grad_bytes <= sizeof(all));
    parts = calloc(FC_MAX_RANKS, bytes);
    CHECK_OR_EXIT(parts != NULL);
    for (size_t n_narrow = 0; n_narrow <= 3; n_narrow++) {
        float wanted[MANY_OWN] = {0};

        for (size_t r = 0; r < FC_MAX_RANKS; r++) {
            const bool is_narrow = r % 3 < n_narrow, borrows = r == 5;
            float own[MANY_OWN];

            sources[r] = (fc_source){parts + r * bytes, &mask,
                                     is_narrow ? FC_WIRE_BF16 : FC_WIRE_REDUCE, NULL};
            for (size_t k = 0; k < MANY_OWN; k++) {
                own[k] = value_of(r, 1, k);
                wanted[k] += own[k];
            }
            if (is_narrow) {
                fc_kern_cast(FC_F32, FC_BF16)(parts + r * bytes + at * sizeof(uint16_t), own,
                                              MANY_OWN);
            } else {
                memcpy(parts + r * bytes + at * sizeof(float), own, sizeof(own));
            }
            for (size_t k = 0; borrows && k < MANY_OWN; k++) {
                const size_t plane = MANY_ROWS / 2 * MANY_COLUMNS;

                full[(k / plane * 2 + 1) * plane + k % plane] = own[k];
            }
        }
        CHECK(fc_unit_reduce_all(w.unit, sources, FC_MAX_RANKS, all, 1));
        CHECK(memcmp((char *)all + w.layout->params[1].grad_at, wanted, sizeof(wanted)) == 0);
        for (int borrows = 0; n_narrow < 3 && borrows < 2; borrows++) {
            memset(sums, 0, sizeof(sums));
            sources[5].grads = borrows != 0 ? grads : NULL;
            CHECK(fc_unit_reduce(w.unit, sources, FC_MAX_RANKS, 1, sums + 1, FC_F32, 1, false));
            CHECK(memcmp(sums + 1, wanted, sizeof(wanted)) == 0);
            CHECK(sums[0] == 0 && sums[MANY_OWN + 1] == 0);
        }
    }
    free(parts);
    leave(&w);
}

/* The same where sums are rounded before they are added to wider ones. */
static void test_many_rounded(void)
{
    fc_param params[] = {param(1, 2, 3, FC_BF16, FC_F32)};
    static fc_source sources[FC_MAX_RANKS];
    uint16_t ones[3], zeros[3] = {0};
    float sums[3] = {1, 2, 3};
    uint64_t mask = 1;
    world w;

    join(&w, params, 1);
    for (size_t k = 0; k < 3; k++) {
        ones[k] = narrow(1, FC_BF16);
    }
    for (size_t r = 0; r < FC_MAX_RANKS; r++) {
        sources[r] =
            (fc_source){(const char *)(r % 8 == 7 ? ones : zeros), &mask, FC_WIRE_REDUCE, NULL};
    }
    CHECK(fc_unit_reduce(w.unit, sources, FC_MAX_RANKS, 0, sums, FC_F32, 1, true));
    for (size_t k = 0; k < 3; k++) {
        CHECK(sums[k] == (float)(FC_MAX_RANKS / 8 + k + 1));
    }
    leave(&w);
}

/* A gradient whose runs end at each of two outer indices. */
static void test_two_runs(void)
{
    fc_param params[] = {param(2, 4, 3, FC_F32, FC_F32)};
    float full[2 * 4 * 3], sums[2 * 2 * 3 + 1] = {0};
    const fc_gradient grad = {.data = full};
    uint64_t mask = 1;
    fc_source source = {"", &mask, FC_WIRE_REDUCE, &grad};
    world w;

    join(&w, params, 1);
    for (size_t k = 0; k < sizeof(full) / sizeof(full[0]); k++) {
        full[k] = value_of(0, 0, k);
    }
    CHECK(fc_unit_reduce(w.unit, &source, 1, 0, sums, FC_F32, 1, false));
    for (size_t k = 0; k < 12; k++) {
        CHECK(sums[k] == full[(k / 6 * 2 + 1) * 6 + k % 6]);
    }
    CHECK(sums[12] == 0);
    leave(&w);
}

int main(void)
{
    test_slices();
    test_inputs();
    test_counts();
    test_rounding();
    test_reduce_all();
    test_many_sources();
    test_many_rounded();
    test_two_runs();
    return check_result();
}
