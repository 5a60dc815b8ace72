// fsdp_c._C: an index of what the binding registers.
#include "bind/module.h"

#include "bind/python/calls.h"
#include "bind/python/objects.h"
#include "kernels/kernels.h"

namespace fc {

namespace {

PyMethodDef functions[] = {
    function<[] { return fc_kern()->name; }>("kernels",
                                             "kernels() -> str: the instruction set in use."),
    function<[](PyObject *name) { return fc_kern_use(text_from(name)); }>(
        "use_kernels", "use_kernels(name) -> bool: False if this CPU lacks it."),
    function<close_interpreter>(
        "close",
        "close(): from now on other threads than the main one stay out of the interpreter, which "
        "ends."),
    function<set_place>(
        "set_place",
        "set_place(tell=, count=): tell() -> Place, where this rank's program is, for peers that "
        "wait for it; count(group) -> int or None, its collectives."),
    function<open_window>("open_window",
                          "open_window(*, run, rank, world, start_ticks, traces): this process is "
                          "seen from outside from now on."),
    function<names_of_calls>("callbacks", "callbacks() -> names of what it asks of Python."),
    function<set_callbacks>("set_callbacks", "set_callbacks(name=function, ...): all of them."),
    function<watch_functions>(
        "watch_functions",
        "watch_functions(functions=[WatchedFunction], names=): roots leave the core when one of "
        "the functions "
        "is replaced, or one of the names on a state; not by those of an earlier call."),
    function<call_directly>("call_directly",
                            "call_directly(cls): modules of it whose only hooks are their unit's "
                            "run them around forward "
                            "in C, unless the class has a way of its own to be called."),
    function<nccl_open>("nccl_open", "nccl_open(path=, is_loaded=) -> {handle, version, text}; "
                                     "is_loaded: only if it is already."),
    function<note_data>("note_data", "note_data(tensor): the same of a new tensor of a subclass."),
    function<make_noted>(
        "make_noted",
        "make_noted(tensor): one on the same memory whose unit notices `tensor.data`."),
    function<take_memory>("take_memory",
                          "take_memory(*, tensor, text) -> bytes: its storage has none "
                          "from now on; reading raises text."),
    function<give_memory>("give_memory",
                          "give_memory(*, tensor, bytes): its storage gets what bytes "
                          "has, which has none from then on."),
    function<[] { process.n_checkpoints++; }>(
        "count_checkpoint",
        "count_checkpoint(): the forward that runs will be run again, in part, by its backward."),
    function<n_steps>("n_steps", "n_steps() -> int: how many have been counted."),
    function<snapshot_room>("snapshot_room", "snapshot_room(*, tensors, index_bytes) -> int: how "
                                             "long a file must be for them."),
    function<snapshot_facts>("snapshot_facts", "snapshot_facts(file) -> {sequence, step, "
                                               "data_bytes, index_bytes}, or None: none is whole."),
    function<snapshot_is_intact>("snapshot_is_intact",
                                 "snapshot_is_intact(file): whether its bytes are those that were "
                                 "written; reads them all."),
    function<snapshot_clear>("snapshot_clear", "snapshot_clear(file): it holds none from now on."),
    function<norm_of>("norm", "norm(values) -> Tensor: the 2-norm of float32 memory."),
    function<clip_factor>(
        "clip_factor",
        "clip_factor(*, max_norm, norm) -> float: what torch multiplies gradients by."),
    {}};

int exec(PyObject *module)
{
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
