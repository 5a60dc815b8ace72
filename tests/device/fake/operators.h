// Operators by the CPU's kernels, over the same memory, when the current stream gets there.
#ifndef FAKE_OPERATORS_H
#define FAKE_OPERATORS_H

#include "guard.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace fake {

using Values = torch::jit::Stack;

// The same memory, which it does not keep, seen from the host.
inline at::Tensor on_host(const at::Tensor &tensor)
{
    if (!tensor.defined()) {
        return tensor;
    }
    c10::Storage storage = tensor.storage();
    if (!tensor.is_cpu()) {
        storage =
            c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                         at::DataPtr(const_cast<void *>(storage.data()), at::kCPU), nullptr, false);
    }
    at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    c10::TensorImpl *impl = host.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    // Kernels of devices fault where elements do not lie at multiples of their size.
    TORCH_CHECK(reinterpret_cast<uintptr_t>(host.const_data_ptr()) %
                        c10::elementSize(c10::toRealValueType(host.scalar_type())) ==
                    0,
                "a tensor of ", host.scalar_type(), " lies between elements");
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
        impl->set_wrapped_number(true);
    }
    return host;
}

inline at::Tensor view_of(const at::Tensor &base, const at::Tensor &host)
{
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), host.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                      host.storage_offset());
    return view;
}

inline at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type)
{
    return at::detail::empty_strided_generic(
        sizes, strides, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

// With no key but the kernels' own: who enqueued it has been through all others.
template <typename Body> void plainly(Body &&body)
{
    static const c10::DispatchKeySet others =
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    const c10::impl::ExcludeDispatchKeyGuard guard(others);
    body();
}

// `value` with all tensors in it replaced.
template <typename Replace> c10::IValue replaced(const c10::IValue &value, Replace &&replace)
{
    if (value.isTensor()) {
        return replace(value.toTensor());
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &each : value.toTensorVector()) {
            list.push_back(replace(each));
        }
        return list;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> &each : value.toOptionalTensorVector()) {
            list.push_back(each ? std::optional<at::Tensor>(replace(*each)) : std::nullopt);
        }
        return list;
    }
    return value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
}

template <typename Replace> Values all_replaced(const Values &values, Replace &&replace)
{
    Values all;
    for (const c10::IValue &value : values) {
        all.push_back(replaced(value, replace));
    }
    return all;
}

inline at::Tensor zeros_like(const at::Tensor &host)
{
    if (!host.defined()) {
        return host;
    }
    at::Tensor zeros = at::empty_strided(host.sizes(), host.strides(), host.options()).zero_();
    if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
        zeros.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return zeros;
}

// One call of an operator.
class Call {
public:
    Call(const c10::OperatorHandle &op, Values *stack) : op_(op), schema_(op.schema())
    {
        const auto n = static_cast<std::ptrdiff_t>(schema_.arguments().size());
        given_.assign(stack->end() - n, stack->end());
        torch::jit::drop(*stack, static_cast<size_t>(n));
        host_ = all_replaced(given_, on_host);
    }

    Values results() const
    {
        Values results;
        bool is_fresh = false, is_view = false, is_read = false;
        for (const c10::Argument &result : schema_.returns()) {
            const bool is_written = result.alias_info() && result.alias_info()->isWrite();
            const bool is_tensor = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                   result.type()->isSubtypeOf(*c10::ListType::ofTensors());
            is_view = is_view || (result.alias_info() && !is_written);
            is_read = is_read || !is_tensor;
            is_fresh = is_fresh || (is_tensor && !result.alias_info());
        }
        if (is_view) {
            return views();
        }
        if (is_read) {
            return read();
        }
        return is_fresh ? made() : written();
    }

private:
    static void run(const c10::OperatorHandle &op, Values &stack)
    {
        plainly([&] { op.callBoxed(&stack); });
    }

    // Kernels may resize what they are told to write to on their way.
    static void run_out(const c10::OperatorHandle &op, Values &host)
    {
        const auto &arguments = op.schema().arguments();
        Values stack = host;
        for (size_t i = 0; i < host.size(); i++) {
            if (arguments[i].is_out() && host[i].isTensor()) {
                stack[i] = at::empty({0}, host[i].toTensor().options());
            }
        }
        const Values given = stack;
        run(op, stack);
        for (size_t i = 0; i < host.size(); i++) {
            if (arguments[i].is_out() && host[i].isTensor()) {
                fill(host[i], given[i]);
            }
        }
    }

    Values views() const
    {
        Values found = host_;
        run(op_, found);
        const at::Tensor &base = given_[0].toTensor();
        return all_replaced(found, [&](const at::Tensor &host) { return view_of(base, host); });
    }

    // The caller looks at values, so it waits.
    Values read() const
    {
        streams.reach(streams.mark(current_stream));
        Values found = host_;
        run(op_, found);
        return found;
    }

    Values written() const
    {
        streams.run(current_stream, [op = op_, host = host_]() mutable { run_out(op, host); });
        Values results;
        for (const c10::Argument &result : schema_.returns()) {
            results.push_back(argument_of(result));
        }
        return results;
    }

    const c10::IValue &argument_of(const c10::Argument &result) const
    {
        for (size_t i = 0; i < given_.size(); i++) {
            const c10::AliasInfo *info = schema_.arguments()[i].alias_info();
            if (info != nullptr && info->beforeSets() == result.alias_info()->beforeSets()) {
                return given_[i];
            }
        }
        TORCH_CHECK(false, schema_.name(), ": whose memory is a result?");
    }

    // Results are as large as those of zeros.
    Values made() const
    {
        Values like = all_replaced(host_, [](const at::Tensor &t) {
            at::Tensor zeros;
            plainly([&] { zeros = zeros_like(t); });
            return zeros;
        });
        run(op_, like);
        const Values results = all_replaced(like, [](const at::Tensor &t) {
            return t.defined() ? empty_strided(t.sizes(), t.strides(), t.scalar_type()) : t;
        });
        const Values targets = all_replaced(results, on_host);
        streams.run(current_stream, [op = op_, host = host_, targets]() mutable {
            run(op, host);
            for (size_t i = 0; i < targets.size(); i++) {
                fill(targets[i], host[i]);
            }
        });
        return results;
    }

    static void fill(const c10::IValue &target, const c10::IValue &value)
    {
        const auto to = target.isTensor() ? std::vector<at::Tensor>{target.toTensor()}
                                          : target.toTensorVector();
        const auto from =
            value.isTensor() ? std::vector<at::Tensor>{value.toTensor()} : value.toTensorVector();
        for (size_t i = 0; i < to.size(); i++) {
            if (to[i].defined()) {
                plainly([&] { to[i].copy_(from[i]); });
            }
        }
    }

    c10::OperatorHandle op_;
    const c10::FunctionSchema &schema_;
    Values given_, host_;
};

inline void call(const c10::OperatorHandle &op, Values *stack)
{
    for (c10::IValue &result : Call(op, stack).results()) {
        stack->push_back(std::move(result));
    }
}

// ---- operators with kernels of their own ----

inline at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                        std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                        std::optional<at::MemoryFormat> format)
{
    return at::detail::empty_generic(sizes, &memory,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(type), format);
}

inline at::Tensor empty_with_strides(at::IntArrayRef sizes, at::IntArrayRef strides,
                                     std::optional<at::ScalarType> type, std::optional<at::Layout>,
                                     std::optional<at::Device>, std::optional<bool>)
{
    return empty_strided(sizes, strides, c10::dtype_or_default(type));
}

// From memory of the host that is not pinned a copy is made at once.
inline at::Tensor copy(const at::Tensor &from, const at::Tensor &to, bool non_blocking)
{
    at::Tensor source = on_host(from);
    if (from.is_cpu() && !non_blocking) {
        plainly([&] { source = source.clone(); });
    }
    streams.run(current_stream, [to = on_host(to), source] { plainly([&] { to.copy_(source); }); });
    if (to.is_cpu() && !non_blocking) {
        streams.reach(streams.mark(current_stream));
    }
    return to;
}

inline void record_stream(at::Tensor &tensor, at::Stream stream)
{
    Guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

inline const at::Tensor &resize(const at::Tensor &tensor, at::IntArrayRef sizes,
                                std::optional<at::MemoryFormat>)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    const size_t bytes =
        (static_cast<size_t>(impl->storage_offset()) + impl->numel()) * impl->itemsize();
    if (bytes > tensor.storage().nbytes()) {
        Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
    }
    return tensor;
}

inline at::Tensor &set_to_part(at::Tensor &tensor, at::Storage source, int64_t offset,
                               at::IntArrayRef sizes, at::IntArrayRef strides)
{
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_storage_offset(offset);
    if (strides.data() == nullptr) {
        impl->set_sizes_contiguous(sizes);
    } else {
        impl->set_sizes_and_strides(sizes, strides);
    }
    return tensor;
}

inline at::Tensor &set_to_all(at::Tensor &tensor, at::Storage source)
{
    const auto n = static_cast<int64_t>(source.nbytes() / tensor.itemsize());
    return set_to_part(tensor, std::move(source), 0, {n}, {1});
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library)
{
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&call>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library)
{
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_with_strides);
    library.impl("_copy_from", &copy);
    library.impl("record_stream", &record_stream);
    library.impl("resize_", &resize);
    library.impl("set_.source_Storage", &set_to_all);
    library.impl("set_.source_Storage_storage_offset", &set_to_part);
}

} // namespace fake

#endif
