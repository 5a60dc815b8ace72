// _C.Streams: the schedule of a root whose units are on a device.
#include "bind/device/device.h"

#include "bind/compat.h"
#include "bind/device/accelerator.h"
#include "bind/fsdp/unit.h"
#include "bind/python/fields.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"
#include "device/host/host.h"
#include "engine/gathers.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>

#include <algorithm>
#include <cmath>

namespace fc {

namespace {

fc_stream *handle_of(const c10::Stream &stream)
{
    return reinterpret_cast<fc_stream *>(const_cast<c10::Stream *>(&stream));
}

constexpr size_t n_streams = 4;

} // namespace

// ---- Streams ----

Streams::Streams(c10::Device device, bool by_torch, const std::string &kernels)
    : device_(device), collectives_(device), core_(nullptr, fc_host_device_destroy)
{
    const c10::impl::VirtualGuardImpl impl(device.type());
    for (size_t i = 0; i < n_streams; i++) { // as torch's: all but the last of high priority
        streams_.push_back(device.is_cpu()
                               ? impl.getStream(device)
                               : impl.getStreamFromGlobalPool(device, i + 1 < n_streams));
    }
    const fc_device_caller caller = fc_collectives_caller(collectives_.core());
    if (device.is_cpu() && !by_torch) {
        fc_device *host = nullptr;
        check(fc_host_device_create(&caller, &host));
        core_.reset(host);
    } else {
        const fc_cuda_kernels *found = nullptr;
        if (!kernels.empty()) {
            check(fc_cuda_open(kernels.c_str(), &found));
        }
        core_ = make_accelerator(device, caller, found);
    }
    const fc_schedule_options options = {core_.get(),
                                         handle_of(streams_[0]),
                                         handle_of(streams_[1]),
                                         handle_of(streams_[2]),
                                         handle_of(streams_[3]),
                                         1,
                                         0,
                                         0};
    check(fc_schedule_create(&options, &schedule_));
}

Streams::~Streams()
{
    fc_schedule_destroy(schedule_);
}

fc_stream *Streams::current()
{
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
    auto known = std::find(computing_.begin(), computing_.end(), stream);
    if (known == computing_.end()) {
        known = computing_.insert(known, stream);
    }
    newest_ = &*known;
    return handle_of(*known);
}

c10::Stream Streams::computing() const
{
    return newest_ != nullptr ? *newest_
                              : c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

void Streams::begin()
{
    check(fc_collectives_watch(collectives_.core()));
    check(fc_schedule_begin(schedule_, current(), nullptr));
    forward_ = newest_;
}

void Streams::resume()
{
    if (forward_ == nullptr || newest_ == forward_) {
        return;
    }
    c10::Event unsharded(device_.type());
    unsharded.record(*newest_);
    unsharded.block(*forward_);
    check(fc_schedule_read_shards(schedule_, handle_of(*forward_)));
    newest_ = forward_;
}

void Streams::read_shards()
{
    check(fc_schedule_read_shards(schedule_, current()));
}

// ---- DeviceUnit ----

namespace {

// float16 overflows where sums are large: a part of the division comes before, as in torch. It is a
// power of two, so a unit's other types lose nothing by it.
double pre_divisor_of(const fc_layout *layout, double divisor)
{
    double factor = 1;
    bool has_f16 = false;
    for (size_t i = 0; i < layout->n_sections; i++) {
        has_f16 = has_f16 || layout->sections[i].reduce == FC_F16;
    }
    while (has_f16 && std::fmod(divisor, factor) == 0 && divisor / factor > factor) {
        factor *= 2;
    }
    return factor;
}

} // namespace

DeviceOptions::DeviceOptions(PyObject *options)
{
    Fields fields(options);
    is_offloaded = fields.flag("is_offloaded");
    is_pinned = fields.flag("is_pinned");
    post_rank = static_cast<int>(fields.size("post_rank"));
    n_post_ranks = static_cast<int>(fields.size("n_post_ranks"));
    post_group = fields.text("post_group");
    fields.end();
}

DeviceUnit::DeviceUnit(Streams *streams, fc_unit *shard, fc_unit *replicate,
                       const DeviceComms &comms, const DeviceOptions &options)
    : streams_(streams), layout_(fc_unit_layout(shard)), has_replicas_(comms.replicas != nullptr),
      why_staged_(fc_gathers_why_staged(layout_, fc_collectives_has_groups(comms.shards))),
      options_(options), full_(layout_->n_params), types_(layout_->n_params)
{
    fc_schedule_unit_options plan = {};
    plan.name = fc_unit_name(shard);
    plan.layout = layout_;
    plan.shard_unit = shard;
    plan.replicate_unit = replicate;
    plan.gather = plan.reduce = comms.shards;
    plan.replicas = comms.replicas;
    plan.is_direct = why_staged_ == nullptr;
    plan.is_offloaded = options.is_offloaded != 0;
    if (options.n_post_ranks > 0) {
        plan.post_rank = options.post_rank;
        plan.n_post_ranks = options.n_post_ranks;
        plan.post_gather = streams->collectives().find(options.post_group);
    }
    plan.pre_divisor = plan.divisor = 1; // given with the gradients
    check(fc_schedule_add(streams->schedule(), &plan, &unit_));
}

DeviceUnit::~DeviceUnit()
{
    fc_schedule_remove(unit_);
}

at::Tensor DeviceUnit::make_buffer(size_t bytes) const
{
    const auto size = static_cast<int64_t>(bytes);
    const at::TensorOptions options = at::dtype(at::kByte);
    if (options_.is_offloaded) {
        return at::empty({size}, options.pinned_memory(options_.is_pinned != 0));
    }
    if (!is_alone()) {
        check(fc_schedule_enter_reduce(streams_->schedule()));
    }
    const c10::StreamGuard guard(is_alone() ? streams_->computing() : streams_->reducing());
    return at::empty({size}, options.device(streams_->device()));
}

void DeviceUnit::await_gradients() const
{
    if (options_.is_offloaded) {
        check(fc_schedule_await_gradients(streams_->schedule()));
    }
}

GradientScope::GradientScope(const DeviceUnit &unit) : guard_(unit.finishing())
{
    unit.await_gradients();
}

void DeviceUnit::set_reduce_group(const std::string &group)
{
    fc_schedule_set_reduce(unit_, streams_->collectives().find(group));
}

bool DeviceUnit::stages_all(const std::vector<Param> &params) const
{
    for (size_t i = 0; i < params.size(); i++) {
        if (params[i].has_grad && !layout_->params[i].trainable &&
            params[i].sharded_tensor().requires_grad()) {
            return false;
        }
    }
    return true;
}

void DeviceUnit::set_prefetch(bool in_backward, const std::vector<DeviceUnit *> &units)
{
    std::vector<fc_schedule_unit *> list;
    for (const DeviceUnit *unit : units) {
        if (unit->streams_ == streams_) {
            list.push_back(unit->unit_);
        }
    }
    check(fc_schedule_set_prefetch(unit_, in_backward, list.data(), list.size()));
}

void DeviceUnit::post(const std::vector<at::Tensor> &grads, uint64_t present, double divisor,
                      void *out, bool accumulate)
{
    for (size_t i = 0; i < grads.size(); i++) {
        const fc_param &p = layout_->params[i];
        const bool is_given = grads[i].defined();
        full_[i] = is_given ? grads[i].const_data_ptr() : nullptr;
        types_[i] = is_given ? dtype_of(grads[i].scalar_type()) : p.compute;
    }
    const double pre_divisor = pre_divisor_of(layout_, divisor);
    const fc_schedule_grads given = {.full = full_.data(),
                                     .types = types_.data(),
                                     .pre_divisor = pre_divisor,
                                     .divisor = divisor / pre_divisor,
                                     .out = out,
                                     .accumulate = accumulate,
                                     .sync = out != nullptr ? FC_SYNC_ALL : FC_SYNC_SCATTER,
                                     .keep_unsharded = true,
                                     .present = present};
    bool is_reduced = false;
    check(fc_schedule_post_backward(unit_, &given, &is_reduced));
}

// ---- the Python type ----

namespace {

PyTypeObject *streams_type = nullptr; // the process's

std::unique_ptr<Streams> make_streams(Fields &given)
{
    const Ref device = given.object("device");
    const bool by_torch = given.flag("by_torch");
    const std::string kernels = given.text("kernels");
    given.end();
    TORCH_CHECK_TYPE(THPDevice_Check(device.get()), "device must be a torch.device");
    return std::make_unique<Streams>(reinterpret_cast<THPDevice *>(device.get())->device, by_torch,
                                     kernels);
}

Ref streams_connect(Streams &self, Fields &given)
{
    const std::string group = given.text("group");
    const Ref nccl = given.object("nccl");
    given.end();
    self.collectives().connect(group, nccl.get());
    return Ref::borrow(Py_None);
}

PyObject *streams_tells_handles(PyObject *, PyObject *)
{
    return PyBool_FromLong(tells_streams());
}

PyMethodDef streams_methods[] = {
    {"tells_handles", streams_tells_handles, METH_NOARGS | METH_STATIC,
     "tells_handles(): whether streams of CUDA can be handed to kernels and to NCCL."},
    method<streams_connect>(
        "connect", "connect(*, group, nccl): who does the collectives of the process group "
                   "of that name, a NcclGroup or, with None, the group itself."),
    {nullptr, nullptr, 0, nullptr}};

const char streams_doc[] =
    "Streams(*, device, by_torch, kernels): the schedule of units on a device.";

} // namespace

Streams *streams_of(PyObject *object)
{
    return &owned_by<Streams>(object, streams_type, "Streams");
}

} // namespace fc

int fc_register_streams(PyObject *module)
{
    return fc::add_owner<fc::Streams, fc::make_streams>(
        module, "fsdp_c._C.Streams",
        {{Py_tp_methods, fc::streams_methods}, {Py_tp_doc, const_cast<char *>(fc::streams_doc)}},
        &fc::streams_type);
}
