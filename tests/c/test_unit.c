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

/* A rank's rows at each outer index; and back, a byte at a time. */
static void test_slices(void)
{
    fc_param params[] = {param(1, 4, 2, FC_F32, FC_F32), param(3, 5, 7, FC_F32, FC_F32)};
    world w;
    char *full, *pack, *back;

    join(&w, params, 2);
    full = calloc(1, w.layout->full_bytes);
    pack = calloc(1, w.layout->pack_bytes);
    back = calloc(1, w.layout->full_bytes);
    CHECK_OR_EXIT(full != NULL && pack != NULL && back != NULL);
    for (size_t i = 0; i < w.layout->full_bytes; i++) {
        full[i] = (char)(1 + i % 127);
    }
    fc_unit_slice(w.unit, full, pack);
    for (size_t i = 0; i < 2; i++) {
        const fc_param *p = &w.layout->params[i];
        const size_t row = p->inner * sizeof(float), first = p->chunk_rows;

        for (size_t o = 0; o < p->outer; o++) {
            CHECK(memcmp(pack + p->pack_at + o * p->own_rows * row,
                         full + p->full_at + (o * p->rows + first) * row, p->own_rows * row) == 0);
        }
        for (size_t at = 0; at < p->outer * p->own_rows * row; at++) {
            fc_unit_unpack(w.unit, RANK, p->pack_at + at, pack + p->pack_at + at, 1, back);
        }
        for (size_t o = 0; o < p->outer; o++) {
            const size_t at = p->full_at + o * p->rows * row;

            CHECK(memcmp(back + at + first * row, full + at + first * row, p->own_rows * row) == 0);
            for (size_t k = 0; k < first * row; k++) {
                CHECK_EQ(back[at + k], 0);
            }
        }
    }
    free(full);
    free(pack);
    free(back);
    leave(&w);
}

/* The count stands behind a chunk, and touches nothing else. */
static void test_counts(void)
{
    fc_param params[] = {param(1, 4, 2, FC_F32, FC_F32), param(1, 2, 3, FC_BF16, FC_F32)};
    world w;
    size_t bytes;
    char *parts;

    params[0].is_counted = params[1].is_counted = true;
    join(&w, params, 2);
    bytes = w.layout->part_bytes;
    parts = calloc(N_RANKS + 1, bytes);
    CHECK_OR_EXIT(parts != NULL);
    for (size_t i = 0; i < 2; i++) {
        const fc_param *p = &w.layout->params[i];
        const size_t at = p->part_at + p->chunk_numel * fc_dtype_bytes(p->reduce);
        uint64_t mask = 0, none = 0;
        size_t n_set = 0;

        memset(parts, 0, (N_RANKS + 1) * bytes);
        fc_unit_count_present(w.unit, i, parts, N_RANKS, bytes);
        for (size_t k = 0; k < (N_RANKS + 1) * bytes; k++) {
            const bool may_be_set = k < N_RANKS * bytes && k % bytes >= at &&
                                    k % bytes < at + fc_dtype_bytes(p->reduce);

            CHECK(parts[k] == 0 || may_be_set);
            n_set += parts[k] != 0;
        }
        CHECK(n_set >= N_RANKS);
        fc_unit_read_present(w.unit, parts, bytes, &mask);
        CHECK_EQ(mask, UINT64_C(1) << i);
        fc_unit_read_present(w.unit, parts, at, &none); /* a part that ends before it */
        CHECK_EQ(none, 0);
    }
    free(parts);
    CHECK_EQ(fc_unit_bytes_of(w.unit, &(uint64_t){0}, FC_WIRE_REDUCE), 0);
    CHECK_EQ(fc_unit_bytes_of(w.unit, &(uint64_t){1}, FC_WIRE_REDUCE), FC_ALIGN);
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

int main(void)
{
    test_slices();
    test_counts();
    test_rounding();
    return check_result();
}
