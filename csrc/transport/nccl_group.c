/* Making, splitting and ending the communicators of a process group.
 *
 * The first communicator is made from an id that the group's first rank brings to the board's
 * exchange; the second is split off the first, which needs no set-up of its own. A group that is
 * split off another one splits its communicators. Where NCCL cannot split, each has an id.
 */
#include "transport/nccl_private.h"

#include "base/alloc.h"

#include <stdio.h>
#include <string.h>

/* Where a group's communicators come from. */
typedef struct origin {
    fc_nccl_comm *parent; /* NULL: from ids */
    int color;
} origin;

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
                        .shrink_share = FC_NCCL_UNDEFINED};

    if (version >= 22700) {
        c.size = sizeof(c);
        c.version = version < FC_NCCL_NEWEST ? (unsigned)version : FC_NCCL_NEWEST;
    } else if (version >= 21800) {
        c.size = offsetof(fc_nccl_config, traffic_class);
    } else if (version >= 21700) {
        c.size = offsetof(fc_nccl_config, split_share);
    } else {
        c.size = offsetof(fc_nccl_config, cga_cluster_size);
    }
    return c;
}

static fc_status init_comm(fc_nccl_comm *comm, const fc_nccl_id *id)
{
    const fc_wait_info info = {.op = "the set-up of a communicator"};
    fc_nccl_group *group = comm->group;
    fc_nccl_config config = config_of(group);
    int result = group->nccl->call.comm_init(&comm->handle, group->base->n_ranks, *id,
                                             group->base->rank, &config);

    return fc_nccl_settle(comm, result, &info);
}

/* Every rank of the parent takes part; FC_NCCL_NO_COLOR leaves `comm` without a handle. The handle
 * is there when the parent's call has ended. */
static fc_status split_comm(fc_nccl_comm *comm, fc_nccl_comm *parent, int color)
{
    const fc_wait_info info = {.op = "the split of a communicator"};
    fc_nccl_group *group = comm->group;
    fc_nccl_config config = config_of(group);
    fc_status st;
    int result = group->nccl->call.comm_split(parent->handle, color, group->base->rank,
                                              &comm->handle, &config);

    if (color == FC_NCCL_NO_COLOR) {
        return fc_nccl_settle(parent, result, &info);
    }
    if (parent->group == group) {
        FC_TRY(fc_nccl_settle(parent, result, &info));
    } else {
        st = fc_nccl_settle(parent, result, &info);
        if (st != FC_OK) {
            return fc_nccl_abort(group, st, fc_last_message());
        }
    }
    return fc_nccl_settle(comm, FC_NCCL_IN_PROGRESS, &info);
}

static fc_status make_comms(fc_nccl_group *group, const fc_nccl_id *ids, origin from)
{
    bool can_split = group->nccl->call.comm_split != NULL;
    int i;

    for (i = 0; i < group->n_comms; i++) {
        fc_nccl_comm *comm = &group->comms[i];

        if (can_split && from.parent != NULL) {
            FC_TRY(split_comm(comm, from.parent, from.color));
        } else if (can_split && i > 0) {
            FC_TRY(split_comm(comm, &group->comms[0], 0));
        } else if (from.color != FC_NCCL_NO_COLOR) {
            FC_TRY(init_comm(comm, &ids[i]));
        }
    }
    return FC_OK;
}

/* Ids of the group's first rank, as many as will be used. */
static fc_status make_ids(const fc_nccl_group *group, origin from, fc_nccl_id *out)
{
    bool can_split = group->nccl->call.comm_split != NULL;
    int i, result, n = can_split ? from.parent == NULL : group->n_comms;

    memset(out, 0, FC_NCCL_COMMS * sizeof(*out));
    if (group->base->rank != 0 || from.color == FC_NCCL_NO_COLOR) {
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
    static const char *const uses[] = {"", "gathers", "reductions", "gathers and reductions"};
    const fc_transport *base = group->base;
    int n_watched = fc_nccl_board_n_watched(group->board);
    int n_unseen = base->n_ranks - 1 - n_watched;
    char version[32];
    size_t used;

    fc_nccl_version_text(group->nccl->version, version, sizeof(version));
    (void)snprintf(group->text, sizeof(group->text), "%d rank%s over NCCL %s, %s for %s",
                   base->n_ranks, base->n_ranks == 1 ? "" : "s", version,
                   group->n_comms > 1 ? "a communicator each" : "one communicator",
                   uses[group->options.use]);
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
    group->nccl = options->nccl;
    group->n_comms = options->use == FC_NCCL_BOTH && !options->is_one ? 2 : 1;
    for (i = 0; i < FC_NCCL_COMMS; i++) {
        group->comms[i].group = group;
        group->comms[i].number = i;
    }
    *out = group;
    return FC_OK;
}

static fc_status create(const fc_transport_config *config, const fc_nccl_options *options,
                        origin from, fc_nccl_group **out)
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
        st = make_ids(group, from, ids);
        st = fc_nccl_board_create(group->base, st, ids, all, &group->board);
    }
    if (st == FC_OK) {
        st = make_comms(group, all, from);
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
    if (options->nccl == NULL || options->use < FC_NCCL_GATHERS || options->use > FC_NCCL_BOTH) {
        return fc_fail(FC_ERR_INVALID, "process group %s: no library of NCCL, or no use for it",
                       config->name);
    }
    if (config->n_ranks > 1 && config->host.exchange == NULL) {
        return fc_fail(FC_ERR_INVALID, "process group %s: no way to exchange NCCL's ids",
                       config->name);
    }
    if (config->n_ranks == 1) {
        fc_transport_config alone = *config;

        alone.host.exchange = NULL;
        return create(&alone, options, (origin){NULL, 0}, out);
    }
    return create(config, options, (origin){NULL, 0}, out);
}

/* ---- splitting ---- */

/* An exchange among the ranks of one color, in terms of the parent's: all colors take the same
 * steps at the same time. */
typedef struct split_host {
    const fc_transport *parent;
    const int *members; /* parent's ranks */
    int n_members;
} split_host;

static fc_status split_exchange(void *context, const char *what, const void *mine, size_t bytes,
                                void *all_out)
{
    const split_host *split = context;
    const fc_host_ops *host = &split->parent->host;
    char *all = fc_alloc((size_t)split->parent->n_ranks, bytes);
    fc_status st;

    if (all == NULL) {
        return fc_fail(FC_ERR_NOMEM, "exchange of %s", what);
    }
    st = host->exchange(host->context, what, mine, bytes, all);
    for (int i = 0; st == FC_OK && i < split->n_members; i++) {
        memcpy((char *)all_out + (size_t)i * bytes, all + (size_t)split->members[i] * bytes, bytes);
    }
    fc_free(all);
    return st;
}

/* The ranks of this rank's color; `members` and `global_ranks` have room for all. */
static fc_status find_members(fc_transport *parent, int32_t color, int *members, int *global_ranks,
                              fc_transport_config *config)
{
    int32_t *colors = fc_alloc((size_t)parent->n_ranks, sizeof(*colors));
    fc_status st;

    if (colors == NULL) {
        return fc_fail(FC_ERR_NOMEM, "colors of %d ranks", parent->n_ranks);
    }
    colors[0] = color;
    st = parent->host.exchange == NULL ? FC_OK
                                       : parent->host.exchange(parent->host.context, "nccl colors",
                                                               &color, sizeof(color), colors);
    config->n_ranks = 0;
    for (int r = 0; st == FC_OK && r < parent->n_ranks; r++) {
        if (colors[r] != color) {
            continue;
        }
        if (r == parent->rank) {
            config->rank = config->n_ranks;
        }
        members[config->n_ranks] = r;
        global_ranks[config->n_ranks++] = parent->global_ranks[r];
    }
    fc_free(colors);
    return st;
}

static fc_status split(fc_nccl_group *group, int color, const char *name, fc_nccl_use use,
                       int *ranks, fc_nccl_group **out)
{
    fc_transport *parent = group->base;
    int *members = ranks, *global_ranks = ranks + parent->n_ranks;
    split_host context = {.parent = parent, .members = members};
    fc_nccl_options options = group->options;
    fc_transport_config config = {.name = name,
                                  .global_ranks = global_ranks,
                                  .timeout_ns = parent->timeout_ns,
                                  .host = parent->host};
    fc_nccl_group *child = NULL;

    options.use = use;
    FC_TRY(find_members(parent, color, members, global_ranks, &config));
    context.n_members = config.n_ranks;
    config.host.context = &context;
    config.host.exchange = parent->host.exchange == NULL ? NULL : split_exchange;
    /* The others visit the program, which knows its own context only. */
    config.host.enter_wait = NULL;
    config.host.leave_wait = NULL;
    config.host.poll = NULL;
    config.host.notice = NULL;
    FC_TRY(create(&config, &options, (origin){&group->comms[0], color}, &child));
    if (color == FC_NCCL_NO_COLOR) {
        fc_nccl_group_destroy(child);
        child = NULL;
    } else {
        child->base->host = parent->host;
        child->base->host.exchange = NULL; /* a split of a split begins at the parent */
    }
    *out = child;
    return FC_OK;
}

fc_status fc_nccl_group_split(fc_nccl_group *group, int color, const char *name, fc_nccl_use use,
                              fc_nccl_group **out)
{
    int *ranks;
    fc_status st;

    FC_TRY(fc_nccl_watch(group));
    if (use < FC_NCCL_GATHERS || use > FC_NCCL_BOTH ||
        (group->base->n_ranks > 1 && group->base->host.exchange == NULL)) {
        return fc_fail(FC_ERR_INVALID, "process group %s cannot be split for %s", group->base->name,
                       name);
    }
    ranks = fc_alloc(2 * (size_t)group->base->n_ranks, sizeof(*ranks));
    if (ranks == NULL) {
        return fc_fail(FC_ERR_NOMEM, "split of %d ranks", group->base->n_ranks);
    }
    st = split(group, color < 0 ? FC_NCCL_NO_COLOR : color, name, use, ranks, out);
    fc_free(ranks);
    return st;
}

/* ---- the end ---- */

static fc_status close_comm(fc_nccl_comm *comm)
{
    const fc_wait_info info = {.op = "the end of a communicator"};
    const fc_nccl_functions *call = &comm->group->nccl->call;
    void *handle = comm->handle;
    int result;

    FC_TRY(fc_nccl_settle(comm, call->comm_finalize(handle), &info));
    comm->handle = NULL;
    result = call->comm_destroy(handle);
    return result == FC_NCCL_SUCCESS || result == FC_NCCL_IN_PROGRESS
               ? FC_OK
               : fc_nccl_settle(comm, result, &info);
}

fc_status fc_nccl_group_close(fc_nccl_group *group)
{
    int i;

    if (group->is_closed) {
        return FC_OK;
    }
    FC_TRY(fc_transport_check(group->base));
    for (i = group->n_comms - 1; i >= 0; i--) {
        FC_TRY(close_comm(&group->comms[i]));
    }
    fc_nccl_board_leave(group->board);
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
        if (group->board != NULL) {
            fc_nccl_board_leave(group->board);
        }
        fc_nccl_abort_comms(group);
    }
    fc_nccl_board_destroy(group->board);
    fc_transport_destroy(group->base);
    fc_free(group);
}

fc_device_comm *fc_nccl_gathers(fc_nccl_group *group)
{
    return group->options.use & FC_NCCL_GATHERS ? (fc_device_comm *)(void *)&group->comms[0] : NULL;
}

fc_device_comm *fc_nccl_reductions(fc_nccl_group *group)
{
    return group->options.use & FC_NCCL_REDUCTIONS
               ? (fc_device_comm *)(void *)&group->comms[group->n_comms - 1]
               : NULL;
}

const char *fc_nccl_group_describe(const fc_nccl_group *group)
{
    return group->text;
}
