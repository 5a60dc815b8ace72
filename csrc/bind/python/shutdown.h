// The interpreter's end: other threads are through with it before it goes.
#ifndef FC_BIND_PYTHON_SHUTDOWN_H
#define FC_BIND_PYTHON_SHUTDOWN_H

#include <Python.h>

// close(), of the module.
PyObject *fc_close(PyObject *, PyObject *);

#endif
