// Clipping's passes over float32 memory, with torch's bits.
#ifndef FC_BIND_OPTIM_CLIP_H
#define FC_BIND_OPTIM_CLIP_H

#include <Python.h>

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

namespace fc {

// Numbers of tensors, those of one length one after the other.
struct Order {
    std::vector<size_t> numels;
    std::vector<size_t> numbers;
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

// Whether multiplying by one changes numbers (torch.set_flush_denormal).
bool flushes_denormals();

} // namespace fc

// Of the module.
PyObject *fc_norm(PyObject *, PyObject *values);
PyObject *fc_clip_factor(PyObject *, PyObject *args);

#endif
