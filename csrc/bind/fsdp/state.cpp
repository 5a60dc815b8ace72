// The Python type State: fields, lifetime, methods. What it does is in hooks.cpp.
#include "bind/fsdp/root.h"

#include "bind/python/calls.h"
#include "bind/python/objects.h"
#include "bind/python/replaced_functions.h"
#include "bind/python/untraced.h"
#include "bind/tensor/tensors.h"

#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fc {

namespace {

PyTypeObject *state_type = nullptr;

} // namespace

StateObject *state_of(PyObject *object)
{
    if (!PyObject_TypeCheck(object, state_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a State");
        throw_python();
    }
    return as<StateObject>(object);
}

int parse_training(PyObject *value, fc_training *out)
{
    const long index = value != nullptr ? PyLong_AsLong(value) : -1;
    if (index < 0 || index >= FC_TRAINING_COUNT) {
        PyErr_SetString(PyExc_ValueError, "expected the index of a TrainingState");
        return -1;
    }
    *out = static_cast<fc_training>(index);
    return 0;
}

namespace {

PyObject *state_new(PyTypeObject *type, PyObject *, PyObject *)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self == nullptr) {
        return nullptr;
    }
    auto *state = as<StateObject>(self);
    state->course.owner = self;
    state->course.training = FC_TRAINING_IDLE;
    state->param_dtype = state->output_dtype = at::ScalarType::Undefined;
    return self;
}

int state_traverse(PyObject *self, visitproc visit, void *arg)
{
    auto *state = as<StateObject>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<PyObject *>(state->root));
    Py_VISIT(state->groups);
    Py_VISIT(state->modules);
    Py_VISIT(state->to_run);
    return 0;
}

int state_clear(PyObject *self)
{
    auto *state = as<StateObject>(self);
    state->course.unit = nullptr;
    Py_CLEAR(state->root);
    state->group = nullptr;
    Py_CLEAR(state->groups);
    Py_CLEAR(state->modules);
    Py_CLEAR(state->to_run);
    return 0;
}

void state_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    state_clear(self);
    free_object(self);
}

// Each a dtype or None.
void state_set_casts(StateObject &state, PyObject *args, PyObject *named)
{
    PyObject *param, *output;
    int casts;
    parse(args, named, "$pOO", {"cast_inputs", "param_dtype", "output_dtype"}, &casts, &param,
          &output);
    const auto type_of = [](PyObject *dtype) {
        return THPDtype_Check(dtype) ? reinterpret_cast<THPDtype *>(dtype)->scalar_type
                                     : at::ScalarType::Undefined;
    };
    state.casts_inputs = casts != 0;
    state.param_dtype = type_of(param);
    state.output_dtype = type_of(output);
}

// Root, or None, and a tuple of groups: their order is that of the state's forward.
void state_join(StateObject &state, PyObject *args, PyObject *named)
{
    PyObject *root, *groups;
    int uses_fallback;
    parse(args, named, "$OO!p", {"root", "groups", "uses_fallback"}, &root, &PyTuple_Type, &groups,
          &uses_fallback);
    RootObject *new_root = root == Py_None ? nullptr : root_of(root);
    GroupObject *first = nullptr;
    for (Py_ssize_t i = PyTuple_GET_SIZE(groups); i-- > 0;) {
        GroupObject *group = group_of(PyTuple_GET_ITEM(groups, i));
        group->course.next = first != nullptr ? &first->course : nullptr;
        first = group;
    }
    Py_XINCREF(reinterpret_cast<PyObject *>(new_root));
    Py_XSETREF(state.root, new_root);
    state.group = first;
    Py_XSETREF(state.groups, Py_NewRef(groups));
    state.uses_fallback = uses_fallback != 0;
    fc_root_module_join(&state.course, first != nullptr ? &first->course : nullptr,
                        state.modules != nullptr && PyTuple_GET_SIZE(state.modules) > 1);
    if (first != nullptr && first->input_seen_in != 0) {
        first->input_seen_in = UINT64_MAX; // by no backward of this root
    }
}

// Decides, before the first forward, whether the state runs here. False: the fallback.
bool is_ours(StateObject *state)
{
    if (state->root == nullptr && !state->uses_fallback) {
        ask_python(Call::choose_implementation, state);
    } else if (state->root != nullptr && state->root->course.opener == nullptr &&
               (state->root->is_replaced || state->root->calls_methods || functions_replaced() ||
                has_dispatch_modes() != state->root->has_modes) &&
               fc_root_is_between_steps(&state->root->course)) {
        state->root->is_replaced = false;
        state->root->has_modes = has_dispatch_modes();
        ask_python(Call::leave_replaced, state);
    }
    return state->root != nullptr;
}

} // namespace

PyObject *state_hook_pre_forward(PyObject *self, PyObject *const *a, Py_ssize_t n)
{
    return guarded([&]() -> PyObject * {
        if (!has_arguments(n, 3)) {
            return nullptr;
        }
        const Untraced untraced;
        if (!is_ours(as<StateObject>(self))) {
            return ask_python(Call::torch_pre_forward, self, a[0], a[1], a[2]).release();
        }
        return state_pre_forward_member(as<StateObject>(self), a[1], a[2]).release();
    });
}

PyObject *state_hook_post_forward(PyObject *self, PyObject *const *a, Py_ssize_t n)
{
    return guarded([&]() -> PyObject * {
        if (!has_arguments(n, 3)) {
            return nullptr;
        }
        const Untraced untraced;
        if (as<StateObject>(self)->root == nullptr) {
            return ask_python(Call::torch_post_forward, self, a[0], a[1], a[2]).release();
        }
        return state_post_forward_member(as<StateObject>(self), a[0], a[2]).release();
    });
}

namespace {

bool state_takes_core(StateObject &state)
{
    return is_ours(&state);
}

// (args, kwargs) -> (args, kwargs); a whole pass, whatever the members of a grouped unit do
PyObject *state_enter(PyObject *self, PyObject *const *a, Py_ssize_t n)
{
    return guarded([&]() -> PyObject * {
        if (!has_arguments(n, 2)) {
            return nullptr;
        }
        Ref changed = state_pre_forward(as<StateObject>(self), a[0], a[1]);
        return changed.get() == Py_None ? PyTuple_Pack(2, a[0], a[1]) : changed.release();
    });
}

Ref state_leave(StateObject &state, PyObject *output)
{
    return state_post_forward(&state, output);
}

void state_call_pre_backward(StateObject &state)
{
    state_pre_backward(&state);
}

PyMemberDef state_members[] = {
    {"_root", T_OBJECT, offsetof(StateObject, root), READONLY, "the Root, or None on the fallback"},
    {"_uses_fallback", T_BOOL, offsetof(StateObject, uses_fallback), READONLY, nullptr},
    {"_is_strict", T_BOOL, offsetof(StateObject, is_strict), 0, nullptr},
    {"_modules", T_OBJECT_EX, offsetof(StateObject, modules), 0, nullptr},
    {"_modules_to_run_forward", T_OBJECT_EX, offsetof(StateObject, to_run), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyObject *state_get_training(PyObject *self, void *)
{
    return PyLong_FromLong(training_of(as<StateObject>(self)));
}

int state_set_training(PyObject *self, PyObject *value, void *)
{
    auto *state = as<StateObject>(self);
    state->course.backward = state->root != nullptr ? state->root->course.backward : 0;
    return parse_training(value, &state->course.training);
}

// Who replaces a method of a state is noticed by the next forward of its root.
int state_setattro(PyObject *self, PyObject *name, PyObject *value)
{
    auto *state = as<StateObject>(self);
    if (state->root != nullptr && is_watched_on_states(name)) {
        state->root->is_replaced = true;
    }
    return PyObject_GenericSetAttr(self, name, value);
}

PyGetSetDef state_properties[] = {
    {"_training", state_get_training, state_set_training, "TrainingState, as its index", nullptr},
    {}};

PyMethodDef state_methods[] = {
    method<state_set_casts>("_set_casts", "_set_casts(cast_inputs=, param_dtype=, output_dtype=)"),
    method<state_join>("_join", "_join(root=, groups=, uses_fallback=)"),
    {"_hook_pre_forward", fastcall<StateObject>(state_hook_pre_forward), METH_FASTCALL,
     "The forward pre-hook: (module, args, kwargs) -> None or (args, kwargs)."},
    {"_hook_post_forward", fastcall<StateObject>(state_hook_post_forward), METH_FASTCALL,
     "The forward hook: (module, args, output) -> output."},
    method<state_takes_core>(
        "_takes_core",
        "Whether the core runs the forward that begins; chooses the implementation if need be."),
    {"_enter", fastcall<StateObject>(state_enter), METH_FASTCALL,
     "(args, kwargs) -> (args, kwargs)"},
    method<state_leave>("_leave", "(output) -> output"),
    method<state_call_pre_backward>("_core_pre_backward", "What a gradient of an output sets off."),
    {}};

PyType_Slot state_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(state_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(state_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(state_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(state_clear)},
    {Py_tp_setattro, reinterpret_cast<void *>(state_setattro)},
    {Py_tp_members, state_members},
    {Py_tp_getset, state_properties},
    {Py_tp_methods, state_methods},
    {Py_tp_doc, const_cast<char *>("Base of FSDPState: the hooks of one fully_shard call.")},
    {0, nullptr}};
PyType_Spec state_spec = {"fsdp_c._C.State", sizeof(StateObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                          state_slots};

} // namespace

} // namespace fc

int fc_register_state(PyObject *module)
{
    return fc_register_group(module) < 0 || fc_register_root(module) < 0
               ? -1
               : fc::add_type(module, "State", &fc::state_spec, &fc::state_type);
}
