/* The device simulator: it finds every kind of missing order, names it, and finds nothing else. */
#include "check.h"

#include "base/alloc.h"
#include "device/sim/sim.h"

#include <stdbool.h>

#define N 16
#define BYTES (N * sizeof(float))
#define SEEDS 200

/* One rank with two streams and an event. */
typedef struct bench {
    fc_sim *sim;
    fc_device *device;
    const fc_device_ops *ops;
    fc_stream *a, *b;
    fc_event *event;
} bench;

#define MUST(call) CHECK_EQ(call, FC_OK)

static fc_label label(const char *what)
{
    return (fc_label){"unit", what, 0};
}

static bench bench_create(uint64_t seed)
{
    bench x = {0};

    MUST(fc_sim_create(1, seed, &x.sim));
    CHECK_OR_EXIT(x.sim != NULL);
    x.device = fc_sim_device(x.sim, 0);
    x.ops = x.device->ops;
    MUST(fc_sim_stream_create(x.sim, 0, "a", &x.a));
    MUST(fc_sim_stream_create(x.sim, 0, "b", &x.b));
    MUST(x.ops->event_create(x.device, &x.event));
    return x;
}

static void bench_destroy(bench *x)
{
    x->ops->event_destroy(x->device, x->event);
    fc_sim_destroy(x->sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

static float *take(bench *x, fc_stream *stream, const char *what)
{
    void *out = NULL;

    MUST(x->ops->alloc(x->device, stream, label(what), BYTES, &out));
    CHECK_OR_EXIT(out != NULL);
    return out;
}

/* The second stream comes after the first. */
static void chain(bench *x, fc_stream *first, fc_stream *second)
{
    MUST(x->ops->record(x->device, x->event, first));
    MUST(x->ops->wait(x->device, second, x->event));
}

static void copy(bench *x, fc_stream *stream, const char *what, float *to, const float *from)
{
    MUST(x->ops->copy(x->device, stream, label(what), to, from, BYTES, FC_ON_DEVICE));
}

static void copy_down(bench *x, const char *what, void *to, const float *from)
{
    MUST(x->ops->copy(x->device, x->a, label(what), to, from, BYTES, FC_TO_HOST));
}

static void copy_up(bench *x, const char *what, float *to, const void *from)
{
    MUST(x->ops->copy(x->device, x->a, label(what), to, from, BYTES, FC_TO_DEVICE));
}

typedef struct fill_args {
    float *to;
    float value;
} fill_args;

static void fill(const void *args)
{
    const fill_args *f = args;
    size_t i;

    for (i = 0; i < N; i++) {
        f->to[i] = f->value;
    }
}

static void set(bench *x, fc_stream *stream, const char *what, float *to, float value)
{
    MUST(fc_sim_launch(x->device, stream, label(what), &(fc_sim_range){to, BYTES, true}, 1, fill,
                       &(fill_args){to, value}, sizeof(fill_args)));
}

static void finish(bench *x)
{
    MUST(x->ops->record(x->device, x->event, x->a));
    MUST(x->ops->synchronize(x->device, x->event));
    MUST(x->ops->record(x->device, x->event, x->b));
    MUST(x->ops->synchronize(x->device, x->event));
}

static void read_on_host(bench *x, const float *at)
{
    fc_sim_host_access(x->device, label("look"), (fc_sim_range){at, BYTES, false});
}

/* ---- one device ---- */

/* Write in a, read in b, write in a again: both orders are needed; values tell in some seeds. */
static void test_write_read_write(void)
{
    bool went_wrong[3] = {false};
    uint64_t seed;
    int missing;

    for (missing = 0; missing < 3; missing++) { /* 0: none */
        for (seed = 0; seed < SEEDS; seed++) {
            bench x = bench_create(seed);
            float *from = take(&x, x.a, "source");
            float *to = take(&x, x.b, "target");

            set(&x, x.a, "first", from, 1);
            if (missing != 1) {
                chain(&x, x.a, x.b);
            }
            copy(&x, x.b, "take", to, from);
            if (missing != 2) {
                chain(&x, x.b, x.a);
            }
            set(&x, x.a, "second", from, 2);
            finish(&x);
            read_on_host(&x, to);
            went_wrong[missing] = went_wrong[missing] || to[0] != 1;
            if (missing == 0) {
                CHECK_EQ(fc_sim_faults(x.sim), 0);
            } else {
                CHECK(fc_sim_faults(x.sim) > 0);
                CHECK_HAS(fc_sim_fault(x.sim, 0), "race on rank 0 in 'source' of 'unit'");
            }
            if (missing == 2) {
                CHECK_EQ(fc_sim_faults(x.sim), 1);
                CHECK_HAS(fc_sim_fault(x.sim, 0),
                          "'take' of 'unit' on stream 'b' reads bytes 0 to 64, then 'second' of"
                          " 'unit' on stream 'a' writes bytes 0 to 64");
            }
            bench_destroy(&x);
        }
    }
    CHECK(!went_wrong[0]);
    CHECK(went_wrong[1]);
    CHECK(went_wrong[2]);
}

/* Neither two reads nor neighbours are a race; one shared byte is. */
static void test_only_conflicts_count(void)
{
    bench x = bench_create(1);
    char *memory = (char *)take(&x, x.a, "memory");
    fc_sim_range ranges[2] = {{memory, 8, true}, {memory + 8, 8, true}};
    int i;

    chain(&x, x.a, x.b);
    for (i = 0; i < 3; i++) {
        fc_sim_range ra = ranges[0], rb = ranges[1];

        if (i == 1) { /* both read everything */
            ra = rb = (fc_sim_range){memory, 16, false};
            chain(&x, x.a, x.b);
            chain(&x, x.b, x.a);
        }
        if (i == 2) {
            chain(&x, x.a, x.b);
            chain(&x, x.b, x.a);
            rb.at = memory + 7;
        }
        MUST(fc_sim_launch(x.device, x.a, label("left"), &ra, 1, fill,
                           &(fill_args){(float *)(void *)memory, 0}, sizeof(fill_args)));
        MUST(fc_sim_launch(x.device, x.b, label("right"), &rb, 1, fill,
                           &(fill_args){(float *)(void *)memory, 0}, sizeof(fill_args)));
        CHECK_EQ(fc_sim_faults(x.sim), i == 2 ? 1 : 0);
    }
    CHECK_HAS(fc_sim_fault(x.sim, 0), "writes bytes 0 to 8");
    CHECK_HAS(fc_sim_fault(x.sim, 0), "writes bytes 7 to 15");
    bench_destroy(&x);
}

/* An event stands for where it was recorded when the wait was called. */
static void test_events(void)
{
    bench x = bench_create(2);
    float *from = take(&x, x.a, "source"), *to = take(&x, x.b, "target");

    MUST(x.ops->wait(x.device, x.b, x.event)); /* never recorded */
    chain(&x, x.a, x.b);
    set(&x, x.a, "late", from, 1); /* after the record */
    copy(&x, x.b, "take", to, from);
    CHECK_EQ(fc_sim_faults(x.sim), 1);
    MUST(x.ops->record(x.device, x.event, x.a));
    MUST(x.ops->wait(x.device, x.b, x.event));
    MUST(x.ops->record(x.device, x.event, x.b)); /* the wait keeps the older record */
    copy(&x, x.b, "again", to, from);
    CHECK_EQ(fc_sim_faults(x.sim), 1);
    bench_destroy(&x);
}

/* Order passes on through a third stream and through the host. */
static void test_order_is_transitive(void)
{
    bench x = bench_create(3);
    float *from = take(&x, x.a, "source"), *to = take(&x, x.b, "target");
    fc_stream *c;

    MUST(fc_sim_stream_create(x.sim, 0, "c", &c));
    set(&x, x.a, "set", from, 3);
    chain(&x, x.a, c);
    chain(&x, c, x.b);
    copy(&x, x.b, "take", to, from);
    MUST(x.ops->record(x.device, x.event, x.b));
    MUST(x.ops->synchronize(x.device, x.event));
    read_on_host(&x, to);
    read_on_host(&x, from);
    CHECK(to[0] == 3);
    set(&x, c, "after the host", from, 4);
    CHECK_EQ(fc_sim_faults(x.sim), 0);
    bench_destroy(&x);
}

static void test_host_accesses(void)
{
    bench x = bench_create(4);
    float *device = take(&x, x.a, "device");
    void *host = NULL;

    MUST(fc_sim_host_alloc(x.device, label("pinned"), BYTES, &host));
    set(&x, x.a, "set", device, 1);
    copy_down(&x, "down", host, device);
    read_on_host(&x, host);
    CHECK_EQ(fc_sim_faults(x.sim), 1);
    CHECK_HAS(fc_sim_fault(x.sim, 0), "'look' of 'unit' on stream 'host' reads");
    finish(&x);
    read_on_host(&x, host);
    copy_up(&x, "up", device, host);
    fc_sim_host_access(x.device, label("change"), (fc_sim_range){host, BYTES, true});
    CHECK_EQ(fc_sim_faults(x.sim), 2);
    CHECK_HAS(fc_sim_fault(x.sim, 1), "'up' of 'unit' on stream 'a' reads");
    finish(&x);
    fc_sim_host_access(x.device, label("change"), (fc_sim_range){host, BYTES, true});
    CHECK_EQ(fc_sim_faults(x.sim), 2);
    copy_up(&x, "stay", device, device);
    CHECK_EQ(fc_sim_faults(x.sim), 3);
    CHECK_HAS(fc_sim_fault(x.sim, 2), "'stay' of 'unit' goes another way than it says");
    finish(&x);
    x.ops->free(x.device, host);
    CHECK_EQ(fc_sim_faults(x.sim), 3);
    bench_destroy(&x);
}

/* Memory is its stream's: others wait for the allocation, and it waits for them to free it. */
static void test_allocation_and_free(void)
{
    bench x = bench_create(5);
    float *p = take(&x, x.a, "p"), *q, *mine = take(&x, x.b, "mine");

    CHECK_EQ(fc_sim_bytes(x.device), 2 * BYTES);
    set(&x, x.b, "too early", p, 1);
    CHECK_EQ(fc_sim_faults(x.sim), 1);
    CHECK_HAS(fc_sim_fault(x.sim, 0), "'allocation' of 'unit' on stream 'a'");
    chain(&x, x.a, x.b);
    copy(&x, x.b, "use", mine, p);
    x.ops->free(x.device, p);
    CHECK_EQ(fc_sim_faults(x.sim), 3); /* it also misses the write before */
    CHECK_HAS(fc_sim_fault(x.sim, 2), "'use' of 'unit' on stream 'b' reads");
    CHECK_HAS(fc_sim_fault(x.sim, 2), "then 'free' of 'unit' on stream 'a'");
    CHECK_EQ(fc_sim_bytes(x.device), BYTES);
    chain(&x, x.b, x.a);
    set(&x, x.a, "use after free", p, 1);
    CHECK_EQ(fc_sim_faults(x.sim), 4);
    CHECK_HAS(fc_sim_fault(x.sim, 3), "which were freed as p");
    q = take(&x, x.a, "q");
    CHECK(q == p); /* handed out again */
    x.ops->free(x.device, q);
    x.ops->free(x.device, q);
    CHECK_HAS(fc_sim_fault(x.sim, 4), "frees what is not allocated");
    set(&x, x.a, "overrun", mine + 1, 1);
    CHECK_HAS(fc_sim_fault(x.sim, 5), "reach past the end of mine");
    CHECK_EQ(fc_sim_peak_bytes(x.device), 2 * BYTES);
    bench_destroy(&x);
}

/* A buffer freed without a wait keeps the values of the order that was run only by luck. */
static void test_freed_memory_is_overwritten(void)
{
    bool went_wrong = false;
    uint64_t seed;

    for (seed = 0; seed < SEEDS; seed++) {
        bench x = bench_create(seed);
        float *p = take(&x, x.a, "p"), *to = take(&x, x.b, "target");

        set(&x, x.a, "set", p, 1);
        chain(&x, x.a, x.b);
        copy(&x, x.b, "use", to, p);
        x.ops->free(x.device, p);
        finish(&x);
        CHECK_EQ(fc_sim_faults(x.sim), 1);
        went_wrong = went_wrong || to[0] != 1;
        bench_destroy(&x);
    }
    CHECK(went_wrong);
}

static void test_moves(void)
{
    /* Two lines of two, from four apart to next to each other; and one element of nothing. */
    const fc_block blocks[2] = {{.planes = 1,
                                 .lines = 2,
                                 .numel = 2,
                                 .to = {.base = 0, .type = FC_F32, .at = 4, .line_stride = 8},
                                 .from = {.base = 2, .type = FC_F32, .at = 8, .line_stride = 16}},
                                {.planes = 1,
                                 .lines = 1,
                                 .numel = 1,
                                 .to = {.base = 0, .type = FC_F32},
                                 .from = {.base = 1, .type = FC_BF16}}};
    bench x = bench_create(6);
    float *from = take(&x, x.a, "source"), *to = take(&x, x.a, "target");
    const uint64_t addresses[3] = {(uintptr_t)to, 0, (uintptr_t)from};
    fc_moves *moves = NULL;
    fc_runs plan;
    int i;

    finish(&x);
    for (i = 0; i < N; i++) {
        from[i] = (float)i;
    }
    fc_runs_init(&plan);
    MUST(fc_runs_add(&plan, &blocks[0]));
    MUST(fc_runs_add(&plan, &blocks[1]));
    MUST(x.ops->moves_create(x.device, &plan, &moves));
    CHECK_EQ(plan.n_runs, 0);
    MUST(x.ops->move(x.device, x.a, label("plain"), &(fc_move){moves, addresses, 1.0, false}));
    MUST(x.ops->move(x.device, x.a, label("add"), &(fc_move){moves, addresses, 2.0, true}));
    finish(&x);
    CHECK(to[0] == 0 && to[1] == 2 + 1 && to[2] == 3 + 1.5f && to[3] == 6 + 3 && to[4] == 7 + 3.5f);
    CHECK_EQ(fc_sim_faults(x.sim), 0);
    set(&x, x.a, "set", from, 1);
    MUST(x.ops->move(x.device, x.b, label("other"), &(fc_move){moves, addresses, 1.0, false}));
    CHECK_EQ(fc_sim_faults(x.sim), 1);
    CHECK_HAS(fc_sim_fault(x.sim, 0), "'other' of 'unit' on stream 'b' reads bytes 8 to 32");
    finish(&x);
    x.ops->moves_destroy(x.device, moves);
    bench_destroy(&x);
}

/* ---- several ranks ---- */

typedef enum scene_kind {
    SCENE_RIGHT,
    SCENE_OTHER_ORDER, /* of two comms, in one stream */
    SCENE_OTHER_UNIT,  /* the same call for something else */
    SCENE_OTHER_SIZE,
    SCENE_ONE_MISSING,
    SCENE_NO_WAIT, /* before the result is read */
    SCENE_COUNT
} scene_kind;

typedef struct team {
    scene_kind scene;
    int n_ranks;
    fc_device_comm *first, *second;
    fc_stream *stream[FC_SIM_RANKS], *other[FC_SIM_RANKS];
    fc_event *event[FC_SIM_RANKS];
} team;

static fc_status collect(fc_device *device, fc_stream *stream, fc_device_comm *comm,
                         const char *unit, float *buffer, size_t numel)
{
    return device->ops->all_gather(device, comm, stream, (fc_label){unit, "gather", 0}, buffer,
                                   numel * sizeof(float));
}

static void check_sum(const team *t, int rank, const float *sums, const float *all)
{
    float expected = 0;
    int r;

    for (r = 0; r < t->n_ranks; r++) {
        CHECK(all[r] == (float)(10 + r));
        expected += (float)(10 * r + rank);
    }
    CHECK(sums[0] == expected);
}

static fc_status body(fc_device *device, int rank, void *arg)
{
    team *t = arg;
    const fc_device_ops *ops = device->ops;
    fc_stream *s = t->stream[rank];
    bool is_odd = rank == t->n_ranks - 1;
    size_t numel = t->scene == SCENE_OTHER_SIZE && is_odd ? 2 : 1;
    const char *unit = t->scene == SCENE_OTHER_UNIT && is_odd ? "second" : "first";
    void *memory[3] = {NULL};
    float *all, *parts, *sum;
    fc_event *event = t->event[rank];
    int r;

    for (r = 0; r < 3; r++) {
        FC_TRY(fc_sim_host_alloc(device, label("buffer"), 2 * FC_SIM_RANKS * sizeof(float),
                                 &memory[r]));
    }
    all = memory[0], parts = memory[1], sum = memory[2];
    all[rank] = (float)(10 + rank);
    for (r = 0; r < t->n_ranks; r++) {
        parts[r] = (float)(10 * rank + r);
    }
    if (t->scene == SCENE_OTHER_ORDER && is_odd) {
        FC_TRY(ops->all_reduce(device, t->second, s, label("sum"), parts, 8, FC_F32));
        FC_TRY(collect(device, s, t->first, unit, all, numel));
    } else {
        FC_TRY(collect(device, s, t->first, unit, all, numel));
        if (t->scene == SCENE_OTHER_ORDER) {
            FC_TRY(ops->all_reduce(device, t->second, s, label("sum"), parts, 8, FC_F32));
        }
    }
    if (t->scene != SCENE_OTHER_ORDER && !(t->scene == SCENE_ONE_MISSING && is_odd)) {
        FC_TRY(ops->record(device, event, s));
        if (t->scene != SCENE_NO_WAIT) {
            FC_TRY(ops->wait(device, t->other[rank], event));
        }
        FC_TRY(ops->reduce_scatter(device, t->second, t->other[rank], label("scatter"), sum,
                                   t->scene == SCENE_NO_WAIT ? all : parts, 1, FC_F32));
    }
    if (t->scene != SCENE_ONE_MISSING || !is_odd) {
        FC_TRY(ops->record(device, event, t->other[rank]));
        FC_TRY(ops->synchronize(device, event));
        if (t->scene == SCENE_RIGHT) {
            fc_sim_host_access(device, label("look"), (fc_sim_range){sum, sizeof(float), false});
            check_sum(t, rank, sum, all);
        }
    }
    return FC_OK;
}

static const char *const scene_faults[SCENE_COUNT] = {
    NULL,
    "deadlock; rank 0, stream 's': all-gather 0 of 'gathers' ('gather' of 'first'); rank ",
    "calls all-gather ('gather' of 'second', 4 bytes)",
    "calls all-gather ('gather' of 'first', 8 bytes)",
    "reduce-scatter 0 of 'sums' ('scatter' of 'unit')",
    "'gather' of 'first' on stream 's' writes bytes",
};

static void play(scene_kind scene, int n_ranks, uint64_t seed)
{
    const int ranks[4] = {0, 1, 2, 3};
    team t = {.scene = scene, .n_ranks = n_ranks};
    fc_sim *sim = NULL;
    fc_status st;
    bool is_found = false;
    int r;

    MUST(fc_sim_create(n_ranks, seed, &sim));
    CHECK_OR_EXIT(sim != NULL);
    MUST(fc_sim_comm_create(sim, "gathers", ranks, n_ranks, &t.first));
    MUST(fc_sim_comm_create(sim, "sums", ranks, n_ranks, &t.second));
    for (r = 0; r < n_ranks; r++) {
        MUST(fc_sim_stream_create(sim, r, "s", &t.stream[r]));
        MUST(fc_sim_stream_create(sim, r, "t", &t.other[r]));
        MUST(fc_sim_device(sim, r)->ops->event_create(fc_sim_device(sim, r), &t.event[r]));
    }
    st = fc_sim_run(sim, body, &t);
    if (scene == SCENE_RIGHT) {
        CHECK_EQ(st, FC_OK);
        CHECK_EQ(fc_sim_faults(sim), 0);
    } else {
        for (r = 0; r < fc_sim_faults(sim); r++) {
            is_found = is_found || strstr(fc_sim_fault(sim, r), scene_faults[scene]) != NULL;
        }
        CHECK_MSG(is_found, "scene %d, seed %d: %s", (int)scene, (int)seed, fc_sim_fault(sim, 0));
        CHECK_EQ(st == FC_OK, scene == SCENE_NO_WAIT);
    }
    for (r = 0; r < n_ranks; r++) {
        fc_sim_device(sim, r)->ops->event_destroy(fc_sim_device(sim, r), t.event[r]);
    }
    fc_sim_destroy(sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_ranks(void)
{
    uint64_t seed;
    int scene;

    for (scene = 0; scene < (int)SCENE_COUNT; scene++) {
        for (seed = 0; seed < SEEDS; seed++) {
            play((scene_kind)scene, 2 + (int)(seed % 3), seed);
        }
    }
}

static fc_status nothing(fc_device *device, int rank, void *arg)
{
    (void)device;
    (void)rank;
    (void)arg;
    return FC_OK;
}

static void test_no_memory(void)
{
    fc_sim *sim = NULL;
    int64_t n;

    for (n = 0; n < 3; n++) {
        fc_alloc_fail_after(n);
        CHECK_EQ(fc_sim_create(2, 0, &sim), FC_ERR_NOMEM);
        fc_alloc_fail_after(-1);
        CHECK(sim == NULL);
        CHECK_EQ(fc_alloc_live(), 0);
    }
    CHECK_EQ(fc_sim_create(0, 0, &sim), FC_ERR_INVALID);
    MUST(fc_sim_create(3, 0, &sim));
    MUST(fc_sim_run(sim, nothing, NULL));
    fc_sim_destroy(sim);
    fc_sim_destroy(NULL);
}

int main(void)
{
    test_write_read_write();
    test_only_conflicts_count();
    test_events();
    test_order_is_transitive();
    test_host_accesses();
    test_allocation_and_free();
    test_freed_memory_is_overwritten();
    test_moves();
    test_ranks();
    test_no_memory();
    return check_result();
}
