// Any accelerator that torch knows as a device of the core.
#ifndef FC_BIND_DEVICE_ACCELERATOR_H
#define FC_BIND_DEVICE_ACCELERATOR_H

#include "device/caller.h"
#include "kernels/cuda/kern_cuda.h"

#include <c10/core/Device.h>

#include <memory>

namespace fc {

// Streams are c10::Streams, events those of their backend, moves launches of `kernels` (null:
// torch's copies, one for each run of a plan). A host has neither streams nor events: what it is
// given is done at once.
std::unique_ptr<fc_device, void (*)(fc_device *)> make_accelerator(c10::Device device,
                                                                   const fc_device_caller &caller,
                                                                   const fc_cuda_kernels *kernels);

} // namespace fc

#endif
