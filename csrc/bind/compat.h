// All differences between torch versions that the binding meets.
#ifndef FC_BIND_COMPAT_H
#define FC_BIND_COMPAT_H

#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/version.h>

#include <dlfcn.h>

#include <string>
#include <utility>

#define FC_TORCH_AT_LEAST(major, minor)                                                            \
    (TORCH_VERSION_MAJOR > (major) ||                                                              \
     (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace fc {

// Autograd nodes are counted by intrusive_ptr from 2.13, by shared_ptr before.
#if FC_TORCH_AT_LEAST(2, 13)
using NodePtr = c10::intrusive_ptr<torch::autograd::Node>;
template <typename N, typename... Args> c10::intrusive_ptr<N> make_node(Args &&...args)
{
    return c10::make_intrusive<N>(std::forward<Args>(args)...);
}
#else
using NodePtr = std::shared_ptr<torch::autograd::Node>;
template <typename N, typename... Args> std::shared_ptr<N> make_node(Args &&...args)
{
    return std::shared_ptr<N>(new N(std::forward<Args>(args)...), torch::autograd::deleteNode);
}
#endif

// From 2.15 gradients that are kept without synchronisation stay in .grad of the unsharded
// parameter, in the reduce dtype; before, in a tensor beside it.
constexpr bool holds_gradients_on_leaf = FC_TORCH_AT_LEAST(2, 15);

// From 2.15 a sum that the replicas have not seen yet reaches them in the next backward with
// all-reduce, also if that one has nothing to add.
constexpr bool flushes_partial_sums = FC_TORCH_AT_LEAST(2, 15);

// Collectives on whole tensors have their names since 2.13. They are enqueued, and return null or
// what to wait for.
inline c10::intrusive_ptr<c10d::Work> gather_into(c10d::ProcessGroup &group, at::Tensor &all,
                                                  at::Tensor &own)
{
    c10d::AllgatherOptions options;
    options.asyncOp = false;
#if FC_TORCH_AT_LEAST(2, 13)
    return group.all_gather_single(all, own, options);
#else
    return group._allgather_base(all, own, options);
#endif
}

inline c10::intrusive_ptr<c10d::Work> scatter_sums(c10d::ProcessGroup &group, at::Tensor &part,
                                                   at::Tensor &all)
{
    c10d::ReduceScatterOptions options;
    options.asyncOp = false;
#if FC_TORCH_AT_LEAST(2, 13)
    return group.reduce_scatter_single(part, all, options);
#else
    return group._reduce_scatter_base(part, all, options);
#endif
}

#if !FC_TORCH_AT_LEAST(2, 13)
// Before 2.13 only CUDA's own class of streams tells its handle: a c10::Stream and nothing beside.
// Null where libc10_cuda is not loaded.
using StreamTeller = void *(*)(const c10::Stream *);

inline StreamTeller stream_teller()
{
    static const auto teller = [] {
        void *library = dlopen("libc10_cuda.so", RTLD_NOW | RTLD_NOLOAD);
        void *found =
            library == nullptr ? nullptr : dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv");
        return reinterpret_cast<StreamTeller>(found);
    }();
    return teller;
}
#endif

// Whether native_stream() can be asked about streams of CUDA.
inline bool tells_streams()
{
#if FC_TORCH_AT_LEAST(2, 13)
    return true;
#else
    return stream_teller() != nullptr;
#endif
}

// The backend's own handle of a stream, which is null for CUDA's default stream.
inline void *native_stream(const c10::Stream &stream)
{
#if FC_TORCH_AT_LEAST(2, 13)
    return stream.native_handle();
#else
    return stream_teller()(&stream);
#endif
}

// From now on reading the storage's data raises RuntimeError with `text`.
inline void set_unreadable_text(c10::StorageImpl *storage, std::string text)
{
#if FC_TORCH_AT_LEAST(2, 13)
    storage->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(text));
#else
    (void)storage; // before 2.13 the error cannot be taken back, so it is never set
    (void)text;
#endif
}

// Gives the storage other data, and says whether reading it raises, with the text that the storage
// has for that. torch's way to take the error back drops the text. So all is exchanged with another
// storage's, and the text is not even touched; needs the GIL.
inline void set_data(c10::StorageImpl *storage, at::DataPtr &&data, size_t bytes, bool is_readable)
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

// Whether `object`, which may be null, is the Python object of a tensor that has one.
inline bool is_object_of(PyObject *object, const c10::TensorImpl *impl)
{
#if FC_TORCH_AT_LEAST(2, 13)
    return object != nullptr && impl->pyobj_slot()->load_pyobj() == object;
#else
    return object != nullptr && THPVariable_Check(object) &&
           THPVariable_Unpack(object).unsafeGetTensorImpl() == impl;
#endif
}

} // namespace fc

#endif
