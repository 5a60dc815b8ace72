/* The type `_C.Transport`. */
#include "bind/comm/transport.h"

#include "base/clock.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "libtorch/process_group.h"

namespace fc {

RanksConfig::RanksConfig(Fields &given, Host *host)
{
    global_ranks = given.values<integer_from>("global_ranks");
    host->exchange = given.object("exchange");
    host->n_ranks = (int)global_ranks.size();
    config.name = given.text("name");
    config.rank = given.integer("rank");
    config.n_ranks = host->n_ranks;
    config.global_ranks = global_ranks.data();
    config.timeout_ns = fc_transport_timeout_ns(given.real("timeout_seconds"));
    config.host = host->ops();
}

namespace {

// Collectives over rails (fc_rails_create), by what Python's `Rails` says (fsdp_c/_comm/_hosts.py);
// `group`, the process group's own, is released with them, or by an exception. The transport of
// this host's ranks, which they borrow, is left in `local_out`.
fc_message_ops rails_over(const Ref &rails, const fc_transport_config &config,
                          const fc_message_ops &group, Ref &local_out)
{
    std::unique_ptr<fc_message_ops, void (*)(fc_message_ops *)> owner(
        new fc_message_ops(group), [](fc_message_ops *ops) {
            ops->release(ops->context);
            delete ops;
        });
    Fields fields(rails.get());
    const auto hosts = fields.values<integer_from>("hosts");
    const auto names = fields.values<text_from>("names");
    const std::string name = fields.text("group");
    Ref local = fields.object("local");
    fields.end();
    fc_transport *over = local.get() == Py_None ? nullptr : transport_from_object(local.get());
    const fc_rails_config of = {.rank = config.rank,
                                .n_ranks = config.n_ranks,
                                .global_ranks = config.global_ranks,
                                .hosts = hosts.data(),
                                .names = names.data(),
                                .local = over,
                                .rails = group_rails(name, config.n_ranks),
                                .group = *owner};
    fc_message_ops ops;

    delete owner.release(); /* the core has them from here on */
    local_out = std::move(local);
    check(fc_rails_create(&of, &ops));
    return ops;
}

struct Transport {
    explicit Transport(Fields &given);

    Host host;
    Ref local; /* of this host's ranks, for rails */
    Owned<fc_transport, fc_transport_destroy> core;
};

Transport::Transport(Fields &given)
{
    const RanksConfig ranks(given, &host);
    const Ref messages = given.object("messages");
    const Ref rails = given.object("rails");
    const char *kind = given.text("kind");

    given.end();
    fc_message_ops ops = messages_ops(messages, ranks.config.n_ranks);
    if (rails.get() != Py_None) {
        ops = rails_over(rails, ranks.config, ops, local);
    }
    check(fc_transport_create(kind, &ranks.config, &ops, Out(core)));
}

void transport_abort(Transport &self, PyObject *why)
{
    (void)fc_transport_abort(self.core.get(), FC_ERR_BROKEN, text_from(why));
}

Ref transport_awaited(Transport &self)
{
    fc_rails_wait wait;

    if (!fc_rails_waits(fc_transport_messages(self.core.get()), &wait)) {
        return Ref::borrow(Py_None);
    }
    const double seconds = (double)(fc_now_ns() - wait.since_ns) / (double)FC_NS_PER_S;
    return checked(Py_BuildValue("(id)", wait.rank, seconds));
}

void transport_tell(Transport &self, Fields &given)
{
    const int rank = given.integer("rank");
    const char *text = given.text("text");

    given.end();
    fc_rails_tell(fc_transport_messages(self.core.get()), rank, text);
}

void transport_interrupt(Transport &self, PyObject *why)
{
    fc_rails_interrupt(fc_transport_messages(self.core.get()), text_from(why));
}

Ref transport_failed(Transport &self)
{
    const fc_rails_failure found = fc_rails_failed(fc_transport_messages(self.core.get()));

    return checked(
        Py_BuildValue("(KK)", (unsigned long long)found.phase, (unsigned long long)found.after));
}

void transport_hear(Transport &self, Fields &given)
{
    const int rank = given.integer("rank");
    const fc_rails_failure failure = {given.size("phase"), given.size("after")};

    given.end();
    fc_rails_hear(fc_transport_messages(self.core.get()), rank, failure);
}

Ref transport_sent(Transport &self)
{
    const fc_message_ops *ops = fc_transport_messages(self.core.get());
    const int n_hosts = fc_rails_n_hosts(ops);
    Ref rows = checked(PyList_New(n_hosts));

    for (int h = 0; h < n_hosts; h++) {
        const fc_rails_sent sent = fc_rails_count(ops, h);
        Ref row = checked(Py_BuildValue("(KK)", (unsigned long long)sent.bytes,
                                        (unsigned long long)sent.messages));
        PyList_SET_ITEM(rows.get(), h, row.release());
    }
    return rows;
}

PyObject *transport_repr(PyObject *self)
{
    const fc_transport *t = owned<Transport>(self).core.get();

    return PyUnicode_FromFormat("<fsdp_c Transport %s of group %s, rank %d of %d>",
                                fc_transport_kind(t), fc_transport_name(t), fc_transport_rank(t),
                                fc_transport_n_ranks(t));
}

PyMethodDef transport_methods[] = {
    method<[](Transport &self) { return fc_transport_check(self.core.get()); }>("check"),
    method<transport_abort>("abort"),
    method<transport_awaited>("awaited"),
    method<transport_failed>("failed"),
    method<transport_hear>("hear"),
    method<transport_tell>("tell"),
    method<transport_sent>("sent"),
    method<transport_interrupt>("interrupt"),
    {},
};

PyGetSetDef transport_properties[] = {
    property<[](Transport &self) { return fc_transport_kind(self.core.get()); }>("kind"),
    property<[](Transport &self) { return fc_transport_rank(self.core.get()); }>("rank"),
    {},
};

} // namespace

fc_transport *transport_from_object(PyObject *object)
{
    return owned_by<Transport>(object).core.get();
}

int register_transport(PyObject *module)
{
    return add_type<Transport>(module, {.name = "fsdp_c._C.Transport",
                                        .methods = transport_methods,
                                        .properties = transport_properties,
                                        .repr = transport_repr});
}

} // namespace fc
