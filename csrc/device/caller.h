/* What devices leave to their caller: memory, and the collectives of somebody's communicators. */
#ifndef FC_DEVICE_CALLER_H
#define FC_DEVICE_CALLER_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As the members of fc_device_ops that have their names. */
typedef struct fc_device_caller {
    void *context; /* passed first */
    fc_status (*alloc)(void *context, fc_stream *stream, size_t bytes, void **out);
    void (*free)(void *context, void *memory);
    fc_status (*all_gather)(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                            void *buffer, size_t part_bytes);
    fc_status (*reduce_scatter)(void *context, fc_device_comm *comm, fc_stream *stream,
                                fc_label label, void *to, const void *from, size_t numel,
                                fc_dtype dtype);
    fc_status (*all_reduce)(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                            void *buffer, size_t numel, fc_dtype dtype);
    fc_status (*all_gather_each)(void *context, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, const fc_gather *gathers, size_t n_gathers);
    /* Until ready(arg), in place of a wait in the driver, which nothing but the device can end: not
     * the death of a rank, and not Ctrl-C. FC_AGAIN: there is nothing to watch meanwhile, so wait
     * in the driver. Optional. */
    fc_status (*wait)(void *context, bool (*ready)(void *arg), void *arg);
} fc_device_caller;

/* What devices that leave it to a caller begin with, and those of fc_device_ops that they share. */
typedef struct fc_called_device {
    fc_device base;
    fc_device_caller caller;
} fc_called_device;

/* Waits on the host until `query` says that the event is over, by the caller's wait, or by `block`
 * in the driver where there is nothing to watch meanwhile. */
FC_MUST_CHECK fc_status
fc_called_synchronize(fc_device *device, fc_event *event,
                      fc_status (*query)(fc_device *device, fc_event *event, bool *is_over_out),
                      fc_status (*block)(fc_device *device, fc_event *event));
FC_MUST_CHECK fc_status fc_called_alloc(fc_device *device, fc_stream *stream, fc_label label,
                                        size_t bytes, void **out);
void fc_called_free(fc_device *device, void *memory);
FC_MUST_CHECK fc_status fc_called_all_gather(fc_device *device, fc_device_comm *comm,
                                             fc_stream *stream, fc_label label, void *buffer,
                                             size_t part_bytes);
FC_MUST_CHECK fc_status fc_called_reduce_scatter(fc_device *device, fc_device_comm *comm,
                                                 fc_stream *stream, fc_label label, void *to,
                                                 const void *from, size_t numel, fc_dtype dtype);
FC_MUST_CHECK fc_status fc_called_all_reduce(fc_device *device, fc_device_comm *comm,
                                             fc_stream *stream, fc_label label, void *buffer,
                                             size_t numel, fc_dtype dtype);
FC_MUST_CHECK fc_status fc_called_all_gather_each(fc_device *device, fc_device_comm *comm,
                                                  fc_stream *stream, fc_label label,
                                                  const fc_gather *gathers, size_t n_gathers);

#ifdef __cplusplus
}
#endif
#endif
