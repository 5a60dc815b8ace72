/* Deadlines of NCCL's work on the device, while the program waits for something else: over the
 * stand-ins for NCCL and for CUDA's driver, on 2 or 3 ranks that are processes. */
#define _GNU_SOURCE

#include "nccl_world.h"

#include "device/events.h"

#include <pthread.h>

#define MARKS 128 /* FC_NCCL_MARKS, of each of two communicators */
#define MANY 3000
#define LIMIT_NS FC_NS_PER_S /* that is waited for; all else is in time by far */

static const setting usual = {0, false, false, 0};

static fc_events events;
static char reported[FC_MESSAGE_BYTES];
static _Atomic int n_reports;

static void report(const char *line)
{
    (void)snprintf(reported, sizeof(reported), "%s", line);
    atomic_fetch_add(&n_reports, 1);
}

/* Those of the library that look; sanitizers have threads, too. */
static int count_threads(void)
{
    DIR *dir = opendir("/proc/self/task");
    const struct dirent *entry;
    int n = 0;

    CHECK_OR_EXIT(dir != NULL);
    while ((entry = readdir(dir)) != NULL) {
        char path[PATH_MAX], name[32] = "";
        FILE *file;

        (void)snprintf(path, sizeof(path), "/proc/self/task/%s/comm", entry->d_name);
        file = fopen(path, "r");
        if (file != NULL) {
            n += fgets(name, sizeof(name), file) != NULL && strcmp(name, "fsdp_c nccl\n") == 0;
            (void)fclose(file);
        }
    }
    (void)closedir(dir);
    return n;
}

static void start_with_events(world *w, const setting *s)
{
    char path[PATH_MAX];

    start(w, s);
    library_path("libnccl_stand_in.so", path);
    MUST(fc_cuda_events_open(path, 0, &events));
    w->options.events = &events;
    w->options.report = report;
}

static void finish_with_events(world *w)
{
    int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);

    finish(w);
    CHECK_EQ(w->control->n_events, 0);
    CHECK_EQ(w->control->n_contexts, 0);
    while (count_threads() > 0 && fc_now_ns() < deadline_ns) {
        (void)usleep(500);
    }
    CHECK_EQ(count_threads(), 0);
}

static fc_status gather(world *w, const char *unit)
{
    static char memory[RANKS_MAX * PART];
    const fc_label label = {unit, "test", 0};

    return fc_nccl_all_gather(fc_nccl_gathers(w->group), stream_of(0), label, memory, PART);
}

/* As cudaStreamSynchronize: nothing of the library is called. False: it hangs. */
static bool sit(const world *w, int stream)
{
    int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);

    while (!w->is_idle(stream_of(stream))) {
        if (fc_now_ns() > deadline_ns) {
            return false;
        }
        (void)usleep(500);
    }
    return true;
}

/* Until a counter has come so far. */
static bool await(const _Atomic int *counter, int at_least)
{
    int64_t deadline_ns = fc_deadline_ns(20 * FC_NS_PER_S);

    while (atomic_load(counter) < at_least) {
        if (fc_now_ns() > deadline_ns) {
            return false;
        }
        (void)usleep(200);
    }
    return true;
}

/* The group has ended by itself: it was said once, and every call says it. */
static void check_ended(world *w, fc_status status, const char *what, const char *who)
{
    CHECK_EQ(atomic_load(&n_reports), 1);
    CHECK(strncmp(reported, "[fsdp_c] ", 9) == 0);
    CHECK_HAS(reported, what);
    CHECK_HAS(reported, who);
    CHECK_EQ(gather(w, "layers.2"), status);
    CHECK_STR(fc_last_message(), reported + 9);
    CHECK_EQ(
        fc_nccl_all_reduce(fc_nccl_reductions(w->group), stream_of(1), layer, reported, 1, FC_F32),
        FC_ERR_BROKEN);
    CHECK_HAS(fc_last_message(), reported + 9);
    CHECK_EQ(fc_nccl_watch(w->group), FC_ERR_BROKEN);
    CHECK_EQ(fc_nccl_group_close(w->group), FC_ERR_BROKEN);
    CHECK(fc_nccl_is_broken(w->group));
}

/* ---- what has to end ---- */

enum {
    LATE,        /* the last rank does not come */
    LATE_IN_SUM, /* the same in the other communicator */
    DIES,
    GIVES_UP,
    ASYNC_ERROR,
    NO_ANSWER, /* of the driver */
    N_FAILURES
};

typedef struct failure {
    int kind;
    fc_status status;
    const char *what, *who;
} failure;

static const failure failures[N_FAILURES] = {
    {LATE, FC_ERR_TIMEOUT,
     "rank 10 was in all-gather of unit layers.1 of process group test group over NCCL",
     "the device did not do it within 1 s of its call: rank 11 called 1, "
     "last all-gather of 'layers.0' (96 bytes)"},
    {LATE_IN_SUM, FC_ERR_TIMEOUT, "rank 10 was in all-reduce of unit layers.0 of process group",
     "rank 11 has called none"},
    {DIES, FC_ERR_PEER, "rank 11 (pid ", "rank 10 was in all-gather of unit layers.1"},
    {GIVES_UP, FC_ERR_PEER, "rank 11 failed: no more", "rank 10 was in all-gather of unit layers."},
    {ASYNC_ERROR, FC_ERR_PEER, "NCCL reports 'remote process exited'",
     "rank 10 was in all-gather of unit layers.1"},
    {NO_ANSWER, FC_ERR_SYSTEM, "CUDA's driver answers 'an error on purpose' to cuEventQuery",
     "rank 10 was in a look at the device of process group test group over NCCL"},
};

static void enqueue(world *w, int kind)
{
    float sum = 1;

    if (kind == ASYNC_ERROR) {
        w->control->error = 6;
        w->control->error_at = w->control->n_collectives + 1;
    }
    if (kind == LATE_IN_SUM) {
        MUST(
            fc_nccl_all_reduce(fc_nccl_reductions(w->group), stream_of(1), layer, &sum, 1, FC_F32));
        CHECK(sit(w, 1));
        return;
    }
    if (kind == NO_ANSWER) {
        w->control->fail_queries = 700;
    }
    MUST(gather(w, "layers.1"));
    atomic_store(&ranks_common->values[1], 1);
    CHECK(sit(w, 0));
}

/* What the others find who come afterwards. */
static void come_too_late(world *w, const failure *f)
{
    fc_status st = f->status == FC_ERR_TIMEOUT ? FC_ERR_TIMEOUT : FC_ERR_PEER;

    CHECK(ranks_await(0, 1));
    CHECK_EQ(gather(w, "layers.1"), st);
    CHECK_HAS(fc_last_message(), "rank 10 failed: ");
    CHECK_EQ(atomic_load(&n_reports), 0);
}

static void fail(int rank, int n, void *arg)
{
    const failure *f = arg;
    bool is_short = f->kind == LATE || f->kind == LATE_IN_SUM;
    world w;

    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, is_short ? LIMIT_NS : TIMEOUT_NS));
    MUST(gather(&w, "layers.0"));
    CHECK(sit(&w, 0));
    if (rank == 0) {
        enqueue(&w, f->kind);
        check_ended(&w, f->status, f->what, f->who);
        CHECK(await(&w.control->n_aborts, 2)); /* after what waited has gone on */
        atomic_store(&ranks_common->values[0], 1);
    } else if (f->kind == DIES && rank == 1) {
        (void)raise(SIGKILL);
    } else if (f->kind == GIVES_UP && rank == 1) {
        CHECK(ranks_await(1, 1));
        CHECK_EQ(fc_nccl_abort(w.group, FC_ERR_INVALID, "no more"), FC_ERR_INVALID);
    } else if (f->kind != DIES && f->kind != GIVES_UP) {
        come_too_late(&w, f);
    } else {
        CHECK(ranks_await(0, 1)); /* one that leaves meanwhile would be named instead */
    }
    finish_with_events(&w);
}

static void check_failure(const void *arg)
{
    failure f = *(const failure *)arg;
    int statuses[RANKS_MAX];

    for (int n = 2; n <= 3; n++) {
        ranks_run(n, fail, &f, statuses);
        for (int r = 0; r < n; r++) {
            bool is_killed = r == 1 && f.kind == DIES;

            CHECK_MSG(is_killed ? WIFSIGNALED(statuses[r]) : statuses[r] == 0,
                      "failure %d, rank %d of %d: status %#x", f.kind, r, n, (unsigned)statuses[r]);
        }
        atomic_store(&n_reports, 0);
    }
}

typedef struct asked {
    const world *w;
    int n_before; /* questions that are answered at once */
} asked;

/* The group ends within a question, and the device is idle. */
static bool sit_until_idle(void *arg)
{
    asked *a = arg;

    if (a->n_before-- > 0) {
        return false;
    }
    CHECK(sit(a->w, 0));
    return true;
}

/* Whoever waits here is told as well, and not that all is well since the device is idle. */
static void wait_through(int rank, int n, void *arg)
{
    const fc_wait_info info = {.op = "synchronize"};
    world w;

    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, LIMIT_NS));
    if (rank == 0) {
        asked a = {&w, *(const int *)arg};

        MUST(gather(&w, "layers.0"));
        CHECK_EQ(fc_nccl_wait(&w.group, 1, sit_until_idle, &a, &info), FC_ERR_TIMEOUT);
        CHECK_STR(fc_last_message(), reported + 9);
        atomic_store(&ranks_common->values[0], 1);
    } else {
        CHECK(ranks_await(0, 1));
    }
    finish_with_events(&w);
}

/* More than there are marks for are under way, and one behind the oldest of them does not end. */
static void fill_up(int rank, int n, void *arg)
{
    const int n_all = 2 * MARKS + 44, n_done = MARKS + 22;
    world w;

    (void)arg;
    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, 6 * FC_NS_PER_S));
    if (rank == 0) {
        for (int i = 0; i < n_all; i++) {
            MUST(gather(&w, i + 1 < n_all ? "layers.0" : "layers.1"));
        }
        CHECK_EQ(w.control->n_records, n_all);
        atomic_store(&ranks_common->values[0], 1);
        CHECK(sit(&w, 0));
        check_ended(&w, FC_ERR_TIMEOUT, "rank 10 was in all-gather of unit layers.1", "rank 11");
        atomic_store(&ranks_common->values[1], 1);
    } else {
        CHECK(ranks_await(0, 1));
        for (int i = 0; i < n_done; i++) {
            MUST(gather(&w, "layers.0"));
        }
        CHECK(sit(&w, 0));
        CHECK(ranks_await(1, 1));
    }
    finish_with_events(&w);
}

static void check_wait_through(const void *arg)
{
    (void)arg;
    for (int n_before = 0; n_before < 2; n_before++) {
        ranks_check(2, wait_through, &n_before);
        atomic_store(&n_reports, 0);
    }
}

static void check_fill_up(const void *arg)
{
    (void)arg;
    ranks_check(2, fill_up, NULL);
}

/* ---- calls that do not return ---- */

static _Atomic int n_let_go;

static void enter_and_count(void *context)
{
    (void)context;
    atomic_fetch_add(&n_let_go, 1);
}

static void leave_and_count(void *context)
{
    (void)context;
    atomic_fetch_sub(&n_let_go, 1);
}

static fc_status create_counted(world *w, int rank, int n, int64_t timeout_ns)
{
    fc_transport_config config = ranks_config(&w->host, 0, rank, n, timeout_ns);

    config.host.enter_wait = enter_and_count;
    config.host.leave_wait = leave_and_count;
    return fc_nccl_group_create(&config, &w->options, &w->group);
}

/* Another thread of the program, which needs what enter_wait lets go of. */
static void *let_go_on(void *arg)
{
    stand_in *control = arg;

    CHECK(await(&control->n_blocked, 1));
    CHECK_EQ(atomic_load(&n_let_go), 1);
    atomic_store(&control->blocks, false);
    return NULL;
}

static void block(int rank, int n, void *arg)
{
    static float from[2 * PART], to[PART];
    pthread_t other;
    world w;

    start_with_events(&w, &usual);
    MUST(create_counted(&w, rank, n, arg == NULL ? TIMEOUT_NS : LIMIT_NS));
    for (int kind = 0; arg == NULL && kind < 4; kind++) {
        fc_gather each = {to, from, sizeof(from[0])};
        fc_device_comm *sums = fc_nccl_reductions(w.group);

        atomic_store(&w.control->blocks, true);
        CHECK_EQ(pthread_create(&other, NULL, let_go_on, w.control), 0);
        if (kind == 0) {
            MUST(gather(&w, "layers.0"));
        } else if (kind == 1) {
            MUST(fc_nccl_all_gather_each(fc_nccl_gathers(w.group), stream_of(0), layer, &each, 1));
        } else if (kind == 2) {
            MUST(fc_nccl_reduce_scatter(sums, stream_of(0), layer, to, from, PART, FC_F32));
        } else {
            MUST(fc_nccl_all_reduce(sums, stream_of(0), layer, to, 1, FC_F32));
        }
        CHECK_EQ(pthread_join(other, NULL), 0);
        CHECK_EQ(atomic_load(&n_let_go), 0);
    }
    if (arg != NULL) { /* nobody makes room: the deadline does */
        atomic_store(&w.control->blocks, true);
        CHECK_EQ(gather(&w, "layers.0"), FC_ERR_TIMEOUT);
        CHECK_HAS(fc_last_message(),
                  "NCCL did not take it within 1 s of its call: no rank that can "
                  "be seen from here is behind; rank 1");
        CHECK_STR(fc_last_message(), reported + 9);
        CHECK(await(&w.control->n_aborts, 2));
        CHECK_EQ(gather(&w, "layers.0"), FC_ERR_BROKEN);
    }
    CHECK_EQ(atomic_load(&n_let_go), 0);
    finish_with_events(&w);
}

static void check_blocked(const void *arg)
{
    int is_late = 1;

    (void)arg;
    ranks_check(2, block, NULL);
    ranks_check(2, block, &is_late);
}

/* ---- what has not to end ---- */

/* Thousands, in time, with more on the way than there are marks. */
static void work(int rank, int n, void *arg)
{
    const setting *s = arg;
    world w;

    start_with_events(&w, s);
    MUST(create(&w, rank, n, TIMEOUT_NS));
    CHECK_EQ(w.control->n_events, s->is_one ? MARKS : 2 * MARKS);
    for (int i = 0; i < MANY; i++) {
        float sum = 1;

        w.control->hangs = i % 1000 < 300; /* and then goes on */
        MUST(gather(&w, "layers.0"));
        if (i % 1000 == 999) {
            MUST(fc_nccl_all_reduce(fc_nccl_reductions(w.group), stream_of(1), layer, &sum, 1,
                                    FC_F32));
            CHECK(sit(&w, 0) && sit(&w, 1));
            CHECK(sum == (float)n);
        }
    }
    MUST(fc_nccl_watch(w.group));
    CHECK_EQ(w.control->n_records, MANY + MANY / 1000);
    CHECK_EQ(w.control->n_events, s->is_one ? MARKS : 2 * MARKS);
    MUST(fc_nccl_group_close(w.group));
    CHECK_EQ(w.control->n_aborts, 0);
    CHECK_EQ(atomic_load(&n_reports), 0);
    finish_with_events(&w);
}

/* Events that are used again count from their new collective. */
static void use_again(int rank, int n, void *arg)
{
    const int64_t timeout_ns = 5 * FC_NS_PER_S;
    world w;
    int n_queries;

    (void)arg;
    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, timeout_ns));
    for (int i = 0; i < MARKS; i++) {
        MUST(gather(&w, "layers.0"));
    }
    CHECK(sit(&w, 0));
    (void)usleep((useconds_t)(timeout_ns / 1000));
    w.control->hangs = true;
    for (int i = 0; i < MARKS + 1; i++) {
        MUST(gather(&w, "layers.0"));
    }
    n_queries = atomic_load(&w.control->n_queries);
    CHECK(await(&w.control->n_queries, n_queries + 2));
    w.control->hangs = false;
    CHECK(sit(&w, 0));
    CHECK_EQ(atomic_load(&n_reports), 0);
    MUST(fc_nccl_group_close(w.group));
    finish_with_events(&w);
}

static void check_use_again(const void *arg)
{
    (void)arg;
    ranks_check(2, use_again, NULL);
}

/* Nothing is on the way: a rank that has gone is missed by nobody. */
static void miss_nobody(int rank, int n, void *arg)
{
    world w;

    (void)arg;
    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, LIMIT_NS));
    MUST(gather(&w, "layers.0"));
    CHECK(sit(&w, 0));
    if (rank == 0) {
        atomic_store(&ranks_common->values[0], 1);
        (void)usleep(2 * LIMIT_NS / 1000);
        CHECK_EQ(atomic_load(&n_reports), 0);
    } else {
        CHECK(ranks_await(0, 1));
        _exit(check_result()); /* without a word */
    }
    finish_with_events(&w);
}

/* While a stream is captured nothing is recorded, and nothing that was recorded ends the capture.
 */
static void capture(int rank, int n, void *arg)
{
    world w;
    int n_queries;

    (void)arg;
    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, TIMEOUT_NS));
    w.control->hangs = true;
    MUST(gather(&w, "layers.0"));
    atomic_store(&w.control->captures, true);
    n_queries = atomic_load(&w.control->n_queries);
    for (int i = 0; i < 2 * MARKS; i++) {
        MUST(gather(&w, "layers.1"));
    }
    CHECK_EQ(w.control->n_records, 1);
    CHECK(await(&w.control->n_queries, n_queries + 2));
    atomic_store(&w.control->captures, false);
    w.control->hangs = false;
    CHECK(sit(&w, 0));
    MUST(fc_nccl_group_close(w.group));
    CHECK_EQ(atomic_load(&n_reports), 0);
    finish_with_events(&w);
}

/* The end comes while the thread looks. */
static void end_while_it_looks(int rank, int n, void *arg)
{
    world w;

    (void)arg;
    start_with_events(&w, &usual);
    for (int i = 0; i < 60; i++) {
        int n_queries;

        MUST(create(&w, rank, n, TIMEOUT_NS));
        w.control->hangs = i % 3 == 2;
        n_queries = atomic_load(&w.control->n_queries);
        for (int c = 0; c < 50; c++) {
            MUST(gather(&w, "layers.0"));
        }
        if (i % 6 < 3) {
            CHECK(await(&w.control->n_queries, n_queries + 1));
        }
        if (i % 3 == 0) {
            MUST(fc_nccl_group_close(w.group));
        } else if (i % 3 == 1) {
            fc_nccl_group_leave(w.group, FC_NS_PER_S * 20);
        } /* or it is destroyed with work under way */
        fc_nccl_group_destroy(w.group);
        w.group = NULL;
        CHECK_EQ(w.control->n_live, 0);
        CHECK_EQ(w.control->n_events, 0);
        w.control->hangs = false;
    }
    CHECK_EQ(w.control->n_aborts, 2 * 20);
    CHECK_EQ(atomic_load(&n_reports), 0);
    finish_with_events(&w);
}

/* A forked child has no such thread, and leaves the events alone. */
static void fork_away(int rank, int n, void *arg)
{
    int status = 0, n_queries;
    world w;
    pid_t pid;

    (void)arg;
    start_with_events(&w, &usual);
    MUST(create(&w, rank, n, TIMEOUT_NS));
    CHECK_EQ(count_threads(), 1);
    pid = fork();
    if (pid == 0) {
        CHECK_EQ(count_threads(), 0);
        CHECK_EQ(gather(&w, "layers.0"), FC_ERR_STATE);
        fc_nccl_group_destroy(w.group);
        CHECK_EQ(w.control->n_events, 2 * MARKS);
        CHECK_EQ(w.control->n_aborts, 0);
        w.control->n_live = 0;
        MUST(create(&w, 0, 1, TIMEOUT_NS)); /* and begins anew */
        CHECK_EQ(count_threads(), 1);
        MUST(fc_nccl_group_close(w.group));
        _exit(check_result());
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    w.control->hangs = true;
    MUST(gather(&w, "layers.0"));
    n_queries = atomic_load(&w.control->n_queries);
    CHECK(await(&w.control->n_queries, n_queries + 2));
    w.control->hangs = false;
    CHECK(sit(&w, 0));
    MUST(fc_nccl_group_close(w.group));
    finish_with_events(&w);
}

/* ---- set-up ---- */

static void run_out(int rank, int n, void *arg)
{
    fc_status st = FC_ERR_NOMEM;
    world w;

    (void)arg;
    start_with_events(&w, &usual);
    for (int64_t i = 0; st == FC_ERR_NOMEM && i < 50; i++) {
        fc_alloc_fail_after(i);
        st = create(&w, rank, n, TIMEOUT_NS);
        fc_alloc_fail_after(-1);
        if (st == FC_OK) {
            CHECK(i > 5);
            MUST(fc_nccl_group_close(w.group));
        }
        finish_with_events(&w);
    }
    w.control->fail_event_at = MARKS + 5;
    CHECK_EQ(create(&w, rank, n, TIMEOUT_NS), FC_ERR_SYSTEM);
    CHECK_HAS(fc_last_message(), "CUDA's driver answers 'out of memory' to cuEventCreate");
    finish_with_events(&w);
}

/* One rank has no events: none waits for it. */
static void lack(int rank, int n, void *arg)
{
    world w;

    (void)arg;
    start_with_events(&w, &usual);
    w.control->fail_event_at = rank == 1 ? 1 : 0;
    CHECK_EQ(create(&w, rank, n, TIMEOUT_NS), FC_ERR_SYSTEM);
    CHECK_HAS(fc_last_message(), "to cuEventCreate");
    finish_with_events(&w);
}

static void look_at_drivers(int rank, int n, void *arg)
{
    char path[PATH_MAX];
    fc_events found;

    (void)rank;
    (void)n;
    (void)arg;
    CHECK_EQ(fc_cuda_events_open("/nowhere/libcuda.so.1", 0, &found), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "CUDA's driver cannot be opened: /nowhere/libcuda.so.1");
    CHECK_EQ(fc_cuda_events_open("libm.so.6", 0, &found), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "libm.so.6 cannot be used as CUDA's driver: it lacks cuDeviceGet");
    library_path("libnccl_stand_in.so", path);
    CHECK_EQ(fc_cuda_events_open(path, 1, &found), FC_ERR_SYSTEM);
    CHECK_HAS(fc_last_message(), "CUDA's driver answers 'an error on purpose' to cuDeviceGet");
    CHECK_EQ(fc_cuda_events_open(path, 64, &found), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "there is no room for a GPU of number 64");
    MUST(fc_cuda_events_open(path, 0, &found));
    MUST(fc_cuda_events_open(path, 0, &found));
}

int main(void)
{
    static const setting one = {0, true, false, 0};
    ranks_test tests[RANKS_TESTS_MAX] = {{check_wait_through, NULL},
                                         {check_fill_up, NULL},
                                         {check_blocked, NULL},
                                         {check_use_again, NULL}};
    size_t n = 4;

    for (int i = 0; i < N_FAILURES; i++) {
        tests[n++] = (ranks_test){check_failure, &failures[i]};
    }
    ranks_check_at_once(tests, n);
    ranks_check(1, look_at_drivers, NULL);
    ranks_check(2, work, (void *)(uintptr_t)&usual);
    ranks_check(3, work, (void *)(uintptr_t)&one);
    ranks_check(2, miss_nobody, NULL);
    ranks_check(2, capture, NULL);
    ranks_check(2, end_while_it_looks, NULL);
    ranks_check(2, fork_away, NULL);
    ranks_check(1, run_out, NULL);
    ranks_check(2, lack, NULL);
    return check_result();
}
