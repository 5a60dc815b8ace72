/* Reductions whose collectives others make or look at: what is announced, and who is visible. */
#define _GNU_SOURCE

#include "reduction_messages_world.h"

#include "engine/root.h"

/* Sums that a device makes: which parameters are in them, and whether to the end. */
static void body_announced(int rank, int n_ranks, void *arg)
{
    static const float one = 1;
    fc_gradient *first = guarded_create(N_PARAMS * sizeof(*first));
    fc_gradient *second = guarded_create(N_PARAMS * sizeof(*second));
    fc_reduce_options options = {DIVISOR, false, false, false};
    uint64_t mask = 0, print = 0, print_of_second = 0, print_of_both = 0;
    const bool has_replicas = n_ranks > ((const setup *)arg)->n_shards;
    fc_reduction *r;
    world w;

    join(&w, rank, n_ranks, arg);
    r = w.owners[0].reduction;
    first[0].data = second[1].data = &one;
    CHECK_EQ(fc_reduction_announce(r, first, &options, &mask, &print), !has_replicas);
    CHECK_EQ(mask, 1);
    CHECK_EQ(fc_reduction_has_sums(r), has_replicas);
    CHECK(fc_reduction_sum(r, 0) == NULL); /* it lies there */
    CHECK(!fc_reduction_is_submitted(r));
    options.all_reduce = true;
    CHECK(fc_reduction_announce(r, second, &options, &mask, &print_of_both));
    CHECK_EQ(mask, has_replicas ? 3 : 2);
    CHECK(!fc_reduction_has_sums(r) && !fc_reduction_is_submitted(r));
    CHECK(fc_reduction_announce(r, second, &options, &mask, &print_of_second));
    CHECK_EQ(mask, 2);
    CHECK(print_of_second != print && (print_of_second == print_of_both) != has_replicas);
    CHECK_EQ(fc_reduction_traffic(r)->reductions, 3);
    guarded_destroy(first, N_PARAMS * sizeof(*first));
    guarded_destroy(second, N_PARAMS * sizeof(*second));
    leave(&w);
}

/* More parameters than there are bits in a word. */
static void body_many(int rank, int n_ranks, void *arg)
{
    enum {
        N_MANY = 70
    };
    static const float one = 1;
    const fc_reduce_options keep = {DIVISOR, false, false, false};
    fc_param params[N_MANY];
    const fc_unit_desc desc = {"many", params, N_MANY};
    uint64_t mask[2], other_mask[2], print, other_print;
    fc_transport_config config;
    fc_transport *transport = NULL;
    fc_domain *domains[2] = {NULL};
    fc_reduction *r = NULL, *next = NULL;
    ranks_host host;

    (void)arg;
    config = ranks_config(&host, 0, rank, n_ranks, DOMAINS_TIMEOUT_NS);
    CHECK_OK(fc_shm_create(&config, &transport));
    for (size_t i = 0; i < N_MANY; i++) {
        params[i] = make_param(1, 1, 1, FC_F32, true);
    }
    for (int d = 0; d < 2; d++) {
        CHECK_OK(fc_domain_create(transport, d == 0 ? FC_DOMAIN_SHARD : FC_DOMAIN_REPLICATE, &desc,
                                  1, 0, 1, &domains[d]));
    }
    CHECK_OK(fc_reduction_create(fc_domain_unit(domains[0], 0), fc_domain_unit(domains[1], 0), NULL,
                                 &ops, &r));
    CHECK_OK(fc_reduction_create(fc_domain_unit(domains[0], 0), fc_domain_unit(domains[1], 0), NULL,
                                 &ops, &next));
    for (size_t i = 0; i < N_MANY; i++) {
        fc_gradient grads[N_MANY] = {{.data = NULL}};

        grads[i].data = &one;
        CHECK(!fc_reduction_announce(r, grads, &keep, mask, &print));
        CHECK(mask[i / 64] == UINT64_C(1) << i % 64 && mask[1 - i / 64] == 0);
        CHECK(fc_reduction_has_sums(r) && fc_reduction_has_sum(r, i));
        CHECK_OK(fc_reduction_inherit(next, r));
        CHECK(fc_reduction_has_sum(next, i) && fc_reduction_sum(next, i) == NULL);
        fc_reduction_drop_sums(r);
        CHECK(!fc_reduction_has_sums(r) && !fc_reduction_has_sum(r, i));
        CHECK_OK(fc_reduction_inherit(next, r)); /* of which there is nothing to take */
        CHECK(fc_reduction_has_sum(next, i));
        grads[i].data = NULL;
        grads[(i + 1) % N_MANY].data = &one;
        CHECK(!fc_reduction_announce(r, grads, &keep, other_mask, &other_print));
        CHECK(print != other_print);
        fc_reduction_drop_sums(r);
    }
    fc_reduction_destroy(r);
    fc_reduction_destroy(next);
    fc_domain_destroy(domains[1]);
    fc_domain_destroy(domains[0]);
    fc_transport_destroy(transport);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A root is visible if any domain is. */
static void body_visible(int rank, int n_ranks, void *arg)
{
    fc_root_course root = {0};
    fc_root_unit unit;
    world w;

    join(&w, rank, n_ranks, arg);
    fc_root_unit_init(&unit);
    unit.reduction = w.owners[0].reduction;
    CHECK_EQ(fc_root_unit_options(&unit, 0).divisor, w.of->is_packed ? 1 : n_ranks);
    root.domains = w.domains;
    CHECK(!fc_root_is_visible(&root));
    for (root.n_domains = 1; root.n_domains <= w.n_domains; root.n_domains++) {
        CHECK_EQ(fc_root_is_visible(&root),
                 w.of->is_packed && (!w.of->shards_are_mapped || root.n_domains > 1));
    }
    leave(&w);
}

int main(void)
{
    static setup pair = {2, false, false, 0, false}, packed_pair = {2, false, true, 0, false};
    static setup packed_behind = {2, true, true, 0, false};

    ranks_check(2, body_announced, &pair);
    ranks_check(4, body_announced, &pair);
    ranks_check(1, body_many, NULL);
    ranks_check(2, body_visible, &pair);
    ranks_check(2, body_visible, &packed_pair);
    ranks_check(4, body_visible, &packed_behind);
    return check_result();
}
