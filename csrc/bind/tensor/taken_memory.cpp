// Takes a storage's memory away and gives it back: tensors, views and whoever holds them stay.
#include "bind/tensor/taken_memory.h"

#include "bind/compat.h"
#include "bind/python/python.h"
#include "bind/tensor/tensors.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

PyObject *fc_take_memory(PyObject *, PyObject *args)
{
    return fc::guarded([&]() -> PyObject * {
        PyObject *object;
        const char *text;
        if (!PyArg_ParseTuple(args, "Os", &object, &text)) {
            return nullptr;
        }
        c10::StorageImpl *storage = fc::tensor_of(object).storage().unsafeGetStorageImpl();
        const size_t bytes = storage->nbytes();
        at::Tensor taken = at::empty({0}, at::dtype(at::kByte));
        c10::StorageImpl *into = taken.storage().unsafeGetStorageImpl();
        into->set_data_ptr_noswap(
            storage->set_data_ptr(at::DataPtr(nullptr, c10::Device(c10::kCPU))));
        into->set_nbytes(bytes);
        into->set_resizable(false);
        fc::set_memory(storage, nullptr, 0);
        fc::set_unreadable_text(storage, text);
        taken.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes)});
        return THPVariable_Wrap(taken);
    });
}

PyObject *fc_give_memory(PyObject *, PyObject *args)
{
    return fc::guarded([&]() -> PyObject * {
        PyObject *object, *bytes;
        if (!PyArg_ParseTuple(args, "OO", &object, &bytes)) {
            return nullptr;
        }
        c10::StorageImpl *storage = fc::tensor_of(object).storage().unsafeGetStorageImpl();
        const at::Tensor &given = fc::tensor_of(bytes);
        c10::StorageImpl *from = given.storage().unsafeGetStorageImpl();
        if (given.scalar_type() != at::kByte || given.storage_offset() != 0 || from == storage) {
            PyErr_SetString(PyExc_ValueError, "expected a tensor of a storage's bytes");
            return nullptr;
        }
        const size_t n_bytes = from->nbytes();
        fc::set_data(storage, from->set_data_ptr(at::DataPtr(nullptr, c10::Device(c10::kCPU))),
                     n_bytes, true);
        fc::set_memory(from, nullptr, 0);
        fc::set_unreadable_text(from, "this memory was given back to its tensor");
        Py_RETURN_NONE;
    });
}
