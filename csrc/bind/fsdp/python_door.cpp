// The slower door to a unit's transitions: through its group's Python methods.
#include "bind/fsdp/state.h"

namespace fc {

namespace {

// Methods call each other: of each group the innermost body is to run next.
class Waiting : NoCopy {
public:
    Waiting(GroupObject *group, Body body)
        : group_(group), body_(std::move(body)), outer_(std::exchange(group->waiting, &body_))
    {
    }
    ~Waiting() { group_->waiting = outer_; }

private:
    GroupObject *group_;
    Body body_;
    Body *outer_;
};

Ref call(GroupObject *group, Attribute method, const Ref &arguments)
{
    const Ref function =
        checked(PyObject_GetAttr(reinterpret_cast<PyObject *>(group), name_of(method)));
    return checked(PyObject_Call(function.get(), arguments.get(), nullptr));
}

} // namespace

Ref call_method(GroupObject *group, Attribute method, const Ref &arguments, Body body)
{
    const Ref kept = Ref::borrow(reinterpret_cast<PyObject *>(group));
    const Waiting waiting(group, std::move(body));
    Ref result = call(group, method, arguments);
    go_on(*group);
    return result;
}

bool go_on(GroupObject &group)
{
    if (group.waiting == nullptr || !*group.waiting) {
        return false;
    }
    const Body body = std::exchange(*group.waiting, nullptr);
    body();
    return true;
}

void call_methods(GroupObject &group, std::initializer_list<Attribute> methods)
{
    const Waiting nothing(&group, nullptr);
    for (const Attribute method : methods) {
        call(&group, method, checked(PyTuple_New(0)));
    }
}

Ref arguments_of_forward(const StateObject *state, PyObject *second, PyObject *third)
{
    return checked(PyTuple_Pack(3, PyTuple_GET_ITEM(state->modules, 0), second, third));
}

} // namespace fc
