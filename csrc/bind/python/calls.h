// The names by which C++ meets Python, all of them: functions that fsdp_c hands down when it is
// loaded, attributes, and what is looked up in modules of others. And what a process has once.
#ifndef FC_BIND_PYTHON_CALLS_H
#define FC_BIND_PYTHON_CALLS_H

#include "bind/python/python.h"

#include <array>
#include <cstddef>
#include <cstdint>

// X(name): functions that fsdp_c/_fully_shard/_callbacks.py hands to set_callbacks, and describes.
#define FC_CALLS(X)                                                                                \
    X(join_root)                                                                                   \
    X(look_around)                                                                                 \
    X(rebuild_units)                                                                               \
    X(refuse_unless_waited)                                                                        \
    X(note_forward)                                                                                \
    X(prefetch_in_forward)                                                                         \
    X(prefetch_in_backward)                                                                        \
    X(torchs_pre_forward)                                                                          \
    X(torchs_post_forward)                                                                         \
    X(wait_for_inputs)                                                                             \
    X(cast_any_input)                                                                              \
    X(cast_any_output)                                                                             \
    X(warn_of_view)                                                                                \
    X(warn_of_hidden_output)                                                                       \
    X(warn_of_failed_backward)                                                                     \
    X(refuse_sparse_gradient)                                                                      \
    X(tell_of_double_backward)                                                                     \
    X(explain_error)                                                                               \
    X(tell_of_write)                                                                               \
    X(warn_of_outdated)                                                                            \
    X(warn_of_unfinalized)                                                                         \
    X(refuse_backward)                                                                             \
    X(refuse_zero_divisor)                                                                         \
    X(refuse_grad_dtype)                                                                           \
    X(refuse_plain_gradient)                                                                       \
    X(refuse_frozen_gradient)                                                                      \
    X(refuse_accumulated)                                                                          \
    X(refuse_orphan)                                                                               \
    X(text_of_sharded)                                                                             \
    X(text_for_graph)                                                                              \
    X(text_of_withheld)                                                                            \
    X(is_logging)                                                                                  \
    X(log_event)                                                                                   \
    X(parameter_name)                                                                              \
    X(make_sharded_gradient)                                                                       \
    X(make_slice)                                                                                  \
    X(local_gradient)                                                                              \
    X(make_inputs)                                                                                 \
    X(fill_unsharded)

// X(name, text): attributes and keys, of states and of torch's objects.
#define FC_ATTRIBUTES(X)                                                                           \
    X(state_context, "_state_ctx")                                                                 \
    X(post_optim_event, "post_optim_event")                                                        \
    X(wait, "wait")                                                                                \
    X(unshard, "unshard")                                                                          \
    X(wait_for_unshard, "wait_for_unshard")                                                        \
    X(reshard, "reshard")                                                                          \
    X(pre_forward, "pre_forward")                                                                  \
    X(post_forward, "post_forward")                                                                \
    X(pre_backward, "pre_backward")                                                                \
    X(post_backward, "post_backward")                                                              \
    X(local_tensor, "_local_tensor")                                                               \
    X(inner_tensors, "_unsharded_inner_tensors")                                                   \
    X(dunder_call, "__call__")                                                                     \
    X(dunder_getattribute, "__getattribute__")                                                     \
    X(spec, "_spec")                                                                               \
    X(mesh, "mesh")                                                                                \
    X(placements, "placements")                                                                    \
    X(call_impl, "_call_impl")                                                                     \
    X(forward, "forward")                                                                          \
    X(post_accumulate_hooks, "_post_accumulate_grad_hooks")                                        \
    X(forward_pre_hooks, "_forward_pre_hooks")                                                     \
    X(forward_hooks, "_forward_hooks")                                                             \
    X(forward_hooks_always_called, "_forward_hooks_always_called")                                 \
    X(backward_hooks, "_backward_hooks")                                                           \
    X(backward_pre_hooks, "_backward_pre_hooks")                                                   \
    X(compiled_call_impl, "_compiled_call_impl")                                                   \
    X(global_forward_pre_hooks, "_global_forward_pre_hooks")                                       \
    X(global_forward_hooks, "_global_forward_hooks")                                               \
    X(global_backward_pre_hooks, "_global_backward_pre_hooks")                                     \
    X(global_backward_hooks, "_global_backward_hooks")

// X(name, module, attribute): looked up when needed; without an attribute the module itself.
#define FC_IMPORTS(X)                                                                              \
    X(nn_module_file, "torch.nn.modules.module", nullptr)                                          \
    X(nn_module, "torch.nn.modules.module", "Module")                                              \
    X(dtensor, "torch.distributed.tensor", "DTensor")                                              \
    X(async_tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor")          \
    X(collect_grad_tensors, "fsdp_c._compat._versions", "collect_grad_tensors")                    \
    X(replace_grad_tensors, "fsdp_c._compat._versions", "replace_grad_tensors")                    \
    X(shows_all_tensors, "fsdp_c._fully_shard._containers", "shows_all_tensors")                   \
    X(swap_tensor_impl, "torch._C", "_swap_tensor_impl")                                           \
    X(set_eval_frame, "torch._C._dynamo.eval_frame", "set_eval_frame")

namespace fc {

#define FC_ENUM(name, ...) name,
enum class Call : size_t {
    FC_CALLS(FC_ENUM) count
};
enum class Attribute : size_t {
    FC_ATTRIBUTES(FC_ENUM) count
};
enum class Import : size_t {
    FC_IMPORTS(FC_ENUM) count
};
#undef FC_ENUM

constexpr size_t n_calls = static_cast<size_t>(Call::count);

// What there is once in a process, since who counts it knows no root. Guarded by the GIL.
struct Process {
    // Steps of all optimizers, and loads: copies that were gathered before the last are out of
    // date, whoever stepped.
    uint64_t n_steps = 0;
    // How often some unit came to follow another optimizer, or was loaded: what roots know of that
    // is out of date.
    uint64_t n_changes = 0;
    // Activation checkpoints that began: a forward in which one did is run again by its backward.
    uint64_t n_checkpoints = 0;
    // Handles of finalize_backward(async_op=True) that are to be waited for: no forward may begin.
    int n_awaited = 0;
    // DEBUG was on in torch's log when a root's forward began last.
    bool is_logging = false;
    // Functions of Python, owned: by Call, and of set_place().
    std::array<PyObject *, n_calls> calls{};
    PyObject *tell_place = nullptr, *count_collectives = nullptr;
};

inline Process process;

inline uint64_t n_steps()
{
    return process.n_steps;
}

// Borrowed; RuntimeError as an exception if it was not handed down.
PyObject *function_of(Call call);
template <typename... Arguments> Ref ask_python(Call which, Arguments *...arguments)
{
    PyObject *const given[] = {reinterpret_cast<PyObject *>(arguments)..., nullptr};
    return checked(PyObject_Vectorcall(function_of(which), given, sizeof...(arguments), nullptr));
}

// Interned, by Attribute; the process's.
inline std::array<PyObject *, static_cast<size_t>(Attribute::count)> attribute_names{};
int intern_names();                           // once, before; -1 with the Python error set
inline PyObject *name_of(Attribute attribute) // borrowed
{
    return attribute_names[static_cast<size_t>(attribute)];
}
Ref look_up(Import what); // a Python error as an exception

} // namespace fc

#endif
