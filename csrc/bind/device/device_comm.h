// What a device leaves to its caller: memory of torch's allocator, and collectives, which are a
// process group's own or NCCL's.
#ifndef FC_BIND_DEVICE_DEVICE_COMM_H
#define FC_BIND_DEVICE_DEVICE_COMM_H

#include "device/caller.h"
#include "transport/nccl.h"

#include <Python.h>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <string>

// Who does the collectives between the ranks of one process group; a file for each. Streams are
// c10::Streams.
struct fc_device_comm {
    virtual ~fc_device_comm() = default;
    virtual fc_status all_gather(fc_stream *stream, fc_label label, void *buffer,
                                 size_t part_bytes) = 0;
    virtual fc_status all_gather_each(fc_stream *stream, fc_label label, const fc_gather *gathers,
                                      size_t n_gathers) = 0;
    virtual fc_status reduce_scatter(fc_stream *stream, fc_label label, void *to, const void *from,
                                     size_t numel, fc_dtype dtype) = 0;
    virtual fc_status all_reduce(fc_stream *stream, fc_label label, void *buffer, size_t numel,
                                 fc_dtype dtype) = 0;
    // Whether several all-gathers are one piece of work.
    virtual bool has_groups() const = 0;
    // What waits of the host watch, and what ends with its neighbours; null: nothing.
    virtual fc_nccl_group *watched() { return nullptr; }
};

namespace fc {

// `device` outlives them. The process group is found by the name that it is registered under;
// `nccl` is a NcclGroup, which is kept.
std::unique_ptr<fc_device_comm> process_group_comm(const c10::Device *device,
                                                   const std::string &name);
std::unique_ptr<fc_device_comm> nccl_comm(PyObject *nccl);

// Those of one device, by the names of their process groups.
class Collectives {
public:
    explicit Collectives(c10::Device device) : device_(device) {}
    Collectives(const Collectives &) = delete;
    Collectives &operator=(const Collectives &) = delete;

    // Says who does them: NCCL, or with null the process group. What was said first stays.
    void connect(const std::string &name, PyObject *nccl);
    fc_device_comm *find(const std::string &name);

    // For devices; valid as long as this.
    fc_device_caller caller();
    // The first thing that is wrong with a rank or a library; no waiting.
    fc_status watch();
    // Until ready(arg), watching; FC_AGAIN if there is nothing to watch.
    fc_status wait(fc_ready_fn ready, void *arg);
    // What a collective came to: where NCCL's has failed no other goes on.
    fc_status ended(fc_device_comm *comm, fc_status status);

    const c10::Device &device() const { return device_; }

private:
    c10::Device device_;
    std::map<std::string, std::unique_ptr<fc_device_comm>> comms_;
};

inline const c10::Stream &torch_stream(fc_stream *stream)
{
    return *reinterpret_cast<const c10::Stream *>(stream);
}

} // namespace fc

#endif
