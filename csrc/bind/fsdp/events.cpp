// What the hooks tell while they run: ranges for the profiler, lines for torch's debug log.
#include "bind/fsdp/events.h"

#include "bind/fsdp/unit.h"
#include "bind/python/objects.h"

namespace fc {

namespace {

// "label (unit)"; the root has no name.
std::string with_name(const char *label, const Unit *unit)
{
    std::string text = label;
    if (unit != nullptr && !unit->name().empty()) {
        text += " (" + unit->name() + ")";
    }
    return text;
}

} // namespace

// Asked as torch asks before each operator, of this thread's own: hasCallbacks() takes a lock.
void Range::begin(const char *label, const Unit *unit)
{
    if (auto listening = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
        record_ = std::make_unique<at::RecordFunction>(std::move(*listening));
        record_->before(with_name(label, unit));
    }
}

void log_event(const char *label, const Unit *unit)
{
    if (process.is_logging) {
        ask_python(Call::log_event, to_python(with_name(label, unit).c_str()).get());
    }
}

void log_look_up_level()
{
    process.is_logging = truth_of(ask_python(Call::is_logging).get());
}

} // namespace fc
