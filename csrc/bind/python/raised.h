// C++ exceptions on their way through the engine's C, which knows statuses.
#ifndef FC_BIND_PYTHON_RAISED_H
#define FC_BIND_PYTHON_RAISED_H

#include "bind/python/python.h"

#include <functional>
#include <memory>
#include <new>
#include <type_traits>

namespace fc {

// What an operation that the engine has called has thrown, until check_raised(); owned. A pointer,
// since threads need no code to begin and end it: it is looked at some twenty times a step and
// unit.
inline constinit thread_local std::exception_ptr *raised = nullptr;

// For operations: runs `body`, and keeps what it throws.
template <typename Body> fc_status kept(Body &&body)
{
    try {
        body();
        return FC_OK;
    } catch (...) {
        auto *now = new (std::nothrow) std::exception_ptr(std::current_exception());
        if (now == nullptr) {
            return fc_fail(FC_ERR_NOMEM, "no memory to say what went wrong");
        }
        delete std::exchange(raised, now);
        return FC_ERR_INTERRUPTED;
    }
}

// Throws what operations have thrown, or the error of the status.
inline void check_raised(fc_status status)
{
    if (raised != nullptr) {
        const std::unique_ptr<std::exception_ptr> taken(std::exchange(raised, nullptr));
        std::rethrow_exception(*taken);
    }
    check(status);
}

// An operation in one of the engine's tables: `call`, a function of what `find` makes of its owner
// or a member of that, with the operation's other arguments. Where the operation returns a status
// `call` does, too, or may throw, and without those arguments it gives what the only one of them
// points to.
template <auto find, auto call> class Operation {
    template <typename Result, typename... Args> using Function = Result (*)(void *, Args...);

    template <typename Result, typename Self, typename... Args>
    static constexpr bool gives = requires(Result result, Self self, Args... args) {
        result = std::invoke(call, self, args...);
    };

    template <typename Result, typename... Args> static Result run(void *owner, Args... args)
    {
        auto &&self = find(owner);
        if constexpr (!std::is_same_v<Result, fc_status> ||
                      gives<Result, decltype(self), Args...>) {
            return std::invoke(call, self, args...);
        } else if constexpr (std::is_invocable_v<decltype(call), decltype(self), Args...>) {
            return kept([&] { std::invoke(call, self, args...); });
        } else {
            return kept([&] { answer(self, args...); });
        }
    }
    template <typename Self, typename Answer> static void answer(Self &&self, Answer *out)
    {
        *out = std::invoke(call, self);
    }

public:
    template <typename Result, typename... Args>
    constexpr operator Function<Result, Args...>() const
    {
        return run<Result, Args...>;
    }
};

} // namespace fc

#endif
