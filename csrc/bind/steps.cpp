// Counts the steps of optimizers.
#include "bind/steps.h"

namespace fc {

namespace {

uint64_t n_steps_taken = 0;

} // namespace

uint64_t n_steps()
{
    return n_steps_taken;
}

} // namespace fc

PyObject *fc_count_step(PyObject *, PyObject *)
{
    fc::n_steps_taken++;
    Py_RETURN_NONE;
}

PyObject *fc_n_steps(PyObject *, PyObject *)
{
    return PyLong_FromUnsignedLongLong(fc::n_steps());
}
