/* What happens to the others when a rank dies, stops, comes late, fails or is interrupted.
 *
 * Survivors must end with the reason long before the time limit: a status other than FC_ERR_TIMEOUT
 * proves that.
 */
#define _GNU_SOURCE

#include "ranks.h"

#include "base/alloc.h"
#include "comm/comm.h"

#define TIMEOUT_NS (20 * FC_NS_PER_S)
#define ROUNDS 60
#define DEATH_ROUND 30
#define RANDOM_KILLS 24

/* Where the victim dies, and how. */
typedef enum fault_point {
    BEFORE_PUBLISH,
    AFTER_PUBLISH,
    WHILE_YIELDING,
    BEFORE_SLEEP,
    AFTER_SLEEP,
    BEFORE_MAPPING,
    AFTER_MAPPING,
    POINT_COUNT
} fault_point;

typedef enum fault_kind {
    KILLED,
    EXITED,
    FINISHED,
    ENDED,
    RAISED,
    KIND_COUNT
} fault_kind;

typedef struct fault {
    fault_point point;
    fault_kind kind;
} fault;

/* Values in ranks_common. */
enum {
    PIDS = 0,
    ROUNDS_DONE = 8,
    STARTED = 16
};

/* As the others say it. */
static const char *const ends[KIND_COUNT] = {
    [KILLED] = " was killed, or left by os._exit while",
    [EXITED] = " was killed, or left by os._exit while",
    [FINISHED] = " finished while",
    [ENDED] = " ended its script while",
    [RAISED] = " ended its script by an exception while",
};

static fault_point armed = POINT_COUNT;
static fault_kind armed_kind;
static fc_transport *armed_transport;

static void die_at(fault_point point)
{
    if (point != armed) {
        return;
    }
    switch (armed_kind) {
    case FINISHED:
        fc_transport_destroy(armed_transport);
        _exit(0);
    case ENDED:
        fc_transport_tell_end(FC_END_IN_ORDER);
        _exit(0);
    case RAISED:
        fc_transport_tell_end(FC_END_BY_EXCEPTION);
        _exit(1);
    case EXITED:
        _exit(0);
    default:
        (void)kill(getpid(), SIGKILL);
    }
}

typedef struct word_wait {
    const fc_word *word;
    uint64_t at_least;
    bool was_asked;
} word_wait;

static bool word_ready(void *arg)
{
    word_wait *w = arg;
    bool is_ready = fc_word_load(w->word) >= w->at_least;

    if (!is_ready && w->was_asked) {
        die_at(WHILE_YIELDING);
    }
    w->was_asked = true;
    return is_ready;
}

static void enter_wait(void *context)
{
    (void)context;
    die_at(BEFORE_SLEEP);
}

static void leave_wait(void *context)
{
    (void)context;
    die_at(AFTER_SLEEP);
}

static fc_word *word_of(fc_region *region, int rank)
{
    return (fc_word *)(void *)(region->shared + (size_t)rank * FC_CACHE_LINE);
}

static fc_status wait_for(fc_transport *t, fc_region *region, int peer, uint64_t at_least)
{
    word_wait w = {.word = word_of(region, peer), .at_least = at_least};
    fc_wait_info info = {.op = "reduce-scatter", .unit = "layers.3", .sequence = at_least};

    return fc_transport_wait(t, peer, word_ready, &w, &info);
}

/* One round: publish, wait for everybody. */
static fc_status play_round(fc_transport *t, fc_region *region, uint64_t round)
{
    die_at(BEFORE_PUBLISH);
    fc_transport_publish(t, word_of(region, fc_transport_rank(t)), round);
    die_at(AFTER_PUBLISH);
    for (int r = 0; r < fc_transport_n_ranks(t); r++) {
        FC_TRY(wait_for(t, region, r, round));
    }
    return FC_OK;
}

static fc_transport *create(ranks_host *host, int rank, int n_ranks, int64_t timeout_ns)
{
    fc_transport_config config = ranks_config(host, 0, rank, n_ranks, timeout_ns);
    fc_transport *t = NULL;

    config.host.enter_wait = enter_wait;
    config.host.leave_wait = leave_wait;
    CHECK_OR_EXIT(fc_shm_create(&config, &t) == FC_OK);
    return t;
}

/* The text is there, names the victim, and later calls repeat it at once. */
static void check_broken(fc_transport *t, fc_status st, const char *part)
{
    char first[FC_MESSAGE_BYTES];

    (void)snprintf(first, sizeof(first), "%s", fc_last_message());
    CHECK_EQ(st, FC_ERR_PEER);
    CHECK_HAS(first, part);
    CHECK_HAS(first, "test group");
    CHECK_EQ(fc_transport_check(t), FC_ERR_BROKEN);
    CHECK_HAS(fc_last_message(), part);
}

static fc_status play_with_mapping(fc_transport *t, fc_region **region)
{
    fc_status st;

    die_at(BEFORE_MAPPING);
    st = fc_transport_map_region(t, "test memory", FC_PAGE, 7, region);
    die_at(AFTER_MAPPING);
    return st;
}

/* The last rank dies; FINISHED also ends in order, which is the same error to those who still wait.
 */
static void body_death(int rank, int n, void *arg)
{
    const fault *f = arg;
    bool is_victim = rank == n - 1;
    ranks_host host;
    fc_transport *t = create(&host, rank, n, TIMEOUT_NS);
    fc_region *region = NULL;
    fc_status st;
    char name[48], end[FC_END_BYTES];

    armed_kind = f->kind;
    armed_transport = t;
    if (is_victim && f->point >= BEFORE_MAPPING) {
        armed = f->point;
    }
    st = play_with_mapping(t, &region);
    for (uint64_t i = 1; i <= ROUNDS && st == FC_OK; i++) {
        if (i == DEATH_ROUND) {
            armed = is_victim ? f->point : POINT_COUNT;
            /* Sleeping needs somebody to wait for. */
            if (!is_victim && (f->point == BEFORE_SLEEP || f->point == AFTER_SLEEP ||
                               f->point == WHILE_YIELDING)) {
                (void)usleep(20000);
            }
        }
        st = play_round(t, region, i);
    }
    CHECK_MSG(!is_victim, "the victim lives on: point %d", (int)f->point);
    (void)snprintf(name, sizeof(name), "rank %d (pid ", 10 + n - 1);
    check_broken(t, st, name);
    CHECK_HAS(fc_last_message(), ends[f->kind]);
    if (f->kind != FINISHED) { /* whose process may still be there */
        CHECK(fc_transport_find_end(end));
        CHECK_HAS(end,
                  n == 2 ? name : "rank 1"); /* of three another survivor may have ended, too */
    }
    if (f->point < BEFORE_MAPPING) {
        CHECK_HAS(fc_last_message(), "layers.3");
    }
    CHECK_EQ(fc_transport_map_region(t, "more", FC_PAGE, 7, &region), FC_ERR_BROKEN);
    fc_region_release(region);
    fc_transport_destroy(t);
    CHECK_EQ(fc_alloc_live(), 0);
    CHECK_EQ(count_segments(), 0);
}

static void test_deaths(int n)
{
    for (int point = 0; point < POINT_COUNT; point++) {
        for (int kind = 0; kind < KIND_COUNT; kind++) {
            fault f = {.point = (fault_point)point, .kind = (fault_kind)kind};
            int statuses[RANKS_MAX];

            /* Leaving in order in the middle of its own wait is not something a rank can do. */
            if (kind == FINISHED &&
                (point == WHILE_YIELDING || point == BEFORE_SLEEP || point == AFTER_SLEEP)) {
                continue;
            }
            ranks_run(n, body_death, &f, statuses);
            for (int r = 0; r < n - 1; r++) {
                CHECK_MSG(statuses[r] == 0, "rank %d of %d, point %d, kind %d: %#x", r, n, point,
                          kind, (unsigned)statuses[r]);
            }
        }
    }
}

/* A stopped rank is not a dead one. */
static void body_stop(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, rank, n, TIMEOUT_NS);
    fc_region *region = NULL;
    char end[FC_END_BYTES];

    (void)arg;
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    CHECK(!fc_transport_find_end(end));
    atomic_store(&ranks_common->values[PIDS + rank], (int64_t)getpid());
    for (uint64_t i = 1; i <= 200; i++) {
        if (rank == 0 && (i == 50 || i == 100)) {
            pid_t peer = (pid_t)atomic_load(&ranks_common->values[PIDS + n - 1]);
            pid_t helper = fork();

            if (helper == 0) {
                (void)kill(peer, SIGSTOP);
                (void)usleep(150000);
                (void)kill(peer, SIGCONT);
                _exit(0);
            }
            CHECK_EQ(play_round(t, region, i), FC_OK);
            CHECK_EQ(waitpid(helper, NULL, 0), helper);
        } else {
            CHECK_EQ(play_round(t, region, i), FC_OK);
        }
    }
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* A rank that comes too late: those who waited say so, and it learns why it is alone. */
static void body_late(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, rank, n, FC_NS_PER_S / 4);
    fc_region *region = NULL;
    fc_status st;

    (void)arg;
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    CHECK_EQ(play_round(t, region, 1), FC_OK);
    if (rank == n - 1) {
        /* Long enough for the others to have given up. */
        CHECK(ranks_await(ROUNDS_DONE, n - 1));
    }
    st = play_round(t, region, 2);
    CHECK_EQ(st, rank == n - 1 ? (fc_status)FC_OK : FC_ERR_TIMEOUT);
    if (rank == n - 1) {
        /* Everybody had published: only the next wait finds the abort. */
        st = play_round(t, region, 3);
        CHECK_EQ(st, FC_ERR_TIMEOUT);
    }
    CHECK_HAS(fc_last_message(), "did not come within 0.25 s");
    CHECK_HAS(fc_last_message(), "reduce-scatter of unit layers.3 (step 2)");
    CHECK_HAS(fc_last_message(), n == 2 ? "rank 11 last waited in" : "last waited in");
    CHECK(strstr(fc_last_message(), "; it") == NULL); /* nobody was asked so soon */
    atomic_fetch_add(&ranks_common->values[ROUNDS_DONE], 1);
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* Who waits long tells people once; and a host that wants to stop a wait can, and go on later. */
static fc_status poll_and_interrupt(void *context)
{
    ranks_host *host = context;

    (void)host;
    return atomic_load(&ranks_common->values[STARTED]) == 1 ? fc_fail(FC_ERR_INTERRUPTED, "Ctrl-C")
                                                            : FC_OK;
}

static void body_interrupt(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport_config config = ranks_config(&host, 0, rank, n, TIMEOUT_NS);
    fc_transport *t = NULL;
    fc_region *region = NULL;
    fc_comm *comm = NULL;

    (void)arg;
    config.host.poll = poll_and_interrupt;
    CHECK_OR_EXIT(fc_shm_create(&config, &t) == FC_OK);
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    CHECK_OR_EXIT(fc_comm_create(t, &comm) == FC_OK);
    if (rank == 0) {
        atomic_store(&ranks_common->values[STARTED], 1);
        CHECK_EQ(wait_for(t, region, 1, 1), FC_ERR_INTERRUPTED);
        CHECK_STR(fc_last_message(), "Ctrl-C");
        CHECK_EQ(fc_transport_check(t), FC_OK);
        atomic_store(&ranks_common->values[STARTED], 2);
        CHECK_EQ(wait_for(t, region, 1, 1), FC_OK);
        CHECK_EQ(host.notices, 1);
        /* A collective cannot be taken up again: all ranks are told. */
        atomic_store(&ranks_common->values[STARTED], 1);
        CHECK_EQ(fc_comm_barrier(comm), FC_ERR_INTERRUPTED);
        CHECK_EQ(fc_comm_barrier(comm), FC_ERR_BROKEN);
        atomic_store(&ranks_common->values[STARTED], 3);
    } else {
        CHECK(ranks_await(STARTED, 2));
        /* Long enough for the notice, which comes after 5 s. */
        (void)usleep(5300000);
        fc_transport_publish(t, word_of(region, rank), 1);
        CHECK(ranks_await(STARTED, 3));
        CHECK_EQ(fc_comm_barrier(comm), FC_ERR_BROKEN);
        CHECK_HAS(fc_last_message(), "rank 10 failed: Ctrl-C");
    }
    CHECK_EQ(host.entered, 0);
    fc_comm_destroy(comm);
    fc_region_release(region);
    fc_transport_destroy(t);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* What the last rank says of itself when it is asked, and what the others have counted. */
typedef struct place_case {
    fc_place place;
    uint64_t counted; /* of the peers */
    bool is_known;
    fc_status expected;
    const char *part;
} place_case;

static const place_case place_cases[] = {
    {{.text = "train.py:41 in save", .group = 7, .sequence = 5, .is_gather = 1},
     4,
     true,
     FC_ERR_PEER,
     "rank 11 is in a gather of full parameters (train.py:41 in save) that rank 10 has not called"},
    {{.text = "train.py:42 in main", .group = 7, .sequence = 5},
     4,
     true,
     FC_ERR_PEER,
     "rank 11 is in a collective (train.py:42 in main) that rank 10 has not called"},
    /* Called here too, so that others are waited for there; or not to be compared. */
    {{.text = "train.py:43", .group = 7, .sequence = 5},
     5,
     true,
     FC_ERR_TIMEOUT,
     "; it is at train.py:43"},
    {{.text = "train.py:44", .group = 7, .sequence = 5},
     0,
     false,
     FC_ERR_TIMEOUT,
     "; it is at train.py:44"},
    {{.text = "train.py:45"}, 0, true, FC_ERR_TIMEOUT, "; it is at train.py:45"},
};

static const place_case *place_now;

static bool tell_place(fc_place *out)
{
    *out = place_now->place;
    return true;
}

static bool count_collectives(uint64_t group, uint64_t *count_out)
{
    CHECK_EQ(group, 7);
    *count_out = place_now->counted;
    return place_now->is_known;
}

/* Sanitizers have threads of their own. */
static int count_watchers(void)
{
    DIR *dir = opendir("/proc/self/task");
    const struct dirent *entry;
    char path[300];
    char name[32];
    int n = 0;

    CHECK_OR_EXIT(dir != NULL);
    while ((entry = readdir(dir)) != NULL) {
        FILE *file;

        (void)snprintf(path, sizeof(path), "/proc/self/task/%s/comm", entry->d_name);
        file = fopen(path, "r");
        if (file != NULL) {
            n += fgets(name, sizeof(name), file) != NULL && strstr(name, "watcher") != NULL;
            (void)fclose(file);
        }
    }
    (void)closedir(dir);
    return n;
}

static void body_place(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport_config config = ranks_config(&host, 0, rank, n, 5 * FC_NS_PER_S / 2);
    fc_transport *t = NULL;
    fc_region *region = NULL;
    int64_t start_ns;

    place_now = arg;
    config.host.tell_place = tell_place;
    config.host.count_collectives = count_collectives;
    CHECK_OR_EXIT(fc_shm_create(&config, &t) == FC_OK);
    CHECK_EQ(count_watchers(), 1);
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    if (rank == 0) {
        CHECK_EQ(wait_for(t, region, 1, 1), place_now->expected);
        CHECK_HAS(fc_last_message(), place_now->part);
        CHECK_HAS(fc_last_message(), "layers.3");
        atomic_store(&ranks_common->values[ROUNDS_DONE], 1);
    } else {
        CHECK(ranks_await(ROUNDS_DONE, 1));
        CHECK_EQ(fc_transport_check(t), FC_ERR_BROKEN);
        CHECK_HAS(fc_last_message(), place_now->part);
    }
    fc_region_release(region);
    fc_transport_destroy(t);
    start_ns = fc_now_ns();
    while (count_watchers() > 0 && fc_now_ns() - start_ns < 5 * FC_NS_PER_S) {
        (void)usleep(1000);
    }
    CHECK_EQ(count_watchers(), 0);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A peer whose host cannot be asked right now, and one that is stopped. */
static _Atomic bool is_telling;

static bool tell_nothing_yet(fc_place *out)
{
    (void)out;
    atomic_store(&is_telling, true);
    (void)ranks_await(ROUNDS_DONE, 2);
    (void)usleep(50000);
    atomic_store(&is_telling, false);
    return false;
}

/* The last rank asks when the silent one's watcher is within its call already. */
static void body_silent(int rank, int n, void *arg)
{
    bool is_stopped = *(const bool *)arg;
    ranks_host host;
    fc_transport_config config = ranks_config(&host, 0, rank, n, 2 * FC_NS_PER_S);
    fc_transport *t = NULL;
    fc_region *region = NULL;

    config.host.tell_place = tell_nothing_yet;
    CHECK_OR_EXIT(fc_shm_create(&config, &t) == FC_OK);
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    if (rank == 1) {
        atomic_store(&ranks_common->values[PIDS], (int64_t)getpid());
        if (is_stopped) {
            (void)raise(SIGSTOP);
        }
        CHECK(ranks_await(ROUNDS_DONE, n - 1));
        /* Not while a call of the host's goes on. */
        fc_transport_stop_telling();
        CHECK(!atomic_load(&is_telling));
    } else {
        CHECK(ranks_await(PIDS, 1));
        (void)usleep(rank == 2 ? 700000 : 0);
        CHECK_EQ(wait_for(t, region, 1, 1), FC_ERR_TIMEOUT);
        CHECK_HAS(fc_last_message(), is_stopped
                                         ? "; its process is stopped"
                                         : "; its Python does not answer: it is in a C call");
        atomic_fetch_add(&ranks_common->values[ROUNDS_DONE], 1);
        CHECK(ranks_await(ROUNDS_DONE, n - 1));
        (void)kill((pid_t)atomic_load(&ranks_common->values[PIDS]), SIGCONT);
    }
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* The watcher stays behind when a process forks, and the child has its own. */
static void body_fork(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport_config config = ranks_config(&host, 0, rank, n, TIMEOUT_NS);
    fc_transport *t = NULL;
    pid_t child;
    int status;

    (void)arg;
    config.host.tell_place = tell_place;
    for (int i = 0; i < 20; i++) {
        CHECK_OR_EXIT(fc_shm_create(&config, &t) == FC_OK);
        child = fork();
        CHECK_OR_EXIT(child >= 0);
        if (child == 0) {
            fc_transport *own = NULL;

            fc_transport_destroy(t);
            CHECK_OR_EXIT(fc_shm_create(&config, &own) == FC_OK);
            CHECK_EQ(count_watchers(), 1);
            fc_transport_destroy(own);
            _exit(check_result());
        }
        CHECK_EQ(waitpid(child, &status, 0), child);
        CHECK_EQ(status, 0);
        fc_transport_destroy(t);
    }
}

static void check_place(const void *arg)
{
    place_case c = *(const place_case *)arg;

    ranks_check(2, body_place, &c);
}

static void check_silent(const void *arg)
{
    bool is_stopped = *(const bool *)arg;

    ranks_check(3, body_silent, &is_stopped);
}

/* A rank that fails on its own account ends its peers' waits with its text. */
static void body_abort(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, rank, n, TIMEOUT_NS);
    fc_region *region = NULL;

    (void)arg;
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    if (rank == 1) {
        (void)usleep(20000);
        CHECK_EQ(fc_transport_abort(t, FC_ERR_NOMEM, "no room in unit layers.3"), FC_ERR_NOMEM);
        CHECK_STR(fc_last_message(), "no room in unit layers.3");
        /* Without publishing: a peer that finds what it waits for goes on. */
        CHECK_EQ(wait_for(t, region, 0, 1), FC_ERR_BROKEN);
    } else {
        CHECK_EQ(play_round(t, region, 1), FC_ERR_PEER);
        CHECK_HAS(fc_last_message(), "rank 11 failed: no room in unit layers.3");
    }
    fc_region_release(region);
    fc_transport_destroy(t);
}

/* Collectives of all sizes until somebody kills the last rank: at any instant, also within copies.
 */
static void body_collectives(int rank, int n, void *arg)
{
    static const size_t numels[] = {0, 5, 1000, 100000, 700000};
    ranks_host host;
    fc_transport *t = create(&host, rank, n, TIMEOUT_NS);
    fc_comm *comm = NULL;
    float *data = fc_alloc((size_t)n * 700000, sizeof(float));
    fc_status st = FC_OK;
    char name[48];

    (void)arg;
    atomic_store(&ranks_common->values[PIDS + rank], (int64_t)getpid());
    atomic_fetch_add(&ranks_common->values[STARTED], 1);
    CHECK_OR_EXIT(data != NULL);
    st = fc_comm_create(t, &comm);
    for (size_t i = 0; st == FC_OK; i++) {
        size_t numel = numels[i % 5];

        st = fc_comm_all_gather(comm, data, data + (size_t)rank * numel, numel * sizeof(float));
        if (st == FC_OK) {
            st =
                fc_comm_reduce_scatter(comm, data + (size_t)rank * numel, data, numel, FC_F32, 2.0);
        }
        if (st == FC_OK) {
            st = fc_comm_all_reduce(comm, data, numel, FC_F32, (double)n);
        }
    }
    (void)snprintf(name, sizeof(name), "rank %d (pid ", 10 + n - 1);
    check_broken(t, st == FC_ERR_BROKEN ? FC_ERR_PEER : st, name);
    fc_comm_destroy(comm);
    fc_free(data);
    fc_transport_destroy(t);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Ranks 0 and 1 wait for each other, the others for rank 0: all learn of it long before the
 * deadline.
 */
static void body_mutual(int rank, int n, void *arg)
{
    ranks_host host;
    fc_transport *t = create(&host, rank, n, 60 * FC_NS_PER_S);
    fc_region *region = NULL;
    int64_t start_ns;
    fc_status st;

    (void)arg;
    CHECK_OR_EXIT(fc_transport_map_region(t, "test memory", FC_PAGE, 7, &region) == FC_OK);
    start_ns = fc_now_ns();
    st = wait_for(t, region, rank == 0 ? 1 : 0, 1);
    CHECK(st == FC_ERR_PEER || st == FC_ERR_BROKEN);
    CHECK_HAS(fc_last_message(), "waits for something else");
    CHECK(fc_now_ns() - start_ns < 30 * FC_NS_PER_S);
    fc_region_release(region);
    fc_transport_destroy(t);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void body_killer_and_ranks(int rank, int n, void *arg)
{
    useconds_t delay_us = *(const useconds_t *)arg;

    if (rank < n - 1) {
        body_collectives(rank, n - 1, arg);
        return;
    }
    CHECK(ranks_await(STARTED, n - 1));
    (void)usleep(delay_us);
    CHECK_EQ(kill((pid_t)atomic_load(&ranks_common->values[PIDS + n - 2]), SIGKILL), 0);
}

static void test_random_kills(void)
{
    uint32_t seed = 12345;

    for (int i = 0; i < RANDOM_KILLS; i++) {
        useconds_t delay_us;
        int n = 3 + i % 2; /* one of them is the killer */
        int statuses[RANKS_MAX];

        seed = seed * 1664525U + 1013904223U;
        delay_us = seed >> 17; /* up to 33 ms */
        ranks_run(n, body_killer_and_ranks, &delay_us, statuses);
        CHECK_EQ(statuses[n - 2], SIGKILL);
        for (int r = 0; r < n; r++) {
            CHECK_MSG(r == n - 2 || statuses[r] == 0, "rank %d of %d, %u us: %#x", r, n - 1,
                      (unsigned)delay_us, (unsigned)statuses[r]);
        }
    }
}

static void check_mutual(const void *arg)
{
    ranks_check(*(const int *)arg, body_mutual, NULL);
}

static void check_interrupt(const void *arg)
{
    (void)arg;
    ranks_check(2, body_interrupt, NULL);
}

/* Seconds each, of nothing but waits. */
static void test_long_waits(void)
{
    static const bool is_stopped[] = {false, true};
    static const int n_ranks[] = {2, 4};
    ranks_test tests[RANKS_TESTS_MAX] = {{check_interrupt, NULL}};
    size_t n = 1;

    for (size_t i = 0; i < sizeof(place_cases) / sizeof(place_cases[0]); i++) {
        tests[n++] = (ranks_test){check_place, &place_cases[i]};
    }
    for (int i = 0; i < 2; i++) {
        tests[n++] = (ranks_test){check_silent, &is_stopped[i]};
        tests[n++] = (ranks_test){check_mutual, &n_ranks[i]};
    }
    ranks_check_at_once(tests, n);
}

int main(void)
{
    const time_t start = time(NULL);

    for (int n = 2; n <= RANKS_MAX; n++) {
        test_deaths(n);
        ranks_check(n, body_late, NULL);
        ranks_check(n, body_abort, NULL);
    }
    ranks_check(3, body_stop, NULL);
    ranks_check(2, body_fork, NULL);
    test_long_waits();
    test_random_kills();
    CHECK_EQ(count_shm_files_since(start), 0);
    return check_result();
}
