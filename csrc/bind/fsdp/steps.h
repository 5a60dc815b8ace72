// Optimizer steps: what was gathered before the last one is out of date.
#ifndef FC_BIND_FSDP_STEPS_H
#define FC_BIND_FSDP_STEPS_H

#include <Python.h>

#include "engine/updates.h"

#include <cstdint>

namespace fc {

// Of all optimizers of this process, and loads.
uint64_t n_steps();

// Borrowed from a StepCounter; TypeError as an exception.
fc_step_counter *counter_of(PyObject *object);

} // namespace fc

#endif
