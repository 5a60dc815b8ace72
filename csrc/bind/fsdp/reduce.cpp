// A unit's gradients are handed to the engine, which says when and where their sums are written.
#include "bind/compat.h"
#include "bind/fsdp/events.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <utility>

namespace fc {

// Who sets `grad_dtype` on a shard after the first forward gets torch's error.
void Unit::check_grad_dtype(const Param &param) const
{
    const auto *meta = torch::autograd::impl::get_autograd_meta(param.sharded_tensor());
    if (meta == nullptr || !meta->grad_dtype_ || *meta->grad_dtype_ == param.grad_type ||
        meta->grad_.defined()) {
        return;
    }
    raise_error(PyExc_RuntimeError,
                "parameter '%s' of FSDP unit '%s': attempting to assign a gradient with dtype "
                "'%s' to a tensor with grad_dtype '%s'. From torch 2.15 on grad_dtype can be set "
                "before the first forward",
                parameter_name(param).c_str(), name().c_str(), c10::toString(param.grad_type),
                c10::toString(*meta->grad_dtype_));
}

void Unit::submit(bool with_unused, const fc_reduce_options &options)
{
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
            taken->grads[i].dtype = dtype_of(grad.scalar_type());
            taken->grads[i].is_exclusive = grad.use_count() == 1 && grad.storage().use_count() == 1;
        }
    }
    if (!any) {
        return;
    }
    Range range("FSDP::post_backward_reduce", this);
    gradients_->submit(std::move(taken), options);
}

void Unit::accumulate()
{
    if (keep_gradients()) {
        fc_reduction_accumulate(reduction());
    }
}

void Unit::inherit(Unit &former)
{
    take_from(former);
    gradients_->inherit(*former.gradients_);
}

void Unit::drop_gradients()
{
    drop();
    gradients_->drop();
    gradients_->drop_partial_sums();
    gradients_->forget_deferred_hooks();
}

bool Unit::is_settled() const
{
    return has_all_gradients() && !has_partial_sums() && fc_unsharding_is_settled(unsharding());
}

} // namespace fc
