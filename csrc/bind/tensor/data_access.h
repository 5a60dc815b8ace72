// Tensors that know when somebody may write to them uncounted.
#ifndef FC_BIND_TENSOR_DATA_ACCESS_H
#define FC_BIND_TENSOR_DATA_ACCESS_H

#include <Python.h>

#include <ATen/core/Tensor.h>

namespace fc {

// True if the tensor, made by make_noted, was copied with a version counter of its own
// (`tensor.data`): writes to the copy are writes to its memory that its own counter does not count.
bool is_data_taken(const at::Tensor &tensor);

// make_noted(tensor): a tensor on the same memory for is_data_taken.
at::Tensor make_noted(PyObject *tensor);
// note_data(tensor): the same for a new tensor of a subclass, in place.
void note_data(PyObject *tensor);

} // namespace fc

#endif
