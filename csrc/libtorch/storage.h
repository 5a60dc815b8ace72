// Storages of tensors: where they point, who has their memory, what reading them says. Under the
// interpreter's lock, as all that changes tensors of Python's.
#ifndef FC_LIBTORCH_STORAGE_H
#define FC_LIBTORCH_STORAGE_H

#include "transport/transport.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <string>

namespace fc {

// While one is there, dispatch modes and functorch's transforms see nothing and make nothing:
// tensors are real.
struct NoModes : c10::impl::ExcludeDispatchKeyGuard {
    NoModes()
        : ExcludeDispatchKeyGuard(
              c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                   c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                   c10::DispatchKey::FuncTorchDynamicLayerBackMode}))
    {
    }
};

// From now on reading the storage's data raises RuntimeError with `text`.
void set_unreadable_text(c10::StorageImpl *storage, std::string text);

// Gives the storage other data, and says whether reading it raises, with the text that the storage
// has for that.
void set_data(c10::StorageImpl *storage, at::DataPtr &&data, size_t bytes, bool is_readable);

// Makes the storage `bytes` of memory that it does not own; it can be read as before.
void set_memory(c10::StorageImpl *storage, void *memory, size_t bytes);

// Copies the storage's bytes to `home` (in `region`, which it then keeps alive) and points the
// storage, hence every tensor on it, there. The memory of before may have to stay as long.
void move_to(c10::StorageImpl *storage, void *home, fc_region *region, bool keeps_former);
// The same to bytes of a tensor of its device, from `at` on.
void move_to(c10::StorageImpl *storage, const at::Tensor &home, size_t at);

// Makes a tensor a view of another storage, from an element on; the storage has its dtype.
void point_to(const at::Tensor &tensor, const c10::Storage &storage, int64_t offset);

// A tensor on the same memory that notices whether it is copied with a version counter of its own
// (`tensor.data`): writes to the copy are writes to its memory that its own counter does not count.
at::Tensor make_noted(const at::Tensor &like);
bool is_data_taken_of(const at::Tensor &noted);
// Of any tensor of the process, since tensors are nobody's; else nobody has to look at them.
inline std::atomic<bool> any_data_is_taken{false};
inline bool is_data_taken(const at::Tensor &noted)
{
    return any_data_is_taken.load(std::memory_order_relaxed) && is_data_taken_of(noted);
}

} // namespace fc

#endif
