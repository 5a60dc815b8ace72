/* The type `_C.Transport`. */
#include "bind/comm/transport.h"

#include "base/clock.h"
#include "bind/comm/process_group.h"
#include "bind/python/callbacks.h"
#include "bind/python/status.h"

#include <cmath>
#include <cstring>
#include <new>
#include <vector>

namespace {

struct py_transport {
    PyObject_HEAD
    fc_transport *transport; /* owned; nullptr until made */
    fc_host host;
};

} // namespace

static PyTypeObject *transport_type = nullptr; /* owned by the process */

static void transport_dealloc(PyObject *object)
{
    auto *self = reinterpret_cast<py_transport *>(object);
    PyTypeObject *type = Py_TYPE(object);

    fc_transport_destroy(self->transport);
    Py_XDECREF(self->host.exchange);
    type->tp_free(object);
    Py_DECREF(type);
}

bool fc_read_ranks(PyObject *sequence, int n_ranks, std::vector<int> &out)
{
    PyObject *fast = PySequence_Fast(sequence, "global_ranks must be a sequence of ints");

    if (fast == nullptr) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); i++) {
        long rank = PyLong_AsLong(PySequence_Fast_GET_ITEM(fast, i));

        if (rank == -1 && PyErr_Occurred()) {
            Py_DECREF(fast);
            return false;
        }
        out.push_back((int)rank);
    }
    Py_DECREF(fast);
    if ((int)out.size() != n_ranks) {
        PyErr_Format(PyExc_ValueError, "global_ranks has %zd entries for %d ranks",
                     (Py_ssize_t)out.size(), n_ranks);
        return false;
    }
    return true;
}

int64_t fc_timeout_ns(double seconds)
{
    if (std::isnan(seconds) || seconds <= 0) {
        return 0; /* refused by the core */
    }
    return seconds >= 1e9 ? INT64_MAX : (int64_t)(seconds * (double)FC_NS_PER_S);
}

static fc_status make(py_transport *self, const fc_transport_config *config, const char *kind,
                      PyObject *messages)
{
    if (std::strcmp(kind, "shm") == 0) {
        return fc_shm_create(config, &self->transport);
    }
    if (std::strcmp(kind, "callback") == 0 && messages != Py_None) {
        fc_message_ops ops = fc_messages_get_ops(messages, config->n_ranks);
        fc_status st = fc_callback_create(config, &ops, &self->transport);

        if (st != FC_OK) {
            ops.release(ops.context);
        }
        return st;
    }
    return fc_fail(FC_ERR_INVALID,
                   "transport kind '%s': expected 'shm', or 'callback' with messages", kind);
}

static PyObject *transport_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *names[] = {
        "name",     "rank",     "n_ranks", "global_ranks", "timeout_seconds",
        "exchange", "messages", "kind",    nullptr};
    fc_transport_config config{};
    PyObject *global_ranks;
    PyObject *exchange;
    PyObject *messages;
    double timeout_seconds;
    const char *kind = "shm";
    std::vector<int> ranks;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "siiOdOO|s:Transport",
                                     const_cast<char **>(names), &config.name, &config.rank,
                                     &config.n_ranks, &global_ranks, &timeout_seconds, &exchange,
                                     &messages, &kind) ||
        !fc_read_ranks(global_ranks, config.n_ranks, ranks)) {
        return nullptr;
    }
    auto *self = reinterpret_cast<py_transport *>(type->tp_alloc(type, 0));
    if (self == nullptr) {
        return nullptr;
    }
    Py_INCREF(exchange);
    self->host.exchange = exchange;
    self->host.n_ranks = config.n_ranks;
    config.global_ranks = ranks.data();
    config.timeout_ns = fc_timeout_ns(timeout_seconds);
    config.host = fc_host_get_ops(&self->host);
    fc_status st = make(self, &config, kind, messages);
    if (st != FC_OK) {
        /* Before the object goes: its destructor may run Python code, the exception must be set by
         * then. */
        fc_raise(st);
        Py_DECREF(self);
        return nullptr;
    }
    return reinterpret_cast<PyObject *>(self);
}

static const fc_transport *core_of(PyObject *self)
{
    return reinterpret_cast<py_transport *>(self)->transport;
}

static PyObject *transport_check(PyObject *self, PyObject *)
{
    fc_status st = fc_transport_check(reinterpret_cast<py_transport *>(self)->transport);

    if (st != FC_OK) {
        return fc_raise(st);
    }
    Py_RETURN_NONE;
}

static PyObject *transport_abort(PyObject *self, PyObject *text)
{
    const char *why = PyUnicode_AsUTF8(text);

    if (why == nullptr) {
        return nullptr;
    }
    (void)fc_transport_abort(reinterpret_cast<py_transport *>(self)->transport, FC_ERR_BROKEN, why);
    Py_RETURN_NONE;
}

static PyObject *transport_wait_stats(PyObject *self, PyObject *)
{
    uint64_t waits;
    uint64_t wait_ns;

    fc_transport_wait_stats(core_of(self), &waits, &wait_ns);
    return Py_BuildValue("KK", (unsigned long long)waits, (unsigned long long)wait_ns);
}

static PyObject *get_kind(PyObject *self, void *)
{
    return PyUnicode_FromString(fc_transport_is_mapped(core_of(self)) ? "shm" : "callback");
}

static PyObject *get_name(PyObject *self, void *)
{
    return PyUnicode_FromString(fc_transport_name(core_of(self)));
}

static PyObject *get_rank(PyObject *self, void *)
{
    return PyLong_FromLong(fc_transport_rank(core_of(self)));
}

static PyObject *get_n_ranks(PyObject *self, void *)
{
    return PyLong_FromLong(fc_transport_n_ranks(core_of(self)));
}

static PyObject *transport_repr(PyObject *self)
{
    const fc_transport *t = core_of(self);

    return PyUnicode_FromFormat("<fsdp_c Transport %s of group %s, rank %d of %d>",
                                fc_transport_is_mapped(t) ? "shm" : "callback",
                                fc_transport_name(t), fc_transport_rank(t),
                                fc_transport_n_ranks(t));
}

static PyMethodDef transport_methods[] = {
    {"check", transport_check, METH_NOARGS, "Raise if this transport cannot be used any more."},
    {"abort", transport_abort, METH_O,
     "Break the transport on every rank: waits of peers end with this text."},
    {"wait_stats", transport_wait_stats, METH_NOARGS,
     "(number of waits, nanoseconds spent in them)"},
    {nullptr, nullptr, 0, nullptr},
};

static PyGetSetDef transport_getset[] = {
    {"kind", get_kind, nullptr, "'shm' or 'callback'", nullptr},
    {"name", get_name, nullptr, "Name of the process group.", nullptr},
    {"rank", get_rank, nullptr, "This rank in the group.", nullptr},
    {"n_ranks", get_n_ranks, nullptr, "Ranks in the group.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

static PyType_Slot transport_slots[] = {
    {Py_tp_doc,
     const_cast<char *>("Transport(name, rank, n_ranks, global_ranks, timeout_seconds, exchange, "
                        "messages, kind='shm')\n"
                        "--\n\n"
                        "Moves bytes between the ranks of one process group. Collective.")},
    {Py_tp_new, reinterpret_cast<void *>(transport_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(transport_dealloc)},
    {Py_tp_repr, reinterpret_cast<void *>(transport_repr)},
    {Py_tp_methods, transport_methods},
    {Py_tp_getset, transport_getset},
    {0, nullptr},
};

static PyType_Spec transport_spec = {
    "fsdp_c._C.Transport", (int)sizeof(py_transport), 0, Py_TPFLAGS_DEFAULT, transport_slots,
};

fc_transport *fc_transport_from_object(PyObject *object)
{
    if (transport_type == nullptr || !PyObject_TypeCheck(object, transport_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Transport, got %s", Py_TYPE(object)->tp_name);
        return nullptr;
    }
    return reinterpret_cast<py_transport *>(object)->transport;
}

int fc_register_transport(PyObject *module)
{
    if (transport_type == nullptr) {
        transport_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&transport_spec));
    }
    return transport_type == nullptr
               ? -1
               : PyModule_AddObjectRef(module, "Transport",
                                       reinterpret_cast<PyObject *>(transport_type));
}
