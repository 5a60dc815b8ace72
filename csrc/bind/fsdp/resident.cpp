// Shards of one rank alone on a device: they lie as in the unsharded buffer, which they are.
#include "bind/device/device.h"
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/data_access.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace fc {

// Whole storages of the type in which they are used.
bool Unit::can_reside() const
{
    if (device_ == nullptr || !device_->has_all() || bytes_ == 0) {
        return false;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    std::vector<const void *> seen;
    for (size_t i = 0; i < params_.size(); i++) {
        const fc_param &p = layout->params[i];
        const at::Tensor &local = params_[i].local;
        const void *data = local.storage().data();
        if (p.orig != p.compute || local.storage_offset() != 0 ||
            local.storage().nbytes() != p.chunk_numel * fc_dtype_bytes(p.orig) ||
            std::find(seen.begin(), seen.end(), data) != seen.end()) {
            return false;
        }
        if (data != nullptr) {
            seen.push_back(data);
        }
    }
    return true;
}

// Whether forward has written to an unsharded parameter, or may have: `param.data` is on no
// counter.
bool Unit::may_be_written() const
{
    return std::any_of(params_.begin(), params_.end(), [](const Param &p) {
        return is_written(p) || is_data_taken(p.unsharded_tensor);
    });
}

// The first forward has a copy. A module that writes to its own parameters (an embedding with a
// largest norm, a scale that is clamped) does it in every forward: such a unit keeps to copies,
// where writes do not last.
void Unit::end_forward()
{
    if (!may_reside_) {
        return;
    }
    may_reside_ = false;
    if (may_be_written() || !can_reside()) {
        return;
    }
    if (unsharded_) {
        device_->reshard();
    }
    void *home = take_residence();
    if (unsharded_) {
        slot_ = device_->take_resident();
        show(slot_);
    } else if (has_graph_) {
        show(home);
    }
}

void *Unit::take_residence()
{
    const c10::InferenceMode normal(false);
    const c10::StreamGuard guard(device_->computing());
    const fc_layout *layout = fc_unit_layout(shard_);
    const at::Tensor home = at::empty({static_cast<int64_t>(bytes_)},
                                      at::dtype(at::kByte).device(params_.front().local.device()));
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        move_to(p.local.storage().unsafeGetStorageImpl(), home, layout->params[i].full_at);
        p.storage = p.local.storage().mutable_data();
    }
    device_->set_shards(params_);
    device_->set_resident(home.mutable_data_ptr());
    is_resident_ = true;
    return home.mutable_data_ptr();
}

// A write to an unsharded parameter is one to the shard: it cannot be taken back, as it would be
// from a copy.
void Unit::leave_if_written()
{
    if (!may_be_written()) {
        return;
    }
    is_resident_ = false;
    device_->set_resident(nullptr);
    const auto written = std::find_if(params_.begin(), params_.end(), is_written);
    if (written == params_.end()) {
        return;
    }
    const std::string text =
        "the unsharded parameter '" + parameter_name(*written) + "' of FSDP unit '" + name_ +
        "' was written: on one rank it is the shard itself, so the write stays. Later writes to "
        "the unit's parameters last until they are resharded, as on several ranks; write to the "
        "sharded parameters, outside of forward and backward, what is meant to stay";
    check(PyErr_WarnEx(PyExc_UserWarning, text.c_str(), 1));
}

} // namespace fc
