// Looks up what C++ asks of Python, and takes the functions that are handed down.
#include "bind/python/calls.h"

#include "bind/module.h"
#include "bind/python/fields.h"

#include <iterator>

namespace fc {

namespace {

constexpr const char *call_names[] = {
#define FC_TEXT(name) #name,
    FC_CALLS(FC_TEXT)
#undef FC_TEXT
};

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

std::vector<const char *> names_of_calls()
{
    return {std::begin(call_names), std::end(call_names)};
}

void set_callbacks(Fields &given)
{
    std::array<Ref, n_calls> functions;
    for (size_t i = 0; i < n_calls; i++) {
        functions[i] = given.object(call_names[i]);
    }
    given.end();
    for (size_t i = 0; i < n_calls; i++) {
        Py_XSETREF(process.calls[i], functions[i].release());
    }
}

} // namespace fc
