// Storages of tensors: where they point, and what reading them says.
#include "libtorch/storage.h"

#include "libtorch/versions.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>

namespace fc {

void set_unreadable_text(c10::StorageImpl *storage, std::string text)
{
#if FC_TORCH_AT_LEAST(2, 13)
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
#else
    (void)storage; // before 2.13 the error cannot be taken back, so it is never set
    (void)text;
#endif
}

// torch's way to take the error back drops the text. So all is exchanged with another storage's,
// and the text is not even touched.
void set_data(c10::StorageImpl *storage, at::DataPtr &&data, size_t bytes, bool is_readable)
{
#if FC_TORCH_AT_LEAST(2, 13)
    static c10::StorageImpl *const other =
        new c10::StorageImpl(c10::StorageImpl::use_byte_size_t(), 0, at::DataPtr(), nullptr, false);
    if (is_readable) {
        other->clear_data_ptr_access_error_msg_();
    } else {
        other->release_data_and_set_meta_custom_data_ptr_error_msg_(std::nullopt);
    }
    other->set_data_ptr_noswap(std::move(data));
    other->set_nbytes(bytes);
    other->set_allocator(storage->allocator()); // it goes along, and so does what follows
    other->set_resizable(storage->resizable());
    storage->swap_data_ptr(*other);
    other->set_data_ptr_noswap(at::DataPtr());
#else
    (void)is_readable;
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
#endif
}

void set_memory(c10::StorageImpl *storage, void *memory, size_t bytes)
{
    storage->set_data_ptr_noswap(at::DataPtr(memory, storage->device()));
    storage->set_nbytes(bytes);
}

namespace {

struct Home {
    fc_region *region;
    at::DataPtr former; // NumPy and others may have its address
    ~Home() { fc_region_release(region); }
};

} // namespace

void move_to(c10::StorageImpl *storage, void *home, fc_region *region, bool keeps_former)
{
    if (storage->nbytes() > 0) {
        std::memcpy(home, storage->data(), storage->nbytes());
    }
    fc_region_retain(region);
    auto *owner = new Home{region, {}};
    at::DataPtr former = storage->set_data_ptr(
        {home, owner, [](void *p) { delete static_cast<Home *>(p); }, c10::Device(c10::kCPU)});
    if (keeps_former) {
        owner->former = std::move(former);
    }
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
