// The course of a step: opening and closing phases, post-backward, the end of backward, recovery.
#include "bind/fsdp/root.h"

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
    if (fc_domain_is_packed(unit->domain())) { // its collectives divide, as torch's do
        return {1, group->all_reduce_grads != 0, group->defers_hooks != 0};
    }
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
template <typename Body> void or_fail(RootObject *root, Body &&body)
{
    try {
        body();
    } catch (...) {
        root_fail(root);
        throw;
    }
}

template <typename Body> void each_unit(const RootObject *root, Body &&body)
{
    each_state(root, [&](StateObject *state) {
        if (state->group != nullptr && state->group->unit != nullptr) {
            body(state->group->unit);
        }
    });
}

// Steps of all optimizers that hold shards of the root, and loads.
uint64_t count_updates(RootObject *root)
{
    if (root->updates == nullptr) {
        root->updates = new RootUpdates();
    }
    RootUpdates &known = *root->updates;
    if (known.version != Updates::version()) {
        known = {};
        each_state(root, [&](const StateObject *state) {
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
bool check_shards(RootObject *root)
{
    bool is_intact = true;
    root->publishes = root->has_grouped = false;
    root->n_units = 0;
    each_state(root, [&](const StateObject *state) {
        root->has_grouped = root->has_grouped || is_grouped(state);
        Unit *unit = state->group != nullptr ? state->group->unit : nullptr;
        if (unit != nullptr) {
            root->n_units++;
            root->publishes = root->publishes || unit->publishes();
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
    if (!check_shards(state->root)) {
        checked(
            PyObject_CallMethod(reinterpret_cast<PyObject *>(state), "_rebuild_units", nullptr));
        check_shards(state->root); // it may be a new one
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

// The root's place for `state`, by which ranks compare who began a phase.
uint32_t place_of(const RootObject *root, const StateObject *state)
{
    const Py_ssize_t n = PyList_GET_SIZE(root->states);
    Py_ssize_t i = 0;
    while (i < n && reinterpret_cast<StateObject *>(PyList_GET_ITEM(root->states, i)) != state) {
        i++;
    }
    return static_cast<uint32_t>(i);
}

void open(RootObject *root, fc_opening opening)
{
    each_domain(root, [&](fc_domain *domain) {
        drop_ahead(domain);
        fc_domain_open(domain, opening);
    });
}

void close(RootObject *root)
{
    each_domain(root, [](fc_domain *domain) { fc_domain_mark_closed(domain); });
    each_domain(root, [](fc_domain *domain) { check(fc_domain_close(domain)); });
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
        if (state->root->streams != nullptr) {
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
void reduce_group(RootObject *root, GroupObject *group, bool at_end)
{
    constexpr int through = static_cast<int>(Training::post_backward);
    const bool is_news = !at_end || group->training != through;
    group->training = through;
    Unit *unit = group->unit;
    if (unit == nullptr) {
        return;
    }
    or_fail(root, [&] {
        root_begin_backward(root);
        if (!root->context->callback_queued && torch::autograd::get_current_graph_task_id() != -1) {
            queue_final_callback(root);
        }
        if (is_news) {
            log_event("FSDP::post_backward", unit);
        }
        group->backwards++;
        const bool was_reached = unit->end_awaiting();
        // A module that ran several times may be read again by peers in this phase: an optimizer in
        // one of its post-accumulate hooks must not write its shards before the end.
        if (group->forwards > 1) {
            group->defers_hooks = root->defers_hooks = true;
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
void end_reductions(RootObject *root, bool is_last)
{
    if (root->streams != nullptr) {
        check(fc_schedule_end_backward(root->streams->schedule(), is_last));
    }
}

// Whether a group whose post-backward has run has something left for the end of backward.
bool is_late(const GroupObject *group)
{
    return group->backwards < group->forwards || group->unit->has_accumulated() ||
           (group->unit->is_unsharded() && group->reshard_after_backward);
}

// Whether the end of backward would find nothing to do in any state.
bool is_all_finished(const RootObject *root)
{
    return root->n_units > 0 && root->n_finished == root->n_units && !root->has_grouped &&
           root->n_reused == Unit::n_reused() && root->context->ending == Ending::automatic;
}

// What the end of backward has to do in a state.
void end_state(RootObject *root, StateObject *state)
{
    ContextObject *context = root->context;
    const bool is_manual = context->ending == Ending::manual;
    PySet_Clear(state->to_run);
    GroupObject *group = state->group;
    if (group != nullptr && group->unit != nullptr) {
        // Inputs that need no gradient have no node, and what is not reduced by now is
        // reduced here; or by finalize_backward().
        const bool is_through = group->training == static_cast<int>(Training::post_backward) ||
                                group->finished_in == root->backward;
        if (is_manual && !is_through && group->reduce_grads) {
            group->post_backward_pending = true;
            context->is_unfinalized = true;
        } else if (!is_through || is_late(group)) {
            reduce_group(root, group, true);
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
void close_backward(RootObject *root)
{
    std::vector<fc_domain *> domains;
    each_domain(root, [&](fc_domain *domain) { domains.push_back(domain); });
    check_raised(fc_reduction_finish_all(domains.data(), domains.size()));
    each_domain(root, [](fc_domain *domain) {
        drop_ahead(domain);
        check(fc_domain_close(domain));
    });
    if (std::exchange(root->defers_hooks, false)) {
        each_state(root, [](StateObject *state) {
            if (state->group != nullptr && state->group->unit != nullptr) {
                state->group->defers_hooks = false;
                state->group->unit->run_deferred_hooks();
            }
        });
    }
}

} // namespace

void root_fail(RootObject *root)
{
    root->context->callback_queued = false;
    root->context->is_failed = true;
    each_domain(root, [](fc_domain *domain) { fc_domain_fail(domain); });
}

void root_note_raised(StateObject *state)
{
    RootObject *root = state->root;
    if (root != nullptr && root->iteration_root == state && !root_in_backward(root)) {
        root->has_raised = true;
    }
}

void root_pre_forward(StateObject *state)
{
    RootObject *root = state->root;
    if (root->context->is_failed) {
        checked(PyObject_CallMethod(reinterpret_cast<PyObject *>(state), "_warn_of_failed_backward",
                                    nullptr));
        root_reset(root, true);
    }
    if (root_in_backward(root)) {
        root->iteration_root = state; // recomputation: the backward's phase covers it
        return;
    }
    warn_if_unfinalized(root->context);
    log_look_up_level();
    log_event("FSDP::root_pre_forward");
    Range range("FSDP::root_pre_forward");
    take_post_optim_event(state);
    rebuild_if_changed(state);
    root = state->root;
    if (root->publishes) {
        each_unit(root, [](Unit *unit) { unit->publish(); });
    }
    open(root, {at::GradMode::is_enabled() ? FC_PHASE_FORWARD : FC_PHASE_FORWARD_NO_GRAD,
                place_of(root, state), count_updates(root)});
    if (root->streams != nullptr) {
        each_unit(root, [](Unit *unit) { unit->release_unused(); });
        root->streams->begin();
    }
    root->iteration_root = state;
    root->has_raised = false;
}

void root_post_forward(RootObject *root)
{
    root->iteration_root = nullptr;
    if (!root_in_backward(root) && root_is_open(root)) {
        or_fail(root, [&] {
            each_unit(root, [](Unit *unit) {
                unit->check_unwritten();
                if (unit->is_kept_after_forward()) {
                    unit->keep();
                }
            });
            close(root);
        });
        if (root->streams != nullptr && !at::GradMode::is_enabled()) {
            check(fc_schedule_end_forward(root->streams->schedule()));
        }
    }
}

void root_begin_backward(RootObject *root)
{
    if (root_in_backward(root)) {
        return;
    }
    or_fail(root, [&] {
        if (root_is_open(root)) {
            close(root);
        }
        if (root->publishes) {
            each_unit(root, [](Unit *unit) {
                if (unit->publishes() && unit->was_written()) {
                    unit->publish();
                    unit->note_shards();
                }
            });
        }
    });
    if (root->streams != nullptr) {
        root->streams->resume();
        each_unit(root, [](Unit *unit) { unit->release_unused(); });
    }
    open(root, {FC_PHASE_BACKWARD, 0, FC_UPDATES_UNKNOWN});
    root->n_finished = 0;
    root->n_reused = Unit::n_reused();
}

bool root_is_between_steps(const RootObject *root)
{
    bool is_free = root->iteration_root == nullptr && !root_in_backward(root);
    each_state(root, [&](const StateObject *state) {
        const GroupObject *group = state->group;
        is_free = is_free && (group == nullptr || group->unit == nullptr ||
                              (group->forwards == 0 && !group->unit->has_accumulated()));
    });
    return is_free;
}

void group_post_backward(RootObject *root, GroupObject *group)
{
    reduce_group(root, group, false);
    if (group->unit != nullptr) {
        fc_reduction_return_large(group->unit->domain());
    }
}

void state_post_backward(StateObject *state)
{
    RootObject *root = state->root;
    GroupObject *group = state->group;
    if (root == nullptr || group == nullptr) {
        return;
    }
    group_post_backward(root, group);
    // All gradients have come: autograd adds up those of a parameter before it hands them over, but
    // does so anew in a backward within this one.
    if (group->unit != nullptr && group->reduce_grads && group->backwards >= group->forwards &&
        torch::autograd::get_current_graph_task_id() == root->graph_task &&
        group->unit->finish_step()) {
        root->n_finished++;
        group->finished_in = root->backward;
        group->training = static_cast<int>(Training::idle);
        group->forwards = group->backwards = 0;
    }
}

void root_end_backward(RootObject *root)
{
    log_event("FSDP::root_post_backward");
    Range range("FSDP::root_post_backward_callback");
    ContextObject *context = root->context;
    const bool is_manual = context->ending == Ending::manual;
    root->iteration_root = nullptr;
    or_fail(root, [&] {
        if (!is_all_finished(root)) {
            each_state(root, [&](StateObject *state) { end_state(root, state); });
        }
        root->backward = new_backward();
        end_reductions(root, !is_manual && context->is_last_backward);
        close_backward(root);
    });
    context->callback_queued = false;
    if (!is_manual && context->is_last_backward) {
        context->ending = Ending::open;
    }
}

void root_finalize_backward(RootObject *root)
{
    log_event("FSDP::finalize_backward");
    Range range("FSDP::finalize_backward");
    or_fail(root, [&] {
        root_begin_backward(root);
        for (Py_ssize_t i = PyList_GET_SIZE(root->states); i-- > 0;) {
            GroupObject *group =
                reinterpret_cast<StateObject *>(PyList_GET_ITEM(root->states, i))->group;
            if (group == nullptr || group->unit == nullptr) {
                continue;
            }
            const bool has_sums =
                group->reduce_grads && group->all_reduce_grads && group->unit->has_partial_sums();
            if (group->post_backward_pending || has_sums) {
                reduce_group(root, group, true);
            } else if (group->reshard_after_backward) {
                group->unit->reshard();
            }
            group->unit->drop_pending();
            group->training = static_cast<int>(Training::idle);
            group->backwards = 0;
        }
        end_reductions(root, true);
        close_backward(root);
    });
    root->context->is_unfinalized = false;
}

void root_reset(RootObject *root, bool drop_gradients)
{
    each_domain(root, [](fc_domain *domain) {
        drop_ahead(domain);
        fc_domain_fail(domain);
        fc_exchange_reset(domain);
    });
    each_state(root, [&](StateObject *state) {
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
    ContextObject *context = root->context;
    if (root->streams != nullptr) {
        fc_schedule *schedule = root->streams->schedule();
        check(drop_gradients ? fc_schedule_reset(schedule) : fc_schedule_end_forward(schedule));
    }
    if (drop_gradients) {
        context->ending = Ending::open;
        context->is_unfinalized = false;
    }
    root->iteration_root = nullptr;
    root->has_raised = false;
    context->callback_queued = context->is_failed = false;
}

} // namespace fc
