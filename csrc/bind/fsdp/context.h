// _C.Context: what fsdp_c's FSDPStateContext is built on; how the backwards of a root end.
#ifndef FC_BIND_FSDP_CONTEXT_H
#define FC_BIND_FSDP_CONTEXT_H

#include <Python.h>

#include "engine/root.h"

namespace fc {

// Shared by a root and everything below it.
struct ContextObject {
    PyObject_HEAD
    fc_root_context course;
    char awaits_handle; // of finalize_backward(async_op=True)
    char has_warned;    // that gradients were left to finalize_backward() and forgotten
};

ContextObject *context_of(PyObject *object); // borrowed; TypeError as an exception

// A getter and a setter for a char or bool of an object that takes any truth value, as Python's own
// attributes do; `offset` is its place.
PyObject *flag_get(PyObject *self, void *offset);
int flag_set(PyObject *self, PyObject *value, void *offset);

} // namespace fc

#define FC_FLAG(name, type, field, doc)                                                            \
    {name, fc::flag_get, fc::flag_set, doc, reinterpret_cast<void *>(offsetof(type, field))}

int fc_register_context(PyObject *module);

#endif
