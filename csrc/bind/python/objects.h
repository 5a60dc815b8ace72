// Python types that own a C++ object: their functions are the object's, by templates.
#ifndef FC_BIND_PYTHON_OBJECTS_H
#define FC_BIND_PYTHON_OBJECTS_H

#include "bind/python/fields.h"
#include "bind/python/python.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <type_traits>
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

// What a Python object is about: what it owns, or itself if T begins with PyObject_HEAD.
template <typename T> inline T &owned(PyObject *self)
{
    if constexpr (requires(T &object) { object.ob_base; }) {
        return *as<T>(self);
    } else {
        return *as<Owning<T>>(self)->owned;
    }
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

// ---- values ----

// What a function returns, for Python.
inline Ref to_python(Ref value)
{
    return value;
}

inline Ref to_python(const at::Tensor &value)
{
    return checked(THPVariable_Wrap(value));
}

inline Ref to_python(fc_status status)
{
    check(status);
    return Ref::borrow(Py_None);
}

inline Ref to_python(const char *text)
{
    return checked(PyUnicode_FromString(text));
}

template <typename Number>
    requires std::is_arithmetic_v<Number>
inline Ref to_python(Number value)
{
    if constexpr (std::is_same_v<Number, bool>) {
        return Ref::borrow(value ? Py_True : Py_False);
    } else if constexpr (std::is_floating_point_v<Number>) {
        return checked(PyFloat_FromDouble(value));
    } else if constexpr (std::is_signed_v<Number>) {
        return checked(PyLong_FromLongLong(value));
    } else {
        return checked(PyLong_FromUnsignedLongLong(value));
    }
}

template <typename T> inline Ref to_python(const std::vector<T> &values)
{
    Ref list = checked(PyList_New(static_cast<Py_ssize_t>(values.size())));
    for (size_t i = 0; i < values.size(); i++) {
        PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), to_python(values[i]).release());
    }
    return list;
}

// {name: value}
using Entries = std::initializer_list<std::pair<const char *, Ref>>;

inline Ref dict_of(Entries entries)
{
    Ref dict = checked(PyDict_New());
    for (const auto &[name, value] : entries) {
        check(PyDict_SetItemString(dict.get(), name, value.get()));
    }
    return dict;
}

// ---- functions ----

// Arguments by position or name, as PyArg_ParseTupleAndKeywords has them.
template <size_t N, typename... Out>
void parse(PyObject *args, PyObject *named, const char *format, const char *const (&names)[N],
           Out... out)
{
    const char *ended[N + 1] = {};
    std::copy_n(names, N, ended);
    if (!PyArg_ParseTupleAndKeywords(args, named, format, const_cast<char **>(ended), out...)) {
        throw_python();
    }
}

// Calls `function` with the owned object (without one if T is void) and returns what Python gets.
template <typename T, auto function, typename... Args>
PyObject *called([[maybe_unused]] PyObject *self, Args... args)
{
    const auto call = [&]() -> decltype(auto) {
        if constexpr (std::is_void_v<T>) {
            return std::invoke(function, args...);
        } else {
            return std::invoke(function, owned<T>(self), args...);
        }
    };
    return guarded([&]() -> PyObject * {
        if constexpr (std::is_void_v<decltype(call())>) {
            call();
            Py_RETURN_NONE;
        } else {
            return to_python(call()).release();
        }
    });
}

template <typename T, typename Function, typename... Args>
struct Takes : std::is_invocable<Function, T &, Args...> {};
template <typename Function, typename... Args>
struct Takes<void, Function, Args...> : std::is_invocable<Function, Args...> {};

// Named arguments only, without a tuple or dict.
template <typename T, auto function>
PyObject *called_by_name(PyObject *self, PyObject *const *values, Py_ssize_t n, PyObject *names)
{
    return guarded([&] {
        Fields given(values, n, names);
        return to_python(std::invoke(function, owned<T>(self), given)).release();
    });
}

// A method from a function, or member function, of the owned object. What it takes beside that says
// how Python calls it: nothing, one object, Fields, or tuple and dict for `parse`.
template <typename T, auto function>
PyMethodDef method(const char *name, const char *doc, int flags = 0)
{
    using Function = decltype(function);
    if constexpr (Takes<T, Function>::value) {
        const auto call = [](PyObject *self, PyObject *) { return called<T, function>(self); };
        return {name, call, METH_NOARGS | flags, doc};
    } else if constexpr (Takes<T, Function, PyObject *>::value) {
        return {name, called<T, function, PyObject *>, METH_O | flags, doc};
    } else if constexpr (Takes<T, Function, Fields &>::value) {
        auto *call = reinterpret_cast<void *>(called_by_name<T, function>);
        return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL | METH_KEYWORDS | flags,
                doc};
    } else {
        auto *call = reinterpret_cast<void *>(called<T, function, PyObject *, PyObject *>);
        return {name, reinterpret_cast<PyCFunction>(call), METH_VARARGS | METH_KEYWORDS | flags,
                doc};
    }
}

// The same of a module; with METH_STATIC of a type.
template <auto call> PyMethodDef function(const char *name, const char *doc, int flags = 0)
{
    return method<void, call>(name, doc, flags);
}

// A property from a member, or from a function of the owned object.
template <typename T, auto member> PyGetSetDef getter(const char *name, const char *doc)
{
    const auto get = [](PyObject *self, void *) { return called<T, member>(self); };
    return {name, get, nullptr, doc, nullptr};
}

// Whose a function is: what its first argument refers to.
template <typename Function> struct FirstArgument;
template <typename R, typename T, typename... Args> struct FirstArgument<R (*)(T &, Args...)> {
    using type = T;
};

template <auto call> PyMethodDef method(const char *name, const char *doc)
{
    return method<typename FirstArgument<decltype(call)>::type, call>(name, doc);
}

template <auto call> PyGetSetDef property(const char *name, const char *doc)
{
    return getter<typename FirstArgument<decltype(call)>::type, call>(name, doc);
}

// ---- types ----

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

// tp_new: T is made from arguments, if it takes any.
template <typename T> PyObject *construct(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return guarded([&] {
        if constexpr (std::is_constructible_v<T, PyObject *, PyObject *>) {
            return make_owner(type, std::make_unique<T>(args, named)).release();
        } else {
            check(PyArg_ParseTuple(args, "") ? 0 : -1);
            return make_owner(type, std::make_unique<T>()).release();
        }
    });
}

struct OwnerType {
    const char *name; // "fsdp_c._C.<name>"
    const char *doc;
    newfunc make; // null: made in C++ only
    PyMethodDef *methods;
    PyGetSetDef *getters; // null: none
};

// Makes the type of Owning<T> and shows it in the module; -1 with the Python error set. The garbage
// collector traverses it if there is a T::traverse.
template <typename T>
int add_owner_type(PyObject *module, const OwnerType &type, PyTypeObject **out = nullptr)
{
    constexpr bool is_traversed =
        requires(const T &object, visitproc visit, void *arg) { object.traverse(visit, arg); };
    std::vector<PyType_Slot> slots = {{Py_tp_doc, const_cast<char *>(type.doc)},
                                      {Py_tp_methods, type.methods}};
    const auto add = [&](int slot, auto *function) {
        slots.push_back({slot, reinterpret_cast<void *>(function)});
    };
    unsigned flags = Py_TPFLAGS_DEFAULT;
    if (type.make != nullptr) {
        add(Py_tp_new, type.make);
    } else {
        flags |= Py_TPFLAGS_DISALLOW_INSTANTIATION;
    }
    if (type.getters != nullptr) {
        add(Py_tp_getset, type.getters);
    }
    if constexpr (is_traversed) {
        add(Py_tp_dealloc, free_traversed<T>);
        add(Py_tp_traverse, traverse_owner<T>);
        add(Py_tp_clear, clear_owner<T>);
        flags |= Py_TPFLAGS_HAVE_GC;
    } else {
        add(Py_tp_dealloc, free_owner<T>);
    }
    slots.push_back({0, nullptr});
    PyType_Spec spec = {type.name, sizeof(Owning<T>), 0, flags, slots.data()};
    PyTypeObject *made;
    return add_type(module, std::strrchr(type.name, '.') + 1, &spec, out == nullptr ? &made : out);
}

} // namespace fc

#endif
