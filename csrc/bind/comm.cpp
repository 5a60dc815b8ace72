/* The type `_C.Comm`: tensors are checked here, then lent to the core. */
#include "bind/comm.h"

#include "bind/status.h"
#include "bind/transport.h"
#include "comm/comm.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

namespace {

struct py_comm {
    PyObject_HEAD
    PyObject *transport; /* owned; the communicator borrows from it */
    fc_comm *comm;       /* owned */
    bool is_busy;        /* a call waits without the GIL */
};

/* Memory of a tensor for the time of a call. */
struct operand {
    at::Tensor tensor;
    char *data = nullptr;
    size_t bytes = 0;
    size_t numel = 0;
};

} // namespace

static bool read_operand(PyObject *object, const char *name, operand &out)
{
    if (!THPVariable_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tensor, got %s", name,
                     Py_TYPE(object)->tp_name);
        return false;
    }
    out.tensor = THPVariable_Unpack(object);
    if (out.tensor.layout() != at::kStrided || !out.tensor.device().is_cpu() ||
        !out.tensor.is_contiguous() || out.tensor.is_conj() || out.tensor.is_neg() ||
        !out.tensor.has_storage()) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be a contiguous CPU tensor, got %s on %s with %s layout", name,
                     out.tensor.is_contiguous() ? "a contiguous one" : "one that is not contiguous",
                     out.tensor.device().str().c_str(),
                     out.tensor.layout() == at::kStrided ? "strided" : "another");
        return false;
    }
    out.data = static_cast<char *>(out.tensor.data_ptr());
    out.bytes = out.tensor.nbytes();
    out.numel = (size_t)out.tensor.numel();
    return true;
}

static bool read_dtype(const operand &op, fc_dtype *out)
{
    switch (op.tensor.scalar_type()) {
    case at::kFloat:
        *out = FC_F32;
        return true;
    case at::kDouble:
        *out = FC_F64;
        return true;
    case at::kBFloat16:
        *out = FC_BF16;
        return true;
    case at::kHalf:
        *out = FC_F16;
        return true;
    case at::kByte:
        *out = FC_U8;
        return true;
    case at::kChar:
        *out = FC_I8;
        return true;
    case at::kShort:
        *out = FC_I16;
        return true;
    case at::kInt:
        *out = FC_I32;
        return true;
    case at::kLong:
        *out = FC_I64;
        return true;
    default:
        PyErr_Format(PyExc_ValueError, "tensors of type %s cannot be added",
                     at::toString(op.tensor.scalar_type()));
        return false;
    }
}

/* `whole` holds n_ranks times `part`; where they overlap, `part` is this rank's part of it. */
static bool check_pair(const py_comm *self, const operand &whole, const char *whole_name,
                       const operand &part, const char *part_name)
{
    const fc_transport *t = fc_transport_from_object(self->transport);
    auto n_ranks = (size_t)fc_transport_n_ranks(t);
    const char *own = whole.data + (size_t)fc_transport_rank(t) * part.bytes;

    if (whole.tensor.scalar_type() != part.tensor.scalar_type() ||
        whole.numel != n_ranks * part.numel) {
        PyErr_Format(
            PyExc_ValueError,
            "%s must have %zu x the elements of %s and the same dtype, got %zu of %s for %zu of %s",
            whole_name, n_ranks, part_name, whole.numel, at::toString(whole.tensor.scalar_type()),
            part.numel, at::toString(part.tensor.scalar_type()));
        return false;
    }
    if (part.bytes > 0 && part.data != own && part.data < whole.data + whole.bytes &&
        whole.data < part.data + part.bytes) {
        PyErr_Format(PyExc_ValueError, "%s overlaps %s, but is not this rank's part of it",
                     part_name, whole_name);
        return false;
    }
    return true;
}

/* Autograd learns that a tensor was written. */
static PyObject *finish(py_comm *self, fc_status st, const operand *written)
{
    self->is_busy = false;
    if (written != nullptr && !written->tensor.is_inference()) {
        written->tensor.unsafeGetTensorImpl()->bump_version();
    }
    if (st != FC_OK) {
        return fc_raise(st);
    }
    Py_RETURN_NONE;
}

/* Waits give up the GIL, so another thread could come in between. */
static bool enter(py_comm *self)
{
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError,
                        "another thread is in a collective of this communicator");
        return false;
    }
    self->is_busy = true;
    return true;
}

static PyObject *comm_all_gather(PyObject *object, PyObject *args)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    PyObject *output_object;
    PyObject *input_object;
    operand output;
    operand input;

    if (!PyArg_ParseTuple(args, "OO:all_gather", &output_object, &input_object) ||
        !read_operand(output_object, "output", output) ||
        !read_operand(input_object, "input", input) ||
        !check_pair(self, output, "output", input, "input") || !enter(self)) {
        return nullptr;
    }
    return finish(self, fc_comm_all_gather(self->comm, output.data, input.data, input.bytes),
                  &output);
}

static PyObject *comm_reduce_scatter(PyObject *object, PyObject *args)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    PyObject *output_object;
    PyObject *input_object;
    double divisor = 1.0;
    operand output;
    operand input;
    fc_dtype dtype;

    if (!PyArg_ParseTuple(args, "OO|d:reduce_scatter", &output_object, &input_object, &divisor) ||
        !read_operand(output_object, "output", output) ||
        !read_operand(input_object, "input", input) ||
        !check_pair(self, input, "input", output, "output") || !read_dtype(input, &dtype) ||
        !enter(self)) {
        return nullptr;
    }
    return finish(
        self,
        fc_comm_reduce_scatter(self->comm, output.data, input.data, output.numel, dtype, divisor),
        &output);
}

static PyObject *comm_all_reduce(PyObject *object, PyObject *args)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    PyObject *tensor_object;
    double divisor = 1.0;
    operand tensor;
    fc_dtype dtype;

    if (!PyArg_ParseTuple(args, "O|d:all_reduce", &tensor_object, &divisor) ||
        !read_operand(tensor_object, "tensor", tensor) || !read_dtype(tensor, &dtype) ||
        !enter(self)) {
        return nullptr;
    }
    return finish(self, fc_comm_all_reduce(self->comm, tensor.data, tensor.numel, dtype, divisor),
                  &tensor);
}

static PyObject *comm_broadcast(PyObject *object, PyObject *args)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    PyObject *tensor_object;
    int src;
    operand tensor;

    if (!PyArg_ParseTuple(args, "Oi:broadcast", &tensor_object, &src) ||
        !read_operand(tensor_object, "tensor", tensor) || !enter(self)) {
        return nullptr;
    }
    return finish(self, fc_comm_broadcast(self->comm, tensor.data, tensor.bytes, src), &tensor);
}

/* The table of elements between ranks, a list of n_ranks rows, in bytes. */
static bool read_table(PyObject *object, size_t n_ranks, size_t item_bytes,
                       std::vector<size_t> &out)
{
    PyObject *rows = PySequence_Fast(object, "counts must be a list of rows");
    bool is_fine = rows != nullptr && (size_t)PySequence_Fast_GET_SIZE(rows) == n_ranks;

    out.reserve(n_ranks * n_ranks);
    for (size_t s = 0; is_fine && s < n_ranks; s++) {
        PyObject *row = PySequence_Fast(PySequence_Fast_GET_ITEM(rows, (Py_ssize_t)s),
                                        "a row of counts must be a list");

        is_fine = row != nullptr && (size_t)PySequence_Fast_GET_SIZE(row) == n_ranks;
        for (size_t r = 0; is_fine && r < n_ranks; r++) {
            size_t count = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(row, (Py_ssize_t)r));

            is_fine = PyErr_Occurred() == nullptr && count <= (size_t)PTRDIFF_MAX / item_bytes;
            out.push_back(count * item_bytes);
        }
        Py_XDECREF(row);
    }
    Py_XDECREF(rows);
    if (!is_fine && PyErr_Occurred() == nullptr) {
        PyErr_Format(PyExc_ValueError, "counts must be %zu rows of %zu numbers", n_ranks, n_ranks);
    }
    return is_fine;
}

static PyObject *comm_all_to_all(PyObject *object, PyObject *args)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    const fc_transport *t = fc_transport_from_object(self->transport);
    auto n_ranks = (size_t)fc_transport_n_ranks(t);
    auto own = (size_t)fc_transport_rank(t);
    PyObject *output_object, *input_object, *counts;
    operand output, input;
    std::vector<size_t> table;
    size_t sent = 0, received = 0;

    if (!PyArg_ParseTuple(args, "OOO:all_to_all", &output_object, &input_object, &counts) ||
        !read_operand(output_object, "output", output) ||
        !read_operand(input_object, "input", input) ||
        !read_table(counts, n_ranks, input.tensor.itemsize(), table)) {
        return nullptr;
    }
    for (size_t r = 0; r < n_ranks; r++) {
        sent += table[own * n_ranks + r];
        received += table[r * n_ranks + own];
    }
    if (output.tensor.scalar_type() != input.tensor.scalar_type() || sent != input.bytes ||
        received != output.bytes) {
        return PyErr_Format(
            PyExc_ValueError,
            "output and input must have one dtype and the elements of this rank's "
            "column and row of counts: %zu and %zu bytes, got %zu of %s and %zu of %s",
            received, sent, output.bytes, at::toString(output.tensor.scalar_type()), input.bytes,
            at::toString(input.tensor.scalar_type()));
    }
    if (output.data < input.data + input.bytes && input.data < output.data + output.bytes) {
        PyErr_SetString(PyExc_ValueError, "output overlaps input");
        return nullptr;
    }
    if (!enter(self)) {
        return nullptr;
    }
    return finish(self, fc_comm_all_to_all(self->comm, output.data, input.data, table.data()),
                  &output);
}

static PyObject *comm_all_agree(PyObject *object, PyObject *argument)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    const int is_true = PyObject_IsTrue(argument);
    int32_t n_against = is_true == 0;

    if (is_true < 0 || !enter(self)) {
        return nullptr;
    }
    PyObject *done =
        finish(self, fc_comm_all_reduce(self->comm, &n_against, 1, FC_I32, 1.0), nullptr);
    if (done == nullptr) {
        return nullptr;
    }
    Py_DECREF(done);
    return PyBool_FromLong(n_against == 0);
}

static PyObject *comm_barrier(PyObject *object, PyObject *)
{
    auto *self = reinterpret_cast<py_comm *>(object);

    if (!enter(self)) {
        return nullptr;
    }
    return finish(self, fc_comm_barrier(self->comm), nullptr);
}

/* New reference. */
static PyObject *comm_get_transport(PyObject *object, void *)
{
    return Py_NewRef(reinterpret_cast<py_comm *>(object)->transport);
}

static void comm_dealloc(PyObject *object)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    PyTypeObject *type = Py_TYPE(object);

    fc_comm_destroy(self->comm);
    Py_XDECREF(self->transport);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static const char *names[] = {"transport", nullptr};
    PyObject *transport_object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Comm", const_cast<char **>(names),
                                     &transport_object)) {
        return nullptr;
    }
    fc_transport *transport = fc_transport_from_object(transport_object);
    if (transport == nullptr) {
        return nullptr;
    }
    auto *self = reinterpret_cast<py_comm *>(type->tp_alloc(type, 0));
    if (self == nullptr) {
        return nullptr;
    }
    self->transport = Py_NewRef(transport_object);
    fc_status st = fc_comm_create(transport, &self->comm);
    if (st != FC_OK) {
        fc_raise(st);
        Py_DECREF(self);
        return nullptr;
    }
    return reinterpret_cast<PyObject *>(self);
}

static PyMethodDef comm_methods[] = {
    {"all_gather", comm_all_gather, METH_VARARGS, "all_gather(output, input)"},
    {"reduce_scatter", comm_reduce_scatter, METH_VARARGS,
     "reduce_scatter(output, input, divisor=1.0)"},
    {"all_reduce", comm_all_reduce, METH_VARARGS, "all_reduce(tensor, divisor=1.0)"},
    {"broadcast", comm_broadcast, METH_VARARGS, "broadcast(tensor, src)"},
    {"all_to_all", comm_all_to_all, METH_VARARGS, "all_to_all(output, input, counts)"},
    {"all_agree", comm_all_agree, METH_O,
     "all_agree(bool) -> bool\n\nWhether it is true on all ranks."},
    {"barrier", comm_barrier, METH_NOARGS, "barrier()"},
    {nullptr, nullptr, 0, nullptr},
};

static PyGetSetDef comm_getset[] = {
    {"transport", comm_get_transport, nullptr, "The Transport it uses.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

static PyType_Slot comm_slots[] = {
    {Py_tp_doc,
     const_cast<char *>("Comm(transport)\n--\n\nBlocking collectives on CPU tensors. Collective.")},
    {Py_tp_new, reinterpret_cast<void *>(comm_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(comm_dealloc)},
    {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},
    {0, nullptr},
};

static PyType_Spec comm_spec = {
    "fsdp_c._C.Comm", (int)sizeof(py_comm), 0, Py_TPFLAGS_DEFAULT, comm_slots,
};

int fc_register_comm(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&comm_spec);
    int result = type == nullptr ? -1 : PyModule_AddObjectRef(module, "Comm", type);

    Py_XDECREF(type);
    return result;
}
