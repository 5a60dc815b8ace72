// The Python types Root and Context: fields, lifetime, methods. What they do is in root.cpp.
#include "bind/fsdp/events.h"
#include "bind/fsdp/state.h"
#include "bind/module.h"
#include "bind/python/objects.h"

#include <structmember.h>

namespace fc {

void RootObject::open(Fields &given)
{
    std::construct_at(&hold);
    Ref all = given.list("states"), of_units = given.list("domains"),
        shared = given.object("context");
    given.end();
    std::vector<fc_domain *> linked;
    for (PyObject *domain : items_of(of_units.get())) {
        linked.push_back(domain_of(domain));
    }
    for (PyObject *state : items_of(all.get())) {
        owned_by<StateObject>(state);
    }
    context = &owned_by<ContextObject>(shared.get());
    shared.release();
    states = all.release();
    domains = of_units.release();
    streams = linked.empty() ? nullptr : domain_streams(PyList_GET_ITEM(domains, 0));
    root_init(this, linked);
}

int RootObject::traverse(visitproc visit, void *arg) const
{
    Py_VISIT(states);
    Py_VISIT(domains);
    Py_VISIT(reinterpret_cast<PyObject *>(context));
    return 0;
}

void RootObject::clear()
{
    fc_root_fini(&course);
    streams = nullptr;
    Py_CLEAR(states);
    Py_CLEAR(domains);
    Py_CLEAR(context);
}

namespace {

// ---- Context: torch's names for the flags of a root ----

Ref active(ContextObject &context)
{
    const fc_root_ending ending = context.course.ending;
    return ending == FC_ENDING_OPEN ? Ref::borrow(Py_None) : to_python(ending == FC_ENDING_MANUAL);
}

void set_active(ContextObject &context, PyObject *value)
{
    context.course.ending = value == Py_None  ? FC_ENDING_OPEN
                            : truth_of(value) ? FC_ENDING_MANUAL
                                              : FC_ENDING_AUTOMATIC;
}

// A backward that failed has not completed.
bool is_queued(ContextObject &context)
{
    return context.course.awaits_end || context.course.is_failed;
}

void set_pending(ContextObject &context, PyObject *value)
{
    const bool before = std::exchange(context.awaits_handle, truth_of(value));
    process.n_awaited += context.awaits_handle - before;
}

PyGetSetDef context_properties[] = {
    flag_property<[](ContextObject &context) -> bool & { return context.course.is_last_backward; }>(
        "is_last_backward"),
    flag_property<[](ContextObject &context) -> bool & { return context.course.ends_manually; }>(
        "manual_backward_finalization"),
    property<active, set_active>("manual_backward_finalization_active"),
    property<is_queued, [](ContextObject &context,
                           PyObject *value) { context.course.awaits_end = truth_of(value); }>(
        "post_backward_final_callback_queued"),
    property<&ContextObject::awaits_handle, set_pending>("gradient_reduction_pending"),
    {}};

// ---- Root ----

void root_call_end_backward(RootObject &root)
{
    check_raised(fc_root_begin_backward(&root.course));
    root_end_backward(&root);
}

void root_finalize_backward(RootObject &root)
{
    log_event("FSDP::finalize_backward");
    Range range("FSDP::finalize_backward");
    check_raised(fc_root_finalize_backward(&root.course));
    if (root.streams != nullptr) {
        root.streams->show_caller();
    }
}

void root_drop_raised_forward(RootObject &root)
{
    if (root.course.has_raised) {
        root_reset(&root, false);
    }
}

Ref root_iteration_root(RootObject &root)
{
    const fc_root_module *opener = root.course.opener;
    return Ref::borrow(opener != nullptr ? static_cast<PyObject *>(opener->owner) : Py_None);
}

PyMemberDef root_members[] = {
    {"states", T_OBJECT, offsetof(RootObject, states), READONLY, nullptr},
    {"domains", T_OBJECT, offsetof(RootObject, domains), READONLY, nullptr},
    {"calls_methods", T_BOOL, offsetof(RootObject, calls_methods), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef root_properties[] = {
    property<[](RootObject &root) { return root.course.backward; }>("backward"),
    property<root_iteration_root>("iteration_root"),
    property<[](RootObject &root) { return fc_root_is_between_steps(&root.course); }>(
        "is_between_steps"),
    property<[](RootObject &root) { return root_in_backward(&root) && !in_autograd_backward(); }>(
        "awaits_end"),
    {}};

PyMethodDef root_methods[] = {
    method<[](RootObject &root, PyObject *group) {
        check_raised(fc_root_pass(&root.course, &owned_by<GroupObject>(group).course));
    }>("post_backward"),
    method<root_call_end_backward>("end_backward"),
    method<root_finalize_backward>("finalize_backward"),
    method<[](RootObject &root) { root.looks_around = true; }>("look_again"),
    method<[](RootObject &root) { root_reset(&root, true); }>("reset"),
    method<root_drop_raised_forward>("drop_raised_forward"),
    {}};

} // namespace

int register_root(PyObject *module)
{
    if (add_type<ContextObject>(module, {.name = "fsdp_c._C.Context",
                                         .properties = context_properties,
                                         .flags = Py_TPFLAGS_BASETYPE}) < 0) {
        return -1;
    }
    return add_type<RootObject>(module, {.name = "fsdp_c._C.Root",
                                         .methods = root_methods,
                                         .properties = root_properties,
                                         .members = root_members});
}

} // namespace fc
