// One unit's tensors: what Python registers on modules, and how it follows the core's buffers.
#ifndef FC_BIND_FSDP_UNIT_H
#define FC_BIND_FSDP_UNIT_H

#include "base/alloc.h"
#include "bind/device/device.h"
#include "bind/fsdp/arrivals.h"
#include "bind/fsdp/steps.h"
#include "bind/python/python.h"
#include "engine/domain.h"
#include "engine/exchange.h"
#include "engine/unit.h"

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <functional>
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
    void *home = nullptr;                     // where an aliased shard lies, else null
    PyObject *dict = nullptr, *key = nullptr; // borrowed from places.front()
    uint32_t version = 0;                     // of unsharded_tensor when it was filled
    uint16_t local_slot = 0;                  // offset of the DTensor's local tensor
    bool is_trained = false;                  // requires_grad when it was filled
    bool has_one_place = false;               // which needs no __setattr__

    Gradient grad;
    at::Tensor held;    // unreduced, in the reduce dtype (gradient accumulation)
    int32_t copies = 1; // a replicated parameter is held once per rank
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

// Called while a post waits for room: finishes what can be finished.
using Progress = std::function<void(fc_domain *)>;

// How gradients are divided and where they stop.
struct ReduceOptions {
    double divisor;   // of the sum over all ranks
    bool all_reduce;  // false: keep the sum over the shard group (HSDP)
    bool defer_hooks; // post-accumulate hooks run at the end of the phase
};

// Gradients of a post whose part for this rank itself is not written.
struct Lent {
    std::vector<at::Tensor> tensors;
    std::vector<const void *> data; // of each tensor; empty: nothing is lent
    size_t bytes = 0;
    fc_wire wire = FC_WIRE_REDUCE;
    char *parts = nullptr; // where the post lies
    size_t part_bytes = 0;
};

// Bytes that a unit has moved, since it was made. The payload is what a collective would bring to
// this rank over any transport; what was copied is what this rank really wrote to move it.
struct Traffic {
    uint64_t gathers = 0, gathered = 0;   // all-gathers: the peers' chunks, in the compute dtype
    uint64_t reductions = 0, reduced = 0; // reduce-scatters: a chunk per peer, in the reduce dtype
    uint64_t all_reductions = 0, all_reduced = 0; // between replicas: twice (n-1)/n of the part
    uint64_t copied = 0;
    uint64_t unshards = 0; // of which those over several ranks are gathers

    void add(const Traffic &other);
};

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
    void outlast_forward() { outlasts_forward_ = true; }
    bool outlasts_forward() const { return outlasts_forward_; }
    // Until the next reshard: backward goes on without the parameters, and reading them tells why
    // they are not there.
    void withhold();
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
    // Whether the newest post or hold had a gradient of each parameter, of its backward.
    bool has_all_gradients() const { return has_all_gradients_; }
    // True if none of its parameters has had a gradient since.
    bool awaits_gradients() const { return awaits_gradients_; }
    // Fresh gradients stay as narrow as they are, unless they are the first of several to be added
    // up; from pre-backward to post-backward.
    void defer_upcasts(bool reduces);
    void end_deferral();
    // What micro-batches have left beside the unsharded parameter (before torch 2.15).
    const at::Tensor &held(size_t param) const { return params_[param].held; }
    // ValueError unless it is the parameter's size in the reduce dtype; an undefined one clears.
    void set_held(size_t param, const at::Tensor &tensor);
    // Keeps gradients for a later backward; peers that reduce the unit meanwhile get an error.
    void hold();
    // Hands what there is to the reduction, zeros for unused parameters if `with_unused`.
    void post(bool with_unused, const ReduceOptions &options, const Progress &progress);
    // Adds up what `lane` (the shard's or the replicas') has ready.
    void finish(fc_unit *lane, const ReduceOptions &options, const Progress &progress);
    // Takes its part of a batch.
    void finish_batched(const fc_source &sum, const ReduceOptions &options);
    // Sums over shards that the replicas have not seen yet (HSDP).
    bool has_partial_sums() const;
    // Of each parameter, a copy, flat and in its reduce dtype; undefined: none, or on a device.
    std::vector<at::Tensor> partial_sums() const;
    void release_sums(); // the memory for them, which stays, unless something waits in it
    size_t partial_bytes() const { return partial_.size(); }
    // Forgets the gradients that are kept for reuse, so that torch may swap them.
    void release_gradients();
    // Gives back the memory of those that nobody uses: on a device, where autograd could need it.
    void release_unused();
    // True while gradients of earlier backwards wait for a reduction.
    bool holds_gradients() const;
    // Takes them from the unit in whose place this one comes, in the dtypes of this one. On a
    // device sums that wait for the replicas need the same layout.
    void inherit(Unit &former);
    // Drops gradients that were not reduced; or of them what only the replicas have not seen.
    void drop_gradients();
    void drop_partial_sums();
    void run_deferred_hooks();
    // After post(): true, once until the next unshard, if nothing of the unit is left for the end
    // of backward. Reopened counts settled units that were unsharded again.
    bool settle_step();
    static uint64_t n_reopened() { return n_reopened_; }
    // At most one unit of the process lends its last post its gradients, to be added up without a
    // copy. Writes their part after all, so that they can go; called before the next post.
    static void settle_lent();
    // The same, if they are large: the backward that goes on needs the memory.
    static void settle_large();
    // Forgets lent gradients of a phase of `domain` that has ended.
    static void forget_lent(const fc_domain *domain);
    void forget_posts() { sums_are_posted_ = false; } // they were lost
    fc_unit *shard_lane() const { return shard_; }
    fc_unit *replicate_lane() const { return replicate_; }
    const Traffic &traffic() const { return traffic_; }

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
    void post_device(const std::vector<at::Tensor> &grads, const ReduceOptions &options);
    void add_apart(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                   uint64_t print, const ReduceOptions &options);
    at::Tensor make_grad_buffer(size_t bytes) const;
    void post_mapped(std::vector<at::Tensor> grads, const Progress &progress);
    void settle();
    void post_messages(const std::vector<at::Tensor> &grads, const ReduceOptions &options,
                       const Progress &progress);
    void post_to_batch(const std::vector<at::Tensor> &grads);
    void post_own(const std::vector<at::Tensor> &grads, const ReduceOptions &options,
                  const Progress &progress);
    void post_to_replicas(const std::vector<at::Tensor> &grads, const Progress &progress);
    void stage(fc_unit *lane, size_t param, const void *grad, fc_dtype type, fc_wire wire,
               fc_receivers receivers, char *parts, size_t part_bytes);
    void count_gather();
    void count_reduction(const std::vector<at::Tensor> &grads);
    size_t part_bytes(size_t param) const;
    size_t bytes_of(const std::vector<uint64_t> &mask) const;
    void count_all_reduction(size_t bytes);
    void reduce_part(char *part, std::vector<uint64_t> &mask, const ReduceOptions &options,
                     const Progress &progress);
    void add_up(const std::vector<fc_source> &sources, char *part, std::vector<uint64_t> &mask);
    void take_partial(char *part, std::vector<uint64_t> &mask);
    void all_reduce_part(char *part, std::vector<uint64_t> &mask, const ReduceOptions &options);
    void post_partial(const Progress &progress);
    void reduce_replicas(const std::vector<fc_source> &sources, const ReduceOptions &options,
                         const Progress &progress);
    void write_own(const std::vector<at::Tensor> &grads, const ReduceOptions &options);
    void write_gradients(fc_unit *lane, const std::vector<fc_source> &sources,
                         const ReduceOptions &options);
    bool write_all_gradients(fc_unit *lane, const std::vector<fc_source> &sources,
                             const ReduceOptions &options);
    template <typename Reduce>
    void write_gradient(size_t index, const ReduceOptions &options, const Reduce &reduce);
    bool takes_over(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                    const ReduceOptions &options) const;
    void take_over(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                   const ReduceOptions &options);
    void adopt(Param &param, const at::Tensor &grad);
    void make_gradient(Param &param, at::Tensor local);
    void make_gradients(bool all);
    void restore_flat();
    bool can_share_flat() const;
    void check_grad_dtype(const Param &param) const;
    bool moves_frozen(const std::vector<at::Tensor> &grads) const;
    void after_write(size_t index, const ReduceOptions &options);
    void inherit_partial_sums(const Unit &former);

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
    bool outlasts_forward_ = false;
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
    bool is_withheld_ = false;       // the storage says so
    bool grads_share_flat_ = false;  // every cached gradient lies in grads_flat_
    bool sums_are_posted_ = false;   // a post of this backward carries them
    bool moves_frozen_ = false;      // the last post's collectives do
    bool has_held_ = false;          // micro-batches left gradients for the next post
    bool has_all_gradients_ = false; // the last post had one of each parameter, of its backward
    bool is_settled_ = false;
    uint64_t gather_bytes_ = 0, publish_bytes_ = 0; // that an all-gather brings, a publish writes
    at::Tensor grads_flat_;
    uint64_t gathered_at_ = 0; // over messages, in steps of optimizers
    size_t flat_uses_ = 0;     // of its storage, right after construction
    Traffic traffic_;
    std::vector<uint64_t> partial_mask_; // of partial_
    fc_domain *replicate_domain_;
    fc_unit *replicate_;
    const Updates *updates_;

    uint64_t steps_seen_, updates_seen_;     // of all optimizers, and of those of the shards
    std::vector<uint32_t> shard_versions_;   // then
    std::vector<const ArrivalHook *> hooks_; // of the parameters, borrowed
    size_t graph_at_ = 0;                    // in graphs_
    static std::vector<Unit *> graphs_;      // units that have one

    std::vector<char> partial_; // HSDP sums that were not all-reduced yet: a part
    std::vector<size_t> deferred_hooks_;
    std::vector<uint64_t> noted_shards_; // what is_written tells writes by
    std::string name_;
    at::Tensor storage_owner_; // keeps storage_ alive
    Lent lent_;
    static Unit *lender_; // whose lent_ is not empty
    static uint64_t n_reopened_;
};

} // namespace fc

#endif
