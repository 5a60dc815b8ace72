/* The type `_C.Comm`: tensors are checked here, then lent to the core. */
#include "bind/comm/communicator.h"

#include "bind/comm/transport.h"
#include "bind/python/status.h"
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

static bool read_memory(PyObject *object, const char *name, at::Tensor &out, bool is_dense)
{
    if (!THPVariable_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tensor, got %s", name,
                     Py_TYPE(object)->tp_name);
        return false;
    }
    out = THPVariable_Unpack(object);
    if (out.layout() != at::kStrided || !out.device().is_cpu() ||
        (is_dense && !out.is_contiguous()) || out.is_conj() || out.is_neg() || !out.has_storage()) {
        PyErr_Format(PyExc_ValueError, "%s must be a %sCPU tensor, got %s on %s with %s layout",
                     name, is_dense ? "contiguous " : "",
                     out.is_contiguous() ? "a contiguous one" : "one that is not contiguous",
                     out.device().str().c_str(),
                     out.layout() == at::kStrided ? "strided" : "another");
        return false;
    }
    return true;
}

static bool read_operand(PyObject *object, const char *name, operand &out)
{
    if (!read_memory(object, name, out.tensor, true)) {
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
static void note_write(const at::Tensor &tensor)
{
    if (!tensor.is_inference()) {
        tensor.unsafeGetTensorImpl()->bump_version();
    }
}

static PyObject *finish(py_comm *self, fc_status st, const operand *written)
{
    self->is_busy = false;
    if (written != nullptr) {
        note_write(written->tensor);
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
    std::vector<fc_comm_piece> pieces(2 * n_ranks);
    std::vector<fc_comm_block> blocks(2 * n_ranks);
    for (size_t r = 0; r < n_ranks; r++) {
        pieces[r] = {output.data, table[r * n_ranks + own], 1, 0};
        pieces[n_ranks + r] = {input.data, table[own * n_ranks + r], 1, 0};
        output.data += pieces[r].row_bytes;
        input.data += pieces[n_ranks + r].row_bytes;
        blocks[r] = {&pieces[r], 1};
        blocks[n_ranks + r] = {&pieces[n_ranks + r], 1};
    }
    if (!enter(self)) {
        return nullptr;
    }
    return finish(self,
                  fc_comm_all_to_all(self->comm, blocks.data(), &blocks[n_ranks], table.data()),
                  &output);
}

/* The tensor's bytes in the order of its indices. */
static void add_pieces(const at::Tensor &tensor, std::vector<fc_comm_piece> &out)
{
    const auto item = tensor.itemsize();
    auto *data = static_cast<char *>(tensor.data_ptr());
    std::vector<std::pair<size_t, size_t>> dims; /* size and pitch; what lies together is one */
    size_t row_bytes = item, n_outer = 1;

    for (int64_t d = 0; d < tensor.dim(); d++) {
        const auto size = (size_t)tensor.size(d), pitch = (size_t)tensor.stride(d) * item;

        if (!dims.empty() && dims.back().second == size * pitch) {
            dims.back() = {dims.back().first * size, pitch};
        } else if (size != 1) {
            dims.emplace_back(size, pitch);
        }
    }
    if (!dims.empty() && dims.back().second == item) {
        row_bytes *= dims.back().first;
        dims.pop_back();
    }
    fc_comm_piece rows = {data, row_bytes, 1, 0};
    if (!dims.empty()) {
        rows.n_rows = dims.back().first;
        rows.pitch = dims.back().second;
        dims.pop_back();
    }
    for (const auto &dim : dims) {
        n_outer *= dim.first;
    }
    for (size_t i = 0; i < n_outer; i++) {
        size_t rest = i, at = 0;

        for (auto dim = dims.rbegin(); dim != dims.rend(); ++dim) {
            at += rest % dim->first * dim->second;
            rest /= dim->first;
        }
        out.push_back({data + at, rows.row_bytes, rows.n_rows, rows.pitch});
    }
}

/* Lists of tensors, one for each rank; their strides do not matter. */
struct tensor_lists {
    std::vector<at::Tensor> tensors;
    std::vector<fc_comm_piece> pieces;
    std::vector<fc_comm_block> blocks;
};

static bool read_lists(PyObject *object, const char *name, size_t n_ranks, tensor_lists &out)
{
    std::vector<size_t> ends;

    if (!PyList_Check(object) || (size_t)PyList_GET_SIZE(object) != n_ranks) {
        PyErr_Format(PyExc_ValueError, "%s must be a list of %zu lists of tensors", name, n_ranks);
        return false;
    }
    for (size_t r = 0; r < n_ranks; r++) {
        PyObject *list = PyList_GET_ITEM(object, (Py_ssize_t)r);

        if (!PyList_Check(list)) {
            PyErr_Format(PyExc_ValueError, "%s must be a list of lists of tensors", name);
            return false;
        }
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
            at::Tensor tensor;

            if (!read_memory(PyList_GET_ITEM(list, i), name, tensor, false)) {
                return false;
            }
            add_pieces(tensor, out.pieces);
            out.tensors.push_back(std::move(tensor));
        }
        ends.push_back(out.pieces.size());
    }
    for (size_t begin = 0; size_t end : ends) {
        out.blocks.push_back({out.pieces.data() + begin, end - begin});
        begin = end;
    }
    return true;
}

static PyObject *comm_exchange(PyObject *object, PyObject *args)
{
    auto *self = reinterpret_cast<py_comm *>(object);
    const fc_transport *t = fc_transport_from_object(self->transport);
    auto n_ranks = (size_t)fc_transport_n_ranks(t);
    PyObject *received_object, *sent_object, *counts;
    Py_ssize_t item_bytes;
    tensor_lists received, sent;
    std::vector<size_t> table;

    if (!PyArg_ParseTuple(args, "OOOn:exchange", &received_object, &sent_object, &counts,
                          &item_bytes) ||
        !read_lists(received_object, "received", n_ranks, received) ||
        !read_lists(sent_object, "sent", n_ranks, sent) ||
        !read_table(counts, n_ranks, (size_t)item_bytes, table) || !enter(self)) {
        return nullptr;
    }
    fc_status st =
        fc_comm_all_to_all(self->comm, received.blocks.data(), sent.blocks.data(), table.data());
    for (const at::Tensor &tensor : received.tensors) {
        note_write(tensor);
    }
    return finish(self, st, nullptr);
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
    {"exchange", comm_exchange, METH_VARARGS,
     "exchange(received, sent, counts, itemsize)\n\nall_to_all between lists of tensors of any "
     "strides, a list for each rank."},
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
