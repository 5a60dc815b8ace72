// The engine's sums are written to where the shards' gradients are.
#include "bind/fsdp/events.h"
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/state.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

#include <utility>

namespace fc {

namespace {

template <typename Body> fc_status kept(void *owner, Body &&body)
{
    return fc::kept([&] { body(*static_cast<GroupObject *>(owner)->unit); });
}

fc_status options_of(void *owner, fc_reduce_options *options_out)
{
    return kept(owner, [&](Unit &) {
        *options_out = reduce_options(static_cast<const GroupObject *>(owner));
    });
}

const fc_reduction_ops ops = {
    options_of,
    [](void *owner, void **out) {
        return kept(owner, [&](Unit &unit) { *out = unit.flat_gradients(); });
    },
    [](void *owner, const fc_reduce_options *options) {
        return kept(owner, [&](Unit &unit) { unit.assign_flat(*options); });
    },
    [](void *owner) { return kept(owner, [](Unit &unit) { unit.prepare_gradients(); }); },
    [](void *owner, size_t param, void **out, bool *accumulate) {
        return kept(owner, [&](Unit &unit) { *out = unit.target_of(param, accumulate); });
    },
    [](void *owner, size_t param, const fc_reduce_options *options) {
        return kept(owner, [&](Unit &unit) { unit.assign(param, *options); });
    },
    [](void *memory) { delete static_cast<Taken *>(memory); },
    [](void *owner, bool begins) {
        (void)kept(owner, [&](Unit &unit) { unit.show_wait(begins); });
    },
};

} // namespace

const fc_reduction_ops *reduction_ops()
{
    return &ops;
}

void Unit::show_wait(bool begins)
{
    if (begins) {
        waits_.push_back(std::make_unique<Range>("FSDP::post_backward_rs_wait", this));
    } else {
        waits_.pop_back();
    }
}

void *Unit::flat_gradients()
{
    for (const Param &p : params_) {
        if (p.sharded_tensor().grad().defined()) {
            return nullptr;
        }
    }
    make_gradients(true);
    return grads_flat_.mutable_data_ptr();
}

void Unit::assign_flat(const fc_reduce_options &options)
{
    const fc_layout *layout = fc_unit_layout(shard_);
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
}

void *Unit::target_of(size_t index, bool *accumulate)
{
    Param &p = params_[index];
    const at::Tensor present = p.sharded_tensor().grad();
    const bool is_ours = present.defined() && p.grad.object && present.is_same(p.grad.tensor);
    *accumulate = is_ours;
    if (is_ours || !present.defined()) {
        return p.grad.local.mutable_data_ptr();
    }
    // A gradient that the user put there: add to it as torch would.
    const Ref local = local_gradient(p);
    added_to_ = tensor_of(local.get());
    addend_ = at::empty_strided(p.local_size, p.local_stride, at::dtype(p.grad_type));
    return addend_.mutable_data_ptr();
}

void Unit::assign(size_t index, const fc_reduce_options &options)
{
    Param &p = params_[index];
    if (added_to_.defined()) {
        const at::NoGradGuard no_grad;
        const at::Tensor sum = std::exchange(addend_, at::Tensor());
        std::exchange(added_to_, at::Tensor()).add_(sum);
    } else if (!p.sharded_tensor().grad().defined()) {
        p.sharded_tensor().mutable_grad() = p.grad.tensor;
    }
    after_write(index, options);
}

} // namespace fc
