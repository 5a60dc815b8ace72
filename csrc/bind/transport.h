/* `_C.Transport`: a transport of the core, made over callables of Python. */
#ifndef FC_BIND_TRANSPORT_H
#define FC_BIND_TRANSPORT_H

#include <Python.h>

#include "transport/transport.h"

/* Borrowed: valid while `object` lives, so whoever keeps the pointer keeps a reference to the
 * object. Raises TypeError and returns nullptr for anything but a `_C.Transport`. */
fc_transport *fc_transport_from_object(PyObject *object);

int fc_register_transport(PyObject *module);

#endif
