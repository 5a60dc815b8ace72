/* The host device: a unit through its iterations, what a step asks of a device, errors. */
#include "check.h"

#include "base/alloc.h"
#include "device/caller.h"
#include "device/host/host.h"
#include "device/host/operators.h"
#include "engine/schedule.h"

#define MUST(call) CHECK_EQ(call, FC_OK)
#define ROWS 5
#define WIDTH 3
#define NUMEL (ROWS * WIDTH)
#define STEPS 4

/* One rank: what a communicator does is little, and counted. */
typedef struct counts {
    size_t allocs, collectives;
    size_t plans, events, synchronizations; /* nothing that may happen in a step */
    bool fails;
} counts;

static fc_status caller_alloc(void *context, fc_stream *stream, size_t bytes, void **out)
{
    counts *c = context;

    (void)stream;
    if (c->fails) {
        return fc_fail(FC_ERR_NOMEM, "no %zu bytes", bytes);
    }
    c->allocs++;
    *out = fc_alloc(1, bytes);
    return FC_OK;
}

static void caller_free(void *context, void *memory)
{
    (void)context;
    fc_free(memory);
}

static fc_status caller_all_gather(void *context, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *buffer, size_t part_bytes)
{
    (void)comm;
    (void)label;
    (void)stream;
    CHECK(buffer != NULL && part_bytes > 0);
    ((counts *)context)->collectives++;
    return FC_OK;
}

static fc_status caller_reduce_scatter(void *context, fc_device_comm *comm, fc_stream *stream,
                                       fc_label label, void *to, const void *from, size_t numel,
                                       fc_dtype dtype)
{
    (void)comm;
    (void)label;
    (void)stream;
    memcpy(to, from, numel * fc_dtype_bytes(dtype));
    ((counts *)context)->collectives++;
    return FC_OK;
}

static fc_status caller_all_reduce(void *context, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    (void)comm;
    (void)label;
    (void)stream;
    CHECK(buffer != NULL && numel > 0 && dtype == FC_F32);
    ((counts *)context)->collectives++;
    return FC_OK;
}

static fc_status caller_all_gather_each(void *context, fc_device_comm *comm, fc_stream *stream,
                                        fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    (void)comm;
    (void)label;
    (void)stream;
    CHECK(n_gathers == 1 && gathers[0].from == gathers[0].to && gathers[0].bytes > 0);
    ((counts *)context)->collectives++;
    return FC_OK;
}

/* ---- a table that counts what must not happen in a step ---- */

static fc_device_ops recorded;
static const fc_device_ops *host_ops;
static counts *recorder;

static fc_status record_event_create(fc_device *device, fc_event **out)
{
    recorder->events++;
    return host_ops->event_create(device, out);
}

static fc_status record_synchronize(fc_device *device, fc_event *event)
{
    recorder->synchronizations++;
    return host_ops->synchronize(device, event);
}

static fc_status record_moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    recorder->plans++;
    return host_ops->moves_create(device, plan, out);
}

static fc_device *make_device(counts *c)
{
    const fc_device_caller caller = {.context = c,
                                     .alloc = caller_alloc,
                                     .free = caller_free,
                                     .all_gather = caller_all_gather,
                                     .reduce_scatter = caller_reduce_scatter,
                                     .all_reduce = caller_all_reduce,
                                     .all_gather_each = caller_all_gather_each};
    fc_device *device = NULL;

    MUST(fc_host_device_create(&caller, &device));
    host_ops = device->ops;
    recorded = *host_ops;
    recorded.event_create = record_event_create;
    recorded.synchronize = record_synchronize;
    recorded.moves_create = record_moves_create;
    device->ops = &recorded;
    recorder = c;
    return device;
}

/* ---- tests ---- */

typedef struct world {
    counts counts;
    fc_device *device;
    fc_schedule *schedule;
    fc_schedule_unit *unit;
    fc_param param;
    fc_dtype given; /* the type of gradients */
    fc_layout layout;
    float shard[NUMEL], out[64];
    double grad[NUMEL]; /* of any type */
    const void *shards[1];
} world;

static char streams[4];

static fc_stream *stream(int i)
{
    return (fc_stream *)&streams[i];
}

static void make_world(world *w, fc_dtype compute, fc_dtype given, bool has_replicas,
                       bool is_direct)
{
    fc_schedule_options options = {.copy_in = stream(0),
                                   .gather = stream(1),
                                   .reduce = stream(2),
                                   .all_reduce = stream(3),
                                   .n_reduce_inputs = 1};
    fc_schedule_unit_options unit = {.name = "layer",
                                     .layout = &w->layout,
                                     .replicas = has_replicas ? (fc_device_comm *)streams : NULL,
                                     .reshard_after_forward = true,
                                     .is_direct = is_direct,
                                     .pre_divisor = 1,
                                     .divisor = 4};

    memset(w, 0, sizeof(*w));
    w->given = given;
    w->param = (fc_param){.outer = 1,
                          .rows = ROWS,
                          .inner = WIDTH,
                          .orig = FC_F32,
                          .compute = compute,
                          .reduce = FC_F32,
                          .grad = FC_F32,
                          .has_grad = true,
                          .trainable = true};
    MUST(fc_layout_init(&w->layout, &w->param, 1, 0, 1, false));
    options.device = w->device = make_device(&w->counts);
    MUST(fc_schedule_create(&options, &w->schedule));
    MUST(fc_schedule_add(w->schedule, &unit, &w->unit));
    w->shards[0] = w->shard;
    fc_schedule_set_shards(w->unit, w->shards);
    for (int i = 0; i < NUMEL; i++) {
        w->shard[i] = (float)i / 2;
    }
}

static void unmake(world *w)
{
    fc_schedule_destroy(w->schedule);
    fc_host_device_destroy(w->device);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A forward, a backward whose gradients are all `value`, and the end. */
static void step(world *w, double value, bool accumulate)
{
    const void *full[1] = {w->grad};
    const fc_schedule_grads grads = {.full = full,
                                     .types = &w->given,
                                     .out = w->out,
                                     .accumulate = accumulate,
                                     .sync = FC_SYNC_ALL};
    bool is_reduced = false;
    void *memory = NULL;

    MUST(fc_schedule_begin(w->schedule, stream(3), NULL));
    MUST(fc_schedule_pre_forward(w->unit, &memory));
    for (int i = 0; i < NUMEL; i++) {
        if (w->param.compute == FC_F64) {
            CHECK(((const double *)memory)[i] == w->shard[i]);
        } else {
            CHECK(((const float *)memory)[i] == w->shard[i]);
        }
        if (w->given == FC_F64) {
            w->grad[i] = value;
        } else {
            ((float *)w->grad)[i] = (float)value;
        }
    }
    MUST(fc_schedule_post_forward(w->unit));
    MUST(fc_schedule_pre_backward(w->unit, &memory));
    MUST(fc_schedule_post_backward(w->unit, &grads, &is_reduced));
    CHECK(is_reduced);
    MUST(fc_schedule_end_backward(w->schedule, true));
}

static void test_steps(fc_dtype compute, fc_dtype given, bool has_replicas, bool is_direct)
{
    world w;
    counts before = {0};

    make_world(&w, compute, given, has_replicas, is_direct);
    step(&w, 1, false);
    for (int i = 0; i < STEPS; i++) {
        w.shard[i]++;
        step(&w, i, true);
        before = i == 0 ? w.counts : before; /* by now there is all that steps use again */
    }
    for (int i = 0; i < NUMEL; i++) {
        CHECK(w.out[i] == (1 + 0 + 1 + 2 + 3) / 4.0F);
    }
    /* Nothing that a graph of the step could not hold. */
    CHECK_EQ(w.counts.plans, before.plans);
    CHECK_EQ(w.counts.events, before.events);
    CHECK_EQ(w.counts.synchronizations, 0);
    /* Two gathers. Without replicas there is nobody to reduce with. */
    CHECK_EQ(w.counts.collectives, (1 + STEPS) * (has_replicas ? 4U : 2U));
    unmake(&w);
}

static void test_errors(bool is_direct)
{
    world w;
    void *memory = NULL;

    make_world(&w, FC_F32, FC_F32, false, is_direct);
    MUST(fc_schedule_begin(w.schedule, stream(3), NULL));
    w.counts.fails = true;
    CHECK_EQ(fc_schedule_pre_forward(w.unit, &memory), FC_ERR_NOMEM);
    CHECK_HAS(fc_last_message(), "no ");
    w.counts.fails = false;
    MUST(fc_schedule_reset(w.schedule));
    step(&w, 8, false);
    CHECK(w.out[0] == 2);
    unmake(&w);
    fc_host_device_destroy(NULL);
}

/* Who reads what goes to the host without a wait sees that it is not there. */
static void test_late_copies(void)
{
    counts c = {0};
    const fc_label label = {"layer", "gradients to host", 0};
    fc_device *device = make_device(&c);
    float from = 1, to = 0, back = 0;
    int i;

    for (i = 1; i < 3; i++) {
        from = (float)i;
        MUST(device->ops->copy(device, stream(2), label, &to, &from, sizeof(to), FC_TO_HOST));
    }
    from = 0;
    CHECK(to != to);
    MUST(device->ops->synchronize(device, NULL));
    CHECK(to == 2);
    MUST(device->ops->copy(device, stream(2), label, &to, &from, sizeof(to), FC_TO_HOST));
    MUST(device->ops->copy(device, stream(2), label, &back, &to, sizeof(to), FC_TO_DEVICE));
    CHECK(to == 0 && back == 0);
    fc_alloc_fail_after(0);
    CHECK_EQ(device->ops->copy(device, stream(2), label, &to, &from, sizeof(to), FC_TO_HOST),
             FC_ERR_NOMEM);
    fc_alloc_fail_after(-1);
    MUST(device->ops->copy(device, stream(2), label, &to, &from, sizeof(to), FC_TO_HOST));
    fc_host_device_destroy(device); /* it never arrives */
    CHECK_EQ(fc_alloc_live(), 0);
}

/* ---- a launch by operators ---- */

typedef struct steps {
    char text[64]; /* which operators, in order */
    fc_planes to, from;
    int fails_at;
} steps;

static fc_status note(steps *s, char name, const fc_planes *to, const fc_planes *from)
{
    size_t n = strlen(s->text);

    s->text[n] = name;
    s->to = *to;
    s->from = from == NULL ? *to : *from;
    return (int)n == s->fails_at ? fc_fail(FC_ERR_SYSTEM, "on purpose") : FC_OK;
}

static fc_status note_zero(void *context, const fc_planes *to)
{
    return note(context, 'z', to, NULL);
}

static fc_status note_copy(void *context, const fc_planes *to, const fc_planes *from)
{
    return note(context, 'c', to, from);
}

static fc_status note_finish(void *context, const fc_planes *to, const fc_planes *from,
                             fc_dtype wide, double divisor, bool accumulate)
{
    CHECK(divisor == 2 || accumulate);
    return note(context, wide == FC_F64 ? 'F' : 'f', to, from);
}

static fc_status operate(steps *s, const fc_runs *plan, const uint64_t *addresses, double divisor,
                         bool accumulate)
{
    const fc_operators operators = {s, note_zero, note_copy, note_finish};

    memset(s->text, 0, sizeof(s->text));
    return fc_operators_move(plan, addresses, divisor, accumulate, &operators);
}

/* Two planes of three lines of four elements, then a line of doubles; of a base without memory. */
static void test_operators(void)
{
    static char memory[4096];
    const fc_block blocks[] = {
        {2, 3, 4, {0, FC_F32, 0, 16, 48}, {1, FC_BF16, 8, 10, 40}},
        {1, 1, 5, {0, FC_F64, 512, 40, 40}, {1, FC_F32, 256, 20, 20}},
        {1, 1, 5, {0, FC_F32, 1024, 20, 20}, {2, FC_F32, 0, 20, 20}},
    };
    const uint64_t addresses[] = {(uintptr_t)memory, (uintptr_t)memory + 2048, 0};
    fc_runs plan;
    steps s = {.fails_at = -1};

    fc_runs_init(&plan);
    MUST(fc_runs_add(&plan, &blocks[0]));
    MUST(operate(&s, &plan, addresses, 1, false));
    CHECK_STR(s.text, "c");
    CHECK(s.to.first == memory && s.to.dtype == FC_F32 && s.from.dtype == FC_BF16);
    CHECK(s.from.first == memory + 2048 + 8);
    CHECK(s.to.sizes[0] == 2 && s.to.sizes[1] == 3 && s.to.sizes[2] == 4);
    CHECK(s.to.strides[0] == 12 && s.to.strides[1] == 4 && s.to.strides[2] == 1);
    CHECK(s.from.strides[0] == 20 && s.from.strides[1] == 5 && s.from.strides[2] == 1);
    MUST(fc_runs_add(&plan, &blocks[1]));
    MUST(fc_runs_add(&plan, &blocks[2]));
    MUST(operate(&s, &plan, addresses, 1, false));
    CHECK_STR(s.text, "ccz");
    MUST(operate(&s, &plan, addresses, 2, false));
    CHECK_STR(s.text, "fFz");
    MUST(operate(&s, &plan, addresses, 1, true)); /* nothing is added where there is nothing */
    CHECK_STR(s.text, "fF");
    s.fails_at = 0;
    CHECK_EQ(operate(&s, &plan, addresses, 2, false), FC_ERR_SYSTEM);
    CHECK_STR(s.text, "f");
    fc_runs_clear(&plan);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* Two packs of which each begins with a number of two bytes: floats between elements are bytes. */
static void test_operators_between_elements(void)
{
    static _Alignas(8) char memory[256];
    const fc_block unpack = {2, 1, 3, {0, FC_F32, 0, 12, 12}, {1, FC_F32, 2, 12, 14}};
    const fc_block cast = {1, 1, 3, {1, FC_F32, 2, 12, 12}, {0, FC_F64, 0, 24, 24}};
    const uint64_t addresses[] = {(uintptr_t)memory, (uintptr_t)memory + 128};
    fc_runs plan;
    steps s = {.fails_at = -1};

    fc_runs_init(&plan);
    MUST(fc_runs_add(&plan, &unpack));
    MUST(operate(&s, &plan, addresses, 1, false));
    CHECK_STR(s.text, "c");
    CHECK(s.to.dtype == FC_RAW1 && s.from.dtype == FC_RAW1);
    CHECK(!s.to.is_unaligned && !s.from.is_unaligned); /* bytes are aligned everywhere */
    CHECK(s.from.first == memory + 128 + 2);
    CHECK(s.from.sizes[1] == 2 && s.from.sizes[2] == 12 && s.to.sizes[2] == 12);
    CHECK(s.from.strides[1] == 14 && s.to.strides[1] == 12);
    fc_runs_clear(&plan);
    MUST(fc_runs_add(&plan, &cast));
    MUST(operate(&s, &plan, addresses, 1, false));
    CHECK(s.to.dtype == FC_F32 && s.from.dtype == FC_F64 && s.to.sizes[2] == 3);
    CHECK(s.to.first == memory + 128 + 2);
    CHECK(s.to.is_unaligned && !s.from.is_unaligned);
    fc_runs_clear(&plan);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* A wait that the caller watches, asks three times, and may end; or has nothing to watch. */
typedef struct watched {
    fc_called_device device;
    fc_status answer, query; /* of the caller's wait, and of the third question */
    int n_questions, n_blocks;
} watched;

static fc_status watch(void *context, bool (*ready)(void *arg), void *arg)
{
    const watched *w = context;

    if (w->answer != FC_OK) {
        return w->answer;
    }
    while (!ready(arg)) {
    }
    return FC_OK;
}

static fc_status query(fc_device *device, fc_event *event, bool *is_over_out)
{
    watched *w = (watched *)event;

    CHECK(device == &w->device.base);
    *is_over_out = ++w->n_questions == 3 && w->query == FC_OK;
    return w->n_questions == 3 ? w->query : FC_OK;
}

static fc_status block(fc_device *device, fc_event *event)
{
    (void)device;
    ((watched *)event)->n_blocks++;
    return FC_OK;
}

static void test_watched_waits(void)
{
    static const struct {
        fc_status answer, query, result;
        int n_questions, n_blocks;
    } cases[] = {{FC_OK, FC_OK, FC_OK, 3, 0},
                 {FC_OK, FC_ERR_SYSTEM, FC_ERR_SYSTEM, 3, 0},
                 {FC_AGAIN, FC_OK, FC_OK, 0, 1},
                 {FC_ERR_PEER, FC_OK, FC_ERR_PEER, 0, 0}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        watched w = {.answer = cases[i].answer, .query = cases[i].query};

        w.device.caller = (fc_device_caller){.context = &w, .wait = watch};
        CHECK_EQ(fc_called_synchronize(&w.device.base, (fc_event *)&w, query, block),
                 cases[i].result);
        CHECK_EQ(w.n_questions, cases[i].n_questions);
        CHECK_EQ(w.n_blocks, cases[i].n_blocks);
    }
}

int main(void)
{
    for (int is_direct = 0; is_direct < 2; is_direct++) {
        test_steps(FC_F32, FC_F32, false, is_direct);
        test_steps(FC_F32, FC_F64, false, is_direct); /* staging rounds */
        test_steps(FC_F32, FC_F64, true, is_direct);
        test_steps(FC_F64, FC_F64, true, is_direct);
        test_errors(is_direct);
    }
    test_late_copies();
    test_operators();
    test_operators_between_elements();
    test_watched_waits();
    return check_result();
}
