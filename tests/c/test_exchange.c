/* The exchange: random histories of posts against serial sums, full arenas, failures, deaths. */
#define _GNU_SOURCE

#include "domains.h"

#include "engine/domain_private.h"

#define MAX_PARAMS 3
#define MAX_OPS (2 * DOMAINS_MAX_UNITS)

/* Values in ranks_common. */
enum {
    POSTED = 0,
    PIDS = 8
};

static const char *const names[DOMAINS_MAX_UNITS] = {"embed", "layers.0", "layers.1", "layers.2"};

/* Units of one test; equal on all ranks. */
typedef struct model {
    fc_param params[DOMAINS_MAX_UNITS][MAX_PARAMS];
    fc_unit_desc units[DOMAINS_MAX_UNITS];
    size_t n_units;
} model;

/* Parameters that are frozen at set-up have no room of their own: an arena of such units holds one
 * or two posts. */
static void make_model(model *out, size_t n_units, bool is_tight, uint64_t seed)
{
    static const fc_dtype types[] = {FC_F32, FC_F32, FC_BF16, FC_F64};

    *out = (model){.n_units = n_units};
    for (size_t u = 0; u < n_units; u++) {
        size_t n_params = 1 + mix(seed, u) % MAX_PARAMS;
        fc_dtype type = types[mix(seed, u + 100) % 4];

        for (size_t i = 0; i < n_params; i++) {
            uint64_t h = mix(mix(seed, u), i + 7);

            type = h % 5 == 0 ? types[(h >> 8) % 4] : type;
            out->params[u][i] = make_param(1 + (h >> 16) % 3, 1 + (h >> 24) % 9, 1 + (h >> 32) % 40,
                                           type, !is_tight && (h >> 40) % 8 != 0);
        }
        out->units[u] =
            (fc_unit_desc){names[u] == NULL ? "layers.n" : names[u], out->params[u], n_params};
    }
}

/* ---- random histories ---- */

typedef struct history {
    size_t n_units;
    bool is_tight;
    uint64_t seed;
    int steps;
    fc_domain_kind kind;
} history;

/* The order in which a rank posts its units in a phase: its own, some left out, some more often. */
static size_t plan(uint64_t seed, int rank, size_t n_units, size_t *ops)
{
    uint64_t h = mix(seed, 1000 + (uint64_t)rank);
    bool in_order = mix(seed, 5) % 4 == 0;
    size_t n = 0;

    for (size_t u = 0; u < n_units; u++) {
        uint64_t times = mix(h, u) % 8;

        times = times == 0 ? 0 : times < 6 ? 1 : times - 4;
        for (uint64_t k = 0; k < times && n < MAX_OPS; k++) {
            ops[n++] = u;
        }
    }
    for (size_t i = n; i > 1 && !in_order; i--) {
        size_t j = mix(h, i + 500) % i;
        size_t other = ops[j];

        ops[j] = ops[i - 1];
        ops[i - 1] = other;
    }
    return mix(h, 77) % 8 == 0 ? 0 : n;
}

static int backwards_of(uint64_t seed, int rank)
{
    return mix(seed, 300 + (uint64_t)rank) % 4 == 0 ? 1 : 2;
}

static int most_backwards(uint64_t step_seed, int n_ranks)
{
    int most = 0;

    for (int r = 0; r < n_ranks; r++) {
        most = backwards_of(step_seed, r) > most ? backwards_of(step_seed, r) : most;
    }
    return most;
}

static void play_backward(member *m, const history *h, uint64_t step_seed, int backward)
{
    size_t ops[MAX_OPS];
    uint64_t seed = mix(step_seed, (uint64_t)backward);
    size_t n;

    member_open(m, true, seed);
    for (int r = 0; r < m->n_ranks; r++) {
        n = backward <= backwards_of(step_seed, r) ? plan(seed, r, h->n_units, ops) : 0;
        for (size_t i = 0; i < n; i++) {
            m->planned[r][ops[i]]++;
        }
    }
    n = backward <= backwards_of(step_seed, m->rank) ? plan(seed, m->rank, h->n_units, ops) : 0;
    if (n > 0 && seed % 2 == 0) {
        CHECK_OK(fc_domain_ready(m->domain, fc_domain_unit(m->domain, ops[0])));
    }
    for (size_t i = 0; i < n; i++) {
        uint64_t luck = mix(mix(seed, i), 900 + (uint64_t)m->rank);

        if (luck % 16 == 0) {
            (void)usleep((useconds_t)(luck >> 8) % 400);
        }
        CHECK_OK(member_post(m, ops[i]));
        if (luck % 3 == 0) {
            CHECK_OK(member_finish_ready(m, FC_SEARCH_OLDEST));
        }
    }
    CHECK_OK(member_close(m));
}

static void body_history(int rank, int n_ranks, void *arg)
{
    const history *h = arg;
    member m;
    model made;

    member_join(&m, rank, n_ranks);
    make_model(&made, h->n_units, h->is_tight, h->seed);
    if (h->kind == FC_DOMAIN_REPLICATE) {
        /* All replicas of shard 1 of 3. */
        member_make_domain(&m, h->kind, made.units, h->n_units, 1, 3);
    } else {
        member_make_domain(&m, h->kind, made.units, h->n_units, rank, n_ranks);
    }
    for (int step = 0; step < h->steps; step++) {
        uint64_t seed = mix(h->seed, (uint64_t)step);

        CHECK_OK(member_forward(&m));
        /* Who has fewer posts nothing in the others'. */
        for (int b = 1; b <= most_backwards(seed, n_ranks) && n_ranks > 1; b++) {
            play_backward(&m, h, seed, b);
        }
    }
    member_leave(&m);
}

static void test_histories(fc_domain_kind kind)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        for (int n = 1; n <= RANKS_MAX; n++) {
            history tight = {2 + seed * 2, true, seed, 12, kind};
            history loose = {DOMAINS_MAX_UNITS, false, seed + 50, 2, kind};

            ranks_check(n, body_history, &tight);
            ranks_check(n, body_history, &loose);
        }
    }
}

/* ---- certain orders in full arenas ---- */

/* Each rank's posts; -1 ends them. */
typedef struct orders {
    int of_rank[RANKS_MAX][16];
} orders;

/* Units of which the arena holds `capacity`, all of the same size. */
static void make_equal(model *out, size_t n_units, size_t capacity, int n_ranks)
{
    size_t rows = (size_t)n_ranks;
    size_t inner = FC_PAGE / sizeof(float) / (size_t)n_ranks / capacity / 32 * 32;

    *out = (model){.n_units = n_units};
    for (size_t u = 0; u < n_units; u++) {
        out->params[u][0] = make_param(1, rows, inner, FC_F32, false);
        out->units[u] = (fc_unit_desc){names[u], out->params[u], 1};
    }
}

static void play_orders(member *m, const orders *o, uint64_t seed)
{
    member_open(m, true, seed);
    for (int r = 0; r < m->n_ranks; r++) {
        for (int i = 0; o->of_rank[r][i] >= 0; i++) {
            m->planned[r][o->of_rank[r][i]]++;
        }
    }
    for (int i = 0; o->of_rank[m->rank][i] >= 0; i++) {
        CHECK_OK(member_post(m, (size_t)o->of_rank[m->rank][i]));
    }
    CHECK_OK(member_close(m));
}

static void body_orders(int rank, int n_ranks, void *arg)
{
    member m;

    for (size_t capacity = 1; capacity <= 2; capacity++) {
        model made;

        member_join(&m, rank, n_ranks);
        make_equal(&made, 4, capacity, n_ranks);
        member_make_domain(&m, FC_DOMAIN_SHARD, made.units, made.n_units, rank, n_ranks);
        CHECK_EQ(fc_domain_arena_bytes(m.domain), FC_PAGE);
        for (uint64_t seed = 1; seed <= 10; seed++) {
            CHECK_OK(member_forward(&m));
            play_orders(&m, arg, seed);
        }
        member_leave(&m);
    }
}

static void test_orders(void)
{
    static orders opposite = {{{0, 1, 2, 3, -1}, {3, 2, 1, 0, -1}}};
    /* Who has nothing to post must read in whatever order the others need it. */
    static orders idle = {{{-1}, {0, 1, 2, 3, -1}, {3, 2, 1, 0, -1}, {1, 3, 0, 2, -1}}};
    static orders crossing = {{{0, 0, 0, 1, 2, -1}, {3, 3, 3, 2, 1, -1}}};
    static orders tangled = {
        {{0, 0, 2, 2, 3, 1, -1}, {1, 1, 3, 3, 2, 0, -1}, {2, 3, 3, 2, -1}, {1, 0, 1, 0, 1, -1}}};

    ranks_check(2, body_orders, &opposite);
    ranks_check(2, body_orders, &idle);
    ranks_check(3, body_orders, &idle);
    ranks_check(4, body_orders, &idle);
    ranks_check(2, body_orders, &crossing);
    ranks_check(3, body_orders, &tangled);
    ranks_check(4, body_orders, &tangled);
}

/* Units above the size up to which an arena holds all of them; rows do not divide by the ranks. */
static void body_large(int rank, int n_ranks, void *arg)
{
    static const orders opposite = {{{0, 1, 2, -1}, {2, 1, 0, -1}}};
    model made = {.n_units = 3};
    member m;

    (void)arg;
    for (size_t u = 0; u < 3; u++) {
        made.params[u][0] = make_param(1, 1001, 1051, FC_F32, true);
        made.params[u][1] = make_param(1, 3, 1, FC_F32, true);
        made.units[u] = (fc_unit_desc){names[u], made.params[u], 2};
    }
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 3, rank, n_ranks);
    CHECK(fc_domain_arena_bytes(m.domain) < 2 * 1003 * 1052 * sizeof(float));
    for (uint64_t seed = 1; seed <= 2; seed++) {
        CHECK_OK(member_forward(&m));
        play_orders(&m, &opposite, 2 * seed); /* all parameters present */
    }
    member_leave(&m);
}

static void body_too_large(int rank, int n_ranks, void *arg)
{
    model made;
    member m;
    char *parts = NULL;
    fc_unit *unit;

    (void)arg;
    member_join(&m, rank, n_ranks);
    make_equal(&made, 2, 1, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 2, rank, n_ranks);
    unit = fc_domain_unit(m.domain, 0);
    CHECK_OK(member_forward(&m));
    member_open(&m, true, 1);
    CHECK_EQ(fc_exchange_reserve(unit, FC_PAGE, FC_WIRE_REDUCE, &parts), FC_AGAIN);
    CHECK_EQ(fc_exchange_make_way(unit), FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "does not fit");
    CHECK_OK(member_close(&m));
    member_leave(&m);
}

/* Whether a rank's post has one of so many parameters: some of the first ones, and the last. */
static bool has_many(int rank, int n_ranks, size_t param, size_t n_params)
{
    return param + 1 == n_params || (param < 128 && (int)param % (n_ranks + 1) != rank);
}

static void check_many(member *m)
{
    for (int n = 0; n < 3; n++) {
        fc_source sources[RANKS_MAX];
        fc_unit *unit = NULL;
        size_t n_params;

        CHECK_OK(fc_exchange_next(m->domain, FC_SEARCH_ALL, &unit));
        CHECK_OR_EXIT(unit != NULL);
        n_params = fc_unit_layout(unit)->n_params;
        CHECK_OK(fc_exchange_sources(unit, sources));
        for (int r = 0; r < m->n_ranks; r++) {
            CHECK_OR_EXIT(sources[r].part != NULL);
            for (size_t i = 0; i < n_params; i++) {
                CHECK_EQ(sources[r].mask[i / 64] >> i % 64 & 1,
                         has_many(r, m->n_ranks, i, n_params));
            }
        }
        fc_exchange_consume(unit);
    }
}

/* A lane says which of its unit's parameters a post has, and who has read it, however many they
 * are; of the widest unit it is as long as a cache line, or longer. */
static void body_many_params(int rank, int n_ranks, void *arg)
{
    const bool is_longer = *(const bool *)arg;
    const size_t n_words = (FC_CACHE_LINE - sizeof(lane)) / sizeof(fc_word) - (size_t)n_ranks;
    const size_t n_params[] = {n_words * 64 + is_longer, 1, 65};
    fc_param *params = calloc(n_params[0], sizeof(*params));
    fc_unit_desc units[3];
    member m;

    CHECK_OR_EXIT(params != NULL);
    for (size_t i = 0; i < n_params[0]; i++) {
        params[i] = make_param(1, 4, 1, FC_F32, true);
    }
    for (size_t u = 0; u < 3; u++) {
        units[u] = (fc_unit_desc){"many", params, n_params[u]};
    }
    member_join(&m, rank, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, units, 3, rank, n_ranks);
    free(params);
    CHECK_OK(member_forward(&m));
    member_open(&m, true, 1);
    for (size_t u = 3; u-- > 0;) {
        fc_unit *unit = fc_domain_unit(m.domain, u);
        size_t bytes;
        char *parts;

        for (size_t i = 0; i < n_params[u]; i++) {
            if (has_many(rank, n_ranks, i, n_params[u])) {
                fc_exchange_set_present(unit, i);
            }
        }
        bytes = fc_unit_part_bytes(unit, FC_WIRE_REDUCE);
        CHECK_OK(fc_exchange_reserve(unit, bytes, FC_WIRE_REDUCE, &parts));
        memset(parts, 0, (size_t)n_ranks * bytes);
        fc_exchange_commit(unit);
    }
    fc_domain_mark_closed(m.domain);
    for (int turn = 0; turn < n_ranks; turn++) { /* what one has read the next one still reads */
        if (turn == rank) {
            check_many(&m);
        }
        CHECK_OK(ranks_exchange(&m.host, "turn", &rank, sizeof(rank), NULL));
    }
    CHECK_OK(fc_domain_close(m.domain));
    member_leave(&m);
}

/* A bit of what a rank says of its post has changed: its peer reads nothing there. */
static void body_changed_lane(int rank, int n_ranks, void *arg)
{
    const int bit = *(const int *)arg;
    fc_source sources[RANKS_MAX];
    model made;
    member m;
    lane *theirs;
    fc_unit *unit;
    uint64_t at;

    member_join(&m, rank, n_ranks);
    make_equal(&made, 1, 2, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 1, rank, n_ranks);
    unit = fc_domain_unit(m.domain, 0);
    CHECK_OK(member_forward(&m));
    member_open(&m, true, 2);
    for (int r = 0; r < n_ranks; r++) {
        m.planned[r][0] = 1;
    }
    if (rank == 0) { /* the other one waits for this rank's post */
        theirs = domain_lane(m.domain, 1, 0);
        while (fc_word_load(&theirs->tag) == 0) {
            (void)sched_yield();
        }
        for (uint64_t *word = &theirs->stage_at; word <= &theirs->wire; word++) {
            *word ^= UINT64_C(1) << bit;
            CHECK_EQ(fc_exchange_sources(unit, sources), FC_ERR_MISMATCH);
            CHECK_HAS(fc_last_message(), "what rank 11 says of its gradients");
            CHECK_EQ(fc_exchange_make_way(unit), FC_ERR_MISMATCH); /* nor is it copied away */
            CHECK_HAS(fc_last_message(), "what rank 11 says of its gradients");
            *word ^= UINT64_C(1) << bit;
        }
        at = theirs->stage_at; /* the last part alone does not fit */
        theirs->stage_at = m.domain->arena_bytes - theirs->part_bytes;
        CHECK_EQ(fc_exchange_sources(unit, sources), FC_ERR_MISMATCH);
        theirs->stage_at = at;
        CHECK_OK(fc_exchange_sources(unit, sources));
    }
    CHECK_OK(member_post(&m, 0));
    CHECK_OK(member_close(&m));
    member_leave(&m);
}

static void body_too_often(int rank, int n_ranks, void *arg)
{
    model made;
    member m;
    char *parts = NULL;

    (void)arg;
    member_join(&m, rank, n_ranks);
    make_equal(&made, 1, 2, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 1, rank, n_ranks);
    CHECK_OK(member_forward(&m));
    member_open(&m, true, 3);
    for (int r = 0; r < n_ranks; r++) {
        m.planned[r][0] = 255;
    }
    for (int i = 0; i < 255; i++) {
        CHECK_OK(member_post(&m, 0));
    }
    CHECK_EQ(fc_exchange_reserve(fc_domain_unit(m.domain, 0), 64, FC_WIRE_REDUCE, &parts),
             FC_ERR_STATE);
    CHECK_HAS(fc_last_message(), "255 times");
    CHECK_OK(member_close(&m));
    member_leave(&m);
}

/* ---- errors ---- */

/* Rank 0 keeps what the others reduce: every rank that gets there hears of it. */
static void body_held(int rank, int n_ranks, void *arg)
{
    bool is_early = *(const bool *)arg;
    model made;
    member m;

    member_join(&m, rank, n_ranks);
    make_model(&made, 3, false, 9);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 3, rank, n_ranks);
    for (uint64_t seed = 1; seed <= 3; seed++) {
        fc_status st = FC_ERR_MISMATCH;

        /* Rank 0 may go on once the others, who tell it why they have stopped, do. */
        member_open(&m, false, 0);
        while (st == FC_ERR_MISMATCH) {
            st = fc_domain_ready(m.domain, fc_domain_unit(m.domain, 0));
            if (st != FC_OK && rank == 0 && seed == 3) {
                CHECK_HAS(fc_last_message(), "rank 10 keeps the gradients");
                (void)usleep(100);
                continue;
            }
            CHECK_OK(st);
        }
        CHECK_OK(fc_domain_close(m.domain));
        member_open(&m, true, seed);
        for (int r = 0; r < n_ranks; r++) {
            m.planned[r][1] = seed == 2 && r == 0 ? 0 : 1;
        }
        if (rank == 0 && is_early) {
            (void)usleep(3000);
        }
        if (seed != 2) {
            CHECK_OK(member_post(&m, 1));
            CHECK_OK(member_close(&m));
            continue;
        }
        if (rank == 0) {
            fc_exchange_accumulate(fc_domain_unit(m.domain, 1));
        } else {
            CHECK_OK(member_post(&m, 1));
        }
        fc_domain_mark_closed(m.domain);
        CHECK_EQ(member_finish_ready(&m, FC_SEARCH_ALL), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "rank 10 keeps the gradients of unit layers.0");
        fc_domain_fail(m.domain);
        fc_exchange_reset(m.domain);
    }
    member_leave(&m);
}

/* Holding and never reducing is fine; so is holding one unit and reducing another. */
static void body_held_by_all(int rank, int n_ranks, void *arg)
{
    model made;
    member m;

    (void)arg;
    member_join(&m, rank, n_ranks);
    make_model(&made, 3, false, 9);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 3, rank, n_ranks);
    for (uint64_t seed = 1; seed <= 4; seed++) {
        CHECK_OK(member_forward(&m));
        member_open(&m, true, seed);
        for (int r = 0; r < n_ranks; r++) {
            m.planned[r][2] = 1;
            m.planned[r][1] = seed % 2 == 0;
        }
        CHECK_OK(member_post(&m, 2));
        if (seed % 2 == 0) {
            CHECK_OK(member_post(&m, 1));
        } else {
            fc_exchange_accumulate(fc_domain_unit(m.domain, 1));
        }
        CHECK_OK(member_close(&m));
    }
    member_leave(&m);
}

/* The last rank fails after some posts: peers hear of it at the end, and no room is lost however
 * often. */
static void body_failed_phase(int rank, int n_ranks, void *arg)
{
    static const orders all = {
        {{0, 1, 2, 3, -1}, {3, 2, 1, 0, -1}, {1, 2, 3, 0, -1}, {2, 0, 3, 1, -1}}};
    bool resets = *(const bool *)arg;
    bool is_victim = rank == n_ranks - 1;
    model made;
    member m;

    member_join(&m, rank, n_ranks);
    make_equal(&made, 4, 2, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 4, rank, n_ranks);
    for (uint64_t seed = 1; seed <= 12; seed++) {
        size_t n_by_victim = seed % 3;
        fc_status st = FC_OK;

        CHECK_OK(member_forward(&m));
        member_open(&m, true, seed);
        /* What all have posted may be reduced before the failure is seen. */
        for (int r = 0; r < n_ranks; r++) {
            for (size_t u = 0; u < (r == n_ranks - 1 ? n_by_victim : 4); u++) {
                m.planned[r][u] = 1;
            }
        }
        for (size_t i = 0; i < (is_victim ? n_by_victim : 4) && st == FC_OK; i++) {
            st = member_post(&m, is_victim ? i : 3 - i);
        }
        /* A slow rank may need room when the last one has failed already. */
        CHECK_MSG(st == FC_OK || (!is_victim && st == FC_ERR_PEER), "%s", fc_last_message());
        if (is_victim) {
            fc_domain_fail(m.domain);
            CHECK(!fc_domain_is_open(m.domain));
        } else {
            fc_domain_mark_closed(m.domain);
            st = st == FC_OK ? member_finish_ready(&m, FC_SEARCH_ALL) : st;
            st = st == FC_OK ? fc_domain_close(m.domain) : st;
            CHECK_EQ(st, FC_ERR_PEER);
            CHECK_HAS(fc_last_message(), n_ranks == 2 ? "rank 11 left the backward of step "
                                                      : " left the backward of step ");
            fc_domain_fail(m.domain);
        }
        if (resets) {
            fc_exchange_reset(m.domain);
        }
        CHECK_EQ(fc_transport_check(m.transport), FC_OK);
        /* The next phase of the same step works, and a full arena does. */
        play_orders(&m, &all, seed);
    }
    member_leave(&m);
}

/* A rank that completed a phase and failed the next one does no harm to who is still in the first.
 */
static void body_failed_later(int rank, int n_ranks, void *arg)
{
    model made;
    member m;

    (void)arg;
    member_join(&m, rank, n_ranks);
    make_model(&made, 2, false, 3);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 2, rank, n_ranks);
    CHECK_OK(member_forward(&m));
    member_open(&m, true, 4);
    for (int r = 0; r < n_ranks; r++) {
        m.planned[r][0] = m.planned[r][1] = 1;
    }
    CHECK_OK(member_post(&m, 0));
    CHECK_OK(member_post(&m, 1));
    if (rank == 0) {
        fc_domain_mark_closed(m.domain);
        CHECK(ranks_await(POSTED, n_ranks - 1));
        CHECK_OK(member_close(&m));
        member_open(&m, false, 0);
    } else {
        CHECK_OK(member_close(&m));
        member_open(&m, false, 0);
        if (rank == 1) {
            fc_domain_fail(m.domain);
        }
        atomic_fetch_add(&ranks_common->values[POSTED], 1);
    }
    if (rank != 1) {
        CHECK_EQ(fc_domain_close(m.domain), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "rank 11 left the forward of step 2");
    }
    CHECK_OK(member_forward(&m));
    member_leave(&m);
}

typedef struct awaited {
    member *members;
    int waits, fails;
} awaited;

/* Whoever waits for a peer hears at once that it has failed, even if another one is not there yet.
 */
static void body_failed_awaited(int rank, int n_ranks, void *arg)
{
    const awaited *what = arg;
    member *m = &what->members[rank]; /* shared: peers see who waits */
    const ranks_host *waiting = &what->members[what->waits].host;
    char text[128];
    fc_unit *unit = NULL;
    model made;

    for (int i = 0; i < 2; i++) {
        member_join(m, rank, n_ranks);
        make_equal(&made, 1, 2, n_ranks);
        member_make_domain(m, FC_DOMAIN_SHARD, made.units, 1, rank, n_ranks);
        CHECK_OK(member_forward(m));
        member_open(m, true, 2);
        CHECK_OK(ranks_exchange(&m->host, "all are here", &rank, sizeof(rank), NULL));
        if (rank == what->waits) {
            if (i == 0) {
                CHECK_OK(member_post(m, 0));
                CHECK_EQ(fc_exchange_await(fc_domain_unit(m->domain, 0)), FC_ERR_PEER);
            } else {
                fc_domain_mark_closed(m->domain);
                CHECK_EQ(fc_exchange_next(m->domain, FC_SEARCH_ALL, &unit), FC_ERR_PEER);
            }
            (void)snprintf(text, sizeof(text),
                           "rank %d left the backward of step 1 by an exception while rank %d was "
                           "in reduce-scatter of unit embed",
                           10 + what->fails, 10 + what->waits);
            CHECK_HAS(fc_last_message(), text);
        } else if (rank == what->fails) {
            while (__atomic_load_n(&waiting->entered, __ATOMIC_RELAXED) == 0) {
                (void)usleep(100);
            }
        }
        if (rank != 1) {
            fc_domain_fail(m->domain);
        }
        CHECK_OK(ranks_exchange(&m->host, "all have failed", &rank, sizeof(rank), NULL));
        fc_domain_fail(m->domain);
        member_leave(m);
    }
}

static void test_failed_awaited(void)
{
    member *members =
        mmap(NULL, 3 * sizeof(*members), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    CHECK_OR_EXIT(members != MAP_FAILED);
    ranks_check(3, body_failed_awaited, &(awaited){members, 0, 2});
    ranks_check(3, body_failed_awaited, &(awaited){members, 2, 0});
    CHECK_EQ(munmap(members, 3 * sizeof(*members)), 0);
}

/* Posts until somebody kills the last rank, at any instant. */
static void body_death(int rank, int n_ranks, void *arg)
{
    useconds_t delay_us = *(const useconds_t *)arg;
    history h = {6, true, 11, 0, FC_DOMAIN_SHARD};
    fc_status st = FC_OK;
    model made;
    member m;
    char victim[32];
    char *parts = NULL;

    member_join(&m, rank, n_ranks);
    make_model(&made, h.n_units, true, h.seed);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, h.n_units, rank, n_ranks);
    if (rank == n_ranks - 1) {
        pid_t victim_pid = getpid();
        pid_t killer = fork();

        if (killer == 0) {
            (void)usleep(delay_us);
            (void)kill(victim_pid, SIGKILL);
            _exit(0);
        }
    }
    for (uint64_t step = 0; st == FC_OK; step++) {
        size_t ops[MAX_OPS];
        size_t n;

        st = member_forward(&m);
        member_open(&m, true, mix(7, step));
        for (int r = 0; r < n_ranks; r++) {
            n = plan(m.seed, r, h.n_units, ops);
            for (size_t i = 0; i < n; i++) {
                m.planned[r][ops[i]]++;
            }
        }
        n = plan(m.seed, rank, h.n_units, ops);
        for (size_t i = 0; i < n && st == FC_OK; i++) {
            st = member_post(&m, ops[i]);
        }
        if (st == FC_OK) {
            fc_domain_mark_closed(m.domain);
            st = member_finish_ready(&m, FC_SEARCH_ALL);
        }
        st = st == FC_OK ? fc_domain_close(m.domain) : st;
    }
    CHECK_MSG(st == FC_ERR_PEER || st == FC_ERR_BROKEN, "%s", fc_status_text(st));
    (void)snprintf(victim, sizeof(victim), "rank %d (pid ", 10 + n_ranks - 1);
    CHECK_HAS(fc_last_message(), victim);
    CHECK_EQ(fc_transport_check(m.transport), FC_ERR_BROKEN);
    CHECK_EQ(fc_exchange_reserve(fc_domain_unit(m.domain, 0), 64, FC_WIRE_REDUCE, &parts),
             FC_ERR_BROKEN);
    member_leave(&m);
}

static void test_deaths(void)
{
    for (useconds_t i = 0; i < 9; i++) {
        useconds_t delay_us = 500 + 1700 * i;
        int n = 2 + (int)i % 3;
        int statuses[RANKS_MAX];

        ranks_run(n, body_death, &delay_us, statuses);
        CHECK_EQ(statuses[n - 1], SIGKILL);
        for (int r = 0; r < n - 1; r++) {
            CHECK_MSG(statuses[r] == 0, "rank %d of %d, %u us: %#x", r, n, (unsigned)delay_us,
                      (unsigned)statuses[r]);
        }
    }
}

/* ---- growth ---- */

/* Copies that were spilled are used again; after some phases nothing is allocated any more. */
static void body_growth(int rank, int n_ranks, void *arg)
{
    static const orders opposite = {
        {{0, 1, 2, 3, 0, -1}, {3, 2, 1, 0, 3, -1}, {-1}, {1, 0, 3, 2, -1}}};
    int64_t live = 0;
    int descriptors = 0;
    model made;
    member m;

    (void)arg;
    member_join(&m, rank, n_ranks);
    make_equal(&made, 4, 1, n_ranks);
    member_make_domain(&m, FC_DOMAIN_SHARD, made.units, 4, rank, n_ranks);
    for (int phase = 0; phase < 200; phase++) {
        CHECK_OK(member_forward(&m));
        play_orders(&m, &opposite, (uint64_t)phase);
        if (phase == 0) {
            live = fc_alloc_live();
            descriptors = count_descriptors();
        }
        CHECK_EQ(count_descriptors(), descriptors);
    }
    /* At most one copy of each post that a rank can have copied away at once. */
    CHECK(fc_alloc_live() <= live + 5 * n_ranks);
    CHECK_EQ(count_segments(), 3); /* the control segment, and the domain's region twice */
    member_leave(&m);
}

int main(void)
{
    static bool yes = true;
    static bool no = false;

    for (int n = 2; n <= 3; n++) {
        ranks_check(n, body_many_params, &yes);
        ranks_check(n, body_many_params, &no);
    }
    test_orders();
    test_histories(FC_DOMAIN_SHARD);
    test_histories(FC_DOMAIN_REPLICATE);
    ranks_check(2, body_large, NULL);
    for (int n = 2; n <= RANKS_MAX; n++) {
        ranks_check(n, body_too_large, NULL);
        ranks_check(n, body_held, &yes);
        ranks_check(n, body_held, &no);
        ranks_check(n, body_held_by_all, NULL);
        ranks_check(n, body_failed_phase, &yes);
        ranks_check(n, body_failed_phase, &no);
        ranks_check(n, body_failed_later, NULL);
        ranks_check(n, body_growth, NULL);
    }
    test_failed_awaited();
    ranks_check(2, body_too_often, NULL);
    for (int bit = 2; bit < 64; bit++) {
        if (bit < 6 || bit > 12) { /* others may be another place in the arenas */
            ranks_check(2, body_changed_lane, &bit);
        }
    }
    test_deaths();
    return check_result();
}
