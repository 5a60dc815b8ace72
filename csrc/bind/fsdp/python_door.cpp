// The slower door to a unit's transitions: through its group's Python methods.
#include "bind/fsdp/python_door.h"

#include <utility>

namespace fc {

namespace {

// Methods call each other: of each group the innermost body is to run next.
class Waiting {
public:
    Waiting(GroupObject *group, Body body)
        : group_(group), body_(std::move(body)), outer_(std::exchange(group->waiting, &body_))
    {
    }
    Waiting(const Waiting &) = delete;
    Waiting &operator=(const Waiting &) = delete;
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

void unshard_by_methods(GroupObject *group)
{
    const Ref none = checked(PyTuple_New(0));
    const Waiting nothing(group, nullptr); // these two know the unit themselves
    call(group, Attribute::unshard, none);
    call(group, Attribute::wait_for_unshard, none);
    group->unit->unshard();
}

void reshard_by_methods(GroupObject *group, const Body &body)
{
    const Ref none = checked(PyTuple_New(0));
    const Waiting nothing(group, nullptr);
    call(group, Attribute::reshard, none);
    body();
}

Ref arguments_of_forward(const StateObject *state, PyObject *second, PyObject *third)
{
    return checked(PyTuple_Pack(3, PyTuple_GET_ITEM(state->modules, 0), second, third));
}

} // namespace fc
