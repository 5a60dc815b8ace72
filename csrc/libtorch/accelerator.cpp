// The table of functions of accelerators, over what c10 and ATen offer for all of them.
#include "libtorch/accelerator.h"

#include "device/host/operators.h"
#include "libtorch/types.h"
#include "libtorch/versions.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

struct fc_moves {
    fc_runs plan;                     // owned
    at::Tensor runs, stretches;       // on the device, for kernels
    std::vector<c10::Stream> streams; // that have read them
    ~fc_moves() { fc_runs_clear(&plan); }
};

namespace fc {

namespace {

struct Accelerator : fc_called_device {
    c10::Device device;
    c10::impl::VirtualGuardImpl impl;
    const fc_cuda_kernels *kernels;

    bool has_streams() const { return !device.is_cpu(); }
};

Accelerator *accelerator(fc_device *device)
{
    return static_cast<Accelerator *>(reinterpret_cast<fc_called_device *>(device));
}

// The backend's event, made by its first record.
void *&handle_of(fc_event *event)
{
    return *reinterpret_cast<void **>(event);
}

template <typename Body> fc_status attempt_as(fc_label label, Body &&body)
{
    return attempt(body, "'%s' of '%s': %s", label.what, label.unit);
}

// ---- events ----

fc_status accelerator_event_create(fc_device *, fc_event **out)
{
    *out = reinterpret_cast<fc_event *>(new void *(nullptr));
    return FC_OK;
}

void accelerator_event_destroy(fc_device *device, fc_event *event)
{
    const Accelerator *self = accelerator(device);
    if (event != nullptr) {
        if (handle_of(event) != nullptr) {
            self->impl.destroyEvent(handle_of(event), self->device.index());
        }
        delete &handle_of(event);
    }
}

fc_status accelerator_record(fc_device *device, fc_event *event, fc_stream *stream)
{
    const Accelerator *self = accelerator(device);
    if (!self->has_streams()) {
        return FC_OK;
    }
    return attempt_as({"a stream", "record"}, [&] {
        self->impl.record(&handle_of(event), torch_stream(stream), self->device.index(),
                          c10::EventFlag::PYTORCH_DEFAULT);
    });
}

fc_status accelerator_wait(fc_device *device, fc_stream *stream, fc_event *event)
{
    if (handle_of(event) == nullptr) {
        return FC_OK;
    }
    return attempt_as({"a stream", "wait"}, [&] {
        accelerator(device)->impl.block(handle_of(event), torch_stream(stream));
    });
}

fc_status accelerator_query(fc_device *device, fc_event *event, bool *is_over_out)
{
    return attempt_as({"a stream", "query"}, [&] {
        *is_over_out = accelerator(device)->impl.queryEvent(handle_of(event));
    });
}

fc_status accelerator_block(fc_device *device, fc_event *event)
{
    return attempt_as({"a stream", "synchronize"},
                      [&] { accelerator(device)->impl.synchronizeEvent(handle_of(event)); });
}

fc_status accelerator_synchronize(fc_device *device, fc_event *event)
{
    return handle_of(event) == nullptr
               ? FC_OK
               : fc_called_synchronize(device, event, accelerator_query, accelerator_block);
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
    return attempt_as(label, [&] {
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
    return attempt_as({"a unit", "plan"}, [&] {
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

// ---- a plan's runs by torch's operators ----

struct ByTorch {
    c10::Device device;
    fc_label label;

    at::Tensor tensor(const fc_planes *planes) const
    {
        return memory_at(device, planes->first, planes->sizes, planes->strides,
                         scalar_type_of(planes->dtype));
    }

    at::Tensor bytes(const fc_planes *planes) const
    {
        const auto item = static_cast<int64_t>(fc_dtype_bytes(planes->dtype));
        const int64_t *sizes = planes->sizes, *strides = planes->strides;
        return memory_at(device, planes->first, {sizes[0], sizes[1], sizes[2] * item},
                         {strides[0] * item, strides[1] * item, 1}, at::kByte);
    }

    // Kernels of torch read and write whole elements: others go through memory of their own.
    at::Tensor read(const fc_planes *planes) const
    {
        return planes->is_unaligned ? bytes(planes)
                                          .clone(at::MemoryFormat::Contiguous)
                                          .view(scalar_type_of(planes->dtype))
                                    : tensor(planes);
    }

    void write(const fc_planes *planes, const at::Tensor &value) const
    {
        if (planes->is_unaligned) {
            const at::Tensor rounded = value.to(scalar_type_of(planes->dtype));
            bytes(planes).copy_(rounded.contiguous().view(at::kByte));
        } else {
            tensor(planes).copy_(value);
        }
    }
};

template <typename Body> fc_status on_planes(void *context, Body &&body)
{
    const auto *on = static_cast<const ByTorch *>(context);
    return attempt_as(on->label, [&] { body(*on); });
}

fc_status planes_zero(void *context, const fc_planes *to)
{
    return on_planes(context, [&](const ByTorch &on) {
        (to->is_unaligned ? on.bytes(to) : on.tensor(to)).zero_();
    });
}

fc_status planes_copy(void *context, const fc_planes *to, const fc_planes *from)
{
    return on_planes(context, [&](const ByTorch &on) { on.write(to, on.read(from)); });
}

fc_status planes_finish(void *context, const fc_planes *to, const fc_planes *from, fc_dtype wide,
                        double divisor, bool accumulate)
{
    return on_planes(context, [&](const ByTorch &on) {
        const at::ScalarType type = scalar_type_of(wide);
        at::Tensor value = on.read(from).to(type);
        value = divisor == 1 ? value : value.div(divisor);
        on.write(to, accumulate ? on.read(to).to(type).add_(value) : value);
    });
}

fc_status move_by_torch(const Accelerator *self, fc_stream *stream, fc_label label,
                        const fc_move *move)
{
    ByTorch on = {self->device, label};
    const fc_operators operators = {
        .context = &on, .zero = planes_zero, .copy = planes_copy, .finish = planes_finish};
    fc_status status = FC_OK;
    FC_TRY(attempt_as(label, [&] {
        const c10::StreamGuard guard(torch_stream(stream));
        const at::NoGradGuard no_grad;
        status = fc_operators_move(&move->moves->plan, move->addresses, move->divisor,
                                   move->accumulate, &operators);
    }));
    return status;
}

fc_status accelerator_move(fc_device *device, fc_stream *stream, fc_label label,
                           const fc_move *move)
{
    const Accelerator *self = accelerator(device);
    fc_moves *moves = move->moves;
    if (self->kernels == nullptr) {
        return move_by_torch(self, stream, label, move);
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
    return fc_cuda_move(self->kernels, &launch, move->divisor, move->accumulate, label.what,
                        label.unit);
}

constexpr fc_device_ops accelerator_ops = {
    .name = "accelerator",
    .alloc = fc_called_alloc,
    .free = fc_called_free,
    .event_create = accelerator_event_create,
    .event_destroy = accelerator_event_destroy,
    .record = accelerator_record,
    .wait = accelerator_wait,
    .synchronize = accelerator_synchronize,
    .copy = accelerator_copy,
    .moves_create = accelerator_moves_create,
    .moves_destroy = accelerator_moves_destroy,
    .move = accelerator_move,
    .all_gather = fc_called_all_gather,
    .reduce_scatter = fc_called_reduce_scatter,
    .all_reduce = fc_called_all_reduce,
    .all_gather_each = fc_called_all_gather_each,
};

} // namespace

OwnedDevice make_accelerator(c10::Device device, const fc_device_caller &caller,
                             const fc_cuda_kernels *kernels)
{
    auto *made = new Accelerator{
        {{&accelerator_ops}, caller}, device, c10::impl::VirtualGuardImpl(device.type()), kernels};
    return {&made->base, [](fc_device *d) { delete accelerator(d); }};
}

} // namespace fc
