/* Host operations in terms of Python. The core may call them with or without the GIL held. */
#include "bind/python/callbacks.h"

#include "bind/python/process.h"
#include "bind/python/python.h"

#include <cstring>
#include <unistd.h>

/* Of this thread while it waits without the GIL; nullptr otherwise. */
static thread_local PyThreadState *waiting_state = nullptr;

static void enter_wait(void *)
{
    if (waiting_state == nullptr && PyGILState_Check()) {
        waiting_state = PyEval_SaveThread();
    }
}

static void leave_wait(void *)
{
    if (waiting_state != nullptr) {
        PyThreadState *state = waiting_state;

        const fc::Request request;
        waiting_state = nullptr;
        PyEval_RestoreThread(state);
    }
}

static fc_status poll(void *)
{
    const fc::Gil gil;
    const bool is_interrupted = PyErr_CheckSignals() != 0;

    return is_interrupted ? fc_fail(FC_ERR_INTERRUPTED, "interrupted by a signal") : FC_OK;
}

static void notice(void *, const char *line)
{
    const fc::Gil gil;

    PySys_FormatStderr("%s\n", line);
}

/* Copies what all ranks gave; false with a Python exception set. */
static bool unpack_answers(PyObject *answers, int n_ranks, size_t bytes, void *all_out)
{
    if (!PyList_Check(answers) || PyList_GET_SIZE(answers) != n_ranks) {
        PyErr_Format(PyExc_TypeError, "exchange must return a list of %d bytes objects", n_ranks);
        return false;
    }
    for (int r = 0; r < n_ranks; r++) {
        PyObject *item = PyList_GET_ITEM(answers, r); /* borrowed */

        if (!PyBytes_Check(item) || PyBytes_GET_SIZE(item) != (Py_ssize_t)bytes) {
            PyErr_Format(
                PyExc_RuntimeError,
                "rank %d runs another version of fsdp_c, or exchange did not return %zu bytes", r,
                bytes);
            return false;
        }
        std::memcpy(static_cast<char *>(all_out) + (size_t)r * bytes, PyBytes_AS_STRING(item),
                    bytes);
    }
    return true;
}

/* An exception of the callable stays set and travels as FC_ERR_INTERRUPTED. */
static fc_status exchange(void *context, const char *what, const void *mine, size_t bytes,
                          void *all_out)
{
    auto *host = static_cast<fc_host *>(context);
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *bytes_object =
        PyBytes_FromStringAndSize(static_cast<const char *>(mine), (Py_ssize_t)bytes);
    PyObject *answers = bytes_object == nullptr
                            ? nullptr
                            : PyObject_CallFunction(host->exchange, "sO", what, bytes_object);
    bool is_good = answers != nullptr && unpack_answers(answers, host->n_ranks, bytes, all_out);

    Py_XDECREF(bytes_object);
    Py_XDECREF(answers);
    PyGILState_Release(gil);
    return is_good ? FC_OK : fc_fail(FC_ERR_INTERRUPTED, "exchange of %s failed", what);
}

/* False with a Python exception set. */
static bool read_place(PyObject *answer, fc_place *out)
{
    const char *text;
    unsigned long long group, sequence;
    int is_gather;

    if (!PyArg_ParseTuple(answer, "sKKp", &text, &group, &sequence, &is_gather)) {
        return false;
    }
    std::strncpy(out->text, text, sizeof(out->text) - 1);
    out->group = group;
    out->sequence = sequence;
    out->is_gather = is_gather != 0;
    return true;
}

/* On the watcher's thread. Whoever asks is told nothing if this goes wrong. */
static bool tell_place(fc_place *out)
{
    const fc::Gil gil;
    PyObject *tell = fc::process.tell_place;
    const fc::Ref answer = fc::Ref::take(tell == nullptr ? nullptr : PyObject_CallNoArgs(tell));
    const bool is_told = answer && PyTuple_Check(answer.get()) && read_place(answer.get(), out);

    PyErr_Clear();
    return is_told;
}

/* Threads beside the main one may do their work between any of its collectives. */
static bool count_collectives(uint64_t group, uint64_t *count_out)
{
    if (getpid() != gettid() || fc::process.count_collectives == nullptr) {
        return false;
    }
    const fc::Gil gil;
    const fc::Ref answer = fc::Ref::take(
        PyObject_CallFunction(fc::process.count_collectives, "K", (unsigned long long)group));
    const bool is_known = answer && answer.get() != Py_None;

    if (is_known) {
        *count_out = PyLong_AsUnsignedLongLong(answer.get());
    }
    const bool is_good = is_known && PyErr_Occurred() == nullptr;
    PyErr_Clear();
    return is_good;
}

PyObject *fc_set_place(PyObject *, PyObject *args)
{
    PyObject *tell, *count;

    if (!PyArg_ParseTuple(args, "OO", &tell, &count)) {
        return nullptr;
    }
    Py_INCREF(tell);
    Py_INCREF(count);
    Py_XSETREF(fc::process.tell_place, tell);
    Py_XSETREF(fc::process.count_collectives, count);
    Py_RETURN_NONE;
}

fc_host_ops fc_host_get_ops(fc_host *host)
{
    return {.context = host,
            .exchange = exchange,
            .enter_wait = enter_wait,
            .leave_wait = leave_wait,
            .poll = poll,
            .notice = notice,
            .tell_place = tell_place,
            .count_collectives = count_collectives};
}
