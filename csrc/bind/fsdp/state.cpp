// The Python types State and Tree: fields, lifetime, methods. What they do is in hooks.cpp
// and tree.cpp.
#include "bind/fsdp/state.h"

#include "bind/fsdp/hooks.h"
#include "bind/fsdp/tree.h"
#include "bind/python/objects.h"
#include "bind/python/replaced_functions.h"
#include "bind/python/untraced.h"
#include "bind/tensor/tensors.h"

#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fc {

namespace {

PyTypeObject *state_type = nullptr, *tree_type = nullptr;

// ---- Tree ----

PyObject *tree_new(PyTypeObject *type, PyObject *args, PyObject *)
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
        as<TreeObject>(self.get())->states = Py_NewRef(states);
        as<TreeObject>(self.get())->domains = Py_NewRef(domains);
        as<TreeObject>(self.get())->context = context_of(Py_NewRef(context));
        as<TreeObject>(self.get())->publishes = true;
        as<TreeObject>(self.get())->backward = new_backward();
        if (PyList_GET_SIZE(domains) > 0) {
            as<TreeObject>(self.get())->streams = domain_streams(PyList_GET_ITEM(domains, 0));
        }
        return self.release();
    });
}

int tree_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(as<TreeObject>(self)->states);
    Py_VISIT(as<TreeObject>(self)->domains);
    Py_VISIT(reinterpret_cast<PyObject *>(as<TreeObject>(self)->context));
    return 0;
}

int tree_clear(PyObject *self)
{
    as<TreeObject>(self)->iteration_root = nullptr;
    as<TreeObject>(self)->streams = nullptr;
    Py_CLEAR(as<TreeObject>(self)->states);
    Py_CLEAR(as<TreeObject>(self)->domains);
    Py_CLEAR(as<TreeObject>(self)->context);
    return 0;
}

void tree_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    tree_clear(self);
    delete as<TreeObject>(self)->updates;
    free_object(self);
}

PyObject *tree_call_post_backward(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        group_post_backward(as<TreeObject>(self), group_of(arg));
        Py_RETURN_NONE;
    });
}

PyObject *tree_call_end_backward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        tree_begin_backward(as<TreeObject>(self));
        tree_end_backward(as<TreeObject>(self));
        Py_RETURN_NONE;
    });
}

PyObject *tree_call_finalize_backward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        tree_finalize_backward(as<TreeObject>(self));
        Py_RETURN_NONE;
    });
}

PyObject *tree_call_reset(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        tree_reset(as<TreeObject>(self), true);
        Py_RETURN_NONE;
    });
}

PyObject *tree_drop_raised_forward(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        if (as<TreeObject>(self)->has_raised) {
            tree_reset(as<TreeObject>(self), false);
        }
        Py_RETURN_NONE;
    });
}

PyObject *tree_get_iteration_root(PyObject *self, void *)
{
    StateObject *root = as<TreeObject>(self)->iteration_root;
    return Py_NewRef(root != nullptr ? reinterpret_cast<PyObject *>(root) : Py_None);
}

PyObject *tree_get_between_steps(PyObject *self, void *)
{
    return PyBool_FromLong(tree_is_between_steps(as<TreeObject>(self)));
}

PyObject *tree_awaits_end(PyObject *self, void *)
{
    const bool by_autograd = torch::autograd::get_current_graph_task_id() != -1;
    return PyBool_FromLong(tree_in_backward(as<TreeObject>(self)) && !by_autograd);
}

PyMemberDef tree_members[] = {
    {"states", T_OBJECT, offsetof(TreeObject, states), READONLY, "in named_modules order"},
    {"domains", T_OBJECT, offsetof(TreeObject, domains), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef tree_properties[] = {{"iteration_root", tree_get_iteration_root, nullptr,
                                  "the state that began the current forward", nullptr},
                                 {"is_between_steps", tree_get_between_steps, nullptr,
                                  "whether no forward or backward is going on or to come, and no "
                                  "gradient waits for a reduction",
                                  nullptr},
                                 {"awaits_end", tree_awaits_end, nullptr,
                                  "whether a backward is open that autograd will not end", nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef tree_methods[] = {
    {"post_backward", tree_call_post_backward, METH_O,
     "post_backward(group): reshards it and posts its gradients."},
    {"end_backward", tree_call_end_backward, METH_NOARGS,
     "Finishes all reductions and closes the phase."},
    {"finalize_backward", tree_call_finalize_backward, METH_NOARGS,
     "Reduces what the backwards of a manual ending left."},
    {"reset", tree_call_reset, METH_NOARGS, "Drops everything of the running step."},
    {"drop_raised_forward", tree_drop_raised_forward, METH_NOARGS,
     "Ends a forward that was left by an exception, as the next one would."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot tree_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(tree_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(tree_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(tree_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(tree_clear)},
    {Py_tp_members, tree_members},
    {Py_tp_getset, tree_properties},
    {Py_tp_methods, tree_methods},
    {Py_tp_doc, const_cast<char *>("Tree(states, domains, context): a root and all below it.")},
    {0, nullptr}};
PyType_Spec tree_spec = {"fsdp_c._C.Tree", sizeof(TreeObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, tree_slots};

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
    Py_VISIT(reinterpret_cast<PyObject *>(state->tree));
    Py_VISIT(reinterpret_cast<PyObject *>(state->group));
    Py_VISIT(state->modules);
    Py_VISIT(state->to_run);
    return 0;
}

int state_clear(PyObject *self)
{
    auto *state = as<StateObject>(self);
    Py_CLEAR(state->tree);
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

// _join(tree or None, group or None, on_torch_road)
PyObject *state_join(PyObject *self, PyObject *args)
{
    return guarded([&]() -> PyObject * {
        PyObject *tree, *group;
        int on_torch_road;
        if (!PyArg_ParseTuple(args, "OOp", &tree, &group, &on_torch_road)) {
            return nullptr;
        }
        if (tree != Py_None && !PyObject_TypeCheck(tree, tree_type)) {
            return PyErr_Format(PyExc_TypeError, "expected a Tree");
        }
        auto *state = as<StateObject>(self);
        GroupObject *new_group = group == Py_None ? nullptr : group_of(group);
        Py_XSETREF(state->tree,
                   reinterpret_cast<TreeObject *>(tree == Py_None ? nullptr : Py_NewRef(tree)));
        Py_XINCREF(reinterpret_cast<PyObject *>(new_group));
        Py_XSETREF(state->group, new_group);
        state->on_torch_road = on_torch_road != 0;
        Py_RETURN_NONE;
    });
}

// Decides, before the first forward, whether the state runs here. False: torch's road.
bool is_ours(StateObject *state)
{
    auto *self = reinterpret_cast<PyObject *>(state);
    if (state->tree == nullptr && !state->on_torch_road) {
        checked(PyObject_CallMethod(self, "_choose_road", nullptr));
    } else if (state->tree != nullptr && state->tree->iteration_root == nullptr &&
               (state->tree->is_replaced || functions_replaced()) &&
               tree_is_between_steps(state->tree)) {
        state->tree->is_replaced = false;
        checked(PyObject_CallMethod(self, "_leave_replaced", nullptr));
    }
    return state->tree != nullptr;
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
        if (as<StateObject>(self)->tree == nullptr) {
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
    {"_tree", T_OBJECT, offsetof(StateObject, tree), READONLY, "the Tree, or None on torch's road"},
    {"_on_torch_road", T_BOOL, offsetof(StateObject, on_torch_road), READONLY, nullptr},
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
    state->backward = state->tree != nullptr ? state->tree->backward : 0;
    return 0;
}

// Who replaces a method of a state is noticed by the next forward of its tree.
int state_setattro(PyObject *self, PyObject *name, PyObject *value)
{
    auto *state = as<StateObject>(self);
    if (state->tree != nullptr && is_watched_on_states(name)) {
        state->tree->is_replaced = true;
    }
    return PyObject_GenericSetAttr(self, name, value);
}

PyGetSetDef state_properties[] = {
    {"_training", state_get_training, state_set_training, "TrainingState, as its index", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef state_methods[] = {
    {"_set_casts", state_set_casts, METH_VARARGS,
     "_set_casts(cast_inputs, param_dtype, output_dtype)"},
    {"_join", state_join, METH_VARARGS, "_join(tree, group, on_torch_road)"},
    {"_hook_pre_forward", fastcall<StateObject>(state_hook_pre_forward), METH_FASTCALL,
     "The forward pre-hook: (module, args, kwargs) -> None or (args, kwargs)."},
    {"_hook_post_forward", fastcall<StateObject>(state_hook_post_forward), METH_FASTCALL,
     "The forward hook: (module, args, output) -> output."},
    {"_takes_core", state_takes_core, METH_NOARGS,
     "Whether the core runs the forward that begins; chooses the road if need be."},
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
        fc::add_type(module, "Tree", &fc::tree_spec, &fc::tree_type) < 0) {
        return -1;
    }
    return fc::add_type(module, "State", &fc::state_spec, &fc::state_type);
}
