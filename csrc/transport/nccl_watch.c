/* The thread that ends groups whose work on the device does not end.
 *
 * One per process, from its first group with events on until the last is gone; not in a child made
 * by fork. It is not the one of watcher.c, which may wait for the interpreter. Ten times a second
 * it looks at the oldest mark of each communicator that was not reached. While there is one it
 * looks around as those who wait do; without one a peer may leave, and nobody misses it.
 */
#include "base/threads.h"
#include "transport/nccl_private.h"
#include "transport/process.h"
#include "transport/shm_futex.h"

#include <stdio.h>
#include <string.h>

#define LOOK_NS (100 * FC_NS_PER_MS)
#define CALL_NS FC_NS_PER_S        /* for a call of NCCL to return before an abort */
#define ABORT_NS (5 * FC_NS_PER_S) /* for aborts, before a group goes that is in one */

static struct {
    pthread_mutex_t lock; /* held through a look, which waits for nothing */
    fc_nccl_group *first; /* linked by `next_watched` */
    const fc_nccl_group *ending;
    bool is_running;
    bool is_fork_safe;
    _Atomic uint32_t bell; /* changes when the thread has to look at once */
} watch = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void begin_anew(void)
{
    watch.lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    watch.first = NULL;
    watch.ending = NULL;
    watch.is_running = false;
}

/* ---- looking ---- */

static bool is_late(const fc_nccl_group *group, int64_t since_ns)
{
    return fc_now_ns() - since_ns >= group->timeout_ns;
}

static bool found(const fc_nccl_group *group, const fc_wait_info *info, fc_status status,
                  const char *text, fc_nccl_end *out)
{
    out->status = status;
    fc_nccl_tell_place(group, info, text, out->text, sizeof(out->text));
    return true;
}

static bool found_late(const fc_nccl_comm *comm, const fc_wait_info *info, uint64_t sequence,
                       const char *what, fc_nccl_end *out)
{
    const fc_nccl_group *group = comm->group;
    char text[640];
    char who[400];

    (void)fc_nccl_board_tell(group->board, comm->number, sequence, who, sizeof(who));
    (void)snprintf(text, sizeof(text), "%s within %.3g s of its call: %s", what,
                   (double)group->timeout_ns / (double)FC_NS_PER_S, who);
    return found(group, info, FC_ERR_TIMEOUT, text, out);
}

/* An error of NCCL's. While a call is under way it is not asked: it goes by the next look. */
static bool find_error(fc_nccl_comm *comm, const fc_wait_info *info, fc_nccl_end *out)
{
    fc_nccl_group *group = comm->group;
    char text[512];
    bool is_error;
    fc_status st = FC_OK;
    int result;

    if (pthread_mutex_trylock(&group->calling) != 0) {
        return false;
    }
    result = fc_nccl_ask(comm);
    is_error = fc_nccl_is_error(result);
    if (is_error) {
        st = fc_nccl_tell_result(comm, result, text, sizeof(text));
    }
    (void)pthread_mutex_unlock(&group->calling);
    return is_error && found(group, info, st, text, out);
}

/* Whether the oldest collective that is under way has to end. */
static bool look_at_comm(fc_nccl_comm *comm, fc_nccl_end *out)
{
    fc_nccl_group *group = comm->group;
    fc_wait_info info = {.op = "a look at the device"};
    fc_nccl_mark mark;
    bool is_there;
    fc_status st = fc_nccl_marks_oldest(comm, &mark, &is_there);

    if (st != FC_OK) {
        return found(group, &info, st, fc_last_message(), out);
    }
    if (!is_there) {
        return false;
    }
    info = (fc_wait_info){.op = mark.op, .unit = mark.unit, .sequence = mark.sequence};
    if (find_error(comm, &info, out)) {
        return true;
    }
    st = fc_nccl_board_look(group->board);
    if (st != FC_OK) {
        out->is_known = true;
        return found(group, &info, st, fc_last_message(), out);
    }
    return is_late(group, mark.enqueued_ns) &&
           found_late(comm, &info, mark.sequence, "the device did not do it", out);
}

/* A call of NCCL that does not return: what it enqueues has no mark yet. */
static bool look_at_call(const fc_nccl_group *group, fc_nccl_end *out)
{
    const int64_t since_ns = atomic_load_explicit(&group->call_began_ns, memory_order_acquire);
    const fc_nccl_comm *comm = &group->comms[atomic_load(&group->caller)];
    fc_wait_info info = {.op = "a call of NCCL"};
    fc_nccl_deed deed = {.sequence = 0};

    if (since_ns == 0 || !is_late(group, since_ns)) {
        return false;
    }
    if (fc_nccl_board_own(group->board, comm->number, &deed)) {
        info = (fc_wait_info){.op = deed.op, .unit = deed.unit, .sequence = deed.sequence};
    }
    return found_late(comm, &info, deed.sequence, "NCCL did not take it", out);
}

static bool look_at(fc_nccl_group *group, fc_nccl_end *out)
{
    *out = (fc_nccl_end){.status = FC_OK};
    for (int i = 0; i < group->n_comms; i++) {
        if (look_at_comm(&group->comms[i], out)) {
            return true;
        }
    }
    return look_at_call(group, out);
}

/* ---- ending ---- */

/* Says why before anything of the group is taken away. False: somebody else has ended it. */
static bool tell_why(fc_nccl_group *group, const fc_nccl_end *end)
{
    int state = FC_NCCL_GOES_ON;

    if (!atomic_compare_exchange_strong(&group->state, &state, FC_NCCL_WRITES)) {
        return false;
    }
    group->end = *end;
    atomic_store_explicit(&group->state, FC_NCCL_WAS_ENDED, memory_order_release);
    if (!end->is_known) {
        fc_nccl_board_give_up(group->board, end->status, end->text);
    }
    return true;
}

/* NCCL lets another thread abort, but not within a call on the communicator. Such calls return
 * soon, as communicators do not block. One that does not return waits for the device, whose kernels
 * only an abort can end: then it comes within the call, as that of torch's watchdog may. */
static int take_handles(fc_nccl_group *group, void *handles[FC_NCCL_COMMS])
{
    const struct timespec pause = {.tv_nsec = FC_NS_PER_MS};
    const int64_t deadline_ns = fc_deadline_ns(CALL_NS);
    bool is_calm = pthread_mutex_trylock(&group->calling) == 0;
    int n;

    while (!is_calm && fc_now_ns() < deadline_ns) {
        (void)nanosleep(&pause, NULL);
        is_calm = pthread_mutex_trylock(&group->calling) == 0;
    }
    n = fc_nccl_take_handles(group, handles);
    if (is_calm) {
        (void)pthread_mutex_unlock(&group->calling);
    }
    return n;
}

/* Without the lock: an abort takes its time, and stderr may. Of the group nothing is needed once
 * its handles are taken: its owner waits for the rest, but not for good. */
static void end(fc_nccl_group *group, const fc_nccl_end *why)
{
    const fc_nccl *nccl = group->nccl;
    void (*report)(const char *line) = group->options.report;
    void *handles[FC_NCCL_COMMS];
    char line[FC_MESSAGE_BYTES];
    int n = take_handles(group, handles);

    (void)snprintf(line, sizeof(line), "[fsdp_c] %.1500s", why->text);
    if (report != NULL) {
        report(line);
    }
    while (n > 0) {
        (void)nccl->call.comm_abort(handles[--n]);
    }
}

/* One that has to end; it is said why. */
static fc_nccl_group *find_ended(fc_nccl_end *why)
{
    for (fc_nccl_group *g = watch.first; g != NULL; g = g->next_watched) {
        if (atomic_load(&g->state) == FC_NCCL_GOES_ON && look_at(g, why) && tell_why(g, why)) {
            return g;
        }
    }
    return NULL;
}

static void *look_around(void *arg)
{
    fc_nccl_end why;

    (void)arg;
    (void)pthread_mutex_lock(&watch.lock);
    while (watch.first != NULL) {
        uint32_t bell = atomic_load(&watch.bell);
        fc_nccl_group *group = find_ended(&why);

        watch.ending = group;
        (void)pthread_mutex_unlock(&watch.lock);
        if (group != NULL) {
            end(group, &why);
        } else {
            (void)fc_futex_sleep(&watch.bell, bell, LOOK_NS);
        }
        (void)pthread_mutex_lock(&watch.lock);
        watch.ending = NULL;
    }
    watch.is_running = false;
    (void)pthread_mutex_unlock(&watch.lock);
    return NULL;
}

/* ---- from when to when ---- */

/* The thread wants the lock, which is held here. */
static fc_status start(void)
{
    int error = fc_thread_start(FC_NCCL_WATCHER_NAME, look_around, NULL, NULL);

    watch.is_running = error == 0;
    return error == 0 ? FC_OK
                      : fc_fail_errno(FC_ERR_SYSTEM, error, "no thread to watch NCCL's work");
}

fc_status fc_nccl_watch_over(fc_nccl_group *group)
{
    fc_status st = FC_OK;

    if (group->events.record == NULL) {
        return FC_OK;
    }
    (void)pthread_mutex_lock(&watch.lock);
    if (!watch.is_fork_safe) {
        watch.is_fork_safe = true;
        fc_process_reset_in_children(begin_anew);
    }
    if (!watch.is_running) {
        st = start();
    }
    if (st == FC_OK) {
        group->next_watched = watch.first;
        watch.first = group;
    }
    (void)pthread_mutex_unlock(&watch.lock);
    return st;
}

static bool is_ending(const fc_nccl_group *group)
{
    bool answer;

    (void)pthread_mutex_lock(&watch.lock);
    answer = watch.ending == group;
    (void)pthread_mutex_unlock(&watch.lock);
    return answer;
}

void fc_nccl_stop_watching(fc_nccl_group *group)
{
    const struct timespec pause = {.tv_nsec = FC_NS_PER_MS};
    const int64_t deadline_ns = fc_deadline_ns(ABORT_NS);
    fc_nccl_group **at = &watch.first;

    (void)pthread_mutex_lock(&watch.lock);
    while (*at != NULL && *at != group) {
        at = &(*at)->next_watched;
    }
    if (*at != NULL) {
        *at = group->next_watched;
    }
    if (watch.first == NULL && watch.is_running) {
        atomic_fetch_add(&watch.bell, 1);
        fc_futex_wake_all(&watch.bell);
    }
    (void)pthread_mutex_unlock(&watch.lock);
    while (is_ending(group) && fc_now_ns() < deadline_ns) {
        (void)nanosleep(&pause, NULL);
    }
}
