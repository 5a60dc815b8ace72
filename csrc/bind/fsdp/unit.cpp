// A unit: its parts, made from what Python has decided; what opens and ends a use of its
// parameters.
#include "bind/fsdp/unit.h"

#include "bind/fsdp/domain.h"
#include "bind/fsdp/events.h"
#include "bind/tensor/tensors.h"

namespace fc {

Unit::Unit(PyObject *domain, size_t index, PyObject *replicate_domain, PyObject *rows,
           const at::Tensor &flat, PyObject *on_device, const Updates *updates)
    : Parameters(fc_domain_unit(domain_of(domain), index), rows, flat),
      domain_object_(Ref::borrow(domain)), domain_(domain_of(domain)),
      unsharding_(nullptr, fc_unsharding_destroy), reduction_(nullptr, fc_reduction_destroy),
      replicate_domain_(nullptr), replicate_(nullptr), updates_(updates)
{
    if (replicate_domain != Py_None) {
        replicate_object_ = Ref::borrow(replicate_domain);
        replicate_domain_ = domain_of(replicate_domain);
        replicate_ = fc_domain_unit(replicate_domain_, index);
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        has_widened_ = has_widened_ || p.is_widened;
        if (layout->params[i].is_aliased) {
            p.storage = fc_unit_shard_storage(shard_, i);
            move_to(p.local.storage().unsafeGetStorageImpl(), p.storage, fc_unit_region(shard_));
        }
    }
    fc_reduction *reduction;
    check(fc_reduction_create(shard_, replicate_, slots(), reduction_ops(), &reduction));
    reduction_.reset(reduction);
    hooks_.resize(params_.size());
    steps_seen_ = n_steps();
    updates_seen_ = n_updates();
    for (const Param &p : params_) {
        shard_versions_.push_back(p.shard_versions());
    }
    make_unsharding(domain, replicate_domain, on_device);
}

void Unit::make_unsharding(PyObject *domain, PyObject *replicate_domain, PyObject *on_device)
{
    fc_unsharding_options options = {shard_, slots(), fc_reduction_traffic(reduction_.get()),
                                     unsharding_ops(), this};
    if (Streams *streams = domain_streams(domain)) {
        const DeviceComms comms = {domain_device_comm(domain),
                                   replicate_ != nullptr ? domain_device_comm(replicate_domain)
                                                         : nullptr};
        device_ = std::make_unique<DeviceUnit>(streams, shard_, replicate_, comms,
                                               DeviceOptions(on_device));
        options.schedule = streams->schedule();
        options.on_device = device_->scheduled();
        options.has_all = device_->has_all();
    }
    fc_unsharding *unsharding;
    check_raised(fc_unsharding_create(&options, &unsharding));
    unsharding_.reset(unsharding);
    set_says_graph(fc_unsharding_makes_copies(unsharding));
    withhold(false);
    hide(false);
}

Unit::~Unit()
{
    drop_ahead();
    end_graph();
    if (arrivals_ != nullptr) {
        arrivals_->is_expected = false;
        arrivals_->state = Ref();
    }
}

bool Unit::is_pending() const
{
    const fc_unsharding_state state = fc_unsharding_state_of(unsharding());
    return state == FC_UNIT_REQUESTED || state == FC_UNIT_GATHERED;
}

bool Unit::is_intact() const
{
    return Parameters::is_intact(is_unsharded()) &&
           (device_ == nullptr || device_->stages_all(params_));
}

void Unit::unshard_private()
{
    // What moves nothing has no range: a unit on one rank, and a second call before the wait.
    const bool is_news = fc_unsharding_moves(unsharding()) &&
                         fc_unsharding_state_of(unsharding()) == FC_UNIT_SHARDED;
    Range range(is_news ? "FSDP::all_gather" : nullptr, this);
    check_raised(fc_unsharding_gather(unsharding()));
}

void Unit::unshard()
{
    note_updates();
    bool is_shown;
    check_raised(fc_unsharding_begin_use(unsharding(), &is_shown));
    if (!is_shown) {
        unshard_private();
        Range range(fc_unsharding_moves(unsharding()) ? "FSDP::all_gather_copy_out" : nullptr,
                    this);
        check_raised(fc_unsharding_show(unsharding()));
    }
}

} // namespace fc
