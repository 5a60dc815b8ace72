// All differences between versions of libtorch that are met here, and in the binding.
#ifndef FC_LIBTORCH_VERSIONS_H
#define FC_LIBTORCH_VERSIONS_H

#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
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

// Sums of what was multiplied before; the function has its name since 2.13.
inline c10d::ReduceOp scaled_sums(double factor)
{
#if FC_TORCH_AT_LEAST(2, 13)
    return c10d::makePreMulSum(factor);
#else
    return c10d::makeNCCLPreMulSum(factor);
#endif
}

inline c10::intrusive_ptr<c10d::Work> scatter_sums(c10d::ProcessGroup &group, at::Tensor &part,
                                                   at::Tensor &all, const c10d::ReduceOp &op)
{
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
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

} // namespace fc

#endif
