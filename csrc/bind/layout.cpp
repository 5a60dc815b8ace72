// Local tensors of DTensors, and passes over those of many gradients: norms and multiplication.
#include "bind/layout.h"

#include "kernels/kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <memory>

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

// The local tensors of a list of DTensors; false if one of them is another thing.
bool locals_of(PyObject *self, PyObject *list, std::vector<at::Tensor> &locals)
{
    if (!PyList_Check(list)) {
        return false;
    }
    Layout *layout = reinterpret_cast<LayoutObject *>(self)->layout;
    const Py_ssize_t n = PyList_GET_SIZE(list);
    locals.reserve(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; i++) {
        at::Tensor local = floats_of(PyList_GET_ITEM(list, i), layout);
        if (!local.defined()) {
            return false;
        }
        locals.push_back(std::move(local));
    }
    return true;
}

PyObject *layout_locals(PyObject *self, PyObject *list)
{
    return guarded([&]() -> PyObject * {
        std::vector<at::Tensor> locals;
        if (!locals_of(self, list, locals)) {
            Py_RETURN_NONE;
        }
        Ref result = checked(PyList_New(static_cast<Py_ssize_t>(locals.size())));
        for (size_t i = 0; i < locals.size(); i++) {
            PyList_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(locals[i]));
        }
        return result.release();
    });
}

float norm_of(const at::Tensor &tensor)
{
    const auto numel = static_cast<size_t>(tensor.numel());
    const float *data = tensor.const_data_ptr<float>();
    return numel == 1 ? std::fabs(*data) : fc_kern()->norm(data, numel);
}

PyObject *layout_norms(PyObject *self, PyObject *list)
{
    return guarded([&]() -> PyObject * {
        std::vector<at::Tensor> locals;
        if (!locals_of(self, list, locals)) {
            Py_RETURN_NONE;
        }
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        at::Tensor norms = at::empty({static_cast<int64_t>(locals.size())}, at::kFloat);
        float *out = static_cast<float *>(norms.data_ptr());
        {
            NoGil no_gil;
            at::parallel_for(0, static_cast<int64_t>(locals.size()), 64,
                             [&](int64_t begin, int64_t end) {
                                 for (int64_t i = begin; i < end; i++) {
                                     out[i] = norm_of(locals[static_cast<size_t>(i)]);
                                 }
                             });
        }
        return THPVariable_Wrap(norms);
    });
}

PyObject *layout_multiply(PyObject *self, PyObject *args)
{
    PyObject *list;
    float factor;
    if (!PyArg_ParseTuple(args, "Of:multiply", &list, &factor)) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        std::vector<at::Tensor> locals;
        if (!locals_of(self, list, locals)) {
            Py_RETURN_FALSE;
        }
        for (size_t i = 0; i < locals.size(); i++) {
            bump_version(THPVariable_Unpack(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i))));
            bump_version(locals[i]);
        }
        NoGil no_gil;
        at::parallel_for(0, static_cast<int64_t>(locals.size()), 64, [&](int64_t i, int64_t end) {
            for (; i < end; i++) {
                const at::Tensor &local = locals[static_cast<size_t>(i)];
                fc_kern()->multiply(static_cast<float *>(local.data_ptr()), factor,
                                    static_cast<size_t>(local.numel()));
            }
        });
        Py_RETURN_TRUE;
    });
}

PyMethodDef layout_methods[] = {
    {"locals", layout_locals, METH_O,
     "locals(tensors) -> list[Tensor] | None\n\nTheir local tensors. None: one of them is laid out "
     "otherwise."},
    {"norms", layout_norms, METH_O,
     "norms(tensors) -> Tensor | None\n\nThe 2-norm of each local tensor; float32, [n]. None: one "
     "of them is laid out otherwise."},
    {"multiply", layout_multiply, METH_VARARGS,
     "multiply(tensors, factor) -> bool\n\nMultiplies local tensors in place. False: one of them "
     "is laid out otherwise, nothing was touched."},
    {nullptr, nullptr, 0, nullptr}};

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
    return dtensor == nullptr ? -1 : add_type(module, "Layout", &layout_spec, &layout_type);
}
