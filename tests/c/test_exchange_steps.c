/* The exchange step by step: where posts lie, what is offered when, what makes way for what; two
 * ranks that take turns. */
#define _GNU_SOURCE

#include "domains.h"

#include "engine/domain_private.h"

#define N_UNITS 4
#define N_RANKS 2
#define MAX_DOMAINS 2
#define LARGE ((size_t)1 << 15) /* elements of a part whose copies are not kept */

static const char *const names[N_UNITS] = {"first", "second", "third", "fourth"};

/* One rank. */
typedef struct world {
    ranks_host host;
    fc_transport *transports[MAX_DOMAINS];
    fc_domain *domains[MAX_DOMAINS];
    size_t n_domains;
    size_t numel; /* of a part; an arena holds two posts, or one of half its size more */
    int rank;
} world;

static void join_domain(world *w, size_t d)
{
    fc_param param = make_param(1, N_RANKS, w->numel, FC_F32, w->numel == LARGE);
    fc_unit_desc units[N_UNITS];
    const fc_transport_config config =
        ranks_config(&w->host, 0, w->rank, N_RANKS, DOMAINS_TIMEOUT_NS);

    for (size_t u = 0; u < N_UNITS; u++) {
        units[u] = (fc_unit_desc){names[u], &param, 1};
    }
    CHECK_OK(fc_shm_create(&config, &w->transports[d]));
    CHECK_OK(fc_domain_create(w->transports[d], FC_DOMAIN_SHARD, units, N_UNITS, w->rank, N_RANKS,
                              &w->domains[d]));
    if (w->numel != LARGE) {
        CHECK_EQ(fc_domain_arena_bytes(w->domains[d]), FC_PAGE);
    }
}

/* Behind the words of the last rank lies what looks like those of one more: nobody reads it. */
static void write_behind(const fc_domain *domain)
{
    clock_line *line = domain_clock(domain, N_RANKS);

    line->failed.value = UINT64_MAX;
    line->stuck.value = 1;
    for (size_t u = 0; u < N_UNITS; u++) {
        lane *l = domain_lane(domain, N_RANKS, u);

        l->tag.value = domain->clock | 1;
        l->accumulated_in = phase_of(domain->clock);
    }
}

static void open(world *w, fc_phase phase)
{
    for (size_t d = 0; d < w->n_domains; d++) {
        fc_domain_open(w->domains[d], (fc_opening){.phase = phase});
        write_behind(w->domains[d]);
    }
}

static void join(world *w, int rank, size_t n_domains, size_t numel)
{
    (void)alarm(DOMAINS_WATCHDOG_S);
    *w = (world){.rank = rank, .n_domains = n_domains, .numel = numel};
    for (size_t d = 0; d < n_domains; d++) {
        join_domain(w, d);
    }
    fc_domain_link(w->domains, n_domains);
    open(w, FC_PHASE_FORWARD);
    for (size_t d = 0; d < n_domains; d++) {
        CHECK_OK(fc_domain_close(w->domains[d]));
    }
    open(w, FC_PHASE_BACKWARD);
}

static void leave(world *w)
{
    for (size_t d = w->n_domains; d-- > 0;) {
        fc_domain_destroy(w->domains[d]);
        fc_transport_destroy(w->transports[d]);
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

/* All ranks are here. */
static void meet_all(world *w)
{
    CHECK_OK(ranks_exchange(&w->host, "turn", &w->rank, sizeof(w->rank), NULL));
}

/* ---- what a rank does ---- */

/* Where in the arena the post came to lie; negative: a status. Rank r gets value + r. */
static int64_t put_in(world *w, size_t d, size_t u, float value)
{
    fc_unit *unit = fc_domain_unit(w->domains[d], u);
    char *parts = NULL;
    size_t part_bytes;
    fc_status st;

    fc_exchange_set_present(unit, 0);
    part_bytes = fc_unit_part_bytes(unit, FC_WIRE_REDUCE);
    CHECK_EQ(part_bytes, w->numel * sizeof(float));
    st = fc_exchange_reserve(unit, part_bytes, FC_WIRE_REDUCE, &parts);
    if (st != FC_OK) {
        return st;
    }
    for (size_t i = 0; i < N_RANKS * w->numel; i++) {
        ((float *)(void *)parts)[i] = value + (float)(i / w->numel);
    }
    CHECK(fc_exchange_is_present(unit, 0));
    fc_exchange_commit(unit);
    CHECK(!fc_exchange_is_present(unit, 0));
    return parts - domain_arena(w->domains[d], w->rank);
}

static int64_t put(world *w, size_t u, float value)
{
    return put_in(w, 0, u, value);
}

static size_t index_of(const fc_unit *unit)
{
    return unit == NULL ? N_UNITS : unit->index;
}

/* The unit that is offered; N_UNITS: none. */
static size_t next_in(world *w, size_t d, fc_search search)
{
    fc_unit *unit = NULL;

    CHECK_OK(fc_exchange_next(w->domains[d], search, &unit));
    return index_of(unit);
}

static size_t next(world *w, fc_search search)
{
    return next_in(w, 0, search);
}

/* What each rank has posted; 0: nothing. Then it is done with. */
static void take(world *w, size_t d, size_t u, float of_first, float of_second)
{
    const float expected[N_RANKS] = {of_first, of_second};
    fc_source sources[N_RANKS];
    fc_unit *unit = fc_domain_unit(w->domains[d], u);

    CHECK_OK(fc_exchange_sources(unit, sources));
    for (int r = 0; r < N_RANKS; r++) {
        const float *part = (const float *)(const void *)sources[r].part;

        CHECK_EQ(part != NULL, expected[r] != 0);
        CHECK(sources[r].grads == NULL);
        for (size_t i = 0; part != NULL && i < w->numel; i++) {
            if (part[i] != expected[r] + (float)w->rank) {
                CHECK_MSG(false, "rank %d of unit %zu [%zu]: %g", r, u, i, (double)part[i]);
                break;
            }
        }
        CHECK(part == NULL || (sources[r].mask[0] == 1 && sources[r].wire == FC_WIRE_REDUCE));
    }
    fc_exchange_consume(unit);
}

/* All that is left, in whatever order: the units from `first` on, and twice those with `more`. */
static void take_all(world *w, size_t d, size_t first, float (*values)[N_RANKS],
                     float (*more)[N_RANKS])
{
    int n_taken[N_UNITS] = {0};
    size_t u;

    while ((u = next_in(w, d, FC_SEARCH_ALL)) < N_UNITS) {
        const float *value = n_taken[u]++ == 0 ? values[u] : more[u];

        take(w, d, u, value[0], value[1]);
    }
    for (u = 0; u < N_UNITS; u++) {
        const bool has_more = more != NULL && (more[u][0] != 0 || more[u][1] != 0);

        CHECK_EQ(n_taken[u], u < first ? 0 : 1 + has_more);
    }
}

static fc_status make_way(world *w, size_t d, size_t u)
{
    return fc_exchange_make_way(fc_domain_unit(w->domains[d], u));
}

/* The number of the peer's post of a unit in this phase that this rank has read or copied away. */
static uint64_t has_read(const world *w, size_t d, size_t u)
{
    const fc_domain *domain = w->domains[d];
    const uint64_t tag = fc_word_load(lane_consumed(domain_lane(domain, w->rank, u), 1 - w->rank));

    return phase_of(tag) == phase_of(domain->clock) ? tag & STATE_MASK : 0;
}

#define HALF ((int64_t)FC_PAGE / 2)
#define USUAL (FC_PAGE / 2 / N_RANKS / sizeof(float))

/* ---- tests ---- */

/* Posts follow one another round the arena; room comes back in their order, when all have read it.
 */
static void body_places(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    for (int phase = 0; phase < 3; phase++) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(put(&w, 0, 10), FC_AGAIN); /* one post of a unit at a time */
        CHECK_EQ(put(&w, 1, 20), HALF);
        CHECK_EQ(put(&w, 2, 30), FC_AGAIN); /* it is full */
        meet_all(&w);
        if (rank == 0) {
            CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 0);
            take(&w, 0, 0, 10, 10);
            CHECK_EQ(put(&w, 2, 30), FC_AGAIN); /* the other rank has not read it */
        }
        meet_all(&w);
        if (rank == 1) {
            CHECK_EQ(next(&w, FC_SEARCH_OWN), 0);
            CHECK_EQ(put(&w, 2, 30), FC_AGAIN); /* this one has not */
            CHECK_EQ(put(&w, 0, 40), FC_AGAIN);
            take(&w, 0, 0, 10, 10);
            CHECK_EQ(put(&w, 2, 30), 0);
        }
        meet_all(&w);
        if (rank == 0) {
            CHECK_EQ(put(&w, 2, 30), 0);
        }
        CHECK_EQ(put(&w, 3, 40), FC_AGAIN); /* in front of the second post is no room left */
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 1);
        take(&w, 0, 1, 20, 20);
        meet_all(&w);
        CHECK_EQ(put(&w, 3, 40), HALF);
        CHECK_EQ(put(&w, 0, 50), FC_AGAIN);
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        take_all(&w, 0, 2, (float[N_UNITS][N_RANKS]){{0}, {0}, {30, 30}, {40, 40}}, NULL);
        CHECK_OK(fc_domain_close(w.domains[0]));
        meet_all(&w);
        open(&w, FC_PHASE_BACKWARD); /* all of it is free */
        meet_all(&w);
    }
    leave(&w);
}

/* What is left between the newest and the oldest post is room to the last byte. */
static void body_gaps(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL / 2);
    for (size_t u = 0; u < N_UNITS; u++) {
        CHECK_EQ(put(&w, u, 10), (int64_t)u * HALF / 2);
    }
    meet_all(&w);
    for (size_t u = 0; u < 2; u++) {
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), u);
        take(&w, 0, u, 10, 10);
    }
    meet_all(&w);
    CHECK_EQ(put(&w, 0, 20), 0);
    CHECK_EQ(put(&w, 1, 20), HALF / 2);
    fc_domain_mark_closed(w.domains[0]);
    take_all(&w, 0, 0, (float[N_UNITS][N_RANKS]){{20, 20}, {20, 20}, {10, 10}, {10, 10}}, NULL);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* The oldest post alone, all of this rank's, whatever any rank has; and the gaps of who has none.
 */
static void body_searches(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL / 4);
    if (rank == 0) {
        for (size_t u = 0; u < 3; u++) {
            CHECK_EQ(put(&w, u, 10), (int64_t)u * HALF / 4);
        }
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        meet_all(&w); /* the other one has posted the second */
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 1);
        take(&w, 0, 1, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        meet_all(&w); /* and the first */
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 0);
        take(&w, 0, 0, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        meet_all(&w);
        meet_all(&w); /* and the fourth, and has left */
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 2);
        take(&w, 0, 2, 10, 0);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 3);
        take(&w, 0, 3, 0, 20);
    } else {
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS); /* the others' are for the end */
        CHECK_EQ(put(&w, 1, 20), 0);
        meet_all(&w);
        meet_all(&w);
        CHECK_EQ(put(&w, 0, 20), HALF / 4);
        meet_all(&w);
        meet_all(&w);
        CHECK_EQ(put(&w, 3, 20), HALF / 2);
        fc_domain_mark_closed(w.domains[0]);
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 1);
        take(&w, 0, 1, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), 0);
        take(&w, 0, 0, 10, 20);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS); /* the third is not its own */
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 2);
        take(&w, 0, 2, 10, 0);
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 3);
        take(&w, 0, 3, 0, 20);
    }
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* Peers' posts are copied away first, one at a time, then this rank's own part. Copies are used
 * again, unless they are large. */
static void body_copies(int rank, int n_ranks, void *arg)
{
    const bool is_large = arg != NULL;
    const size_t mine = rank == 0 ? 0 : 2, theirs = 2 - mine;
    const float value = rank == 0 ? 10 : 20;
    int64_t live;
    world w;

    (void)n_ranks;
    join(&w, rank, 1, is_large ? LARGE : USUAL);
    live = fc_alloc_live();
    for (int phase = 0; phase < 3; phase++) {
        CHECK(put(&w, mine, value) >= 0);
        CHECK(put(&w, mine + 1, value) >= 0);
        CHECK_EQ(put(&w, mine, value + 5), FC_AGAIN);
        meet_all(&w);
        for (uint64_t n = 0; n < 2; n++) {
            CHECK_EQ(has_read(&w, 0, theirs + n), 0);
            if (phase == 0) {
                fc_alloc_fail_after(0);
                CHECK_EQ(make_way(&w, 0, mine), FC_ERR_NOMEM);
                fc_alloc_fail_after(-1);
                CHECK_HAS(fc_last_message(), rank == 0 ? "copy rank 11's" : "copy rank 10's");
                CHECK_HAS(fc_last_message(), names[theirs + n]);
            }
            fc_alloc_fail_after(phase == 0 || is_large ? -1 : 0);
            CHECK_OK(make_way(&w, 0, mine));
            fc_alloc_fail_after(-1);
            CHECK_EQ(has_read(&w, 0, theirs + n), 1);
        }
        CHECK_EQ(put(&w, mine, value + 5), FC_AGAIN);
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, mine));
        CHECK_EQ(fc_alloc_live() - live, 3);
        meet_all(&w);
        CHECK_EQ(put(&w, mine, value + 5) > 0, is_large); /* of which more fit in */
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        meet_all(&w);
        fc_domain_mark_closed(w.domains[0]);
        meet_all(&w);
        take_all(&w, 0, 0, (float[N_UNITS][N_RANKS]){{10, 0}, {10, 0}, {0, 20}, {0, 20}},
                 (float[N_UNITS][N_RANKS]){{15, 0}, {0}, {0, 25}, {0}});
        CHECK_EQ(fc_alloc_live() - live, is_large ? 0 : 3);
        CHECK_OK(fc_domain_close(w.domains[0]));
        meet_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        meet_all(&w);
    }
    (void)fc_domain_trim(w.domains[0]);
    CHECK_EQ(fc_alloc_live(), live);
    leave(&w);
}

/* A post that everybody has copied away is offered all the same, though not as the oldest one. */
static void body_left_arena(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 0) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(put(&w, 1, 20), HALF);
        meet_all(&w);
        meet_all(&w); /* the other one has copied both away */
        CHECK_OK(make_way(&w, 0, 2));
        CHECK_EQ(put(&w, 2, 30), 0);
        CHECK_OK(make_way(&w, 0, 3));
        CHECK_EQ(put(&w, 3, 40), HALF);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        for (size_t u = 2; u-- > 0;) {
            meet_all(&w);
            meet_all(&w); /* and has posted this one */
            CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
            CHECK_EQ(next(&w, FC_SEARCH_OWN), u);
            take(&w, 0, u, 10 * (float)(u + 1), 50);
        }
    } else {
        meet_all(&w);
        CHECK_OK(make_way(&w, 0, 0));
        CHECK_OK(make_way(&w, 0, 0));
        meet_all(&w);
        for (size_t u = 2; u-- > 0;) {
            meet_all(&w);
            CHECK(put(&w, u, 50) >= 0);
            meet_all(&w);
        }
    }
    fc_domain_mark_closed(w.domains[0]);
    take_all(&w, 0, rank == 0 ? 2 : 0,
             (float[N_UNITS][N_RANKS]){{10, 50}, {20, 50}, {30, 0}, {40, 0}}, NULL);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* Who waits for room in one domain copies away what waits in another one of the root. */
static void body_two_domains(int rank, int n_ranks, void *arg)
{
    const size_t mine = (size_t)rank, other = 1 - mine;
    float values[N_UNITS][N_RANKS] = {{0}};
    size_t u;
    int n_taken = 0;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 2, USUAL);
    CHECK_EQ(put_in(&w, mine, 0, 10), 0);
    CHECK_EQ(put_in(&w, mine, 1, 20), HALF);
    CHECK_EQ(put_in(&w, mine, 2, 30), FC_AGAIN);
    meet_all(&w);
    for (u = 0; u < 2; u++) {
        CHECK_EQ(has_read(&w, other, u), 0);
        CHECK_OK(make_way(&w, mine, 2));
        CHECK_EQ(has_read(&w, other, u), 1);
    }
    meet_all(&w);
    CHECK_OK(make_way(&w, mine, 2)); /* its own part */
    meet_all(&w);
    CHECK_EQ(put_in(&w, mine, 2, 30), 0);
    for (size_t d = 0; d < 2; d++) {
        fc_domain_mark_closed(w.domains[d]);
    }
    for (size_t d = 0; d < 2; d++) {
        for (u = 0; u < 3; u++) {
            values[u][d] = 10 * (float)(u + 1);
            values[u][1 - d] = 0;
        }
        while ((u = next_in(&w, d, FC_SEARCH_ALL)) < N_UNITS) {
            take(&w, d, u, values[u][0], values[u][1]);
            n_taken++;
        }
    }
    CHECK_EQ(n_taken, 2 * 3);
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

typedef struct stuck {
    size_t in;
    int rank;
} stuck;

/* Who is at the end of one domain reads for a peer that is stuck in another one. */
static void body_stuck(int rank, int n_ranks, void *arg)
{
    const stuck *peer = arg;
    float values[N_UNITS][N_RANKS] = {{0}};
    world w;

    (void)n_ranks;
    join(&w, rank, 2, USUAL);
    if (rank != peer->rank) {
        fc_domain_mark_closed(w.domains[0]);
    }
    for (size_t u = 0; u < N_UNITS; u++) {
        values[u][peer->rank] = 10 * (float)(u + 1);
        while (rank == peer->rank && put_in(&w, peer->in, u, values[u][rank]) == FC_AGAIN) {
            CHECK_EQ(fc_word_load(&domain_clock(w.domains[peer->in], rank)->stuck) % 2, 0);
            CHECK_OK(make_way(&w, peer->in, u));
        }
    }
    fc_domain_mark_closed(w.domains[0]);
    for (size_t d = 0; d < 2; d++) {
        fc_domain_mark_closed(w.domains[d]);
        take_all(&w, d, d == peer->in ? 0 : N_UNITS, values, NULL);
    }
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

/* Who waits at the end of one domain leaves what waits in another one where it lies, unless a peer
 * is stuck. */
static void body_not_stuck(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 2, USUAL);
    if (rank == 1) {
        CHECK_EQ(put_in(&w, 1, 0, 10), 0);
        meet_all(&w);
        (void)usleep(2000);
    } else {
        meet_all(&w);
    }
    fc_domain_mark_closed(w.domains[0]);
    CHECK_EQ(next_in(&w, 0, FC_SEARCH_ALL), N_UNITS);
    CHECK_EQ(has_read(&w, 1, 0), 0);
    fc_domain_mark_closed(w.domains[1]);
    CHECK_EQ(next_in(&w, 1, FC_SEARCH_ALL), 0);
    take(&w, 1, 0, 0, 10);
    CHECK_EQ(next_in(&w, 1, FC_SEARCH_ALL), N_UNITS);
    for (size_t d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_close(w.domains[d]));
    }
    leave(&w);
}

/* Who posts and leaves the phase by an exception is an error at the end alone; what was posted
 * before a reset is never offered. */
static void body_failed(int rank, int n_ranks, void *arg)
{
    const int failing = *(const int *)arg;
    fc_unit *unit = NULL;
    world w;

    (void)n_ranks;
    join(&w, rank, 1, USUAL);
    CHECK_EQ(put(&w, 2, 10), 0);
    fc_exchange_set_present(fc_domain_unit(w.domains[0], 3), 0);
    meet_all(&w);
    if (rank == failing) {
        fc_domain_fail(w.domains[0]);
    }
    meet_all(&w);
    if (rank != failing) {
        CHECK_EQ(next(&w, FC_SEARCH_OLDEST), N_UNITS);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_ALL, &unit), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), failing == 1 ? "rank 11 left the backward of step 1 by an "
                                                    "exception while rank 10 was in "
                                                    "reduce-scatter of unit third"
                                                  : "rank 10 left the backward of step 1 by an "
                                                    "exception while rank 11 was in "
                                                    "reduce-scatter of unit third");
        fc_domain_fail(w.domains[0]);
    }
    fc_exchange_reset(w.domains[0]);
    CHECK(!fc_exchange_is_present(fc_domain_unit(w.domains[0], 3), 0));
    meet_all(&w);
    if (rank ==
        failing) { /* who has failed reads no more: the other one has room before it goes on */
        meet_all(&w);
    }
    open(&w, FC_PHASE_BACKWARD);
    CHECK_EQ(put(&w, 2, 30), 0);
    CHECK_EQ(put(&w, 0, 40), HALF);
    if (rank != failing) {
        meet_all(&w);
    }
    meet_all(&w);
    CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 2);
    take(&w, 0, 2, 30, 30);
    fc_domain_mark_closed(w.domains[0]);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), 0);
    take(&w, 0, 0, 40, 40);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* Who has gone on without this backward is named by whoever adds up in it. */
static void body_skipped(int rank, int n_ranks, void *arg)
{
    fc_unit *unit = NULL;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    fc_domain_mark_closed(w.domains[0]);
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    open(&w, rank == 0 ? FC_PHASE_BACKWARD : FC_PHASE_FORWARD);
    meet_all(&w);
    if (rank == 0) {
        CHECK_EQ(put(&w, 0, 10), 0);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_OWN, &unit), FC_ERR_MISMATCH);
        CHECK_HAS(fc_last_message(), "ranks are out of step at unit first: rank 11 went on to the "
                                     "forward of step 2 without the backward of step 1 (number 2 "
                                     "of it) that rank 10 is in");
    }
    meet_all(&w);
    fc_domain_fail(w.domains[0]);
    leave(&w);
}

/* A unit is told apart from others by who keeps its gradients, and in which step. */
static void body_kept(int rank, int n_ranks, void *arg)
{
    fc_unit *unit = NULL;
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    CHECK_EQ(put(&w, 0, 10), 0);
    CHECK_EQ(put(&w, 1, 10), HALF);
    if (rank == 1) {
        fc_exchange_accumulate(fc_domain_unit(w.domains[0], 1));
    }
    meet_all(&w);
    CHECK_EQ(next(&w, FC_SEARCH_OLDEST), 0);
    take(&w, 0, 0, 10, 10);
    meet_all(&w);
    if (rank == 1) { /* which hears of it from the other one */
        meet_all(&w);
        CHECK_EQ(next(&w, FC_SEARCH_OWN), N_UNITS);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_ALL, &unit), FC_ERR_MISMATCH);
    } else {
        CHECK_EQ(fc_exchange_next(w.domains[0], FC_SEARCH_OWN, &unit), FC_ERR_MISMATCH);
    }
    CHECK_HAS(fc_last_message(), "rank 11 keeps the gradients of unit second");
    CHECK_HAS(fc_last_message(), "in step 1;");
    if (rank == 0) {
        CHECK_EQ(fc_exchange_await(fc_domain_unit(w.domains[0], 1)), FC_ERR_MISMATCH);
        fc_domain_fail(w.domains[0]);
        meet_all(&w);
    }
    meet_all(&w);
    fc_domain_fail(w.domains[0]);
    fc_exchange_reset(w.domains[0]);
    leave(&w);
}

/* Waits for who has to post, or to leave. */
static void body_awaited(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 1) {
        (void)usleep(2000);
    }
    CHECK_EQ(put(&w, 1, 10), 0);
    CHECK_OK(fc_exchange_await(fc_domain_unit(w.domains[0], 1)));
    take(&w, 0, 1, 10, 10);
    if (rank == 0) {
        CHECK(put(&w, 0, 20) >= 0);
        CHECK_OK(fc_exchange_await(fc_domain_unit(w.domains[0], 0)));
        take(&w, 0, 0, 20, 0);
        fc_domain_mark_closed(w.domains[0]);
    } else {
        (void)usleep(2000);
        fc_domain_mark_closed(w.domains[0]);
        CHECK_EQ(next(&w, FC_SEARCH_ALL), 0);
        take(&w, 0, 0, 20, 0);
    }
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

/* A wait at the end counts for the first unit that is not settled. */
static void body_counted(int rank, int n_ranks, void *arg)
{
    world w;

    (void)n_ranks, (void)arg;
    join(&w, rank, 1, USUAL);
    if (rank == 0) {
        CHECK_EQ(put(&w, 1, 10), 0);
        CHECK_EQ(put(&w, 2, 20), HALF);
    }
    meet_all(&w);
    if (rank == 1) {
        (void)usleep(2000);
    }
    fc_domain_mark_closed(w.domains[0]);
    for (size_t u = 1; u < 3; u++) {
        CHECK_EQ(next(&w, FC_SEARCH_ALL), u);
        take(&w, 0, u, 10 * (float)u, 0);
    }
    CHECK_EQ(next(&w, FC_SEARCH_ALL), N_UNITS);
    for (size_t u = 0; u < N_UNITS; u++) {
        const fc_unit *unit = fc_domain_unit(w.domains[0], u);

        CHECK(fc_waits_of(w.domains[0], unit, FC_WAIT_REDUCE).n <= (u == 1));
    }
    CHECK_OK(fc_domain_close(w.domains[0]));
    leave(&w);
}

int main(void)
{
    static bool yes = true;

    ranks_check(N_RANKS, body_places, NULL);
    ranks_check(N_RANKS, body_gaps, NULL);
    ranks_check(N_RANKS, body_searches, NULL);
    ranks_check(N_RANKS, body_copies, NULL);
    ranks_check(N_RANKS, body_copies, &yes);
    ranks_check(N_RANKS, body_left_arena, NULL);
    ranks_check(N_RANKS, body_two_domains, NULL);
    for (int i = 0; i < 4; i++) {
        stuck peer = {(size_t)i / 2, i % 2};

        ranks_check(N_RANKS, body_stuck, &peer);
    }
    ranks_check(N_RANKS, body_not_stuck, NULL);
    for (int failing = 0; failing < N_RANKS; failing++) {
        ranks_check(N_RANKS, body_failed, &failing);
    }
    ranks_check(N_RANKS, body_skipped, NULL);
    ranks_check(N_RANKS, body_kept, NULL);
    ranks_check(N_RANKS, body_awaited, NULL);
    ranks_check(N_RANKS, body_counted, NULL);
    return check_result();
}
