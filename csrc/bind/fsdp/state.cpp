// The Python type State: fields, lifetime, methods. What it does is in hooks.cpp.
#include "bind/fsdp/state.h"

#include "bind/fsdp/events.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/python/untraced.h"

#include <structmember.h>
#include <torch/csrc/Dtype.h>

namespace fc {

fc_training training_from(PyObject *value)
{
    const long index = value != nullptr ? PyLong_AsLong(value) : -1;
    if (index < 0 || index >= FC_TRAINING_COUNT) {
        raise_error(PyExc_ValueError, "expected the index of a TrainingState");
    }
    return static_cast<fc_training>(index);
}

void StateObject::open()
{
    course.owner = this;
    course.training = FC_TRAINING_IDLE;
    param_dtype = output_dtype = at::ScalarType::Undefined;
}

int StateObject::traverse(visitproc visit, void *arg) const
{
    Py_VISIT(reinterpret_cast<PyObject *>(root));
    Py_VISIT(groups);
    Py_VISIT(modules);
    Py_VISIT(to_run);
    return 0;
}

void StateObject::clear()
{
    course.unit = nullptr;
    Py_CLEAR(root);
    group = nullptr;
    Py_CLEAR(groups);
    Py_CLEAR(modules);
    Py_CLEAR(to_run);
}

namespace {

// Each a dtype or None.
void state_set_casts(StateObject &state, Fields &given)
{
    const auto type_in = [&](const char *name) {
        const Ref dtype = given.object(name);
        return THPDtype_Check(dtype.get()) ? reinterpret_cast<THPDtype *>(dtype.get())->scalar_type
                                           : at::ScalarType::Undefined;
    };
    state.casts_inputs = given.flag("cast_inputs");
    state.param_dtype = type_in("param_dtype");
    state.output_dtype = type_in("output_dtype");
    given.end();
}

// Root, or None, and a tuple of groups: their order is that of the state's forward.
void state_join(StateObject &state, Fields &given)
{
    const Ref root = given.object("root");
    Ref groups = given.object("groups");
    given.end();
    RootObject *new_root = root.get() == Py_None ? nullptr : &owned_by<RootObject>(root.get());
    GroupObject *first = nullptr;
    for (Py_ssize_t i = PyTuple_GET_SIZE(groups.get()); i-- > 0;) {
        GroupObject *group = &owned_by<GroupObject>(PyTuple_GET_ITEM(groups.get(), i));
        group->course.next = first != nullptr ? &first->course : nullptr;
        first = group;
    }
    Py_XINCREF(reinterpret_cast<PyObject *>(new_root));
    Py_XSETREF(state.root, new_root);
    state.group = first;
    Py_XSETREF(state.groups, groups.release());
    fc_root_module_join(&state.course, first != nullptr ? &first->course : nullptr,
                        state.modules != nullptr && PyTuple_GET_SIZE(state.modules) > 1);
}

// Roots are made where no mode is seen. The state may have got another one, or none any more.
void note_modes(StateObject *state)
{
    if (state->root != nullptr) {
        state->root->has_modes = has_dispatch_modes();
    }
}

// Somebody has put in what the core has to look at. Between two steps only.
void look_around(StateObject *state)
{
    RootObject *root = state->root;
    const bool is_asked = root->looks_around || root->calls_methods || functions_replaced() ||
                          has_dispatch_modes() != root->has_modes;
    if (!is_asked) {
        return;
    }
    if (root_was_left(state)) {
        root_reset(root, false);
    }
    if (root->course.opener == nullptr && fc_root_is_between_steps(&root->course)) {
        root->looks_around = false;
        ask_python(Call::look_around, state);
        note_modes(state);
    }
}

// Before a forward. False: the state was handed over to torch's.
bool is_ours(StateObject *state)
{
    if (state->root == nullptr) {
        ask_python(Call::join_root, state);
        note_modes(state);
    } else if (state->root->course.opener == nullptr ||
               state->course.training != FC_TRAINING_IDLE) {
        look_around(state);
    }
    return state->root != nullptr;
}

// (args, kwargs) -> (args, kwargs); a whole pass, whatever the members of a grouped unit do
PyObject *state_enter(PyObject *self, PyObject *const *a, Py_ssize_t n)
{
    return guarded([&]() -> PyObject * {
        check_arguments(n, 2);
        Ref changed = state_pre_forward(as<StateObject>(self), a[0], a[1]);
        return changed.get() == Py_None ? PyTuple_Pack(2, a[0], a[1]) : changed.release();
    });
}

PyMemberDef state_members[] = {
    {"_root", T_OBJECT, offsetof(StateObject, root), READONLY, nullptr},
    {"_is_compiled", T_BOOL, offsetof(StateObject, is_compiled), 0, nullptr},
    {"_is_strict", T_BOOL, offsetof(StateObject, is_strict), 0, nullptr},
    {"_fills_in_gradients", T_BOOL, offsetof(StateObject, fills_in_gradients), 0, nullptr},
    {"_modules", T_OBJECT_EX, offsetof(StateObject, modules), 0, nullptr},
    {"_modules_to_run_forward", T_OBJECT_EX, offsetof(StateObject, to_run), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

void state_set_training(StateObject &state, PyObject *value)
{
    state.course.backward = state.root != nullptr ? state.root->course.backward : 0;
    state.course.training = training_from(value);
}

PyGetSetDef state_properties[] = {
    property<[](StateObject &state) { return training_of(&state); }, state_set_training>(
        "_training"),
    {}};

PyMethodDef state_methods[] = {
    method<state_set_casts>("_set_casts"),
    method<state_join>("_join"),
    {"_hook_pre_forward", fastcall(state_hook_pre_forward), METH_FASTCALL, nullptr},
    {"_hook_post_forward", fastcall(state_hook_post_forward), METH_FASTCALL, nullptr},
    method<[](StateObject &state) { return is_ours(&state); }>("_takes_core"),
    {"_enter", fastcall(state_enter), METH_FASTCALL, nullptr},
    method<[](StateObject &state, PyObject *output) { return state_post_forward(&state, output); }>(
        "_leave"),
    method<[](StateObject &state) { state_pre_backward(&state); }>("_core_pre_backward"),
    {}};

// Python's cast for containers that pytree.cpp does not open.
Ref cast_any(StateObject *state, Call cast)
{
    return checked(PyMethod_New(function_of(cast), reinterpret_cast<PyObject *>(state)));
}

} // namespace

void cast_inputs(StateObject *state, Ref &args, Ref &kwargs)
{
    if (!state->casts_inputs || state->param_dtype == at::ScalarType::Undefined) {
        return;
    }
    Range range("FSDP::cast_forward_inputs");
    const Ref any = cast_any(state, Call::cast_any_input);
    for (Ref *object : {&args, &kwargs}) {
        if (Ref cast = cast_tensors(object->get(), state->param_dtype, any.get())) {
            *object = std::move(cast);
        }
    }
}

Ref cast_output(StateObject *state, PyObject *output)
{
    if (state->output_dtype == at::ScalarType::Undefined) {
        return Ref::borrow(output);
    }
    Range range("FSDP::cast_forward_outputs");
    const Ref any = cast_any(state, Call::cast_any_output);
    Ref cast = cast_tensors(output, state->output_dtype, any.get());
    return cast ? std::move(cast) : Ref::borrow(output);
}

namespace {

// torch.compile reads the numbers inside of a collective's output, past the node that takes its
// gradient: that one is lost, or backward fails. Which outputs are waited for there anyway.
bool has_async_gradient(PyObject *args, PyObject *kwargs)
{
    if (!at::GradMode::is_enabled()) {
        return false;
    }
    BorrowedTensors tensors;
    collect_grad_tensors(args, tensors);
    collect_grad_tensors(kwargs, tensors);
    return std::any_of(tensors.list.begin(), tensors.list.end(), [](const at::Tensor *tensor) {
        if (!tensor->key_set().has(at::DispatchKey::Python)) {
            return false;
        }
        static PyObject *const async = look_up(Import::async_tensor).release();
        const Ref object = checked(THPVariable_Wrap(*tensor));
        return reinterpret_cast<PyObject *>(Py_TYPE(object.get())) == async;
    });
}

} // namespace

PyObject *state_hook_pre_forward(PyObject *self, PyObject *const *a, Py_ssize_t n)
{
    return guarded([&]() -> PyObject * {
        check_arguments(n, 3);
        const Untraced untraced;
        if (!is_ours(as<StateObject>(self))) {
            return ask_python(Call::torchs_pre_forward, self, a[0], a[1], a[2]).release();
        }
        auto *state = as<StateObject>(self);
        if ((state->is_compiled || untraced.is_in_compiled()) && has_async_gradient(a[1], a[2])) {
            const Ref waited = ask_python(Call::wait_for_inputs, self, a[1], a[2]);
            PyObject *args = PyTuple_GET_ITEM(waited.get(), 0);
            PyObject *kwargs = PyTuple_GET_ITEM(waited.get(), 1);
            Ref changed = state_pre_forward_member(state, args, kwargs);
            return changed.get() == Py_None ? PyTuple_Pack(2, args, kwargs) : changed.release();
        }
        return state_pre_forward_member(state, a[1], a[2]).release();
    });
}

PyObject *state_hook_post_forward(PyObject *self, PyObject *const *a, Py_ssize_t n)
{
    return guarded([&]() -> PyObject * {
        check_arguments(n, 3);
        const Untraced untraced;
        if (as<StateObject>(self)->root == nullptr) {
            return ask_python(Call::torchs_post_forward, self, a[0], a[1], a[2]).release();
        }
        return state_post_forward_member(as<StateObject>(self), a[0], a[2]).release();
    });
}

int register_state(PyObject *module)
{
    return add_type<StateObject>(module, {.name = "fsdp_c._C.State",
                                          .methods = state_methods,
                                          .properties = state_properties,
                                          .members = state_members,
                                          .flags = Py_TPFLAGS_BASETYPE});
}

} // namespace fc
