// Memory and collectives for devices: torch's allocator, and process groups on given streams.
#include "bind/device_comm.h"

#include "bind/compat.h"
#include "bind/python.h"
#include "bind/tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>

#include <optional>

namespace fc {

namespace {

const c10::Device &device_in(void *context)
{
    return *static_cast<const c10::Device *>(context);
}

const c10::Stream &stream_of(fc_stream *stream)
{
    return *reinterpret_cast<const c10::Stream *>(stream);
}

// Runs `body` with the stream as the current one; exceptions become a status.
template <typename Body> fc_status in_stream(fc_stream *stream, const char *what, Body &&body)
{
    try {
        const c10::StreamGuard guard(stream_of(stream));
        body();
        return FC_OK;
    } catch (const c10::Error &error) {
        return fc_fail(FC_ERR_SYSTEM, "%s: %s", what, error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_SYSTEM, "%s: %s", what, error.what());
    }
}

at::Tensor tensor_at(void *context, const void *memory, size_t numel, at::ScalarType type)
{
    const c10::Device device = device_in(context);
    return at::for_blob(const_cast<void *>(memory), {static_cast<int64_t>(numel)})
        .options(at::dtype(type).device(device))
        .target_device(device)
        .make_tensor();
}

// A collective of a process group. Without the GIL: backends keep their locks while their threads
// let go of Python objects. On a host the end is waited for; on an accelerator by the stream.
template <typename Call> void collective(Call &&call)
{
    std::optional<NoGil> no_gil;
    if (PyGILState_Check()) {
        no_gil.emplace();
    }
    if (const c10::intrusive_ptr<c10d::Work> work = call()) {
        work->wait();
    }
}

fc_status alloc(void *context, fc_stream *stream, size_t bytes, void **out)
{
    return in_stream(stream, "memory for units on a device", [&] {
        *out = c10::GetAllocator(device_in(context).type())->raw_allocate(bytes);
    });
}

void free_memory(void *context, void *memory)
{
    c10::GetAllocator(device_in(context).type())->raw_deallocate(memory);
}

fc_status all_gather(void *context, fc_device_comm *comm, fc_stream *stream, fc_label, void *buffer,
                     size_t part_bytes)
{
    const auto n_ranks = static_cast<size_t>(comm->group->getSize());
    const auto rank = static_cast<size_t>(comm->group->getRank());
    if (n_ranks == 1 || part_bytes == 0) {
        return FC_OK;
    }
    return in_stream(stream, "all-gather", [&] {
        at::Tensor all = tensor_at(context, buffer, n_ranks * part_bytes, at::kByte);
        at::Tensor own = all.narrow(0, static_cast<int64_t>(rank * part_bytes),
                                    static_cast<int64_t>(part_bytes));
        collective([&] { return gather_into(*comm->group, all, own); });
    });
}

fc_status reduce_scatter(void *context, fc_device_comm *comm, fc_stream *stream, fc_label, void *to,
                         const void *from, size_t numel, fc_dtype dtype)
{
    const auto n_ranks = static_cast<size_t>(comm->group->getSize());
    const at::ScalarType type = scalar_type_of(dtype);
    return in_stream(stream, "reduce-scatter", [&] {
        at::Tensor part = tensor_at(context, to, numel, type);
        at::Tensor all = tensor_at(context, from, n_ranks * numel, type);
        if (n_ranks == 1) {
            part.copy_(all);
        } else {
            collective([&] { return scatter_sums(*comm->group, part, all); });
        }
    });
}

fc_status all_reduce(void *context, fc_device_comm *comm, fc_stream *stream, fc_label, void *buffer,
                     size_t numel, fc_dtype dtype)
{
    if (comm->group->getSize() == 1) {
        return FC_OK;
    }
    return in_stream(stream, "all-reduce", [&] {
        std::vector<at::Tensor> tensors = {
            tensor_at(context, buffer, numel, scalar_type_of(dtype))};
        collective([&] { return comm->group->allreduce(tensors); });
    });
}

} // namespace

fc_device_caller device_caller(const c10::Device *device)
{
    return {const_cast<c10::Device *>(device),
            alloc,
            free_memory,
            all_gather,
            reduce_scatter,
            all_reduce};
}

} // namespace fc
