// Tensors as the core sees them: element types, storages that point elsewhere.
#ifndef FC_BIND_TENSOR_TENSORS_H
#define FC_BIND_TENSOR_TENSORS_H

#include "bind/python/python.h"
#include "transport/transport.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

namespace fc {

// A few need no allocation.
using Tensors = c10::SmallVector<at::Tensor, 4>;

// While one is there, dispatch modes and functorch's transforms see nothing and make nothing:
// tensors are real.
struct NoModes : c10::impl::ExcludeDispatchKeyGuard {
    NoModes()
        : ExcludeDispatchKeyGuard(
              c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                   c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                   c10::DispatchKey::FuncTorchDynamicLayerBackMode}))
    {
    }
};

// The element type, RAW of its size for those without arithmetic; throws for types of other sizes.
fc_dtype dtype_of(at::ScalarType type);

// The type in which elements are added up; FC_RAW1: they cannot be.
fc_dtype number_of(at::ScalarType type);

// A type of that kind and size: the way back, except that RAW comes back as some type of its size.
at::ScalarType scalar_type_of(fc_dtype dtype);

// The tensor inside a Python object; TypeError as an exception if it is none.
const at::Tensor &tensor_of(PyObject *object);

// True if the tensor, made by make_noted, was copied with a version counter of its own
// (`tensor.data`): writes to the copy are writes to its memory that its own counter does not count.
bool is_data_taken(const at::Tensor &tensor);

// Makes the storage `bytes` of memory that it does not own; it can be read as before.
void set_memory(c10::StorageImpl *storage, void *memory, size_t bytes);

// Copies the storage's bytes to `home` (in `region`, which it then keeps alive) and points the
// storage, hence every tensor on it, there.
void move_to(c10::StorageImpl *storage, void *home, fc_region *region);
// The same to bytes of a tensor of its device, from `at` on.
void move_to(c10::StorageImpl *storage, const at::Tensor &home, size_t at);

// Makes a tensor a view of another storage, from an element on; the storage has its dtype.
void point_to(const at::Tensor &tensor, const c10::Storage &storage, int64_t offset);

// Waits until no snapshot reads memory of tensors any more: before memory is moved or given back.
void finish_copies();

// ---- pytree.cpp: the tensors in a module's arguments and results ----

// True if nothing in `object` can hide a tensor from the traversal. None counts as hiding: what a
// module computes without returning it went somewhere else.
bool is_transparent(PyObject *object);

// Appends the tensors that require grad, in order. Plain tensors, tuples, lists and dicts are
// opened here; anything else that may hold tensors (dataclasses, subclasses of containers) is left
// to torch's own traversal.
void collect_grad_tensors(PyObject *object, Tensors &out);

// The same object with the collected tensors replaced, in order, by `tensors`; a new reference.
Ref replace_grad_tensors(PyObject *object, at::TensorList tensors);

// Casts floating-point tensors of a tuple or a dict to `dtype`. Null if nothing has to change;
// opaque containers go to `cast_any(object)`.
Ref cast_tensors(PyObject *object, at::ScalarType dtype, PyObject *cast_any);

} // namespace fc

#endif
