// One unit's tensors: what Python registers on modules, and how it follows the core's buffers.
#ifndef FC_BIND_FSDP_UNIT_H
#define FC_BIND_FSDP_UNIT_H

#include "base/alloc.h"
#include "bind/device/device.h"
#include "bind/fsdp/arrivals.h"
#include "bind/fsdp/steps.h"
#include "bind/python/python.h"
#include "bind/python/raised.h"
#include "engine/domain.h"
#include "engine/reduction.h"
#include "engine/unit.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fc {

// A place where a parameter is registered.
struct Place {
    Ref dict;   // module._parameters
    Ref key;    // its name there
    Ref module; // set only if the module overrides __setattr__, which is then called instead
};

// A gradient of a shard: made once, assigned again in every step while nobody else holds it.
struct Gradient {
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
    at::Tensor unsharded_tensor;              // a view of the unit's unsharded storage
    at::Tensor local;                         // the shard: the DTensor's local tensor
    void *storage = nullptr;                  // where an aliased shard lies, else null
    PyObject *dict = nullptr, *key = nullptr; // borrowed from places.front()
    uint32_t version = 0;                     // of unsharded_tensor when it was filled
    uint16_t local_slot = 0;                  // offset of the DTensor's local tensor
    bool is_trained = false;                  // requires_grad when it was filled
    bool has_one_place = false;               // which needs no __setattr__

    Gradient grad;
    at::Tensor accumulated; // unreduced, in the reduce dtype (gradient accumulation)
    int32_t copies = 1;     // a replicated parameter is held once per rank
    at::ScalarType reduce_type, grad_type;
    bool has_grad = false;   // may have one
    bool is_widened = false; // leaf_grad_type is wider than the parameter

    // The dtype in which autograd keeps the unsharded gradient, none: any; from torch 2.15.
    std::optional<at::ScalarType> leaf_grad_type;
    Ref owner; // fsdp_c's FSDPParam: makes DTensors, names the parameter
    std::vector<Place> places;
    std::vector<int64_t> local_size, local_stride; // of the shard and of its gradient

    // The DTensor. Only Python's reference is kept: torch swaps tensors that nobody else refers to.
    const at::Tensor &sharded_tensor() const;
    // True while the DTensor's local tensor is the one that was found at set-up, in its place.
    bool is_in_place() const;
    // Changes when the shard is written: counted for the DTensor or its local tensor, or, around
    // both counters (`param.data.mul_()`), by a write that changes its first bytes.
    uint64_t shard_mark() const;
    uint32_t shard_versions() const; // the counters alone
};
static_assert(offsetof(Param, grad) == FC_CACHE_LINE / 2, "two lines make a pair");
static_assert(offsetof(Param, leaf_grad_type) <= FC_CACHE_LINE, "what a step needs is in it");

// A backward's gradients, as the engine holds them.
struct Taken {
    std::vector<at::Tensor> tensors; // by parameter; undefined: none
    std::vector<fc_gradient> grads;
};

class Range;

// What the engine calls for a unit whose owner is a GroupObject; write.cpp.
const fc_reduction_ops *reduction_ops();

class alignas(FC_CACHE_LINE) Unit {
public:
    // rows: one per parameter, see fsdp_c/_fully_shard/_fsdp_param_group.py; flat: owns the storage
    // that the unsharded parameters are views of; on_device: see DeviceOptions. updates: of the
    // shards, borrowed.
    Unit(PyObject *domain, size_t index, PyObject *replicate_domain, PyObject *rows,
         const at::Tensor &flat, PyObject *on_device, const Updates *updates);
    ~Unit();
    Unit(const Unit &) = delete;
    Unit &operator=(const Unit &) = delete;

    const std::string &name() const { return name_; }
    fc_domain *domain() const { return domain_; }
    fc_domain *replicate_domain() const { return replicate_domain_; }
    bool is_unsharded() const { return unsharded_; }
    bool is_pending() const { return requested_; }
    // True if what is unsharded outlives the phase.
    bool has_own_memory() const { return is_copied() ? is_kept_ : slot_ != nullptr; }
    // Gives up what was gathered ahead and not used.
    void drop_ahead();
    DeviceUnit *device() const { return device_.get(); }
    bool is_resident() const { return is_resident_; }
    // After a forward of the unit: from the first one on its shards may be used where they lie.
    void end_forward();
    const std::vector<Param> &params() const { return params_; }
    // Steps of optimizers, and loads, that the shards have seen.
    uint64_t n_updates() const { return updates_->n(); }
    int traverse(visitproc visit, void *arg);

    // ---- parameters ----
    // Registers and shows the unsharded parameters. Inside a phase they are the shared ones.
    void unshard();
    // The private copy of an explicit unshard: data now, registration by unshard().
    void unshard_private();
    // `to_slice`: a rank of a smaller group keeps its slice.
    void reshard(bool to_slice = false);
    // Until the next reshard forward leaves the unsharded parameters registered.
    void keep_after_forward() { is_kept_after_forward_ = true; }
    bool is_kept_after_forward() const { return is_kept_after_forward_; }
    // Until the next reshard: backward goes on without the parameters, and reading them tells why
    // they are not there.
    void make_unavailable();
    // At the end of a phase: a unit that stays unsharded gets memory of its own until the next
    // forward, since peers may write their shards then.
    void keep();
    // Whether the unsharded parameters have memory of their own, which reshard leaves as it is and
    // the next unshard fills again; from the next unshard on.
    void keep_storage(bool keeps);
    // Forgets an unshard that nobody waited for.
    void drop_pending();
    // True while every shard is where set-up put it; false asks for a rebuild.
    bool is_intact() const;
    // Whether publish() has something to copy.
    bool publishes() const { return publish_bytes_ > 0; }
    // Makes this rank's shards readable by peers; at the opening of a phase.
    void publish();
    // Takes the shards as they are for those that peers will read; as a forward opens.
    void note_shards();
    // True if a shard was written since then, or since the last publish.
    bool was_written() const;
    // RuntimeError if this forward has read the unit and a shard was written after that: a peer may
    // have read either value.
    void check_unwritten() const;

    // ---- graphs ----
    // After a forward with gradients, before its reshard: until end_graph() nodes inside of the
    // unit can read its parameters where these stay in place, and `state` is told of gradients that
    // come from there.
    void begin_graph(PyObject *state);
    // Gradients are told of, though nothing is read: a recomputation.
    void watch_gradients(PyObject *state);
    // Nothing is left of the unit for another backward.
    void end_graph();
    // Whether nodes inside of the unit can read its parameters only while it is unsharded.
    bool is_read_apart() const { return is_copied() && !is_resident_ && !stays(); }
    // Steps that changed the shards, as the newest unshard has found them; see note_updates().
    uint64_t updates_seen() const { return updates_seen_; }
    // Weights that an optimizer has changed since: graphs that have saved them find out by their
    // versions, as those of a module that is not sharded.
    // True if these are all of the unit's.
    bool note_updates();
    // The same, after a step, for all units whose graphs would not meet an unshard first.
    static void note_step();
    const Arrivals *arrivals() const { return arrivals_.get(); }
    const std::shared_ptr<Arrivals> &shared_arrivals() const { return arrivals_; }

    // ---- gradients ----
    // A backward goes through the unit.
    void await_gradients()
    {
        awaits_gradients_ = true;
        if (arrivals_ != nullptr) {
            arrivals_->is_expected.store(true, std::memory_order_relaxed);
        }
    }
    // Post-backward, or its backward was dropped. True if one had gone through the unit.
    bool end_awaiting()
    {
        return arrivals_ != nullptr &&
               arrivals_->is_expected.exchange(false, std::memory_order_relaxed);
    }
    // Whether the newest submission had a gradient of each parameter, of its backward.
    bool has_all_gradients() const { return has_all_gradients_; }
    // True if none of its parameters has had a gradient since.
    bool awaits_gradients() const { return awaits_gradients_; }
    // Fresh gradients stay as narrow as they are, unless they are the first of several to be added
    // up; from pre-backward to post-backward.
    void defer_upcasts(bool reduces);
    void end_deferral();
    // What micro-batches have left beside the unsharded parameter (before torch 2.15).
    const at::Tensor &accumulated(size_t param) const { return params_[param].accumulated; }
    // ValueError unless it is the parameter's size in the reduce dtype; an undefined one clears.
    void set_accumulated(size_t param, const at::Tensor &tensor);
    // Keeps gradients for a later backward; peers that reduce the unit meanwhile get an error.
    void accumulate();
    // Hands what there is to the reduction, zeros for unused parameters if `with_unused`.
    void submit(bool with_unused, const fc_reduce_options &options);
    // ---- where sums go; see fc_reduction_ops ----
    void *flat_gradients();
    void assign_flat(const fc_reduce_options &options);
    void prepare_gradients() { make_gradients(false); }
    void *target_of(size_t index, bool *accumulate);
    void assign(size_t index, const fc_reduce_options &options);
    void show_wait(bool begins);

    // Sums over shards that the replicas have not seen yet (HSDP).
    bool has_partial_sums() const { return fc_reduction_has_sums(reduction_.get()); }
    // Of each parameter, a copy, flat and in its reduce dtype; undefined: none, or on a device.
    std::vector<at::Tensor> partial_sums() const;
    // Forgets the gradients that are kept for reuse, so that torch may swap them.
    void release_gradients();
    // Gives back the memory of those that nobody uses: on a device, where autograd could need it.
    void release_unused();
    // True while gradients of earlier backwards wait for a reduction.
    bool has_accumulated() const;
    // Takes them from the unit in whose place this one comes, in the dtypes of this one. On a
    // device sums that wait for the replicas need the same layout.
    void inherit(Unit &former);
    // Drops gradients that were not reduced; or of them what only the replicas have not seen.
    void drop_gradients();
    void drop_partial_sums();
    void run_deferred_hooks();
    // After submit(): true if nothing of the unit is left for the end of backward.
    bool is_settled() const;
    fc_reduction *reduction() const { return reduction_.get(); }
    fc_unit *shard_unit() const { return shard_; }
    const fc_traffic &traffic() const { return *traffic_; }

private:
    bool is_gathered() const { return fc_domain_n_ranks(domain_) > 1; }
    // Every gather makes a copy, which optimizer steps leave behind.
    bool is_copied() const { return device_ != nullptr || !fc_domain_is_mapped(domain_); }
    // Whether an optimizer has stepped since it was gathered over messages, in forward or before.
    bool is_outdated() const;
    void register_params(bool unsharded);
    void show(void *memory);
    void hide();
    void leave_to_graph();
    std::string unreadable_text() const;
    static bool is_written(const Param &param);
    void discard_writes();
    void refresh();
    void renew_if_written();
    bool can_reside() const;
    bool may_be_written() const;
    void *take_residence();
    void leave_if_written();
    void gather_messages();
    static void gather_messages_of(const std::vector<Unit *> &units);
    std::vector<Unit *> followers() const;
    void come_along();
    void claim_ahead();
    bool has_hooks() const; // post-accumulate hooks of its parameters
    void take_slot();
    void release_slot(bool to_slice = false);
    // True if reshard leaves the memory.
    bool stays() const { return keeps_storage_ && slot_ != nullptr; }

    std::vector<at::Tensor> take_gradients(bool with_unused, bool with_partial_sums);
    void submit_device(const Taken &taken, const fc_reduce_options &options);
    void add_apart(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                   uint64_t print, const fc_reduce_options &options);
    at::Tensor make_grad_buffer(size_t bytes) const;
    void count_gather();
    bool takes_over(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                    const fc_reduce_options &options) const;
    void take_over(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                   const fc_reduce_options &options);
    void adopt(Param &param, const at::Tensor &grad);
    void make_gradient(Param &param, at::Tensor local);
    void make_gradients(bool all);
    void restore_flat();
    bool can_share_flat() const;
    void check_grad_dtype(const Param &param) const;
    void after_write(size_t index, const fc_reduce_options &options);

    Ref domain_object_, replicate_object_; // keep the domains alive until all below is gone
    // What every step needs, in few cache lines.
    fc_domain *domain_;
    fc_unit *shard_;
    std::unique_ptr<DeviceUnit> device_; // null in shared memory and over messages
    c10::StorageImpl *storage_;          // of all unsharded parameters
    size_t bytes_;
    void *view_ = nullptr; // of the unsharded unit in shared memory
    void *slot_ = nullptr; // private memory, from the pool or the device
    bool unsharded_ = false;
    bool awaits_gradients_ = false;
    bool is_kept_after_forward_ = false;
    bool is_kept_ = false;               // slot_ holds what was gathered before the phase
    bool keeps_storage_ = false;         // slot_ stays over reshards
    bool is_resident_ = false;           // the shards are the unsharded buffer
    bool may_reside_ = false;            // they could be, which the first forward decides
    bool has_widened_ = false;           // a parameter whose gradients are wider than it is
    bool pending_ = false;               // slot_ holds data that is not registered yet
    bool requested_ = false;             // unshard was called and not waited for
    bool is_watched_ = false;            // for writes to its shards within a forward
    bool is_read_ = false;               // in this phase
    bool is_ahead_ = false;              // pending_, since another unit's gather brought it along
    bool came_along_ = false;            // which its next use does not count again
    bool has_graph_ = false;             // see begin_graph()
    void *shown_ = nullptr;              // what the storage shows
    std::shared_ptr<Arrivals> arrivals_; // from the first graph on
    std::vector<Param> params_;
    bool is_unavailable_ = false;   // the storage says so
    bool grads_share_flat_ = false; // every cached gradient lies in grads_flat_
    bool has_accumulated_ = false;  // micro-batches left gradients for the next submission
    bool has_all_gradients_ =
        false; // the last submission had one of each parameter, of its backward
    uint64_t gather_bytes_ = 0, publish_bytes_ = 0; // that an all-gather brings, a publish writes
    at::Tensor grads_flat_;
    uint64_t gathered_at_ = 0; // over messages, in steps of optimizers
    size_t flat_uses_ = 0;     // of its storage, right after construction
    std::unique_ptr<fc_reduction, decltype(&fc_reduction_destroy)> reduction_;
    fc_traffic *traffic_; // reduction_'s
    fc_domain *replicate_domain_;
    fc_unit *replicate_;
    const Updates *updates_;

    uint64_t steps_seen_, updates_seen_;     // of all optimizers, and of those of the shards
    std::vector<uint32_t> shard_versions_;   // then
    std::vector<const ArrivalHook *> hooks_; // of the parameters, borrowed
    size_t graph_at_ = 0;                    // in graphs_
    static std::vector<Unit *> graphs_;      // units that have one

    std::vector<size_t> deferred_hooks_;
    std::vector<uint64_t> noted_shards_; // what is_written tells writes by
    std::string name_;
    at::Tensor storage_owner_;                  // keeps storage_ alive
    std::vector<std::unique_ptr<Range>> waits_; // of submissions for room
    at::Tensor added_to_, addend_; // between target_of() and assign(): the user's own gradient
};

} // namespace fc

#endif
