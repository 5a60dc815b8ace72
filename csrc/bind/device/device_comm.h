// What a device leaves to its caller: memory of torch's allocator, and collectives, which are a
// process group's own or NCCL's.
#ifndef FC_BIND_DEVICE_DEVICE_COMM_H
#define FC_BIND_DEVICE_DEVICE_COMM_H

#include "bind/core.h"
#include "bind/python/python.h"
#include "transport/collectives.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>

namespace fc {

// A process group's own collectives, on tensors of `device`, which outlives them; it is found by
// the name that it is registered under. Streams are c10::Streams.
fc_collectives_group own_collectives(const c10::Device *device, const std::string &name);

// Those of one device, by the names of their process groups.
class Collectives : NoCopy {
public:
    explicit Collectives(c10::Device device);

    // Says who does them: a NcclGroup, which is kept, or with None the process group. What was said
    // first stays.
    void connect(const std::string &name, PyObject *nccl);
    fc_device_comm *find(const std::string &name) const; // of one that is connected
    fc_collectives *core() const { return core_.get(); }
    const c10::Device &device() const { return device_; }

private:
    c10::Device device_;
    Owned<fc_collectives, fc_collectives_destroy> core_;
};

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

} // namespace fc

#endif
