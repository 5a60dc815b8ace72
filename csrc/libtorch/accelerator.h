// Any accelerator that torch knows as a device of the core, over what c10 and ATen offer for all of
// them.
#ifndef FC_LIBTORCH_ACCELERATOR_H
#define FC_LIBTORCH_ACCELERATOR_H

#include "device/caller.h"
#include "device/device.h"
#include "kernels/cuda/kern_cuda.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <exception>
#include <memory>

namespace fc {

inline const c10::Stream &torch_stream(fc_stream *stream)
{
    return *reinterpret_cast<const c10::Stream *>(stream);
}

// Runs `body`; exceptions become a status, whose message has their text last.
template <typename Body, typename... Words>
fc_status attempt(Body &&body, const char *format, Words... words)
{
    try {
        body();
        return FC_OK;
    } catch (const c10::Error &error) {
        return fc_fail(FC_ERR_SYSTEM, format, words..., error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_SYSTEM, format, words..., error.what());
    }
}

// Streams are c10::Streams, events those of their backend, moves launches of `kernels` (null:
// torch's copies, one for each run of a plan). A host has neither streams nor events: what it is
// given is done at once.
using OwnedDevice = std::unique_ptr<fc_device, void (*)(fc_device *)>;
OwnedDevice make_accelerator(c10::Device device, const fc_device_caller &caller,
                             const fc_cuda_kernels *kernels);

} // namespace fc

#endif
