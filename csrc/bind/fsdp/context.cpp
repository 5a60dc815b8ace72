// The Python type Context: torch's names for the flags of a root.
#include "bind/fsdp/context.h"

#include "bind/python/process.h"
#include "bind/python/python.h"

#include <cstddef>

namespace fc {

namespace {

PyTypeObject *context_type = nullptr;

ContextObject *as_context(PyObject *self)
{
    return reinterpret_cast<ContextObject *>(self);
}

PyObject *context_new(PyTypeObject *type, PyObject *, PyObject *)
{
    PyObject *self = type->tp_alloc(type, 0);
    if (self != nullptr) {
        as_context(self)->course.is_last_backward = true;
    }
    return self;
}

void context_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    process.n_awaited -= as_context(self)->awaits_handle;
    type->tp_free(self);
    Py_DECREF(type);
}

// None, or whether the running backward waits for finalize_backward().
PyObject *get_active(PyObject *self, void *)
{
    const fc_root_ending ending = as_context(self)->course.ending;
    return ending == FC_ENDING_OPEN ? Py_NewRef(Py_None)
                                    : PyBool_FromLong(ending == FC_ENDING_MANUAL);
}

int set_active(PyObject *self, PyObject *value, void *)
{
    const int manual = value == nullptr ? -1 : PyObject_IsTrue(value);
    if (manual >= 0) {
        as_context(self)->course.ending = value == Py_None ? FC_ENDING_OPEN
                                          : manual != 0    ? FC_ENDING_MANUAL
                                                           : FC_ENDING_AUTOMATIC;
    }
    return manual < 0 ? -1 : 0;
}

// A backward that failed has not completed.
PyObject *get_queued(PyObject *self, void *)
{
    const fc_root_context &course = as_context(self)->course;
    return PyBool_FromLong(course.awaits_end || course.is_failed);
}

int set_queued(PyObject *self, PyObject *value, void *)
{
    return flag_set(self, value,
                    reinterpret_cast<void *>(offsetof(ContextObject, course.awaits_end)));
}

PyObject *get_pending(PyObject *self, void *)
{
    return PyBool_FromLong(as_context(self)->awaits_handle);
}

int set_pending(PyObject *self, PyObject *value, void *)
{
    ContextObject *context = as_context(self);
    const char before = context->awaits_handle;
    const int result =
        flag_set(self, value, reinterpret_cast<void *>(offsetof(ContextObject, awaits_handle)));
    process.n_awaited += context->awaits_handle - before;
    return result;
}

PyGetSetDef context_properties[] = {
    FC_FLAG("is_last_backward", ContextObject, course.is_last_backward, nullptr),
    FC_FLAG("manual_backward_finalization", ContextObject, course.ends_manually, nullptr),
    {"manual_backward_finalization_active", get_active, set_active,
     "None, or whether the running backward waits for finalize_backward()", nullptr},
    {"post_backward_final_callback_queued", get_queued, set_queued,
     "whether a backward is going on, or has failed", nullptr},
    {"gradient_reduction_pending", get_pending, set_pending,
     "whether a handle of finalize_backward() is to be waited for", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot context_slots[] = {
    {Py_tp_new, reinterpret_cast<void *>(context_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(context_dealloc)},
    {Py_tp_getset, context_properties},
    {Py_tp_doc, const_cast<char *>("Base of FSDPStateContext: what the units of a root share.")},
    {0, nullptr}};
PyType_Spec context_spec = {"fsdp_c._C.Context", sizeof(ContextObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, context_slots};

} // namespace

PyObject *flag_get(PyObject *self, void *offset)
{
    return PyBool_FromLong(reinterpret_cast<char *>(self)[reinterpret_cast<size_t>(offset)]);
}

int flag_set(PyObject *self, PyObject *value, void *offset)
{
    if (value == nullptr) {
        PyErr_SetString(PyExc_AttributeError, "cannot delete the attribute");
        return -1;
    }
    const int truth = PyObject_IsTrue(value);
    if (truth >= 0) {
        reinterpret_cast<char *>(self)[reinterpret_cast<size_t>(offset)] = static_cast<char>(truth);
    }
    return truth < 0 ? -1 : 0;
}

ContextObject *context_of(PyObject *object)
{
    if (!PyObject_TypeCheck(object, context_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a Context");
        throw_python();
    }
    return as_context(object);
}

} // namespace fc

int fc_register_context(PyObject *module)
{
    return fc::add_type(module, "Context", &fc::context_spec, &fc::context_type);
}
