// The parameters of an optimizer's group: steps over their local tensors, or these as lists.
//
// A step first looks at everything. Unless all of it is plain float32 memory laid out alike, it
// touches nothing, and torch's own code runs.
#include "bind/module.h"
#include "bind/python/objects.h"
#include "bind/tensor/layout.h"
#include "optim/optim.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace fc {

// The type `_C.Params`.
class OptimizerParams {
public:
    explicit OptimizerParams(Fields &given); // params, sharded: the ids of those to step
    bool is_for(PyObject *params) const;
    bool step_adam(Fields &given);
    bool step_sgd(Fields &given);
    std::vector<Ref> locals(PyObject *rows);
    Ref collect(Fields &given);
    int traverse(visitproc visit, void *arg) const;

private:
    struct Member {
        Ref param;
        bool is_ours; // to step
        int layout;
    };
    using Objects = std::span<PyObject *const>;

    template <typename Take>
    bool each_with_gradient(PyObject *state, const std::vector<Ref> &keys, Take take);
    bool step(PyObject *state, const fc_optim_rule &rule);
    bool add(const Member &row, Objects values, const fc_optim_rule &rule);
    bool add_count(PyObject *step, const fc_adam_options &options);
    bool add_written(PyObject *object, int layout, at::IntArrayRef sizes, float *&memory);
    void forget();
    Ref row_locals(const Member &row, Objects values);

    std::vector<Member> rows_;
    DTensorLayouts layouts_;
    bool is_running_ = false;
    // Of the running step; empty between steps, so that nobody's tensors are kept.
    std::vector<fc_optim_param> stepped_;
    std::vector<at::Tensor> steps_, grads_, written_; // written: their versions count
    double last_step_ = 0;                            // that `numbers_` belong to
    fc_adam numbers_{};
};

namespace {

void roots_by_torch(float *x, size_t numel)
{
    at::Tensor roots = at::from_blob(x, {static_cast<int64_t>(numel)}, at::kFloat);
    at::sqrt_out(roots, roots);
}

// How torch's operator takes square roots on this CPU; FC_ROOT_COUNT: in another way. Asked once in
// a process, as it depends on nothing else.
fc_root torchs_root()
{
    static const fc_kern_table *asked = nullptr;
    static fc_root found;
    if (asked != fc_kern()) {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        found = fc_optim_root_of(roots_by_torch);
        asked = fc_kern();
    }
    return found;
}

PyObject *item(PyObject *dict, PyObject *key) // null: it has none
{
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr && PyErr_Occurred() != nullptr) {
        throw_python();
    }
    return found;
}

// Of what a step needs beside parameter and gradient; of Adam the count of steps is the last.
std::vector<Ref> keys_of(const fc_optim_rule &rule)
{
    std::vector<Ref> keys;
    for (size_t i = 0; i < rule.n_state; i++) {
        keys.push_back(to_python(fc_optim_key(&rule, i)));
    }
    if (rule.is_adam) {
        keys.push_back(to_python("step"));
    }
    return keys;
}

} // namespace

OptimizerParams::OptimizerParams(Fields &given)
{
    const Ref params = given.list("params"), sharded = given.object("sharded");
    given.end();
    for (PyObject *object : items_of(params.get())) {
        const int is_ours =
            PySet_Contains(sharded.get(), checked(PyLong_FromVoidPtr(object)).get());
        check(is_ours);
        rows_.push_back({Ref::borrow(object), is_ours == 1, layouts_.number_for(object)});
    }
}

bool OptimizerParams::is_for(PyObject *params) const
{
    if (!PyList_Check(params)) {
        return false;
    }
    const auto given = items_of(params);
    return std::equal(
        given.begin(), given.end(), rows_.begin(), rows_.end(),
        [](PyObject *object, const Member &row) { return object == row.param.get(); });
}

int OptimizerParams::traverse(visitproc visit, void *arg) const
{
    for (const Member &row : rows_) {
        Py_VISIT(row.param.get());
    }
    return 0;
}

// Calls `take` with each parameter that has a gradient, and with it, its gradient and what the
// state has under `keys`. False: one lacks something, or is not taken.
template <typename Take>
bool OptimizerParams::each_with_gradient(PyObject *state, const std::vector<Ref> &keys, Take take)
{
    std::vector<PyObject *> values(keys.size() + 2); // borrowed
    for (const Member &row : rows_) {
        const at::Tensor &tensor = THPVariable_Unpack(row.param.get());
        if (!tensor.grad().defined()) {
            continue;
        }
        const Ref grad = checked(THPVariable_Wrap(tensor.grad()));
        values[0] = row.param.get();
        values[1] = grad.get();
        PyObject *own = row.is_ours && PyDict_Check(state) ? item(state, row.param.get()) : nullptr;
        bool is_whole = row.is_ours && (keys.empty() || (own != nullptr && PyDict_CheckExact(own)));
        for (size_t k = 0; is_whole && k < keys.size(); k++) {
            values[k + 2] = item(own, keys[k].get());
            is_whole = values[k + 2] != nullptr;
        }
        if (!is_whole || !take(row, values)) {
            return false;
        }
    }
    return true;
}

// ---- steps ----

// Its version will count. False: it is no memory of these sizes.
bool OptimizerParams::add_written(PyObject *object, int layout, at::IntArrayRef sizes,
                                  float *&memory)
{
    at::Tensor local = layouts_.floats_of(object, layout);
    if (!local.defined() || local.sizes() != sizes) {
        return false;
    }
    memory = static_cast<float *>(local.data_ptr());
    written_.push_back(THPVariable_Unpack(object));
    written_.push_back(std::move(local));
    return true;
}

// Adam's numbers for a parameter that was stepped so often. False: it is no count.
bool OptimizerParams::add_count(PyObject *object, const fc_adam_options &options)
{
    const bool is_memory = is_ordinary(object) && THPVariable_Unpack(object).is_cpu();
    if (!is_memory || THPVariable_Unpack(object).dim() != 0 ||
        THPVariable_Unpack(object).scalar_type() != at::kFloat) {
        return false;
    }
    steps_.push_back(THPVariable_Unpack(object));
    const double count = static_cast<double>(*steps_.back().const_data_ptr<float>()) + 1;
    if (count != last_step_) {
        fc_adam_set(&numbers_, &options, count);
        last_step_ = count;
    }
    return true;
}

bool OptimizerParams::add(const Member &row, Objects values, const fc_optim_rule &rule)
{
    at::Tensor grad = layouts_.floats_of(values[1], row.layout);
    if (!grad.defined()) {
        return false;
    }
    fc_optim_param added{};
    added.grad = grad.const_data_ptr<float>();
    added.numel = static_cast<size_t>(grad.numel());
    bool is_whole = add_written(values[0], row.layout, grad.sizes(), added.param);
    for (size_t i = 0; is_whole && i < rule.n_state; i++) {
        is_whole = add_written(values[i + 2], row.layout, grad.sizes(), added.state[i]);
    }
    if (!is_whole || (rule.is_adam && !add_count(values.back(), rule.adam))) {
        return false;
    }
    added.adam = numbers_;
    grads_.push_back(std::move(grad));
    stepped_.push_back(added);
    return true;
}

bool OptimizerParams::step(PyObject *state, const fc_optim_rule &rule)
{
    if (is_running_) { // in another thread
        return false;
    }
    is_running_ = true;
    last_step_ = 0;
    const std::shared_ptr<void> at_exit(nullptr, [this](void *) { forget(); });
    if (!each_with_gradient(state, keys_of(rule), [&](const Member &row, Objects values) {
            return add(row, values, rule);
        })) {
        return false;
    }
    const size_t n_blocks = fc_optim_cut(stepped_.data(), stepped_.size());
    for (const at::Tensor &step : steps_) {
        *static_cast<float *>(step.data_ptr()) += 1;
        bump_version(step);
    }
    for (const at::Tensor &tensor : written_) {
        bump_version(tensor);
    }
    NoGil no_gil;
    at::parallel_for(0, static_cast<int64_t>(n_blocks), 1, [&](int64_t begin, int64_t end) {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        for (int64_t i = begin; i < end; i++) {
            fc_optim_step(stepped_.data(), stepped_.size(), static_cast<size_t>(i), &rule);
        }
    });
    return true;
}

void OptimizerParams::forget()
{
    stepped_.clear();
    steps_.clear();
    grads_.clear();
    written_.clear();
    is_running_ = false;
}

bool OptimizerParams::step_adam(Fields &given)
{
    const Ref state = given.object("state");
    fc_optim_rule rule = {};
    rule.is_adam = true;
    rule.n_state = given.flag("amsgrad") ? 3 : 2;
    rule.adam = {given.real("lr"),           given.real("beta1"),
                 given.real("beta2"),        given.real("eps"),
                 given.real("weight_decay"), given.flag("decoupled_weight_decay"),
                 given.flag("maximize")};
    rule.fused_lanes = given.size("fused_lanes");
    given.end();
    rule.root = rule.fused_lanes == 0 ? torchs_root() : FC_ROOT_NEAREST;
    rule.roots = roots_by_torch;
    return step(state.get(), rule);
}

bool OptimizerParams::step_sgd(Fields &given)
{
    const Ref state = given.object("state");
    fc_optim_rule rule = {};
    rule.sgd = {static_cast<float>(given.real("weight_decay")),
                static_cast<float>(given.real("momentum")),
                static_cast<float>(1 - given.real("dampening")),
                static_cast<float>(-given.real("lr")),
                given.flag("nesterov"),
                given.flag("maximize")};
    rule.n_state = rule.sgd.momentum != 0 ? 1 : 0;
    rule.fused_lanes = given.size("fused_lanes");
    given.end();
    return step(state.get(), rule);
}

// ---- lists ----

// A tuple of those of a row's parameter, gradient and state; null: one has none.
Ref OptimizerParams::row_locals(const Member &row, Objects values)
{
    std::vector<Ref> locals;
    if (!row.is_ours || row.layout == no_layout) {
        return Ref();
    }
    for (PyObject *value : values) {
        if (locals.size() < 2 || is_dtensor(value)) {
            locals.push_back(layouts_.local_of(value, row.layout));
        } else if (value == Py_None ||
                   (THPVariable_Check(value) && THPVariable_Unpack(value).dim() == 0)) {
            locals.push_back(Ref::borrow(value));
            continue;
        } else {
            return Ref();
        }
        if (!locals.back()) {
            return Ref();
        }
        const at::Tensor &first = THPVariable_Unpack(locals.front().get());
        const at::Tensor &local = THPVariable_Unpack(locals.back().get());
        if (local.sizes() != first.sizes() || local.device() != first.device()) {
            return Ref();
        }
    }
    const bool is_of_one_type = THPVariable_Unpack(locals[0].get()).scalar_type() ==
                                THPVariable_Unpack(locals[1].get()).scalar_type();
    return is_of_one_type ? checked(PyList_AsTuple(to_python(locals).get())) : Ref();
}

// Of rows, the parameters first: for each a tuple, or None unless it has local tensors throughout.
std::vector<Ref> OptimizerParams::locals(PyObject *rows)
{
    const Ref all = checked(PySequence_List(rows));
    std::vector<Ref> found;
    auto member = rows_.begin();
    for (PyObject *row : items_of(all.get())) {
        if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) < 2) {
            raise_error(PyExc_TypeError, "expected parameters and gradients");
        }
        while (member != rows_.end() && member->param.get() != PyTuple_GET_ITEM(row, 0)) {
            member++; // it has no gradient
        }
        Ref locals = member != rows_.end() ? row_locals(*member, items_of(row)) : Ref();
        found.push_back(locals ? std::move(locals) : Ref::borrow(Py_None));
    }
    return found;
}

// Of parameters, gradients and what `state` has under each of `keys`, for every parameter that has
// a gradient; versions count. None: one of these parameters has no local tensors throughout.
Ref OptimizerParams::collect(Fields &given)
{
    const Ref state = given.object("state"), names = given.list("keys");
    given.end();
    std::vector<Ref> keys, rows;
    for (PyObject *key : items_of(names.get())) {
        keys.push_back(Ref::borrow(key));
    }
    std::vector<at::Tensor> written;
    const auto take = [&](const Member &row, Objects values) {
        rows.push_back(row_locals(row, values));
        if (!rows.back() ||
            THPVariable_Unpack(PyTuple_GET_ITEM(rows.back().get(), 0)).is_complex()) {
            return false;
        }
        for (size_t c = 0; c < values.size(); c++) {
            if (c != 1 && is_dtensor(values[c])) {
                written.push_back(THPVariable_Unpack(values[c]));
            }
        }
        return true;
    };
    if (!each_with_gradient(state.get(), keys, take)) {
        return Ref::borrow(Py_None);
    }
    for (const at::Tensor &dtensor : written) {
        bump_version(dtensor);
    }
    return to_python(rows);
}

static PyMethodDef params_methods[] = {method<&OptimizerParams::is_for>("is_for"),
                                       method<&OptimizerParams::locals>("locals"),
                                       method<&OptimizerParams::collect>("collect"),
                                       method<&OptimizerParams::step_adam>("step_adam"),
                                       method<&OptimizerParams::step_sgd>("step_sgd"),
                                       {}};

int register_optim(PyObject *module)
{
    return add_type<OptimizerParams>(module,
                                     {.name = "fsdp_c._C.Params", .methods = params_methods});
}

} // namespace fc
