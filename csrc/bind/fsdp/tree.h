// Walking a tree's states and domains.
#ifndef FC_BIND_FSDP_TREE_H
#define FC_BIND_FSDP_TREE_H

#include "bind/fsdp/domain.h"
#include "bind/fsdp/state.h"

namespace fc {

template <typename Body> void each_state(const TreeObject *tree, Body &&body)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tree->states); i++) {
        body(reinterpret_cast<StateObject *>(PyList_GET_ITEM(tree->states, i)));
    }
}

template <typename Body> void each_domain(const TreeObject *tree, Body &&body)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tree->domains); i++) {
        body(domain_of(PyList_GET_ITEM(tree->domains, i)));
    }
}

// True while a forward or backward phase is open. All domains of a tree change together.
inline bool tree_is_open(const TreeObject *tree)
{
    return PyList_GET_SIZE(tree->domains) > 0 &&
           fc_domain_is_open(domain_of(PyList_GET_ITEM(tree->domains, 0)));
}

inline bool tree_in_backward(const TreeObject *tree)
{
    return PyList_GET_SIZE(tree->domains) > 0 &&
           fc_domain_in_backward(domain_of(PyList_GET_ITEM(tree->domains, 0)));
}

} // namespace fc

#endif
