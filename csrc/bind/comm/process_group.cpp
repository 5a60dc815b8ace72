/* Memory of the core as tensors for the collectives of Python. */
#include "bind/comm/transport.h"

#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"

#include <torch/csrc/autograd/python_variable.h>

#include <numeric>

namespace fc {

namespace {

struct Messages {
    Ref object;
    size_t n_ranks;
    c10::Device device;
};

const Messages &messages_in(void *context)
{
    return *static_cast<const Messages *>(context);
}

/* New reference; nullptr with an exception set. */
PyObject *elements(void *context, const void *data, size_t numel, fc_dtype dtype)
{
    return guarded([&] {
        const c10::Device device = messages_in(context).device;
        const NoModes no_modes;
        return THPVariable_Wrap(at::for_blob(const_cast<void *>(data), {(int64_t)numel})
                                    .options(at::dtype(scalar_type_of(dtype)).device(device))
                                    .target_device(device)
                                    .make_tensor());
    });
}

/* Calls a method with `named`, which it takes. An exception stays set and travels as FC_ERR_GROUP.
 */
fc_status call(void *context, const char *method, PyObject *named)
{
    const Ref arguments = Ref::take(named), unnamed = Ref::take(PyTuple_New(0));
    const Ref function =
        Ref::take(PyObject_GetAttrString(messages_in(context).object.get(), method));
    const Ref result = Ref::take(arguments && unnamed && function
                                     ? PyObject_Call(function.get(), unnamed.get(), arguments.get())
                                     : nullptr);

    return result ? FC_OK : fc_fail(FC_ERR_GROUP, "%s of the process group", method);
}

fc_status messages_all_gather(void *context, void *recv, const void *send, size_t send_bytes)
{
    const Gil gil;
    return call(
        context, "all_gather",
        Py_BuildValue("{sNsN}", "output",
                      elements(context, recv, messages_in(context).n_ranks * send_bytes, FC_U8),
                      "input", elements(context, send, send_bytes, FC_U8)));
}

fc_status messages_reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                                  fc_dtype dtype)
{
    const Gil gil;
    return call(
        context, "reduce_scatter",
        Py_BuildValue("{sNsN}", "output", elements(context, recv, recv_numel, dtype), "input",
                      elements(context, send, messages_in(context).n_ranks * recv_numel, dtype)));
}

fc_status messages_all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    const Gil gil;
    return call(context, "all_reduce",
                Py_BuildValue("{sN}", "tensor", elements(context, data, numel, dtype)));
}

fc_status messages_broadcast(void *context, void *data, size_t n_bytes, int root)
{
    const Gil gil;
    return call(
        context, "broadcast",
        Py_BuildValue("{sNsi}", "tensor", elements(context, data, n_bytes, FC_U8), "src", root));
}

/* New reference; nullptr with an exception set. */
PyObject *list_of(const size_t *values, size_t n)
{
    return guarded([&] { return to_python(std::vector<size_t>(values, values + n)).release(); });
}

fc_status messages_all_to_all(void *context, void *recv, const size_t *recv_bytes, const void *send,
                              const size_t *send_bytes)
{
    const Gil gil;
    const size_t n = messages_in(context).n_ranks;
    return call(
        context, "all_to_all",
        Py_BuildValue(
            "{sNsNsNsN}", "output",
            elements(context, recv, std::accumulate(recv_bytes, recv_bytes + n, size_t(0)), FC_U8),
            "received", list_of(recv_bytes, n), "input",
            elements(context, send, std::accumulate(send_bytes, send_bytes + n, size_t(0)), FC_U8),
            "sent", list_of(send_bytes, n)));
}

fc_status messages_barrier(void *context)
{
    const Gil gil;
    return call(context, "barrier", PyDict_New());
}

fc_status messages_begin(void *context, size_t unit)
{
    const Gil gil;
    return call(context, "begin", Py_BuildValue("{sn}", "unit", (Py_ssize_t)unit));
}

void messages_release(void *context)
{
    const Gil gil;
    delete static_cast<Messages *>(context);
}

} // namespace

fc_message_ops messages_ops(const Ref &messages, int n_ranks, c10::Device device)
{
    return {.context = new Messages{messages, (size_t)n_ranks, device},
            .all_gather = messages_all_gather,
            .reduce_scatter = messages_reduce_scatter,
            .all_reduce = messages_all_reduce,
            .broadcast = messages_broadcast,
            .all_to_all = messages_all_to_all,
            .barrier = messages_barrier,
            .begin = PyObject_HasAttrString(messages.get(), "begin") ? messages_begin : nullptr,
            .release = messages_release};
}

} // namespace fc
