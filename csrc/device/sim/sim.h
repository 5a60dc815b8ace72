/* A simulator of accelerators for tests: ranks of one process, each with a device of its own.
 *
 * Work waits in the queue of its stream until a scheduler, drawn from a seed, picks it; any order
 * that streams, events and collectives allow may come, and a stream may fall behind by any amount.
 * Which order a program *asked for* is known when it enqueues: every access to memory carries a
 * vector clock, and two accesses to one byte of which one writes and which nothing orders are
 * reported as a race that names both, whether or not the orders that were run went wrong.
 *
 * [Note: what counts as ordered] Program order of a stream, a record before the waits for it, and
 * what the host waited for before what it enqueues later. Collectives order nothing between ranks,
 * and neither do communicators between streams. Allocating and freeing count as writes on the
 * memory's stream: a free that another stream's use does not precede is a race, whoever gets the
 * memory next. Fresh and freed memory is overwritten with NaN.
 *
 * Also reported: use of memory that is not allocated, host accesses before completion, collectives
 * that differ between ranks, and waits that can never end. Threading: fc_sim_run runs ranks as
 * threads of which one runs at a time; everything else serialized.
 */
#ifndef FC_DEVICE_SIM_SIM_H
#define FC_DEVICE_SIM_SIM_H

#include "device/device.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_SIM_RANKS 16
#define FC_SIM_STREAMS 12 /* of a rank, the host being one */

typedef struct fc_sim fc_sim;

FC_MUST_CHECK fc_status fc_sim_create(int n_ranks, uint64_t seed, fc_sim **out);
/* Memory that was not freed goes too. NULL is fine. */
void fc_sim_destroy(fc_sim *sim);

fc_device *fc_sim_device(fc_sim *sim, int rank);
FC_MUST_CHECK fc_status fc_sim_stream_create(fc_sim *sim, int rank, const char *name,
                                             fc_stream **out);
/* Ranks in order; each calls collectives with its own device. */
FC_MUST_CHECK fc_status fc_sim_comm_create(fc_sim *sim, const char *name, const int *ranks,
                                           int n_ranks, fc_device_comm **out);

/* A collective that has begun on a rank stays until all ranks are there, and a rank has room for so
 * many at once, as GPUs have; 0, at first: for any number. Which begins first is up to the queues.
 */
void fc_sim_limit_collectives(fc_sim *sim, int n_at_once);

/* Pinned memory of a rank; freed with ops->free once the host has waited for all uses. */
FC_MUST_CHECK fc_status fc_sim_host_alloc(fc_device *device, fc_label label, size_t bytes,
                                          void **out);

/* Test aid: the n-th allocation on the device from now fails (0: the next one); negative: none. */
void fc_sim_fail_alloc(fc_device *device, int64_t n);

/* ---- what a program does besides ---- */

typedef struct fc_sim_range {
    const void *at;
    size_t bytes;
    bool writes; /* false: reads */
} fc_sim_range;

/* A kernel of the test's own; `args` is copied. */
typedef void (*fc_sim_kernel)(const void *args);
FC_MUST_CHECK fc_status fc_sim_launch(fc_device *device, fc_stream *stream, fc_label label,
                                      const fc_sim_range *ranges, size_t n_ranges,
                                      fc_sim_kernel kernel, const void *args, size_t args_bytes);

/* The same over all that a plan moves. */
FC_MUST_CHECK fc_status fc_sim_launch_plan(fc_device *device, fc_stream *stream, fc_label label,
                                           const fc_runs *plan, const uint64_t *addresses,
                                           fc_sim_kernel kernel, const void *args,
                                           size_t args_bytes);

/* Says that the host touches memory now. */
void fc_sim_host_access(fc_device *device, fc_label label, fc_sim_range range);

/* ---- running ---- */

/* Runs `body` for every rank, their calls interleaved, then everything that is still queued.
 * Returns the first failure of a body, or FC_ERR_TIMEOUT if the queues cannot be emptied. */
typedef fc_status (*fc_sim_body)(fc_device *device, int rank, void *arg);
FC_MUST_CHECK fc_status fc_sim_run(fc_sim *sim, fc_sim_body body, void *arg);

/* Mistakes found so far, and the sentence of one of the first eight. */
int fc_sim_faults(const fc_sim *sim);
const char *fc_sim_fault(const fc_sim *sim, int index);

/* Bytes allocated on a rank now, and the most there were. */
size_t fc_sim_bytes(const fc_device *device);
size_t fc_sim_peak_bytes(const fc_device *device);

#ifdef __cplusplus
}
#endif
#endif
