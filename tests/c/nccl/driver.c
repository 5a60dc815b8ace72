/* A stand-in for CUDA's driver: events behind the work of the stand-in for NCCL, with a check of
 * the rules for captures and for contexts.
 */
#include "nccl/engine.h"

#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum {
    SUCCESS = 0,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_READY = 600,
    CAPTURE_UNSUPPORTED = 900,
    GLOBAL_MODE = 0,
    RELAXED_MODE = 2
};

typedef struct event {
    struct event *next;
    uint64_t serial; /* that was enqueued last when it was recorded */
    bool is_alive;   /* never freed: who uses it afterwards is told */
} event;

static int primary; /* the context */
static event *events;
static _Thread_local int n_current, mode = GLOBAL_MODE;

API int cuDeviceGet(int *device, int gpu);
API int cuDevicePrimaryCtxRetain(void **context, int device);
API int cuCtxPushCurrent_v2(void *context);
API int cuCtxPopCurrent_v2(void **context);
API int cuEventCreate(void **out, unsigned flags);
API int cuEventDestroy_v2(void *handle);
API int cuEventRecord(void *handle, void *stream);
API int cuEventQuery(void *handle);
API int cuStreamIsCapturing(void *stream, int *status);
API int cuThreadExchangeStreamCaptureMode(int *exchanged);
API int cuGetErrorString(int error, const char **text);

static int refuse(int error, const char *what)
{
    (void)fault("%s", what);
    return error;
}

API int cuDeviceGet(int *device, int gpu)
{
    *device = gpu;
    return gpu == 0 ? SUCCESS : INVALID_DEVICE;
}

API int cuDevicePrimaryCtxRetain(void **context, int device)
{
    (void)device;
    *context = &primary;
    return SUCCESS;
}

API int cuCtxPushCurrent_v2(void *context)
{
    if (context != &primary) {
        return refuse(INVALID_CONTEXT, "a context that nobody has retained");
    }
    n_current++;
    control.n_contexts++;
    return SUCCESS;
}

API int cuCtxPopCurrent_v2(void **context)
{
    *context = &primary;
    control.n_contexts--;
    return n_current-- > 0 ? SUCCESS : refuse(INVALID_CONTEXT, "a context less than there are");
}

API int cuEventCreate(void **out, unsigned flags)
{
    event *e = control.fail_event_at == control.n_events + 1 ? NULL : calloc(1, sizeof(*e));

    if (e == NULL) {
        return OUT_OF_MEMORY;
    }
    if (n_current == 0 || flags != 2) {
        return refuse(INVALID_CONTEXT, "an event without a context, or with times");
    }
    e->is_alive = true;
    e->next = events;
    events = e;
    *out = e;
    control.n_events++;
    return SUCCESS;
}

API int cuEventDestroy_v2(void *handle)
{
    event *e = handle;

    if (!e->is_alive) {
        return refuse(INVALID_HANDLE, "an event that was destroyed twice");
    }
    e->is_alive = false;
    control.n_events--;
    return SUCCESS;
}

API int cuEventRecord(void *handle, void *stream)
{
    event *e = handle;

    (void)stream;
    if (!e->is_alive || n_current == 0 || atomic_load(&control.captures)) {
        return refuse(INVALID_HANDLE, "a record without an event or a context, or in a capture");
    }
    (void)pthread_mutex_lock(&lock);
    e->serial = n_enqueued;
    control.n_records++;
    (void)pthread_mutex_unlock(&lock);
    return SUCCESS;
}

/* In the usual mode the question ends a capture of any thread. */
API int cuEventQuery(void *handle)
{
    const event *e = handle;
    bool is_reached;

    atomic_fetch_add(&control.n_queries, 1);
    if (control.fail_queries != 0) {
        return control.fail_queries;
    }
    if (!e->is_alive) {
        return refuse(INVALID_HANDLE, "a question about an event that was destroyed");
    }
    if (mode != RELAXED_MODE) {
        return refuse(CAPTURE_UNSUPPORTED, "a question about an event that ends captures");
    }
    (void)pthread_mutex_lock(&lock);
    is_reached = is_done(e->serial);
    (void)pthread_mutex_unlock(&lock);
    return is_reached ? SUCCESS : NOT_READY;
}

API int cuStreamIsCapturing(void *stream, int *status)
{
    (void)stream;
    *status = atomic_load(&control.captures) ? 1 : 0;
    return SUCCESS;
}

API int cuThreadExchangeStreamCaptureMode(int *exchanged)
{
    int before = mode;

    mode = *exchanged;
    *exchanged = before;
    return SUCCESS;
}

API int cuGetErrorString(int error, const char **text)
{
    *text = error == OUT_OF_MEMORY ? "out of memory" : "an error on purpose";
    return SUCCESS;
}
