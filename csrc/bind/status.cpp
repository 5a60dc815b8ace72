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

PyObject *fc_raise(fc_status status)
{
    if (status != FC_ERR_INTERRUPTED || !PyErr_Occurred()) {
        const char *text = fc_last_message();

        PyErr_SetString(exception_of(status), text[0] != '\0' ? text : fc_status_text(status));
    }
    return nullptr;
}
