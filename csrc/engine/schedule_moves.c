/* The plans of all that a unit moves: those of its layout, and what a reshard to a smaller group
 * and sums that are held need besides. */
#include "engine/schedule_private.h"

#include "base/alloc.h"
#include "engine/layout_runs.h"

#include <string.h>

/* Of a unit, for types that came later: a model that is used alike in all steps needs one or two.
 */
#define MIXED_MAX 8

/* This rank's chunks of the unsharded buffer, into a pack of the smaller group. */
static fc_status plan_slice(const fc_layout *post, fc_runs *plan)
{
    size_t i;

    for (i = 0; i < post->n_params; i++) {
        const fc_param *p = &post->params[i];
        size_t row = p->inner * fc_dtype_bytes(p->compute);
        fc_block block = {.planes = 1,
                          .lines = p->outer,
                          .numel = p->own_rows * p->inner,
                          .to = {.base = FC_BASE_WIRE, .type = p->compute, .at = p->pack_at},
                          .from = {.base = FC_BASE_UNIT, .type = p->compute}};

        block.to.line_stride = p->own_rows * row;
        block.from.line_stride = p->rows * row;
        block.from.at = p->full_at + (size_t)post->rank * p->chunk_rows * row;
        FC_TRY(fc_runs_add(plan, &block));
        FC_TRY(fc_layout_plan_padding(p, plan));
    }
    return FC_OK;
}

bool fc_schedule_is_sent_as_is(const fc_schedule_unit *unit, const fc_param *param)
{
    return param->orig == param->compute && !unit->options.is_offloaded &&
           unit->options.layout->n_ranks > 1;
}

size_t fc_schedule_own_at(const fc_schedule_unit *unit, const fc_param *param)
{
    return param->full_at +
           (size_t)unit->options.layout->rank * param->chunk_numel * fc_dtype_bytes(param->compute);
}

/* This rank's shards, cast, to their places in the unsharded buffer: those that are not sent as
 * they are. */
static fc_status plan_place(const fc_schedule_unit *unit, fc_runs *plan)
{
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; i < l->n_entries; i++) {
        const fc_param *p = &l->params[i];
        const fc_block block = {
            .planes = 1,
            .lines = 1,
            .numel = p->chunk_numel,
            .to = {.base = FC_BASE_UNIT, .type = p->compute, .at = fc_schedule_own_at(unit, p)},
            .from = {.base = FC_BASE_PARAMS + (uint32_t)i, .type = p->orig}};

        if (fc_layout_is_gathered(p) && !fc_schedule_is_sent_as_is(unit, p)) {
            FC_TRY(fc_runs_add(plan, &block));
        }
    }
    return FC_OK;
}

static fc_status plan_pack(const fc_schedule_unit *unit, fc_runs *plan)
{
    return unit->options.is_direct ? plan_place(unit, plan)
                                   : fc_layout_plan_pack(unit->options.layout, plan);
}

/* A part to another one. */
static fc_status plan_add(const fc_layout *l, fc_runs *plan)
{
    size_t i;

    for (i = 0; i < l->n_sections; i++) {
        const fc_section *c = &l->sections[i];
        const fc_block block = {.planes = 1,
                                .lines = 1,
                                .numel = c->bytes / fc_dtype_bytes(c->reduce),
                                .to = {.base = FC_BASE_UNIT, .type = c->reduce, .at = c->at},
                                .from = {.base = FC_BASE_WIRE, .type = c->reduce, .at = c->at}};

        FC_TRY(fc_runs_add(plan, &block));
    }
    return FC_OK;
}

/* Of gradients that are all of type `compute`; of `types` if they are given. */
static fc_status plan_stage(const fc_schedule_unit *unit, const fc_dtype *types, fc_runs *plan)
{
    const fc_layout *l = unit->options.layout;
    fc_dtype *grads = fc_alloc(l->n_params, sizeof(*grads));
    fc_status st;
    size_t i;

    if (grads == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s': %zu types", unit->name, l->n_params);
    }
    for (i = 0; i < l->n_params; i++) {
        grads[i] = types != NULL ? types[i] : l->params[i].compute;
    }
    st = fc_layout_plan_stage(l, grads, FC_WIRE_REDUCE, plan);
    fc_free(grads);
    return st;
}

/* The same to the reduced gradients, of one rank. */
static fc_status plan_straight(const fc_schedule_unit *unit, const fc_dtype *types, fc_runs *plan)
{
    const fc_layout *l = unit->options.layout;
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        const fc_param *p = &l->params[i];
        const fc_block block = {.planes = 1,
                                .lines = 1,
                                .numel = p->chunk_numel,
                                .to = {.base = FC_BASE_UNIT, .type = p->grad, .at = p->grad_at},
                                .from = {.base = FC_BASE_PARAMS + (uint32_t)i,
                                         .type = types != NULL ? types[i] : p->compute}};

        if (p->has_grad && p->trainable) {
            FC_TRY(fc_runs_add(plan, &block));
        }
    }
    return FC_OK;
}

/* The device's form of a plan that was made with `st`; the plan is empty afterwards. */
static fc_status finish(fc_schedule_unit *unit, fc_status st, fc_runs *plan, fc_moves **out)
{
    fc_schedule *s = unit->schedule;

    if (st == FC_OK) {
        st = s->ops->moves_create(s->options.device, plan, out);
    }
    fc_runs_clear(plan);
    return st;
}

fc_status fc_schedule_moves_create(fc_schedule_unit *unit)
{
    const fc_layout *l = unit->options.layout;
    fc_runs plan;

    fc_runs_init(&plan);
    FC_TRY(finish(unit, plan_pack(unit, &plan), &plan, &unit->pack));
    FC_TRY(finish(unit, fc_layout_plan_unpack(l, &plan), &plan, &unit->unpack));
    FC_TRY(finish(unit, plan_stage(unit, NULL, &plan), &plan, &unit->stage));
    FC_TRY(finish(unit, fc_layout_plan_finish(l, FC_WIRE_REDUCE, &plan), &plan, &unit->finish));
    FC_TRY(finish(unit, plan_add(l, &plan), &plan, &unit->add));
    if (fc_schedule_is_alone(unit)) {
        FC_TRY(finish(unit, plan_straight(unit, NULL, &plan), &plan, &unit->straight));
    }
    if (unit->post_params == NULL) {
        return FC_OK;
    }
    FC_TRY(finish(unit, plan_slice(&unit->post, &plan), &plan, &unit->slice));
    return finish(unit, fc_layout_plan_unpack(&unit->post, &plan), &plan, &unit->post_unpack);
}

static bool are_compute_types(const fc_layout *l, const fc_dtype *types)
{
    size_t i;

    for (i = 0; i < l->n_params; i++) {
        if (types[i] != l->params[i].compute) {
            return false;
        }
    }
    return true;
}

static fc_status staging_create(fc_schedule_unit *unit, const fc_dtype *types, bool is_straight,
                                fc_schedule_staging *staging)
{
    size_t bytes = unit->options.layout->n_params * sizeof(*types);
    fc_runs plan;

    staging->is_straight = is_straight;
    staging->types = fc_alloc(1, bytes);
    if (staging->types == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s': types of gradients", unit->name);
    }
    memcpy(staging->types, types, bytes);
    fc_runs_init(&plan);
    return finish(unit,
                  is_straight ? plan_straight(unit, types, &plan) : plan_stage(unit, types, &plan),
                  &plan, &staging->moves);
}

/* NULL: there is none. */
static const fc_schedule_staging *find_staging(const fc_schedule_unit *unit, const fc_dtype *types,
                                               bool is_straight)
{
    const size_t bytes = unit->options.layout->n_params * sizeof(*types);
    const fc_schedule_staging *staging = unit->stagings;

    while (staging != NULL &&
           (staging->is_straight != is_straight || memcmp(staging->types, types, bytes) != 0)) {
        staging = staging->next;
    }
    return staging;
}

static fc_status known_or_made(fc_schedule_unit *unit, const fc_dtype *types, bool is_straight,
                               fc_moves **out)
{
    const fc_schedule_staging *known = find_staging(unit, types, is_straight);
    fc_schedule_staging *staging;
    fc_status st;

    if (known != NULL) {
        *out = known->moves;
        return FC_OK;
    }
    staging = fc_alloc(1, sizeof(*staging));
    if (staging == NULL) {
        return fc_fail(FC_ERR_NOMEM, "unit '%s': plan of gradients", unit->name);
    }
    st = staging_create(unit, types, is_straight, staging);
    if (st != FC_OK) {
        fc_free(staging->types);
        fc_free(staging);
        return st;
    }
    staging->next = unit->stagings;
    unit->stagings = staging;
    *out = staging->moves;
    return FC_OK;
}

void fc_schedule_moves_destroy(fc_schedule_unit *unit)
{
    fc_moves *const all[] = {unit->pack,  unit->unpack,   unit->slice,  unit->post_unpack,
                             unit->stage, unit->straight, unit->finish, unit->add};
    fc_schedule *s = unit->schedule;
    size_t i;

    for (i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        s->ops->moves_destroy(s->options.device, all[i]);
    }
    while (unit->stagings != NULL) {
        fc_schedule_staging *next = unit->stagings->next;

        s->ops->moves_destroy(s->options.device, unit->stagings->moves);
        fc_free(unit->stagings->types);
        fc_free(unit->stagings);
        unit->stagings = next;
    }
}

fc_status fc_schedule_move(fc_schedule_unit *unit, fc_stream *stream, const char *what,
                           const fc_schedule_launch *launch)
{
    fc_schedule *s = unit->schedule;
    const fc_layout *l = unit->options.layout;
    const fc_move move = {launch->moves, unit->addresses, launch->divisor, launch->accumulate};
    const size_t n = launch->moves == unit->pack ? l->n_entries : l->n_params;
    size_t i;

    unit->addresses[FC_BASE_WIRE] = (uintptr_t)launch->wire;
    unit->addresses[FC_BASE_UNIT] = (uintptr_t)launch->unit;
    for (i = 0; i < n; i++) {
        const void *param = launch->params != NULL ? launch->params[i] : NULL;

        unit->addresses[FC_BASE_PARAMS + i] = (uintptr_t)param;
    }
    return s->ops->move(s->options.device, stream, fc_schedule_label(unit, what), &move);
}

/* ---- gradients ---- */

static bool is_given(const fc_schedule_unit *unit, const fc_schedule_launch *launch, size_t param)
{
    const fc_param *p = &unit->options.layout->params[param];

    return launch->params[param] != NULL && p->has_grad && p->trainable;
}

static fc_status move_by(fc_schedule_unit *unit, const fc_dtype *types, bool is_straight,
                         fc_schedule_launch launch)
{
    if (types == NULL || are_compute_types(unit->options.layout, types)) {
        launch.moves = is_straight ? unit->straight : unit->stage;
    } else {
        FC_TRY(known_or_made(unit, types, is_straight, &launch.moves));
    }
    return fc_schedule_move(unit, unit->schedule->compute, is_straight ? "finish" : "stage",
                            &launch);
}

/* Those of one type alone, by the plan for all of that type: the others count as absent. */
static fc_status move_type(fc_schedule_unit *unit, const fc_dtype *types, fc_dtype type,
                           bool is_straight, fc_schedule_launch launch)
{
    const size_t n = unit->options.layout->n_params;
    size_t i;

    for (i = 0; i < n; i++) {
        unit->type_of_each[i] = type;
        unit->of_type[i] = types[i] == type ? launch.params[i] : NULL;
    }
    launch.params = unit->of_type;
    return move_by(unit, unit->type_of_each, is_straight, launch);
}

/* One after the other: all but the first are added to the zeros that it has left for them. */
static fc_status move_types(fc_schedule_unit *unit, const fc_dtype *types, bool is_straight,
                            fc_schedule_launch launch)
{
    const size_t n = unit->options.layout->n_params;
    bool is_done[FC_DTYPE_COUNT] = {false};
    size_t i;

    for (i = 0; i < n; i++) {
        if (is_given(unit, &launch, i) && !is_done[types[i]]) {
            is_done[types[i]] = true;
            FC_TRY(move_type(unit, types, types[i], is_straight, launch));
            launch.accumulate = true;
        }
    }
    return FC_OK;
}

/* Where steps use other parameters each, and have added up gradients of some of them (experts),
 * there would be as many plans as sets of parameters; none may go, since a captured graph may read
 * it. Beyond some of them gradients are moved a type at a time, by a plan for each type. */
fc_status fc_schedule_move_grads(fc_schedule_unit *unit, const fc_dtype *types, bool is_straight,
                                 const fc_schedule_launch *launch)
{
    if (types == NULL || are_compute_types(unit->options.layout, types) ||
        find_staging(unit, types, is_straight) != NULL) {
        return move_by(unit, types, is_straight, *launch);
    }
    if (unit->n_mixed < MIXED_MAX) {
        FC_TRY(move_by(unit, types, is_straight, *launch));
        unit->n_mixed++;
        return FC_OK;
    }
    return move_types(unit, types, is_straight, *launch);
}
