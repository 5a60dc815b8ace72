// Shards of one rank alone on a device: they lie as in the unsharded buffer, which they are.
#include "bind/device/device.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace fc {

// Whole storages of the type in which they are used.
bool Parameters::can_reside() const
{
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

void *Unit::take_residence()
{
    const c10::InferenceMode normal(false);
    const c10::StreamGuard guard(device_->computing());
    const fc_layout *layout = fc_unit_layout(shard_);
    const at::Tensor home = at::empty({static_cast<int64_t>(layout->full_bytes)},
                                      at::dtype(at::kByte).device(params_.front().local.device()));
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        move_to(p.local.storage().unsafeGetStorageImpl(), home, layout->params[i].full_at);
        p.storage = p.local.storage().mutable_data();
    }
    return home.mutable_data_ptr();
}

} // namespace fc
