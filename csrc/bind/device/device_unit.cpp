// Gradients of a unit on a device: where its reductions write.
#include "bind/device/device.h"
#include "bind/fsdp/domain.h"
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace fc {

namespace {

// Parameters that were frozen at set-up have no place in what is staged.
void refuse_frozen(const Unit &unit, const Param &param)
{
    PyErr_Format(PyExc_RuntimeError,
                 "parameter '%s' of FSDP unit '%s' was frozen when this forward began and has a "
                 "gradient now: call requires_grad_(True) before the forward",
                 parameter_name(param).c_str(), unit.name().c_str());
    throw_python();
}

} // namespace

void Unit::submit_device(const Taken &taken, const fc_reduce_options &options)
{
    const fc_layout *layout = fc_unit_layout(shard_);
    const std::vector<at::Tensor> &grads = taken.tensors;
    for (size_t i = 0; i < params_.size(); i++) {
        if (grads[i].defined() && !layout->params[i].trainable) {
            refuse_frozen(*this, params_[i]);
        }
    }
    std::vector<uint64_t> mask(layout->mask_words);
    uint64_t print;
    if (!fc_reduction_announce(reduction_.get(), taken.grads.data(), &options, mask.data(),
                               &print)) {
        device_->post(grads, print, options.divisor, nullptr, false);
        return;
    }
    bool is_first = true, is_ours = grads_share_flat_;
    std::vector<size_t> present;
    for (size_t i = 0; i < params_.size(); i++) {
        if (!has_bit(mask.data(), i)) {
            continue;
        }
        const Param &p = params_[i];
        const at::Tensor &old = p.sharded_tensor().grad();
        is_first = is_first && !old.defined();
        is_ours = is_ours && p.grad.object && old.defined() && old.is_same(p.grad.tensor);
        present.push_back(i);
    }
    if (takes_over(grads, present, options)) {
        take_over(grads, present, options);
        return;
    }
    if (!is_first && !is_ours) {
        add_apart(grads, present, print, options);
        return;
    }
    if (is_first && !can_share_flat()) {
        make_gradients(true);
    }
    device_->post(grads, print, options.divisor, grads_flat_.mutable_data_ptr(), is_ours);
    for (size_t i : present) {
        params_[i].sharded_tensor().mutable_grad() = params_[i].grad.tensor;
    }
    for (size_t i : present) {
        after_write(i, options);
    }
}

// True if the reduction would be a copy, of gradients that nobody else has: of one rank's, as they
// are.
bool Unit::takes_over(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                      const fc_reduce_options &options) const
{
    if (!device_->is_alone() || options.divisor != 1) {
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

void Unit::take_over(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                     const fc_reduce_options &options)
{
    std::vector<at::Tensor> sums, terms;
    for (size_t i : present) {
        Param &p = params_[i];
        if (p.sharded_tensor().grad().defined()) {
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
    for (size_t i : present) {
        after_write(i, options);
    }
}

// Some shards have gradients and others do not, or the user's own.
void Unit::add_apart(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                     uint64_t print, const fc_reduce_options &options)
{
    const fc_layout *layout = fc_unit_layout(shard_);
    const at::Tensor sums = make_grad_buffer(layout->grad_bytes);
    device_->post(grads, print, options.divisor, sums.mutable_data_ptr(), false);
    make_gradients(false);
    at::NoGradGuard no_grad;
    const GradientScope scope(*device_);
    for (size_t i : present) {
        Param &p = params_[i];
        const auto item = static_cast<int64_t>(c10::elementSize(p.grad_type));
        at::Tensor sum = at::empty({0}, sums.options().dtype(p.grad_type));
        sum.set_(sums.storage(), static_cast<int64_t>(layout->params[i].grad_at) / item,
                 p.local_size, p.local_stride);
        if (p.sharded_tensor().grad().defined()) {
            tensor_of(local_gradient(p).get()).add_(sum);
        } else {
            p.grad.local.copy_(sum);
            p.sharded_tensor().mutable_grad() = p.grad.tensor;
        }
    }
    for (size_t i : present) {
        after_write(i, options);
    }
}

} // namespace fc
