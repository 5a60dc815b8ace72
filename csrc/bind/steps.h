// Optimizer steps of this process: what was gathered before the last one is out of date.
#ifndef FC_BIND_STEPS_H
#define FC_BIND_STEPS_H

#include <Python.h>

#include <cstdint>

namespace fc {

uint64_t n_steps();

} // namespace fc

PyObject *fc_count_step(PyObject *, PyObject *);
PyObject *fc_n_steps(PyObject *, PyObject *);

#endif
