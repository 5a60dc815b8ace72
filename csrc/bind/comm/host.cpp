/* Host operations in terms of Python. The core may call them with or without the GIL held. */
#include "bind/comm/transport.h"

#include "bind/module.h"
#include "bind/python/calls.h"
#include "bind/python/objects.h"
#include "window/window.h"

namespace fc {

namespace {

/* Of this thread while it waits without the GIL; nullptr otherwise. */
thread_local PyThreadState *waiting_state = nullptr;

void enter_wait(void *)
{
    if (waiting_state == nullptr && PyGILState_Check()) {
        waiting_state = PyEval_SaveThread();
    }
}

void leave_wait(void *)
{
    if (waiting_state != nullptr) {
        PyThreadState *state = waiting_state;

        const Request request;
        waiting_state = nullptr;
        PyEval_RestoreThread(state);
    }
}

fc_status poll(void *)
{
    const Gil gil;
    const bool is_interrupted = PyErr_CheckSignals() != 0;

    return is_interrupted ? fc_fail(FC_ERR_INTERRUPTED, "interrupted by a signal") : FC_OK;
}

void notice(void *, const char *line)
{
    const Gil gil;

    PySys_FormatStderr("%s\n", line);
}

/* An exception of the callable stays set and travels as FC_ERR_INTERRUPTED. */
fc_status exchange(void *context, const char *what, const void *mine, size_t bytes, void *all_out)
{
    const auto *host = static_cast<Host *>(context);
    const Gil gil;
    const bool is_good = succeeds([&] {
        const Ref sent = checked(PyBytes_FromStringAndSize((const char *)mine, (Py_ssize_t)bytes));
        const Ref named = dict_of({{"what", to_python(what)}, {"mine", sent}});
        const Ref all = checked(
            PyObject_Call(host->exchange.get(), checked(PyTuple_New(0)).get(), named.get()));
        const size_t all_bytes = (size_t)host->n_ranks * bytes;
        if (!PyBytes_Check(all.get()) || (size_t)PyBytes_GET_SIZE(all.get()) != all_bytes) {
            raise_error(PyExc_TypeError, "exchange must return %zu bytes", all_bytes);
        }
        if (all_out != nullptr) {
            std::memcpy(all_out, PyBytes_AS_STRING(all.get()), all_bytes);
        }
    });

    return is_good ? FC_OK : fc_fail(FC_ERR_INTERRUPTED, "exchange of %s failed", what);
}

/* On the watcher's thread. Whoever asks is told nothing if this goes wrong. */
bool tell_place(fc_place *out)
{
    const Gil gil;
    const bool is_told = process.tell_place != nullptr && succeeds([&] {
                             const Ref answer = checked(PyObject_CallNoArgs(process.tell_place));
                             Fields fields(answer.get());

                             std::strncpy(out->text, fields.text("text"), sizeof(out->text) - 1);
                             out->group = fields.size("group");
                             out->sequence = fields.size("sequence");
                             out->is_gather = fields.flag("is_gather");
                             fields.end();
                         });

    PyErr_Clear();
    return is_told;
}

/* Threads beside the main one may do their work between any of its collectives. */
bool count_collectives(uint64_t group, uint64_t *count_out)
{
    if (getpid() != gettid() || process.count_collectives == nullptr) {
        return false;
    }
    const Gil gil;
    bool is_known = false;
    const bool is_good = succeeds([&] {
        const Ref answer =
            checked(PyObject_CallOneArg(process.count_collectives, to_python(group).get()));

        is_known = answer.get() != Py_None;
        *count_out = is_known ? size_from(answer.get()) : *count_out;
    });

    PyErr_Clear();
    return is_good && is_known;
}

} // namespace

fc_host_ops Host::ops()
{
    return {.context = this,
            .exchange = fc::exchange,
            .enter_wait = enter_wait,
            .leave_wait = leave_wait,
            .poll = poll,
            .notice = notice,
            .tell_place = tell_place,
            .count_collectives = count_collectives};
}

Ref find_end()
{
    char found[FC_END_BYTES];

    return fc_transport_find_end(found) ? to_python((const char *)found) : Ref::borrow(Py_None);
}

void set_place(Fields &given)
{
    Ref tell = given.object("tell"), count = given.object("count");

    given.end();
    Py_XSETREF(process.tell_place, tell.release());
    Py_XSETREF(process.count_collectives, count.release());
}

void open_window(Fields &given)
{
    const fc_window_config config = {.run = given.text("run"),
                                     .rank = given.integer("rank"),
                                     .world = given.integer("world"),
                                     .start_ticks = given.size("start_ticks"),
                                     .traces = given.flag("traces")};

    given.end();
    check(fc_window_open(&config));
}

} // namespace fc
