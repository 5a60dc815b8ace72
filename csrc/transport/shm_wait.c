/* Waiting for a peer: ask, yield, sleep; and find out why it does not come. What there is to do for
 * a while is done in place of a yield or a sleep.
 *
 * Yielding first beats spinning when ranks share cores, and a futex wake costs some 25 us across
 * cores: so a wait yields for about a millisecond and only then sleeps. All checks that cost a
 * system call are made between two sleeps.
 */
#include "base/idle.h"
#include "transport/shm_futex.h"
#include "transport/shm_impl.h"
#include "window/window.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define SPINS 20
#define YIELD_NS FC_NS_PER_MS
#define SLICE_MIN_NS FC_NS_PER_MS
#define SLICE_MAX_NS (20 * FC_NS_PER_MS)
#define POLL_NS (50 * FC_NS_PER_MS)
#define PLACE_NS (500 * FC_NS_PER_MS)

typedef struct shm_wait {
    fc_transport *transport;
    int peer;
    fc_ready_fn ready;
    void *arg;
    const fc_wait_info *info;
    int64_t start_ns;
    int64_t next_poll_ns;
    int64_t next_place_ns;
    int n_notices;
    fc_shm_inquiry inquiry;
} shm_wait;

static void pause_cpu(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void copy_text(char *to, const char *from, size_t bytes)
{
    size_t n = from == NULL ? 0 : strnlen(from, bytes - 1);

    if (n > 0) {
        memcpy(to, from, n);
    }
    to[n] = '\0';
}

static void note_activity(fc_transport *t, int peer, const fc_wait_info *info, bool is_waiting)
{
    fc_shm_activity *mine = &fc_shm_rank_of(t, t->rank)->activity;

    atomic_store_explicit(&mine->peer, peer, memory_order_relaxed);
    copy_text(mine->op, info->op, sizeof(mine->op));
    copy_text(mine->unit, info->unit, sizeof(mine->unit));
    atomic_store_explicit(&mine->sequence, info->sequence, memory_order_relaxed);
    atomic_store_explicit(&mine->is_waiting, is_waiting, memory_order_relaxed);
}

static void describe(char *out, size_t bytes, const char *op, const char *unit, uint64_t sequence)
{
    if (unit != NULL && unit[0] != '\0') {
        (void)snprintf(out, bytes, "%s of unit %s (step %llu)", op, unit,
                       (unsigned long long)sequence);
    } else {
        (void)snprintf(out, bytes, "%s (step %llu)", op, (unsigned long long)sequence);
    }
}

static void describe_peer(char *out, size_t bytes, const fc_transport *t, int peer)
{
    fc_shm_activity last = {0};
    const fc_shm_activity *theirs = &fc_shm_rank_of(t, peer)->activity;
    int awaited = atomic_load_explicit(&theirs->peer, memory_order_relaxed);
    char what[192];

    copy_text(last.op, theirs->op, sizeof(last.op));
    copy_text(last.unit, theirs->unit, sizeof(last.unit));
    if (last.op[0] == '\0') {
        (void)snprintf(out, bytes, "rank %d has not waited for anybody yet", t->global_ranks[peer]);
        return;
    }
    describe(what, sizeof(what), last.op, last.unit,
             atomic_load_explicit(&theirs->sequence, memory_order_relaxed));
    if (atomic_load_explicit(&theirs->is_waiting, memory_order_relaxed)) {
        (void)snprintf(out, bytes, "rank %d waits for rank %d in %s", t->global_ranks[peer],
                       fc_transport_global_rank(t, awaited), what);
    } else {
        (void)snprintf(out, bytes, "rank %d last waited in %s", t->global_ranks[peer], what);
    }
}

static fc_status fail_adopted(fc_transport *t)
{
    return fc_fail(t->broken, "process group %s: %s", t->name, t->broken_text);
}

/* Breaks the transport because of what was found out about the peer. */
static fc_status fail_wait(shm_wait *w, fc_status status, const char *found)
{
    fc_transport *t = w->transport;
    char what[192];
    char last[256];
    char place[384];
    char text[FC_MESSAGE_BYTES];

    fc_shm_adopt_abort(t);
    if (t->broken != FC_OK) {
        return fail_adopted(t);
    }
    describe(what, sizeof(what), w->info->op, w->info->unit, w->info->sequence);
    describe_peer(last, sizeof(last), t, w->peer);
    place[0] = '\0';
    if (status == FC_ERR_TIMEOUT || w->inquiry.mutual_ns != 0) {
        fc_shm_tell_place(t, w->peer, &w->inquiry, place, sizeof(place));
    }
    (void)snprintf(text, sizeof(text),
                   "%s while rank %d waited for it in %s of process group %s; %s%s", found,
                   t->global_ranks[t->rank], what, t->name, last, place);
    return fc_transport_abort(t, status, text);
}

/* What has become of a peer that does not come any more. */
static const char *end_of(const fc_shm_rank *peer)
{
    switch (atomic_load_explicit(&peer->end, memory_order_acquire)) {
    case FC_END_IN_ORDER:
        return "ended its script";
    case FC_END_BY_EXCEPTION:
        return "ended its script by an exception";
    default:
        return atomic_load_explicit(&peer->is_closed, memory_order_acquire) ? "finished"
                                                                            : FC_PROCESS_LOST;
    }
}

void fc_shm_tell_end(const fc_transport *t, int peer, char *out, size_t bytes)
{
    (void)snprintf(out, bytes, "rank %d (pid %d) %s", t->global_ranks[peer],
                   (int)t->shm->peers[peer].id.pid, end_of(fc_shm_rank_of(t, peer)));
}

static fc_status fail_gone(shm_wait *w)
{
    char found[FC_END_BYTES];

    fc_shm_tell_end(w->transport, w->peer, found, sizeof(found));
    return fail_wait(w, FC_ERR_PEER, found);
}

static fc_status fail_late(shm_wait *w)
{
    fc_transport *t = w->transport;
    char found[128];

    (void)snprintf(found, sizeof(found), "rank %d did not come within %.3g s",
                   t->global_ranks[w->peer], (double)t->timeout_ns / (double)FC_NS_PER_S);
    return fail_wait(w, FC_ERR_TIMEOUT, found);
}

/* The peer sits in a collective that this rank has not called. */
static fc_status fail_stuck(shm_wait *w)
{
    fc_transport *t = w->transport;
    const fc_place *place = &w->inquiry.place;
    char found[512];

    (void)snprintf(found, sizeof(found),
                   place->is_gather
                       ? "rank %d is in a gather of full parameters (%s) that rank %d has not "
                         "called: is it saving alone? All ranks must call it. Neither could go on"
                       : "rank %d is in a collective (%s) that rank %d has not called: all ranks "
                         "of its process group must call it. Neither could go on",
                   t->global_ranks[w->peer], place->text, t->global_ranks[t->rank]);
    return fail_wait(w, FC_ERR_PEER, found);
}

/* Both wait, and what each waits for the other would have to do first. */
static fc_status fail_mutual(shm_wait *w)
{
    char found[192];

    (void)snprintf(found, sizeof(found),
                   "rank %d waits for something else (all ranks make the same calls in the same "
                   "order; neither could go on)",
                   w->transport->global_ranks[w->peer]);
    return fail_wait(w, FC_ERR_PEER, found);
}

static void give_notice(shm_wait *w, int64_t waited_ns)
{
    fc_transport *t = w->transport;
    char what[192];
    char last[256];
    char place[384];
    char line[FC_MESSAGE_BYTES];

    w->n_notices++;
    if (t->host.notice == NULL) {
        return;
    }
    describe(what, sizeof(what), w->info->op, w->info->unit, w->info->sequence);
    describe_peer(last, sizeof(last), t, w->peer);
    fc_shm_tell_place(t, w->peer, &w->inquiry, place, sizeof(place));
    (void)snprintf(line, sizeof(line), "[fsdp_c] rank %d has waited %d s for rank %d in %s; %s%s",
                   t->global_ranks[t->rank], (int)(waited_ns / FC_NS_PER_S),
                   t->global_ranks[w->peer], what, last, place);
    t->host.notice(t->host.context, line);
}

/* Who looks at this process from outside sees what it waits for. */
static fc_window_waiting shown(const shm_wait *w)
{
    return (fc_window_waiting){
        .since_ns = (uint64_t)w->start_ns,
        .rank = (uint64_t)fc_transport_global_rank(w->transport, w->peer),
        .op = fc_window_name(w->info->op),
        .unit = fc_window_name(w->info->unit),
        .step = w->info->sequence,
    };
}

static void show_place(shm_wait *w, int64_t now_ns)
{
    char place[384];

    if (now_ns >= w->next_place_ns) {
        w->next_place_ns = now_ns + PLACE_NS;
        fc_shm_tell_place(w->transport, w->peer, &w->inquiry, place, sizeof(place));
        fc_window_tell_place(place[0] != '\0' ? place + strlen("; ") : "");
    }
}

/* What the embedding program wants to do and say while this rank waits; it holds its lock here. */
static fc_status visit_host(shm_wait *w, int64_t now_ns)
{
    fc_transport *t = w->transport;
    int64_t waited_ns = now_ns - w->start_ns;
    fc_status st = FC_OK;

    w->next_poll_ns = now_ns + POLL_NS;
    if (t->host.leave_wait != NULL) {
        t->host.leave_wait(t->host.context);
    }
    if (t->host.poll != NULL) {
        st = t->host.poll(t->host.context);
    }
    if (st == FC_OK && fc_shm_inquire(t, w->peer, &w->inquiry, waited_ns)) {
        st = w->ready(w->arg) ? FC_OK : fail_stuck(w);
    }
    if (st == FC_OK && fc_shm_waits_for_us(t, w->peer, &w->inquiry)) {
        st = w->ready(w->arg) ? FC_OK : fail_mutual(w);
    }
    if (st == FC_OK && waited_ns >= fc_transport_notice_ns(w->n_notices)) {
        give_notice(w, waited_ns);
    }
    show_place(w, now_ns);
    if (t->host.enter_wait != NULL) {
        t->host.enter_wait(t->host.context);
    }
    return st;
}

/* FC_AGAIN: keep waiting. */
static fc_status look_around(shm_wait *w)
{
    fc_transport *t = w->transport;
    int64_t now_ns = fc_now_ns();

    fc_shm_adopt_abort(t);
    if (t->broken != FC_OK) {
        return fail_adopted(t);
    }
    if (atomic_load_explicit(&fc_shm_rank_of(t, w->peer)->is_closed, memory_order_acquire) ||
        !fc_process_is_alive(&t->shm->peers[w->peer])) {
        /* It may have published as its last act. */
        return w->ready(w->arg) ? FC_OK : fail_gone(w);
    }
    if (now_ns - w->start_ns >= t->timeout_ns) {
        return fail_late(w);
    }
    if (now_ns >= w->next_poll_ns) {
        FC_TRY(visit_host(w, now_ns));
    }
    return FC_AGAIN;
}

static bool yield_until_ready(shm_wait *w)
{
    int64_t end_ns = w->start_ns + YIELD_NS;

    if (w->transport->shm->may_spin) {
        for (int i = 0; i < SPINS; i++) {
            pause_cpu();
            if (w->ready(w->arg)) {
                return true;
            }
        }
    }
    do {
        if (!fc_idle_step()) {
            (void)sched_yield();
        }
        if (w->ready(w->arg)) {
            return true;
        }
    } while (fc_now_ns() < end_ns);
    return false;
}

static fc_status sleep_until_ready(shm_wait *w)
{
    fc_shm_rank *peer = fc_shm_rank_of(w->transport, w->peer);
    fc_shm_patience *mine = &fc_shm_rank_of(w->transport, w->transport->rank)->patience;
    int64_t slice_ns = SLICE_MIN_NS;

    (void)atomic_fetch_add_explicit(&mine->n_waits, 1, memory_order_seq_cst);
    for (;;) {
        fc_status st = look_around(w);
        bool is_ready;
        uint32_t bell;

        if (st != FC_AGAIN) {
            return st;
        }
        /* [Note: bell and sleepers] in shm.c. */
        atomic_fetch_add_explicit(&peer->n_sleepers, 1, memory_order_seq_cst);
        bell = atomic_load_explicit(&peer->bell, memory_order_seq_cst);
        is_ready = w->ready(w->arg);
        if (!is_ready && !fc_idle_step() && fc_futex_sleep(&peer->bell, bell, slice_ns)) {
            w->next_poll_ns = 0; /* the signal may be a Ctrl-C */
        }
        atomic_fetch_sub_explicit(&peer->n_sleepers, 1, memory_order_seq_cst);
        if (is_ready || w->ready(w->arg)) {
            return FC_OK;
        }
        (void)atomic_fetch_add_explicit(&mine->n_looks, 1, memory_order_seq_cst);
        slice_ns = slice_ns * 2 < SLICE_MAX_NS ? slice_ns * 2 : SLICE_MAX_NS;
    }
}

static fc_status wait_slowly(shm_wait *w)
{
    fc_transport *t = w->transport;
    fc_status st = FC_OK;
    int64_t end_ns;

    note_activity(t, w->peer, w->info, true);
    if (!yield_until_ready(w)) {
        const fc_window_waiting before = fc_window_wait_for(shown(w));

        if (t->host.enter_wait != NULL) {
            t->host.enter_wait(t->host.context);
        }
        st = sleep_until_ready(w);
        if (t->host.leave_wait != NULL) {
            t->host.leave_wait(t->host.context);
        }
        (void)fc_window_wait_for(before);
    }
    end_ns = fc_now_ns();
    if (fc_window_traces()) {
        fc_window_waited(shown(w), end_ns);
    }
    t->n_waits++;
    t->wait_ns += (uint64_t)(end_ns - w->start_ns);
    return st;
}

fc_status fc_transport_wait(fc_transport *transport, int peer, fc_ready_fn ready, void *arg,
                            const fc_wait_info *info)
{
    if (fc_transport_is_forked(transport) || transport->broken != FC_OK) {
        return fc_transport_check(transport);
    }
    if (!ready(arg)) {
        shm_wait w = {
            .transport = transport, .peer = peer, .ready = ready, .arg = arg, .info = info};

        if (transport->shm == NULL || peer < 0 || peer >= transport->n_ranks ||
            peer == transport->rank) {
            return fc_fail(FC_ERR_INVALID,
                           "rank %d of process group %s cannot wait for rank %d here",
                           transport->rank, transport->name, peer);
        }
        w.start_ns = fc_now_ns();
        w.next_poll_ns = w.start_ns + POLL_NS;
        FC_TRY(wait_slowly(&w));
    }
    if (transport->shm != NULL) {
        note_activity(transport, peer, info, false);
    }
    return FC_OK;
}
