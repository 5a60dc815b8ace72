// Tensors of Python, and the memory that is taken from them for a while.
#include "bind/tensor/tensors.h"

#include "bind/module.h"
#include "bind/python/calls.h"
#include "bind/python/objects.h"

namespace fc {

fc_dtype dtype_of(at::ScalarType type)
{
    const fc_dtype found = find_dtype(type);
    if (found == FC_DTYPE_COUNT) {
        raise_error(PyExc_NotImplementedError, "fsdp_c: parameters of type %s are not supported",
                    c10::toString(type));
    }
    return found;
}

fc_dtype dtype_of_parts(at::ScalarType type)
{
    return dtype_of(c10::toRealValueType(type));
}

const at::Tensor &tensor_of(PyObject *object)
{
    if (!THPVariable_Check(object)) {
        raise_error(PyExc_TypeError, "expected a tensor, not %.100s", Py_TYPE(object)->tp_name);
    }
    return THPVariable_Unpack(object);
}

void note_data(PyObject *tensor)
{
    const Ref noted = to_python(make_noted(tensor_of(tensor)));
    const Ref swap = look_up(Import::swap_tensor_impl);
    checked(PyObject_CallFunctionObjArgs(swap.get(), tensor, noted.get(), nullptr));
    tensor_of(tensor).unsafeGetTensorImpl()->set_python_dispatch(true); // lost with its object
}

// ---- tensors, views and whoever holds them stay without their memory ----

static c10::StorageImpl *storage_of(PyObject *tensor)
{
    return tensor_of(tensor).storage().unsafeGetStorageImpl();
}

static at::DataPtr take_from(c10::StorageImpl *storage)
{
    finish_copies();
    return storage->set_data_ptr(at::DataPtr(nullptr, c10::Device(c10::kCPU)));
}

at::Tensor take_memory(Fields &given)
{
    const Ref tensor = given.object("tensor"), text = given.object("text");
    given.end();
    c10::StorageImpl *storage = storage_of(tensor.get());
    const size_t bytes = storage->nbytes();
    at::Tensor taken = at::empty({0}, at::dtype(at::kByte));
    c10::StorageImpl *into = taken.storage().unsafeGetStorageImpl();
    into->set_data_ptr_noswap(take_from(storage));
    into->set_nbytes(bytes);
    into->set_resizable(false);
    set_memory(storage, nullptr, 0);
    set_unreadable_text(storage, text_from(text.get()));
    taken.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(bytes)});
    return taken;
}

void give_memory(Fields &given)
{
    const Ref tensor = given.object("tensor"), bytes = given.object("bytes");
    given.end();
    c10::StorageImpl *storage = storage_of(tensor.get()), *from = storage_of(bytes.get());
    const at::Tensor &all = tensor_of(bytes.get());
    if (all.scalar_type() != at::kByte || all.storage_offset() != 0 || from == storage) {
        raise_error(PyExc_ValueError, "expected a tensor of a storage's bytes");
    }
    const size_t n_bytes = from->nbytes();
    set_data(storage, take_from(from), n_bytes, true);
    set_memory(from, nullptr, 0);
    set_unreadable_text(from, "this memory was given back to its tensor");
}

} // namespace fc
