/* Collectives over rails. What a rank's chunk is cut into is cut alike on all hosts, so that each
 * side knows which messages come; see [Note: rails].
 */
#include "comm/rails_impl.h"

#include <string.h>

/* Up to here all hosts' sums go to all hosts: one message instead of two. */
#define ALL_REDUCE_SMALL_BYTES ((size_t)32 << 10)

/* ---- all_reduce ---- */

/* Each host's sum goes to all ranks of the others. */
static fc_status all_reduce_small(rails *r, char *data, size_t numel, fc_dtype dtype)
{
    const rails_call *call = &r->calls[RAILS_AT_ONCE];
    const size_t bytes = numel * fc_dtype_bytes(dtype);
    char *sums;

    FC_TRY(rails_begin(r, RAILS_AT_ONCE, FC_COMM_ALL_REDUCE, bytes, dtype, -1));
    if (r->local != NULL) {
        FC_TRY(fc_comm_all_reduce(r->local, data, numel, dtype, 1.0));
    }
    FC_TRY(rails_reserve(&r->buffers[RAILS_PIECES], (size_t)r->n_hosts * bytes));
    sums = r->buffers[RAILS_PIECES].data;
    for (int h = 0; h < r->n_hosts; h++) {
        r->sources[h] = sums + (size_t)h * bytes;
        if (rails_is_other_host(r, h)) {
            FC_TRY(rails_receive(r, call, r->servers[h], sums + (size_t)h * bytes, bytes));
        }
    }
    rails_copy(sums + (size_t)r->host * bytes, data, bytes);
    for (int i = 0; i < r->n_served; i++) {
        FC_TRY(rails_send(r, call, r->served[i], r->sources[r->host], bytes));
    }
    for (int h = 0; h < r->n_hosts; h++) {
        if (rails_is_other_host(r, h)) {
            FC_TRY(rails_await_received(r, call, r->servers[h], bytes));
        }
    }
    if (bytes > 0) {
        fc_kern_reduce(dtype, dtype)(data, r->sources, (size_t)r->n_hosts, numel, 1.0, false);
    }
    for (int i = 0; i < r->n_served; i++) {
        FC_TRY(rails_await_sent(r, call, r->served[i], bytes));
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
        FC_TRY(rails_ended(r, rails_reserve(&r->buffers[RAILS_PART], part * item_bytes)));
        FC_TRY(rails_reduce_scatter(r, r->buffers[RAILS_PART].data, data, part, dtype));
        FC_TRY(rails_all_gather(r, data, r->buffers[RAILS_PART].data, part * item_bytes));
    }
    if (part > 0 && whole == numel) {
        return FC_OK;
    }
    return rails_ended(
        r, all_reduce_small(r, (char *)data + whole * item_bytes, numel - whole, dtype));
}

/* ---- others ---- */

static fc_status spread(rails *r, void *data, size_t bytes, int root)
{
    const rails_call *call = &r->calls[RAILS_AT_ONCE];

    FC_TRY(rails_begin(r, RAILS_AT_ONCE, FC_COMM_BROADCAST, bytes, FC_U8, root));
    if (r->rank == root) {
        for (int h = 0; h < r->n_hosts; h++) {
            if (rails_is_other_host(r, h)) {
                FC_TRY(rails_send(r, call, r->servers[h], data, bytes));
            }
        }
    } else if (r->hosts[root] != r->host && r->holders[root] == r->places[r->rank]) {
        FC_TRY(rails_receive(r, call, root, data, bytes));
        FC_TRY(rails_await_received(r, call, root, bytes));
    }
    if (r->local != NULL) {
        FC_TRY(fc_comm_broadcast(r->local, data, bytes, r->holders[root]));
    }
    for (int h = 0; h < r->n_hosts && r->rank == root; h++) {
        if (rails_is_other_host(r, h)) {
            FC_TRY(rails_await_sent(r, call, r->servers[h], bytes));
        }
    }
    return FC_OK;
}

static fc_status broadcast(void *context, void *data, size_t bytes, int root)
{
    rails *r = context;

    FC_TRY(rails_check(r));
    return rails_ended(r, spread(r, data, bytes, root));
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
                                  .all_gather = rails_all_gather,
                                  .reduce_scatter = rails_reduce_scatter,
                                  .all_reduce = all_reduce,
                                  .broadcast = broadcast,
                                  .all_to_all = all_to_all,
                                  .barrier = barrier,
                                  .gather = rails_gather,
                                  .gather_begin = rails_gather_begin,
                                  .gather_end = rails_gather_end,
                                  .gather_drop = rails_gather_drop,
                                  .sum_begin = rails_sum_begin,
                                  .sum_end = rails_sum_end,
                                  .sum_drop = rails_sum_drop,
                                  .open_phase = rails_open_phase,
                                  .fail_phase = rails_fail_phase,
                                  .give_up = rails_give_up};
