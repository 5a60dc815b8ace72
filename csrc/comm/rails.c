/* Rails: who talks to whom, and what a failure of one of them ends; see [Note: rails]. */
#include "comm/rails_impl.h"

#include <stdio.h>
#include <string.h>

/* ---- messages ---- */

/* This host's other ranks hear of it; later calls fail at once. */
static fc_status fail(rails *r, int peer, const char *what, fc_status status)
{
    char text[FC_MESSAGE_BYTES / 2], line[FC_MESSAGE_BYTES];

    (void)snprintf(text, sizeof(text), "%s", fc_last_message());
    (void)snprintf(line, sizeof(line), "rank %d %s rank %d (host %s): %s", r->global_ranks[r->rank],
                   what, r->global_ranks[peer], r->names[r->hosts[peer]], text);
    return rails_break(r, status, line);
}

/* Ranks of other hosts read it as the frame that they wait for next. */
static void tell(rails *r, int peer, const char *text)
{
    rails_frame *frame = &r->farewell;

    frame->header = (rails_header){.op = RAILS_FAILED};
    (void)snprintf(frame->data, sizeof(frame->data), "%.*s", (int)sizeof(frame->data) - 1, text);
    (void)r->ops.send(r->ops.context, peer, 0, frame, sizeof(*frame)); /* it may be gone */
}

fc_status rails_break(rails *r, fc_status status, const char *text)
{
    char copy[FC_MESSAGE_BYTES]; /* `text` may be the last message itself */

    (void)snprintf(copy, sizeof(copy), "%s", text);
    if (!r->is_broken) {
        r->is_broken = true;
        (void)snprintf(r->broken_text, sizeof(r->broken_text), "%s", copy);
        r->ops.drop(r->ops.context);
        for (int h = 0; h < r->n_hosts; h++) {
            if (h != r->host) {
                tell(r, r->servers[h], copy);
            }
        }
        for (int i = 0; i < r->n_served; i++) {
            if (r->servers[r->hosts[r->served[i]]] != r->served[i]) {
                tell(r, r->served[i], copy);
            }
        }
        if (r->local != NULL) {
            return fc_transport_abort(r->local->transport, status, copy);
        }
    }
    return fc_fail(status, "%s", copy);
}

fc_status rails_check(const rails *r)
{
    return r->is_broken
               ? fc_fail(FC_ERR_BROKEN, "the rails cannot be used any more: %s", r->broken_text)
               : FC_OK;
}

/* ---- frames ---- */

void rails_begin(rails *r, fc_comm_op op, size_t bytes, fc_dtype dtype, int root)
{
    r->header = (rails_header){.sequence = r->header.sequence + 1,
                               .bytes = bytes,
                               .op = (uint32_t)op,
                               .dtype = (uint32_t)dtype,
                               .root = root};
    /* Of two that differ, one key is another: in any of these. */
    r->key = 1 + (uint32_t)((bytes * UINT64_C(0x9e3779b97f4a7c15) >> 40) ^ (uint64_t)op << 24);
}

static bool is_inline(const rails *r)
{
    return r->header.bytes <= RAILS_INLINE_BYTES;
}

static fc_status line_to(rails *r, int peer, rails_line **out)
{
    if (r->lines[peer] == NULL) {
        r->lines[peer] = fc_alloc(1, sizeof(rails_line));
    }
    *out = r->lines[peer];
    return *out != NULL ? FC_OK : fc_fail(FC_ERR_NOMEM, "a line to rank %d", peer);
}

static void describe(const rails_header *header, char *out, size_t bytes)
{
    static const char *const names[FC_COMM_OP_COUNT] = {
        "all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "barrier"};

    (void)snprintf(out, bytes, "%s of %llu bytes of %s (call %llu)",
                   header->op < FC_COMM_OP_COUNT ? names[header->op] : "?",
                   (unsigned long long)header->bytes,
                   header->dtype < FC_DTYPE_COUNT ? fc_dtype_name((fc_dtype)header->dtype) : "?",
                   (unsigned long long)header->sequence);
}

static fc_status check_frame(rails *r, int peer, rails_frame *frame)
{
    const rails_header *theirs = &frame->header;
    char here[128], there[128], line[FC_MESSAGE_BYTES + RAILS_FRAME_BYTES];

    if (memcmp(theirs, &r->header, sizeof(*theirs)) == 0) {
        return FC_OK;
    }
    if (theirs->op == RAILS_FAILED) {
        frame->data[sizeof(frame->data) - 1] = '\0';
        (void)snprintf(line, sizeof(line), "rank %d (host %s) failed: %s", r->global_ranks[peer],
                       r->names[r->hosts[peer]], frame->data);
        return rails_break(r, FC_ERR_PEER, line);
    }
    describe(&r->header, here, sizeof(here));
    describe(theirs, there, sizeof(there));
    (void)snprintf(line, sizeof(line),
                   "ranks call different collectives: rank %d %s, rank %d (host %s) %s: all ranks "
                   "call the same units in the same order",
                   r->global_ranks[r->rank], here, r->global_ranks[peer], r->names[r->hosts[peer]],
                   there);
    return rails_break(r, FC_ERR_MISMATCH, line);
}

static fc_status send_now(rails *r, int peer, uint32_t key, const void *data, size_t bytes)
{
    const fc_status st = r->ops.send(r->ops.context, peer, key, data, bytes);

    r->sent.messages++;
    return st == FC_OK ? st : fail(r, peer, "cannot send to", st);
}

fc_status rails_send(rails *r, int peer, const void *data, size_t bytes)
{
    rails_line *line;

    if (bytes == 0) {
        return FC_OK;
    }
    FC_TRY(line_to(r, peer, &line));
    r->sent.bytes += bytes;
    if (line->opened_out != r->header.sequence) {
        line->opened_out = r->header.sequence;
        line->out.header = r->header;
        if (is_inline(r)) {
            memcpy(line->out.data, data, bytes);
        }
        FC_TRY(send_now(r, peer, 0, &line->out, sizeof(line->out)));
    }
    return is_inline(r) ? FC_OK : send_now(r, peer, r->key, data, bytes);
}

static fc_status receive_now(rails *r, int peer, uint32_t key, void *data, size_t bytes)
{
    const fc_status st = r->ops.receive(r->ops.context, peer, key, data, bytes);

    return st == FC_OK ? st : fail(r, peer, "cannot receive from", st);
}

fc_status rails_receive(rails *r, int peer, void *data, size_t bytes)
{
    rails_line *line;

    if (bytes == 0) {
        return FC_OK;
    }
    FC_TRY(line_to(r, peer, &line));
    if (line->opened_in != r->header.sequence) {
        line->opened_in = r->header.sequence;
        line->inline_to = data;
        line->inline_bytes = bytes;
        FC_TRY(receive_now(r, peer, 0, &line->in, sizeof(line->in)));
    }
    return is_inline(r) ? FC_OK : receive_now(r, peer, r->key, data, bytes);
}

static fc_status sent_now(rails *r, int peer)
{
    const fc_status st = r->ops.await_sent(r->ops.context, peer);

    return st == FC_OK ? st : fail(r, peer, "could not send to", st);
}

fc_status rails_await_sent(rails *r, int peer, size_t bytes)
{
    rails_line *line = r->lines[peer];

    if (bytes == 0) {
        return FC_OK;
    }
    if (line->awaited_out != r->header.sequence) {
        line->awaited_out = r->header.sequence;
        FC_TRY(sent_now(r, peer));
    }
    return is_inline(r) ? FC_OK : sent_now(r, peer);
}

static fc_status received_now(rails *r, int peer)
{
    const fc_status st = r->ops.await_received(r->ops.context, peer);

    return st == FC_OK ? st : fail(r, peer, "waited in vain for", st);
}

fc_status rails_await_received(rails *r, int peer, size_t bytes)
{
    rails_line *line = r->lines[peer];

    if (bytes == 0) {
        return FC_OK;
    }
    if (line->awaited_in != r->header.sequence) {
        line->awaited_in = r->header.sequence;
        FC_TRY(received_now(r, peer));
        FC_TRY(check_frame(r, peer, &line->in));
        if (is_inline(r)) {
            memcpy(line->inline_to, line->in.data, line->inline_bytes);
        }
    }
    return is_inline(r) ? FC_OK : received_now(r, peer);
}

fc_status rails_reserve(rails_buffer *buffer, size_t bytes)
{
    char *data;

    if (bytes <= buffer->bytes) {
        return FC_OK;
    }
    data = fc_pages_alloc(FC_FOR_MESSAGES, bytes);
    if (data == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%zu bytes for what travels between hosts", bytes);
    }
    fc_pages_free(FC_FOR_MESSAGES, buffer->data, buffer->bytes);
    *buffer = (rails_buffer){data, bytes};
    return FC_OK;
}

/* ---- who talks to whom ---- */

static int n_ranks_of(const rails *r, int host)
{
    int n = 0;

    for (int q = 0; q < r->n_ranks; q++) {
        n += r->hosts[q] == host;
    }
    return n;
}

/* Ranks of its host that come before it. */
static int place_of(const rails *r, int rank)
{
    int n = 0;

    for (int q = 0; q < rank; q++) {
        n += r->hosts[q] == r->hosts[rank];
    }
    return n;
}

static int rank_at(const rails *r, int host, int place)
{
    for (int q = 0; q < r->n_ranks; q++) {
        if (r->hosts[q] == host && r->places[q] == place) {
            return q;
        }
    }
    return -1;
}

/* The rank of `host` that serves rank `q` of another one; of its own host: itself. */
static int server_of(const rails *r, const int *sizes, int q, int host)
{
    return rank_at(r, host, r->places[q] % sizes[host]);
}

/* What a piece may be for all ranks to cut alike. */
static void choose_pieces(rails *r, const int *sizes)
{
    size_t most = 1, hosts_max = 1;

    for (int h = 0; h < r->n_hosts; h++) {
        size_t n = 1;

        for (int other = 0; other < r->n_hosts; other++) {
            n += other != h ? (size_t)((sizes[other] + sizes[h] - 1) / sizes[h]) : 0;
        }
        most = n > most ? n : most;
        hosts_max = (size_t)sizes[h] > hosts_max ? (size_t)sizes[h] : hosts_max;
    }
    r->held_max = most;
    r->gather_piece = RAILS_PIECE_BYTES;
    r->reduce_piece = RAILS_PIECE_BYTES;
    if (hosts_max == 1) {
        r->gather_piece = SIZE_MAX; /* goes straight to its place */
        return;
    }
    while (r->gather_piece * most > FC_COMM_SLOT_MAX) {
        r->gather_piece /= 2;
    }
    while (r->reduce_piece * (size_t)r->n_ranks > RAILS_STAGED_BYTES &&
           r->reduce_piece > RAILS_PIECE_MIN) {
        r->reduce_piece /= 2;
    }
}

static void pair_up(rails *r, const int *sizes)
{
    for (int h = 0; h < r->n_hosts; h++) {
        r->servers[h] = server_of(r, sizes, r->rank, h);
    }
    for (int q = 0; q < r->n_ranks; q++) {
        r->holders[q] = r->places[server_of(r, sizes, q, r->host)];
        if (r->hosts[q] != r->host && r->holders[q] == r->places[r->rank]) {
            r->served[r->n_served++] = q;
        }
    }
    choose_pieces(r, sizes);
}

static fc_status learn_hosts(rails *r, const fc_rails_config *config)
{
    int *sizes;

    for (int q = 0; q < r->n_ranks; q++) {
        r->hosts[q] = config->hosts[q];
        r->global_ranks[q] = config->global_ranks[q];
        if (r->hosts[q] < 0 || r->hosts[q] > r->n_hosts) {
            return fc_fail(FC_ERR_INVALID,
                           "rank %d lives on host %d: hosts are numbered in the "
                           "order of their first ranks",
                           q, r->hosts[q]);
        }
        r->places[q] = place_of(r, q);
        r->n_hosts += r->hosts[q] == r->n_hosts;
    }
    r->host = r->hosts[r->rank];
    sizes = fc_alloc((size_t)r->n_hosts, sizeof(*sizes));
    if (sizes == NULL) {
        return fc_fail(FC_ERR_NOMEM, "rails of %d ranks", r->n_ranks);
    }
    for (int h = 0; h < r->n_hosts; h++) {
        sizes[h] = n_ranks_of(r, h);
        (void)snprintf(r->names[h], sizeof(r->names[h]), "%s", config->names[h]);
    }
    r->n_local = sizes[r->host];
    pair_up(r, sizes);
    fc_free(sizes);
    return FC_OK;
}

/* ---- lifetime ---- */

static void destroy(rails *r)
{
    fc_comm_destroy(r->local);
    rails_free_buffers(r);
    fc_free(r->names);
    fc_free(r->numbers);
    fc_free((void *)r->sources);
    for (int q = 0; r->lines != NULL && q < r->n_ranks; q++) {
        fc_free(r->lines[q]);
    }
    fc_free((void *)r->lines);
    fc_free(r);
}

static void release(void *context)
{
    rails *r = context;
    const fc_rail_ops ops = r->ops;
    const fc_message_ops group = r->group;

    destroy(r);
    ops.release(ops.context);
    group.release(group.context);
}

void rails_free_buffers(rails *r)
{
    for (int i = 0; i < RAILS_N_BUFFERS; i++) {
        fc_pages_free(FC_FOR_MESSAGES, r->buffers[i].data, r->buffers[i].bytes);
        r->buffers[i] = (rails_buffer){0};
    }
}

static fc_status make(const fc_rails_config *config, rails **out)
{
    const size_t n = (size_t)config->n_ranks;
    rails *r = fc_alloc(1, sizeof(*r));

    *out = r;
    if (r == NULL) {
        return fc_fail(FC_ERR_NOMEM, "rails");
    }
    r->numbers = fc_alloc(6 * n, sizeof(*r->numbers));
    r->names = fc_alloc(n, sizeof(*r->names));
    r->sources = (const void **)fc_alloc(n, sizeof(*r->sources));
    r->lines = (rails_line **)fc_alloc(n, sizeof(*r->lines));
    r->n_ranks = config->n_ranks;
    if (r->numbers == NULL || r->names == NULL || r->sources == NULL || r->lines == NULL) {
        return fc_fail(FC_ERR_NOMEM, "rails of %zu ranks", n);
    }
    r->hosts = r->numbers;
    r->places = r->hosts + n;
    r->global_ranks = r->places + n;
    r->holders = r->global_ranks + n;
    r->served = r->holders + n;
    r->servers = r->served + n;
    r->rank = config->rank;
    r->ops = config->rails;
    r->group = config->group;
    FC_TRY(learn_hosts(r, config));
    if ((r->n_local > 1) != (config->local != NULL)) {
        return fc_fail(FC_ERR_INVALID, "rails: %d ranks on this host %s shared memory", r->n_local,
                       config->local != NULL ? "with" : "without");
    }
    return FC_OK;
}

fc_status fc_rails_create(const fc_rails_config *config, fc_message_ops *out)
{
    rails *r;
    fc_status st = make(config, &r);

    if (config->local != NULL) {
        st = st == FC_OK ? fc_comm_create(config->local, &r->local)
                         : fc_transport_refuse_region(config->local, "communicator", st);
    }
    if (st != FC_OK) {
        if (r != NULL) {
            destroy(r);
        }
        config->rails.release(config->rails.context);
        config->group.release(config->group.context);
        return st;
    }
    *out = rails_ops;
    out->context = r;
    out->release = release;
    return FC_OK;
}

fc_rails_sent fc_rails_count(const fc_message_ops *ops)
{
    return ((const rails *)ops->context)->sent;
}
