/* The CUDA device: random programs through it onto simulated devices, with the GPU kernels run
 * thread by thread; errors; libraries that are no CUDA runtime. */
#include "emulated_cuda.h"
#include "schedule_world.h"

#include "device/cuda/cuda.h"

#define ADDRESSES 8

/* ---- a CUDA runtime whose streams and events are the simulator's ---- */

/* As cudaSetDevice: of the thread, and every rank has its own. */
static _Thread_local fc_device *current;

static const fc_label cuda_label = {"cuda", "call"};

static int error_of(fc_status st)
{
    return st == FC_OK ? 0 : 1;
}

static int run_event_create(void **event, unsigned flags)
{
    fc_event *made = NULL;
    fc_status st = current->ops->event_create(current, &made);

    CHECK_EQ(flags, 2);
    *event = made;
    return error_of(st);
}

static int run_event_destroy(void *event)
{
    current->ops->event_destroy(current, event);
    return 0;
}

static int run_event_record(void *event, void *stream)
{
    return error_of(current->ops->record(current, event, stream));
}

static int run_event_synchronize(void *event)
{
    return error_of(current->ops->synchronize(current, event));
}

/* As busy devices do, it is not over when it is asked about first. */
static int run_event_query(void *event)
{
    static _Thread_local unsigned n_queries;

    return n_queries++ % 2 == 0 ? 600 : run_event_synchronize(event);
}

static int run_stream_wait_event(void *stream, void *event, unsigned flags)
{
    CHECK_EQ(flags, 0);
    return error_of(current->ops->wait(current, stream, event));
}

static int run_copy_async(void *to, const void *from, size_t bytes, int kind, void *stream)
{
    fc_way way = kind == 1 ? FC_TO_DEVICE : kind == 2 ? FC_TO_HOST : FC_ON_DEVICE;

    CHECK(kind >= 1 && kind <= 3);
    return error_of(current->ops->copy(current, stream, cuda_label, to, from, bytes, way));
}

static int run_copy(void *to, const void *from, size_t bytes, int kind)
{
    CHECK_EQ(kind, 1);
    memcpy(to, from, bytes);
    return 0;
}

static int run_alloc(void **memory, size_t bytes)
{
    *memory = fc_alloc(1, bytes);
    return *memory == NULL ? 2 : 0;
}

static int run_free(void *memory)
{
    fc_free(memory);
    return 0;
}

static const fc_cuda_runtime simulated_runtime = {run_event_create,   run_event_destroy,
                                                  run_event_record,   run_event_synchronize,
                                                  run_event_query,    run_stream_wait_event,
                                                  run_copy_async,     run_copy,
                                                  run_alloc,          run_free,
                                                  emulated_error_text};

/* ---- kernels that wait for their turn in a simulated stream ---- */

typedef struct queued_launch {
    fc_cuda_launch launch;
    uint64_t addresses[ADDRESSES];
    bool is_plain;
    fc_sum sum;
} queued_launch;

static void run_queued(const void *args)
{
    queued_launch q;

    memcpy(&q, args, sizeof(q));
    q.launch.addresses = q.addresses;
    if (q.is_plain) {
        CHECK_EQ(emulated_move(&q.launch), 0);
    } else {
        CHECK_EQ(emulated_finish(&q.launch, q.sum.divisor, q.sum.accumulate), 0);
    }
}

static int enqueue_launch(const fc_cuda_launch *launch, bool is_plain, fc_sum sum)
{
    queued_launch q = {.launch = *launch, .is_plain = is_plain, .sum = sum};
    size_t i;

    for (i = 0; i < launch->plan->n_bases; i++) {
        CHECK_OR_EXIT(launch->plan->bases[i] < ADDRESSES);
        q.addresses[launch->plan->bases[i]] = launch->addresses[launch->plan->bases[i]];
    }
    return error_of(fc_sim_launch_plan(current, launch->stream, cuda_label, launch->plan,
                                       launch->addresses, run_queued, &q, sizeof(q)));
}

static int run_move(const fc_cuda_launch *launch)
{
    return enqueue_launch(launch, true, (fc_sum){1, false});
}

static int run_finish(const fc_cuda_launch *launch, double divisor, bool accumulate)
{
    return enqueue_launch(launch, false, (fc_sum){divisor, accumulate});
}

static const fc_cuda_kernels queued_kernels = {
    .version = FC_CUDA_VERSION,
    .error_text = emulated_error_text,
    .move = run_move,
    .finish = run_finish,
};

/* ---- what torch and a communicator would do ---- */

static fc_status caller_alloc(void *context, fc_stream *stream, size_t bytes, void **out)
{
    fc_device *device = context;

    return device->ops->alloc(device, stream, cuda_label, bytes, out);
}

static void caller_free(void *context, void *memory)
{
    fc_device *device = context;

    device->ops->free(device, memory);
}

static fc_status caller_all_gather(void *context, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *buffer, size_t part_bytes)
{
    fc_device *device = context;

    return device->ops->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static fc_status caller_reduce_scatter(void *context, fc_device_comm *comm, fc_stream *stream,
                                       fc_label label, void *to, const void *from, size_t numel,
                                       fc_dtype dtype)
{
    fc_device *device = context;

    return device->ops->reduce_scatter(device, comm, stream, label, to, from, numel, dtype);
}

static fc_status caller_all_reduce(void *context, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    fc_device *device = context;

    return device->ops->all_reduce(device, comm, stream, label, buffer, numel, dtype);
}

static fc_status caller_all_gather_each(void *context, fc_device_comm *comm, fc_stream *stream,
                                        fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    fc_device *device = context;

    return device->ops->all_gather_each(device, comm, stream, label, gathers, n_gathers);
}

static fc_status caller_wait(void *context, bool (*ready)(void *arg), void *arg)
{
    (void)context;
    while (!ready(arg)) {
    }
    return FC_OK;
}

/* With a wait of its own on every second device. */
static fc_device_caller caller_of(fc_device *simulated)
{
    static _Thread_local unsigned n_devices;
    fc_device_caller caller = {.context = simulated,
                               .alloc = caller_alloc,
                               .free = caller_free,
                               .all_gather = caller_all_gather,
                               .reduce_scatter = caller_reduce_scatter,
                               .all_reduce = caller_all_reduce,
                               .all_gather_each = caller_all_gather_each};

    if (n_devices++ % 2 == 0) {
        caller.wait = caller_wait;
    }
    return caller;
}

static fc_status wrap(fc_device *simulated, fc_device **out)
{
    const fc_device_caller caller = caller_of(simulated);

    current = simulated;
    return fc_cuda_device_create(&simulated_runtime, &queued_kernels, &caller, out);
}

/* ---- tests ---- */

static program the_program;

/* All that units do, in a device that only has CUDA's functions. */
static void test_random_programs(void)
{
    char first[512];
    uint64_t seed;

    for (seed = 0; seed < 300; seed++) {
        make_program(&the_program, seed);
        the_program.wrap = wrap;
        the_program.unwrap = fc_cuda_device_destroy;
        (void)run(&the_program, seed, first, sizeof(first));
    }
}

static int fail_alloc(void **memory, size_t bytes)
{
    (void)memory;
    (void)bytes;
    return 2;
}

static int fail_copy(void *to, const void *from, size_t bytes, int kind)
{
    (void)to;
    (void)from;
    (void)bytes;
    (void)kind;
    return 1;
}

static int fail_move(const fc_cuda_launch *launch)
{
    (void)launch;
    return 1;
}

static fc_status give_up_waiting(void *context, bool (*ready)(void *arg), void *arg)
{
    (void)context;
    return ready(arg) ? FC_OK : fc_fail(FC_ERR_PEER, "a rank is gone");
}

static int query_fails(void *event)
{
    return event == NULL ? 1 : 600;
}

/* What only some callers have. */
static void test_options(void)
{
    fc_cuda_runtime runtime = simulated_runtime;
    fc_device_caller caller = caller_of(NULL);
    int event = 0;
    fc_device *device = NULL;

    runtime.event_query = query_fails;
    caller.wait = give_up_waiting;
    MUST(fc_cuda_device_create(&runtime, &queued_kernels, &caller, &device));
    CHECK_EQ(device->ops->synchronize(device, (fc_event *)(void *)&event), FC_ERR_PEER);
    CHECK_EQ(device->ops->synchronize(device, NULL), FC_ERR_SYSTEM);
    CHECK_HAS(fc_last_message(), "cudaEventQuery");
    fc_cuda_device_destroy(device);
    CHECK_EQ(fc_alloc_live(), 0);
}

/* The library's own words, and nothing is left behind. */
static void test_errors(void)
{
    const fc_block block = {.planes = 1,
                            .lines = 1,
                            .numel = 4,
                            .to = {.base = 0, .type = FC_F32},
                            .from = {.base = 1, .type = FC_F32}};
    const uint64_t addresses[2] = {0, 0};
    const fc_label label = {"layer", "pack"};
    fc_cuda_runtime runtime = simulated_runtime;
    fc_cuda_kernels kernels = queued_kernels;
    fc_device_caller caller = caller_of(NULL);
    fc_device *device = NULL;
    fc_moves *moves = NULL;
    fc_runs plan;
    int i;

    fc_runs_init(&plan);
    MUST(fc_runs_add(&plan, &block));
    kernels.move = fail_move;
    for (i = 0; i < 3; i++) {
        runtime.alloc = i == 0 ? fail_alloc : run_alloc;
        runtime.copy = i == 1 ? fail_copy : run_copy;
        MUST(fc_cuda_device_create(&runtime, &kernels, &caller, &device));
        if (i < 2) {
            CHECK_EQ(device->ops->moves_create(device, &plan, &moves), FC_ERR_SYSTEM);
            CHECK_HAS(fc_last_message(), i == 0 ? "cudaMalloc" : "cudaMemcpy");
            CHECK_HAS(fc_last_message(), ": invalid argument");
            CHECK_EQ(plan.n_runs, 1);
        } else {
            MUST(device->ops->moves_create(device, &plan, &moves));
            CHECK_EQ(
                device->ops->move(device, NULL, label, &(fc_move){moves, addresses, 1.0, false}),
                FC_ERR_SYSTEM);
            CHECK_STR(fc_last_message(), "kernel of 'pack' of 'layer': invalid argument");
            device->ops->moves_destroy(device, moves);
        }
        device->ops->free(device, NULL);
        device->ops->event_destroy(device, NULL);
        device->ops->moves_destroy(device, NULL);
        fc_cuda_device_destroy(device);
    }
    fc_cuda_device_destroy(NULL);
    fc_runs_clear(&plan);
    CHECK_EQ(fc_alloc_live(), 0);
}

static void test_libraries(void)
{
    fc_cuda_runtime runtime;

    CHECK_EQ(fc_cuda_runtime_open("/nowhere/libcudart.so", &runtime), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "the CUDA runtime cannot be opened: /nowhere/libcudart.so");
    CHECK_EQ(fc_cuda_runtime_open("libm.so.6", &runtime), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "libm.so.6 is no CUDA runtime that fsdp_c can use: it lacks cuda");
}

int main(int argc, char **argv)
{
    fc_cuda_runtime runtime;

    if (argc > 1) { /* a CUDA runtime to look at: `test_device_cuda libcudart.so.13` */
        CHECK_MSG(fc_cuda_runtime_open(argv[1], &runtime) == FC_OK, "%s", fc_last_message());
    }
    test_random_programs();
    test_errors();
    test_options();
    test_libraries();
    return check_result();
}
