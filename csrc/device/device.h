/* What the core asks of an accelerator: memory, streams, events, copies, moves and collectives.
 *
 * Everything is a table of functions, so that callers cannot tell one device from another. All work
 * is enqueued: a call returns at once, its bytes are read and written when its stream gets there.
 * Nothing but streams and events orders work; callers say every order they need.
 *
 * Streams are borrowed handles of the device (on CUDA a cudaStream_t). An event marks the place in
 * a stream where it was recorded last; a wait means the record that was there when it was called,
 * and an event that was never recorded holds nobody up. Memory belongs to the stream it was
 * allocated for: it is given and taken back in that stream's order, so another stream may use it
 * only after a wait for the allocation, and its owner frees it only after a wait for that use.
 * Threading: serialized per device.
 */
#ifndef FC_DEVICE_DEVICE_H
#define FC_DEVICE_DEVICE_H

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/cuda/runs.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_device fc_device;           /* one rank's accelerator */
typedef struct fc_stream fc_stream;           /* borrowed from the device's owner */
typedef struct fc_event fc_event;             /* a place in a stream */
typedef struct fc_device_comm fc_device_comm; /* ranks that talk, in an order all of them keep */
typedef struct fc_moves fc_moves;             /* a plan where the device can read it */

/* Whom messages and traces name; both texts outlive the work. */
typedef struct fc_label {
    const char *unit;
    const char *what;
    uint64_t detail; /* what ranks in a collective must have alike beside its size */
} fc_label;

/* One launch over a plan: to = (accumulate ? to : 0) + from / divisor, rounded once. Types without
 * arithmetic are copied. A source whose address is 0 stands for zeros. */
typedef struct fc_move {
    fc_moves *moves;
    const uint64_t *addresses; /* by base number; read before the call returns */
    double divisor;
    bool accumulate;
} fc_move;

/* Where a copy goes. Host memory is pinned, or the calling thread may wait for the copy. */
typedef enum fc_way {
    FC_ON_DEVICE,
    FC_TO_DEVICE,
    FC_TO_HOST
} fc_way;

/* One all-gather of several: every rank's `bytes` at `from` become its part of `to`, in rank order.
 * `from` may be that part. */
typedef struct fc_gather {
    void *to;
    const void *from;
    size_t bytes;
} fc_gather;

typedef struct fc_device_ops {
    const char *name;

    FC_MUST_CHECK fc_status (*alloc)(fc_device *device, fc_stream *stream, fc_label label,
                                     size_t bytes, void **out);
    /* Where the memory's stream is now. NULL is fine. */
    void (*free)(fc_device *device, void *memory);

    FC_MUST_CHECK fc_status (*event_create)(fc_device *device, fc_event **out);
    void (*event_destroy)(fc_device *device, fc_event *event);
    FC_MUST_CHECK fc_status (*record)(fc_device *device, fc_event *event, fc_stream *stream);
    FC_MUST_CHECK fc_status (*wait)(fc_device *device, fc_stream *stream, fc_event *event);
    /* Holds up the calling thread. */
    FC_MUST_CHECK fc_status (*synchronize)(fc_device *device, fc_event *event);

    FC_MUST_CHECK fc_status (*copy)(fc_device *device, fc_stream *stream, fc_label label, void *to,
                                    const void *from, size_t bytes, fc_way way);

    /* Made once, launched often. Takes the plan over: it is empty afterwards. */
    FC_MUST_CHECK fc_status (*moves_create)(fc_device *device, fc_runs *plan, fc_moves **out);
    /* Launches of them may be queued still. NULL is fine. */
    void (*moves_destroy)(fc_device *device, fc_moves *moves);
    FC_MUST_CHECK fc_status (*move)(fc_device *device, fc_stream *stream, fc_label label,
                                    const fc_move *move);

    /* Every rank of a comm calls them in one order. In place: `buffer` holds a part per rank, the
     * own one is there. */
    FC_MUST_CHECK fc_status (*all_gather)(fc_device *device, fc_device_comm *comm,
                                          fc_stream *stream, fc_label label, void *buffer,
                                          size_t part_bytes);
    /* Sums; `from` holds a part of `numel` elements per rank, `to` receives this rank's. */
    FC_MUST_CHECK fc_status (*reduce_scatter)(fc_device *device, fc_device_comm *comm,
                                              fc_stream *stream, fc_label label, void *to,
                                              const void *from, size_t numel, fc_dtype dtype);
    /* Sums, in place. */
    FC_MUST_CHECK fc_status (*all_reduce)(fc_device *device, fc_device_comm *comm,
                                          fc_stream *stream, fc_label label, void *buffer,
                                          size_t numel, fc_dtype dtype);
    /* All of them as one piece of work. */
    FC_MUST_CHECK fc_status (*all_gather_each)(fc_device *device, fc_device_comm *comm,
                                               fc_stream *stream, fc_label label,
                                               const fc_gather *gathers, size_t n_gathers);
} fc_device_ops;

/* First member of every device. */
struct fc_device {
    const fc_device_ops *ops;
};

#ifdef __cplusplus
}
#endif
#endif
