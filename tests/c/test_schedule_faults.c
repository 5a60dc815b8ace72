/* Any call to the device may fail: whoever asked the schedule for something learns of it. */
#include "schedule_world.h"

static program the_program;

static const fc_device_ops *real_ops;
static fc_device_ops failing_ops;
static int64_t fails_at;              /* the call that does, of each rank */
static _Thread_local int64_t n_calls; /* of this rank */
static _Atomic bool has_failed;
static _Atomic bool may_pass; /* nobody has to learn of it */

static fc_status count(const char *what)
{
    if (n_calls++ != fails_at) {
        return FC_OK;
    }
    has_failed = true;
    return fc_fail(FC_ERR_SYSTEM, "call %d, %s, fails", (int)fails_at, what);
}

static fc_status alloc(fc_device *device, fc_stream *stream, fc_label label, size_t bytes,
                       void **out)
{
    FC_TRY(count("alloc"));
    return real_ops->alloc(device, stream, label, bytes, out);
}

static fc_status event_create(fc_device *device, fc_event **out)
{
    FC_TRY(count("event_create"));
    return real_ops->event_create(device, out);
}

/* A reshard returns nothing: memory that compute could not mark, that a guest could not, behind
 * whose mark compute did not come, or that copy-in could not free behind one, is not used again. */
static void note_reshard(const fc_stream *stream, int passing)
{
    for (int rank = 0; n_calls == fails_at && rank < RANKS; rank++) {
        may_pass = may_pass || is_resharding || stream == the_program.streams[rank][passing];
    }
}

static fc_status record(fc_device *device, fc_event *event, fc_stream *stream)
{
    note_reshard(stream, 0);
    FC_TRY(count("record"));
    return real_ops->record(device, event, stream);
}

static fc_status wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    note_reshard(stream, 1);
    FC_TRY(count("wait"));
    return real_ops->wait(device, stream, event);
}

static fc_status synchronize(fc_device *device, fc_event *event)
{
    FC_TRY(count("synchronize"));
    return real_ops->synchronize(device, event);
}

static fc_status copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                      const void *from, size_t bytes, fc_way way)
{
    FC_TRY(count("copy"));
    return real_ops->copy(device, stream, label, to, from, bytes, way);
}

static fc_status moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    FC_TRY(count("moves_create"));
    return real_ops->moves_create(device, plan, out);
}

static fc_status move(fc_device *device, fc_stream *stream, fc_label label, const fc_move *what)
{
    FC_TRY(count("move"));
    return real_ops->move(device, stream, label, what);
}

static fc_status all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t part_bytes)
{
    FC_TRY(count("all_gather"));
    return real_ops->all_gather(device, comm, stream, label, buffer, part_bytes);
}

static fc_status reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                fc_label label, void *to, const void *from, size_t numel,
                                fc_dtype dtype)
{
    FC_TRY(count("reduce_scatter"));
    return real_ops->reduce_scatter(device, comm, stream, label, to, from, numel, dtype);
}

static fc_status all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                            fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    FC_TRY(count("all_reduce"));
    return real_ops->all_reduce(device, comm, stream, label, buffer, numel, dtype);
}

static fc_status all_gather_each(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    FC_TRY(count("all_gather_each"));
    return real_ops->all_gather_each(device, comm, stream, label, gathers, n_gathers);
}

static fc_status let_fail(fc_device *simulated, fc_device **out)
{
    if (simulated->ops != &failing_ops) {
        real_ops = simulated->ops;
        failing_ops = *real_ops;
        failing_ops.alloc = alloc;
        failing_ops.event_create = event_create;
        failing_ops.record = record;
        failing_ops.wait = wait;
        failing_ops.synchronize = synchronize;
        failing_ops.copy = copy;
        failing_ops.moves_create = moves_create;
        failing_ops.move = move;
        failing_ops.all_gather = all_gather;
        failing_ops.reduce_scatter = reduce_scatter;
        failing_ops.all_reduce = all_reduce;
        failing_ops.all_gather_each = all_gather_each;
        simulated->ops = &failing_ops;
    }
    n_calls = 0;
    *out = simulated;
    return FC_OK;
}

static void leave_device(fc_device *device)
{
    (void)device;
}

/* All ranks fail at the same place: one that goes on alone would wait for the others. */
static void play(uint64_t seed, int64_t *n_told, int64_t *n_passed_over)
{
    char first[512];
    int n_faults;

    make_program(&the_program, seed);
    the_program.n_steps = 1;
    the_program.wrap = let_fail;
    the_program.unwrap = leave_device;
    the_program.may_fail = true;
    the_program.fail_at = INT64_MAX; /* a slot may be lost */
    has_failed = may_pass = false;
    n_faults = run(&the_program, seed, first, sizeof(first));
    if (has_failed && the_program.ended == FC_ERR_SYSTEM) {
        *n_told += 1;
    } else {
        CHECK_MSG(may_pass || !has_failed, "seed %d: %s and nobody is told", (int)seed,
                  fc_last_message());
        CHECK_MSG(the_program.ended == FC_OK && n_faults == 0 && the_program.n_wrong == 0,
                  "seed %d, call %d: ended with %d, %d faults, %d wrong", (int)seed, (int)fails_at,
                  (int)the_program.ended, n_faults, (int)the_program.n_wrong);
        *n_passed_over += has_failed;
    }
}

static void test_each_call_fails(uint64_t n_seeds)
{
    int64_t n_told = 0, n_passed_over = 0;

    for (uint64_t seed = 0; seed < n_seeds; seed++) {
        for (fails_at = 0, has_failed = true; has_failed; fails_at++) {
            play(seed, &n_told, &n_passed_over);
        }
    }
    CHECK_MSG(n_told > 1000 && n_passed_over < n_told / 20, "%d calls failed, %d unnoticed",
              (int)(n_told + n_passed_over), (int)n_passed_over);
}

int main(int argc, char **argv)
{
    test_each_call_fails(argc > 1 ? (uint64_t)strtoul(argv[1], NULL, 10) : 12);
    return check_result();
}
