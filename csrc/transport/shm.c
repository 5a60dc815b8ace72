/* Shared memory transport: joining the ranks, publishing, aborting, leaving.
 *
 * Create costs two exchanges: rank 0 offers the control segment, all attach, all tell how that
 * went.
 */
#define _GNU_SOURCE /* cpu sets */

#include "transport/shm_futex.h"
#include "transport/shm_impl.h"
#include "transport/shm_segment.h"

#include "base/clock.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define ABORT_TEXT_WAIT_NS (10 * FC_NS_PER_MS)

typedef struct shm_offer {
    fc_shm_outcome outcome;
    fc_process_id process;
    fc_segment_id control; /* of rank 0 */
} shm_offer;

void fc_shm_outcome_set(fc_shm_outcome *outcome, const fc_transport *transport, fc_status status)
{
    memset(outcome, 0, sizeof(*outcome));
    outcome->status = (int32_t)status;
    outcome->rank = transport->global_ranks[transport->rank];
    if (status != FC_OK) {
        (void)snprintf(outcome->text, sizeof(outcome->text), "%s", fc_last_message());
    }
}

fc_status fc_shm_outcome_agree(const fc_transport *transport, const char *what,
                               const void *outcomes, size_t stride)
{
    for (int r = 0; r < transport->n_ranks; r++) {
        fc_shm_outcome outcome;

        memcpy(&outcome, (const char *)outcomes + (size_t)r * stride, sizeof(outcome));
        if (outcome.status != FC_OK) {
            outcome.text[sizeof(outcome.text) - 1] = '\0';
            return fc_fail((fc_status)outcome.status, "%s: rank %d: %s", what, (int)outcome.rank,
                           outcome.text);
        }
    }
    return FC_OK;
}

static fc_status exchange_with_host(fc_transport *t, const char *what, const void *mine,
                                    size_t bytes, void *all_out)
{
    if (t->n_ranks == 1) {
        memcpy(all_out, mine, bytes);
        return FC_OK;
    }
    return t->host.exchange(t->host.context, what, mine, bytes, all_out);
}

/* Ranks that are threads of one process share its descriptors and its death: this transport cannot
 * serve them. */
static fc_status check_processes(const fc_transport *t, const shm_offer *offers)
{
    for (int a = 0; a < t->n_ranks; a++) {
        if (offers[a].process.pid_namespace != offers[0].process.pid_namespace) {
            return fc_fail(FC_ERR_UNSUPPORTED, "ranks %d and %d cannot see each other's processes",
                           t->global_ranks[0], t->global_ranks[a]);
        }
    }
    for (int a = 0; a < t->n_ranks; a++) {
        for (int b = a + 1; b < t->n_ranks; b++) {
            if (offers[a].process.pid == offers[b].process.pid) {
                return fc_fail(FC_ERR_UNSUPPORTED, "ranks %d and %d have the same process id %d",
                               t->global_ranks[a], t->global_ranks[b], (int)offers[a].process.pid);
            }
        }
    }
    return FC_OK;
}

/* Opens every peer and maps the control segment; whatever was done is undone by free_shm. */
static fc_status attach(fc_transport *t, const shm_offer *offers)
{
    fc_shm *shm = t->shm;
    char *memory;
    fc_status st;
    int fd;

    FC_TRY(check_processes(t, offers));
    if (offers[0].control.bytes != shm->control_bytes) {
        return fc_fail(FC_ERR_UNSUPPORTED, "rank %d runs another version of this library",
                       t->global_ranks[0]);
    }
    for (int r = 0; r < t->n_ranks; r++) {
        FC_TRY(fc_process_open(&offers[r].process, &shm->peers[r]));
    }
    FC_TRY(fc_segment_open(&offers[0].control, &fd));
    st = fc_segment_map(fd, shm->control_bytes, 0, false, &memory);
    fc_segment_close(fd);
    FC_TRY(st);
    shm->control = (fc_shm_control *)(void *)memory;
    return FC_OK;
}

static bool has_cpu_per_rank(int n_ranks)
{
    cpu_set_t cpus;

    return sched_getaffinity(0, sizeof(cpus), &cpus) == 0 && CPU_COUNT(&cpus) >= n_ranks;
}

static void free_shm(fc_transport *t)
{
    fc_shm *shm = t->shm;

    if (shm == NULL) {
        return;
    }
    if (shm->peers != NULL) {
        for (int r = 0; r < t->n_ranks; r++) {
            fc_process_close(&shm->peers[r]);
        }
    }
    fc_segment_unmap((char *)shm->control, shm->control_bytes);
    fc_free(shm->mail_in);
    fc_free(shm->peers);
    fc_free(shm);
    t->shm = NULL;
}

static fc_status alloc_shm(fc_transport *t)
{
    fc_shm *shm = fc_alloc(1, sizeof(*shm));

    if (shm == NULL) {
        return fc_fail(FC_ERR_NOMEM, "transport: %zu bytes", sizeof(*shm));
    }
    shm->peers = fc_alloc((size_t)t->n_ranks, sizeof(*shm->peers));
    shm->mail_in = fc_alloc((size_t)t->n_ranks, FC_SHM_MAIL_BYTES);
    if (shm->peers == NULL || shm->mail_in == NULL) {
        fc_free(shm->mail_in);
        fc_free(shm->peers);
        fc_free(shm);
        return fc_fail(FC_ERR_NOMEM, "transport: %d peers", t->n_ranks);
    }
    for (int r = 0; r < t->n_ranks; r++) {
        shm->peers[r].pidfd = -1;
    }
    shm->control_bytes = sizeof(fc_shm_control) + (size_t)t->n_ranks * sizeof(fc_shm_rank);
    shm->may_spin = has_cpu_per_rank(t->n_ranks);
    t->shm = shm;
    return FC_OK;
}

/* How it went travels with the offer. */
static void make_offer(fc_transport *t, shm_offer *offer)
{
    fc_status st = alloc_shm(t);

    memset(offer, 0, sizeof(*offer));
    offer->control.fd = -1;
    if (st == FC_OK) {
        st = fc_process_self(&offer->process);
    }
    if (st == FC_OK && t->rank == 0) {
        st = fc_segment_create("control segment", t->shm->control_bytes, 0, t->n_ranks,
                               &offer->control);
    }
    fc_shm_outcome_set(&offer->outcome, t, st);
}

/* Every rank walks through both exchanges whatever happened to it, so that none waits for another.
 */
static fc_status join(fc_transport *t, const shm_offer *mine, shm_offer *offers,
                      fc_shm_outcome *outcomes)
{
    fc_shm_outcome outcome;

    FC_TRY(exchange_with_host(t, "shm offer", mine, sizeof(*mine), offers));
    FC_TRY(fc_shm_outcome_agree(t, "shared memory", offers, sizeof(*offers)));
    fc_shm_outcome_set(&outcome, t, attach(t, offers));
    FC_TRY(exchange_with_host(t, "shm attach", &outcome, sizeof(outcome), outcomes));
    return fc_shm_outcome_agree(t, "shared memory", outcomes, sizeof(*outcomes));
}

/* A rank without memory even for what the others say tells them so, and hears nothing. */
static fc_status refuse(const fc_transport_config *config)
{
    const int rank = config->global_ranks[config->rank];
    shm_offer mine;

    memset(&mine, 0, sizeof(mine));
    mine.outcome.status = FC_ERR_NOMEM;
    mine.outcome.rank = rank;
    (void)snprintf(mine.outcome.text, sizeof(mine.outcome.text), "transport of %d ranks",
                   config->n_ranks);
    if (config->n_ranks > 1) {
        FC_TRY(config->host.exchange(config->host.context, "shm offer", &mine, sizeof(mine), NULL));
    }
    return fc_fail(FC_ERR_NOMEM, "shared memory: rank %d: %s", rank, mine.outcome.text);
}

fc_status fc_shm_create(const fc_transport_config *config, fc_transport **out)
{
    fc_transport *t;
    shm_offer *offers;
    shm_offer mine;
    fc_shm_outcome *outcomes;
    fc_status st;

    if (config->n_ranks > 1 && config->host.exchange == NULL) {
        return fc_fail(FC_ERR_INVALID, "transport of %d ranks: no way to exchange addresses",
                       config->n_ranks);
    }
    st = fc_transport_alloc(config, &t);
    if (st != FC_OK) {
        return st == FC_ERR_NOMEM ? refuse(config) : st;
    }
    offers = fc_alloc((size_t)t->n_ranks, sizeof(*offers));
    outcomes = fc_alloc((size_t)t->n_ranks, sizeof(*outcomes));
    if (offers == NULL || outcomes == NULL) {
        st = refuse(config);
    } else {
        make_offer(t, &mine);
        st = join(t, &mine, offers, outcomes);
        fc_segment_close(mine.control.fd);
    }
    fc_free(outcomes);
    fc_free(offers);
    if (st != FC_OK) {
        free_shm(t);
        fc_transport_free(t);
        return st;
    }
    fc_watcher_add(t);
    *out = t;
    return FC_OK;
}

/* Wakes whoever sleeps on a rank's bell. [Note: bell and sleepers] The publisher changes the bell
 * and then reads n_sleepers; a sleeper raises n_sleepers, then reads the bell, then asks its
 * condition once more. All four are sequentially consistent: either the publisher sees the sleeper
 * and wakes it, or the sleeper sees the new bell, hence the published word. */
static void ring(fc_shm_rank *rank)
{
    atomic_fetch_add_explicit(&rank->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&rank->n_sleepers, memory_order_seq_cst) > 0) {
        fc_futex_wake_all(&rank->bell);
    }
}

void fc_transport_publish(fc_transport *transport, fc_word *word, uint64_t value)
{
    if (fc_transport_is_forked(transport)) {
        return;
    }
    /* Pairs with the acquire in fc_word_load. */
    atomic_store_explicit((_Atomic uint64_t *)&word->value, value, memory_order_release);
    if (transport->shm != NULL) {
        ring(fc_shm_rank_of(transport, transport->rank));
    }
}

void fc_shm_destroy(fc_transport *transport)
{
    if (!fc_transport_is_forked(transport)) {
        fc_shm_rank *mine = fc_shm_rank_of(transport, transport->rank);

        fc_watcher_remove(transport);
        atomic_store_explicit(&mine->is_closed, 1, memory_order_release);
        ring(mine);
    }
    free_shm(transport);
}

void fc_shm_abort(fc_transport *transport, fc_status status, const char *text)
{
    fc_shm_control *control = transport->shm->control;
    uint32_t none = FC_SHM_ABORT_NONE;

    if (atomic_compare_exchange_strong(&control->abort_state, &none, FC_SHM_ABORT_WRITING)) {
        control->abort_rank = transport->rank;
        control->abort_status = (int32_t)status;
        (void)snprintf(control->abort_text, sizeof(control->abort_text), "%s", text);
        /* Pairs with the acquire in fc_shm_adopt_abort. */
        atomic_store_explicit(&control->abort_state, FC_SHM_ABORT_WRITTEN, memory_order_release);
    }
    for (int r = 0; r < transport->n_ranks; r++) {
        ring(fc_shm_rank_of(transport, r));
    }
}

/* What a failure of one rank means to the others. */
static fc_status status_for_peers(int32_t status)
{
    switch (status) {
    case FC_ERR_TIMEOUT:
    case FC_ERR_MISMATCH:
    case FC_ERR_UNSUPPORTED:
        return (fc_status)status;
    default:
        return FC_ERR_PEER;
    }
}

void fc_shm_adopt_abort(fc_transport *transport)
{
    fc_shm_control *control = transport->shm->control;
    uint32_t state = atomic_load_explicit(&control->abort_state, memory_order_acquire);
    int64_t deadline_ns;
    char text[FC_MESSAGE_BYTES];
    char line[FC_MESSAGE_BYTES];

    if (state == FC_SHM_ABORT_NONE) {
        return;
    }
    /* The writer may have been killed half way: its text is waited for, not relied upon. */
    deadline_ns = fc_deadline_ns(ABORT_TEXT_WAIT_NS);
    while (state != FC_SHM_ABORT_WRITTEN && fc_now_ns() < deadline_ns) {
        (void)sched_yield();
        state = atomic_load_explicit(&control->abort_state, memory_order_acquire);
    }
    if (state != FC_SHM_ABORT_WRITTEN) {
        fc_transport_mark_broken(transport, FC_ERR_PEER,
                                 "a peer failed and died while it said why");
        return;
    }
    memcpy(text, control->abort_text, sizeof(text));
    text[sizeof(text) - 1] = '\0';
    (void)snprintf(line, sizeof(line), "rank %d failed: %.*s",
                   fc_transport_global_rank(transport, control->abort_rank), (int)sizeof(line) - 32,
                   text);
    fc_transport_mark_broken(transport, status_for_peers(control->abort_status), line);
}
