// Walking a root's states and domains.
#ifndef FC_BIND_FSDP_ROOT_H
#define FC_BIND_FSDP_ROOT_H

#include "bind/fsdp/domain.h"
#include "bind/fsdp/state.h"

namespace fc {

template <typename Body> void each_state(const RootObject *root, Body &&body)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(root->states); i++) {
        body(reinterpret_cast<StateObject *>(PyList_GET_ITEM(root->states, i)));
    }
}

template <typename Body> void each_domain(const RootObject *root, Body &&body)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(root->domains); i++) {
        body(domain_of(PyList_GET_ITEM(root->domains, i)));
    }
}

// True while a forward or backward phase is open. All domains of a root change together.
inline bool root_is_open(const RootObject *root)
{
    return PyList_GET_SIZE(root->domains) > 0 &&
           fc_domain_is_open(domain_of(PyList_GET_ITEM(root->domains, 0)));
}

inline bool root_in_backward(const RootObject *root)
{
    return PyList_GET_SIZE(root->domains) > 0 &&
           fc_domain_in_backward(domain_of(PyList_GET_ITEM(root->domains, 0)));
}

} // namespace fc

#endif
