// How DTensors are laid out, and what memory they have here.
#include "bind/layout.h"

#include <torch/csrc/autograd/python_variable.h>

namespace fc {

namespace {

PyTypeObject *dtensor_type = nullptr;
struct Names {
    PyObject *local_tensor, *spec, *mesh, *placements;
} names; // interned
struct DTensorSlots {
    uint16_t local_tensor, spec;
} dtensor_slots;
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

uint16_t slot_of(PyTypeObject *type, PyObject *name)
{
    PyObject *slot = _PyType_Lookup(type, name);
    if (slot == nullptr || Py_TYPE(slot) != &PyMemberDescr_Type) {
        PyErr_Format(PyExc_TypeError, "%.100s has no slot '%U'", type->tp_name, name);
        throw_python();
    }
    return static_cast<uint16_t>(reinterpret_cast<PyMemberDescrObject *>(slot)->d_member->offset);
}

PyObject *in_slot(PyObject *object, uint16_t slot)
{
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + slot);
}

namespace {

Ref attribute(PyObject *object, uint16_t slot, PyObject *name)
{
    PyObject *value = in_slot(object, slot);
    return value != nullptr ? Ref::borrow(value) : checked(PyObject_GetAttr(object, name));
}

} // namespace

Ref spec_of(PyObject *dtensor)
{
    return attribute(dtensor, dtensor_slots.spec, names.spec);
}

bool is_ordinary(PyObject *object)
{
    if (!THPVariable_CheckExact(object)) {
        return false;
    }
    const at::Tensor &t = THPVariable_Unpack(object);
    return (t.is_cpu() || t.is_cuda()) && t.layout() == at::kStrided && !t.is_inference() &&
           !t.is_neg() &&
           !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::FuncTorchGradWrapper,
                                                     c10::DispatchKey::FuncTorchBatched,
                                                     c10::DispatchKey::Functionalize}));
}

bool is_plain(PyObject *object)
{
    return is_ordinary(object) && THPVariable_Unpack(object).is_cpu();
}

Ref local_of(PyObject *object, Layout *layout)
{
    Ref local;
    if (layout == nullptr) {
        local = Ref::borrow(object);
    } else if (is_dtensor(object)) {
        Ref spec = spec_of(object);
        if (layout->has(spec.get())) {
            local = attribute(object, dtensor_slots.local_tensor, names.local_tensor);
        }
    }
    return local && is_ordinary(local.get()) ? local : Ref();
}

at::Tensor floats_of(PyObject *object, Layout *layout)
{
    Ref local = local_of(object, layout);
    if (!local) {
        return {};
    }
    const at::Tensor &t = THPVariable_Unpack(local.get());
    return t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous() ? t : at::Tensor();
}

void bump_version(const at::Tensor &tensor)
{
    tensor.unsafeGetTensorImpl()->bump_version();
}

namespace {

int find_slots()
{
    return guarded([]() -> PyObject * {
               dtensor_slots = {slot_of(dtensor_type, names.local_tensor),
                                slot_of(dtensor_type, names.spec)};
               return Py_None;
           }) == nullptr
               ? -1
               : 0;
}

} // namespace

} // namespace fc

int fc_find_dtensors()
{
    using namespace fc;
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
    return dtensor == nullptr ? -1 : find_slots();
}
