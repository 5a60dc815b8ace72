// _C.State: what fsdp_c's FSDPState is built on; the hooks of one fully_shard call, and its unit.
#ifndef FC_BIND_FSDP_STATE_H
#define FC_BIND_FSDP_STATE_H

#include <Python.h>

#include "bind/fsdp/context.h"
#include "bind/fsdp/steps.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"

#include <map>
#include <optional>
#include <string>

namespace fc {

struct RootObject;
class RootHold;

// torch's TrainingState, in its order.
enum class Training : int {
    forward = 0,
    pre_backward = 1,
    post_backward = 2,
    idle = 3
};

// The base of FSDPParamGroup: flags that Python sets and the hooks read, and the bound unit.
struct GroupObject {
    PyObject_HEAD
    Unit *unit;   // owned; null until bound, and on the fallback
    Unit *former; // owned; what the next unit inherits from, null: nothing
    int training;
    char reduce_grads, all_reduce_grads, reshard_after_backward, reduce_scatter_unused_params,
        unshard_in_backward;
    char post_backward_pending; // gradients of a backward that went by are still to be reduced
    char hides_outputs;         // pre-backward hangs on the parameters, see keep_for_hidden_output
    char defers_hooks;          // post-accumulate hooks run at the end of the phase
    PyObject *post_forward_mesh_info; // owned; None: keep the parameters after forward
    PyObject *gradient_divide_factor; // owned; None: the number of ranks
    // Forward passes of this step whose backward is still to come, and backwards that went by in
    // this phase.
    int forwards, backwards;
    uint64_t finished_in;   // the root's backward that has left nothing of it for its end
    uint64_t input_seen_in; // the root's backward that has shown the following; 0: none has yet
    bool owns_input;        // one tensor, which only the unit reads, so that its node can end it
    fc_traffic past;        // of the units that were bound before this one
    Updates *updates;       // owned; of its shards, whatever unit is bound
};

// The base of FSDPState.
struct StateObject {
    PyObject_HEAD
    RootObject *root;   // owned; null while undecided or on the fallback
    GroupObject *group; // owned; null without parameters
    PyObject *modules;  // owned; a tuple
    PyObject *to_run;   // owned; the set of modules of a grouped unit that are still to run
    int training;
    uint64_t entry_sequence;    // of the autograd nodes made since forward was entered
    uint64_t entry_checkpoints; // activation checkpoints of the process, then
    uint64_t backward;          // of the root, in which pre-backward was entered
    char uses_fallback;
    char casts_inputs;
    char is_strict; // as torch: warns of outputs that are views, refuses inputs changed in place
    at::ScalarType param_dtype, output_dtype; // Undefined: as they are
};

// What the shards of a root have seen, by the optimizers that hold some.
struct RootUpdates {
    std::map<Updates::Counter, uint64_t> optimizers; // what each had counted before
    uint64_t n_loads = 0;
    uint64_t version = UINT64_MAX; // of Updates
};

// One root and everything below it: shared by its states.
struct RootObject {
    PyObject_HEAD
    PyObject *states;            // owned; a list, in named_modules order
    PyObject *domains;           // owned; a list
    ContextObject *context;      // owned
    Streams *streams;            // borrowed from the domains; null without a device
    StateObject *iteration_root; // borrowed; the unit that began the current forward
    RootHold *hold;              // borrowed; of autograd's nodes, null without any
    RootUpdates *updates;        // owned; null before the first forward
    size_t n_units;              // as the last forward found them
    size_t n_finished;           // of them, in the running backward
    uint64_t n_reused;           // units in the process, when that began
    uint64_t backward;           // the number of the running or next one
    int64_t graph_task;          // autograd's number of it
    bool has_grouped;            // some state has several modules
    bool publishes;              // some unit's shards are not where peers read them
    bool defers_hooks;           // some group does, in this phase
    bool is_replaced;            // a method of one of the states was, since set-up
    bool has_modes;              // a dispatch mode was active when units were bound
    bool has_raised;             // the current forward has ended in an exception
};

GroupObject *group_of(PyObject *object); // borrowed; TypeError as an exception

// The group and the unit whose parameters an engine's unit has; null if its module is gone.
inline GroupObject *owner_group(const fc_unit *unit)
{
    auto *group = static_cast<GroupObject *>(fc_unit_owner(unit));
    return group != nullptr && group->unit != nullptr ? group : nullptr;
}
inline Unit *owner_unit(const fc_unit *unit)
{
    const GroupObject *group = owner_group(unit);
    return group != nullptr ? group->unit : nullptr;
}

// How the group's gradients are reduced now.
fc_reduce_options reduce_options(const GroupObject *group);

// A number for a backward that no root has had; never 0.
inline uint64_t new_backward()
{
    static uint64_t n = 0;
    return ++n;
}

inline bool is_grouped(const StateObject *state)
{
    return PyTuple_GET_SIZE(state->modules) > 1;
}

// Pre-backward lasts until the root's backward ends, which does not go to each state to say so.
inline Training training_of(const StateObject *state)
{
    const auto training = static_cast<Training>(state->training);
    const bool is_over = training == Training::pre_backward && state->root != nullptr &&
                         state->backward != state->root->backward;
    return is_over ? Training::idle : training;
}

// ---- what is registered with the modules; `self`: a state ----
// (module, args, kwargs) -> None or (args, kwargs)
PyObject *state_hook_pre_forward(PyObject *self, PyObject *const *arguments, Py_ssize_t n);
// (module, args, output) -> output
PyObject *state_hook_post_forward(PyObject *self, PyObject *const *arguments, Py_ssize_t n);

// ---- phases and backward; root.cpp ----
void root_pre_forward(StateObject *state);
void root_post_forward(RootObject *root);
void root_begin_backward(RootObject *root);
void root_end_backward(RootObject *root);
// Reduces what the backwards of a manual ending left.
void root_finalize_backward(RootObject *root);
// The running phase ended in an exception: tells peers at once; this rank's own state is put right
// at its next use.
void root_fail(RootObject *root);
// Drops everything of the running step: after exceptions and on reset_iter_state(). A forward that
// was left by an exception leaves gradients, and units that were unsharded by hand, alone.
void root_reset(RootObject *root, bool drop_gradients);
// A call of the state's module ended in an exception, and with it the forward, if it began there.
void root_note_raised(StateObject *state);
// Whether nothing of a forward, or of a backward that is still to come, would be lost.
bool root_is_between_steps(const RootObject *root);
void group_post_backward(RootObject *root, GroupObject *group);
// The same, from autograd; then nothing may be left of the unit for the end of backward.
void state_post_backward(StateObject *state);

// ---- autograd; autograd.cpp ----
// Post-backward runs when autograd comes to the node that made the unit's only input: in the order
// of a backward that is after all nodes of the unit. False if that node cannot tell.
bool end_at_producer(StateObject *state, const at::Tensor &input);
// Routes the tensors through one identity node whose backward is the group's post-backward.
void route_through_node(StateObject *state, Tensors &tensors);
// Calls state_pre_backward when the gradient of any of the tensors is about to be used.
void hook_outputs(StateObject *state, at::TensorList tensors);
// The same for each node that the unit has made on the way to these outputs, so that the unit is
// gathered wherever a backward enters it.
void hook_nodes_inside(StateObject *state, at::TensorList outputs);
// The same for the gradients of the unit's parameters; for good.
void hook_params(StateObject *state);
void queue_final_callback(RootObject *root);

// ---- hooks.cpp ----
void state_pre_backward(StateObject *state);
// A parameter of the unit has a gradient that no pre-backward has announced.
void state_on_arrival(StateObject *state);

} // namespace fc

PyObject *fc_count_checkpoint(PyObject *, PyObject *);
int fc_register_group(PyObject *module);
int fc_register_state(PyObject *module);

#endif
