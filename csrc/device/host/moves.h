/* A plan's launch on the host: which bytes its runs name, and the move itself by CPU kernels. */
#ifndef FC_DEVICE_HOST_MOVES_H
#define FC_DEVICE_HOST_MOVES_H

#include "kernels/cuda/runs.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One operand of a run: its first byte and where its last line ends. A base may be 0. */
typedef struct fc_host_operand {
    char *first;
    size_t line_stride, plane_stride, bytes;
} fc_host_operand;

/* What is done with each run of a launch. */
typedef void (*fc_host_visitor)(const void *arg, const fc_run *run, fc_host_operand to,
                                fc_host_operand from);

/* `addresses`: as in fc_move. */
void fc_host_visit(const fc_runs *plan, const uint64_t *addresses, fc_host_visitor visit,
                   const void *arg);

/* to = (accumulate ? to : 0) + from / divisor, see fc_move. */
void fc_host_move(const fc_runs *plan, const uint64_t *addresses, double divisor, bool accumulate);

#ifdef __cplusplus
}
#endif

#endif
