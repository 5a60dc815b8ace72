/* Collectives over mapped memory.
 *
 * n ranks, F bytes in the gathered or unreduced buffer; copied per rank (one step if it fits a
 * slot):
 *   all_gather      stages F/n, pulls F(n-1)/n, keeps its own F/n unless in place
 *   reduce_scatter  stages F(n-1)/n, reads n parts of F/n, its own from private memory
 *   all_reduce      small: stages F, everybody adds up all of it. Large: reduce_scatter into the
 * next slot, then pull broadcast       the root stages F, the others pull F
 *   all_to_all      stages what it sends to others, pulls what they send to it
 */
#include "comm/comm_impl.h"

#include <string.h>

/* Up to here every rank adds up all of an all_reduce: one step less is worth more than the bytes.
 */
#define ALL_REDUCE_SMALL_BYTES ((size_t)32 << 10)

/* Parts begin at multiples of this, so that ranks do not write to one another's cache lines. */
#define PART_BYTES ((size_t)FC_ALIGN)

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0) {
        fc_kern()->copy(to, from, bytes);
    }
}

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Blocks go in pieces that stay in a core's cache until the peers have read them. */
#define GATHER_PIECE_BYTES ((size_t)512 << 10)
/* From here on a result would push its own beginning out of the cache: it goes past it. */
#define GATHER_STREAM_BYTES ((size_t)8 << 20)

static fc_status all_gather(fc_comm *comm, void *recv, const void *send, size_t send_bytes)
{
    fc_comm_call call = fc_comm_start(comm, FC_COMM_ALL_GATHER, send_bytes, FC_U8, 1.0, -1);
    size_t piece_max = smaller(send_bytes, GATHER_PIECE_BYTES);
    char *own = (char *)recv + (size_t)comm->rank * send_bytes;
    bool streams = send_bytes * (size_t)comm->n_ranks >= GATHER_STREAM_BYTES;
    void (*keep)(void *, const void *, size_t) = streams ? fc_kern()->copy_away : fc_kern()->copy;
    size_t done = 0;

    FC_TRY(fc_comm_reserve(comm, &call, piece_max));
    do {
        size_t piece = smaller(piece_max, send_bytes - done);

        copy(fc_comm_next_slot(comm), (const char *)send + done, piece);
        FC_TRY(fc_comm_meet(comm, &call));
        if (own != send) {
            keep(own + done, (const char *)send + done, piece);
        }
        for (int i = 1; i < comm->n_ranks; i++) {
            int peer = (comm->rank + i) % comm->n_ranks;

            keep((char *)recv + (size_t)peer * send_bytes + done, fc_comm_slot(comm, peer), piece);
        }
        done += piece;
    } while (done < send_bytes);
    return FC_OK;
}

/* Elements that fit one slot `n_parts` times; whole cache lines unless all of them fit. */
static size_t chunk_numel_max(size_t numel, size_t item_bytes, size_t n_parts)
{
    size_t part_bytes = FC_COMM_SLOT_MAX / n_parts / PART_BYTES * PART_BYTES;

    return smaller(numel, part_bytes / item_bytes);
}

static fc_status reduce_scatter(fc_comm *comm, void *recv, const void *send, size_t recv_numel,
                                fc_dtype dtype, double divisor)
{
    size_t item_bytes = fc_dtype_bytes(dtype);
    size_t n_ranks = (size_t)comm->n_ranks;
    size_t own = (size_t)comm->rank;
    size_t block_bytes = recv_numel * item_bytes;
    size_t chunk_max = chunk_numel_max(recv_numel, item_bytes, n_ranks) * item_bytes;
    fc_comm_call call =
        fc_comm_start(comm, FC_COMM_REDUCE_SCATTER, block_bytes, dtype, divisor, -1);
    const char *own_block = (const char *)send + own * block_bytes;
    /* The kernel may not read what it writes: then the own part is staged as well. */
    bool stages_own = recv == own_block;
    size_t done = 0;

    FC_TRY(fc_comm_reserve(comm, &call, chunk_max * n_ranks));
    do {
        size_t chunk = smaller(chunk_max, block_bytes - done);
        char *slot = fc_comm_next_slot(comm);

        for (size_t i = stages_own ? 0 : 1; i < n_ranks; i++) {
            size_t r = (own + i) % n_ranks;

            copy(slot + r * chunk_max, (const char *)send + r * block_bytes + done, chunk);
        }
        FC_TRY(fc_comm_meet(comm, &call));
        for (size_t r = 0; r < n_ranks; r++) {
            comm->sources[r] = fc_comm_slot(comm, (int)r) + own * chunk_max;
        }
        if (!stages_own) {
            comm->sources[own] = own_block + done;
        }
        fc_kern_reduce(dtype, dtype)((char *)recv + done, comm->sources, n_ranks,
                                     chunk / item_bytes, divisor, false);
        done += chunk;
    } while (done < block_bytes);
    return FC_OK;
}

static fc_status all_reduce_small(fc_comm *comm, const fc_comm_call *call, void *data, size_t numel,
                                  fc_dtype dtype, double divisor)
{
    FC_TRY(fc_comm_reserve(comm, call, call->bytes));
    copy(fc_comm_next_slot(comm), data, call->bytes);
    FC_TRY(fc_comm_meet(comm, call));
    for (int r = 0; r < comm->n_ranks; r++) {
        comm->sources[r] = fc_comm_slot(comm, r);
    }
    fc_kern_reduce(dtype, dtype)(data, comm->sources, (size_t)comm->n_ranks, numel, divisor, false);
    return FC_OK;
}

/* One chunk, in place: each rank adds up one part into its next slot, then all pull all parts. */
static fc_status all_reduce_chunk(fc_comm *comm, const fc_comm_call *call, char *data, size_t bytes,
                                  fc_dtype dtype, double divisor)
{
    size_t n_ranks = (size_t)comm->n_ranks;
    size_t own = (size_t)comm->rank;
    size_t part_max = fc_round_up((bytes + n_ranks - 1) / n_ranks, PART_BYTES);
    size_t own_begin = smaller(own * part_max, bytes);
    size_t own_bytes = smaller(part_max, bytes - own_begin);
    char *slot = fc_comm_next_slot(comm);

    copy(slot, data, own_begin);
    copy(slot + own_begin + own_bytes, data + own_begin + own_bytes, bytes - own_begin - own_bytes);
    FC_TRY(fc_comm_meet(comm, call));
    for (size_t r = 0; r < n_ranks; r++) {
        comm->sources[r] = fc_comm_slot(comm, (int)r) + own_begin;
    }
    comm->sources[own] = data + own_begin;
    fc_kern_reduce(dtype, dtype)(fc_comm_next_slot(comm), comm->sources, n_ranks,
                                 own_bytes / fc_dtype_bytes(dtype), divisor, false);
    FC_TRY(fc_comm_meet(comm, call));
    for (size_t i = 0; i < n_ranks; i++) {
        size_t r = (own + i) % n_ranks;
        size_t begin = smaller(r * part_max, bytes);

        copy(data + begin, fc_comm_slot(comm, (int)r), smaller(part_max, bytes - begin));
    }
    return FC_OK;
}

static fc_status all_reduce(fc_comm *comm, void *data, size_t numel, fc_dtype dtype, double divisor)
{
    size_t item_bytes = fc_dtype_bytes(dtype);
    size_t bytes = numel * item_bytes;
    size_t chunk_max = chunk_numel_max(numel, item_bytes, 1) * item_bytes;
    fc_comm_call call = fc_comm_start(comm, FC_COMM_ALL_REDUCE, bytes, dtype, divisor, -1);

    if (bytes <= ALL_REDUCE_SMALL_BYTES) {
        return all_reduce_small(comm, &call, data, numel, dtype, divisor);
    }
    FC_TRY(fc_comm_reserve(comm, &call, chunk_max));
    for (size_t done = 0; done < bytes; done += smaller(chunk_max, bytes - done)) {
        FC_TRY(all_reduce_chunk(comm, &call, (char *)data + done, smaller(chunk_max, bytes - done),
                                dtype, divisor));
    }
    return FC_OK;
}

static fc_status broadcast(fc_comm *comm, void *data, size_t bytes, int root)
{
    fc_comm_call call = fc_comm_start(comm, FC_COMM_BROADCAST, bytes, FC_U8, 1.0, root);
    size_t chunk_max = smaller(bytes, FC_COMM_SLOT_MAX);
    size_t done = 0;

    FC_TRY(fc_comm_reserve(comm, &call, chunk_max));
    do {
        size_t chunk = smaller(chunk_max, bytes - done);

        if (comm->rank == root) {
            copy(fc_comm_next_slot(comm), (const char *)data + done, chunk);
        }
        FC_TRY(fc_comm_meet(comm, &call));
        if (comm->rank != root) {
            copy((char *)data + done, fc_comm_slot(comm, root), chunk);
        }
        done += chunk;
    } while (done < bytes);
    return FC_OK;
}

/* FNV-1a, folded: ranks with different tables find out when their headers are compared. */
static uint32_t digest_of(const size_t *values, size_t n)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < n; i++) {
        hash = (hash ^ values[i]) * UINT64_C(0x100000001b3);
        hash ^= hash >> 32;
    }
    return (uint32_t)(hash ^ hash >> 32);
}

/* Of a slot, which another core reads next: at twice and half of it 48 MiB took a tenth longer. */
#define EXCHANGE_BYTES ((size_t)256 << 10)
#define EXCHANGE_PIECE_MIN ((size_t)32 << 10)

/* One step: the next piece of each block, from `done` on. Rank r's lies at r * stride in a slot. */
static fc_status all_to_all_step(fc_comm *comm, const fc_comm_call *call, const size_t *bytes,
                                 size_t stride, size_t done, fc_copy_fn keep)
{
    size_t n_ranks = (size_t)comm->n_ranks;
    size_t own = (size_t)comm->rank;
    char *slot = fc_comm_next_slot(comm);

    for (size_t r = 0; r < n_ranks; r++) {
        size_t block = bytes[own * n_ranks + r];

        if (r != own && done < block) {
            fc_cursor_read(&comm->cursors[r], slot + r * stride, smaller(stride, block - done),
                           fc_kern()->copy);
        }
    }
    FC_TRY(fc_comm_meet(comm, call));
    for (size_t r = 0; r < n_ranks; r++) {
        size_t block = bytes[r * n_ranks + own];

        if (r != own && done < block) {
            fc_cursor_write(&comm->cursors[n_ranks + r], fc_comm_slot(comm, (int)r) + own * stride,
                            smaller(stride, block - done), keep);
        }
    }
    return FC_OK;
}

static fc_status all_to_all(fc_comm *comm, const fc_comm_block *recv, const fc_comm_block *send,
                            const size_t *bytes)
{
    size_t n_ranks = (size_t)comm->n_ranks;
    size_t own = (size_t)comm->rank;
    size_t total = 0, largest = 0, received = 0, stride;
    fc_copy_fn keep;
    fc_comm_call call;

    for (size_t i = 0; i < n_ranks * n_ranks; i++) {
        total += bytes[i];
        if (i / n_ranks != i % n_ranks && bytes[i] > largest) {
            largest = bytes[i];
        }
    }
    call = fc_comm_start(comm, FC_COMM_ALL_TO_ALL, total, FC_U8, 1.0, -1);
    call.table = digest_of(bytes, n_ranks * n_ranks);
    /* A slot stays in cache, but for many ranks, whose pieces would be small. */
    stride = EXCHANGE_BYTES / n_ranks;
    if (stride < EXCHANGE_PIECE_MIN) {
        stride = smaller(EXCHANGE_PIECE_MIN, FC_COMM_SLOT_MAX / n_ranks);
    }
    stride = smaller(fc_round_up(largest, PART_BYTES), stride / PART_BYTES * PART_BYTES);
    FC_TRY(fc_comm_reserve(comm, &call, stride * n_ranks));
    for (size_t r = 0; r < n_ranks; r++) {
        comm->cursors[r] = fc_cursor_of(&send[r]);
        comm->cursors[n_ranks + r] = fc_cursor_of(&recv[r]);
        received += bytes[r * n_ranks + own];
    }
    keep = received >= GATHER_STREAM_BYTES ? fc_kern()->copy_away : fc_kern()->copy;
    /* At least one step, which compares the calls. */
    for (size_t done = 0; done == 0 || done < largest; done += stride) {
        FC_TRY(all_to_all_step(comm, &call, bytes, stride, done, keep));
        if (stride == 0) {
            break;
        }
    }
    fc_cursor_move(&comm->cursors[n_ranks + own], &comm->cursors[own], bytes[own * n_ranks + own],
                   keep);
    return FC_OK;
}

static fc_status barrier(fc_comm *comm)
{
    fc_comm_call call = fc_comm_start(comm, FC_COMM_BARRIER, 0, FC_U8, 1.0, -1);

    return fc_comm_meet(comm, &call);
}

const fc_comm_ops fc_comm_mapped_ops = {
    .all_gather = all_gather,
    .reduce_scatter = reduce_scatter,
    .all_reduce = all_reduce,
    .broadcast = broadcast,
    .all_to_all = all_to_all,
    .barrier = barrier,
};
