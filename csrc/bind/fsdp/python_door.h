// The slower door to a unit's transitions: through its group's Python methods, where somebody has
// replaced one. The methods' own code goes on here.
#ifndef FC_BIND_FSDP_PYTHON_DOOR_H
#define FC_BIND_FSDP_PYTHON_DOOR_H

#include "bind/fsdp/state.h"

#include <initializer_list>

namespace fc {

using Body = std::function<void()>;

// Calls a method of the group. `body` runs where the class's own method stands: once, and at the
// latest when the method is through, since peers count on it. Returns what the method does.
Ref call_method(GroupObject *group, Attribute method, const Ref &arguments, Body body);
// The same where somebody has replaced a method; else `body` alone, and null.
template <typename Arguments, typename Run>
Ref through_method(GroupObject *group, Attribute method, Arguments &&arguments, Run &&body)
{
    if (group->calls_methods) {
        return call_method(group, method, arguments(), body);
    }
    body();
    return Ref();
}
// For the class's own method: runs the body that is waited for. False: it was called by others.
bool go_on(GroupObject &group);

// The methods without arguments, one after the other, which know the unit themselves.
void call_methods(GroupObject &group, std::initializer_list<Attribute> methods);
// The unit is gathered and shown, or gives its parameters up; `body` does what is still to be done.
inline void unshard_group(GroupObject &group)
{
    if (group.calls_methods) {
        call_methods(group, {Attribute::unshard, Attribute::wait_for_unshard});
    }
    group.unit->unshard();
}
template <typename Run> void reshard_group(GroupObject &group, Run &&body)
{
    if (group.calls_methods) {
        call_methods(group, {Attribute::reshard});
    }
    body();
}

// The module that stands for the state; and an empty tuple, for what hooks do not keep.
Ref arguments_of_forward(const StateObject *state, PyObject *second, PyObject *third);

} // namespace fc

#endif
