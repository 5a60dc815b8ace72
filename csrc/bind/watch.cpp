// Functions of torch's implementation that the core does not call: notices when one is replaced.
#include "bind/watch.h"

#include "bind/python.h"

#include <vector>

namespace fc {

namespace {

struct Watched {
    Ref owner, name, function;
};

// Never freed: the interpreter may be gone when static objects are.
std::vector<Watched> *watched = nullptr;

} // namespace

bool functions_replaced()
{
    if (watched == nullptr) {
        return false;
    }
    for (const Watched &row : *watched) {
        const Ref found = Ref::take(PyObject_GetAttr(row.owner.get(), row.name.get()));
        if (found.get() != row.function.get()) {
            PyErr_Clear();
            return true;
        }
    }
    return false;
}

} // namespace fc

PyObject *fc_watch_functions(PyObject *, PyObject *rows)
{
    return fc::guarded([&]() -> PyObject * {
        const fc::Ref all = fc::checked(PySequence_Fast(rows, "expected a list"));
        std::vector<fc::Watched> found;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); i++) {
            PyObject *owner, *name, *function;
            if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(all.get(), i), "OUO", &owner, &name,
                                  &function)) {
                return nullptr;
            }
            found.push_back(
                {fc::Ref::borrow(owner), fc::Ref::borrow(name), fc::Ref::borrow(function)});
        }
        delete std::exchange(fc::watched, new std::vector<fc::Watched>(std::move(found)));
        Py_RETURN_NONE;
    });
}
