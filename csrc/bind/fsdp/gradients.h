// The gradients of a unit's shards: their memory, and how reductions place their sums.
#ifndef FC_BIND_FSDP_GRADIENTS_H
#define FC_BIND_FSDP_GRADIENTS_H

#include "bind/fsdp/parameters.h"

namespace fc {

// A backward's gradients, as the engine holds them.
struct Taken {
    Tensors tensors; // by parameter; undefined: none
    c10::SmallVector<fc_gradient, 4> grads;
};

inline bool has_bit(const uint64_t *mask, size_t i)
{
    return (mask[i / 64] >> (i % 64) & 1) != 0;
}

// The local tensor of the gradient that a shard has.
Ref local_gradient(const Param &param);

// In memory of the host; for those elsewhere see DeviceGradients.
class ShardGradients : NoCopy {
public:
    // All borrowed.
    ShardGradients(std::vector<Param> &params, const fc_layout *layout, fc_reduction *reduction)
        : params_(params), layout_(layout), reduction_(reduction)
    {
    }
    virtual ~ShardGradients() = default;

    fc_reduction *reduction() const { return reduction_; }
    // Hands a backward's gradients to the reduction.
    virtual void submit(std::unique_ptr<Taken> taken, const fc_reduce_options &options);
    // Drops what waits for a reduction elsewhere than there; or of it what only the replicas have
    // not seen.
    virtual void drop() {}
    virtual void drop_partial_sums() { fc_reduction_drop_sums(reduction_); }
    // From a unit of the same layout in whose place this one comes.
    virtual void inherit(const ShardGradients &former)
    {
        check(fc_reduction_inherit(reduction_, former.reduction_));
    }
    // Gives back the memory of those that nobody uses, where autograd could need it.
    virtual void release_unused() {}
    // Forgets those that are kept for reuse, so that torch may swap them.
    void release();
    void run_deferred_hooks();
    void forget_deferred_hooks() { deferred_hooks_.clear(); }

    // ---- where sums go; see fc_reduction_ops ----
    void *flat();
    void assign_flat(const fc_reduce_options *options);
    void prepare() { make(false); }
    void target_of(size_t index, void **target_out, bool *accumulate_out);
    void assign(size_t index, const fc_reduce_options *options);

protected:
    virtual at::Tensor make_buffer(size_t bytes) const;
    // The gradient that is kept for a parameter shows memory, from an element on.
    virtual void show(const Param &param, const at::Tensor &memory, int64_t offset) const;
    // That of a parameter in such memory.
    at::Tensor gradient_in(const at::Tensor &memory, size_t index) const;
    // Runs the post-accumulate hooks of a parameter whose gradient is there.
    virtual void run_hooks(const Param &param) const;
    // A gradient for every parameter without one (`all`: for every parameter), in one buffer.
    void make(bool all);
    // Whether all of them lie in that, and nobody else has one.
    bool can_share_flat() const;
    // A gradient of autograd's becomes the shard's.
    void adopt(Param &param, const at::Tensor &grad);
    // A parameter's gradient is final: its hooks run, now or at the end of the phase.
    void after_write(size_t index, const fc_reduce_options &options);

    std::vector<Param> &params_;
    const fc_layout *layout_;
    fc_reduction *reduction_;
    at::Tensor flat_;
    bool share_flat_ = false; // every cached gradient lies in flat_

private:
    void make_one(Param &param, const at::Tensor &memory, at::ScalarType type, int64_t offset);
    void restore_flat();
    bool lies_in_flat(size_t index) const;
    bool is_reusable(size_t index) const;
    void count_uses();

    size_t storage_uses_ = 0; // of a gradient in flat_, right after construction
    std::vector<size_t> deferred_hooks_;
    at::Tensor added_to_, addend_; // between target_of() and assign(): the user's own gradient
};

} // namespace fc

#endif
