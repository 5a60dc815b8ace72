// The Python type Context: torch's names for the flags of a root.
#include "bind/fsdp/state.h"

#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/python/process.h"

#include <utility>

namespace fc {

namespace {

Ref active(ContextObject &context)
{
    const fc_root_ending ending = context.course.ending;
    return ending == FC_ENDING_OPEN ? Ref::borrow(Py_None) : to_python(ending == FC_ENDING_MANUAL);
}

void set_active(ContextObject &context, PyObject *value)
{
    context.course.ending = value == Py_None  ? FC_ENDING_OPEN
                            : truth_of(value) ? FC_ENDING_MANUAL
                                              : FC_ENDING_AUTOMATIC;
}

// A backward that failed has not completed.
bool is_queued(ContextObject &context)
{
    return context.course.awaits_end || context.course.is_failed;
}

void set_queued(ContextObject &context, PyObject *value)
{
    context.course.awaits_end = truth_of(value);
}

void set_pending(ContextObject &context, PyObject *value)
{
    const bool before = std::exchange(context.awaits_handle, truth_of(value));
    process.n_awaited += context.awaits_handle - before;
}

PyGetSetDef context_properties[] = {
    flag_property<[](ContextObject &context) -> bool & { return context.course.is_last_backward; }>(
        "is_last_backward", nullptr),
    flag_property<[](ContextObject &context) -> bool & { return context.course.ends_manually; }>(
        "manual_backward_finalization", nullptr),
    property<active, set_active>(
        "manual_backward_finalization_active",
        "None, or whether the running backward waits for finalize_backward()"),
    property<is_queued, set_queued>("post_backward_final_callback_queued",
                                    "whether a backward is going on, or has failed"),
    property<&ContextObject::awaits_handle, set_pending>(
        "gradient_reduction_pending",
        "whether a handle of finalize_backward() is to be waited for"),
    {}};

} // namespace

void ContextObject::open()
{
    course.is_last_backward = true;
}

void ContextObject::close() const
{
    process.n_awaited -= awaits_handle;
}

int register_context(PyObject *module)
{
    return add_type<ContextObject>(
        module, {.name = "fsdp_c._C.Context",
                 .doc = "Base of FSDPStateContext: what the units of a root share.",
                 .properties = context_properties,
                 .flags = Py_TPFLAGS_BASETYPE});
}

} // namespace fc
