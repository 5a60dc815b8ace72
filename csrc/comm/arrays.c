/* Arrays as people hand them in: what collectives demand of them, and where their bytes lie. */
#include "comm/comm_impl.h"

#include <stdint.h>
#include <string.h>

#define DIMS_MAX 64 /* as torch's operators */

static bool has_one_type(const fc_comm_array *a, const fc_comm_array *b)
{
    return strcmp(a->type, b->type) == 0;
}

static bool overlap(const fc_comm_array *a, const fc_comm_array *b)
{
    return a->data < b->data + b->bytes && b->data < a->data + a->bytes;
}

fc_status fc_comm_check_parts(const fc_comm *comm, const fc_comm_array *whole,
                              const fc_comm_array *part)
{
    size_t n_ranks = (size_t)comm->n_ranks;
    const char *own = whole->data + (size_t)comm->rank * part->bytes;

    if (!has_one_type(whole, part) || whole->numel != n_ranks * part->numel) {
        return fc_fail(FC_ERR_INVALID,
                       "%s must have %zu x the elements of %s and the same dtype, got %zu of %s for"
                       " %zu of %s",
                       whole->name, n_ranks, part->name, whole->numel, whole->type, part->numel,
                       part->type);
    }
    if (part->bytes > 0 && part->data != own && overlap(whole, part)) {
        return fc_fail(FC_ERR_INVALID, "%s overlaps %s, but is not this rank's part of it",
                       part->name, whole->name);
    }
    return FC_OK;
}

typedef enum kind {
    ALL_GATHER,
    REDUCE_SCATTER,
    ALL_REDUCE,
    BROADCAST,
    N_KINDS
} kind;

static kind kind_of(const char *what)
{
    static const char *const names[N_KINDS] = {"all_gather", "reduce_scatter", "all_reduce",
                                               "broadcast"};
    int found = 0;

    while (found < N_KINDS && strcmp(names[found], what) != 0) {
        found++;
    }
    return (kind)found;
}

fc_status fc_comm_check_arrays(const fc_comm *comm, const char *what, const fc_comm_array *to,
                               const fc_comm_array *from)
{
    const kind k = kind_of(what);

    if (k == N_KINDS) {
        return fc_fail(FC_ERR_INVALID, "no collective is called %s", what);
    }
    if (k == ALL_GATHER || k == REDUCE_SCATTER) {
        FC_TRY(fc_comm_check_parts(comm, k == ALL_GATHER ? to : from, k == ALL_GATHER ? from : to));
    }
    if ((k == REDUCE_SCATTER || k == ALL_REDUCE) && to->dtype >= FC_RAW1) {
        return fc_fail(FC_ERR_INVALID, "tensors of type %s cannot be added", to->type);
    }
    return FC_OK;
}

fc_status fc_comm_collect(fc_comm *comm, const char *what, const fc_comm_array *to,
                          const fc_comm_array *from, double divisor, int root)
{
    switch (kind_of(what)) {
    case ALL_GATHER:
        return fc_comm_all_gather(comm, to->data, from->data, from->bytes);
    case REDUCE_SCATTER:
        return fc_comm_reduce_scatter(comm, to->data, from->data, to->numel, to->dtype, divisor);
    case ALL_REDUCE:
        return fc_comm_all_reduce(comm, to->data, to->numel, to->dtype, divisor);
    default:
        return fc_comm_broadcast(comm, to->data, to->bytes, root);
    }
}

fc_status fc_comm_table(const fc_comm *comm, size_t *counts, size_t n_counts, size_t item_bytes)
{
    const size_t n = (size_t)comm->n_ranks;
    bool is_fine = n_counts == n * n && item_bytes > 0;

    for (size_t i = 0; is_fine && i < n_counts; i++) {
        is_fine = counts[i] <= (size_t)PTRDIFF_MAX / item_bytes;
        counts[i] *= item_bytes;
    }
    return is_fine ? FC_OK
                   : fc_fail(FC_ERR_INVALID, "counts must be %zu rows of %zu numbers", n, n);
}

/* Parts of `data` one after another, as long as every `step`-th entry says. */
static void split(char *data, const size_t *bytes, size_t n, size_t step, fc_comm_piece *pieces,
                  fc_comm_block *blocks)
{
    for (size_t r = 0; r < n; r++) {
        pieces[r] = (fc_comm_piece){.data = data, .row_bytes = bytes[r * step], .n_rows = 1};
        blocks[r] = (fc_comm_block){.pieces = &pieces[r], .n_pieces = 1};
        data += bytes[r * step];
    }
}

fc_status fc_comm_split(const fc_comm *comm, const fc_comm_array *recv, const fc_comm_array *send,
                        const size_t *bytes, fc_comm_piece *pieces, fc_comm_block *blocks)
{
    size_t n = (size_t)comm->n_ranks;
    const size_t *column = bytes + comm->rank, *row = bytes + (size_t)comm->rank * n;
    size_t sent = 0, received = 0;

    for (size_t r = 0; r < n; r++) {
        sent += row[r];
        received += column[r * n];
    }
    if (!has_one_type(recv, send) || sent != send->bytes || received != recv->bytes) {
        return fc_fail(FC_ERR_INVALID,
                       "%s and %s must have one dtype and the elements of this rank's column and "
                       "row of counts: %zu and %zu bytes, got %zu of %s and %zu of %s",
                       recv->name, send->name, received, sent, recv->bytes, recv->type, send->bytes,
                       send->type);
    }
    if (overlap(recv, send)) {
        return fc_fail(FC_ERR_INVALID, "%s overlaps %s", recv->name, send->name);
    }
    split(recv->data, column, n, n, pieces, blocks);
    split(send->data, row, n, 1, pieces + n, blocks + n);
    return FC_OK;
}

typedef struct dim {
    size_t size, pitch; /* in bytes */
} dim;

/* What lies together becomes one dimension. */
static size_t merge_dims(const fc_comm_strided *array, dim *dims)
{
    size_t n = 0;

    for (size_t d = 0; d < array->n_dims; d++) {
        size_t size = (size_t)array->sizes[d];
        size_t pitch = (size_t)array->strides[d] * array->item_bytes;

        if (n > 0 && dims[n - 1].pitch == size * pitch) {
            dims[n - 1] = (dim){dims[n - 1].size * size, pitch};
        } else if (size != 1) {
            dims[n++] = (dim){size, pitch};
        }
    }
    return n;
}

fc_status fc_comm_rows_of(const fc_comm_strided *array, fc_comm_piece *out, size_t *n_out)
{
    fc_comm_piece rows = {.data = array->data, .row_bytes = array->item_bytes, .n_rows = 1};
    dim dims[DIMS_MAX];
    size_t n;

    if (array->n_dims > DIMS_MAX) {
        return fc_fail(FC_ERR_INVALID, "an array of %zu dimensions", array->n_dims);
    }
    n = merge_dims(array, dims);
    if (n > 0 && dims[n - 1].pitch == array->item_bytes) {
        rows.row_bytes *= dims[--n].size;
    }
    if (n > 0) {
        n--;
        rows.n_rows = dims[n].size;
        rows.pitch = dims[n].pitch;
    }
    *n_out = 1;
    for (size_t d = 0; d < n; d++) {
        *n_out *= dims[d].size;
    }
    for (size_t i = 0; out != NULL && i < *n_out; i++) {
        size_t rest = i;

        out[i] = rows;
        for (size_t d = n; d-- > 0; rest /= dims[d].size) {
            out[i].data += rest % dims[d].size * dims[d].pitch;
        }
    }
    return FC_OK;
}
