// Names the parameter in torch's error about a sharded weight among plain tensors.
#ifndef FC_BIND_MIXED_H
#define FC_BIND_MIXED_H

#include <Python.h>

// name_mixed(describe): from now on describe(tensors) -> text, which is added to that error; an
// empty text leaves it alone.
PyObject *fc_name_mixed(PyObject *module, PyObject *describe);

#endif
