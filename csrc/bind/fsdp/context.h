// _C.Context: what fsdp_c's FSDPStateContext is built on; how the backwards of a root end.
#ifndef FC_BIND_FSDP_CONTEXT_H
#define FC_BIND_FSDP_CONTEXT_H

#include <Python.h>

#include "engine/root.h"

namespace fc {

// Shared by a root and everything below it.
struct ContextObject {
    void open();
    void close() const;

    PyObject_HEAD
    fc_root_context course;
    bool awaits_handle; // of finalize_backward(async_op=True)
    bool has_warned;    // that gradients were left to finalize_backward() and forgotten
};

} // namespace fc

#endif
