// Local tensors of DTensors, and passes over those of many gradients: norms and multiplication.
#include "bind/layout.h"

#include "kernels/kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>

namespace fc {

namespace {

PyTypeObject *dtensor_type = nullptr;
struct Names {
    PyObject *local_tensor, *spec, *mesh, *placements;
} names; // interned
constexpr size_t max_known_specs = size_t{1} << 16;

} // namespace

Layout::Layout(PyObject *spec)
    : mesh_(checked(PyObject_GetAttr(spec, names.mesh))),
      placements_(checked(PyObject_GetAttr(spec, names.placements)))
{
    remember(spec);
}

void Layout::remember(PyObject *spec)
{
    if (known_.size() == max_known_specs) { // somebody makes new ones in every step
        known_.clear();
        kept_.clear();
    }
    known_.insert(spec);
    kept_.push_back(Ref::borrow(spec));
}

bool Layout::has(PyObject *spec)
{
    if (known_.count(spec) != 0) {
        return true;
    }
    Ref mesh = checked(PyObject_GetAttr(spec, names.mesh));
    Ref placements = checked(PyObject_GetAttr(spec, names.placements));
    const int same_mesh = PyObject_RichCompareBool(mesh.get(), mesh_.get(), Py_EQ);
    check(same_mesh);
    const int same = PyObject_RichCompareBool(placements.get(), placements_.get(), Py_EQ);
    check(same);
    if (same_mesh != 1 || same != 1) {
        return false;
    }
    remember(spec);
    return true;
}

bool is_dtensor(PyObject *object)
{
    return Py_TYPE(object) == dtensor_type;
}

Ref spec_of(PyObject *dtensor)
{
    return checked(PyObject_GetAttr(dtensor, names.spec));
}

bool is_plain(PyObject *object)
{
    if (!THPVariable_CheckExact(object)) {
        return false;
    }
    const at::Tensor &t = THPVariable_Unpack(object);
    return t.device().is_cpu() && t.layout() == at::kStrided && !t.is_inference() && !t.is_neg() &&
           !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::FuncTorchGradWrapper,
                                                     c10::DispatchKey::FuncTorchBatched,
                                                     c10::DispatchKey::Functionalize}));
}

Ref local_of(PyObject *object, Layout *layout)
{
    Ref local;
    if (layout == nullptr) {
        local = Ref::borrow(object);
    } else if (is_dtensor(object)) {
        Ref spec = spec_of(object);
        if (layout->has(spec.get())) {
            local = checked(PyObject_GetAttr(object, names.local_tensor));
        }
    }
    return local && is_plain(local.get()) ? local : Ref();
}

at::Tensor floats_of(PyObject *object, Layout *layout)
{
    Ref local = local_of(object, layout);
    if (!local) {
        return {};
    }
    const at::Tensor &t = THPVariable_Unpack(local.get());
    return t.scalar_type() == at::kFloat && t.is_contiguous() ? t : at::Tensor();
}

void bump_version(const at::Tensor &tensor)
{
    tensor.unsafeGetTensorImpl()->bump_version();
}

namespace {

struct LayoutObject {
    PyObject_HEAD
    Layout *layout; // owned; null: plain tensors
};

PyObject *layout_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    PyObject *spec;
    if (!PyArg_ParseTuple(args, "O:Layout", &spec)) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        auto layout = spec == Py_None ? nullptr : std::make_unique<Layout>(spec);
        Ref self = checked(type->tp_alloc(type, 0));
        reinterpret_cast<LayoutObject *>(self.get())->layout = layout.release();
        return self.release();
    });
}

void layout_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    delete reinterpret_cast<LayoutObject *>(self)->layout;
    type->tp_free(self);
    Py_DECREF(type);
}

// Tensors of one layout, and their memory on this rank.
struct Locals {
    std::vector<at::Tensor> tensors; // as users have them
    std::vector<at::Tensor> locals;
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
    held.locals.push_back(std::move(local));
    return true;
}

// None if one of them is another thing.
PyObject *collect(PyObject *self, PyObject *list, bool gradients)
{
    return guarded([&]() -> PyObject * {
        if (!PyList_Check(list)) {
            Py_RETURN_NONE;
        }
        Layout *layout = reinterpret_cast<LayoutObject *>(self)->layout;
        auto held = std::make_unique<Locals>();
        const Py_ssize_t n = PyList_GET_SIZE(list);
        held->tensors.reserve(static_cast<size_t>(n));
        held->locals.reserve(static_cast<size_t>(n));
        for (Py_ssize_t i = 0; i < n; i++) {
            PyObject *item = PyList_GET_ITEM(list, i);
            if (!THPVariable_Check(item)) {
                Py_RETURN_NONE;
            }
            const at::Tensor &tensor = THPVariable_Unpack(item);
            const at::Tensor &wanted = gradients ? tensor.grad() : tensor;
            if (wanted.defined() && !take(*held, wanted, layout)) {
                Py_RETURN_NONE;
            }
        }
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

// Numbers of the tensors, those of one length one after the other.
std::vector<size_t> by_length(const std::vector<at::Tensor> &tensors)
{
    std::vector<size_t> order(tensors.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return tensors[a].numel() > tensors[b].numel(); });
    return order;
}

constexpr int64_t norm_grain = 64;

void find_norms(const std::vector<at::Tensor> &tensors, float *out)
{
    const std::vector<size_t> order = by_length(tensors);
    at::parallel_for(0, static_cast<int64_t>(order.size()), norm_grain,
                     [&](int64_t i, int64_t end) {
                         const float *data[norm_grain];
                         size_t numels[norm_grain];
                         float found[norm_grain];
                         while (i < end) {
                             const auto n = static_cast<size_t>(std::min(norm_grain, end - i));
                             const size_t *numbers = order.data() + i;
                             for (size_t k = 0; k < n; k++) {
                                 const at::Tensor &tensor = tensors[numbers[k]];
                                 data[k] = tensor.const_data_ptr<float>();
                                 numels[k] = static_cast<size_t>(tensor.numel());
                             }
                             fc_kern()->norms(found, data, numels, n);
                             for (size_t k = 0; k < n; k++) {
                                 // PyTorch squares nothing where there is only one.
                                 out[numbers[k]] = numels[k] == 1 ? std::fabs(*data[k]) : found[k];
                             }
                             i += static_cast<int64_t>(n);
                         }
                     });
}

PyObject *locals_norms(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        const std::vector<at::Tensor> &locals = held_by(self).locals;
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        at::Tensor norms = at::empty({static_cast<int64_t>(locals.size())}, at::kFloat);
        {
            NoGil no_gil;
            find_norms(locals, static_cast<float *>(norms.data_ptr()));
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
        NoGil no_gil;
        const auto n = static_cast<int64_t>(held.locals.size());
        at::parallel_for(0, n, 64, [&](int64_t i, int64_t end) {
            for (; i < end; i++) {
                const at::Tensor &local = held.locals[static_cast<size_t>(i)];
                fc_kern()->multiply(static_cast<float *>(local.data_ptr()), factor,
                                    static_cast<size_t>(local.numel()));
            }
        });
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

int fc_register_layout(PyObject *module)
{
    using namespace fc;
    PyTypeObject *layout_type;
    if (intern({{&names.local_tensor, "_local_tensor"},
                {&names.spec, "_spec"},
                {&names.mesh, "mesh"},
                {&names.placements, "placements"}}) < 0) {
        return -1;
    }
    PyObject *tensors = PyImport_ImportModule("torch.distributed.tensor");
    PyObject *dtensor = tensors == nullptr ? nullptr : PyObject_GetAttrString(tensors, "DTensor");
    Py_XDECREF(tensors);
    dtensor_type = reinterpret_cast<PyTypeObject *>(dtensor);
    return dtensor == nullptr || add_type(module, "Locals", &locals_spec, &locals_type) < 0
               ? -1
               : add_type(module, "Layout", &layout_spec, &layout_type);
}
