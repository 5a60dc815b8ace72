/* Host memory behind the table of device.h: all work is done when it is enqueued.
 *
 * Queues run in the order in which they are filled, so every order that streams and events allow
 * holds, and streams and events are names. Only copies to the host are late: their bytes arrive
 * when the host waits, for any event, so that who reads them without a wait reads NaN. Units whose
 * parameters are in host memory run on it as they do on an accelerator. Threading: serialized per
 * device.
 */
#ifndef FC_DEVICE_HOST_HOST_H
#define FC_DEVICE_HOST_HOST_H

#include "device/caller.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The table is copied. Any pointers serve as streams. */
FC_MUST_CHECK fc_status fc_host_device_create(const fc_device_caller *caller, fc_device **out);
/* NULL is fine. */
void fc_host_device_destroy(fc_device *device);

#ifdef __cplusplus
}
#endif
#endif
