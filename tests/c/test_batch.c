/* Gathers of several units over messages: what is left of them when they fail. */
#include "ranks.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "engine/batch.h"
#include "engine/unit.h"

#define N_UNITS 2
#define N_RANKS 2
#define ROWS 6
#define COLUMNS 4
#define LIMIT ((size_t)1 << 20)
#define UNTOUCHED 0x55

/* A peer that sends what this rank sends. */
typedef struct peer {
    size_t wrong_at; /* a byte that it gets wrong; 0: none */
    bool is_gone;
} peer;

static peer other;

static fc_status exchange_with_peer(void *context, const char *what, const void *mine, size_t bytes,
                                    void *all_out)
{
    (void)context, (void)what;
    for (size_t r = 0; r < N_RANKS; r++) {
        memcpy((char *)all_out + r * bytes, mine, bytes);
    }
    return FC_OK;
}

static fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    (void)context;
    if (other.is_gone) {
        return fc_fail(FC_ERR_GROUP, "nobody is there");
    }
    (void)exchange_with_peer(NULL, "", send, bytes, recv);
    ((char *)recv)[bytes + other.wrong_at] ^= other.wrong_at != 0;
    return FC_OK;
}

/* Which unit a collective was announced for, and how many. */
static size_t begun_with = N_UNITS, n_begun;

static fc_status begin(void *context, size_t unit)
{
    (void)context;
    begun_with = unit;
    n_begun++;
    return other.is_gone ? fc_fail(FC_ERR_GROUP, "nobody is there") : FC_OK;
}

static fc_transport *create_transport(void)
{
    static const int global_ranks[N_RANKS] = {10, 11};
    const fc_transport_config config = {.name = "test group",
                                        .n_ranks = N_RANKS,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange_with_peer}};
    fc_message_ops ops = refused_messages;
    fc_transport *transport = NULL;

    ops.all_gather = all_gather;
    ops.begin = begin;
    CHECK_OR_EXIT(fc_callback_create(&config, &ops, &transport) == FC_OK);
    return transport;
}

static fc_domain *create_domain(fc_transport *transport)
{
    static fc_param params[N_UNITS];
    static const char *const names[N_UNITS] = {"layers.0", "layers.1"};
    fc_unit_desc units[N_UNITS];
    fc_domain *domain = NULL;

    for (size_t i = 0; i < N_UNITS; i++) {
        params[i] = (fc_param){.outer = 1,
                               .rows = ROWS,
                               .inner = COLUMNS,
                               .orig = FC_F32,
                               .compute = FC_F32,
                               .reduce = FC_F32,
                               .grad = FC_F32,
                               .has_grad = true,
                               .trainable = true};
        units[i] = (fc_unit_desc){.name = names[i], .params = &params[i], .n_params = 1};
    }
    CHECK_OR_EXIT(
        fc_domain_create(transport, FC_DOMAIN_SHARD, units, N_UNITS, 0, N_RANKS, &domain) == FC_OK);
    fc_batch_limit(domain, LIMIT);
    return domain;
}

static bool is_filled(const char *bytes, size_t n, char with)
{
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] != with) {
            return false;
        }
    }
    return true;
}

/* The peer's last unit shows only after the units before it were found right. */
static void test_failures(void)
{
    static const float shard[ROWS / N_RANKS * COLUMNS] = {1, 2, 3};
    const void *const shards[] = {shard};
    char full[N_UNITS][ROWS * COLUMNS * sizeof(float)];
    fc_transport *transport = create_transport();
    fc_domain *domain = create_domain(transport);
    fc_batch_gather gathers[N_UNITS];
    size_t unit_bytes;
    char *pack;

    for (size_t i = 0; i < N_UNITS; i++) {
        gathers[i] =
            (fc_batch_gather){.unit = fc_domain_unit(domain, i), .shards = shards, .dst = full[i]};
        CHECK(fc_batch_admits(gathers[i].unit));
    }
    memset(full, UNTOUCHED, sizeof(full));
    pack = malloc(fc_batch_pack_bytes(gathers, N_UNITS));
    CHECK_OR_EXIT(pack != NULL);
    unit_bytes = fc_batch_pack_bytes(gathers, 1) / (N_RANKS + 1);
    for (int is_observed = 1; is_observed >= 0; is_observed--) {
        gathers[0].is_observed = is_observed != 0;

        other = (peer){.wrong_at = unit_bytes};
        CHECK_EQ(fc_batch_all_gather(gathers, N_UNITS, pack), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "rank 10 gathers FSDP unit 'layers.1' and rank 11 another");
        CHECK_EQ(fc_batch_admits(gathers[0].unit), is_observed);
        CHECK(is_filled(full[0], sizeof(full), UNTOUCHED));

        other = (peer){.is_gone = true};
        CHECK_EQ(fc_batch_all_gather(gathers, N_UNITS, pack), FC_ERR_GROUP);
        CHECK_EQ(fc_batch_admits(gathers[0].unit), is_observed);
        CHECK(is_filled(full[0], sizeof(full), UNTOUCHED));

        other = (peer){0};
        n_begun = 0;
        CHECK_EQ(fc_batch_all_gather(gathers, N_UNITS, pack), FC_OK);
        CHECK_EQ(n_begun, 1);
        CHECK_EQ(begun_with, 0);
        CHECK_EQ(fc_batch_admits(gathers[0].unit), !is_observed);
        CHECK(fc_batch_admits(gathers[1].unit));
        CHECK(memcmp(full[1], shard, sizeof(shard)) == 0);
        CHECK(memcmp(full[1] + sizeof(shard), shard, sizeof(shard)) == 0);
        memset(full, UNTOUCHED, sizeof(full));
    }
    free(pack);
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_failures();
    return check_result();
}
