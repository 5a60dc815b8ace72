/* Sums over rails. A chunk is cut alike on all hosts; see [Note: rails] and [Note: begun
 * collectives].
 */
#include "comm/rails_impl.h"

#include <string.h>

typedef struct reduction {
    rails *r;
    const rails_call *call;
    const char *send;
    size_t bytes, piece_max; /* of a chunk */
    fc_dtype dtype;
    fc_comm_call local;
    /* For each rank that this one serves and for each host, its own included: of two pieces, or of
     * the whole chunk. */
    char *rows;
    size_t row_bytes;
} reduction;

/* Rows of outgoing sums come first: who is alone sends its parts as they are, and adds its own. */
static int n_outgoing(const rails *r)
{
    return r->local != NULL ? r->n_served : 0;
}

static int n_rows(const rails *r)
{
    return n_outgoing(r) + r->n_hosts - (r->local == NULL);
}

static char *piece_at(const reduction *d, int row, size_t done)
{
    return d->rows + (size_t)row * d->row_bytes + done % d->row_bytes;
}

static char *outgoing(const reduction *d, int i, size_t done)
{
    return piece_at(d, i, done);
}

static char *incoming(const reduction *d, int host, size_t done)
{
    const rails *r = d->r;
    const int skipped = r->local == NULL && host > r->host;

    return piece_at(d, n_outgoing(r) + host - skipped, done);
}

static size_t piece_bytes(const reduction *d, size_t done)
{
    return rails_smaller(d->piece_max, d->bytes - done);
}

/* Other ranks of this host add up what this one has for them and those whom they serve. */
static void stage(const reduction *d, size_t done)
{
    const rails *r = d->r;
    char *slot = fc_comm_next_slot(r->local);

    for (int q = 0; q < r->n_ranks; q++) {
        if (r->holders[q] != r->places[r->rank]) {
            rails_copy(slot + (size_t)q * d->piece_max, d->send + (size_t)q * d->bytes + done,
                       piece_bytes(d, done));
        }
    }
}

/* This host's sum of rank q's chunk. */
static void add_local(const reduction *d, int q, size_t done, char *out)
{
    const rails *r = d->r;

    for (int place = 0; place < r->n_local; place++) {
        r->sources[place] = place == r->places[r->rank]
                                ? d->send + (size_t)q * d->bytes + done
                                : fc_comm_slot(r->local, place) + (size_t)q * d->piece_max;
    }
    fc_kern_reduce(d->dtype, d->dtype)(out, r->sources, (size_t)r->n_local,
                                       piece_bytes(d, done) / fc_dtype_bytes(d->dtype), 1.0, false);
}

static fc_status send_sums(const reduction *d, size_t done)
{
    rails *r = d->r;
    const size_t piece = piece_bytes(d, done);

    for (int i = 0; i < r->n_served; i++) {
        const int q = r->served[i];
        const char *from = d->send + (size_t)q * d->bytes + done;

        if (r->local != NULL) {
            char *sum = outgoing(d, i, done);

            if (done >= d->row_bytes) {
                FC_TRY(rails_await_sent(r, d->call, q, 1)); /* what lay there before */
            }
            add_local(d, q, done, sum);
            from = sum;
        }
        FC_TRY(rails_send(r, d->call, q, from, piece));
    }
    return FC_OK;
}

static fc_status receive_sums(const reduction *d, size_t done)
{
    rails *r = d->r;

    for (int h = 0; h < r->n_hosts; h++) {
        if (rails_is_other_host(r, h)) {
            FC_TRY(rails_receive(r, d->call, r->servers[h], incoming(d, h, done),
                                 piece_bytes(d, done)));
        }
    }
    return FC_OK;
}

static fc_status await_hosts(const reduction *d, size_t done)
{
    rails *r = d->r;

    for (int h = 0; h < r->n_hosts; h++) {
        if (rails_is_other_host(r, h)) {
            FC_TRY(rails_await_received(r, d->call, r->servers[h], piece_bytes(d, done)));
        }
    }
    return FC_OK;
}

static void add_hosts(const reduction *d, size_t done, char *recv)
{
    const rails *r = d->r;

    for (int h = 0; h < r->n_hosts; h++) {
        r->sources[h] = r->local == NULL && h == r->host
                            ? d->send + (size_t)r->rank * d->bytes + done
                            : incoming(d, h, done);
    }
    fc_kern_reduce(d->dtype, d->dtype)(recv + done, r->sources, (size_t)r->n_hosts,
                                       piece_bytes(d, done) / fc_dtype_bytes(d->dtype), 1.0, false);
}

/* Sends a piece of this host's sums, and adds up its own. */
static fc_status begin_piece(const reduction *d, size_t done)
{
    rails *r = d->r;

    FC_TRY(receive_sums(d, done));
    if (r->local != NULL) {
        stage(d, done);
        FC_TRY(fc_comm_meet(r->local, &d->local));
    }
    FC_TRY(send_sums(d, done));
    if (r->local != NULL && d->bytes > 0) {
        add_local(d, r->rank, done, incoming(d, r->host, done));
    }
    return FC_OK;
}

static fc_status end_piece(const reduction *d, size_t done, char *recv)
{
    FC_TRY(await_hosts(d, done));
    add_hosts(d, done, recv);
    return FC_OK;
}

/* A piece travels while the next one is added up. */
static fc_status reduce_pieces(const reduction *d, char *recv)
{
    size_t done = 0;

    do {
        FC_TRY(begin_piece(d, done));
        if (done > 0) {
            FC_TRY(end_piece(d, done - d->piece_max, recv));
        }
        done += d->piece_max;
    } while (done < d->bytes);
    return d->bytes > 0 ? end_piece(d, done - d->piece_max, recv) : FC_OK;
}

/* Those that nobody has awaited: as many as its rows hold, or all that went straight from `send`.
 */
static fc_status await_sums(const reduction *d)
{
    rails *r = d->r;
    size_t n = (d->bytes + d->piece_max - 1) / d->piece_max;

    n = r->local != NULL ? rails_smaller(n, d->row_bytes / d->piece_max) : n;
    for (int i = 0; i < r->n_served; i++) {
        for (size_t k = 0; k < n; k++) {
            FC_TRY(rails_await_sent(r, d->call, r->served[i], 1));
        }
    }
    return FC_OK;
}

static fc_status open(reduction *d, rails_buffer *rows)
{
    rails *r = d->r;

    FC_TRY(rails_reserve(rows, (size_t)n_rows(r) * d->row_bytes));
    d->rows = rows->data;
    if (r->local == NULL) {
        return FC_OK;
    }
    d->local = fc_comm_start(r->local, FC_COMM_REDUCE_SCATTER, d->bytes, d->dtype, 1.0, -1);
    return fc_comm_reserve(r->local, &d->local, d->piece_max * (size_t)r->n_ranks);
}

static fc_status check(rails *r, fc_dtype dtype)
{
    FC_TRY(rails_check(r));
    return fc_kern_reduce(dtype, dtype) != NULL
               ? FC_OK
               : fc_fail(FC_ERR_INVALID, "elements of type %s cannot be added",
                         fc_dtype_name(dtype));
}

static reduction reduction_of(rails *r, rails_kind kind, const void *send, size_t bytes,
                              fc_dtype dtype)
{
    return (reduction){.r = r,
                       .call = &r->calls[kind],
                       .send = send,
                       .bytes = bytes,
                       .piece_max = rails_smaller(r->reduce_piece, bytes > 0 ? bytes : 1),
                       .dtype = dtype};
}

/* ---- at once ---- */

static fc_status reduce(reduction *d, char *recv)
{
    d->row_bytes = 2 * d->piece_max;
    FC_TRY(open(d, &d->r->buffers[RAILS_PIECES]));
    FC_TRY(reduce_pieces(d, recv));
    return await_sums(d);
}

fc_status rails_reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                               fc_dtype dtype)
{
    rails *r = context;
    const size_t bytes = recv_numel * fc_dtype_bytes(dtype);
    reduction d = reduction_of(r, RAILS_AT_ONCE, send, bytes, dtype);

    FC_TRY(check(r, dtype));
    FC_TRY(rails_ended(r, rails_begin(r, RAILS_AT_ONCE, FC_COMM_REDUCE_SCATTER, bytes, dtype, -1)));
    return rails_ended(r, reduce(&d, recv));
}

/* ---- begun, and ended later ---- */

/* Whole pieces, so that none lies across the end of a row. */
static void hold_whole(reduction *d)
{
    const size_t n = (d->bytes + d->piece_max - 1) / d->piece_max;

    d->row_bytes = (n > 0 ? n : 1) * d->piece_max;
}

static reduction reduction_begun(rails *r, const rails_call *call)
{
    reduction d = reduction_of(r, RAILS_BEGUN_SUM, call->send, call->bytes, call->dtype);

    hold_whole(&d);
    d.rows = r->buffers[RAILS_SUMS].data;
    return d;
}

static fc_status begin_pieces(reduction *d)
{
    size_t done = 0;

    hold_whole(d);
    FC_TRY(open(d, &d->r->buffers[RAILS_SUMS]));
    do {
        FC_TRY(begin_piece(d, done));
        done += d->piece_max;
    } while (done < d->bytes);
    return FC_OK;
}

fc_status rails_sum_begin(void *context, void *send, size_t recv_numel, fc_dtype dtype,
                          bool *is_lent_out)
{
    rails *r = context;
    const size_t bytes = recv_numel * fc_dtype_bytes(dtype);
    reduction d = reduction_of(r, RAILS_BEGUN_SUM, send, bytes, dtype);

    if (r->calls[RAILS_BEGUN_SUM].is_open) {
        return FC_AGAIN;
    }
    FC_TRY(check(r, dtype));
    FC_TRY(rails_begin(r, RAILS_BEGUN_SUM, FC_COMM_REDUCE_SCATTER, bytes, dtype, -1));
    r->calls[RAILS_BEGUN_SUM].send = send;
    r->calls[RAILS_BEGUN_SUM].bytes = bytes;
    *is_lent_out = r->local == NULL;
    return rails_ended(r, begin_pieces(&d));
}

fc_status rails_sum_arrive(rails *r, const rails_call *call)
{
    const reduction d = reduction_begun(r, call);

    for (size_t done = 0; done < d.bytes; done += d.piece_max) {
        FC_TRY(await_hosts(&d, done));
    }
    return await_sums(&d);
}

static fc_status end_whole(rails *r, rails_call *call, char *recv)
{
    const reduction d = reduction_begun(r, call);

    FC_TRY(rails_arrive(r, call));
    for (size_t done = 0; done < d.bytes; done += d.piece_max) {
        add_hosts(&d, done, recv);
    }
    return FC_OK;
}

fc_status rails_sum_end(void *context, void *recv)
{
    rails *r = context;
    rails_call *call = &r->calls[RAILS_BEGUN_SUM];
    fc_status st;

    FC_TRY(rails_check(r));
    st = rails_ended(r, end_whole(r, call, recv));
    call->is_open = false;
    return st;
}

void rails_sum_drop(void *context)
{
    rails *r = context;

    rails_drop(r, &r->calls[RAILS_BEGUN_SUM]);
}
