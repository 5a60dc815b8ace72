// Collects the local tensors of many DTensors.
#include "bind/tensor/local_tensors.h"

#include "bind/optim/clip.h"
#include "bind/python/objects.h"
#include "bind/python/python.h"
#include "bind/tensor/layout.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fc {

namespace {

// DTensorLayouts of all tensors that were collected, and for each of them, where it was the first
// of a collection, the order of that.
struct Known {
    DTensorLayouts layouts;
    std::unordered_map<int, SharedOrder> orders;
};

PyObject *layouts_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    if (!PyArg_ParseTuple(args, ":Layouts")) {
        return nullptr;
    }
    return guarded([&] { return make_owner(type, std::make_unique<Known>()).release(); });
}

constexpr int no_layout = -1; // of a plain tensor

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

PyTypeObject *locals_type;

Known &known_of(PyObject *layouts)
{
    return owned<Known>(layouts);
}

int mesh_number_of(const Locals &collected, int layout)
{
    return layout == no_layout ? no_layout
                               : known_of(collected.owner.get()).layouts.mesh_number_of(layout);
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
    collected.is_flat = collected.is_flat && local.is_cpu() && local.scalar_type() == at::kFloat &&
                        local.is_contiguous();
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
    Ref local = object;
    int layout = no_layout;
    if (is_dtensor(object.get())) {
        Ref spec = spec_of(object.get());
        layout = known_of(collected.owner.get()).layouts.number_of(spec.get());
        local = local_tensor_of(object.get());
    }
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

// Of a subclass too.
bool has_dtensors(PyObject *list, bool gradients)
{
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *item = PyList_GET_ITEM(list, i);
        if (THPVariable_Check(item)) {
            const at::Tensor wanted = wanted_of(item, gradients);
            Ref object = wanted.defined() ? checked(THPVariable_Wrap(wanted)) : Ref();
            if (object && is_dtensor_or_subclass(object.get())) {
                return true;
            }
        }
    }
    return false;
}

PyObject *collect(PyObject *self, PyObject *list, bool gradients)
{
    return guarded([&]() -> PyObject * {
        if (!PyList_Check(list)) {
            Py_RETURN_NONE;
        }
        auto collected = std::make_unique<Locals>();
        collected->owner = Ref::borrow(self);
        const auto n = static_cast<size_t>(PyList_GET_SIZE(list));
        collected->tensors.reserve(n);
        collected->locals.reserve(n);
        collected->numbers.reserve(n);
        bool is_sharded = false; // plain tensors alone are torch's
        // Comparing specs runs Python code, which may change the list.
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
            PyObject *item = PyList_GET_ITEM(list, i);
            if (!THPVariable_Check(item)) {
                Py_RETURN_NONE;
            }
            at::Tensor wanted = wanted_of(item, gradients);
            if (wanted.defined() && !take(*collected, std::move(wanted))) {
                Py_RETURN_NONE;
            }
            if (!is_sharded && !collected->numbers.empty()) {
                is_sharded =
                    collected->numbers.front() != no_layout || has_dtensors(list, gradients);
                if (!is_sharded) {
                    Py_RETURN_NONE;
                }
            }
        }
        if (collected->tensors.empty()) {
            Py_RETURN_NONE;
        }
        return make_owner(locals_type, std::move(collected)).release();
    });
}

PyObject *layouts_collect(PyObject *self, PyObject *list)
{
    return collect(self, list, false);
}

PyObject *layouts_collect_gradients(PyObject *self, PyObject *list)
{
    return collect(self, list, true);
}

PyObject *layouts_has_dtensors(PyObject *, PyObject *args)
{
    PyObject *list;
    int gradients;
    if (!PyArg_ParseTuple(args, "O!p:has_dtensors", &PyList_Type, &list, &gradients)) {
        return nullptr;
    }
    return guarded(
        [&]() -> PyObject * { return PyBool_FromLong(has_dtensors(list, gradients != 0)); });
}

PyObject *layouts_number(PyObject *self, PyObject *spec)
{
    return guarded(
        [&]() -> PyObject * { return PyLong_FromLong(known_of(self).layouts.number_of(spec)); });
}

PyObject *layouts_first_spec(PyObject *self, PyObject *argument)
{
    const long number = PyLong_AsLong(argument);
    const DTensorLayouts &layouts = known_of(self).layouts;
    if (number < 0 || number >= layouts.n_layouts()) {
        return PyErr_Occurred() != nullptr
                   ? nullptr
                   : PyErr_Format(PyExc_IndexError, "no layout %ld", number);
    }
    return Ref::borrow(layouts.spec_of(static_cast<int>(number))).release();
}

PyMethodDef layouts_methods[] = {
    {"collect", layouts_collect, METH_O,
     "collect(tensors) -> Locals | None\n\n"
     "None: one of them is no memory of real numbers, or none is a DTensor."},
    {"collect_gradients", layouts_collect_gradients, METH_O,
     "collect_gradients(tensors) -> Locals | None\n\nThe same of the gradients that tensors have."},
    {"has_dtensors", layouts_has_dtensors, METH_VARARGS,
     "has_dtensors(tensors, gradients) -> bool\n\nAmong them, or among the gradients they have."},
    {"number", layouts_number, METH_O, "number(spec) -> int\n\nThat of the spec's layout."},
    {"spec", layouts_first_spec, METH_O, "spec(number)\n\nThe first one seen of the layout."},
    {nullptr, nullptr, 0, nullptr}};

PyObject *list_of(const std::vector<at::Tensor> &tensors)
{
    return guarded([&]() -> PyObject * {
        Ref result = checked(PyList_New(static_cast<Py_ssize_t>(tensors.size())));
        for (size_t i = 0; i < tensors.size(); i++) {
            PyList_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i), THPVariable_Wrap(tensors[i]));
        }
        return result.release();
    });
}

PyObject *locals_given(PyObject *self, PyObject *)
{
    return list_of(owned<Locals>(self).tensors);
}

PyObject *locals_tensors(PyObject *self, PyObject *)
{
    return list_of(owned<Locals>(self).locals);
}

PyObject *tuple_of(const std::vector<int> &numbers)
{
    return guarded([&]() -> PyObject * {
        Ref result = checked(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
        for (size_t i = 0; i < numbers.size(); i++) {
            PyTuple_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i),
                             checked(PyLong_FromLong(numbers[i])).release());
        }
        return result.release();
    });
}

PyObject *locals_numbers(PyObject *self, PyObject *)
{
    return tuple_of(owned<Locals>(self).numbers);
}

PyObject *locals_parts(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        const Locals &collected = owned<Locals>(self);
        std::vector<std::pair<int, std::unique_ptr<Locals>>> parts;
        for (size_t i = 0; i < collected.tensors.size(); i++) {
            const int mesh = mesh_number_of(collected, collected.numbers[i]);
            auto part = std::find_if(parts.begin(), parts.end(),
                                     [&](const auto &other) { return other.first == mesh; });
            if (part == parts.end()) {
                parts.emplace_back(mesh, std::make_unique<Locals>());
                part = parts.end() - 1;
                part->second->owner = collected.owner;
            }
            add(*part->second, collected.tensors[i], collected.locals[i], collected.numbers[i]);
        }
        Ref result = checked(PyList_New(static_cast<Py_ssize_t>(parts.size())));
        for (size_t i = 0; i < parts.size(); i++) {
            PyList_SET_ITEM(result.get(), static_cast<Py_ssize_t>(i),
                            make_owner(locals_type, std::move(parts[i].second)).release());
        }
        return result.release();
    });
}

const Flat &flat_in(Locals &collected)
{
    TORCH_CHECK(collected.is_flat, "expected contiguous float32 tensors on the CPU");
    if (!collected.flat) {
        SharedOrder &last = known_of(collected.owner.get()).orders[collected.layouts.front()];
        collected.flat = flat_of(collected.locals, last);
    }
    return *collected.flat;
}

PyObject *locals_norms(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        Locals &collected = owned<Locals>(self);
        const Flat &flat = flat_in(collected);
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        at::Tensor norms = at::empty({static_cast<int64_t>(collected.locals.size())}, at::kFloat);
        {
            NoGil no_gil;
            find_norms(flat, static_cast<float *>(norms.data_ptr()));
        }
        return THPVariable_Wrap(norms);
    });
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

PyObject *locals_multiply(PyObject *self, PyObject *argument)
{
    const auto factor = static_cast<float>(PyFloat_AsDouble(argument));
    if (PyErr_Occurred() != nullptr) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        Locals &collected = owned<Locals>(self);
        const Flat &flat = flat_in(collected);
        count_versions(collected);
        for (const at::Tensor &local : collected.locals) {
            bump_version(local);
        }
        if (factor != 1.0f || flushes_denormals()) {
            NoGil no_gil;
            multiply_all(flat, factor);
        }
        Py_RETURN_NONE;
    });
}

PyObject *locals_count_versions(PyObject *self, PyObject *)
{
    return guarded([&]() -> PyObject * {
        count_versions(owned<Locals>(self));
        Py_RETURN_NONE;
    });
}

PyMethodDef locals_methods[] = {
    {"given", locals_given, METH_NOARGS, "given() -> list[Tensor]\n\nAs they were collected."},
    {"tensors", locals_tensors, METH_NOARGS, "tensors() -> list[Tensor]\n\nThe local ones."},
    {"numbers", locals_numbers, METH_NOARGS,
     "numbers() -> tuple[int, ...]\n\nEach tensor's layout; -1: a plain one."},
    {"parts", locals_parts, METH_NOARGS,
     "parts() -> list[Locals]\n\nOne for each mesh, and one for plain tensors."},
    {"norms", locals_norms, METH_NOARGS,
     "norms() -> Tensor\n\nThe 2-norm of each local tensor, which are flat; float32, [n]."},
    {"multiply", locals_multiply, METH_O,
     "multiply(factor)\n\nMultiplies the local tensors, which are flat, in place."},
    {"count_versions", locals_count_versions, METH_NOARGS,
     "count_versions()\n\nDTensors whose local tensors were changed count that."},
    {nullptr, nullptr, 0, nullptr}};

PyObject *locals_layouts(PyObject *self, void *)
{
    return tuple_of(owned<Locals>(self).layouts);
}

PyObject *locals_n_meshes(PyObject *self, void *)
{
    return PyLong_FromLong(owned<Locals>(self).n_meshes);
}

PyObject *locals_is_uniform(PyObject *self, void *)
{
    return PyBool_FromLong(owned<Locals>(self).is_uniform);
}

PyObject *locals_is_flat(PyObject *self, void *)
{
    return PyBool_FromLong(owned<Locals>(self).is_flat);
}

PyGetSetDef locals_facts[] = {
    {"layouts", locals_layouts, nullptr, "numbers of the layouts, each once, as they came",
     nullptr},
    {"n_meshes", locals_n_meshes, nullptr, "plain tensors count as one", nullptr},
    {"is_uniform", locals_is_uniform, nullptr, "of one device and dtype", nullptr},
    {"is_flat", locals_is_flat, nullptr, "contiguous float32 on the CPU", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot locals_slots[] = {
    {Py_tp_doc, const_cast<char *>("The local tensors of a list of tensors.")},
    {Py_tp_dealloc, reinterpret_cast<void *>(free_owner<Locals>)},
    {Py_tp_methods, locals_methods},
    {Py_tp_getset, locals_facts},
    {0, nullptr}};

PyType_Spec locals_spec = {"fsdp_c._C.Locals", sizeof(Owning<Locals>), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, locals_slots};

PyType_Slot layouts_slots[] = {
    {Py_tp_doc, const_cast<char *>("Layouts()\n--\n\nMeshes and placements of DTensors, numbered "
                                   "as they come; collects local tensors.")},
    {Py_tp_new, reinterpret_cast<void *>(layouts_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(free_owner<Known>)},
    {Py_tp_methods, layouts_methods},
    {0, nullptr}};

PyType_Spec layouts_spec = {"fsdp_c._C.Layouts", sizeof(Owning<Known>), 0, Py_TPFLAGS_DEFAULT,
                            layouts_slots};

} // namespace

} // namespace fc

int fc_register_locals(PyObject *module)
{
    using namespace fc;
    PyTypeObject *layouts_type;
    return add_type(module, "Locals", &locals_spec, &locals_type) < 0
               ? -1
               : add_type(module, "Layouts", &layouts_spec, &layouts_type);
}
