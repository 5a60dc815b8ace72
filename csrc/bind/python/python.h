// Owned Python references and the bridge between C statuses, Python errors and C++ exceptions.
#ifndef FC_BIND_PYTHON_PYTHON_H
#define FC_BIND_PYTHON_PYTHON_H

#include <Python.h>

#include "base/status.h"
#include "bind/core.h"
#include "libtorch/unlocked.h"

#include <torch/csrc/Exceptions.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <utility>

/* Raises the exception for `status` (or what a signal's handler raises, where a peer has failed:
 * Ctrl-C reaches all ranks, one after the other) with this thread's last message; always returns
 * nullptr. For FC_ERR_INTERRUPTED an exception that a callback or a signal handler has set is kept;
 * for FC_ERR_GROUP the message goes before that of the process group. The GIL is held. */
PyObject *fc_raise(fc_status status);

namespace fc {

// An owned reference; null is allowed. Needs the GIL wherever it changes.
class Ref {
public:
    Ref() = default;
    Ref(Ref &&other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Ref(const Ref &other) : object_(other.object_) { Py_XINCREF(object_); }
    Ref &operator=(Ref other) noexcept
    {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Ref() { Py_XDECREF(object_); }

    static Ref take(PyObject *owned)
    {
        Ref ref;
        ref.object_ = owned;
        return ref;
    }
    static Ref borrow(PyObject *borrowed)
    {
        Py_XINCREF(borrowed);
        return take(borrowed);
    }
    PyObject *get() const { return object_; }
    PyObject *release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject *object_ = nullptr;
};

// Throws the Python error that is set; it survives the way through autograd's threads.
[[noreturn]] inline void throw_python()
{
    python_error error;
    error.persist();
    throw error;
}

// Throws a Python error; the words as PyErr_Format has them.
template <typename... Words>
[[noreturn]] void raise_error(PyObject *type, const char *format, Words... words)
{
    PyErr_Format(type, format, words...);
    throw_python();
}

// A new reference, or the Python error as an exception.
inline Ref checked(PyObject *owned)
{
    if (owned == nullptr) {
        throw_python();
    }
    return Ref::take(owned);
}

// The error that is set, taken aside: set again at the end, or as drop() says.
class ErrorAside : NoCopy {
public:
    ErrorAside() { PyErr_Fetch(&type_, &value_, &trace_); }
    ~ErrorAside() { PyErr_Restore(type_, value_, trace_); }
    // The exception itself, with its traceback; borrowed.
    PyObject *object()
    {
        PyErr_NormalizeException(&type_, &value_, &trace_);
        if (trace_ != nullptr) {
            (void)PyException_SetTraceback(value_, trace_);
        }
        return value_;
    }
    // What is set meanwhile stands.
    void drop()
    {
        Py_XDECREF(type_);
        Py_XDECREF(value_);
        Py_XDECREF(trace_);
        PyErr_Fetch(&type_, &value_, &trace_);
    }

private:
    PyObject *type_, *value_, *trace_;
};

inline void check(int result)
{
    if (result < 0) {
        throw_python();
    }
}

inline void check(fc_status status)
{
    if (status != FC_OK) {
        fc_raise(status);
        throw_python();
    }
}

// Runs `body` and turns C++ exceptions into Python errors; for functions that Python calls.
template <typename Body> PyObject *guarded(Body &&body)
{
    try {
        return body();
    } catch (python_error &error) {
        error.restore();
    } catch (const c10::Error &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// The same of a body without a result: false with the Python error set.
template <typename Body> bool succeeds(Body &&body)
{
    return bool(Ref::take(guarded([&] {
        body();
        return Py_NewRef(Py_None);
    })));
}

// The interpreter's end: a thread that asks for its lock then is ended by an exception that no C++
// destructor lets through. Threads other than the main one stay away from it instead, as CPython
// has it from 3.14 on, and the end waits for those that have asked already.
inline std::atomic<bool> is_closing{false};
inline std::atomic<int> n_asking{0};

inline bool is_left_behind()
{
    return is_closing && getpid() != gettid();
}

// Around a request for the lock.
class Request : NoCopy {
public:
    Request()
    {
        n_asking++;
        if (is_left_behind()) {
            n_asking--;
            for (;;) {
                (void)pause();
            }
        }
    }
    ~Request() { n_asking--; }
};

// Holds the GIL; for callbacks from autograd.
class Gil : NoCopy {
public:
    Gil() : state_(ensure()) {}
    ~Gil() { PyGILState_Release(state_); }

private:
    static PyGILState_STATE ensure()
    {
        const Request request;
        return PyGILState_Ensure();
    }

    PyGILState_STATE state_;
};

// Lets other Python threads run, where this one holds the lock; for long work on memory.
using NoGil = Unlocked;

} // namespace fc

#endif
