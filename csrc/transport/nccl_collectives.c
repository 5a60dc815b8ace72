/* Collectives over NCCL: shown on the board first, then enqueued. */
#include "transport/nccl_private.h"

#include "base/alloc.h"
#include "base/clock.h"

#include <stdio.h>
#include <string.h>

static fc_nccl_comm *comm_of(fc_device_comm *comm)
{
    return (fc_nccl_comm *)(void *)comm;
}

/* Element types of reductions; false: NCCL has none. */
static bool type_of(fc_dtype dtype, int *out)
{
    static const int types[FC_DTYPE_COUNT] = {[FC_F32] = FC_NCCL_FLOAT32,
                                              [FC_F64] = FC_NCCL_FLOAT64,
                                              [FC_BF16] = FC_NCCL_BFLOAT16,
                                              [FC_F16] = FC_NCCL_FLOAT16,
                                              [FC_U8] = FC_NCCL_UINT8,
                                              [FC_I8] = FC_NCCL_INT8,
                                              [FC_I16] = -1,
                                              [FC_I32] = FC_NCCL_INT32,
                                              [FC_I64] = FC_NCCL_INT64,
                                              [FC_RAW1] = -1,
                                              [FC_RAW2] = -1,
                                              [FC_RAW4] = -1,
                                              [FC_RAW8] = -1,
                                              [FC_RAW16] = -1};

    *out = types[dtype];
    return *out >= 0;
}

static fc_status begin(fc_nccl_comm *comm, const fc_wait_info *info, size_t bytes, uint64_t form,
                       uint64_t detail)
{
    fc_nccl_group *group = comm->group;
    fc_nccl_deed deed = {.bytes = bytes, .form = form, .detail = detail};
    fc_status st;

    FC_TRY(fc_nccl_check(group));
    comm->began_ns = fc_now_ns();
    if (group->is_closed) {
        return fc_fail(FC_ERR_STATE, "%s of unit %s: NCCL's part of process group %s is closed",
                       info->op, info->unit, group->base->name);
    }
    if (comm->is_pending) { /* a wait was interrupted */
        FC_TRY(fc_nccl_settle(comm, FC_NCCL_IN_PROGRESS, info));
    }
    deed.sequence = comm->sequence + 1;
    (void)snprintf(deed.op, sizeof(deed.op), "%s", info->op);
    (void)snprintf(deed.unit, sizeof(deed.unit), "%s", info->unit);
    st = fc_nccl_board_post(group->board, comm->number, &deed);
    if (st == FC_ERR_MISMATCH) {
        return fc_nccl_abort(group, st, fc_last_message());
    }
    if (st == FC_AGAIN) {
        FC_TRY(fc_nccl_look(group, info));
    }
    comm->sequence++;
    return FC_OK;
}

/* What the call that began with fc_nccl_enter has come to; behind it comes a mark. */
static fc_status finish(fc_nccl_comm *comm, int result, fc_stream *stream, const fc_wait_info *info)
{
    fc_status st;

    fc_nccl_leave(comm);
    FC_TRY(fc_nccl_settle(comm, result, info));
    st = fc_nccl_marks_put(comm, stream, info);
    return st == FC_OK ? FC_OK : fc_nccl_abort(comm->group, st, fc_last_message());
}

static fc_status find_type(fc_nccl_comm *comm, const fc_wait_info *info, fc_dtype dtype, int *out)
{
    if (type_of(dtype, out)) {
        return FC_OK;
    }
    return fc_fail(FC_ERR_UNSUPPORTED,
                   "%s of unit %s on rank %d: NCCL does not add up elements of type %s", info->op,
                   info->unit, comm->group->base->global_ranks[comm->group->base->rank],
                   fc_dtype_name(dtype));
}

fc_status fc_nccl_all_gather(fc_device_comm *target, fc_stream *stream, fc_label label,
                             void *buffer, size_t part_bytes)
{
    fc_nccl_comm *comm = comm_of(target);
    const fc_wait_info info = {.op = "all-gather", .unit = label.unit};
    const fc_transport *base = comm->group->base;
    const char *own = (const char *)buffer + (size_t)base->rank * part_bytes;

    FC_TRY(begin(comm, &info, part_bytes, FC_NCCL_INT8, 0));
    if (base->n_ranks == 1) {
        return FC_OK;
    }
    FC_TRY(fc_nccl_enter(comm));
    return finish(comm,
                  comm->group->nccl->call.all_gather(own, buffer, part_bytes, FC_NCCL_INT8,
                                                     fc_nccl_handle(comm), stream),
                  stream, &info);
}

/* The first failure; the group is ended whatever happened in it. */
static int gather_each(const fc_nccl_functions *call, fc_nccl_comm *comm, fc_stream *stream,
                       const fc_gather *gathers, size_t n_gathers)
{
    int result = call->group_start(), ended;
    size_t i;

    if (result != FC_NCCL_SUCCESS) {
        return result;
    }
    for (i = 0; i < n_gathers && (result == FC_NCCL_SUCCESS || result == FC_NCCL_IN_PROGRESS);
         i++) {
        result = call->all_gather(gathers[i].from, gathers[i].to, gathers[i].bytes, FC_NCCL_INT8,
                                  fc_nccl_handle(comm), stream);
    }
    ended = call->group_end();
    return result == FC_NCCL_SUCCESS || result == FC_NCCL_IN_PROGRESS ? ended : result;
}

fc_status fc_nccl_all_gather_each(fc_device_comm *target, fc_stream *stream, fc_label label,
                                  const fc_gather *gathers, size_t n_gathers)
{
    fc_nccl_comm *comm = comm_of(target);
    const fc_wait_info info = {.op = "all-gathers", .unit = label.unit};
    uint64_t form = n_gathers;
    size_t bytes = 0, i;

    /* Ranks that swap two sizes do not do the same. */
    for (i = 0; i < n_gathers; i++) {
        bytes += gathers[i].bytes;
        form = form * 31 + gathers[i].bytes;
    }
    FC_TRY(begin(comm, &info, bytes, form, 0));
    if (n_gathers == 0) {
        return FC_OK;
    }
    FC_TRY(fc_nccl_enter(comm));
    return finish(comm, gather_each(&comm->group->nccl->call, comm, stream, gathers, n_gathers),
                  stream, &info);
}

bool fc_nccl_scale(fc_nccl_group *group, double factor)
{
    group->has_averages = factor != 1 && factor == 1.0 / group->base->n_ranks;
    return factor == 1 || group->has_averages;
}

static int operation_of(const fc_nccl_comm *comm)
{
    return comm->group->has_averages ? FC_NCCL_AVG : FC_NCCL_SUM;
}

fc_status fc_nccl_reduce_scatter(fc_device_comm *target, fc_stream *stream, fc_label label,
                                 void *to, const void *from, size_t numel, fc_dtype dtype)
{
    fc_nccl_comm *comm = comm_of(target);
    const fc_wait_info info = {.op = "reduce-scatter", .unit = label.unit};
    int type;

    FC_TRY(find_type(comm, &info, dtype, &type));
    FC_TRY(begin(comm, &info, numel * fc_dtype_bytes(dtype), (uint64_t)type, label.detail));
    FC_TRY(fc_nccl_enter(comm));
    return finish(comm,
                  comm->group->nccl->call.reduce_scatter(from, to, numel, type, operation_of(comm),
                                                         fc_nccl_handle(comm), stream),
                  stream, &info);
}

fc_status fc_nccl_all_reduce(fc_device_comm *target, fc_stream *stream, fc_label label,
                             void *buffer, size_t numel, fc_dtype dtype)
{
    fc_nccl_comm *comm = comm_of(target);
    const fc_wait_info info = {.op = "all-reduce", .unit = label.unit};
    int type;

    FC_TRY(find_type(comm, &info, dtype, &type));
    FC_TRY(begin(comm, &info, numel * fc_dtype_bytes(dtype), (uint64_t)type, label.detail));
    if (comm->group->base->n_ranks == 1) {
        return FC_OK;
    }
    FC_TRY(fc_nccl_enter(comm));
    return finish(comm,
                  comm->group->nccl->call.all_reduce(buffer, buffer, numel, type,
                                                     operation_of(comm), fc_nccl_handle(comm),
                                                     stream),
                  stream, &info);
}

/* ---- by name ---- */

static fc_status collect_each(fc_device_comm *comm, fc_stream *stream, fc_label label,
                              const fc_nccl_array *outputs, const fc_nccl_array *inputs, size_t n)
{
    fc_gather *gathers = fc_alloc(n + 1, sizeof(*gathers));
    fc_status st;

    if (gathers == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%zu all-gathers", n);
    }
    for (size_t i = 0; i < n; i++) {
        gathers[i] = (fc_gather){outputs[i].data, inputs[i].data, inputs[i].bytes};
    }
    st = fc_nccl_all_gather_each(comm, stream, label, gathers, n);
    fc_free(gathers);
    return st;
}

/* Whether the arrays fit into what is named; `n_ranks` parts make the larger one. */
static fc_status check_arrays(fc_label label, size_t n_ranks, const fc_nccl_array *outputs,
                              size_t n_outputs, const fc_nccl_array *inputs, size_t n_inputs)
{
    const bool is_each = strcmp(label.what, "all_gather_each") == 0;
    const bool is_scatter = strcmp(label.what, "reduce_scatter") == 0;

    if (is_each ? n_inputs != n_outputs : n_outputs != 1 || n_inputs != (is_scatter ? 1 : 0)) {
        return fc_fail(FC_ERR_INVALID, "%s of unit %s: %zu outputs and %zu inputs", label.what,
                       label.unit, n_outputs, n_inputs);
    }
    for (size_t i = 0; i < n_inputs; i++) {
        const fc_nccl_array *whole = is_scatter ? &inputs[i] : &outputs[i];
        const fc_nccl_array *part = is_scatter ? &outputs[i] : &inputs[i];

        if (whole->dtype != part->dtype || whole->numel != n_ranks * part->numel) {
            return fc_fail(FC_ERR_INVALID, "%s of unit %s: %zu elements of type %s for %zu of %s",
                           label.what, label.unit, inputs[i].numel, fc_dtype_name(inputs[i].dtype),
                           outputs[i].numel, fc_dtype_name(outputs[i].dtype));
        }
    }
    return FC_OK;
}

fc_status fc_nccl_collect(fc_nccl_group *group, fc_stream *stream, fc_label label,
                          const fc_nccl_array *outputs, size_t n_outputs,
                          const fc_nccl_array *inputs, size_t n_inputs)
{
    fc_device_comm *gathers = fc_nccl_gathers(group), *reductions = fc_nccl_reductions(group);
    const size_t n_ranks = (size_t)group->base->n_ranks;

    FC_TRY(check_arrays(label, n_ranks, outputs, n_outputs, inputs, n_inputs));
    if (strcmp(label.what, "all_gather_each") == 0) {
        return collect_each(gathers, stream, label, outputs, inputs, n_inputs);
    }
    if (strcmp(label.what, "reduce_scatter") == 0) {
        return fc_nccl_reduce_scatter(reductions, stream, label, outputs->data, inputs->data,
                                      outputs->numel, outputs->dtype);
    }
    if (strcmp(label.what, "all_reduce") == 0) {
        return fc_nccl_all_reduce(reductions, stream, label, outputs->data, outputs->numel,
                                  outputs->dtype);
    }
    if (strcmp(label.what, "all_gather") != 0 || outputs->bytes % n_ranks != 0) {
        return fc_fail(FC_ERR_INVALID, "%s of unit %s: no collective of NCCL's for %zu bytes",
                       label.what, label.unit, outputs->bytes);
    }
    return fc_nccl_all_gather(gathers, stream, label, outputs->data, outputs->bytes / n_ranks);
}
