// The course of a step: opening and closing phases, post-backward, the end of backward, recovery.
#include "bind/fsdp/tree.h"

#include "bind/fsdp/events.h"
#include "bind/tensor/tensors.h"
#include "engine/order.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace fc {

fc_reduce_options reduce_options(const GroupObject *group)
{
    const Unit *unit = group->unit;
    double divisor = fc_domain_n_ranks(unit->domain());
    if (unit->replicate_domain() != nullptr) {
        divisor *= fc_domain_n_ranks(unit->replicate_domain());
    }
    if (group->gradient_divide_factor != nullptr && group->gradient_divide_factor != Py_None) {
        divisor = PyFloat_AsDouble(group->gradient_divide_factor);
        if (divisor == -1.0 && PyErr_Occurred()) {
            throw_python();
        }
        if (divisor == 0.0) {
            PyErr_Format(PyExc_ZeroDivisionError,
                         "set_gradient_divide_factor(0) on unit '%s': its gradients cannot be "
                         "divided by zero",
                         unit->name().c_str());
            throw_python();
        }
    }
    return {divisor, group->all_reduce_grads != 0, group->defers_hooks != 0};
}

namespace {

// The oldest submissions, if peers have theirs.
void finish_oldest(fc_domain *domain)
{
    check_raised(fc_reduction_finish_ready(domain, FC_SEARCH_OLDEST));
}

// Runs `body`; if it throws, peers learn that this rank has left the phase.
template <typename Body> void or_fail(TreeObject *tree, Body &&body)
{
    try {
        body();
    } catch (...) {
        tree_fail(tree);
        throw;
    }
}

template <typename Body> void each_unit(const TreeObject *tree, Body &&body)
{
    each_state(tree, [&](StateObject *state) {
        if (state->group != nullptr && state->group->unit != nullptr) {
            body(state->group->unit);
        }
    });
}

// Steps of all optimizers that hold shards of the tree, and loads.
uint64_t count_updates(TreeObject *tree)
{
    if (tree->updates == nullptr) {
        tree->updates = new TreeUpdates();
    }
    TreeUpdates &known = *tree->updates;
    if (known.version != Updates::version()) {
        known = {};
        each_state(tree, [&](const StateObject *state) {
            if (state->group != nullptr) {
                for (const auto &[counter, before] : state->group->updates->counters()) {
                    uint64_t &first = known.optimizers.try_emplace(counter, before).first->second;
                    first = std::min(first, before);
                }
                known.n_loads += state->group->updates->n_loads();
            }
        });
        known.version = Updates::version();
    }
    uint64_t n = known.n_loads;
    for (const auto &[counter, before] : known.optimizers) {
        n += *counter - before;
    }
    return n;
}

// Also finds out what passes over all units can be left out.
bool check_shards(TreeObject *tree)
{
    bool is_intact = true;
    tree->publishes = tree->has_grouped = false;
    tree->n_units = 0;
    each_state(tree, [&](const StateObject *state) {
        tree->has_grouped = tree->has_grouped || is_grouped(state);
        Unit *unit = state->group != nullptr ? state->group->unit : nullptr;
        if (unit != nullptr) {
            tree->n_units++;
            tree->publishes = tree->publishes || unit->publishes();
            is_intact = is_intact && unit->is_intact();
            if (is_intact) { // else they may have no memory
                unit->note_shards();
            }
        }
    });
    return is_intact;
}

// A shard that was replaced or moved since set-up is taken over before it is read.
void rebuild_if_changed(StateObject *state)
{
    if (!check_shards(state->tree)) {
        checked(
            PyObject_CallMethod(reinterpret_cast<PyObject *>(state), "_rebuild_units", nullptr));
        check_shards(state->tree); // it may be a new one
    }
}

// Gives up what was gathered ahead and not used in the phase.
void drop_ahead(fc_domain *domain)
{
    for (size_t i = 0; fc_order_n_ahead(domain) > 0 && i < fc_domain_n_units(domain); i++) {
        if (Unit *unit = owner_unit(fc_domain_unit(domain, i))) {
            unit->drop_ahead();
        }
    }
}

// The tree's place for `state`, by which ranks compare who began a phase.
uint32_t place_of(const TreeObject *tree, const StateObject *state)
{
    const Py_ssize_t n = PyList_GET_SIZE(tree->states);
    Py_ssize_t i = 0;
    while (i < n && reinterpret_cast<StateObject *>(PyList_GET_ITEM(tree->states, i)) != state) {
        i++;
    }
    return static_cast<uint32_t>(i);
}

void open(TreeObject *tree, fc_opening opening)
{
    each_domain(tree, [&](fc_domain *domain) {
        drop_ahead(domain);
        fc_domain_open(domain, opening);
    });
}

void close(TreeObject *tree)
{
    each_domain(tree, [](fc_domain *domain) { fc_domain_mark_closed(domain); });
    each_domain(tree, [](fc_domain *domain) { check(fc_domain_close(domain)); });
}

// set_post_optim_event counts for one forward. On a device the current stream waits for it, and
// all that reads shards comes behind that.
void take_post_optim_event(StateObject *state)
{
    static PyObject *const context_name = PyUnicode_InternFromString("_state_ctx");
    static PyObject *const event_name = PyUnicode_InternFromString("post_optim_event");
    Ref context = checked(PyObject_GetAttr(reinterpret_cast<PyObject *>(state), context_name));
    Ref event = checked(PyObject_GetAttr(context.get(), event_name));
    if (event.get() != Py_None) {
        if (state->tree->streams != nullptr) {
            checked(PyObject_CallMethod(event.get(), "wait", nullptr));
        }
        check(PyObject_SetAttr(context.get(), event_name, Py_None));
    }
}

void warn_if_unfinalized(ContextObject *context)
{
    if (context->is_unfinalized && !context->has_warned) {
        context->has_warned = true;
        check(PyErr_WarnEx(PyExc_UserWarning,
                           "backward was left to finalize_backward(), which was not called before "
                           "this forward: gradients of some FSDP units are not reduced yet, and an "
                           "optimizer step in between has not used them",
                           1));
    }
}

// What a group does once its gradients are there; at the end of backward, or while it goes on.
void reduce_group(TreeObject *tree, GroupObject *group, bool at_end)
{
    constexpr int through = static_cast<int>(Training::post_backward);
    const bool is_news = !at_end || group->training != through;
    group->training = through;
    Unit *unit = group->unit;
    if (unit == nullptr) {
        return;
    }
    or_fail(tree, [&] {
        tree_begin_backward(tree);
        if (!tree->context->callback_queued && torch::autograd::get_current_graph_task_id() != -1) {
            queue_final_callback(tree);
        }
        if (is_news) {
            log_event("FSDP::post_backward", unit);
        }
        group->backwards++;
        const bool was_reached = unit->end_awaiting();
        // A module that ran several times may be read again by peers in this phase: an optimizer in
        // one of its post-accumulate hooks must not write its shards before the end.
        if (group->forwards > 1) {
            group->defers_hooks = tree->defers_hooks = true;
        }
        if (group->reshard_after_backward) {
            Range range(is_news ? "FSDP::post_backward_reshard" : nullptr, unit);
            unit->reshard();
        }
        group->post_backward_pending = !group->reduce_grads;
        if (!group->reduce_grads) {
            Range range(is_news ? "FSDP::post_backward_accumulate" : nullptr, unit);
            unit->accumulate();
        } else if (at_end || group->backwards >= group->forwards) {
            // A module that ran several times is reduced once, after its last backward.
            finish_oldest(unit->domain());
            // Of units that no forward has used yet nobody has gradients; torch leaves them, too.
            const bool was_used = unit->traffic().unshards + group->past.unshards > 0;
            unit->submit(group->reduce_scatter_unused_params != 0 && was_used,
                         reduce_options(group));
        }
        unit->end_deferral();
        // A unit that ran again, a graph that is kept, a parameter that a branch of its own uses: a
        // later backward may begin inside of the unit.
        if (was_reached && group->backwards >= group->forwards && unit->has_all_gradients() &&
            !torch::autograd::get_current_graph_task_keep_graph()) {
            unit->end_graph();
        }
        finish_oldest(unit->domain());
        if (unit->replicate_domain() != nullptr) {
            finish_oldest(unit->replicate_domain());
        }
    });
}

// On a device: after the last backward what the caller does next comes behind all reductions.
void end_reductions(TreeObject *tree, bool is_last)
{
    if (tree->streams != nullptr) {
        check(fc_schedule_end_backward(tree->streams->schedule(), is_last));
    }
}

// Whether a group whose post-backward has run has something left for the end of backward.
bool is_late(const GroupObject *group)
{
    return group->backwards < group->forwards || group->unit->has_accumulated() ||
           (group->unit->is_unsharded() && group->reshard_after_backward);
}

// Whether the end of backward would find nothing to do in any state.
bool is_all_finished(const TreeObject *tree)
{
    return tree->n_units > 0 && tree->n_finished == tree->n_units && !tree->has_grouped &&
           tree->n_reused == Unit::n_reused() && tree->context->ending == Ending::automatic;
}

// What the end of backward has to do in a state.
void end_state(TreeObject *tree, StateObject *state)
{
    ContextObject *context = tree->context;
    const bool is_manual = context->ending == Ending::manual;
    PySet_Clear(state->to_run);
    GroupObject *group = state->group;
    if (group != nullptr && group->unit != nullptr) {
        // Inputs that need no gradient have no node, and what is not reduced by now is
        // reduced here; or by finalize_backward().
        const bool is_through = group->training == static_cast<int>(Training::post_backward) ||
                                group->finished_in == tree->backward;
        if (is_manual && !is_through && group->reduce_grads) {
            group->post_backward_pending = true;
            context->is_unfinalized = true;
        } else if (!is_through || is_late(group)) {
            reduce_group(tree, group, true);
        }
        group->unit->keep();
        if (!is_manual) {
            group->unit->drop_pending();
        }
        group->training = static_cast<int>(Training::idle);
        group->forwards = group->backwards = 0;
    }
    state->training = static_cast<int>(Training::idle);
}

// Finishes all reductions of a backward phase and closes it.
void close_backward(TreeObject *tree)
{
    std::vector<fc_domain *> domains;
    each_domain(tree, [&](fc_domain *domain) { domains.push_back(domain); });
    check_raised(fc_reduction_finish_all(domains.data(), domains.size()));
    each_domain(tree, [](fc_domain *domain) {
        drop_ahead(domain);
        check(fc_domain_close(domain));
    });
    if (std::exchange(tree->defers_hooks, false)) {
        each_state(tree, [](StateObject *state) {
            if (state->group != nullptr && state->group->unit != nullptr) {
                state->group->defers_hooks = false;
                state->group->unit->run_deferred_hooks();
            }
        });
    }
}

} // namespace

void tree_fail(TreeObject *tree)
{
    tree->context->callback_queued = false;
    tree->context->is_failed = true;
    each_domain(tree, [](fc_domain *domain) { fc_domain_fail(domain); });
}

void tree_note_raised(StateObject *state)
{
    TreeObject *tree = state->tree;
    if (tree != nullptr && tree->iteration_root == state && !tree_in_backward(tree)) {
        tree->has_raised = true;
    }
}

void tree_root_pre_forward(StateObject *state)
{
    TreeObject *tree = state->tree;
    if (tree->context->is_failed) {
        check(PyErr_WarnEx(PyExc_UserWarning,
                           "the previous backward ended in an exception: its gradients, and those "
                           "kept from earlier "
                           "backwards without synchronisation, are dropped",
                           1));
        tree_reset(tree, true);
    }
    if (tree_in_backward(tree)) {
        tree->iteration_root = state; // recomputation: the backward's phase covers it
        return;
    }
    warn_if_unfinalized(tree->context);
    log_look_up_level();
    log_event("FSDP::root_pre_forward");
    Range range("FSDP::root_pre_forward");
    take_post_optim_event(state);
    rebuild_if_changed(state);
    tree = state->tree;
    if (tree->publishes) {
        each_unit(tree, [](Unit *unit) { unit->publish(); });
    }
    open(tree, {at::GradMode::is_enabled() ? FC_PHASE_FORWARD : FC_PHASE_FORWARD_NO_GRAD,
                place_of(tree, state), count_updates(tree)});
    if (tree->streams != nullptr) {
        each_unit(tree, [](Unit *unit) { unit->release_unused(); });
        tree->streams->begin();
    }
    tree->iteration_root = state;
    tree->has_raised = false;
}

void tree_root_post_forward(TreeObject *tree)
{
    tree->iteration_root = nullptr;
    if (!tree_in_backward(tree) && tree_is_open(tree)) {
        or_fail(tree, [&] {
            each_unit(tree, [](Unit *unit) {
                unit->check_unwritten();
                if (unit->is_kept_after_forward()) {
                    unit->keep();
                }
            });
            close(tree);
        });
        if (tree->streams != nullptr && !at::GradMode::is_enabled()) {
            check(fc_schedule_end_forward(tree->streams->schedule()));
        }
    }
}

void tree_begin_backward(TreeObject *tree)
{
    if (tree_in_backward(tree)) {
        return;
    }
    or_fail(tree, [&] {
        if (tree_is_open(tree)) {
            close(tree);
        }
        if (tree->publishes) {
            each_unit(tree, [](Unit *unit) {
                if (unit->publishes() && unit->was_written()) {
                    unit->publish();
                    unit->note_shards();
                }
            });
        }
    });
    if (tree->streams != nullptr) {
        tree->streams->resume();
        each_unit(tree, [](Unit *unit) { unit->release_unused(); });
    }
    open(tree, {FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
    tree->n_finished = 0;
    tree->n_reused = Unit::n_reused();
}

bool tree_is_between_steps(const TreeObject *tree)
{
    bool is_free = tree->iteration_root == nullptr && !tree_in_backward(tree);
    each_state(tree, [&](const StateObject *state) {
        const GroupObject *group = state->group;
        is_free = is_free && (group == nullptr || group->unit == nullptr ||
                              (group->forwards == 0 && !group->unit->has_accumulated()));
    });
    return is_free;
}

void group_post_backward(TreeObject *tree, GroupObject *group)
{
    reduce_group(tree, group, false);
    if (group->unit != nullptr) {
        fc_reduction_return_large(group->unit->domain());
    }
}

void state_post_backward(StateObject *state)
{
    TreeObject *tree = state->tree;
    GroupObject *group = state->group;
    if (tree == nullptr || group == nullptr) {
        return;
    }
    group_post_backward(tree, group);
    // All gradients have come: autograd adds up those of a parameter before it hands them over, but
    // does so anew in a backward within this one.
    if (group->unit != nullptr && group->reduce_grads && group->backwards >= group->forwards &&
        torch::autograd::get_current_graph_task_id() == tree->graph_task &&
        group->unit->finish_step()) {
        tree->n_finished++;
        group->finished_in = tree->backward;
        group->training = static_cast<int>(Training::idle);
        group->forwards = group->backwards = 0;
    }
}

void tree_end_backward(TreeObject *tree)
{
    log_event("FSDP::root_post_backward");
    Range range("FSDP::root_post_backward_callback");
    ContextObject *context = tree->context;
    const bool is_manual = context->ending == Ending::manual;
    tree->iteration_root = nullptr;
    or_fail(tree, [&] {
        if (!is_all_finished(tree)) {
            each_state(tree, [&](StateObject *state) { end_state(tree, state); });
        }
        tree->backward = new_backward();
        end_reductions(tree, !is_manual && context->is_last_backward);
        close_backward(tree);
    });
    context->callback_queued = false;
    if (!is_manual && context->is_last_backward) {
        context->ending = Ending::open;
    }
}

void tree_finalize_backward(TreeObject *tree)
{
    log_event("FSDP::finalize_backward");
    Range range("FSDP::finalize_backward");
    or_fail(tree, [&] {
        tree_begin_backward(tree);
        for (Py_ssize_t i = PyList_GET_SIZE(tree->states); i-- > 0;) {
            GroupObject *group =
                reinterpret_cast<StateObject *>(PyList_GET_ITEM(tree->states, i))->group;
            if (group == nullptr || group->unit == nullptr) {
                continue;
            }
            const bool has_sums =
                group->reduce_grads && group->all_reduce_grads && group->unit->has_partial_sums();
            if (group->post_backward_pending || has_sums) {
                reduce_group(tree, group, true);
            } else if (group->reshard_after_backward) {
                group->unit->reshard();
            }
            group->unit->drop_pending();
            group->training = static_cast<int>(Training::idle);
            group->backwards = 0;
        }
        end_reductions(tree, true);
        close_backward(tree);
    });
    tree->context->is_unfinalized = false;
}

void tree_reset(TreeObject *tree, bool drop_gradients)
{
    each_domain(tree, [](fc_domain *domain) {
        drop_ahead(domain);
        fc_domain_fail(domain);
        fc_exchange_reset(domain);
    });
    each_state(tree, [&](StateObject *state) {
        PySet_Clear(state->to_run);
        state->training = static_cast<int>(Training::idle);
        if (GroupObject *group = state->group; group != nullptr && group->unit != nullptr) {
            group->training = static_cast<int>(Training::idle);
            group->forwards = group->backwards = 0;
            group->defers_hooks = false;
            group->unit->end_awaiting();
            if (drop_gradients || !group->unit->has_own_memory()) {
                group->unit->reshard();
                group->unit->drop_pending();
            }
            fc_reduction_forget(group->unit->reduction());
            if (drop_gradients) {
                group->unit->drop_gradients();
                group->post_backward_pending = false;
            }
        }
    });
    ContextObject *context = tree->context;
    if (tree->streams != nullptr) {
        fc_schedule *schedule = tree->streams->schedule();
        check(drop_gradients ? fc_schedule_reset(schedule) : fc_schedule_end_forward(schedule));
    }
    if (drop_gradients) {
        context->ending = Ending::open;
        context->is_unfinalized = false;
    }
    tree->iteration_root = nullptr;
    tree->has_raised = false;
    context->callback_queued = context->is_failed = false;
}

} // namespace fc
