// Passes over the local tensors of many gradients: norms and multiplication.
#include "bind/locals.h"

#include "bind/layout.h"
#include "bind/python.h"
#include "bind/tensors.h"
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

namespace fc {

namespace {

// Numbers of tensors, those of one length one after the other.
struct Order {
    std::vector<size_t> numels;
    std::vector<size_t> numbers;
};

struct LayoutObject {
    PyObject_HEAD
    Layout *layout;                      // owned; null: plain tensors
    std::shared_ptr<const Order> *order; // owned; of the tensors that were collected last
};

PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    PyObject *spec;
    if (!PyArg_ParseTuple(args, "O:Layout", &spec)) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        auto layout = spec == Py_None ? nullptr : std::make_unique<Layout>(spec);
        auto order = std::make_unique<std::shared_ptr<const Order>>(std::make_shared<Order>());
        Ref self = checked(type->tp_alloc(type, 0));
        reinterpret_cast<LayoutObject *>(self.get())->layout = layout.release();
        reinterpret_cast<LayoutObject *>(self.get())->order = order.release();
        return self.release();
    });
}

void layout_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    delete reinterpret_cast<LayoutObject *>(self)->layout;
    delete reinterpret_cast<LayoutObject *>(self)->order;
    type->tp_free(self);
    Py_DECREF(type);
}

// Tensors of one layout, and their memory on this rank.
struct Locals {
    std::vector<at::Tensor> tensors; // as users have them
    std::vector<at::Tensor> locals;
    std::vector<float *> data;
    std::shared_ptr<const Order> order;
};

struct LocalsObject {
    PyObject_HEAD
    Locals *held; // owned
};

PyTypeObject *locals_type;

// False if the tensor is laid out otherwise.
bool take(Locals &held, const at::Tensor &tensor, Layout *layout)
{
    Ref object = checked(THPVariable_Wrap(tensor));
    at::Tensor local = floats_of(object.get(), layout);
    if (!local.defined()) {
        return false;
    }
    held.tensors.push_back(tensor);
    held.data.push_back(static_cast<float *>(local.data_ptr()));
    held.locals.push_back(std::move(local));
    return true;
}

std::shared_ptr<const Order> order_of(std::vector<size_t> numels)
{
    auto order = std::make_shared<Order>();
    order->numbers.resize(numels.size());
    std::iota(order->numbers.begin(), order->numbers.end(), size_t{0});
    std::stable_sort(order->numbers.begin(), order->numbers.end(),
                     [&](size_t a, size_t b) { return numels[a] > numels[b]; });
    order->numels = std::move(numels);
    return order;
}

// Lengths are as they were the last time, most often.
void put_in_order(Locals &held, std::shared_ptr<const Order> &last)
{
    std::vector<size_t> numels;
    numels.reserve(held.locals.size());
    for (const at::Tensor &local : held.locals) {
        numels.push_back(static_cast<size_t>(local.numel()));
    }
    if (numels != last->numels) {
        last = order_of(std::move(numels));
    }
    held.order = last;
}

// None if one of them is another thing.
PyObject *collect(PyObject *self, PyObject *list, bool gradients)
{
    return guarded([&]() -> PyObject * {
        if (!PyList_Check(list)) {
            Py_RETURN_NONE;
        }
        auto *from = reinterpret_cast<LayoutObject *>(self);
        Layout *layout = from->layout;
        auto held = std::make_unique<Locals>();
        const auto n = static_cast<size_t>(PyList_GET_SIZE(list));
        held->tensors.reserve(n);
        held->locals.reserve(n);
        held->data.reserve(n);
        // Comparing specs runs Python code, which may change the list.
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
            PyObject *item = PyList_GET_ITEM(list, i);
            if (!is_dtensor(item) && !THPVariable_Check(item)) {
                Py_RETURN_NONE;
            }
            const at::Tensor &tensor = THPVariable_Unpack(item);
            const at::Tensor &wanted = gradients ? tensor.grad() : tensor;
            if (wanted.defined() && !take(*held, wanted, layout)) {
                Py_RETURN_NONE;
            }
        }
        put_in_order(*held, *from->order);
        Ref result = checked(locals_type->tp_alloc(locals_type, 0));
        reinterpret_cast<LocalsObject *>(result.get())->held = held.release();
        return result.release();
    });
}

PyObject *layout_collect(PyObject *self, PyObject *list)
{
    return collect(self, list, false);
}

PyObject *layout_collect_gradients(PyObject *self, PyObject *list)
{
    return collect(self, list, true);
}

PyMethodDef layout_methods[] = {
    {"collect", layout_collect, METH_O,
     "collect(tensors) -> Locals | None\n\nNone: one of them is laid out otherwise."},
    {"collect_gradients", layout_collect_gradients, METH_O,
     "collect_gradients(tensors) -> Locals | None\n\nThe same of the gradients that tensors have."},
    {nullptr, nullptr, 0, nullptr}};

const Locals &held_by(PyObject *self)
{
    return *reinterpret_cast<LocalsObject *>(self)->held;
}

void locals_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    delete reinterpret_cast<LocalsObject *>(self)->held;
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *locals_tensors(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        const std::vector<at::Tensor> &locals = held_by(self).locals;
        Ref result = checked(PyList_New(static_cast<Py_ssize_t>(locals.size())));
        for (size_t i = 0; i < locals.size(); i++) {
            PyList_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(locals[i]));
        }
        return result.release();
    });
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

void find_norms(const Locals &held, float *out)
{
    const Order &order = *held.order;
    at::parallel_for(0, static_cast<int64_t>(order.numbers.size()), grain,
                     [&](int64_t i, int64_t end) {
                         const float *data[grain];
                         size_t numels[grain];
                         float found[grain];
                         while (i < end) {
                             const auto n = static_cast<size_t>(std::min(grain, end - i));
                             const size_t *numbers = order.numbers.data() + i;
                             for (size_t k = 0; k < n; k++) {
                                 data[k] = held.data[numbers[k]];
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
void multiply_all(const Locals &held, float factor)
{
    const Order &order = *held.order;
    at::parallel_for(0, static_cast<int64_t>(order.numbers.size()), grain,
                     [&](int64_t begin, int64_t i) {
                         while (i-- > begin) {
                             const size_t number = order.numbers[static_cast<size_t>(i)];
                             fc_kern()->multiply(held.data[number], factor, order.numels[number]);
                         }
                     });
}

// torch.set_flush_denormal: then a factor of one changes numbers.
bool flushes_denormals()
{
    volatile float least = std::numeric_limits<float>::denorm_min();
    volatile float one = 1.0f;
    return least * one == 0.0f;
}

PyObject *locals_norms(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        const Locals &held = held_by(self);
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        at::Tensor norms = at::empty({static_cast<int64_t>(held.locals.size())}, at::kFloat);
        {
            NoGil no_gil;
            find_norms(held, static_cast<float *>(norms.data_ptr()));
        }
        return THPVariable_Wrap(norms);
    });
}

PyObject *locals_multiply(PyObject *self, PyObject *argument)
{
    const auto factor = static_cast<float>(PyFloat_AsDouble(argument));
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        const Locals &held = held_by(self);
        for (size_t i = 0; i < held.locals.size(); i++) {
            bump_version(held.tensors[i]);
            bump_version(held.locals[i]);
        }
        if (factor != 1.0f || flushes_denormals()) {
            NoGil no_gil;
            multiply_all(held, factor);
        }
        Py_RETURN_NONE;
    });
}

PyMethodDef locals_methods[] = {
    {"tensors", locals_tensors, METH_NOARGS, "tensors() -> list[Tensor]"},
    {"norms", locals_norms, METH_NOARGS,
     "norms() -> Tensor\n\nThe 2-norm of each local tensor; float32, [n]."},
    {"multiply", locals_multiply, METH_O, "multiply(factor)\n\nMultiplies them in place."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot locals_slots[] = {
    {Py_tp_doc, const_cast<char *>("The local tensors of a list of tensors of one layout.")},
    {Py_tp_dealloc, reinterpret_cast<void *>(locals_dealloc)},
    {Py_tp_methods, locals_methods},
    {0, nullptr}};

PyType_Spec locals_spec = {"fsdp_c._C.Locals", sizeof(LocalsObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, locals_slots};

PyType_Slot layout_slots[] = {
    {Py_tp_doc, const_cast<char *>("Layout(spec)\n--\n\nfloat32 DTensors on one CPU mesh with the "
                                   "placements of `spec`; plain tensors if it is None.")},
    {Py_tp_new, reinterpret_cast<void *>(layout_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(layout_dealloc)},
    {Py_tp_methods, layout_methods},
    {0, nullptr}};

PyType_Spec layout_spec = {"fsdp_c._C.Layout", sizeof(LayoutObject), 0, Py_TPFLAGS_DEFAULT,
                           layout_slots};

} // namespace

} // namespace fc

int fc_register_locals(PyObject *module)
{
    using namespace fc;
    PyTypeObject *layout_type;
    return add_type(module, "Locals", &locals_spec, &locals_type) < 0
               ? -1
               : add_type(module, "Layout", &layout_spec, &layout_type);
}

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
