// How DTensors are laid out, and what memory they have here.
#include "bind/tensor/layout.h"

#include "bind/module.h"
#include "bind/python/calls.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

namespace fc {

namespace {

struct DTensorSlots { // the process's, too
    uint16_t local_tensor, spec;
} dtensor_slots;
constexpr size_t max_known_specs = size_t{1} << 16;

bool are_equal(PyObject *a, PyObject *b)
{
    const int result = PyObject_RichCompareBool(a, b, Py_EQ);
    check(result);
    return result == 1;
}

} // namespace

int DTensorLayouts::number_of(PyObject *spec)
{
    const auto known = known_.find(spec);
    if (known != known_.end()) {
        return known->second.number;
    }
    const int number = find(spec);
    if (known_.size() >= max_known_specs) { // somebody makes new ones in every step
        known_.clear();
    }
    known_.insert({spec, {Ref::borrow(spec), number}});
    return number;
}

// Comparing runs Python code, which may come here too.
int DTensorLayouts::find(PyObject *spec)
{
    Seen made{Ref::borrow(spec), checked(PyObject_GetAttr(spec, name_of(Attribute::mesh))),
              checked(PyObject_GetAttr(spec, name_of(Attribute::placements))), -1};
    int n_meshes = 0;
    for (size_t i = 0; i < seen_.size(); i++) {
        const Seen old = seen_[i];
        n_meshes = std::max(n_meshes, old.mesh_number + 1);
        if (!are_equal(made.mesh.get(), old.mesh.get())) {
            continue;
        }
        if (are_equal(made.placements.get(), old.placements.get())) {
            return static_cast<int>(i);
        }
        made.mesh_number = old.mesh_number;
    }
    made.mesh_number = made.mesh_number < 0 ? n_meshes : made.mesh_number;
    seen_.push_back(std::move(made));
    return static_cast<int>(seen_.size()) - 1;
}

int DTensorLayouts::number_for(PyObject *object)
{
    return is_dtensor(object) ? number_of(fc::spec_of(object).get()) : no_layout;
}

Ref DTensorLayouts::local_of(PyObject *object, int layout)
{
    Ref local;
    if (layout == no_layout) {
        local = Ref::borrow(object);
    } else if (number_for(object) == layout) {
        local = local_tensor_of(object);
    }
    return local && is_ordinary(local.get()) ? local : Ref();
}

at::Tensor DTensorLayouts::floats_of(PyObject *object, int layout)
{
    Ref local = local_of(object, layout);
    return local && are_floats(THPVariable_Unpack(local.get())) ? THPVariable_Unpack(local.get())
                                                                : at::Tensor();
}

uint16_t slot_of(PyTypeObject *type, PyObject *name)
{
    PyObject *slot = _PyType_Lookup(type, name);
    if (slot == nullptr || Py_TYPE(slot) != &PyMemberDescr_Type) {
        raise_error(PyExc_TypeError, "%.100s has no slot '%U'", type->tp_name, name);
    }
    return static_cast<uint16_t>(reinterpret_cast<PyMemberDescrObject *>(slot)->d_member->offset);
}

static Ref attribute(PyObject *object, uint16_t slot, Attribute name)
{
    PyObject *value = in_slot(object, slot);
    return value != nullptr ? Ref::borrow(value) : checked(PyObject_GetAttr(object, name_of(name)));
}

Ref spec_of(PyObject *dtensor)
{
    return attribute(dtensor, dtensor_slots.spec, Attribute::spec);
}

Ref local_tensor_of(PyObject *dtensor)
{
    return attribute(dtensor, dtensor_slots.local_tensor, Attribute::local_tensor);
}

bool is_ordinary(PyObject *object)
{
    if (!THPVariable_CheckExact(object)) {
        return false;
    }
    const at::Tensor &t = THPVariable_Unpack(object);
    return (t.is_cpu() || t.is_cuda() || t.is_privateuseone()) && t.layout() == at::kStrided &&
           !t.is_inference() && !t.is_neg() &&
           !t.key_set().has_any(c10::DispatchKeySet({c10::DispatchKey::FuncTorchGradWrapper,
                                                     c10::DispatchKey::FuncTorchBatched,
                                                     c10::DispatchKey::Functionalize}));
}

int find_dtensors()
{
    const auto find = [] {
        dtensor_type = reinterpret_cast<PyTypeObject *>(look_up(Import::dtensor).release());
        dtensor_slots = {slot_of(dtensor_type, name_of(Attribute::local_tensor)),
                         slot_of(dtensor_type, name_of(Attribute::spec))};
    };
    return succeeds(find) ? 0 : -1;
}

} // namespace fc
