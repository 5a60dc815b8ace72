/* Domains of a C test: a rank with its transport and units, posting and finishing as the binding
 * does, and gradients that every rank can compute, so that each sum is compared bit by bit.
 */
#ifndef FC_TESTS_DOMAINS_H
#define FC_TESTS_DOMAINS_H

#include "base/alloc.h"
#include "engine/unit.h"
#include "kernels/kernels.h"
#include "ranks.h"

#define DOMAINS_TIMEOUT_NS (20 * FC_NS_PER_S)
#define DOMAINS_WATCHDOG_S 50
#define DOMAINS_MAX_UNITS 48
#define DOMAINS_MAX_PARAMS 4

/* One rank. */
typedef struct member {
    ranks_host host;
    fc_transport *transport;
    fc_domain *domain;
    int rank, n_ranks;
    /* The phase under way. */
    uint64_t seed; /* of the phase; equal on all ranks */
    int posts[DOMAINS_MAX_UNITS];
    int finishes[DOMAINS_MAX_UNITS];
    /* Posts of each rank in this phase; what finish() expects. */
    int planned[RANKS_MAX][DOMAINS_MAX_UNITS];
    /* The last post, if its part for this rank itself is not written; by parameter. */
    struct {
        size_t unit;
        int post; /* 0: none */
        float *full[DOMAINS_MAX_PARAMS];
        char *narrow[DOMAINS_MAX_PARAMS];
        fc_gradient data[DOMAINS_MAX_PARAMS];
        char *parts;
        size_t part_bytes;
        fc_wire wire;
    } borrowed;
} member;

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    return fc_fingerprint(a, b);
}

static inline fc_param make_param(size_t outer, size_t rows, size_t inner, fc_dtype reduce,
                                  bool trainable)
{
    return (fc_param){.outer = outer,
                      .rows = rows,
                      .inner = inner,
                      .orig = FC_F32,
                      .compute = FC_F32,
                      .reduce = reduce,
                      .grad = FC_F32,
                      .has_grad = true,
                      .trainable = trainable};
}

static inline void member_join(member *m, int rank, int n_ranks)
{
    fc_transport_config config;

    (void)alarm(DOMAINS_WATCHDOG_S);
    memset(m, 0, sizeof(*m));
    m->rank = rank;
    m->n_ranks = n_ranks;
    config = ranks_config(&m->host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    if (fc_shm_create(&config, &m->transport) != FC_OK) {
        (void)fprintf(stderr, "%s\n", fc_last_message());
        exit(CHECK_EXIT_FAIL);
    }
}

static inline void member_make_domain(member *m, fc_domain_kind kind, const fc_unit_desc *units,
                                      size_t n_units, int shard_rank, int n_shards)
{
    CHECK_OR_EXIT(n_units <= DOMAINS_MAX_UNITS);
    if (fc_domain_create(m->transport, kind, units, n_units, shard_rank, n_shards, &m->domain) !=
        FC_OK) {
        (void)fprintf(stderr, "%s\n", fc_last_message());
        exit(CHECK_EXIT_FAIL);
    }
}

static inline void forget_borrowed(member *m)
{
    for (size_t i = 0; i < DOMAINS_MAX_PARAMS; i++) {
        free(m->borrowed.full[i]);
        free(m->borrowed.narrow[i]);
    }
    memset(&m->borrowed, 0, sizeof(m->borrowed));
}

static inline void member_leave(member *m)
{
    forget_borrowed(m);
    fc_domain_destroy(m->domain);
    fc_transport_destroy(m->transport);
    CHECK_EQ(fc_alloc_live(), 0);
    CHECK_EQ(count_segments(), 0);
}

/* The status is expected; a failure's text is shown. */
#define CHECK_OK(call)                                                                             \
    do {                                                                                           \
        fc_status check_status_ = (call);                                                          \
        CHECK_MSG(check_status_ == FC_OK, "%s: %s", #call, fc_last_message());                     \
    } while (0)

/* ---- gradients ---- */

/* Which parameters a post holds; at least one. */
static inline bool is_present(const member *m, int rank, size_t unit, int post, size_t param,
                              size_t n_params)
{
    uint64_t h = mix(mix(mix(m->seed, unit), (uint64_t)rank), (uint64_t)post);

    return h % 2 == 0 || (h >> 8) % n_params == param || mix(h, param) % 4 != 0;
}

/* In what types a post travels: ranks differ. */
static inline fc_wire wire_of(const member *m, int rank, size_t unit, int post,
                              const fc_layout *layout)
{
    static const fc_dtype types[] = {FC_F32, FC_F32, FC_BF16, FC_F16};

    return fc_layout_wire(layout,
                          types[mix(m->seed, unit * 64 + (uint64_t)post * 8 + (uint64_t)rank) % 4]);
}

/* An element of a full gradient. Sums of BF16 are exact, those of other types depend on the order.
 */
static inline float gradient(const member *m, int rank, size_t unit, int post, size_t param,
                             size_t index, const fc_layout *layout)
{
    bool is_narrow = layout->params[param].reduce == FC_BF16 ||
                     wire_of(m, rank, unit, post, layout) != FC_WIRE_REDUCE;

    uint64_t h = m->seed + (uint64_t)rank * 7919 + unit * 104729 + (uint64_t)post * 1299709 +
                 param * 15485863 + index * 179424673;

    h = (h ^ (h >> 29)) * UINT64_C(0xbf58476d1ce4e5b9);
    h >>= 33;
    return is_narrow ? (float)(h % 65) - 32.0F : ((float)(h % 20001) - 10000.0F) / 7.0F;
}

/* To nearest, ties to even; of finite numbers. */
static inline float rounded_to_bf16(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    bits += 0x7fff + (bits >> 16 & 1);
    bits &= 0xffff0000;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* What reduction number `post` of an element must give. */
static inline float expected_sum(const member *m, size_t unit, int post, size_t param, size_t index,
                                 const fc_layout *layout, double divisor, float before,
                                 bool accumulate)
{
    fc_dtype reduce = layout->params[param].reduce;
    double wide = 0;
    float narrow = 0;
    bool is_first = true;

    for (int r = 0; r < m->n_ranks; r++) {
        float value;

        if (m->planned[r][unit] < post || !is_present(m, r, unit, post, param, layout->n_params)) {
            continue;
        }
        value = gradient(m, r, unit, post, param, index, layout);
        wide = is_first ? (double)value : wide + (double)value;
        narrow = is_first ? value : narrow + value;
        is_first = false;
    }
    if (reduce == FC_F64) {
        return (float)(accumulate ? (double)before + wide / divisor : wide / divisor);
    }
    narrow = narrow / (float)divisor;
    narrow = reduce == FC_BF16 ? rounded_to_bf16(narrow) : narrow;
    return accumulate ? before + narrow : narrow;
}

static inline bool is_summed(const member *m, size_t unit, int post, size_t param, size_t n_params)
{
    for (int r = 0; r < m->n_ranks; r++) {
        if (m->planned[r][unit] >= post && is_present(m, r, unit, post, param, n_params)) {
            return true;
        }
    }
    return false;
}

/* Compares this rank's chunk. */
static inline void check_chunk(const member *m, size_t unit, int post, size_t param,
                               const fc_layout *layout, const float *chunk, float before,
                               bool accumulate, double divisor)
{
    const fc_param *p = &layout->params[param];
    size_t n = 0;

    for (size_t o = 0; o < p->outer; o++) {
        for (size_t i = 0; i < p->own_rows * p->inner; i++, n++) {
            size_t index = (o * p->rows + (size_t)layout->rank * p->chunk_rows) * p->inner + i;
            float wanted =
                expected_sum(m, unit, post, param, index, layout, divisor, before, accumulate);

            if (memcmp(&wanted, &chunk[n], sizeof(wanted)) != 0) {
                CHECK_MSG(false, "rank %d unit %zu post %d param %zu [%zu]: %g, not %g", m->rank,
                          unit, post, param, n, (double)chunk[n], (double)wanted);
                return;
            }
        }
    }
}

/* ---- the binding's loops ---- */

/* Finishes a reduction and compares it with the serial sum. */
static inline void member_finish(member *m, fc_unit *unit)
{
    size_t index = 0;
    const fc_layout *layout = fc_unit_layout(unit);
    fc_source sources[RANKS_MAX];
    float *all = malloc(layout->grad_bytes);
    double divisor = m->seed % 2 == 0 ? 1.0 : 3.0;
    int post;

    while (fc_domain_unit(m->domain, index) != unit) {
        index++;
    }
    post = ++m->finishes[index];
    CHECK_OR_EXIT(all != NULL);
    CHECK_OR_EXIT(fc_exchange_sources(unit, sources) == FC_OK);
    if (m->borrowed.post == post && m->borrowed.unit == index) {
        sources[m->rank].grads = m->borrowed.data;
    }
    for (int r = 0; r < m->n_ranks; r++) {
        CHECK_MSG((sources[r].part != NULL) == (m->planned[r][index] >= post),
                  "unit %zu post %d of rank %d", index, post, r);
    }
    if (fc_unit_reduce_all(unit, sources, m->n_ranks, all, divisor)) {
        for (size_t i = 0; i < layout->n_params; i++) {
            if (layout->params[i].trainable) {
                check_chunk(m, index, post, i, layout,
                            all + layout->params[i].grad_at / sizeof(float), 0, false, divisor);
            }
        }
    }
    free(all);
    for (size_t i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];
        size_t numel = p->outer * p->own_rows * p->inner;
        float *chunk = malloc(numel * sizeof(float) + 1);
        bool accumulate = mix(m->seed, i) % 2 == 0;

        CHECK_OR_EXIT(chunk != NULL);
        for (size_t k = 0; k < numel; k++) {
            chunk[k] = 0.75F;
        }
        if (p->has_grad) {
            bool was_reduced =
                fc_unit_reduce(unit, sources, m->n_ranks, i, chunk, p->grad, divisor, accumulate);

            CHECK_EQ(was_reduced, is_summed(m, index, post, i, layout->n_params));
            if (was_reduced) {
                check_chunk(m, index, post, i, layout, chunk, 0.75F, accumulate, divisor);
            }
        }
        free(chunk);
    }
    fc_exchange_consume(unit);
    if (m->borrowed.post == post && m->borrowed.unit == index) {
        forget_borrowed(m);
    }
}

static inline fc_status member_finish_ready(member *m, fc_search search)
{
    for (;;) {
        fc_unit *unit = NULL;

        FC_TRY(fc_exchange_next(m->domain, search, &unit));
        if (unit == NULL) {
            return FC_OK;
        }
        member_finish(m, unit);
    }
}

/* Makes a parameter's gradient, writes it into the receivers' parts and keeps it as borrowed. */
static inline void stage(member *m, size_t index, int post, size_t param, fc_wire wire,
                         fc_receivers receivers, char *parts, size_t part_bytes)
{
    fc_unit *unit = fc_domain_unit(m->domain, index);
    const fc_layout *layout = fc_unit_layout(unit);
    const fc_param *p = &layout->params[param];
    fc_dtype type = fc_wire_dtype(p, wire);
    size_t numel = p->outer * p->rows * p->inner;
    float *full = malloc(numel * sizeof(float) + 1);
    char *narrow = malloc(numel * fc_dtype_bytes(type) + 1);

    CHECK_OR_EXIT(full != NULL && narrow != NULL);
    for (size_t i = 0; i < numel; i++) {
        full[i] = gradient(m, m->rank, index, post, param, i, layout);
    }
    fc_kern_cast(FC_F32, type)(narrow, full, numel);
    fc_unit_stage(unit, param, full, FC_F32, wire, receivers, parts, part_bytes);
    m->borrowed.full[param] = full;
    m->borrowed.narrow[param] = narrow;
    m->borrowed.data[param].data = narrow;
}

/* Writes the part for this rank itself after all. */
static inline void return_borrowed(member *m)
{
    fc_unit *unit = fc_domain_unit(m->domain, m->borrowed.unit);

    for (size_t i = 0; i < DOMAINS_MAX_PARAMS && m->borrowed.post != 0; i++) {
        if (m->borrowed.full[i] != NULL) {
            fc_unit_stage(unit, i, m->borrowed.full[i], FC_F32, m->borrowed.wire, FC_TO_SELF,
                          m->borrowed.parts, m->borrowed.part_bytes);
        }
    }
    forget_borrowed(m);
}

static inline fc_status member_post(member *m, size_t index)
{
    fc_unit *unit = fc_domain_unit(m->domain, index);
    const fc_layout *layout = fc_unit_layout(unit);
    int post = m->posts[index] + 1;
    fc_wire wire = wire_of(m, m->rank, index, post, layout);
    bool is_shard = !fc_domain_is_replicate(m->domain);
    bool borrows = is_shard && mix(m->seed, index + 31 * (size_t)post) % 2 == 0;
    size_t part_bytes;
    char *parts = NULL;
    char *target;
    fc_status st;

    CHECK_OR_EXIT(layout->n_params <= DOMAINS_MAX_PARAMS);
    return_borrowed(m);

    for (size_t i = 0; i < layout->n_params; i++) {
        if (layout->params[i].has_grad &&
            is_present(m, m->rank, index, post, i, layout->n_params)) {
            fc_exchange_set_present(unit, i);
        }
    }
    part_bytes = fc_unit_part_bytes(unit, wire);
    while ((st = fc_exchange_reserve(unit, part_bytes, wire, &parts)) == FC_AGAIN) {
        FC_TRY(member_finish_ready(m, FC_SEARCH_OWN));
        st = fc_exchange_reserve(unit, part_bytes, wire, &parts);
        if (st != FC_AGAIN) {
            break;
        }
        FC_TRY(fc_exchange_make_way(unit));
    }
    FC_TRY(st);
    /* Replicas send the part of their own shard only. */
    target = parts;
    if (!is_shard) {
        target = calloc((size_t)layout->n_ranks, part_bytes);
        CHECK_OR_EXIT(target != NULL);
    }
    for (size_t i = 0; i < layout->n_params; i++) {
        if (fc_exchange_is_present(unit, i)) {
            stage(m, index, post, i, wire, borrows ? FC_TO_PEERS : FC_TO_ALL, target, part_bytes);
        }
    }
    if (target != parts) {
        memcpy(parts, target + (size_t)layout->rank * part_bytes, part_bytes);
        free(target);
    }
    fc_exchange_commit(unit);
    m->posts[index] = post;
    if (!borrows) {
        forget_borrowed(m);
        return FC_OK;
    }
    m->borrowed.unit = index;
    m->borrowed.post = post;
    m->borrowed.parts = parts;
    m->borrowed.part_bytes = part_bytes;
    m->borrowed.wire = wire;
    return FC_OK;
}

/* Begins a phase that all ranks call `seed`; nothing is planned in it yet. */
static inline void member_open(member *m, bool is_backward, uint64_t seed)
{
    m->seed = seed;
    forget_borrowed(m);
    memset(m->posts, 0, sizeof(m->posts));
    memset(m->finishes, 0, sizeof(m->finishes));
    memset(m->planned, 0, sizeof(m->planned));
    fc_domain_open(m->domain,
                   (fc_opening){.phase = is_backward ? FC_PHASE_BACKWARD : FC_PHASE_FORWARD});
}

/* Ends a phase as the end of a backward does: every planned reduction was finished once. */
static inline fc_status member_close(member *m)
{
    fc_domain_mark_closed(m->domain);
    FC_TRY(member_finish_ready(m, FC_SEARCH_ALL));
    for (size_t u = 0; u < fc_domain_n_units(m->domain); u++) {
        int most = 0;

        for (int r = 0; r < m->n_ranks; r++) {
            most = m->planned[r][u] > most ? m->planned[r][u] : most;
        }
        CHECK_MSG(m->n_ranks == 1 || m->finishes[u] == most, "unit %zu: %d reductions of %d", u,
                  m->finishes[u], most);
    }
    return fc_domain_close(m->domain);
}

/* A phase in which nobody posts. */
static inline fc_status member_forward(member *m)
{
    member_open(m, false, 0);
    FC_TRY(fc_domain_ready(m->domain, fc_domain_unit(m->domain, 0)));
    return fc_domain_close(m->domain);
}

#endif
