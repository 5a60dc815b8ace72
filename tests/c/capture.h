/* A device that holds a program to CUDA's rules while its stream is captured into a graph.
 *
 * A stream is in the capture once it has waited for a record of a stream that is. Work and memory
 * of other streams would not be in the graph; the host may wait for nothing; an event means what
 * was captured, or what was not; memory that was allocated before may be gone
 * when the graph runs; and at the end compute comes behind all that the others were given.
 */
#ifndef FC_TESTS_CAPTURE_H
#define FC_TESTS_CAPTURE_H

#include "check.h"
#include "device/sim/sim.h"
#include "engine/layout_runs.h"

#include <stdbool.h>

#define STREAMS 5
#define EVENTS 64
#define BLOCKS 64
#define PARAMS 2 /* of a unit */

typedef struct block {
    const char *at;
    size_t bytes;
} block;

typedef struct capture {
    fc_stream *streams[STREAMS]; /* compute first */
    bool is_captured[STREAMS];
    int seen[STREAMS][STREAMS]; /* of each stream's work, what comes before the next; own: all */
    struct {
        fc_event *event;
        bool is_recorded, is_captured;
        int seen[STREAMS];
    } events[EVENTS];
    int n_events;
    block outside[BLOCKS]; /* what the graph does not own */
    bool is_on;
    char breach[128]; /* the first one */
} capture;

static _Thread_local capture now; /* of a rank */
static const fc_device_ops *simulated;

static inline void breach(const char *what, fc_label label)
{
    if (now.breach[0] == 0) {
        (void)snprintf(now.breach, sizeof(now.breach), "%s: %s of %s", what, label.what,
                       label.unit);
    }
}

static inline int index_of(const fc_stream *stream)
{
    int i;

    for (i = 0; i < STREAMS && now.streams[i] != stream; i++) {
    }
    CHECK_OR_EXIT(i < STREAMS);
    return i;
}

static inline int event_of(fc_event *event)
{
    int i;

    for (i = 0; i < now.n_events && now.events[i].event != event; i++) {
    }
    CHECK_OR_EXIT(i < EVENTS);
    if (i == now.n_events) {
        now.events[now.n_events++].event = event;
    }
    return i;
}

static inline void work(const fc_stream *stream, fc_label label)
{
    int s = index_of(stream);

    now.seen[s][s]++;
    if (now.is_on && !now.is_captured[s]) {
        breach("outside of the capture", label);
    }
}

static inline block *block_of(const void *memory)
{
    const char *at = memory;
    block *b = now.outside;

    while (b < now.outside + BLOCKS && (at < b->at || at >= b->at + b->bytes)) {
        b++;
    }
    return b < now.outside + BLOCKS ? b : NULL;
}

static inline fc_status alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                              void **out)
{
    block *b = now.outside;

    if (now.is_on && !now.is_captured[index_of(stream)]) {
        breach("memory of a stream outside", label);
    }
    FC_TRY(simulated->alloc(device, stream, label, bytes, out));
    while (!now.is_on && b->at != NULL) {
        CHECK_OR_EXIT(++b < now.outside + BLOCKS);
    }
    if (!now.is_on) {
        *b = (block){*out, bytes};
    }
    return FC_OK;
}

static inline void free_memory(fc_device *device, void *memory)
{
    block *b = block_of(memory);

    if (b != NULL) {
        *b = (block){NULL, 0};
    }
    simulated->free(device, memory);
}

static inline void use(const void *memory, fc_label label)
{
    if (now.is_on && block_of(memory) != NULL) {
        breach("memory that is not the graph's", label);
    }
}

static inline fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    int e = event_of(event), s = index_of(stream);

    now.events[e].is_recorded = true;
    now.events[e].is_captured = now.is_captured[s];
    memcpy(now.events[e].seen, now.seen[s], sizeof(now.seen[s]));
    return simulated->record(device, event, stream);
}

static inline fc_status wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    int e = event_of(event), s = index_of(stream), i;

    if (now.events[e].is_recorded && now.events[e].is_captured != now.is_captured[s]) {
        if (!now.events[e].is_captured || !now.is_on) {
            breach("a wait across the capture's edge", (fc_label){"a stream", "wait", 0});
        }
        now.is_captured[s] = true;
    }
    for (i = 0; i < STREAMS; i++) {
        if (now.seen[s][i] < now.events[e].seen[i]) {
            now.seen[s][i] = now.events[e].seen[i];
        }
    }
    return simulated->wait(device, stream, event);
}

static inline fc_status synchronize(fc_device *device, fc_event *event)
{
    if (now.is_on) {
        breach("the host waits", (fc_label){"the host", "wait", 0});
    }
    return simulated->synchronize(device, event);
}

static inline fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    if (now.is_on) {
        breach("a table is copied to the device", (fc_label){"a unit", "plan", 0});
    }
    return simulated->moves_create(device, plan, out);
}

static inline fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                             const void *from, size_t bytes, fc_way way)
{
    work(stream, label);
    use(to, label);
    use(from, label);
    return simulated->copy(device, stream, label, to, from, bytes, way);
}

static inline fc_status move(fc_device *device, fc_stream *stream, fc_label label,
                             const fc_move *given)
{
    work(stream, label);
    for (uint32_t i = 0; i < FC_BASE_PARAMS + PARAMS; i++) {
        use((const void *)(uintptr_t)given->addresses[i], label);
    }
    return simulated->move(device, stream, label, given);
}

static inline fc_status all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *buffer, size_t part_bytes)
{
    work(stream, label);
    use(buffer, label);
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static inline fc_status all_gather_each(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                        fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    size_t i;

    work(stream, label);
    for (i = 0; i < n_gathers; i++) {
        use(gathers[i].to, label);
    }
    return simulated->all_gather_each(device, comm, stream, label, gathers, n_gathers);
}

static inline fc_status reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                       fc_label label, void *to, const void *from, size_t numel,
                                       fc_dtype dtype)
{
    work(stream, label);
    use(to, label);
    use(from, label);
    return simulated->reduce_scatter(device, comm, stream, label, to, from, numel, dtype);
}

static inline fc_status all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                   fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    work(stream, label);
    use(buffer, label);
    return simulated->all_reduce(device, comm, stream, label, buffer, numel, dtype);
}

static inline fc_device_ops capturing_ops(void)
{
    fc_device_ops ops = *simulated;

    ops.alloc = alloc;
    ops.free = free_memory;
    ops.record = record;
    ops.wait = wait;
    ops.synchronize = synchronize;
    ops.moves_create = moves_create;
    ops.copy = copy;
    ops.move = move;
    ops.all_gather = all_gather;
    ops.all_gather_each = all_gather_each;
    ops.reduce_scatter = reduce_scatter;
    ops.all_reduce = all_reduce;
    return ops;
}

static inline void begin_capture(void)
{
    now.is_on = now.is_captured[0] = true;
}

static inline void end_capture(void)
{
    int s;

    for (s = 1; s < STREAMS; s++) {
        if (now.is_captured[s] && now.seen[0][s] < now.seen[s][s]) {
            breach("unjoined", (fc_label){"a stream", "work", 0});
        }
        now.is_captured[s] = false;
    }
    now.is_on = now.is_captured[0] = false;
}

#endif
