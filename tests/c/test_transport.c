/* Transports: joining, regions, publishing and waiting, on 1 to 4 ranks that are processes. */
#define _GNU_SOURCE

#include "ranks.h"

#include "base/alloc.h"
#include "base/idle.h"
#include "transport/transport_impl.h"

#include <math.h>
#include <pthread.h>
#include <sys/resource.h>

#define TIMEOUT_NS (20 * FC_NS_PER_S)
#define ROUNDS 2000

typedef struct word_wait {
    const fc_word *word;
    uint64_t at_least;
} word_wait;

static bool word_ready(void *arg)
{
    const word_wait *w = arg;

    return fc_word_load(w->word) >= w->at_least;
}

static fc_transport *create(ranks_host *host, int board, int rank, int n_ranks)
{
    fc_transport_config config = ranks_config(host, board, rank, n_ranks, TIMEOUT_NS);
    fc_transport *t = NULL;

    if (n_ranks == 1) {
        config.host.exchange = NULL;
    }
    CHECK_EQ(fc_shm_create(&config, &t), FC_OK);
    if (t == NULL) {
        (void)fprintf(stderr, "%s\n", fc_last_message());
        exit(CHECK_EXIT_FAIL);
    }
    return t;
}

static fc_region *map(fc_transport *t, size_t bytes)
{
    fc_region *region = NULL;

    CHECK_EQ(fc_transport_map_region(t, "test memory", bytes, 7, &region), FC_OK);
    CHECK_OR_EXIT(region != NULL);
    return region;
}

static fc_word *word_of(fc_region *region, int rank)
{
    return (fc_word *)(void *)(region->shared + (size_t)rank * FC_CACHE_LINE);
}

static fc_status wait_for(fc_transport *t, fc_region *region, int peer, uint64_t at_least)
{
    word_wait w = {.word = word_of(region, peer), .at_least = at_least};
    fc_wait_info info = {.op = "test", .unit = "layers.3", .sequence = at_least};

    return fc_transport_wait(t, peer, word_ready, &w, &info);
}

static void meet(fc_transport *t, fc_region *region, uint64_t round)
{
    fc_transport_publish(t, word_of(region, fc_transport_rank(t)), round);
    for (int r = 0; r < fc_transport_n_ranks(t); r++) {
        CHECK_EQ(wait_for(t, region, r, round), FC_OK);
    }
}

/* Publish, wait for all: each round a barrier. Writes made before it must be seen after it. */
static void body_rounds(int rank, int n_ranks, void *arg)
{
    ranks_host host;
    int descriptors = count_descriptors();
    fc_transport *t = create(&host, 0, rank, n_ranks);
    fc_region *region = map(t, 4 * FC_PAGE);
    int64_t *values = (int64_t *)(void *)(region->shared + FC_PAGE);
    const int64_t *seen = (const int64_t *)(const void *)(region->view + FC_PAGE);
    uint64_t waits;
    uint64_t wait_ns;

    (void)arg;
    CHECK(fc_transport_is_mapped(t));
    CHECK(fc_transport_messages(t) == NULL);
    CHECK_EQ(fc_transport_rank(t), rank);
    CHECK_EQ(fc_transport_n_ranks(t), n_ranks);
    CHECK_EQ(fc_transport_global_rank(t, n_ranks - 1), 10 + n_ranks - 1);
    CHECK_STR(fc_transport_name(t), "test group");
    CHECK_EQ(region->bytes, 4 * FC_PAGE);
    for (uint64_t i = 1; i <= ROUNDS; i++) {
        values[rank * 2 + (int)(i % 2)] = (int64_t)i;
        fc_transport_publish(t, word_of(region, rank), i);
        for (int r = 0; r < n_ranks; r++) {
            CHECK_EQ(wait_for(t, region, r, i), FC_OK);
            CHECK_EQ(seen[r * 2 + (int)(i % 2)], i);
        }
    }
    fc_transport_wait_stats(t, &waits, &wait_ns);
    CHECK(n_ranks > 1 || waits == 0);
    CHECK_EQ(host.entered, 0);
    CHECK_EQ(host.calls, n_ranks == 1 ? 0 : 2);
    CHECK_EQ(fc_transport_check(t), FC_OK);
    fc_transport_destroy(t);
    /* The region outlives the transport. */
    CHECK_EQ(seen[rank * 2], ROUNDS);
    CHECK_EQ(count_segments(), 2);
    fc_region_release(region);
    CHECK_EQ(count_segments(), 0);
    CHECK_EQ(count_descriptors(), descriptors);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A rank that sleeps must be woken, and the sleeping must have been bracketed for the host. */
static void body_sleep(int rank, int n_ranks, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, 0, rank, n_ranks);
    fc_region *region = map(t, FC_PAGE);
    uint64_t waits;
    uint64_t wait_ns;

    (void)arg;
    for (uint64_t i = 1; i <= 5; i++) {
        if ((int)i % n_ranks == rank) {
            (void)usleep(30000);
        }
        meet(t, region, i);
    }
    fc_transport_wait_stats(t, &waits, &wait_ns);
    CHECK(waits > 0);
    CHECK(wait_ns > 0);
    CHECK_EQ(host.entered, 0);
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* What there is to do: in waits that yield, and in those that would sleep. */
static int n_steps;

static bool take_a_step(void *context)
{
    const int *const total = context;

    (void)usleep(200);
    n_steps++;
    return n_steps < *total;
}

static void body_idle(int rank, int n_ranks, void *arg)
{
    int few = 3, many = 1000000;
    ranks_host host;
    fc_transport *t = create(&host, 0, rank, n_ranks);
    fc_region *region = map(t, FC_PAGE);

    (void)arg;
    for (int i = 0; i < 2; i++) {
        n_steps = 0;
        CHECK(fc_idle_begin(take_a_step, i == 0 ? &few : &many));
        if (rank == 1) {
            (void)usleep(100000);
            CHECK_EQ(n_steps, 0); /* this rank has not waited */
        }
        meet(t, region, (uint64_t)i + 1);
        if (rank == 0) {
            CHECK(i == 0 ? n_steps == few : n_steps > 10);
        }
        fc_idle_end(&few);
        fc_idle_end(&many);
        CHECK(!fc_idle_step());
    }
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* Writes to a view stay with their rank until they are discarded. */
static void body_view(int rank, int n_ranks, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, 0, rank, n_ranks);
    fc_region *region = map(t, 3 * FC_PAGE + 5);

    (void)arg;
    /* The words at the front may have been published already. */
    for (size_t i = RANKS_MAX * FC_CACHE_LINE; i < region->bytes; i++) {
        CHECK_OR_EXIT(region->view[i] == 0);
    }
    region->view[FC_PAGE] = (char)(rank + 1);
    region->view[2 * FC_PAGE] = (char)(rank + 1);
    meet(t, region, 1);
    CHECK_EQ(region->shared[FC_PAGE], 0);
    CHECK_EQ(region->view[FC_PAGE], rank + 1);
    meet(t, region, 2);
    if (rank == n_ranks - 1) {
        region->shared[FC_PAGE] = 77;
    }
    meet(t, region, 3);
    CHECK_EQ(region->view[FC_PAGE], rank + 1);
    fc_region_discard_writes(region, 0, 0);
    fc_region_discard_writes(region, region->bytes, 1);
    fc_region_discard_writes(region, 1, region->bytes);
    CHECK_EQ(region->view[FC_PAGE], rank + 1);
    fc_region_discard_writes(region, FC_PAGE + 100, 10);
    CHECK_EQ(region->view[FC_PAGE], 77);
    CHECK_EQ(region->view[2 * FC_PAGE], rank + 1);
    fc_region_discard_writes(region, 0, region->bytes);
    CHECK_EQ(region->view[2 * FC_PAGE], 0);
    fc_region_retain(region);
    fc_region_release(region);
    CHECK_EQ(region->view[FC_PAGE], 77);
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* Ranks that want different memory all learn so; then the transport goes on. */
static void body_mismatch(int rank, int n_ranks, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, 0, rank, n_ranks);
    bool is_last = rank == n_ranks - 1;
    fc_region *region = NULL;

    (void)arg;
    CHECK_EQ(fc_transport_map_region(t, "slots", is_last ? 8192 : 4096, 1, &region),
             FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "slots (8192 bytes");
    CHECK_HAS(fc_last_message(), "slots (4096 bytes");
    CHECK_HAS(fc_last_message(), "rank 10");
    CHECK_EQ(fc_transport_map_region(t, "slots", 4096, is_last, &region), FC_ERR_MISMATCH);
    CHECK_EQ(fc_transport_map_region(t, is_last ? "other" : "slots", 4096, 1, &region),
             FC_ERR_MISMATCH);
    CHECK_HAS(fc_last_message(), "other");
    CHECK(region == NULL);
    CHECK_EQ(fc_transport_check(t), FC_OK);
    region = map(t, 100);
    fc_region_release(region);
    CHECK_EQ(count_segments(), 1);
    fc_transport_destroy(t);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Missing memory, on the creating rank and on another one. */
static void body_no_memory(int rank, int n_ranks, void *arg)
{
    struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
    struct rlimit small = {1 << 20, RLIM_INFINITY};
    ranks_host host;
    fc_transport *t = create(&host, 0, rank, n_ranks);
    int descriptors = count_descriptors();
    fc_region *region = NULL;

    (void)arg;
    (void)setrlimit(RLIMIT_FSIZE, &small);
    CHECK_EQ(fc_transport_map_region(t, "slots", 4 << 20, 1, &region), FC_ERR_NOMEM);
    CHECK_HAS(fc_last_message(), "rank 10");
    CHECK_HAS(fc_last_message(), "file size limit");
    (void)setrlimit(RLIMIT_FSIZE, &unlimited);
    for (int culprit = 0; culprit < n_ranks; culprit++) {
        char name[16];

        fc_alloc_fail_after(rank == culprit ? 0 : -1);
        CHECK_EQ(fc_transport_map_region(t, "slots", 4096, 1, &region), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        (void)snprintf(name, sizeof(name), "rank %d", 10 + culprit);
        CHECK_HAS(fc_last_message(), name);
    }
    CHECK(region == NULL);
    CHECK_EQ(count_descriptors(), descriptors);
    region = map(t, 100);
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* No descriptors left on one rank: the peers hear of it. */
static void body_no_descriptors(int rank, int n_ranks, void *arg)
{
    struct rlimit before;
    struct rlimit none;
    ranks_host host;
    fc_transport *t = create(&host, 0, rank, n_ranks);
    fc_region *region = NULL;

    (void)arg;
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
    none = before;
    none.rlim_cur = 3;
    if (rank == n_ranks - 1) {
        (void)setrlimit(RLIMIT_NOFILE, &none);
    }
    CHECK(fc_transport_map_region(t, "slots", 4096, 1, &region) != FC_OK);
    CHECK_HAS(fc_last_message(), n_ranks == 1 ? "rank 10" : n_ranks == 2 ? "rank 11" : "rank 1");
    (void)setrlimit(RLIMIT_NOFILE, &before);
    region = map(t, 4096);
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* Each request of a rank (`arg`), or of all of them, fails once; create and map must end alike on
 * all ranks and leak nothing. */
static void body_alloc_sweep(int rank, int n_ranks, void *arg)
{
    const bool fails = arg == NULL || *(const int *)arg == rank;
    int n = 0;

    for (bool is_done = false; !is_done; n++) {
        ranks_host host;
        fc_transport_config config = ranks_config(&host, 0, rank, n_ranks, TIMEOUT_NS);
        fc_transport *t = NULL;
        fc_region *region = NULL;
        fc_status st;

        fc_alloc_fail_after(fails ? n : -1);
        st = fc_shm_create(&config, &t);
        if (st == FC_OK) {
            st = fc_transport_map_region(t, "slots", 4096, 1, &region);
        } else {
            CHECK(t == NULL);
        }
        fc_alloc_fail_after(-1);
        is_done = st == FC_OK;
        CHECK(is_done || st == FC_ERR_NOMEM);
        CHECK(is_done || region == NULL);
        fc_region_release(region);
        fc_transport_destroy(t);
        CHECK_EQ(fc_alloc_live(), 0);
        CHECK_EQ(count_segments(), 0);
        CHECK_OR_EXIT(n < 100);
    }
    CHECK(n > 5);
}

/* Ranks that are threads of one process are refused, on all of them. */
typedef struct thread_rank {
    int rank;
    fc_status status;
    char text[FC_MESSAGE_BYTES];
} thread_rank;

static void *join_as_thread(void *arg)
{
    thread_rank *t = arg;
    ranks_host host;
    fc_transport_config config = ranks_config(&host, 0, t->rank, 2, TIMEOUT_NS);
    fc_transport *transport = NULL;

    t->status = fc_shm_create(&config, &transport);
    (void)snprintf(t->text, sizeof(t->text), "%s", fc_last_message());
    return NULL;
}

static void test_threads_are_refused(void)
{
    thread_rank ranks[2] = {{.rank = 0}, {.rank = 1}};
    pthread_t threads[2];

    ranks_init();
    for (int r = 0; r < 2; r++) {
        CHECK_OR_EXIT(pthread_create(&threads[r], NULL, join_as_thread, &ranks[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        (void)pthread_join(threads[r], NULL);
        CHECK_EQ(ranks[r].status, FC_ERR_UNSUPPORTED);
        CHECK_HAS(ranks[r].text, "same process id");
    }
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Two groups over the same ranks, and one that holds only some of them, do not touch each other. */
static void body_groups(int rank, int n_ranks, void *arg)
{
    ranks_host hosts[3];
    fc_transport *all = create(&hosts[0], 0, rank, n_ranks);
    fc_transport *half = create(&hosts[1], 1 + rank % 2, rank / 2, n_ranks / 2);
    fc_region *wide = map(all, FC_PAGE);
    fc_region *narrow = map(half, 2 * FC_PAGE);

    (void)arg;
    for (uint64_t i = 1; i <= 200; i++) {
        fc_transport_publish(all, word_of(wide, rank), i);
        fc_transport_publish(half, word_of(narrow, rank / 2), 3 * i);
        for (int r = 0; r < n_ranks / 2; r++) {
            CHECK_EQ(wait_for(half, narrow, r, 3 * i), FC_OK);
        }
        for (int r = 0; r < n_ranks; r++) {
            CHECK_EQ(wait_for(all, wide, r, i), FC_OK);
        }
    }
    fc_region_release(wide);
    fc_region_release(narrow);
    fc_transport_destroy(all);
    fc_transport_destroy(half);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_times_of_notices(void)
{
    static const int64_t expected_s[] = {5, 15, 45, 120, 420, 720};

    for (int i = 0; i < 6; i++) {
        CHECK_EQ(fc_transport_notice_ns(i), expected_s[i] * FC_NS_PER_S);
    }
}

static void test_bad_arguments(void)
{
    ranks_host host;
    fc_transport_config config;
    fc_transport *t = NULL;
    fc_region *region = NULL;
    fc_wait_info info = {.op = "test"};
    fc_word word = {0};
    word_wait w = {.word = &word, .at_least = 1};

    ranks_init();
    config = ranks_config(&host, 0, 2, 2, TIMEOUT_NS);
    CHECK_EQ(fc_shm_create(&config, &t), FC_ERR_INVALID);
    config = ranks_config(&host, 0, 0, 2, 0);
    CHECK_EQ(fc_shm_create(&config, &t), FC_ERR_INVALID);
    config = ranks_config(&host, 0, 0, 2, TIMEOUT_NS);
    config.host.exchange = NULL;
    CHECK_EQ(fc_shm_create(&config, &t), FC_ERR_INVALID);
    CHECK(t == NULL);
    t = create(&host, 0, 0, 1);
    CHECK_EQ(fc_transport_wait(t, 0, word_ready, &w, &info), FC_ERR_INVALID);
    CHECK_EQ(fc_transport_wait(t, 5, word_ready, &w, &info), FC_ERR_INVALID);
    CHECK_EQ(fc_transport_map_region(t, "slots", SIZE_MAX, 1, &region), FC_ERR_INVALID);
    CHECK_EQ(fc_transport_global_rank(t, 5), -1);
    CHECK_EQ(fc_transport_check(t), FC_OK);
    fc_transport_destroy(t);
    fc_transport_destroy(NULL);
    fc_region_release(NULL);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_kinds(void)
{
    ranks_host host;
    fc_transport_config config;
    const fc_message_ops ops = {.context = NULL};
    fc_transport *t = NULL;

    ranks_init();
    config = ranks_config(&host, 0, 0, 1, FC_NS_PER_S);
    CHECK_EQ(fc_transport_create("pigeon", &config, &ops, &t), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "transport kind 'pigeon': expected 'shm', or 'callback'");
    CHECK_EQ(fc_transport_create("callback", &config, &ops, &t), FC_ERR_INVALID);
    CHECK_EQ(fc_transport_create("shm", &config, &ops, &t), FC_OK);
    CHECK_STR(fc_transport_kind(t), "shm");
    fc_transport_destroy(t);
    CHECK_EQ(fc_transport_timeout_ns(0), 0);
    CHECK_EQ(fc_transport_timeout_ns(-1), 0);
    CHECK_EQ(fc_transport_timeout_ns((double)NAN), 0);
    CHECK_EQ(fc_transport_timeout_ns(0.5), FC_NS_PER_S / 2);
    CHECK_EQ(fc_transport_timeout_ns(1e300), INT64_MAX);
}

int main(void)
{
    int first = 0;

    const time_t start = time(NULL);

    for (int n = 1; n <= RANKS_MAX; n++) {
        ranks_check(n, body_rounds, NULL);
        ranks_check(n, body_view, NULL);
        ranks_check(n, body_no_memory, NULL);
        ranks_check(n, body_no_descriptors, NULL);
        ranks_check(n, body_alloc_sweep, NULL);
        ranks_check(n, body_alloc_sweep, &first);
        ranks_check(n, body_alloc_sweep, &(int){n - 1});
    }
    for (int n = 2; n <= RANKS_MAX; n++) {
        ranks_check(n, body_sleep, NULL);
        ranks_check(n, body_mismatch, NULL);
    }
    ranks_check(2, body_idle, NULL);
    ranks_check(4, body_groups, NULL);
    test_threads_are_refused();
    test_bad_arguments();
    test_times_of_notices();
    CHECK_EQ(count_shm_files_since(start), 0);
    test_kinds();
    return check_result();
}
