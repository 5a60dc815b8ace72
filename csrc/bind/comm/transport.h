/* `_C.Transport` and `_C.NcclGroup`: how ranks talk, made over callables of Python. */
#ifndef FC_BIND_COMM_TRANSPORT_H
#define FC_BIND_COMM_TRANSPORT_H

#include "bind/python/fields.h"
#include "transport/nccl.h"
#include "transport/transport.h"

#include <c10/core/Device.h>

#include <vector>

namespace fc {

/* What a transport asks of the Python process it lives in; outlives its use. */
struct Host {
    Ref exchange; /* exchange(what: str, mine: bytes) -> bytes, all ranks' (for_core of _rendezvous)
                   */
    int n_ranks = 0;

    fc_host_ops ops();
};

/* Who the ranks are and how they meet, by the names name, rank, global_ranks, timeout_seconds and
 * exchange. `host` outlives what is made of it. */
struct RanksConfig {
    RanksConfig(Fields &given, Host *host);

    std::vector<int> global_ranks;
    fc_transport_config config{}; /* borrows from the above and from what was given */
};

/* Borrowed: valid while `object` lives, so whoever keeps the pointer keeps a reference to the
 * object. TypeError as an exception for anything but a `_C.Transport`. */
fc_transport *transport_from_object(PyObject *object);

/* The same of a `_C.NcclGroup`. */
fc_nccl_group *nccl_from_object(PyObject *object);

/* The operations of a message transport over `messages`, whose methods have the operations' names
 * (`Messages` of fsdp_c/_comm/_transport.py); they get 1-d tensors of the device that are valid
 * during the call. `begin` may be missing. Kept until the operation `release`. */
fc_message_ops messages_ops(const Ref &messages, int n_ranks,
                            c10::Device device = c10::DeviceType::CPU);

} // namespace fc

#endif
