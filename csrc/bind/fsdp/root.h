// A root for the engine, see engine/root.h: what is done around its functions.
#ifndef FC_BIND_FSDP_ROOT_H
#define FC_BIND_FSDP_ROOT_H

#include "bind/fsdp/state.h"

#include <vector>

namespace fc {

template <typename Body> void each_state(const RootObject *root, Body &&body)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(root->states); i++) {
        body(reinterpret_cast<StateObject *>(PyList_GET_ITEM(root->states, i)));
    }
}

inline bool root_in_backward(const RootObject *root)
{
    return fc_root_in_backward(&root->course);
}

// After its other fields.
void root_init(RootObject *root, const std::vector<fc_domain *> &domains);
void root_pre_forward(StateObject *state);
void root_end_backward(RootObject *root);
void root_finalize_backward(RootObject *root);
void root_reset(RootObject *root, bool drops_gradients);

} // namespace fc

#endif
