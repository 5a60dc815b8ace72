// Collectives of units on a device by the process group itself, whatever its backend.
#include "bind/compat.h"
#include "bind/device/device_comm.h"
#include "bind/python/python.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <optional>
#include <vector>

namespace fc {

namespace {

// The group sees the given stream as the current one.
struct ProcessGroupComm final : fc_device_comm {
    const c10::Device *device;
    c10::intrusive_ptr<c10d::ProcessGroup> group;

    ProcessGroupComm(const c10::Device *on, const std::string &name)
        : device(on), group(c10d::resolve_process_group(name))
    {
    }

    size_t n_ranks() const { return static_cast<size_t>(group->getSize()); }

    at::Tensor tensor_at(const void *memory, size_t numel, at::ScalarType type) const
    {
        return at::for_blob(const_cast<void *>(memory), {static_cast<int64_t>(numel)})
            .options(at::dtype(type).device(*device))
            .target_device(*device)
            .make_tensor();
    }

    fc_status all_gather(fc_stream *stream, fc_label label, void *buffer,
                         size_t part_bytes) override;
    fc_status all_gather_each(fc_stream *stream, fc_label label, const fc_gather *gathers,
                              size_t n_gathers) override;
    fc_status reduce_scatter(fc_stream *stream, fc_label label, void *to, const void *from,
                             size_t numel, fc_dtype dtype) override;
    fc_status all_reduce(fc_stream *stream, fc_label label, void *buffer, size_t numel,
                         fc_dtype dtype) override;
    bool has_groups() const override { return false; }
};

// Runs `body` with the stream as the current one; exceptions become a status.
template <typename Body>
fc_status in_stream(fc_stream *stream, const char *what, fc_label label, Body &&body)
{
    try {
        const c10::StreamGuard guard(torch_stream(stream));
        body();
        return FC_OK;
    } catch (const c10::Error &error) {
        return fc_fail(FC_ERR_SYSTEM, "%s of unit %s: %s", what, label.unit,
                       error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_SYSTEM, "%s of unit %s: %s", what, label.unit, error.what());
    }
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

fc_status ProcessGroupComm::all_gather(fc_stream *stream, fc_label label, void *buffer,
                                       size_t part_bytes)
{
    if (n_ranks() == 1 || part_bytes == 0) {
        return FC_OK;
    }
    const auto rank = static_cast<size_t>(group->getRank());
    return in_stream(stream, "all-gather", label, [&] {
        at::Tensor all = tensor_at(buffer, n_ranks() * part_bytes, at::kByte);
        at::Tensor own = all.narrow(0, static_cast<int64_t>(rank * part_bytes),
                                    static_cast<int64_t>(part_bytes));
        collective([&] { return gather_into(*group, all, own); });
    });
}

fc_status ProcessGroupComm::all_gather_each(fc_stream *, fc_label label, const fc_gather *, size_t)
{
    return n_ranks() == 1 // whose parts are in their places
               ? FC_OK
               : fc_fail(FC_ERR_UNSUPPORTED,
                         "all-gathers of unit %s: a process group has no groups", label.unit);
}

fc_status ProcessGroupComm::reduce_scatter(fc_stream *stream, fc_label label, void *to,
                                           const void *from, size_t numel, fc_dtype dtype)
{
    const at::ScalarType type = scalar_type_of(dtype);
    return in_stream(stream, "reduce-scatter", label, [&] {
        at::Tensor part = tensor_at(to, numel, type);
        at::Tensor all = tensor_at(from, n_ranks() * numel, type);
        if (n_ranks() == 1) {
            part.copy_(all);
        } else {
            collective([&] { return scatter_sums(*group, part, all); });
        }
    });
}

fc_status ProcessGroupComm::all_reduce(fc_stream *stream, fc_label label, void *buffer,
                                       size_t numel, fc_dtype dtype)
{
    if (n_ranks() == 1) {
        return FC_OK;
    }
    return in_stream(stream, "all-reduce", label, [&] {
        std::vector<at::Tensor> tensors = {tensor_at(buffer, numel, scalar_type_of(dtype))};
        collective([&] { return group->allreduce(tensors); });
    });
}

} // namespace

std::unique_ptr<fc_device_comm> process_group_comm(const c10::Device *device,
                                                   const std::string &name)
{
    return std::make_unique<ProcessGroupComm>(device, name);
}

} // namespace fc
