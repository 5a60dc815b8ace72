// Finds the tensors in a module's arguments and results.
#ifndef FC_BIND_TENSOR_PYTREE_H
#define FC_BIND_TENSOR_PYTREE_H

#include "bind/python/python.h"
#include "bind/tensor/tensors.h"

namespace fc {

// Appends the tensors that require grad, in order. Plain tensors, tuples, lists and dicts are
// opened here; anything else that may hold tensors (dataclasses, subclasses of containers) is left
// to torch's own traversal.
// True if nothing in `object` can hide a tensor from the traversal. None counts as hiding: what a
// module computes without returning it went somewhere else.
bool is_transparent(PyObject *object);
void collect_grad_tensors(PyObject *object, Tensors &out);

// The same object with the collected tensors replaced, in order, by `tensors`; a new reference.
Ref replace_grad_tensors(PyObject *object, at::TensorList tensors);

// Casts floating-point tensors of a tuple or a dict to `dtype`. Null if nothing has to change;
// opaque containers go to `cast_any(object)`.
Ref cast_tensors(PyObject *object, at::ScalarType dtype, PyObject *cast_any);

} // namespace fc

#endif
