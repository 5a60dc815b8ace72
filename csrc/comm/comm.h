/* Collectives of one process group over a transport, on plain memory.
 *
 * Every call is blocking and collective: all ranks make the same calls in the same order. Before
 * data moves each rank publishes (sequence, operation, bytes, dtype) and compares what its peers
 * published; a difference is FC_ERR_MISMATCH on every rank, with both sides in the text, before any
 * user memory is written. A communicator of one rank is a real object with the same code path. Over
 * a message transport the calls go to its process group.
 *
 * Buffers are borrowed for the duration of the call. Threading: serialized.
 */
#ifndef FC_COMM_COMM_H
#define FC_COMM_COMM_H

#include "base/dtype.h"
#include "base/status.h"
#include "transport/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_comm fc_comm;

/* Rows of bytes; row i begins at data + i * pitch. */
typedef struct fc_comm_piece {
    char *data;
    size_t row_bytes, n_rows, pitch;
} fc_comm_piece;

/* The bytes of its pieces one after another. Borrowed. */
typedef struct fc_comm_block {
    const fc_comm_piece *pieces;
    size_t n_pieces;
} fc_comm_block;

/* Borrows the transport for its lifetime. Staging memory is mapped on first use and kept. */
FC_MUST_CHECK fc_status fc_comm_create(fc_transport *transport, fc_comm **out);
void fc_comm_destroy(fc_comm *comm);

/* recv holds n_ranks blocks of send_bytes, block r from rank r; send may be recv + rank *
 * send_bytes. */
FC_MUST_CHECK fc_status fc_comm_all_gather(fc_comm *comm, void *recv, const void *send,
                                           size_t send_bytes);

/* recv[i] = (sum over ranks of send[rank * recv_numel + i]) / divisor, added in rank order
 * (kernels.h); recv may lie inside send at this rank's block. */
FC_MUST_CHECK fc_status fc_comm_reduce_scatter(fc_comm *comm, void *recv, const void *send,
                                               size_t recv_numel, fc_dtype dtype, double divisor);
/* In place; the same bits on every rank. */
FC_MUST_CHECK fc_status fc_comm_all_reduce(fc_comm *comm, void *data, size_t numel, fc_dtype dtype,
                                           double divisor);
FC_MUST_CHECK fc_status fc_comm_broadcast(fc_comm *comm, void *data, size_t bytes, int root);
/* bytes[s * n_ranks + r] go from rank s to rank r; the same table on every rank. send[r] is read
 * for rank r (this one included), recv[s] gets what comes from rank s. What is read may not overlap
 * what is written. */
FC_MUST_CHECK fc_status fc_comm_all_to_all(fc_comm *comm, const fc_comm_block *recv,
                                           const fc_comm_block *send, const size_t *bytes);
FC_MUST_CHECK fc_status fc_comm_barrier(fc_comm *comm);
/* Whether it is true on all ranks. */
FC_MUST_CHECK fc_status fc_comm_all_agree(fc_comm *comm, bool is_true, bool *all_out);

/* ---- arrays, before a collective takes them: local, FC_ERR_INVALID names the arguments ---- */

/* Elements one after another. */
typedef struct fc_comm_array {
    const char *name; /* of the argument */
    const char *type; /* of its elements */
    char *data;
    size_t numel, bytes;
    fc_dtype dtype; /* FC_RAW1 and above: cannot be added */
} fc_comm_array;

/* Whether `whole` has n_ranks times `part`; where they overlap, `part` is this rank's part of it.
 */
FC_MUST_CHECK fc_status fc_comm_check_parts(const fc_comm *comm, const fc_comm_array *whole,
                                            const fc_comm_array *part);
/* What the collective of that name demands: "all_gather" and "reduce_scatter" of two arrays,
 * "all_reduce" and "broadcast", which are in place, of `to`. */
FC_MUST_CHECK fc_status fc_comm_check_arrays(const fc_comm *comm, const char *what,
                                             const fc_comm_array *to, const fc_comm_array *from);
/* Does it; of arrays that have been checked. */
FC_MUST_CHECK fc_status fc_comm_collect(fc_comm *comm, const char *what, const fc_comm_array *to,
                                        const fc_comm_array *from, double divisor, int root);
/* A table of elements between ranks, n_ranks rows one after another, becomes one of bytes. */
FC_MUST_CHECK fc_status fc_comm_table(const fc_comm *comm, size_t *counts, size_t n_counts,
                                      size_t item_bytes);
/* What all_to_all takes, of arrays that hold their parts in rank order, by its table of bytes.
 * `pieces` and `blocks` have 2 * n_ranks entries: n_ranks of `recv`, then those of `send`. */
FC_MUST_CHECK fc_status fc_comm_split(const fc_comm *comm, const fc_comm_array *recv,
                                      const fc_comm_array *send, const size_t *bytes,
                                      fc_comm_piece *pieces, fc_comm_block *blocks);

/* Elements with gaps; strides count elements. */
typedef struct fc_comm_strided {
    char *data;
    size_t item_bytes, n_dims;
    const int64_t *sizes, *strides;
} fc_comm_strided;

/* Its bytes in the order of its indices: how many pieces, and into `out`, unless it is NULL, which.
 */
FC_MUST_CHECK fc_status fc_comm_rows_of(const fc_comm_strided *array, fc_comm_piece *out,
                                        size_t *n_out);

#ifdef __cplusplus
}
#endif
#endif
