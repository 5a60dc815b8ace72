// The Python types State and Root: fields, lifetime, methods. What they do is in hooks.cpp
// and root.cpp.
#include "bind/fsdp/state.h"

#include "bind/fsdp/hooks.h"
#include "bind/fsdp/root.h"
#include "bind/python/objects.h"
#include "bind/python/replaced_functions.h"
#include "bind/python/untraced.h"
#include "bind/tensor/tensors.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fc {

namespace {

PyTypeObject *state_type = nullptr, *root_type = nullptr;

// Who uses one sees the collectives of units.
bool has_dispatch_modes()
{
    return c10::impl::TorchDispatchModeTLS::any_modes_set();
}

// ---- Root ----

PyObject *root_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    return guarded([&]() -> PyObject * {
        PyObject *states, *domains, *context;
        if (!PyArg_ParseTuple(args, "O!O!O", &PyList_Type, &states, &PyList_Type, &domains,
                              &context)) {
            return nullptr;
        }
        context_of(context);
        std::vector<fc_domain *> linked;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(domains); i++) {
            linked.push_back(domain_of(PyList_GET_ITEM(domains, i)));
        }
        fc_domain_link(linked.data(), linked.size());
        Ref self = checked(type->tp_alloc(type, 0));
        as<RootObject>(self.get())->states = Py_NewRef(states);
        as<RootObject>(self.get())->domains = Py_NewRef(domains);
        as<RootObject>(self.get())->context = context_of(Py_NewRef(context));
        as<RootObject>(self.get())->publishes = true;
        as<RootObject>(self.get())->has_modes = has_dispatch_modes();
        as<RootObject>(self.get())->backward = new_backward();
        if (PyList_GET_SIZE(domains) > 0) {
            as<RootObject>(self.get())->streams = domain_streams(PyList_GET_ITEM(domains, 0));
        }
        return self.release();
    });
}

int root_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as<RootObject>(self)->states);
    Py_VISIT(as<RootObject>(self)->domains);
    Py_VISIT(reinterpret_cast<PyObject *>(as<RootObject>(self)->context));
    return 0;
}

int root_clear(PyObject *self)
{
    as<RootObject>(self)->iteration_root = nullptr;
    as<RootObject>(self)->streams = nullptr;
    Py_CLEAR(as<RootObject>(self)->states);
    Py_CLEAR(as<RootObject>(self)->domains);
    Py_CLEAR(as<RootObject>(self)->context);
    return 0;
}

void root_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    root_clear(self);
    delete as<RootObject>(self)->updates;
    free_object(self);
}

PyObject *root_call_post_backward(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        group_post_backward(as<RootObject>(self), group_of(arg));
        Py_RETURN_NONE;
    });
}

PyObject *root_call_end_backward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        root_begin_backward(as<RootObject>(self));
        root_end_backward(as<RootObject>(self));
        Py_RETURN_NONE;
    });
}

PyObject *root_call_finalize_backward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        root_finalize_backward(as<RootObject>(self));
        Py_RETURN_NONE;
    });
}

PyObject *root_call_reset(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        root_reset(as<RootObject>(self), true);
        Py_RETURN_NONE;
    });
}

PyObject *root_look_again(PyObject *self, PyObject *)
{
    as<RootObject>(self)->is_replaced = true;
    Py_RETURN_NONE;
}

PyObject *root_drop_raised_forward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        if (as<RootObject>(self)->has_raised) {
            root_reset(as<RootObject>(self), false);
        }
        Py_RETURN_NONE;
    });
}

PyObject *root_get_iteration_root(PyObject *self, void *)
{
    StateObject *root = as<RootObject>(self)->iteration_root;
    return Py_NewRef(root != nullptr ? reinterpret_cast<PyObject *>(root) : Py_None);
}

PyObject *root_get_between_steps(PyObject *self, void *)
{
    return PyBool_FromLong(root_is_between_steps(as<RootObject>(self)));
}

PyObject *root_awaits_end(PyObject *self, void *)
{
    const bool by_autograd = torch::autograd::get_current_graph_task_id() != -1;
    return PyBool_FromLong(root_in_backward(as<RootObject>(self)) && !by_autograd);
}

PyMemberDef root_members[] = {
    {"states", T_OBJECT, offsetof(RootObject, states), READONLY, "in named_modules order"},
    {"domains", T_OBJECT, offsetof(RootObject, domains), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyObject *root_get_backward(PyObject *self, void *)
{
    return PyLong_FromUnsignedLongLong(as<RootObject>(self)->backward);
}

PyGetSetDef root_properties[] = {{"backward", root_get_backward, nullptr,
                                  "the number of the running backward, or the next one", nullptr},
                                 {"iteration_root", root_get_iteration_root, nullptr,
                                  "the state that began the current forward", nullptr},
                                 {"is_between_steps", root_get_between_steps, nullptr,
                                  "whether no forward or backward is going on or to come, and no "
                                  "gradient waits for a reduction",
                                  nullptr},
                                 {"awaits_end", root_awaits_end, nullptr,
                                  "whether a backward is open that autograd will not end", nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef root_methods[] = {
    {"post_backward", root_call_post_backward, METH_O,
     "post_backward(group): reshards it and posts its gradients."},
    {"end_backward", root_call_end_backward, METH_NOARGS,
     "Finishes all reductions and closes the phase."},
    {"finalize_backward", root_call_finalize_backward, METH_NOARGS,
     "Reduces what the backwards of a manual ending left."},
    {"look_again", root_look_again, METH_NOARGS,
     "The next forward asks who looks at the units' collectives."},
    {"reset", root_call_reset, METH_NOARGS, "Drops everything of the running step."},
    {"drop_raised_forward", root_drop_raised_forward, METH_NOARGS,
     "Ends a forward that was left by an exception, as the next one would."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot root_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(root_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(root_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(root_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(root_clear)},
    {Py_tp_members, root_members},
    {Py_tp_getset, root_properties},
    {Py_tp_methods, root_methods},
    {Py_tp_doc, const_cast<char *>("Root(states, domains, context): a root and all below it.")},
    {0, nullptr}};
PyType_Spec root_spec = {"fsdp_c._C.Root", sizeof(RootObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, root_slots};

// ---- State ----

PyObject *state_new(PyTypeObject *type, PyObject *, PyObject *)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self == nullptr) {
        return nullptr;
    }
    auto *state = as<StateObject>(self);
    state->training = static_cast<int>(Training::idle);
    state->param_dtype = state->output_dtype = at::ScalarType::Undefined;
    return self;
}

int state_traverse(PyObject *self, visitproc visit, void *arg)
{
    auto *state = as<StateObject>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<PyObject *>(state->root));
    Py_VISIT(reinterpret_cast<PyObject *>(state->group));
    Py_VISIT(state->modules);
    Py_VISIT(state->to_run);
    return 0;
}

int state_clear(PyObject *self)
{
    auto *state = as<StateObject>(self);
    Py_CLEAR(state->root);
    Py_CLEAR(state->group);
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

// _set_casts(cast_inputs, param_dtype or None, output_dtype or None)
PyObject *state_set_casts(PyObject *self, PyObject *args)
{
    PyObject *param, *output;
    int casts;
    if (!PyArg_ParseTuple(args, "pOO", &casts, &param, &output)) {
        return nullptr;
    }
    auto *state = as<StateObject>(self);
    const auto type_of = [](PyObject *dtype) {
        return THPDtype_Check(dtype) ? reinterpret_cast<THPDtype *>(dtype)->scalar_type
                                     : at::ScalarType::Undefined;
    };
    state->casts_inputs = casts != 0;
    state->param_dtype = type_of(param);
    state->output_dtype = type_of(output);
    Py_RETURN_NONE;
}

// _join(root or None, group or None, uses_fallback)
PyObject *state_join(PyObject *self, PyObject *args)
{
    return guarded([&]() -> PyObject * {
        PyObject *root, *group;
        int uses_fallback;
        if (!PyArg_ParseTuple(args, "OOp", &root, &group, &uses_fallback)) {
            return nullptr;
        }
        if (root != Py_None && !PyObject_TypeCheck(root, root_type)) {
            return PyErr_Format(PyExc_TypeError, "expected a Root");
        }
        auto *state = as<StateObject>(self);
        GroupObject *new_group = group == Py_None ? nullptr : group_of(group);
        Py_XSETREF(state->root,
                   reinterpret_cast<RootObject *>(root == Py_None ? nullptr : Py_NewRef(root)));
        Py_XINCREF(reinterpret_cast<PyObject *>(new_group));
        Py_XSETREF(state->group, new_group);
        state->uses_fallback = uses_fallback != 0;
        Py_RETURN_NONE;
    });
}

// Decides, before the first forward, whether the state runs here. False: the fallback.
bool is_ours(StateObject *state)
{
    auto *self = reinterpret_cast<PyObject *>(state);
    if (state->root == nullptr && !state->uses_fallback) {
        checked(PyObject_CallMethod(self, "_choose_implementation", nullptr));
    } else if (state->root != nullptr && state->root->iteration_root == nullptr &&
               (state->root->is_replaced || functions_replaced() ||
                has_dispatch_modes() != state->root->has_modes) &&
               root_is_between_steps(state->root)) {
        state->root->is_replaced = false;
        state->root->has_modes = has_dispatch_modes();
        checked(PyObject_CallMethod(self, "_leave_replaced", nullptr));
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
            return PyObject_CallMethod(self, "_torch_pre_forward", "OOO", a[0], a[1], a[2]);
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
            return PyObject_CallMethod(self, "_torch_post_forward", "OOO", a[0], a[1], a[2]);
        }
        return state_post_forward_member(as<StateObject>(self), a[0], a[2]).release();
    });
}

namespace {

PyObject *state_takes_core(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * { return PyBool_FromLong(is_ours(as<StateObject>(self))); });
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

PyObject *state_leave(PyObject *self, PyObject *output)
{
    return guarded([&]() -> PyObject * {
        return state_post_forward(as<StateObject>(self), output).release();
    });
}

PyObject *state_call_pre_backward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        state_pre_backward(as<StateObject>(self));
        Py_RETURN_NONE;
    });
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
    return PyLong_FromLong(static_cast<int>(training_of(as<StateObject>(self))));
}

int state_set_training(PyObject *self, PyObject *value, void *)
{
    auto *state = as<StateObject>(self);
    const long index = value != nullptr ? PyLong_AsLong(value) : -1;
    if (index < 0 || index > static_cast<int>(Training::idle)) {
        PyErr_SetString(PyExc_ValueError, "expected the index of a TrainingState");
        return -1;
    }
    state->training = static_cast<int>(index);
    state->backward = state->root != nullptr ? state->root->backward : 0;
    return 0;
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
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef state_methods[] = {
    {"_set_casts", state_set_casts, METH_VARARGS,
     "_set_casts(cast_inputs, param_dtype, output_dtype)"},
    {"_join", state_join, METH_VARARGS, "_join(root, group, uses_fallback)"},
    {"_hook_pre_forward", fastcall<StateObject>(state_hook_pre_forward), METH_FASTCALL,
     "The forward pre-hook: (module, args, kwargs) -> None or (args, kwargs)."},
    {"_hook_post_forward", fastcall<StateObject>(state_hook_post_forward), METH_FASTCALL,
     "The forward hook: (module, args, output) -> output."},
    {"_takes_core", state_takes_core, METH_NOARGS,
     "Whether the core runs the forward that begins; chooses the implementation if need be."},
    {"_enter", fastcall<StateObject>(state_enter), METH_FASTCALL,
     "(args, kwargs) -> (args, kwargs)"},
    {"_leave", state_leave, METH_O, "(output) -> output"},
    {"_core_pre_backward", state_call_pre_backward, METH_NOARGS,
     "What a gradient of an output sets off."},
    {nullptr, nullptr, 0, nullptr}};

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
    if (fc_register_group(module) < 0 ||
        fc::add_type(module, "Root", &fc::root_spec, &fc::root_type) < 0) {
        return -1;
    }
    return fc::add_type(module, "State", &fc::state_spec, &fc::state_type);
}
