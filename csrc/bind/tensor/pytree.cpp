// Traversal of arguments and results: the common shapes here, the rest by torch's functions.
#include "bind/tensor/tensors.h"

#include "bind/python/calls.h"
#include "bind/python/fields.h"

#include <torch/csrc/autograd/python_variable.h>

namespace fc {

namespace {

bool is_scalar(PyObject *object)
{
    return object == Py_None || PyLong_Check(object) || PyFloat_Check(object) ||
           PyUnicode_Check(object) || PyBytes_Check(object);
}

// An exact tuple, list or dict, which is opened.
bool is_container(PyObject *object)
{
    return PyTuple_CheckExact(object) || PyList_CheckExact(object) || PyDict_CheckExact(object);
}

// Calls `visit` with all that a simple container holds.
template <typename Visit> void each(PyObject *container, Visit visit)
{
    if (PyDict_CheckExact(container)) {
        PyObject *key, *value;
        Py_ssize_t at = 0;
        while (PyDict_Next(container, &at, &key, &value)) {
            visit(value);
        }
        return;
    }
    for (PyObject *item : items_of(container)) {
        visit(item);
    }
}

// The same container with what `change` makes of its items.
template <typename Change> Ref copied(PyObject *container, Change change)
{
    if (PyDict_CheckExact(container)) {
        Ref copy = checked(PyDict_New());
        PyObject *key, *value;
        Py_ssize_t at = 0;
        while (PyDict_Next(container, &at, &key, &value)) {
            check(PyDict_SetItem(copy.get(), key, change(value).get()));
        }
        return copy;
    }
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(container);
    const bool is_tuple = PyTuple_CheckExact(container);
    Ref copy = checked(is_tuple ? PyTuple_New(n) : PyList_New(n));
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = change(PySequence_Fast_GET_ITEM(container, i)).release();
        is_tuple ? PyTuple_SET_ITEM(copy.get(), i, item) : PyList_SET_ITEM(copy.get(), i, item);
    }
    return copy;
}

constexpr int max_depth = 100; // torch stops at 128 with an error of its own

// True if only such containers hold what is reachable. Subclasses of tensors are looked for last:
// for an object of another type torch asks its metaclass.
bool is_simple(PyObject *object, int depth)
{
    if (!is_container(object)) {
        return THPVariable_CheckExact(object) || is_scalar(object) || THPVariable_Check(object);
    }
    bool is_so = depth > 0;
    each(object, [&](PyObject *item) { is_so = is_so && is_simple(item, depth - 1); });
    return is_so;
}

void collect(PyObject *object, BorrowedTensors &out)
{
    if (is_container(object)) {
        each(object, [&](PyObject *item) { collect(item, out); });
    } else if (THPVariable_Check(object)) {
        const at::Tensor &tensor = THPVariable_Unpack(object);
        if (tensor.requires_grad()) {
            out.list.push_back(&tensor);
        }
    }
}

Ref replace(PyObject *object, const at::Tensor *&next)
{
    if (is_container(object)) {
        return copied(object, [&](PyObject *item) { return replace(item, next); });
    }
    if (THPVariable_Check(object) && THPVariable_Unpack(object).requires_grad()) {
        return checked(THPVariable_Wrap(*next++));
    }
    return Ref::borrow(object);
}

Ref cast_one(PyObject *object, at::ScalarType dtype, PyObject *cast_any, bool &changed)
{
    if (THPVariable_Check(object)) {
        const at::Tensor &tensor = THPVariable_Unpack(object);
        if (!at::isFloatingType(tensor.scalar_type()) || tensor.scalar_type() == dtype) {
            return Ref::borrow(object);
        }
        changed = true;
        return checked(THPVariable_Wrap(tensor.to(dtype)));
    }
    if (is_scalar(object)) {
        return Ref::borrow(object);
    }
    changed = true;
    return checked(PyObject_CallOneArg(cast_any, object));
}

} // namespace

bool is_transparent(PyObject *object)
{
    if (object == Py_None || is_simple(object, max_depth)) {
        return object != Py_None;
    }
    return truth_of(
        checked(PyObject_CallOneArg(look_up(Import::shows_all_tensors).get(), object)).get());
}

void collect_grad_tensors(PyObject *object, BorrowedTensors &out)
{
    if (is_simple(object, max_depth)) {
        collect(object, out);
        return;
    }
    Ref found = checked(PyObject_CallOneArg(look_up(Import::collect_grad_tensors).get(), object));
    Ref list = checked(PySequence_List(found.get()));
    collect(list.get(), out);
    out.kept.push_back(std::move(list));
}

Ref replace_grad_tensors(PyObject *object, at::TensorList tensors)
{
    if (is_simple(object, max_depth)) {
        const at::Tensor *next = tensors.begin();
        return replace(object, next);
    }
    Ref list = checked(PyList_New(0));
    for (const at::Tensor &tensor : tensors) {
        check(PyList_Append(list.get(), checked(THPVariable_Wrap(tensor)).get()));
    }
    Ref iterator = checked(PyObject_GetIter(list.get()));
    return checked(PyObject_CallFunctionObjArgs(look_up(Import::replace_grad_tensors).get(), object,
                                                iterator.get(), nullptr));
}

Ref cast_tensors(PyObject *object, at::ScalarType dtype, PyObject *cast_any)
{
    bool changed = false;
    const auto cast = [&](PyObject *item) { return cast_one(item, dtype, cast_any, changed); };
    const bool is_opened = PyTuple_CheckExact(object) || PyDict_CheckExact(object);
    Ref made = is_opened ? copied(object, cast) : cast(object);
    return changed ? made : Ref();
}

} // namespace fc
