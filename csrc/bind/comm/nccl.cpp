/* The type `_C.NcclGroup`. Streams are their handles as ints; tensors may be on any device that the
 * library can read. Collectives are for who tries NCCL: units call the core. */
#include "bind/comm/transport.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

namespace fc {

namespace {

const char library_name[] = "fsdp_c.nccl";

struct Nccl {
    explicit Nccl(Fields &given);

    Host host;
    Owned<fc_nccl_group, fc_nccl_group_destroy> owner;
    fc_nccl_group *group;
};

Nccl::Nccl(Fields &given)
{
    const RanksConfig ranks(given, &host);
    const Ref library = given.object("library");
    const fc_nccl_options options = {
        .nccl = static_cast<fc_nccl *>(PyCapsule_GetPointer(library.get(), library_name)),
        .is_one = given.flag("is_one")};

    check(options.nccl == nullptr ? -1 : 0);
    given.end();
    check(fc_nccl_group_create(&ranks.config, &options, Out(owner)));
    group = owner.get();
}

/* ---- failures and the end ---- */

/* Asks Python, and stops the wait at an exception. */
bool nccl_is_ready(void *arg)
{
    const Gil gil;
    const Ref answer = Ref::take(PyObject_CallNoArgs(static_cast<PyObject *>(arg)));

    return !answer || PyObject_IsTrue(answer.get()) != 0;
}

fc_status nccl_wait(Nccl &self, Fields &given)
{
    const Ref is_ready = given.object("is_ready");
    const fc_wait_info info = {.op = given.text("what")};

    given.end();
    const fc_status status = fc_nccl_wait(&self.group, 1, nccl_is_ready, is_ready.get(), &info);
    check(PyErr_Occurred() != nullptr ? -1 : 0);
    return status;
}

/* ---- collectives ---- */

void require(bool is_good, const char *text)
{
    check(is_good ? FC_OK : fc_fail(FC_ERR_INVALID, "%s", text));
}

/* Kept by who gave it. */
const at::Tensor &contiguous(PyObject *object)
{
    const at::Tensor &tensor = tensor_of(object);

    require(tensor.is_contiguous(), "a collective over NCCL needs contiguous tensors");
    return tensor;
}

/* What every collective is given beside its tensors; the last that is read. */
struct Queue {
    fc_stream *stream;
    fc_label label;

    Queue(Fields &given, const char *what)
        : stream(reinterpret_cast<fc_stream *>(given.size("stream"))),
          label{given.text("unit"), what, 0}
    {
        given.end();
    }
};

fc_status nccl_all_gather(Nccl &self, Fields &given)
{
    const at::Tensor &all = contiguous(given.object("tensor").get());
    const Queue at(given, "all_gather");
    const auto n_ranks = (size_t)self.host.n_ranks;

    require(all.nbytes() % n_ranks == 0, "all_gather: the buffer has no part for each rank");
    return fc_nccl_all_gather(fc_nccl_gathers(self.group), at.stream, at.label, all.data_ptr(),
                              all.nbytes() / n_ranks);
}

fc_status nccl_all_gather_each(Nccl &self, Fields &given)
{
    const Ref outputs = given.object("outputs"), inputs = given.object("inputs");
    const Queue at(given, "all_gather");
    std::vector<fc_gather> gathers;

    require(PyList_Check(outputs.get()) && PyList_Check(inputs.get()) &&
                PyList_GET_SIZE(outputs.get()) == PyList_GET_SIZE(inputs.get()),
            "all_gather_each: as many outputs as inputs");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs.get()); i++) {
        const at::Tensor &to = contiguous(PyList_GET_ITEM(outputs.get(), i));
        const at::Tensor &from = contiguous(PyList_GET_ITEM(inputs.get(), i));

        gathers.push_back({to.data_ptr(), from.data_ptr(), from.nbytes()});
    }
    return fc_nccl_all_gather_each(fc_nccl_gathers(self.group), at.stream, at.label, gathers.data(),
                                   gathers.size());
}

fc_status nccl_reduce_scatter(Nccl &self, Fields &given)
{
    const at::Tensor &to = contiguous(given.object("output").get());
    const at::Tensor &from = contiguous(given.object("input").get());
    const Queue at(given, "reduce_scatter");

    require(to.scalar_type() == from.scalar_type(),
            "reduce_scatter: both tensors must have one type");
    return fc_nccl_reduce_scatter(fc_nccl_reductions(self.group), at.stream, at.label,
                                  to.data_ptr(), from.data_ptr(), (size_t)to.numel(),
                                  dtype_of(to.scalar_type()));
}

fc_status nccl_all_reduce(Nccl &self, Fields &given)
{
    const at::Tensor &tensor = contiguous(given.object("tensor").get());
    const Queue at(given, "all_reduce");

    return fc_nccl_all_reduce(fc_nccl_reductions(self.group), at.stream, at.label,
                              tensor.data_ptr(), (size_t)tensor.numel(),
                              dtype_of(tensor.scalar_type()));
}

PyMethodDef nccl_methods[] = {
    method<[](Nccl &self) { return fc_nccl_watch(self.group); }>(
        "watch", "Raise if something is wrong with NCCL or a rank."),
    method<[](Nccl &self) { return fc_nccl_group_close(self.group); }>(
        "close", "Wait until all work is done everywhere, and end. Collective."),
    method<[](Nccl &self, PyObject *seconds) {
        fc_nccl_group_leave(self.group, fc_transport_timeout_ns(real_from(seconds)));
        PyErr_Clear(); /* an interrupted wait was aborted */
    }>("leave", "leave(seconds): ends locally; aborts what does not end within so long."),
    method<[](Nccl &self, PyObject *why) {
        (void)fc_nccl_abort(self.group, FC_ERR_BROKEN, text_from(why));
    }>("abort", "End here, and on the ranks of this host, with this text."),
    method<nccl_wait>("wait",
                      "wait(*, is_ready, what): until is_ready() is true, watching the ranks."),
    method<nccl_all_gather>("all_gather", "all_gather(*, tensor, stream, unit): in place"),
    method<nccl_all_gather_each>("all_gather_each",
                                 "all_gather_each(*, outputs, inputs, stream, unit)"),
    method<nccl_reduce_scatter>("reduce_scatter",
                                "reduce_scatter(*, output, input, stream, unit): sums"),
    method<nccl_all_reduce>("all_reduce", "all_reduce(*, tensor, stream, unit): sums"),
    {},
};

PyGetSetDef nccl_properties[] = {
    property<[](Nccl &self) { return fc_nccl_group_describe(self.group); }>(
        "text", "Ranks, version and communicators."),
    {},
};

} // namespace

Ref nccl_open(Fields &given)
{
    const char *path = given.text("path");
    const bool is_loaded = given.flag("is_loaded");
    const fc_nccl *library = nullptr;

    given.end();
    check(fc_nccl_open(path, is_loaded, &library));
    auto *handle = const_cast<fc_nccl *>(library);
    return dict_of({{"handle", checked(PyCapsule_New(handle, library_name, nullptr))},
                    {"version", to_python(fc_nccl_version(library))},
                    {"text", to_python(fc_nccl_describe(library))}});
}

fc_nccl_group *nccl_from_object(PyObject *object)
{
    return owned_by<Nccl>(object).group;
}

int register_nccl(PyObject *module)
{
    return add_type<Nccl>(
        module,
        {.name = "fsdp_c._C.NcclGroup",
         .doc = "NcclGroup(*, name, rank, global_ranks, timeout_seconds, exchange, library, "
                "is_one)\n--\n\nNCCL for the ranks of one process group. Collective.",
         .methods = nccl_methods,
         .properties = nccl_properties});
}

} // namespace fc
