// What the files of the binding register in fsdp_c._C.
#ifndef FC_BIND_MODULE_H
#define FC_BIND_MODULE_H

#include "bind/python/python.h"

#include <ATen/core/Tensor.h>

namespace fc {

class Fields;

// ---- python/ ----
// From now on other threads than the main one stay out of the interpreter, which ends.
void close_interpreter();
// (tell=, count=): what answers peers that wait for this rank. `tell()` gives the fields of
// fc_place, `count(group)` an int or None.
void set_place(Fields &given);
// (name=function, ...): all of FC_CALLS; TypeError names what is missing or unknown.
void set_callbacks(PyObject *unnamed, PyObject *named);
// ([WatchedFunction], names on states): replaces what was watched before.
void watch_functions(PyObject *args, PyObject *named);

// ---- tensor/ ----
// (tensor, text) -> its storage's memory, as a tensor of bytes. Until it is given back, all tensors
// on the storage have none, and reading them raises `text`.
at::Tensor take_memory(PyObject *args, PyObject *named);
// (tensor, bytes): the storage gets what `bytes`, a tensor of bytes, has, which has none from then
// on.
void give_memory(PyObject *args, PyObject *named);
// A tensor on the same memory for is_data_taken; the same for a new tensor of a subclass, in place.
at::Tensor make_noted(PyObject *tensor);
void note_data(PyObject *tensor);
// -1 with the Python error set, as the others that register; once, before all that sees DTensors.
int find_dtensors();
int register_locals(PyObject *module); // Layouts and Locals

// ---- optim/ ----
// The 2-norm of float32 memory.
at::Tensor norm_of(PyObject *values);
double clip_factor(PyObject *args, PyObject *named); // (max_norm, norm)
int register_optim(PyObject *module);                // Params

// ---- comm/ and device/ ----
Ref nccl_open(Fields &given); // (path=, is_loaded=) -> {handle, version, text}
int register_transport(PyObject *module);
int register_comm(PyObject *module);
int register_nccl(PyObject *module);    // NcclGroup
int register_streams(PyObject *module); // Streams

// ---- fsdp/ ----
// (cls): instances whose only hooks are their unit's run them around forward in C. Does nothing to
// a class that has a way of its own to be called.
void call_directly(PyObject *cls);
void count_checkpoint();
int register_steps(PyObject *module); // StepCounter
int register_domain(PyObject *module);
int register_context(PyObject *module);
int register_state(PyObject *module);
int register_group(PyObject *module);
int register_root(PyObject *module);

} // namespace fc

#endif
