// Norms of many tensors and their multiplication.
#include "bind/optim/clip.h"

#include "bind/python/python.h"
#include "bind/tensor/tensors.h"
#include "kernels/kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

namespace fc {

namespace {

SharedOrder order_of(std::vector<size_t> numels)
{
    auto order = std::make_shared<Order>();
    order->numbers.resize(numels.size());
    std::iota(order->numbers.begin(), order->numbers.end(), size_t{0});
    std::stable_sort(order->numbers.begin(), order->numbers.end(),
                     [&](size_t a, size_t b) { return numels[a] > numels[b]; });
    order->numels = std::move(numels);
    return order;
}

constexpr int64_t grain = 64; // tensors of a thread's part

// PyTorch squares nothing where there is only one element.
void norms_of(float *out, const float *const *data, const size_t *numels, size_t n)
{
    fc_kern()->norms(out, data, numels, n);
    for (size_t k = 0; k < n; k++) {
        out[k] = numels[k] == 1 ? std::fabs(*data[k]) : out[k];
    }
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
    const Order &order = *flat.order;
    at::parallel_for(0, static_cast<int64_t>(order.numbers.size()), grain,
                     [&](int64_t i, int64_t end) {
                         const float *data[grain];
                         size_t numels[grain];
                         float found[grain];
                         while (i < end) {
                             const auto n = static_cast<size_t>(std::min(grain, end - i));
                             const size_t *numbers = order.numbers.data() + i;
                             for (size_t k = 0; k < n; k++) {
                                 data[k] = flat.data[numbers[k]];
                                 numels[k] = order.numels[numbers[k]];
                             }
                             norms_of(found, data, numels, n);
                             for (size_t k = 0; k < n; k++) {
                                 out[numbers[k]] = found[k];
                             }
                             i += static_cast<int64_t>(n);
                         }
                     });
}

// From the end: what norms were taken of last is in the cache still.
void multiply_all(const Flat &flat, float factor)
{
    const Order &order = *flat.order;
    at::parallel_for(0, static_cast<int64_t>(order.numbers.size()), grain,
                     [&](int64_t begin, int64_t i) {
                         while (i-- > begin) {
                             const size_t number = order.numbers[static_cast<size_t>(i)];
                             fc_kern()->multiply(flat.data[number], factor, order.numels[number]);
                         }
                     });
}

bool flushes_denormals()
{
    volatile float least = std::numeric_limits<float>::denorm_min();
    volatile float one = 1.0f;
    return least * one == 0.0f;
}

} // namespace fc

// As torch's operators round it: a number's product with a reciprocal, and NaN stays.
PyObject *fc_clip_factor(PyObject *, PyObject *args)
{
    float max_norm, norm;
    if (!PyArg_ParseTuple(args, "ff:clip_factor", &max_norm, &norm)) {
        return nullptr;
    }
    const float reciprocal = 1.0f / (norm + 1e-6f);
    const float factor = reciprocal * max_norm;
    return PyFloat_FromDouble(factor > 1.0f ? 1.0f : factor);
}

// The norm of a vector's few elements.
PyObject *fc_norm(PyObject *, PyObject *argument)
{
    using namespace fc;
    return guarded([&]() -> PyObject * {
        const at::Tensor &values = tensor_of(argument);
        if (values.scalar_type() != at::kFloat || !values.is_cpu() || !values.is_contiguous()) {
            PyErr_SetString(PyExc_ValueError,
                            "norm: expected a contiguous float32 tensor on the CPU");
            return nullptr;
        }
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        at::Tensor found = at::empty({}, at::kFloat);
        const auto *data = values.const_data_ptr<float>();
        const auto numel = static_cast<size_t>(values.numel());
        norms_of(static_cast<float *>(found.data_ptr()), &data, &numel, 1);
        return THPVariable_Wrap(found);
    });
}
