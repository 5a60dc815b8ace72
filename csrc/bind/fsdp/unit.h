// One unit's tensors: what Python registers on modules, and how it follows the core's buffers.
#ifndef FC_BIND_FSDP_UNIT_H
#define FC_BIND_FSDP_UNIT_H

#include "bind/device/device.h"
#include "bind/fsdp/arrivals.h"
#include "bind/fsdp/parameters.h"
#include "bind/fsdp/steps.h"
#include "bind/python/raised.h"
#include "engine/domain.h"
#include "engine/reduction.h"
#include "engine/unsharding.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace fc {

// A backward's gradients, as the engine holds them.
struct Taken {
    std::vector<at::Tensor> tensors; // by parameter; undefined: none
    std::vector<fc_gradient> grads;
};

class Range;

// What the engine calls for a unit whose owner is a GroupObject; write.cpp.
const fc_reduction_ops *reduction_ops();
// And for one whose owner is a Unit; unsharding_ops.cpp.
const fc_unsharding_ops *unsharding_ops();

class alignas(FC_CACHE_LINE) Unit : public Parameters {
public:
    // rows, flat: see Parameters; on_device: see DeviceOptions. updates: of the shards, borrowed.
    Unit(PyObject *domain, size_t index, PyObject *replicate_domain, PyObject *rows,
         const at::Tensor &flat, PyObject *on_device, const Updates *updates);
    ~Unit();
    Unit(const Unit &) = delete;
    Unit &operator=(const Unit &) = delete;

    fc_domain *domain() const { return domain_; }
    fc_domain *replicate_domain() const { return replicate_domain_; }
    DeviceUnit *device() const { return device_.get(); }
    // Steps of optimizers, and loads, that the shards have seen.
    uint64_t n_updates() const { return updates_->n(); }

    // ---- parameters; see engine/unsharding.h ----
    fc_unsharding *unsharding() const { return unsharding_.get(); }
    bool is_unsharded() const
    {
        return fc_unsharding_is_shown(fc_unsharding_state_of(unsharding()));
    }
    // An unshard that was asked for and not waited for.
    bool is_pending() const;
    bool has_own_memory() const { return fc_unsharding_has_own_memory(unsharding()); }
    bool is_resident() const { return fc_unsharding_is_resident(unsharding()); }
    // Registers and shows the unsharded parameters. Inside a phase they are the shared ones.
    void unshard();
    // The private copy of an explicit unshard: data now, registration by unshard().
    void unshard_private();
    void reshard(bool to_slice = false)
    {
        check_raised(fc_unsharding_reshard(unsharding(), to_slice));
    }
    void end_forward() { check_raised(fc_unsharding_end_forward(unsharding())); }
    void keep_after_forward() { fc_unsharding_stay_unsharded(unsharding()); }
    bool is_kept_after_forward() const { return fc_unsharding_stays_unsharded(unsharding()); }
    void make_unavailable() { fc_unsharding_withhold(unsharding()); }
    void keep() { check_raised(fc_unsharding_keep(unsharding())); }
    void keep_storage(bool keeps) { fc_unsharding_keep_memory(unsharding(), keeps); }
    void drop_pending() { fc_unsharding_drop(unsharding()); }
    void drop_ahead() { fc_unsharding_drop_ahead(unsharding()); }
    // True while every shard is where set-up put it; false asks for a rebuild.
    bool is_intact() const;
    bool publishes() const { return fc_unsharding_publishes(unsharding()); }
    void publish() { fc_unsharding_publish(unsharding()); }
    void note_shards() { fc_unsharding_note_shards(unsharding()); }
    bool was_written() const { return fc_unsharding_was_written(unsharding()); }
    void check_unwritten() const { check_raised(fc_unsharding_check_unwritten(unsharding())); }
    // Moves the shards to where the unsharded buffer lies.
    void *take_residence();

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
    bool is_read_apart() const { return fc_unsharding_is_read_apart(unsharding()); }
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
    // After submit(): true, once until the next unshard, if nothing of the unit is left for the end
    // of backward.
    bool finish_step()
    {
        return fc_unsharding_finish(unsharding(), has_all_gradients_ && !has_partial_sums());
    }
    fc_reduction *reduction() const { return reduction_.get(); }
    const fc_traffic &traffic() const { return *fc_reduction_traffic(reduction_.get()); }

private:
    void make_unsharding(PyObject *domain, PyObject *replicate_domain, PyObject *on_device);
    std::vector<at::Tensor> take_gradients(bool with_unused, bool with_partial_sums);
    void submit_device(const Taken &taken, const fc_reduce_options &options);
    void add_apart(const std::vector<at::Tensor> &grads, const std::vector<size_t> &present,
                   uint64_t print, const fc_reduce_options &options);
    at::Tensor make_grad_buffer(size_t bytes) const;
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
    std::unique_ptr<DeviceUnit> device_; // null in shared memory and over messages
    std::unique_ptr<fc_unsharding, decltype(&fc_unsharding_destroy)> unsharding_;
    bool awaits_gradients_ = false;
    bool has_widened_ = false;      // a parameter whose gradients are wider than it is
    bool has_graph_ = false;        // see begin_graph()
    bool grads_share_flat_ = false; // every cached gradient lies in grads_flat_
    bool has_accumulated_ = false;  // micro-batches left gradients for the next submission
    bool has_all_gradients_ =
        false; // the last submission had one of each parameter, of its backward
    std::shared_ptr<Arrivals> arrivals_; // from the first graph on
    at::Tensor grads_flat_;
    size_t flat_uses_ = 0; // of its storage, right after construction
    std::unique_ptr<fc_reduction, decltype(&fc_reduction_destroy)> reduction_;
    fc_domain *replicate_domain_;
    fc_unit *replicate_;
    const Updates *updates_;

    uint64_t steps_seen_, updates_seen_;     // of all optimizers, and of those of the shards
    std::vector<uint32_t> shard_versions_;   // then
    std::vector<const ArrivalHook *> hooks_; // of the parameters, borrowed
    size_t graph_at_ = 0;                    // in graphs_
    static std::vector<Unit *> graphs_;      // units that have one

    std::vector<size_t> deferred_hooks_;
    std::vector<std::unique_ptr<Range>> waits_; // of submissions for room
    at::Tensor added_to_, addend_; // between target_of() and assign(): the user's own gradient
};

} // namespace fc

#endif
