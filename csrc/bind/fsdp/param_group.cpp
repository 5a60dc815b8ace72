// The Python type Group: what FSDPParamGroup asks of its unit.
#include "bind/fsdp/root.h"
#include "bind/fsdp/state.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/empty.h>
#include <structmember.h>

#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

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

void group_bind(GroupObject &group, PyObject *args, PyObject *named)
{
    PyObject *domain, *replicate, *smaller, *post_mesh, *rows, *flat, *on_device;
    Py_ssize_t index;
    parse(args, named, "$OnOOOO!OO!",
          {"domain", "index", "replicate", "smaller", "post_mesh", "params", "flat", "on_device"},
          &domain, &index, &replicate, &smaller, &post_mesh, &PyList_Type, &rows, &flat,
          &PyTuple_Type, &on_device);
    const UnitDomains domains = {domain, replicate, smaller, static_cast<size_t>(index)};
    auto unit =
        std::make_unique<Unit>(domains, post_mesh, rows, tensor_of(flat), on_device, group.updates);
    std::unique_ptr<Unit> former(std::exchange(group.former, nullptr));
    if (group.unit != nullptr) {
        former = detach(&group);
    }
    if (former != nullptr) {
        unit->inherit(*former);
    }
    group.unit = unit.release();
    fc_root_unit_bind(&group.course, group.unit->reduction(), &group);
}

void group_unbind(GroupObject &group)
{
    if (group.unit != nullptr) {
        group.unit->reshard();
    }
    detach(&group);
    delete std::exchange(group.former, nullptr);
}

void group_set_aside(GroupObject &group)
{
    if (group.unit != nullptr) {
        group.unit->reshard();
        if (auto unit = detach(&group); unit->has_accumulated()) {
            group.former = unit.release();
        }
    }
}

// `question` to the bound unit; without one nothing happens, and the answer is no.
template <auto question> auto ask_unit(GroupObject &group)
{
    using Answer = std::invoke_result_t<decltype(question), Unit &>;
    if (group.unit != nullptr) {
        return std::invoke(question, *group.unit);
    }
    return Answer();
}

template <auto question> PyMethodDef unit_method(const char *name, const char *doc)
{
    return method<GroupObject, ask_unit<question>>(name, doc);
}

template <auto question> PyGetSetDef unit_property(const char *name, const char *doc)
{
    return getter<GroupObject, ask_unit<question>>(name, doc);
}

void group_keep_storage(GroupObject &group, PyObject *keeps)
{
    if (group.unit != nullptr) {
        group.unit->keep_storage(keeps == Py_True);
    }
}

at::Tensor accumulated_of(const Unit *unit, size_t index)
{
    return unit != nullptr && index < unit->params().size() ? unit->accumulated(index)
                                                            : at::Tensor();
}

Ref group_accumulated(GroupObject &group, PyObject *index)
{
    const at::Tensor found = accumulated_of(group.unit, size_from(index));
    return found.defined() ? to_python(found) : Ref::borrow(Py_None);
}

// A copy, flat and in the parameter's reduce dtype, or None.
Ref partial_sum(const Unit &unit, size_t index)
{
    const fc_param &p = fc_unit_layout(unit.shard_unit())->params[index];
    const void *sum = fc_reduction_sum(unit.reduction(), index);
    if (sum == nullptr) {
        return Ref::borrow(Py_None);
    }
    const at::Tensor copy =
        at::empty({static_cast<int64_t>(p.chunk_numel)}, scalar_type_of(p.reduce));
    std::memcpy(copy.mutable_data_ptr(), sum, copy.nbytes());
    return to_python(copy);
}

std::vector<Ref> unit_partial_sums(Unit &unit)
{
    std::vector<Ref> sums;
    for (size_t i = 0; i < unit.params().size(); i++) {
        sums.push_back(partial_sum(unit, i));
    }
    return sums;
}

void group_set_accumulated(GroupObject &group, PyObject *args, PyObject *named)
{
    Py_ssize_t index;
    PyObject *tensor;
    parse(args, named, "nO", {"index", "tensor"}, &index, &tensor);
    if (group.unit == nullptr) {
        return;
    }
    if (static_cast<size_t>(index) >= group.unit->params().size()) {
        PyErr_SetString(PyExc_IndexError, "no such parameter");
        throw_python();
    }
    group.unit->set_accumulated(static_cast<size_t>(index),
                                tensor == Py_None ? at::Tensor() : tensor_of(tensor));
}

void group_follow(GroupObject &group, PyObject *counter)
{
    group.updates->follow(counter_of(counter));
}

Ref group_count_load(GroupObject &group)
{
    group.updates->count_load();
    return Ref::take(fc_count_step(nullptr, nullptr));
}

uint64_t group_n_updates(GroupObject &group)
{
    return group.updates->n();
}

fc_traffic total_traffic(const GroupObject &group)
{
    fc_traffic total = group.course.past;
    if (group.unit != nullptr) {
        fc_traffic_add(&total, &group.unit->traffic());
    }
    return total;
}

Ref group_traffic(GroupObject &group)
{
    const fc_traffic total = total_traffic(group);
    return dict_of({{"gathers", to_python(total.gathers)},
                    {"gathered", to_python(total.gathered)},
                    {"reductions", to_python(total.reductions)},
                    {"reduced", to_python(total.reduced)},
                    {"all_reductions", to_python(total.all_reductions)},
                    {"all_reduced", to_python(total.all_reduced)},
                    {"copied", to_python(total.copied)}});
}

void group_set_prefetch(GroupObject &group, PyObject *args, PyObject *named)
{
    int in_backward;
    PyObject *groups;
    parse(args, named, "pO!", {"in_backward", "groups"}, &in_backward, &PyList_Type, &groups);
    if (group.unit == nullptr) {
        return;
    }
    std::vector<DeviceUnit *> units;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); i++) {
        const Unit *other = group_of(PyList_GET_ITEM(groups, i))->unit;
        if (other != nullptr && other->device() != nullptr) {
            units.push_back(other->device());
        }
    }
    if (group.unit->device() != nullptr) {
        group.unit->device()->set_prefetch(in_backward != 0, units);
    }
}

void group_set_reduce_group(GroupObject &group, PyObject *name)
{
    const char *text = group.unit != nullptr ? text_from(name) : nullptr;
    if (text != nullptr && group.unit->device() != nullptr) {
        group.unit->device()->set_reduce_group(text);
    }
}

bool group_is_bound(GroupObject &group)
{
    return group.unit != nullptr;
}

bool group_was_used(GroupObject &group)
{
    return total_traffic(group).unshards > 0;
}

void group_reshard(GroupObject &group)
{
    if (group.unit != nullptr) {
        group.unit->reshard(group.course.training == FC_TRAINING_FORWARD &&
                            group.unit->leaves_slices(group.post_forward_mesh_info));
    }
}

bool unit_in_phase(Unit &unit)
{
    return fc_domain_is_open(unit.domain());
}

size_t unit_partial_bytes(Unit &unit)
{
    return fc_reduction_sum_bytes(unit.reduction());
}

void unit_drop_partial_sums(Unit &unit)
{
    unit.gradients().drop_partial_sums();
}

void unit_release_gradients(Unit &unit)
{
    unit.gradients().release();
}

void unit_release_sums(Unit &unit)
{
    fc_reduction_trim(unit.reduction());
}

const char *group_why_staged(GroupObject &group)
{
    const bool is_scheduled = group.unit != nullptr && group.unit->device() != nullptr;
    const char *why = is_scheduled ? group.unit->device()->why_staged() : nullptr;
    return why != nullptr ? why : "";
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
    getter<GroupObject, group_is_bound>("_is_bound", "whether the unit runs on the core"),
    unit_property<&Unit::is_unsharded>("_core_is_unsharded", nullptr),
    unit_property<&Unit::has_slices>("_core_has_slices",
                                     "whether slices stand in the place of its shards"),
    unit_property<&Unit::is_intact>("_core_is_intact",
                                    "whether every shard is where set-up put it"),
    unit_property<unit_in_phase>("_core_in_phase", "whether a forward or backward is going on"),
    unit_property<&Unit::is_pending>("_core_is_pending",
                                     "unshard(async_op=True) that was not waited for"),
    unit_property<&Unit::awaits_gradients>(
        "_core_awaits_gradients",
        "whether a backward went through the unit and gave its parameters nothing"),
    unit_property<&Unit::is_kept_after_forward>(
        "_core_is_kept_after_forward",
        "whether forward leaves the unsharded parameters registered"),
    unit_property<&Unit::has_accumulated>("_core_has_accumulated",
                                          "whether gradients wait for a later reduction"),
    unit_property<&Unit::has_partial_sums>("_core_has_partial_sums",
                                           "whether sums over shards wait for the replicas"),
    unit_property<unit_partial_bytes>("_core_partial_bytes", "of the memory for such sums"),
    getter<GroupObject, group_why_staged>(
        "_core_why_staged", "why what a device gathers is copied out; empty: it is not"),
    unit_property<&Unit::is_resident>(
        "_core_is_resident", "whether one rank's shards on a device are used where they lie"),
    getter<GroupObject, group_n_updates>("_core_n_updates",
                                         "optimizer steps and loads that its shards have seen"),
    getter<GroupObject, group_was_used>("_core_was_used", "whether it was ever unsharded"),
    {}};

PyMethodDef group_methods[] = {
    method<group_bind>("_bind", "_bind(domain=, index=, replicate=, smaller=, post_mesh=, params=, "
                                "flat=, on_device=)"),
    method<group_unbind>("_unbind", "Reshards and leaves the core."),
    method<group_set_aside>(
        "_set_aside",
        "Reshards and leaves the core until the next _bind, which takes over gradients that wait."),
    unit_method<&Unit::unshard_private>("_core_unshard_async",
                                        "Gathers; registration is left to _core_unshard."),
    unit_method<&Unit::unshard>("_core_unshard",
                                "Gathers if needed and registers the unsharded parameters."),
    method<group_reshard>("_core_reshard",
                          "Registers the sharded parameters; within a forward that ends with "
                          "slices those."),
    unit_method<&Unit::keep_after_forward>(
        "_core_keep_after_forward",
        "Forward leaves the unsharded parameters registered, until the next reshard."),
    method<group_keep_storage>("_core_keep_storage",
                               "Whether reshard leaves the unsharded parameters' memory as it is."),
    unit_method<unit_partial_sums>(
        "_core_partial_sums",
        "() -> of each parameter a copy of what the replicas have not seen, or None"),
    unit_method<unit_drop_partial_sums>("_core_drop_partial_sums", "Drops them."),
    method<group_accumulated>("_core_accumulated",
                              "(index) -> what is accumulated beside a parameter"),
    method<group_set_accumulated>("_core_set_accumulated", "(index, tensor or None)"),
    method<group_set_prefetch>(
        "_core_set_prefetch", "(in_backward, groups): whom to gather behind this one on a device."),
    method<group_set_reduce_group>("_core_set_reduce_group",
                                   "(name): the process group that sums gradients on a device."),
    method<group_follow>("_core_follow", "(StepCounter): of an optimizer that holds shards of it."),
    method<group_count_load>("_core_count_load", "Its shards are loaded, on all ranks."),
    unit_method<unit_release_gradients>("_core_release_gradients",
                                        "Forgets gradients that are kept for reuse."),
    unit_method<unit_release_sums>(
        "_core_release_sums", "Frees the memory for sums over shards, unless some wait in it."),
    method<group_traffic>("_core_traffic",
                          "What the unit has moved, see fc_traffic in engine/reduction.h."),
    unit_method<&Unit::drop_gradients>("_core_drop_gradients",
                                       "Drops gradients that were not reduced."),
    {}};

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
