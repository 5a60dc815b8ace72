/* Rails: who talks to whom, and what a failure of one of them ends; see [Note: rails]. */
#include "comm/rails_impl.h"

#include "base/clock.h"
#include "window/window.h"

#include <stdio.h>
#include <string.h>

/* ---- messages ---- */

static bool is_interrupted(const rails *r)
{
    return atomic_load_explicit(&r->interrupted, memory_order_acquire) == RAILS_INTERRUPTED;
}

/* This host's other ranks hear of it; later calls fail at once. */
static fc_status fail(rails *r, int peer, const char *what, fc_status status)
{
    char text[FC_MESSAGE_BYTES / 2], line[FC_MESSAGE_BYTES];

    (void)snprintf(text, sizeof(text), "%s",
                   is_interrupted(r) ? r->why_interrupted : fc_last_message());
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
        rails_tell_broken(r);
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

fc_status rails_check(rails *r)
{
    if (!r->is_broken && is_interrupted(r)) {
        return rails_break(r, FC_ERR_PEER, r->why_interrupted);
    }
    return r->is_broken
               ? fc_fail(FC_ERR_BROKEN, "the rails cannot be used any more: %s", r->broken_text)
               : FC_OK;
}

/* ---- what other threads may know and do ---- */

rails *rails_in(const fc_message_ops *ops)
{
    return ops != NULL && ops->kind == rails_ops.kind ? ops->context : NULL;
}

bool fc_rails_waits(const fc_message_ops *ops, fc_rails_wait *out)
{
    const rails *r = rails_in(ops);

    if (r == NULL) {
        return false;
    }
    out->since_ns = atomic_load_explicit(&r->awaited_since, memory_order_acquire);
    out->rank = atomic_load_explicit(&r->awaited, memory_order_acquire);
    return out->since_ns != 0 &&
           atomic_load_explicit(&r->awaited_since, memory_order_relaxed) == out->since_ns;
}

void fc_rails_interrupt(const fc_message_ops *ops, const char *text)
{
    rails *r = rails_in(ops);
    int expected = RAILS_UNDISTURBED;

    if (r != NULL &&
        atomic_compare_exchange_strong(&r->interrupted, &expected, RAILS_INTERRUPTING)) {
        (void)snprintf(r->why_interrupted, sizeof(r->why_interrupted), "%s", text);
        atomic_store_explicit(&r->interrupted, RAILS_INTERRUPTED, memory_order_release);
        r->ops.interrupt(r->ops.context);
    }
}

void fc_rails_tell(const fc_message_ops *ops, int rank, const char *text)
{
    fc_rails_wait wait;

    if (fc_rails_waits(ops, &wait) && wait.rank == rank) {
        fc_window_tell_of((uint64_t)wait.since_ns, text);
    }
}

static const char *const op_names[FC_COMM_OP_COUNT] = {"all_gather", "reduce_scatter", "all_reduce",
                                                       "broadcast",  "all_to_all",     "barrier"};

/* Who looks at this process from outside sees the rank and its host; the unit, if the collective is
 * one's, has been told. */
static fc_window_waiting shown(const rails *r, const rails_call *call, int peer,
                               fc_window_waiting around, int64_t since_ns)
{
    const bool is_unit = around.since_ns != 0;

    return (fc_window_waiting){
        .since_ns = (uint64_t)since_ns,
        .rank = (uint64_t)r->global_ranks[peer],
        .op = is_unit ? around.op : fc_window_name(op_names[call->header.op]),
        .unit = is_unit ? around.unit : 0,
        .host = fc_window_name(r->names[r->hosts[peer]]),
        .step = is_unit ? around.step : 0,
    };
}

static fc_status await_peer(rails *r, const rails_call *call, int peer,
                            fc_status (*await)(void *context, int rank))
{
    const int64_t since_ns = fc_now_ns();
    const fc_window_waiting around = fc_window_waits();
    const fc_window_waiting what = shown(r, call, peer, around, since_ns);
    fc_status st;

    (void)fc_window_wait_for(what);
    atomic_store_explicit(&r->awaited, peer, memory_order_relaxed);
    atomic_store_explicit(&r->awaited_in, call->header.sequence, memory_order_relaxed);
    atomic_store_explicit(&r->awaited_since, since_ns, memory_order_release);
    st = await(r->ops.context, peer);
    atomic_store_explicit(&r->awaited_since, 0, memory_order_release);
    (void)fc_window_wait_for(around);
    if (fc_window_traces()) {
        fc_window_waited(what, fc_now_ns());
    }
    return st;
}

/* ---- frames ---- */

fc_status rails_begin(rails *r, rails_kind kind, fc_comm_op op, size_t bytes, fc_dtype dtype,
                      int root)
{
    rails_call *call = &r->calls[kind];

    *call = (rails_call){
        .header = {.sequence = ++r->sequence,
                   .bytes = bytes,
                   .op = (uint32_t)op,
                   .dtype = (uint32_t)dtype,
                   .root = root,
                   .failed = (uint32_t)r->failed},
        .message_max = bytes,
        /* Of two that differ, one key is another: in any of these. */
        .key = 1 + (uint32_t)((bytes * UINT64_C(0x9e3779b97f4a7c15) >> 40) ^ (uint64_t)op << 24),
        .kind = kind,
        .is_open = kind != RAILS_AT_ONCE,
        .dtype = dtype};
    return kind == RAILS_AT_ONCE ? rails_settle(r, call) : FC_OK;
}

bool rails_is_together(const rails *r, size_t bytes)
{
    return r->n_local_max > 1 && bytes <= RAILS_TOGETHER_BYTES / (size_t)r->n_local_max &&
           bytes <= FC_COMM_SLOT_MAX / (size_t)r->n_ranks;
}

/* One that was begun before, and is on its way. */
static rails_call *oldest_before(rails *r, const rails_call *than)
{
    rails_call *oldest = NULL;

    for (int k = RAILS_AT_ONCE + 1; k < RAILS_N_KINDS; k++) {
        rails_call *call = &r->calls[k];

        if (call->is_open && !call->has_arrived && call->header.sequence < than->header.sequence &&
            (oldest == NULL || call->header.sequence < oldest->header.sequence)) {
            oldest = call;
        }
    }
    return oldest;
}

fc_status rails_settle(rails *r, const rails_call *call)
{
    rails_call *older;

    while ((older = oldest_before(r, call)) != NULL) {
        FC_TRY(older->kind == RAILS_BEGUN_GATHER ? rails_gather_arrive(r, older)
                                                 : rails_sum_arrive(r, older));
        older->has_arrived = true;
    }
    return FC_OK;
}

fc_status rails_arrive(rails *r, rails_call *call)
{
    FC_TRY(rails_settle(r, call));
    if (!call->has_arrived) {
        FC_TRY(call->kind == RAILS_BEGUN_GATHER ? rails_gather_arrive(r, call)
                                                : rails_sum_arrive(r, call));
        call->has_arrived = true;
    }
    return FC_OK;
}

/* Its messages are on their way, whether somebody wants them or not; a failure is told later. */
void rails_drop(rails *r, rails_call *call)
{
    if (call->is_open && rails_check(r) == FC_OK) {
        (void)rails_ended(r, rails_arrive(r, call));
    }
    call->is_open = false;
}

fc_status rails_ended(rails *r, fc_status st)
{
    return st == FC_OK || r->is_broken ? st : rails_break(r, st, fc_last_message());
}

static bool is_inline(const rails_call *call)
{
    return call->message_max <= RAILS_INLINE_BYTES;
}

static rails_line **place_of(rails *r, const rails_call *call, int peer)
{
    return &r->lines[(size_t)call->kind * (size_t)r->n_ranks + (size_t)peer];
}

static fc_status line_to(rails *r, const rails_call *call, int peer, rails_line **out)
{
    rails_line **place = place_of(r, call, peer);

    if (*place == NULL) {
        *place = fc_alloc(1, sizeof(rails_line));
    }
    *out = *place;
    return *out != NULL ? FC_OK : fc_fail(FC_ERR_NOMEM, "a line to rank %d", peer);
}

static void describe(const rails_header *header, char *out, size_t bytes)
{
    (void)snprintf(out, bytes, "%s of %llu bytes of %s (call %llu)",
                   header->op < FC_COMM_OP_COUNT ? op_names[header->op] : "?",
                   (unsigned long long)header->bytes,
                   header->dtype < FC_DTYPE_COUNT ? fc_dtype_name((fc_dtype)header->dtype) : "?",
                   (unsigned long long)header->sequence);
}

static fc_status check_frame(rails *r, const rails_call *call, int peer, rails_frame *frame)
{
    const rails_header *theirs = &frame->header;
    char here[128], there[128], line[FC_MESSAGE_BYTES + RAILS_FRAME_BYTES];

    if (memcmp(theirs, &call->header, offsetof(rails_header, failed)) == 0) {
        return FC_OK;
    }
    if (theirs->op == RAILS_FAILED) {
        frame->data[sizeof(frame->data) - 1] = '\0';
        (void)snprintf(line, sizeof(line), "rank %d (host %s) failed: %s", r->global_ranks[peer],
                       r->names[r->hosts[peer]], frame->data);
        return rails_break(r, FC_ERR_PEER, line);
    }
    if (rails_has_left(r, theirs)) {
        rails_tell_left(r, peer, line, sizeof(line));
        return rails_break(r, FC_ERR_PEER, line);
    }
    describe(&call->header, here, sizeof(here));
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

    r->sent[r->hosts[peer]].messages++;
    return st == FC_OK ? st : fail(r, peer, "cannot send to", st);
}

fc_status rails_send(rails *r, const rails_call *call, int peer, const void *data, size_t bytes)
{
    rails_line *line;

    if (bytes == 0) {
        return FC_OK;
    }
    FC_TRY(line_to(r, call, peer, &line));
    r->sent[r->hosts[peer]].bytes += bytes;
    if (line->opened_out != call->header.sequence) {
        line->opened_out = call->header.sequence;
        line->out.header = call->header;
        if (is_inline(call)) {
            memcpy(line->out.data, data, bytes);
        }
        FC_TRY(send_now(r, peer, 0, &line->out, sizeof(line->out)));
    }
    return is_inline(call) ? FC_OK : send_now(r, peer, call->key, data, bytes);
}

static fc_status receive_now(rails *r, int peer, uint32_t key, void *data, size_t bytes)
{
    const fc_status st = r->ops.receive(r->ops.context, peer, key, data, bytes);

    return st == FC_OK ? st : fail(r, peer, "cannot receive from", st);
}

fc_status rails_receive(rails *r, const rails_call *call, int peer, void *data, size_t bytes)
{
    rails_line *line;

    if (bytes == 0) {
        return FC_OK;
    }
    FC_TRY(line_to(r, call, peer, &line));
    if (line->opened_in != call->header.sequence) {
        line->opened_in = call->header.sequence;
        line->inline_to = data;
        line->inline_bytes = bytes;
        FC_TRY(receive_now(r, peer, 0, &line->in, sizeof(line->in)));
    }
    return is_inline(call) ? FC_OK : receive_now(r, peer, call->key, data, bytes);
}

static fc_status sent_now(rails *r, const rails_call *call, int peer)
{
    const fc_status st = await_peer(r, call, peer, r->ops.await_sent);

    return st == FC_OK ? st : fail(r, peer, "could not send to", st);
}

fc_status rails_await_sent(rails *r, const rails_call *call, int peer, size_t bytes)
{
    rails_line *line = *place_of(r, call, peer);

    if (bytes == 0) {
        return FC_OK;
    }
    if (line->awaited_out != call->header.sequence) {
        line->awaited_out = call->header.sequence;
        FC_TRY(sent_now(r, call, peer));
    }
    return is_inline(call) ? FC_OK : sent_now(r, call, peer);
}

static fc_status received_now(rails *r, const rails_call *call, int peer)
{
    const fc_status st = await_peer(r, call, peer, r->ops.await_received);

    return st == FC_OK ? st : fail(r, peer, "waited in vain for", st);
}

fc_status rails_await_received(rails *r, const rails_call *call, int peer, size_t bytes)
{
    rails_line *line = *place_of(r, call, peer);

    if (bytes == 0) {
        return FC_OK;
    }
    if (line->awaited_in != call->header.sequence) {
        line->awaited_in = call->header.sequence;
        FC_TRY(received_now(r, call, peer));
        FC_TRY(check_frame(r, call, peer, &line->in));
        if (is_inline(call)) {
            memcpy(line->inline_to, line->in.data, line->inline_bytes);
        }
    }
    return is_inline(call) ? FC_OK : received_now(r, call, peer);
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

/* The ranks of each host, in order, one host after the other. */
typedef struct roster {
    int *sizes, *begins; /* of hosts */
    int *ranks;
} roster;

/* The rank of `host` that serves rank `q` of another one; of its own host: itself. */
static int server_of(const rails *r, const roster *all, int q, int host)
{
    return all->ranks[all->begins[host] + r->places[q] % all->sizes[host]];
}

/* What a piece may be for all ranks to cut alike. */
static void choose_pieces(rails *r, const int *sizes)
{
    int smallest = sizes[0], largest = sizes[0];
    size_t most = 0; /* on a host of the smallest: as many of each other one, and its own */

    for (int h = 0; h < r->n_hosts; h++) {
        smallest = sizes[h] < smallest ? sizes[h] : smallest;
        largest = sizes[h] > largest ? sizes[h] : largest;
    }
    for (int h = 0; h < r->n_hosts; h++) {
        most += (size_t)((sizes[h] + smallest - 1) / smallest);
    }
    r->n_local_max = largest;
    r->held_max = most;
    r->gather_piece = RAILS_PIECE_BYTES;
    r->reduce_piece = RAILS_PIECE_BYTES;
    if (largest == 1) {
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

static void pair_up(rails *r, const roster *all)
{
    for (int h = 0; h < r->n_hosts; h++) {
        r->servers[h] = server_of(r, all, r->rank, h);
        r->firsts[h] = all->ranks[all->begins[h]];
        r->lasts[h] = all->ranks[all->begins[h] + all->sizes[h] - 1];
        r->sizes[h] = all->sizes[h];
        r->begins[h] = all->begins[h];
    }
    for (int q = 0; q < r->n_ranks; q++) {
        r->holders[q] = r->places[server_of(r, all, q, r->host)];
        if (r->hosts[q] != r->host && r->holders[q] == r->places[r->rank]) {
            r->served[r->n_served++] = q;
        }
    }
    choose_pieces(r, all->sizes);
}

/* `all` has room for as many hosts as ranks, and is zero. */
static fc_status count_hosts(rails *r, const fc_rails_config *config, const roster *all)
{
    for (int q = 0; q < r->n_ranks; q++) {
        const int host = config->hosts[q];

        r->hosts[q] = host;
        r->global_ranks[q] = config->global_ranks[q];
        if (host < 0 || host > r->n_hosts) {
            return fc_fail(FC_ERR_INVALID,
                           "rank %d lives on host %d: hosts are numbered in the "
                           "order of their first ranks",
                           q, host);
        }
        r->n_hosts += host == r->n_hosts;
        r->places[q] = all->sizes[host]++;
    }
    for (int h = 1; h < r->n_hosts; h++) {
        all->begins[h] = all->begins[h - 1] + all->sizes[h - 1];
    }
    for (int q = 0; q < r->n_ranks; q++) {
        all->ranks[all->begins[r->hosts[q]] + r->places[q]] = q;
    }
    return FC_OK;
}

static fc_status learn_hosts(rails *r, const fc_rails_config *config)
{
    const size_t n = (size_t)r->n_ranks;
    int *room = fc_alloc(3 * n, sizeof(*room));
    const roster all = {room, room + n, room + 2 * n};
    fc_status st;

    if (room == NULL) {
        return fc_fail(FC_ERR_NOMEM, "rails of %d ranks", r->n_ranks);
    }
    st = count_hosts(r, config, &all);
    if (st == FC_OK) {
        r->host = r->hosts[r->rank];
        r->n_local = all.sizes[r->host];
        for (int h = 0; h < r->n_hosts; h++) {
            (void)snprintf(r->names[h], sizeof(r->names[h]), "%s", config->names[h]);
        }
        pair_up(r, &all);
    }
    fc_free(room);
    return st;
}

/* ---- lifetime ---- */

static void destroy(rails *r)
{
    fc_comm_destroy(r->local);
    rails_free_buffers(r);
    fc_free(r->names);
    fc_free(r->numbers);
    fc_free((void *)r->sources);
    for (int i = 0; r->lines != NULL && i < r->n_ranks * RAILS_N_KINDS; i++) {
        fc_free(r->lines[i]);
    }
    fc_free((void *)r->lines);
    fc_free(r->sent);
    fc_free(r);
}

static void release(void *context)
{
    rails *r = context;
    const fc_rail_ops ops = r->ops;
    const fc_message_ops group = r->group;

    ops.drop(ops.context); /* messages still use the memory: of what was begun, and why it failed */
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
    r->numbers = fc_alloc(10 * n, sizeof(*r->numbers));
    r->names = fc_alloc(n, sizeof(*r->names));
    r->sources = (const void **)fc_alloc(n, sizeof(*r->sources));
    r->lines = (rails_line **)fc_alloc(n * RAILS_N_KINDS, sizeof(*r->lines));
    r->sent = fc_alloc(n, sizeof(*r->sent));
    r->n_ranks = config->n_ranks;
    if (r->numbers == NULL || r->names == NULL || r->sources == NULL || r->lines == NULL ||
        r->sent == NULL) {
        return fc_fail(FC_ERR_NOMEM, "rails of %zu ranks", n);
    }
    r->hosts = r->numbers;
    r->places = r->hosts + n;
    r->global_ranks = r->places + n;
    r->holders = r->global_ranks + n;
    r->served = r->holders + n;
    r->servers = r->served + n;
    r->firsts = r->servers + n;
    r->lasts = r->firsts + n;
    r->sizes = r->lasts + n;
    r->begins = r->sizes + n;
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
    rails_enter_phase(r, 1);
    *out = rails_ops;
    out->context = r;
    out->release = release;
    return FC_OK;
}

int fc_rails_n_hosts(const fc_message_ops *ops)
{
    const rails *r = rails_in(ops);

    return r != NULL ? r->n_hosts : 0;
}

fc_rails_sent fc_rails_count(const fc_message_ops *ops, int host)
{
    return ((const rails *)ops->context)->sent[host];
}
