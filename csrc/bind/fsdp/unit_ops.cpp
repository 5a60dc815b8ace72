// The engine asks a unit's tensors for what it needs and where its sums go, and tells them where
// they lie and that sums are there.
#include "bind/fsdp/events.h"
#include "bind/fsdp/state.h"

#include <c10/core/StreamGuard.h>

#include <optional>

namespace fc {

namespace {

Unit &owner_of(void *owner)
{
    return *static_cast<Unit *>(owner);
}

template <auto call> constexpr Operation<owner_of, call> on_unit;

void list_shards(const Unit &unit, const void **shards_out)
{
    for (const Param &p : unit.params()) {
        *shards_out++ = p.local.const_data_ptr();
    }
}

void list_marks(const Unit &unit, uint64_t *marks_out)
{
    for (const Param &p : unit.params()) {
        *marks_out++ = p.shard_mark();
    }
}

const fc_unsharding_ops on_parameters = {
    .show = on_unit<&Unit::show>,
    .hide = on_unit<&Unit::hide>,
    .withhold = on_unit<&Unit::withhold>,
    .enter = on_unit<&Unit::enter>,
    .leave = on_unit<&Unit::leave>,
    .leave_slices = on_unit<&Unit::leave_slices>,
    .shards = on_unit<list_shards>,
    .mark = on_unit<list_marks>,
    .find_changed = on_unit<&Unit::find_changed>,
    .find_written = on_unit<&Unit::find_written>,
    .find_written_slice = on_unit<&Unit::find_written_slice>,
    .tell_of_write = on_unit<&Unit::tell_of_write>,
    .is_observed = on_unit<&Unit::has_hooks>,
    .n_steps = [](void *) { return n_steps(); },
    .read_shards = on_unit<[](Unit &unit) { unit.device()->streams().read_shards(); }>,
    .can_reside = on_unit<&Unit::can_reside>,
    .reside = on_unit<&Unit::take_residence>,
};

Extended &extended_of(void *owner)
{
    return *owner_of(owner).extended();
}

template <auto call> constexpr Operation<extended_of, call> on_extended;

fc_unsharding_ops extended_ops(bool has_extensions)
{
    fc_unsharding_ops ops = on_parameters;
    ops.show = on_unit<[](Unit &unit, void *memory) {
        unit.show(memory);
        unit.extended()->show(memory);
        unit.show_caller(); // which makes what it shows of it
    }>;
    ops.hide = on_unit<[](Unit &unit, bool keeps_size) {
        unit.hide(keeps_size);
        unit.extended()->hide();
    }>;
    ops.shards = on_extended<&Extended::shards>;
    ops.mark = on_extended<&Extended::mark>;
    ops.find_changed = on_extended<&Extended::find_changed>;
    ops.make = on_unit<[](Unit &unit) {
        std::optional<c10::StreamGuard> guard; // on a device, where shards are packed
        if (unit.device() != nullptr) {
            guard.emplace(unit.device()->streams().copying_in());
        }
        unit.extended()->make();
    }>;
    if (has_extensions) {
        ops.fill = on_unit<[](Unit &unit) {
            unit.extended()->fill();
            if (unit.device() != nullptr) {
                unit.device()->streams().hold_copies();
            }
        }>;
    }
    ops.forget = on_extended<&Extended::forget>;
    ops.can_reside = [](void *) { return false; };
    return ops;
}

ShardGradients &gradients_of(void *owner)
{
    return as_group(owner).unit->gradients();
}

template <auto call> constexpr Operation<gradients_of, call> on_gradients;

} // namespace

const fc_reduction_ops reduction_ops = {
    .options = Operation<as_group, reduce_options>(),
    .flat = on_gradients<&ShardGradients::flat>,
    .assign_flat = on_gradients<&ShardGradients::assign_flat>,
    .prepare = on_gradients<&ShardGradients::prepare>,
    .target = on_gradients<&ShardGradients::target_of>,
    .assign = on_gradients<&ShardGradients::assign>,
    .release = [](void *memory) { delete static_cast<Taken *>(memory); },
    .wait = [](void *owner, bool begins) { as_group(owner).unit->show_wait(begins); },
    .find_frozen = [](void *owner, size_t from) { return as_group(owner).unit->find_frozen(from); },
    .name =
        [](void *owner, size_t param, char *out, size_t bytes) {
            (void)snprintf(out, bytes, "%s",
                           parameter_name(as_group(owner).unit->params()[param]).c_str());
        },
};

const fc_unsharding_ops *unsharding_ops(const Extended *extended)
{
    static const fc_unsharding_ops without = extended_ops(false), with = extended_ops(true);
    return extended == nullptr ? &on_parameters : extended->has_extensions() ? &with : &without;
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
