// Element types and storages: where they point, and who has their memory.
#include "bind/tensor/tensors.h"

#include "bind/compat.h"
#include "bind/module.h"
#include "bind/python/objects.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>

namespace fc {

namespace {

// By fc_dtype; RAW ones some of their size.
constexpr std::array<at::ScalarType, FC_DTYPE_COUNT> types = {
    at::kFloat, at::kDouble, at::kBFloat16, at::kHalf,  at::kByte, at::kChar, at::kShort,
    at::kInt,   at::kLong,   at::kByte,     at::kShort, at::kInt,  at::kLong, at::kComplexDouble};

// Of the first `n`; as many as these: none is it.
int place_of(at::ScalarType type, int n)
{
    return static_cast<int>(std::find(types.begin(), types.begin() + n, type) - types.begin());
}

} // namespace

fc_dtype number_of(at::ScalarType type)
{
    return static_cast<fc_dtype>(place_of(type, FC_RAW1));
}

fc_dtype dtype_of(at::ScalarType type)
{
    if (const int place = place_of(type, FC_FLOAT_COUNT); place < FC_FLOAT_COUNT) {
        return static_cast<fc_dtype>(place);
    }
    for (const fc_dtype raw : {FC_RAW1, FC_RAW2, FC_RAW4, FC_RAW8, FC_RAW16}) {
        if (fc_dtype_bytes(raw) == c10::elementSize(type)) {
            return raw;
        }
    }
    raise_error(PyExc_NotImplementedError, "fsdp_c: parameters of type %s are not supported",
                c10::toString(type));
}

at::ScalarType scalar_type_of(fc_dtype dtype)
{
    return types[dtype];
}

const at::Tensor &tensor_of(PyObject *object)
{
    if (!THPVariable_Check(object)) {
        raise_error(PyExc_TypeError, "expected a tensor, not %.100s", Py_TYPE(object)->tp_name);
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
    finish_copies();
    if (storage->nbytes() > 0) {
        std::memcpy(home, storage->data(), storage->nbytes());
    }
    fc_region_retain(region);
    storage->set_data_ptr_noswap(at::DataPtr(home, region, release_region, c10::Device(c10::kCPU)));
}

void move_to(c10::StorageImpl *storage, const at::Tensor &home, size_t at)
{
    finish_copies();
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
