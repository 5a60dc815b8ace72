/* Reductions: the types in which gradients travel, what is copied of them, and where there is no
 * memory for it. */
#define _GNU_SOURCE

#include "reduction_world.h"
#include "refused_messages.h"

/* Whatever memory there is none for is told, and nothing of it is left. */
static void body_no_memory(int rank, int n_ranks, void *arg)
{
    fc_status st = FC_ERR_NOMEM;
    fc_reduction *unmade = NULL;
    int n_failures = 0;
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    for (int n = 0; n < 2; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_reduction_create(w.owners[0].shard, NULL, w.slots, &ops, &unmade),
                 FC_ERR_NOMEM);
        CHECK_HAS(fc_last_message(), "no memory for the reductions of unit 'first'");
    }
    for (int n = 0; st != FC_OK; n++) {
        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        set_all_reduce(&w, false);
        fc_alloc_fail_after(n);
        st = submit_of(&w, 0, 0, false, (fc_dtype[]){FC_BF16, FC_BF16});
        st = st == FC_OK ? fc_reduction_finish_all(w.domains, w.n_domains) : st;
        fc_alloc_fail_after(-1);
        atomic_fetch_add(&ranks_common->values[1], 1);
        CHECK(ranks_await(1, (n + 1) * n_ranks));
        if (st != FC_OK) {
            CHECK_EQ(st, FC_ERR_NOMEM);
            n_failures++;
            for (size_t d = 0; d < w.n_domains; d++) {
                fc_domain_fail(w.domains[d]);
            }
            CHECK_EQ(n_released, n_submitted);
            fc_reduction_drop_sums(w.owners[0].reduction);
        } else {
            close_all(&w);
        }
    }
    CHECK_EQ(n_failures > 0, n_ranks > w.n_shards || w.n_domains > 1);
    set_all_reduce(&w, true);
    open(&w, FC_PHASE_FORWARD);
    close_all(&w);
    forget(&w);
    fc_reduction_drop_sums(w.owners[0].reduction);
    CHECK_OK(backward(&w, 2, false));
    check_sums(&w, 0, 2, 2, n_ranks, 0.5F);
    leave(&w);
}

/* Gradients travel in their own type where all have the same; else in that of the reduction. */
static void body_types(int rank, int n_ranks, void *arg)
{
    static const fc_dtype types[][N_PARAMS] = {
        {FC_F32, FC_F32}, {FC_BF16, FC_BF16}, {FC_BF16, FC_F32}, {FC_F32, FC_BF16}};
    static const size_t item_of[] = {4, 2, 4, 4}; /* as they travel */
    world w;

    join(&w, rank, n_ranks, *(const int *)arg);
    set_all_reduce(&w, true);
    for (int i = 0; i < 16; i++) {
        const fc_dtype *type = types[i % 4];
        const bool is_exclusive = i >= 8, is_alone = n_ranks == 1;
        const int seed = i / 4;
        const bool is_borrowed =
            is_exclusive && w.n_shards > 1 && (i % 4 < 2 || is_missing(seed, rank, 1));
        const fc_traffic before = *fc_reduction_traffic(w.owners[0].reduction);
        fc_traffic now;
        const size_t n_replicas = (size_t)(n_ranks / w.n_shards);
        size_t copied = 0, reduced = 0, all_reduced = 0;

        open(&w, FC_PHASE_FORWARD);
        close_all(&w);
        open(&w, FC_PHASE_BACKWARD);
        CHECK_OK(submit_of(&w, 0, seed, is_exclusive, type));
        CHECK_EQ(n_released, n_submitted - is_borrowed);
        CHECK_OK(fc_reduction_finish_all(w.domains, w.n_domains));
        close_all(&w);
        check_sums(&w, 0, seed, seed, n_ranks, 0.5F);
        forget(&w);
        for (size_t k = 0; k < N_PARAMS; k++) {
            const fc_param *p = &fc_unit_layout(w.owners[0].shard)->params[k];
            const size_t rows = p->rows - (is_borrowed ? p->own_rows : 0);
            /* What is missing has no type; alone, what has the reduction's own is not moved. */
            const size_t item = is_missing(seed, rank, 1) && i % 4 == 2 ? 2 : item_of[i % 4];
            const bool stays =
                is_alone && (i % 4 == 0 || (is_missing(seed, rank, 1) && i % 4 == 3));

            /* Of what a rank of its shard group has. */
            if (w.n_shards > 1 || !is_missing(seed, rank, k)) {
                all_reduced += p->own_rows * p->inner * sizeof(float);
            }
            if (!is_missing(seed, rank, k) && !stays) {
                copied += rows * p->inner * (is_alone ? sizeof(float) : item);
            }
            if (!is_missing(seed, rank, k)) {
                reduced += (size_t)(w.n_shards - 1) * p->own_rows * p->inner * sizeof(float);
            }
        }
        now = *fc_reduction_traffic(w.owners[0].reduction);
        if (w.n_domains == 1 || w.n_shards == 1) {
            CHECK_EQ(now.copied - before.copied, copied);
        }
        CHECK_EQ(now.all_reduced - before.all_reduced,
                 n_replicas > 1 ? 2 * (n_replicas - 1) * all_reduced / n_replicas : 0);
        CHECK(!fc_reduction_is_submitted(w.owners[0].reduction) || w.n_domains == 1);
        CHECK_EQ(now.reduced - before.reduced, reduced);
        CHECK_EQ(now.reductions - before.reductions, w.n_shards > 1);
        CHECK_EQ(now.all_reductions - before.all_reductions, n_replicas > 1);
    }
    leave(&w);
}

static fc_status note_flat(void *of, const fc_reduce_options *options)
{
    (void)options;
    ((owner *)of)->has[0] = true;
    return FC_OK;
}

static void free_memory(void *memory)
{
    n_released++;
    free(memory);
}

static size_t find_none(void *of, size_t from)
{
    (void)of, (void)from;
    return SIZE_MAX;
}

/* Of a unit whose gradients are left in the buffer. */
static const fc_reduction_ops flat_ops = {get_options, get_flat, note_flat,   prepare,
                                          get_target,  assign,   free_memory, wait_for_room,
                                          find_none,   NULL};

/* One unit of one parameter. */
typedef struct single {
    owner o;
    ranks_host host;
    fc_transport *transport;
    fc_domain *domain;
    fc_slots *slots;
} single;

/* In its backward. */
static void join_single(single *s, int rank, int n_ranks, size_t inner)
{
    fc_param param = make_param(1, (size_t)n_ranks, inner, FC_F32, true);
    const fc_unit_desc desc = {"single", &param, 1};
    const fc_transport_config config = ranks_config(&s->host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);

    s->o = (owner){.all_reduce = true, .divisor = 1};
    n_released = 0;
    CHECK_OK(fc_slots_create(&s->slots));
    CHECK_OK(fc_shm_create(&config, &s->transport));
    CHECK_OK(fc_domain_create(s->transport, FC_DOMAIN_SHARD, &desc, 1, rank, n_ranks, &s->domain));
    s->o.shard = fc_domain_unit(s->domain, 0);
    s->o.flat = malloc(fc_unit_layout(s->o.shard)->grad_bytes);
    CHECK_OR_EXIT(s->o.flat != NULL);
    CHECK_OK(fc_reduction_create(s->o.shard, NULL, s->slots, &flat_ops, &s->o.reduction));
    fc_reduction_attach(s->o.reduction, &s->o);
    fc_domain_open(s->domain, (fc_opening){.phase = FC_PHASE_FORWARD});
    CHECK_OK(fc_domain_close(s->domain));
    fc_domain_open(s->domain, (fc_opening){.phase = FC_PHASE_BACKWARD});
}

static void leave_single(single *s)
{
    CHECK_OK(fc_domain_close(s->domain));
    fc_reduction_destroy(s->o.reduction);
    fc_domain_destroy(s->domain);
    fc_transport_destroy(s->transport);
    fc_slots_destroy(s->slots);
    free(s->o.flat);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Large gradients are given back while backward goes on, small ones never taken. */
static void body_large(int rank, int n_ranks, void *arg)
{
    static const size_t inner_of_case[] = {2048, FC_BORROWED_BYTES_MAX / sizeof(float) / 2,
                                           FC_BORROWED_BYTES_MAX / sizeof(float)};
    const fc_reduce_options options = {1, true, false, false};

    (void)arg;
    for (int i = 0; i < 3; i++) {
        const size_t numel = (size_t)n_ranks * inner_of_case[i];
        static single s;
        float *memory = malloc(numel * sizeof(float) + sizeof(fc_gradient));
        fc_gradient *grad = (fc_gradient *)(void *)(memory + numel);

        CHECK_OR_EXIT(memory != NULL);
        join_single(&s, rank, n_ranks, inner_of_case[i]);
        for (size_t k = 0; k < numel; k++) {
            memory[k] = (float)(k % 97 + (size_t)rank);
        }
        *grad = (fc_gradient){memory, FC_F32, true, true};
        CHECK_OK(fc_reduction_submit(s.o.reduction, grad, memory, &options));
        CHECK_EQ(n_released, i == 0);
        fc_reduction_return_large(s.domain);
        CHECK_EQ(n_released, i != 1);
        CHECK_EQ(fc_reduction_traffic(s.o.reduction)->copied, /* each part once */
                 (numel - (i == 1 ? inner_of_case[i] : 0)) * sizeof(float));
        CHECK_OK(fc_reduction_finish_all(&s.domain, 1));
        CHECK_EQ(n_released, 1);
        CHECK(s.o.has[0]);
        for (size_t k = 0; k < inner_of_case[i]; k++) {
            const size_t at = (size_t)rank * inner_of_case[i] + k;
            float wanted = 0;

            for (int r = 0; r < n_ranks; r++) {
                wanted += (float)(at % 97 + (size_t)r);
            }
            if (s.o.flat[k] != wanted) {
                CHECK_MSG(false, "[%zu]: %g, not %g", k, (double)s.o.flat[k], (double)wanted);
                break;
            }
        }
        leave_single(&s);
    }
}

/* Which parameters a sum holds is said behind it, also where that fills its pages. */
static void body_page(int rank, int n_ranks, void *arg)
{
    static const size_t numel = FC_PAGE / sizeof(float);
    const fc_reduce_options options = {1, true, false, false};
    fc_gradient *grad = malloc(sizeof(*grad) + numel * fc_dtype_bytes(FC_BF16));
    static single s;

    (void)arg;
    CHECK_OR_EXIT(grad != NULL);
    join_single(&s, rank, n_ranks, numel);
    for (size_t k = 0; k < numel; k++) {
        s.o.flat[k] = (float)(k % 97);
    }
    fc_kern_cast(FC_F32, FC_BF16)(grad + 1, s.o.flat, numel);
    *grad = (fc_gradient){grad + 1, FC_BF16, true, true};
    memset(s.o.flat, 0, FC_PAGE);
    CHECK_OK(fc_reduction_submit(s.o.reduction, grad, grad, &options));
    CHECK_EQ(fc_slots_bytes(s.slots), 2 * FC_PAGE);
    CHECK(s.o.has[0]);
    for (size_t k = 0; k < numel; k++) {
        CHECK(s.o.flat[k] == (float)(k % 97));
    }
    leave_single(&s);
}

/* Memory that slots give out next has been used before. */
static void fill_slot(fc_slots *slots, size_t bytes)
{
    void *memory = NULL;

    CHECK_OK(fc_slots_acquire(slots, bytes, &memory));
    memset(memory, 0xff, bytes);
    fc_slots_release(slots, memory);
}

/* As many parameters as a word of a mask has bits, and an input behind them: one backward's sums
 * wait for the next one's, in another reduction; a third one's go alone. Between replicas in shared
 * memory, or to one alone over messages.
 */
static void body_word(int rank, int n_ranks, void *arg)
{
    enum {
        N = 64
    };
    static const float one = 1;
    static owner o;
    const bool is_mapped = n_ranks > 1;
    fc_param params[N + 1];
    const fc_unit_desc desc = {"word", params, N};
    fc_transport *transports[2];
    fc_domain *domains[2];
    fc_slots *slots = NULL;
    fc_reduction *former;
    ranks_host hosts[2];
    fc_unit *replicate;

    (void)arg;
    o = (owner){.divisor = 1};
    n_released = 0;
    CHECK_OK(fc_slots_create(&slots));
    for (size_t i = 0; i <= N; i++) {
        params[i] = make_param(1, 1, i < N ? 1 : FC_ALIGN / 2, FC_F32, true);
        params[i].is_counted = !is_mapped;
    }
    params[0].n_inputs = 1;
    params[0].is_made = params[N].is_made = true;
    params[N].has_grad = false;
    for (int d = 0; d < 2; d++) {
        const fc_transport_config config =
            ranks_config(&hosts[d], d == 0 ? rank : n_ranks, d == 0 ? 0 : rank,
                         d == 0 ? 1 : n_ranks, DOMAINS_TIMEOUT_NS);

        CHECK_OK(d == 0 || is_mapped
                     ? fc_shm_create(&config, &transports[d])
                     : fc_callback_create(&config, &refused_messages, &transports[d]));
        CHECK_OK(fc_domain_create(transports[d], d == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE,
                                  &desc, 1, 0, 1, &domains[d]));
    }
    fc_domain_link(domains, 2);
    o.shard = fc_domain_unit(domains[0], 0);
    replicate = fc_domain_unit(domains[1], 0);
    o.flat = malloc(fc_unit_layout(o.shard)->grad_bytes);
    CHECK_OR_EXIT(o.flat != NULL);
    CHECK_OK(fc_reduction_create(o.shard, replicate, slots, &flat_ops, &o.reduction));
    fc_reduction_attach(o.reduction, &o);
    for (int n = 0; n < 3; n++) {
        const fc_reduce_options options = {1, n > 0, false, false};
        fc_gradient *grads = calloc(N, sizeof(*grads));

        CHECK_OR_EXIT(grads != NULL);
        for (size_t i = 0; i < N; i++) {
            grads[i] = (fc_gradient){.data = &one, .dtype = FC_F32, .is_wanted = true};
        }
        o.all_reduce = options.all_reduce;
        o.has[0] = false;
        fill_slot(slots, fc_unit_layout(o.shard)->part_bytes + FC_PAGE);
        for (int k = 0; k < 4; k++) {
            fc_domain_open(
                domains[k % 2],
                (fc_opening){k < 2 ? FC_PHASE_FORWARD : FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
            if (k < 2) {
                CHECK_OK(fc_domain_close(domains[k]));
            }
        }
        CHECK_OK(fc_reduction_submit(o.reduction, grads, grads, &options));
        CHECK_OK(fc_reduction_finish_all(domains, 2));
        CHECK_OK(fc_domain_close(domains[0]));
        CHECK_OK(fc_domain_close(domains[1]));
        CHECK_EQ(o.has[0], n > 0);
        for (size_t i = 0; i < N && n > 0; i++) {
            const char *at = (const char *)o.flat + fc_unit_layout(o.shard)->params[i].grad_at;

            CHECK(*(const float *)(const void *)at == (float)(n == 1 ? 2 * n_ranks : n_ranks));
        }
        if (n == 0) {
            former = o.reduction;
            CHECK_OK(fc_reduction_create(o.shard, replicate, slots, &flat_ops, &o.reduction));
            fc_reduction_attach(o.reduction, &o);
            CHECK_OK(fc_reduction_inherit(o.reduction, former));
            fc_reduction_destroy(former);
        }
        CHECK_EQ(fc_reduction_traffic(o.reduction)->all_reduced,
                 (size_t)n * 2 * (size_t)(n_ranks - 1) * N * sizeof(one) / (size_t)n_ranks);
    }
    CHECK_EQ(n_released, 3);
    fc_reduction_destroy(o.reduction);
    for (int d = 2; d-- > 0;) {
        fc_domain_destroy(domains[d]);
        fc_transport_destroy(transports[d]);
    }
    fc_slots_destroy(slots);
    free(o.flat);
    CHECK_EQ(fc_alloc_live(), 0);
}

int main(void)
{
    static int one = 1, two = 2, three = 3, lone_one = -1;

    ranks_check(1, body_no_memory, &lone_one);
    ranks_check(2, body_no_memory, &two);
    ranks_check(2, body_no_memory, &one);
    ranks_check(4, body_no_memory, &two);
    ranks_check(4, body_types, &two);
    ranks_check(1, body_types, &one);
    ranks_check(2, body_types, &one);
    ranks_check(2, body_types, &two);
    ranks_check(3, body_types, &three);
    ranks_check(2, body_large, NULL);
    ranks_check(1, body_page, NULL);
    ranks_check(1, body_word, NULL);
    ranks_check(2, body_word, NULL);
    return check_result();
}
