/* The collectives of a device's process groups, and what the failure of one means to the others. */
#include "transport/collectives.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* What fc_device_comm points to. */
typedef struct peers {
    struct peers *next;
    fc_collectives_group group;
    char name[];
} peers;

struct fc_collectives {
    fc_collectives_host host;
    peers *first;            /* owned */
    fc_nccl_group **watched; /* owned; NCCL's among them, for waits */
    size_t n_watched;
};

static const peers *peers_of(const fc_device_comm *comm)
{
    return (const peers *)(const void *)comm;
}

fc_status fc_collectives_create(const fc_collectives_host *host, fc_collectives **out)
{
    fc_collectives *all = fc_alloc(1, sizeof(*all));

    if (all == NULL) {
        return fc_fail(FC_ERR_NOMEM, "collectives of a device");
    }
    all->host = *host;
    *out = all;
    return FC_OK;
}

static void release(const fc_collectives_group *group)
{
    if (group->is_seen) {
        group->seen.release(group->seen.context);
    } else if (group->release != NULL) {
        group->release(group->context);
    }
}

void fc_collectives_destroy(fc_collectives *all)
{
    while (all != NULL && all->first != NULL) {
        peers *p = all->first;

        all->first = p->next;
        release(&p->group);
        fc_free(p);
    }
    if (all != NULL) {
        fc_free((void *)all->watched);
        fc_free(all);
    }
}

static fc_status watch_too(fc_collectives *all, fc_nccl_group *nccl)
{
    fc_nccl_group **more = (fc_nccl_group **)fc_alloc(all->n_watched + 1, sizeof(*more));

    if (more == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%zu groups of NCCL", all->n_watched + 1);
    }
    for (size_t i = 0; i < all->n_watched; i++) {
        more[i] = all->watched[i];
    }
    more[all->n_watched++] = nccl;
    fc_free((void *)all->watched);
    all->watched = more;
    return FC_OK;
}

static fc_status add(fc_collectives *all, const char *name, const fc_collectives_group *group)
{
    size_t name_bytes = strlen(name) + 1;
    peers *p = fc_alloc(1, sizeof(*p) + name_bytes);
    fc_status st = p == NULL             ? fc_fail(FC_ERR_NOMEM, "collectives of %s", name)
                   : group->nccl == NULL ? FC_OK
                                         : watch_too(all, group->nccl);

    if (st != FC_OK) {
        fc_free(p);
        return st;
    }
    p->group = *group;
    memcpy(p->name, name, name_bytes);
    p->next = all->first;
    all->first = p;
    return FC_OK;
}

fc_status fc_collectives_connect(fc_collectives *all, const char *name,
                                 const fc_collectives_group *group)
{
    bool is_known = fc_collectives_find(all, name) != NULL;
    fc_status st = is_known ? FC_OK : add(all, name, group);

    if (is_known || st != FC_OK) {
        release(group);
    }
    return st;
}

fc_device_comm *fc_collectives_find(const fc_collectives *all, const char *name)
{
    for (peers *p = all->first; p != NULL; p = p->next) {
        if (strcmp(p->name, name) == 0) {
            return (fc_device_comm *)(void *)p;
        }
    }
    return NULL;
}

bool fc_collectives_has_groups(const fc_device_comm *comm)
{
    return peers_of(comm)->group.nccl != NULL;
}

int fc_collectives_n_ranks(const fc_device_comm *comm)
{
    return peers_of(comm)->group.n_ranks;
}

bool fc_collectives_scale(fc_device_comm *comm, double factor)
{
    const fc_collectives_group *g = &peers_of(comm)->group;

    if (!g->may_scale || g->is_seen) {
        return factor == 1;
    }
    if (g->nccl != NULL) {
        return fc_nccl_scale(g->nccl, factor);
    }
    g->scale(g->context, factor);
    return true;
}

/* ---- failures ---- */

/* What a collective or a wait came to: where it has broken its group, all end. */
static fc_status ended(const fc_collectives *all, const fc_nccl_group *nccl, fc_status st)
{
    char text[FC_MESSAGE_BYTES];

    if (st == FC_OK || !fc_nccl_is_broken(nccl)) {
        return st;
    }
    (void)snprintf(text, sizeof(text), "%s", fc_last_message());
    for (size_t i = 0; i < all->n_watched; i++) {
        (void)fc_nccl_abort(all->watched[i], st, text);
    }
    return fc_fail(st, "%s", text);
}

fc_status fc_collectives_watch(fc_collectives *all)
{
    for (const peers *p = all->first; p != NULL; p = p->next) {
        if (p->group.nccl != NULL) {
            FC_TRY(ended(all, p->group.nccl, fc_nccl_watch(p->group.nccl)));
        }
    }
    return FC_OK;
}

static fc_status wait_watching(void *context, bool (*ready)(void *arg), void *arg)
{
    const fc_wait_info info = {.op = "a wait for the device"};
    const fc_collectives *all = context;
    fc_status st;

    if (all->n_watched == 0) {
        return FC_AGAIN;
    }
    st = fc_nccl_wait(all->watched, all->n_watched, ready, arg, &info);
    for (size_t i = 0; i < all->n_watched; i++) {
        if (fc_nccl_is_broken(all->watched[i])) {
            return ended(all, all->watched[i], st);
        }
    }
    return st;
}

/* ---- in sight ---- */

/* A collective of messages, for its stream. */
typedef struct seen_call {
    const fc_message_ops *ops;
    void *to;
    const void *from;
    size_t n;
    fc_dtype dtype;
} seen_call;

static fc_status seen_all_gather(void *arg)
{
    const seen_call *c = arg;

    return c->ops->all_gather(c->ops->context, c->to, c->from, c->n);
}

static fc_status seen_reduce_scatter(void *arg)
{
    const seen_call *c = arg;

    return c->ops->reduce_scatter(c->ops->context, c->to, (void *)(uintptr_t)c->from, c->n,
                                  c->dtype);
}

static fc_status seen_all_reduce(void *arg)
{
    const seen_call *c = arg;

    return c->ops->all_reduce(c->ops->context, c->to, c->n, c->dtype);
}

static fc_status in_sight(const fc_collectives *all, fc_stream *stream, seen_call call,
                          fc_status (*body)(void *arg))
{
    return all->host.in_stream(all->host.context, stream, body, &call);
}

/* ---- what devices call ---- */

static fc_status alloc_for(void *context, fc_stream *stream, size_t bytes, void **out)
{
    const fc_collectives_host *host = &((fc_collectives *)context)->host;

    return host->alloc(host->context, stream, bytes, out);
}

static void give_back(void *context, void *memory)
{
    const fc_collectives_host *host = &((fc_collectives *)context)->host;

    host->free(host->context, memory);
}

static fc_status all_gather(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                            void *buffer, size_t part_bytes)
{
    const fc_collectives *all = context;
    const fc_collectives_group *g = &peers_of(comm)->group;

    if (part_bytes == 0 || (g->nccl == NULL && g->n_ranks == 1)) {
        return FC_OK;
    }
    if (g->is_seen) {
        const char *own = (const char *)buffer + (size_t)g->rank * part_bytes;

        return in_sight(all, stream, (seen_call){&g->seen, buffer, own, part_bytes, FC_U8},
                        seen_all_gather);
    }
    if (g->nccl == NULL) {
        return g->all_gather(g->context, stream, label, buffer, part_bytes);
    }
    return ended(all, g->nccl,
                 fc_nccl_all_gather(fc_nccl_gathers(g->nccl), all->host.native(stream), label,
                                    buffer, part_bytes));
}

static fc_status all_gather_each(void *context, fc_device_comm *comm, fc_stream *stream,
                                 fc_label label, const fc_gather *gathers, size_t n_gathers)
{
    const fc_collectives *all = context;
    const fc_collectives_group *g = &peers_of(comm)->group;

    if (g->nccl == NULL) {
        return g->n_ranks == 1 /* whose parts are in their places */
                   ? FC_OK
                   : fc_fail(FC_ERR_UNSUPPORTED,
                             "all-gathers of unit %s: a process group has no groups", label.unit);
    }
    return ended(all, g->nccl,
                 fc_nccl_all_gather_each(fc_nccl_gathers(g->nccl), all->host.native(stream), label,
                                         gathers, n_gathers));
}

static fc_status reduce_scatter(void *context, fc_device_comm *comm, fc_stream *stream,
                                fc_label label, void *to, const void *from, size_t numel,
                                fc_dtype dtype)
{
    const fc_collectives *all = context;
    const fc_collectives_group *g = &peers_of(comm)->group;

    if (g->is_seen) {
        return in_sight(all, stream, (seen_call){&g->seen, to, from, numel, dtype},
                        seen_reduce_scatter);
    }
    if (g->nccl == NULL) {
        return g->reduce_scatter(g->context, stream, label, to, from, numel, dtype);
    }
    return ended(all, g->nccl,
                 fc_nccl_reduce_scatter(fc_nccl_reductions(g->nccl), all->host.native(stream),
                                        label, to, from, numel, dtype));
}

static fc_status all_reduce(void *context, fc_device_comm *comm, fc_stream *stream, fc_label label,
                            void *buffer, size_t numel, fc_dtype dtype)
{
    const fc_collectives *all = context;
    const fc_collectives_group *g = &peers_of(comm)->group;

    if (g->is_seen) {
        return in_sight(all, stream, (seen_call){&g->seen, buffer, NULL, numel, dtype},
                        seen_all_reduce);
    }
    if (g->nccl == NULL) {
        return g->n_ranks == 1 ? FC_OK
                               : g->all_reduce(g->context, stream, label, buffer, numel, dtype);
    }
    return ended(all, g->nccl,
                 fc_nccl_all_reduce(fc_nccl_reductions(g->nccl), all->host.native(stream), label,
                                    buffer, numel, dtype));
}

fc_device_caller fc_collectives_caller(fc_collectives *all)
{
    return (fc_device_caller){.context = all,
                              .alloc = alloc_for,
                              .free = give_back,
                              .all_gather = all_gather,
                              .reduce_scatter = reduce_scatter,
                              .all_reduce = all_reduce,
                              .all_gather_each = all_gather_each,
                              .wait = wait_watching};
}
