// The Python types State, Group and Tree: fields, lifetime, methods. What they do is in hooks.cpp
// and tree.cpp.
#include "bind/state.h"

#include "bind/hooks.h"
#include "bind/tensors.h"
#include "bind/tree.h"
#include "bind/untraced.h"
#include "bind/watch.h"

#include <structmember.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/graph_task.h>

namespace fc {

namespace {

PyTypeObject *state_type = nullptr, *group_type = nullptr, *tree_type = nullptr;

template <typename Object> Object *as(PyObject *self)
{
    return reinterpret_cast<Object *>(self);
}

void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

template <typename Object>
PyCFunction fastcall(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t))
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

bool has_arguments(Py_ssize_t n, Py_ssize_t wanted)
{
    if (n != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, n);
    }
    return n == wanted;
}

// ---- Group ----

PyObject *group_new(PyTypeObject *type, PyObject *, PyObject *)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self != nullptr) {
        auto *group = as<GroupObject>(self);
        group->training = static_cast<int>(Training::idle);
        group->reduce_grads = group->all_reduce_grads = group->reshard_after_backward = 1;
        group->unshard_in_backward = 1;
    }
    return self;
}

void unbind(GroupObject *group)
{
    if (group->unit != nullptr) {
        fc_unit_set_owner(group->unit->shard_lane(), nullptr);
        if (group->unit->replicate_lane() != nullptr) {
            fc_unit_set_owner(group->unit->replicate_lane(), nullptr);
        }
        group->past.add(group->unit->traffic());
        delete std::exchange(group->unit, nullptr);
        group->hides_outputs = false; // the next unit has parameters of its own
    }
}

int group_traverse(PyObject *self, visitproc visit, void *arg)
{
    auto *group = as<GroupObject>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(group->post_forward_mesh_info);
    Py_VISIT(group->gradient_divide_factor);
    return group->unit != nullptr ? group->unit->traverse(visit, arg) : 0;
}

int group_clear(PyObject *self)
{
    auto *group = as<GroupObject>(self);
    unbind(group);
    Py_CLEAR(group->post_forward_mesh_info);
    Py_CLEAR(group->gradient_divide_factor);
    return 0;
}

void group_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    group_clear(self);
    free_object(self);
}

// _bind(domain, index, replicate_domain or None, rows, flat, on_device)
PyObject *group_bind(PyObject *self, PyObject *args)
{
    return guarded([&]() -> PyObject * {
        PyObject *domain, *replicate, *rows, *flat, *on_device;
        Py_ssize_t index;
        if (!PyArg_ParseTuple(args, "OnOO!OO!", &domain, &index, &replicate, &PyList_Type, &rows,
                              &flat, &PyTuple_Type, &on_device)) {
            return nullptr;
        }
        auto *group = as<GroupObject>(self);
        auto unit = std::make_unique<Unit>(domain, static_cast<size_t>(index), replicate, rows,
                                           tensor_of(flat), on_device);
        unbind(group);
        group->unit = unit.release();
        fc_unit_set_owner(group->unit->shard_lane(), group);
        if (group->unit->replicate_lane() != nullptr) {
            fc_unit_set_owner(group->unit->replicate_lane(), group);
        }
        Py_RETURN_NONE;
    });
}

PyObject *group_unbind(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        auto *group = as<GroupObject>(self);
        if (group->unit != nullptr) {
            group->unit->reshard();
        }
        unbind(group);
        Py_RETURN_NONE;
    });
}

// Runs `body` on the bound unit; nothing happens without one.
template <typename Body> PyObject *with_unit(PyObject *self, Body &&body)
{
    return guarded([&]() -> PyObject * {
        if (Unit *unit = as<GroupObject>(self)->unit) {
            body(unit);
        }
        Py_RETURN_NONE;
    });
}

PyObject *group_unshard_async(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->unshard_private(); });
}

PyObject *group_unshard(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->unshard(); });
}

PyObject *group_reshard(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->reshard(); });
}

PyObject *group_outlast_forward(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->outlast_forward(); });
}

PyObject *group_keep_storage(PyObject *self, PyObject *arg)
{
    return with_unit(self, [arg](Unit *unit) { unit->keep_storage(arg == Py_True); });
}

// _core_held(index) -> Tensor or None
PyObject *group_held(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        const size_t index = PyLong_AsSize_t(arg);
        const Unit *unit = as<GroupObject>(self)->unit;
        if (unit == nullptr || index >= unit->params().size() || !unit->held(index).defined()) {
            return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
        }
        return THPVariable_Wrap(unit->held(index));
    });
}

// _core_partial_sums() -> [Tensor or None]
PyObject *group_partial_sums(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        const Unit *unit = as<GroupObject>(self)->unit;
        const std::vector<at::Tensor> sums =
            unit != nullptr ? unit->partial_sums() : std::vector<at::Tensor>();
        Ref list = checked(PyList_New(static_cast<Py_ssize_t>(sums.size())));
        for (size_t i = 0; i < sums.size(); i++) {
            PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i),
                            sums[i].defined() ? THPVariable_Wrap(sums[i]) : Py_NewRef(Py_None));
        }
        return list.release();
    });
}

PyObject *group_drop_partial_sums(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->drop_partial_sums(); });
}

// _core_set_held(index, Tensor or None)
PyObject *group_set_held(PyObject *self, PyObject *args)
{
    Py_ssize_t index;
    PyObject *tensor;
    if (!PyArg_ParseTuple(args, "nO", &index, &tensor)) {
        return nullptr;
    }
    return with_unit(self, [&](Unit *unit) {
        if (static_cast<size_t>(index) >= unit->params().size()) {
            PyErr_SetString(PyExc_IndexError, "no such parameter");
            throw_python();
        }
        unit->set_held(static_cast<size_t>(index),
                       tensor == Py_None ? at::Tensor() : tensor_of(tensor));
    });
}

// _core_traffic() -> (gathers, gathered, reductions, reduced, all-reductions, summed, copied)
PyObject *group_traffic(PyObject *self, PyObject *)
{
    const auto *group = as<GroupObject>(self);
    Traffic total = group->past;
    if (group->unit != nullptr) {
        total.add(group->unit->traffic());
    }
    return Py_BuildValue("KKKKKKK", (unsigned long long)total.gathers,
                         (unsigned long long)total.gathered, (unsigned long long)total.reductions,
                         (unsigned long long)total.reduced,
                         (unsigned long long)total.all_reductions, (unsigned long long)total.summed,
                         (unsigned long long)total.copied);
}

PyObject *group_release(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->release_gradients(); });
}

PyObject *group_release_sums(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->release_sums(); });
}

PyObject *group_drop(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->drop_gradients(); });
}

// _core_set_prefetch(in_backward, [Group, ...])
PyObject *group_set_prefetch(PyObject *self, PyObject *args)
{
    int in_backward;
    PyObject *groups;
    if (!PyArg_ParseTuple(args, "pO!", &in_backward, &PyList_Type, &groups)) {
        return nullptr;
    }
    return with_unit(self, [&](Unit *unit) {
        std::vector<DeviceUnit *> units;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); i++) {
            const Unit *other = group_of(PyList_GET_ITEM(groups, i))->unit;
            if (other != nullptr && other->device() != nullptr) {
                units.push_back(other->device());
            }
        }
        if (unit->device() != nullptr) {
            unit->device()->set_prefetch(in_backward != 0, units);
        }
    });
}

// _core_set_reduce_group(name of a process group)
PyObject *group_set_reduce_group(PyObject *self, PyObject *arg)
{
    return with_unit(self, [&](Unit *unit) {
        const char *name = PyUnicode_AsUTF8(arg);
        if (name == nullptr) {
            throw_python();
        }
        if (unit->device() != nullptr) {
            unit->device()->set_reduce_group(name);
        }
    });
}

PyObject *group_is_bound(PyObject *self, void *)
{
    return PyBool_FromLong(as<GroupObject>(self)->unit != nullptr);
}

PyObject *group_is_unsharded(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->is_unsharded());
}

PyObject *group_is_intact(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->is_intact());
}

PyObject *group_in_phase(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && fc_domain_is_open(unit->domain()));
}

PyObject *group_holds_gradients(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->holds_gradients());
}

PyObject *group_has_partial_sums(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->has_partial_sums());
}

PyObject *group_partial_bytes(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyLong_FromSize_t(unit != nullptr ? unit->partial_bytes() : 0);
}

PyObject *group_was_used(PyObject *self, void *)
{
    const auto *group = as<GroupObject>(self);
    return PyBool_FromLong(group->past.unshards > 0 ||
                           (group->unit != nullptr && group->unit->traffic().unshards > 0));
}

PyObject *group_is_pending(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->is_pending());
}

PyObject *group_awaits_gradients(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->awaits_gradients());
}

PyObject *group_outlasts_forward(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->outlasts_forward());
}

PyMemberDef group_members[] = {
    {"_training", T_INT, offsetof(GroupObject, training), 0, "TrainingState, as its index"},
    {"post_forward_mesh_info", T_OBJECT, offsetof(GroupObject, post_forward_mesh_info), 0, nullptr},
    {"gradient_divide_factor", T_OBJECT, offsetof(GroupObject, gradient_divide_factor), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef group_properties[] = {
    FC_FLAG("reduce_grads", GroupObject, reduce_grads, nullptr),
    FC_FLAG("all_reduce_grads", GroupObject, all_reduce_grads, nullptr),
    FC_FLAG("reshard_after_backward", GroupObject, reshard_after_backward, nullptr),
    FC_FLAG("reduce_scatter_unused_params", GroupObject, reduce_scatter_unused_params, nullptr),
    FC_FLAG("unshard_in_backward", GroupObject, unshard_in_backward, nullptr),
    FC_FLAG("_post_backward_pending", GroupObject, post_backward_pending,
            "whether gradients of a backward that went by are still to be reduced"),
    {"_is_bound", group_is_bound, nullptr, "whether the unit runs on the core", nullptr},
    {"_core_is_unsharded", group_is_unsharded, nullptr, nullptr, nullptr},
    {"_core_is_intact", group_is_intact, nullptr, "whether every shard is where set-up put it",
     nullptr},
    {"_core_in_phase", group_in_phase, nullptr, "whether a forward or backward is going on",
     nullptr},
    {"_core_is_pending", group_is_pending, nullptr,
     "unshard(async_op=True) that was not waited for", nullptr},
    {"_core_awaits_gradients", group_awaits_gradients, nullptr,
     "whether a backward went through the unit and gave its parameters nothing", nullptr},
    {"_core_outlasts_forward", group_outlasts_forward, nullptr,
     "whether forward leaves the unsharded parameters registered", nullptr},
    {"_core_holds_gradients", group_holds_gradients, nullptr,
     "whether gradients wait for a later reduction", nullptr},
    {"_core_has_partial_sums", group_has_partial_sums, nullptr,
     "whether sums over shards wait for the replicas", nullptr},
    {"_core_partial_bytes", group_partial_bytes, nullptr, "of the memory for such sums", nullptr},
    {"_core_was_used", group_was_used, nullptr, "whether it was ever unsharded", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef group_methods[] = {
    {"_bind", group_bind, METH_VARARGS,
     "_bind(domain, index, replicate_domain, rows, flat, on_device)"},
    {"_unbind", group_unbind, METH_NOARGS, "Reshards and leaves the core."},
    {"_core_unshard_async", group_unshard_async, METH_NOARGS,
     "Gathers; registration is left to _core_unshard."},
    {"_core_unshard", group_unshard, METH_NOARGS,
     "Gathers if needed and registers the unsharded parameters."},
    {"_core_reshard", group_reshard, METH_NOARGS, "Registers the sharded parameters."},
    {"_core_outlast_forward", group_outlast_forward, METH_NOARGS,
     "Forward leaves the unsharded parameters registered, until the next reshard."},
    {"_core_keep_storage", group_keep_storage, METH_O,
     "Whether reshard leaves the unsharded parameters' memory as it is."},
    {"_core_partial_sums", group_partial_sums, METH_NOARGS,
     "() -> of each parameter a copy of what the replicas have not seen, or None"},
    {"_core_drop_partial_sums", group_drop_partial_sums, METH_NOARGS, "Drops them."},
    {"_core_held", group_held, METH_O, "(index) -> what is accumulated beside a parameter"},
    {"_core_set_held", group_set_held, METH_VARARGS, "(index, tensor or None)"},
    {"_core_set_prefetch", group_set_prefetch, METH_VARARGS,
     "(in_backward, groups): whom to gather behind this one on a device."},
    {"_core_set_reduce_group", group_set_reduce_group, METH_O,
     "(name): the process group that sums gradients on a device."},
    {"_core_release_gradients", group_release, METH_NOARGS,
     "Forgets gradients that are kept for reuse."},
    {"_core_release_sums", group_release_sums, METH_NOARGS,
     "Frees the memory for sums over shards, unless some wait in it."},
    {"_core_traffic", group_traffic, METH_NOARGS,
     "What the unit has moved, see Traffic in unit.h."},
    {"_core_drop_gradients", group_drop, METH_NOARGS, "Drops gradients that were not reduced."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot group_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(group_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(group_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(group_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(group_clear)},
    {Py_tp_members, group_members},
    {Py_tp_getset, group_properties},
    {Py_tp_methods, group_methods},
    {Py_tp_doc, const_cast<char *>("Base of FSDPParamGroup: one unit of the core.")},
    {0, nullptr}};
PyType_Spec group_spec = {"fsdp_c._C.Group", sizeof(GroupObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                          group_slots};

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
    {"_warns_of_views", T_BOOL, offsetof(StateObject, warns_of_views), 0, nullptr},
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

GroupObject *group_of(PyObject *object)
{
    if (!PyObject_TypeCheck(object, group_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a Group");
        throw_python();
    }
    return as<GroupObject>(object);
}

} // namespace fc

int fc_register_state(PyObject *module)
{
    if (fc::add_type(module, "Group", &fc::group_spec, &fc::group_type) < 0 ||
        fc::add_type(module, "Tree", &fc::tree_spec, &fc::tree_type) < 0) {
        return -1;
    }
    return fc::add_type(module, "State", &fc::state_spec, &fc::state_type);
}
