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
        static const char *const names[] = {"states", "domains", "context", nullptr};
        if (!PyArg_ParseTupleAndKeywords(args, named, "$O!O!O", const_cast<char **>(names),
                                         &PyList_Type, &states, &PyList_Type, &domains, &context)) {
            return nullptr;
        }
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

// Runs `body` on the root.
template <typename Body> PyObject *with_root(PyObject *self, Body &&body)
{
    return guarded([&]() -> PyObject * {
        body(as<RootObject>(self));
        Py_RETURN_NONE;
    });
}

PyObject *root_call_post_backward(PyObject *self, PyObject *arg)
{
    return with_root(self, [arg](RootObject *root) {
        check_raised(fc_root_pass(&root->course, &group_of(arg)->course));
    });
}

PyObject *root_call_end_backward(PyObject *self, PyObject *)
{
    return with_root(self, [](RootObject *root) {
        check_raised(fc_root_begin_backward(&root->course));
        root_end_backward(root);
    });
}

PyObject *root_call_finalize_backward(PyObject *self, PyObject *)
{
    return with_root(self, root_finalize_backward);
}

PyObject *root_call_reset(PyObject *self, PyObject *)
{
    return with_root(self, [](RootObject *root) { root_reset(root, true); });
}

PyObject *root_look_again(PyObject *self, PyObject *)
{
    as<RootObject>(self)->is_replaced = true;
    Py_RETURN_NONE;
}

PyObject *root_drop_raised_forward(PyObject *self, PyObject *)
{
    return with_root(self, [](RootObject *root) {
        if (root->course.has_raised) {
            root_reset(root, false);
        }
    });
}

PyObject *root_get_iteration_root(PyObject *self, void *)
{
    const fc_root_module *opener = as<RootObject>(self)->course.opener;
    return Py_NewRef(opener != nullptr ? static_cast<PyObject *>(opener->owner) : Py_None);
}

PyObject *root_get_between_steps(PyObject *self, void *)
{
    return PyBool_FromLong(fc_root_is_between_steps(&as<RootObject>(self)->course));
}

PyObject *root_awaits_end(PyObject *self, void *)
{
    return PyBool_FromLong(root_in_backward(as<RootObject>(self)) && !in_autograd_backward());
}

PyMemberDef root_members[] = {
    {"states", T_OBJECT, offsetof(RootObject, states), READONLY, "in named_modules order"},
    {"domains", T_OBJECT, offsetof(RootObject, domains), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyObject *root_get_backward(PyObject *self, void *)
{
    return PyLong_FromUnsignedLongLong(as<RootObject>(self)->course.backward);
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
