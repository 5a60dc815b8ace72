/* Events over the functions of CUDA's driver, found by name: there is no library to build with.
 *
 * The GPU's primary context, which the runtime uses as well, is made current around each call:
 * streams and events belong to it, and a thread of our own has none.
 */
#include "device/events.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#define GPUS 64

/* CUresult, CUevent_flags, CUstreamCaptureMode, CUstreamCaptureStatus */
enum {
    SUCCESS = 0,
    NOT_READY = 600,
    CAPTURE_IMPLICIT = 906, /* the default stream, while another one is captured */
    WITHOUT_TIMES = 2,
    RELAXED = 2,
    NOT_CAPTURED = 0
};

/* X(name in the table, name in the library, parameters) */
#define FUNCTIONS(X)                                                                               \
    X(device, "cuDeviceGet", (int *device, int gpu))                                               \
    X(retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                            \
    X(push, "cuCtxPushCurrent_v2", (void *context))                                                \
    X(pop, "cuCtxPopCurrent_v2", (void **context))                                                 \
    X(create, "cuEventCreate", (void **event, unsigned flags))                                     \
    X(destroy, "cuEventDestroy_v2", (void *event))                                                 \
    X(record, "cuEventRecord", (void *event, void *stream))                                        \
    X(query, "cuEventQuery", (void *event))                                                        \
    X(is_capturing, "cuStreamIsCapturing", (void *stream, int *status))                            \
    X(exchange_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                             \
    X(error_text, "cuGetErrorString", (int error, const char **text))

typedef struct driver {
    void *library;
#define MEMBER(name, symbol, parameters) int(*name) parameters;
    FUNCTIONS(MEMBER)
#undef MEMBER
} driver;

typedef struct gpu_context {
    driver call;
    void *primary; /* NULL: not opened */
} gpu_context;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static gpu_context gpus[GPUS]; /* for good, as the runtime has them */

static fc_status fail(const driver *call, int error, const char *what)
{
    const char *text = NULL;

    if (call->error_text(error, &text) != SUCCESS || text == NULL) {
        text = "unknown error";
    }
    return fc_fail(FC_ERR_SYSTEM, "CUDA's driver answers '%s' to %s", text, what);
}

static fc_status checked(const driver *call, int error, const char *what)
{
    return error == SUCCESS ? FC_OK : fail(call, error, what);
}

static fc_status create(void *context, void **event_out)
{
    const gpu_context *gpu = context;
    void *popped;
    int error;

    FC_TRY(checked(&gpu->call, gpu->call.push(gpu->primary), "cuCtxPushCurrent"));
    error = gpu->call.create(event_out, WITHOUT_TIMES);
    (void)gpu->call.pop(&popped);
    return checked(&gpu->call, error, "cuEventCreate");
}

/* At the end, whatever it answers. */
static void destroy(void *context, void *event)
{
    const gpu_context *gpu = context;

    (void)gpu->call.destroy(event);
}

/* The stream is asked first: an event recorded into a graph would not be that of the device, and to
 * ask about it would end the capture. */
static fc_status record_here(const driver *call, void *event, void *stream)
{
    int status = NOT_CAPTURED;
    int error = call->is_capturing(stream, &status);

    if (error == CAPTURE_IMPLICIT || (error == SUCCESS && status != NOT_CAPTURED)) {
        return FC_AGAIN;
    }
    FC_TRY(checked(call, error, "cuStreamIsCapturing"));
    return checked(call, call->record(event, stream), "cuEventRecord");
}

static fc_status record(void *context, void *event, fc_stream *stream)
{
    const gpu_context *gpu = context;
    void *popped;
    fc_status st;

    FC_TRY(checked(&gpu->call, gpu->call.push(gpu->primary), "cuCtxPushCurrent"));
    st = record_here(&gpu->call, event, stream);
    (void)gpu->call.pop(&popped);
    return st;
}

/* While any thread captures in CUDA's usual mode a question about an event is an error and ends the
 * capture, unless the thread that asks says that it knows. It does: what is captured has no mark.
 */
static fc_status is_reached(void *context, void *event, bool *out)
{
    const driver *call = &((const gpu_context *)context)->call;
    int mode = RELAXED, error;

    FC_TRY(checked(call, call->exchange_mode(&mode), "cuThreadExchangeStreamCaptureMode"));
    error = call->query(event);
    (void)call->exchange_mode(&mode);
    *out = error == SUCCESS;
    return error == NOT_READY ? FC_OK : checked(call, error, "cuEventQuery");
}

/* ---- the library ---- */

static fc_status find_functions(driver *call, const char *path)
{
    void *address;

#define FIND(name, symbol, parameters)                                                             \
    address = dlsym(call->library, symbol);                                                        \
    if (address == NULL) {                                                                         \
        return fc_fail(FC_ERR_UNSUPPORTED, "%s cannot be used as CUDA's driver: it lacks %s",      \
                       path, symbol);                                                              \
    }                                                                                              \
    memcpy(&call->name, &address, sizeof(address));
    FUNCTIONS(FIND)
#undef FIND
    return FC_OK;
}

static fc_status open_gpu(const char *path, int number, gpu_context *gpu)
{
    driver *call = &gpu->call;
    int device = 0;

    call->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (call->library == NULL) {
        return fc_fail(FC_ERR_UNSUPPORTED, "CUDA's driver cannot be opened: %s", dlerror());
    }
    FC_TRY(find_functions(call, path));
    FC_TRY(checked(call, call->device(&device, number), "cuDeviceGet"));
    return checked(call, call->retain(&gpu->primary, device), "cuDevicePrimaryCtxRetain");
}

fc_status fc_cuda_events_open(const char *path, int gpu, fc_events *out)
{
    fc_status st = FC_OK;

    if (gpu < 0 || gpu >= GPUS) {
        return fc_fail(FC_ERR_UNSUPPORTED, "there is no room for a GPU of number %d", gpu);
    }
    (void)pthread_mutex_lock(&lock);
    if (gpus[gpu].primary == NULL) {
        st = open_gpu(path, gpu, &gpus[gpu]);
    }
    (void)pthread_mutex_unlock(&lock);
    *out = (fc_events){&gpus[gpu], create, destroy, record, is_reached};
    return st;
}
