// The gradients of shards: what reductions need to place them.
#ifndef FC_BIND_FSDP_GRADIENTS_H
#define FC_BIND_FSDP_GRADIENTS_H

#include "bind/fsdp/unit.h"

#include <string>
#include <vector>

namespace fc {

inline bool has_bit(const uint64_t *mask, size_t i)
{
    return (mask[i / 64] >> (i % 64) & 1) != 0;
}

// The local tensor of the gradient that a shard has.
Ref local_gradient(const Param &param);

} // namespace fc

#endif
