// A root for the engine: its lists, and what the course of a step asks of Python and tensors.

#include "bind/fsdp/events.h"
#include "bind/fsdp/state.h"
#include "bind/python/fields.h"

#include <torch/csrc/autograd/graph_task.h>

namespace fc {

fc_reduce_options reduce_options(GroupObject &group)
{
    PyObject *const given = group.gradient_divide_factor;
    const bool is_given = given != nullptr && given != Py_None;
    const double factor = is_given ? real_from(given) : 0;
    if (is_given && factor == 0) {
        ask_python(Call::refuse_zero_divisor, &group);
    }
    return fc_root_unit_options(&group.course, factor);
}

namespace {

// ---- what the engine asks ----

RootObject &root_in(void *owner)
{
    return *static_cast<RootObject *>(owner);
}

Unit &unit_in(void *owner)
{
    return *as_group(owner).unit;
}

fc_unsharding *unsharding_in(void *owner)
{
    return unit_in(owner).unsharding();
}

template <auto call> constexpr Operation<root_in, call> of_root;
template <auto call> constexpr Operation<as_group, call> of_group;
template <auto call> constexpr Operation<unit_in, call> of_unit;
template <auto call> constexpr Operation<unsharding_in, call> of_unsharding;

void reshard(GroupObject &group, bool is_news)
{
    const Range range(is_news ? "FSDP::post_backward_reshard" : nullptr, group.unit);
    reshard_group(group, [&] { group.unit->reshard(); });
}

void reshard_after_forward(GroupObject &group, bool in_forward)
{
    const bool leaves_slices =
        in_forward && group.unit->leaves_slices(group.post_forward_mesh_info);
    reshard_group(group, [&] { group.unit->reshard(leaves_slices); });
}

void accumulate(Unit &unit, bool is_news)
{
    const Range range(is_news ? "FSDP::post_backward_accumulate" : nullptr, &unit);
    unit.accumulate();
}

void submit(GroupObject &group, bool with_unused)
{
    group.unit->submit(with_unused, reduce_options(group));
}

const fc_root_ops root_ops = {
    .is_in_backward = [](void *) { return in_autograd_backward(); },
    .await_end = of_root<[](RootObject &root) { queue_final_callback(&root); }>,
    .keeps_graph = [](void *) { return torch::autograd::get_current_graph_task_keep_graph(); },
    .begin = of_root<[](RootObject &root) { root.streams->begin(); }>,
    .resume = of_root<[](RootObject &root) { root.streams->resume(); }>,
    .forget_members = [](void *state) { PySet_Clear(as_state(state)->to_run); },
    .publishes = of_unsharding<fc_unsharding_publishes>,
    .publish = of_unsharding<fc_unsharding_publish>,
    .is_intact = of_unit<&Unit::is_intact>,
    .note_shards = of_unsharding<fc_unsharding_note_shards>,
    .is_stale = of_unsharding<fc_unsharding_is_stale>,
    .check_unwritten = of_unsharding<fc_unsharding_check_unwritten>,
    .unshard = of_group<unshard_group>,
    .make_unavailable = of_unsharding<fc_unsharding_withhold>,
    .reshard = of_group<reshard>,
    .reshard_after_forward = of_group<reshard_after_forward>,
    .is_kept_after_forward = of_unsharding<fc_unsharding_stays_unsharded>,
    .end_forward = of_unsharding<fc_unsharding_end_forward>,
    .keep = of_unsharding<fc_unsharding_keep>,
    .is_unsharded = of_unit<&Unit::is_unsharded>,
    .has_own_memory = of_unsharding<fc_unsharding_has_own_memory>,
    .drop_pending = of_unsharding<fc_unsharding_drop>,
    .drop_ahead = of_unsharding<fc_unsharding_drop_ahead>,
    .await_gradients = of_unit<&Unit::await_gradients>,
    .end_awaiting = of_unit<&Unit::end_awaiting>,
    .defer_upcasts = of_unit<&Unit::defer_upcasts>,
    .end_deferral = of_unit<&Unit::end_deferral>,
    .note_passed = of_unit<[](Unit &unit) { log_event("FSDP::post_backward", &unit); }>,
    .accumulate = of_unit<accumulate>,
    .submit = of_group<submit>,
    .has_accumulated = of_unit<&Unit::has_accumulated>,
    .has_held = of_unit<&Unit::has_held>,
    .has_all_gradients = of_unit<&Unit::has_all_gradients>,
    .is_settled = of_unit<&Unit::is_settled>,
    .end_graph = of_unit<&Unit::end_graph>,
    .run_deferred_hooks = of_unit<&Unit::run_deferred_hooks>,
    .drop_gradients = of_unit<&Unit::drop_gradients>,
    .release_unused = of_unit<&Unit::release_unused>,
};

// ---- forward ----

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
        ask_python(Call::warn_of_unfinalized);
    }
}

// ---- backward ----

// Of the group alone.
void pass_group(RootObject *root, GroupObject *group)
{
    check_raised(fc_root_pass(&root->course, &group->course));
    // All gradients have come: autograd adds up those of a parameter before it hands them over, but
    // does so anew in a backward within this one.
    if (torch::autograd::get_current_graph_task_id() == root->graph_task) {
        fc_root_finish(&root->course, &group->course);
    }
}

void call_post_backward(RootObject *root, GroupObject *group)
{
    through_method(
        group, Attribute::post_backward, [] { return checked(PyTuple_New(0)); },
        [=] { pass_group(root, group); });
}

// They end the other way round.
template <typename Body> void each_group_backwards(GroupObject *group, Body &&body)
{
    if (GroupObject *first = bound_from(group)) {
        each_group_backwards(next_group(first), body);
        body(first);
    }
}

// The end passes what has not been passed: for torch's users, by the groups' methods.
void pass_rest(RootObject *root)
{
    each_state(root, [&](const StateObject *state) {
        each_group_backwards(state->group, [&](GroupObject *group) {
            if (group->calls_methods && group->course.training != FC_TRAINING_POST_BACKWARD &&
                group->course.finished_in != root->course.backward) {
                call_post_backward(root, group);
            }
        });
    });
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
                                      process.n_changes));
}

void state_post_backward(StateObject *state)
{
    if (RootObject *root = state->root) {
        each_group_backwards(state->group,
                             [=](GroupObject *group) { call_post_backward(root, group); });
    }
}

void root_end_backward(RootObject *root)
{
    log_event("FSDP::root_post_backward");
    Range range("FSDP::root_post_backward_callback");
    if (root->context->course.ending != FC_ENDING_MANUAL) {
        pass_rest(root);
    }
    check_raised(fc_root_end_backward(&root->course));
    if (root->streams != nullptr) { // backward() may have been called in another than the forward
        root->streams->show_caller();
    }
}

} // namespace fc
