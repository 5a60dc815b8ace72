// Collectives of units on a device by NCCL, in communicators of our own.
#include "bind/comm/nccl.h"
#include "bind/compat.h"
#include "bind/device/device_comm.h"
#include "bind/python/python.h"

namespace fc {

namespace {

// Host memory has no streams: there a library ends its work before a call has ended.
fc_stream *native(fc_stream *stream)
{
    const c10::Stream &given = torch_stream(stream);
    return given.device().is_cpu() ? nullptr : static_cast<fc_stream *>(native_stream(given));
}

struct NcclComm final : fc_device_comm {
    Ref object; // its group is `group`
    fc_nccl_group *group;

    explicit NcclComm(PyObject *nccl) : object(Ref::borrow(nccl)), group(fc_nccl_from_object(nccl))
    {
        if (group == nullptr) {
            throw_python();
        }
    }

    fc_status all_gather(fc_stream *stream, fc_label label, void *buffer,
                         size_t part_bytes) override
    {
        return part_bytes == 0 ? FC_OK
                               : fc_nccl_all_gather(fc_nccl_gathers(group), native(stream), label,
                                                    buffer, part_bytes);
    }

    fc_status all_gather_each(fc_stream *stream, fc_label label, const fc_gather *gathers,
                              size_t n_gathers) override
    {
        return fc_nccl_all_gather_each(fc_nccl_gathers(group), native(stream), label, gathers,
                                       n_gathers);
    }

    fc_status reduce_scatter(fc_stream *stream, fc_label label, void *to, const void *from,
                             size_t numel, fc_dtype dtype) override
    {
        return fc_nccl_reduce_scatter(fc_nccl_reductions(group), native(stream), label, to, from,
                                      numel, dtype);
    }

    fc_status all_reduce(fc_stream *stream, fc_label label, void *buffer, size_t numel,
                         fc_dtype dtype) override
    {
        return fc_nccl_all_reduce(fc_nccl_reductions(group), native(stream), label, buffer, numel,
                                  dtype);
    }

    bool has_groups() const override { return true; }

    fc_nccl_group *watched() override { return group; }
};

} // namespace

std::unique_ptr<fc_device_comm> nccl_comm(PyObject *nccl)
{
    return std::make_unique<NcclComm>(nccl);
}

} // namespace fc
