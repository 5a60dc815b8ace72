/* The functions of devices that leave something to their caller. */
#include "device/caller.h"

static const fc_device_caller *caller_of(fc_device *device)
{
    return &((fc_called_device *)device)->caller;
}

typedef struct question {
    fc_device *device;
    fc_event *event;
    fc_status (*query)(fc_device *device, fc_event *event, bool *is_over_out);
    fc_status status;
} question;

/* Or it has failed. */
static bool is_over(void *arg)
{
    question *q = arg;
    bool answer = false;

    q->status = q->query(q->device, q->event, &answer);
    return answer || q->status != FC_OK;
}

fc_status fc_called_synchronize(fc_device *device, fc_event *event,
                                fc_status (*query)(fc_device *device, fc_event *event,
                                                   bool *is_over_out),
                                fc_status (*block)(fc_device *device, fc_event *event))
{
    const fc_device_caller *caller = caller_of(device);
    question q = {device, event, query, FC_OK};
    const fc_status st = caller->wait(caller->context, is_over, &q);

    if (st == FC_AGAIN) {
        return block(device, event);
    }
    return st == FC_OK ? q.status : st;
}

fc_status fc_called_alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                          void **out)
{
    const fc_device_caller *caller = caller_of(device);

    (void)label;
    return caller->alloc(caller->context, stream, bytes, out);
}

void fc_called_free(fc_device *device, void *memory)
{
    const fc_device_caller *caller = caller_of(device);

    if (memory != NULL) {
        caller->free(caller->context, memory);
    }
}

fc_status fc_called_all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                               fc_label label, void *buffer, size_t part_bytes)
{
    const fc_device_caller *caller = caller_of(device);

    return caller->all_gather(caller->context, comm, stream, label, buffer, part_bytes);
}

fc_status fc_called_reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *to, const void *from, size_t numel,
                                   fc_dtype dtype)
{
    const fc_device_caller *caller = caller_of(device);

    return caller->reduce_scatter(caller->context, comm, stream, label, to, from, numel, dtype);
}

fc_status fc_called_all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                               fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    const fc_device_caller *caller = caller_of(device);

    return caller->all_reduce(caller->context, comm, stream, label, buffer, numel, dtype);
}

fc_status fc_called_all_gather_each(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                    fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    const fc_device_caller *caller = caller_of(device);

    return caller->all_gather_each(caller->context, comm, stream, label, gathers, n_gathers);
}
