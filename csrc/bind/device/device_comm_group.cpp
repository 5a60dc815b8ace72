// Collectives of units on a device by the process group itself, whatever its backend.
#include "bind/comm/transport.h"
#include "bind/compat.h"
#include "bind/device/device.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <optional>
#include <vector>

namespace fc {

namespace {

struct OwnGroup {
    const c10::Device *device;
    c10::intrusive_ptr<c10d::ProcessGroup> group; // null: of one rank

    int n_ranks() const { return group ? group->getSize() : 1; }

    at::Tensor tensor_at(const void *memory, size_t numel, at::ScalarType type) const
    {
        return at::for_blob(const_cast<void *>(memory), {static_cast<int64_t>(numel)})
            .options(at::dtype(type).device(*device))
            .target_device(*device)
            .make_tensor();
    }
};

const OwnGroup &group_in(void *context)
{
    return *static_cast<const OwnGroup *>(context);
}

// Runs `body` with the stream as the current one, as the group sees it.
template <typename Body>
fc_status in_stream(fc_stream *stream, const char *what, fc_label label, Body &&body)
{
    return attempt(
        [&] {
            const c10::StreamGuard guard(torch_stream(stream));
            body();
        },
        "%s of unit %s: %s", what, label.unit);
}

// A collective of a process group. Without the GIL: backends keep their locks while their threads
// let go of Python objects. On a host the end is waited for; on an accelerator by the stream.
template <typename Call> void await(Call &&call)
{
    std::optional<NoGil> no_gil;
    if (PyGILState_Check()) {
        no_gil.emplace();
    }
    if (const c10::intrusive_ptr<c10d::Work> work = call()) {
        work->wait();
    }
}

fc_status group_all_gather(void *context, fc_stream *stream, fc_label label, void *buffer,
                           size_t part_bytes)
{
    const OwnGroup &own = group_in(context);
    return in_stream(stream, "all-gather", label, [&] {
        const auto part = static_cast<int64_t>(part_bytes);
        at::Tensor all = own.tensor_at(buffer, size_t(own.n_ranks()) * part_bytes, at::kByte);
        at::Tensor mine = all.narrow(0, own.group->getRank() * part, part);
        await([&] { return gather_into(*own.group, all, mine); });
    });
}

fc_status group_reduce_scatter(void *context, fc_stream *stream, fc_label label, void *to,
                               const void *from, size_t numel, fc_dtype dtype)
{
    const OwnGroup &own = group_in(context);
    return in_stream(stream, "reduce-scatter", label, [&] {
        const at::ScalarType type = scalar_type_of(dtype);
        at::Tensor part = own.tensor_at(to, numel, type);
        at::Tensor all = own.tensor_at(from, size_t(own.n_ranks()) * numel, type);
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
    const OwnGroup &own = group_in(context);
    return in_stream(stream, "all-reduce", label, [&] {
        std::vector<at::Tensor> tensors = {own.tensor_at(buffer, numel, scalar_type_of(dtype))};
        await([&] { return own.group->allreduce(tensors); });
    });
}

// ---- in sight: Python makes them ----

struct Seen {
    fc_message_ops ops;
    size_t rank;
};

const Seen &seen_in(void *context)
{
    return *static_cast<const Seen *>(context);
}

fc_status seen_all_gather(void *context, fc_stream *stream, fc_label, void *buffer,
                          size_t part_bytes)
{
    const Seen &seen = seen_in(context);
    const c10::StreamGuard guard(torch_stream(stream));
    return seen.ops.all_gather(seen.ops.context, buffer,
                               static_cast<char *>(buffer) + seen.rank * part_bytes, part_bytes);
}

fc_status seen_reduce_scatter(void *context, fc_stream *stream, fc_label, void *to,
                              const void *from, size_t numel, fc_dtype dtype)
{
    const Seen &seen = seen_in(context);
    const c10::StreamGuard guard(torch_stream(stream));
    return seen.ops.reduce_scatter(seen.ops.context, to, const_cast<void *>(from), numel, dtype);
}

fc_status seen_all_reduce(void *context, fc_stream *stream, fc_label, void *buffer, size_t numel,
                          fc_dtype dtype)
{
    const Seen &seen = seen_in(context);
    const c10::StreamGuard guard(torch_stream(stream));
    return seen.ops.all_reduce(seen.ops.context, buffer, numel, dtype);
}

void release_seen(void *context)
{
    const std::unique_ptr<Seen> seen(static_cast<Seen *>(context));
    seen->ops.release(seen->ops.context);
}

} // namespace

fc_collectives_group seen_collectives(const c10::Device &device, const Ref &messages, int rank,
                                      int n_ranks)
{
    return {.context = new Seen{messages_ops(messages, n_ranks, device), static_cast<size_t>(rank)},
            .n_ranks = n_ranks,
            .is_seen = true,
            .all_gather = seen_all_gather,
            .reduce_scatter = seen_reduce_scatter,
            .all_reduce = seen_all_reduce,
            .release = release_seen};
}

fc_collectives_group own_collectives(const c10::Device *device, const std::string &name,
                                     int n_ranks)
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

} // namespace fc
