// _C.Layout and _C.Locals: passes over the memory that many DTensors have on this rank.
#ifndef FC_BIND_LOCALS_H
#define FC_BIND_LOCALS_H

#include <Python.h>

int fc_register_locals(PyObject *module);

// Of the module.
PyObject *fc_norm(PyObject *, PyObject *values);
PyObject *fc_clip_factor(PyObject *, PyObject *args);

#endif
