// The engine asks a unit where its sums go, and tells it that they are there.
#include "bind/fsdp/events.h"
#include "bind/fsdp/state.h"
#include "bind/fsdp/unit.h"

#include <memory>

namespace fc {

namespace {

template <typename Body> fc_status on_unit(void *owner, Body &&body)
{
    return kept([&] { body(*static_cast<GroupObject *>(owner)->unit); });
}

fc_status options_of(void *owner, fc_reduce_options *options_out)
{
    return on_unit(owner, [&](Unit &) {
        *options_out = reduce_options(static_cast<const GroupObject *>(owner));
    });
}

const fc_reduction_ops ops = {
    options_of,
    [](void *owner, void **out) {
        return on_unit(owner, [&](Unit &unit) { *out = unit.gradients().flat(); });
    },
    [](void *owner, const fc_reduce_options *options) {
        return on_unit(owner, [&](Unit &unit) { unit.gradients().assign_flat(*options); });
    },
    [](void *owner) { return on_unit(owner, [](Unit &unit) { unit.gradients().prepare(); }); },
    [](void *owner, size_t param, void **out, bool *accumulate) {
        return on_unit(owner,
                       [&](Unit &unit) { *out = unit.gradients().target_of(param, accumulate); });
    },
    [](void *owner, size_t param, const fc_reduce_options *options) {
        return on_unit(owner, [&](Unit &unit) { unit.gradients().assign(param, *options); });
    },
    [](void *memory) { delete static_cast<Taken *>(memory); },
    [](void *owner, bool begins) { static_cast<GroupObject *>(owner)->unit->show_wait(begins); },
};

} // namespace

const fc_reduction_ops *reduction_ops()
{
    return &ops;
}

void Unit::show_wait(bool begins)
{
    if (begins) {
        waits_.push_back(std::make_unique<Range>("FSDP::post_backward_rs_wait", this));
    } else {
        waits_.pop_back();
    }
}

} // namespace fc
