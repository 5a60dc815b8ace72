/* Collectives of a message transport, run by a Python object. */
#ifndef FC_BIND_COMM_PROCESS_GROUP_H
#define FC_BIND_COMM_PROCESS_GROUP_H

#include "bind/python/python.h"
#include "transport/transport.h"

namespace fc {

/* The operations over `messages`, whose methods have the operations' names (`Messages` of
 * fsdp_c/_comm/_transport.py); they get 1-d CPU tensors that are valid during the call. `begin` may
 * be missing. Kept until the operation `release`. */
fc_message_ops messages_ops(const Ref &messages, int n_ranks);

} // namespace fc

#endif
