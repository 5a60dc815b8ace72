/* Windows: memory that every rank of a communicator has registered.
 *
 * If one rank works in a window all must, so they agree twice over the group's exchange: that all
 * have the memory, before NCCL waits for all of them; and that all got a window, since NCCL answers
 * success with no window where it cannot.
 */
#include "transport/nccl_private.h"

#include "base/alloc.h"
#include "transport/shm_impl.h"

#include <string.h>

struct fc_nccl_window {
    fc_nccl_comm *comm; /* borrowed */
    void *memory;
    bool is_own;  /* memory is NCCL's, to be freed */
    void *handle; /* NULL: not registered */
};

/* The same status on all ranks: the first failure in rank order. */
static fc_status agree(const fc_transport *base, const char *what, fc_status status)
{
    fc_shm_outcome mine, *all;
    fc_status st;

    if (base->host.exchange == NULL) { /* one rank */
        return status;
    }
    fc_shm_outcome_set(&mine, base, status);
    all = fc_alloc((size_t)base->n_ranks, sizeof(*all));
    if (all == NULL) {
        return fc_fail(FC_ERR_NOMEM, "window of %d ranks", base->n_ranks);
    }
    st = base->host.exchange(base->host.context, what, &mine, sizeof(mine), all);
    if (st == FC_OK) {
        st = fc_shm_outcome_agree(base, "memory for NCCL", all, sizeof(*all));
    }
    fc_free(all);
    return st;
}

static fc_status find_memory(fc_nccl_window *window, void *memory, size_t bytes)
{
    const fc_nccl *nccl = window->comm->group->nccl;
    int result;

    if (nccl->call.window_register == NULL || nccl->call.mem_alloc == NULL ||
        nccl->call.window_deregister == NULL || nccl->call.mem_free == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "symmetric memory needs NCCL 2.27.3: %s", nccl->text);
    }
    if (memory != NULL) {
        window->memory = memory;
        return FC_OK;
    }
    result = nccl->call.mem_alloc(&window->memory, bytes);
    if (result != FC_NCCL_SUCCESS) {
        window->memory = NULL;
        return fc_fail(FC_ERR_NOMEM, "%zu bytes of NCCL's memory: %s", bytes,
                       nccl->call.error_text(result));
    }
    window->is_own = true;
    return FC_OK;
}

static fc_status enlist(fc_nccl_window *window, size_t bytes)
{
    const fc_wait_info info = {.op = "the registration of memory"};
    fc_nccl_comm *comm = window->comm;

    FC_TRY(fc_nccl_settle(comm,
                          comm->group->nccl->call.window_register(comm->handle, window->memory,
                                                                  bytes, &window->handle,
                                                                  FC_NCCL_WINDOW_SYMMETRIC),
                          &info));
    comm->group->n_windows += window->handle != NULL;
    return window->handle != NULL
               ? FC_OK
               : fc_fail(FC_ERR_UNSUPPORTED, "NCCL has no symmetric memory between these ranks, or"
                                             " not for this kind of memory");
}

fc_status fc_nccl_window_create(fc_device_comm *target, void *memory, size_t bytes,
                                fc_nccl_window **out)
{
    fc_nccl_comm *comm = (fc_nccl_comm *)(void *)target;
    const fc_transport *base = comm->group->base;
    fc_nccl_window *window;
    fc_status st;

    FC_TRY(fc_nccl_watch(comm->group));
    if (base->n_ranks > 1 && base->host.exchange == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED,
                       "process group %s was split off another one: its ranks cannot agree on"
                       " memory",
                       base->name);
    }
    window = fc_alloc(1, sizeof(*window));
    if (window == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "window");
        return agree(base, "nccl memory", st);
    }
    window->comm = comm;
    st = agree(base, "nccl memory", find_memory(window, memory, bytes));
    if (st == FC_OK) {
        st = agree(base, "nccl window", enlist(window, bytes));
    }
    if (st != FC_OK) {
        fc_nccl_window_destroy(window);
        return st;
    }
    *out = window;
    return FC_OK;
}

void fc_nccl_window_destroy(fc_nccl_window *window)
{
    const fc_nccl_functions *call;

    if (window == NULL) {
        return;
    }
    call = &window->comm->group->nccl->call;
    if (window->handle != NULL && !fc_transport_is_forked(window->comm->group->base)) {
        window->comm->group->n_windows--;
        if (window->comm->handle != NULL) { /* an abort takes windows with it */
            (void)call->window_deregister(window->comm->handle, window->handle);
        }
    }
    if (window->is_own && !fc_transport_is_forked(window->comm->group->base)) {
        (void)call->mem_free(window->memory);
    }
    fc_free(window);
}

void *fc_nccl_window_memory(const fc_nccl_window *window)
{
    return window->memory;
}
