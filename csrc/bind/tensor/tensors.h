// Tensors as the core sees them: element types, storages that point elsewhere.
#ifndef FC_BIND_TENSOR_TENSORS_H
#define FC_BIND_TENSOR_TENSORS_H

#include "bind/python/python.h"
#include "libtorch/storage.h"
#include "libtorch/types.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <vector>

namespace fc {

// A few need no allocation.
using Tensors = c10::SmallVector<at::Tensor, 4>;

// Tensors that Python's objects keep, for while no Python runs: for a second reference to a tensor
// torch looks for its object, to count it there.
struct BorrowedTensors {
    c10::SmallVector<const at::Tensor *, 4> list;
    std::vector<Ref> kept; // what was made to find them
};

// The element type, RAW of its size for those without arithmetic; throws for types of other sizes.
fc_dtype dtype_of(at::ScalarType type);
// The same of the numbers that are added up: a complex one is two.
fc_dtype dtype_of_parts(at::ScalarType type);

// The tensor inside a Python object; TypeError as an exception if it is none.
const at::Tensor &tensor_of(PyObject *object);

// Waits until no snapshot reads memory of tensors any more: before memory is moved or given back.
void finish_copies();

// ---- pytree.cpp: the tensors in a module's arguments and results ----

// True if nothing in `object` can hide a tensor from the traversal. None counts as hiding: what a
// module computes without returning it went somewhere else.
bool is_transparent(PyObject *object);

// Appends the tensors that require grad, in order. Plain tensors, tuples, lists and dicts are
// opened here; anything else that may hold tensors (dataclasses, subclasses of containers) is left
// to torch's own traversal.
void collect_grad_tensors(PyObject *object, BorrowedTensors &out);

// The same object with the collected tensors replaced, in order, by `tensors`; a new reference.
Ref replace_grad_tensors(PyObject *object, at::TensorList tensors);

// Casts floating-point tensors of a tuple or a dict to `dtype`. Null if nothing has to change;
// opaque containers go to `cast_any(object)`.
Ref cast_tensors(PyObject *object, at::ScalarType dtype, PyObject *cast_any);

} // namespace fc

#endif
