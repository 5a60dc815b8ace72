// The hooks of a module: what happens before and after forward, and before backward.

#include "bind/fsdp/events.h"
#include "bind/fsdp/state.h"
#include "bind/module.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fc {

bool in_autograd_backward()
{
    return torch::autograd::get_current_graph_task_id() != -1;
}

namespace {

// What autograd does on this thread; asked once for a hook, since each answer is the thread's own.
struct Autograd {
    const bool records = at::GradMode::is_enabled();
    const bool in_backward = in_autograd_backward();

    // A forward that a backward will come to, and not what that recomputes.
    bool is_first_forward() const { return records && !in_backward; }
};

bool has_units(const StateObject *state)
{
    return bound_from(state->group) != nullptr;
}

// An identity node costs more than all else of a small unit's step. It is needed where the unit has
// memory that should go at once, where the producer may be the graph's around a recomputation, and
// to refuse inputs that are changed in place.
bool may_end_at_producer(const StateObject *state, const Autograd &autograd)
{
    const auto has_memory = [](const GroupObject *group) {
        const Unit *unit = group->unit;
        return unit->device() != nullptr ? !fc_unsharding_is_resident(unit->unsharding())
                                         : !fc_domain_is_mapped(unit->domain());
    };
    return state->group->course.owns_input && !state->is_strict && !any_group(state, has_memory) &&
           !autograd.in_backward;
}

void register_post_backward(StateObject *state, Ref &args, Ref &kwargs)
{
    const Autograd autograd;
    if (!autograd.records) {
        return;
    }
    if (!autograd.in_backward) {
        each_group(state, [](GroupObject *group) { group->course.n_entered++; });
    }
    BorrowedTensors tensors;
    collect_grad_tensors(args.get(), tensors);
    const size_t n_args = tensors.list.size();
    if (PyDict_GET_SIZE(kwargs.get()) > 0) {
        collect_grad_tensors(kwargs.get(), tensors);
    }
    if (tensors.list.empty() || (tensors.list.size() == 1 && may_end_at_producer(state, autograd) &&
                                 end_at_producer(state, *tensors.list[0]))) {
        return;
    }
    const Tensors through_node = route_through_node(state, tensors);
    const at::TensorList routed = through_node;
    if (n_args > 0) {
        args = replace_grad_tensors(args.get(), routed.slice(0, n_args));
    }
    if (n_args < routed.size()) {
        kwargs = replace_grad_tensors(kwargs.get(), routed.slice(n_args));
    }
}

void register_pre_backward(StateObject *state, PyObject *output, const Autograd &autograd)
{
    if (!autograd.records) {
        return;
    }
    // Where a backward that begins inside of the unit finds no parameters, or runs code that looks
    // for them.
    const auto is_read_apart = [](const GroupObject *group) {
        return fc_unsharding_is_read_apart(group->unit->unsharding());
    };
    const bool may_begin_inside =
        has_units(state) && !autograd.in_backward &&
        (state->entry_checkpoints != process.n_checkpoints || any_group(state, is_read_apart));
    if (may_begin_inside) {
        each_group(state, [&](GroupObject *group) { // a member's, before the others'
            group->unit->begin_graph(reinterpret_cast<PyObject *>(state));
        });
    }
    BorrowedTensors tensors;
    collect_grad_tensors(output, tensors);
    hook_outputs(state, tensors);
    if (may_begin_inside) {
        hook_nodes_inside(state, tensors);
    }
    if (state->is_strict) {
        const auto is_view = [](const at::Tensor *tensor) { return tensor->is_view(); };
        for (auto n = std::count_if(tensors.list.begin(), tensors.list.end(), is_view); n > 0;
             n--) {
            ask_python(Call::warn_of_view, state);
        }
    }
}

bool is_trainable(const GroupObject *group)
{
    const std::vector<Param> &params = group->unit->params();
    return std::any_of(params.begin(), params.end(),
                       [](const Param &param) { return param.unsharded_tensor.requires_grad(); });
}

// An output without a tensor that a hook could be put on says nothing about the start of backward:
// then the unit keeps its parameters for it, and the gradients of those start its end. True if so.
// A grouped unit's hooks also run when forward raised, with None.
bool keep_for_hidden_output(StateObject *state, PyObject *output, const Autograd &autograd)
{
    GroupObject *group = state->group;
    if (!autograd.is_first_forward() || (output == Py_None && state->course.is_grouped)) {
        return false;
    }
    BorrowedTensors tensors;
    collect_grad_tensors(output, tensors);
    if (!tensors.list.empty() || is_transparent(output) || !any_group(state, is_trainable)) {
        return false;
    }
    if (!group->hides_outputs) {
        ask_python(Call::warn_of_hidden_output, state);
        hook_params(state);
        group->hides_outputs = true;
    }
    return true;
}

// A unit whose collectives, or methods, others see gathers ahead where torch's would: behind any
// unit of its root.
void ask_if_seen(const RootObject *root, GroupObject *group, Call call)
{
    const bool is_scheduled = group->unit->device() != nullptr; // which gathers ahead itself
    if (root->calls_methods || (fc_root_is_visible(&root->course) && !is_scheduled)) {
        ask_python(call, group);
    }
}

// After forward: give the parameters up unless they are to stay.
void group_post_forward(StateObject *state, GroupObject *group, bool is_needed,
                        const Autograd &autograd)
{
    log_event("FSDP::post_forward", group->unit);
    Range range("FSDP::post_forward", group->unit);
    DeviceUnit *device = group->unit->device();
    if (autograd.is_first_forward()) {
        group->unit->begin_graph(reinterpret_cast<PyObject *>(state));
        if (device != nullptr) {
            device->note_forward();
        }
    }
    const bool stays =
        group->post_forward_mesh_info == nullptr || group->post_forward_mesh_info == Py_None;
    const bool in_forward = group->course.training == FC_TRAINING_FORWARD && !autograd.in_backward;
    const bool is_passed = in_forward && autograd.records;
    if (in_forward && stays && !is_needed) {
        reshard_group(*group, [] {}); // a method of others' finds that it is to do nothing
    }
    check_raised(fc_root_leave_unit(&state->root->course, &group->course, autograd.in_backward,
                                    stays, is_needed));
    if (is_passed) {
        ask_if_seen(state->root, group, Call::note_forward);
    }
}

void units_post_forward(StateObject *state, Ref &output, bool is_needed, const Autograd &autograd)
{
    each_group(state, [&](GroupObject *group) {
        const auto arguments = [&] {
            return arguments_of_forward(state, checked(PyTuple_New(0)).get(), output.get());
        };
        Ref changed = through_method(group, Attribute::post_forward, arguments, [&] {
            group_post_forward(state, group, is_needed, autograd);
        });
        if (changed) {
            output = std::move(changed);
        }
    });
}

void group_pre_backward(RootObject *root, GroupObject *group)
{
    log_event("FSDP::pre_backward", group->unit);
    Range range("FSDP::pre_backward", group->unit);
    if (group->unit->has_replaced_shards()) { // the former ones would take their places again
        const char *const name = fc_unit_name(group->unit->shard_unit());
        ask_python(Call::refuse_orphan, to_python(name).get());
    }
    check_raised(fc_root_enter_backward(&root->course, &group->course));
    if (group->course.unshard_in_backward) {
        ask_if_seen(root, group, Call::prefetch_in_backward);
    }
}

// A grouped unit whose members did not all run ends with the root's forward; its backward hangs on
// the root's output.
void complete_partial_groups(RootObject *root, const StateObject *entered, Ref &output,
                             const Autograd &autograd)
{
    for (Py_ssize_t i = PyList_GET_SIZE(root->states); i-- > 0;) {
        auto *state = reinterpret_cast<StateObject *>(PyList_GET_ITEM(root->states, i));
        if (state == entered || PySet_GET_SIZE(state->to_run) == 0) {
            continue;
        }
        log_event("FSDP::force_complete_post_forward");
        units_post_forward(state, output, false, autograd);
        register_pre_backward(state, output.get(), autograd);
        (void)fc_training_move(&state->course.training, FC_TRAINING_LEFT);
        output = cast_output(state, output.get());
        check(PySet_Clear(state->to_run));
    }
}

// A backward that begins inside of a unit, in what a checkpoint recomputes, runs the unit again
// before any gradient comes to one.
bool is_recomputed_first(const StateObject *state)
{
    const auto was_entered = [](const GroupObject *group) { return group->course.n_entered > 0; };
    return any_group(state, was_entered) && in_autograd_backward() && at::GradMode::is_enabled() &&
           !root_in_backward(state->root);
}

void begin_forward(StateObject *state)
{
    fc_root_module *course = &state->course;
    if (root_was_left(state)) {
        root_reset(state->root, false);
    }
    const bool is_first = !course->is_grouped || course->training != FC_TRAINING_FORWARD;
    if (is_first && state->root->course.opener == nullptr) {
        root_pre_forward(state);
    }
    (void)fc_training_move(&course->training, FC_TRAINING_ENTERED);
    state->entry_checkpoints = process.n_checkpoints;
}

// Whether forward was not in the unit already.
bool group_pre_forward(const RootObject *root, GroupObject *group)
{
    log_event("FSDP::pre_forward", group->unit);
    Range range("FSDP::pre_forward", group->unit);
    const bool is_news = fc_training_move(&group->course.training, FC_TRAINING_ENTERED);
    unshard_group(*group);
    ask_if_seen(root, group, Call::prefetch_in_forward);
    return is_news;
}

void units_pre_forward(StateObject *state, Ref &args, Ref &kwargs)
{
    bool is_news = false;
    each_group(state, [&](GroupObject *group) {
        const auto arguments = [&] {
            return arguments_of_forward(state, args.get(), kwargs.get());
        };
        const Ref changed = through_method(group, Attribute::pre_forward, arguments, [&] {
            is_news = group_pre_forward(state->root, group) || is_news;
        });
        if (changed) {
            take_arguments(changed.get(), args, kwargs);
        }
    });
    // The calls that a module makes of itself are passed when the one around them is. What an
    // exception has left in forward is entered anew.
    if (has_units(state) && (is_news || !(state->course.is_grouped || is_running(state)))) {
        register_post_backward(state, args, kwargs);
    }
}

} // namespace

Ref state_pre_forward(StateObject *state, PyObject *given_args, PyObject *given_kwargs)
{
    if (process.n_awaited > 0) {
        ask_python(Call::refuse_unless_waited, state);
    }
    find_failed_backward(state->root);
    Ref args = Ref::borrow(given_args), kwargs = Ref::borrow(given_kwargs);
    if (is_recomputed_first(state)) {
        state_pre_backward(state);
    }
    if (training_of(state) == FC_TRAINING_PRE_BACKWARD && !state->root->context->course.is_failed) {
        // Recomputation: the pre-backward hook has gathered the parameters, or they are gathered
        // again. (After a failed backward the state is a leftover, and this a new forward.)
        each_group(state, [](GroupObject *group) { unshard_group(*group); });
        cast_inputs(state, args, kwargs);
    } else {
        begin_forward(state);
        cast_inputs(state, args, kwargs);
        // Nodes of casts are outside: backward comes to them after the unit's post-backward.
        state->entry_sequence = at::sequence_number::peek();
        units_pre_forward(state, args, kwargs); // set-up may have been repeated
        note_entered(state);
    }
    if (args.get() == given_args && kwargs.get() == given_kwargs) {
        return Ref::borrow(Py_None);
    }
    return checked(PyTuple_Pack(2, args.get(), kwargs.get()));
}

Ref state_post_forward(StateObject *state, PyObject *given_output)
{
    if (training_of(state) == FC_TRAINING_PRE_BACKWARD) {
        return cast_output(state, given_output);
    }
    Ref output = Ref::borrow(given_output);
    const Autograd autograd;
    if (has_units(state)) {
        const bool is_needed = keep_for_hidden_output(state, given_output, autograd);
        units_post_forward(state, output, is_needed, autograd);
    }
    register_pre_backward(state, output.get(), autograd);
    (void)fc_training_move(&state->course.training, FC_TRAINING_LEFT);
    RootObject *root = state->root;
    if (root->course.opener == &state->course) {
        complete_partial_groups(root, state, output, autograd);
        check_raised(fc_root_end_forward(&root->course, autograd.records));
    }
    return cast_output(state, output.get());
}

Ref state_pre_forward_member(StateObject *state, PyObject *args, PyObject *kwargs)
{
    if (state->course.is_grouped && PySet_GET_SIZE(state->to_run) == 0) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(state->modules); i++) {
            check(PySet_Add(state->to_run, PyTuple_GET_ITEM(state->modules, i)));
        }
    }
    return state_pre_forward(state, args, kwargs);
}

Ref state_post_forward_member(StateObject *state, PyObject *module, PyObject *output)
{
    if (state->course.is_grouped) {
        const int was_to_run = PySet_Discard(state->to_run, module);
        check(was_to_run);
        if (was_to_run == 0 || PySet_GET_SIZE(state->to_run) > 0) {
            if (state->course.training == FC_TRAINING_FORWARD) {
                // The others may never run, and the root need not return what this one computed.
                register_pre_backward(state, output, Autograd());
            }
            return cast_output(state, output);
        }
    }
    return state_post_forward(state, output);
}

void state_pre_backward(StateObject *state)
{
    RootObject *root = state->root;
    if (root == nullptr) {
        return;
    }
    bool is_news;
    check_raised(fc_root_reach(&root->course, &state->course, &is_news));
    if (!is_news) {
        return;
    }
    if (at::GradMode::is_enabled() &&
        fc_unsharding_is_read_apart(
            bound_from(state->group)->unit->unsharding())) { // create_graph=True
        ask_python(Call::tell_of_double_backward, state);
    }
    each_group(state, [&](GroupObject *group) {
        if (group->course.training == FC_TRAINING_PRE_BACKWARD) {
            return;
        }
        through_method(
            group, Attribute::pre_backward,
            [] { return checked(PyTuple_Pack(1, Py_True)); }, // it is a default
            [&] { group_pre_backward(root, group); });
    });
}

void state_on_arrival(StateObject *state)
{
    const RootObject *root = state->root;
    if (root == nullptr || !has_units(state)) {
        return;
    }
    if (root->context->course.is_failed) { // it is added to what the failed backward has left
        ask_python(Call::refuse_backward, bound_from(state->group));
    }
    // After the unit's post-backward it is the end of backward that looks for more.
    const auto is_before = [](const GroupObject *group) {
        return group->course.training != FC_TRAINING_POST_BACKWARD;
    };
    if (!root_in_backward(root) || any_group(state, is_before)) {
        state_pre_backward(state);
    }
}

} // namespace fc
