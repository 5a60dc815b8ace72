/* Lifetime of a communicator, checks of arguments, and the dispatch to its kind. */
#include "comm/comm.h"

#include "comm/comm_impl.h"

#define HEADERS_FINGERPRINT UINT64_C(0x636f6d6d0001)

fc_status fc_comm_create(fc_transport *transport, fc_comm **out)
{
    int n_ranks = fc_transport_n_ranks(transport);
    fc_comm *c = fc_alloc(1, sizeof(*c));
    const void **sources = (const void **)fc_alloc((size_t)n_ranks, sizeof(*sources));
    size_t *columns = fc_alloc((size_t)n_ranks, sizeof(*columns));
    fc_cursor *cursors = fc_alloc((size_t)n_ranks, 2 * sizeof(*cursors));
    fc_status st = FC_OK;

    if (c == NULL || sources == NULL || columns == NULL || cursors == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "communicator of %d ranks", n_ranks);
        if (fc_transport_is_mapped(transport)) {
            /* Peers would wait for this rank in the mapping below. */
            st = fc_transport_refuse_region(transport, "communicator", st);
        }
        goto free_comm;
    }
    c->transport = transport;
    c->rank = fc_transport_rank(transport);
    c->n_ranks = n_ranks;
    c->sources = sources;
    c->columns = columns;
    c->cursors = cursors;
    c->ops = &fc_comm_message_ops;
    if (fc_transport_is_mapped(transport)) {
        c->ops = &fc_comm_mapped_ops;
        st = fc_transport_map_region(transport, "communicator", (size_t)n_ranks * FC_CACHE_LINE,
                                     HEADERS_FINGERPRINT, &c->headers);
        if (st != FC_OK) {
            goto free_comm;
        }
    }
    *out = c;
    return FC_OK;

free_comm:
    fc_free(cursors);
    fc_free(columns);
    fc_free((void *)sources);
    fc_free(c);
    return st;
}

void fc_comm_destroy(fc_comm *comm)
{
    if (comm != NULL) {
        fc_region_release(comm->staging);
        fc_region_release(comm->headers);
        fc_pages_free(FC_FOR_MESSAGES, comm->scratch, comm->scratch_bytes);
        fc_free(comm->cursors);
        fc_free(comm->columns);
        fc_free((void *)comm->sources);
        fc_free(comm);
    }
}

static fc_status check_size(const fc_comm *comm, const char *what, size_t numel, fc_dtype dtype)
{
    size_t item_bytes;

    if ((unsigned)dtype >= FC_DTYPE_COUNT) {
        return fc_fail(FC_ERR_INVALID, "%s: unknown element type %d", what, (int)dtype);
    }
    item_bytes = fc_dtype_bytes(dtype);
    if (numel > (size_t)PTRDIFF_MAX / item_bytes / (size_t)comm->n_ranks) {
        return fc_fail(FC_ERR_INVALID, "%s: %zu elements of %zu bytes are too many", what, numel,
                       item_bytes);
    }
    return FC_OK;
}

static fc_status check_reduction(const fc_comm *comm, const char *what, size_t numel,
                                 fc_dtype dtype, double divisor)
{
    FC_TRY(check_size(comm, what, numel, dtype));
    if (fc_kern_reduce(dtype, dtype) == NULL) {
        return fc_fail(FC_ERR_INVALID, "%s: elements of type %s cannot be added", what,
                       fc_dtype_name(dtype));
    }
    /* Written so that NaN fails too. */
    if (!(divisor > 0.0) || (divisor != 1.0 && !fc_dtype_is_float(dtype))) {
        return fc_fail(FC_ERR_INVALID, "%s of %s: divisor %g", what, fc_dtype_name(dtype), divisor);
    }
    return FC_OK;
}

fc_status fc_comm_all_gather(fc_comm *comm, void *recv, const void *send, size_t send_bytes)
{
    FC_TRY(check_size(comm, "all_gather", send_bytes, FC_U8));
    FC_TRY(fc_transport_check(comm->transport));
    return comm->ops->all_gather(comm, recv, send, send_bytes);
}

fc_status fc_comm_reduce_scatter(fc_comm *comm, void *recv, const void *send, size_t recv_numel,
                                 fc_dtype dtype, double divisor)
{
    FC_TRY(check_reduction(comm, "reduce_scatter", recv_numel, dtype, divisor));
    FC_TRY(fc_transport_check(comm->transport));
    return comm->ops->reduce_scatter(comm, recv, send, recv_numel, dtype, divisor);
}

fc_status fc_comm_all_reduce(fc_comm *comm, void *data, size_t numel, fc_dtype dtype,
                             double divisor)
{
    FC_TRY(check_reduction(comm, "all_reduce", numel, dtype, divisor));
    FC_TRY(fc_transport_check(comm->transport));
    return comm->ops->all_reduce(comm, data, numel, dtype, divisor);
}

fc_status fc_comm_broadcast(fc_comm *comm, void *data, size_t bytes, int root)
{
    FC_TRY(check_size(comm, "broadcast", bytes, FC_U8));
    if (root < 0 || root >= comm->n_ranks) {
        return fc_fail(FC_ERR_INVALID, "broadcast: root %d of %d ranks", root, comm->n_ranks);
    }
    FC_TRY(fc_transport_check(comm->transport));
    return comm->ops->broadcast(comm, data, bytes, root);
}

fc_status fc_comm_all_to_all(fc_comm *comm, const fc_comm_block *recv, const fc_comm_block *send,
                             const size_t *bytes)
{
    size_t n_ranks = (size_t)comm->n_ranks;
    size_t own = (size_t)comm->rank;
    size_t n_blocks = n_ranks * n_ranks;
    size_t total = 0;

    for (size_t i = 0; i < n_blocks; i++) {
        if (bytes[i] > (size_t)PTRDIFF_MAX - total) {
            return fc_fail(FC_ERR_INVALID, "all_to_all: blocks of %zu bytes are too many",
                           bytes[i]);
        }
        total += bytes[i];
    }
    for (size_t r = 0; r < n_ranks; r++) {
        size_t sent = fc_block_bytes(&send[r]);
        size_t received = fc_block_bytes(&recv[r]);

        if (sent != bytes[own * n_ranks + r] || received != bytes[r * n_ranks + own]) {
            return fc_fail(FC_ERR_INVALID,
                           "all_to_all: %zu bytes to rank %zu and %zu from it, by the table %zu and"
                           " %zu",
                           sent, r, received, bytes[own * n_ranks + r], bytes[r * n_ranks + own]);
        }
    }
    FC_TRY(fc_transport_check(comm->transport));
    return comm->ops->all_to_all(comm, recv, send, bytes);
}

fc_status fc_comm_barrier(fc_comm *comm)
{
    FC_TRY(fc_transport_check(comm->transport));
    return comm->ops->barrier(comm);
}

fc_status fc_comm_all_agree(fc_comm *comm, bool is_true, bool *all_out)
{
    int32_t n_against = is_true ? 0 : 1;

    FC_TRY(fc_comm_all_reduce(comm, &n_against, 1, FC_I32, 1.0));
    *all_out = n_against == 0;
    return FC_OK;
}
