// Units on a device: a root's streams and schedule, and each unit's part in them.
#ifndef FC_BIND_DEVICE_DEVICE_H
#define FC_BIND_DEVICE_DEVICE_H

#include "bind/device/device_comm.h"
#include "bind/python/python.h"
#include "engine/schedule.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace fc {

struct Param;

// One schedule for the units of a root, with what it runs on. CPU tensors have a device, too: there
// all work is done at once.
class Streams {
public:
    // Host memory has a device of its own unless `by_torch`; there and on accelerators torch's
    // operators move what `kernels` (a library's path, or empty) do not.
    Streams(c10::Device device, bool by_torch, const std::string &kernels);
    ~Streams();
    Streams(const Streams &) = delete;
    Streams &operator=(const Streams &) = delete;

    c10::Device device() const { return device_; }
    fc_schedule *schedule() const { return schedule_; }
    Collectives &collectives() { return collectives_; }
    c10::Stream reducing() const { return streams_[2]; }
    c10::Stream all_reducing() const { return streams_[3]; }
    // Where the newest forward, or unshard, began.
    c10::Stream computing() const;

    // A forward begins in the current stream: shards may be read behind what is in it. Raises if
    // something is wrong with another rank.
    void begin();
    // The same for an unshard outside of forward and backward.
    void read_shards();
    // Backward computes where the forward began, behind what was unsharded on another stream since.
    void resume();

private:
    fc_stream *current();

    c10::Device device_;
    Collectives collectives_;
    std::vector<c10::Stream> streams_;  // copy-in, gather, reduce, all-reduce
    std::deque<c10::Stream> computing_; // the callers' own; places stay
    const c10::Stream *newest_ = nullptr, *forward_ = nullptr;
    std::unique_ptr<fc_device, void (*)(fc_device *)> core_;
    fc_schedule *schedule_ = nullptr; // owned
};

Streams *streams_of(PyObject *object); // borrowed; TypeError as an exception

// Who talks about a unit.
struct DeviceComms {
    fc_device_comm *shards = nullptr, *replicas = nullptr; // without replicas: null
};

// What a unit's plan says of its device.
struct DeviceOptions {
    // DeviceOptions of fsdp_c/_comm/_device.py.
    explicit DeviceOptions(PyObject *options);

    int is_offloaded = 0; // shards and their gradients are host memory
    int is_pinned = 0;
    int post_rank = 0, n_post_ranks = 0; // in a smaller group that forward reshards to
    std::string post_group;
};

// One unit in the schedule of its root.
class DeviceUnit {
public:
    // The units whose ranks shard and, unless it is null, replicate; both outlive this one.
    DeviceUnit(Streams *streams, fc_unit *shard, fc_unit *replicate, const DeviceComms &comms,
               const DeviceOptions &options);
    ~DeviceUnit();
    DeviceUnit(const DeviceUnit &) = delete;
    DeviceUnit &operator=(const DeviceUnit &) = delete;

    // Where gradients are finished.
    c10::Stream finishing() const
    {
        return is_alone()      ? streams_->computing()
               : has_replicas_ ? streams_->all_reducing()
                               : streams_->reducing();
    }
    // For reduced gradients: bytes where the shards are.
    at::Tensor make_buffer(size_t bytes) const;
    // Why what is gathered is copied out, for people; null: it is not.
    const char *why_staged() const { return why_staged_; }
    // Gradients that are on their way to the host are there.
    void await_gradients() const;
    // Whether the plan stages a gradient of each parameter that is trained now.
    bool stages_all(const std::vector<Param> &params) const;
    fc_schedule_unit *scheduled() const { return unit_; }
    bool is_offloaded() const { return options_.is_offloaded != 0; }
    // One rank has all of the unit, on the device.
    bool has_all() const { return layout_->n_ranks == 1 && !is_offloaded(); }
    // And nobody else has: its gradients are what autograd makes.
    bool is_alone() const { return has_all() && !has_replicas_; }
    // Where a forward computes.
    c10::Stream computing() const { return streams_->computing(); }
    // Shards may be read behind what the current stream does now.
    void read_shards() { streams_->read_shards(); }
    void note_forward() { check(fc_schedule_note_forward(unit_)); }
    // Whom to gather behind this one's gather; of the same root.
    void set_prefetch(bool in_backward, const std::vector<DeviceUnit *> &units);
    // Sums over the unit's ranks are those of this process group, which is connected, from now on.
    void set_reduce_group(const std::string &group);
    void drop_gradients() { fc_schedule_drop_gradients(unit_); }
    void drop_partial_sum() { fc_schedule_drop_partial_sum(unit_); }
    // From a unit of the same layout.
    void inherit_partial_sum(const DeviceUnit &former)
    {
        fc_schedule_move_partial_sum(former.unit_, unit_);
    }
    // Full gradients, undefined ones: none. The sum, divided, goes to `out`; held without it.
    // `present` is a fingerprint of those that are summed up, held ones included.
    void post(const std::vector<at::Tensor> &grads, uint64_t present, double divisor, void *out,
              bool accumulate);

private:
    Streams *streams_;
    const fc_layout *layout_;
    fc_schedule_unit *unit_ = nullptr; // owned
    bool has_replicas_;
    const char *why_staged_;
    DeviceOptions options_;
    std::vector<const void *> full_;
    std::vector<fc_dtype> types_;
};

// What runs in this scope uses a unit's reduced gradients: in the stream that writes them, and on
// the host if they go there.
class GradientScope {
public:
    explicit GradientScope(const DeviceUnit &unit);

private:
    c10::StreamGuard guard_;
};

} // namespace fc

int fc_register_streams(PyObject *module);

#endif
