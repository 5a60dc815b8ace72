// The Python type Group: what FSDPParamGroup asks of its unit.
#include "bind/fsdp/root.h"
#include "bind/fsdp/state.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/empty.h>
#include <structmember.h>

#include <cstring>
#include <memory>
#include <utility>

namespace fc {

namespace {

PyTypeObject *group_type = nullptr;

PyObject *group_new(PyTypeObject *type, PyObject *, PyObject *)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self != nullptr) {
        auto *group = as<GroupObject>(self);
        fc_root_unit_init(&group->course);
        group->updates = new Updates();
    }
    return self;
}

// The unit, which is bound no longer; null if there was none.
std::unique_ptr<Unit> detach(GroupObject *group)
{
    std::unique_ptr<Unit> unit(std::exchange(group->unit, nullptr));
    if (unit != nullptr) {
        fc_unsharding_detach(unit->unsharding());
        fc_root_unit_bind(&group->course, nullptr, nullptr);
        group->hides_outputs = false; // the next unit has parameters of its own
    }
    return unit;
}

int group_traverse(PyObject *self, visitproc visit, void *arg)
{
    auto *group = as<GroupObject>(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(group->post_forward_mesh_info);
    Py_VISIT(group->gradient_divide_factor);
    for (Unit *unit : {group->unit, group->former}) {
        if (const int result = unit != nullptr ? unit->traverse(visit, arg) : 0; result != 0) {
            return result;
        }
    }
    return 0;
}

int group_clear(PyObject *self)
{
    auto *group = as<GroupObject>(self);
    detach(group);
    delete std::exchange(group->former, nullptr);
    Py_CLEAR(group->post_forward_mesh_info);
    Py_CLEAR(group->gradient_divide_factor);
    return 0;
}

void group_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    group_clear(self);
    delete as<GroupObject>(self)->updates;
    free_object(self);
}

// _bind(domain=, index=, replicate=, params=, flat=, on_device=)
PyObject *group_bind(PyObject *self, PyObject *args, PyObject *named)
{
    return guarded([&]() -> PyObject * {
        PyObject *domain, *replicate, *rows, *flat, *on_device;
        Py_ssize_t index;
        static const char *const names[] = {"domain", "index",     "replicate", "params",
                                            "flat",   "on_device", nullptr};
        if (!PyArg_ParseTupleAndKeywords(args, named, "$OnOO!OO!", const_cast<char **>(names),
                                         &domain, &index, &replicate, &PyList_Type, &rows, &flat,
                                         &PyTuple_Type, &on_device)) {
            return nullptr;
        }
        auto *group = as<GroupObject>(self);
        auto unit = std::make_unique<Unit>(domain, static_cast<size_t>(index), replicate, rows,
                                           tensor_of(flat), on_device, group->updates);
        std::unique_ptr<Unit> former(std::exchange(group->former, nullptr));
        if (group->unit != nullptr) {
            former = detach(group);
        }
        if (former != nullptr) {
            unit->inherit(*former);
        }
        group->unit = unit.release();
        fc_root_unit_bind(&group->course, group->unit->reduction(), group);
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
        detach(group);
        delete std::exchange(group->former, nullptr);
        Py_RETURN_NONE;
    });
}

PyObject *group_set_aside(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        auto *group = as<GroupObject>(self);
        if (group->unit != nullptr) {
            group->unit->reshard();
            if (auto unit = detach(group); unit->has_accumulated()) {
                group->former = unit.release();
            }
        }
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

PyObject *group_keep_after_forward(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->keep_after_forward(); });
}

PyObject *group_keep_storage(PyObject *self, PyObject *arg)
{
    return with_unit(self, [arg](Unit *unit) { unit->keep_storage(arg == Py_True); });
}

// _core_accumulated(index) -> Tensor or None
PyObject *group_accumulated(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        const size_t index = PyLong_AsSize_t(arg);
        const Unit *unit = as<GroupObject>(self)->unit;
        if (unit == nullptr || index >= unit->params().size() ||
            !unit->accumulated(index).defined()) {
            return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
        }
        return THPVariable_Wrap(unit->accumulated(index));
    });
}

// _core_partial_sums() -> [Tensor or None]: of each parameter a copy, flat and in its reduce dtype
PyObject *group_partial_sums(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        const Unit *unit = as<GroupObject>(self)->unit;
        const size_t n = unit != nullptr ? unit->params().size() : 0;
        Ref list = checked(PyList_New(static_cast<Py_ssize_t>(n)));
        for (size_t i = 0; i < n; i++) {
            const fc_param &p = fc_unit_layout(unit->shard_unit())->params[i];
            const void *sum = fc_reduction_sum(unit->reduction(), i);
            at::Tensor copy;
            if (sum != nullptr) {
                copy = at::empty({static_cast<int64_t>(p.chunk_numel)}, scalar_type_of(p.reduce));
                std::memcpy(copy.mutable_data_ptr(), sum, copy.nbytes());
            }
            PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i),
                            sum != nullptr ? THPVariable_Wrap(copy) : Py_NewRef(Py_None));
        }
        return list.release();
    });
}

PyObject *group_drop_partial_sums(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->gradients().drop_partial_sums(); });
}

// _core_set_accumulated(index, Tensor or None)
PyObject *group_set_accumulated(PyObject *self, PyObject *args)
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
        unit->set_accumulated(static_cast<size_t>(index),
                              tensor == Py_None ? at::Tensor() : tensor_of(tensor));
    });
}

// _core_follow(StepCounter)
PyObject *group_follow(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        as<GroupObject>(self)->updates->follow(counter_of(arg));
        Py_RETURN_NONE;
    });
}

PyObject *group_count_load(PyObject *self, PyObject *)
{
    as<GroupObject>(self)->updates->count_load();
    return fc_count_step(nullptr, nullptr);
}

PyObject *group_n_updates(PyObject *self, void *)
{
    return PyLong_FromUnsignedLongLong(as<GroupObject>(self)->updates->n());
}

// _core_traffic() -> {name: count or bytes}, as fc_traffic has them
PyObject *group_traffic(PyObject *self, PyObject *)
{
    const auto *group = as<GroupObject>(self);
    fc_traffic total = group->course.past;
    if (group->unit != nullptr) {
        fc_traffic_add(&total, &group->unit->traffic());
    }
    return Py_BuildValue(
        "{s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "gathers", (unsigned long long)total.gathers, "gathered",
        (unsigned long long)total.gathered, "reductions", (unsigned long long)total.reductions,
        "reduced", (unsigned long long)total.reduced, "all_reductions",
        (unsigned long long)total.all_reductions, "all_reduced",
        (unsigned long long)total.all_reduced, "copied", (unsigned long long)total.copied);
}

PyObject *group_release(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { unit->gradients().release(); });
}

PyObject *group_release_sums(PyObject *self, PyObject *)
{
    return with_unit(self, [](Unit *unit) { fc_reduction_trim(unit->reduction()); });
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

PyObject *group_has_accumulated(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->has_accumulated());
}

PyObject *group_has_partial_sums(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->has_partial_sums());
}

PyObject *group_partial_bytes(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyLong_FromSize_t(unit != nullptr ? fc_reduction_sum_bytes(unit->reduction()) : 0);
}

PyObject *group_was_used(PyObject *self, void *)
{
    const auto *group = as<GroupObject>(self);
    return PyBool_FromLong(group->course.past.unshards > 0 ||
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

PyObject *group_why_staged(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    const bool is_scheduled = unit != nullptr && unit->device() != nullptr;
    const char *why = is_scheduled ? unit->device()->why_staged() : nullptr;
    return PyUnicode_FromString(why != nullptr ? why : "");
}

PyObject *group_is_resident(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->is_resident());
}

PyObject *group_is_kept_after_forward(PyObject *self, void *)
{
    const Unit *unit = as<GroupObject>(self)->unit;
    return PyBool_FromLong(unit != nullptr && unit->is_kept_after_forward());
}

PyObject *group_get_training(PyObject *self, void *)
{
    return PyLong_FromLong(as<GroupObject>(self)->course.training);
}

int group_set_training(PyObject *self, PyObject *value, void *)
{
    return parse_training(value, &as<GroupObject>(self)->course.training);
}

PyMemberDef group_members[] = {
    {"post_forward_mesh_info", T_OBJECT, offsetof(GroupObject, post_forward_mesh_info), 0, nullptr},
    {"gradient_divide_factor", T_OBJECT, offsetof(GroupObject, gradient_divide_factor), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef group_properties[] = {
    FC_FLAG("reduce_grads", GroupObject, course.reduce_grads, nullptr),
    FC_FLAG("all_reduce_grads", GroupObject, course.all_reduce_grads, nullptr),
    FC_FLAG("reshard_after_backward", GroupObject, course.reshard_after_backward, nullptr),
    FC_FLAG("reduce_scatter_unused_params", GroupObject, course.reduce_unused, nullptr),
    FC_FLAG("unshard_in_backward", GroupObject, course.unshard_in_backward, nullptr),
    FC_FLAG("_post_backward_pending", GroupObject, course.is_pending,
            "whether gradients of a backward that went by are still to be reduced"),
    {"_training", group_get_training, group_set_training, "TrainingState, as its index", nullptr},
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
    {"_core_is_kept_after_forward", group_is_kept_after_forward, nullptr,
     "whether forward leaves the unsharded parameters registered", nullptr},
    {"_core_has_accumulated", group_has_accumulated, nullptr,
     "whether gradients wait for a later reduction", nullptr},
    {"_core_has_partial_sums", group_has_partial_sums, nullptr,
     "whether sums over shards wait for the replicas", nullptr},
    {"_core_partial_bytes", group_partial_bytes, nullptr, "of the memory for such sums", nullptr},
    {"_core_why_staged", group_why_staged, nullptr,
     "why what a device gathers is copied out; empty: it is not", nullptr},
    {"_core_is_resident", group_is_resident, nullptr,
     "whether one rank's shards on a device are used where they lie", nullptr},
    {"_core_n_updates", group_n_updates, nullptr,
     "optimizer steps and loads that its shards have seen", nullptr},
    {"_core_was_used", group_was_used, nullptr, "whether it was ever unsharded", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef group_methods[] = {
    {"_bind", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(group_bind)),
     METH_VARARGS | METH_KEYWORDS,
     "_bind(domain=, index=, replicate=, params=, flat=, on_device=)"},
    {"_unbind", group_unbind, METH_NOARGS, "Reshards and leaves the core."},
    {"_set_aside", group_set_aside, METH_NOARGS,
     "Reshards and leaves the core until the next _bind, which takes over gradients that wait."},
    {"_core_unshard_async", group_unshard_async, METH_NOARGS,
     "Gathers; registration is left to _core_unshard."},
    {"_core_unshard", group_unshard, METH_NOARGS,
     "Gathers if needed and registers the unsharded parameters."},
    {"_core_reshard", group_reshard, METH_NOARGS, "Registers the sharded parameters."},
    {"_core_keep_after_forward", group_keep_after_forward, METH_NOARGS,
     "Forward leaves the unsharded parameters registered, until the next reshard."},
    {"_core_keep_storage", group_keep_storage, METH_O,
     "Whether reshard leaves the unsharded parameters' memory as it is."},
    {"_core_partial_sums", group_partial_sums, METH_NOARGS,
     "() -> of each parameter a copy of what the replicas have not seen, or None"},
    {"_core_drop_partial_sums", group_drop_partial_sums, METH_NOARGS, "Drops them."},
    {"_core_accumulated", group_accumulated, METH_O,
     "(index) -> what is accumulated beside a parameter"},
    {"_core_set_accumulated", group_set_accumulated, METH_VARARGS, "(index, tensor or None)"},
    {"_core_set_prefetch", group_set_prefetch, METH_VARARGS,
     "(in_backward, groups): whom to gather behind this one on a device."},
    {"_core_set_reduce_group", group_set_reduce_group, METH_O,
     "(name): the process group that sums gradients on a device."},
    {"_core_follow", group_follow, METH_O,
     "(StepCounter): of an optimizer that holds shards of it."},
    {"_core_count_load", group_count_load, METH_NOARGS, "Its shards are loaded, on all ranks."},
    {"_core_release_gradients", group_release, METH_NOARGS,
     "Forgets gradients that are kept for reuse."},
    {"_core_release_sums", group_release_sums, METH_NOARGS,
     "Frees the memory for sums over shards, unless some wait in it."},
    {"_core_traffic", group_traffic, METH_NOARGS,
     "What the unit has moved, see fc_traffic in engine/reduction.h."},
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

int fc_register_group(PyObject *module)
{
    return fc::add_type(module, "Group", &fc::group_spec, &fc::group_type);
}
