// Gradients that autograd has made: taken from the leaves, or accumulated there for a later
// backward.
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
        checked(PyObject_CallMethod(param.owner.get(), "_refuse_sparse_gradient", nullptr));
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
    has_all_gradients_ = !std::exchange(has_accumulated_, false);
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        at::Tensor &fresh = p.unsharded_tensor.mutable_grad();
        if (!p.has_grad) {
            continue;
        }
        has_all_gradients_ = has_all_gradients_ && (fresh.defined() || !p.is_trained);
        if (p.accumulated.defined() || fresh.defined()) {
            awaits_gradients_ = false;
        }
        if (p.accumulated.defined()) {
            if (fresh.defined()) {
                p.accumulated.add_(fresh);
            }
            grads[i] = std::move(p.accumulated);
            p.accumulated = at::Tensor();
        } else if (fresh.defined()) {
            grads[i] = readable(fresh, p);
        } else if ((with_unused && p.sharded_tensor().requires_grad()) ||
                   (with_partial_sums && fc_reduction_has_sum(reduction_.get(), i))) {
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

void Unit::set_accumulated(size_t param, const at::Tensor &tensor)
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
    p.accumulated = tensor.defined() ? readable(tensor, p) : tensor;
}

void Unit::accumulate()
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
        any = has_accumulated_ = true;
        awaits_gradients_ = false;
        if (p.accumulated.defined()) {
            p.accumulated.add_(fresh);
            fresh = at::Tensor();
        } else if (!holds_gradients_on_leaf && fresh.scalar_type() != p.reduce_type) {
            p.accumulated = readable(fresh, p).to(p.reduce_type);
            fresh = at::Tensor();
        } // else autograd adds the next one to it where it is
    }
    if (any && fc_domain_is_mapped(domain_) && fc_domain_n_ranks(domain_) > 1) {
        fc_exchange_accumulate(shard_);
    }
}

std::vector<at::Tensor> Unit::partial_sums() const
{
    std::vector<at::Tensor> sums(params_.size());
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; i < sums.size(); i++) {
        const fc_param &p = layout->params[i];
        if (const void *sum = fc_reduction_sum(reduction_.get(), i)) {
            sums[i] = at::empty({static_cast<int64_t>(p.chunk_numel)}, scalar_type_of(p.reduce));
            std::memcpy(sums[i].mutable_data_ptr(), sum, sums[i].nbytes());
        }
    }
    return sums;
}

bool Unit::has_accumulated() const
{
    for (const Param &p : params_) {
        if (p.accumulated.defined() || p.unsharded_tensor.grad().defined()) {
            return true;
        }
    }
    return has_partial_sums();
}

void Unit::inherit(Unit &former)
{
    at::NoGradGuard no_grad;
    has_accumulated_ = std::exchange(former.has_accumulated_, false);
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        at::Tensor accumulated = std::move(former.params_[i].accumulated);
        at::Tensor on_leaf = std::move(former.params_[i].unsharded_tensor.mutable_grad());
        if (accumulated.defined()) {
            p.accumulated = accumulated.to(p.reduce_type);
        }
        if (on_leaf.defined()) {
            p.unsharded_tensor.mutable_grad() =
                on_leaf.to(p.leaf_grad_type.value_or(p.unsharded_tensor.scalar_type()));
        }
    }
    if (device_ != nullptr && former.has_partial_sums()) {
        device_->inherit_partial_sum(*former.device_);
    }
    check(fc_reduction_inherit(reduction_.get(), former.reduction_.get()));
}

void Unit::drop_gradients()
{
    for (Param &p : params_) {
        p.accumulated = at::Tensor();
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
    fc_reduction_drop_sums(reduction_.get());
}

} // namespace fc
