/* Ranks whose phases and collectives differ: a domain over shared memory, over messages with a
 * clock in shared memory, or over messages alone; and what ranks then have to say. */
#ifndef APART_WORLD_H
#define APART_WORLD_H

#include "domains.h"
#include "refused_messages.h"

#include "engine/batch.h"

#define TIMEOUT_NS (10 * FC_NS_PER_S)
#define N_UNITS 3
#define N_OPENERS 3
#define ROWS 5
#define COLUMNS 3
#define NUMEL ((size_t)ROWS * COLUMNS)

/* What the engine says of causes and cures. */
#define CAUSES                                                                                     \
    "usual causes, on one rank alone: a loss that was passed over (not finite), an out-of-memory " \
    "or other error that was caught, one more forward or backward (a metric, a log)"
#define CURE                                                                                       \
    "let all ranks decide alike, for instance by an all_reduce of the decision before backward()"

typedef enum travel {
    MAPPED,
    WATCHED, /* messages, and a clock */
    ALONE,   /* messages without */
    N_KINDS
} travel;

typedef struct world {
    travel kind;
    int rank, n_ranks;
    ranks_host host, watch_host, own_host; /* the last one of the test's own meetings */
    fc_transport *transport, *watch;
    fc_domain *domain;
    /* Of the same root and ranks; NULL: there is none. */
    fc_transport *second_transport, *second_watch;
    fc_domain *second;
    bool is_packed;
    /* Counted. */
    int n_gathers, n_words, n_sums, n_reductions, n_opened, n_failed;
    fc_status fails_with; /* the next collectives; FC_OK: they do not */
} world;

static const char *last_name = "head"; /* of units */
static fc_domain_kind kind_of_domains = FC_DOMAIN_SHARD;
static world *of_messages; /* whose collectives run */
/* Of clocks over messages; NULL: nothing more. */
static void (*at_wait)(void *context), (*at_end_of_wait)(void *context);

/* ---- messages ---- */

static inline fc_status trouble(void)
{
    return of_messages->fails_with != FC_OK ? fc_fail(of_messages->fails_with, "no luck") : FC_OK;
}

static inline fc_status all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    of_messages->n_gathers++;
    of_messages->n_words += bytes == 64;
    FC_TRY(trouble());
    return ranks_exchange(context, "all-gather", send, bytes, recv);
}

static inline fc_status add_all(void *context, const char *what, const float *mine, size_t numel,
                                float *sum)
{
    float *all = malloc(RANKS_MAX * numel * sizeof(float));
    const int n_ranks = ((ranks_host *)context)->n_ranks;
    fc_status st = ranks_exchange(context, what, mine, numel * sizeof(float), all);

    for (size_t i = 0; i < numel; i++) {
        sum[i] = 0;
        for (int r = 0; r < n_ranks; r++) {
            sum[i] += all[(size_t)r * numel + i];
        }
    }
    free(all);
    return st;
}

static inline fc_status all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    of_messages->n_sums++;
    CHECK_EQ(dtype, FC_F32);
    FC_TRY(trouble());
    return add_all(context, "all-reduce", data, numel, data);
}

static inline fc_status reduce_scatter(void *context, void *recv, void *send, size_t numel,
                                       fc_dtype dtype)
{
    const ranks_host *host = context;
    float *sum = malloc((size_t)host->n_ranks * numel * sizeof(float));
    fc_status st;

    of_messages->n_reductions++;
    CHECK_EQ(dtype, FC_F32);
    st = trouble();
    st = st == FC_OK ? add_all(context, "reduce-scatter", send, (size_t)host->n_ranks * numel, sum)
                     : st;
    memcpy(recv, sum + (size_t)host->rank * numel, numel * sizeof(float));
    free(sum);
    return st;
}

static inline void open_phase(void *context)
{
    (void)context;
    of_messages->n_opened++;
}

static inline void fail_phase(void *context)
{
    (void)context;
    of_messages->n_failed++;
}

/* ---- the world ---- */

static inline fc_status connect_by_messages(fc_transport_config *config, ranks_host *host,
                                            fc_transport **out)
{
    fc_message_ops messages = refused_messages;

    messages.context = host;
    messages.all_gather = all_gather;
    messages.all_reduce = all_reduce;
    messages.reduce_scatter = reduce_scatter;
    messages.open_phase = open_phase;
    messages.fail_phase = fail_phase;
    return fc_callback_create(config, &messages, out);
}

static inline void make_domain(world *w, int board, fc_transport **transport, fc_transport **watch,
                               fc_domain **domain)
{
    static const char *const names[N_OPENERS] = {"Model", "Model.embed", "Model.head"};
    fc_param params[N_UNITS];
    const fc_unit_desc units[N_UNITS] = {
        {"embed", &params[0], 1}, {"layers.0", &params[1], 1}, {last_name, &params[2], 1}};
    fc_transport_config config = ranks_config(&w->host, board, w->rank, w->n_ranks, TIMEOUT_NS);

    for (size_t u = 0; u < N_UNITS; u++) {
        params[u] = make_param(1, ROWS, COLUMNS, FC_F32, true);
        params[u].is_packed = w->is_packed;
    }
    if (w->kind == MAPPED) {
        CHECK_OR_EXIT(fc_shm_create(&config, transport) == FC_OK);
    } else {
        CHECK_OR_EXIT(connect_by_messages(&config, &w->host, transport) == FC_OK);
    }
    CHECK_OR_EXIT(fc_domain_create(*transport, kind_of_domains, units, N_UNITS, w->rank, w->n_ranks,
                                   domain) == FC_OK);
    if (w->kind == WATCHED) {
        config = ranks_config(&w->watch_host, board, w->rank, w->n_ranks, TIMEOUT_NS);
        if (at_wait != NULL) {
            config.host.enter_wait = at_wait;
            config.host.leave_wait = at_end_of_wait;
        }
        CHECK_OR_EXIT(fc_shm_create(&config, watch) == FC_OK);
        CHECK_OR_EXIT(fc_domain_watch(*domain, *watch) == FC_OK);
    }
    CHECK_OR_EXIT(fc_domain_name_openers(*domain, names, N_OPENERS) == FC_OK);
}

static inline void join(world *w, travel kind, int rank, int n_ranks, bool is_packed)
{
    (void)alarm(DOMAINS_WATCHDOG_S);
    *w = (world){.kind = kind, .rank = rank, .n_ranks = n_ranks, .is_packed = is_packed};
    of_messages = w;
    w->own_host = (ranks_host){.board = &ranks_common->boards[3], .rank = rank, .n_ranks = n_ranks};
    make_domain(w, 0, &w->transport, &w->watch, &w->domain);
}

/* The root has another domain over the same ranks. */
static inline void join_second(world *w)
{
    make_domain(w, 0, &w->second_transport, &w->second_watch, &w->second);
    fc_domain_link((fc_domain *const[]){w->domain, w->second}, 2);
}

static inline void leave_world(world *w)
{
    fc_domain_destroy(w->domain);
    fc_domain_destroy(w->second);
    fc_transport_destroy(w->transport);
    fc_transport_destroy(w->watch);
    fc_transport_destroy(w->second_transport);
    fc_transport_destroy(w->second_watch);
    CHECK_EQ(fc_alloc_live(), 0);
    CHECK_EQ(count_segments(), 0);
}

/* All ranks have come here. */
static inline void together(world *w)
{
    CHECK_OR_EXIT(ranks_exchange(&w->own_host, "together", &w->rank, sizeof(w->rank), NULL) ==
                  FC_OK);
}

static inline fc_unit *unit_of(const world *w, size_t u)
{
    return fc_domain_unit(w->domain, u);
}

static inline void begin(world *w, fc_phase phase, uint32_t opener, uint64_t updates)
{
    fc_domain_open(w->domain, (fc_opening){phase, opener, updates});
    if (w->second != NULL) {
        fc_domain_open(w->second, (fc_opening){phase, opener, updates});
    }
}

static inline void end(world *w)
{
    CHECK_OK(fc_domain_close(w->domain));
    if (w->second != NULL) {
        CHECK_OK(fc_domain_close(w->second));
    }
}

/* A gather of `n` units of a domain from `u` on, in one collective. */
static inline fc_status gather(fc_domain *domain, size_t u, size_t n)
{
    static const float zeros[NUMEL];
    static char full[N_UNITS][4096];
    const void *const shards[] = {zeros};
    fc_batch_gather gathers[N_UNITS];
    fc_status st;
    char *pack;

    for (size_t i = 0; i < n; i++) {
        gathers[i] = (fc_batch_gather){
            .unit = fc_domain_unit(domain, u + i), .shards = shards, .dst = full[i]};
        CHECK_OR_EXIT(fc_unit_layout(gathers[i].unit)->full_bytes <= sizeof(full[i]));
    }
    pack = malloc(fc_batch_pack_bytes(gathers, n));
    CHECK_OR_EXIT(pack != NULL);
    st = fc_batch_all_gather(gathers, n, pack);
    free(pack);
    return st;
}

/* What a rank does that wants a unit's parameters. */
static inline fc_status read_in(fc_domain *domain, size_t u)
{
    return fc_domain_is_mapped(domain) ? fc_domain_ready(domain, fc_domain_unit(domain, u))
                                       : gather(domain, u, 1);
}

static inline fc_status read_unit(world *w, size_t u)
{
    return read_in(w->domain, u);
}

/* A phase in which all ranks are alike. */
static inline void run_phase(world *w, fc_phase phase, uint32_t opener, uint64_t updates)
{
    begin(w, phase, opener, updates);
    CHECK_OK(read_unit(w, 0));
    end(w);
    CHECK(!fc_domain_is_open(w->domain));
}

/* The call fails with that status and that sentence. */
#define CHECK_FAILS(call, status, text)                                                            \
    do {                                                                                           \
        CHECK_EQ(call, status);                                                                    \
        CHECK_STR(fc_last_message(), text);                                                        \
    } while (0)

#endif
