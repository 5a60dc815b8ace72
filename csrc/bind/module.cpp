// fsdp_c._C: an index of what the binding registers.
#include <Python.h>

#include "bind/comm/communicator.h"
#include "bind/comm/nccl.h"
#include "bind/comm/transport.h"
#include "bind/device/device.h"
#include "bind/fsdp/context.h"
#include "bind/fsdp/domain.h"
#include "bind/fsdp/module_call.h"
#include "bind/fsdp/state.h"
#include "bind/fsdp/steps.h"
#include "bind/optim/clip.h"
#include "bind/optim/optim.h"
#include "bind/python/callbacks.h"
#include "bind/python/calls.h"
#include "bind/python/fields.h"
#include "bind/python/objects.h"
#include "bind/python/replaced_functions.h"
#include "bind/python/shutdown.h"
#include "bind/tensor/data_access.h"
#include "bind/tensor/layout.h"
#include "bind/tensor/local_tensors.h"
#include "bind/tensor/taken_memory.h"
#include "kernels/kernels.h"

static fc::Ref kernels()
{
    return fc::checked(PyUnicode_FromString(fc_kern()->name));
}

static bool use_kernels(PyObject *name)
{
    return fc_kern_use(fc::text_from(name));
}

static PyMethodDef functions[] = {
    fc::function<kernels>("kernels", "kernels() -> str: the instruction set in use."),
    fc::function<use_kernels>("use_kernels",
                              "use_kernels(name) -> bool: False if this CPU lacks it."),
    {"close", fc_close, METH_NOARGS,
     "close(): from now on other threads than the main one stay out of the interpreter, which "
     "ends."},
    {"set_place", fc::with_names(fc_set_place), METH_VARARGS | METH_KEYWORDS,
     "set_place(tell=, count=): tell() -> Place, where this rank's program is, for peers that wait "
     "for it; count(group) -> int or None, its collectives."},
    {"set_callbacks", reinterpret_cast<PyCFunction>(reinterpret_cast<void *>(fc_set_callbacks)),
     METH_VARARGS | METH_KEYWORDS,
     "set_callbacks(name=function, ...): what the extension asks of Python, all of it."},
    {"watch_functions", fc_watch_functions, METH_VARARGS,
     "watch_functions([WatchedFunction], names): roots leave the core when one of the "
     "functions is replaced, or one of the names on a state."},
    {"call_directly", fc_call_directly, METH_O,
     "call_directly(cls): modules of it run their unit's hooks around forward in C."},
    {"nccl_open", fc::with_names(fc_nccl_open_library), METH_VARARGS | METH_KEYWORDS,
     "nccl_open(path=, is_loaded=) -> {handle, version, text}; is_loaded: only if it is already."},
    fc::function<fc::note_data>("note_data",
                                "note_data(tensor): the same of a new tensor of a subclass."),
    fc::function<fc::make_noted>(
        "make_noted",
        "make_noted(tensor): one on the same memory whose unit notices `tensor.data`."),
    fc::function<fc::take_memory>(
        "take_memory",
        "take_memory(tensor, text) -> bytes: its storage has none from now on; reading raises "
        "text."),
    fc::function<fc::give_memory>("give_memory",
                                  "give_memory(tensor, bytes): gives its storage memory again."),
    {"count_step", fc_count_step, METH_NOARGS,
     "count_step(): an optimizer has stepped; what was gathered is out of date."},
    {"count_checkpoint", fc_count_checkpoint, METH_NOARGS,
     "count_checkpoint(): the forward that runs will be run again, in part, by its backward."},
    {"n_steps", fc_n_steps, METH_NOARGS, "n_steps() -> int: how many have been counted."},
    fc::function<fc::norm_of>("norm", "norm(values) -> Tensor: the 2-norm of float32 memory."),
    fc::function<fc::clip_factor>(
        "clip_factor", "clip_factor(max_norm, norm) -> float: what torch multiplies gradients by."),
    {}};

static int exec(PyObject *module)
{
    return fc_register_transport(module) < 0 || fc_register_comm(module) < 0 ||
                   fc_register_steps(module) < 0 || fc_register_streams(module) < 0 ||
                   fc_register_domain(module) < 0 || fc_register_context(module) < 0 ||
                   fc_register_state(module) < 0 || fc_find_dtensors() < 0 ||
                   fc_register_locals(module) < 0 || fc_register_optim(module) < 0 ||
                   fc_register_nccl(module) < 0
               ? -1
               : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(exec)}, {0, nullptr}};
static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fsdp_c._C", nullptr, 0, functions, slots, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__C(void)
{
    return PyModuleDef_Init(&definition);
}
