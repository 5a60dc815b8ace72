// Units on a device: a root's streams and schedule, and each unit's part in them.
#ifndef FC_BIND_DEVICE_DEVICE_H
#define FC_BIND_DEVICE_DEVICE_H

#include "bind/fsdp/gradients.h"
#include "engine/schedule.h"
#include "libtorch/accelerator.h"
#include "transport/collectives.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <deque>
#include <optional>

namespace fc {

class Fields;

// Those of one device, by the names of their process groups.
class Collectives : NoCopy {
public:
    explicit Collectives(c10::Device device);

    // group, nccl, messages, rank, n_ranks: who does those of that name, `messages` in sight of
    // others, a NcclGroup, which is kept, or with None for both the process group that is
    // registered under it. What was said first stays.
    void connect(Fields &given);
    fc_device_comm *find(const std::string &name) const; // of one that is connected
    fc_collectives *core() const { return core_.get(); }

private:
    c10::Device device_;
    Owned<fc_collectives, fc_collectives_destroy> core_;
};

// One schedule for the units of a root, with what it runs on. CPU tensors have a device, too: there
// all work is done at once.
class Streams : NoCopy {
public:
    // device, by_torch, kernels: host memory has a device of its own unless `by_torch`; there and
    // on accelerators torch's operators move what `kernels` (a library's path, or empty) do not.
    explicit Streams(Fields &given);

    c10::Device device() const { return device_; }
    fc_schedule *schedule() const { return schedule_.get(); }
    Collectives &collectives() { return collectives_; }
    c10::Stream copying_in() const { return streams_[0]; }
    c10::Stream reducing() const { return streams_[2]; }
    c10::Stream all_reducing() const { return streams_[3]; }
    // Where the newest forward, or unshard, began.
    c10::Stream computing() const;

    // A forward begins in the current stream, or where one did whose backward is to come: shards
    // may be read behind what is in it. Raises if something is wrong with another rank.
    void begin();
    // The same for an unshard outside of forward and backward.
    void read_shards();
    // Backward computes where the forward began, behind what was unsharded on another stream since.
    void resume();
    c10::Stream caller() const; // whose stream need not be where units compute
    // The caller comes behind where units compute, or before it. The streams are the same mostly,
    // and nothing is to do. Returns the caller's.
    c10::Stream show_caller() const;
    c10::Stream await_caller() const;
    // The caller has used what an extension has made in copy-in beside what is gathered, such as a
    // scale: what comes there next may get its memory.
    void hold_copies() const;

private:
    fc_stream *current();
    const c10::Stream *bound_to() const; // null: by nothing to any

    c10::Device device_;
    Collectives collectives_;
    std::vector<c10::Stream> streams_;  // copy-in, gather, reduce, all-reduce
    std::deque<c10::Stream> computing_; // the callers' own; places stay
    const c10::Stream *newest_ = nullptr, *forward_ = nullptr;
    OwnedDevice core_;
    Owned<fc_schedule, fc_schedule_destroy> schedule_;
};

// One unit in the schedule of its root.
class DeviceUnit : NoCopy {
public:
    // The units whose ranks shard and, unless it is null, replicate; both outlive this one.
    // `options`: DeviceOptions of fsdp_c/_comm/_device.py.
    DeviceUnit(Streams *streams, fc_unit *shard, fc_unit *replicate, PyObject *options);

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
    void await_gradients() const
    {
        if (is_offloaded()) {
            check(fc_schedule_await_gradients(streams_->schedule()));
        }
    }
    // Whether the plan stages a gradient of each parameter that is trained now.
    bool stages_all(const std::vector<Param> &params) const;
    fc_schedule_unit *scheduled() const { return unit_.get(); }
    // Shards and their gradients are host memory.
    bool is_offloaded() const { return is_offloaded_; }
    // One rank has all of the unit, on the device.
    bool has_all() const { return layout_->n_ranks == 1 && !is_offloaded(); }
    // And nobody else has, or looks: its gradients are what autograd makes.
    bool is_alone() const { return has_all() && !has_replicas_ && !fc_layout_is_packed(layout_); }
    // Where a forward computes.
    c10::Stream computing() const { return streams_->computing(); }
    // A script may run a unit in a stream of its own, beside the others of the root. What was
    // unsharded is there for that stream, which has done what it does with it before it goes.
    void show_caller();
    void await_users();
    // The caller, and with it where units compute, comes behind a stream that gradients were made
    // in. A graph that somebody keeps has it from an earlier forward.
    void await_maker(const c10::Stream &maker);
    // Gradients of such a unit are read in other streams than their own.
    bool is_used_apart() const { return is_used_apart_; }
    void note_read(const at::Tensor &grad) const;
    // Where units compute comes behind what the caller has made of gradients, as the end of a
    // backward does in the stream that backward() was called in.
    void take_from_caller(const Tensors &grads) const;
    Streams &streams() const { return *streams_; }
    void note_forward() { check(fc_schedule_note_forward(scheduled())); }
    // Sums over the unit's ranks are those of this process group, which is connected, from now on.
    void set_reduce_group(const std::string &group)
    {
        reduce_ = streams_->collectives().find(group);
        fc_schedule_set_reduce(scheduled(), reduce_);
    }
    // Full gradients, undefined ones: none. The sum, divided, goes to `out`; held without it.
    // `present` is a fingerprint of those that are summed up, held ones included.
    void post(const Tensors &grads, uint64_t present, const fc_reduce_options &options, void *out,
              bool accumulate);

private:
    bool scale(double in_shards, double in_replicas) const;
    bool scales(const fc_reduce_options &options) const;

    Streams *streams_;
    const fc_layout *layout_;
    Owned<fc_schedule_unit, fc_schedule_remove> unit_;
    fc_device_comm *reduce_, *replicas_; // null: there are none
    std::optional<c10::Stream> user_;    // one that uses what is unsharded, beside that of compute
    bool is_used_apart_ = false;         // or was, at any time
    bool has_replicas_, is_offloaded_, is_pinned_;
    const char *why_staged_;
    std::vector<const void *> full_;
    std::vector<fc_dtype> types_;
};

// What runs in this scope uses a unit's reduced gradients: in the stream that writes them, and on
// the host if they go there.
class GradientScope {
public:
    explicit GradientScope(const DeviceUnit &unit) : guard_(unit.finishing())
    {
        unit.await_gradients();
    }

private:
    c10::StreamGuard guard_;
};

// The gradients of a unit's shards on a device. The schedule of the unit's root makes the sums.
class DeviceGradients : public ShardGradients {
public:
    // All borrowed.
    DeviceGradients(std::vector<Param> &params, const fc_layout *layout, fc_reduction *reduction,
                    DeviceUnit *device)
        : ShardGradients(params, layout, reduction), device_(device)
    {
    }

    void submit(std::unique_ptr<Taken> taken, const fc_reduce_options &options) override;
    void drop() override { fc_schedule_drop_gradients(device_->scheduled()); }
    void drop_partial_sums() override;
    void inherit(const ShardGradients &former) override;
    void release_unused() override;

protected:
    at::Tensor make_buffer(size_t bytes) const override { return device_->make_buffer(bytes); }
    // In the storage that the allocator gave, which alone heeds Tensor.record_stream().
    void show(const Param &param, const at::Tensor &memory, int64_t offset) const override
    {
        point_to(param.grad.local, memory.storage(), offset);
    }
    void run_hooks(const Param &param) const override;

private:
    using Grads = Tensors;
    using Indices = std::vector<size_t>; // of parameters in the sum

    bool takes_over(const Grads &grads, const Indices &present, double divisor) const;
    void take_over(const Grads &grads, const Indices &present);
    void add_apart(const Grads &grads, const Indices &present, uint64_t print,
                   const fc_reduce_options &options);
    void place(const Grads &grads, const Indices &present, uint64_t print,
               const fc_reduce_options &options);

    DeviceUnit *device_;
};

} // namespace fc

#endif
