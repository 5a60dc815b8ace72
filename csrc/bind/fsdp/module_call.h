// Calling a sharded module without the detour that nn.Module makes for hooks.
#ifndef FC_BIND_FSDP_MODULE_CALL_H
#define FC_BIND_FSDP_MODULE_CALL_H

#include <Python.h>

// call_directly(cls): instances whose only hooks are their unit's run them around forward in C.
// Does nothing to a class that has a way of its own to be called.
PyObject *fc_call_directly(PyObject *module, PyObject *cls);

#endif
