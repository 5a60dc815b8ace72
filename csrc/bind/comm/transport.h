/* `_C.Transport`: a transport of the core, made over callables of Python. */
#ifndef FC_BIND_COMM_TRANSPORT_H
#define FC_BIND_COMM_TRANSPORT_H

#include "bind/python/callbacks.h"
#include "bind/python/fields.h"
#include "transport/transport.h"

#include <vector>

namespace fc {

/* Who the ranks are and how they meet, by the names name, rank, global_ranks, timeout_seconds and
 * exchange. `host` outlives what is made of it. */
struct RanksConfig {
    RanksConfig(Fields &given, fc_host *host);

    std::vector<int> global_ranks;
    fc_transport_config config{}; /* borrows from the above and from what was given */
};

/* Borrowed: valid while `object` lives, so whoever keeps the pointer keeps a reference to the
 * object. TypeError as an exception for anything but a `_C.Transport`. */
fc_transport *transport_from_object(PyObject *object);

} // namespace fc

#endif
