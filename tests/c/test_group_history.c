/* Phases and parameters: what ranks read while others write, skip, fail or die. */
#define _GNU_SOURCE

#include "domains.h"
#include "engine/batch.h"
#include "refused_messages.h"

#define N_UNITS 2
#define N_PARAMS 4
#define STEPS 60

/* Aliased; published because of its dim, of a cast; an aliased one without gradient. */
static fc_param shapes[N_UNITS][N_PARAMS];
static const fc_unit_desc units[N_UNITS] = {{"embed", shapes[0], N_PARAMS},
                                            {"layers.0", shapes[1], N_PARAMS}};

static void make_shapes(void)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        shapes[u][0] = make_param(1, 7 + 40 * u, 33, FC_F32, true);
        shapes[u][1] = make_param(3, 5, 17, FC_F32, true);
        shapes[u][2] = make_param(1, 2, 301, FC_F32, true);
        shapes[u][2].compute = FC_BF16;
        shapes[u][3] = make_param(1, 3, 2, FC_F32, false);
        shapes[u][3].has_grad = false;
    }
}

/* An element at a step; a small integer, so that BF16 holds it. */
static float value_at(uint64_t step, size_t unit, size_t param, size_t index)
{
    return (float)(mix(step * 64 + unit * 8 + param, index) % 256);
}

static size_t index_in_full(const fc_param *p, int rank, size_t o, size_t i)
{
    return (o * p->rows + (size_t)rank * p->chunk_rows) * p->inner + i;
}

/* The optimizer: this rank's shards of a step, where they live; then those that are copied. */
static void write_shards(member *m, uint64_t step)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_unit *unit = fc_domain_unit(m->domain, u);
        const fc_layout *layout = fc_unit_layout(unit);

        float *own[N_PARAMS];

        for (size_t k = 0; k < N_PARAMS; k++) {
            const fc_param *p = &layout->params[k];
            size_t row = p->own_rows * p->inner;
            float *to;

            own[k] = calloc(p->outer * row + 1, sizeof(float));
            to = p->is_aliased ? fc_unit_shard_storage(unit, k) : own[k];
            CHECK_OR_EXIT(own[k] != NULL);
            for (size_t o = 0; o < p->outer; o++) {
                for (size_t i = 0; i < row; i++) {
                    to[o * row + i] = value_at(step, u, k, index_in_full(p, layout->rank, o, i));
                }
            }
        }
        fc_unit_publish(unit, (const void *const *)own);
        for (size_t k = 0; k < N_PARAMS; k++) {
            free(own[k]);
        }
    }
}

static float load(const char *memory, size_t index, fc_dtype dtype)
{
    uint32_t bits = 0;
    float value;

    if (dtype == FC_BF16) {
        memcpy((char *)&bits + 2, memory + index * 2, 2);
        memcpy(&value, &bits, sizeof(value));
    } else {
        memcpy(&value, memory + index * sizeof(value), sizeof(value));
    }
    return value;
}

/* Every element of a buffer must be of the step that its owner was in. */
static void check_buffer(const fc_layout *layout, size_t u, const char *buffer,
                         const uint64_t *step_of)
{
    for (size_t k = 0; k < N_PARAMS; k++) {
        const fc_param *p = &layout->params[k];

        for (int r = 0; r < layout->n_ranks; r++) {
            size_t row = fc_layout_rows(p, r, layout->n_ranks) * p->inner;

            for (size_t o = 0; o < p->outer; o++) {
                for (size_t i = 0; i < row; i++) {
                    size_t at = index_in_full(p, r, o, i);
                    float value = load(buffer + p->full_at, at, p->compute);
                    float wanted = value_at(step_of[r], u, k, at);

                    if (value < wanted || value > wanted) {
                        CHECK_MSG(false,
                                  "unit %zu param %zu [%zu] of rank %d: %g, not %g (step %d)", u, k,
                                  at, r, (double)value, (double)wanted, (int)step_of[r]);
                        return;
                    }
                }
            }
        }
    }
}

static void check_view(member *m, const uint64_t *step_of)
{
    for (size_t u = 0; u < N_UNITS; u++) {
        fc_unit *unit = fc_domain_unit(m->domain, u);

        check_buffer(fc_unit_layout(unit), u, fc_unit_view(unit), step_of);
    }
}

static void nap(member *m, uint64_t what)
{
    uint64_t h = mix(what, (uint64_t)m->rank);

    if (h % 3 == 0) {
        (void)usleep((useconds_t)(h >> 8) % 700);
    }
}

static void join(member *m, int rank, int n_ranks)
{
    make_shapes();
    member_join(m, rank, n_ranks);
    member_make_domain(m, FC_DOMAIN_SHARD, units, N_UNITS, rank, n_ranks);
}

static fc_unit *first_unit(member *m)
{
    return fc_domain_unit(m->domain, 0);
}

/* ---- reading and writing ---- */

/* The last rank writes in the view; only that rank sees it, until it discards what it wrote. */
static void scribble(member *m, uint64_t step, const uint64_t *step_of)
{
    fc_unit *unit = fc_domain_unit(m->domain, step % N_UNITS);
    const fc_layout *layout = fc_unit_layout(unit);
    char *copy = malloc(layout->full_bytes);
    char *view = fc_unit_view(unit);

    CHECK_OR_EXIT(copy != NULL);
    for (size_t k = 0; k < N_PARAMS; k++) {
        const fc_param *p = &layout->params[k];

        memset(view + p->full_at, 0x7e, p->outer * p->rows * p->inner * fc_dtype_bytes(p->compute));
    }
    fc_unit_copy_out(unit, copy);
    check_buffer(layout, step % N_UNITS, copy, step_of);
    CHECK_EQ(view[0], 0x7e);
    for (size_t k = 0; k < N_PARAMS; k++) {
        fc_unit_discard_writes(unit, k);
    }
    free(copy);
    check_view(m, step_of);
}

static void body_steps(int rank, int n_ranks, void *arg)
{
    member m;

    (void)arg;
    join(&m, rank, n_ranks);
    for (uint64_t step = 1; step <= STEPS; step++) {
        uint64_t steps[RANKS_MAX] = {step, step, step, step};

        nap(&m, step);
        write_shards(&m, step);
        fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_FORWARD});
        CHECK(fc_domain_is_open(m.domain) && !fc_domain_in_backward(m.domain));
        CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
        nap(&m, step + 1000);
        check_view(&m, steps);
        if (rank == n_ranks - 1) {
            scribble(&m, step, steps);
        }
        CHECK_OK(fc_domain_close(m.domain));
        for (uint64_t b = 0; b < step % 3; b++) {
            fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
            CHECK(fc_domain_in_backward(m.domain));
            CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
            nap(&m, step + 2000);
            check_view(&m, steps);
            CHECK_OK(fc_domain_close(m.domain));
            CHECK(!fc_domain_is_open(m.domain) && !fc_domain_in_backward(m.domain));
        }
    }
    member_leave(&m);
}

/* Of the ranks of a step with a backward that one of them passes over, the one that does. */
static bool skips(uint64_t step, int rank, int n_ranks)
{
    return n_ranks > 1 && step % 3 == 0 && (int)(mix(step, 40) % (uint64_t)n_ranks) == rank;
}

/* Until the others, who have learned of it, go on, a rank is told what it has passed over. */
static void await_pardon(member *m)
{
    fc_status st = fc_domain_ready(m->domain, first_unit(m));

    while (st == FC_ERR_MISMATCH) {
        CHECK_HAS(fc_last_message(), "went on to the forward of step");
        (void)usleep(100);
        st = fc_domain_ready(m->domain, first_unit(m));
    }
    CHECK_OK(st);
}

/* Who skips a backward is named by those that are in it, before they read, and learns it from them
 * in its next forward; then all go on. */
static void body_skips(int rank, int n_ranks, void *arg)
{
    member m;
    bool has_skipped = false;

    (void)arg;
    join(&m, rank, n_ranks);
    for (uint64_t step = 1; step <= STEPS; step++) {
        uint64_t steps[RANKS_MAX] = {step, step, step, step};
        bool is_skipped = n_ranks > 1 && step % 3 == 0;
        char text[64];

        write_shards(&m, step);
        nap(&m, step);
        fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_FORWARD, .updates = step});
        if (has_skipped) {
            await_pardon(&m);
        }
        /* A rank may also read nothing in a phase. */
        if (step % 4 != 0) {
            CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
            check_view(&m, steps);
        }
        CHECK_OK(fc_domain_close(m.domain));
        has_skipped = skips(step, rank, n_ranks) && step < STEPS;
        if (has_skipped || step == STEPS) {
            continue;
        }
        fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
        if (is_skipped) {
            CHECK_EQ(fc_domain_ready(m.domain, first_unit(&m)), FC_ERR_MISMATCH);
            (void)snprintf(text, sizeof(text), "without the backward of step %d", (int)step);
            CHECK_HAS(fc_last_message(), text);
            fc_domain_fail(m.domain);
            continue;
        }
        CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
        nap(&m, step + 500);
        check_view(&m, steps);
        CHECK_OK(fc_domain_close(m.domain));
    }
    member_leave(&m);
}

/* ---- failures ---- */

/* One rank after the other leaves a phase by an exception: before others read or while they do. */
static void body_failures(int rank, int n_ranks, void *arg)
{
    member m;

    (void)arg;
    join(&m, rank, n_ranks);
    for (uint64_t step = 1; step <= STEPS; step++) {
        uint64_t steps[RANKS_MAX] = {step, step, step, step};
        int victim = (int)(step % (uint64_t)n_ranks);
        bool is_backward = step % 4 >= 2;
        char text[96];

        write_shards(&m, step);
        fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_FORWARD});
        if (is_backward) {
            CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
            check_view(&m, steps);
            CHECK_OK(fc_domain_close(m.domain));
            fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
        }
        nap(&m, step);
        if (rank == victim) {
            if (step % 3 == 0) {
                /* An exception that nobody told the domain of. */
                continue;
            }
            fc_domain_fail(m.domain);
            fc_domain_fail(m.domain);
            CHECK(!fc_domain_is_open(m.domain));
            continue;
        }
        if (step % 2 == 0) {
            CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
        }
        CHECK_EQ(fc_domain_close(m.domain), FC_ERR_PEER);
        /* With more ranks it may be one that failed in turn, or a step later. */
        if (n_ranks == 2) {
            (void)snprintf(text, sizeof(text), "rank %d left", 10 + victim);
            CHECK_HAS(fc_last_message(), text);
        }
        (void)snprintf(text, sizeof(text), " left the %s of step %d by an exception while rank %d",
                       is_backward ? "backward" : "forward", (int)step, 10 + rank);
        CHECK_HAS(fc_last_message(), text);
        CHECK_OK(fc_transport_check(m.transport));
    }
    CHECK_OK(member_forward(&m));
    member_leave(&m);
}

/* Where a rank is killed. */
typedef enum death {
    BEFORE_OPEN,
    IN_PHASE,
    BEFORE_CLOSE_ENDS,
    DEATH_COUNT
} death;

static void body_death(int rank, int n_ranks, void *arg)
{
    death point = *(const death *)arg;
    bool is_victim = rank == n_ranks - 1;
    fc_status st;
    member m;
    char text[32];

    join(&m, rank, n_ranks);
    for (int i = 0; i < 3; i++) {
        CHECK_OK(member_forward(&m));
    }
    if (is_victim && point == BEFORE_OPEN) {
        (void)kill(getpid(), SIGKILL);
    }
    fc_domain_open(m.domain,
                   (fc_opening){.phase = point != IN_PHASE ? FC_PHASE_BACKWARD : FC_PHASE_FORWARD});
    if (is_victim && point == BEFORE_CLOSE_ENDS) {
        fc_domain_mark_closed(m.domain);
    }
    if (is_victim) {
        (void)kill(getpid(), SIGKILL);
    }
    st = fc_domain_ready(m.domain, first_unit(&m));
    st = st == FC_OK ? fc_domain_close(m.domain) : st;
    if (st == FC_OK) {
        /* It died as its last word was said: the next phase has to find out. */
        CHECK_EQ(point, BEFORE_CLOSE_ENDS);
        st = member_forward(&m);
    }
    CHECK_EQ(st, FC_ERR_PEER);
    (void)snprintf(text, sizeof(text), "rank %d (pid ", 10 + n_ranks - 1);
    CHECK_HAS(fc_last_message(), text);
    CHECK_EQ(member_forward(&m), FC_ERR_BROKEN);
    member_leave(&m);
}

static void test_deaths(int n)
{
    for (int point = 0; point < DEATH_COUNT; point++) {
        death arg = (death)point;
        int statuses[RANKS_MAX];

        ranks_run(n, body_death, &arg, statuses);
        CHECK_EQ(statuses[n - 1], SIGKILL);
        for (int r = 0; r < n - 1; r++) {
            CHECK_MSG(statuses[r] == 0, "rank %d of %d, point %d: %#x", r, n, point,
                      (unsigned)statuses[r]);
        }
    }
}

/* ---- set-up ---- */

/* Ranks with other parameters or another order of units are told, all of them. */
static void body_mismatch(int rank, int n_ranks, void *arg)
{
    int change = *(const int *)arg;
    fc_unit_desc mine[N_UNITS];
    fc_domain *domain = NULL;
    bool is_other = rank == n_ranks - 1;
    member m;

    make_shapes();
    member_join(&m, rank, n_ranks);
    memcpy(mine, units, sizeof(units));
    if (is_other && change == 0) {
        shapes[1][3].inner++;
    } else if (is_other && change == 1) {
        mine[0].params = shapes[1];
        mine[1].params = shapes[0];
    }
    CHECK_EQ(fc_domain_create(m.transport,
                              is_other && change == 2 ? FC_DOMAIN_REPLICATE : FC_DOMAIN_SHARD, mine,
                              N_UNITS, rank, n_ranks, &domain),
             FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "rank 10 ");
    CHECK(domain == NULL);
    /* The transport is as good as before. */
    make_shapes();
    member_make_domain(&m, FC_DOMAIN_SHARD, units, N_UNITS, rank, n_ranks);
    CHECK_OK(member_forward(&m));
    member_leave(&m);
}

static void body_no_memory(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_ERR_NOMEM;
    int64_t live;
    int n = 0;
    member m;

    (void)arg;
    make_shapes();
    member_join(&m, rank, n_ranks);
    live = fc_alloc_live();
    while (st != FC_OK) {
        fc_domain *domain = NULL;

        fc_alloc_fail_after(n++);
        st = fc_domain_create(m.transport, FC_DOMAIN_SHARD, units, N_UNITS, 0, 1, &domain);
        fc_alloc_fail_after(-1);
        CHECK_EQ(st, st == FC_OK ? FC_OK : FC_ERR_NOMEM);
        fc_domain_destroy(domain);
        CHECK_EQ(fc_alloc_live(), live);
        CHECK_OR_EXIT(n < 100);
    }
    CHECK(n > 10);
    member_leave(&m);
}

/* One rank has no memory: all of them are told, and can try again. */
static void body_one_without_memory(int rank, int n_ranks, void *arg)
{
    bool is_victim = rank == n_ranks - 1;
    fc_status st = FC_ERR_NOMEM;
    char victim[32];
    member m;

    (void)arg;
    (void)snprintf(victim, sizeof(victim), "rank %d", 10 + n_ranks - 1);
    make_shapes();
    member_join(&m, rank, n_ranks);
    for (int n = 0; st != FC_OK; n++) {
        CHECK_OR_EXIT(n < 100);
        fc_alloc_fail_after(is_victim ? n : -1);
        st = fc_domain_create(m.transport, FC_DOMAIN_SHARD, units, N_UNITS, rank, n_ranks,
                              &m.domain);
        fc_alloc_fail_after(-1);
        CHECK_EQ(st, st == FC_OK ? FC_OK : FC_ERR_NOMEM);
        if (st != FC_OK) {
            CHECK_HAS(fc_last_message(), victim);
        }
        CHECK((m.domain == NULL) == (st != FC_OK));
    }
    CHECK_OK(member_forward(&m));
    member_leave(&m);
}

static void body_accessors(int rank, int n_ranks, void *arg)
{
    fc_region *region;
    fc_unit *unit;
    member m;

    (void)arg;
    join(&m, rank, n_ranks);
    CHECK_EQ(fc_domain_n_units(m.domain), N_UNITS);
    CHECK(fc_domain_transport(m.domain) == m.transport);
    CHECK(fc_domain_is_mapped(m.domain));
    CHECK(!fc_domain_is_replicate(m.domain));
    CHECK_EQ(fc_domain_rank(m.domain), rank);
    CHECK_EQ(fc_domain_n_ranks(m.domain), n_ranks);
    CHECK((fc_domain_arena_bytes(m.domain) == 0) == (n_ranks == 1));
    unit = fc_domain_unit(m.domain, 1);
    CHECK_STR(fc_unit_name(unit), "layers.0");
    CHECK(fc_unit_owner(unit) == NULL);
    CHECK(fc_unit_layout(unit)->params[0].is_aliased);
    CHECK(!fc_unit_layout(unit)->params[1].is_aliased);
    CHECK(!fc_unit_layout(unit)->params[2].is_aliased);
    /* Shards outlive the domain. */
    write_shards(&m, 5);
    region = fc_unit_region(unit);
    fc_region_retain(region);
    fc_domain_destroy(m.domain);
    m.domain = NULL;
    CHECK_EQ(count_segments(), 3);
    fc_region_release(region);
    fc_domain_destroy(NULL);
    member_leave(&m);
}

/* 200 phases later nothing is larger than after the first. */
static void body_growth(int rank, int n_ranks, void *arg)
{
    int64_t live;
    size_t bytes;
    member m;

    (void)arg;
    join(&m, rank, n_ranks);
    CHECK_OK(member_forward(&m));
    live = fc_alloc_live();
    bytes = fc_domain_region_bytes(m.domain);
    for (int i = 0; i < 200; i++) {
        fc_domain_open(m.domain,
                       (fc_opening){.phase = i % 3 != 0 ? FC_PHASE_BACKWARD : FC_PHASE_FORWARD});
        if (i % 20 == 7) {
            fc_domain_fail(m.domain);
            fc_exchange_reset(m.domain);
        } else {
            CHECK_OK(fc_domain_ready(m.domain, first_unit(&m)));
            CHECK_OK(fc_domain_close(m.domain));
        }
    }
    CHECK_EQ(fc_alloc_live(), live);
    CHECK_EQ(fc_domain_region_bytes(m.domain), bytes);
    CHECK_EQ(count_segments(), 3);
    member_leave(&m);
}

/* ---- over messages ---- */

static fc_status gather_by_mail(void *context, void *recv, const void *send, size_t bytes)
{
    return ranks_exchange(context, "all-gather", send, bytes, recv);
}

/* The same parameters, gathered by another process group. */
static void body_messages(int rank, int n_ranks, void *arg)
{
    static const uint64_t steps[RANKS_MAX] = {9, 9, 9, 9};
    fc_transport_config config;
    fc_message_ops ops;
    fc_unit *unit;
    const fc_layout *layout;
    const void *shards[N_PARAMS];
    fc_batch_gather gather;
    char *full, *pack;
    member m = {.rank = rank, .n_ranks = n_ranks};

    (void)arg;
    (void)alarm(DOMAINS_WATCHDOG_S);
    make_shapes();
    config = ranks_config(&m.host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    ops = refused_messages;
    ops.context = &m.host;
    ops.all_gather = gather_by_mail;
    CHECK_OR_EXIT(fc_callback_create(&config, &ops, &m.transport) == FC_OK);
    member_make_domain(&m, FC_DOMAIN_SHARD, units, 1, rank, n_ranks);
    CHECK(!fc_domain_is_mapped(m.domain));
    CHECK_EQ(fc_domain_region_bytes(m.domain), 0);
    unit = first_unit(&m);
    layout = fc_unit_layout(unit);
    full = calloc(1, layout->full_bytes);
    gather = (fc_batch_gather){.unit = unit, .shards = shards, .dst = full};
    pack = malloc(fc_batch_pack_bytes(&gather, 1));
    CHECK_OR_EXIT(full != NULL && pack != NULL);
    for (size_t k = 0; k < N_PARAMS; k++) {
        const fc_param *p = &layout->params[k];
        size_t row = p->own_rows * p->inner;
        float *shard = malloc(p->outer * row * sizeof(float) + 1);

        CHECK_OR_EXIT(shard != NULL);
        CHECK(!p->is_aliased);
        for (size_t i = 0; i < p->outer * row; i++) {
            shard[i] = value_at(9, 0, k, index_in_full(p, rank, i / row, i % row));
        }
        shards[k] = shard;
    }
    fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_FORWARD});
    CHECK_OK(fc_domain_ready(m.domain, unit));
    CHECK_OK(fc_batch_all_gather(&gather, 1, pack));
    CHECK_OK(fc_domain_close(m.domain));
    check_buffer(layout, 0, full, steps);
    fc_domain_open(m.domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
    fc_domain_fail(m.domain);
    CHECK(!fc_domain_is_open(m.domain));
    for (size_t k = 0; k < N_PARAMS; k++) {
        free((void *)(uintptr_t)shards[k]);
    }
    free(pack);
    free(full);
    member_leave(&m);
}

int main(void)
{
    for (int n = 1; n <= RANKS_MAX; n++) {
        ranks_check(n, body_steps, NULL);
        ranks_check(n, body_growth, NULL);
        ranks_check(n, body_accessors, NULL);
    }
    for (int n = 2; n <= RANKS_MAX; n++) {
        ranks_check(n, body_skips, NULL);
        ranks_check(n, body_failures, NULL);
        ranks_check(n, body_messages, NULL);
        test_deaths(n);
        for (int change = 0; change < 3; change++) {
            ranks_check(n, body_mismatch, &change);
        }
    }
    ranks_check(1, body_no_memory, NULL);
    ranks_check(2, body_one_without_memory, NULL);
    ranks_check(3, body_one_without_memory, NULL);
    return check_result();
}
