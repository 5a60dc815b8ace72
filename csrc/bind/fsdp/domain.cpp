// _C.Domain(transport, kind, units, shard_rank, n_shards, batch_bytes, is_counted, is_packed,
// streams, group):
// builds fc_domain from plain Python data.
#include "bind/fsdp/domain.h"

#include "base/alloc.h"
#include "bind/comm/transport.h"
#include "bind/python/fields.h"
#include "bind/python/python.h"
#include "bind/tensor/tensors.h"
#include "engine/batch.h"
#include "engine/unit.h"
#include "engine/waits.h"

#include <torch/csrc/Dtype.h>

#include <malloc.h>

#include <string>
#include <utility>
#include <vector>

namespace fc {

namespace {

struct DomainObject {
    PyObject_HEAD
    PyObject *transport;  // owned; outlives the domain
    PyObject *watch;      // owned, too; null unless over messages
    fc_domain *domain;    // owned
    PyObject *streams;    // owned; null without a device
    fc_device_comm *comm; // borrowed from the streams
};

at::ScalarType scalar_type(PyObject *object)
{
    if (!THPDtype_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected a torch.dtype, not %.100s",
                     Py_TYPE(object)->tp_name);
        throw_python();
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
    param.has_grad = fields.flag("has_grad");
    param.trainable = fields.flag("trainable");
    param.is_counted = is_counted;
    param.is_packed = is_packed;
    fields.end();
    return param;
}

// [(name, [parameter, ...]), ...] as the core takes it.
struct UnitList {
    std::vector<std::string> names;
    std::vector<std::vector<fc_param>> params;
    std::vector<fc_unit_desc> descs;

    // `is_counted`: some of the collectives go over messages; `is_packed`: that others look at.
    UnitList(PyObject *units, bool is_counted, bool is_packed = false)
    {
        const size_t n = static_cast<size_t>(PyList_GET_SIZE(units));
        names.resize(n);
        params.resize(n);
        for (size_t i = 0; i < n; i++) {
            const char *name;
            PyObject *rows;
            if (!PyArg_ParseTuple(PyList_GET_ITEM(units, static_cast<Py_ssize_t>(i)), "sO!", &name,
                                  &PyList_Type, &rows)) {
                throw_python();
            }
            names[i] = name;
            for (Py_ssize_t j = 0; j < PyList_GET_SIZE(rows); j++) {
                params[i].push_back(parse_param(PyList_GET_ITEM(rows, j), is_counted, is_packed));
            }
            descs.push_back({names[i].c_str(), params[i].data(), params[i].size()});
        }
    }
};

PyObject *domain_new(PyTypeObject *type, PyObject *args, PyObject *named)
{
    return guarded([&]() -> PyObject * {
        PyObject *transport, *units, *streams = Py_None;
        const char *group = "";
        int is_replicate, shard_rank, n_shards, is_counted, is_packed;
        Py_ssize_t batch_bytes;
        static const char *const names[] = {"transport", "is_replicate", "units",      "shard_rank",
                                            "n_shards",  "batch_bytes",  "is_counted", "is_packed",
                                            "streams",   "group",        nullptr};
        if (!PyArg_ParseTupleAndKeywords(args, named, "OpO!iinpp|Os", const_cast<char **>(names),
                                         &transport, &is_replicate, &PyList_Type, &units,
                                         &shard_rank, &n_shards, &batch_bytes, &is_counted,
                                         &is_packed, &streams, &group)) {
            return nullptr;
        }
        const UnitList list(units, is_counted != 0, is_packed != 0);
        Ref self = checked(type->tp_alloc(type, 0));
        auto *object = reinterpret_cast<DomainObject *>(self.get());
        check(fc_domain_create(fc_transport_from_object(transport),
                               is_replicate ? FC_DOMAIN_REPLICATE : FC_DOMAIN_SHARD,
                               list.descs.data(), list.descs.size(), shard_rank, n_shards,
                               &object->domain));
        fc_domain_name_fallback(object->domain, "torch's implementation");
        fc_batch_limit(object->domain, static_cast<size_t>(batch_bytes));
        object->transport = Py_NewRef(transport);
        if (streams != Py_None) {
            object->comm = streams_of(streams)->collectives().find(group);
            object->streams = Py_NewRef(streams);
        }
        return self.release();
    });
}

void domain_dealloc(PyObject *self)
{
    auto *object = reinterpret_cast<DomainObject *>(self);
    PyTypeObject *type = Py_TYPE(self);
    fc_domain_destroy(object->domain);
    Py_XDECREF(object->transport);
    Py_XDECREF(object->watch);
    Py_XDECREF(object->streams);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *domain_layout(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        const size_t index = PyLong_AsSize_t(arg);
        fc_domain *domain = domain_of(self);
        if (PyErr_Occurred() || index >= fc_domain_n_units(domain)) {
            return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_IndexError, "unit %zu", index);
        }
        const fc_layout *layout = fc_unit_layout(fc_domain_unit(domain, index));
        Ref offsets = checked(PyList_New(0));
        for (size_t i = 0; i < layout->n_params; i++) {
            Ref row =
                checked(Py_BuildValue("nO", static_cast<Py_ssize_t>(layout->params[i].full_at),
                                      layout->params[i].is_aliased ? Py_True : Py_False));
            check(PyList_Append(offsets.get(), row.get()));
        }
        return Py_BuildValue("nO", static_cast<Py_ssize_t>(layout->full_bytes), offsets.get());
    });
}

PyObject *domain_bytes(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        fc_domain *domain = domain_of(self);
        return Py_BuildValue("{s:n,s:n}", "region",
                             static_cast<Py_ssize_t>(fc_domain_region_bytes(domain)), "arena",
                             static_cast<Py_ssize_t>(fc_domain_arena_bytes(domain)));
    });
}

PyObject *domain_watch(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        fc_transport *watch = fc_transport_from_object(arg);
        if (watch == nullptr) {
            return nullptr;
        }
        check(fc_domain_watch(domain_of(self), watch));
        reinterpret_cast<DomainObject *>(self)->watch = Py_NewRef(arg);
        Py_RETURN_NONE;
    });
}

// name_openers([name, ...])
PyObject *domain_name_openers(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        Ref list = checked(PySequence_List(arg));
        std::vector<const char *> names;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); i++) {
            names.push_back(PyUnicode_AsUTF8(PyList_GET_ITEM(list.get(), i)));
            check(names.back() == nullptr ? -1 : 0);
        }
        check(fc_domain_name_openers(domain_of(self), names.data(), names.size()));
        Py_RETURN_NONE;
    });
}

PyObject *domain_leave(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        fc_domain_leave(domain_of(self));
        Py_RETURN_NONE;
    });
}

PyObject *domain_await_left(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        check(fc_domain_await_left(domain_of(self)));
        Py_RETURN_NONE;
    });
}

PyObject *sizes_dict(const fc_domain_sizes &sizes)
{
    const std::pair<const char *, size_t> entries[] = {
        {"control", sizes.control}, {"full", sizes.full},       {"aliased", sizes.aliased},
        {"arena", sizes.arena},     {"gradients", sizes.grads}, {"largest", sizes.largest},
        {"pack", sizes.pack},       {"part", sizes.part},       {"parts", sizes.parts},
        {"small", sizes.small}};
    Ref dict = checked(PyDict_New());
    for (const auto &[name, bytes] : entries) {
        Ref value = checked(PyLong_FromSize_t(bytes));
        check(PyDict_SetItemString(dict.get(), name, value.get()));
    }
    return dict.release();
}

PyObject *domain_sizes(PyObject *self, PyObject *)
{
    return guarded([&]() { return sizes_dict(fc_domain_measure(domain_of(self))); });
}

PyObject *domain_plan(PyObject *, PyObject *args)
{
    return guarded([&]() -> PyObject * {
        PyObject *units;
        int is_replicate, n_shards, n_ranks, is_mapped;
        if (!PyArg_ParseTuple(args, "pO!iip", &is_replicate, &PyList_Type, &units, &n_shards,
                              &n_ranks, &is_mapped)) {
            return nullptr;
        }
        const UnitList list(units, is_mapped == 0);
        fc_domain_sizes sizes;
        check(fc_domain_plan(is_replicate ? FC_DOMAIN_REPLICATE : FC_DOMAIN_SHARD,
                             list.descs.data(), list.descs.size(), n_shards, n_ranks, is_mapped,
                             &sizes));
        return sizes_dict(sizes);
    });
}

PyObject *domain_trim(PyObject *self, PyObject *)
{
    return guarded(
        [&]() -> PyObject * { return PyLong_FromSize_t(fc_domain_trim(domain_of(self))); });
}

PyObject *trim_slots(PyObject *, PyObject *)
{
    return guarded([&]() -> PyObject * {
        fc_slots_trim(slots());
        Py_RETURN_NONE;
    });
}

PyObject *domain_account(PyObject *, PyObject *)
{
    return Py_BuildValue(
        "{s:L,s:L,s:L,s:L,s:L}", "objects", fc_account_bytes(FC_FOR_OBJECTS), "slots",
        fc_account_bytes(FC_FOR_SLOTS), "gradients", fc_account_bytes(FC_FOR_GRADIENTS), "messages",
        fc_account_bytes(FC_FOR_MESSAGES), "shared", fc_account_bytes(FC_FOR_SHARED));
}

int global_rank(fc_domain *domain, int rank)
{
    return rank < 0 ? -1 : fc_transport_global_rank(fc_domain_transport(domain), rank);
}

// Appends (unit name, kind, waits, ns, longest ns, for whom) for each kind that `unit` waited in.
void append_waits(PyObject *rows, fc_domain *domain, const fc_unit *unit)
{
    for (int kind = 0; kind < FC_WAIT_KIND_COUNT; kind++) {
        const fc_waits w = fc_waits_of(domain, unit, static_cast<fc_wait_kind>(kind));
        if (w.n > 0) {
            const char *name = unit != nullptr ? fc_unit_name(unit) : nullptr;
            Ref row = checked(Py_BuildValue("{s:z,s:i,s:K,s:K,s:K,s:i}", "unit", name, "kind", kind,
                                            "count", static_cast<unsigned long long>(w.n), "ns",
                                            static_cast<unsigned long long>(w.ns), "longest_ns",
                                            static_cast<unsigned long long>(w.longest_ns),
                                            "longest_rank", global_rank(domain, w.longest_peer)));
            check(PyList_Append(rows, row.get()));
        }
    }
}

PyObject *domain_waits(PyObject *self, PyObject *arg)
{
    return guarded([&]() -> PyObject * {
        fc_domain *domain = domain_of(self);
        Ref rows = checked(PyList_New(0)), peers = checked(PyDict_New());
        for (size_t i = 0; i < fc_domain_n_units(domain); i++) {
            append_waits(rows.get(), domain, fc_domain_unit(domain, i));
        }
        append_waits(rows.get(), domain, nullptr);
        for (int peer = 0; peer < fc_domain_n_ranks(domain); peer++) {
            Ref key = checked(PyLong_FromLong(global_rank(domain, peer)));
            Ref ns = checked(PyLong_FromUnsignedLongLong(fc_waits_for(domain, peer)));
            check(PyDict_SetItem(peers.get(), key.get(), ns.get()));
        }
        Ref result = checked(Py_BuildValue(
            "{s:K,s:K,s:O,s:O}", "forwards",
            static_cast<unsigned long long>(fc_waits_phases(domain, false)), "backwards",
            static_cast<unsigned long long>(fc_waits_phases(domain, true)), "waits", rows.get(),
            "ns_by_rank", peers.get()));
        if (arg == Py_True) {
            fc_waits_reset(domain);
        }
        return result.release();
    });
}

// glibc's aligned allocation cannot reuse a hole of exactly the size asked for, so a heap of large
// gradients grows with every unit.
PyObject *set_heap(PyObject *, PyObject *args)
{
    int largest, slack;
    if (!PyArg_ParseTuple(args, "ii", &largest, &slack)) {
        return nullptr;
    }
    mallopt(M_MMAP_THRESHOLD, largest);
    if (slack > 0) {
        mallopt(M_TRIM_THRESHOLD, slack);
    }
    Py_RETURN_NONE;
}

// Gives back what set-up freed: shards that moved, placeholders of unsharded parameters.
PyObject *trim_heap(PyObject *, PyObject *)
{
    malloc_trim(0);
    Py_RETURN_NONE;
}

PyObject *domain_get_streams(PyObject *self, void *)
{
    PyObject *streams = reinterpret_cast<DomainObject *>(self)->streams;
    return Py_NewRef(streams != nullptr ? streams : Py_None);
}

PyGetSetDef properties[] = {
    {"streams", domain_get_streams, nullptr, "what the units run in on a device, or None", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef methods[] = {
    {"set_heap", set_heap, METH_VARARGS | METH_STATIC,
     "set_heap(largest, slack): allocations of `largest` bytes and more stay off the heap, which"
     " keeps up to `slack` free bytes at its end (0: no change)."},
    {"trim_heap", trim_heap, METH_NOARGS | METH_STATIC, "trim_heap(): gives back what is free."},
    {"sizes", domain_sizes, METH_NOARGS, "sizes() -> {purpose: bytes}"},
    {"plan", domain_plan, METH_VARARGS | METH_STATIC,
     "plan(is_replicate, units, n_shards, n_ranks, is_mapped) -> sizes of such a domain"},
    {"trim", domain_trim, METH_NOARGS,
     "trim() -> bytes of reduce slots: gives back what is held for speed alone."},
    {"trim_slots", trim_slots, METH_NOARGS | METH_STATIC,
     "trim_slots(): gives back the free slots of all domains."},
    {"account", domain_account, METH_NOARGS | METH_STATIC,
     "account() -> {purpose: bytes that the core holds in this process}"},
    {"waits", domain_waits, METH_O,
     "waits(reset) -> {forwards, backwards, waits: [{unit, kind, count, ns, longest_ns, "
     "longest_rank}], ns_by_rank: {rank: ns}}"},
    {"layout", domain_layout, METH_O,
     "layout(unit) -> (unsharded bytes, [(offset, is aliased), ...])"},
    {"watch", domain_watch, METH_O,
     "watch(transport): over messages, where ranks see what the others are about to do."},
    {"name_openers", domain_name_openers, METH_O,
     "name_openers(names): of the modules that may begin a phase, the root first."},
    {"leave", domain_leave, METH_NOARGS,
     "leave(): peers that wait for this rank get an error from now on."},
    {"await_left", domain_await_left, METH_NOARGS,
     "await_left(): waits until all peers have left too; RuntimeError if one goes on."},
    {"bytes", domain_bytes, METH_NOARGS,
     "bytes() -> {'region': mapped bytes, 'arena': reduce slots of a rank}"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot slots_of_type[] = {
    {Py_tp_new, reinterpret_cast<void *>(domain_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(domain_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char *>("Units that travel over one process group.")},
    {0, nullptr}};
PyType_Spec spec = {"fsdp_c._C.Domain", sizeof(DomainObject), 0, Py_TPFLAGS_DEFAULT, slots_of_type};
PyTypeObject *domain_type = nullptr;

} // namespace

fc_domain *domain_of(PyObject *object)
{
    if (!PyObject_TypeCheck(object, domain_type)) {
        PyErr_SetString(PyExc_TypeError, "expected a Domain");
        throw_python();
    }
    return reinterpret_cast<DomainObject *>(object)->domain;
}

Streams *domain_streams(PyObject *object)
{
    (void)domain_of(object);
    PyObject *streams = reinterpret_cast<DomainObject *>(object)->streams;
    return streams != nullptr ? streams_of(streams) : nullptr;
}

fc_device_comm *domain_device_comm(PyObject *object)
{
    (void)domain_of(object);
    return reinterpret_cast<DomainObject *>(object)->comm;
}

fc_slots *slots()
{
    static fc_slots *pool = [] {
        fc_slots *made = nullptr;
        check(fc_slots_create(&made));
        return made;
    }();
    return pool;
}

} // namespace fc

int fc_register_domain(PyObject *module)
{
    return fc::add_type(module, "Domain", &fc::spec, &fc::domain_type);
}
