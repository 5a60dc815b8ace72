// The engine asks a unit's tensors for what it needs, and tells them where they lie.
#include "bind/fsdp/unit.h"

namespace fc {

namespace {

Unit &owner_of(void *owner)
{
    return *static_cast<Unit *>(owner);
}

const fc_unsharding_ops on_parameters = {
    .show = [](void *owner, void *memory) { owner_of(owner).show(memory); },
    .hide = [](void *owner, bool keeps_size) { owner_of(owner).hide(keeps_size); },
    .withhold = [](void *owner, bool is_withheld) { owner_of(owner).withhold(is_withheld); },
    .enter = [](void *owner) { return kept([&] { owner_of(owner).enter(); }); },
    .leave = [](void *owner) { return kept([&] { owner_of(owner).leave(); }); },
    .shards =
        [](void *owner, const void **shards_out) {
            for (const Param &p : owner_of(owner).params()) {
                *shards_out++ = p.local.const_data_ptr();
            }
        },
    .mark =
        [](void *owner, uint64_t *marks_out) {
            for (const Param &p : owner_of(owner).params()) {
                *marks_out++ = p.shard_mark();
            }
        },
    .find_changed = [](void *owner, const uint64_t *marks,
                       size_t from) { return owner_of(owner).find_changed(marks, from); },
    .find_written = [](void *owner, size_t from,
                       bool maybe) { return owner_of(owner).find_written(from, maybe); },
    .tell_of_write =
        [](void *owner, size_t param, fc_written what) {
            return kept([&] { owner_of(owner).tell_of_write(param, what); });
        },
    .is_observed = [](void *owner) { return owner_of(owner).has_hooks(); },
    .n_steps = [](void *) { return n_steps(); },
    .read_shards =
        [](void *owner) { return kept([&] { owner_of(owner).device()->read_shards(); }); },
    .can_reside = [](void *owner) { return owner_of(owner).can_reside(); },
    .reside =
        [](void *owner, void **home_out) {
            return kept([&] { *home_out = owner_of(owner).take_residence(); });
        },
};

Extended &extended_of(void *owner)
{
    return *owner_of(owner).extended();
}

fc_unsharding_ops on_extended(bool has_extensions)
{
    fc_unsharding_ops ops = on_parameters;
    ops.show = [](void *owner, void *memory) {
        owner_of(owner).show(memory);
        extended_of(owner).show(memory);
    };
    ops.hide = [](void *owner, bool keeps_size) {
        owner_of(owner).hide(keeps_size);
        extended_of(owner).hide();
    };
    ops.shards = [](void *owner, const void **out) { extended_of(owner).shards(out); };
    ops.mark = [](void *owner, uint64_t *marks_out) { extended_of(owner).mark(marks_out); };
    ops.find_changed = [](void *owner, const uint64_t *marks, size_t from) {
        return extended_of(owner).find_changed(marks, from);
    };
    ops.make = [](void *owner) { return kept([&] { extended_of(owner).make(); }); };
    if (has_extensions) {
        ops.fill = [](void *owner) { return kept([&] { extended_of(owner).fill(); }); };
    }
    ops.forget = [](void *owner) { extended_of(owner).forget(); };
    return ops;
}

int rank_of(const fc_unit *unit)
{
    fc_domain *domain = fc_unit_domain(unit);
    return fc_transport_global_rank(fc_domain_transport(domain), fc_domain_rank(domain));
}

} // namespace

const fc_unsharding_ops *unsharding_ops(const Extended *extended)
{
    static const fc_unsharding_ops without = on_extended(false), with = on_extended(true);
    return extended == nullptr ? &on_parameters : extended->has_extensions() ? &with : &without;
}

void Parameters::tell_of_write(size_t param, fc_written what) const
{
    const std::string name = parameter_name(params_[param]);
    if (what == FC_WRITTEN_RESIDENT) {
        const std::string text =
            "the unsharded parameter '" + name + "' of FSDP unit '" + name_ +
            "' was written: on one rank it is the shard itself, so the write stays. Later writes "
            "to the unit's parameters last until they are resharded, as on several ranks; write to "
            "the sharded parameters, outside of forward and backward, what is meant to stay";
        check(PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1));
        return;
    }
    const char *when = what == FC_WRITTEN_IN_FORWARD
                           ? "within a forward that had read the parameter before, so other ranks "
                             "may have read either value: write shards between two forwards, or "
                             "before their first use in one, or set FSDP_C_TRANSPORT=callback, "
                             "which gathers for each use"
                           : "within a backward, after other ranks had gathered it: write shards "
                             "between backward and forward, or set FSDP_C_BATCH_BYTES=0, which "
                             "gathers units one by one";
    PyErr_Format(PyExc_RuntimeError, "the shard of parameter '%s' was written on rank %d %s",
                 name.c_str(), rank_of(shard_), when);
    throw_python();
}

} // namespace fc
