/* Events of a GPU for who watches its work from a thread of its own: places in streams as CUDA's
 * driver knows them, which is what libraries of NVIDIA take.
 *
 * Not those of fc_device_ops, which order streams and belong to the threads that enqueue. Nothing
 * here waits for the device but `record`, where its queue is full. Threading: multi, with one
 * caller per event.
 */
#ifndef FC_DEVICE_EVENTS_H
#define FC_DEVICE_EVENTS_H

#include "base/status.h"
#include "device/device.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_events {
    void *context; /* passed first */
    FC_MUST_CHECK fc_status (*create)(void *context, void **event_out);
    void (*destroy)(void *context, void *event);
    /* Behind what the stream holds. FC_AGAIN: the stream is being captured into a graph, where an
     * event says nothing about the device; nothing was recorded. */
    FC_MUST_CHECK fc_status (*record)(void *context, void *event, fc_stream *stream);
    /* Whether the device has come to the place of the last record. */
    FC_MUST_CHECK fc_status (*is_reached)(void *context, void *event, bool *out);
} fc_events;

/* Those of one GPU, by its number in this process, over CUDA's driver, which `path` names. The
 * library stays open for good. FC_ERR_UNSUPPORTED with a sentence if it lacks what is needed. */
FC_MUST_CHECK fc_status fc_cuda_events_open(const char *path, int gpu, fc_events *out);

#ifdef __cplusplus
}
#endif
#endif
