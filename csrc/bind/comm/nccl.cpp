/* The type `_C.NcclGroup`. Streams are their handles as ints; tensors may be on any device that the
 * library can read. */
#include "bind/comm/nccl.h"

#include "bind/comm/transport.h"
#include "bind/python/callbacks.h"
#include "bind/python/python.h"
#include "bind/tensor/tensors.h"

#include <ATen/ATen.h>

#include <vector>

namespace {

struct py_nccl {
    PyObject_HEAD
    fc_nccl_group *group; /* owned; nullptr until made */
    fc_host host;
};

} // namespace

static const char library_name[] = "fsdp_c.nccl";
static PyTypeObject *nccl_type = nullptr; /* owned by the process */

PyObject *fc_nccl_open_library(PyObject *, PyObject *args)
{
    const fc_nccl *library = nullptr;
    const char *path;
    int is_loaded;

    if (!PyArg_ParseTuple(args, "sp:nccl_open", &path, &is_loaded)) {
        return nullptr;
    }
    fc_status st = fc_nccl_open(path, is_loaded != 0, &library);
    if (st != FC_OK) {
        return fc_raise(st);
    }
    return Py_BuildValue("Nis",
                         PyCapsule_New(const_cast<fc_nccl *>(library), library_name, nullptr),
                         fc_nccl_version(library), fc_nccl_describe(library));
}

static py_nccl *nccl_of(PyObject *self)
{
    return reinterpret_cast<py_nccl *>(self);
}

fc_nccl_group *fc_nccl_from_object(PyObject *object)
{
    if (nccl_type == nullptr || !PyObject_TypeCheck(object, nccl_type)) {
        PyErr_Format(PyExc_TypeError, "expected an NcclGroup, got %s", Py_TYPE(object)->tp_name);
        return nullptr;
    }
    return nccl_of(object)->group;
}

static void nccl_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    fc_nccl_group_destroy(nccl_of(object)->group);
    Py_XDECREF(nccl_of(object)->host.exchange);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *nccl_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *names[] = {"library",  "name",         "rank",
                                  "n_ranks",  "global_ranks", "timeout_seconds",
                                  "exchange", "is_one",       nullptr};
    fc_transport_config config{};
    fc_nccl_options options{};
    PyObject *library, *global_ranks, *exchange;
    int is_one = 0;
    double timeout_seconds;
    std::vector<int> ranks;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OsiiOdO|p:NcclGroup", const_cast<char **>(names), &library, &config.name,
            &config.rank, &config.n_ranks, &global_ranks, &timeout_seconds, &exchange, &is_one) ||
        !fc_read_ranks(global_ranks, config.n_ranks, ranks)) {
        return nullptr;
    }
    options.nccl = static_cast<fc_nccl *>(PyCapsule_GetPointer(library, library_name));
    if (options.nccl == nullptr) {
        return nullptr;
    }
    options.is_one = is_one != 0;
    fc::Ref object = fc::Ref::take(type->tp_alloc(type, 0));
    if (!object) {
        return nullptr;
    }
    py_nccl *self = nccl_of(object.get());
    Py_INCREF(exchange);
    self->host.exchange = exchange;
    self->host.n_ranks = config.n_ranks;
    config.global_ranks = ranks.data();
    config.timeout_ns = fc_timeout_ns(timeout_seconds);
    config.host = fc_host_get_ops(&self->host);
    fc_status st = fc_nccl_group_create(&config, &options, &self->group);
    return st == FC_OK ? object.release() : fc_raise(st);
}

/* None, or the status as an exception. */
static PyObject *none_or_raise(fc_status st)
{
    if (st != FC_OK) {
        return fc_raise(st);
    }
    Py_RETURN_NONE;
}

static PyObject *nccl_watch(PyObject *self, PyObject *)
{
    return none_or_raise(fc_nccl_watch(nccl_of(self)->group));
}

static PyObject *nccl_close(PyObject *self, PyObject *)
{
    return none_or_raise(fc_nccl_group_close(nccl_of(self)->group));
}

static PyObject *nccl_leave(PyObject *self, PyObject *args)
{
    double seconds;

    if (!PyArg_ParseTuple(args, "d:leave", &seconds)) {
        return nullptr;
    }
    fc_nccl_group_leave(nccl_of(self)->group, fc_timeout_ns(seconds));
    PyErr_Clear(); /* an interrupted wait was aborted */
    Py_RETURN_NONE;
}

static PyObject *nccl_abort(PyObject *self, PyObject *text)
{
    const char *why = PyUnicode_AsUTF8(text);

    if (why == nullptr) {
        return nullptr;
    }
    (void)fc_nccl_abort(nccl_of(self)->group, FC_ERR_BROKEN, why);
    Py_RETURN_NONE;
}

/* Asks Python, and stops the wait at an exception. */
static bool nccl_is_ready(void *arg)
{
    fc::Gil gil;
    fc::Ref answer = fc::Ref::take(PyObject_CallNoArgs(static_cast<PyObject *>(arg)));

    return !answer || PyObject_IsTrue(answer.get()) != 0;
}

static PyObject *nccl_wait(PyObject *self, PyObject *args)
{
    fc_nccl_group *group = nccl_of(self)->group;
    fc_wait_info info{};
    PyObject *is_ready;

    if (!PyArg_ParseTuple(args, "Os:wait", &is_ready, &info.op)) {
        return nullptr;
    }
    fc_status st = fc_nccl_wait(&group, 1, nccl_is_ready, is_ready, &info);
    return PyErr_Occurred() ? nullptr : none_or_raise(st);
}

/* ---- collectives ---- */

static void require(bool is_good, const char *text)
{
    fc::check(is_good ? FC_OK : fc_fail(FC_ERR_INVALID, "%s", text));
}

/* Contiguous memory of a tensor; the tensor itself is kept by the caller's arguments. */
static const at::Tensor &contiguous(PyObject *object)
{
    const at::Tensor &tensor = fc::tensor_of(object);

    require(tensor.is_contiguous(), "a collective over NCCL needs contiguous tensors");
    return tensor;
}

static fc_stream *nccl_stream(unsigned long long handle)
{
    return reinterpret_cast<fc_stream *>(static_cast<uintptr_t>(handle));
}

static PyObject *nccl_all_gather(PyObject *self, PyObject *args)
{
    unsigned long long stream;
    PyObject *buffer;
    const char *unit;
    int n_ranks;

    if (!PyArg_ParseTuple(args, "OKsi:all_gather", &buffer, &stream, &unit, &n_ranks)) {
        return nullptr;
    }
    return fc::guarded([&] {
        const at::Tensor &tensor = contiguous(buffer);

        require(n_ranks > 0 && tensor.nbytes() % (size_t)n_ranks == 0,
                "all_gather: the buffer has no part for each rank");
        return none_or_raise(fc_nccl_all_gather(
            fc_nccl_gathers(nccl_of(self)->group), nccl_stream(stream), {unit, "all_gather"},
            tensor.data_ptr(), tensor.nbytes() / (size_t)n_ranks));
    });
}

static PyObject *nccl_all_gather_each(PyObject *self, PyObject *args)
{
    unsigned long long stream;
    PyObject *outputs, *inputs;
    const char *unit;

    if (!PyArg_ParseTuple(args, "O!O!Ks:all_gather_each", &PyList_Type, &outputs, &PyList_Type,
                          &inputs, &stream, &unit)) {
        return nullptr;
    }
    return fc::guarded([&] {
        std::vector<fc_gather> gathers;

        require(PyList_GET_SIZE(outputs) == PyList_GET_SIZE(inputs),
                "all_gather_each: as many outputs as inputs");
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); i++) {
            const at::Tensor &from = contiguous(PyList_GET_ITEM(inputs, i));

            gathers.push_back({contiguous(PyList_GET_ITEM(outputs, i)).data_ptr(), from.data_ptr(),
                               from.nbytes()});
        }
        return none_or_raise(fc_nccl_all_gather_each(fc_nccl_gathers(nccl_of(self)->group),
                                                     nccl_stream(stream), {unit, "all_gather"},
                                                     gathers.data(), gathers.size()));
    });
}

static PyObject *nccl_reduce_scatter(PyObject *self, PyObject *args)
{
    unsigned long long stream;
    PyObject *output, *input;
    const char *unit;

    if (!PyArg_ParseTuple(args, "OOKs:reduce_scatter", &output, &input, &stream, &unit)) {
        return nullptr;
    }
    return fc::guarded([&] {
        const at::Tensor &to = contiguous(output), &from = contiguous(input);

        require(to.scalar_type() == from.scalar_type(),
                "reduce_scatter: both tensors must have one type");
        return none_or_raise(fc_nccl_reduce_scatter(
            fc_nccl_reductions(nccl_of(self)->group), nccl_stream(stream), {unit, "reduce_scatter"},
            to.data_ptr(), from.data_ptr(), (size_t)to.numel(), fc::dtype_of(to.scalar_type())));
    });
}

static PyObject *nccl_all_reduce(PyObject *self, PyObject *args)
{
    unsigned long long stream;
    PyObject *buffer;
    const char *unit;

    if (!PyArg_ParseTuple(args, "OKs:all_reduce", &buffer, &stream, &unit)) {
        return nullptr;
    }
    return fc::guarded([&] {
        const at::Tensor &tensor = contiguous(buffer);

        return none_or_raise(fc_nccl_all_reduce(
            fc_nccl_reductions(nccl_of(self)->group), nccl_stream(stream), {unit, "all_reduce"},
            tensor.data_ptr(), (size_t)tensor.numel(), fc::dtype_of(tensor.scalar_type())));
    });
}

/* ---- what people see ---- */

static PyObject *get_text(PyObject *self, void *)
{
    return PyUnicode_FromString(fc_nccl_group_describe(nccl_of(self)->group));
}

static PyMethodDef nccl_methods[] = {
    {"watch", nccl_watch, METH_NOARGS, "Raise if something is wrong with NCCL or a rank."},
    {"close", nccl_close, METH_NOARGS,
     "Wait until all work is done everywhere, and end. Collective."},
    {"leave", nccl_leave, METH_VARARGS,
     "leave(seconds): ends locally; aborts what does not end within so long."},
    {"abort", nccl_abort, METH_O, "End here, and on the ranks of this host, with this text."},
    {"wait", nccl_wait, METH_VARARGS,
     "wait(is_ready, what): until is_ready() is true, watching the ranks."},
    {"all_gather", nccl_all_gather, METH_VARARGS, "all_gather(buffer, stream, unit, n_ranks)"},
    {"all_gather_each", nccl_all_gather_each, METH_VARARGS,
     "all_gather_each(outputs, inputs, stream, unit)"},
    {"reduce_scatter", nccl_reduce_scatter, METH_VARARGS,
     "reduce_scatter(output, input, stream, unit): sums"},
    {"all_reduce", nccl_all_reduce, METH_VARARGS, "all_reduce(tensor, stream, unit): sums"},
    {nullptr, nullptr, 0, nullptr},
};

static PyGetSetDef nccl_getset[] = {
    {"text", get_text, nullptr, "Ranks, version and communicators.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

static PyType_Slot nccl_slots[] = {
    {Py_tp_doc,
     const_cast<char *>("NcclGroup(library, name, rank, n_ranks, global_ranks, timeout_seconds, "
                        "exchange, use=3, is_one=False)\n"
                        "--\n\n"
                        "NCCL for the ranks of one process group. Collective.")},
    {Py_tp_new, reinterpret_cast<void *>(nccl_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(nccl_dealloc)},
    {Py_tp_methods, nccl_methods},
    {Py_tp_getset, nccl_getset},
    {0, nullptr},
};

static PyType_Spec nccl_spec = {
    "fsdp_c._C.NcclGroup", (int)sizeof(py_nccl), 0, Py_TPFLAGS_DEFAULT, nccl_slots,
};

int fc_register_nccl(PyObject *module)
{
    return fc::add_type(module, "NcclGroup", &nccl_spec, &nccl_type);
}
