// The Python types Group, what FSDPParamGroup asks of its unit, and StepCounter.
#include "bind/fsdp/state.h"
#include "bind/module.h"
#include "bind/python/objects.h"

#include <structmember.h>

namespace fc {

namespace {

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

void group_bind(GroupObject &group, Fields &given)
{
    const UnitParts parts(given);
    auto unit = std::make_unique<Unit>(parts, &group.course.updates);
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

// `question` to the unit, or to that one of its objects of the engine which it is about.
template <auto question> auto asked(Unit &unit)
{
    using Question = decltype(question);
    if constexpr (std::is_invocable_v<Question, Unit &>) {
        return std::invoke(question, unit);
    } else if constexpr (std::is_invocable_v<Question, fc_unsharding *>) {
        return question(unit.unsharding());
    } else if constexpr (std::is_invocable_v<Question, fc_domain *>) {
        return question(unit.domain());
    } else {
        return question(unit.reduction());
    }
}

// To the bound unit; without one nothing happens, and the answer is no.
template <auto question> auto ask_unit(GroupObject &group)
{
    using Answer = decltype(asked<question>(*group.unit));
    if (group.unit != nullptr) {
        return asked<question>(*group.unit);
    }
    return Answer();
}

template <auto question> PyMethodDef unit_method(const char *name)
{
    return method<ask_unit<question>>(name);
}

template <auto question> PyGetSetDef unit_property(const char *name)
{
    return property<ask_unit<question>>(name);
}

// A flag of the step's course.
template <auto flag> PyGetSetDef setting(const char *name)
{
    return flag_property<[](GroupObject &group) -> bool & { return group.course.*flag; }>(name);
}

void group_keep_storage(GroupObject &group, PyObject *keeps)
{
    if (group.unit != nullptr) {
        fc_unsharding_keep_memory(group.unit->unsharding(), keeps == Py_True);
    }
}

Ref group_accumulated(GroupObject &group, PyObject *index)
{
    const size_t i = size_from(index);
    const bool is_known = group.unit != nullptr && i < group.unit->params().size();
    const at::Tensor found = is_known ? group.unit->accumulated(i) : at::Tensor();
    return found.defined() ? to_python(found) : Ref::borrow(Py_None);
}

// A copy, flat and in the parameter's reduce dtype, or None.
Ref partial_sum(const Unit &unit, size_t index)
{
    const fc_param &p = fc_unit_layout(unit.shard_unit())->params[index];
    const at::ScalarType type = unit.params()[index].reduce_type;
    const void *sum = fc_reduction_sum(unit.reduction(), index);
    if (sum == nullptr) {
        return Ref::borrow(Py_None);
    }
    const size_t bytes = p.chunk_numel * fc_dtype_bytes(p.reduce);
    const at::Tensor copy = at::empty({static_cast<int64_t>(bytes / c10::elementSize(type))}, type);
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

void group_set_accumulated(GroupObject &group, Fields &given)
{
    const size_t index = given.size("index");
    const Ref tensor = given.object("tensor");
    given.end();
    if (group.unit == nullptr) {
        return;
    }
    if (index >= group.unit->params().size()) {
        raise_error(PyExc_IndexError, "no such parameter");
    }
    group.unit->set_accumulated(index,
                                tensor.get() == Py_None ? at::Tensor() : tensor_of(tensor.get()));
}

void group_follow(GroupObject &group, PyObject *counter)
{
    bool is_news;
    check(fc_updates_follow(&group.course.updates, owned_by<StepCounter>(counter).core.get(),
                            &is_news));
    process.n_changes += is_news ? 1 : 0;
}

void group_count_load(GroupObject &group)
{
    fc_updates_load(&group.course.updates);
    process.n_changes++;
    process.n_steps++;
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
    return dict_of({FC_ENTRY(total, gathers), FC_ENTRY(total, gathered),
                    FC_ENTRY(total, reductions), FC_ENTRY(total, reduced),
                    FC_ENTRY(total, all_reductions), FC_ENTRY(total, all_reduced),
                    FC_ENTRY(total, copied)});
}

DeviceUnit *device_of(const GroupObject &group)
{
    return group.unit != nullptr ? group.unit->device() : nullptr;
}

void group_set_prefetch(GroupObject &group, Fields &given)
{
    const bool in_backward = given.flag("in_backward");
    const Ref groups = given.list("groups");
    given.end();
    const DeviceUnit *device = device_of(group);
    if (device == nullptr) {
        return;
    }
    std::vector<fc_schedule_unit *> units;
    for (PyObject *object : items_of(groups.get())) {
        if (const auto *other = device_of(owned_by<GroupObject>(object))) {
            units.push_back(other->scheduled());
        }
    }
    check(fc_schedule_set_prefetch(device->scheduled(), in_backward, units.data(), units.size()));
}

void group_set_reduce_group(GroupObject &group, PyObject *name)
{
    if (DeviceUnit *device = device_of(group)) {
        device->set_reduce_group(text_from(name));
    }
}

void group_reshard(GroupObject &group)
{
    if (group.unit != nullptr) {
        group.unit->reshard(group.course.training == FC_TRAINING_FORWARD &&
                            group.unit->leaves_slices(group.post_forward_mesh_info));
    }
}

const char *group_why_staged(GroupObject &group)
{
    const DeviceUnit *device = device_of(group);
    const char *why = device != nullptr ? device->why_staged() : nullptr;
    return why != nullptr ? why : "";
}

PyMemberDef group_members[] = {
    {"post_forward_mesh_info", T_OBJECT, offsetof(GroupObject, post_forward_mesh_info), 0, nullptr},
    {"gradient_divide_factor", T_OBJECT, offsetof(GroupObject, gradient_divide_factor), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef group_properties[] = {
    setting<&fc_root_unit::reduce_grads>("reduce_grads"),
    setting<&fc_root_unit::all_reduce_grads>("all_reduce_grads"),
    setting<&fc_root_unit::reshard_after_backward>("reshard_after_backward"),
    setting<&fc_root_unit::reduce_unused>("reduce_scatter_unused_params"),
    setting<&fc_root_unit::unshard_in_backward>("unshard_in_backward"),
    setting<&fc_root_unit::force_sum>("force_sum_reduction_for_comms"),
    setting<&fc_root_unit::is_pending>("_post_backward_pending"),
    flag_property<[](GroupObject &group) -> bool & { return group.calls_methods; }>(
        "_core_calls_methods"),
    property<[](GroupObject &group) { return group.course.training; },
             [](GroupObject &group, PyObject *value) {
                 group.course.training = training_from(value);
             }>("_training"),
    property<[](GroupObject &group) { return group.unit != nullptr; }>("_is_bound"),
    unit_property<&Unit::is_unsharded>("_core_is_unsharded"),
    unit_property<fc_unsharding_has_slices>("_core_has_slices"),
    unit_property<&Unit::is_intact>("_core_is_intact"),
    unit_property<fc_domain_is_mapped>("_core_is_mapped"),
    unit_property<fc_domain_is_open>("_core_in_phase"),
    unit_property<&Unit::is_pending>("_core_is_pending"),
    unit_property<&Unit::awaits_gradients>("_core_awaits_gradients"),
    unit_property<fc_unsharding_stays_unsharded>("_core_is_kept_after_forward"),
    unit_property<&Unit::has_accumulated>("_core_has_accumulated"),
    unit_property<&Unit::has_partial_sums>("_core_has_partial_sums"),
    unit_property<fc_reduction_sum_bytes>("_core_partial_bytes"),
    property<group_why_staged>("_core_why_staged"),
    unit_property<fc_unsharding_is_resident>("_core_is_resident"),
    property<[](GroupObject &group) { return total_traffic(group).unshards != 0; }>(
        "_core_was_used"),
    {}};

PyMethodDef group_methods[] = {
    method<group_bind>("_bind"),
    method<group_unbind>("_unbind"),
    method<group_set_aside>("_set_aside"),
    method<go_on>("_core_go_on"),
    unit_method<&Unit::unshard_private>("_core_unshard_async"),
    unit_method<&Unit::unshard>("_core_unshard"),
    method<group_reshard>("_core_reshard"),
    unit_method<fc_unsharding_stay_unsharded>("_core_keep_after_forward"),
    method<group_keep_storage>("_core_keep_storage"),
    unit_method<unit_partial_sums>("_core_partial_sums"),
    unit_method<[](Unit &unit) { unit.gradients().drop_partial_sums(); }>(
        "_core_drop_partial_sums"),
    method<group_accumulated>("_core_accumulated"),
    method<group_set_accumulated>("_core_set_accumulated"),
    method<group_set_prefetch>("_core_set_prefetch"),
    method<group_set_reduce_group>("_core_set_reduce_group"),
    method<group_follow>("_core_follow"),
    method<group_count_load>("_core_count_load"),
    unit_method<[](Unit &unit) { unit.gradients().release(); }>("_core_release_gradients"),
    unit_method<fc_reduction_trim>("_core_release_sums"),
    method<group_traffic>("_core_traffic"),
    {}};

// ---- the steps of optimizers: of all of them, and each one's ----

void counter_count(StepCounter &counter)
{
    fc_step_counter_count(counter.core.get());
    process.n_steps++;
    Unit::note_step();
}

PyMethodDef counter_methods[] = {method<counter_count>("count"), {}};

} // namespace

int GroupObject::traverse(visitproc visit, void *arg) const
{
    Py_VISIT(post_forward_mesh_info);
    Py_VISIT(gradient_divide_factor);
    for (Unit *part : {unit, former}) {
        if (const int result = part != nullptr ? part->traverse(visit, arg) : 0; result != 0) {
            return result;
        }
    }
    return 0;
}

void GroupObject::clear()
{
    detach(this);
    delete std::exchange(former, nullptr);
    Py_CLEAR(post_forward_mesh_info);
    Py_CLEAR(gradient_divide_factor);
}

int register_group(PyObject *module)
{
    if (add_type<StepCounter>(module,
                              {.name = "fsdp_c._C.StepCounter", .methods = counter_methods}) < 0) {
        return -1;
    }
    return add_type<GroupObject>(module, {.name = "fsdp_c._C.Group",
                                          .methods = group_methods,
                                          .properties = group_properties,
                                          .members = group_members,
                                          .flags = Py_TPFLAGS_BASETYPE});
}

} // namespace fc
