// What the hooks tell while they run: ranges for the profiler, lines for torch's debug log.
#ifndef FC_BIND_FSDP_EVENTS_H
#define FC_BIND_FSDP_EVENTS_H

#include "bind/core.h"

#include <ATen/record_function.h>

namespace fc {

class Unit;

// Labels a range for the profiler as torch does, if a profiler is listening; nothing without a
// label.
class Range : NoCopy {
public:
    explicit Range(const char *label, const Unit *unit = nullptr)
    {
        if (label != nullptr) {
            begin(label, unit);
        }
    }

private:
    void begin(const char *label, const Unit *unit);

    std::unique_ptr<at::RecordFunction> record_;
};

// A line in the log of torch's implementation, if DEBUG was on when the forward's root began.
void log_event(const char *label, const Unit *unit = nullptr);
// Asks the log for its level; at the beginning of a root's forward.
void log_look_up_level();

} // namespace fc

#endif
