/* Collectives over a message transport: forwarded to its process group, which sums; divided here.
 */
#include "comm/comm_impl.h"

#include <string.h>

#define DIVIDE_BYTES ((size_t)64 << 10)

/* Memory that the process group may overwrite, kept for the next call. */
static fc_status reserve_scratch(fc_comm *comm, size_t bytes)
{
    char *scratch;

    if (comm->scratch != NULL && bytes <= comm->scratch_bytes) {
        return FC_OK;
    }
    scratch = fc_pages_alloc(FC_FOR_MESSAGES, bytes);
    if (scratch == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%zu bytes for a collective of process group %s", bytes,
                       fc_transport_name(comm->transport));
    }
    fc_pages_free(FC_FOR_MESSAGES, comm->scratch, comm->scratch_bytes);
    comm->scratch = scratch;
    comm->scratch_bytes = bytes;
    return FC_OK;
}

/* The kernel divides from one place to another: by way of the scratch memory. */
static fc_status divide(fc_comm *comm, char *data, size_t numel, fc_dtype dtype, double divisor)
{
    size_t bytes = numel * fc_dtype_bytes(dtype);
    size_t done = 0;

    if (divisor == 1.0) {
        return FC_OK;
    }
    FC_TRY(reserve_scratch(comm, DIVIDE_BYTES));
    while (done < bytes) {
        size_t chunk = bytes - done < DIVIDE_BYTES ? bytes - done : DIVIDE_BYTES;
        const void *source = comm->scratch;

        memcpy(comm->scratch, data + done, chunk);
        fc_kern_reduce(dtype, dtype)(data + done, &source, 1, chunk / fc_dtype_bytes(dtype),
                                     divisor, false);
        done += chunk;
    }
    return FC_OK;
}

static fc_status all_gather(fc_comm *comm, void *recv, const void *send, size_t send_bytes)
{
    const fc_message_ops *ops = fc_transport_messages(comm->transport);

    return ops->all_gather(ops->context, recv, send, send_bytes);
}

static fc_status reduce_scatter(fc_comm *comm, void *recv, const void *send, size_t recv_numel,
                                fc_dtype dtype, double divisor)
{
    const fc_message_ops *ops = fc_transport_messages(comm->transport);
    size_t send_bytes = (size_t)comm->n_ranks * recv_numel * fc_dtype_bytes(dtype);

    FC_TRY(reserve_scratch(comm, send_bytes));
    if (send_bytes > 0) {
        memcpy(comm->scratch, send, send_bytes);
    }
    FC_TRY(ops->reduce_scatter(ops->context, recv, comm->scratch, recv_numel, dtype));
    return divide(comm, recv, recv_numel, dtype, divisor);
}

static fc_status all_reduce(fc_comm *comm, void *data, size_t numel, fc_dtype dtype, double divisor)
{
    const fc_message_ops *ops = fc_transport_messages(comm->transport);

    FC_TRY(ops->all_reduce(ops->context, data, numel, dtype));
    return divide(comm, data, numel, dtype, divisor);
}

static fc_status broadcast(fc_comm *comm, void *data, size_t bytes, int root)
{
    const fc_message_ops *ops = fc_transport_messages(comm->transport);

    return ops->broadcast(ops->context, data, bytes, root);
}

/* Packed in the scratch memory: what is sent, then what is received. */
static fc_status all_to_all(fc_comm *comm, const fc_comm_block *recv, const fc_comm_block *send,
                            const size_t *bytes)
{
    const fc_message_ops *ops = fc_transport_messages(comm->transport);
    size_t n_ranks = (size_t)comm->n_ranks;
    const size_t *row = bytes + (size_t)comm->rank * n_ranks;
    size_t sent = 0, received = 0;

    for (size_t r = 0; r < n_ranks; r++) {
        comm->columns[r] = bytes[r * n_ranks + (size_t)comm->rank];
        sent += row[r];
        received += comm->columns[r];
    }
    FC_TRY(reserve_scratch(comm, sent + received));
    sent = 0;
    for (size_t r = 0; r < n_ranks; sent += row[r], r++) {
        fc_cursor from = fc_cursor_of(&send[r]);

        fc_cursor_read(&from, comm->scratch + sent, row[r], fc_kern()->copy);
    }
    char *packed = comm->scratch + sent;
    FC_TRY(ops->all_to_all(ops->context, packed, comm->columns, comm->scratch, row));
    for (size_t r = 0; r < n_ranks; packed += comm->columns[r], r++) {
        fc_cursor to = fc_cursor_of(&recv[r]);

        fc_cursor_write(&to, packed, comm->columns[r], fc_kern()->copy);
    }
    return FC_OK;
}

static fc_status barrier(fc_comm *comm)
{
    const fc_message_ops *ops = fc_transport_messages(comm->transport);

    return ops->barrier(ops->context);
}

const fc_comm_ops fc_comm_message_ops = {
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .all_to_all = all_to_all,
    .barrier = barrier,
};
