/* The table of functions of CUDA devices: each passes on to the runtime, the kernels or the caller.
 */
#include "device/cuda/cuda.h"

#include "base/alloc.h"

#define EVENT_WITHOUT_TIMING 2 /* cudaEventDisableTiming */
#define NOT_READY 600          /* cudaErrorNotReady */
/* cudaMemcpyKind */
#define COPY_TO_DEVICE 1
#define COPY_TO_HOST 2
#define COPY_ON_DEVICE 3

typedef struct cuda_device {
    fc_device base;
    fc_cuda_runtime runtime;
    fc_cuda_kernels kernels;
    fc_device_caller caller;
} cuda_device;

struct fc_moves {
    fc_runs plan; /* owned */
    fc_run *runs; /* owned; on the device */
};

static cuda_device *cuda(fc_device *device)
{
    return (cuda_device *)device;
}

static fc_status check(const cuda_device *d, int error, const char *call, fc_label label)
{
    if (error == 0) {
        return FC_OK;
    }
    return fc_fail(FC_ERR_SYSTEM, "%s ('%s' of '%s'): %s", call, label.what, label.unit,
                   d->runtime.error_text(error));
}

static const fc_label no_label = {"", ""};

/* ---- memory and events ---- */

static fc_status device_alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                              void **out)
{
    const fc_device_caller *caller = &cuda(device)->caller;

    (void)label;
    return caller->alloc(caller->context, stream, bytes, out);
}

static void device_free(fc_device *device, void *memory)
{
    const fc_device_caller *caller = &cuda(device)->caller;

    if (memory != NULL) {
        caller->free(caller->context, memory);
    }
}

static fc_status event_create(fc_device *device, fc_event **out)
{
    cuda_device *d = cuda(device);
    void *event = NULL;

    FC_TRY(check(d, d->runtime.event_create(&event, EVENT_WITHOUT_TIMING), "cudaEventCreate",
                 no_label));
    *out = event;
    return FC_OK;
}

static void event_destroy(fc_device *device, fc_event *event)
{
    if (event != NULL) {
        (void)cuda(device)->runtime.event_destroy(event);
    }
}

static fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    cuda_device *d = cuda(device);

    return check(d, d->runtime.event_record(event, stream), "cudaEventRecord", no_label);
}

static fc_status wait_event(fc_device *device, fc_stream *stream, fc_event *event)
{
    cuda_device *d = cuda(device);

    return check(d, d->runtime.stream_wait_event(stream, event, 0), "cudaStreamWaitEvent",
                 no_label);
}

typedef struct query {
    cuda_device *device;
    void *event;
    int error;
} query;

static bool is_over(void *arg)
{
    query *q = arg;

    q->error = q->device->runtime.event_query(q->event);
    return q->error != NOT_READY;
}

static fc_status synchronize(fc_device *device, fc_event *event)
{
    cuda_device *d = cuda(device);
    query q = {.device = d, .event = event};

    fc_status st =
        d->caller.wait == NULL ? FC_AGAIN : d->caller.wait(d->caller.context, is_over, &q);

    if (st == FC_OK) {
        return check(d, q.error, "cudaEventQuery", no_label);
    }
    if (st != FC_AGAIN) {
        return st;
    }
    return check(d, d->runtime.event_synchronize(event), "cudaEventSynchronize", no_label);
}

/* ---- copies and moves ---- */

static fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                      const void *from, size_t bytes, fc_way way)
{
    static const int kinds[] = {[FC_TO_DEVICE] = COPY_TO_DEVICE,
                                [FC_TO_HOST] = COPY_TO_HOST,
                                [FC_ON_DEVICE] = COPY_ON_DEVICE};
    cuda_device *d = cuda(device);

    return check(d, d->runtime.copy_async(to, from, bytes, kinds[way], stream), "cudaMemcpyAsync",
                 label);
}

/* Puts the plan's runs onto the device. */
static fc_status upload(cuda_device *d, const fc_runs *plan, fc_run **out)
{
    size_t bytes = plan->n_runs * sizeof(fc_run);
    void *runs = NULL;
    fc_status st;

    if (bytes == 0) {
        *out = NULL;
        return FC_OK;
    }
    FC_TRY(check(d, d->runtime.alloc(&runs, bytes), "cudaMalloc", (fc_label){"a unit", "plan"}));
    st = check(d, d->runtime.copy(runs, plan->runs, bytes, COPY_TO_DEVICE), "cudaMemcpy",
               (fc_label){"a unit", "plan"});
    if (st != FC_OK) {
        (void)d->runtime.free(runs);
        return st;
    }
    *out = runs;
    return FC_OK;
}

static fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    fc_moves *moves = fc_alloc(1, sizeof(*moves));
    fc_status st;

    if (moves == NULL) {
        return fc_fail(FC_ERR_NOMEM, "plan of %zu runs", plan->n_runs);
    }
    st = upload(cuda(device), plan, &moves->runs);
    if (st != FC_OK) {
        fc_free(moves);
        return st;
    }
    moves->plan = *plan;
    fc_runs_init(plan);
    *out = moves;
    return FC_OK;
}

static void moves_destroy(fc_device *device, fc_moves *moves)
{
    if (moves != NULL) {
        if (moves->runs != NULL) {
            (void)cuda(device)->runtime.free(moves->runs);
        }
        fc_runs_clear(&moves->plan);
        fc_free(moves);
    }
}

static fc_status move(fc_device *device, fc_stream *stream, fc_label label, const fc_move *move)
{
    cuda_device *d = cuda(device);
    const fc_cuda_launch launch = {.plan = &move->moves->plan,
                                   .runs = move->moves->runs,
                                   .addresses = move->addresses,
                                   .stream = stream};
    bool is_plain = move->divisor == 1 && !move->accumulate;
    int error = is_plain ? d->kernels.move(&launch)
                         : d->kernels.finish(&launch, move->divisor, move->accumulate);

    if (error != 0) {
        return fc_fail(FC_ERR_SYSTEM, "kernel of '%s' of '%s': %s", label.what, label.unit,
                       d->kernels.error_text(error));
    }
    return FC_OK;
}

/* ---- collectives ---- */

static fc_status all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t part_bytes)
{
    const fc_device_caller *caller = &cuda(device)->caller;

    return caller->all_gather(caller->context, comm, stream, label, buffer, part_bytes);
}

static fc_status reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                fc_label label, void *to, const void *from, size_t numel,
                                fc_dtype dtype)
{
    const fc_device_caller *caller = &cuda(device)->caller;

    return caller->reduce_scatter(caller->context, comm, stream, label, to, from, numel, dtype);
}

static fc_status all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    const fc_device_caller *caller = &cuda(device)->caller;

    return caller->all_reduce(caller->context, comm, stream, label, buffer, numel, dtype);
}

static fc_status all_gather_each(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    const fc_device_caller *caller = &cuda(device)->caller;

    return caller->all_gather_each(caller->context, comm, stream, label, gathers, n_gathers);
}

static const fc_device_ops cuda_ops = {
    .name = "cuda",
    .alloc = device_alloc,
    .free = device_free,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .record = record,
    .wait = wait_event,
    .synchronize = synchronize,
    .copy = copy,
    .moves_create = moves_create,
    .moves_destroy = moves_destroy,
    .move = move,
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .all_gather_each = all_gather_each,
};

fc_status fc_cuda_device_create(const fc_cuda_runtime *runtime, const fc_cuda_kernels *kernels,
                                const fc_device_caller *caller, fc_device **out)
{
    cuda_device *d = fc_alloc(1, sizeof(*d));

    if (d == NULL) {
        return fc_fail(FC_ERR_NOMEM, "CUDA device");
    }
    d->base.ops = &cuda_ops;
    d->runtime = *runtime;
    d->kernels = *kernels;
    d->caller = *caller;
    *out = &d->base;
    return FC_OK;
}

void fc_cuda_device_destroy(fc_device *device)
{
    fc_free(device);
}
