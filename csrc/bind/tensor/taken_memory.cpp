// Takes a storage's memory away and gives it back: tensors, views and whoever holds them stay.
#include "bind/compat.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/empty.h>

namespace fc {

namespace {

c10::StorageImpl *storage_of(PyObject *tensor)
{
    return tensor_of(tensor).storage().unsafeGetStorageImpl();
}

at::DataPtr take_from(c10::StorageImpl *storage)
{
    return storage->set_data_ptr(at::DataPtr(nullptr, c10::Device(c10::kCPU)));
}

} // namespace

at::Tensor take_memory(PyObject *args, PyObject *named)
{
    PyObject *tensor;
    const char *text;
    parse(args, named, "Os:take_memory", {"tensor", "text"}, &tensor, &text);
    c10::StorageImpl *storage = storage_of(tensor);
    const size_t bytes = storage->nbytes();
    at::Tensor taken = at::empty({0}, at::dtype(at::kByte));
    c10::StorageImpl *into = taken.storage().unsafeGetStorageImpl();
    into->set_data_ptr_noswap(take_from(storage));
    into->set_nbytes(bytes);
    into->set_resizable(false);
    set_memory(storage, nullptr, 0);
    set_unreadable_text(storage, text);
    taken.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes)});
    return taken;
}

void give_memory(PyObject *args, PyObject *named)
{
    PyObject *tensor, *bytes;
    parse(args, named, "OO:give_memory", {"tensor", "bytes"}, &tensor, &bytes);
    c10::StorageImpl *storage = storage_of(tensor), *from = storage_of(bytes);
    const at::Tensor &given = tensor_of(bytes);
    if (given.scalar_type() != at::kByte || given.storage_offset() != 0 || from == storage) {
        raise_error(PyExc_ValueError, "expected a tensor of a storage's bytes");
    }
    const size_t n_bytes = from->nbytes();
    set_data(storage, take_from(from), n_bytes, true);
    set_memory(from, nullptr, 0);
    set_unreadable_text(from, "this memory was given back to its tensor");
}

} // namespace fc
