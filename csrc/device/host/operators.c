/* The runs of a plan, one after the other, as operators on tensors. */
#include "device/host/operators.h"

#include "device/host/moves.h"

typedef struct launch {
    const fc_operators *operators;
    double divisor;
    bool accumulate;
    fc_status *status; /* of the first that failed */
} launch;

static bool has_whole_elements(const fc_host_operand *side, uint8_t dtype)
{
    size_t item = fc_dtype_bytes((fc_dtype)dtype);

    return ((uintptr_t)side->first | side->line_stride | side->plane_stride) % item == 0;
}

/* In elements of a type that those of the run are made of. */
static fc_planes planes_of(const fc_run *run, const fc_host_operand *side, uint8_t dtype,
                           fc_dtype as)
{
    size_t item = fc_dtype_bytes(as);
    size_t lines = run->lines_per_plane;
    size_t numel = run->line_numel * (fc_dtype_bytes((fc_dtype)dtype) / item);

    return (fc_planes){
        .first = side->first,
        .dtype = as,
        .is_unaligned = (uintptr_t)side->first % item != 0,
        .sizes = {(int64_t)(run->n_lines / lines), (int64_t)lines, (int64_t)numel},
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
    /* Packs of several types lie between elements. What is only copied then goes as bytes; of a
     * cast the strides are whole elements. */
    const bool is_split = run->from == run->to && !(has_whole_elements(&to, run->to) &&
                                                    has_whole_elements(&from, run->from));
    const fc_planes target = planes_of(run, &to, run->to, is_split ? FC_RAW1 : (fc_dtype)run->to);
    const fc_planes source =
        planes_of(run, &from, run->from, is_split ? FC_RAW1 : (fc_dtype)run->from);

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
