// A unit: its parts, made from what Python has decided; what opens and ends a use of its
// parameters.
#include "bind/fsdp/unit.h"

#include "bind/device/device_unit.h"
#include "bind/fsdp/domain.h"
#include "bind/fsdp/events.h"
#include "bind/tensor/tensors.h"

namespace fc {

Unit::Unit(PyObject *domain, size_t index, PyObject *replicate_domain, PyObject *rows,
           const at::Tensor &flat, PyObject *on_device, const Updates *updates)
    : Parameters(fc_domain_unit(domain_of(domain), index), rows, flat), Accumulated(params_),
      UnitGraph(shard_, params_, *this, updates), domain_object_(Ref::borrow(domain)),
      domain_(domain_of(domain)), replicate_domain_(nullptr),
      reduction_(nullptr, fc_reduction_destroy)
{
    fc_unit *replicate = nullptr;
    if (replicate_domain != Py_None) {
        replicate_object_ = Ref::borrow(replicate_domain);
        replicate_domain_ = domain_of(replicate_domain);
        replicate = fc_domain_unit(replicate_domain_, index);
    }
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        if (fc_unit_layout(shard_)->params[i].is_aliased) {
            p.storage = fc_unit_shard_storage(shard_, i);
            move_to(p.local.storage().unsafeGetStorageImpl(), p.storage, fc_unit_region(shard_));
        }
    }
    if (is_extended(fc_unit_layout(shard_))) {
        extended_ = std::make_unique<Extended>(*this, rows);
    }
    fc_reduction *made;
    check(fc_reduction_create(shard_, replicate, slots(), reduction_ops(), &made));
    reduction_.reset(made);
    begin(make_device(domain, replicate_domain, replicate, on_device));
    make_gradients();
    set_says_graph(fc_unsharding_makes_copies(unsharding()));
    withhold(false);
    hide(false);
}

// What the unit's parameters are unsharded with; on a device a unit there is made first.
fc_unsharding_options Unit::make_device(PyObject *domain, PyObject *replicate_domain,
                                        fc_unit *replicate, PyObject *options)
{
    fc_unsharding_options made = {shard_, slots(), fc_reduction_traffic(reduction_.get()),
                                  unsharding_ops(extended_.get()), this};
    if (Streams *streams = domain_streams(domain)) {
        const DeviceComms comms = {domain_device_comm(domain),
                                   replicate != nullptr ? domain_device_comm(replicate_domain)
                                                        : nullptr};
        device_ =
            std::make_unique<DeviceUnit>(streams, shard_, replicate, comms, DeviceOptions(options));
        made.schedule = streams->schedule();
        made.on_device = device_->scheduled();
        made.has_all = device_->has_all();
    }
    return made;
}

void Unit::make_gradients()
{
    const fc_layout *layout = fc_unit_layout(shard_);
    if (device_ != nullptr) {
        gradients_ = std::make_unique<DeviceGradients>(params_, layout, reduction_.get(), name(),
                                                       device_.get());
    } else {
        gradients_ = std::make_unique<ShardGradients>(params_, layout, reduction_.get());
    }
}

Unit::~Unit()
{
    drop_ahead();
    end_graph();
    end();
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
