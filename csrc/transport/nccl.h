/* NCCL for the ranks of one process group: communicators of our own over the library that torch
 * brings, each wait and each collective with a deadline, and an end when a rank of this host dies.
 *
 * A group has a communicator for gathers and one for reductions, or one for both. They never block:
 * calls enqueue work on a stream, and what NCCL does meanwhile is waited for here, where
 * errors, deadlines, dead processes and Ctrl-C are noticed. Beside those who wait a thread of the
 * process looks at what is on the device, so that a program that waits elsewhere (for the stream,
 * say) goes on, too. After a failure the group is broken: its communicators have been aborted, and
 * each later call fails with the first failure's text.
 *
 * Threading: serialized per process, as NCCL asks for one issuing thread. Calls of NCCL are made
 * between the host's enter_wait and leave_wait. Creation, split and close are collective.
 */
#ifndef FC_TRANSPORT_NCCL_H
#define FC_TRANSPORT_NCCL_H

#include "device/device.h"
#include "device/events.h"
#include "transport/transport.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fc_nccl fc_nccl;             /* a library; stays open for good */
typedef struct fc_nccl_group fc_nccl_group; /* ranks, and what they have in common */

/* ---- the library ---- */

/* `is_loaded`: only if the process has it already. FC_ERR_UNSUPPORTED with a sentence if it cannot
 * be opened, is too old, or lacks what is needed. */
FC_MUST_CHECK fc_status fc_nccl_open(const char *path, bool is_loaded, const fc_nccl **out);

int fc_nccl_version(const fc_nccl *nccl); /* as NCCL codes it: 2.27.3 is 22703 */
/* Its version, and a sentence on each thing that it cannot do. Borrowed. */
const char *fc_nccl_describe(const fc_nccl *nccl);

/* ---- groups ---- */

typedef struct fc_nccl_options {
    const fc_nccl *nccl; /* borrowed, as libraries live on */
    /* Gathers and reductions in one communicator: they then run in the order of their calls.
     * Needed on a device with room for one collective at a time, where two communicators can
     * each occupy one rank and wait for the other. */
    bool is_one;
    /* A collective that the device has not done `timeout_ns` after it was enqueued ends the group,
     * whatever this rank does meanwhile. Copied. NULL: who does not wait learns nothing. */
    const fc_events *events;
    /* Gets one line of text when that happens; called by a thread of this library, which waits for
     * nobody. Optional. */
    void (*report)(const char *line);
} fc_nccl_options;

/* Over the config's exchange; the calling thread's current device. */
FC_MUST_CHECK fc_status fc_nccl_group_create(const fc_transport_config *config,
                                             const fc_nccl_options *options, fc_nccl_group **out);

/* Waits until all work is done on all ranks and gives back everything but the object. */
FC_MUST_CHECK fc_status fc_nccl_group_close(fc_nccl_group *group);

/* Local, at the end of a process group or of the process: as close, but gives up after `limit_ns`
 * and aborts. Other ranks learn that this one has left, which is no failure of what it did before.
 */
void fc_nccl_group_leave(fc_nccl_group *group, int64_t limit_ns);

/* Local: what was not closed is aborted. NULL is fine. */
void fc_nccl_group_destroy(fc_nccl_group *group);

/* For the collectives of fc_device_ops; borrowed from the group. */
fc_device_comm *fc_nccl_gathers(fc_nccl_group *group);
fc_device_comm *fc_nccl_reductions(fc_nccl_group *group);

/* "2 ranks over NCCL 2.27.3, ...": communicators, and whose processes are watched. Borrowed. */
const char *fc_nccl_group_describe(const fc_nccl_group *group);

/* ---- failures ---- */

/* FC_OK while nothing is wrong: NCCL reports no error, the processes of this host's ranks live and
 * none of them has given up. Otherwise the group is broken and says why. No waiting. */
FC_MUST_CHECK fc_status fc_nccl_watch(fc_nccl_group *group);

/* Until ready(arg), watching all groups; ends with an error like every wait. */
FC_MUST_CHECK fc_status fc_nccl_wait(fc_nccl_group *const *groups, size_t n_groups,
                                     fc_ready_fn ready, void *arg, const fc_wait_info *info);

/* Whether a failure has ended it. */
bool fc_nccl_is_broken(const fc_nccl_group *group);

/* Aborts here, and on the ranks of this host when they look next. Returns `status` with `text`. */
fc_status fc_nccl_abort(fc_nccl_group *group, fc_status status, const char *text);

/* ---- collectives: those of device.h ---- */

FC_MUST_CHECK fc_status fc_nccl_all_gather(fc_device_comm *comm, fc_stream *stream, fc_label label,
                                           void *buffer, size_t part_bytes);
FC_MUST_CHECK fc_status fc_nccl_all_gather_each(fc_device_comm *comm, fc_stream *stream,
                                                fc_label label, const fc_gather *gathers,
                                                size_t n_gathers);
FC_MUST_CHECK fc_status fc_nccl_reduce_scatter(fc_device_comm *comm, fc_stream *stream,
                                               fc_label label, void *to, const void *from,
                                               size_t numel, fc_dtype dtype);
FC_MUST_CHECK fc_status fc_nccl_all_reduce(fc_device_comm *comm, fc_stream *stream, fc_label label,
                                           void *buffer, size_t numel, fc_dtype dtype);

/* From now on reductions multiply elements by the factor before they add them up. False: NCCL has
 * no such operation without being asked to make one, and sums stay what they are. It has averages.
 */
bool fc_nccl_scale(fc_nccl_group *group, double factor);

/* ---- for who tries NCCL on arrays of their own ---- */

typedef struct fc_nccl_array {
    void *data;
    size_t bytes, numel;
    fc_dtype dtype;
} fc_nccl_array;

/* The collective that the label names: "all_gather" and "all_reduce", in place in one output;
 * "reduce_scatter" of one input; "all_gather_each" of as many inputs as outputs. Of an input
 * nothing is written. */
FC_MUST_CHECK fc_status fc_nccl_collect(fc_nccl_group *group, fc_stream *stream, fc_label label,
                                        const fc_nccl_array *outputs, size_t n_outputs,
                                        const fc_nccl_array *inputs, size_t n_inputs);

#ifdef __cplusplus
}
#endif
#endif
