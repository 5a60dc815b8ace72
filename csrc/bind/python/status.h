/* The one place where a status of the core becomes a Python exception. */
#ifndef FC_BIND_PYTHON_STATUS_H
#define FC_BIND_PYTHON_STATUS_H

#include <Python.h>

#include "base/status.h"

/* Raises the exception for `status` (or what a signal's handler raises, where a peer has failed:
 * Ctrl-C reaches all ranks, one after the other) with this thread's last message; always returns
 * nullptr. For FC_ERR_INTERRUPTED an exception that a callback or a signal handler has set is kept;
 * for FC_ERR_GROUP the message goes before that of the process group. The GIL is held. */
PyObject *fc_raise(fc_status status);

#endif
