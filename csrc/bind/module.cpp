// fsdp_c._C: an index of what the binding registers.
#include "bind/module.h"

#include "bind/python/calls.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"
#include "kernels/kernels.h"
#include "libtorch/process_group.h"

namespace fc {

namespace {

PyMethodDef functions[] = {
    function<[] { return fc_kern()->name; }>("kernels"),
    function<[](PyObject *name) { return fc_kern_use(text_from(name)); }>("use_kernels"),
    function<close_interpreter>("close"),
    function<find_end>("find_end"),
    function<set_place>("set_place"),
    function<[](PyObject *group) { return rail_messages(text_from(group)); }>("rail_messages"),
    function<open_window>("open_window"),
    function<names_of_calls>("callbacks"),
    function<set_callbacks>("set_callbacks"),
    function<watch_functions>("watch_functions"),
    function<call_directly>("call_directly"),
    function<nccl_open>("nccl_open"),
    function<cuda_events>("cuda_events"),
    function<note_data>("note_data"),
    function<[](PyObject *tensor) { return make_noted(tensor_of(tensor)); }>("make_noted"),
    function<take_memory>("take_memory"),
    function<give_memory>("give_memory"),
    function<[] { process.n_checkpoints++; }>("count_checkpoint"),
    function<n_steps>("n_steps"),
    function<snapshot_room>("snapshot_room"),
    function<snapshot_layouts>("snapshot_layouts"),
    function<snapshot_facts>("snapshot_facts"),
    function<snapshot_is_intact>("snapshot_is_intact"),
    function<snapshot_clear>("snapshot_clear"),
    function<snapshot_header>("snapshot_header"),
    function<snapshot_adopt>("snapshot_adopt"),
    function<norm_of>("norm"),
    function<clip_factor>("clip_factor"),
    {}};

int exec(PyObject *module)
{
    open_interpreter();
    if (intern_names() < 0 || find_dtensors() < 0) {
        return -1;
    }
    for (const auto add : {register_beats, register_transport, register_comm, register_nccl,
                           register_streams, register_domain, register_group, register_root,
                           register_state, register_locals, register_optim, register_snapshots}) {
        if (add(module) < 0) {
            return -1;
        }
    }
    return 0;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(exec)}, {0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fsdp_c._C", nullptr, 0, functions, slots, nullptr, nullptr, nullptr};

} // namespace

} // namespace fc

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&fc::definition);
}
