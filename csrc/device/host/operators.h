/* A plan's launch by somebody's operators on tensors: which of them each run needs. They round as
 * the kernels do, each step in float32 or wider. */
#ifndef FC_DEVICE_HOST_OPERATORS_H
#define FC_DEVICE_HOST_OPERATORS_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One side of a run: planes of lines of elements that lie together. Strides count elements. */
typedef struct fc_planes {
    void *first;
    fc_dtype dtype;
    bool is_unaligned; /* `first` is no multiple of an element's size: to be touched as bytes */
    int64_t sizes[3], strides[3];
} fc_planes;

typedef struct fc_operators {
    void *context; /* passed first */
    fc_status (*zero)(void *context, const fc_planes *to);
    /* Cast, rounded once. */
    fc_status (*copy)(void *context, const fc_planes *to, const fc_planes *from);
    /* to = (accumulate ? to : 0) + from / divisor in `wide`, rounded once. */
    fc_status (*finish)(void *context, const fc_planes *to, const fc_planes *from, fc_dtype wide,
                        double divisor, bool accumulate);
} fc_operators;

/* As fc_host_move; ends with the first failure. */
FC_MUST_CHECK fc_status fc_operators_move(const fc_runs *plan, const uint64_t *addresses,
                                          double divisor, bool accumulate,
                                          const fc_operators *operators);

#ifdef __cplusplus
}
#endif
#endif
