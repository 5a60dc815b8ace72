// The slower door to a unit's transitions: through its group's Python methods, where somebody has
// replaced one. The methods' own code goes on here.
#ifndef FC_BIND_FSDP_PYTHON_DOOR_H
#define FC_BIND_FSDP_PYTHON_DOOR_H

#include "bind/fsdp/state.h"
#include "bind/python/calls.h"

#include <functional>

namespace fc {

using Body = std::function<void()>;

// Calls a method of the group. `body` runs where the class's own method stands: once, and at the
// latest when the method is through, since peers count on it. Returns what the method does.
Ref call_method(GroupObject *group, Attribute method, const Ref &arguments, Body body);
// For the class's own method: runs the body that is waited for. False: it was called by others.
bool go_on(GroupObject &group);

// The unit is gathered and shown, or gives its parameters up; `body` does what is still to be done.
void unshard_by_methods(GroupObject *group);
void reshard_by_methods(GroupObject *group, const Body &body);

// The module that stands for the state; and an empty tuple, for what hooks do not keep.
Ref arguments_of_forward(const StateObject *state, PyObject *second, PyObject *third);

} // namespace fc

#endif
