/* The runs of a plan, one after the other, as operators on tensors. */
#include "device/host/operators.h"

#include "device/host/moves.h"

typedef struct launch {
    const fc_operators *operators;
    double divisor;
    bool accumulate;
    fc_status *status; /* of the first that failed */
} launch;

static fc_planes planes_of(const fc_run *run, const fc_host_operand *side, uint8_t dtype)
{
    size_t item = fc_dtype_bytes((fc_dtype)dtype);
    size_t lines = run->lines_per_plane;

    return (fc_planes){
        .first = side->first,
        .dtype = (fc_dtype)dtype,
        .sizes = {(int64_t)(run->n_lines / lines), (int64_t)lines, (int64_t)run->line_numel},
        .strides = {(int64_t)(side->plane_stride / item), (int64_t)(side->line_stride / item), 1}};
}

static fc_status move_run(const launch *l, const fc_planes *to, const fc_planes *from)
{
    const fc_operators *call = l->operators;
    bool is_wide = from->dtype == FC_F64 || to->dtype == FC_F64;

    if (from->first == NULL) {
        return l->accumulate ? FC_OK : call->zero(call->context, to);
    }
    if (l->divisor == 1 && !l->accumulate) {
        return call->copy(call->context, to, from);
    }
    return call->finish(call->context, to, from, is_wide ? FC_F64 : FC_F32, l->divisor,
                        l->accumulate);
}

static void visit(const void *arg, const fc_run *run, fc_host_operand to, fc_host_operand from)
{
    const launch *l = arg;
    fc_planes target = planes_of(run, &to, run->to), source = planes_of(run, &from, run->from);

    if (*l->status == FC_OK) {
        *l->status = move_run(l, &target, &source);
    }
}

fc_status fc_operators_move(const fc_runs *plan, const uint64_t *addresses, double divisor,
                            bool accumulate, const fc_operators *operators)
{
    fc_status st = FC_OK;
    launch l = {operators, divisor, accumulate, &st};

    fc_host_visit(plan, addresses, visit, &l);
    return st;
}
