// Calls of sharded modules: nn.Module.__call__ in C for those that have no hooks but their unit's.
#include "bind/fsdp/state.h"
#include "bind/module.h"
#include "bind/python/untraced.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/frontend/tracer.h>

namespace fc {

namespace {

// A call that this thread is in.
class RunningCall : NoCopy {
public:
    explicit RunningCall(PyObject *module) : module_(module), around_(newest_) { newest_ = this; }
    ~RunningCall() { newest_ = around_; }
    static RunningCall *newest() { return newest_; }
    RunningCall *around() const { return around_; }
    bool is_of(const StateObject *state) const
    {
        Py_ssize_t i = 0;
        while (i < PyTuple_GET_SIZE(state->modules) &&
               PyTuple_GET_ITEM(state->modules, i) != module_) {
            i++;
        }
        return i < PyTuple_GET_SIZE(state->modules);
    }
    bool has_entered = false; // the forward of the module's state

private:
    static thread_local RunningCall *newest_;

    PyObject *module_; // borrowed
    RunningCall *around_;
};

thread_local RunningCall *RunningCall::newest_ = nullptr;

// nn.Module, and what is the same in every call. Never freed.
struct Caller {
    PyTypeObject *module_type;
    PyObject *globals;         // of the file that defines nn.Module
    PyObject *plain_call_impl; // nn.Module's own function
    PyObject
        *plain_getattribute; // and how its attributes are found before its __getattr__ is asked
};

Caller *caller = nullptr;

// Dicts of a module that have to be empty, and of `globals`, too.
constexpr Attribute no_hooks[] = {Attribute::backward_hooks, Attribute::backward_pre_hooks,
                                  Attribute::forward_hooks_always_called};
constexpr Attribute global_hooks[] = {
    Attribute::global_forward_pre_hooks, Attribute::global_forward_hooks,
    Attribute::global_backward_pre_hooks, Attribute::global_backward_hooks};

Caller *make_caller()
{
    auto *made = new Caller();
    const Ref type = look_up(Import::nn_module);
    made->globals = Py_NewRef(PyModule_GetDict(look_up(Import::nn_module_file).get()));
    made->module_type = reinterpret_cast<PyTypeObject *>(Py_NewRef(type.get()));
    made->plain_call_impl =
        checked(PyObject_GetAttr(type.get(), name_of(Attribute::call_impl))).release();
    made->plain_getattribute =
        _PyType_Lookup(made->module_type, name_of(Attribute::dunder_getattribute));
    return made;
}

// Whether what `__call__` calls is nn.Module's own; somebody may replace it at any time. (When a
// `__call__` is set, Python itself takes `call` from the class.)
bool is_called_plainly(PyTypeObject *type)
{
    return _PyType_Lookup(type, name_of(Attribute::call_impl)) == caller->plain_call_impl;
}

bool is_empty_dict(PyObject *owner, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(owner, key);
    return value != nullptr && PyDict_Check(value) && PyDict_GET_SIZE(value) == 0;
}

// The state that the hook belongs to, if it is `function`; borrowed, or null.
PyObject *state_of_hook(PyObject *hook, const void *function)
{
    const bool is_ours = PyCFunction_Check(hook) &&
                         reinterpret_cast<void *>(PyCFunction_GET_FUNCTION(hook)) == function;
    return is_ours ? PyCFunction_GET_SELF(hook) : nullptr;
}

// The state whose hook `function` is the only one in the dict; borrowed, or null.
PyObject *only_hook(PyObject *owner, PyObject *key, const void *function)
{
    PyObject *hooks = PyDict_GetItemWithError(owner, key);
    if (hooks == nullptr || !PyDict_Check(hooks) || PyDict_GET_SIZE(hooks) != 1) {
        return nullptr;
    }
    PyObject *hook;
    Py_ssize_t at = 0;
    PyDict_Next(hooks, &at, nullptr, &hook);
    return state_of_hook(hook, function);
}

// Whether somebody watches Python's calls, and would miss those of nn.Module.
bool is_watched()
{
    const PyThreadState *thread = PyThreadState_Get();
    return thread->c_profilefunc != nullptr || thread->c_tracefunc != nullptr ||
           is_frame_evaluation_replaced() || torch::jit::tracer::isTracing();
}

// The state of a module that has nothing to run around forward but its unit's two hooks; borrowed,
// or null.
PyObject *direct_state(PyObject *module)
{
    if (!is_called_plainly(Py_TYPE(module)) || is_watched()) {
        return nullptr;
    }
    for (const Attribute name : global_hooks) {
        if (!is_empty_dict(caller->globals, name_of(name))) {
            return nullptr;
        }
    }
    const Ref attributes = checked(PyObject_GenericGetDict(module, nullptr));
    for (const Attribute name : no_hooks) {
        if (!is_empty_dict(attributes.get(), name_of(name))) {
            return nullptr;
        }
    }
    PyObject *compiled =
        PyDict_GetItemWithError(attributes.get(), name_of(Attribute::compiled_call_impl));
    if (compiled != nullptr && compiled != Py_None) {
        return nullptr;
    }
    PyObject *state = only_hook(attributes.get(), name_of(Attribute::forward_pre_hooks),
                                reinterpret_cast<const void *>(state_hook_pre_forward));
    PyObject *after = only_hook(attributes.get(), name_of(Attribute::forward_hooks),
                                reinterpret_cast<const void *>(state_hook_post_forward));
    return state == after ? state : nullptr;
}

// The function of the class that `module.forward` is a method of; borrowed, or null: the attribute
// has to be asked for.
PyObject *forward_of_class(PyObject *module)
{
    PyTypeObject *const type = Py_TYPE(module);
    PyObject *const name = name_of(Attribute::forward);
    PyObject *const found = _PyType_Lookup(type, name);
    if (found == nullptr || !PyFunction_Check(found) ||
        _PyType_Lookup(type, name_of(Attribute::dunder_getattribute)) !=
            caller->plain_getattribute) {
        return nullptr;
    }
    const Ref attributes = checked(PyObject_GenericGetDict(module, nullptr));
    const int is_own = PyDict_Contains(attributes.get(), name); // somebody has set it on the module
    check(is_own);
    return is_own != 0 ? nullptr : found;
}

Ref call_forward(PyObject *module, PyObject *args, PyObject *kwargs)
{
    const Ref function = Ref::borrow(forward_of_class(module));
    if (!function) {
        const Ref forward = checked(PyObject_GetAttr(module, name_of(Attribute::forward)));
        return checked(PyObject_Call(forward.get(), args, kwargs));
    }
    c10::SmallVector<PyObject *, 8> given = {module};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        given.push_back(PyTuple_GET_ITEM(args, i));
    }
    return checked(PyObject_VectorcallDict(function.get(), given.data(), given.size(), kwargs));
}

Ref call_around(PyObject *module, PyObject *state, PyObject *given_args, PyObject *given_kwargs)
{
    Ref args = Ref::borrow(given_args);
    Ref kwargs = given_kwargs != nullptr ? Ref::borrow(given_kwargs) : checked(PyDict_New());
    PyObject *const before[] = {module, args.get(), kwargs.get()};
    const Ref changed = checked(state_hook_pre_forward(state, before, 3));
    if (changed.get() != Py_None) {
        take_arguments(changed.get(), args, kwargs);
    }
    Ref output = call_forward(module, args.get(), kwargs.get());
    PyObject *const after[] = {module, args.get(), output.get()};
    Ref replaced = checked(state_hook_post_forward(state, after, 3));
    return replaced.get() != Py_None ? std::move(replaced) : std::move(output);
}

// An error that leaves a module may name the parameter it is about: fsdp_c/_fully_shard/_errors.py
// knows.
void explain_error()
{
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        return;
    }
    ErrorAside error;
    PyObject *const value = error.object();
    if (!succeeds([&] { ask_python(Call::explain_error, value); })) {
        PyErr_WriteUnraisable(value); // the error itself is what counts
    }
}

// The module's states learn that its call ended in an exception, which is set.
void note_raised(PyObject *module)
{
    const ErrorAside error;
    const Ref attributes = Ref::take(PyObject_GenericGetDict(module, nullptr));
    PyObject *hooks = attributes
                          ? PyDict_GetItem(attributes.get(), name_of(Attribute::forward_pre_hooks))
                          : nullptr;
    if (hooks != nullptr && PyDict_Check(hooks)) {
        PyObject *hook;
        for (Py_ssize_t at = 0; PyDict_Next(hooks, &at, nullptr, &hook) != 0;) {
            PyObject *state =
                state_of_hook(hook, reinterpret_cast<const void *>(state_hook_pre_forward));
            if (state != nullptr) {
                auto *owner = reinterpret_cast<StateObject *>(state);
                if (owner->root != nullptr) {
                    fc_root_note_raised(&owner->root->course, &owner->course);
                }
            }
        }
    }
}

PyObject *call_module(PyObject *module, PyObject *args, PyObject *kwargs)
{
    return guarded([&]() -> PyObject * {
        const Ref state = Ref::borrow(direct_state(module));
        if (!state) {
            if (PyErr_Occurred()) {
                return nullptr;
            }
            return caller->module_type->tp_call(module, args, kwargs);
        }
        return call_around(module, state.get(), args, kwargs).release();
    });
}

// tp_call of the classes.
PyObject *call(PyObject *module, PyObject *args, PyObject *kwargs)
{
    RunningCall running(module);
    PyObject *output = call_module(module, args, kwargs);
    if (output == nullptr) {
        note_raised(module);
        explain_error();
    }
    return output;
}

} // namespace

void note_entered(const StateObject *state)
{
    RunningCall *newest = RunningCall::newest();
    if (newest != nullptr && newest->is_of(state)) {
        newest->has_entered = true;
    }
}

bool is_running(const StateObject *state)
{
    const RunningCall *running = RunningCall::newest();
    while (running != nullptr && !(running->has_entered && running->is_of(state))) {
        running = running->around();
    }
    return running != nullptr;
}

void call_directly(PyObject *cls)
{
    if (caller == nullptr) {
        caller = make_caller();
    }
    auto *type = reinterpret_cast<PyTypeObject *>(cls);
    PyTypeObject *base = caller->module_type;
    if (!PyType_Check(cls) || !PyType_IsSubtype(type, base)) {
        raise_error(PyExc_TypeError, "expected a class of modules");
    }
    PyObject *const name = name_of(Attribute::dunder_call);
    const Ref own = checked(PyObject_GetAttr(cls, name));
    const Ref plain = checked(PyObject_GetAttr(reinterpret_cast<PyObject *>(base), name));
    if (own.get() == plain.get() && is_called_plainly(type)) {
        type->tp_call = call;
    }
}

} // namespace fc
