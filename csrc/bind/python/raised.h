// Exceptions on their way through C: thrown by what the engine calls, thrown again where it was
// called.
#ifndef FC_BIND_PYTHON_RAISED_H
#define FC_BIND_PYTHON_RAISED_H

#include "bind/python/python.h"

#include <exception>
#include <utility>

namespace fc {

inline thread_local std::exception_ptr raised;

// What a function does that the engine calls.
template <typename Body> fc_status kept(Body &&body)
{
    try {
        body();
        return FC_OK;
    } catch (...) {
        raised = std::current_exception();
        return FC_ERR_INTERRUPTED;
    }
}

// Throws what such a function has thrown, or the error of the status.
inline void check_raised(fc_status status)
{
    if (status == FC_OK) {
        return;
    }
    if (raised != nullptr) {
        std::rethrow_exception(std::exchange(raised, nullptr));
    }
    check(status);
}

} // namespace fc

#endif
