// Looks up what C++ asks of Python, and takes the functions that are handed down.
#include "bind/python/calls.h"

#include "bind/module.h"

#include <algorithm>
#include <string>

namespace fc {

namespace {

constexpr const char *call_names[] = {
#define FC_TEXT(name) #name,
    FC_CALLS(FC_TEXT)
#undef FC_TEXT
};

// Which of the functions were not given, or what was given beside them; empty: all is well.
std::string what_is_wrong(PyObject *named)
{
    std::string missing, unknown;
    const auto add = [](std::string &list, const char *head, const char *name) {
        list += (list.empty() ? head : ", ") + std::string(name);
    };
    for (const char *name : call_names) {
        if (PyDict_GetItemString(named, name) == nullptr) {
            add(missing, "missing: ", name);
        }
    }
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(named, &at, &key, &value) != 0;) {
        const bool is_known =
            std::any_of(std::begin(call_names), std::end(call_names), [&](const char *name) {
                return PyUnicode_CompareWithASCIIString(key, name) == 0;
            });
        if (!is_known || PyCallable_Check(value) == 0) {
            add(unknown, "no such function: ", PyUnicode_AsUTF8(key));
        }
    }
    return missing + (missing.empty() || unknown.empty() ? "" : "; ") + unknown;
}

} // namespace

PyObject *function_of(Call call)
{
    PyObject *function = process.calls[static_cast<size_t>(call)];
    if (function == nullptr) {
        raise_error(PyExc_RuntimeError, "fsdp_c: %s() was not handed to the extension",
                    call_names[static_cast<size_t>(call)]);
    }
    return function;
}

int intern_names()
{
    static constexpr const char *texts[] = {
#define FC_ATTRIBUTE_TEXT(name, text) text,
        FC_ATTRIBUTES(FC_ATTRIBUTE_TEXT)
#undef FC_ATTRIBUTE_TEXT
    };
    for (size_t i = 0; i < attribute_names.size(); i++) {
        attribute_names[i] = PyUnicode_InternFromString(texts[i]);
        if (attribute_names[i] == nullptr) {
            return -1;
        }
    }
    return 0;
}

Ref look_up(Import what)
{
    static constexpr struct {
        const char *module, *attribute;
    } places[] = {
#define FC_PLACE(name, module, attribute) {module, attribute},
        FC_IMPORTS(FC_PLACE)
#undef FC_PLACE
    };
    const auto &place = places[static_cast<size_t>(what)];
    Ref file = checked(PyImport_ImportModule(place.module));
    return place.attribute == nullptr
               ? std::move(file)
               : checked(PyObject_GetAttrString(file.get(), place.attribute));
}

void set_callbacks(PyObject *unnamed, PyObject *named)
{
    if (PyTuple_GET_SIZE(unnamed) > 0 || named == nullptr) {
        raise_error(PyExc_TypeError, "set_callbacks takes functions by name");
    }
    if (const std::string text = what_is_wrong(named); !text.empty()) {
        raise_error(PyExc_TypeError, "set_callbacks: %s", text.c_str());
    }
    for (size_t i = 0; i < n_calls; i++) {
        Py_XSETREF(process.calls[i], Py_NewRef(PyDict_GetItemString(named, call_names[i])));
    }
}

} // namespace fc
