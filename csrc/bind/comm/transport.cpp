/* The type `_C.Transport`. */
#include "bind/comm/transport.h"

#include "bind/comm/process_group.h"
#include "bind/python/objects.h"

namespace fc {

RanksConfig::RanksConfig(Fields &given, fc_host *host)
{
    const Ref ranks = checked(PySequence_Fast(given.object("global_ranks").get(),
                                              "global_ranks must be a sequence of ints"));

    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(ranks.get()); i++) {
        global_ranks.push_back((int)PyLong_AsLong(PySequence_Fast_GET_ITEM(ranks.get(), i)));
        check(PyErr_Occurred() != nullptr ? -1 : 0);
    }
    host->exchange = given.object("exchange");
    host->n_ranks = (int)global_ranks.size();
    config.name = given.text("name");
    config.rank = given.integer("rank");
    config.n_ranks = host->n_ranks;
    config.global_ranks = global_ranks.data();
    config.timeout_ns = fc_transport_timeout_ns(given.real("timeout_seconds"));
    config.host = fc_host_get_ops(host);
}

namespace {

struct Transport {
    fc_host host;
    fc_transport *core = nullptr; /* owned */

    Transport() = default;
    Transport(const Transport &) = delete;
    Transport &operator=(const Transport &) = delete;
    ~Transport() { fc_transport_destroy(core); }
};

PyTypeObject *transport_type = nullptr; /* the process's */

std::unique_ptr<Transport> make_transport(Fields &given)
{
    auto made = std::make_unique<Transport>();
    const RanksConfig ranks(given, &made->host);
    const Ref messages = given.object("messages");
    const char *kind = given.text("kind");

    given.end();
    const fc_message_ops ops = messages_ops(messages, ranks.config.n_ranks);
    check(fc_transport_create(kind, &ranks.config, &ops, &made->core));
    return made;
}

fc_status transport_check(Transport &self)
{
    return fc_transport_check(self.core);
}

Ref transport_abort(Transport &self, PyObject *why)
{
    const char *text = PyUnicode_AsUTF8(why);

    check(text == nullptr ? -1 : 0);
    (void)fc_transport_abort(self.core, FC_ERR_BROKEN, text);
    return Ref::borrow(Py_None);
}

const char *transport_kind(Transport &self)
{
    return fc_transport_kind(self.core);
}

int transport_rank(Transport &self)
{
    return fc_transport_rank(self.core);
}

PyObject *transport_repr(PyObject *self)
{
    const fc_transport *t = owned<Transport>(self).core;

    return PyUnicode_FromFormat("<fsdp_c Transport %s of group %s, rank %d of %d>",
                                fc_transport_kind(t), fc_transport_name(t), fc_transport_rank(t),
                                fc_transport_n_ranks(t));
}

PyMethodDef transport_methods[] = {
    method<transport_check>("check", "Raise if this transport cannot be used any more."),
    method<transport_abort>(
        "abort", "Break the transport on every rank: waits of peers end with this text."),
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef transport_properties[] = {
    property<transport_kind>("kind", "'shm' or 'callback'"),
    property<transport_rank>("rank", "This rank in the group."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

const char transport_doc[] =
    "Transport(*, name, rank, global_ranks, timeout_seconds, exchange, messages, kind)\n"
    "--\n\n"
    "Moves bytes between the ranks of one process group. Collective.";

} // namespace

} // namespace fc

fc_transport *fc_transport_from_object(PyObject *object)
{
    return fc::owned_by<fc::Transport>(object, fc::transport_type, "a Transport").core;
}

int fc_register_transport(PyObject *module)
{
    return fc::add_owner<fc::Transport, fc::make_transport>(
        module, "fsdp_c._C.Transport",
        {{Py_tp_repr, reinterpret_cast<void *>(fc::transport_repr)},
         {Py_tp_methods, fc::transport_methods},
         {Py_tp_getset, fc::transport_properties},
         {Py_tp_doc, const_cast<char *>(fc::transport_doc)}},
        &fc::transport_type);
}
