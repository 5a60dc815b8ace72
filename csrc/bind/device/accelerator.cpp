// The table of functions of accelerators, over what c10 and ATen offer for all of them.
#include "bind/device/accelerator.h"

#include "base/status.h"
#include "bind/compat.h"
#include "bind/device/device_comm.h"
#include "bind/tensor/tensors.h"
#include "device/host/moves.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>
#include <vector>

struct fc_moves {
    fc_runs plan;                     // owned
    at::Tensor runs, stretches;       // on the device, for kernels
    std::vector<c10::Stream> streams; // that have read them
    ~fc_moves() { fc_runs_clear(&plan); }
};

namespace fc {

namespace {

struct Accelerator : fc_device {
    c10::Device device;
    fc_device_caller caller;
    c10::impl::VirtualGuardImpl impl;
    const fc_cuda_kernels *kernels;

    bool has_streams() const { return !device.is_cpu(); }
};

struct BackendEvent {
    void *handle = nullptr; // made by its first record
};

Accelerator *accelerator(fc_device *device)
{
    return static_cast<Accelerator *>(device);
}

BackendEvent *backend_event(fc_event *event)
{
    return reinterpret_cast<BackendEvent *>(event);
}

// Runs `body`; exceptions become a status.
template <typename Body> fc_status attempt(fc_label label, Body &&body)
{
    try {
        body();
        return FC_OK;
    } catch (const c10::Error &error) {
        return fc_fail(FC_ERR_SYSTEM, "'%s' of '%s': %s", label.what, label.unit,
                       error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_SYSTEM, "'%s' of '%s': %s", label.what, label.unit, error.what());
    }
}

// ---- memory and events ----

fc_status accelerator_alloc(fc_device *device, fc_stream *stream, fc_label, size_t bytes,
                            void **out)
{
    const fc_device_caller &caller = accelerator(device)->caller;
    return caller.alloc(caller.context, stream, bytes, out);
}

void accelerator_free(fc_device *device, void *memory)
{
    const fc_device_caller &caller = accelerator(device)->caller;
    if (memory != nullptr) {
        caller.free(caller.context, memory);
    }
}

fc_status accelerator_event_create(fc_device *, fc_event **out)
{
    *out = reinterpret_cast<fc_event *>(new BackendEvent());
    return FC_OK;
}

void accelerator_event_destroy(fc_device *device, fc_event *event)
{
    const Accelerator *self = accelerator(device);
    if (event != nullptr) {
        if (backend_event(event)->handle != nullptr) {
            self->impl.destroyEvent(backend_event(event)->handle, self->device.index());
        }
        delete backend_event(event);
    }
}

fc_status accelerator_record(fc_device *device, fc_event *event, fc_stream *stream)
{
    const Accelerator *self = accelerator(device);
    if (!self->has_streams()) {
        return FC_OK;
    }
    return attempt({"a stream", "record"}, [&] {
        self->impl.record(&backend_event(event)->handle, torch_stream(stream), self->device.index(),
                          c10::EventFlag::PYTORCH_DEFAULT);
    });
}

fc_status accelerator_wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    if (backend_event(event)->handle == nullptr) {
        return FC_OK;
    }
    return attempt({"a stream", "wait"}, [&] {
        accelerator(device)->impl.block(backend_event(event)->handle, torch_stream(stream));
    });
}

struct Query {
    const Accelerator *device;
    void *event;
    fc_status status;
};

bool is_over(void *arg)
{
    auto *query = static_cast<Query *>(arg);
    bool is_there = false;
    query->status = attempt({"a stream", "query"},
                            [&] { is_there = query->device->impl.queryEvent(query->event); });
    return is_there || query->status != FC_OK;
}

fc_status accelerator_synchronize(fc_device *device, fc_event *event)
{
    const Accelerator *self = accelerator(device);
    Query query = {self, backend_event(event)->handle, FC_OK};
    if (query.event == nullptr) {
        return FC_OK;
    }
    const fc_status st = self->caller.wait(self->caller.context, is_over, &query);
    if (st != FC_AGAIN) {
        return st == FC_OK ? query.status : st;
    }
    return attempt({"a stream", "synchronize"}, [&] { self->impl.synchronizeEvent(query.event); });
}

// ---- copies and moves ----

at::Tensor memory_at(c10::Device device, const void *memory, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType type)
{
    return at::for_blob(const_cast<void *>(memory), sizes)
        .strides(strides)
        .options(at::dtype(type).device(device))
        .target_device(device)
        .make_tensor();
}

fc_status accelerator_copy(fc_device *device, fc_stream *stream, fc_label label, void *to,
                           const void *from, size_t bytes, fc_way way)
{
    const Accelerator *self = accelerator(device);
    const c10::Device host(c10::kCPU);
    return attempt(label, [&] {
        const c10::StreamGuard guard(torch_stream(stream));
        const at::NoGradGuard no_grad;
        const auto n = static_cast<int64_t>(bytes);
        memory_at(way == FC_TO_HOST ? host : self->device, to, {n}, {1}, at::kByte)
            .copy_(memory_at(way == FC_TO_DEVICE ? host : self->device, from, {n}, {1}, at::kByte),
                   /*non_blocking=*/true);
    });
}

// A table of a plan, copied.
at::Tensor on_device(c10::Device device, void *content, size_t bytes)
{
    return memory_at(c10::kCPU, content, {static_cast<int64_t>(bytes)}, {1}, at::kByte)
        .to(device, /*non_blocking=*/false, /*copy=*/true);
}

fc_status accelerator_moves_create(fc_device *device, fc_runs *plan, fc_moves **out)
{
    const Accelerator *self = accelerator(device);
    return attempt({"a unit", "plan"}, [&] {
        auto moves = std::make_unique<fc_moves>();
        fc_runs_init(&moves->plan);
        if (self->kernels != nullptr && plan->n_runs > 0) {
            const c10::InferenceMode normal(false);
            moves->runs = on_device(self->device, plan->runs, plan->n_runs * sizeof(fc_run));
            moves->stretches = on_device(self->device, plan->stretches,
                                         plan->n_stretches * sizeof(*plan->stretches));
        }
        moves->plan = std::exchange(*plan, moves->plan);
        *out = moves.release();
    });
}

// The allocator gives the tables to nobody before the launches that read them are done.
void accelerator_moves_destroy(fc_device *device, fc_moves *moves)
{
    if (moves == nullptr) {
        return;
    }
    for (const c10::Stream &stream : moves->streams) { // none if there is nothing to read
        for (const at::Tensor *table : {&moves->runs, &moves->stretches}) {
            accelerator(device)->impl.recordDataPtrOnStream(table->storage().data_ptr(), stream);
        }
    }
    delete moves;
}

struct CopyArgs {
    c10::Device device;
    double divisor;
    bool accumulate;
};

at::Tensor side_of(const CopyArgs &args, const fc_run *run, const fc_host_operand &side,
                   uint8_t dtype)
{
    const auto item = static_cast<int64_t>(fc_dtype_bytes(static_cast<fc_dtype>(dtype)));
    const int64_t lines = run->lines_per_plane;
    return memory_at(args.device, side.first, {run->n_lines / lines, lines, run->line_numel},
                     {static_cast<int64_t>(side.plane_stride) / item,
                      static_cast<int64_t>(side.line_stride) / item, 1},
                     scalar_type_of(static_cast<fc_dtype>(dtype)));
}

// A run by torch's operators: rounded as the kernels do it, each step in float32 or wider.
void copy_run(const void *arg, const fc_run *run, fc_host_operand to, fc_host_operand from)
{
    const CopyArgs &args = *static_cast<const CopyArgs *>(arg);
    at::Tensor target = side_of(args, run, to, run->to);
    if (from.first == nullptr) {
        if (!args.accumulate) {
            target.zero_();
        }
        return;
    }
    const at::Tensor source = side_of(args, run, from, run->from);
    if (args.divisor == 1 && !args.accumulate) {
        target.copy_(source);
        return;
    }
    const bool is_wide = source.scalar_type() == at::kDouble || target.scalar_type() == at::kDouble;
    const at::ScalarType wide = is_wide ? at::kDouble : at::kFloat;
    at::Tensor value = source.to(wide);
    value = args.divisor == 1 ? value : value.div(args.divisor);
    target.copy_(args.accumulate ? target.to(wide).add_(value) : value);
}

fc_status accelerator_move(fc_device *device, fc_stream *stream, fc_label label,
                           const fc_move *move)
{
    const Accelerator *self = accelerator(device);
    fc_moves *moves = move->moves;
    if (self->kernels == nullptr) {
        return attempt(label, [&] {
            const c10::StreamGuard guard(torch_stream(stream));
            const at::NoGradGuard no_grad;
            const CopyArgs args = {self->device, move->divisor, move->accumulate};
            fc_host_visit(&moves->plan, move->addresses, copy_run, &args);
        });
    }
    const c10::DeviceGuard guard(self->device);
    fc_cuda_launch launch = {};
    launch.plan = &moves->plan;
    if (moves->runs.defined()) {
        launch.runs = static_cast<const fc_run *>(moves->runs.const_data_ptr());
        launch.stretches = static_cast<const uint32_t *>(moves->stretches.const_data_ptr());
    }
    launch.addresses = move->addresses;
    launch.stream = native_stream(torch_stream(stream));
    if (moves->runs.defined() && std::find(moves->streams.begin(), moves->streams.end(),
                                           torch_stream(stream)) == moves->streams.end()) {
        moves->streams.push_back(torch_stream(stream));
    }
    const bool is_plain = move->divisor == 1 && !move->accumulate;
    const int error = is_plain ? self->kernels->move(&launch)
                               : self->kernels->finish(&launch, move->divisor, move->accumulate);
    return error == 0 ? FC_OK
                      : fc_fail(FC_ERR_SYSTEM, "kernel of '%s' of '%s': %s", label.what, label.unit,
                                self->kernels->error_text(error));
}

// ---- collectives ----

fc_status accelerator_all_gather(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, void *buffer, size_t part_bytes)
{
    const fc_device_caller &caller = accelerator(device)->caller;
    return caller.all_gather(caller.context, comm, stream, label, buffer, part_bytes);
}

fc_status accelerator_reduce_scatter(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                     fc_label label, void *to, const void *from, size_t numel,
                                     fc_dtype dtype)
{
    const fc_device_caller &caller = accelerator(device)->caller;
    return caller.reduce_scatter(caller.context, comm, stream, label, to, from, numel, dtype);
}

fc_status accelerator_all_reduce(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, void *buffer, size_t numel, fc_dtype dtype)
{
    const fc_device_caller &caller = accelerator(device)->caller;
    return caller.all_reduce(caller.context, comm, stream, label, buffer, numel, dtype);
}

fc_status accelerator_all_gather_each(fc_device *device, fc_device_comm *comm, fc_stream *stream,
                                      fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    const fc_device_caller &caller = accelerator(device)->caller;
    return caller.all_gather_each(caller.context, comm, stream, label, gathers, n_gathers);
}

constexpr fc_device_ops accelerator_ops = {
    .name = "accelerator",
    .alloc = accelerator_alloc,
    .free = accelerator_free,
    .event_create = accelerator_event_create,
    .event_destroy = accelerator_event_destroy,
    .record = accelerator_record,
    .wait = accelerator_wait,
    .synchronize = accelerator_synchronize,
    .copy = accelerator_copy,
    .moves_create = accelerator_moves_create,
    .moves_destroy = accelerator_moves_destroy,
    .move = accelerator_move,
    .all_gather = accelerator_all_gather,
    .reduce_scatter = accelerator_reduce_scatter,
    .all_reduce = accelerator_all_reduce,
    .all_gather_each = accelerator_all_gather_each,
};

} // namespace

std::unique_ptr<fc_device, void (*)(fc_device *)>
make_accelerator(c10::Device device, const fc_device_caller &caller, const fc_cuda_kernels *kernels)
{
    auto *made = new Accelerator{
        {&accelerator_ops}, device, caller, c10::impl::VirtualGuardImpl(device.type()), kernels};
    return {made, [](fc_device *d) { delete accelerator(d); }};
}

} // namespace fc
