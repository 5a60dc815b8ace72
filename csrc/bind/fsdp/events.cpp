// What the hooks tell while they run: ranges for the profiler, lines for torch's debug log.
#include "bind/fsdp/events.h"

#include "bind/fsdp/unit.h"
#include "bind/python/calls.h"
#include "bind/python/process.h"

#include <string>

namespace fc {

namespace {

constexpr const char *logger_name = "torch.distributed.fsdp.fully_shard";
constexpr int debug_level = 10; // logging.DEBUG

// "label (unit)"; the root has no name.
std::string with_name(const char *label, const Unit *unit)
{
    std::string text = label;
    if (unit != nullptr && !unit->name().empty()) {
        text += " (" + unit->name() + ")";
    }
    return text;
}

// Never freed: logging keeps its loggers for as long as the process lives.
PyObject *logger()
{
    static PyObject *const found = [] {
        const Ref get = look_up(Import::get_logger);
        return checked(PyObject_CallFunction(get.get(), "s", logger_name)).release();
    }();
    return found;
}

} // namespace

Range::Range(const char *label, const Unit *unit)
{
    if (label == nullptr || !at::hasCallbacks()) {
        return;
    }
    record_ = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    record_->before(with_name(label, unit));
}

void log_event(const char *label, const Unit *unit)
{
    if (process.is_logging) {
        const Ref debug = checked(PyObject_GetAttr(logger(), name_of(Attribute::debug)));
        checked(PyObject_CallFunction(debug.get(), "ss", "%s", with_name(label, unit).c_str()));
    }
}

void log_look_up_level()
{
    static PyObject *const level = PyLong_FromLong(debug_level);
    const Ref answer =
        checked(PyObject_CallMethodOneArg(logger(), name_of(Attribute::is_enabled_for), level));
    process.is_logging = PyObject_IsTrue(answer.get()) == 1;
}

} // namespace fc
