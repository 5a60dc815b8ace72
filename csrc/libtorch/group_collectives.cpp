// For units on a device: memory of torch's allocator, and the process group's own collectives,
// whatever its backend.
#include "libtorch/accelerator.h"
#include "libtorch/process_group.h"
#include "libtorch/types.h"
#include "libtorch/unlocked.h"
#include "libtorch/versions.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

namespace fc {

namespace {

// ---- the host of collectives ----

c10::Allocator *allocator_in(void *context)
{
    return c10::GetAllocator(static_cast<const c10::Device *>(context)->type());
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

// ---- collectives ----

struct OwnGroup {
    c10::Device device;
    c10::intrusive_ptr<c10d::ProcessGroup> group; // null: of one rank
    c10d::ReduceOp op;                            // of reductions

    size_t n_ranks() const { return group ? static_cast<size_t>(group->getSize()) : 1; }

    at::Tensor tensor_at(const void *memory, size_t numel, at::ScalarType type) const
    {
        return at::for_blob(const_cast<void *>(memory), {static_cast<int64_t>(numel)})
            .options(at::dtype(type).device(device))
            .target_device(device)
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

// A collective of a process group. Unlocked: backends keep their locks while their threads let go
// of Python objects. On a host the end is waited for; on an accelerator by the stream.
template <typename Call> void await(Call &&call)
{
    const Unlocked others_run;
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
            await([&] { return scatter_sums(*own.group, part, all, own.op); });
        }
    });
}

fc_status group_all_reduce(void *context, fc_stream *stream, fc_label label, void *buffer,
                           size_t numel, fc_dtype dtype)
{
    return in_stream(context, stream, "all-reduce", label, [&](const OwnGroup &own) {
        std::vector<at::Tensor> tensors = {own.tensor_at(buffer, numel, scalar_type_of(dtype))};
        await([&] { return own.group->allreduce(tensors, {.reduceOp = own.op}); });
    });
}

// As torch's fully_shard asks for it.
void group_scale(void *context, double factor)
{
    auto &own = *static_cast<OwnGroup *>(context);
    const bool is_average = factor == 1.0 / static_cast<double>(own.n_ranks());
    own.op = factor == 1  ? c10d::ReduceOp(c10d::ReduceOp::SUM)
             : is_average ? c10d::ReduceOp(c10d::ReduceOp::AVG)
                          : scaled_sums(factor);
}

} // namespace

fc_collectives_group group_collectives(c10::Device device, const std::string &name, int n_ranks,
                                       bool may_scale)
{
    auto *own = new OwnGroup{device, {}, c10d::ReduceOp::SUM};
    if (n_ranks > 1) {
        own->group = c10d::resolve_process_group(name);
    }
    return {.context = own,
            .n_ranks = n_ranks,
            .may_scale = may_scale,
            .all_gather = group_all_gather,
            .reduce_scatter = group_reduce_scatter,
            .all_reduce = group_all_reduce,
            .scale = group_scale,
            .release = [](void *context) { delete static_cast<OwnGroup *>(context); }};
}

fc_collectives_host collectives_host(const c10::Device *device)
{
    return {.context = const_cast<c10::Device *>(device),
            .alloc = alloc,
            .free = free_memory,
            .native = native,
            .in_stream = in_stream_of};
}

} // namespace fc
