// Reads what Python hands down by name, all of it: the fields of a NamedTuple, the arguments of a
// call. In steps for calls alone, whose arguments are found without a copy.
#ifndef FC_BIND_PYTHON_FIELDS_H
#define FC_BIND_PYTHON_FIELDS_H

#include "bind/python/python.h"

#include <span>
#include <vector>

namespace fc {

// What `convert` of CPython makes of an object; its error as an exception.
template <auto convert> auto converted(PyObject *object)
{
    const auto value = convert(object);
    check(PyErr_Occurred() != nullptr ? -1 : 0);
    return value;
}

inline size_t size_from(PyObject *number)
{
    return converted<PyLong_AsSize_t>(number);
}

inline int integer_from(PyObject *number)
{
    return static_cast<int>(converted<PyLong_AsLong>(number));
}

inline double real_from(PyObject *number)
{
    return converted<PyFloat_AsDouble>(number);
}

inline bool truth_of(PyObject *object)
{
    const int is_true = PyObject_IsTrue(object);
    check(is_true);
    return is_true != 0;
}

inline const char *text_from(PyObject *text) // lives as long as the object
{
    const char *value = PyUnicode_AsUTF8(text);
    check(value == nullptr ? -1 : 0);
    return value;
}

// What a list or tuple holds, borrowed, while nobody changes it.
inline std::span<PyObject *const> items_of(PyObject *sequence)
{
    return {PySequence_Fast_ITEMS(sequence),
            static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence))};
}

class Fields {
public:
    explicit Fields(PyObject *row) : row_(row), what_(Py_TYPE(row)->tp_name)
    {
        if (!PyTuple_Check(row)) {
            raise_error(PyExc_TypeError, "expected a NamedTuple, not %.100s", what_);
        }
        n_given_ = PyTuple_GET_SIZE(row);
    }
    // Of METH_FASTCALL | METH_KEYWORDS.
    Fields(PyObject *const *values, Py_ssize_t n_unnamed, PyObject *names)
        : values_(values), names_(names)
    {
        refuse_unnamed(n_unnamed);
        n_given_ = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
    }
    // Of a type's constructor.
    Fields(PyObject *unnamed, PyObject *named) : named_(named)
    {
        refuse_unnamed(PyTuple_GET_SIZE(unnamed));
        n_given_ = named == nullptr ? 0 : PyDict_GET_SIZE(named);
    }

    Ref object(const char *name)
    {
        n_read_++;
        if (row_ != nullptr) {
            return checked(PyObject_GetAttrString(row_, name));
        }
        PyObject *found = argument(name);
        if (found == nullptr) {
            raise_error(PyExc_TypeError, "%s has no %s", what_, name);
        }
        return Ref::borrow(found);
    }
    // A list, or a tuple as one.
    Ref list(const char *name) { return checked(PySequence_List(object(name).get())); }
    // What `convert` makes of the items of one; texts are kept by what was handed down.
    template <auto convert> auto values(const char *name)
    {
        const Ref items = list(name);
        std::vector<decltype(convert(nullptr))> made;
        for (PyObject *item : items_of(items.get())) {
            made.push_back(convert(item));
        }
        return made;
    }
    bool flag(const char *name) { return truth_of(object(name).get()); }
    size_t size(const char *name) { return size_from(object(name).get()); }
    int integer(const char *name) { return integer_from(object(name).get()); }
    double real(const char *name) { return real_from(object(name).get()); }
    // Kept by what was handed down.
    const char *text(const char *name) { return text_from(object(name).get()); }

    // After the last field: an error if Python has one that nobody reads.
    void end() const
    {
        if (n_read_ != n_given_) {
            raise_error(PyExc_TypeError, "%.100s has %zd fields, %zd of which are known", what_,
                        n_given_, n_read_);
        }
    }

private:
    void refuse_unnamed(Py_ssize_t n)
    {
        if (n > 0) {
            raise_error(PyExc_TypeError, "%s has %zd arguments without a name", what_, n);
        }
    }

    // Borrowed; null: there is none.
    PyObject *argument(const char *name) const
    {
        if (named_ != nullptr) {
            return PyDict_GetItemString(named_, name);
        }
        for (Py_ssize_t i = 0; i < n_given_; i++) {
            if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names_, i), name) == 0) {
                return values_[i];
            }
        }
        return nullptr;
    }

    // Borrowed: one of the three.
    PyObject *row_ = nullptr, *named_ = nullptr;
    PyObject *const *values_ = nullptr;
    PyObject *names_ = nullptr; // of the values
    const char *what_ = "the call";
    Py_ssize_t n_given_ = 0, n_read_ = 0;
};

} // namespace fc

#endif
