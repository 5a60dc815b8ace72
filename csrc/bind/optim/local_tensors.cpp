// The local tensors of many DTensors, for clipping: their norms, and their multiplication.
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/layout.h"
#include "bind/tensor/tensors.h"
#include "optim/clip.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <optional>

namespace fc {

namespace {

// ---- passes over the memory of many tensors, by torch's threads ----

// Lengths of tensors, and their numbers in the order that clipping takes.
struct Order {
    std::vector<size_t> numels, numbers;
};
using SharedOrder = std::shared_ptr<const Order>;

// Memory of contiguous float32 tensors on the CPU, which have to live as long.
struct Flat {
    std::vector<float *> data;
    SharedOrder order;
};

SharedOrder order_of(std::vector<size_t> numels)
{
    auto order = std::make_shared<Order>();
    order->numbers.resize(numels.size());
    fc_clip_order(numels.data(), numels.size(), order->numbers.data());
    order->numels = std::move(numels);
    return order;
}

template <typename Run> void run_parts(const Flat &flat, Run run)
{
    const Order &order = *flat.order;
    const fc_clip_tensors all = {flat.data.data(), order.numels.data(), order.numbers.data()};
    at::parallel_for(0, static_cast<int64_t>(order.numbers.size()), FC_CLIP_GRAIN,
                     [&](int64_t begin, int64_t end) {
                         run(&all, static_cast<size_t>(begin), static_cast<size_t>(end));
                     });
}

// `last`: the order of such tensors before; lengths are most often the same.
Flat flat_of(const std::vector<at::Tensor> &tensors, SharedOrder &last)
{
    Flat flat;
    std::vector<size_t> numels;
    numels.reserve(tensors.size());
    flat.data.reserve(tensors.size());
    for (const at::Tensor &tensor : tensors) {
        numels.push_back(static_cast<size_t>(tensor.numel()));
        flat.data.push_back(static_cast<float *>(tensor.data_ptr()));
    }
    if (last == nullptr || numels != last->numels) {
        last = order_of(std::move(numels));
    }
    flat.order = last;
    return flat;
}

// 2-norms, in the order of the tensors.
void find_norms(const Flat &flat, float *out)
{
    run_parts(flat, [out](const fc_clip_tensors *all, size_t begin, size_t end) {
        fc_clip_norms(all, begin, end, out);
    });
}

void multiply_all(const Flat &flat, float factor)
{
    run_parts(flat, [factor](const fc_clip_tensors *all, size_t begin, size_t end) {
        fc_clip_multiply(all, begin, end, factor);
    });
}

// ---- collections of tensors ----

// DTensorLayouts of all tensors that were collected, and for each of them, where it was the first
// of a collection, the order of that.
struct Known {
    DTensorLayouts layouts;
    std::unordered_map<int, SharedOrder> orders;
};

// A list's tensors, and their memory on this rank.
struct Locals {
    Ref owner;                       // the DTensorLayouts object
    std::vector<at::Tensor> tensors; // as users have them
    std::vector<at::Tensor> locals;
    std::vector<int> numbers; // their layouts
    std::vector<int> layouts; // each once, as they came
    int n_meshes = 0;         // plain tensors count as one
    bool is_uniform = true;   // of one device and dtype
    bool is_flat = true;      // contiguous float32 on the CPU
    std::optional<Flat> flat; // once it was asked for
};

Known &known_of(const Locals &collected)
{
    return owned<Known>(collected.owner.get());
}

int mesh_number_of(const Locals &collected, int layout)
{
    return layout == no_layout ? no_layout : known_of(collected).layouts.mesh_number_of(layout);
}

void note_layout(Locals &collected, int layout)
{
    collected.numbers.push_back(layout);
    std::vector<int> &seen = collected.layouts;
    if (std::find(seen.begin(), seen.end(), layout) != seen.end()) {
        return;
    }
    const bool is_new_mesh = std::none_of(seen.begin(), seen.end(), [&](int other) {
        return mesh_number_of(collected, other) == mesh_number_of(collected, layout);
    });
    collected.n_meshes += is_new_mesh ? 1 : 0;
    seen.push_back(layout);
}

void add(Locals &collected, at::Tensor tensor, at::Tensor local, int layout)
{
    if (!collected.locals.empty()) {
        const at::Tensor &first = collected.locals.front();
        collected.is_uniform = collected.is_uniform && local.scalar_type() == first.scalar_type() &&
                               local.device() == first.device();
    }
    collected.is_flat = collected.is_flat && are_floats(local);
    note_layout(collected, layout);
    collected.tensors.push_back(std::move(tensor));
    collected.locals.push_back(std::move(local));
}

bool is_real(at::ScalarType type)
{
    return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
}

// False if the tensor is something else than numbers in memory, or cannot count its versions.
bool take(Locals &collected, at::Tensor tensor)
{
    if (tensor.is_inference()) {
        return false;
    }
    Ref object = checked(THPVariable_Wrap(tensor));
    const int layout = known_of(collected).layouts.number_for(object.get());
    Ref local = layout == no_layout ? object : local_tensor_of(object.get());
    if (!is_ordinary(local.get()) || !is_real(THPVariable_Unpack(local.get()).scalar_type())) {
        return false;
    }
    add(collected, std::move(tensor), THPVariable_Unpack(local.get()), layout);
    return true;
}

// Undefined: the item has none.
at::Tensor wanted_of(PyObject *item, bool gradients)
{
    const at::Tensor &tensor = THPVariable_Unpack(item);
    return gradients ? tensor.grad() : tensor;
}

Ref collect(PyObject *self, PyObject *list, bool gradients)
{
    const Ref none = Ref::borrow(Py_None);
    if (!PyList_Check(list)) {
        return none;
    }
    auto collected = std::make_unique<Locals>();
    collected->owner = Ref::borrow(self);
    const auto n = static_cast<size_t>(PyList_GET_SIZE(list));
    collected->tensors.reserve(n);
    collected->locals.reserve(n);
    collected->numbers.reserve(n);
    // Comparing specs runs Python code, which may change the list.
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i);
        if (!THPVariable_Check(item)) {
            return none;
        }
        at::Tensor wanted = wanted_of(item, gradients);
        if (wanted.defined() && !take(*collected, std::move(wanted))) {
            return none;
        }
    }
    // Plain tensors alone are torch's.
    const std::vector<int> &layouts = collected->layouts;
    const bool is_sharded = layouts.size() > 1 || (!layouts.empty() && layouts[0] != no_layout);
    return is_sharded ? make_owner(python_type<Locals>, std::move(collected)) : none;
}

template <bool gradients> PyObject *layouts_collect(PyObject *self, PyObject *list)
{
    return guarded([&] { return collect(self, list, gradients).release(); });
}

Ref layouts_first_spec(Known &self, PyObject *argument)
{
    const size_t number = size_from(argument);
    if (number >= static_cast<size_t>(self.layouts.n_layouts())) {
        raise_error(PyExc_IndexError, "no layout %zu", number);
    }
    return Ref::borrow(self.layouts.spec_of(static_cast<int>(number)));
}

PyMethodDef layouts_methods[] = {
    {"collect", layouts_collect<false>, METH_O, nullptr},
    {"collect_gradients", layouts_collect<true>, METH_O, nullptr},
    method<[](Known &self, PyObject *spec) { return self.layouts.number_of(spec); }>("number"),
    method<layouts_first_spec>("spec"),
    {}};

Ref tuple_of(const std::vector<int> &numbers)
{
    return checked(PyList_AsTuple(to_python(numbers).get()));
}

Ref locals_part(const Locals &collected, PyObject *indices)
{
    const Ref all = checked(PySequence_List(indices));
    auto part = std::make_unique<Locals>();
    part->owner = collected.owner;
    for (PyObject *index : items_of(all.get())) {
        const size_t i = size_from(index);
        add(*part, collected.tensors.at(i), collected.locals.at(i), collected.numbers.at(i));
    }
    return make_owner(python_type<Locals>, std::move(part));
}

const Flat &flat_in(Locals &collected)
{
    TORCH_CHECK(collected.is_flat, "expected contiguous float32 tensors on the CPU");
    if (!collected.flat) {
        SharedOrder &last = known_of(collected).orders[collected.layouts.front()];
        collected.flat = flat_of(collected.locals, last);
    }
    return *collected.flat;
}

at::Tensor locals_norms(Locals &collected)
{
    const Flat &flat = flat_in(collected);
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::Tensor norms = at::empty({static_cast<int64_t>(collected.locals.size())}, at::kFloat);
    NoGil no_gil;
    find_norms(flat, static_cast<float *>(norms.data_ptr()));
    return norms;
}

// Those of local tensors are counted by who writes them.
void count_versions(const Locals &collected)
{
    for (size_t i = 0; i < collected.tensors.size(); i++) {
        if (collected.numbers[i] != no_layout) {
            bump_version(collected.tensors[i]);
        }
    }
}

void locals_multiply(Locals &collected, PyObject *argument)
{
    const auto factor = static_cast<float>(real_from(argument));
    const Flat &flat = flat_in(collected);
    count_versions(collected);
    for (const at::Tensor &local : collected.locals) {
        bump_version(local);
    }
    if (factor != 1.0f || fc_clip_flushes_denormals()) {
        NoGil no_gil;
        multiply_all(flat, factor);
    }
}

PyMethodDef locals_methods[] = {
    method<&Locals::tensors>("given"),
    method<&Locals::locals>("tensors"),
    method<[](Locals &self) { return tuple_of(self.numbers); }>("numbers"),
    method<locals_part>("part"),
    method<locals_norms>("norms"),
    method<locals_multiply>("multiply"),
    method<count_versions>("count_versions"),
    {}};

PyGetSetDef locals_facts[] = {
    property<[](Locals &self) { return tuple_of(self.layouts); }>("layouts"),
    property<&Locals::n_meshes>("n_meshes"),
    property<&Locals::is_uniform>("is_uniform"),
    property<&Locals::is_flat>("is_flat"),
    {}};

} // namespace

double clip_factor(Fields &given)
{
    const auto max_norm = static_cast<float>(given.real("max_norm"));
    const auto norm = static_cast<float>(given.real("norm"));
    given.end();
    return fc_clip_factor_of(max_norm, norm);
}

// The norm of a vector's few elements.
at::Tensor norm_of(PyObject *argument)
{
    const at::Tensor &values = tensor_of(argument);
    if (values.scalar_type() != at::kFloat || !values.is_cpu() || !values.is_contiguous()) {
        raise_error(PyExc_ValueError, "norm: expected a contiguous float32 tensor on the CPU");
    }
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::Tensor found = at::empty({}, at::kFloat);
    SharedOrder none;
    find_norms(flat_of({values}, none), static_cast<float *>(found.data_ptr()));
    return found;
}

int register_locals(PyObject *module)
{
    if (add_type<Locals>(module, {.name = "fsdp_c._C.Locals",
                                  .methods = locals_methods,
                                  .properties = locals_facts,
                                  .flags = Py_TPFLAGS_DISALLOW_INSTANTIATION}) < 0) {
        return -1;
    }
    return add_type<Known>(module, {.name = "fsdp_c._C.Layouts", .methods = layouts_methods});
}

} // namespace fc
