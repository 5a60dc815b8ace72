// _C.Layouts and _C.Locals: what many DTensors have on this rank.
#ifndef FC_BIND_TENSOR_LOCAL_TENSORS_H
#define FC_BIND_TENSOR_LOCAL_TENSORS_H

#include <Python.h>

int fc_register_locals(PyObject *module);

#endif
