// How DTensors are laid out, and the plain memory that they have on this rank.
#ifndef FC_BIND_TENSOR_LAYOUT_H
#define FC_BIND_TENSOR_LAYOUT_H

#include "bind/python/python.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

namespace fc {

constexpr int no_layout = -1; // of a plain tensor

// Layouts of DTensors (mesh and placements), numbered as they come, and so are their meshes. Specs
// that were compared once are known again.
class DTensorLayouts {
public:
    int number_of(PyObject *spec);
    int number_for(PyObject *object); // no_layout if it is no DTensor
    int n_layouts() const { return static_cast<int>(seen_.size()); }
    int mesh_number_of(int layout) const { return seen_[static_cast<size_t>(layout)].mesh_number; }
    PyObject *spec_of(int layout) const { return seen_[static_cast<size_t>(layout)].spec.get(); }

    // The tensor that a DTensor in the layout has here, or with no_layout `object` itself; null if
    // it is another thing.
    Ref local_of(PyObject *object, int layout);
    at::Tensor floats_of(PyObject *object, int layout); // the same if are_floats; else undefined

private:
    struct Seen {
        Ref spec, mesh, placements;
        int mesh_number;
    };
    struct Numbered {
        Ref spec; // keeps it
        int number;
    };
    int find(PyObject *spec);

    std::vector<Seen> seen_;
    std::unordered_map<PyObject *, Numbered> known_;
};

// A tensor that is memory of this process, or of a GPU, and nothing more.
bool is_ordinary(PyObject *object);

inline PyTypeObject *dtensor_type = nullptr; // the process's, as torch's class is
inline bool is_dtensor(PyObject *object)     // and no subclass
{
    return Py_TYPE(object) == dtensor_type;
}
inline bool is_dtensor_or_subclass(PyObject *object)
{
    return PyObject_TypeCheck(object, dtensor_type) != 0;
}

// Where objects of a class keep what one of its __slots__ names; TypeError if none does.
uint16_t slot_of(PyTypeObject *type, PyObject *name);
inline PyObject *in_slot(PyObject *object, uint16_t slot) // borrowed; null after `del`
{
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + slot);
}

Ref spec_of(PyObject *dtensor);
Ref local_tensor_of(PyObject *dtensor); // what it has here, of any kind

inline bool are_floats(const at::Tensor &t) // flat float32 memory of this process
{
    return t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous();
}

inline void bump_version(const at::Tensor &tensor)
{
    tensor.unsafeGetTensorImpl()->bump_version();
}

} // namespace fc

#endif
