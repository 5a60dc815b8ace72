// A unit and the graphs that its forwards have made: what these read, and which of it is outdated.
#include "bind/fsdp/graphs.h"

#include "bind/fsdp/state.h"
#include "bind/python/objects.h"
#include "bind/python/untraced.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

namespace fc {

std::vector<UnitGraph *> UnitGraph::with_graph_;

namespace {

void tell_of_arrival(const Arrivals &arrivals)
{
    Gil gil;
    const Untraced untraced;
    PyObject *state = arrivals.state ? PyWeakref_GetObject(arrivals.state.get()) : Py_None;
    if (state == Py_None) {
        ask_python(Call::refuse_orphan, to_python(arrivals.unit.c_str()).get());
    }
    const Ref kept = Ref::borrow(state);
    state_on_arrival(reinterpret_cast<StateObject *>(state));
}

struct Watch : public ArrivalHook {
    std::shared_ptr<Arrivals> arrivals;
    std::unique_ptr<ArrivalHook> users;

    void operator()(const torch::autograd::Variable &param) override
    {
        if (!arrivals->is_expected.load(std::memory_order_relaxed)) {
            tell_of_arrival(*arrivals);
        }
        if (users != nullptr) {
            (*users)(param);
        }
    }
};

// Calls state_on_arrival() for a gradient of `param` that is not expected. There is one such hook
// to a tensor: a user's, if one is there, is called by this one. Returns it, borrowed.
const ArrivalHook *watch_arrivals(const at::Tensor &param,
                                  const std::shared_ptr<Arrivals> &arrivals,
                                  const ArrivalHook *installed)
{
    std::unique_ptr<ArrivalHook> &hook = torch::autograd::impl::post_acc_grad_hooks(param);
    if (hook.get() != installed || installed == nullptr) {
        auto watch = std::make_unique<Watch>();
        watch->arrivals = arrivals;
        watch->users = std::move(hook);
        hook = std::move(watch);
    }
    return hook.get();
}

} // namespace

UnitGraph::UnitGraph(const fc_unit *unit, std::vector<Param> &params, const fc_updates *updates)
    : unit_(unit), read_(params), updates_(updates), steps_seen_(n_steps()),
      updates_seen_(fc_updates_count(updates)), hooks_(params.size())
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
        graph_at_ = with_graph_.size();
        with_graph_.push_back(this);
        fc_unsharding_set_graph(unsharding_, true);
    }
}

void UnitGraph::end_graph()
{
    if (!std::exchange(has_graph_, false)) {
        return;
    }
    with_graph_.back()->graph_at_ = graph_at_;
    with_graph_[graph_at_] = with_graph_.back();
    with_graph_.pop_back();
    fc_unsharding_set_graph(unsharding_, false);
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
    if (with_graph_.empty() || torch::autograd::get_current_graph_task_id() != -1) {
        return;
    }
    for (size_t i = with_graph_.size(); i-- > 0;) {
        if (UnitGraph *unit = with_graph_[i]; unit->note_updates()) {
            unit->end_graph(); // which takes another unit's place in the list
        }
    }
}

} // namespace fc
