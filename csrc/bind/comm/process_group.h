/* Collectives of a message transport, run by a Python object. */
#ifndef FC_BIND_COMM_PROCESS_GROUP_H
#define FC_BIND_COMM_PROCESS_GROUP_H

#include <Python.h>

#include "transport/transport.h"

/* The operations over `messages`, an object with the methods all_gather(output, input),
 * reduce_scatter(output, input), all_reduce(tensor), broadcast(tensor, src) and barrier(); they get
 * 1-d CPU tensors that are valid during the call. Takes a new reference, dropped by the operation
 * `release`. */
fc_message_ops fc_messages_get_ops(PyObject *messages, int n_ranks);

#endif
