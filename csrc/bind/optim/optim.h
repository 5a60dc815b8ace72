// _C.Params: optimizer steps over the local tensors of DTensors.
#ifndef FC_BIND_OPTIM_OPTIM_H
#define FC_BIND_OPTIM_OPTIM_H

#include <Python.h>

int fc_register_optim(PyObject *module);

#endif
