/* Counters of waits, and the waits themselves. */
#include "engine/waits.h"

#include "base/clock.h"
#include "engine/domain_private.h"
#include "engine/present.h"
#include "window/window.h"

#include <stdio.h>
#include <string.h>

static fc_waits *entry_of(fc_domain *domain, size_t unit, fc_wait_kind kind)
{
    return &domain->waits[unit * FC_WAIT_KIND_COUNT + kind];
}

static size_t row_of(const fc_domain *domain, const fc_unit *unit)
{
    return unit != NULL ? unit->index : domain->n_units;
}

static void count(fc_domain *domain, size_t unit, fc_wait_kind kind, int peer, uint64_t n,
                  uint64_t ns)
{
    fc_waits *w = entry_of(domain, unit, kind);

    w->n += n;
    w->ns += ns;
    if (ns > w->longest_ns) {
        w->longest_ns = ns;
        w->longest_peer = peer;
    }
    if (peer >= 0) {
        domain->wait_ns[peer] += ns;
    }
}

fc_status waits_init(fc_domain *domain)
{
    domain->waits = fc_alloc((domain->n_units + 1) * FC_WAIT_KIND_COUNT, sizeof(fc_waits));
    domain->wait_ns = fc_alloc((size_t)domain->n_ranks, sizeof(uint64_t));
    if (domain->waits == NULL || domain->wait_ns == NULL) {
        return fc_fail(FC_ERR_NOMEM, "domain of %zu units", domain->n_units);
    }
    fc_waits_reset(domain);
    return FC_OK;
}

fc_status waits_await(fc_domain *domain, const fc_unit *unit, fc_wait_kind kind, int peer,
                      fc_ready_fn ready, void *arg, const fc_wait_info *info)
{
    uint64_t n_before, ns_before, n, ns;
    fc_status st;

    fc_transport_wait_stats(domain->watch, &n_before, &ns_before);
    st = fc_transport_wait(domain->watch, peer, ready, arg, info);
    fc_transport_wait_stats(domain->watch, &n, &ns);
    if (n != n_before) {
        count(domain, row_of(domain, unit), kind, peer, n - n_before, ns - ns_before);
    }
    return st;
}

fc_waits fc_waits_of(const fc_domain *domain, const fc_unit *unit, fc_wait_kind kind)
{
    return domain->waits[row_of(domain, unit) * FC_WAIT_KIND_COUNT + kind];
}

uint64_t fc_waits_for(const fc_domain *domain, int peer)
{
    return domain->wait_ns[peer];
}

uint64_t fc_waits_phases(const fc_domain *domain, bool is_backward)
{
    return domain->phases[is_backward];
}

void fc_waits_reset(fc_domain *domain)
{
    for (size_t i = 0; i < (domain->n_units + 1) * FC_WAIT_KIND_COUNT; i++) {
        domain->waits[i] = (fc_waits){.longest_peer = -1};
    }
    memset(domain->wait_ns, 0, (size_t)domain->n_ranks * sizeof(uint64_t));
    memset(domain->phases, 0, sizeof(domain->phases));
}

/* ---- messages ---- */

/* Who looks from outside sees a collective as a wait for all ranks. */
static fc_window_waiting shown(const fc_unit *unit, const char *op, int64_t start_ns)
{
    return (fc_window_waiting){.since_ns = (uint64_t)start_ns,
                               .rank = FC_WINDOW_ALL,
                               .op = fc_window_name(op),
                               .unit = unit->shown_as,
                               .step = unit->domain->clock >> STEP_SHIFT};
}

/* Its status, with the unit if it failed. */
static fc_status named(const fc_unit *unit, size_t n_units, fc_wait_kind kind, fc_status st)
{
    const char *what = kind == FC_WAIT_REDUCE ? "reduction" : "all-gather";

    if (st == FC_ERR_PEER || st == FC_ERR_TIMEOUT || st == FC_ERR_MISMATCH) {
        char text[FC_MESSAGE_BYTES];

        (void)snprintf(text, sizeof(text), "%s", fc_last_message());
        return fc_fail(st, "%s of FSDP unit '%s': %s", what, unit->name, text);
    }
    if (st == FC_ERR_GROUP) {
        char others[48] = "";

        if (n_units > 1) {
            (void)snprintf(others, sizeof(others), ", with %zu after it,", n_units - 1);
        }
        return fc_fail(
            st,
            "%s of FSDP unit '%s'%s failed on rank %d of %d. A rank may have skipped the "
            "unit or have ended: over a process group all ranks call the same units in "
            "the same order (set_reduce_scatter_unused_params(True) where they use "
            "different parameters of one). The group says",
            what, unit->name, others, unit->domain->rank, unit->domain->n_ranks);
    }
    return st;
}

/* Counts a collective of `n_units` from this one on that began at `start_ns`. */
static fc_status counted(fc_unit *unit, size_t n_units, fc_wait_kind kind, int64_t start_ns,
                         fc_status st)
{
    const int64_t end_ns = fc_now_ns();

    (void)fc_window_wait_for((fc_window_waiting){.since_ns = 0});
    if (fc_window_traces()) {
        fc_window_waited(shown(unit, kind == FC_WAIT_REDUCE ? "reduction" : "all-gather", start_ns),
                         end_ns);
    }
    count(unit->domain, unit->index, kind, -1, 1, (uint64_t)(end_ns - start_ns));
    return named(unit, n_units, kind, st);
}

/* Ranks meet, and the transport learns whose collective comes. */
static fc_status make_ready(fc_unit *unit, size_t n_units, const char *op, uint64_t detail,
                            const fc_message_ops *messages)
{
    FC_TRY(meet(unit, n_units, op, detail));
    return messages->begin != NULL ? messages->begin(messages->context, unit->index) : FC_OK;
}

static fc_status begin(fc_unit *unit, size_t n_units, const char *op, uint64_t detail,
                       const fc_message_ops **messages_out, int64_t *start_ns_out)
{
    const fc_message_ops *messages = fc_transport_messages(unit->domain->transport);
    fc_status st;

    (void)fc_window_wait_for(shown(unit, op, fc_now_ns())); /* to meet is to wait, too */
    st = make_ready(unit, n_units, op, detail, messages);
    if (st != FC_OK) {
        (void)fc_window_wait_for((fc_window_waiting){.since_ns = 0});
        return st;
    }
    *messages_out = messages;
    *start_ns_out = fc_now_ns();
    return FC_OK;
}

bool waits_takes_gathers(const fc_domain *domain)
{
    return fc_transport_messages(domain->transport)->gather != NULL;
}

static fc_status gather(const fc_message_ops *messages, int n_ranks, char *recv, const void *send,
                        size_t send_bytes, const fc_gathered *to)
{
    if (messages->gather != NULL) {
        return messages->gather(messages->context, send, send_bytes, to);
    }
    FC_TRY(messages->all_gather(messages->context, recv, send, send_bytes));
    for (int r = 0; r < n_ranks; r++) {
        FC_TRY(to->look(to->context, r, recv + (size_t)r * send_bytes, send_bytes));
    }
    for (int r = 0; r < n_ranks; r++) {
        FC_TRY(to->take(to->context, r, 0, recv + (size_t)r * send_bytes, send_bytes));
    }
    return FC_OK;
}

fc_status waits_gather(fc_unit *unit, size_t n_units, char *recv, const void *send,
                       size_t send_bytes, const fc_gathered *to)
{
    const fc_message_ops *messages;
    int64_t start_ns;

    FC_TRY(begin(unit, n_units, "all-gather", 0, &messages, &start_ns));
    return counted(unit, n_units, waits_gather_kind(unit->domain), start_ns,
                   gather(messages, unit->domain->n_ranks, recv, send, send_bytes, to));
}

/* ---- begun, and ended later: only what is waited for then counts ---- */

static fc_status begun(const fc_unit *unit, fc_wait_kind kind, fc_status st)
{
    (void)fc_window_wait_for((fc_window_waiting){.since_ns = 0});
    return st == FC_AGAIN ? st : named(unit, 1, kind, st);
}

static int64_t begin_end(const fc_unit *unit, const char *op)
{
    const int64_t start_ns = fc_now_ns();

    (void)fc_window_wait_for(shown(unit, op, start_ns));
    return start_ns;
}

fc_status waits_gather_begin(fc_unit *unit, const void *send, size_t send_bytes)
{
    const fc_message_ops *messages;
    int64_t start_ns;

    FC_TRY(begin(unit, 1, "all-gather", 0, &messages, &start_ns));
    return begun(unit, waits_gather_kind(unit->domain),
                 messages->gather_begin(messages->context, send, send_bytes));
}

fc_status waits_gather_end(fc_unit *unit, const fc_gathered *to)
{
    const fc_message_ops *messages = fc_transport_messages(unit->domain->transport);
    const int64_t start_ns = begin_end(unit, "all-gather");

    return counted(unit, 1, waits_gather_kind(unit->domain), start_ns,
                   messages->gather_end(messages->context, to));
}

fc_status waits_sum_begin(fc_unit *unit, void *send, size_t recv_numel, fc_dtype dtype,
                          bool *is_lent_out)
{
    const fc_message_ops *messages;
    int64_t start_ns;

    FC_TRY(begin(unit, 1, "reduce-scatter", 0, &messages, &start_ns));
    return begun(unit, FC_WAIT_REDUCE,
                 messages->sum_begin(messages->context, send, recv_numel, dtype, is_lent_out));
}

fc_status waits_sum_end(fc_unit *unit, void *recv)
{
    const fc_message_ops *messages = fc_transport_messages(unit->domain->transport);
    const int64_t start_ns = begin_end(unit, "reduce-scatter");

    return counted(unit, 1, FC_WAIT_REDUCE, start_ns, messages->sum_end(messages->context, recv));
}

/* ---- at once ---- */

fc_status waits_reduce_scatter(fc_unit *unit, size_t n_units, void *recv, void *send,
                               size_t recv_numel, fc_dtype dtype, uint64_t detail)
{
    const fc_message_ops *messages;
    int64_t start_ns;

    FC_TRY(begin(unit, n_units, "reduce-scatter", detail, &messages, &start_ns));
    return counted(unit, n_units, FC_WAIT_REDUCE, start_ns,
                   messages->reduce_scatter(messages->context, recv, send, recv_numel, dtype));
}

static fc_status all_reduce(fc_unit *unit, void *data, size_t numel, fc_dtype dtype,
                            uint64_t detail)
{
    const fc_message_ops *messages;
    int64_t start_ns;

    FC_TRY(begin(unit, 1, "all-reduce", detail, &messages, &start_ns));
    return counted(unit, 1, FC_WAIT_REDUCE, start_ns,
                   messages->all_reduce(messages->context, data, numel, dtype));
}

static fc_status reduce_scatter_sections(fc_unit *unit, const fc_section *sections, size_t n,
                                         char *part, char *parts, const fc_present *present)
{
    const size_t n_ranks = (size_t)unit->layout.n_ranks;

    for (size_t i = 0; i < n; i++) {
        const fc_section *s = &sections[i];
        char *rows = parts + n_ranks * s->at;
        const size_t bytes = present_pack(present, s, rows, n_ranks);

        FC_TRY(waits_reduce_scatter(unit, 1, part + s->at, rows, bytes / fc_dtype_bytes(s->reduce),
                                    s->reduce, present->print));
        present_unpack(present, s, part + s->at);
    }
    return FC_OK;
}

fc_status fc_waits_reduce_scatter(fc_unit *unit, void *part, void *parts, const fc_present *present)
{
    const fc_layout *l = &unit->layout;

    FC_TRY(reduce_scatter_sections(unit, l->sections, l->n_sections, part, parts, present));
    return reduce_scatter_sections(unit, l->frozen, present->frozen ? l->n_frozen : 0, part, parts,
                                   present);
}

static fc_status all_reduce_sections(fc_unit *unit, const fc_section *sections, size_t n,
                                     char *part, const fc_present *present)
{
    const bool is_needed = unit->domain->n_ranks > 1 || unit->domain->is_packed;

    for (size_t i = 0; i < n && is_needed; i++) {
        const fc_section *s = &sections[i];
        const size_t bytes = present_pack(present, s, part + s->at, 1);

        FC_TRY(all_reduce(unit, part + s->at, bytes / fc_dtype_bytes(s->reduce), s->reduce,
                          present->print));
        present_unpack(present, s, part + s->at);
    }
    return FC_OK;
}

fc_status fc_waits_all_reduce(fc_unit *unit, void *part, const fc_present *present)
{
    const fc_layout *l = &unit->layout;

    FC_TRY(all_reduce_sections(unit, l->sections, l->n_sections, part, present));
    return all_reduce_sections(unit, l->frozen, present->frozen ? l->n_frozen : 0, part, present);
}
