// Names the parameter in torch's error about a sharded weight among plain tensors.
//
// DTensor's operations fail in torch's C++, below everything that Python could wrap. All calls of
// tensor subclasses go through one table of the interpreter; the one in its place here passes them
// on, and looks at nothing but that error.
#include "bind/mixed.h"

#include "bind/compat.h"
#include "bind/python.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <exception>
#include <string>

namespace fc {

namespace {

PyObject *describe_mixed = nullptr; // owned, never freed

#if FC_KNOWS_INTERPRETER_TABLE

using c10::TensorImpl;

using Arguments = c10::SmallVector<c10::IValue, 8>;

constexpr const char *mixed_text = "got mixed torch.Tensor and DTensor";

// What Python says about the tensors among the arguments; needs the GIL and no error set.
std::string explanation(const Arguments &arguments)
{
    Ref tensors = Ref::take(PyList_New(0));
    const auto add = [&](const at::Tensor &tensor) {
        Ref object = Ref::take(THPVariable_Wrap(tensor));
        return object && tensors && PyList_Append(tensors.get(), object.get()) == 0;
    };
    bool is_complete = true;
    for (const c10::IValue &argument : arguments) {
        if (argument.isTensor()) {
            is_complete = is_complete && add(argument.toTensor());
        } else if (argument.isTensorList()) {
            for (const at::Tensor &tensor : argument.toTensorVector()) {
                is_complete = is_complete && add(tensor);
            }
        }
    }
    std::string text;
    if (is_complete) {
        const Ref said = Ref::take(PyObject_CallOneArg(describe_mixed, tensors.get()));
        const char *utf8 = said && PyUnicode_Check(said.get()) ? PyUnicode_AsUTF8(said.get()) : "";
        text = utf8 != nullptr ? utf8 : "";
    }
    PyErr_Clear(); // torch's error is the one to raise
    return text;
}

// Adds to a Python error that is on its way; it is set again.
void explain_python_error(python_error &error, const Arguments &arguments)
{
    error.restore();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    const Ref said = Ref::take(value != nullptr ? PyObject_Str(value) : nullptr);
    const char *utf8 = said ? PyUnicode_AsUTF8(said.get()) : nullptr;
    const std::string text = utf8 != nullptr ? utf8 : "";
    PyErr_Clear();
    std::string more;
    if (text.find(mixed_text) != std::string::npos) {
        more = explanation(arguments);
    }
    if (more.empty()) {
        PyErr_Restore(type, value, traceback);
    } else {
        PyErr_SetString(type, (text + "\n" + more).c_str());
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
    }
    throw_python();
}

class Table final : public c10::impl::PyInterpreterVTable {
public:
    explicit Table(const c10::impl::PyInterpreterVTable *next) : next_(next) {}

    void dispatch(const c10::OperatorHandle &op, torch::jit::Stack *stack) const override
    {
        const size_t n = std::min(op.schema().arguments().size(), stack->size());
        const Arguments arguments(stack->end() - static_cast<ptrdiff_t>(n), stack->end());
        try {
            next_->dispatch(op, stack);
        } catch (python_error &error) {
            const Gil gil;
            explain_python_error(error, arguments);
        } catch (const std::exception &error) {
            const auto *known = dynamic_cast<const c10::Error *>(&error);
            const std::string text = known ? known->what_without_backtrace() : error.what();
            if (text.find(mixed_text) == std::string::npos) {
                throw;
            }
            std::string more;
            {
                const Gil gil;
                more = explanation(arguments);
            }
            if (more.empty()) {
                throw;
            }
            TORCH_CHECK(false, text, "\n", more);
        }
    }

#define FC_PASS(type, name, parameters, arguments)                                                 \
    type name parameters const override                                                            \
    {                                                                                              \
        return next_->name arguments;                                                              \
    }

    FC_PASS(std::string, name, (), ())
    FC_PASS(void, incref, (PyObject * o), (o))
    FC_PASS(void, decref, (PyObject * o), (o))
    FC_PASS(bool, try_incref, (const c10::impl::PyObjectSlot &s), (s))
    FC_PASS(size_t, refcnt, (PyObject * o), (o))
    FC_PASS(c10::intrusive_ptr<TensorImpl>, detach, (const TensorImpl *t), (t))
    FC_PASS(void, reportErrorCallback, (PyObject * o, c10::DispatchKey k), (o, k))
    FC_PASS(void, python_op_registration_trampoline,
            (const c10::OperatorHandle &op, c10::DispatchKey k, c10::DispatchKeySet ks,
             torch::jit::Stack *stack, bool with_keyset, bool with_op),
            (op, k, ks, stack, with_keyset, with_op))
    FC_PASS(void, throw_abstract_impl_not_imported_error,
            (std::string op, const char *module, const char *context), (op, module, context))
    FC_PASS(void, python_dispatcher,
            (const c10::OperatorHandle &op, c10::DispatchKeySet k, torch::jit::Stack *stack),
            (op, k, stack))
    FC_PASS(bool, is_contiguous, (const TensorImpl *t, at::MemoryFormat f), (t, f))
    FC_PASS(c10::SymBool, sym_is_contiguous, (const TensorImpl *t, at::MemoryFormat f), (t, f))
    FC_PASS(bool, is_strides_like, (const TensorImpl *t, at::MemoryFormat f), (t, f))
    FC_PASS(bool, is_non_overlapping_and_dense, (const TensorImpl *t), (t))
    FC_PASS(c10::Device, device, (const TensorImpl *t), (t))
    FC_PASS(int64_t, dim, (const TensorImpl *t), (t))
    FC_PASS(c10::IntArrayRef, strides, (const TensorImpl *t), (t))
    FC_PASS(c10::IntArrayRef, sizes, (const TensorImpl *t), (t))
    FC_PASS(c10::SymIntArrayRef, sym_sizes, (const TensorImpl *t), (t))
    FC_PASS(c10::Layout, layout, (const TensorImpl *t), (t))
    FC_PASS(int64_t, numel, (const TensorImpl *t), (t))
    FC_PASS(c10::SymInt, sym_numel, (const TensorImpl *t), (t))
    FC_PASS(c10::SymIntArrayRef, sym_strides, (const TensorImpl *t), (t))
    FC_PASS(c10::SymInt, sym_storage_offset, (const TensorImpl *t), (t))
    FC_PASS(void, trace_gpu_event_creation, (c10::DeviceType d, uintptr_t e), (d, e))
    FC_PASS(void, trace_gpu_event_deletion, (c10::DeviceType d, uintptr_t e), (d, e))
    FC_PASS(void, trace_gpu_event_record, (c10::DeviceType d, uintptr_t e, uintptr_t s), (d, e, s))
    FC_PASS(void, trace_gpu_event_wait, (c10::DeviceType d, uintptr_t e, uintptr_t s), (d, e, s))
    FC_PASS(void, trace_gpu_memory_allocation, (c10::DeviceType d, uintptr_t p), (d, p))
    FC_PASS(void, trace_gpu_memory_deallocation, (c10::DeviceType d, uintptr_t p), (d, p))
    FC_PASS(void, trace_gpu_stream_creation, (c10::DeviceType d, uintptr_t s), (d, s))
    FC_PASS(void, trace_gpu_device_synchronization, (c10::DeviceType d), (d))
    FC_PASS(void, trace_gpu_stream_synchronization, (c10::DeviceType d, uintptr_t s), (d, s))
    FC_PASS(void, trace_gpu_event_synchronization, (c10::DeviceType d, uintptr_t e), (d, e))
    FC_PASS(void, reset_backward_hooks, (const TensorImpl *t), (t))

#undef FC_PASS

private:
    const c10::impl::PyInterpreterVTable *next_;
};

void put_table()
{
    c10::impl::PyInterpreter *interpreter = getPyInterpreter();
    interpreter->vtable_ = new Table(interpreter->vtable_); // torch takes it out at exit
}

#else

void put_table()
{
} // the error stays torch's

#endif

} // namespace

} // namespace fc

PyObject *fc_name_mixed(PyObject *, PyObject *describe)
{
    return fc::guarded([&]() -> PyObject * {
        const bool is_first = fc::describe_mixed == nullptr;
        Py_XSETREF(fc::describe_mixed, Py_NewRef(describe));
        if (is_first) {
            fc::put_table();
        }
        Py_RETURN_NONE;
    });
}
