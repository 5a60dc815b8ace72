// Gradients that autograd has made: taken from the leaves, or held there for a later backward.
#include "bind/compat.h"
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

namespace fc {

namespace {

// A gradient that the core can read: dense, real floating point, on the CPU, in memory as its
// parameter is.
at::Tensor readable(const at::Tensor &grad, const Param &param)
{
    if (grad.layout() != at::kStrided) {
        PyErr_Format(
            PyExc_ValueError,
            "the gradient of parameter '%s' is sparse, which cannot be reduced: build the module "
            "with sparse=False",
            parameter_name(param).c_str());
        throw_python();
    }
    const at::Tensor &full = param.unsharded_tensor;
    if (full.is_contiguous()) {
        return grad.contiguous();
    }
    if (grad.strides() == full.strides()) {
        return grad;
    }
    return at::empty_strided(full.sizes(), full.strides(), grad.options()).copy_(grad);
}

} // namespace

std::vector<at::Tensor> Unit::take_gradients(bool with_unused, bool with_partial_sums)
{
    std::vector<at::Tensor> grads(params_.size());
    at::NoGradGuard no_grad;
    has_all_gradients_ = !std::exchange(has_held_, false);
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        at::Tensor &fresh = p.unsharded_tensor.mutable_grad();
        if (!p.has_grad) {
            continue;
        }
        has_all_gradients_ = has_all_gradients_ && (fresh.defined() || !p.is_trained);
        if (p.held.defined() || fresh.defined()) {
            awaits_gradients_ = false;
        }
        if (p.held.defined()) {
            if (fresh.defined()) {
                p.held.add_(fresh);
            }
            grads[i] = std::move(p.held);
            p.held = at::Tensor();
        } else if (fresh.defined()) {
            grads[i] = readable(fresh, p);
        } else if ((with_unused && p.sharded_tensor().requires_grad()) ||
                   (with_partial_sums && has_bit(partial_mask_.data(), i))) {
            grads[i] = at::zeros_like(p.unsharded_tensor);
        }
        if (p.copies > 1 && grads[i].defined()) {
            grads[i] = grads[i].expand({p.copies}).contiguous(); // every rank gets all of it
        }
        fresh = at::Tensor();
    }
    return grads;
}

void Unit::defer_upcasts(bool reduces)
{
    for (size_t i = 0; has_widened_ && i < params_.size(); i++) {
        const at::Tensor &unsharded = params_[i].unsharded_tensor;
        if (params_[i].is_widened && unsharded.requires_grad() &&
            (reduces || unsharded.grad().defined())) {
            unsharded.set_grad_dtype(std::nullopt);
        }
    }
}

void Unit::end_deferral()
{
    for (size_t i = 0; has_widened_ && i < params_.size(); i++) {
        const Param &p = params_[i];
        if (p.is_widened && p.unsharded_tensor.requires_grad()) {
            at::Tensor &grad = p.unsharded_tensor.mutable_grad();
            if (grad.defined() && grad.scalar_type() != *p.leaf_grad_type) {
                grad = grad.detach().to(*p.leaf_grad_type);
            }
            p.unsharded_tensor.set_grad_dtype(p.leaf_grad_type);
        }
    }
}

void Unit::set_held(size_t param, const at::Tensor &tensor)
{
    Param &p = params_[param];
    if (tensor.defined() &&
        (tensor.sizes() != p.unsharded_tensor.sizes() || tensor.scalar_type() != p.reduce_type)) {
        PyErr_Format(PyExc_ValueError,
                     "an accumulated gradient of parameter '%s' must have the size of the whole "
                     "parameter and the dtype %s",
                     parameter_name(p).c_str(), c10::toString(p.reduce_type));
        throw_python();
    }
    p.held = tensor.defined() ? readable(tensor, p) : tensor;
}

void Unit::hold()
{
    bool any = false;
    at::NoGradGuard no_grad;
    has_all_gradients_ = true;
    for (Param &p : params_) {
        at::Tensor &fresh = p.unsharded_tensor.mutable_grad();
        if (!fresh.defined()) {
            has_all_gradients_ = has_all_gradients_ && !(p.has_grad && p.is_trained);
            continue;
        }
        any = has_held_ = true;
        awaits_gradients_ = false;
        if (p.held.defined()) {
            p.held.add_(fresh);
            fresh = at::Tensor();
        } else if (!holds_gradients_on_leaf && fresh.scalar_type() != p.reduce_type) {
            p.held = readable(fresh, p).to(p.reduce_type);
            fresh = at::Tensor();
        } // else autograd adds the next one to it where it is
    }
    if (any && fc_domain_is_mapped(domain_) && fc_domain_n_ranks(domain_) > 1) {
        fc_exchange_hold(shard_);
    }
}

bool Unit::has_partial_sums() const
{
    return replicate_ != nullptr && std::any_of(partial_mask_.begin(), partial_mask_.end(),
                                                [](uint64_t word) { return word != 0; });
}

std::vector<at::Tensor> Unit::partial_sums() const
{
    std::vector<at::Tensor> sums(params_.size());
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; i < sums.size() && device_ == nullptr; i++) {
        const fc_param &p = layout->params[i];
        if (has_bit(partial_mask_.data(), i)) {
            sums[i] = at::empty({static_cast<int64_t>(p.chunk_numel)}, scalar_type_of(p.reduce));
            std::memcpy(sums[i].mutable_data_ptr(), partial_.data() + p.part_at, sums[i].nbytes());
        }
    }
    return sums;
}

void Unit::release_sums()
{
    if (!has_partial_sums()) {
        std::vector<char>().swap(partial_);
    }
}

bool Unit::holds_gradients() const
{
    for (const Param &p : params_) {
        if (p.held.defined() || p.unsharded_tensor.grad().defined()) {
            return true;
        }
    }
    return has_partial_sums();
}

void Unit::inherit(Unit &former)
{
    at::NoGradGuard no_grad;
    has_held_ = std::exchange(former.has_held_, false);
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        at::Tensor held = std::move(former.params_[i].held);
        at::Tensor on_leaf = std::move(former.params_[i].unsharded_tensor.mutable_grad());
        if (held.defined()) {
            p.held = held.to(p.reduce_type);
        }
        if (on_leaf.defined()) {
            p.unsharded_tensor.mutable_grad() =
                on_leaf.to(p.leaf_grad_type.value_or(p.unsharded_tensor.scalar_type()));
        }
    }
    if (former.has_partial_sums()) {
        inherit_partial_sums(former);
    }
}

void Unit::inherit_partial_sums(const Unit &former)
{
    if (device_ != nullptr) {
        device_->inherit_partial_sum(*former.device_);
        partial_mask_ = former.partial_mask_;
        return;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    const std::vector<at::Tensor> sums = former.partial_sums();
    partial_.resize(layout->part_bytes);
    for (size_t i = 0; i < sums.size(); i++) {
        if (sums[i].defined()) {
            const at::Tensor sum = sums[i].to(params_[i].reduce_type);
            std::memcpy(partial_.data() + layout->params[i].part_at, sum.const_data_ptr(),
                        sum.nbytes());
            set_bit(partial_mask_, i);
        }
    }
}

void Unit::drop_gradients()
{
    for (Param &p : params_) {
        p.held = at::Tensor();
        p.unsharded_tensor.mutable_grad() = at::Tensor();
    }
    end_deferral();
    if (device_ != nullptr) {
        device_->drop_gradients();
    }
    drop_partial_sums();
    deferred_hooks_.clear();
}

void Unit::drop_partial_sums()
{
    if (device_ != nullptr) {
        device_->drop_partial_sum();
    }
    std::fill(partial_mask_.begin(), partial_mask_.end(), 0);
    forget_posts();
}

} // namespace fc
