// A root for the engine: its lists, and what the course of a step asks of Python and tensors.
#include "bind/fsdp/root.h"

#include "bind/fsdp/events.h"
#include "bind/python/calls.h"
#include "bind/python/process.h"
#include "bind/python/raised.h"
#include "bind/tensor/tensors.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
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
    if (fc_domain_is_packed(unit->domain())) { // its collectives divide, as torch's do
        divisor = 1;
    }
    return {divisor, group->course.all_reduce_grads, group->course.defers_hooks};
}

namespace {

// ---- what the engine asks ----

GroupObject *as_group(void *owner)
{
    return static_cast<GroupObject *>(owner);
}

RootObject *as_root(void *owner)
{
    return static_cast<RootObject *>(owner);
}

template <typename Method> struct PartOf;
template <typename Function, typename Part> struct PartOf<Function Part::*> {
    using type = Part;
};

// A method of the unit, or of one of its parts.
template <auto Method> bool ask(void *owner)
{
    const typename PartOf<decltype(Method)>::type &part = *as_group(owner)->unit;
    return (part.*Method)();
}

template <auto Method> fc_status find(void *owner, bool *out)
{
    return kept([&] { *out = ask<Method>(owner); });
}

template <auto Method> fc_status run(void *owner)
{
    return kept([&] {
        typename PartOf<decltype(Method)>::type &part = *as_group(owner)->unit;
        (part.*Method)();
    });
}

fc_status reshard(void *owner, bool is_news)
{
    return kept([&] {
        Unit *unit = as_group(owner)->unit;
        const Range range(is_news ? "FSDP::post_backward_reshard" : nullptr, unit);
        unit->reshard();
    });
}

fc_status reshard_after_forward(void *owner, bool in_forward)
{
    return kept([&] {
        const GroupObject *group = as_group(owner);
        const DeviceUnit *device = group->unit->device();
        group->unit->reshard(in_forward && device != nullptr &&
                             device->keeps_slice(group->post_forward_mesh_info));
    });
}

// Of a unit whose module may be gone.
fc_status drop_ahead(void *owner)
{
    return kept([&] {
        if (Unit *unit = as_group(owner)->unit) {
            unit->drop_ahead();
        }
    });
}

fc_status note_passed(void *owner)
{
    return kept([&] { log_event("FSDP::post_backward", as_group(owner)->unit); });
}

fc_status accumulate(void *owner, bool is_news)
{
    return kept([&] {
        Unit *unit = as_group(owner)->unit;
        const Range range(is_news ? "FSDP::post_backward_accumulate" : nullptr, unit);
        unit->accumulate();
    });
}

fc_status submit(void *owner, bool with_unused)
{
    return kept([&] {
        const GroupObject *group = as_group(owner);
        group->unit->submit(with_unused, reduce_options(group));
    });
}

const fc_root_ops root_ops = {
    .is_in_backward = [](void *) { return in_autograd_backward(); },
    .await_end = [](void *root) { return kept([&] { queue_final_callback(as_root(root)); }); },
    .keeps_graph = [](void *) { return torch::autograd::get_current_graph_task_keep_graph(); },
    .begin = [](void *root) { return kept([&] { as_root(root)->streams->begin(); }); },
    .resume = [](void *root) { return kept([&] { as_root(root)->streams->resume(); }); },
    .forget_members = [](void *state) { PySet_Clear(as_state(state)->to_run); },
    .publishes = ask<&Unit::publishes>,
    .publish = run<&Unit::publish>,
    .is_intact = find<&Unit::is_intact>,
    .note_shards = run<&Unit::note_shards>,
    .is_stale = find<&Unit::is_stale>,
    .check_unwritten = run<&Unit::check_unwritten>,
    .unshard = run<&Unit::unshard>,
    .make_unavailable = run<&Unit::make_unavailable>,
    .reshard = reshard,
    .reshard_after_forward = reshard_after_forward,
    .is_kept_after_forward = ask<&Unit::is_kept_after_forward>,
    .end_forward = run<&Unit::end_forward>,
    .keep = run<&Unit::keep>,
    .is_unsharded = ask<&Unit::is_unsharded>,
    .has_own_memory = ask<&Unit::has_own_memory>,
    .drop_pending = run<&Unit::drop_pending>,
    .drop_ahead = drop_ahead,
    .await_gradients = [](void *group) { as_group(group)->unit->await_gradients(); },
    .end_awaiting = [](void *group) { return as_group(group)->unit->end_awaiting(); },
    .defer_upcasts =
        [](void *group, bool reduces) {
            return kept([&] { as_group(group)->unit->defer_upcasts(reduces); });
        },
    .end_deferral = run<&Unit::end_deferral>,
    .note_passed = note_passed,
    .accumulate = accumulate,
    .submit = submit,
    .has_accumulated = ask<&Unit::has_accumulated>,
    .has_all_gradients = ask<&Unit::has_all_gradients>,
    .is_settled = ask<&Unit::is_settled>,
    .end_graph = run<&Unit::end_graph>,
    .run_deferred_hooks = run<&Unit::run_deferred_hooks>,
    .drop_gradients = run<&Unit::drop_gradients>,
    .release_unused = run<&Unit::release_unused>,
};

// ---- forward ----

// Steps of all optimizers that hold shards of the root, and loads.
uint64_t count_updates(RootObject *root)
{
    if (root->updates == nullptr) {
        root->updates = new RootUpdates();
    }
    RootUpdates &known = *root->updates;
    if (known.version != process.n_changes) {
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
        known.version = process.n_changes;
    }
    uint64_t n = known.n_loads;
    for (const auto &[counter, before] : known.optimizers) {
        n += *counter - before;
    }
    return n;
}

bool take_shards(RootObject *root)
{
    bool is_intact;
    check_raised(fc_root_take_shards(&root->course, &is_intact));
    return is_intact;
}

// A shard that was replaced or moved since set-up is taken over before it is read.
void rebuild_if_changed(StateObject *state)
{
    if (!take_shards(state->root)) {
        ask_python(Call::rebuild_units, state);
        take_shards(state->root); // it may be a new one
    }
}

// set_post_optim_event counts for one forward. On a device the current stream waits for it, and
// all that reads shards comes behind that.
void take_post_optim_event(StateObject *state)
{
    PyObject *const event_name = name_of(Attribute::post_optim_event);
    Ref context = checked(
        PyObject_GetAttr(reinterpret_cast<PyObject *>(state), name_of(Attribute::state_context)));
    Ref event = checked(PyObject_GetAttr(context.get(), event_name));
    if (event.get() != Py_None) {
        if (state->root->streams != nullptr) {
            checked(PyObject_CallMethodNoArgs(event.get(), name_of(Attribute::wait)));
        }
        check(PyObject_SetAttr(context.get(), event_name, Py_None));
    }
}

void warn_if_unfinalized(ContextObject *context)
{
    if (context->course.is_unfinalized && !context->has_warned) {
        context->has_warned = true;
        check(PyErr_WarnEx(PyExc_UserWarning,
                           "backward was left to finalize_backward(), which was not called before "
                           "this forward: gradients of some FSDP units are not reduced yet, and an "
                           "optimizer step in between has not used them",
                           1));
    }
}

} // namespace

void root_init(RootObject *root, const std::vector<fc_domain *> &domains)
{
    std::vector<fc_root_module *> modules;
    each_state(root, [&](StateObject *state) { modules.push_back(&state->course); });
    root->course.owner = root;
    root->course.ops = &root_ops;
    root->course.context = &root->context->course;
    root->course.schedule = root->streams != nullptr ? root->streams->schedule() : nullptr;
    check(fc_root_init(&root->course, domains.data(), domains.size(), modules.data(),
                       modules.size()));
}

void root_pre_forward(StateObject *state)
{
    RootObject *root = state->root;
    if (root->context->course.is_failed) {
        ask_python(Call::warn_of_failed_backward, state);
        root_reset(root, true);
    }
    if (root_in_backward(root)) {
        root->course.opener = &state->course; // recomputation: the backward's phase covers it
        return;
    }
    warn_if_unfinalized(root->context);
    log_look_up_level();
    log_event("FSDP::root_pre_forward");
    Range range("FSDP::root_pre_forward");
    take_post_optim_event(state);
    rebuild_if_changed(state);
    root = state->root;
    check_raised(fc_root_open_forward(&root->course, &state->course, at::GradMode::is_enabled(),
                                      count_updates(root)));
}

void state_post_backward(StateObject *state)
{
    RootObject *root = state->root;
    GroupObject *group = state->group;
    if (root == nullptr || group == nullptr) {
        return;
    }
    check_raised(fc_root_pass(&root->course, &group->course));
    // All gradients have come: autograd adds up those of a parameter before it hands them over, but
    // does so anew in a backward within this one.
    if (torch::autograd::get_current_graph_task_id() == root->graph_task) {
        fc_root_finish(&root->course, &group->course);
    }
}

void root_end_backward(RootObject *root)
{
    log_event("FSDP::root_post_backward");
    Range range("FSDP::root_post_backward_callback");
    check_raised(fc_root_end_backward(&root->course));
}

void root_finalize_backward(RootObject *root)
{
    log_event("FSDP::finalize_backward");
    Range range("FSDP::finalize_backward");
    check_raised(fc_root_finalize_backward(&root->course));
}

void root_reset(RootObject *root, bool drops_gradients)
{
    check_raised(fc_root_reset(&root->course, drops_gradients));
}

} // namespace fc
