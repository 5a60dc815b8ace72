// A unit: its parts, made from what Python has decided; what opens and ends a use of its
// parameters, and what hands in its gradients.
#include "bind/fsdp/unit.h"

#include "bind/fsdp/events.h"
#include "bind/python/objects.h"
#include "libtorch/versions.h"

#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

namespace fc {

UnitParts::UnitParts(Fields &given)
    : domain(given.object("domain")), replicate(given.object("replicate")),
      smaller(given.object("smaller")), index(given.size("index")),
      post_mesh(given.object("post_mesh")), params(given.list("params")),
      flat(given.object("flat")), on_device(given.object("on_device"))
{
    given.end();
}

fc_unit *UnitParts::in(const Ref &of) const
{
    return of.get() == Py_None ? nullptr : fc_domain_unit(domain_of(of.get()), index);
}

// Of a shard's storage, as set-up leaves it: the local tensor, what that was detached from, the
// flat one that torch keeps, and what that is a view of.
static constexpr size_t own_uses_of_shards = 4;

Unit::Unit(const UnitParts &parts, const fc_updates *updates)
    : Parameters(parts.in(parts.domain), parts.params.get(), tensor_of(parts.flat.get())),
      Accumulated(params_), UnitGraph(shard_, params_, updates),
      domains_{parts.domain, parts.replicate, parts.smaller}, post_mesh_(parts.post_mesh),
      domain_(fc_unit_domain(shard_)), replicate_domain_(nullptr)
{
    fc_unit *replicate = parts.in(parts.replicate);
    replicate_domain_ = replicate != nullptr ? fc_unit_domain(replicate) : nullptr;
    finish_copies();
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        if (fc_unit_layout(shard_)->params[i].is_aliased) {
            p.storage = fc_unit_shard_storage(shard_, i);
            const c10::Storage &storage = p.local.storage();
            move_to(storage.unsafeGetStorageImpl(), p.storage, fc_unit_region(shard_),
                    storage.use_count() > own_uses_of_shards);
        }
    }
    if (is_extended(fc_unit_layout(shard_))) {
        extended_ = std::make_unique<Extended>(*this, parts.params.get());
    }
    check(fc_reduction_create(shard_, replicate, slots(), &reduction_ops, Out(reduction_)));
    const fc_unsharding_options options = make_device(parts);
    check_raised(fc_unsharding_create(&options, Out(unsharding_)));
    set_unsharding(unsharding());
    make_gradients();
    set_says_graph(fc_unsharding_makes_copies(unsharding()));
    withhold(false);
    hide(false);
}

// What the unit's parameters are unsharded with; on a device a unit there is made first.
fc_unsharding_options Unit::make_device(const UnitParts &parts)
{
    fc_unsharding_options made = {};
    made.unit = shard_;
    made.sliced = parts.in(parts.smaller);
    made.slots = slots();
    made.traffic = fc_reduction_traffic(reduction_.get());
    made.ops = unsharding_ops(extended_.get());
    made.owner = this;
    if (Streams *streams = domain_streams(parts.domain.get())) {
        device_ = std::make_unique<DeviceUnit>(streams, shard_, parts.in(parts.replicate),
                                               parts.on_device.get());
        made.schedule = streams->schedule();
        made.on_device = device_->scheduled();
        made.has_all = device_->has_all();
    }
    return made;
}

void Unit::make_gradients()
{
    const fc_layout *layout = fc_unit_layout(shard_);
    if (device_ != nullptr) {
        gradients_ =
            std::make_unique<DeviceGradients>(params_, layout, reduction_.get(), device_.get());
    } else {
        gradients_ = std::make_unique<ShardGradients>(params_, layout, reduction_.get());
    }
}

Unit::~Unit()
{
    fc_unsharding_drop_ahead(unsharding());
    end_graph();
    forget_slices();
    unsharding_.reset();
}

void Unit::unshard_private()
{
    // What moves nothing has no range: a unit on one rank, and a second call before the wait.
    const bool is_news = fc_unsharding_moves(unsharding()) &&
                         fc_unsharding_is_away(fc_unsharding_state_of(unsharding()));
    Range range(is_news ? "FSDP::all_gather" : nullptr, this);
    check_raised(fc_unsharding_gather(unsharding()));
}

void Unit::unshard()
{
    note_updates();
    bool is_shown;
    check_raised(fc_unsharding_begin_use(unsharding(), &is_shown));
    if (!is_shown) {
        unshard_private();
        Range range(fc_unsharding_moves(unsharding()) ? "FSDP::all_gather_copy_out" : nullptr,
                    this);
        check_raised(fc_unsharding_show(unsharding()));
    }
    show_caller();
}

// Before what is unsharded goes, and before gradients that were added up are taken from the
// parameters.
void Unit::await_users()
{
    if (device_ == nullptr) {
        return;
    }
    for (const Param &p : params_) { // by autograd, in the stream that its node was made in
        if (p.unsharded_tensor.grad().defined()) {
            const NodePtr node =
                torch::autograd::impl::try_get_grad_accumulator(p.unsharded_tensor);
            if (node != nullptr && node->stream()) {
                device_->await_maker(*node->stream());
            }
        }
    }
    device_->await_users();
    for (size_t i = 0; device_->is_used_apart() && i < params_.size(); i++) {
        const at::Tensor &grad = params_[i].unsharded_tensor.grad();
        if (grad.defined() && grad.has_storage()) { // not a DTensor
            device_->note_read(grad);
        }
    }
}

// ---- shards of one rank alone on a device: they lie as in the unsharded buffer, which they are
// ----

// Whole storages of the type in which they are used.
bool Parameters::can_reside() const
{
    const fc_layout *layout = fc_unit_layout(shard_);
    std::vector<const void *> seen;
    for (size_t i = 0; i < params_.size(); i++) {
        const fc_param &p = layout->params[i];
        const at::Tensor &local = params_[i].local;
        const void *data = local.storage().data();
        if (p.orig != p.compute || local.storage_offset() != 0 ||
            local.storage().nbytes() != p.chunk_numel * fc_dtype_bytes(p.orig) ||
            std::find(seen.begin(), seen.end(), data) != seen.end()) {
            return false;
        }
        if (data != nullptr) {
            seen.push_back(data);
        }
    }
    return true;
}

void *Unit::take_residence()
{
    const NoModes no_modes;
    const c10::InferenceMode normal(false);
    const c10::StreamGuard guard(device_->computing());
    const fc_layout *layout = fc_unit_layout(shard_);
    const at::Tensor home = at::empty({static_cast<int64_t>(layout->full_bytes)},
                                      at::dtype(at::kByte).device(params_.front().local.device()));
    finish_copies();
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        move_to(p.local.storage().unsafeGetStorageImpl(), home, layout->params[i].full_at);
        p.storage = p.local.storage().mutable_data();
    }
    return home.mutable_data_ptr();
}

// ---- gradients are handed to the engine, which says when and where their sums are written ----

// Who sets `grad_dtype` on a shard after the first forward gets torch's error.
static void check_grad_dtype(const Param &param)
{
    const auto *meta = torch::autograd::impl::get_autograd_meta(param.sharded_tensor());
    if (meta == nullptr || !meta->grad_dtype_ || *meta->grad_dtype_ == param.grad_type ||
        meta->grad_.defined()) {
        return;
    }
    ask_python(Call::refuse_grad_dtype, param.owner.get(),
               to_python(c10::toString(param.grad_type)).get(),
               to_python(c10::toString(*meta->grad_dtype_)).get());
}

void Unit::submit(bool with_unused, const fc_reduce_options &options)
{
    await_users();
    // A submission that waits for the peers takes the partial sums along.
    const bool takes_sums =
        flushes_partial_sums && options.all_reduce && !fc_reduction_is_submitted(reduction());
    auto taken = std::make_unique<Taken>();
    taken->tensors = take_gradients(with_unused, takes_sums ? reduction() : nullptr);
    taken->grads.resize(params_.size());
    bool any = false;
    for (size_t i = 0; i < params_.size(); i++) {
        at::Tensor &grad = taken->tensors[i];
        taken->grads[i].is_wanted = params_[i].unsharded_tensor.requires_grad();
        if (grad.defined()) {
            any = true;
            check_grad_dtype(params_[i]);
            taken->grads[i].data = grad.const_data_ptr();
            if (taken->grads[i].data == nullptr && grad.numel() > 0) { // a FakeTensor's is nowhere
                const NoModes no_modes;
                grad = at::zeros(grad.sizes(),
                                 params_[i].unsharded_tensor.options().dtype(grad.scalar_type()));
                taken->grads[i].data = grad.const_data_ptr();
            }
            taken->grads[i].dtype = dtype_of_parts(grad.scalar_type());
            taken->grads[i].is_exclusive = grad.use_count() == 1 && grad.storage().use_count() == 1;
        }
    }
    if (!any) {
        return;
    }
    Range range("FSDP::post_backward_reduce", this);
    gradients_->submit(std::move(taken), options);
}

void Unit::drop_gradients()
{
    drop();
    gradients_->drop();
    gradients_->drop_partial_sums();
    gradients_->forget_deferred_hooks();
}

} // namespace fc
