// A unit and the graphs that its forwards have made: what these read, and which of it is outdated.
#include "bind/fsdp/steps.h"
#include "bind/fsdp/unit.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace fc {

std::vector<Unit *> Unit::graphs_;

void Unit::watch_gradients(PyObject *state)
{
    if (arrivals_ == nullptr) {
        auto arrivals = std::make_shared<Arrivals>();
        arrivals->state = checked(PyWeakref_NewRef(state, nullptr));
        arrivals->unit = fc_unit_name(shard_);
        arrivals_ = std::move(arrivals);
    }
    for (size_t i = 0; i < params_.size(); i++) {
        if (params_[i].is_trained) {
            hooks_[i] = watch_arrivals(params_[i].unsharded_tensor, arrivals_, hooks_[i]);
        }
    }
}

void Unit::begin_graph(PyObject *state)
{
    watch_gradients(state);
    if (!std::exchange(has_graph_, true)) {
        graph_at_ = graphs_.size();
        graphs_.push_back(this);
        fc_unsharding_set_graph(unsharding(), true);
    }
}

void Unit::end_graph()
{
    if (!std::exchange(has_graph_, false)) {
        return;
    }
    graphs_.back()->graph_at_ = graph_at_;
    graphs_[graph_at_] = graphs_.back();
    graphs_.pop_back();
    fc_unsharding_set_graph(unsharding(), false);
}

bool Unit::note_updates()
{
    if (steps_seen_ == n_steps()) {
        return false;
    }
    steps_seen_ = n_steps();
    const uint64_t n = n_updates();
    if (n == updates_seen_) {
        return false;
    }
    updates_seen_ = n;
    bool has_changed_all = true;
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        const uint32_t versions = p.shard_versions();
        if (std::exchange(shard_versions_[i], versions) != versions) {
            p.unsharded_tensor.unsafeGetTensorImpl()->bump_version();
            p.version++;
        } else {
            has_changed_all = false;
        }
    }
    return has_changed_all;
}

void Unit::note_step()
{
    // An optimizer that steps in backward does so behind the backward of the unit.
    if (graphs_.empty() || torch::autograd::get_current_graph_task_id() != -1) {
        return;
    }
    for (size_t i = graphs_.size(); i-- > 0;) {
        if (Unit *unit = graphs_[i]; unit->note_updates()) {
            unit->end_graph(); // which takes another unit's place in the list
        }
    }
}

} // namespace fc
