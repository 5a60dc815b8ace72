// _C.Streams: the schedule of a root whose units are on a device.
#include "bind/device/device.h"

#include "bind/fsdp/unit.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "device/host/host.h"
#include "engine/gathers.h"
#include "libtorch/versions.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Device.h>

namespace fc {

namespace {

fc_stream *handle_of(const c10::Stream &stream)
{
    return reinterpret_cast<fc_stream *>(const_cast<c10::Stream *>(&stream));
}

// `second` waits for all that is in `first` now.
void chain(const c10::Stream &first, const c10::Stream &second)
{
    if (first != second) {
        c10::Event event(first.device_type());
        event.record(first);
        event.block(second);
    }
}

constexpr size_t n_streams = 4;

c10::Device device_from(PyObject *object)
{
    TORCH_CHECK_TYPE(THPDevice_Check(object), "device must be a torch.device");
    return reinterpret_cast<THPDevice *>(object)->device;
}

} // namespace

// ---- Streams ----

Streams::Streams(Fields &given)
    : device_(device_from(given.object("device").get())), collectives_(device_),
      core_(nullptr, fc_host_device_destroy)
{
    const bool by_torch = given.flag("by_torch");
    const std::string kernels = given.text("kernels");
    given.end();
    const c10::impl::VirtualGuardImpl impl(device_.type());
    for (size_t i = 0; i < n_streams; i++) { // as torch's: all but the last of high priority
        streams_.push_back(device_.is_cpu()
                               ? impl.getStream(device_)
                               : impl.getStreamFromGlobalPool(device_, i + 1 < n_streams));
    }
    const fc_device_caller caller = fc_collectives_caller(collectives_.core());
    if (device_.is_cpu() && !by_torch) {
        fc_device *host = nullptr;
        check(fc_host_device_create(&caller, &host));
        core_.reset(host);
    } else {
        const fc_cuda_kernels *found = nullptr;
        if (!kernels.empty()) {
            check(fc_cuda_open(kernels.c_str(), &found));
        }
        core_ = make_accelerator(device_, caller, found);
    }
    const fc_schedule_options options = {core_.get(),
                                         handle_of(streams_[0]),
                                         handle_of(streams_[1]),
                                         handle_of(streams_[2]),
                                         handle_of(streams_[3]),
                                         1,
                                         0,
                                         0};
    check(fc_schedule_create(&options, Out(schedule_)));
}

fc_stream *Streams::current()
{
    const c10::Stream stream = caller();
    auto known = std::find(computing_.begin(), computing_.end(), stream);
    if (known == computing_.end()) {
        known = computing_.insert(known, stream);
    }
    newest_ = &*known;
    return handle_of(*known);
}

const c10::Stream *Streams::bound_to() const
{
    return reinterpret_cast<const c10::Stream *>(fc_schedule_bound_to(schedule()));
}

c10::Stream Streams::computing() const
{
    return newest_ != nullptr ? *newest_ : caller();
}

void Streams::begin()
{
    check(fc_collectives_watch(collectives_.core()));
    if (const c10::Stream *bound = bound_to()) { // by a forward whose backward is to come
        newest_ = bound;
        await_caller();
    } else {
        current();
    }
    check(fc_schedule_begin(schedule(), handle_of(*newest_), nullptr));
    forward_ = newest_;
}

void Streams::resume()
{
    const c10::Stream *bound = bound_to(), *target = bound != nullptr ? bound : forward_;
    if (target == nullptr || newest_ == target) {
        return;
    }
    chain(*newest_, *target);
    check(fc_schedule_read_shards(schedule(), handle_of(*target)));
    newest_ = target;
}

c10::Stream Streams::caller() const
{
    return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

c10::Stream Streams::show_caller() const
{
    const c10::Stream now = caller();
    chain(computing(), now);
    return now;
}

c10::Stream Streams::await_caller() const
{
    const c10::Stream now = caller();
    chain(now, computing());
    return now;
}

void Streams::hold_copies() const
{
    chain(caller(), copying_in());
}

void Streams::read_shards()
{
    check(fc_schedule_read_shards(schedule(), current()));
}

// ---- DeviceUnit ----

DeviceUnit::DeviceUnit(Streams *streams, fc_unit *shard, fc_unit *replicate, PyObject *options)
    : streams_(streams), layout_(fc_unit_layout(shard)), has_replicas_(replicate != nullptr),
      full_(layout_->n_params), types_(layout_->n_params)
{
    const Collectives &all = streams->collectives();
    Fields fields(options);
    fc_device_comm *shards = all.find(fields.text("group"));
    const char *replicas = fields.text("replicate_group"), *post = fields.text("post_group");
    is_offloaded_ = fields.flag("is_offloaded");
    is_pinned_ = fields.flag("is_pinned");
    why_staged_ = fc_gathers_why_staged(layout_, fc_collectives_has_groups(shards));
    fc_schedule_unit_options plan = {};
    plan.name = fc_unit_name(shard);
    plan.layout = layout_;
    plan.shard_unit = shard;
    plan.replicate_unit = replicate;
    plan.gather = plan.reduce = reduce_ = shards;
    plan.replicas = replicas_ = has_replicas_ ? all.find(replicas) : nullptr;
    plan.is_direct = why_staged_ == nullptr;
    plan.is_offloaded = is_offloaded_;
    plan.post_rank = fields.integer("post_rank");
    plan.n_post_ranks = fields.integer("n_post_ranks");
    plan.post_gather = plan.n_post_ranks > 0 ? all.find(post) : nullptr;
    plan.pre_divisor = plan.divisor = 1; // given with the gradients
    fields.end();
    check(fc_schedule_add(streams->schedule(), &plan, Out(unit_)));
}

void DeviceUnit::show_caller()
{
    const c10::Stream caller = streams_->show_caller();
    if (caller == computing()) {
        return;
    }
    if (user_ && *user_ != caller) {
        chain(*user_, computing());
    }
    user_ = caller;
    is_used_apart_ = true;
}

void DeviceUnit::await_users()
{
    streams_->await_caller();
    if (user_) {
        chain(*user_, computing());
        user_.reset();
    }
}

void DeviceUnit::await_maker(const c10::Stream &maker)
{
    const c10::Stream caller = streams_->caller();
    chain(maker, caller);
    is_used_apart_ = is_used_apart_ || maker != caller || maker != computing();
}

// Its memory goes back to the stream that it was made in, which may not write to it before.
void DeviceUnit::note_read(const at::Tensor &grad) const
{
    const c10::impl::VirtualGuardImpl impl(streams_->device().type());
    for (const c10::Stream &reader : {computing(), impl.getStream(streams_->device())}) {
        impl.recordDataPtrOnStream(grad.storage().data_ptr(), reader);
    }
}

void DeviceUnit::take_from_caller(const Tensors &grads) const
{
    if (streams_->await_caller() == computing() && !is_used_apart_) {
        return;
    }
    for (const at::Tensor &grad : grads) {
        if (grad.defined()) {
            note_read(grad);
        }
    }
}

at::Tensor DeviceUnit::make_buffer(size_t bytes) const
{
    const NoModes no_modes;
    const auto size = static_cast<int64_t>(bytes);
    const at::TensorOptions options = at::dtype(at::kByte);
    if (is_offloaded_) {
        return at::empty({size}, options.pinned_memory(is_pinned_));
    }
    if (!is_alone()) {
        check(fc_schedule_enter_reduce(streams_->schedule()));
    }
    const c10::StreamGuard guard(is_alone() ? streams_->computing() : streams_->reducing());
    const at::Tensor buffer = at::empty({size}, options.device(streams_->device()));
    if (has_replicas_) { // where it is written and read, and may be when it goes
        const c10::impl::VirtualGuardImpl impl(streams_->device().type());
        impl.recordDataPtrOnStream(buffer.storage().data_ptr(), streams_->all_reducing());
    }
    return buffer;
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

// Who adds gradients up multiplies them before by these.
bool DeviceUnit::scale(double in_shards, double in_replicas) const
{
    const bool is_done = fc_collectives_scale(reduce_, in_shards);
    return (replicas_ == nullptr || fc_collectives_scale(replicas_, in_replicas)) && is_done;
}

// Whether sums will come divided: torch's fully_shard has NCCL multiply gradients before it adds
// them up, but for types that overflow.
bool DeviceUnit::scales(const fc_reduce_options &options) const
{
    const int n_shards = layout_->n_ranks;
    const int n_replicas = replicas_ != nullptr ? fc_collectives_n_ranks(replicas_) : 1;
    const bool is_average = options.divisor == static_cast<double>(n_shards) * n_replicas;
    bool may = !options.is_sum && (is_average || n_shards > 1);
    for (size_t i = 0; i < layout_->n_sections; i++) {
        const fc_dtype type = layout_->sections[i].reduce;
        may = may && (type == FC_F32 || type == FC_BF16);
    }
    if (!may) {
        return false;
    }
    const bool is_done =
        is_average ? scale(1.0 / n_shards, 1.0 / n_replicas) : scale(1 / options.divisor, 1);
    if (!is_done) {
        scale(1, 1); // one of the two may have taken it
    }
    return is_done;
}

void DeviceUnit::post(const Tensors &grads, uint64_t present, const fc_reduce_options &options,
                      void *out, bool accumulate)
{
    for (size_t i = 0; i < grads.size(); i++) {
        const fc_param &p = layout_->params[i];
        const bool is_given = grads[i].defined();
        full_[i] = is_given ? grads[i].const_data_ptr() : nullptr;
        types_[i] = is_given ? dtype_of_parts(grads[i].scalar_type()) : p.compute;
    }
    const double divisor = scales(options) ? 1 : options.divisor;
    const double pre_divisor = fc_layout_pre_divisor(layout_, divisor);
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
    const fc_status status = fc_schedule_post_backward(scheduled(), &given, &is_reduced);
    scale(1, 1);
    check(status);
}

// ---- the Python type ----

static PyMethodDef streams_methods[] = {
    function<tells_streams>("tells_handles", METH_STATIC),
    method<[](Streams &self, Fields &given) { self.collectives().connect(given); }>("connect"),
    {}};

int register_streams(PyObject *module)
{
    return add_type<Streams>(module, {.name = "fsdp_c._C.Streams", .methods = streams_methods});
}

} // namespace fc
