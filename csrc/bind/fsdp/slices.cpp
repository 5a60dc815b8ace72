// DTensors of slices: made in Python, shown again while nobody else keeps them.
#include "bind/fsdp/parameters.h"

#include "bind/python/fields.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>

namespace fc {

Slices::Slices(const std::vector<Param> &params)
{
    for (const Param &p : params) {
        Slice slice = {};
        Ref object, local;
        { // a BoundSlice of fsdp_c/_fully_shard/_slices.py
            const Ref row = ask_python(Call::make_slice, p.owner.get());
            Fields fields(row.get());
            object = fields.object("param");
            local = fields.object("local");
            slice.at = fields.size("offset");
            slice.bytes = fields.size("size");
            fields.end();
        }
        slice.kept = Reused(std::move(object), std::move(local));
        slice.storage_uses = slice.kept.local.storage().use_count();
        slices_.push_back(std::move(slice));
    }
}

Slices::~Slices()
{
    hide();
}

uint32_t Slices::Slice::count_versions() const
{
    return version_of(kept.tensor) + version_of(kept.local);
}

bool Slices::Slice::is_free() const
{
    return kept.is_free() && kept.local.storage().use_count() == storage_uses &&
           !kept.tensor.grad().defined();
}

void Slices::show(const std::vector<Param> &params, char *memory)
{
    for (size_t i = 0; i < slices_.size(); i++) {
        Slice &slice = slices_[i];
        set_memory(slice.kept.local.storage().unsafeGetStorageImpl(), memory + slice.at,
                   slice.bytes);
        slice.is_trained = params[i].sharded_tensor().requires_grad();
        if (slice.kept.tensor.requires_grad() != slice.is_trained) {
            slice.kept.tensor.set_requires_grad(slice.is_trained);
        }
        slice.versions = slice.count_versions();
    }
}

void Slices::carry_requires_grad(const std::vector<Param> &params) const
{
    for (size_t i = 0; i < slices_.size(); i++) {
        if (slices_[i].kept.tensor.requires_grad() != slices_[i].is_trained) {
            params[i].sharded_tensor().set_requires_grad(!slices_[i].is_trained);
        }
    }
}

bool Slices::is_written(size_t i) const
{
    const Slice &slice = slices_[i];
    return slice.versions != slice.count_versions() || is_data_taken(slice.kept.tensor) ||
           is_data_taken(slice.kept.local);
}

bool Slices::hide()
{
    bool are_free = true;
    for (const Slice &slice : slices_) {
        c10::StorageImpl *storage = slice.kept.local.storage().unsafeGetStorageImpl();
        if (slice.is_free()) {
            set_memory(storage, nullptr, 0);
            continue;
        }
        are_free = false;
        if (storage->data() == nullptr) {
            continue;
        }
        at::DataPtr copy = c10::GetCPUAllocator()->allocate(slice.bytes);
        std::memcpy(copy.get(), storage->data(), slice.bytes);
        storage->set_data_ptr_noswap(std::move(copy));
    }
    if (!are_free) {
        slices_.clear();
    }
    return are_free;
}

} // namespace fc
