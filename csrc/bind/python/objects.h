// What the functions of Python types begin and end with.
#ifndef FC_BIND_PYTHON_OBJECTS_H
#define FC_BIND_PYTHON_OBJECTS_H

#include "bind/python/python.h"

#include <memory>
#include <utility>

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

// A Python object that owns a C++ object.
template <typename T> struct Owning {
    PyObject_HEAD
    T *owned; // null when cleared
};

template <typename T> inline T &owned(PyObject *self)
{
    return *as<Owning<T>>(self)->owned;
}

template <typename T> inline Ref make_owner(PyTypeObject *type, std::unique_ptr<T> made)
{
    Ref self = checked(type->tp_alloc(type, 0));
    as<Owning<T>>(self.get())->owned = made.release();
    return self;
}

template <typename T> inline int clear_owner(PyObject *self)
{
    delete std::exchange(as<Owning<T>>(self)->owned, nullptr);
    return 0;
}

template <typename T> inline void free_owner(PyObject *self)
{
    clear_owner<T>(self);
    free_object(self);
}

// The same for types that the garbage collector traverses, by T::traverse.
template <typename T> inline void free_traversed(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    free_owner<T>(self);
}

template <typename T> inline int traverse_owner(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    const T *object = as<Owning<T>>(self)->owned;
    return object == nullptr ? 0 : object->traverse(visit, arg);
}

template <typename Object>
inline PyCFunction fastcall(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t))
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

inline PyCFunction with_names(PyObject *(*function)(PyObject *, PyObject *, PyObject *))
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
