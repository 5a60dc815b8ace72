// Gradients of a unit on a device: where its reductions write.
#include "bind/device/device.h"

#include <ATen/ops/_foreach_add.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

namespace fc {

void DeviceGradients::submit(std::unique_ptr<Taken> taken, const fc_reduce_options &options)
{
    const Grads &grads = taken->tensors;
    device_->take_from_caller(grads);
    for (size_t i = 0; i < params_.size(); i++) {
        if (grads[i].defined() && !layout_->params[i].trainable) {
            ask_python(Call::refuse_frozen_gradient, params_[i].owner.get());
        }
    }
    std::vector<uint64_t> mask(layout_->mask_words);
    uint64_t print;
    if (!fc_reduction_announce(reduction_, taken->grads.data(), &options, mask.data(), &print)) {
        device_->post(grads, print, options, nullptr, false);
        return;
    }
    Indices present;
    for (size_t i = 0; i < params_.size(); i++) {
        if (has_bit(mask.data(), i)) {
            present.push_back(i);
        }
    }
    place(grads, present, print, options);
    for (size_t i : present) {
        after_write(i, options);
    }
}

void DeviceGradients::place(const Grads &grads, const Indices &present, uint64_t print,
                            const fc_reduce_options &options)
{
    bool is_first = true, is_ours = share_flat_;
    for (size_t i : present) {
        const Param &p = params_[i];
        is_first = is_first && !p.sharded_grad().defined();
        is_ours = is_ours && p.has_own_grad();
    }
    if (takes_over(grads, present, options.divisor)) {
        take_over(grads, present);
        return;
    }
    if (!is_first && !is_ours) {
        add_apart(grads, present, print, options);
        return;
    }
    if (is_first && !can_share_flat()) {
        make(true);
    }
    device_->post(grads, print, options, flat_.mutable_data_ptr(), is_ours);
    for (size_t i : present) {
        params_[i].sharded_tensor().mutable_grad() = params_[i].grad.tensor;
    }
}

void DeviceGradients::run_hooks(const Param &param) const
{
    const GradientScope scope(*device_);
    ShardGradients::run_hooks(param);
}

void DeviceGradients::drop_partial_sums()
{
    fc_schedule_drop_partial_sum(device_->scheduled());
    ShardGradients::drop_partial_sums();
}

void DeviceGradients::inherit(const ShardGradients &former)
{
    if (fc_reduction_has_sums(former.reduction())) { // which lie on the device, too
        const DeviceUnit &device = *static_cast<const DeviceGradients &>(former).device_;
        fc_schedule_move_partial_sum(device.scheduled(), device_->scheduled());
    }
    ShardGradients::inherit(former);
}

void DeviceGradients::release_unused()
{
    if (device_->is_offloaded()) { // memory of the host, which is costly to pin
        return;
    }
    if (share_flat_ ? !can_share_flat() : flat_.defined()) {
        return;
    }
    c10::Storage none;
    for (const Param &p : params_) {
        if (!p.grad.object || !p.grad.is_free() || p.grad.local.storage().nbytes() == 0) {
            continue;
        }
        if (!none) {
            const c10::Device device = p.grad.local.device();
            none = c10::Storage(c10::Storage::use_byte_size_t(), 0, at::DataPtr(nullptr, device),
                                nullptr, false);
        }
        point_to(p.grad.local, none, 0);
    }
    flat_ = at::Tensor();
}

// True if the reduction would be a copy, of gradients that nobody else has: of one rank's, as they
// are.
bool DeviceGradients::takes_over(const Grads &grads, const Indices &present, double divisor) const
{
    if (!device_->is_alone() || divisor != 1) {
        return false;
    }
    return std::all_of(present.begin(), present.end(), [&](size_t i) {
        const Param &p = params_[i];
        const at::Tensor &grad = grads[i];
        return grad.defined() && grad.scalar_type() == p.grad_type &&
               c10::promoteTypes(p.grad_type, p.reduce_type) == p.reduce_type &&
               grad.use_count() == 1 && grad.storage().use_count() == 1 &&
               grad.storage().nbytes() == grad.nbytes() && grad.sizes() == p.local_size &&
               grad.strides() == p.local_stride;
    });
}

void DeviceGradients::take_over(const Grads &grads, const Indices &present)
{
    std::vector<at::Tensor> sums, terms;
    for (size_t i : present) {
        Param &p = params_[i];
        if (p.sharded_grad().defined()) {
            sums.push_back(tensor_of(local_gradient(p).get()));
            terms.push_back(grads[i]);
        } else {
            adopt(p, grads[i]);
        }
    }
    if (!sums.empty()) {
        const at::NoGradGuard no_grad;
        const c10::StreamGuard guard(device_->finishing());
        at::_foreach_add_(sums, terms);
    }
}

// Some shards have gradients and others do not, or the user's own.
void DeviceGradients::add_apart(const Grads &grads, const Indices &present, uint64_t print,
                                const fc_reduce_options &options)
{
    const at::Tensor sums = make_buffer(layout_->grad_bytes);
    device_->post(grads, print, options, sums.mutable_data_ptr(), false);
    make(false);
    at::NoGradGuard no_grad;
    const GradientScope scope(*device_);
    for (size_t i : present) {
        Param &p = params_[i];
        const at::Tensor sum = gradient_in(sums, i);
        if (p.sharded_grad().defined()) {
            tensor_of(local_gradient(p).get()).add_(sum);
        } else {
            p.grad.local.copy_(sum);
            p.sharded_tensor().mutable_grad() = p.grad.tensor;
        }
    }
}

} // namespace fc
