/* Collectives over rails. What a rank's chunk is cut into is cut alike on all hosts, so that each
 * side knows which messages come; see [Note: rails].
 */
#include "comm/rails_impl.h"

#include <string.h>

/* Up to here all hosts' sums go to all hosts: one message instead of two. */
#define ALL_REDUCE_SMALL_BYTES ((size_t)32 << 10)

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from) {
        fc_kern()->copy(to, from, bytes);
    }
}

static bool is_other_host(const rails *r, int host)
{
    return host != r->host;
}

/* ---- all_gather ---- */

typedef struct gather {
    rails *r;
    char *recv;
    const char *send;
    size_t bytes, piece_max;
    fc_comm_call call;
} gather;

/* All that this rank sends: it lies still until the call ends. */
static fc_status send_own(const gather *g)
{
    rails *r = g->r;

    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int h = 0; h < r->n_hosts; h++) {
            if (is_other_host(r, h)) {
                FC_TRY(rails_send(r, r->servers[h], g->send + done,
                                  smaller(g->piece_max, g->bytes - done)));
            }
        }
    }
    return FC_OK;
}

static fc_status await_own(const gather *g)
{
    rails *r = g->r;

    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int h = 0; h < r->n_hosts; h++) {
            if (is_other_host(r, h)) {
                FC_TRY(rails_await_sent(r, r->servers[h], 1));
            }
        }
    }
    return FC_OK;
}

/* Alone on its host: everything goes straight to its place. */
static fc_status gather_alone(const gather *g)
{
    rails *r = g->r;

    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int i = 0; i < r->n_served; i++) {
            FC_TRY(rails_receive(r, r->served[i], g->recv + (size_t)r->served[i] * g->bytes + done,
                                 smaller(g->piece_max, g->bytes - done)));
        }
    }
    FC_TRY(send_own(g));
    copy(g->recv + (size_t)r->rank * g->bytes, g->send, g->bytes);
    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int i = 0; i < r->n_served; i++) {
            FC_TRY(rails_await_received(r, r->served[i], 1));
        }
    }
    return await_own(g);
}

/* Into this rank's next slot, behind its own piece. */
static fc_status receive_pieces(const gather *g, size_t done)
{
    rails *r = g->r;
    const size_t piece = smaller(g->piece_max, g->bytes - done);
    char *slot = fc_comm_next_slot(r->local);

    for (int i = 0; i < r->n_served; i++) {
        FC_TRY(rails_receive(r, r->served[i], slot + ((size_t)i + 1) * g->piece_max, piece));
    }
    return FC_OK;
}

/* From the slots of this host's ranks. Who holds several has them in the order of ranks. */
static void take_pieces(const gather *g, size_t done)
{
    const rails *r = g->r;
    const size_t piece = smaller(g->piece_max, g->bytes - done);
    const bool streams = g->bytes * (size_t)r->n_ranks >= (size_t)8 << 20;
    void (*keep)(void *, const void *, size_t) = streams ? fc_kern()->copy_away : fc_kern()->copy;

    for (int i = 0; i < r->n_local && piece > 0; i++) {
        const int place = (r->places[r->rank] + i) % r->n_local;
        const char *from = fc_comm_slot(r->local, place) + g->piece_max;

        for (int q = 0; q < r->n_ranks; q++) {
            char *to = g->recv + (size_t)q * g->bytes + done;

            if (r->holders[q] != place) {
                continue;
            }
            if (r->hosts[q] != r->host) {
                keep(to, from, piece);
                from += g->piece_max;
            } else if (q != r->rank) {
                keep(to, fc_comm_slot(r->local, place), piece);
            } else if (to != g->send + done) {
                keep(to, g->send + done, piece);
            }
        }
    }
}

static fc_status gather_shared(gather *g)
{
    rails *r = g->r;
    size_t done = 0;

    g->call = fc_comm_start(r->local, FC_COMM_ALL_GATHER, g->bytes, FC_U8, 1.0, -1);
    FC_TRY(fc_comm_reserve(r->local, &g->call, g->piece_max * r->held_max));
    FC_TRY(receive_pieces(g, 0));
    FC_TRY(send_own(g));
    do {
        const size_t piece = smaller(g->piece_max, g->bytes - done);

        copy(fc_comm_next_slot(r->local), g->send + done, piece);
        for (int i = 0; i < r->n_served; i++) {
            FC_TRY(rails_await_received(r, r->served[i], piece));
        }
        FC_TRY(fc_comm_meet(r->local, &g->call));
        if (done + piece < g->bytes) {
            FC_TRY(receive_pieces(g, done + piece));
        }
        take_pieces(g, done);
        done += piece;
    } while (done < g->bytes);
    return await_own(g);
}

/* What failed beside the rails ends them as well: messages of this call are on their way. */
static fc_status ended(rails *r, fc_status st)
{
    return st == FC_OK || r->is_broken ? st : rails_break(r, st, fc_last_message());
}

static fc_status all_gather(void *context, void *recv, const void *send, size_t send_bytes)
{
    rails *r = context;
    gather g = {.r = r,
                .recv = recv,
                .send = send,
                .bytes = send_bytes,
                .piece_max = smaller(r->gather_piece, send_bytes)};

    FC_TRY(rails_check(r));
    rails_begin(r, FC_COMM_ALL_GATHER, send_bytes, FC_U8, -1);
    return ended(r, r->local != NULL ? gather_shared(&g) : gather_alone(&g));
}

/* ---- reduce_scatter ---- */

typedef struct reduction {
    rails *r;
    char *recv;
    const char *send;
    size_t bytes, piece_max; /* of a chunk */
    fc_dtype dtype;
    fc_comm_call call;
    char *pieces; /* two for each rank that this one serves, for each host, and for its own sum */
} reduction;

static char *piece_at(const reduction *d, int row, size_t done)
{
    return d->pieces + ((size_t)row * 2 + done / d->piece_max % 2) * d->piece_max;
}

static char *outgoing(const reduction *d, int i, size_t done)
{
    return piece_at(d, i, done);
}

static char *incoming(const reduction *d, int host, size_t done)
{
    return piece_at(d, d->r->n_served + host, done);
}

static size_t piece_bytes(const reduction *d, size_t done)
{
    return smaller(d->piece_max, d->bytes - done);
}

/* Other ranks of this host add up what this one has for them and those whom they serve. */
static void stage(const reduction *d, size_t done)
{
    const rails *r = d->r;
    char *slot = fc_comm_next_slot(r->local);

    for (int q = 0; q < r->n_ranks; q++) {
        if (r->holders[q] != r->places[r->rank]) {
            copy(slot + (size_t)q * d->piece_max, d->send + (size_t)q * d->bytes + done,
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

            if (done >= 2 * d->piece_max) {
                FC_TRY(rails_await_sent(r, q, 1)); /* what lay there before */
            }
            add_local(d, q, done, sum);
            from = sum;
        }
        FC_TRY(rails_send(r, q, from, piece));
    }
    return FC_OK;
}

static fc_status receive_sums(const reduction *d, size_t done)
{
    rails *r = d->r;

    for (int h = 0; h < r->n_hosts; h++) {
        if (is_other_host(r, h)) {
            FC_TRY(rails_receive(r, r->servers[h], incoming(d, h, done), piece_bytes(d, done)));
        }
    }
    return FC_OK;
}

static fc_status add_hosts(const reduction *d, size_t done)
{
    rails *r = d->r;
    const size_t piece = piece_bytes(d, done);

    for (int h = 0; h < r->n_hosts; h++) {
        r->sources[h] = incoming(d, h, done);
        if (is_other_host(r, h)) {
            FC_TRY(rails_await_received(r, r->servers[h], piece));
        } else if (r->local == NULL) {
            r->sources[h] = d->send + (size_t)r->rank * d->bytes + done;
        }
    }
    fc_kern_reduce(d->dtype, d->dtype)(d->recv + done, r->sources, (size_t)r->n_hosts,
                                       piece / fc_dtype_bytes(d->dtype), 1.0, false);
    return FC_OK;
}

/* A piece travels while the next one is added up. */
static fc_status reduce_pieces(reduction *d)
{
    rails *r = d->r;
    size_t done = 0;

    do {
        FC_TRY(receive_sums(d, done));
        if (r->local != NULL) {
            stage(d, done);
            FC_TRY(fc_comm_meet(r->local, &d->call));
        }
        FC_TRY(send_sums(d, done));
        if (r->local != NULL && d->bytes > 0) {
            add_local(d, r->rank, done, incoming(d, r->host, done));
        }
        if (done > 0) {
            FC_TRY(add_hosts(d, done - d->piece_max));
        }
        done += d->piece_max;
    } while (done < d->bytes);
    return d->bytes > 0 ? add_hosts(d, done - d->piece_max) : FC_OK;
}

/* Those that nobody has awaited: the last two pieces, or all that went straight from `send`. */
static fc_status await_sums(const reduction *d)
{
    rails *r = d->r;
    size_t n = d->bytes == 0 ? 0 : (d->bytes + d->piece_max - 1) / d->piece_max;

    n = r->local != NULL ? smaller(n, 2) : n;
    for (int i = 0; i < r->n_served; i++) {
        for (size_t k = 0; k < n; k++) {
            FC_TRY(rails_await_sent(r, r->served[i], 1));
        }
    }
    return FC_OK;
}

static fc_status reduce(reduction *d)
{
    rails *r = d->r;
    const size_t rows = 2 * (size_t)(r->n_served + r->n_hosts);

    FC_TRY(rails_reserve(&r->buffers[RAILS_PIECES], rows * d->piece_max));
    d->pieces = r->buffers[RAILS_PIECES].data;
    if (r->local != NULL) {
        d->call = fc_comm_start(r->local, FC_COMM_REDUCE_SCATTER, d->bytes, d->dtype, 1.0, -1);
        FC_TRY(fc_comm_reserve(r->local, &d->call, d->piece_max * (size_t)r->n_ranks));
    }
    FC_TRY(reduce_pieces(d));
    return await_sums(d);
}

static fc_status reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                                fc_dtype dtype)
{
    rails *r = context;
    reduction d = {.r = r,
                   .recv = recv,
                   .send = send,
                   .bytes = recv_numel * fc_dtype_bytes(dtype),
                   .dtype = dtype};

    FC_TRY(rails_check(r));
    if (fc_kern_reduce(dtype, dtype) == NULL) {
        return fc_fail(FC_ERR_INVALID, "elements of type %s cannot be added", fc_dtype_name(dtype));
    }
    rails_begin(r, FC_COMM_REDUCE_SCATTER, d.bytes, dtype, -1);
    d.piece_max = smaller(r->reduce_piece, d.bytes > 0 ? d.bytes : 1);
    return ended(r, reduce(&d));
}

/* ---- all_reduce ---- */

/* Each host's sum goes to all ranks of the others. */
static fc_status all_reduce_small(rails *r, char *data, size_t numel, fc_dtype dtype)
{
    const size_t bytes = numel * fc_dtype_bytes(dtype);
    char *sums;

    rails_begin(r, FC_COMM_ALL_REDUCE, bytes, dtype, -1);
    if (r->local != NULL) {
        FC_TRY(fc_comm_all_reduce(r->local, data, numel, dtype, 1.0));
    }
    FC_TRY(rails_reserve(&r->buffers[RAILS_PIECES], (size_t)r->n_hosts * bytes));
    sums = r->buffers[RAILS_PIECES].data;
    for (int h = 0; h < r->n_hosts; h++) {
        r->sources[h] = sums + (size_t)h * bytes;
        if (is_other_host(r, h)) {
            FC_TRY(rails_receive(r, r->servers[h], sums + (size_t)h * bytes, bytes));
        }
    }
    copy(sums + (size_t)r->host * bytes, data, bytes);
    for (int i = 0; i < r->n_served; i++) {
        FC_TRY(rails_send(r, r->served[i], r->sources[r->host], bytes));
    }
    for (int h = 0; h < r->n_hosts; h++) {
        if (is_other_host(r, h)) {
            FC_TRY(rails_await_received(r, r->servers[h], bytes));
        }
    }
    if (bytes > 0) {
        fc_kern_reduce(dtype, dtype)(data, r->sources, (size_t)r->n_hosts, numel, 1.0, false);
    }
    for (int i = 0; i < r->n_served; i++) {
        FC_TRY(rails_await_sent(r, r->served[i], bytes));
    }
    return FC_OK;
}

static fc_status all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    rails *r = context;
    const size_t item_bytes = fc_dtype_bytes(dtype);
    const size_t part =
        numel * item_bytes <= ALL_REDUCE_SMALL_BYTES ? 0 : numel / (size_t)r->n_ranks;
    const size_t whole = part * (size_t)r->n_ranks;

    FC_TRY(rails_check(r));
    if (fc_kern_reduce(dtype, dtype) == NULL) {
        return fc_fail(FC_ERR_INVALID, "elements of type %s cannot be added", fc_dtype_name(dtype));
    }
    if (part > 0) {
        FC_TRY(ended(r, rails_reserve(&r->buffers[RAILS_PART], part * item_bytes)));
        FC_TRY(reduce_scatter(r, r->buffers[RAILS_PART].data, data, part, dtype));
        FC_TRY(all_gather(r, data, r->buffers[RAILS_PART].data, part * item_bytes));
    }
    if (part > 0 && whole == numel) {
        return FC_OK;
    }
    return ended(r, all_reduce_small(r, (char *)data + whole * item_bytes, numel - whole, dtype));
}

/* ---- others ---- */

static fc_status spread(rails *r, void *data, size_t bytes, int root)
{
    rails_begin(r, FC_COMM_BROADCAST, bytes, FC_U8, root);
    if (r->rank == root) {
        for (int h = 0; h < r->n_hosts; h++) {
            if (is_other_host(r, h)) {
                FC_TRY(rails_send(r, r->servers[h], data, bytes));
            }
        }
    } else if (r->hosts[root] != r->host && r->holders[root] == r->places[r->rank]) {
        FC_TRY(rails_receive(r, root, data, bytes));
        FC_TRY(rails_await_received(r, root, bytes));
    }
    if (r->local != NULL) {
        FC_TRY(fc_comm_broadcast(r->local, data, bytes, r->holders[root]));
    }
    for (int h = 0; h < r->n_hosts && r->rank == root; h++) {
        if (is_other_host(r, h)) {
            FC_TRY(rails_await_sent(r, r->servers[h], bytes));
        }
    }
    return FC_OK;
}

static fc_status broadcast(void *context, void *data, size_t bytes, int root)
{
    rails *r = context;

    FC_TRY(rails_check(r));
    return ended(r, spread(r, data, bytes, root));
}

/* Between each two ranks, whatever is between them: nothing to gain here. */
static fc_status all_to_all(void *context, void *recv, const size_t *recv_bytes, const void *send,
                            const size_t *send_bytes)
{
    rails *r = context;

    FC_TRY(rails_check(r));
    return r->group.all_to_all(r->group.context, recv, recv_bytes, send, send_bytes);
}

static fc_status barrier(void *context)
{
    int32_t nothing = 0;

    return all_reduce(context, &nothing, 1, FC_I32);
}

const fc_message_ops rails_ops = {.kind = "rails",
                                  .all_gather = all_gather,
                                  .reduce_scatter = reduce_scatter,
                                  .all_reduce = all_reduce,
                                  .broadcast = broadcast,
                                  .all_to_all = all_to_all,
                                  .barrier = barrier};
