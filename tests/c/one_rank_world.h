/* One rank of a group with units on a device, whose peers are played by nobody: for what a schedule
 * asks its device for.
 */
#ifndef ONE_RANK_WORLD_H
#define ONE_RANK_WORLD_H

#include "base/alloc.h"
#include "check.h"
#include "device/sim/sim.h"
#include "engine/schedule.h"

#include <stdbool.h>
#include <string.h>

#define MUST(call) CHECK_EQ(call, FC_OK)
#define UNITS 5
#define PARAMS 2
#define STREAMS 6 /* compute first; the last one is another one to compute in */

/* What the device was asked for since the last time. */
typedef struct calls {
    int events, allocs, frees, moves, records, waits, copies;
    size_t planned; /* elements of all plans */
    size_t pieces;  /* of direct gathers */
    char gathered[32];
    const char *gathered_at; /* memory of the last one */
} calls;

static calls now;
static const fc_device_ops *simulated;
static bool gathers_fail, waits_fail, records_fail;
static int waits_left, records_left; /* before one fails */
static int n_syncs, failing_sync = -1;

static inline fc_status count_event(fc_device *device, fc_event **out)
{
    now.events++;
    return simulated->event_create(device, out);
}

static inline fc_status count_alloc(fc_device *device, fc_stream *stream, fc_label label,
                                    size_t bytes, void **out)
{
    now.allocs++;
    return simulated->alloc(device, stream, label, bytes, out);
}

static inline void count_free(fc_device *device, void *memory)
{
    now.frees += memory != NULL;
    simulated->free(device, memory);
}

static inline fc_status count_plan(fc_device *device, fc_runs *plan, fc_moves **out)
{
    for (size_t i = 0; i < plan->n_runs; i++) {
        now.planned += (size_t)plan->runs[i].n_lines * plan->runs[i].line_numel;
    }
    return simulated->moves_create(device, plan, out);
}

static inline fc_status count_move(fc_device *device, fc_stream *stream, fc_label label,
                                   const fc_move *move)
{
    now.moves++;
    return simulated->move(device, stream, label, move);
}

static inline fc_status note_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                    fc_label label, void *buffer, size_t part_bytes)
{
    if (gathers_fail) {
        return fc_fail(FC_ERR_SYSTEM, "no gather");
    }
    (void)strncat(now.gathered, label.unit, sizeof(now.gathered) - strlen(now.gathered) - 1);
    now.gathered_at = buffer;
    return simulated->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static inline fc_status count_pieces(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                     fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    now.pieces += n_gathers;
    return simulated->all_gather_each(device, comm, stream, label, gathers, n_gathers);
}

static inline fc_status count_record(fc_device *device, fc_event *event, fc_stream *stream)
{
    now.records++;
    return records_fail && records_left-- == 0 ? fc_fail(FC_ERR_SYSTEM, "no event")
                                               : simulated->record(device, event, stream);
}

static inline fc_status count_sync(fc_device *device, fc_event *event)
{
    return n_syncs++ == failing_sync ? fc_fail(FC_ERR_SYSTEM, "no end")
                                     : simulated->synchronize(device, event);
}

static inline fc_status count_wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    now.waits++;
    return waits_fail && waits_left-- == 0 ? fc_fail(FC_ERR_SYSTEM, "no wait")
                                           : simulated->wait(device, stream, event);
}

static inline fc_status count_copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                                   const void *from, size_t bytes, fc_way way)
{
    now.copies++;
    CHECK_EQ((intptr_t)to % 16, 0); /* vectors are read there */
    return simulated->copy(device, stream, label, to, from, bytes, way);
}

static inline calls take(void)
{
    calls taken = now;

    now = (calls){0};
    return taken;
}

/* ---- a rank and its units ---- */

typedef struct kind {
    bool is_direct, has_replicas, has_slices;
    fc_dtype types[PARAMS]; /* in which they compute; shards are FC_F32 */
    double pre_divisor;     /* 0: 1 */
    int n_ranks;            /* 0: 2 */
} kind;

typedef struct world {
    fc_sim *sim;
    fc_device *device;
    fc_device_ops counting;
    fc_stream *streams[STREAMS];
    fc_device_comm *comm;
    fc_schedule *schedule;
    fc_schedule_unit *units[UNITS];
    fc_param params[UNITS][PARAMS];
    fc_layout layouts[UNITS];
    fc_schedule_unit_options options;
    const void *shards[PARAMS], *grads[PARAMS + 1];
    void *out;
    size_t rest_bytes;
} world;

static inline void *memory(world *w)
{
    const fc_label label = {"world", "memory", 0};
    void *made = NULL;

    MUST(simulated->alloc(w->device, w->streams[0], label, 4096, &made));
    return made;
}

/* Of so many rows. */
static inline void lay_out(world *w, const kind *k, int i, size_t rows)
{
    for (int j = 0; j < PARAMS; j++) {
        w->params[i][j] = (fc_param){.outer = 1,
                                     .rows = rows,
                                     .inner = 16,
                                     .compute = k->types[j],
                                     .has_grad = true,
                                     .trainable = true};
    }
    MUST(fc_layout_init(&w->layouts[i], w->params[i], PARAMS, 0, k->n_ranks == 0 ? 2 : k->n_ranks,
                        false));
}

static inline void make_world(world *w, const kind *k)
{
    static const char *const names[] = {"compute", "copy-in", "gather", "reduce", "all", "other"};
    const int ranks[1] = {0};

    *w = (world){.sim = NULL};
    MUST(fc_sim_create(1, 1, &w->sim));
    w->device = fc_sim_device(w->sim, 0);
    simulated = w->device->ops;
    w->counting = *simulated;
    w->counting.event_create = count_event;
    w->counting.alloc = count_alloc;
    w->counting.free = count_free;
    w->counting.moves_create = count_plan;
    w->counting.move = count_move;
    w->counting.all_gather = note_gather;
    w->counting.all_gather_each = count_pieces;
    w->counting.record = count_record;
    w->counting.wait = count_wait;
    w->counting.synchronize = count_sync;
    w->counting.copy = count_copy;
    w->device->ops = &w->counting;
    for (int i = 0; i < STREAMS; i++) {
        MUST(fc_sim_stream_create(w->sim, 0, names[i], &w->streams[i]));
    }
    MUST(fc_sim_comm_create(w->sim, "comm", ranks, 1, &w->comm));
    MUST(fc_schedule_create(&(fc_schedule_options){w->device, w->streams[1], w->streams[2],
                                                   w->streams[3], w->streams[4], 1, 0, 0},
                            &w->schedule));
    w->options = (fc_schedule_unit_options){.gather = w->comm,
                                            .reduce = w->comm,
                                            .replicas = k->has_replicas ? w->comm : NULL,
                                            .reshard_after_forward = true,
                                            .n_post_ranks = k->has_slices,
                                            .post_gather = w->comm,
                                            .is_direct = k->is_direct,
                                            .pre_divisor = k->pre_divisor == 0 ? 1 : k->pre_divisor,
                                            .divisor = 1};
    for (int j = 0; j < PARAMS; j++) {
        w->shards[j] = memory(w);
        w->grads[j] = memory(w);
    }
    w->out = memory(w);
    for (int i = 0; i < UNITS; i++) {
        lay_out(w, k, i, i == UNITS - 1 ? 32 : 16); /* the last one is larger */
        w->options.name = (const char *const[]){"a", "b", "c", "d", "e"}[i];
        w->options.layout = &w->layouts[i];
        MUST(fc_schedule_add(w->schedule, &w->options, &w->units[i]));
        fc_schedule_set_shards(w->units[i], w->shards);
    }
    w->rest_bytes = fc_sim_bytes(w->device);
    (void)take();
}

static inline void await_all(world *w)
{
    fc_event *event = NULL;

    MUST(simulated->event_create(w->device, &event));
    for (int i = 0; i < STREAMS; i++) {
        MUST(simulated->record(w->device, event, w->streams[i]));
        MUST(simulated->synchronize(w->device, event));
    }
    simulated->event_destroy(w->device, event);
}

static inline void unmake(world *w)
{
    await_all(w);
    fc_schedule_destroy(w->schedule);
    CHECK_EQ(fc_sim_bytes(w->device), w->rest_bytes);
    CHECK_MSG(fc_sim_faults(w->sim) == 0, "%s", fc_sim_fault(w->sim, 0));
    fc_sim_destroy(w->sim);
    CHECK_EQ(fc_alloc_live(), 0);
}

static inline void begin(world *w)
{
    MUST(fc_schedule_begin(w->schedule, w->streams[0], NULL));
}

static inline void end(world *w)
{
    MUST(fc_schedule_end_backward(w->schedule, true));
}

static inline void check_bytes_after_end(world *w)
{
    end(w);
    CHECK_EQ(fc_sim_bytes(w->device), w->rest_bytes);
}

static inline void unshard(world *w, int unit)
{
    void *full = NULL;

    MUST(fc_schedule_unshard(w->units[unit], &full));
    CHECK(full != NULL);
}

/* True if something was reduced. */
static inline bool post(world *w, int unit, const void *const *full, fc_schedule_sync sync)
{
    bool is_reduced = true;

    MUST(fc_schedule_post_backward(w->units[unit],
                                   &(fc_schedule_grads){.full = full, .out = w->out, .sync = sync},
                                   &is_reduced));
    return is_reduced;
}

#endif
