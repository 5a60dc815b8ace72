/* NCCL's communicators, collectives and failures, over the stand-in library, on 1 to 4 ranks that
 * are processes. */
#define _GNU_SOURCE

#include "nccl_world.h"

#include <math.h>

/* ---- what works ---- */

static void fill(float *to, size_t n, int rank, int step)
{
    for (size_t i = 0; i < n; i++) {
        to[i] = (float)((int)i % 7 + rank * 10 + step);
    }
}

static void gather_and_check(world *w, fc_nccl_group *group, int rank, int n, int step)
{
    float all[RANKS_MAX * PART], expected[PART], small[RANKS_MAX * 3], own[3];
    fc_gather each[2] = {{all, all + (size_t)rank * PART, PART * sizeof(float)},
                         {small, own, sizeof(own)}};

    memset(all, 0, sizeof(all));
    fill(all + (size_t)rank * PART, PART, rank, step);
    fill(own, 3, rank, step + 1);
    if (step % 2 == 0) {
        MUST(fc_nccl_all_gather(fc_nccl_gathers(group), stream_of(0), layer, all,
                                PART * sizeof(float)));
    } else {
        MUST(fc_nccl_all_gather_each(fc_nccl_gathers(group), stream_of(0), layer, each, 2));
    }
    MUST(wait_idle(w, group, 0));
    for (int r = 0; r < n; r++) {
        fill(expected, PART, r, step);
        CHECK(memcmp(all + (size_t)r * PART, expected, sizeof(expected)) == 0);
        fill(expected, 3, r, step + 1);
        CHECK(step % 2 == 0 || memcmp(small + (size_t)r * 3, expected, sizeof(own)) == 0);
    }
}

static void reduce_and_check(world *w, fc_nccl_group *group, int rank, int n, int step)
{
    float from[RANKS_MAX * PART], to[PART], sum[2] = {(float)rank, 1};
    uint16_t bf16[RANKS_MAX], bf16_sum = 0;
    int32_t ints[1] = {1 << rank};

    fill(from, (size_t)n * PART, rank, step);
    for (int r = 0; r < n; r++) {
        bf16[r] = 0x3f80; /* 1.0 */
    }
    MUST(fc_nccl_reduce_scatter(fc_nccl_reductions(group), stream_of(1), layer, to, from, PART,
                                FC_F32));
    MUST(fc_nccl_reduce_scatter(fc_nccl_reductions(group), stream_of(1), layer, &bf16_sum, bf16, 1,
                                FC_BF16));
    MUST(fc_nccl_all_reduce(fc_nccl_reductions(group), stream_of(1), layer, sum, 2, FC_F32));
    MUST(fc_nccl_all_reduce(fc_nccl_reductions(group), stream_of(1), layer, ints, 1, FC_I32));
    MUST(wait_idle(w, group, 1));
    for (int i = 0; i < PART; i++) {
        CHECK(to[i] == (float)(n * ((rank * PART + i) % 7) + 10 * n * (n - 1) / 2 + n * step));
    }
    CHECK(bf16_sum == (n == 1 ? 0x3f80 : n == 2 ? 0x4000 : n == 3 ? 0x4040 : 0x4080));
    CHECK(sum[0] == (float)(n * (n - 1) / 2) && sum[1] == (float)n);
    CHECK_EQ(ints[0], (1 << n) - 1);
}

/* Averages, and sums again. */
static void average_and_check(world *w, fc_nccl_group *group, int rank, int n)
{
    float from[RANKS_MAX], mean, part, expected = 0, own = (float)rank + 0.1f;

    for (int r = 0; r < n; r++) {
        from[r] = own;
        expected += ((float)r + 0.1f) / (float)n;
    }
    mean = own;
    CHECK(fc_nccl_scale(group, 1.0 / n));
    MUST(fc_nccl_reduce_scatter(fc_nccl_reductions(group), stream_of(1), layer, &part, from, 1,
                                FC_F32));
    MUST(fc_nccl_all_reduce(fc_nccl_reductions(group), stream_of(1), layer, &mean, 1, FC_F32));
    MUST(wait_idle(w, group, 1));
    CHECK(fabsf(part - expected) < 1e-6f && mean == part);
    CHECK(!fc_nccl_scale(group, 0.3)); /* which is no average: sums */
    mean = 1;
    MUST(fc_nccl_all_reduce(fc_nccl_reductions(group), stream_of(1), layer, &mean, 1, FC_F32));
    MUST(wait_idle(w, group, 1));
    CHECK(mean == (float)n);
    CHECK(fc_nccl_scale(group, 1));
}

static fc_nccl_array floats(float *data, size_t numel)
{
    return (fc_nccl_array){data, numel * sizeof(float), numel, FC_F32};
}

static fc_status collect(world *w, const char *what, const fc_nccl_array *to, size_t n_to,
                         const fc_nccl_array *from, size_t n_from)
{
    const fc_label label = {"layers.0", what, 0};

    return fc_nccl_collect(w->group, stream_of(0), label, to, n_to, from, n_from);
}

/* The four by their names, and arrays that do not fit. */
static void collect_and_check(world *w, int rank, int n)
{
    float all[RANKS_MAX] = {0}, each[RANKS_MAX], own = (float)rank, sum = (float)rank, part;
    float ones[RANKS_MAX] = {1, 1, 1, 1};
    const fc_nccl_array whole = floats(all, (size_t)n), parts = floats(each, (size_t)n);
    const fc_nccl_array mine = floats(&own, 1), total = floats(&sum, 1), to = floats(&part, 1);
    const fc_nccl_array from = floats(ones, (size_t)n);
    fc_nccl_array odd = floats(ones, (size_t)n + 1);

    all[rank] = own;
    MUST(collect(w, "all_gather", &whole, 1, NULL, 0));
    MUST(collect(w, "all_gather_each", &parts, 1, &mine, 1));
    MUST(collect(w, "reduce_scatter", &to, 1, &from, 1));
    MUST(collect(w, "all_reduce", &total, 1, NULL, 0));
    MUST(wait_idle(w, w->group, 0));
    for (int r = 0; r < n; r++) {
        CHECK(all[r] == (float)r && each[r] == (float)r);
    }
    CHECK(part == (float)n && sum == (float)(n * (n - 1) / 2));
    CHECK_EQ(collect(w, "all_gather", &whole, 1, &mine, 1), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "all_gather of unit layers.0: 1 outputs and 1 inputs");
    CHECK_EQ(collect(w, "reduce_scatter", &to, 1, &odd, 1), FC_ERR_INVALID);
    odd.dtype = FC_I32;
    odd.numel = (size_t)n;
    CHECK_EQ(collect(w, "reduce_scatter", &to, 1, &odd, 1), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "elements of type I32 for 1 of F32");
    odd.bytes = (size_t)n + 1;
    CHECK_EQ(collect(w, "all_gather", &odd, 1, NULL, 0), n == 1 ? FC_OK : FC_ERR_INVALID);
    CHECK_EQ(collect(w, "broadcast", &to, 1, NULL, 0), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "broadcast of unit layers.0: no collective of NCCL's");
}

static void work(int rank, int n, void *arg)
{
    const setting *s = arg;
    world w;

    start(&w, s);
    for (int round = 0; round < 2; round++) {
        MUST(create(&w, rank, n, TIMEOUT_NS));
        CHECK_EQ(fc_nccl_gathers(w.group) == fc_nccl_reductions(w.group), s->is_one);
        for (int step = 0; step < 6; step++) {
            gather_and_check(&w, w.group, rank, n, step);
            reduce_and_check(&w, w.group, rank, n, step);
        }
        average_and_check(&w, w.group, rank, n);
        collect_and_check(&w, rank, n);
        MUST(fc_nccl_watch(w.group));
        MUST(fc_nccl_group_close(w.group));
        CHECK_EQ(
            fc_nccl_all_gather(fc_nccl_gathers(w.group), stream_of(0), layer, stream_memory, 4),
            FC_ERR_STATE);
        CHECK_HAS(fc_last_message(), "all-gather of unit layers.0: NCCL's part of process group");
        MUST(fc_nccl_group_close(w.group)); /* once more is fine */
        finish(&w);
    }
    /* The second communicator is split off where that can be done. */
    CHECK_EQ(w.control->n_inits, s->is_one || !s->is_old ? 2 : 4);
    CHECK_EQ(w.control->n_splits, s->is_one || s->is_old ? 0 : 2);
    CHECK_EQ(w.control->n_aborts, 0);
    CHECK_EQ(w.control->n_destroyed, s->is_one ? 2 : 4);
}

static void test_collectives(void)
{
    static const setting settings[] = {
        {0, false, false, 0}, {3, false, false, 0}, {2, true, false, 0}, {1, false, true, 0}};

    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        for (int n = 1; n <= RANKS_MAX; n++) {
            setting s = settings[i];

            ranks_check(n, work, &s);
        }
    }
}

/* A config has as much as the version knows. */
static size_t known_bytes(int version)
{
    return version >= 22800   ? 80
           : version >= 22700 ? 68
           : version >= 21800 ? 44
           : version >= 21700 ? 40
                              : 20;
}

static void configure(int rank, int n, void *arg)
{
    int version = *(int *)arg;
    world w;

    start(&w, &(setting){0, true, false, version});
    MUST(create(&w, rank, n, TIMEOUT_NS));
    CHECK_EQ(w.control->config_bytes, (int)known_bytes(version));
    CHECK_HAS(fc_nccl_group_describe(w.group), "1 rank over NCCL 2.");
    MUST(fc_nccl_group_close(w.group));
    finish(&w);
}

static void test_configs(void)
{
    static const int versions[] = {21602, 21703, 21805, 22703, 22809, 23007};

    for (size_t i = 0; i < sizeof(versions) / sizeof(versions[0]); i++) {
        int version = versions[i];

        ranks_check(1, configure, &version);
    }
}

/* ---- failures ---- */

enum {
    DIES,
    DIES_IN_INIT,
    LATE,
    LATE_IN_SUM, /* in the other communicator */
    HANGS,
    HANGS_IN_INIT,
    ASYNC_ERROR,
    CALL_FAILS,
    MISMATCH,
    GIVES_UP,
    LEAVES,
    N_FAILURES
};

typedef struct failure {
    int kind;
    fc_status mine, theirs; /* statuses of the rank that fails, and of the others */
    const char *my_text, *their_text;
} failure;

static const failure failures[N_FAILURES] = {
    {DIES, FC_OK, FC_ERR_PEER, "", "rank 11 (pid "},
    {DIES_IN_INIT, FC_OK, FC_ERR_PEER, "", "was in the set-up of a communicator"},
    {LATE, FC_ERR_TIMEOUT, FC_ERR_TIMEOUT, "rank 11 called 1,",
     "rank 11 called 1, last all-gather of 'layers.0'"},
    {LATE_IN_SUM, FC_ERR_TIMEOUT, FC_ERR_TIMEOUT, "failed: nothing came of it",
     "rank 11 has called none"},
    {HANGS, FC_ERR_TIMEOUT, FC_ERR_TIMEOUT, "nothing came of it within 0.3 s",
     "nothing came of it within 0.3 s: "},
    {HANGS_IN_INIT, FC_ERR_TIMEOUT, FC_ERR_TIMEOUT, "in the ", "nothing came of it within 0.3 s: "},
    {ASYNC_ERROR, FC_ERR_PEER, FC_ERR_PEER, "NCCL reports 'remote process exited'",
     "rank 11 failed: "},
    {CALL_FAILS, FC_ERR_SYSTEM, FC_ERR_PEER, "NCCL reports 'unhandled cuda error'",
     "was in all-gather of unit layers.1"},
    {MISMATCH, FC_ERR_MISMATCH, FC_ERR_MISMATCH, "layers.9", "layers.9"},
    {GIVES_UP, FC_ERR_INVALID, FC_ERR_PEER, "no more of this", "rank 11 failed: no more of this"},
    {LEAVES, FC_OK, FC_ERR_PEER, "", "rank 11 has left the group"},
};

static fc_status gather(world *w, const char *unit)
{
    static char memory[RANKS_MAX * PART];
    const fc_label label = {unit, "test", 0};

    return fc_nccl_all_gather(fc_nccl_gathers(w->group), stream_of(0), label, memory, PART);
}

static fc_status sum(world *w)
{
    static float number;

    FC_TRY(
        fc_nccl_all_reduce(fc_nccl_reductions(w->group), stream_of(1), layer, &number, 1, FC_F32));
    return wait_idle(w, w->group, 1);
}

/* The rank that fails: what it does instead of its part. */
static fc_status misbehave(world *w, int kind)
{
    switch (kind) {
    case DIES:
        (void)raise(SIGKILL);
        break;
    case LATE:
        (void)usleep(2 * SHORT_NS / 1000);
        break;
    case LATE_IN_SUM:
        (void)usleep(2 * SHORT_NS / 1000);
        return sum(w);
    case HANGS:
        w->control->hangs = true;
        break;
    case ASYNC_ERROR:
        w->control->error = 6;
        w->control->error_at = w->control->n_collectives + 1;
        break;
    case CALL_FAILS:
        w->control->fail_calls = 1;
        break;
    case MISMATCH:
        FC_TRY(gather(w, "layers.9"));
        return wait_idle(w, w->group, 0);
    case GIVES_UP:
        return fc_nccl_abort(w->group, FC_ERR_INVALID, "no more of this");
    case LEAVES:
        fc_nccl_group_destroy(w->group);
        w->group = NULL;
        return FC_OK;
    default:
        break;
    }
    FC_TRY(gather(w, "layers.1"));
    return wait_idle(w, w->group, 0);
}

static fc_status try_all(world *w, int rank, int n, const failure *f)
{
    bool is_short =
        f->kind == LATE || f->kind == LATE_IN_SUM || f->kind == HANGS || f->kind == HANGS_IN_INIT;

    w->control->hangs_in_init = f->kind == HANGS_IN_INIT && rank == 1;
    w->control->dies_in_init = f->kind == DIES_IN_INIT && rank == 1;
    FC_TRY(create(w, rank, n, is_short ? SHORT_NS : TIMEOUT_NS));
    FC_TRY(gather(w, "layers.0"));
    FC_TRY(wait_idle(w, w->group, 0));
    if (rank == 1) {
        return misbehave(w, f->kind);
    }
    if (f->kind == LATE_IN_SUM) {
        return sum(w);
    }
    FC_TRY(gather(w, "layers.1"));
    return wait_idle(w, w->group, 0);
}

static void fail(int rank, int n, void *arg)
{
    const failure *f = arg;
    fc_status st, expected = rank == 1 ? f->mine : f->theirs;
    world w;

    start(&w, &(setting){2, false, false, 0});
    st = try_all(&w, rank, n, f);
    CHECK_MSG(st == expected, "failure %d: rank %d got %d (%s), expected %d", f->kind, rank, st,
              fc_last_message(), expected);
    if (st != FC_OK) {
        CHECK_HAS(fc_last_message(), rank == 1 ? f->my_text : f->their_text);
    }
    if (st != FC_OK && w.group != NULL) {
        /* It stays broken, and says the same. */
        CHECK_EQ(gather(&w, "layers.2"), FC_ERR_BROKEN);
        CHECK_HAS(fc_last_message(), rank == 1 ? f->my_text : f->their_text);
        CHECK_EQ(fc_nccl_group_close(w.group), FC_ERR_BROKEN);
        CHECK_EQ(w.control->n_aborts, 2);
    }
    finish(&w);
}

static void check_failure(const void *arg)
{
    failure f = *(const failure *)arg;
    int statuses[RANKS_MAX];

    for (int n = 2; n <= 3; n++) {
        ranks_run(n, fail, &f, statuses);
        for (int r = 0; r < n; r++) {
            bool is_killed = r == 1 && (f.kind == DIES || f.kind == DIES_IN_INIT);

            CHECK_MSG(is_killed ? WIFSIGNALED(statuses[r]) : statuses[r] == 0,
                      "failure %d, rank %d of %d: status %#x", f.kind, r, n, (unsigned)statuses[r]);
        }
    }
}

static bool interrupts;

static fc_status interrupt(void *context)
{
    (void)context;
    return !interrupts ? FC_OK : fc_fail(FC_ERR_INTERRUPTED, "interrupted on purpose");
}

/* A wait that Ctrl-C ended is gone on with by the next call. */
static void go_on_after_interrupt(int rank, int n, void *arg)
{
    fc_transport_config config;
    world w;

    (void)arg;
    start(&w, &(setting){0, true, false, 0});
    config = ranks_config(&w.host, 0, rank, n, TIMEOUT_NS);
    config.host.poll = interrupt;
    MUST(fc_nccl_group_create(&config, &w.options, &w.group));
    interrupts = true;
    w.control->polls = INT_MAX;
    CHECK_EQ(gather(&w, "layers.0"), FC_ERR_INTERRUPTED);
    CHECK_EQ(gather(&w, "layers.1"), FC_ERR_INTERRUPTED);
    CHECK_EQ(w.control->n_collectives, 1);
    interrupts = false;
    w.control->polls = 0;
    MUST(gather(&w, "layers.1"));
    MUST(wait_idle(&w, w.group, 0));
    CHECK_EQ(w.host.entered, 0);
    CHECK_EQ(w.control->n_collectives, 2);
    MUST(fc_nccl_group_close(w.group));
    finish(&w);
}

static stand_in *held_up;
static char told[FC_MESSAGE_BYTES];

static void tell_and_relent(void *context, const char *line)
{
    (void)context;
    (void)snprintf(told, sizeof(told), "%s", line);
    held_up->polls = 0;
}

/* A wait of 5 s is told to people. */
static void wait_long(int rank, int n, void *arg)
{
    fc_transport_config config;
    world w;

    (void)arg;
    start(&w, &(setting){0, true, false, 0});
    config = ranks_config(&w.host, 0, rank, n, TIMEOUT_NS);
    config.host.notice = tell_and_relent;
    MUST(fc_nccl_group_create(&config, &w.options, &w.group));
    held_up = w.control;
    w.control->polls = INT_MAX;
    MUST(gather(&w, "layers.0"));
    MUST(gather(&w, "layers.1"));
    CHECK_HAS(told, rank == 0 ? "rank 10 has waited 5 s in " : "rank 11 has waited 5 s in ");
    CHECK_HAS(told, "over NCCL: no rank that can be seen from here is behind");
    MUST(wait_idle(&w, w.group, 0));
    MUST(fc_nccl_group_close(w.group));
    finish(&w);
}

/* Each allocation in turn; and ranks whose exchange fails. */
static void run_out(int rank, int n, void *arg)
{
    fc_transport_config config;
    fc_status st = FC_ERR_NOMEM;
    world w;

    (void)arg;
    start(&w, &(setting){1, false, false, 0});
    for (int64_t i = 0; st == FC_ERR_NOMEM && i < 50; i++) {
        fc_alloc_fail_after(i);
        st = create(&w, rank, n, TIMEOUT_NS);
        fc_alloc_fail_after(-1);
        if (st != FC_OK) {
            CHECK_EQ(st, FC_ERR_NOMEM);
            finish(&w);
        } else {
            CHECK(i > 3);
            MUST(fc_nccl_group_close(w.group));
        }
    }
    finish(&w);
    config = ranks_config(&w.host, 0, rank, n, TIMEOUT_NS);
    config.n_ranks = 2;
    config.host.exchange = NULL;
    CHECK_EQ(fc_nccl_group_create(&config, &w.options, &w.group), FC_ERR_INVALID);
    finish(&w);
}

static void fail_to_exchange(int rank, int n, void *arg)
{
    fc_transport_config config;
    world w;

    start(&w, &(setting){0, false, false, 0});
    config = ranks_config(&w.host, 0, rank, n, TIMEOUT_NS);
    w.host.fail_at = *(int *)arg;
    CHECK_EQ(fc_nccl_group_create(&config, &w.options, &w.group), FC_ERR_SYSTEM);
    finish(&w);
}

/* A forked child neither uses nor ends what its parent made. */
static void fork_away(int rank, int n, void *arg)
{
    int status = 0;
    world w;
    pid_t pid;

    (void)arg;
    start(&w, &(setting){0, true, false, 0});
    MUST(create(&w, rank, n, TIMEOUT_NS));
    pid = fork();
    if (pid == 0) {
        CHECK_EQ(gather(&w, "layers.0"), FC_ERR_STATE);
        CHECK_HAS(fc_last_message(), "forked child");
        CHECK_EQ(fc_nccl_watch(w.group), FC_ERR_STATE);
        CHECK_EQ(fc_nccl_abort(w.group, FC_ERR_INVALID, "child"), FC_ERR_INVALID);
        fc_nccl_group_destroy(w.group);
        CHECK_EQ(w.control->n_aborts, 0);
        _exit(check_result());
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    MUST(gather(&w, "layers.0"));
    MUST(wait_idle(&w, w.group, 0));
    CHECK_EQ(
        fc_nccl_all_reduce(fc_nccl_reductions(w.group), stream_of(0), layer, &status, 1, FC_I16),
        FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "all-reduce of unit layers.0 on rank 1");
    CHECK_HAS(fc_last_message(), "NCCL does not add up elements of type I16");
    MUST(fc_nccl_group_close(w.group));
    finish(&w);
}

static void check_long_wait(const void *arg)
{
    (void)arg;
    ranks_check(2, wait_long, NULL);
}

/* What mostly waits. */
static void test_failures(void)
{
    ranks_test tests[RANKS_TESTS_MAX] = {{check_long_wait, NULL}};
    size_t n = 1;

    for (int i = 0; i < N_FAILURES; i++) {
        tests[n++] = (ranks_test){check_failure, &failures[i]};
    }
    ranks_check_at_once(tests, n);
}

static void test_the_rest(void)
{
    int at;

    ranks_check(2, go_on_after_interrupt, NULL);
    ranks_check(1, run_out, NULL);
    ranks_check(2, fork_away, NULL);
    for (at = 1; at <= 2; at++) {
        ranks_check(2, fail_to_exchange, &at);
    }
}

/* ---- libraries ---- */

static void look_at_libraries(int rank, int n, void *arg)
{
    const fc_nccl *nccl = NULL, *again = NULL;
    char path[PATH_MAX];
    stand_in *control;

    (void)rank;
    (void)n;
    (void)arg;
    CHECK_EQ(fc_nccl_open("/nowhere/libnccl.so.2", false, &nccl), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "NCCL cannot be opened: /nowhere/libnccl.so.2");
    CHECK_EQ(fc_nccl_open("libnowhere.so", true, &nccl), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "libnowhere.so has not been loaded by this process");
    CHECK_EQ(fc_nccl_open("libm.so.6", false, &nccl), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "libm.so.6 cannot be used as NCCL: it lacks ncclGetVersion");

    control = open_stand_in(NULL, "libnccl_stand_in.so", path);
    control->version = 21205;
    CHECK_EQ(fc_nccl_open(path, true, &nccl), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "is NCCL 2.12.5; communicators that can be aborted need 2.14");
    control->version = 23007;
    MUST(fc_nccl_open(path, true, &nccl));
    MUST(fc_nccl_open(path, false, &again));
    CHECK(nccl == again);
    CHECK_EQ(fc_nccl_version(nccl), 23007);
    CHECK_HAS(fc_nccl_describe(nccl), "NCCL 2.30.7 (");
    CHECK(strchr(fc_nccl_describe(nccl), ';') == NULL);

    control = open_stand_in(NULL, "libnccl_stand_in_old.so", path);
    control->version = 21602;
    MUST(fc_nccl_open(path, false, &nccl));
    CHECK_HAS(fc_nccl_describe(nccl), "NCCL 2.16.2 (");
    CHECK_HAS(fc_nccl_describe(nccl), "no ncclCommSplit (2.18)");
}

int main(void)
{
    ranks_check(1, look_at_libraries, NULL);
    test_collectives();
    test_configs();
    test_failures();
    test_the_rest();
    return check_result();
}
