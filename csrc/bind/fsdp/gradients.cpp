// The gradients of shards: their memory, their DTensors and the hooks that look at them.
#include "bind/fsdp/gradients.h"

#include "bind/python/fields.h"
#include "bind/python/raised.h"

#include <ATen/ops/empty_strided.h>
#include <algorithm>
#include <torch/csrc/autograd/variable.h>

namespace fc {

Ref local_gradient(const Param &param)
{
    const Ref object = checked(THPVariable_Wrap(param.sharded_grad()));
    Ref local = Ref::take(PyObject_GetAttr(object.get(), name_of(Attribute::local_tensor)));
    if (!local) {
        PyErr_Clear();
        ask_python(Call::refuse_plain_gradient, param.owner.get());
    }
    return local;
}

namespace {

int64_t grad_at(const fc_param &p, const Param &param) // in elements
{
    return static_cast<int64_t>(p.grad_at / c10::elementSize(param.grad_type));
}

} // namespace

// A tensor like the shard's local one over memory that is as real as that, whatever modes make.
at::Tensor Param::like_shard(const at::Tensor &memory, at::ScalarType type, int64_t offset) const
{
    const at::NoGradGuard no_grad;
    const NoModes no_modes;
    at::Tensor made = at::empty({0}, memory.options().dtype(type));
    made.set_(memory.storage(), offset, local_size, local_stride);
    return made;
}

at::Tensor ShardGradients::gradient_in(const at::Tensor &memory, size_t index) const
{
    const Param &p = params_[index];
    return p.like_shard(memory, p.grad_type, grad_at(layout_->params[index], p));
}

// Bytes in pages of their own. Gradients live long among autograd's short-lived large tensors: on
// the heap they would pin the holes between those.
at::Tensor ShardGradients::make_buffer(size_t bytes) const
{
    void *memory = fc_pages_alloc(FC_FOR_GRADIENTS, bytes);
    if (memory == nullptr) {
        raise_error(PyExc_MemoryError, "%zu bytes for sharded gradients", bytes);
    }
    return at::from_blob(
        memory, {static_cast<int64_t>(bytes)},
        [bytes](void *p) { fc_pages_free(FC_FOR_GRADIENTS, p, bytes); }, at::dtype(at::kByte));
}

bool ShardGradients::lies_in_flat(size_t index) const
{
    const Reused &grad = params_[index].grad;
    if (!grad.object || !flat_.defined()) {
        return false;
    }
    const auto offset = static_cast<size_t>(grad.local.storage_offset()) * grad.local.itemsize();
    return static_cast<const char *>(grad.local.storage().data()) + offset ==
           static_cast<const char *>(flat_.const_data_ptr()) + layout_->params[index].grad_at;
}

// Nobody holds it, nor memory of it.
bool ShardGradients::is_reusable(size_t index) const
{
    const Reused &grad = params_[index].grad;
    return lies_in_flat(index) && grad.local.storage().use_count() == storage_uses_ &&
           grad.is_free();
}

bool ShardGradients::can_share_flat() const
{
    const auto is_in_use = [&](size_t i) { return params_[i].grad.object && !is_reusable(i); };
    return share_flat_ && flat_.defined() &&
           first_from(0, params_.size(), is_in_use) == params_.size();
}

// In a storage of its own: torch neither copies a DTensor that lies behind the start of one
// (copy.deepcopy) nor, before 2.15, compiles one that does not lie where its local tensor does. It
// goes up to the next one, so that who adds up storages counts what is held.
void ShardGradients::show(const Param &param, const at::Tensor &memory, int64_t offset) const
{
    const size_t at = static_cast<size_t>(offset) * param.grad.local.itemsize();
    size_t end = memory.nbytes();
    for (size_t i = 0; i < params_.size(); i++) {
        const fc_param &other = layout_->params[i];
        if (other.has_grad && other.grad_at > at) {
            end = std::min(end, other.grad_at);
        }
    }
    auto *owner = new c10::Storage(memory.storage());
    char *data = static_cast<char *>(owner->mutable_data()) + at;
    const c10::DeleterFnPtr release = [](void *p) { delete static_cast<c10::Storage *>(p); };
    at::DataPtr part(data, owner, release, memory.device());
    point_to(param.grad.local,
             {c10::Storage::use_byte_size_t(), end - at, std::move(part), nullptr, false}, 0);
}

// The DTensor of a shard's gradient, and what tells later whether somebody keeps it.
void ShardGradients::make_one(Param &param, const at::Tensor &memory, at::ScalarType type,
                              int64_t offset)
{
    Ref object = checked(THPVariable_Wrap(param.like_shard(memory, type, 0)));
    Ref made = ask_python(Call::make_sharded_gradient, param.owner.get(), object.get());
    param.grad = Reused(std::move(made), std::move(object));
    show(param, memory, offset);
}

void ShardGradients::adopt(Param &param, const at::Tensor &grad)
{
    if (param.grad.object && param.grad.is_free()) {
        show(param, grad, grad.storage_offset());
    } else {
        make_one(param, grad, grad.scalar_type(), grad.storage_offset());
    }
    flat_ = at::Tensor();
    share_flat_ = false;
    param.sharded_tensor().mutable_grad() = param.grad.tensor;
}

// A new buffer for gradients whose memory was given back, unless somebody has one of them.
void ShardGradients::restore_flat()
{
    share_flat_ = std::all_of(params_.begin(), params_.end(),
                              [](const Param &p) { return !p.grad.object || p.grad.is_free(); });
    if (!share_flat_) {
        return;
    }
    flat_ = make_buffer(layout_->grad_bytes);
    for (size_t i = 0; i < params_.size(); i++) {
        if (params_[i].grad.object) {
            show(params_[i], flat_, grad_at(layout_->params[i], params_[i]));
        }
    }
    count_uses();
}

// After gradients were made in the newest buffer.
void ShardGradients::count_uses()
{
    const size_t i = first_from(0, params_.size(), [&](size_t k) { return lies_in_flat(k); });
    storage_uses_ = i < params_.size() ? params_[i].grad.local.storage().use_count() : 0;
}

void ShardGradients::release()
{
    for (Param &p : params_) {
        p.grad = Reused();
    }
    flat_ = at::Tensor();
    share_flat_ = false;
}

// A gradient that somebody else holds is left to its holder.
void ShardGradients::make(bool all)
{
    if (share_flat_ && !flat_.defined()) {
        restore_flat();
    }
    if (can_share_flat()) {
        return;
    }
    // If one needs another buffer, all go there that can: apart they would need others in turn.
    std::vector<size_t> wanted;
    size_t n_grads = 0;
    bool needs_buffer = false;
    for (size_t i = 0; i < params_.size(); i++) {
        if (!layout_->params[i].has_grad) {
            continue;
        }
        n_grads++;
        if (all || !params_[i].has_own_grad()) {
            wanted.push_back(i);
            needs_buffer = needs_buffer || all || !is_reusable(i);
        }
    }
    if (!needs_buffer) {
        return;
    }
    const at::NoGradGuard no_grad;
    flat_ = make_buffer(layout_->grad_bytes);
    for (size_t i : wanted) {
        Param &p = params_[i];
        make_one(p, flat_, p.grad_type, grad_at(layout_->params[i], p));
    }
    share_flat_ = wanted.size() == n_grads; // nothing else lies in the new buffer
    count_uses();
}

void ShardGradients::after_write(size_t index, const fc_reduce_options &options)
{
    Param &p = params_[index];
    if (!torch::autograd::impl::post_acc_grad_hooks(p.sharded_tensor())) {
        return;
    }
    if (options.defer_hooks) {
        // Of a module that ran several times a backward may make several sums: when hooks run all
        // of them are in the gradient, and the first call may take it away.
        if (std::find(deferred_hooks_.begin(), deferred_hooks_.end(), index) ==
            deferred_hooks_.end()) {
            deferred_hooks_.push_back(index);
        }
        return;
    }
    run_hooks(p);
}

// As torch's own does: autograd would refuse hooks that return something.
void ShardGradients::run_hooks(const Param &param) const
{
    const at::NoGradGuard no_grad;
    PyObject *const sharded = param.sharded.get();
    const Ref hooks = checked(PyObject_GetAttr(sharded, name_of(Attribute::post_accumulate_hooks)));
    if (hooks.get() == Py_None) {
        return;
    }
    const Ref all = checked(PyDict_Values(hooks.get())); // one may remove itself
    for (PyObject *hook : items_of(all.get())) {
        checked(PyObject_CallOneArg(hook, sharded));
    }
}

void ShardGradients::run_deferred_hooks()
{
    std::vector<size_t> indices = std::exchange(deferred_hooks_, {});
    for (size_t i : indices) {
        after_write(i, {1, true, false});
    }
}

void *ShardGradients::flat()
{
    if (std::any_of(params_.begin(), params_.end(),
                    [](const Param &p) { return p.sharded_grad().defined(); })) {
        return nullptr;
    }
    make(true);
    return flat_.mutable_data_ptr();
}

void ShardGradients::assign_flat(const fc_reduce_options *options)
{
    for (size_t i = 0; i < params_.size(); i++) {
        if (layout_->params[i].has_grad && layout_->params[i].trainable) {
            params_[i].sharded_tensor().mutable_grad() = params_[i].grad.tensor;
        }
    }
    for (size_t i = 0; i < params_.size(); i++) {
        if (layout_->params[i].has_grad && layout_->params[i].trainable) {
            after_write(i, *options);
        }
    }
}

void ShardGradients::target_of(size_t index, void **target_out, bool *accumulate_out)
{
    Param &p = params_[index];
    const bool is_present = p.sharded_grad().defined();
    *accumulate_out = is_present && p.has_own_grad();
    if (*accumulate_out || !is_present) {
        *target_out = p.grad.local.mutable_data_ptr();
        return;
    }
    // A gradient that the user put there: add to it as torch would.
    const Ref local = local_gradient(p);
    added_to_ = tensor_of(local.get());
    addend_ = at::empty_strided(p.local_size, p.local_stride, at::dtype(p.grad_type));
    *target_out = addend_.mutable_data_ptr();
}

void ShardGradients::assign(size_t index, const fc_reduce_options *options)
{
    Param &p = params_[index];
    if (added_to_.defined()) {
        const at::NoGradGuard no_grad;
        const at::Tensor sum = std::exchange(addend_, at::Tensor());
        std::exchange(added_to_, at::Tensor()).add_(sum);
    } else if (!p.sharded_grad().defined()) {
        p.sharded_tensor().mutable_grad() = p.grad.tensor;
    }
    after_write(index, *options);
}

void ShardGradients::submit(std::unique_ptr<Taken> taken, const fc_reduce_options &options)
{
    const fc_gradient *grads = taken->grads.data();
    check_raised(fc_reduction_submit(reduction_, grads, taken.release(), &options));
}

} // namespace fc
