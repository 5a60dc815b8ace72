// The gradients of a unit's shards on a device.
#ifndef FC_BIND_DEVICE_DEVICE_UNIT_H
#define FC_BIND_DEVICE_DEVICE_UNIT_H

#include "bind/device/device.h"
#include "bind/fsdp/gradients.h"

#include <memory>
#include <string>
#include <vector>

namespace fc {

// The schedule of the unit's root makes the sums.
class DeviceGradients : public ShardGradients {
public:
    // All borrowed; name: of the unit.
    DeviceGradients(std::vector<Param> &params, const fc_layout *layout, fc_reduction *reduction,
                    const std::string &name, DeviceUnit *device)
        : ShardGradients(params, layout, reduction), name_(name), device_(device)
    {
    }

    void submit(std::unique_ptr<Taken> taken, const fc_reduce_options &options) override;
    void drop() override { fc_schedule_drop_gradients(device_->scheduled()); }
    void drop_partial_sums() override;
    void inherit(const ShardGradients &former) override;
    void release_unused() override;

protected:
    at::Tensor make_buffer(size_t bytes) const override { return device_->make_buffer(bytes); }
    void run_hooks(const Param &param) const override;

private:
    using Grads = std::vector<at::Tensor>;
    using Indices = std::vector<size_t>; // of parameters in the sum

    bool takes_over(const Grads &grads, const Indices &present, double divisor) const;
    void take_over(const Grads &grads, const Indices &present);
    void add_apart(const Grads &grads, const Indices &present, uint64_t print, double divisor);
    void place(const Grads &grads, const Indices &present, uint64_t print, double divisor);

    const std::string &name_;
    DeviceUnit *device_;
};

} // namespace fc

#endif
