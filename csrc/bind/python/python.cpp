/* Statuses as exceptions, and the interpreter's end. */
#include "bind/python/python.h"

#include "base/clock.h"
#include "base/threads.h"
#include "bind/module.h"
#include "transport/transport.h"
#include "window/window.h"

static PyObject *exception_of(fc_status status)
{
    switch (status) {
    case FC_ERR_INVALID:
        return PyExc_ValueError;
    case FC_ERR_NOMEM:
        return PyExc_MemoryError;
    case FC_ERR_SYSTEM:
        return PyExc_OSError;
    case FC_ERR_TIMEOUT:
        return PyExc_TimeoutError;
    case FC_ERR_UNSUPPORTED:
        return PyExc_NotImplementedError;
    case FC_ERR_INTERRUPTED:
        return PyExc_KeyboardInterrupt;
    default:
        return PyExc_RuntimeError;
    }
}

/* The error of a process group, with the last message before its text, caused by it as it was. */
static void raise_from_group()
{
    fc::ErrorAside error;
    PyObject *cause = Py_NewRef(error.object());

    PyErr_Format(PyExc_RuntimeError, "%s: %S", fc_last_message(), cause);
    error.drop();
    PyException_SetCause(error.object(), cause); /* takes it */
}

/* Whether a peer's end may be behind the failure. */
static bool is_of_peers(fc_status status)
{
    return status == FC_ERR_PEER || status == FC_ERR_BROKEN || status == FC_ERR_GROUP;
}

/* Whether a handler of this process's own signals has raised. Who sends a signal to all ranks does
 * so one after the other: one that a peer has had already may still be on its way here. */
static bool await_signal()
{
    constexpr int64_t grace_ns = FC_NS_PER_S / 2, apart_ns = 5 * FC_NS_PER_S;
    constexpr useconds_t slice_us = 10000;
    static int64_t last_ns = -apart_ns; /* under the interpreter's lock */
    const int64_t start_ns = fc_now_ns();

    if (PyErr_CheckSignals() != 0) {
        return true;
    }
    if (start_ns - last_ns < apart_ns) { /* the same failure, told again */
        return false;
    }
    last_ns = start_ns;
    while (fc_now_ns() - start_ns < grace_ns) {
        Py_BEGIN_ALLOW_THREADS(void)
        usleep(slice_us);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() != 0) {
            return true;
        }
    }
    return false;
}

/* True: what a signal's handler raised stands instead of the failure. Handlers run in the main
 * thread only. */
static bool is_interrupted(fc_status status)
{
    if (!is_of_peers(status) || getpid() != gettid()) {
        return false;
    }
    fc::ErrorAside error;
    const bool has_raised = await_signal();

    if (has_raised) {
        error.drop();
    }
    return has_raised;
}

PyObject *fc_raise(fc_status status)
{
    if (is_interrupted(status)) {
        return nullptr;
    }
    fc_window_failed(status, fc_last_message());
    const bool is_set = PyErr_Occurred() != nullptr; /* maybe another than the group's */

    if (status == FC_ERR_GROUP && is_set) {
        if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
            raise_from_group();
        }
    } else if (status != FC_ERR_INTERRUPTED || !is_set) {
        const char *text = fc_last_message();

        PyErr_SetString(exception_of(status), text[0] != '\0' ? text : fc_status_text(status));
    }
    return nullptr;
}

/* Of this thread, if it holds the lock; else null. */
static void *leave_interpreter()
{
    return PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

static void enter_interpreter(void *left)
{
    if (left != nullptr) {
        const fc::Request request;
        PyEval_RestoreThread(static_cast<PyThreadState *>(left));
    }
}

void fc::open_interpreter()
{
    interpreter_lock = {leave_interpreter, enter_interpreter};
}

static fc_end end_of_script()
{
    // Where Python leaves an exception that nothing caught; one of the interactive shell, too.
    return PySys_GetObject("last_type") != nullptr ? FC_END_BY_EXCEPTION : FC_END_IN_ORDER;
}

void fc::close_interpreter()
{
    constexpr int longest_ms = 1000; // a forked child inherits requests of threads it lacks
    // Threads of gloo's process groups, as torch names them. After a collective they drop its
    // tensors, often once the caller has gone on; if they then hold the last reference, they ask
    // for the GIL, which ends a process that is at its end with "terminate called without an active
    // exception".
    constexpr const char *collective_thread = "pt_gloo_runloop";

    fc_transport_tell_end(end_of_script());
    Py_BEGIN_ALLOW_THREADS
    fc_transport_stop_telling();
    Py_END_ALLOW_THREADS
    is_closing = true;
    int n_idle = 0;
    // Twice: a thread that asks for the GIL sleeps, too, gets it here, and goes on.
    for (int i = 0; i < longest_ms && (n_idle < 2 || n_asking > 0); i++) {
        Py_BEGIN_ALLOW_THREADS
        usleep(1000);
        n_idle = fc_threads_any_runs(collective_thread) ? 0 : n_idle + 1;
        Py_END_ALLOW_THREADS
    }
}
