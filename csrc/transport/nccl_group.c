/* Making and ending the communicators of a process group.
 *
 * The first communicator is made from an id that the group's first rank brings to the board's
 * exchange; the second is split off the first, which needs no set-up of its own. Where NCCL cannot
 * split, each has an id.
 */
#include "transport/nccl_private.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* ---- communicators ---- */

/* As much of the layout as the library knows, so that it reads nothing else. */
static fc_nccl_config config_of(const fc_nccl_group *group)
{
    int version = group->nccl->version;
    fc_nccl_config c = {.magic = FC_NCCL_MAGIC,
                        .version = (unsigned)version,
                        .blocking = 0,
                        .cga_cluster_size = FC_NCCL_UNDEFINED,
                        .min_ctas = FC_NCCL_UNDEFINED,
                        .max_ctas = FC_NCCL_UNDEFINED,
                        .split_share = 0, /* shared resources would tie parent and child together */
                        .traffic_class = FC_NCCL_UNDEFINED,
                        .collnet_enable = FC_NCCL_UNDEFINED,
                        .cta_policy = FC_NCCL_UNDEFINED,
                        .shrink_share = FC_NCCL_UNDEFINED,
                        .nvls_ctas = FC_NCCL_UNDEFINED,
                        .channels_per_net_peer = FC_NCCL_UNDEFINED,
                        .nvlink_centric_sched = FC_NCCL_UNDEFINED};

    if (version >= 22800) {
        c.size = FC_NCCL_CONFIG_TO(nvlink_centric_sched);
        c.version = version < FC_NCCL_NEWEST ? (unsigned)version : FC_NCCL_NEWEST;
    } else if (version >= 22700) {
        c.size = FC_NCCL_CONFIG_TO(shrink_share);
    } else if (version >= 21800) {
        c.size = FC_NCCL_CONFIG_TO(split_share);
    } else if (version >= 21700) {
        c.size = FC_NCCL_CONFIG_TO(net_name);
    } else {
        c.size = FC_NCCL_CONFIG_TO(blocking);
    }
    return c;
}

static fc_status init_comm(fc_nccl_comm *comm, const fc_nccl_id *id)
{
    const fc_wait_info info = {.op = "the set-up of a communicator"};
    fc_nccl_group *group = comm->group;
    fc_nccl_config config = config_of(group);
    int result;

    FC_TRY(fc_nccl_enter(comm));
    result = group->nccl->call.comm_init(&comm->handle, group->base->n_ranks, *id,
                                         group->base->rank, &config);
    fc_nccl_leave(comm);
    return fc_nccl_settle(comm, result, &info);
}

/* The handle is there when the first one's call has ended. */
static fc_status split_comm(fc_nccl_comm *comm, fc_nccl_comm *first)
{
    const fc_wait_info info = {.op = "the split of a communicator"};
    fc_nccl_group *group = comm->group;
    fc_nccl_config config = config_of(group);
    int result;

    FC_TRY(fc_nccl_enter(comm));
    result =
        group->nccl->call.comm_split(first->handle, 0, group->base->rank, &comm->handle, &config);
    fc_nccl_leave(comm);
    FC_TRY(fc_nccl_settle(first, result, &info));
    return fc_nccl_settle(comm, FC_NCCL_IN_PROGRESS, &info);
}

static bool can_split(const fc_nccl_group *group)
{
    return group->nccl->call.comm_split != NULL;
}

static fc_status make_comms(fc_nccl_group *group, const fc_nccl_id *ids)
{
    for (int i = 0; i < group->n_comms; i++) {
        fc_nccl_comm *comm = &group->comms[i];

        FC_TRY(i > 0 && can_split(group) ? split_comm(comm, &group->comms[0])
                                         : init_comm(comm, &ids[i]));
    }
    return FC_OK;
}

/* Ids of the group's first rank, as many as will be used. */
static fc_status make_ids(const fc_nccl_group *group, fc_nccl_id *out)
{
    int i, result, n = can_split(group) ? 1 : group->n_comms;

    memset(out, 0, FC_NCCL_COMMS * sizeof(*out));
    if (group->base->rank != 0) {
        return FC_OK;
    }
    for (i = 0; i < n; i++) {
        result = group->nccl->call.get_unique_id(&out[i]);
        if (result != FC_NCCL_SUCCESS) {
            return fc_fail(FC_ERR_SYSTEM, "NCCL gives no id for a communicator: %s",
                           group->nccl->call.error_text(result));
        }
    }
    return FC_OK;
}

/* ---- groups ---- */

static void describe(fc_nccl_group *group)
{
    const fc_transport *base = group->base;
    int n_watched = fc_nccl_board_n_watched(group->board);
    int n_unseen = base->n_ranks - 1 - n_watched;
    char version[32];
    size_t used;

    fc_nccl_version_text(group->nccl->version, version, sizeof(version));
    (void)snprintf(group->text, sizeof(group->text),
                   "%d rank%s over NCCL %s, %s for gathers and reductions", base->n_ranks,
                   base->n_ranks == 1 ? "" : "s", version,
                   group->n_comms > 1 ? "a communicator each" : "one communicator");
    used = strlen(group->text);
    if (n_unseen > 0) {
        (void)snprintf(group->text + used, sizeof(group->text) - used,
                       "; the processes of %d ranks cannot be watched from this host", n_unseen);
    }
}

static fc_status alloc_group(const fc_transport_config *config, const fc_nccl_options *options,
                             fc_nccl_group **out)
{
    fc_nccl_group *group = fc_alloc(1, sizeof(*group));
    fc_status st;
    int i;

    if (group == NULL) {
        return fc_fail(FC_ERR_NOMEM, "NCCL's part of process group %s", config->name);
    }
    st = fc_transport_alloc(config, &group->base);
    if (st != FC_OK) {
        fc_free(group);
        return st;
    }
    group->options = *options;
    group->options.events = NULL;
    if (options->events != NULL) {
        group->events = *options->events;
    }
    (void)pthread_mutex_init(&group->calling, NULL);
    group->timeout_ns = config->timeout_ns;
    group->nccl = options->nccl;
    group->n_comms = options->is_one ? 1 : 2;
    for (i = 0; i < FC_NCCL_COMMS; i++) {
        group->comms[i].group = group;
        group->comms[i].number = i;
        (void)pthread_mutex_init(&group->comms[i].marks.looking, NULL);
    }
    *out = group;
    return FC_OK;
}

static fc_status prepare_deadlines(fc_nccl_group *group)
{
    for (int i = 0; i < group->n_comms; i++) {
        FC_TRY(fc_nccl_marks_create(&group->comms[i]));
    }
    return fc_nccl_watch_over(group);
}

static fc_status create(const fc_transport_config *config, const fc_nccl_options *options,
                        fc_nccl_group **out)
{
    fc_nccl_group *group = NULL;
    fc_nccl_id ids[FC_NCCL_COMMS];
    fc_nccl_id *all;
    fc_status st;

    FC_TRY(alloc_group(config, options, &group));
    all = fc_alloc((size_t)config->n_ranks * FC_NCCL_COMMS, sizeof(*all));
    if (all == NULL) {
        st = fc_fail(FC_ERR_NOMEM, "NCCL's ids of %d ranks", config->n_ranks);
    } else {
        st = make_ids(group, ids);
        if (st == FC_OK) {
            st = prepare_deadlines(group);
        }
        st = fc_nccl_board_create(group->base, st, ids, all, &group->board);
    }
    if (st == FC_OK) {
        st = make_comms(group, all);
    }
    fc_free(all);
    if (st != FC_OK) {
        fc_nccl_group_destroy(group);
        return st;
    }
    describe(group);
    *out = group;
    return FC_OK;
}

fc_status fc_nccl_group_create(const fc_transport_config *config, const fc_nccl_options *options,
                               fc_nccl_group **out)
{
    if (options->nccl == NULL) {
        return fc_fail(FC_ERR_INVALID, "process group %s: no library of NCCL", config->name);
    }
    if (config->n_ranks > 1 && config->host.exchange == NULL) {
        return fc_fail(FC_ERR_INVALID, "process group %s: no way to exchange NCCL's ids",
                       config->name);
    }
    if (config->n_ranks == 1) {
        fc_transport_config alone = *config;

        alone.host.exchange = NULL;
        return create(&alone, options, out);
    }
    return create(config, options, out);
}

/* ---- the end ---- */

static fc_status close_comm(fc_nccl_comm *comm)
{
    const fc_wait_info info = {.op = "the end of a communicator"};
    const fc_nccl_functions *call = &comm->group->nccl->call;
    void *handle;
    int result;

    FC_TRY(fc_nccl_enter(comm));
    result = call->comm_finalize(fc_nccl_handle(comm));
    fc_nccl_leave(comm);
    FC_TRY(fc_nccl_settle(comm, result, &info));
    FC_TRY(fc_nccl_enter(comm));
    handle = __atomic_exchange_n(&comm->handle, NULL, __ATOMIC_ACQ_REL);
    result = call->comm_destroy(handle);
    fc_nccl_leave(comm);
    return fc_nccl_is_error(result) ? fc_nccl_settle(comm, result, &info) : FC_OK;
}

fc_status fc_nccl_group_close(fc_nccl_group *group)
{
    int i;

    if (group->is_closed) {
        return FC_OK;
    }
    FC_TRY(fc_nccl_check(group));
    for (i = group->n_comms - 1; i >= 0; i--) {
        FC_TRY(close_comm(&group->comms[i]));
    }
    fc_nccl_board_leave(group->board);
    fc_nccl_stop_watching(group);
    group->is_closed = true;
    return FC_OK;
}

void fc_nccl_group_leave(fc_nccl_group *group, int64_t limit_ns)
{
    fc_transport *base = group->base;
    int64_t timeout_ns = base->timeout_ns;

    if (group->is_closed || fc_transport_is_forked(base)) {
        return;
    }
    fc_nccl_stop_watching(group); /* who waits below watches, and not for long */
    fc_nccl_board_leave(group->board);
    base->timeout_ns = limit_ns < timeout_ns ? limit_ns : timeout_ns;
    if (fc_nccl_group_close(group) != FC_OK) {
        fc_nccl_abort_comms(group);
        group->is_closed = true;
    }
    base->timeout_ns = timeout_ns;
}

void fc_nccl_group_destroy(fc_nccl_group *group)
{
    if (group == NULL) {
        return;
    }
    if (!fc_transport_is_forked(group->base)) {
        fc_nccl_stop_watching(group);
        if (group->board != NULL) {
            fc_nccl_board_leave(group->board);
        }
        fc_nccl_abort_comms(group);
    }
    for (int i = 0; i < group->n_comms; i++) {
        fc_nccl_marks_destroy(&group->comms[i]);
    }
    fc_nccl_board_destroy(group->board);
    fc_transport_destroy(group->base);
    fc_free(group);
}

fc_device_comm *fc_nccl_gathers(fc_nccl_group *group)
{
    return (fc_device_comm *)(void *)&group->comms[0];
}

fc_device_comm *fc_nccl_reductions(fc_nccl_group *group)
{
    return (fc_device_comm *)(void *)&group->comms[group->n_comms - 1];
}

const char *fc_nccl_group_describe(const fc_nccl_group *group)
{
    return group->text;
}
