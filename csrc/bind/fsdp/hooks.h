// The hooks of a module, as functions of its state.
#ifndef FC_BIND_FSDP_HOOKS_H
#define FC_BIND_FSDP_HOOKS_H

#include "bind/fsdp/state.h"

namespace fc {

// None, or (args, kwargs) if they changed. `member`: keeps the books of a grouped unit.
Ref state_pre_forward(StateObject *state, PyObject *args, PyObject *kwargs);
Ref state_pre_forward_member(StateObject *state, PyObject *args, PyObject *kwargs);

// The output to return.
Ref state_post_forward(StateObject *state, PyObject *output);
Ref state_post_forward_member(StateObject *state, PyObject *module, PyObject *output);

} // namespace fc

#endif
