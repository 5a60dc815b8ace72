// Memory of torch's allocator for devices, and collectives of units there: NCCL's, those of the
// process group itself, whatever its backend, or those that Python makes in sight of others.
#include "bind/comm/transport.h"
#include "bind/compat.h"
#include "bind/device/device.h"

#include <c10/core/Allocator.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace fc {

namespace {

c10::Allocator *allocator_in(void *context)
{
    return c10::GetAllocator(static_cast<const Collectives *>(context)->device().type());
}

fc_status alloc(void *context, fc_stream *stream, size_t bytes, void **out)
{
    return attempt(
        [&] {
            const c10::StreamGuard guard(torch_stream(stream));
            *out = allocator_in(context)->raw_allocate(bytes);
        },
        "memory for units on a device: %s");
}

void free_memory(void *context, void *memory)
{
    allocator_in(context)->raw_deallocate(memory);
}

// Host memory has no streams: there a library ends its work before a call has ended.
fc_stream *native(fc_stream *stream)
{
    const c10::Stream &given = torch_stream(stream);
    return given.device().is_cpu() ? nullptr : static_cast<fc_stream *>(native_stream(given));
}

fc_status in_stream_of(void *, fc_stream *stream, fc_status (*body)(void *), void *arg)
{
    const c10::StreamGuard guard(torch_stream(stream));
    return body(arg);
}

fc_collectives_group by_messages(const c10::Device &device, const Ref &messages, int rank,
                                 int n_ranks)
{
    return {.n_ranks = n_ranks,
            .rank = rank,
            .is_seen = true,
            .seen = messages_ops(messages, n_ranks, device)};
}

fc_collectives_group by_nccl(PyObject *nccl)
{
    fc_nccl_group *group = nccl_from_object(nccl);
    return {.context = Py_NewRef(nccl), .nccl = group, .release = [](void *object) {
                Py_DECREF(static_cast<PyObject *>(object));
            }};
}

// ---- the process group's own ----

struct OwnGroup {
    const c10::Device *device;
    c10::intrusive_ptr<c10d::ProcessGroup> group; // null: of one rank

    size_t n_ranks() const { return group ? static_cast<size_t>(group->getSize()) : 1; }

    at::Tensor tensor_at(const void *memory, size_t numel, at::ScalarType type) const
    {
        return at::for_blob(const_cast<void *>(memory), {static_cast<int64_t>(numel)})
            .options(at::dtype(type).device(*device))
            .target_device(*device)
            .make_tensor();
    }
};

// Runs `body` for the group with the stream as the current one, as the group sees it.
template <typename Body>
fc_status in_stream(void *context, fc_stream *stream, const char *what, fc_label label, Body &&body)
{
    return attempt(
        [&] {
            const c10::StreamGuard guard(torch_stream(stream));
            body(*static_cast<const OwnGroup *>(context));
        },
        "%s of unit %s: %s", what, label.unit);
}

// A collective of a process group. Without the GIL: backends keep their locks while their threads
// let go of Python objects. On a host the end is waited for; on an accelerator by the stream.
template <typename Call> void await(Call &&call)
{
    const NoGil no_gil;
    if (const c10::intrusive_ptr<c10d::Work> work = call()) {
        work->wait();
    }
}

fc_status group_all_gather(void *context, fc_stream *stream, fc_label label, void *buffer,
                           size_t part_bytes)
{
    return in_stream(context, stream, "all-gather", label, [&](const OwnGroup &own) {
        const auto part = static_cast<int64_t>(part_bytes);
        at::Tensor all = own.tensor_at(buffer, own.n_ranks() * part_bytes, at::kByte);
        at::Tensor mine = all.narrow(0, own.group->getRank() * part, part);
        await([&] { return gather_into(*own.group, all, mine); });
    });
}

fc_status group_reduce_scatter(void *context, fc_stream *stream, fc_label label, void *to,
                               const void *from, size_t numel, fc_dtype dtype)
{
    return in_stream(context, stream, "reduce-scatter", label, [&](const OwnGroup &own) {
        const at::ScalarType type = scalar_type_of(dtype);
        at::Tensor part = own.tensor_at(to, numel, type);
        at::Tensor all = own.tensor_at(from, own.n_ranks() * numel, type);
        if (own.n_ranks() == 1) {
            part.copy_(all);
        } else {
            await([&] { return scatter_sums(*own.group, part, all); });
        }
    });
}

fc_status group_all_reduce(void *context, fc_stream *stream, fc_label label, void *buffer,
                           size_t numel, fc_dtype dtype)
{
    return in_stream(context, stream, "all-reduce", label, [&](const OwnGroup &own) {
        std::vector<at::Tensor> tensors = {own.tensor_at(buffer, numel, scalar_type_of(dtype))};
        await([&] { return own.group->allreduce(tensors); });
    });
}

fc_collectives_group by_group(const c10::Device *device, const std::string &name, int n_ranks)
{
    auto *own = new OwnGroup{device, {}};
    if (n_ranks > 1) {
        own->group = c10d::resolve_process_group(name);
    }
    return {.context = own,
            .n_ranks = n_ranks,
            .all_gather = group_all_gather,
            .reduce_scatter = group_reduce_scatter,
            .all_reduce = group_all_reduce,
            .release = [](void *context) { delete static_cast<OwnGroup *>(context); }};
}

} // namespace

Collectives::Collectives(c10::Device device) : device_(device)
{
    const fc_collectives_host host = {.context = this,
                                      .alloc = alloc,
                                      .free = free_memory,
                                      .native = native,
                                      .in_stream = in_stream_of};
    check(fc_collectives_create(&host, Out(core_)));
}

void Collectives::connect(Fields &given)
{
    const std::string name = given.text("group");
    const Ref nccl = given.object("nccl"), messages = given.object("messages");
    const int rank = given.integer("rank"), n_ranks = given.integer("n_ranks");
    given.end();
    const fc_collectives_group group = messages.get() != Py_None
                                           ? by_messages(device_, messages, rank, n_ranks)
                                       : nccl.get() != Py_None ? by_nccl(nccl.get())
                                                               : by_group(&device_, name, n_ranks);
    check(fc_collectives_connect(core(), name.c_str(), &group));
}

fc_device_comm *Collectives::find(const std::string &name) const
{
    fc_device_comm *found = fc_collectives_find(core(), name.c_str());
    TORCH_CHECK(found != nullptr, "process group ", name, " is not connected");
    return found;
}

} // namespace fc
