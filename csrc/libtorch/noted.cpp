// Notes copies of tensors that share their memory and not their version counter.
#include "libtorch/storage.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

#include <atomic>

namespace fc {

namespace {

class NotedImpl final : public c10::TensorImpl {
public:
    NotedImpl(c10::Storage &&storage, const at::Tensor &like)
        : TensorImpl(VIEW, std::move(storage), like.key_set(), like.dtype())
    {
        set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    }

    using Copy = c10::intrusive_ptr<c10::TensorImpl>;

    Copy shallow_copy_and_detach(const c10::VariableVersion &version,
                                 bool may_change) const override
    {
        note(version);
        return TensorImpl::shallow_copy_and_detach(version, may_change);
    }

    Copy shallow_copy_and_detach(c10::VariableVersion &&version, bool may_change) const override
    {
        note(version);
        return TensorImpl::shallow_copy_and_detach(std::move(version), may_change);
    }

    bool is_data_taken() const { return is_data_taken_.load(std::memory_order_relaxed); }

private:
    // A counter that nobody else has is not this tensor's. (The copy that detach() makes gets this
    // tensor's afterwards: it is made inside of the operator, where counters are left alone.)
    void note(const c10::VariableVersion &version) const
    {
        const bool is_in_operator =
            !c10::InferenceMode::is_enabled() &&
            c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::ADInplaceOrView);
        if (version.unique() && !is_in_operator) {
            is_data_taken_.store(true, std::memory_order_relaxed);
            any_data_is_taken.store(true, std::memory_order_relaxed);
        }
    }

    mutable std::atomic<bool> is_data_taken_{false};
};

} // namespace

bool is_data_taken_of(const at::Tensor &tensor)
{
    const auto *noted = dynamic_cast<const NotedImpl *>(tensor.unsafeGetTensorImpl());
    return noted != nullptr && noted->is_data_taken();
}

at::Tensor make_noted(const at::Tensor &like)
{
    return at::Tensor(c10::make_intrusive<NotedImpl>(c10::Storage(like.storage()), like));
}

} // namespace fc
