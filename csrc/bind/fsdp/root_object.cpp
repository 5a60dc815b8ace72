// The Python type Root: fields, lifetime, methods. What it does is in root.cpp.
#include "bind/fsdp/domain.h"
#include "bind/fsdp/root.h"
#include "bind/python/objects.h"
#include "bind/python/raised.h"

#include <structmember.h>

#include <vector>

namespace fc {

namespace {

PyTypeObject *root_type = nullptr;

// Root(states=, domains=, context=)
PyObject *root_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return guarded([&]() -> PyObject * {
        PyObject *states, *domains, *context;
        parse(args, named, "$O!O!O", {"states", "domains", "context"}, &PyList_Type, &states,
              &PyList_Type, &domains, &context);
        std::vector<fc_domain *> linked;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(domains); i++) {
            linked.push_back(domain_of(PyList_GET_ITEM(domains, i)));
        }
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(states); i++) {
            state_of(PyList_GET_ITEM(states, i));
        }
        context_of(context);
        Ref self = checked(type->tp_alloc(type, 0));
        auto *root = as<RootObject>(self.get());
        root->states = Py_NewRef(states);
        root->domains = Py_NewRef(domains);
        root->context = context_of(Py_NewRef(context));
        root->streams = linked.empty() ? nullptr : domain_streams(PyList_GET_ITEM(domains, 0));
        root->has_modes = has_dispatch_modes();
        root_init(root, linked);
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
    auto *root = as<RootObject>(self);
    fc_root_fini(&root->course);
    root->streams = nullptr;
    Py_CLEAR(root->states);
    Py_CLEAR(root->domains);
    Py_CLEAR(root->context);
    return 0;
}

void root_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    root_clear(self);
    delete as<RootObject>(self)->updates;
    free_object(self);
}

void root_call_post_backward(RootObject &root, PyObject *group)
{
    check_raised(fc_root_pass(&root.course, &group_of(group)->course));
}

void root_call_end_backward(RootObject &root)
{
    check_raised(fc_root_begin_backward(&root.course));
    root_end_backward(&root);
}

void root_call_finalize_backward(RootObject &root)
{
    root_finalize_backward(&root);
}

void root_call_reset(RootObject &root)
{
    root_reset(&root, true);
}

void root_look_again(RootObject &root)
{
    root.is_replaced = true;
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

bool root_is_between_steps(RootObject &root)
{
    return fc_root_is_between_steps(&root.course);
}

bool root_awaits_end(RootObject &root)
{
    return root_in_backward(&root) && !in_autograd_backward();
}

uint64_t root_backward(RootObject &root)
{
    return root.course.backward;
}

PyMemberDef root_members[] = {
    {"states", T_OBJECT, offsetof(RootObject, states), READONLY, "in named_modules order"},
    {"domains", T_OBJECT, offsetof(RootObject, domains), READONLY, nullptr},
    {"calls_methods", T_BOOL, offsetof(RootObject, calls_methods), 0,
     "whether hooks call the methods of some groups"},
    {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef root_properties[] = {
    property<root_backward>("backward", "the number of the running backward, or the next one"),
    property<root_iteration_root>("iteration_root", "the state that began the current forward"),
    property<root_is_between_steps>("is_between_steps",
                                    "whether no forward or backward is going on or to come, and no "
                                    "gradient waits for a reduction"),
    property<root_awaits_end>("awaits_end",
                              "whether a backward is open that autograd will not end"),
    {}};

PyMethodDef root_methods[] = {
    method<root_call_post_backward>("post_backward",
                                    "post_backward(group): reshards it and posts its gradients."),
    method<root_call_end_backward>("end_backward", "Finishes all reductions and closes the phase."),
    method<root_call_finalize_backward>("finalize_backward",
                                        "Reduces what the backwards of a manual ending left."),
    method<root_look_again>("look_again",
                            "The next forward asks who looks at the units' collectives."),
    method<root_call_reset>("reset", "Drops everything of the running step."),
    method<root_drop_raised_forward>(
        "drop_raised_forward",
        "Ends a forward that was left by an exception, as the next one would."),
    {}};

PyType_Slot root_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(root_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(root_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(root_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(root_clear)},
    {Py_tp_members, root_members},
    {Py_tp_getset, root_properties},
    {Py_tp_methods, root_methods},
    {Py_tp_doc, const_cast<char *>("Root(states=, domains=, context=): a root and all below it.")},
    {0, nullptr}};
PyType_Spec root_spec = {"fsdp_c._C.Root", sizeof(RootObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, root_slots};

} // namespace

RootObject *root_of(PyObject *object)
{
    if (!PyObject_TypeCheck(object, root_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a Root");
        throw_python();
    }
    return as<RootObject>(object);
}

} // namespace fc

int fc_register_root(PyObject *module)
{
    return fc::add_type(module, "Root", &fc::root_spec, &fc::root_type);
}
