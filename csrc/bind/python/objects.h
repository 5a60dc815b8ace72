// Python types that own a C++ object: their functions are the object's, by templates. What they
// take and return, and what for, says fsdp_c/_C.pyi.
#ifndef FC_BIND_PYTHON_OBJECTS_H
#define FC_BIND_PYTHON_OBJECTS_H

#include "bind/python/fields.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <type_traits>
#include <vector>

namespace fc {

template <typename Object> inline Object *as(PyObject *self)
{
    return reinterpret_cast<Object *>(self);
}

// A Python object that owns a C++ object.
template <typename T> struct Owning {
    PyObject_HEAD
    T *owned; // null when cleared
};

// Whether T is a Python object itself: it begins with PyObject_HEAD.
template <typename T> constexpr bool is_object = requires(T &object) { object.ob_base; };

// Whether the garbage collector traverses it.
template <typename T>
constexpr bool is_traversed =
    requires(T &object, visitproc visit, void *arg) { object.traverse(visit, arg); };

// What a Python object is about: what it owns, or itself.
template <typename T> inline T &owned(PyObject *self)
{
    if constexpr (is_object<T>) {
        return *as<T>(self);
    } else {
        return *as<Owning<T>>(self)->owned;
    }
}

// Python's type for T, the process's, once add_type has made it.
template <typename T> inline PyTypeObject *python_type = nullptr;

// The same after a check of its type; TypeError as an exception.
template <typename T> inline T &owned_by(PyObject *self)
{
    if (!PyObject_TypeCheck(self, python_type<T>)) {
        raise_error(PyExc_TypeError, "expected %s, got %s", python_type<T>->tp_name,
                    Py_TYPE(self)->tp_name);
    }
    return owned<T>(self);
}

inline PyCFunction fastcall(PyObject *(*function)(PyObject *, PyObject *const *, Py_ssize_t))
{
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(function));
}

inline void check_arguments(Py_ssize_t n, Py_ssize_t wanted)
{
    if (n != wanted) {
        raise_error(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, n);
    }
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
    requires std::is_arithmetic_v<Number> || std::is_enum_v<Number>
inline Ref to_python(Number value)
{
    if constexpr (std::is_same_v<Number, bool>) {
        return Ref::borrow(value ? Py_True : Py_False);
    } else if constexpr (std::is_floating_point_v<Number>) {
        return checked(PyFloat_FromDouble(value));
    } else if constexpr (std::is_enum_v<Number> || std::is_signed_v<Number>) {
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

// {name: value}; FC_ENTRY: a field under its name.
#define FC_ENTRY(of, name) {#name, to_python((of).name)}
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
        return called<T, function, Fields &>(self, given);
    });
}

// Whose a function is: what its first argument refers to, or whose member it is.
template <typename Function>
struct FirstArgument : FirstArgument<decltype(+std::declval<Function>())> {}; // of a lambda
template <typename R, typename T, typename... Args> struct FirstArgument<R (*)(T &, Args...)> {
    using type = std::remove_const_t<T>;
};
template <typename Member, typename T> struct FirstArgument<Member T::*> {
    using type = T;
};
template <auto call> using OwnerOf = typename FirstArgument<decltype(call)>::type;

// A method from a function, or member function, of the owned object. What it takes beside that says
// how Python calls it: nothing, one object, Fields, or tuple and dict for `parse`.
template <auto function, typename T = OwnerOf<function>>
PyMethodDef method(const char *name, int flags = 0)
{
    using Function = decltype(function);
    if constexpr (Takes<T, Function>::value) {
        const auto call = [](PyObject *self, PyObject *) { return called<T, function>(self); };
        return {name, call, METH_NOARGS | flags, nullptr};
    } else if constexpr (Takes<T, Function, PyObject *>::value) {
        return {name, called<T, function, PyObject *>, METH_O | flags, nullptr};
    } else if constexpr (Takes<T, Function, Fields &>::value) {
        auto *call = reinterpret_cast<void *>(called_by_name<T, function>);
        return {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL | METH_KEYWORDS | flags,
                nullptr};
    } else {
        auto *call = reinterpret_cast<void *>(called<T, function, PyObject *, PyObject *>);
        return {name, reinterpret_cast<PyCFunction>(call), METH_VARARGS | METH_KEYWORDS | flags,
                nullptr};
    }
}

// The same of a module; with METH_STATIC of a type.
template <auto call> PyMethodDef function(const char *name, int flags = 0)
{
    return method<call, void>(name, flags);
}

// A property from a member, or from a function of the owned object; with `set`, a function of it
// that gets the new value, it can be assigned.
template <auto get, auto set = nullptr, typename T = OwnerOf<get>>
PyGetSetDef property(const char *name)
{
    PyGetSetDef made = {name, [](PyObject *self, void *) { return called<T, get>(self); }, nullptr,
                        nullptr, nullptr};
    if constexpr (!std::is_null_pointer_v<decltype(set)>) {
        made.set = [](PyObject *self, PyObject *value, void *) {
            if (value == nullptr) {
                PyErr_SetString(PyExc_AttributeError, "cannot delete the attribute");
                return -1;
            }
            return Ref::take(called<T, set, PyObject *>(self, value)) ? 0 : -1;
        };
    }
    return made;
}

// The same of a flag, to which `find` refers; it takes any truth value, as Python's own attributes
// do.
template <auto find, typename T = OwnerOf<find>> PyGetSetDef flag_property(const char *name)
{
    constexpr auto get = [](T &object) { return static_cast<bool>(find(object)); };
    constexpr auto set = [](T &object, PyObject *value) { find(object) = truth_of(value); };
    return property<get, set>(name);
}

// ---- types ----

// What a type shows. The tables, which may be missing, stay.
struct TypeParts {
    const char *name; // "fsdp_c._C.<name>"
    PyMethodDef *methods = nullptr;
    PyGetSetDef *properties = nullptr;
    PyMemberDef *members = nullptr;
    reprfunc repr = nullptr;
    setattrofunc setattro = nullptr;
    unsigned flags = 0;
};

template <typename T> inline Ref make_owner(PyTypeObject *type, std::unique_ptr<T> made)
{
    Ref self = checked(type->tp_alloc(type, 0));
    as<Owning<T>>(self.get())->owned = made.release();
    return self;
}

// One that Python made: see add_type.
template <typename T> Ref construct(PyTypeObject *type, PyObject *unnamed, PyObject *named)
{
    if constexpr (is_object<T>) {
        Ref self = checked(type->tp_alloc(type, 0)); // all zero
        if constexpr (requires(T &object, Fields &given) { object.open(given); }) {
            Fields given(unnamed, named);
            as<T>(self.get())->open(given);
        } else {
            as<T>(self.get())->open();
        }
        return self;
    } else if constexpr (std::is_constructible_v<T, Fields &>) {
        Fields given(unnamed, named);
        return make_owner(type, std::make_unique<T>(given));
    } else {
        check(PyArg_ParseTuple(unnamed, "") ? 0 : -1);
        return make_owner(type, std::make_unique<T>());
    }
}

template <typename T> PyObject *new_object(PyTypeObject *type, PyObject *unnamed, PyObject *named)
{
    return guarded([&] { return construct<T>(type, unnamed, named).release(); });
}

template <typename T> int traverse_object(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    if constexpr (!is_object<T>) {
        if (as<Owning<T>>(self)->owned == nullptr) {
            return 0;
        }
    }
    return owned<T>(self).traverse(visit, arg);
}

template <typename T> int clear_object(PyObject *self)
{
    if constexpr (!is_object<T>) {
        delete std::exchange(as<Owning<T>>(self)->owned, nullptr);
    } else if constexpr (requires(T &object) { object.clear(); }) {
        as<T>(self)->clear();
    }
    return 0;
}

template <typename T> void free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if constexpr (is_traversed<T>) {
        PyObject_GC_UnTrack(self);
    }
    clear_object<T>(self);
    if constexpr (requires(T &object) { object.close(); }) {
        as<T>(self)->close();
    }
    type->tp_free(self);
    Py_DECREF(type);
}

// Makes the type of objects that own a T, or of T that begin with PyObject_HEAD, and shows it in
// the module; -1 with the Python error set.
//
// Python makes them, unless `flags` forbid it: an owned T from arguments (Fields, tuple and dict)
// or none, another by T::open(), before which it is all zero. The garbage collector traverses them
// if there is a T::traverse; T::clear() and T::close() are the first and the last of an object's
// end.
template <typename T> int add_type(PyObject *module, const TypeParts &parts)
{
    std::vector<PyType_Slot> slots;
    const auto add = [&](int slot, auto *content) {
        if (content != nullptr) {
            slots.push_back({slot, (void *)content});
        }
    };
    add(Py_tp_methods, parts.methods);
    add(Py_tp_getset, parts.properties);
    add(Py_tp_members, parts.members);
    add(Py_tp_repr, parts.repr);
    add(Py_tp_setattro, parts.setattro);
    add(Py_tp_dealloc, free_object<T>);
    if ((parts.flags & Py_TPFLAGS_DISALLOW_INSTANTIATION) == 0) {
        add(Py_tp_new, new_object<T>);
    }
    if constexpr (is_traversed<T>) {
        add(Py_tp_traverse, traverse_object<T>);
        add(Py_tp_clear, clear_object<T>);
    }
    slots.push_back({0, nullptr});
    constexpr size_t size = sizeof(std::conditional_t<is_object<T>, T, Owning<T>>);
    constexpr unsigned long flags = Py_TPFLAGS_DEFAULT | (is_traversed<T> ? Py_TPFLAGS_HAVE_GC : 0);
    PyType_Spec spec = {parts.name, size, 0, static_cast<unsigned>(flags | parts.flags),
                        slots.data()};
    python_type<T> = as<PyTypeObject>(PyType_FromSpec(&spec));
    return python_type<T> == nullptr
               ? -1
               : PyModule_AddObjectRef(module, std::strrchr(parts.name, '.') + 1,
                                       reinterpret_cast<PyObject *>(python_type<T>));
}

} // namespace fc

#endif
