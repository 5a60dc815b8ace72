// Reads what Python hands down by name: the fields of a NamedTuple, all of them. For set-up only.
#ifndef FC_BIND_PYTHON_FIELDS_H
#define FC_BIND_PYTHON_FIELDS_H

#include "bind/python/python.h"

#include <string>

namespace fc {

inline size_t size_from(PyObject *number)
{
    const size_t value = PyLong_AsSize_t(number);
    check(PyErr_Occurred() != nullptr ? -1 : 0);
    return value;
}

inline const char *text_from(PyObject *text) // lives as long as the object
{
    const char *value = PyUnicode_AsUTF8(text);
    check(value == nullptr ? -1 : 0);
    return value;
}

class Fields {
public:
    explicit Fields(PyObject *row) : row_(row)
    {
        if (!PyTuple_Check(row)) {
            PyErr_Format(PyExc_TypeError, "expected a NamedTuple, not %.100s",
                         Py_TYPE(row)->tp_name);
            throw_python();
        }
    }

    Ref object(const char *name)
    {
        n_read_++;
        return checked(PyObject_GetAttrString(row_, name));
    }
    bool flag(const char *name)
    {
        const int is_set = PyObject_IsTrue(object(name).get());
        check(is_set);
        return is_set != 0;
    }
    size_t size(const char *name) { return size_from(object(name).get()); }
    std::string text(const char *name) { return text_from(object(name).get()); }

    // After the last field: an error if Python has one that nobody reads.
    void end() const
    {
        if (n_read_ != PyTuple_GET_SIZE(row_)) {
            PyErr_Format(PyExc_TypeError, "%.100s has %zd fields, %zd of which are known",
                         Py_TYPE(row_)->tp_name, PyTuple_GET_SIZE(row_), n_read_);
            throw_python();
        }
    }

private:
    PyObject *row_; // borrowed
    Py_ssize_t n_read_ = 0;
};

} // namespace fc

#endif
