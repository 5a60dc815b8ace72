// What fsdp_c's classes are built on: _C.State (the hooks of one fully_shard call), _C.Group (its
// unit), _C.Root and _C.Context; how a root is put to the engine's use.
#ifndef FC_BIND_FSDP_STATE_H
#define FC_BIND_FSDP_STATE_H

#include "bind/fsdp/unit.h"
#include "engine/root.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <initializer_list>

namespace fc {

struct RootObject;
class RootHold;

// How often one optimizer has stepped.
struct StepCounter {
    StepCounter() { check(fc_step_counter_create(Out(core))); }
    Owned<fc_step_counter, fc_step_counter_release> core;
};

// The base of FSDPParamGroup: flags that Python sets and the hooks read, and the bound unit.
struct GroupObject {
    void open() { fc_root_unit_init(&course); }
    int traverse(visitproc visit, void *arg) const;
    void clear();
    void close() { fc_root_unit_fini(&course); }

    PyObject_HEAD
    fc_root_unit course; // flags that Python sets, and what a step's course knows of the unit
    Unit *unit;          // owned; null until bound
    Unit *former;        // owned; what the next unit inherits from, null: nothing
    bool calls_methods;  // somebody has replaced one, see python_door.cpp
    std::function<void()> *waiting; // borrowed; what a method of it that runs is to do
    char hides_outputs; // pre-backward hangs on the parameters, see keep_for_hidden_output
    PyObject *post_forward_mesh_info; // owned; None: keep the parameters after forward
    PyObject *gradient_divide_factor; // owned; None: the number of ranks
};

// The base of FSDPStateContext: shared by a root and everything below it.
struct ContextObject {
    void open() { course.is_last_backward = true; }
    void close() const { process.n_awaited -= awaits_handle; }

    PyObject_HEAD
    fc_root_context course;
    bool awaits_handle;         // of finalize_backward(async_op=True)
    bool has_warned;            // that gradients were left to finalize_backward() and forgotten
    const void *final_callback; // of the newest backward, while it has not run; null: none waits
};

// The base of FSDPState.
struct StateObject {
    void open();
    int traverse(visitproc visit, void *arg) const;
    void clear();

    PyObject_HEAD
    fc_root_module course;
    RootObject *root;           // owned; null before the first forward, or handed over
    PyObject *groups;           // owned; a tuple
    GroupObject *group;         // the first of them; null without parameters
    PyObject *modules;          // owned; a tuple
    PyObject *to_run;           // owned; the set of modules of a grouped unit that are still to run
    uint64_t entry_sequence;    // of the autograd nodes made since forward was entered
    uint64_t entry_checkpoints; // activation checkpoints of the process, then
    char casts_inputs;
    char is_compiled; // its module is what torch.compile returned: forward, without the hooks
    char is_strict;   // as torch: warns of outputs that are views, refuses inputs changed in place
    char fills_in_gradients; // of inputs that the unit has not used: zeros, as torch's fully_shard
    at::ScalarType param_dtype, output_dtype; // Undefined: as they are
};

// One root and everything below it: shared by its states.
struct RootObject {
    void open(Fields &given); // states, domains, context
    int traverse(visitproc visit, void *arg) const;
    void clear();
    void close() { std::destroy_at(&hold); }

    PyObject_HEAD
    fc_root_course course;
    PyObject *states;             // owned; a list, in named_modules order
    PyObject *domains;            // owned; a list
    ContextObject *context;       // owned
    Streams *streams;             // borrowed from the domains; null without a device
    std::weak_ptr<RootHold> hold; // of autograd's nodes
    int64_t graph_task;           // autograd's number of the running backward
    bool looks_around;            // somebody has put in what the next forward has to look at
    bool calls_methods;           // of some of its groups
    bool has_modes;               // a dispatch mode was active when somebody looked last
};

// Who uses one sees the collectives of units.
inline bool has_dispatch_modes()
{
    return c10::impl::TorchDispatchModeTLS::any_modes_set();
}

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

// The one behind it, of the same state; null: none.
inline GroupObject *next_group(const GroupObject *group)
{
    fc_root_unit *next = group->course.next;
    return next == nullptr ? nullptr
                           : reinterpret_cast<GroupObject *>(reinterpret_cast<char *>(next) -
                                                             offsetof(GroupObject, course));
}
// Those that are bound, in order; `first` null: none.
inline GroupObject *bound_from(GroupObject *first)
{
    while (first != nullptr && first->unit == nullptr) {
        first = next_group(first);
    }
    return first;
}
template <typename Body> void each_group(const StateObject *state, Body &&body)
{
    for (GroupObject *g = bound_from(state->group); g != nullptr; g = bound_from(next_group(g))) {
        body(g);
    }
}
template <typename Question> bool any_group(const StateObject *state, Question &&question)
{
    GroupObject *g = bound_from(state->group);
    while (g != nullptr && !question(g)) {
        g = bound_from(next_group(g));
    }
    return g != nullptr;
}

// How the group's gradients are reduced now.
fc_reduce_options reduce_options(GroupObject &group);

// The engine's owners.
inline GroupObject &as_group(void *owner)
{
    return *static_cast<GroupObject *>(owner);
}

inline StateObject *as_state(void *owner)
{
    return static_cast<StateObject *>(owner);
}

inline fc_training training_of(const StateObject *state)
{
    return fc_root_module_training(&state->course,
                                   state->root != nullptr ? &state->root->course : nullptr);
}

// Of a module's call, as who may change them returned them: (tuple, dict).
inline void take_arguments(PyObject *pair, Ref &args, Ref &kwargs)
{
    PyObject *new_args, *new_kwargs;
    if (!PyArg_ParseTuple(pair, "O!O!", &PyTuple_Type, &new_args, &PyDict_Type, &new_kwargs)) {
        throw_python();
    }
    args = Ref::borrow(new_args);
    kwargs = Ref::borrow(new_kwargs);
}

// ValueError as an exception unless `value` is the index of a TrainingState.
fc_training training_from(PyObject *value);

// Whether autograd runs a backward on this thread.
bool in_autograd_backward();

// As the policy of the state's unit has it; what must not change stays the same object.
void cast_inputs(StateObject *state, Ref &args, Ref &kwargs);
Ref cast_output(StateObject *state, PyObject *output);

// ---- what is registered with the modules; `self`: a state ----
// (module, args, kwargs) -> None or (args, kwargs)
PyObject *state_hook_pre_forward(PyObject *self, PyObject *const *arguments, Py_ssize_t n);
// (module, args, output) -> output
PyObject *state_hook_post_forward(PyObject *self, PyObject *const *arguments, Py_ssize_t n);

// Post-backward, from autograd; then nothing may be left of the unit for the end of backward.
void state_post_backward(StateObject *state);

// ---- module_call.cpp ----
// Forward has entered the state, in the call of its module that this thread began last.
void note_entered(const StateObject *state);
// Whether such a call goes on: it calls its module again.
bool is_running(const StateObject *state);

// ---- autograd; autograd.cpp ----
// Post-backward runs when autograd comes to the node that made the unit's only input: in the order
// of a backward that is after all nodes of the unit. False if that node cannot tell.
bool end_at_producer(StateObject *state, const at::Tensor &input);
// Routes the tensors through one identity node whose backward is the group's post-backward; returns
// what takes their places.
Tensors route_through_node(StateObject *state, const BorrowedTensors &tensors);
// Calls state_pre_backward when the gradient of any of the tensors is about to be used.
void hook_outputs(StateObject *state, const BorrowedTensors &tensors);
// The same for each node that the unit has made on the way to these outputs, so that the unit is
// gathered wherever a backward enters it.
void hook_nodes_inside(StateObject *state, const BorrowedTensors &outputs);
// The same for the gradients of the unit's parameters; for good.
void hook_params(StateObject *state);
void queue_final_callback(RootObject *root);
// As a forward begins: a backward that has not ended has failed.
void find_failed_backward(RootObject *root);

// ---- root.cpp: what is done around the functions of engine/root.h ----
template <typename Body> void each_state(const RootObject *root, Body &&body)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(root->states); i++) {
        body(reinterpret_cast<StateObject *>(PyList_GET_ITEM(root->states, i)));
    }
}

inline bool root_in_backward(const RootObject *root)
{
    return fc_root_in_backward(&root->course);
}

// Before the state is entered: whether the forward that began before was left by an exception. One
// that calls itself goes on.
inline bool root_was_left(const StateObject *state)
{
    const fc_root_course *course = &state->root->course;
    return fc_root_was_left(course, &state->course) &&
           (course->has_raised ||
            !is_running(static_cast<const StateObject *>(course->opener->owner)));
}

// After its other fields.
void root_init(RootObject *root, const std::vector<fc_domain *> &domains);
void root_pre_forward(StateObject *state);
void root_end_backward(RootObject *root);
inline void root_reset(RootObject *root, bool drops_gradients)
{
    check_raised(fc_root_reset(&root->course, drops_gradients));
}

// ---- python_door.cpp: the slower door to a unit's transitions, through its group's Python
// methods, where somebody has replaced one. The methods' own code goes on here. ----

using Body = std::function<void()>;

// Calls a method of the group. `body` runs where the class's own method stands: once, and at the
// latest when the method is through, since peers count on it. Returns what the method does.
Ref call_method(GroupObject *group, Attribute method, const Ref &arguments, Body body);
// The same where somebody has replaced a method; else `body` alone, and null.
template <typename Arguments, typename Run>
Ref through_method(GroupObject *group, Attribute method, Arguments &&arguments, Run &&body)
{
    if (group->calls_methods) {
        return call_method(group, method, arguments(), body);
    }
    body();
    return Ref();
}

// For the class's own method: runs the body that is waited for. False: it was called by others.
bool go_on(GroupObject &group);

// The methods without arguments, one after the other, which know the unit themselves.
void call_methods(GroupObject &group, std::initializer_list<Attribute> methods);
// The unit is gathered and shown, or gives its parameters up; `body` does what is still to be done.
inline void unshard_group(GroupObject &group)
{
    if (group.calls_methods) {
        call_methods(group, {Attribute::unshard, Attribute::wait_for_unshard});
    }
    group.unit->unshard();
}
template <typename Run> void reshard_group(GroupObject &group, Run &&body)
{
    if (group.calls_methods) {
        call_methods(group, {Attribute::reshard});
    }
    body();
}

// (module that stands for the state, second, third)
Ref arguments_of_forward(const StateObject *state, PyObject *second, PyObject *third);

// ---- hooks.cpp ----
// None, or (args, kwargs) if they changed. `member`: keeps the books of a grouped unit.
Ref state_pre_forward(StateObject *state, PyObject *args, PyObject *kwargs);
Ref state_pre_forward_member(StateObject *state, PyObject *args, PyObject *kwargs);
// The output to return.
Ref state_post_forward(StateObject *state, PyObject *output);
Ref state_post_forward_member(StateObject *state, PyObject *module, PyObject *output);
void state_pre_backward(StateObject *state);
// A parameter of the unit has a gradient that no pre-backward has announced.
void state_on_arrival(StateObject *state);

} // namespace fc

#endif
