// A unit and the graphs that its forwards have made: what these read, and which of it is outdated.
#ifndef FC_BIND_FSDP_GRAPHS_H
#define FC_BIND_FSDP_GRAPHS_H

#include "bind/fsdp/parameters.h"
#include "engine/updates.h"

#include <torch/csrc/autograd/function_hook.h>

namespace fc {

// Shared by a unit and the hooks of its unsharded parameters, which graphs may keep for longer.
struct Arrivals {
    std::atomic<bool> is_expected{false}; // pre-backward has run, and post-backward has not
    Ref state;                            // weak; null once the unit is gone
    std::string unit;                     // its name, for people
};

using ArrivalHook = torch::autograd::PostAccumulateGradHook;

class UnitGraph {
public:
    // All borrowed; updates: of the shards.
    UnitGraph(const fc_unit *unit, std::vector<Param> &params, const fc_updates *updates);
    ~UnitGraph();

    // After a forward with gradients, before its reshard: until end_graph() nodes inside of the
    // unit can read its parameters where these stay in place, and `state` is told of gradients that
    // come from there.
    void begin_graph(PyObject *state);
    // Gradients are told of, though nothing is read: a recomputation.
    void watch_gradients(PyObject *state);
    // Nothing is left of the unit for another backward.
    void end_graph();
    // Steps of optimizers, and loads, that the shards have seen; and had when they were noted last.
    uint64_t n_updates() const { return fc_updates_count(updates_); }
    uint64_t updates_seen() const { return updates_seen_; }
    // Weights that an optimizer has changed since: graphs that have saved them find out by their
    // versions, as those of a module that is not sharded.
    // True if these are all of the unit's.
    bool note_updates();
    // The same, after a step, for all units whose graphs would not meet an unshard first.
    static void note_step();
    const std::shared_ptr<Arrivals> &shared_arrivals() const { return arrivals_; }
    // Post-backward, or its backward was dropped. True if one had gone through the unit.
    bool end_awaiting()
    {
        return arrivals_ != nullptr &&
               arrivals_->is_expected.exchange(false, std::memory_order_relaxed);
    }

protected:
    // From then on, for as long as this one.
    void set_unsharding(fc_unsharding *unsharding) { unsharding_ = unsharding; }
    // A backward goes through the unit.
    void expect_gradients()
    {
        if (arrivals_ != nullptr) {
            arrivals_->is_expected.store(true, std::memory_order_relaxed);
        }
    }

private:
    static std::vector<UnitGraph *> with_graph_; // of the process

    const fc_unit *unit_;
    std::vector<Param> &read_;
    fc_unsharding *unsharding_ = nullptr; // borrowed
    const fc_updates *updates_;
    uint64_t steps_seen_, updates_seen_;     // of all optimizers, and of those of the shards
    std::shared_ptr<Arrivals> arrivals_;     // from the first graph on
    bool has_graph_ = false;                 // it is in with_graph_
    size_t graph_at_ = 0;                    // there
    std::vector<uint32_t> shard_versions_;   // when updates were noted
    std::vector<const ArrivalHook *> hooks_; // of the parameters, borrowed
};

} // namespace fc

#endif
