// What there is once in a process, since who counts it knows no root. Guarded by the GIL.
#ifndef FC_BIND_PYTHON_PROCESS_H
#define FC_BIND_PYTHON_PROCESS_H

#include "bind/python/calls.h"

#include <cstdint>

namespace fc {

struct Process {
    // Steps of all optimizers, and loads: copies that were gathered before the last are out of
    // date, whoever stepped.
    uint64_t n_steps = 0;
    // How often some unit came to follow another optimizer, or was loaded: what roots know of that
    // is out of date.
    uint64_t n_changes = 0;
    // Activation checkpoints that began: a forward in which one did is run again by its backward.
    uint64_t n_checkpoints = 0;
    // Handles of finalize_backward(async_op=True) that are to be waited for: no forward may begin.
    int n_awaited = 0;
    // DEBUG was on in torch's log when a root's forward began last.
    bool is_logging = false;
    // Functions of Python, owned: see calls.h, and fc_set_place.
    std::array<PyObject *, n_calls> calls{};
    PyObject *tell_place = nullptr, *count_collectives = nullptr;
};

inline Process process;

inline uint64_t n_steps()
{
    return process.n_steps;
}

} // namespace fc

#endif
