/* The exchange step by step, for a few ranks that take turns: where posts lie, what is offered
 * when.
 */
#ifndef FC_TESTS_EXCHANGE_WORLD_H
#define FC_TESTS_EXCHANGE_WORLD_H

#include "domains.h"

#include "engine/domain_private.h"

#define N_UNITS 4
#ifndef N_RANKS
#define N_RANKS 2
#endif
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

/* Ranks' waits are counted in ranks_common's values. */
static inline void enter_wait(void *context)
{
    const ranks_host *host = context;

    (void)atomic_fetch_add(&ranks_common->values[host->rank], 1);
}

static inline void leave_wait(void *context)
{
    (void)context;
}

static inline void join_domain(world *w, size_t d)
{
    fc_param param = make_param(1, N_RANKS, w->numel, FC_F32, w->numel == LARGE);
    fc_unit_desc units[N_UNITS];
    fc_transport_config config = ranks_config(&w->host, 0, w->rank, N_RANKS, DOMAINS_TIMEOUT_NS);

    for (size_t u = 0; u < N_UNITS; u++) {
        units[u] = (fc_unit_desc){names[u], &param, 1};
    }
    config.host.enter_wait = enter_wait;
    config.host.leave_wait = leave_wait;
    CHECK_OK(fc_shm_create(&config, &w->transports[d]));
    CHECK_OK(fc_domain_create(w->transports[d], FC_DOMAIN_SHARD, units, N_UNITS, w->rank, N_RANKS,
                              &w->domains[d]));
    if (w->numel != LARGE) {
        CHECK_EQ(fc_domain_arena_bytes(w->domains[d]), FC_PAGE);
    }
}

/* Behind the words of the last rank lies what looks like those of one more: nobody reads it. */
static inline void write_behind(const fc_domain *domain)
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

static inline void open(world *w, fc_phase phase)
{
    for (size_t d = 0; d < w->n_domains; d++) {
        fc_domain_open(w->domains[d], (fc_opening){.phase = phase});
        write_behind(w->domains[d]);
    }
}

static inline void join(world *w, int rank, size_t n_domains, size_t numel)
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

static inline void leave(world *w)
{
    for (size_t d = w->n_domains; d-- > 0;) {
        fc_domain_destroy(w->domains[d]);
        fc_transport_destroy(w->transports[d]);
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

/* All ranks are here. */
static inline void meet_all(world *w)
{
    CHECK_OK(ranks_exchange(&w->host, "turn", &w->rank, sizeof(w->rank), NULL));
}

/* ---- what a rank does ---- */

/* Where in the arena the post came to lie; negative: a status. Rank r gets value + r. */
static inline int64_t put_in(world *w, size_t d, size_t u, float value)
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

static inline int64_t put(world *w, size_t u, float value)
{
    return put_in(w, 0, u, value);
}

static inline size_t index_of(const fc_unit *unit)
{
    return unit == NULL ? N_UNITS : unit->index;
}

/* The unit that is offered; N_UNITS: none. */
static inline size_t next_in(world *w, size_t d, fc_search search)
{
    fc_unit *unit = NULL;

    CHECK_OK(fc_exchange_next(w->domains[d], search, &unit));
    return index_of(unit);
}

static inline size_t next(world *w, fc_search search)
{
    return next_in(w, 0, search);
}

/* What each rank has posted; 0: nothing. Then it is done with. */
static inline void take(world *w, size_t d, size_t u, float of_first, float of_second)
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
static inline void take_all(world *w, size_t d, size_t first, float (*values)[N_RANKS],
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

/* The two units from `first` on, which one of the ranks has posted, in whatever order. */
static inline void take_two(world *w, size_t d, size_t first, const float *of_first,
                            const float *of_second)
{
    size_t last = N_UNITS;

    for (size_t i = 0; i < 2; i++) {
        const size_t u = next_in(w, d, FC_SEARCH_ALL);

        CHECK_OR_EXIT(u != last && (u == first || u == first + 1));
        take(w, d, u, of_first[u - first], of_second[u - first]);
        last = u;
    }
    CHECK_EQ(next_in(w, d, FC_SEARCH_ALL), N_UNITS);
}

static inline fc_status make_way(world *w, size_t d, size_t u)
{
    return fc_exchange_make_way(fc_domain_unit(w->domains[d], u));
}

/* The number of the peer's post of a unit in this phase that this rank has read or copied away. */
static inline uint64_t has_read(const world *w, size_t d, size_t u)
{
    const fc_domain *domain = w->domains[d];
    const uint64_t tag = fc_word_load(lane_consumed(domain_lane(domain, w->rank, u), 1 - w->rank));

    return phase_of(tag) == phase_of(domain->clock) ? tag & STATE_MASK : 0;
}

#define HALF ((int64_t)FC_PAGE / 2)
#define USUAL (FC_PAGE / 2 / N_RANKS / sizeof(float))

#endif
