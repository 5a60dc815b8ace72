/* Collectives over rails, and what they send. */
#define _GNU_SOURCE
#include "rails_world.h"

static const size_t sizes[] = {0, 1, 3, 1000, 5000, 200 * KIB + 7};

#define N_SIZES (sizeof(sizes) / sizeof(sizes[0]))

static void body_collectives(int rank, int n_ranks, void *arg)
{
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    for (size_t i = 0; i < N_SIZES; i++) {
        check_all_gather(&m, sizes[i], (int)i, i % 2 != 0);
        check_reduce_scatter(&m, sizes[i], FC_F32, (int)i);
        check_reduce_scatter(&m, sizes[i], FC_BF16, (int)i);
        check_all_reduce(&m, sizes[i], FC_F32, (int)i);
        check_broadcast(&m, sizes[i], (int)i % n_ranks);
        CHECK_OK(m.ops.barrier(m.ops.context));
    }
    check_all_gather(&m, 1300 * KIB, 5, false); /* three pieces */
    check_reduce_scatter(&m, 400 * KIB, FC_F32, 6);
    CHECK_EQ(m.ops.all_to_all(m.ops.context, NULL, NULL, NULL, NULL), FC_ERR_GROUP);
    destroy(&m);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_collectives(void)
{
    check_worlds(body_collectives);
}

/* Each rank sends its share to one rank of each other host, whatever their number of ranks. */
static void body_bytes(int rank, int n_ranks, void *arg)
{
    const world *w = arg;
    const size_t bytes = 100 * KIB;
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    check_all_gather(&m, bytes, 1, false);
    CHECK_EQ(fc_rails_n_hosts(&m.ops), n_hosts_of(w));
    for (int h = 0; h < n_hosts_of(w); h++) {
        CHECK_EQ(fc_rails_count(&m.ops, h).bytes, h == w->hosts[rank] ? 0 : bytes);
    }
    check_reduce_scatter(&m, bytes / 4, FC_F32, 1);
    for (int h = 0; h < n_hosts_of(w); h++) {
        uint64_t n_served = 0;

        for (int q = 0; h != w->hosts[rank] && q < n_ranks; q++) {
            n_served += w->hosts[q] == h &&
                        place_on_host(w, q) % n_on(w, w->hosts[rank]) == place_on_host(w, rank);
        }
        CHECK_EQ(fc_rails_count(&m.ops, h).bytes, h == w->hosts[rank] ? 0 : (1 + n_served) * bytes);
    }
    destroy(&m);
}

static void test_bytes(void)
{
    check_worlds(body_bytes);
}

/* Of little the first rank of a host speaks to the hosts after it, its last one to those before. */
static void body_together(int rank, int n_ranks, void *arg)
{
    static const size_t some[] = {100, 2000}; /* in the frame, and behind it */
    const world *w = arg;
    const int own = w->hosts[rank], n_local = n_on(w, own);
    uint64_t bytes = 0;
    member m;

    close_lines(n_ranks, rank);
    CHECK_OK(create(&m, arg, rank));
    for (size_t i = 0; i < 2; i++) {
        check_all_gather(&m, some[i], (int)i, false);
        bytes += (uint64_t)n_local * some[i];
        for (int h = 0; h < n_hosts_of(w); h++) {
            const int place = h > own ? 0 : n_local - 1;
            const bool speaks = h != own && place_on_host(w, rank) == place;
            const fc_rails_sent sent = fc_rails_count(&m.ops, h);

            CHECK_EQ(sent.bytes, speaks ? bytes : 0);
            CHECK_EQ(sent.messages, speaks ? (i == 0 ? 1 : 3) : 0);
        }
    }
    destroy(&m);
}

static void test_together(void)
{
    for (size_t i = 0; i < N_WORLDS; i++) {
        if (worlds[i].n_ranks > n_hosts_of(&worlds[i])) {
            check_world(&worlds[i], body_together);
        }
    }
}

int main(void)
{
    test_together();
    test_collectives();
    test_bytes();
    return check_result();
}
