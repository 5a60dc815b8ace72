// Gathers over messages: a unit's own, and those that come along with it.
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/state.h"
#include "bind/fsdp/steps.h"
#include "engine/batch.h"
#include "engine/order.h"
#include "engine/root.h"

#include <algorithm>
#include <iterator>

namespace fc {

// Small units that followed this one in the backward before, and still have to be gathered.
std::vector<Unit *> Unit::followers() const
{
    std::vector<Unit *> found;
    fc_order_walk walk = fc_order_after(shard_);
    while (fc_unit *next = fc_order_next(&walk)) {
        Unit *unit = owner_unit(next);
        if (unit != nullptr && unit != this && !unit->unsharded_ && !unit->pending_ &&
            !unit->keeps_storage_ && std::find(found.begin(), found.end(), unit) == found.end()) {
            fc_order_take(&walk, next);
            found.push_back(unit);
        }
    }
    return found;
}

// In one collective, whose parts they take to their slots.
void Unit::gather_messages_of(const std::vector<Unit *> &units)
{
    std::vector<std::vector<const void *>> shards(units.size());
    std::vector<fc_batch_gather> gathers;
    for (size_t i = 0; i < units.size(); i++) {
        for (const Param &p : units[i]->params_) {
            shards[i].push_back(p.local.const_data_ptr());
        }
        units[i]->take_slot();
        gathers.push_back(
            {units[i]->shard_, shards[i].data(), units[i]->slot_, units[i]->has_hooks()});
    }
    void *pack = nullptr;
    check(fc_slots_acquire(slots(), fc_batch_pack_bytes(gathers.data(), gathers.size()), &pack));
    const fc_status status =
        fc_batch_all_gather(gathers.data(), gathers.size(), static_cast<char *>(pack));
    fc_slots_release(slots(), pack);
    check(status);
}

// A failure leaves all of them as they were.
void Unit::gather_messages()
{
    std::vector<Unit *> units;
    if (fc_domain_in_backward(domain_)) {
        units = followers();
    }
    units.insert(units.begin(), this);
    std::vector<Unit *> without; // memory, until now
    std::copy_if(units.begin(), units.end(), std::back_inserter(without),
                 [](const Unit *unit) { return unit->slot_ == nullptr; });
    try {
        gather_messages_of(units);
    } catch (...) {
        for (Unit *unit : without) {
            unit->release_slot();
        }
        throw;
    }
    for (Unit *unit : units) {
        unit->gathered_at_ = n_steps();
        unit->traffic_->copied += fc_unit_layout(unit->shard_)->pack_bytes + unit->bytes_;
        if (unit != this) {
            unit->come_along();
        }
    }
}

// Gathered with another unit, and pending until it is used.
void Unit::come_along()
{
    fc_root_note_use(shard_);
    for (size_t i = 0; i < params_.size(); i++) {
        noted_shards_[i] = params_[i].shard_mark();
    }
    traffic_->gathered += gather_bytes_;
    pending_ = is_ahead_ = came_along_ = true;
    fc_order_set_ahead(shard_, true);
}

// RuntimeError if a shard was written since: peers have read the value before.
void Unit::claim_ahead()
{
    if (!std::exchange(is_ahead_, false)) {
        return;
    }
    fc_order_set_ahead(shard_, false);
    for (size_t i = 0; i < params_.size(); i++) {
        if (noted_shards_[i] != params_[i].shard_mark()) {
            drop_pending();
            PyErr_Format(
                PyExc_RuntimeError,
                "the shard of parameter '%s' was written on rank %d within a backward, "
                "after other ranks had gathered it: write shards between backward and "
                "forward, or set FSDP_C_BATCH_BYTES=0, which gathers units one by one",
                parameter_name(params_[i]).c_str(),
                fc_transport_global_rank(fc_domain_transport(domain_), fc_domain_rank(domain_)));
            throw_python();
        }
    }
}

void Unit::drop_ahead()
{
    if (std::exchange(is_ahead_, false)) {
        fc_order_set_ahead(shard_, false);
        came_along_ = false;
        drop_pending();
    }
}

} // namespace fc
