// Clipping's passes over the memory of many tensors, by torch's threads.
#ifndef FC_BIND_OPTIM_CLIP_H
#define FC_BIND_OPTIM_CLIP_H

#include "optim/clip.h"

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fc {

// Lengths of tensors, and their numbers in the order that clipping takes.
struct Order {
    std::vector<size_t> numels, numbers;
};
using SharedOrder = std::shared_ptr<const Order>;

// Memory of contiguous float32 tensors on the CPU, which have to live as long.
struct Flat {
    std::vector<float *> data;
    SharedOrder order;
};

// `last`: the order of such tensors before; lengths are most often the same.
Flat flat_of(const std::vector<at::Tensor> &tensors, SharedOrder &last);

// 2-norms, in the order of the tensors.
void find_norms(const Flat &flat, float *out);
void multiply_all(const Flat &flat, float factor);

} // namespace fc

#endif
