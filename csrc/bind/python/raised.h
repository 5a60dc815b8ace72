// C++ exceptions on their way through the engine's C, which knows statuses.
#ifndef FC_BIND_PYTHON_RAISED_H
#define FC_BIND_PYTHON_RAISED_H

#include "bind/python/python.h"

#include <exception>
#include <utility>

namespace fc {

// What an operation that the engine has called has thrown, until check_raised().
inline thread_local std::exception_ptr raised;

// For operations: runs `body`, and keeps what it throws.
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

// Throws what operations have thrown, or the error of the status.
inline void check_raised(fc_status status)
{
    if (raised != nullptr) {
        std::rethrow_exception(std::exchange(raised, nullptr));
    }
    check(status);
}

} // namespace fc

#endif
