// Gradients that autograd has made: taken from the leaves, or accumulated there for a later
// backward.
#include "bind/fsdp/accumulated.h"

#include "bind/python/objects.h"
#include "libtorch/versions.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace fc {

namespace {

// This rank's part of a DTensor's gradient, brought to the placements of the parameter; of another
// tensor around others a plain one.
at::Tensor local_part(const at::Tensor &grad, const Param &param)
{
    const Ref object = checked(THPVariable_Wrap(grad));
    const Ref local = ask_python(Call::local_gradient, param.owner.get(), object.get());
    return tensor_of(local.get());
}

void check_layout(const at::Tensor &grad, const Param &param)
{
    if (grad.layout() != at::kStrided) {
        ask_python(Call::refuse_sparse_gradient, param.owner.get());
    }
}

// Views that show their memory negated or conjugated: what autograd makes of complex numbers.
at::Tensor with_own_values(const at::Tensor &grad)
{
    return grad.is_conj() || grad.is_neg() ? grad.resolve_conj().resolve_neg() : grad;
}

// A gradient that the core can read: dense, in memory as its parameter is, and as it is there.
at::Tensor readable(const at::Tensor &given, const Param &param)
{
    check_layout(given, param);
    const at::Tensor grad =
        with_own_values(param.is_parallel || param.is_wrapped ? local_part(given, param) : given);
    const at::Tensor &full = param.unsharded_local();
    if (full.is_contiguous()) {
        return grad.contiguous();
    }
    if (grad.strides() == full.strides()) {
        return grad;
    }
    return at::empty_strided(full.sizes(), full.strides(), grad.options()).copy_(grad);
}

at::Tensor zeros_for(const Param &param)
{
    const at::Tensor &full = param.unsharded_local();
    if (!param.is_wrapped) {
        return at::zeros_like(full);
    }
    return at::zeros(full.sizes(), at::dtype(full.scalar_type()).device(full.device()));
}

// A gradient that others will be added to: a DTensor stays what it is, so that what ranks of its
// mesh have is brought together once.
at::Tensor addable(const at::Tensor &grad, const Param &param)
{
    if (!param.is_parallel) {
        return readable(grad, param);
    }
    check_layout(grad, param);
    return grad;
}

} // namespace

Accumulated::Accumulated(std::vector<Param> &params) : whole_(params)
{
    for (const Param &p : params) {
        has_widened_ = has_widened_ || p.is_widened;
    }
}

Tensors Accumulated::take_gradients(bool with_unused, const fc_reduction *sums)
{
    Tensors grads(whole_.size());
    at::NoGradGuard no_grad;
    has_all_ = !std::exchange(has_kept_, false);
    has_absent_ = false;
    for (size_t i = 0; i < whole_.size(); i++) {
        Param &p = whole_[i];
        at::Tensor &fresh = p.unsharded_tensor.mutable_grad();
        if (!p.has_grad) {
            continue;
        }
        has_all_ = has_all_ && (fresh.defined() || !p.is_trained);
        if (p.accumulated.defined() || fresh.defined()) {
            awaits_ = false;
        }
        if (p.accumulated.defined()) {
            if (fresh.defined()) {
                p.accumulated.add_(fresh);
            }
            grads[i] = p.is_parallel ? readable(p.accumulated, p) : std::move(p.accumulated);
            p.accumulated = at::Tensor();
        } else if (fresh.defined()) {
            grads[i] = readable(fresh, p);
        } else if ((with_unused && p.sharded_tensor().requires_grad()) ||
                   (sums != nullptr && fc_reduction_has_sum(sums, i))) {
            grads[i] = zeros_for(p);
        }
        p.is_absent = !grads[i].defined() && !p.unsharded_tensor.requires_grad() && !p.was_kept;
        has_absent_ = has_absent_ || p.is_absent;
        p.was_kept = false;
        if (p.copies > 1 && grads[i].defined()) {
            grads[i] = grads[i].expand({p.copies}).contiguous(); // every rank gets all of it
        }
        fresh = at::Tensor();
    }
    return grads;
}

void Accumulated::defer_upcasts(bool reduces)
{
    for (size_t i = 0; has_widened_ && i < whole_.size(); i++) {
        const at::Tensor &unsharded = whole_[i].unsharded_tensor;
        if (whole_[i].is_widened && unsharded.requires_grad() &&
            (reduces || unsharded.grad().defined())) {
            unsharded.set_grad_dtype(std::nullopt);
        }
    }
}

void Accumulated::end_deferral()
{
    for (size_t i = 0; has_widened_ && i < whole_.size(); i++) {
        const Param &p = whole_[i];
        if (p.is_widened && p.unsharded_tensor.requires_grad()) {
            at::Tensor &grad = p.unsharded_tensor.mutable_grad();
            if (grad.defined() && grad.scalar_type() != *p.leaf_grad_type) {
                grad = grad.detach().to(*p.leaf_grad_type);
            }
            p.unsharded_tensor.set_grad_dtype(p.leaf_grad_type);
        }
    }
}

void Accumulated::set_accumulated(size_t param, const at::Tensor &tensor)
{
    Param &p = whole_[param];
    if (tensor.defined() &&
        (tensor.sizes() != p.unsharded_tensor.sizes() || tensor.scalar_type() != p.reduce_type)) {
        ask_python(Call::refuse_accumulated, p.owner.get(),
                   to_python(c10::toString(p.reduce_type)).get());
    }
    p.accumulated = tensor.defined() ? addable(tensor, p) : tensor;
}

bool Accumulated::keep_gradients()
{
    bool any = false;
    at::NoGradGuard no_grad;
    has_all_ = true;
    for (Param &p : whole_) {
        at::Tensor &fresh = p.unsharded_tensor.mutable_grad();
        p.was_kept = p.was_kept || p.unsharded_tensor.requires_grad();
        if (!fresh.defined()) {
            has_all_ = has_all_ && !(p.has_grad && p.is_trained);
            continue;
        }
        any = has_kept_ = true;
        awaits_ = false;
        if (p.accumulated.defined()) {
            p.accumulated.add_(fresh);
            fresh = at::Tensor();
        } else if (!holds_gradients_on_leaf && fresh.scalar_type() != p.reduce_type) {
            p.accumulated = addable(fresh, p).to(p.reduce_type);
            fresh = at::Tensor();
        } // else autograd adds the next one to it where it is
    }
    return any;
}

// A unit that is not used keeps what its last submission said, and its unsharded parameters do.
size_t Accumulated::find_frozen(size_t from) const
{
    size_t i = has_absent_ ? from : whole_.size();
    while (i < whole_.size() && !(whole_[i].is_absent && !whole_[i].is_trained &&
                                  !whole_[i].sharded_tensor().requires_grad())) {
        i++;
    }
    return i;
}

bool Accumulated::has_gradients() const
{
    return std::any_of(whole_.begin(), whole_.end(), [](const Param &p) {
        return p.accumulated.defined() || p.unsharded_tensor.grad().defined();
    });
}

void Accumulated::take_from(Accumulated &former)
{
    at::NoGradGuard no_grad;
    has_kept_ = std::exchange(former.has_kept_, false);
    for (size_t i = 0; i < whole_.size(); i++) {
        Param &p = whole_[i];
        at::Tensor accumulated = std::move(former.whole_[i].accumulated);
        at::Tensor on_leaf = std::move(former.whole_[i].unsharded_tensor.mutable_grad());
        if (accumulated.defined()) {
            p.accumulated = accumulated.to(p.reduce_type);
        }
        if (on_leaf.defined()) {
            p.unsharded_tensor.mutable_grad() =
                on_leaf.to(p.leaf_grad_type.value_or(p.unsharded_tensor.scalar_type()));
        }
    }
}

void Accumulated::drop()
{
    has_kept_ = false;
    for (Param &p : whole_) {
        p.accumulated = at::Tensor();
        p.unsharded_tensor.mutable_grad() = at::Tensor();
    }
    end_deferral();
}

} // namespace fc
