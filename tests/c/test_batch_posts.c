/* Gradients of several units over messages in one reduce-scatter: which join, where their parts
 * lie, what comes of the sum, and what is left after a failure.
 */
#include "check.h"
#include "refused_messages.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "engine/batch.h"
#include "engine/unit.h"
#include "engine/waits.h"
#include "kernels/kernels.h"

#define N_RANKS 4
#include "alike_ranks.h"
#define RANK 1
#define LIMIT ((size_t)1 << 20)
#define MANY_PARAMS 256 /* whose mask fills an entry */
#define ENTRIES_MAX 256

/* Units of the domain. */
enum {
    PAIR, /* of two parameters, which are counted */
    PLAIN,
    TINY, /* the least bytes, of another type */
    MIXED,
    AT_LIMIT,
    ABOVE_LIMIT,
    MANY,
    TOO_MANY,
    N_UNITS
};

static const char *const names[N_UNITS] = {"pair",     "plain",       "tiny", "mixed",
                                           "at limit", "above limit", "many", "too many"};

#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        const fc_status check_status_ = (call);                                                    \
        CHECK_MSG(check_status_ == FC_OK, "%s: %s", #call, fc_last_message());                     \
    } while (0)

/* ---- a group, whose other ranks send what this one does ---- */

static bool is_gone;
static size_t n_sums, summed_numel;
static fc_dtype summed_type;

/* What this rank has for all ranks, summed up, so that each part counts. */
static fc_status reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                                fc_dtype dtype)
{
    const int n_ranks = *(const int *)context;
    const void *parts[N_RANKS];

    if (is_gone) {
        return fc_fail(FC_ERR_GROUP, "nobody is there");
    }
    n_sums++;
    summed_numel = recv_numel;
    summed_type = dtype;
    for (int r = 0; r < n_ranks; r++) {
        parts[r] = (const char *)send + (size_t)r * recv_numel * fc_dtype_bytes(dtype);
    }
    fc_kern_reduce(dtype, dtype)(recv, parts, (size_t)n_ranks, recv_numel, 1, false);
    return FC_OK;
}

static fc_transport *create_transport(int n_ranks)
{
    static const int global_ranks[N_RANKS] = {10, 11, 12, 13};
    static int sizes[N_RANKS + 1] = {0, 1, 2, 3, 4};
    const fc_transport_config config = {.name = "test group",
                                        .rank = n_ranks > RANK ? RANK : 0,
                                        .n_ranks = n_ranks,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = exchange}};
    fc_message_ops ops = refused_messages;
    fc_transport *transport = NULL;

    ops.context = &sizes[n_ranks];
    ops.all_gather = all_gather;
    ops.reduce_scatter = reduce_scatter;
    CHECK_OR_EXIT(fc_callback_create(&config, &ops, &transport) == FC_OK);
    return transport;
}

/* ---- units ---- */

static fc_param param(size_t rows, size_t inner, fc_dtype reduce)
{
    return (fc_param){.outer = 1,
                      .rows = rows,
                      .inner = inner,
                      .orig = FC_F32,
                      .compute = FC_F32,
                      .reduce = reduce,
                      .grad = FC_F32,
                      .has_grad = true,
                      .trainable = true};
}

static fc_domain *create_domain(fc_transport *transport, fc_domain_kind kind)
{
    static fc_param many[MANY_PARAMS + 1];
    fc_param pair[] = {param(5, 4, FC_F32), param(2, 3, FC_F32)};
    fc_param plain = param(8, 2, FC_F32), tiny = param(4, 1, FC_BF16);
    fc_param mixed[] = {param(4, 4, FC_F32), param(4, 4, FC_BF16)};
    fc_param at_limit = param(N_RANKS, FC_BATCH_UNIT_BYTES / N_RANKS / sizeof(float), FC_F32);
    fc_param above_limit = param(N_RANKS, at_limit.inner + FC_ALIGN / sizeof(float), FC_F32);
    const fc_unit_desc units[N_UNITS] = {
        {names[PAIR], pair, 2},           {names[PLAIN], &plain, 1},
        {names[TINY], &tiny, 1},          {names[MIXED], mixed, 2},
        {names[AT_LIMIT], &at_limit, 1},  {names[ABOVE_LIMIT], &above_limit, 1},
        {names[MANY], many, MANY_PARAMS}, {names[TOO_MANY], many, MANY_PARAMS + 1}};
    fc_domain *domain = NULL;
    int n_ranks;

    pair[0].is_counted = pair[1].is_counted = true;
    for (size_t i = 0; i <= MANY_PARAMS; i++) { /* all but the first without elements */
        many[i] = param(i == 0 ? N_RANKS : 0, 1, FC_F32);
    }
    n_ranks = fc_transport_n_ranks(transport);
    CHECK_OR_EXIT(fc_domain_create(transport, kind, units, N_UNITS, n_ranks > RANK ? RANK : 0,
                                   n_ranks, &domain) == FC_OK);
    fc_batch_limit(domain, LIMIT);
    return domain;
}

static size_t part_bytes(fc_domain *domain, size_t unit)
{
    return fc_unit_layout(fc_domain_unit(domain, unit))->trainable_part_bytes;
}

static void leave(fc_domain *domain, fc_transport *transport)
{
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
    CHECK_EQ(fc_account_bytes(FC_FOR_MESSAGES), 0);
}

/* ---- posts ---- */

static bool is_zero(const char *bytes, size_t n)
{
    while (n > 0 && bytes[n - 1] == 0) {
        n--;
    }
    return n == 0;
}

static float value_of(size_t unit, size_t rank, size_t index)
{
    return (float)((unit * 5 + rank * 3 + index) % 16);
}

/* Fills all of its part for each rank; returns where that begins. */
static char *post(fc_domain *domain, size_t index)
{
    fc_unit *unit = fc_domain_unit(domain, index);
    const fc_dtype type = fc_unit_layout(unit)->sections[0].reduce;
    const size_t bytes = part_bytes(domain, index);
    char *parts = NULL;
    size_t pitch = 0;

    CHECK_OK(fc_batch_add(unit, &parts, &pitch));
    CHECK_OR_EXIT(parts != NULL && pitch >= bytes);
    CHECK_EQ((uintptr_t)parts % FC_ALIGN, 0);
    CHECK_EQ(pitch % FC_ALIGN, 0);
    for (size_t r = 0; r < (size_t)fc_domain_n_ranks(domain); r++) {
        char *part = parts + r * pitch;

        CHECK(is_zero(part, bytes));
        for (size_t i = 0; i < bytes / fc_dtype_bytes(type); i++) {
            const float value = value_of(index, r, i);

            fc_kern_cast(FC_F32, type)(part + i * fc_dtype_bytes(type), &value, 1);
        }
    }
    return parts;
}

/* The next unit in the sum: all that its post had, and which parameters were counted in it. */
static void check_next(fc_batch *batch, fc_domain *domain, size_t index, uint64_t mask)
{
    fc_unit *unit = fc_domain_unit(domain, index);
    const fc_dtype type = fc_unit_layout(unit)->sections[0].reduce;
    fc_source sum = {0};

    CHECK(fc_batch_next(batch, &sum) == unit);
    CHECK_OR_EXIT(sum.part != NULL && sum.mask != NULL);
    CHECK_EQ(sum.wire, FC_WIRE_REDUCE);
    CHECK(sum.grads == NULL);
    CHECK_EQ(sum.mask[0], mask);
    for (size_t i = 0; i < part_bytes(domain, index) / fc_dtype_bytes(type); i++) {
        float got, wanted = 0;

        for (size_t r = 0; r < (size_t)fc_domain_n_ranks(domain); r++) {
            wanted += value_of(index, r, i);
        }
        fc_kern_cast(type, FC_F32)(&got, sum.part + i * fc_dtype_bytes(type), 1);
        if (got != wanted) {
            CHECK_MSG(false, "%s [%zu]: %g, not %g", names[index], i, (double)got, (double)wanted);
            return;
        }
    }
}

static void check_end(fc_batch *batch)
{
    fc_source none;

    CHECK(fc_batch_next(batch, &none) == NULL);
    CHECK(fc_batch_next(batch, &none) == NULL);
}

/* ---- tests ---- */

static void test_who_may(void)
{
    static const bool expected[N_UNITS] = {true, true, true, false, true, false, true, false};
    fc_transport *transport = create_transport(N_RANKS), *alone = create_transport(1);
    fc_domain *domain = create_domain(transport, FC_DOMAIN_SHARD);
    fc_domain *replicas = create_domain(transport, FC_DOMAIN_REPLICATE);
    fc_domain *own = create_domain(alone, FC_DOMAIN_SHARD);
    const size_t bytes = N_RANKS * part_bytes(domain, PLAIN);

    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_MSG(fc_batch_admits(fc_domain_unit(domain, u)) == expected[u], "%s", names[u]);
        CHECK(!fc_batch_joins(fc_domain_unit(domain, u))); /* nothing waits */
        CHECK(!fc_batch_admits(fc_domain_unit(replicas, u)));
        CHECK(!fc_batch_admits(fc_domain_unit(own, u)));
    }
    fc_batch_limit(domain, bytes);
    CHECK(fc_batch_admits(fc_domain_unit(domain, PLAIN)));
    fc_batch_limit(domain, bytes - 1);
    CHECK(!fc_batch_admits(fc_domain_unit(domain, PLAIN)));
    fc_batch_limit(domain, 0);
    CHECK(!fc_batch_admits(fc_domain_unit(domain, TINY)));
    fc_domain_destroy(own);
    fc_domain_destroy(replicas);
    fc_transport_destroy(alone);
    leave(domain, transport);
}

/* A batch holds every unit that may join once, up to the limit. */
static void test_room(void)
{
    fc_transport *transport = create_transport(N_RANKS);
    fc_domain *domain = create_domain(transport, FC_DOMAIN_SHARD);
    fc_unit *plain = fc_domain_unit(domain, PLAIN), *tiny = fc_domain_unit(domain, TINY);
    const size_t bytes = part_bytes(domain, PLAIN);
    size_t all = 0;

    for (size_t u = 0; u < N_UNITS; u++) {
        all += fc_batch_admits(fc_domain_unit(domain, u)) ? part_bytes(domain, u) : 0;
    }
    (void)post(domain, PLAIN);
    CHECK_EQ(fc_account_bytes(FC_FOR_MESSAGES), fc_round_up((N_RANKS + 1) * all, FC_PAGE));
    CHECK(!fc_batch_joins(tiny)); /* of another type */
    CHECK(!fc_batch_joins(fc_domain_unit(domain, MIXED)));
    CHECK(fc_batch_joins(fc_domain_unit(domain, AT_LIMIT)));
    (void)fc_domain_trim(domain);
    CHECK_EQ(fc_account_bytes(FC_FOR_MESSAGES), 0);
    CHECK(fc_batch_waiting(domain) == NULL);

    fc_batch_limit(domain, N_RANKS * (3 * bytes + FC_ALIGN - 1)); /* as many as fit, aligned */
    (void)post(domain, PLAIN);
    CHECK(fc_batch_joins(plain));
    (void)post(domain, PLAIN);
    CHECK(fc_batch_joins(plain));
    (void)post(domain, PLAIN);
    CHECK(!fc_batch_joins(plain));
    (void)fc_domain_trim(domain);

    fc_batch_limit(domain, LIMIT);
    for (size_t n = 0; n < ENTRIES_MAX; n++) {
        CHECK_EQ(fc_batch_joins(tiny), n > 0);
        (void)post(domain, TINY);
    }
    CHECK(!fc_batch_joins(tiny)); /* however few their bytes */
    leave(domain, transport);
}

static void test_sums(void)
{
    fc_transport *transport = create_transport(N_RANKS);
    fc_domain *domain = create_domain(transport, FC_DOMAIN_SHARD);
    fc_unit *pair = fc_domain_unit(domain, PAIR);
    fc_batch *batch = (fc_batch *)&batch;
    char *parts;

    CHECK_OK(fc_batch_reduce(domain, &batch));
    CHECK(batch == NULL);
    fc_domain_open(domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
    for (int round = 0; round < 2; round++) { /* in the same memory */
        parts = post(domain, PLAIN);
        CHECK(post(domain, AT_LIMIT) == parts + part_bytes(domain, PLAIN));
        (void)post(domain, MANY);
        CHECK(fc_batch_waiting(domain) == domain);
        CHECK_OK(fc_batch_reduce(domain, &batch));
        CHECK_OR_EXIT(batch != NULL);
        CHECK(fc_batch_waiting(domain) == NULL);
        CHECK_EQ(n_sums, round + 1);
        CHECK_EQ(summed_type, FC_F32);
        CHECK_EQ(summed_numel * sizeof(float), part_bytes(domain, PLAIN) +
                                                   part_bytes(domain, AT_LIMIT) +
                                                   part_bytes(domain, MANY));
        check_next(batch, domain, PLAIN, 0);
        check_next(batch, domain, AT_LIMIT, 0);
        check_next(batch, domain, MANY, 0);
        check_end(batch);
        fc_batch_give_back(batch);
        CHECK_OK(fc_batch_reduce(domain, &batch));
        CHECK(batch == NULL);
    }
    CHECK_EQ(fc_waits_of(domain, fc_domain_unit(domain, PLAIN), FC_WAIT_REDUCE).n, 2);

    /* Another type, in the memory of the first; a sum that is not looked at is none of the next. */
    (void)post(domain, TINY);
    CHECK_OK(fc_batch_reduce(domain, &batch));
    CHECK_EQ(summed_type, FC_BF16);
    fc_batch_give_back(batch);
    (void)post(domain, TINY);
    CHECK_OK(fc_batch_reduce(domain, &batch));
    CHECK_EQ(summed_numel * 2, part_bytes(domain, TINY));
    check_next(batch, domain, TINY, 0);
    check_end(batch);

    /* What is posted while a sum is looked at gets a batch of its own, which stays. */
    parts = post(domain, PAIR);
    fc_batch_give_back(batch);
    CHECK(fc_batch_waiting(domain) == domain);
    CHECK(post(domain, PAIR) == parts + part_bytes(domain, PAIR));
    CHECK_OK(fc_batch_reduce(domain, &batch));
    check_next(batch, domain, PAIR, 3); /* values stand where ranks are counted */
    check_next(batch, domain, PAIR, 3);
    check_end(batch);
    fc_batch_give_back(batch);

    for (size_t i = 0; i < 2; i++) { /* who has posted which of its parameters */
        fc_source sum = {0};
        size_t apart = 0;

        CHECK_OK(fc_batch_add(pair, &parts, &apart));
        fc_unit_count_present(pair, i, parts, N_RANKS, apart);
        CHECK_OK(fc_batch_reduce(domain, &batch));
        CHECK(fc_batch_next(batch, &sum) == pair);
        CHECK_EQ(sum.mask[0], i + 1);
        fc_batch_give_back(batch);
    }
    fc_domain_fail(domain);
    leave(domain, transport);
}

/* Phases that begin or fail forget what waits in them, and keep its memory. */
static void test_drop(void)
{
    fc_transport *transport = create_transport(N_RANKS);
    fc_domain *first = create_domain(transport, FC_DOMAIN_SHARD);
    fc_domain *second = create_domain(transport, FC_DOMAIN_SHARD);
    fc_domain *domains[] = {first, second};
    char *parts;
    int64_t bytes;

    fc_domain_link(domains, 2);
    CHECK(fc_batch_waiting(first) == NULL);
    fc_domain_open(second, (fc_opening){.phase = FC_PHASE_BACKWARD});
    parts = post(second, PLAIN);
    bytes = fc_account_bytes(FC_FOR_MESSAGES);
    CHECK(fc_batch_waiting(first) == second);
    CHECK(fc_batch_waiting(second) == second);
    fc_domain_fail(second);
    CHECK(fc_batch_waiting(first) == NULL);
    CHECK(!fc_batch_joins(fc_domain_unit(second, PLAIN)));
    CHECK(post(second, PLAIN) == parts);
    fc_domain_open(second, (fc_opening){.phase = FC_PHASE_BACKWARD});
    CHECK(fc_batch_waiting(second) == NULL);
    CHECK(post(second, TINY) == parts);
    CHECK_EQ(fc_account_bytes(FC_FOR_MESSAGES), bytes);
    (void)post(first, TINY);
    CHECK(fc_batch_waiting(first) == first);
    fc_domain_destroy(first);
    leave(second, transport);
}

static void test_failures(void)
{
    fc_transport *transport = create_transport(N_RANKS);
    fc_domain *domain = create_domain(transport, FC_DOMAIN_SHARD);
    fc_unit *plain = fc_domain_unit(domain, PLAIN);
    fc_batch *batch = NULL;
    char *parts = NULL;
    size_t pitch = 0;
    int64_t live;

    fc_domain_open(domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
    live = fc_alloc_live();
    for (int n = 0; n < 2; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_batch_add(plain, &parts, &pitch), FC_ERR_NOMEM);
        CHECK_HAS(fc_last_message(), "bytes of gradients");
        fc_alloc_fail_after(-1);
        CHECK_EQ(fc_alloc_live(), live);
        CHECK(fc_batch_waiting(domain) == NULL && parts == NULL);
    }
    (void)post(domain, PLAIN);
    (void)post(domain, PAIR);
    is_gone = true;
    CHECK_EQ(fc_batch_reduce(domain, &batch), FC_ERR_GROUP);
    is_gone = false;
    CHECK_HAS(fc_last_message(), "reduction of FSDP unit 'plain', with 1 after it, failed");
    CHECK(batch == NULL);
    CHECK(fc_batch_waiting(domain) == NULL);
    CHECK_EQ(fc_alloc_live(), live);
    CHECK_EQ(fc_account_bytes(FC_FOR_MESSAGES), 0);

    (void)post(domain, PLAIN);
    CHECK_OK(fc_batch_reduce(domain, &batch));
    CHECK_OR_EXIT(batch != NULL);
    check_next(batch, domain, PLAIN, 0);
    check_end(batch);
    fc_batch_give_back(batch);
    fc_domain_fail(domain);
    leave(domain, transport);
}

int main(void)
{
    test_who_may();
    test_room();
    test_sums();
    test_drop();
    test_failures();
    return check_result();
}
