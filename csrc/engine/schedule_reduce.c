/* Gradients of a unit on their way: staged, scattered, added up over replicas, finished.
 *
 * A unit's gradients pass through two slots. *input* holds a part per rank, staged by compute and
 * read by the reduce-scatter; *output* holds the own part, from the scatter to the last cast. Held
 * gradients stay where they are: staged ones in their input slot, scattered ones in their output.
 *
 * One rank alone scatters nothing: compute finishes its gradients from the input slot, or, where
 * staging would not round them, from where they are.
 *
 * Each section of a part is a collective of its own: all of them, in one order, whatever gradients
 * a rank has. In the input a section's parts lie next to each other.
 */
#include "engine/schedule_private.h"

static double pre_divisor_of(const fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    return grads->pre_divisor > 0 ? grads->pre_divisor : unit->options.pre_divisor;
}

static double divisor_of(const fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    return grads->divisor != 0 ? grads->divisor : unit->options.divisor;
}

/* Adds the gradients to what the unit holds, or to nothing: `waiting` is an input slot afterwards.
 */
static fc_status stage(fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    fc_schedule *s = unit->schedule;
    fc_schedule_launch launch = {.params = grads->full,
                                 .divisor = pre_divisor_of(unit, grads),
                                 .accumulate = unit->waiting != NULL};

    if (unit->waiting == NULL) {
        FC_TRY(fc_stream_pool_acquire(s, &s->inputs, fc_schedule_label(unit, ""),
                                      unit->options.layout->trainable_part_bytes *
                                          (size_t)unit->options.layout->n_ranks,
                                      &unit->waiting));
    }
    launch.wire = unit->waiting->memory;
    return fc_schedule_move_grads(unit, grads->types, false, &launch);
}

static fc_status scatter_sections(fc_schedule_unit *unit, uint64_t present, const void *from,
                                  void *to)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; i < l->n_sections; i++) {
        const fc_section *c = &l->sections[i];

        FC_TRY(s->ops->reduce_scatter(s->options.device, unit->options.reduce, s->options.reduce,
                                      (fc_label){unit->name, "reduce-scatter", present},
                                      (char *)to + c->at,
                                      (const char *)from + (size_t)l->n_ranks * c->at,
                                      c->bytes / fc_dtype_bytes(c->reduce), c->reduce));
    }
    return FC_OK;
}

static fc_status all_reduce_sections(fc_schedule_unit *unit, uint64_t present, void *part)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; i < l->n_sections; i++) {
        const fc_section *c = &l->sections[i];

        FC_TRY(s->ops->all_reduce(s->options.device, unit->options.replicas, s->options.all_reduce,
                                  (fc_label){unit->name, "all-reduce", present},
                                  (char *)part + c->at, c->bytes / fc_dtype_bytes(c->reduce),
                                  c->reduce));
    }
    return FC_OK;
}

/* The own part of the sum over the shard group, and of what was scattered before. */
static fc_status scatter(fc_schedule_unit *unit, uint64_t present, fc_stream_slot **out)
{
    fc_schedule *s = unit->schedule;
    fc_stream *reduce = s->options.reduce;
    fc_stream_slot *input = unit->waiting, *output, *partial = unit->partial;

    FC_TRY(fc_stream_pool_acquire(s, &s->outputs, fc_schedule_label(unit, ""),
                                  unit->options.layout->trainable_part_bytes, &output));
    *out = output;
    FC_TRY(scatter_sections(unit, present, input->memory, output->memory));
    FC_TRY(fc_stream_slot_mark(s, input, reduce));
    fc_stream_pool_release(&s->inputs, input);
    unit->waiting = NULL;
    if (partial != NULL) {
        FC_TRY(fc_schedule_move(unit, reduce, "add",
                                &(fc_schedule_launch){.moves = unit->add,
                                                      .wire = partial->memory,
                                                      .unit = output->memory,
                                                      .divisor = 1,
                                                      .accumulate = true}));
        FC_TRY(fc_stream_slot_mark(s, partial, reduce));
        fc_stream_pool_release(&s->outputs, partial);
        unit->partial = NULL;
    }
    return FC_OK;
}

/* Divides and casts into the gradients; host gradients pass through device memory. */
static fc_status finish(fc_schedule_unit *unit, const fc_schedule_grads *grads,
                        const fc_stream_slot *output, fc_stream *stream)
{
    fc_schedule *s = unit->schedule;
    fc_device *device = s->options.device;
    size_t bytes = unit->options.layout->trainable_grad_bytes;
    fc_schedule_launch launch = {.moves = unit->finish,
                                 .wire = output->memory,
                                 .unit = grads->out,
                                 .divisor = divisor_of(unit, grads),
                                 .accumulate = grads->accumulate};
    void *to = NULL;
    fc_status st = FC_OK;

    if (!unit->options.is_offloaded) {
        return fc_schedule_move(unit, stream, "finish", &launch);
    }
    FC_TRY(s->ops->alloc(device, stream, fc_schedule_label(unit, "gradients"), bytes, &to));
    launch.unit = to;
    if (grads->accumulate) {
        st = s->ops->copy(device, stream, fc_schedule_label(unit, "gradients to device"), to,
                          grads->out, bytes, FC_TO_DEVICE);
    }
    if (st == FC_OK) {
        st = fc_schedule_move(unit, stream, "finish", &launch);
    }
    if (st == FC_OK) {
        st = s->ops->copy(device, stream, fc_schedule_label(unit, "gradients to host"), grads->out,
                          to, bytes, FC_TO_HOST);
        s->has_downloads = true;
    }
    s->ops->free(device, to);
    return st;
}

/* From the scattered part on. */
static fc_status complete(fc_schedule_unit *unit, const fc_schedule_grads *grads,
                          fc_stream_slot *output)
{
    fc_schedule *s = unit->schedule;
    fc_stream *stream = s->options.reduce;

    if (unit->options.replicas != NULL) {
        stream = s->options.all_reduce;
        s->is_all_reducing = true;
        FC_TRY(fc_schedule_chain(s, FC_ORDER_SCATTERED, s->options.reduce, stream));
        FC_TRY(all_reduce_sections(unit, grads->present, output->memory));
    }
    FC_TRY(finish(unit, grads, output, stream));
    return fc_stream_slot_mark(s, output, stream);
}

static bool has_any(const fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; grads->full != NULL && i < l->n_params; i++) {
        if (grads->full[i] != NULL && l->params[i].has_grad && l->params[i].trainable) {
            return true;
        }
    }
    return false;
}

fc_status fc_schedule_enter_reduce(fc_schedule *s)
{
    if (s->compute == NULL) {
        return fc_fail(FC_ERR_STATE, "gradients are made before an iteration has begun");
    }
    s->is_reducing = true;
    return fc_schedule_chain(s, FC_ORDER_STAGED, s->compute, s->options.reduce);
}

void fc_schedule_drop_gradients(fc_schedule_unit *unit)
{
    if (unit->waiting != NULL) {
        fc_stream_pool_release(&unit->schedule->inputs, unit->waiting);
        unit->waiting = NULL;
    }
    fc_schedule_drop_partial_sum(unit);
}

void fc_schedule_drop_partial_sum(fc_schedule_unit *unit)
{
    if (unit->partial != NULL) {
        fc_stream_pool_release(&unit->schedule->outputs, unit->partial);
        unit->partial = NULL;
    }
}

void fc_schedule_move_partial_sum(fc_schedule_unit *from, fc_schedule_unit *to)
{
    to->partial = from->partial;
    from->partial = NULL;
}

/* ---- one rank alone ---- */

/* Whether a gradient of `type` makes the same bits as its staged value: the reduce type holds it,
 * and the finish of neither is in double where the other's is in float. */
static bool is_staged_in_vain(const fc_param *p, fc_dtype type)
{
    return type == p->reduce || (p->reduce == FC_F32 && type != FC_F64) ||
           (p->reduce == FC_F64 && p->grad == FC_F64);
}

/* Whether compute can finish the gradients from where they are. */
static bool is_straight(const fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];

        if (p->has_grad && p->trainable &&
            !is_staged_in_vain(p, grads->types != NULL ? grads->types[i] : p->compute)) {
            return false;
        }
    }
    return pre_divisor_of(unit, grads) == 1;
}

static fc_status finish_straight(fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    const fc_schedule_launch launch = {.unit = grads->out,
                                       .params = grads->full,
                                       .divisor = divisor_of(unit, grads),
                                       .accumulate = grads->accumulate};

    return fc_schedule_move_grads(unit, grads->types, true, &launch);
}

static fc_status finish_waiting(fc_schedule_unit *unit, const fc_schedule_grads *grads)
{
    fc_schedule *s = unit->schedule;

    FC_TRY(finish(unit, grads, unit->waiting, s->compute));
    fc_stream_pool_release(&s->inputs, unit->waiting);
    unit->waiting = NULL;
    return FC_OK;
}

static fc_status post_alone(fc_schedule_unit *unit, const fc_schedule_grads *grads,
                            bool *reduced_out)
{
    bool is_fresh = has_any(unit, grads), is_last = grads->sync != FC_SYNC_NONE;
    bool goes_straight = is_fresh && is_last && unit->waiting == NULL && is_straight(unit, grads);

    if (is_fresh) {
        FC_TRY(goes_straight ? finish_straight(unit, grads) : stage(unit, grads));
    }
    *reduced_out = goes_straight;
    if (!grads->keep_unsharded) {
        fc_schedule_reshard(unit);
    }
    if (is_last && unit->waiting != NULL) {
        FC_TRY(finish_waiting(unit, grads));
        *reduced_out = true;
    }
    return FC_OK;
}

/* Before anything changes: the ranks meet for the collectives that are due. */
static fc_status meet_for_sums(fc_schedule_unit *unit, const fc_schedule_grads *grads,
                               bool is_fresh)
{
    const bool is_due = grads->sync != FC_SYNC_NONE;
    const bool has_input = is_fresh || unit->waiting != NULL;

    if (is_due && has_input) {
        FC_TRY(fc_schedule_meet(unit->options.shard_unit, "reduce-scatter", grads->present));
    }
    if (is_due && grads->sync != FC_SYNC_SCATTER && (has_input || unit->partial != NULL)) {
        FC_TRY(fc_schedule_meet(unit->options.replicate_unit, "all-reduce", grads->present));
    }
    return FC_OK;
}

fc_status fc_schedule_post_backward(fc_schedule_unit *unit, const fc_schedule_grads *grads,
                                    bool *reduced_out)
{
    fc_schedule *s = unit->schedule;
    bool is_partial = grads->sync == FC_SYNC_SCATTER && unit->options.replicas != NULL;
    bool is_fresh = has_any(unit, grads);
    fc_stream_slot *output = NULL;
    fc_status st;

    if (s->compute == NULL) {
        return fc_schedule_unit_fail(unit, "post_backward");
    }
    *reduced_out = false;
    if (fc_schedule_is_alone(unit)) {
        return post_alone(unit, grads, reduced_out);
    }
    FC_TRY(meet_for_sums(unit, grads, is_fresh));
    if (is_fresh) {
        FC_TRY(stage(unit, grads));
    }
    if (!grads->keep_unsharded) {
        fc_schedule_reshard(unit);
    }
    if (grads->sync == FC_SYNC_NONE || (unit->waiting == NULL && unit->partial == NULL)) {
        return FC_OK;
    }
    if (unit->waiting == NULL && is_partial) {
        return FC_OK;
    }
    FC_TRY(fc_schedule_enter_reduce(s));
    if (unit->waiting == NULL) { /* only the sum over replicas is missing */
        output = unit->partial;
        unit->partial = NULL;
        st = FC_OK;
    } else {
        st = scatter(unit, grads->present, &output);
    }
    if (st == FC_OK && is_partial) {
        unit->partial = output;
        return FC_OK;
    }
    if (st == FC_OK) {
        st = complete(unit, grads, output);
    }
    if (output != NULL) {
        fc_stream_pool_release(&s->outputs, output);
    }
    *reduced_out = st == FC_OK;
    return st;
}
