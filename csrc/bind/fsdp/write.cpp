// Sums of gradients are written to where the shards' gradients are.
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"
#include "engine/exchange.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

namespace fc {

// Lets `reduce(memory, accumulate)` write one parameter's gradient where it belongs.
template <typename Reduce>
void Unit::write_gradient(size_t index, const ReduceOptions &options, const Reduce &reduce)
{
    Param &p = params_[index];
    const at::Tensor present = p.sharded_tensor().grad();
    if (!present.defined()) {
        reduce(p.grad.local.mutable_data_ptr(), false);
        p.sharded_tensor().mutable_grad() = p.grad.tensor;
    } else if (p.grad.object && present.is_same(p.grad.tensor)) {
        reduce(p.grad.local.mutable_data_ptr(), true);
    } else {
        // A gradient that the user put there: add to it as torch would.
        at::NoGradGuard no_grad;
        const Ref local = local_gradient(p);
        at::Tensor sum = at::empty_strided(p.local_size, p.local_stride, at::dtype(p.grad_type));
        reduce(sum.mutable_data_ptr(), false);
        tensor_of(local.get()).add_(sum);
    }
    after_write(index, options);
}

// The gradients of one rank.
void Unit::write_own(const std::vector<at::Tensor> &grads, const ReduceOptions &options)
{
    make_gradients(false);
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            const fc_dtype from = dtype_of(grads[i].scalar_type());
            const fc_dtype to = dtype_of(params_[i].grad_type);
            write_gradient(i, options, [&](void *dst, bool accumulate) {
                fc_reduce_own(grads[i].const_data_ptr(), from, dst, to,
                              static_cast<size_t>(grads[i].numel()), options.divisor, accumulate);
            });
        }
    }
}

// The common case: all gradients are None, all ranks used all parameters. One kernel call.
bool Unit::write_all_gradients(fc_unit *lane, const std::vector<fc_source> &sources,
                               const ReduceOptions &options)
{
    const fc_layout *layout = fc_unit_layout(lane);
    for (const Param &p : params_) {
        if (p.sharded_tensor().grad().defined()) {
            return false;
        }
    }
    if (!layout->is_uniform) {
        return false;
    }
    make_gradients(true);
    if (!fc_unit_reduce_all(lane, sources.data(), static_cast<int>(sources.size()),
                            grads_flat_.mutable_data_ptr(), options.divisor)) {
        return false;
    }
    for (size_t i = 0; i < params_.size(); i++) {
        if (layout->params[i].has_grad && layout->params[i].trainable) {
            params_[i].sharded_tensor().mutable_grad() = params_[i].grad.tensor;
        }
    }
    for (size_t i = 0; i < params_.size(); i++) {
        if (layout->params[i].has_grad && layout->params[i].trainable) {
            after_write(i, options);
        }
    }
    return true;
}

void Unit::write_gradients(fc_unit *lane, const std::vector<fc_source> &sources,
                           const ReduceOptions &options)
{
    if (write_all_gradients(lane, sources, options)) {
        return;
    }
    make_gradients(false);
    const fc_layout *layout = fc_unit_layout(lane);
    for (size_t i = 0; i < params_.size(); i++) {
        const fc_dtype to = dtype_of(params_[i].grad_type);
        bool used = false;
        for (const fc_source &source : sources) {
            used = used || (source.part != nullptr && has_bit(source.mask, i));
        }
        if (used && layout->params[i].has_grad) {
            write_gradient(i, options, [&](void *dst, bool accumulate) {
                fc_unit_reduce(lane, sources.data(), static_cast<int>(sources.size()), i, dst, to,
                               options.divisor, accumulate);
            });
        }
    }
}

} // namespace fc
