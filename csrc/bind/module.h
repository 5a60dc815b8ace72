// What the files of the binding register in fsdp_c._C; what the functions do says module.cpp.
#ifndef FC_BIND_MODULE_H
#define FC_BIND_MODULE_H

#include "bind/python/python.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fc {

class Fields;

// ---- python/ ----
void open_interpreter(); // before all else
void close_interpreter();
Ref find_end();
void set_place(Fields &given);
void open_window(Fields &given);
std::vector<const char *> names_of_calls();
void set_callbacks(Fields &given);
void watch_functions(Fields &given);
// True if a watched name is no longer bound to the function that it was watched with.
bool functions_replaced();
// True if a state's attribute of this name stands before a method that the core does not call.

// ---- tensor/ ----
at::Tensor take_memory(Fields &given);
void give_memory(Fields &given);
void note_data(PyObject *tensor);
// -1 with the Python error set, as the others that register; once, before all that sees DTensors.
int find_dtensors();

// ---- snapshot/ ----
size_t snapshot_room(Fields &given);
Ref snapshot_layouts(PyObject *tensors);
Ref snapshot_facts(PyObject *file);
bool snapshot_is_intact(PyObject *file);
void snapshot_clear(PyObject *file);
Ref snapshot_header(PyObject *file);
bool snapshot_adopt(Fields &given);
int register_snapshots(PyObject *module); // SnapshotCopier and SnapshotRanks

// ---- optim/ ----
at::Tensor norm_of(PyObject *values);
double clip_factor(Fields &given);
int register_locals(PyObject *module); // Layouts and Locals
int register_optim(PyObject *module);  // Params

// ---- comm/ and device/ ----
Ref nccl_open(Fields &given);
Ref cuda_events(Fields &given);
int register_transport(PyObject *module);
int register_beats(PyObject *module);
int register_comm(PyObject *module);
int register_nccl(PyObject *module);    // NcclGroup
int register_streams(PyObject *module); // Streams

// ---- fsdp/ ----
void call_directly(PyObject *cls);
int register_domain(PyObject *module);
int register_state(PyObject *module);
int register_group(PyObject *module); // Group and StepCounter
int register_root(PyObject *module);  // Root and Context

} // namespace fc

#endif
