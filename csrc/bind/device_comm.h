// What a device leaves to torch: memory of its allocator, collectives of process groups.
#ifndef FC_BIND_DEVICE_COMM_H
#define FC_BIND_DEVICE_COMM_H

#include "device/caller.h"

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

// A process group, as devices call it. It sees the given stream as the current one.
struct fc_device_comm {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
};

namespace fc {

// Its streams are c10::Streams; `device` outlives it.
fc_device_caller device_caller(const c10::Device *device);

} // namespace fc

#endif
