// The gradients of shards: their memory, their DTensors and the hooks that look at them.
#include "bind/fsdp/gradients.h"

#include "base/alloc.h"
#include "bind/python/calls.h"
#include "bind/tensor/tensors.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

namespace fc {

std::string parameter_name(const Param &param)
{
    Ref fqn = Ref::take(
        guarded([&] { return ask_python(Call::parameter_name, param.owner.get()).release(); }));
    const char *text = fqn && PyUnicode_Check(fqn.get()) ? PyUnicode_AsUTF8(fqn.get()) : nullptr;
    PyErr_Clear();
    return text != nullptr ? text : "?";
}

Ref local_gradient(const Param &param)
{
    const Ref object = checked(THPVariable_Wrap(param.sharded_tensor().grad()));
    Ref local = Ref::take(PyObject_GetAttr(object.get(), name_of(Attribute::local_tensor)));
    if (!local) {
        PyErr_Clear();
        PyErr_Format(PyExc_AssertionError,
                     "expected the gradient of sharded parameter '%s' to be DTensor, got a "
                     "plain tensor: set it to None, or to a DTensor placed as its parameter",
                     parameter_name(param).c_str());
        throw_python();
    }
    return local;
}

namespace {

// Bytes in pages of their own. Gradients live long among autograd's short-lived large tensors: on
// the heap they would pin the holes between those.
at::Tensor page_buffer(size_t bytes)
{
    void *memory = fc_pages_alloc(FC_FOR_GRADIENTS, bytes);
    if (memory == nullptr) {
        PyErr_Format(PyExc_MemoryError, "%zu bytes for sharded gradients", bytes);
        throw_python();
    }
    return at::from_blob(
        memory, {static_cast<int64_t>(bytes)},
        [bytes](void *p) { fc_pages_free(FC_FOR_GRADIENTS, p, bytes); }, at::dtype(at::kByte));
}

} // namespace

bool Gradient::is_free() const
{
    return Py_REFCNT(object.get()) == object_refs && Py_REFCNT(local_object.get()) == local_refs &&
           tensor.use_count() == tensor_uses && local.use_count() == local_uses;
}

at::Tensor Unit::make_grad_buffer(size_t bytes) const
{
    return device_ != nullptr ? device_->make_buffer(bytes) : page_buffer(bytes);
}

bool Unit::can_share_flat() const
{
    if (!grads_share_flat_ || !grads_flat_.defined() ||
        grads_flat_.storage().use_count() != flat_uses_) {
        return false;
    }
    for (const Param &p : params_) {
        if (p.grad.object && !p.grad.is_free()) {
            return false;
        }
    }
    return true;
}

namespace {

int64_t grad_at(const fc_layout &layout, size_t i) // in elements
{
    const fc_param &p = layout.params[i];
    return static_cast<int64_t>(p.grad_at / fc_dtype_bytes(p.grad));
}

} // namespace

// The DTensor of a shard's gradient, and what tells later whether somebody keeps it.
void Unit::make_gradient(Param &param, at::Tensor local)
{
    Gradient g;
    g.local_object = checked(THPVariable_Wrap(local));
    g.object = ask_python(Call::make_sharded_gradient, param.owner.get(), g.local_object.get());
    g.local = std::move(local);
    g.tensor = tensor_of(g.object.get());
    g.object_refs = static_cast<uint32_t>(Py_REFCNT(g.object.get()));
    g.local_refs = static_cast<uint32_t>(Py_REFCNT(g.local_object.get()));
    g.tensor_uses = static_cast<uint32_t>(g.tensor.use_count());
    g.local_uses = static_cast<uint32_t>(g.local.use_count());
    param.grad = std::move(g);
}

// A gradient of autograd's becomes the shard's.
void Unit::adopt(Param &param, const at::Tensor &grad)
{
    if (param.grad.object && param.grad.is_free()) {
        point_to(param.grad.local, grad.storage(), grad.storage_offset());
    } else {
        const at::NoGradGuard no_grad;
        at::Tensor local = at::empty({0}, grad.options());
        local.set_(grad.storage(), grad.storage_offset(), param.local_size, param.local_stride);
        make_gradient(param, std::move(local));
    }
    grads_flat_ = at::Tensor();
    grads_share_flat_ = false;
    param.sharded_tensor().mutable_grad() = param.grad.tensor;
}

// A new buffer for gradients whose memory was given back, unless somebody has one of them.
void Unit::restore_flat()
{
    const fc_layout *layout = fc_unit_layout(shard_);
    grads_share_flat_ = std::all_of(params_.begin(), params_.end(), [](const Param &p) {
        return !p.grad.object || p.grad.is_free();
    });
    if (!grads_share_flat_) {
        return;
    }
    grads_flat_ = make_grad_buffer(layout->grad_bytes);
    for (size_t i = 0; i < params_.size(); i++) {
        if (params_[i].grad.object) {
            point_to(params_[i].grad.local, grads_flat_.storage(), grad_at(*layout, i));
        }
    }
    flat_uses_ = grads_flat_.storage().use_count();
}

void Unit::release_unused()
{
    if (device_->is_offloaded()) { // memory of the host, which is costly to pin
        return;
    }
    if (grads_share_flat_ ? !can_share_flat() : grads_flat_.defined()) {
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
    grads_flat_ = at::Tensor();
}

void Unit::release_gradients()
{
    for (Param &p : params_) {
        p.grad = Gradient();
    }
    grads_flat_ = at::Tensor();
    grads_share_flat_ = false;
}

// Makes a gradient for every parameter without one (`all`: for every parameter), in one new buffer.
// A gradient that somebody else holds is left to its holder.
void Unit::make_gradients(bool all)
{
    if (grads_share_flat_ && !grads_flat_.defined()) {
        restore_flat();
    }
    if (can_share_flat()) {
        return;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    std::vector<size_t> wanted;
    bool flat_is_ours = grads_flat_.defined() && grads_flat_.storage().use_count() == flat_uses_;
    for (size_t i = 0; i < params_.size(); i++) {
        const Param &p = params_[i];
        const at::Tensor &present = p.sharded_tensor().grad();
        const bool assigned = p.grad.object && present.defined() && present.is_same(p.grad.tensor);
        const bool reusable = p.grad.object && flat_is_ours &&
                              p.grad.local.is_alias_of(grads_flat_) && p.grad.is_free();
        if (layout->params[i].has_grad && (all || (!assigned && !reusable))) {
            wanted.push_back(i);
        }
    }
    if (wanted.empty()) {
        return;
    }
    at::NoGradGuard no_grad;
    grads_flat_ = make_grad_buffer(layout->grad_bytes);
    for (size_t i : wanted) {
        Param &p = params_[i];
        at::Tensor local = at::empty({0}, grads_flat_.options().dtype(p.grad_type));
        local.set_(grads_flat_.storage(), grad_at(*layout, i), p.local_size, p.local_stride);
        make_gradient(p, std::move(local));
    }
    grads_share_flat_ = true;
    for (size_t i = 0; i < params_.size(); i++) {
        const Gradient &g = params_[i].grad;
        grads_share_flat_ = grads_share_flat_ && (!layout->params[i].has_grad ||
                                                  (g.object && g.local.is_alias_of(grads_flat_)));
    }
    flat_uses_ = grads_flat_.storage().use_count();
}

bool Unit::has_hooks() const
{
    for (const Param &p : params_) {
        const at::Tensor &tensor = p.sharded_tensor();
        if (torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
            torch::autograd::impl::post_acc_grad_hooks(tensor)) {
            return true;
        }
    }
    return false;
}

// Runs the post-accumulate hooks of a parameter whose gradient is final, now or at the end of the
// phase.
void Unit::after_write(size_t index, const fc_reduce_options &options)
{
    Param &p = params_[index];
    if (!torch::autograd::impl::post_acc_grad_hooks(p.sharded_tensor())) {
        return;
    }
    if (options.defer_hooks) {
        deferred_hooks_.push_back(index);
        return;
    }
    at::NoGradGuard no_grad;
    std::optional<GradientScope> scope;
    if (device_ != nullptr) {
        scope.emplace(*device_);
    }
    (*torch::autograd::impl::post_acc_grad_hooks(p.sharded_tensor()))(p.sharded_tensor());
}

void Unit::run_deferred_hooks()
{
    std::vector<size_t> indices = std::exchange(deferred_hooks_, {});
    for (size_t i : indices) {
        after_write(i, {1, true, false});
    }
}

} // namespace fc
