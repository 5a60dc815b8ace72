// Python types around C++ objects: what their functions begin and end with.
#ifndef FC_BIND_PYTHON_OBJECTS_H
#define FC_BIND_PYTHON_OBJECTS_H

#include "bind/python/fields.h"
#include "bind/python/python.h"

#include <cstring>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

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

// The same after a check of its type; the error names the type with its article.
template <typename T> inline T &owned_by(PyObject *self, PyTypeObject *type, const char *expected)
{
    if (type == nullptr || !PyObject_TypeCheck(self, type)) {
        PyErr_Format(PyExc_TypeError, "expected %s, got %s", expected, Py_TYPE(self)->tp_name);
        throw_python();
    }
    return owned<T>(self);
}

// ---- types, methods and properties from functions of what an object owns ----

inline PyObject *to_python(Ref object)
{
    return object.release();
}
inline PyObject *to_python(fc_status status)
{
    check(status);
    Py_RETURN_NONE;
}
inline PyObject *to_python(bool value)
{
    return PyBool_FromLong(value);
}
inline PyObject *to_python(int value)
{
    return PyLong_FromLong(value);
}
inline PyObject *to_python(const char *text)
{
    return PyUnicode_FromString(text);
}

// What Python calls for `function`, by what it takes beside the owned object.
template <auto function> struct Called;

template <typename R, typename T, R (*function)(T &, Fields &)> struct Called<function> {
    static constexpr int flags = METH_FASTCALL | METH_KEYWORDS;
    static PyObject *call(PyObject *self, PyObject *const *values, Py_ssize_t n, PyObject *names)
    {
        return guarded([&] {
            Fields given(values, n, names);
            return to_python(function(owned<T>(self), given));
        });
    }
};

template <typename R, typename T, R (*function)(T &, PyObject *)> struct Called<function> {
    static constexpr int flags = METH_O;
    static PyObject *call(PyObject *self, PyObject *argument)
    {
        return guarded([&] { return to_python(function(owned<T>(self), argument)); });
    }
};

template <typename R, typename T, R (*function)(T &)> struct Called<function> {
    static constexpr int flags = METH_NOARGS;
    static PyObject *call(PyObject *self, PyObject *)
    {
        return guarded([&] { return to_python(function(owned<T>(self))); });
    }
    static PyObject *get(PyObject *self, void *) { return call(self, nullptr); }
};

template <auto function> inline PyMethodDef method(const char *name, const char *doc)
{
    using Call = Called<function>;
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(Call::call)), Call::flags,
            doc};
}

template <auto function> inline PyGetSetDef property(const char *name, const char *doc)
{
    return {name, Called<function>::get, nullptr, doc, nullptr};
}

template <typename T, std::unique_ptr<T> (*make)(Fields &)>
inline PyObject *new_owner(PyTypeObject *type, PyObject *unnamed, PyObject *named)
{
    return guarded([&] {
        Fields given(unnamed, named);
        return make_owner(type, make(given)).release();
    });
}

// Makes the type "fsdp_c._C.Name" of objects that own what `make` makes, with `more` slots, and
// shows it in the module; the type is the process's. -1 with the Python error set.
template <typename T, std::unique_ptr<T> (*make)(Fields &)>
inline int add_owner(PyObject *module, const char *name, std::initializer_list<PyType_Slot> more,
                     PyTypeObject **out)
{
    std::vector<PyType_Slot> slots = {{Py_tp_new, reinterpret_cast<void *>(new_owner<T, make>)},
                                      {Py_tp_dealloc, reinterpret_cast<void *>(free_owner<T>)}};
    slots.insert(slots.end(), more);
    slots.push_back({0, nullptr});
    PyType_Spec spec = {name, sizeof(Owning<T>), 0, Py_TPFLAGS_DEFAULT, slots.data()};
    return add_type(module, std::strrchr(name, '.') + 1, &spec, out);
}

template <typename Object>
inline PyCFunction fastcall(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t))
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

// Of METH_VARARGS | METH_KEYWORDS.
inline PyCFunction with_names(PyCFunctionWithKeywords function)
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
