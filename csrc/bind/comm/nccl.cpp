/* The type `_C.NcclGroup`. Streams are their handles as ints; tensors may be on any device that the
 * library can read. Collectives are for who tries NCCL: units call the core. */
#include "bind/comm/transport.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

#include <cstdio>
#include <memory>

namespace fc {

namespace {

const char library_name[] = "fsdp_c.nccl";
const char events_name[] = "fsdp_c.events";

/* Not by Python's stderr: a program that waits for the device may keep the interpreter's lock. */
void report(const char *line)
{
    (void)std::fprintf(stderr, "%s\n", line);
    (void)std::fflush(stderr);
}

struct Nccl {
    explicit Nccl(Fields &given);

    Host host;
    Owned<fc_nccl_group, fc_nccl_group_destroy> owner;
    fc_nccl_group *group;
};

Nccl::Nccl(Fields &given)
{
    const RanksConfig ranks(given, &host);
    const Ref library = given.object("library"), events = given.object("events");
    const bool is_watched = events.get() != Py_None;
    const fc_nccl_options options = {
        .nccl = static_cast<fc_nccl *>(PyCapsule_GetPointer(library.get(), library_name)),
        .is_one = given.flag("is_one"),
        .events = is_watched
                      ? static_cast<fc_events *>(PyCapsule_GetPointer(events.get(), events_name))
                      : nullptr,
        .report = report};

    check(PyErr_Occurred() != nullptr ? -1 : 0);
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

/* Of tensors that who gave the list keeps. */
std::vector<fc_nccl_array> arrays_of(const Ref &list)
{
    std::vector<fc_nccl_array> arrays;

    for (PyObject *object : items_of(list.get())) {
        const at::Tensor &tensor = tensor_of(object);

        if (!tensor.is_contiguous()) {
            raise_error(PyExc_ValueError, "a collective over NCCL needs contiguous tensors");
        }
        arrays.push_back({tensor.data_ptr(), tensor.nbytes(), (size_t)tensor.numel(),
                          dtype_of(tensor.scalar_type())});
    }
    return arrays;
}

fc_status nccl_collect(Nccl &self, Fields &given)
{
    const Ref outputs = given.list("outputs"), inputs = given.list("inputs");
    auto *stream = reinterpret_cast<fc_stream *>(given.size("stream"));
    const fc_label label = {given.text("unit"), given.text("what"), 0};

    given.end();
    const std::vector<fc_nccl_array> to = arrays_of(outputs), from = arrays_of(inputs);
    return fc_nccl_collect(self.group, stream, label, to.data(), to.size(), from.data(),
                           from.size());
}

PyMethodDef nccl_methods[] = {
    method<[](Nccl &self) { return fc_nccl_watch(self.group); }>("watch"),
    method<[](Nccl &self) { return fc_nccl_group_close(self.group); }>("close"),
    method<[](Nccl &self, PyObject *seconds) {
        fc_nccl_group_leave(self.group, fc_transport_timeout_ns(real_from(seconds)));
        PyErr_Clear(); /* an interrupted wait was aborted */
    }>("leave"),
    method<[](Nccl &self, PyObject *why) {
        (void)fc_nccl_abort(self.group, FC_ERR_BROKEN, text_from(why));
    }>("abort"),
    method<nccl_wait>("wait"),
    method<nccl_collect>("collect"),
    {},
};

PyGetSetDef nccl_properties[] = {
    property<[](Nccl &self) { return fc_nccl_group_describe(self.group); }>("text"),
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

Ref cuda_events(Fields &given)
{
    const char *path = given.text("path");
    const int gpu = given.integer("gpu");
    fc_events found = {};

    given.end();
    check(fc_cuda_events_open(path, gpu, &found));
    auto kept = std::make_unique<fc_events>(found);
    Ref capsule = checked(PyCapsule_New(kept.get(), events_name, [](PyObject *self) {
        delete static_cast<fc_events *>(PyCapsule_GetPointer(self, events_name));
    }));
    (void)kept.release();
    return capsule;
}

fc_nccl_group *nccl_from_object(PyObject *object)
{
    return owned_by<Nccl>(object).group;
}

int register_nccl(PyObject *module)
{
    return add_type<Nccl>(
        module,
        {.name = "fsdp_c._C.NcclGroup", .methods = nccl_methods, .properties = nccl_properties});
}

} // namespace fc
