// Memory that is taken from a tensor's storage for a while.
#ifndef FC_BIND_TENSOR_TAKEN_MEMORY_H
#define FC_BIND_TENSOR_TAKEN_MEMORY_H

#include <Python.h>

#include <ATen/core/Tensor.h>

namespace fc {

// take_memory(tensor, text) -> its storage's memory, as a tensor of bytes. Until it is given back,
// all tensors on the storage have none, and reading them raises `text`.
at::Tensor take_memory(PyObject *args, PyObject *named);

// give_memory(tensor, bytes): the storage gets what `bytes`, a tensor of bytes, has, which has none
// from then on.
void give_memory(PyObject *args, PyObject *named);

} // namespace fc

#endif
