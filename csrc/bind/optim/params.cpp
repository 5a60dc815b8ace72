// The parameters of an optimizer's group: steps over their local tensors, or these as lists.
//
// A step first looks at everything. Unless all of it is plain float32 memory laid out alike, it
// touches nothing, and torch's own code runs.
#include "bind/optim/params.h"

#include "bind/python/calls.h"
#include "bind/python/objects.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>

namespace fc {

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

void append_row(const std::vector<Ref> &columns, const std::vector<Ref> &values)
{
    for (size_t c = 0; c < columns.size(); c++) {
        check(PyList_Append(columns[c].get(), values[c].get()));
    }
}

} // namespace

OptimizerParams::OptimizerParams(PyObject *args, PyObject *named)
{
    PyObject *params, *sharded;
    parse(args, named, "O!O!:Params", {"params", "sharded"}, &PyList_Type, &params, &PySet_Type,
          &sharded);
    rows_.reserve(static_cast<size_t>(PyList_GET_SIZE(params)));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); i++) {
        const Ref param = Ref::borrow(PyList_GET_ITEM(params, i));
        const Ref id = checked(PyLong_FromVoidPtr(param.get()));
        const int is_ours = PySet_Contains(sharded, id.get());
        check(is_ours);
        rows_.push_back({param, is_ours == 1, layouts_.number_for(param.get())});
    }
}

bool OptimizerParams::is_for(PyObject *params) const
{
    if (PyList_GET_SIZE(params) != static_cast<Py_ssize_t>(rows_.size())) {
        return false;
    }
    for (size_t i = 0; i < rows_.size(); i++) {
        if (PyList_GET_ITEM(params, static_cast<Py_ssize_t>(i)) != rows_[i].param.get()) {
            return false;
        }
    }
    return true;
}

int OptimizerParams::traverse(visitproc visit, void *arg) const
{
    for (const Member &row : rows_) {
        Py_VISIT(row.param.get());
    }
    return 0;
}

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

bool OptimizerParams::add(const Member &row, const StateObjects &state)
{
    PyObject *param = row.param.get();
    Ref grad_object = Ref::take(THPVariable_Wrap(THPVariable_Unpack(param).grad()));
    at::Tensor grad = layouts_.floats_of(grad_object.get(), row.layout);
    if (!grad.defined()) {
        return false;
    }
    fc_optim_param added{};
    added.grad = grad.const_data_ptr<float>();
    added.numel = static_cast<size_t>(grad.numel());
    const std::array<PyObject *, 4> objects = {param, state[0], state[1], state[2]};
    const std::array<float **, 4> places = {&added.param, &added.state[0], &added.state[1],
                                            &added.state[2]};
    for (size_t i = 0; i < objects.size(); i++) {
        if (objects[i] != nullptr &&
            !add_written(objects[i], row.layout, grad.sizes(), *places[i])) {
            return false;
        }
    }
    grads_.push_back(std::move(grad));
    stepped_.push_back(added);
    return true;
}

bool OptimizerParams::collect_adam(const Member &row, PyObject *own, const fc_adam_options &options,
                                   bool is_amsgrad)
{
    PyObject *step = own == nullptr ? nullptr : item(own, name_of(Attribute::step));
    PyObject *exp_avg = own == nullptr ? nullptr : item(own, name_of(Attribute::exp_avg));
    PyObject *exp_avg_sq = own == nullptr ? nullptr : item(own, name_of(Attribute::exp_avg_sq));
    PyObject *largest =
        own == nullptr || !is_amsgrad ? nullptr : item(own, name_of(Attribute::max_exp_avg_sq));
    if (step == nullptr || exp_avg == nullptr || exp_avg_sq == nullptr ||
        (is_amsgrad && largest == nullptr) || !is_plain(step) ||
        THPVariable_Unpack(step).dim() != 0 ||
        THPVariable_Unpack(step).scalar_type() != at::kFloat ||
        !add(row, {exp_avg, exp_avg_sq, largest})) {
        return false;
    }
    const double count = static_cast<double>(*THPVariable_Unpack(step).const_data_ptr<float>()) + 1;
    if (count != last_step_) {
        fc_adam_set(&numbers_, &options, count);
        last_step_ = count;
    }
    stepped_.back().adam = numbers_;
    steps_.push_back(THPVariable_Unpack(step));
    return true;
}

bool OptimizerParams::collect_sgd(const Member &row, PyObject *own)
{
    PyObject *buffer = own == nullptr ? nullptr : item(own, name_of(Attribute::momentum_buffer));
    return buffer != nullptr && add(row, {buffer});
}

// `collect_row` adds a parameter of which it gets the state, a dict or null. `run` steps a block.
template <typename Collect, typename Run>
bool OptimizerParams::step(PyObject *state, Collect collect_row, Run run)
{
    if (is_running_) { // in another thread
        return false;
    }
    is_running_ = true;
    const std::shared_ptr<void> at_exit(nullptr, [this](void *) { forget(); });
    for (const Member &row : rows_) {
        if (!THPVariable_Unpack(row.param.get()).grad().defined()) {
            continue;
        }
        PyObject *own = row.is_ours ? item(state, row.param.get()) : nullptr;
        if (!row.is_ours || (own != nullptr && !PyDict_CheckExact(own)) || !collect_row(row, own)) {
            return false;
        }
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
            run(static_cast<size_t>(i));
        }
    });
    return true;
}

bool OptimizerParams::step_adam(PyObject *state, const fc_adam_options &options, bool is_amsgrad,
                                size_t fused_lanes)
{
    last_step_ = 0;
    const fc_root root = fused_lanes == 0 ? torchs_root() : FC_ROOT_NEAREST;
    return step(
        state,
        [&](const Member &row, PyObject *own) {
            return collect_adam(row, own, options, is_amsgrad);
        },
        [&](size_t block) {
            root == FC_ROOT_COUNT
                ? fc_optim_adam_by(stepped_.data(), stepped_.size(), block, roots_by_torch)
                : fc_optim_adam(stepped_.data(), stepped_.size(), block, root, fused_lanes);
        });
}

bool OptimizerParams::step_sgd(PyObject *state, const fc_sgd &sgd, bool has_momentum,
                               size_t fused_lanes)
{
    return step(
        state,
        [&](const Member &row, PyObject *own) {
            return has_momentum ? collect_sgd(row, own) : add(row, {});
        },
        [&](size_t block) {
            fc_optim_sgd(stepped_.data(), stepped_.size(), block, &sgd, fused_lanes);
        });
}

void OptimizerParams::forget()
{
    stepped_.clear();
    steps_.clear();
    grads_.clear();
    written_.clear();
    is_running_ = false;
}

// Fills `locals` with those of a row's parameter, gradient and state.
bool OptimizerParams::row_locals(const Member &member, const std::vector<PyObject *> &values,
                                 std::vector<Ref> &locals)
{
    locals.clear();
    if (!member.is_ours || member.layout == no_layout) {
        return false;
    }
    for (PyObject *value : values) {
        if (locals.size() < 2 || is_dtensor(value)) {
            locals.push_back(layouts_.local_of(value, member.layout));
        } else if (value == Py_None ||
                   (THPVariable_Check(value) && THPVariable_Unpack(value).dim() == 0)) {
            locals.push_back(Ref::borrow(value));
            continue;
        } else {
            return false;
        }
        if (!locals.back()) {
            return false;
        }
        const at::Tensor &first = THPVariable_Unpack(locals.front().get());
        const at::Tensor &local = THPVariable_Unpack(locals.back().get());
        if (local.sizes() != first.sizes() || local.device() != first.device()) {
            return false;
        }
    }
    return THPVariable_Unpack(locals[0].get()).scalar_type() ==
           THPVariable_Unpack(locals[1].get()).scalar_type();
}

void OptimizerParams::locals(const std::vector<PyObject *> &columns, PyObject *rows,
                             const std::vector<Ref> &locals)
{
    std::vector<PyObject *> values(columns.size());
    std::vector<Ref> found;
    auto member = rows_.begin();
    for (Py_ssize_t row = 0; row < PyList_GET_SIZE(columns[0]); row++) {
        PyObject *param = PyList_GET_ITEM(columns[0], row);
        while (member != rows_.end() && member->param.get() != param) {
            member++; // it has no gradient
        }
        if (member == rows_.end()) {
            return;
        }
        for (size_t c = 0; c < columns.size(); c++) {
            values[c] = PyList_GET_ITEM(columns[c], row);
        }
        if (!row_locals(*member, values, found)) {
            continue;
        }
        check(PyList_Append(rows, checked(PyLong_FromSsize_t(row)).get()));
        append_row(locals, found);
    }
}

bool OptimizerParams::collect(PyObject *state, const std::vector<PyObject *> &keys,
                              const std::vector<Ref> &locals)
{
    std::vector<PyObject *> values(keys.size() + 2);
    std::vector<Ref> found;
    std::vector<at::Tensor> written;
    for (const Member &row : rows_) {
        Ref grad = Ref::take(THPVariable_Wrap(THPVariable_Unpack(row.param.get()).grad()));
        if (grad.get() == Py_None) {
            continue;
        }
        PyObject *own = keys.empty() ? nullptr : item(state, row.param.get());
        if (!keys.empty() && (own == nullptr || !PyDict_CheckExact(own))) {
            return false;
        }
        values[0] = row.param.get();
        values[1] = grad.get();
        for (size_t k = 0; k < keys.size(); k++) {
            values[k + 2] = item(own, keys[k]);
            if (values[k + 2] == nullptr) {
                return false;
            }
        }
        if (!row_locals(row, values, found) || THPVariable_Unpack(found[0].get()).is_complex()) {
            return false;
        }
        append_row(locals, found);
        for (size_t c = 0; c < values.size(); c++) {
            if (c != 1 && is_dtensor(values[c])) {
                written.push_back(THPVariable_Unpack(values[c]));
            }
        }
    }
    for (const at::Tensor &dtensor : written) {
        bump_version(dtensor);
    }
    return true;
}

} // namespace fc
