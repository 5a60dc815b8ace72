/* A root's backwards: what each unit does when it is reached and passed, and what is left for the
 * end.
 */
#include "engine/root_private.h"

/* ---- the phase ---- */

/* In a script that writes shards between forward and backward; and what is made for each gather. */
static fc_status publish_stale(fc_root_course *root)
{
    const fc_root_ops *ops = root->ops;

    for (size_t i = 0; root->publishes && i < root->n_modules; i++) {
        FOR_EACH_UNIT(unit, root->modules[i])
        {
            bool is_stale = false;

            if (ops->publishes(unit->owner)) {
                FC_TRY(ops->is_stale(unit->owner, &is_stale));
            }
            if (is_stale) {
                FC_TRY(ops->publish(unit->owner));
                FC_TRY(ops->note_shards(unit->owner));
            }
        }
    }
    return FC_OK;
}

fc_status fc_root_begin_backward(fc_root_course *root)
{
    if (fc_root_in_backward(root)) {
        return FC_OK;
    }
    if (fc_root_is_open(root)) {
        FC_TRY(or_fail(root, root_close(root)));
    }
    FC_TRY(or_fail(root, publish_stale(root)));
    if (root->schedule != NULL) {
        FC_TRY(root->ops->resume(root->owner));
        FC_TRY(root_each_unit(root, root->ops->release_unused));
    }
    FC_TRY(root_open(root, (fc_opening){FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN}));
    root->n_finished = 0;
    root->n_reused = root_count_reused(root);
    return FC_OK;
}

void fc_root_note_awaited(fc_root_course *root)
{
    fc_root_context *context = root->context;

    context->awaits_end = true;
    if (context->ending == FC_ENDING_OPEN) {
        context->ending = context->ends_manually ? FC_ENDING_MANUAL : FC_ENDING_AUTOMATIC;
    }
}

/* ---- a unit is reached ---- */

fc_status fc_root_reach(fc_root_course *root, fc_root_module *module, bool *is_news_out)
{
    *is_news_out = false;
    if (root->context->is_failed) {
        FC_TRY(fc_root_reset(root, true));
    }
    (void)fc_training_move(&module->training, FC_TRAINING_REACHED);
    module->backward = root->backward;
    FC_TRY(fc_root_begin_backward(root));
    if (!root->context->awaits_end) {
        FC_TRY(root->ops->await_end(root->owner));
    }
    FOR_EACH_UNIT(unit, module)
    {
        *is_news_out = *is_news_out || unit->training != FC_TRAINING_PRE_BACKWARD;
    }
    return FC_OK;
}

fc_status fc_root_enter_backward(fc_root_course *root, fc_root_unit *unit)
{
    const fc_root_ops *ops = root->ops;

    (void)fc_training_move(&unit->training, FC_TRAINING_REACHED);
    ops->await_gradients(unit->owner);
    FC_TRY(unit->unshard_in_backward ? ops->unshard(unit->owner)
                                     : ops->make_unavailable(unit->owner));
    return ops->defer_upcasts(unit->owner, unit->reduce_grads);
}

/* ---- a unit is passed ---- */

/* Submissions that lie there for long, if peers have theirs. */
static fc_status finish_oldest(const fc_root_unit *unit)
{
    FC_TRY(fc_reduction_finish_ready(unit->reduction->shard->domain, FC_SEARCH_OLDEST));
    return unit->reduction->replicate == NULL
               ? FC_OK
               : fc_reduction_finish_ready(unit->reduction->replicate->domain, FC_SEARCH_OLDEST);
}

/* Its parameters go. True in `was_reached_out`: it was reached before. */
static fc_status give_up(fc_root_course *root, fc_root_unit *unit, bool is_news,
                         bool *was_reached_out)
{
    const fc_root_ops *ops = root->ops;

    FC_TRY(fc_root_begin_backward(root));
    if (!root->context->awaits_end && ops->is_in_backward(root->owner)) {
        FC_TRY(ops->await_end(root->owner));
    }
    if (is_news) {
        FC_TRY(ops->note_passed(unit->owner));
    }
    unit->n_passed++;
    *was_reached_out = ops->end_awaiting(unit->owner);
    /* A module that ran several times may be read again by peers in this phase: an optimizer in one
     * of the hooks of its gradients must not write its shards before the end. */
    if (unit->n_entered > 1 || root->finds_sums) {
        unit->defers_hooks = root->defers_hooks = true;
    }
    if (unit->reshard_after_backward) {
        FC_TRY(ops->reshard(unit->owner, is_news));
    }
    unit->is_pending = !unit->reduce_grads;
    return FC_OK;
}

static fc_status submit(fc_root_course *root, fc_root_unit *unit)
{
    const uint64_t n_used = unit->past.unshards + unit->reduction->traffic.unshards;

    FC_TRY(fc_reduction_finish_ready(unit->reduction->shard->domain, FC_SEARCH_OLDEST));
    /* Of units that no forward has used yet nobody has gradients. */
    return root->ops->submit(unit->owner, unit->reduce_unused && n_used > 0);
}

/* Its gradients have gone their way. A unit that ran again, a graph that is kept, a parameter that
 * a branch of its own uses: then a later backward may begin inside of it. */
static fc_status end_pass(fc_root_course *root, fc_root_unit *unit, bool was_reached)
{
    const fc_root_ops *ops = root->ops;

    FC_TRY(ops->end_deferral(unit->owner));
    if (was_reached && unit->n_passed >= unit->n_entered && ops->has_all_gradients(unit->owner) &&
        !ops->keeps_graph(root->owner)) {
        FC_TRY(ops->end_graph(unit->owner));
    }
    return finish_oldest(unit);
}

/* While the backward goes on: a unit that forward has entered several times is reduced once, when
 * it was passed as often. What earlier backwards have left goes ahead, as torch's does. */
static fc_status pass(fc_root_course *root, fc_root_unit *unit)
{
    bool was_reached;

    FC_TRY(give_up(root, unit, true, &was_reached));
    if (!unit->reduce_grads) {
        FC_TRY(root->ops->accumulate(unit->owner, true));
    } else if (unit->n_passed >= unit->n_entered || root->ops->has_held(unit->owner)) {
        FC_TRY(submit(root, unit));
    }
    return end_pass(root, unit, was_reached);
}

/* At the end of a backward: whatever came is all that comes. */
static fc_status reduce_rest(fc_root_course *root, fc_root_unit *unit)
{
    const bool is_news = fc_training_move(&unit->training, FC_TRAINING_PASSED);
    bool was_reached;

    root_mark(unit, FC_WINDOW_EVENT_PASSED);
    FC_TRY(give_up(root, unit, is_news, &was_reached));
    FC_TRY(unit->reduce_grads ? submit(root, unit) : root->ops->accumulate(unit->owner, is_news));
    FC_TRY(end_pass(root, unit, was_reached));
    root_mark(unit, FC_WINDOW_EVENT_LEFT);
    return FC_OK;
}

fc_status fc_root_pass(fc_root_course *root, fc_root_unit *unit)
{
    (void)fc_training_move(&unit->training, FC_TRAINING_PASSED);
    if (unit->reduction == NULL) {
        return FC_OK;
    }
    root_mark(unit, FC_WINDOW_EVENT_PASSED);
    FC_TRY(or_fail(root, pass(root, unit)));
    root_mark(unit, FC_WINDOW_EVENT_LEFT);
    if (unit->reduction != NULL) {
        fc_reduction_return_large(unit->reduction->shard->domain);
    }
    return FC_OK;
}

/* Ready for the next step. */
static void end_unit(fc_root_unit *unit)
{
    (void)fc_training_move(&unit->training, FC_TRAINING_ENDED);
    unit->n_entered = unit->n_passed = 0;
}

bool fc_root_asks_for_input(const fc_root_course *root, const fc_root_unit *unit)
{
    return unit->input_seen_in == 0 || unit->input_seen_in == root->backward;
}

void fc_root_note_input(const fc_root_course *root, fc_root_unit *unit, bool is_own)
{
    unit->owns_input = is_own && (unit->input_seen_in == 0 || unit->owns_input);
    unit->input_seen_in = root->backward;
}

void fc_root_finish(fc_root_course *root, fc_root_unit *unit)
{
    fc_unit *shard = unit->reduction != NULL ? unit->reduction->shard : NULL;

    if (shard == NULL || !unit->reduce_grads || unit->n_passed < unit->n_entered) {
        return;
    }
    if (shard->is_finished) { /* it was passed again */
        shard->domain->n_reused++;
        return;
    }
    shard->is_finished = root->ops->is_settled(unit->owner);
    if (shard->is_finished) {
        root->n_finished++;
        unit->finished_in = root->backward;
        end_unit(unit);
    }
}

/* ---- the end ---- */

/* Whether the end of backward would find nothing to do in any module. */
static bool is_all_finished(const fc_root_course *root)
{
    return root->n_units > 0 && root->n_finished == root->n_units && !root->has_grouped &&
           root->n_reused == root_count_reused(root) &&
           root->context->ending == FC_ENDING_AUTOMATIC;
}

/* Whether a unit that was passed has something left. */
static bool is_late(const fc_root_course *root, const fc_root_unit *unit)
{
    return unit->n_passed < unit->n_entered || root->ops->has_accumulated(unit->owner) ||
           (root->ops->is_unsharded(unit->owner) && unit->reshard_after_backward);
}

/* Inputs that need no gradient bring nobody past the unit, and what is not reduced by now is
 * reduced here; or by fc_root_finalize_backward(). */
static fc_status end_unit_of_backward(fc_root_course *root, fc_root_unit *unit,
                                      const void *is_manual_of)
{
    const bool is_manual = *(const bool *)is_manual_of;
    const bool is_through =
        unit->training == FC_TRAINING_POST_BACKWARD || unit->finished_in == root->backward;

    if (is_manual && !is_through && unit->reduce_grads) {
        unit->is_pending = true;
        root->context->is_unfinalized = true;
    } else if (!is_through || is_late(root, unit)) {
        FC_TRY(or_fail(root, reduce_rest(root, unit)));
    }
    FC_TRY(root->ops->keep(unit->owner));
    if (!is_manual) {
        FC_TRY(root->ops->drop_pending(unit->owner));
    }
    end_unit(unit);
    return FC_OK;
}

static fc_status end_modules(fc_root_course *root, bool is_manual)
{
    for (size_t i = 0; i < root->n_modules; i++) {
        fc_root_module *module = root->modules[i];

        root->ops->forget_members(module->owner);
        FC_TRY(root_each_backwards(root, module->unit, end_unit_of_backward, &is_manual));
        (void)fc_training_move(&module->training, FC_TRAINING_ENDED);
    }
    return FC_OK;
}

static fc_status run_hooks_of(fc_root_course *root, fc_root_unit *unit, const void *unused)
{
    (void)unused;
    unit->defers_hooks = false;
    return root->ops->run_deferred_hooks(unit->owner);
}

/* In the order in which backwards mostly come to units. */
static fc_status run_deferred_hooks(fc_root_course *root)
{
    if (!root->defers_hooks) {
        return FC_OK;
    }
    root->defers_hooks = false;
    for (size_t i = root->n_modules; i-- > 0;) {
        FC_TRY(root_each_backwards(root, root->modules[i]->unit, run_hooks_of, NULL));
    }
    return FC_OK;
}

/* Finishes all reductions and closes the phase. On a device what the caller does next comes behind
 * the reductions after the last backward. */
static fc_status close_backward(fc_root_course *root, bool is_last)
{
    if (root->schedule != NULL) {
        FC_TRY(fc_schedule_end_backward(root->schedule, is_last));
    }
    FC_TRY(fc_reduction_finish_all(root->domains, root->n_domains));
    for (size_t i = 0; i < root->n_domains; i++) {
        FC_TRY(root_drop_ahead(root, root->domains[i]));
        FC_TRY(fc_domain_close(root->domains[i]));
    }
    root_show(root, FC_WINDOW_BETWEEN);
    return run_deferred_hooks(root);
}

static fc_status end_backward(fc_root_course *root, bool is_manual, bool is_last)
{
    if (!is_all_finished(root)) {
        FC_TRY(end_modules(root, is_manual));
    }
    root->backward++;
    return close_backward(root, is_last);
}

fc_status fc_root_end_backward(fc_root_course *root)
{
    fc_root_context *context = root->context;
    const bool is_manual = context->ending == FC_ENDING_MANUAL;

    root->opener = NULL;
    FC_TRY(or_fail(root, end_backward(root, is_manual, !is_manual && context->is_last_backward)));
    context->awaits_end = false;
    if (!is_manual && context->is_last_backward) {
        context->ending = FC_ENDING_OPEN;
    }
    return FC_OK;
}

static fc_status finalize_unit(fc_root_course *root, fc_root_unit *unit, const void *unused)
{
    const bool has_sums =
        unit->reduce_grads && unit->all_reduce_grads && fc_reduction_has_sums(unit->reduction);

    (void)unused;
    if (unit->is_pending || has_sums) {
        FC_TRY(or_fail(root, reduce_rest(root, unit)));
    } else if (unit->reshard_after_backward) {
        FC_TRY(root->ops->reshard(unit->owner, false));
    }
    FC_TRY(root->ops->drop_pending(unit->owner));
    (void)fc_training_move(&unit->training, FC_TRAINING_ENDED);
    unit->n_passed = 0;
    return FC_OK;
}

static fc_status finalize(fc_root_course *root)
{
    FC_TRY(fc_root_begin_backward(root));
    for (size_t i = root->n_modules; i-- > 0;) {
        FC_TRY(root_each_backwards(root, root->modules[i]->unit, finalize_unit, NULL));
    }
    return close_backward(root, true);
}

fc_status fc_root_finalize_backward(fc_root_course *root)
{
    FC_TRY(or_fail(root, finalize(root)));
    root->context->is_unfinalized = false;
    return FC_OK;
}
