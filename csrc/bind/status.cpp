/* Status to exception. */
#include "bind/status.h"

static PyObject *exception_of(fc_status status)
{
    switch (status) {
    case FC_ERR_INVALID:
        return PyExc_ValueError;
    case FC_ERR_NOMEM:
        return PyExc_MemoryError;
    case FC_ERR_SYSTEM:
        return PyExc_OSError;
    case FC_ERR_TIMEOUT:
        return PyExc_TimeoutError;
    case FC_ERR_UNSUPPORTED:
        return PyExc_NotImplementedError;
    case FC_ERR_INTERRUPTED:
        return PyExc_KeyboardInterrupt;
    default:
        return PyExc_RuntimeError;
    }
}

/* The error of a process group, with the last message before its text, caused by it as it was. */
static void raise_from_group()
{
    PyObject *type, *cause, *trace, *error;

    PyErr_Fetch(&type, &cause, &trace);
    PyErr_NormalizeException(&type, &cause, &trace);
    if (trace != nullptr) {
        (void)PyException_SetTraceback(cause, trace);
    }
    Py_DECREF(type);
    Py_XDECREF(trace);
    PyErr_Format(PyExc_RuntimeError, "%s: %S", fc_last_message(), cause);
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyException_SetCause(error, cause); /* takes it */
    PyErr_Restore(type, error, trace);
}

PyObject *fc_raise(fc_status status)
{
    const bool is_set = PyErr_Occurred() != nullptr; /* maybe another than the group's */

    if (status == FC_ERR_GROUP && is_set) {
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            raise_from_group();
        }
    } else if (status != FC_ERR_INTERRUPTED || !is_set) {
        const char *text = fc_last_message();

        PyErr_SetString(exception_of(status), text[0] != '\0' ? text : fc_status_text(status));
    }
    return nullptr;
}
