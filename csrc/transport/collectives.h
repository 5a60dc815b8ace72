/* Who does the collectives of units on a device: for each process group NCCL, or the group itself.
 *
 * What a device leaves to its caller (caller.h) ends here. Where NCCL's collective has failed no
 * other one goes on: all groups of NCCL are aborted with its text. Threading: serialized.
 */
#ifndef FC_TRANSPORT_COLLECTIVES_H
#define FC_TRANSPORT_COLLECTIVES_H

#include "device/caller.h"
#include "transport/nccl.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_collectives fc_collectives;

/* Of the embedding program, for all groups; as the members of fc_device_caller that have their
 * names. */
typedef struct fc_collectives_host {
    void *context; /* passed first */
    fc_status (*alloc)(void *context, fc_stream *stream, size_t bytes, void **out);
    void (*free)(void *context, void *memory);
    /* The stream as NCCL takes it. */
    fc_stream *(*native)(fc_stream *stream);
    /* Calls `body`, which finds the stream to be the current one. Only for groups in sight. */
    fc_status (*in_stream)(void *context, fc_stream *stream, fc_status (*body)(void *arg),
                           void *arg);
} fc_collectives_host;

/* One process group. */
typedef struct fc_collectives_group {
    void *context;       /* passed first */
    fc_nccl_group *nccl; /* does them all; borrowed until release. NULL: the functions */
    int n_ranks, rank;
    /* It is wanted that elements are multiplied before they are added up, where that can be. */
    bool may_scale;
    /* Others look at what these bring, which do them all: reductions of one rank, too. They are
     * released with the group; the functions, and `release`, are not needed. */
    bool is_seen;
    fc_message_ops seen;
    /* Of the process group itself: with more than one rank, and bytes to send. */
    fc_status (*all_gather)(void *context, fc_stream *stream, fc_label label, void *buffer,
                            size_t part_bytes);
    /* With one rank, too: a copy. */
    fc_status (*reduce_scatter)(void *context, fc_stream *stream, fc_label label, void *to,
                                const void *from, size_t numel, fc_dtype dtype);
    fc_status (*all_reduce)(void *context, fc_stream *stream, fc_label label, void *buffer,
                            size_t numel, fc_dtype dtype);
    /* From now on by this, until it is 1 again. Only where it may scale. */
    void (*scale)(void *context, double factor);
    void (*release)(void *context);
} fc_collectives_group;

FC_MUST_CHECK fc_status fc_collectives_create(const fc_collectives_host *host,
                                              fc_collectives **out);
void fc_collectives_destroy(fc_collectives *all); /* NULL is fine */

/* Says who does those of the process group of that name. What was said first stays. The group is
 * released at the end, or at once if it is not needed and by a failure. */
FC_MUST_CHECK fc_status fc_collectives_connect(fc_collectives *all, const char *name,
                                               const fc_collectives_group *group);
fc_device_comm *fc_collectives_find(const fc_collectives *all, const char *name); /* or NULL */
/* Whether several all-gathers are one piece of work. */
bool fc_collectives_has_groups(const fc_device_comm *comm);
int fc_collectives_n_ranks(const fc_device_comm *comm);
/* From now on each rank's elements are multiplied by the factor before they are added up, in their
 * own type. False: they cannot be, and sums stay what they are; with the factor 1 they always can.
 */
bool fc_collectives_scale(fc_device_comm *comm, double factor);

/* For devices; valid as long as `all`. */
fc_device_caller fc_collectives_caller(fc_collectives *all);

/* The first thing that is wrong with a rank or a library; no waiting. */
FC_MUST_CHECK fc_status fc_collectives_watch(fc_collectives *all);

#ifdef __cplusplus
}
#endif
#endif
