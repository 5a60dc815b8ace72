/* Domains: what their units take, for real and as a plan; what they give back; and what is refused.
 */
#define _GNU_SOURCE

#include "domains.h"
#include "refused_messages.h"

#include "engine/batch.h"
#include "engine/exchange.h"

#define MAX_UNITS 6
#define SMALL_BYTES ((size_t)8 << 20) /* of an arena that holds all reductions */

/* Of rows of 4 elements. Half of them are frozen, or all, or none. */
typedef struct shape {
    size_t rows[2];
    bool trainable[2];
} shape;

typedef struct model {
    size_t n_units;
    fc_domain_kind kind;
    shape shapes[MAX_UNITS];
    fc_param params[MAX_UNITS][2];
    fc_unit_desc units[MAX_UNITS];
} model;

static void describe(model *m)
{
    static const char *const names[MAX_UNITS] = {"a", "b", "c", "d", "e", "f"};

    for (size_t u = 0; u < m->n_units; u++) {
        const shape *s = &m->shapes[u];

        m->params[u][0] = make_param(1, s->rows[0], 4, FC_F32, s->trainable[0]);
        m->params[u][1] = make_param(1, s->rows[1], 4, FC_F32, s->trainable[1]);
        m->params[u][u % 2].compute = FC_BF16; /* not aliased */
        m->units[u] = (fc_unit_desc){names[u], m->params[u], 2};
    }
}

static size_t most(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* What domain.h says of them, by the layouts of its units. */
static fc_domain_sizes expect(const model *m, int n_shards, int n_ranks, bool is_mapped)
{
    const size_t copies = m->kind == FC_DOMAIN_SHARD ? (size_t)n_ranks : 1;
    size_t usual = 0, any = 0, all = 0;
    fc_domain_sizes s = {0};

    for (size_t u = 0; u < m->n_units; u++) {
        fc_param params[2];
        fc_layout l;

        memcpy(params, m->params[u], sizeof(params));
        CHECK_OR_EXIT(fc_layout_init(&l, params, 2, 0, n_shards, is_mapped) == FC_OK);
        s.grads += fc_round_up(l.trainable_grad_bytes, FC_PAGE);
        s.largest = most(s.largest, l.full_bytes);
        s.pack = most(s.pack, l.pack_bytes + FC_ALIGN);
        s.part = most(s.part, l.part_bytes);
        s.parts += l.trainable_part_bytes != 0 ? l.part_bytes : 0;
        if (l.full_bytes <= FC_BATCH_UNIT_BYTES &&
            (size_t)n_shards * l.pack_bytes <= FC_BATCH_UNIT_BYTES) {
            s.small += l.full_bytes;
        }
        if (is_mapped && m->kind == FC_DOMAIN_SHARD) {
            s.full += l.full_bytes;
            s.aliased += l.params[(u + 1) % 2].chunk_numel * sizeof(float);
        }
        usual = most(usual, copies * l.trainable_part_bytes);
        any = most(any, copies * l.part_bytes);
        all += fc_round_up(copies * l.trainable_part_bytes, FC_ALIGN);
    }
    if (is_mapped && n_ranks > 1) {
        /* Two of the largest, or all that fit; any one; between replicas all of them. */
        const size_t room = m->kind == FC_DOMAIN_SHARD ? least(all, SMALL_BYTES) : all;

        s.arena = fc_round_up(most(most(2 * usual, room), any), FC_PAGE);
    }
    return s;
}

static void check_sizes(const fc_domain_sizes *s, const fc_domain_sizes *wanted, bool is_mapped)
{
    CHECK_EQ(s->full, wanted->full);
    CHECK_EQ(s->aliased, wanted->aliased);
    CHECK_EQ(s->arena, wanted->arena);
    CHECK_EQ(s->grads, wanted->grads);
    CHECK_EQ(s->largest, wanted->largest);
    CHECK_EQ(s->pack, wanted->pack);
    CHECK_EQ(s->part, wanted->part);
    CHECK_EQ(s->small, wanted->small);
    CHECK_EQ(s->parts, wanted->parts);
    CHECK_EQ(s->control % FC_PAGE, 0);
    CHECK_EQ(s->control > 0, is_mapped);
}

#define TRAINED {true, true}
#define HALF {true, false}
#define FROZEN {false, false}

/* Small ones of which all fit; one that is larger than all others; ones of which all are a little
 * more than two; so many that not all fit; ones of which two are more than fit; one that is frozen;
 * all frozen. */
static const model models[] = {
    {.n_units = 3, .shapes = {{{9, 4}, TRAINED}, {{5, 7}, HALF}, {{130, 2}, TRAINED}}},
    {.n_units = 2, .shapes = {{{4000, 3}, TRAINED}, {{5, 7}, TRAINED}}},
    {.n_units = 3, .shapes = {{{4000, 3}, TRAINED}, {{4000, 3}, TRAINED}, {{2000, 3}, TRAINED}}},
    {.n_units = 5,
     .shapes = {{{0x30000, 1}, TRAINED},
                {{0x30000, 2}, TRAINED},
                {{0x30000, 3}, HALF},
                {{0x30000, 4}, TRAINED},
                {{0x30000, 5}, TRAINED}}},
    {.n_units = 2, .shapes = {{{0x90000, 1}, TRAINED}, {{0x90001, 1}, HALF}}},
    {.n_units = 3, .shapes = {{{9, 4}, TRAINED}, {{4097, 4097}, FROZEN}, {{70, 1}, HALF}}},
    {.n_units = 1, .shapes = {{{600, 700}, FROZEN}}},
    {.n_units = 0},
};

#define N_MODELS (sizeof(models) / sizeof(models[0]))

static void test_plans(void)
{
    for (size_t i = 0; i < N_MODELS; i++) {
        for (int n_ranks = 1; n_ranks <= 5; n_ranks += 2) {
            for (int way = 0; way < 4; way++) {
                const bool is_mapped = way % 2 != 0;
                model m = models[i];
                fc_domain_sizes sizes, wanted;
                int n_shards;

                m.kind = way < 2 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE;
                n_shards = m.kind == FC_DOMAIN_SHARD ? n_ranks : 3;
                describe(&m);
                CHECK_OK(fc_domain_plan(m.kind, m.units, m.n_units, n_shards, n_ranks, is_mapped,
                                        &sizes));
                wanted = expect(&m, n_shards, n_ranks, is_mapped);
                check_sizes(&sizes, &wanted, is_mapped);
            }
        }
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

#define N_ALIKE 64
#define N_WIDE 65

/* Each rank has a lane of whole cache lines for each unit; of ten ranks one line holds 64
 * parameters. The widest unit says how long they are, whichever it is. */
static void test_lanes(void)
{
    static const size_t wides[] = {0, 30, N_ALIKE - 1, N_ALIKE};
    static fc_param params[N_WIDE];
    fc_unit_desc units[N_ALIKE] = {{NULL}};
    fc_domain_sizes sizes, without;

    for (size_t i = 0; i < N_WIDE; i++) {
        params[i] = make_param(1, 2, 1, FC_F32, true);
    }
    CHECK_OK(fc_domain_plan(FC_DOMAIN_SHARD, units, 0, 10, 10, true, &without));
    for (size_t i = 0; i < sizeof(wides) / sizeof(wides[0]); i++) {
        for (size_t u = 0; u < N_ALIKE; u++) {
            units[u] = (fc_unit_desc){"a", params, u == wides[i] ? N_WIDE : N_WIDE - 1};
        }
        CHECK_OK(fc_domain_plan(FC_DOMAIN_SHARD, units, N_ALIKE, 10, 10, true, &sizes));
        CHECK_EQ(sizes.control - without.control,
                 (wides[i] < N_ALIKE ? 2 : 1) * (size_t)10 * N_ALIKE * FC_CACHE_LINE);
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_plans_without_memory(void)
{
    fc_status st = FC_ERR_NOMEM;
    fc_domain_sizes sizes;
    model m = models[0];
    int n = 0;

    describe(&m);
    while (st != FC_OK) {
        fc_alloc_fail_after(n++);
        st = fc_domain_plan(FC_DOMAIN_SHARD, m.units, m.n_units, 2, 2, true, &sizes);
        fc_alloc_fail_after(-1);
        CHECK_EQ(st, st == FC_OK ? FC_OK : FC_ERR_NOMEM);
        CHECK_EQ(fc_alloc_live(), 0);
        if (n == 1) {
            CHECK_STR(fc_last_message(), "plan of 3 units");
        }
        CHECK_OR_EXIT(n < 100);
    }
    CHECK(n > 10);
}

/* A domain takes what is planned, and no more: control, buffers and an arena of each rank. */
static void body_real(int rank, int n_ranks, void *arg)
{
    for (size_t i = 0; i < N_MODELS; i++) {
        for (int kind = 0; kind < 2; kind++) {
            model made = models[i];
            fc_domain_sizes sizes, planned;
            member m;

            (void)arg;
            made.kind = kind == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE;
            describe(&made);
            member_join(&m, rank, n_ranks);
            member_make_domain(&m, made.kind, made.units, made.n_units, kind == 0 ? rank : 1,
                               kind == 0 ? n_ranks : 2);
            sizes = fc_domain_measure(m.domain);
            CHECK_OK(fc_domain_plan(made.kind, made.units, made.n_units, kind == 0 ? n_ranks : 2,
                                    n_ranks, true, &planned));
            check_sizes(&sizes, &planned, true);
            CHECK_EQ(sizes.control, planned.control);
            CHECK_EQ(fc_domain_region_bytes(m.domain),
                     sizes.control + sizes.full + (size_t)n_ranks * sizes.arena);
            CHECK_EQ(fc_domain_arena_bytes(m.domain), sizes.arena);
            CHECK_EQ(fc_domain_is_replicate(m.domain), kind == 1);
            member_leave(&m);
        }
    }
}

/* Ranks of which one has a unit of another shape are told, though it takes as many bytes. */
static void body_other_shapes(int rank, int n_ranks, void *arg)
{
    (void)arg;
    for (size_t other = 0; other <= 3; other++) {
        fc_param params[3];
        fc_unit_desc units[3];
        member m;

        for (size_t u = 0; u < 3; u++) {
            const bool is_other = u == other && rank == n_ranks - 1;

            params[u] = make_param(1, is_other ? 12 : 6, is_other ? 2 : 4, FC_F32, true);
            units[u] = (fc_unit_desc){"a", &params[u], 1};
        }
        member_join(&m, rank, n_ranks);
        CHECK_EQ(fc_domain_create(m.transport, FC_DOMAIN_SHARD, units, 3, rank, n_ranks, &m.domain),
                 other < 3 ? FC_ERR_MISMATCH : FC_OK);
        member_leave(&m);
    }
}

/* A rank that has no memory for its units tells the others, by the name of the first one. */
static void body_refused(int rank, int n_ranks, void *arg)
{
    static const char *const texts[] = {": rank 10: domain of 0 units",
                                        "a: rank 10: domain of 1 units",
                                        "a: rank 10: domain of 2 units"};

    (void)arg;
    for (size_t n_units = 0; n_units <= 2; n_units++) {
        model made = models[0];
        member m;
        fc_status st;

        describe(&made);
        member_join(&m, rank, n_ranks);
        fc_alloc_fail_after(rank == 0 ? 0 : -1);
        st = fc_domain_create(m.transport, FC_DOMAIN_SHARD, made.units, n_units, rank, n_ranks,
                              &m.domain);
        fc_alloc_fail_after(-1);
        CHECK_EQ(st, FC_ERR_NOMEM);
        CHECK_STR(fc_last_message(), texts[n_units]);
        CHECK(m.domain == NULL);
        member_leave(&m);
    }
}

/* ---- what is given back ---- */

/* An arena goes once nobody reads there, and no other rank's; what is posted next is right. */
static void body_trim(int rank, int n_ranks, void *arg)
{
    model made = models[0];
    size_t arena;
    member m;

    (void)arg;
    describe(&made);
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, made.n_units, rank, n_ranks);
    arena = fc_domain_arena_bytes(m.domain);
    CHECK_EQ(fc_domain_trim(m.domain), arena);
    for (uint64_t round = 0; round < 4; round++) {
        const int poster = (int)round % n_ranks;

        member_open(&m, true, 11 + round);
        for (size_t u = 0; u < 2; u++) {
            m.planned[poster][u] = 1;
        }
        if (rank == poster) {
            CHECK_OK(member_post(&m, 0));
            CHECK_OK(member_post(&m, 1));
            CHECK_EQ(fc_domain_trim(m.domain), 0); /* nobody has read it */
        }
        CHECK_OK(ranks_exchange(&m.host, "posted", &rank, sizeof(rank), NULL));
        if (rank != poster) {
            CHECK_EQ(fc_domain_trim(m.domain), arena);
        }
        CHECK_OK(member_close(&m));
        CHECK_OK(ranks_exchange(&m.host, "read", &rank, sizeof(rank), NULL));
        CHECK_EQ(fc_domain_trim(m.domain), arena);
    }
    member_leave(&m);
}

/* What lies beside a rank's arena stays: shards of all ranks, and what others have posted. */
static void body_trim_beside(int rank, int n_ranks, void *arg)
{
    model made = models[1]; /* of whole pages */
    size_t arena;
    member m;

    (void)arg;
    describe(&made);
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, made.n_units, rank, n_ranks);
    arena = fc_domain_arena_bytes(m.domain);
    for (size_t u = 0; u < made.n_units; u++) {
        fc_unit *unit = fc_domain_unit(m.domain, u);
        const fc_param *p = &fc_unit_layout(unit)->params[(u + 1) % 2];

        memset(fc_unit_shard_storage(unit, (u + 1) % 2), 1 + rank, p->chunk_numel * sizeof(float));
    }
    CHECK_OK(ranks_exchange(&m.host, "written", &rank, sizeof(rank), NULL));
    for (int poster = 0; poster < n_ranks; poster++) {
        member_open(&m, true, 2);
        m.planned[poster][0] = 1;
        if (rank == poster) {
            CHECK_OK(member_post(&m, 0));
        }
        CHECK_OK(ranks_exchange(&m.host, "posted", &rank, sizeof(rank), NULL));
        CHECK_EQ(fc_domain_trim(m.domain), rank == poster ? 0 : arena);
        CHECK_OK(ranks_exchange(&m.host, "trimmed", &rank, sizeof(rank), NULL));
        CHECK_OK(member_close(&m)); /* compares the sums */
    }
    for (size_t u = 0; u < made.n_units; u++) {
        const fc_unit *unit = fc_domain_unit(m.domain, u);
        const fc_param *p = &fc_unit_layout(unit)->params[(u + 1) % 2];
        const char *full = (const char *)fc_unit_view(unit) + p->full_at;
        size_t n_wrong = 0;

        for (size_t k = 0; k < p->rows * p->inner * sizeof(float); k++) {
            n_wrong += full[k] != 1 + (char)(k / (p->chunk_rows * p->inner * sizeof(float)));
        }
        CHECK_EQ(n_wrong, 0);
    }
    CHECK_OK(ranks_exchange(&m.host, "read", &rank, sizeof(rank), NULL));
    member_leave(&m);
}

/* Copies of posts that are kept for the next ones go, of all units. */
static void body_trim_copies(int rank, int n_ranks, void *arg)
{
    model made = models[0];
    int64_t live;
    member m;

    (void)arg;
    describe(&made);
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, made.n_units, rank, n_ranks);
    live = fc_alloc_live();
    for (uint64_t round = 0; round < 2; round++) {
        member_open(&m, true, 3 + round);
        for (size_t u = 0; u < made.n_units; u++) {
            m.planned[0][u] = 1;
            if (rank == 0) {
                CHECK_OK(member_post(&m, u));
            }
        }
        CHECK_OK(ranks_exchange(&m.host, "posted", &rank, sizeof(rank), NULL));
        for (size_t u = 0; u < made.n_units && rank != 0; u++) {
            CHECK_OK(fc_exchange_make_way(fc_domain_unit(m.domain, u)));
        }
        CHECK_OK(member_close(&m));
        CHECK_EQ(fc_alloc_live(), live + (rank == 0 ? 0 : (int64_t)made.n_units));
        CHECK_EQ(fc_domain_trim(m.domain), fc_domain_arena_bytes(m.domain));
        CHECK_EQ(fc_alloc_live(), live);
        CHECK_OK(ranks_exchange(&m.host, "trimmed", &rank, sizeof(rank), NULL));
    }
    member_leave(&m);
}

static fc_status no_exchange(void *context, const char *what, const void *mine, size_t bytes,
                             void *all_out)
{
    (void)context, (void)what, (void)mine, (void)bytes, (void)all_out;
    return FC_ERR_UNSUPPORTED;
}

static fc_transport *connect_by_messages(int n_ranks)
{
    static int global_ranks[FC_MAX_RANKS + 1];
    const fc_transport_config config = {.name = "large group",
                                        .n_ranks = n_ranks,
                                        .global_ranks = global_ranks,
                                        .timeout_ns = FC_NS_PER_S,
                                        .host = {.exchange = no_exchange}};
    fc_transport *transport = NULL;

    CHECK_OR_EXIT(fc_callback_create(&config, &refused_messages, &transport) == FC_OK);
    return transport;
}

/* Over messages it is the memory of a batch. */
static void test_trim_batch(void)
{
    fc_transport *transport = connect_by_messages(2);
    fc_domain *domain = NULL;
    model m = models[0];
    int64_t live;
    char *parts;
    size_t pitch;

    describe(&m);
    m.units[0].n_params = m.units[1].n_params = m.units[2].n_params = 1; /* of one type */
    CHECK_OR_EXIT(fc_domain_create(transport, FC_DOMAIN_SHARD, m.units, m.n_units, 0, 2, &domain) ==
                  FC_OK);
    CHECK_EQ(fc_domain_region_bytes(domain), 0);
    CHECK_EQ(fc_domain_trim(domain), 0);
    fc_batch_limit(domain, (size_t)1 << 20);
    live = fc_account_bytes(FC_FOR_MESSAGES);
    CHECK_OK(fc_batch_add(fc_domain_unit(domain, 0), &parts, &pitch));
    CHECK(fc_account_bytes(FC_FOR_MESSAGES) > live);
    CHECK_EQ(fc_domain_trim(domain), 0);
    CHECK_EQ(fc_account_bytes(FC_FOR_MESSAGES), live);
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Posts that wait in a batch are of their phase: they go as it fails, or as the next one opens. */
static void test_dropped_batch(void)
{
    fc_transport *transport = connect_by_messages(2);
    const fc_opening opening = {FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN};
    fc_domain *domain = NULL;
    model m = models[0];
    char *parts;
    size_t pitch;

    describe(&m);
    m.units[0].n_params = m.units[1].n_params = m.units[2].n_params = 1;
    CHECK_OR_EXIT(fc_domain_create(transport, FC_DOMAIN_SHARD, m.units, m.n_units, 0, 2, &domain) ==
                  FC_OK);
    fc_batch_limit(domain, (size_t)1 << 20);
    for (int fails = 0; fails < 2; fails++) {
        fc_domain_open(domain, opening);
        CHECK(fc_batch_waiting(domain) == NULL);
        CHECK_OK(fc_batch_add(fc_domain_unit(domain, 0), &parts, &pitch));
        CHECK(fc_batch_waiting(domain) == domain);
        if (fails != 0) {
            fc_domain_fail(domain);
            CHECK(fc_batch_waiting(domain) == NULL);
        } else {
            CHECK_OK(fc_domain_close(domain));
        }
    }
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- domains of one root ---- */

#define N_LINKED 4

/* The domains that a search from each of them comes by, where posts wait in one of them. */
static void check_linked(fc_domain *const *domains, const int *root_of)
{
    for (int waiting = 0; waiting < N_LINKED; waiting++) {
        char *parts;
        size_t pitch;

        CHECK_OK(fc_batch_add(fc_domain_unit(domains[waiting], 0), &parts, &pitch));
        for (int from = 0; from < N_LINKED; from++) {
            CHECK_MSG((fc_batch_waiting(domains[from]) == domains[waiting]) ==
                          (root_of[from] == root_of[waiting]),
                      "from %d to %d", from, waiting);
        }
        fc_domain_fail(domains[waiting]);
        fc_domain_open(domains[waiting], (fc_opening){FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
    }
}

/* Open, with room for posts that wait. */
static fc_domain *make_waiting(fc_transport *transport, const fc_unit_desc *unit)
{
    fc_domain *domain = NULL;

    CHECK_OR_EXIT(fc_domain_create(transport, FC_DOMAIN_SHARD, unit, 1, 0, 2, &domain) == FC_OK);
    fc_batch_limit(domain, (size_t)1 << 20);
    fc_domain_open(domain, (fc_opening){FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
    return domain;
}

/* A domain is linked to those that it was named with last, and to no others. */
static void test_links(void)
{
    fc_transport *transport = connect_by_messages(2);
    fc_domain *d[N_LINKED];
    model m = models[0];
    char *parts;
    size_t pitch;

    describe(&m);
    m.units[0].n_params = 1;
    for (int i = 0; i < N_LINKED; i++) {
        d[i] = make_waiting(transport, &m.units[0]);
    }
    check_linked(d, (const int[]){0, 1, 2, 3});
    fc_domain_link(d, N_LINKED);
    check_linked(d, (const int[]){0, 0, 0, 0});
    fc_domain_link(d, 0);
    check_linked(d, (const int[]){0, 0, 0, 0});
    fc_domain_link(d, 2);
    check_linked(d, (const int[]){0, 0, 1, 1});
    fc_domain_link(d + 1, 2);
    check_linked(d, (const int[]){0, 1, 1, 2});
    fc_domain_link(d, 3);
    check_linked(d, (const int[]){0, 0, 0, 1});
    fc_domain_link(d, 1);
    check_linked(d, (const int[]){0, 1, 1, 2});
    fc_domain_link(d, 3);
    fc_domain_destroy(d[1]);
    d[1] = make_waiting(transport, &m.units[0]); /* where the other one was */
    CHECK_OK(fc_batch_add(fc_domain_unit(d[1], 0), &parts, &pitch));
    CHECK_OR_EXIT(fc_batch_waiting(d[0]) == NULL && fc_batch_waiting(d[2]) == NULL);
    fc_domain_fail(d[1]);
    fc_domain_open(d[1], (fc_opening){FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
    check_linked(d, (const int[]){0, 1, 0, 2});
    for (int i = 0; i < N_LINKED; i++) {
        fc_domain_destroy(d[i]);
    }
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- what is refused ---- */

static void test_many_ranks(void)
{
    fc_transport *transport = connect_by_messages(FC_MAX_RANKS + 1);
    fc_domain *domain = NULL;
    model m = models[0];

    describe(&m);
    CHECK_EQ(fc_domain_create(transport, FC_DOMAIN_SHARD, m.units, m.n_units, 0, 2, &domain),
             FC_ERR_UNSUPPORTED);
    CHECK_STR(fc_last_message(),
              "process group large group has 1025 ranks; at most 1024 are supported");
    fc_transport_destroy(transport);
    transport = connect_by_messages(FC_MAX_RANKS);
    CHECK_OK(
        fc_domain_create(transport, FC_DOMAIN_SHARD, m.units, m.n_units, 0, FC_MAX_RANKS, &domain));
    CHECK_EQ(fc_domain_n_ranks(domain), FC_MAX_RANKS);
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_broken(void)
{
    fc_transport *transport = connect_by_messages(2);
    fc_domain *domain = NULL;
    model m = models[0];

    describe(&m);
    CHECK_EQ(fc_transport_abort(transport, FC_ERR_SYSTEM, "it is broken"), FC_ERR_SYSTEM);
    CHECK_EQ(fc_domain_create(transport, FC_DOMAIN_SHARD, m.units, m.n_units, 0, 2, &domain),
             FC_ERR_BROKEN);
    CHECK(domain == NULL);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* One unit of messages that others look at makes the domain one; units may have no parameters. */
static void test_packed(void)
{
    fc_transport *transport = connect_by_messages(2);

    for (int which = 0; which < 3; which++) {
        fc_param param = make_param(1, 4, 4, FC_F32, true), packed = param;
        fc_unit_desc units[] = {{"empty", NULL, 0}, {"a", &param, 1}, {"b", &param, 1}};
        fc_domain *domain = NULL;

        packed.is_packed = true;
        if (which > 0) {
            units[which].params = &packed;
        }
        CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, units, 3, 0, 2, &domain));
        CHECK_EQ(fc_domain_is_packed(domain), which > 0);
        CHECK_EQ(fc_domain_is_visible(domain), which > 0);
        fc_domain_destroy(domain);
    }
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A clock is for messages, in a mapped transport, and there is one. */
static void body_clocks(int rank, int n_ranks, void *arg)
{
    fc_transport *transport = connect_by_messages(n_ranks), *other = connect_by_messages(n_ranks);
    const char *const text = "unit a: its ranks need no other clock";
    fc_domain *domain = NULL;
    model made = models[0];
    size_t bytes;
    member m;

    (void)arg;
    describe(&made);
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, made.n_units, rank, n_ranks);
    CHECK_EQ(fc_domain_watch(m.domain, m.transport), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), text);
    CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, made.units, made.n_units, 0, n_ranks,
                              &domain));
    CHECK_EQ(fc_domain_watch(domain, other), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), text);
    CHECK_EQ(fc_domain_region_bytes(domain), 0);
    CHECK_OK(fc_domain_watch(domain, m.transport));
    bytes = fc_domain_region_bytes(domain);
    CHECK(bytes > 0);
    CHECK_EQ(fc_domain_watch(domain, m.transport), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), text);
    CHECK_EQ(fc_domain_region_bytes(domain), bytes);
    fc_domain_destroy(domain);
    domain = NULL;
    CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, made.units, 0, 0, n_ranks, &domain));
    CHECK_EQ(fc_domain_watch(domain, other), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), "unit : its ranks need no other clock");
    fc_domain_destroy(domain);
    CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, made.units, 1, 0, n_ranks, &domain));
    CHECK_EQ(fc_domain_watch(domain, other), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), text);
    fc_domain_destroy(domain);
    domain = NULL;
    /* Ranks with other units are told. */
    CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, made.units, rank == 0 ? 1 : 2, 0, n_ranks,
                              &domain));
    CHECK_EQ(fc_domain_watch(domain, m.transport), FC_ERR_MISMATCH);
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    fc_transport_destroy(other);
    member_leave(&m);
}

/* Names of modules; those that are given last hold. */
static void test_openers(void)
{
    static const char *const first[] = {"Model", "Model.a"}, *const second[] = {"Other"};
    fc_transport *transport = connect_by_messages(2);
    fc_domain *domain = NULL;
    fc_status st = FC_ERR_NOMEM;
    model m = models[0];
    int64_t live;
    int n = 0;

    describe(&m);
    CHECK_OK(fc_domain_create(transport, FC_DOMAIN_SHARD, m.units, m.n_units, 0, 2, &domain));
    live = fc_alloc_live();
    CHECK_OK(fc_domain_name_openers(domain, second, 1));
    CHECK_EQ(fc_alloc_live(), live + 2);
    while (st != FC_OK) {
        fc_alloc_fail_after(n++);
        st = fc_domain_name_openers(domain, first, 2);
        fc_alloc_fail_after(-1);
        CHECK_EQ(st, st == FC_OK ? FC_OK : FC_ERR_NOMEM);
        CHECK_OR_EXIT(n < 10);
        if (n <= 3) {
            CHECK_STR(fc_last_message(), n == 1   ? "the names of 2 modules"
                                         : n == 2 ? "the name of module Model"
                                                  : "the name of module Model.a");
        }
    }
    CHECK_EQ(n, 4);
    CHECK_EQ(fc_alloc_live(), live + 3);
    CHECK_OK(fc_domain_name_openers(domain, second, 1));
    CHECK_EQ(fc_alloc_live(), live + 2);
    fc_domain_destroy(domain);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    test_plans();
    test_plans_without_memory();
    test_lanes();
    test_links();
    test_trim_batch();
    test_dropped_batch();
    test_many_ranks();
    test_broken();
    test_packed();
    test_openers();
    for (int n = 1; n <= 3; n++) {
        ranks_check(n, body_real, NULL);
    }
    for (int n = 2; n <= 3; n++) {
        ranks_check(n, body_other_shapes, NULL);
        ranks_check(n, body_refused, NULL);
        ranks_check(n, body_trim, NULL);
        ranks_check(n, body_trim_beside, NULL);
        ranks_check(n, body_trim_copies, NULL);
        ranks_check(n, body_clocks, NULL);
    }
    return check_result();
}
