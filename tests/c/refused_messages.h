/* Collectives of messages that a test has no use for. */
#ifndef REFUSED_MESSAGES_H
#define REFUSED_MESSAGES_H

#include "transport/transport.h"

static inline fc_status refuse_all_gather(void *context, void *recv, const void *send, size_t bytes)
{
    (void)context, (void)recv, (void)send, (void)bytes;
    return FC_ERR_UNSUPPORTED;
}

static inline fc_status refuse_reduce_scatter(void *context, void *recv, void *send,
                                              size_t recv_numel, fc_dtype dtype)
{
    (void)context, (void)recv, (void)send, (void)recv_numel, (void)dtype;
    return FC_ERR_UNSUPPORTED;
}

static inline fc_status refuse_all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    (void)context, (void)data, (void)numel, (void)dtype;
    return FC_ERR_UNSUPPORTED;
}

static inline fc_status refuse_broadcast(void *context, void *data, size_t bytes, int root)
{
    (void)context, (void)data, (void)bytes, (void)root;
    return FC_ERR_UNSUPPORTED;
}

static inline fc_status refuse_all_to_all(void *context, void *recv, const size_t *recv_bytes,
                                          const void *send, const size_t *send_bytes)
{
    (void)context, (void)recv, (void)recv_bytes, (void)send, (void)send_bytes;
    return FC_ERR_UNSUPPORTED;
}

static inline fc_status refuse_barrier(void *context)
{
    (void)context;
    return FC_ERR_UNSUPPORTED;
}

/* All of them; a test puts its own in their places. */
static const fc_message_ops refused_messages = {.all_gather = refuse_all_gather,
                                                .reduce_scatter = refuse_reduce_scatter,
                                                .all_reduce = refuse_all_reduce,
                                                .broadcast = refuse_broadcast,
                                                .all_to_all = refuse_all_to_all,
                                                .barrier = refuse_barrier};

#endif
