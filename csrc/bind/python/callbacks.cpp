/* Host operations in terms of Python. The core may call them with or without the GIL held. */
#include "bind/python/callbacks.h"

#include "bind/module.h"
#include "bind/python/fields.h"
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
    const fc::Gil gil;
    const fc::Ref unnamed = fc::Ref::take(PyTuple_New(0));
    const fc::Ref named = fc::Ref::take(Py_BuildValue(
        "{sssN}", "what", what, "mine",
        PyBytes_FromStringAndSize(static_cast<const char *>(mine), (Py_ssize_t)bytes)));
    const fc::Ref answers = fc::Ref::take(
        unnamed && named ? PyObject_Call(host->exchange.get(), unnamed.get(), named.get())
                         : nullptr);
    const bool is_good = answers && unpack_answers(answers.get(), host->n_ranks, bytes, all_out);

    return is_good ? FC_OK : fc_fail(FC_ERR_INTERRUPTED, "exchange of %s failed", what);
}

static void read_place(PyObject *answer, fc_place *out)
{
    fc::Fields fields(answer);

    std::strncpy(out->text, fields.text("text"), sizeof(out->text) - 1);
    out->group = fields.size("group");
    out->sequence = fields.size("sequence");
    out->is_gather = fields.flag("is_gather");
    fields.end();
}

/* On the watcher's thread. Whoever asks is told nothing if this goes wrong. */
static bool tell_place(fc_place *out)
{
    const fc::Gil gil;
    const fc::Ref is_told =
        fc::Ref::take(fc::process.tell_place == nullptr ? nullptr : fc::guarded([&] {
            read_place(fc::checked(PyObject_CallNoArgs(fc::process.tell_place)).get(), out);
            return Py_NewRef(Py_True);
        }));

    PyErr_Clear();
    return bool(is_told);
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

void fc::set_place(Fields &given)
{
    Ref tell = given.object("tell"), count = given.object("count");

    given.end();
    Py_XSETREF(process.tell_place, tell.release());
    Py_XSETREF(process.count_collectives, count.release());
}
