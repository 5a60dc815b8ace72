// Gradients that reach a unit's parameters by a way that does not pass its output.
#ifndef FC_BIND_FSDP_ARRIVALS_H
#define FC_BIND_FSDP_ARRIVALS_H

#include "bind/python/python.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <atomic>
#include <memory>
#include <string>

namespace fc {

// Shared by a unit and the hooks of its unsharded parameters, which graphs may keep for longer.
struct Arrivals {
    std::atomic<bool> is_expected{false}; // pre-backward has run, and post-backward has not
    Ref state;                            // weak; null once the unit is gone
    std::string unit;                     // its name, for people
};

using ArrivalHook = torch::autograd::PostAccumulateGradHook;

// Calls state_on_arrival() for a gradient of `param` that is not expected. There is one such hook
// to a tensor: a user's, if one is there, is called by this one. Returns it, borrowed.
const ArrivalHook *watch_arrivals(const at::Tensor &param,
                                  const std::shared_ptr<Arrivals> &arrivals,
                                  const ArrivalHook *installed);

} // namespace fc

#endif
