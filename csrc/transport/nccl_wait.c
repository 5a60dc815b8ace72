/* Waiting for NCCL and looking after its ranks: errors, deadlines, deaths, and the end of a group.
 *
 * The host waits in two places: for a call that NCCL goes on with in the background, and for work
 * on the device (fc_nccl_wait). Whoever waits also looks around. Who waits elsewhere does not,
 * which is what the thread of nccl_watch.c is for.
 */
#include "transport/nccl_private.h"

#include "base/clock.h"
#include "window/window.h"

#include <sched.h>
#include <stdio.h>
#include <time.h>

#define YIELD_NS (FC_NS_PER_MS / 5)
#define SLEEP_NS (FC_NS_PER_MS / 2)
#define LOOK_NS FC_NS_PER_MS
#define POLL_NS (50 * FC_NS_PER_MS)

typedef struct nccl_wait {
    fc_nccl_group *const *groups;
    size_t n_groups;
    fc_ready_fn ready;
    void *arg;
    const fc_wait_info *info;
    int64_t start_ns, next_look_ns, next_poll_ns;
    int n_notices;
} nccl_wait;

/* ---- failing ---- */

fc_status fc_nccl_check(fc_nccl_group *group)
{
    if (group->base->broken == FC_OK && !fc_transport_is_forked(group->base) &&
        atomic_load_explicit(&group->state, memory_order_acquire) == FC_NCCL_WAS_ENDED) {
        fc_transport_mark_broken(group->base, group->end.status, group->end.text);
        return fc_fail(group->end.status, "%s", group->end.text);
    }
    return fc_transport_check(group->base);
}

static fc_status end_group(fc_nccl_group *group, fc_status status, const char *text, bool is_known)
{
    bool is_first = group->base->broken == FC_OK && !fc_transport_is_forked(group->base);
    int state = FC_NCCL_GOES_ON;

    if (is_first) {
        (void)atomic_compare_exchange_strong(&group->state, &state, FC_NCCL_ENDED);
    }
    status = fc_transport_abort(group->base, status, text);
    if (is_first && !is_known) {
        fc_nccl_board_give_up(group->board, status, group->base->broken_text);
    }
    if (is_first) {
        fc_nccl_abort_comms(group);
    }
    return status;
}

fc_status fc_nccl_abort(fc_nccl_group *group, fc_status status, const char *text)
{
    return end_group(group, status, text, false);
}

bool fc_nccl_is_broken(const fc_nccl_group *group)
{
    return group->base->broken != FC_OK || atomic_load(&group->state) == FC_NCCL_WAS_ENDED;
}

static void describe(const fc_wait_info *info, char *out, size_t bytes)
{
    if (info->unit != NULL && info->unit[0] != '\0') {
        (void)snprintf(out, bytes, "%s of unit %s", info->op, info->unit);
    } else {
        (void)snprintf(out, bytes, "%s", info->op);
    }
}

void fc_nccl_tell_place(const fc_nccl_group *group, const fc_wait_info *info, const char *found,
                        char *out, size_t bytes)
{
    const fc_transport *base = group->base;
    char what[160];

    describe(info, what, sizeof(what));
    (void)snprintf(out, bytes, "%.600s; rank %d was in %s of process group %s over NCCL", found,
                   base->global_ranks[base->rank], what, base->name);
}

/* `found` is what happened; the place where this rank was is added. What the board said is known to
 * all who see it, and not told again. */
static fc_status fail_at(fc_nccl_group *group, fc_status status, const fc_wait_info *info,
                         const char *found, bool is_known)
{
    char text[FC_MESSAGE_BYTES];

    fc_nccl_tell_place(group, info, found, text, sizeof(text));
    return end_group(group, status, text, is_known);
}

fc_status fc_nccl_tell_result(const fc_nccl_comm *comm, int result, char *out, size_t bytes)
{
    const fc_nccl_functions *call = &comm->group->nccl->call;
    const char *more = call->last_error == NULL ? NULL : call->last_error(fc_nccl_handle(comm));

    (void)snprintf(out, bytes, "NCCL reports '%s'%s%.300s", call->error_text(result),
                   more == NULL || more[0] == '\0' ? "" : ": ", more == NULL ? "" : more);
    return result == FC_NCCL_REMOTE_ERROR ? FC_ERR_PEER : FC_ERR_SYSTEM;
}

static fc_status fail_result(fc_nccl_comm *comm, int result, const fc_wait_info *info)
{
    char found[512];
    fc_status st = fc_nccl_tell_result(comm, result, found, sizeof(found));

    return fail_at(comm->group, st, info, found, false);
}

/* Who is late, in the first communicator where somebody is; false: nobody that can be seen. */
static bool tell_late(const fc_nccl_group *group, char *out, size_t bytes)
{
    bool is_found = false;

    for (int i = 0; i < group->n_comms && !is_found; i++) {
        is_found = fc_nccl_board_tell(group->board, i, group->comms[i].sequence, out, bytes);
    }
    return is_found;
}

/* The first group in which somebody is late; `group` where none is known to be. */
static fc_nccl_group *find_late(const nccl_wait *w, fc_nccl_group *group, char *who, size_t bytes)
{
    for (size_t i = 0; i < w->n_groups; i++) {
        if (tell_late(w->groups[i], who, bytes)) {
            return w->groups[i];
        }
    }
    (void)tell_late(group, who, bytes);
    return group;
}

/* In the group whose deadline it was all may be in time: the device waits for other groups, too. */
static fc_status fail_late(const nccl_wait *w, fc_nccl_group *group)
{
    const int64_t timeout_ns = group->base->timeout_ns;
    char found[640];
    char who[400];

    group = find_late(w, group, who, sizeof(who));
    (void)snprintf(found, sizeof(found), "nothing came of it within %.3g s: %s",
                   (double)timeout_ns / (double)FC_NS_PER_S, who);
    return fail_at(group, FC_ERR_TIMEOUT, w->info, found, false);
}

/* ---- looking around ---- */

fc_status fc_nccl_look(fc_nccl_group *group, const fc_wait_info *info)
{
    fc_status st;
    int i, result;

    FC_TRY(fc_nccl_check(group));
    for (i = 0; i < group->n_comms; i++) {
        result = fc_nccl_async_error(&group->comms[i]);
        if (fc_nccl_is_error(result)) {
            return fail_result(&group->comms[i], result, info);
        }
    }
    st = fc_nccl_board_look(group->board);
    return st == FC_OK ? FC_OK : fail_at(group, st, info, fc_last_message(), true);
}

fc_status fc_nccl_watch(fc_nccl_group *group)
{
    const fc_wait_info info = {.op = "a look around"};

    return fc_nccl_look(group, &info);
}

static void give_notice(nccl_wait *w, int64_t waited_ns)
{
    const fc_transport *base = w->groups[0]->base;
    const fc_nccl_group *group;
    char what[160];
    char who[400];
    char line[FC_MESSAGE_BYTES];

    w->n_notices++;
    if (base->host.notice == NULL) {
        return;
    }
    describe(w->info, what, sizeof(what));
    group = find_late(w, w->groups[0], who, sizeof(who));
    (void)snprintf(line, sizeof(line),
                   "[fsdp_c] rank %d has waited %d s in %s of process group %s over NCCL: %s",
                   base->global_ranks[base->rank], (int)(waited_ns / FC_NS_PER_S), what,
                   group->base->name, who);
    base->host.notice(base->host.context, line);
}

/* What the embedding program wants to do and say while this rank waits; it holds its lock here. */
static fc_status visit_host(nccl_wait *w, int64_t now_ns)
{
    const fc_transport *base = w->groups[0]->base;
    fc_status st = FC_OK;

    w->next_poll_ns = now_ns + POLL_NS;
    if (base->host.leave_wait != NULL) {
        base->host.leave_wait(base->host.context);
    }
    if (base->host.poll != NULL) {
        st = base->host.poll(base->host.context);
    }
    if (st == FC_OK && now_ns - w->start_ns >= fc_transport_notice_ns(w->n_notices)) {
        give_notice(w, now_ns - w->start_ns);
    }
    if (base->host.enter_wait != NULL) {
        base->host.enter_wait(base->host.context);
    }
    return st;
}

static fc_status look_around(nccl_wait *w)
{
    int64_t now_ns = fc_now_ns();
    size_t i;

    if (now_ns < w->next_look_ns) {
        return FC_OK;
    }
    w->next_look_ns = now_ns + LOOK_NS;
    for (i = 0; i < w->n_groups; i++) {
        FC_TRY(fc_nccl_look(w->groups[i], w->info));
        if (now_ns - w->start_ns >= w->groups[i]->base->timeout_ns) {
            return fail_late(w, w->groups[i]);
        }
    }
    return now_ns < w->next_poll_ns ? FC_OK : visit_host(w, now_ns);
}

/* ---- waiting ---- */

/* For whom the wait is, nobody can tell. */
static fc_window_waiting shown(const nccl_wait *w)
{
    return (fc_window_waiting){.since_ns = (uint64_t)w->start_ns,
                               .rank = FC_WINDOW_ALL,
                               .op = fc_window_name(w->info->op),
                               .unit = fc_window_name(w->info->unit),
                               .step = w->info->sequence};
}

static fc_status sleep_until_ready(nccl_wait *w)
{
    const struct timespec pause = {.tv_nsec = SLEEP_NS};
    int64_t yield_until_ns = w->start_ns + YIELD_NS;

    while (!w->ready(w->arg)) {
        FC_TRY(look_around(w));
        if (fc_now_ns() < yield_until_ns) {
            (void)sched_yield();
        } else {
            (void)nanosleep(&pause, NULL);
        }
    }
    return FC_OK;
}

/* Work that was aborted is over, too. */
static fc_status check_all(fc_nccl_group *const *groups, size_t n_groups)
{
    for (size_t i = 0; i < n_groups; i++) {
        FC_TRY(fc_nccl_check(groups[i]));
    }
    return FC_OK;
}

fc_status fc_nccl_wait(fc_nccl_group *const *groups, size_t n_groups, fc_ready_fn ready, void *arg,
                       const fc_wait_info *info)
{
    nccl_wait w = {
        .groups = groups, .n_groups = n_groups, .ready = ready, .arg = arg, .info = info};
    const fc_host_ops *host;
    fc_window_waiting before;
    fc_status st;
    size_t i;

    if (n_groups == 0) {
        return fc_fail(FC_ERR_INVALID, "a wait for %s without a group to watch", info->op);
    }
    for (i = 0; i < n_groups; i++) {
        FC_TRY(fc_nccl_check(groups[i]));
    }
    if (ready(arg)) {
        return check_all(groups, n_groups);
    }
    host = &groups[0]->base->host;
    w.start_ns = fc_now_ns();
    before = fc_window_wait_for(shown(&w));
    w.next_look_ns = w.start_ns + LOOK_NS;
    w.next_poll_ns = w.start_ns + POLL_NS;
    if (host->enter_wait != NULL) {
        host->enter_wait(host->context);
    }
    st = sleep_until_ready(&w);
    if (host->leave_wait != NULL) {
        host->leave_wait(host->context);
    }
    (void)fc_window_wait_for(before);
    if (fc_window_traces()) {
        fc_window_waited(shown(&w), fc_now_ns());
    }
    return st == FC_OK ? check_all(groups, n_groups) : st;
}

typedef struct progress {
    fc_nccl_comm *comm;
    int result;
} progress;

/* Also when the communicator is gone: then the wait ends with why. */
static bool has_ended(void *arg)
{
    progress *p = arg;

    p->result = fc_nccl_async_error(p->comm);
    return p->result != FC_NCCL_IN_PROGRESS;
}

fc_status fc_nccl_settle(fc_nccl_comm *comm, int result, const fc_wait_info *info)
{
    fc_nccl_group *groups[1] = {comm->group};
    progress p = {.comm = comm, .result = result};

    comm->is_pending = result == FC_NCCL_IN_PROGRESS;
    if (comm->is_pending) {
        FC_TRY(fc_nccl_wait(groups, 1, has_ended, &p, info));
        comm->is_pending = false;
    }
    FC_TRY(fc_nccl_check(comm->group)); /* what was ended meanwhile says why */
    return p.result == FC_NCCL_SUCCESS ? FC_OK : fail_result(comm, p.result, info);
}
