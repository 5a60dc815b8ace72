// One unit: its parts, each with what it owns, and what takes more than one of them.
#ifndef FC_BIND_FSDP_UNIT_H
#define FC_BIND_FSDP_UNIT_H

#include "bind/device/device.h"
#include "bind/fsdp/accumulated.h"
#include "bind/fsdp/extended.h"
#include "bind/fsdp/graphs.h"
#include "bind/python/raised.h"

namespace fc {

class Fields;
class Range;

// ---- domain.cpp: of the Python object that owns an fc_domain, _C.Domain ----
// Borrowed from the object; TypeError as an exception for anything else.
fc_domain *domain_of(PyObject *object);

// What the domain's units run on, and its communicator there; null for units in shared memory or
// over messages.
Streams *domain_streams(PyObject *object);

// The pool of private memory for unsharded units, one for the process.
fc_slots *slots();

// What the engine calls for a unit whose owner is a GroupObject.
extern const fc_reduction_ops reduction_ops;
// And for one whose owner is a Unit.
const fc_unsharding_ops *unsharding_ops(const Extended *extended);

// What a unit is made of.
struct UnitParts {
    explicit UnitParts(Fields &given);
    // The unit in one of the domains; null: None.
    fc_unit *in(const Ref &domain) const;

    // Of its shards, of its replicas, and of a smaller group that forward reshards to (over
    // messages), or None; and its place in these.
    Ref domain, replicate, smaller;
    size_t index;
    Ref post_mesh;    // of slices that forward leaves, or None
    Ref params, flat; // see Parameters
    Ref on_device;    // see DeviceOptions
};

class Unit : public Parameters, public Accumulated, public UnitGraph {
public:
    // updates: of the shards, borrowed.
    Unit(const UnitParts &parts, const fc_updates *updates);
    ~Unit();

    fc_domain *domain() const { return domain_; }
    fc_domain *replicate_domain() const { return replicate_domain_; }
    DeviceUnit *device() const { return device_.get(); }
    Extended *extended() const { return extended_.get(); }
    fc_unsharding *unsharding() const { return unsharding_.get(); }
    fc_reduction *reduction() const { return gradients_->reduction(); }
    ShardGradients &gradients() const { return *gradients_; }
    const fc_traffic &traffic() const { return *fc_reduction_traffic(reduction()); }

    // Whether a forward that ends with this post_forward_mesh_info leaves slices.
    bool leaves_slices(PyObject *post_forward_mesh_info) const
    {
        return post_mesh_.get() != Py_None && post_forward_mesh_info == post_mesh_.get();
    }
    bool is_unsharded() const
    {
        return fc_unsharding_is_shown(fc_unsharding_state_of(unsharding()));
    }
    // An unshard that was asked for and not waited for.
    bool is_pending() const
    {
        const fc_unsharding_state state = fc_unsharding_state_of(unsharding());
        return state == FC_UNIT_REQUESTED || state == FC_UNIT_GATHERED;
    }
    void reshard(bool to_slice = false)
    {
        await_users();
        check_raised(fc_unsharding_reshard(unsharding(), to_slice));
    }
    // Gathers; registration is left to unshard().
    void unshard_private();
    // Registers and shows the unsharded parameters.
    void unshard();
    // True while every shard is where set-up put it; false asks for a rebuild.
    bool is_intact() const
    {
        return Parameters::is_intact() && (device_ == nullptr || device_->stages_all(params_));
    }
    // Moves the shards to where the unsharded buffer lies.
    void *take_residence();

    // A backward goes through the unit.
    void await_gradients()
    {
        await();
        expect_gradients();
    }
    // Keeps gradients for a later backward; peers that reduce the unit meanwhile get an error.
    void accumulate()
    {
        await_users();
        if (keep_gradients()) {
            fc_reduction_accumulate(reduction());
        }
    }
    // Hands what there is to the reduction, zeros for unused parameters if `with_unused`.
    void submit(bool with_unused, const fc_reduce_options &options);
    void show_wait(bool begins); // of a submission for room
    // Sums over shards that the replicas have not seen yet (HSDP).
    bool has_partial_sums() const { return fc_reduction_has_sums(reduction()); }
    // True while gradients of earlier backwards wait for a reduction.
    bool has_accumulated() const { return has_gradients() || has_partial_sums(); }
    using Accumulated::has_held;
    // Takes them from the unit in whose place this one comes, in the dtypes of this one. On a
    // device sums that wait for the replicas need the same layout.
    void inherit(Unit &former)
    {
        take_from(former);
        gradients_->inherit(*former.gradients_);
    }
    // Drops gradients that were not reduced.
    void drop_gradients();
    void release_unused() { gradients_->release_unused(); }
    void run_deferred_hooks() { gradients_->run_deferred_hooks(); }
    // After submit(): true if nothing of the unit is left for the end of backward.
    bool is_settled() const
    {
        return has_all_gradients() && !has_partial_sums() && fc_unsharding_is_settled(unsharding());
    }

    // On a device: the caller's stream may be another than the one that units compute in.
    void show_caller()
    {
        if (device_ != nullptr) {
            device_->show_caller();
        }
    }

private:
    void await_users();
    fc_unsharding_options make_device(const UnitParts &parts);
    void make_gradients();

    // Keep the domains alive until all below is gone.
    const std::array<Ref, 3> domains_;
    Ref post_mesh_;
    fc_domain *domain_, *replicate_domain_;
    std::unique_ptr<DeviceUnit> device_; // null in shared memory and over messages
    std::unique_ptr<Extended> extended_; // null where shards are all that is gathered
    Owned<fc_reduction, fc_reduction_destroy> reduction_;
    std::unique_ptr<ShardGradients> gradients_; // with both
    Owned<fc_unsharding, fc_unsharding_destroy> unsharding_;
    std::vector<std::unique_ptr<Range>> waits_;
};

} // namespace fc

#endif
