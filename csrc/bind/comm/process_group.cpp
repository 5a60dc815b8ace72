/* Memory of the core as tensors for the collectives of Python. */
#include "bind/comm/process_group.h"

#include "bind/tensor/tensors.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>

namespace {

struct messages_context {
    PyObject *object; /* owned */
    int64_t n_ranks;
};

/* Holds the GIL in a scope. */
struct gil_guard {
    PyGILState_STATE state = PyGILState_Ensure();
    gil_guard() = default;
    gil_guard(const gil_guard &) = delete;
    gil_guard &operator=(const gil_guard &) = delete;
    ~gil_guard() { PyGILState_Release(state); }
};

} // namespace

/* New reference; nullptr with an exception set. */
static PyObject *wrap(const void *data, size_t numel, fc_dtype dtype)
{
    try {
        auto options = at::TensorOptions().dtype(fc::scalar_type_of(dtype));
        at::Tensor tensor = at::from_blob(const_cast<void *>(data), {(int64_t)numel}, options);

        return THPVariable_Wrap(tensor);
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

/* Calls a method with up to two arguments, whose references it takes. An exception stays set and
 * travels as FC_ERR_GROUP. */
static fc_status call(void *context, const char *method, PyObject *first, PyObject *second,
                      int n_args)
{
    auto *messages = static_cast<messages_context *>(context);
    PyObject *result = nullptr;

    if (n_args == 0) {
        result = PyObject_CallMethod(messages->object, method, nullptr);
    } else if (n_args == 1 && first != nullptr) {
        result = PyObject_CallMethod(messages->object, method, "O", first);
    } else if (first != nullptr && second != nullptr) {
        result = PyObject_CallMethod(messages->object, method, "OO", first, second);
    }
    Py_XDECREF(first);
    Py_XDECREF(second);
    Py_XDECREF(result);
    return result != nullptr ? FC_OK : fc_fail(FC_ERR_GROUP, "%s of the process group", method);
}

static fc_status all_gather(void *context, void *recv, const void *send, size_t send_bytes)
{
    gil_guard gil;
    auto n_ranks = (size_t)static_cast<messages_context *>(context)->n_ranks;

    return call(context, "all_gather", wrap(recv, n_ranks * send_bytes, FC_U8),
                wrap(send, send_bytes, FC_U8), 2);
}

static fc_status reduce_scatter(void *context, void *recv, void *send, size_t recv_numel,
                                fc_dtype dtype)
{
    gil_guard gil;
    auto n_ranks = (size_t)static_cast<messages_context *>(context)->n_ranks;

    return call(context, "reduce_scatter", wrap(recv, recv_numel, dtype),
                wrap(send, n_ranks * recv_numel, dtype), 2);
}

static fc_status all_reduce(void *context, void *data, size_t numel, fc_dtype dtype)
{
    gil_guard gil;

    return call(context, "all_reduce", wrap(data, numel, dtype), nullptr, 1);
}

static fc_status broadcast(void *context, void *data, size_t bytes, int root)
{
    gil_guard gil;

    return call(context, "broadcast", wrap(data, bytes, FC_U8), PyLong_FromLong(root), 2);
}

/* New reference; nullptr with an exception set. */
static PyObject *sizes(const size_t *bytes, int64_t n, size_t *total)
{
    PyObject *list = PyList_New((Py_ssize_t)n);

    *total = 0;
    for (int64_t i = 0; list != nullptr && i < n; i++) {
        PyObject *size = PyLong_FromSize_t(bytes[i]);

        if (size == nullptr) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, size);
        *total += bytes[i];
    }
    return list;
}

static fc_status all_to_all(void *context, void *recv, const size_t *recv_bytes, const void *send,
                            const size_t *send_bytes)
{
    gil_guard gil;
    int64_t n_ranks = static_cast<messages_context *>(context)->n_ranks;
    size_t recv_total, send_total;
    PyObject *recv_sizes = sizes(recv_bytes, n_ranks, &recv_total);
    PyObject *send_sizes = sizes(send_bytes, n_ranks, &send_total);
    PyObject *first = nullptr, *second = nullptr;

    if (recv_sizes != nullptr && send_sizes != nullptr) {
        first = Py_BuildValue("NO", wrap(recv, recv_total, FC_U8), recv_sizes);
        second = Py_BuildValue("NO", wrap(send, send_total, FC_U8), send_sizes);
    }
    Py_XDECREF(recv_sizes);
    Py_XDECREF(send_sizes);
    return call(context, "all_to_all", first, second, 2);
}

static fc_status barrier(void *context)
{
    gil_guard gil;

    return call(context, "barrier", nullptr, nullptr, 0);
}

static void release(void *context)
{
    gil_guard gil;
    auto *messages = static_cast<messages_context *>(context);

    Py_DECREF(messages->object);
    delete messages;
}

fc_message_ops fc_messages_get_ops(PyObject *messages, int n_ranks)
{
    fc_message_ops ops{};

    Py_INCREF(messages);
    ops.context = new messages_context{messages, n_ranks};
    ops.all_gather = all_gather;
    ops.reduce_scatter = reduce_scatter;
    ops.all_reduce = all_reduce;
    ops.broadcast = broadcast;
    ops.all_to_all = all_to_all;
    ops.barrier = barrier;
    ops.release = release;
    return ops;
}
