/* Gathers over rails. What a rank's chunk is cut into is cut alike on all hosts, so that each side
 * knows which messages come; see [Note: rails] and [Note: begun collectives].
 */
#include "comm/rails_impl.h"

#include <string.h>

typedef struct gather {
    rails *r;
    const rails_call *call;
    const char *send;
    size_t bytes, piece_max;
    fc_comm_call local;
    rails_buffer *staging; /* of whole chunks that come for this host */
    const fc_gathered *to;
    fc_status taken; /* the first failure of who takes what comes */
} gather;

typedef void (*visit)(gather *g, int rank, size_t at, const char *data, size_t bytes);

static void look(gather *g, int rank, size_t at, const char *data, size_t bytes)
{
    (void)at;
    if (g->taken == FC_OK) {
        g->taken = g->to->look(g->to->context, rank, data, bytes);
    }
}

static void take(gather *g, int rank, size_t at, const char *data, size_t bytes)
{
    if (g->taken == FC_OK) {
        g->taken = g->to->take(g->to->context, rank, at, data, bytes);
    }
}

/* All ranks are seen before anything is taken. */
static void take_all(gather *g, void (*ranks)(gather *g, visit to))
{
    if (g->bytes > 0) {
        ranks(g, look);
        ranks(g, take);
    }
}

/* What failed beside the rails ends them; who did not want what came is no failure of them. */
static fc_status ended(const gather *g, fc_status st)
{
    FC_TRY(rails_ended(g->r, st));
    return g->taken;
}

/* All that this rank sends: it lies still until the call ends. */
static fc_status send_own(const gather *g)
{
    rails *r = g->r;

    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int h = 0; h < r->n_hosts; h++) {
            if (rails_is_other_host(r, h)) {
                FC_TRY(rails_send(r, g->call, r->servers[h], g->send + done,
                                  rails_smaller(g->piece_max, g->bytes - done)));
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
            if (rails_is_other_host(r, h)) {
                FC_TRY(rails_await_sent(r, g->call, r->servers[h], 1));
            }
        }
    }
    return FC_OK;
}

/* Into `at`, one chunk after another; or each at the place of its rank. */
static fc_status receive_whole(const gather *g, char *at, bool by_rank)
{
    rails *r = g->r;

    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int i = 0; i < r->n_served; i++) {
            char *chunk = at + (size_t)(by_rank ? r->served[i] : i) * g->bytes;

            FC_TRY(rails_receive(r, g->call, r->served[i], chunk + done,
                                 rails_smaller(g->piece_max, g->bytes - done)));
        }
    }
    return FC_OK;
}

static fc_status await_whole(const gather *g)
{
    rails *r = g->r;

    for (size_t done = 0; done < g->bytes; done += g->piece_max) {
        for (int i = 0; i < r->n_served; i++) {
            FC_TRY(rails_await_received(r, g->call, r->served[i], 1));
        }
    }
    return await_own(g);
}

/* ---- pieces, for ranks that share a host ---- */

/* Into this rank's next slot, behind its own piece. */
static fc_status receive_pieces(const gather *g, size_t done)
{
    rails *r = g->r;
    const size_t piece = rails_smaller(g->piece_max, g->bytes - done);
    char *slot = fc_comm_next_slot(r->local);

    for (int i = 0; i < r->n_served; i++) {
        FC_TRY(
            rails_receive(r, g->call, r->served[i], slot + ((size_t)i + 1) * g->piece_max, piece));
    }
    return FC_OK;
}

/* What of it has come before. */
static void stage_pieces(const gather *g, size_t done)
{
    rails *r = g->r;
    const char *gathered = g->staging->data;
    char *slot = fc_comm_next_slot(r->local);

    for (int i = 0; i < r->n_served; i++) {
        rails_copy(slot + ((size_t)i + 1) * g->piece_max, gathered + (size_t)i * g->bytes + done,
                   rails_smaller(g->piece_max, g->bytes - done));
    }
}

/* In the slots of this host's ranks. Who holds several has them in the order of ranks. */
static void visit_pieces(gather *g, size_t done, size_t piece, visit to)
{
    const rails *r = g->r;

    for (int i = 0; i < r->n_local; i++) {
        const int place = (r->places[r->rank] + i) % r->n_local;
        const char *from = fc_comm_slot(r->local, place) + g->piece_max;

        for (int q = 0; q < r->n_ranks; q++) {
            if (r->holders[q] != place) {
                continue;
            }
            if (r->hosts[q] != r->host) {
                to(g, q, done, from, piece);
                from += g->piece_max;
            } else {
                to(g, q, done, q != r->rank ? fc_comm_slot(r->local, place) : g->send + done,
                   piece);
            }
        }
    }
}

static void take_pieces(gather *g, size_t done)
{
    const size_t piece = rails_smaller(g->piece_max, g->bytes - done);

    if (piece > 0) {
        if (done == 0) {
            visit_pieces(g, done, piece, look);
        }
        visit_pieces(g, done, piece, take);
    }
}

static fc_status share_pieces(gather *g, bool has_come)
{
    rails *r = g->r;
    size_t done = 0;

    do {
        const size_t piece = rails_smaller(g->piece_max, g->bytes - done);

        rails_copy(fc_comm_next_slot(r->local), g->send + done, piece);
        if (has_come) {
            stage_pieces(g, done);
        }
        for (int i = 0; i < r->n_served && !has_come; i++) {
            FC_TRY(rails_await_received(r, g->call, r->served[i], piece));
        }
        FC_TRY(fc_comm_meet(r->local, &g->local));
        if (done + piece < g->bytes && !has_come) {
            FC_TRY(receive_pieces(g, done + piece));
        }
        take_pieces(g, done);
        done += piece;
    } while (done < g->bytes);
    return FC_OK;
}

static fc_status open_local(gather *g)
{
    rails *r = g->r;

    g->piece_max = rails_smaller(r->gather_piece, g->bytes);
    g->local = fc_comm_start(r->local, FC_COMM_ALL_GATHER, g->bytes, FC_U8, 1.0, -1);
    return fc_comm_reserve(r->local, &g->local, g->piece_max * r->held_max);
}

static fc_status gather_shared(gather *g)
{
    FC_TRY(open_local(g));
    FC_TRY(receive_pieces(g, 0));
    FC_TRY(send_own(g));
    FC_TRY(share_pieces(g, false));
    return await_own(g);
}

/* ---- small chunks: one rank speaks for its host, see [Note: one speaks for its host] ---- */

/* Of `from`, for another host: up by its first rank, down by its last, so that no line carries both
 * ways at once. Both are rails: who is in another collective there hears of it. */
static int speaker(const rails *r, int from, int to)
{
    return from < to ? r->firsts[from] : r->lasts[from];
}

static bool speaks_to(const rails *r, int host)
{
    return rails_is_other_host(r, host) && speaker(r, r->host, host) == r->rank;
}

/* The place of this host's rank that has what the host has said. */
static int listener(const rails *r, int host)
{
    return rails_is_other_host(r, host) ? r->holders[speaker(r, host, r->host)] : 0;
}

static bool listens_to(const rails *r, int host)
{
    return rails_is_other_host(r, host) && listener(r, host) == r->places[r->rank];
}

/* Where it lies there: hosts one after the other, ranks of a host in their order. */
static size_t said_at(const gather *g, int host)
{
    return (size_t)g->r->begins[host] * g->bytes;
}

static size_t said_bytes(const gather *g, int host)
{
    return (size_t)g->r->sizes[host] * g->bytes;
}

static fc_status listen(const gather *g)
{
    rails *r = g->r;

    for (int h = 0; h < r->n_hosts; h++) {
        if (listens_to(r, h)) {
            FC_TRY(rails_receive(r, g->call, speaker(r, h, r->host),
                                 r->buffers[RAILS_TOGETHER].data + said_at(g, h),
                                 said_bytes(g, h)));
        }
    }
    return FC_OK;
}

static fc_status speak(const gather *g)
{
    rails *r = g->r;
    char *own = r->buffers[RAILS_TOGETHER].data + said_at(g, r->host);

    for (int place = 0; place < r->n_local; place++) {
        rails_copy(own + (size_t)place * g->bytes,
                   place == r->places[r->rank] ? g->send : fc_comm_slot(r->local, place), g->bytes);
    }
    for (int h = 0; h < r->n_hosts; h++) {
        if (speaks_to(r, h)) {
            FC_TRY(rails_send(r, g->call, r->servers[h], own, said_bytes(g, r->host)));
        }
    }
    return FC_OK;
}

static fc_status hear(const gather *g)
{
    rails *r = g->r;

    for (int h = 0; h < r->n_hosts; h++) {
        if (listens_to(r, h)) {
            FC_TRY(rails_await_received(r, g->call, speaker(r, h, r->host), said_bytes(g, h)));
        }
    }
    for (int h = 0; h < r->n_hosts; h++) {
        if (speaks_to(r, h)) {
            FC_TRY(rails_await_sent(r, g->call, r->servers[h], said_bytes(g, r->host)));
        }
    }
    return FC_OK;
}

/* Each rank's chunk in what all hosts have said. */
static void visit_said(gather *g, visit to)
{
    const rails *r = g->r;

    for (int q = 0; q < r->n_ranks; q++) {
        const int host = r->hosts[q];
        const char *said = r->local != NULL ? fc_comm_slot(r->local, listener(r, host))
                                            : r->buffers[RAILS_TOGETHER].data;

        to(g, q, 0, said + said_at(g, host) + (size_t)r->places[q] * g->bytes, g->bytes);
    }
}

static fc_status open_together(gather *g)
{
    rails *r = g->r;
    const size_t all = (size_t)r->n_ranks * g->bytes;

    r->calls[RAILS_AT_ONCE].message_max = (size_t)r->n_local_max * g->bytes;
    FC_TRY(rails_reserve(&r->buffers[RAILS_TOGETHER], all));
    if (r->local == NULL) {
        return FC_OK;
    }
    g->local = fc_comm_start(r->local, FC_COMM_ALL_GATHER, g->bytes, FC_U8, 1.0, -1);
    return fc_comm_reserve(r->local, &g->local, all);
}

/* What this rank has heard, and the first one what this host has said. */
static fc_status show(gather *g)
{
    rails *r = g->r;

    for (int h = 0; h < r->n_hosts; h++) {
        if (listener(r, h) == r->places[r->rank]) {
            rails_copy(fc_comm_next_slot(r->local) + said_at(g, h),
                       r->buffers[RAILS_TOGETHER].data + said_at(g, h), said_bytes(g, h));
        }
    }
    return fc_comm_meet(r->local, &g->local);
}

static fc_status gather_together(gather *g)
{
    rails *r = g->r;

    FC_TRY(open_together(g));
    FC_TRY(listen(g));
    if (r->local != NULL) {
        rails_copy(fc_comm_next_slot(r->local), g->send, g->bytes);
        FC_TRY(fc_comm_meet(r->local, &g->local));
    }
    FC_TRY(speak(g));
    FC_TRY(hear(g));
    if (r->local != NULL) {
        FC_TRY(show(g));
    }
    take_all(g, visit_said);
    return FC_OK;
}

/* ---- at once ---- */

/* Alone on its host: everything goes straight to its place. */
static fc_status gather_alone(const gather *g, char *recv)
{
    FC_TRY(receive_whole(g, recv, true));
    FC_TRY(send_own(g));
    rails_copy(recv + (size_t)g->r->rank * g->bytes, g->send, g->bytes);
    return await_whole(g);
}

typedef struct whole {
    char *recv;
    size_t bytes;
    bool streams; /* past the caches */
} whole;

static fc_status accept(void *context, int rank, const char *data, size_t bytes)
{
    (void)context, (void)rank, (void)data, (void)bytes;
    return FC_OK;
}

static fc_status keep(void *context, int rank, size_t at, const char *data, size_t bytes)
{
    const whole *w = context;
    char *to = w->recv + (size_t)rank * w->bytes + at;

    if (to != data) {
        (w->streams ? fc_kern()->copy_away : fc_kern()->copy)(to, data, bytes);
    }
    return FC_OK;
}

static fc_status begin(gather *g, rails *r, rails_kind kind, const void *send, size_t bytes)
{
    *g =
        (gather){.r = r,
                 .call = &r->calls[kind],
                 .send = send,
                 .bytes = bytes,
                 .piece_max = kind == RAILS_AT_ONCE ? rails_smaller(r->gather_piece, bytes) : bytes,
                 .staging = &r->buffers[kind == RAILS_AT_ONCE ? RAILS_PIECES : RAILS_GATHERED],
                 .taken = FC_OK};
    FC_TRY(rails_check(r));
    return rails_ended(r, rails_begin(r, kind, FC_COMM_ALL_GATHER, bytes, FC_U8, -1));
}

fc_status rails_all_gather(void *context, void *recv, const void *send, size_t send_bytes)
{
    rails *r = context;
    whole all = {recv, send_bytes, send_bytes * (size_t)r->n_ranks >= (size_t)8 << 20};
    const fc_gathered to = {&all, accept, keep};
    gather g;

    FC_TRY(begin(&g, r, RAILS_AT_ONCE, send, send_bytes));
    g.to = &to;
    return ended(&g, rails_is_together(r, send_bytes) ? gather_together(&g)
                     : r->local != NULL               ? gather_shared(&g)
                                                      : gather_alone(&g, recv));
}

/* ---- begun, and ended later ---- */

fc_status rails_gather_arrive(rails *r, const rails_call *call)
{
    const gather g = {.r = r, .call = call, .bytes = call->bytes, .piece_max = call->bytes};

    return await_whole(&g);
}

static fc_status begin_whole(const gather *g)
{
    rails *r = g->r;

    FC_TRY(rails_reserve(g->staging, (size_t)r->n_served * g->bytes));
    FC_TRY(receive_whole(g, g->staging->data, false));
    return send_own(g);
}

fc_status rails_gather_begin(void *context, const void *send, size_t send_bytes)
{
    rails *r = context;
    gather g;

    if (r->calls[RAILS_BEGUN_GATHER].is_open) {
        return FC_AGAIN;
    }
    FC_TRY(begin(&g, r, RAILS_BEGUN_GATHER, send, send_bytes));
    r->calls[RAILS_BEGUN_GATHER].send = send;
    r->calls[RAILS_BEGUN_GATHER].bytes = send_bytes;
    return rails_ended(r, begin_whole(&g));
}

static void visit_whole(gather *g, visit to)
{
    const rails *r = g->r;

    to(g, r->rank, 0, g->send, g->bytes);
    for (int i = 0; i < r->n_served; i++) {
        to(g, r->served[i], 0, g->staging->data + (size_t)i * g->bytes, g->bytes);
    }
}

static fc_status end_whole(gather *g)
{
    rails *r = g->r;

    FC_TRY(rails_arrive(r, &r->calls[RAILS_BEGUN_GATHER]));
    if (r->local != NULL) {
        FC_TRY(open_local(g));
        return share_pieces(g, true);
    }
    take_all(g, visit_whole);
    return FC_OK;
}

fc_status rails_gather_end(void *context, const fc_gathered *to)
{
    rails *r = context;
    rails_call *call = &r->calls[RAILS_BEGUN_GATHER];
    gather g = {.r = r,
                .call = call,
                .send = call->send,
                .bytes = call->bytes,
                .piece_max = call->bytes,
                .staging = &r->buffers[RAILS_GATHERED],
                .to = to};
    fc_status st;

    FC_TRY(rails_check(r));
    st = ended(&g, end_whole(&g));
    call->is_open = false;
    return st;
}

void rails_gather_drop(void *context)
{
    rails *r = context;

    rails_drop(r, &r->calls[RAILS_BEGUN_GATHER]);
}

/* ---- at once, and taken as it comes ---- */

static fc_status gather_taken(gather *g)
{
    if (rails_is_together(g->r, g->bytes)) {
        return gather_together(g);
    }
    if (g->r->local != NULL) {
        return gather_shared(g);
    }
    FC_TRY(begin_whole(g));
    FC_TRY(await_whole(g));
    take_all(g, visit_whole);
    return FC_OK;
}

fc_status rails_gather(void *context, const void *send, size_t send_bytes, const fc_gathered *to)
{
    gather g;

    FC_TRY(begin(&g, context, RAILS_AT_ONCE, send, send_bytes));
    g.to = to;
    return ended(&g, gather_taken(&g));
}
