// _C.Context: what fsdp_c's FSDPStateContext is built on; how the backwards of a root end.
#ifndef FC_BIND_FSDP_CONTEXT_H
#define FC_BIND_FSDP_CONTEXT_H

#include <Python.h>

namespace fc {

// Who ends a backward, settled when it starts.
enum class Ending : char {
    open = 0, // no backward since the last end
    automatic = 1,
    manual = 2 // by finalize_backward()
};

// Shared by a root and everything below it.
struct ContextObject {
    PyObject_HEAD
    char is_last_backward;
    char ends_manually; // what the next backward is to be
    Ending ending;      // of the running one
    char callback_queued, is_failed;
    char awaits_handle;  // of finalize_backward(async_op=True)
    char is_unfinalized; // a manual backward left gradients to finalize_backward()
    char has_warned;     // that they were forgotten
};

ContextObject *context_of(PyObject *object); // borrowed; TypeError as an exception

// Whether a handle of any root of this process is still to be waited for.
bool any_awaits_handle();

// A backward starts, or goes on.
inline void context_begin_backward(ContextObject *context)
{
    if (context->ending == Ending::open) {
        context->ending = context->ends_manually != 0 ? Ending::manual : Ending::automatic;
    }
}

// A getter and a setter for a char of an object that takes any truth value, as Python's own
// attributes do; `offset` is its place.
PyObject *flag_get(PyObject *self, void *offset);
int flag_set(PyObject *self, PyObject *value, void *offset);

} // namespace fc

#define FC_FLAG(name, type, field, doc)                                                            \
    {name, fc::flag_get, fc::flag_set, doc, reinterpret_cast<void *>(offsetof(type, field))}

int fc_register_context(PyObject *module);

#endif
