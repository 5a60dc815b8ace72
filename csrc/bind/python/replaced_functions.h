// Functions of torch's implementation that the core does not call: notices when one is replaced.
#ifndef FC_BIND_PYTHON_REPLACED_FUNCTIONS_H
#define FC_BIND_PYTHON_REPLACED_FUNCTIONS_H

#include <Python.h>

namespace fc {

// True if a watched name is no longer bound to the function that it was watched with.
bool functions_replaced();

// True if a state's attribute of this name stands before a method that the core does not call.
bool is_watched_on_states(PyObject *name);

} // namespace fc

#endif
