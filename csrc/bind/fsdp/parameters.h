// A unit's parameters as modules have them: shards or whole ones, and what the latter show.
#ifndef FC_BIND_FSDP_PARAMETERS_H
#define FC_BIND_FSDP_PARAMETERS_H

#include "base/alloc.h"
#include "bind/python/calls.h"
#include "bind/tensor/tensors.h"
#include "engine/unit.h"
#include "engine/unsharding.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace fc {

// How often a tensor was written; 0: it does not count.
uint32_t version_of(const at::Tensor &tensor);

// A place where a parameter is registered.
struct Place {
    Ref dict;   // module._parameters
    Ref key;    // its name there
    Ref module; // set only if the module overrides __setattr__, which is then called instead
};

// A DTensor, of a gradient or a slice: made once, shown again in every step while nobody else holds
// it.
struct Reused {
    Reused() = default;
    Reused(Ref object, Ref local_object);

    Ref object, local_object; // the DTensor and its local tensor
    at::Tensor tensor, local;
    // Counts right after construction: more means that somebody keeps the gradient.
    uint32_t object_refs = 0, local_refs = 0, tensor_uses = 0, local_uses = 0;

    bool is_free() const;
};

// A step of a thousand units is as fast as their cache lines come from memory: the first line has
// what forward and backward need, the second what gradients need.
struct alignas(FC_CACHE_LINE) Param {
    Ref sharded, unsharded;                   // the two nn.Parameter objects
    at::Tensor unsharded_tensor;              // what the latter is: autograd's leaf
    at::Tensor local;                         // the shard: the DTensor's local tensor
    void *storage = nullptr;                  // where an aliased shard lies, else null
    PyObject *dict = nullptr, *key = nullptr; // borrowed from places.front()
    uint32_t version = 0;                     // unsharded_versions() when it was filled
    uint16_t local_slot = 0;                  // offset of the DTensor's local tensor
    bool is_trained = false;                  // requires_grad when it was filled
    bool has_one_place : 1 = false;           // which needs no __setattr__
    bool is_parallel : 1 = false;             // the unsharded parameter is a DTensor itself
    bool is_wrapped : 1 = false;              // or another tensor around others

    Reused grad;
    at::Tensor accumulated; // unreduced, in the reduce dtype (gradient accumulation)
    int32_t copies = 1;     // a replicated parameter is held once per rank
    at::ScalarType reduce_type, grad_type;
    bool has_grad = false;       // may have one
    bool is_widened : 1 = false; // leaf_grad_type is wider than the parameter
    bool was_kept : 1 = false;   // trained when gradients were kept for the next submission
    bool is_absent : 1 = false;  // frozen in the newest submission, and not in it

    // The dtype in which autograd keeps the unsharded gradient, none: any; from torch 2.15.
    std::optional<at::ScalarType> leaf_grad_type;
    at::Tensor dtensor_local; // the unsharded parameter's local tensor, if it is a DTensor
    Ref owner;                // fsdp_c's FSDPParam: makes DTensors, names the parameter
    std::vector<Place> places;
    std::vector<int64_t> local_size, local_stride; // of the shard and of its gradient

    // `view`: what a DTensor has here, else the parameter itself.
    void set_unsharded(Ref object, const at::Tensor &view);
    // The DTensor. Only Python's reference is kept: torch swaps tensors that nobody else refers to.
    const at::Tensor &sharded_tensor() const { return THPVariable_Unpack(sharded.get()); }
    // True while the DTensor's local tensor is the one that was found at set-up, in its place.
    bool is_in_place() const;
    // Changes when the shard is written: counted for the DTensor or its local tensor, or, around
    // both counters (`param.data.mul_()`), by a write that changes its first bytes.
    uint64_t shard_mark() const;
    // As the tensor's own grad(), which first asks whether it may warn.
    const at::Tensor &sharded_grad() const
    {
        return sharded_tensor().unsafeGetTensorImpl()->grad();
    }
    uint32_t shard_versions() const; // the counters alone
    // The view of the unit's storage that the unsharded parameter is or has.
    const at::Tensor &unsharded_local() const
    {
        return is_parallel ? dtensor_local : unsharded_tensor;
    }
    // Writes to the unsharded parameter: counted for a DTensor or its local tensor.
    uint32_t unsharded_versions() const
    {
        const uint32_t own =
            unsharded_tensor.unsafeGetTensorImpl()->version_counter().current_version();
        return is_parallel ? own + version_of(dtensor_local) : own;
    }
    void bump_unsharded_versions() const;
    // Whether the shard's gradient is the one that is kept for it.
    bool has_own_grad() const;
    at::Tensor like_shard(const at::Tensor &memory, at::ScalarType type, int64_t offset) const;
    // Whether the unsharded parameter was written since it was filled.
    bool is_written() const { return version != unsharded_versions(); }
};
static_assert(offsetof(Param, grad) == FC_CACHE_LINE / 2, "two lines make a pair");
static_assert(offsetof(Param, leaf_grad_type) <= FC_CACHE_LINE, "what a step needs is in it");

// The first one from `from` on that is it, or `n`.
template <typename Question> size_t first_from(size_t from, size_t n, Question is_it)
{
    while (from < n && !is_it(from)) {
        from++;
    }
    return from;
}

std::string parameter_name(const Param &param);
// Why a sharded parameter cannot be read: one of the texts of Python.
std::string sharded_text(const fc_unit *unit, Call which = Call::text_of_sharded);

// What modules show of a unit after a forward that reshards it to a smaller group: DTensors of this
// rank's slices, which lie in memory of the engine's while they are shown.
class Slices : NoCopy {
public:
    explicit Slices(const std::vector<Param> &params);
    ~Slices();

    PyObject *object(size_t i) const { return slices_[i].kept.object.get(); }
    // They show `memory`, and are trained as the shards are.
    void show(const std::vector<Param> &params, char *memory);
    // What was changed on a slice counts for the shard.
    void carry_requires_grad(const std::vector<Param> &params) const;
    // Whether it was written since it is shown, or could have been, uncounted.
    bool is_written(size_t i) const;
    // They show nothing. False: somebody keeps one, which has a copy now, and none can be reused.
    bool hide();

private:
    struct Slice {
        Reused kept;
        size_t at, bytes; // in the memory that is shown
        size_t storage_uses;
        uint32_t versions; // when it was shown
        bool is_trained;

        uint32_t count_versions() const;
        bool is_free() const;
    };

    std::vector<Slice> slices_;
};

class alignas(FC_CACHE_LINE) Parameters {
public:
    // rows: one per parameter, see fsdp_c/_fully_shard/_fsdp_param_group.py; flat: owns the storage
    // that the unsharded parameters are views of.
    Parameters(fc_unit *shard, PyObject *rows, const at::Tensor &flat);

    const std::vector<Param> &params() const { return params_; }
    fc_unit *shard_unit() const { return shard_; }
    const std::string &name() const { return name_; }
    int traverse(visitproc visit, void *arg);
    // True while every shard is where set-up put it, and the registered parameters are those that
    // were registered last.
    bool is_intact() const;
    // Whether other parameters stand now where the shards were left.
    bool has_replaced_shards() const;

    // ---- see fc_unsharding_ops ----
    void show(void *memory);
    void hide(bool keeps_size);
    void withhold(bool is_withheld);
    void enter();
    void leave(void *slices);
    void leave_slices();
    size_t find_changed(const uint64_t *marks, size_t from) const;
    size_t find_written(size_t from, bool maybe) const;
    size_t find_written_slice(size_t from) const;
    void tell_of_write(size_t param, fc_written what) const;
    bool has_hooks() const; // post-accumulate hooks
    // What was gathered is another object from now on; gradients go along.
    void replace_unsharded(size_t param, Ref object);
    void note_filled(size_t param) { params_[param].version = params_[param].unsharded_versions(); }
    bool can_reside() const;

protected:
    // While the memory is there that they show.
    void forget_slices() { slices_.reset(); }
    // What a graph may look for is said where gathers are copies.
    void set_says_graph(bool says) { says_graph_ = says; }

private:
    enum Registered : char {
        SHARDS,
        SLICES,
        WHOLE
    };
    PyObject *object_of(size_t i, Registered which) const;
    bool is_registered(size_t i) const;
    bool is_assigned(size_t i) const;
    void register_params(Registered which);
    void end_slices();

    std::string name_;
    at::Tensor storage_owner_; // keeps storage_ alive

protected: // what every step needs, in few cache lines
    fc_unit *shard_;
    std::vector<Param> params_;

private:
    c10::StorageImpl *storage_; // of all unsharded parameters
    size_t bytes_;
    void *shown_ = nullptr; // what the storage shows
    bool says_graph_ = false;
    Registered registered_ = SHARDS;
    std::unique_ptr<Slices> slices_; // null: none are kept for reuse
};

} // namespace fc

#endif
