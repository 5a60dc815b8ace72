/* Calls of NCCL, one of a group at a time, and handles, which go between calls.
 *
 * Communicators do not block: NCCL hands what it is asked to do to a thread of its own, answers
 * that it is in progress, and is asked again by who waits. So a launch queue that is full should
 * not hold up the caller. That is how NCCL does it, and no promise of its documentation: the
 * interpreter's lock is let go of around calls all the same, and a call that does not return has a
 * deadline, too.
 */
#include "transport/nccl_private.h"

#include "base/clock.h"

/* Before a lock of ours is taken: who has it may wait for the interpreter's. */
static void let_go(const fc_nccl_group *group)
{
    const fc_host_ops *host = &group->base->host;

    if (host->enter_wait != NULL) {
        host->enter_wait(host->context);
    }
}

static void take_back(const fc_nccl_group *group)
{
    const fc_host_ops *host = &group->base->host;

    if (host->leave_wait != NULL) {
        host->leave_wait(host->context);
    }
}

fc_status fc_nccl_enter(fc_nccl_comm *comm)
{
    fc_nccl_group *group = comm->group;
    fc_status st;

    let_go(group);
    (void)pthread_mutex_lock(&group->calling);
    st = fc_nccl_check(group); /* handles go after the group's end was told */
    if (st != FC_OK) {
        (void)pthread_mutex_unlock(&group->calling);
        take_back(group);
        return st;
    }
    atomic_store(&group->caller, comm->number);
    atomic_store_explicit(&group->call_began_ns, fc_now_ns(), memory_order_release);
    return FC_OK;
}

void fc_nccl_leave(fc_nccl_comm *comm)
{
    fc_nccl_group *group = comm->group;

    atomic_store_explicit(&group->call_began_ns, 0, memory_order_relaxed);
    (void)pthread_mutex_unlock(&group->calling);
    take_back(group);
}

bool fc_nccl_is_error(int result)
{
    return result != FC_NCCL_SUCCESS && result != FC_NCCL_IN_PROGRESS;
}

int fc_nccl_ask(const fc_nccl_comm *comm)
{
    void *handle = fc_nccl_handle(comm);
    int error = FC_NCCL_SUCCESS, result;

    if (handle == NULL) {
        return FC_NCCL_IN_PROGRESS;
    }
    result = comm->group->nccl->call.comm_async_error(handle, &error);
    return result == FC_NCCL_SUCCESS ? error : result;
}

int fc_nccl_async_error(fc_nccl_comm *comm)
{
    int result;

    (void)pthread_mutex_lock(&comm->group->calling);
    result = fc_nccl_ask(comm);
    (void)pthread_mutex_unlock(&comm->group->calling);
    return result;
}

int fc_nccl_take_handles(fc_nccl_group *group, void *handles[FC_NCCL_COMMS])
{
    int n = 0;

    for (int i = 0; i < group->n_comms; i++) {
        void *handle = __atomic_exchange_n(&group->comms[i].handle, NULL, __ATOMIC_ACQ_REL);

        if (handle != NULL) {
            handles[n++] = handle;
        }
    }
    return n;
}

void fc_nccl_abort_comms(fc_nccl_group *group)
{
    void *handles[FC_NCCL_COMMS];
    int n;

    let_go(group);
    (void)pthread_mutex_lock(&group->calling);
    n = fc_nccl_take_handles(group, handles);
    (void)pthread_mutex_unlock(&group->calling);
    while (n > 0) {
        /* Whatever it answers, the handle is gone. */
        (void)group->nccl->call.comm_abort(handles[--n]);
    }
    take_back(group);
}
