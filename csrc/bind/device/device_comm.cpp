// Who does the collectives of units on a device: NCCL, the process group itself, or what Python
// makes in sight of others.
#include "bind/comm/transport.h"
#include "bind/device/device.h"
#include "libtorch/process_group.h"

namespace fc {

namespace {

fc_collectives_group by_messages(const c10::Device &device, const Ref &messages, int rank,
                                 int n_ranks)
{
    return {.n_ranks = n_ranks,
            .rank = rank,
            .is_seen = true,
            .seen = messages_ops(messages, n_ranks, device)};
}

fc_collectives_group by_nccl(PyObject *nccl, int n_ranks, bool may_scale)
{
    fc_nccl_group *group = nccl_from_object(nccl);
    return {.context = Py_NewRef(nccl),
            .nccl = group,
            .n_ranks = n_ranks,
            .may_scale = may_scale,
            .release = [](void *object) { Py_DECREF(static_cast<PyObject *>(object)); }};
}

} // namespace

Collectives::Collectives(c10::Device device) : device_(device)
{
    const fc_collectives_host host = collectives_host(&device_);
    check(fc_collectives_create(&host, Out(core_)));
}

void Collectives::connect(Fields &given)
{
    const std::string name = given.text("group");
    const Ref nccl = given.object("nccl"), messages = given.object("messages");
    const int rank = given.integer("rank"), n_ranks = given.integer("n_ranks");
    const bool may_scale = given.flag("may_scale");
    given.end();
    const fc_collectives_group group =
        messages.get() != Py_None ? by_messages(device_, messages, rank, n_ranks)
        : nccl.get() != Py_None   ? by_nccl(nccl.get(), n_ranks, may_scale)
                                  : group_collectives(device_, name, n_ranks, may_scale);
    check(fc_collectives_connect(core(), name.c_str(), &group));
}

fc_device_comm *Collectives::find(const std::string &name) const
{
    fc_device_comm *found = fc_collectives_find(core(), name.c_str());
    TORCH_CHECK(found != nullptr, "process group ", name, " is not connected");
    return found;
}

} // namespace fc
