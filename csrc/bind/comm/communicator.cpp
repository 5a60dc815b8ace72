/* The type `_C.Comm`: tensors as arrays of the core, lent to it for the time of a call. */
#include "bind/comm/transport.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/tensors.h"
#include "comm/comm.h"

#include <c10/util/ArrayRef.h>

namespace fc {

namespace {

struct Comm {
    explicit Comm(Fields &given);

    Ref transport; /* the communicator borrows from it */
    Owned<fc_comm, fc_comm_destroy> owner;
    fc_comm *core;
    size_t n_ranks;
    bool is_busy = false; /* a call waits without the interpreter's lock */
};

Comm::Comm(Fields &given) : transport(given.object("transport"))
{
    given.end();
    fc_transport *over = transport_from_object(transport.get());

    n_ranks = (size_t)fc_transport_n_ranks(over);
    check(fc_comm_create(over, Out(owner)));
    core = owner.get();
}

/* ---- what is handed in ---- */

/* The tensor inside of an object that is named so, in memory that the core can read. */
at::Tensor memory_of(PyObject *object, const char *name, bool is_dense)
{
    if (!THPVariable_Check(object)) {
        raise_error(PyExc_TypeError, "%s must be a tensor, got %s", name, Py_TYPE(object)->tp_name);
    }
    at::Tensor tensor = THPVariable_Unpack(object);
    if (tensor.layout() != at::kStrided || !tensor.device().is_cpu() ||
        (is_dense && !tensor.is_contiguous()) || tensor.is_conj() || tensor.is_neg() ||
        !tensor.has_storage()) {
        raise_error(PyExc_ValueError, "%s must be a %sCPU tensor, got %s on %s with %s layout",
                    name, is_dense ? "contiguous " : "",
                    tensor.is_contiguous() ? "a contiguous one" : "one that is not contiguous",
                    tensor.device().str().c_str(),
                    tensor.layout() == at::kStrided ? "strided" : "another");
    }
    return tensor;
}

struct Operand {
    at::Tensor tensor;
    fc_comm_array array;

    Operand(const Ref &object, const char *name)
        : tensor(memory_of(object.get(), name, true)), array{name,
                                                             at::toString(tensor.scalar_type()),
                                                             static_cast<char *>(tensor.data_ptr()),
                                                             (size_t)tensor.numel(),
                                                             tensor.nbytes(),
                                                             number_of(tensor.scalar_type())}
    {
    }
};

/* The table of elements between ranks, row by row, in bytes. */
std::vector<size_t> table_of(const Comm &self, PyObject *counts, size_t item_bytes)
{
    std::vector<size_t> table;

    for (PyObject *count : items_of(counts)) {
        table.push_back(size_from(count));
    }
    check(fc_comm_table(self.core, table.data(), table.size(), item_bytes));
    return table;
}

/* Lists of tensors, one for each rank; their strides do not matter. */
struct TensorLists {
    std::vector<at::Tensor> tensors;
    std::vector<fc_comm_piece> pieces;
    std::vector<fc_comm_block> blocks;

    TensorLists(PyObject *lists, const char *name, size_t n_ranks);
};

void append_rows(const at::Tensor &tensor, std::vector<fc_comm_piece> &pieces)
{
    const fc_comm_strided array = {static_cast<char *>(tensor.data_ptr()), tensor.itemsize(),
                                   (size_t)tensor.dim(), tensor.sizes().data(),
                                   tensor.strides().data()};
    const size_t before = pieces.size();
    size_t n = 0;

    check(fc_comm_rows_of(&array, nullptr, &n));
    pieces.resize(before + n);
    check(fc_comm_rows_of(&array, pieces.data() + before, &n));
}

TensorLists::TensorLists(PyObject *lists, const char *name, size_t n_ranks)
{
    std::vector<size_t> ends;

    if (!PyList_Check(lists) || (size_t)PyList_GET_SIZE(lists) != n_ranks) {
        raise_error(PyExc_ValueError, "%s must be a list of %zu lists of tensors", name, n_ranks);
    }
    for (PyObject *list : items_of(lists)) {
        if (!PyList_Check(list)) {
            raise_error(PyExc_ValueError, "%s must be a list of lists of tensors", name);
        }
        for (PyObject *item : items_of(list)) {
            tensors.push_back(memory_of(item, name, false));
            append_rows(tensors.back(), pieces);
        }
        ends.push_back(pieces.size());
    }
    for (size_t begin = 0; size_t end : ends) {
        blocks.push_back({pieces.data() + begin, end - begin});
        begin = end;
    }
}

/* ---- collectives ---- */

/* Waits let go of the interpreter's lock, so another thread could come in between. */
class Turn : NoCopy {
public:
    explicit Turn(Comm &comm) : comm_(comm)
    {
        if (comm.is_busy) {
            raise_error(PyExc_RuntimeError,
                        "another thread is in a collective of this communicator");
        }
        comm.is_busy = true;
    }
    ~Turn() { comm_.is_busy = false; }

private:
    Comm &comm_;
};

/* Autograd learns of what is written, whatever came of it. */
template <typename Call>
fc_status collective(Comm &self, c10::ArrayRef<at::Tensor> written, Call &&call)
{
    const Turn turn(self);
    const fc_status status = call();

    for (const at::Tensor &tensor : written) {
        if (!tensor.is_inference()) {
            tensor.unsafeGetTensorImpl()->bump_version();
        }
    }
    return status;
}

fc_status comm_collect(Comm &self, Fields &given)
{
    const char *what = given.text("what");
    const Ref output = given.object("output"), input = given.object("input");
    const double divisor = given.real("divisor");
    const int src = given.integer("src");

    given.end();
    const bool is_in_place = input.get() == Py_None;
    const Operand to(output, is_in_place ? "tensor" : "output");
    const Operand from(is_in_place ? output : input, is_in_place ? "tensor" : "input");
    check(fc_comm_check_arrays(self.core, what, &to.array, &from.array));
    return collective(self, to.tensor, [&] {
        return fc_comm_collect(self.core, what, &to.array, &from.array, divisor, src);
    });
}

fc_status comm_all_to_all(Comm &self, Fields &given)
{
    const Operand output(given.object("output"), "output"), input(given.object("input"), "input");
    const Ref counts = given.list("counts");
    std::vector<fc_comm_piece> pieces(2 * self.n_ranks);
    std::vector<fc_comm_block> blocks(2 * self.n_ranks);

    given.end();
    const std::vector<size_t> table = table_of(self, counts.get(), input.tensor.itemsize());
    check(fc_comm_split(self.core, &output.array, &input.array, table.data(), pieces.data(),
                        blocks.data()));
    return collective(self, output.tensor, [&] {
        return fc_comm_all_to_all(self.core, blocks.data(), &blocks[self.n_ranks], table.data());
    });
}

fc_status comm_exchange(Comm &self, Fields &given)
{
    const TensorLists received(given.object("received").get(), "received", self.n_ranks);
    const TensorLists sent(given.object("sent").get(), "sent", self.n_ranks);
    const Ref counts = given.list("counts");
    const std::vector<size_t> table = table_of(self, counts.get(), given.size("itemsize"));

    given.end();
    return collective(self, received.tensors, [&] {
        return fc_comm_all_to_all(self.core, received.blocks.data(), sent.blocks.data(),
                                  table.data());
    });
}

bool comm_all_agree(Comm &self, PyObject *argument)
{
    const bool is_true = truth_of(argument);
    bool is_agreed = false;

    check(collective(self, {}, [&] { return fc_comm_all_agree(self.core, is_true, &is_agreed); }));
    return is_agreed;
}

PyMethodDef comm_methods[] = {
    method<comm_collect>("collect"),
    method<comm_all_to_all>("all_to_all"),
    method<comm_exchange>("exchange"),
    method<comm_all_agree>("all_agree"),
    method<[](Comm &self) {
        return collective(self, {}, [&] { return fc_comm_barrier(self.core); });
    }>("barrier"),
    {},
};

PyGetSetDef comm_properties[] = {
    property<&Comm::transport>("transport"),
    {},
};

} // namespace

int register_comm(PyObject *module)
{
    return add_type<Comm>(
        module, {.name = "fsdp_c._C.Comm", .methods = comm_methods, .properties = comm_properties});
}

} // namespace fc
