// Functions of torch's implementation that the core does not call: notices when one is replaced.
#include "bind/module.h"
#include "bind/python/objects.h"

namespace fc {

namespace {

struct Function {
    Ref name, value;
};

// A class or module.
struct Owner {
    Ref object;
    // Of a class when all its functions were found in place: the interpreter gives it another one
    // when it or a base is changed. 0: not known.
    unsigned version;
    std::vector<Function> functions;
};

// Never freed: the interpreter may be gone when static objects are.
struct Watched {
    std::vector<Owner> owners;
};
Watched *watched = nullptr;

// 0 while it has none; Python 3.10 leaves the number of a class that was changed as it was.
unsigned version_of(PyObject *object)
{
    if (!PyType_Check(object)) {
        return 0;
    }
    auto *type = reinterpret_cast<PyTypeObject *>(object);
    return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}

bool is_in_place(Owner &owner)
{
    if (owner.version != 0 && owner.version == version_of(owner.object.get())) {
        return true;
    }
    for (const Function &row : owner.functions) {
        const Ref found = Ref::take(PyObject_GetAttr(owner.object.get(), row.name.get()));
        if (found.get() != row.value.get()) {
            PyErr_Clear();
            return false;
        }
    }
    owner.version = version_of(owner.object.get());
    return true;
}

} // namespace

bool functions_replaced()
{
    if (watched == nullptr) {
        return false;
    }
    for (Owner &owner : watched->owners) {
        if (!is_in_place(owner)) {
            return true;
        }
    }
    return false;
}

void watch_functions(Fields &given)
{
    const Ref all = given.list("functions");
    given.end();
    Watched found;
    for (PyObject *function : items_of(all.get())) {
        Fields row(function);
        Ref owner = row.object("owner"); // those of one come one after another
        if (found.owners.empty() || found.owners.back().object.get() != owner.get()) {
            found.owners.push_back({std::move(owner), 0, {}});
        }
        found.owners.back().functions.push_back({row.object("name"), row.object("function")});
        row.end();
    }
    delete std::exchange(watched, new Watched(std::move(found)));
}

} // namespace fc
