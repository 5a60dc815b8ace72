// The engine asks a unit where its sums go, and tells it that they are there.
#include "bind/fsdp/events.h"
#include "bind/fsdp/state.h"
#include "bind/fsdp/unit.h"

#include <memory>

namespace fc {

namespace {

ShardGradients &gradients_of(void *owner)
{
    return as_group(owner).unit->gradients();
}

template <auto call> constexpr Operation<gradients_of, call> on_gradients;

const fc_reduction_ops ops = {
    .options = Operation<as_group, reduce_options>(),
    .flat = on_gradients<&ShardGradients::flat>,
    .assign_flat = on_gradients<&ShardGradients::assign_flat>,
    .prepare = on_gradients<&ShardGradients::prepare>,
    .target = on_gradients<&ShardGradients::target_of>,
    .assign = on_gradients<&ShardGradients::assign>,
    .release = [](void *memory) { delete static_cast<Taken *>(memory); },
    .wait = [](void *owner, bool begins) { as_group(owner).unit->show_wait(begins); },
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
