// What the functions of Python types begin and end with.
#ifndef FC_BIND_PYTHON_OBJECTS_H
#define FC_BIND_PYTHON_OBJECTS_H

#include <Python.h>

namespace fc {

template <typename Object> inline Object *as(PyObject *self)
{
    return reinterpret_cast<Object *>(self);
}

inline void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

template <typename Object>
inline PyCFunction fastcall(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t))
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

inline bool has_arguments(Py_ssize_t n, Py_ssize_t wanted)
{
    if (n != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, n);
    }
    return n == wanted;
}

} // namespace fc

#endif
