// Memory of torch's allocator for devices, and whom their collectives are left to.
#include "bind/comm/transport.h"
#include "bind/compat.h"
#include "bind/device/device.h"

#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>

namespace fc {

namespace {

c10::Allocator *allocator_in(void *context)
{
    return c10::GetAllocator(static_cast<const Collectives *>(context)->device().type());
}

fc_status alloc(void *context, fc_stream *stream, size_t bytes, void **out)
{
    return attempt(
        [&] {
            const c10::StreamGuard guard(torch_stream(stream));
            *out = allocator_in(context)->raw_allocate(bytes);
        },
        "memory for units on a device: %s");
}

void free_memory(void *context, void *memory)
{
    allocator_in(context)->raw_deallocate(memory);
}

// Host memory has no streams: there a library ends its work before a call has ended.
fc_stream *native(fc_stream *stream)
{
    const c10::Stream &given = torch_stream(stream);
    return given.device().is_cpu() ? nullptr : static_cast<fc_stream *>(native_stream(given));
}

} // namespace

fc_collectives_group Collectives::by_nccl(PyObject *nccl)
{
    fc_nccl_group *group = nccl_from_object(nccl);
    return {.context = Py_NewRef(nccl), .nccl = group, .release = [](void *object) {
                Py_DECREF(static_cast<PyObject *>(object));
            }};
}

Collectives::Collectives(c10::Device device) : device_(device)
{
    const fc_collectives_host host = {
        .context = this, .alloc = alloc, .free = free_memory, .native = native};
    check(fc_collectives_create(&host, Out(core_)));
}

void Collectives::connect(const std::string &name, const fc_collectives_group &group)
{
    check(fc_collectives_connect(core(), name.c_str(), &group));
}

fc_device_comm *Collectives::find(const std::string &name) const
{
    fc_device_comm *found = fc_collectives_find(core(), name.c_str());
    TORCH_CHECK(found != nullptr, "process group ", name, " is not connected");
    return found;
}

} // namespace fc
