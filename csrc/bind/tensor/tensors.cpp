// Element types and storages.
#include "bind/tensor/tensors.h"

#include "bind/compat.h"
#include "bind/python/python.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>

namespace fc {

fc_dtype dtype_of(at::ScalarType type)
{
    switch (type) {
    case at::kFloat:
        return FC_F32;
    case at::kDouble:
        return FC_F64;
    case at::kBFloat16:
        return FC_BF16;
    case at::kHalf:
        return FC_F16;
    default:
        break;
    }
    switch (c10::elementSize(type)) {
    case 1:
        return FC_RAW1;
    case 2:
        return FC_RAW2;
    case 4:
        return FC_RAW4;
    case 8:
        return FC_RAW8;
    case 16:
        return FC_RAW16;
    default:
        PyErr_Format(PyExc_NotImplementedError, "fsdp_c: parameters of type %s are not supported",
                     c10::toString(type));
        throw_python();
    }
}

at::ScalarType scalar_type_of(fc_dtype dtype)
{
    switch (dtype) {
    case FC_F32:
        return at::kFloat;
    case FC_F64:
        return at::kDouble;
    case FC_BF16:
        return at::kBFloat16;
    case FC_F16:
        return at::kHalf;
    case FC_I8:
        return at::kChar;
    default:
        break;
    }
    switch (fc_dtype_bytes(dtype)) {
    case 1:
        return at::kByte;
    case 2:
        return at::kShort;
    case 4:
        return at::kInt;
    case 8:
        return at::kLong;
    default:
        return at::kComplexDouble;
    }
}

const at::Tensor &tensor_of(PyObject *object)
{
    if (!THPVariable_Check(object)) {
        PyErr_Format(PyExc_TypeError, "expected a tensor, not %.100s", Py_TYPE(object)->tp_name);
        throw_python();
    }
    return THPVariable_Unpack(object);
}

void set_memory(c10::StorageImpl *storage, void *memory, size_t bytes)
{
    storage->set_data_ptr_noswap(at::DataPtr(memory, storage->device()));
    storage->set_nbytes(bytes);
}

static void release_region(void *region)
{
    fc_region_release(static_cast<fc_region *>(region));
}

void move_to(c10::StorageImpl *storage, void *home, fc_region *region)
{
    if (storage->nbytes() > 0) {
        std::memcpy(home, storage->data(), storage->nbytes());
    }
    fc_region_retain(region);
    storage->set_data_ptr_noswap(at::DataPtr(home, region, release_region, c10::Device(c10::kCPU)));
}

void move_to(c10::StorageImpl *storage, const at::Tensor &home, size_t at)
{
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    const at::Tensor place = home.narrow(0, static_cast<int64_t>(at), bytes);
    if (bytes > 0) {
        const at::NoGradGuard no_grad;
        const c10::impl::VirtualGuardImpl impl(home.device().type());
        place.copy_(at::for_blob(storage->mutable_data(), {bytes})
                        .options(home.options())
                        .target_device(home.device())
                        .make_tensor());
        impl.recordDataPtrOnStream(storage->data_ptr(), impl.getStream(home.device()));
    }
    storage->set_data_ptr_noswap(at::DataPtr(
        place.mutable_data_ptr(), new at::Tensor(home),
        [](void *owner) { delete static_cast<at::Tensor *>(owner); }, home.device()));
}

void point_to(const at::Tensor &tensor, const c10::Storage &storage, int64_t offset)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(storage);
    impl->set_storage_offset(offset);
}

} // namespace fc
