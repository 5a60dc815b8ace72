// _C.Domain(transport=, is_replicate=, units=, shard_rank=, n_shards=, batch_bytes=, is_counted=,
// is_packed=, streams=, group=): builds fc_domain from plain Python data.
#include "bind/fsdp/unit.h"

#include "bind/comm/transport.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "engine/batch.h"
#include "engine/waits.h"

#include <torch/csrc/Dtype.h>

namespace fc {

namespace {

// What a Python Domain owns.
struct OwnedDomain {
    explicit OwnedDomain(Fields &given);

    Ref transport, streams, watch; // outlive the domain; None, and null unless over messages
    Owned<fc_domain, fc_domain_destroy> domain;

    fc_domain *get() const { return domain.get(); }
    size_t n_units() const { return fc_domain_n_units(get()); }
};

at::ScalarType scalar_type(PyObject *object)
{
    if (!THPDtype_Check(object)) {
        raise_error(PyExc_TypeError, "expected a torch.dtype, not %.100s",
                    Py_TYPE(object)->tp_name);
    }
    return reinterpret_cast<THPDtype *>(object)->scalar_type;
}

// A ParamSpec of fsdp_c/_fully_shard/_param_spec.py.
fc_param parse_param(PyObject *spec, bool is_counted, bool is_packed)
{
    Fields fields(spec);
    const auto dtype = [&](const char *name) {
        return dtype_of(scalar_type(fields.object(name).get()));
    };
    fc_param param = {};
    param.outer = fields.size("outer");
    param.rows = fields.size("rows");
    param.inner = fields.size("inner");
    param.orig = dtype("orig");
    param.compute = dtype("compute");
    param.reduce = dtype("reduce");
    param.grad = dtype("grad");
    param.is_complex = fields.flag("is_complex");
    param.has_grad = fields.flag("has_grad");
    param.trainable = fields.flag("trainable");
    param.is_made = fields.flag("is_made");
    param.n_inputs = fields.size("n_inputs");
    param.is_counted = is_counted;
    param.is_packed = is_packed;
    fields.end();
    return param;
}

// A list of UnitSpec of fsdp_c/_fully_shard/_param_spec.py as the core takes it.
struct UnitList {
    std::vector<std::string> names;
    std::vector<std::vector<fc_param>> params;
    std::vector<fc_unit_desc> descs;

    // `is_counted`: some of the collectives go over messages; `is_packed`: that others look at.
    UnitList(PyObject *units, bool is_counted, bool is_packed = false)
    {
        names.reserve(items_of(units).size()); // they stay in their place
        for (PyObject *unit : items_of(units)) {
            Fields fields(unit);
            names.emplace_back(fields.text("name"));
            const Ref rows = fields.list("params"), inputs = fields.list("inputs");
            fields.end();
            std::vector<fc_param> &entries = params.emplace_back();
            for (PyObject *list : {rows.get(), inputs.get()}) {
                for (PyObject *spec : items_of(list)) {
                    entries.push_back(parse_param(spec, is_counted, is_packed));
                }
            }
            const size_t n_params = items_of(rows.get()).size();
            if (fc_layout_count(entries.data(), n_params) != entries.size()) {
                raise_error(PyExc_ValueError, "inputs of unit '%s'", names.back().c_str());
            }
            descs.push_back({names.back().c_str(), entries.data(), n_params});
        }
    }
};

fc_domain_kind domain_kind(Fields &given)
{
    return given.flag("is_replicate") ? FC_DOMAIN_REPLICATE : FC_DOMAIN_SHARD;
}

OwnedDomain::OwnedDomain(Fields &given)
    : transport(given.object("transport")), streams(given.object("streams"))
{
    const Ref units = given.list("units");
    const UnitList list(units.get(), given.flag("is_counted"), given.flag("is_packed"));
    const fc_domain_kind kind = domain_kind(given);
    const int shard_rank = given.integer("shard_rank"), n_shards = given.integer("n_shards");
    const size_t batch_bytes = given.size("batch_bytes");
    given.end();
    check(fc_domain_create(transport_from_object(transport.get()), kind, list.descs.data(),
                           list.descs.size(), shard_rank, n_shards, Out(domain)));
    fc_batch_limit(get(), batch_bytes);
}

Ref domain_layout(OwnedDomain &self, PyObject *unit)
{
    const size_t index = size_from(unit);
    if (index >= self.n_units()) {
        raise_error(PyExc_IndexError, "unit %zu", index);
    }
    const fc_layout *layout = fc_unit_layout(fc_domain_unit(self.get(), index));
    std::vector<Ref> params;
    for (size_t i = 0; i < layout->n_params; i++) {
        params.push_back(dict_of({{"offset", to_python(layout->params[i].full_at)},
                                  {"packed", to_python(layout->params[i].pack_at)},
                                  {"is_aliased", to_python(layout->params[i].is_aliased)}}));
    }
    return dict_of({{"full_bytes", to_python(layout->full_bytes)}, {"params", to_python(params)}});
}

void domain_watch(OwnedDomain &self, PyObject *transport)
{
    check(fc_domain_watch(self.get(), transport_from_object(transport)));
    self.watch = Ref::borrow(transport);
}

void domain_name_openers(OwnedDomain &self, PyObject *openers)
{
    const Ref list = checked(PySequence_List(openers));
    std::vector<const char *> names;
    for (PyObject *name : items_of(list.get())) {
        names.push_back(text_from(name));
    }
    check(fc_domain_name_openers(self.get(), names.data(), names.size()));
}

Ref dict_of_sizes(const fc_domain_sizes &sizes)
{
    return dict_of({FC_ENTRY(sizes, control), FC_ENTRY(sizes, full), FC_ENTRY(sizes, aliased),
                    FC_ENTRY(sizes, arena), FC_ENTRY(sizes, grads), FC_ENTRY(sizes, largest),
                    FC_ENTRY(sizes, pack), FC_ENTRY(sizes, part), FC_ENTRY(sizes, parts),
                    FC_ENTRY(sizes, small)});
}

Ref domain_plan(Fields &given)
{
    const Ref units = given.list("units");
    const fc_domain_kind kind = domain_kind(given);
    const int n_shards = given.integer("n_shards"), n_ranks = given.integer("n_ranks");
    const bool is_mapped = given.flag("is_mapped");
    given.end();
    const UnitList list(units.get(), !is_mapped);
    fc_domain_sizes sizes;
    check(fc_domain_plan(kind, list.descs.data(), list.descs.size(), n_shards, n_ranks, is_mapped,
                         &sizes));
    return dict_of_sizes(sizes);
}

Ref domain_account()
{
    return dict_of({{"objects", to_python(fc_account_bytes(FC_FOR_OBJECTS))},
                    {"slots", to_python(fc_account_bytes(FC_FOR_SLOTS))},
                    {"gradients", to_python(fc_account_bytes(FC_FOR_GRADIENTS))},
                    {"messages", to_python(fc_account_bytes(FC_FOR_MESSAGES))},
                    {"shared", to_python(fc_account_bytes(FC_FOR_SHARED))}});
}

int global_rank(fc_domain *domain, int rank)
{
    return rank < 0 ? -1 : fc_transport_global_rank(fc_domain_transport(domain), rank);
}

Ref row_of(fc_domain *domain, const fc_unit *unit, int kind, const fc_waits &w)
{
    const char *name = unit != nullptr ? fc_unit_name(unit) : nullptr;
    return dict_of({{"unit", checked(Py_BuildValue("z", name))},
                    {"kind", to_python(kind)},
                    {"longest_rank", to_python(global_rank(domain, w.longest_peer))},
                    {"count", to_python(w.n)},
                    FC_ENTRY(w, ns),
                    FC_ENTRY(w, longest_ns)});
}

Ref domain_waits(OwnedDomain &self, PyObject *reset)
{
    fc_domain *domain = self.get();
    std::vector<Ref> rows;
    for (size_t i = 0; i <= self.n_units(); i++) { // the last are no unit's
        const fc_unit *unit = i < self.n_units() ? fc_domain_unit(domain, i) : nullptr;
        for (int kind = 0; kind < FC_WAIT_KIND_COUNT; kind++) {
            const fc_waits w = fc_waits_of(domain, unit, static_cast<fc_wait_kind>(kind));
            if (w.n > 0) {
                rows.push_back(row_of(domain, unit, kind, w));
            }
        }
    }
    const Ref peers = checked(PyDict_New());
    for (int peer = 0; peer < fc_domain_n_ranks(domain); peer++) {
        check(PyDict_SetItem(peers.get(), to_python(global_rank(domain, peer)).get(),
                             to_python(fc_waits_for(domain, peer)).get()));
    }
    Ref result = dict_of({{"forwards", to_python(fc_waits_phases(domain, false))},
                          {"backwards", to_python(fc_waits_phases(domain, true))},
                          {"waits", to_python(rows)},
                          {"ns_by_rank", peers}});
    if (reset == Py_True) {
        fc_waits_reset(domain);
    }
    return result;
}

PyGetSetDef domain_getters[] = {
    property<&OwnedDomain::streams>("streams"),
    property<[](OwnedDomain &self) { return fc_domain_is_mapped(self.get()); }>("is_mapped"),
    {}};
PyMethodDef domain_methods[] = {
    method<[](OwnedDomain &self) { return dict_of_sizes(fc_domain_measure(self.get())); }>("sizes"),
    function<domain_plan>("plan", METH_STATIC),
    method<[](OwnedDomain &self) { return fc_domain_trim(self.get()); }>("trim"),
    function<[] { fc_slots_trim(slots()); }>("trim_slots", METH_STATIC),
    function<domain_account>("account", METH_STATIC),
    method<domain_waits>("waits"),
    method<domain_layout>("layout"),
    method<domain_watch>("watch"),
    method<domain_name_openers>("name_openers"),
    method<[](OwnedDomain &self) { fc_domain_leave(self.get()); }>("leave"),
    method<[](OwnedDomain &self) { return fc_domain_await_left(self.get()); }>("await_left"),
    {}};
} // namespace

fc_domain *domain_of(PyObject *object)
{
    return owned_by<OwnedDomain>(object).get();
}

Streams *domain_streams(PyObject *object)
{
    PyObject *streams = owned_by<OwnedDomain>(object).streams.get();
    return streams != Py_None ? &owned_by<Streams>(streams) : nullptr;
}

fc_slots *slots()
{
    static const auto pool = [] {
        Owned<fc_slots, fc_slots_destroy> made;
        check(fc_slots_create(Out(made)));
        return made.release(); // the process's
    }();
    return pool;
}

int register_domain(PyObject *module)
{
    if (PyModule_AddIntConstant(module, "BORROWED_BYTES_MAX", FC_BORROWED_BYTES_MAX) < 0) {
        return -1;
    }
    return add_type<OwnedDomain>(
        module,
        {.name = "fsdp_c._C.Domain", .methods = domain_methods, .properties = domain_getters});
}

} // namespace fc
