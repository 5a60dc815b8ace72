// The Python type Root: fields, lifetime, methods. What it does is in root.cpp.
#include "bind/fsdp/state.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/python/raised.h"

#include <structmember.h>

#include <memory>
#include <vector>

namespace fc {

void RootObject::open(PyObject *unnamed, PyObject *named)
{
    std::construct_at(&hold);
    PyObject *given_states, *given_domains, *given_context;
    parse(unnamed, named, "$O!O!O", {"states", "domains", "context"}, &PyList_Type, &given_states,
          &PyList_Type, &given_domains, &given_context);
    std::vector<fc_domain *> linked;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given_domains); i++) {
        linked.push_back(domain_of(PyList_GET_ITEM(given_domains, i)));
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given_states); i++) {
        owned_by<StateObject>(PyList_GET_ITEM(given_states, i));
    }
    context = &owned_by<ContextObject>(given_context);
    Py_INCREF(given_context);
    states = Py_NewRef(given_states);
    domains = Py_NewRef(given_domains);
    streams = linked.empty() ? nullptr : domain_streams(PyList_GET_ITEM(domains, 0));
    has_modes = has_dispatch_modes();
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

void root_call_end_backward(RootObject &root)
{
    check_raised(fc_root_begin_backward(&root.course));
    root_end_backward(&root);
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
    {"states", T_OBJECT, offsetof(RootObject, states), READONLY, "in named_modules order"},
    {"domains", T_OBJECT, offsetof(RootObject, domains), READONLY, nullptr},
    {"calls_methods", T_BOOL, offsetof(RootObject, calls_methods), 0,
     "whether hooks call the methods of some groups"},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef root_properties[] = {
    property<[](RootObject &root) { return root.course.backward; }>(
        "backward", "the number of the running backward, or the next one"),
    property<root_iteration_root>("iteration_root", "the state that began the current forward"),
    property<[](RootObject &root) { return fc_root_is_between_steps(&root.course); }>(
        "is_between_steps", "whether no forward or backward is going on or to come, and no "
                            "gradient waits for a reduction"),
    property<[](RootObject &root) { return root_in_backward(&root) && !in_autograd_backward(); }>(
        "awaits_end", "whether a backward is open that autograd will not end"),
    {}};

PyMethodDef root_methods[] = {
    method<[](RootObject &root, PyObject *group) {
        check_raised(fc_root_pass(&root.course, &owned_by<GroupObject>(group).course));
    }>("post_backward", "post_backward(group): reshards it and posts its gradients."),
    method<root_call_end_backward>("end_backward", "Finishes all reductions and closes the phase."),
    method<[](RootObject &root) { root_finalize_backward(&root); }>(
        "finalize_backward", "Reduces what the backwards of a manual ending left."),
    method<[](RootObject &root) { root.is_replaced = true; }>(
        "look_again", "The next forward asks who looks at the units' collectives."),
    method<[](RootObject &root) { root_reset(&root, true); }>(
        "reset", "Drops everything of the running step."),
    method<root_drop_raised_forward>(
        "drop_raised_forward",
        "Ends a forward that was left by an exception, as the next one would."),
    {}};

} // namespace

int register_root(PyObject *module)
{
    return add_type<RootObject>(
        module, {.name = "fsdp_c._C.Root",
                 .doc = "Root(states=, domains=, context=): a root and all below it.",
                 .methods = root_methods,
                 .properties = root_properties,
                 .members = root_members});
}

} // namespace fc
