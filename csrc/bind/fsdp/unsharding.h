// A unit's parameters between shards and the whole: the engine's object, with exceptions.
#ifndef FC_BIND_FSDP_UNSHARDING_H
#define FC_BIND_FSDP_UNSHARDING_H

#include "bind/core.h"
#include "bind/python/raised.h"
#include "engine/unsharding.h"

namespace fc {

// See engine/unsharding.h.
class Unsharding {
public:
    fc_unsharding *unsharding() const { return engine_.get(); }
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
    // Slices stand in the place of the shards.
    bool has_slices() const { return fc_unsharding_has_slices(unsharding()); }
    bool has_own_memory() const { return fc_unsharding_has_own_memory(unsharding()); }
    bool is_resident() const { return fc_unsharding_is_resident(unsharding()); }
    bool is_read_apart() const { return fc_unsharding_is_read_apart(unsharding()); }
    void reshard(bool to_slice = false)
    {
        check_raised(fc_unsharding_reshard(unsharding(), to_slice));
    }
    void end_forward() { check_raised(fc_unsharding_end_forward(unsharding())); }
    void keep_after_forward() { fc_unsharding_stay_unsharded(unsharding()); }
    bool is_kept_after_forward() const { return fc_unsharding_stays_unsharded(unsharding()); }
    void make_unavailable() { fc_unsharding_withhold(unsharding()); }
    void keep() { check_raised(fc_unsharding_keep(unsharding())); }
    void keep_storage(bool keeps) { fc_unsharding_keep_memory(unsharding(), keeps); }
    void drop_pending() { fc_unsharding_drop(unsharding()); }
    void drop_ahead() { fc_unsharding_drop_ahead(unsharding()); }
    bool publishes() const { return fc_unsharding_publishes(unsharding()); }
    void publish() { check_raised(fc_unsharding_publish(unsharding())); }
    void note_shards() { fc_unsharding_note_shards(unsharding()); }
    bool is_stale() const { return fc_unsharding_is_stale(unsharding()); }
    void check_unwritten() const { check_raised(fc_unsharding_check_unwritten(unsharding())); }

protected:
    void begin(const fc_unsharding_options &options)
    {
        check_raised(fc_unsharding_create(&options, Out(engine_)));
    }
    // While what the options named is there.
    void end() { engine_.reset(); }

private:
    Owned<fc_unsharding, fc_unsharding_destroy> engine_;
};

} // namespace fc

#endif
