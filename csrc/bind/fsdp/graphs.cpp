// A unit and the graphs that its forwards have made: what these read, and which of it is outdated.
#include "bind/fsdp/graphs.h"

#include <torch/csrc/autograd/graph_task.h>

#include <utility>

namespace fc {

class UnitGraph::Registry {
public:
    void add(UnitGraph *unit)
    {
        unit->graph_at_ = units_.size();
        units_.push_back(unit);
    }
    void remove(const UnitGraph *unit)
    {
        units_.back()->graph_at_ = unit->graph_at_;
        units_[unit->graph_at_] = units_.back();
        units_.pop_back();
    }
    const std::vector<UnitGraph *> &units() const { return units_; }

private:
    std::vector<UnitGraph *> units_;
};

UnitGraph::Registry &UnitGraph::registry()
{
    static Registry all;
    return all;
}

UnitGraph::UnitGraph(const fc_unit *unit, std::vector<Param> &params, const Unsharding &unsharding,
                     const fc_updates *updates)
    : unit_(unit), read_(params), unsharding_(unsharding), updates_(updates),
      steps_seen_(n_steps()), updates_seen_(fc_updates_count(updates)), hooks_(params.size())
{
    for (const Param &p : params) {
        shard_versions_.push_back(p.shard_versions());
    }
}

UnitGraph::~UnitGraph()
{
    end_graph();
    if (arrivals_ != nullptr) {
        arrivals_->is_expected = false;
        arrivals_->state = Ref();
    }
}

void UnitGraph::watch_gradients(PyObject *state)
{
    if (arrivals_ == nullptr) {
        auto arrivals = std::make_shared<Arrivals>();
        arrivals->state = checked(PyWeakref_NewRef(state, nullptr));
        arrivals->unit = fc_unit_name(unit_);
        arrivals_ = std::move(arrivals);
    }
    for (size_t i = 0; i < read_.size(); i++) {
        if (read_[i].is_trained) {
            hooks_[i] = watch_arrivals(read_[i].unsharded_tensor, arrivals_, hooks_[i]);
        }
    }
}

void UnitGraph::begin_graph(PyObject *state)
{
    watch_gradients(state);
    if (!std::exchange(has_graph_, true)) {
        registry().add(this);
        fc_unsharding_set_graph(unsharding_.unsharding(), true);
    }
}

void UnitGraph::end_graph()
{
    if (!std::exchange(has_graph_, false)) {
        return;
    }
    registry().remove(this);
    fc_unsharding_set_graph(unsharding_.unsharding(), false);
}

bool UnitGraph::note_updates()
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
    for (size_t i = 0; i < read_.size(); i++) {
        Param &p = read_[i];
        const uint32_t versions = p.shard_versions();
        if (std::exchange(shard_versions_[i], versions) != versions) {
            const uint32_t before = p.unsharded_versions();
            p.bump_unsharded_versions();
            p.version += p.unsharded_versions() - before;
        } else {
            has_changed_all = false;
        }
    }
    return has_changed_all;
}

void UnitGraph::note_step()
{
    // An optimizer that steps in backward does so behind the backward of the unit.
    const std::vector<UnitGraph *> &units = registry().units();
    if (units.empty() || torch::autograd::get_current_graph_task_id() != -1) {
        return;
    }
    for (size_t i = units.size(); i-- > 0;) {
        if (UnitGraph *unit = units[i]; unit->note_updates()) {
            unit->end_graph(); // which takes another unit's place in the list
        }
    }
}

} // namespace fc
