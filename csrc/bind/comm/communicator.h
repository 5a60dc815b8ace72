/* `_C.Comm`: collectives of the core on CPU tensors. */
#ifndef FC_BIND_COMM_COMMUNICATOR_H
#define FC_BIND_COMM_COMMUNICATOR_H

#include <Python.h>

int fc_register_comm(PyObject *module);

#endif
