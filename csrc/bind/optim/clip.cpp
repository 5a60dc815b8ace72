// Norms of many tensors and their multiplication.
#include "bind/optim/clip.h"

#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <utility>

namespace fc {

namespace {

SharedOrder order_of(std::vector<size_t> numels)
{
    auto order = std::make_shared<Order>();
    order->numbers.resize(numels.size());
    fc_clip_order(numels.data(), numels.size(), order->numbers.data());
    order->numels = std::move(numels);
    return order;
}

template <typename Run> void run_parts(const Flat &flat, Run run)
{
    const Order &order = *flat.order;
    const fc_clip_tensors all = {flat.data.data(), order.numels.data(), order.numbers.data()};
    at::parallel_for(0, static_cast<int64_t>(order.numbers.size()), FC_CLIP_GRAIN,
                     [&](int64_t begin, int64_t end) {
                         run(&all, static_cast<size_t>(begin), static_cast<size_t>(end));
                     });
}

} // namespace

Flat flat_of(const std::vector<at::Tensor> &tensors, SharedOrder &last)
{
    Flat flat;
    std::vector<size_t> numels;
    numels.reserve(tensors.size());
    flat.data.reserve(tensors.size());
    for (const at::Tensor &tensor : tensors) {
        numels.push_back(static_cast<size_t>(tensor.numel()));
        flat.data.push_back(static_cast<float *>(tensor.data_ptr()));
    }
    if (last == nullptr || numels != last->numels) {
        last = order_of(std::move(numels));
    }
    flat.order = last;
    return flat;
}

void find_norms(const Flat &flat, float *out)
{
    run_parts(flat, [out](const fc_clip_tensors *all, size_t begin, size_t end) {
        fc_clip_norms(all, begin, end, out);
    });
}

void multiply_all(const Flat &flat, float factor)
{
    run_parts(flat, [factor](const fc_clip_tensors *all, size_t begin, size_t end) {
        fc_clip_multiply(all, begin, end, factor);
    });
}

double clip_factor(PyObject *args, PyObject *named)
{
    float max_norm, norm;
    parse(args, named, "ff:clip_factor", {"max_norm", "norm"}, &max_norm, &norm);
    return fc_clip_factor_of(max_norm, norm);
}

// The norm of a vector's few elements.
at::Tensor norm_of(PyObject *argument)
{
    const at::Tensor &values = tensor_of(argument);
    if (values.scalar_type() != at::kFloat || !values.is_cpu() || !values.is_contiguous()) {
        raise_error(PyExc_ValueError, "norm: expected a contiguous float32 tensor on the CPU");
    }
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::Tensor found = at::empty({}, at::kFloat);
    SharedOrder none;
    find_norms(flat_of({values}, none), static_cast<float *>(found.data_ptr()));
    return found;
}

} // namespace fc
