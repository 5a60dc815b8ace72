// Memory of torch's allocator for devices, and the way of their collectives to who does them.
#include "bind/device/device_comm.h"

#include <c10/core/Allocator.h>
#include <c10/core/StreamGuard.h>

#include <vector>

namespace fc {

namespace {

Collectives &collectives_in(void *context)
{
    return *static_cast<Collectives *>(context);
}

fc_status alloc(void *context, fc_stream *stream, size_t bytes, void **out)
{
    try {
        const c10::StreamGuard guard(torch_stream(stream));
        *out = c10::GetAllocator(collectives_in(context).device().type())->raw_allocate(bytes);
        return FC_OK;
    } catch (const c10::Error &error) {
        return fc_fail(FC_ERR_SYSTEM, "memory for units on a device: %s",
                       error.what_without_backtrace());
    } catch (const std::exception &error) {
        return fc_fail(FC_ERR_SYSTEM, "memory for units on a device: %s", error.what());
    }
}

void free_memory(void *context, void *memory)
{
    c10::GetAllocator(collectives_in(context).device().type())->raw_deallocate(memory);
}

fc_status all_gather(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                     void *buffer, size_t part_bytes)
{
    return collectives_in(context).ended(comm, comm->all_gather(stream, label, buffer, part_bytes));
}

fc_status all_gather_each(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                          const fc_gather *gathers, size_t n_gathers)
{
    return collectives_in(context).ended(comm,
                                         comm->all_gather_each(stream, label, gathers, n_gathers));
}

fc_status reduce_scatter(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                         void *to, const void *from, size_t numel, fc_dtype dtype)
{
    return collectives_in(context).ended(
        comm, comm->reduce_scatter(stream, label, to, from, numel, dtype));
}

fc_status all_reduce(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                     void *buffer, size_t numel, fc_dtype dtype)
{
    return collectives_in(context).ended(comm,
                                         comm->all_reduce(stream, label, buffer, numel, dtype));
}

fc_status wait_watching(void *context, bool (*ready)(void *arg), void *arg)
{
    return collectives_in(context).wait(ready, arg);
}

} // namespace

void Collectives::connect(const std::string &name, PyObject *nccl)
{
    std::unique_ptr<fc_device_comm> &comm = comms_[name];
    if (!comm) {
        comm = nccl != nullptr ? nccl_comm(nccl) : process_group_comm(&device_, name);
    }
}

fc_device_comm *Collectives::find(const std::string &name)
{
    return comms_.at(name).get();
}

fc_device_caller Collectives::caller()
{
    return {.context = this,
            .alloc = alloc,
            .free = free_memory,
            .all_gather = all_gather,
            .reduce_scatter = reduce_scatter,
            .all_reduce = all_reduce,
            .all_gather_each = all_gather_each,
            .wait = wait_watching};
}

fc_status Collectives::watch()
{
    for (const auto &[name, comm] : comms_) {
        fc_nccl_group *group = comm->watched();
        if (group != nullptr) {
            FC_TRY(ended(comm.get(), fc_nccl_watch(group)));
        }
    }
    return FC_OK;
}

fc_status Collectives::wait(fc_ready_fn ready, void *arg)
{
    const fc_wait_info info = {.op = "a wait for the device", .unit = nullptr, .sequence = 0};
    std::vector<fc_nccl_group *> groups;
    for (const auto &[name, comm] : comms_) {
        if (comm->watched() != nullptr) {
            groups.push_back(comm->watched());
        }
    }
    return groups.empty() ? FC_AGAIN
                          : fc_nccl_wait(groups.data(), groups.size(), ready, arg, &info);
}

fc_status Collectives::ended(fc_device_comm *comm, fc_status status)
{
    if (status == FC_OK || comm->watched() == nullptr) {
        return status;
    }
    const std::string text = fc_last_message();
    if (fc_nccl_is_broken(comm->watched())) {
        for (const auto &[name, other] : comms_) {
            if (other->watched() != nullptr) {
                (void)fc_nccl_abort(other->watched(), status, text.c_str());
            }
        }
    }
    return fc_fail(status, "%s", text.c_str());
}

} // namespace fc
