// _C.Params: the parameters of an optimizer's group, and steps over their local tensors.
//
// A step first looks at everything. Unless all of it is plain float32 memory laid out alike, it
// touches nothing, and torch's own code runs.
#include "bind/optim/optim.h"

#include "bind/python/python.h"
#include "bind/tensor/layout.h"
#include "kernels/kernels.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <vector>

namespace fc {

namespace {

// Interned.
PyObject *step_name, *exp_avg_name, *exp_avg_sq_name, *max_exp_avg_sq_name, *momentum_buffer_name;

// Elements that a thread takes at a time. Where torch's operator takes the square roots of that
// many at once, they stay in the second-level cache.
constexpr size_t block_numel = size_t{1} << 14;

// What an optimizer keeps of a parameter: Adam exp_avg, exp_avg_sq and, as AMSGrad, the largest of
// those; SGD momentum_buffer or nothing. Null: it has none.
using StateObjects = std::array<PyObject *, 3>;

// A parameter to step.
struct Job {
    at::Tensor param, grad;
    std::array<at::Tensor, 3> state;
    fc_adam numbers;
};

float *data_of(const at::Tensor &tensor, size_t start)
{
    return tensor.defined() ? static_cast<float *>(tensor.data_ptr()) + start : nullptr;
}

float from_bits(uint32_t bits)
{
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

// Whether `root` gives the bits of torch's operator: for some numbers of every size, then for all
// between 1 and 4. A root of 4 x is twice that of x where a library looks at no more than x's size.
bool is_torchs(fc_root root)
{
    struct Range {
        uint32_t first, stride, n_blocks;
    };
    at::Tensor found = at::empty({static_cast<int64_t>(block_numel)}, at::kFloat);
    auto *values = static_cast<float *>(found.data_ptr());
    for (const Range &range : {Range{0, 32771, 8}, Range{0x3f800000, 1, 1024}}) {
        uint32_t bits = range.first;
        for (uint32_t block = 0; block < range.n_blocks; block++) {
            for (size_t i = 0; i < block_numel; i++, bits += range.stride) {
                values[i] = from_bits(bits);
            }
            at::Tensor wanted = at::sqrt(found);
            if (!fc_kern()->roots(root, values, block_numel) ||
                std::memcmp(values, wanted.const_data_ptr(), block_numel * sizeof(float)) != 0) {
                return false;
            }
        }
    }
    return true;
}

// How torch's operator takes square roots on this CPU; FC_ROOT_COUNT: in another way.
fc_root torchs_root()
{
    static const fc_kern_table *asked = nullptr;
    static fc_root found;
    if (asked != fc_kern()) {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        found = FC_ROOT_NEAREST;
        while (found != FC_ROOT_COUNT && !is_torchs(found)) {
            found = static_cast<fc_root>(found + 1);
        }
        asked = fc_kern();
    }
    return found;
}

struct Segment {
    const Job *job;
    size_t start, numel;
};

// How many of its elements torch's fused kernel takes after its last whole vector.
size_t tail_of(const Segment &segment, size_t fused_lanes)
{
    const auto numel = static_cast<size_t>(segment.job->param.numel());
    const size_t tail = fused_lanes == 0 ? numel : numel - numel % fused_lanes;
    const size_t end = segment.start + segment.numel;
    return end > tail ? end - std::max(segment.start, tail) : 0;
}

struct Block {
    size_t first, count; // segments
};

struct Member {
    Ref param;
    bool is_ours;   // to step
    Layout *layout; // null: a plain tensor
};

class GroupPlan {
public:
    GroupPlan(PyObject *params, PyObject *sharded);
    bool is_for(PyObject *params) const;
    // Steps every parameter that has a gradient, or none: then false. `fused_lanes`: 0, or how many
    // floats torch's fused kernel takes at a time, for its way of rounding.
    bool step_adam(PyObject *state, const fc_adam_options &options, bool is_amsgrad,
                   size_t fused_lanes);
    bool step_sgd(PyObject *state, const fc_sgd &sgd, bool has_momentum, size_t fused_lanes);
    // Fills `rows` with the rows of `columns` (lists of one length, the parameters first) that have
    // local tensors throughout, and `locals` with these, column by column.
    void locals(const std::vector<PyObject *> &columns, PyObject *rows,
                const std::vector<Ref> &locals) const;
    // Fills `locals` with parameters, gradients and what `state` has under each of `keys`, for
    // every parameter that has a gradient, and counts versions; false: one of these parameters has
    // no local tensors throughout.
    bool collect(PyObject *state, const std::vector<PyObject *> &keys,
                 const std::vector<Ref> &locals) const;
    int traverse(visitproc visit, void *arg);

private:
    Layout *layout_of(PyObject *param);
    template <typename Collect, typename Run>
    bool step(PyObject *state, Collect collect_row, Run run);
    bool collect_adam(const Member &row, PyObject *own, const fc_adam_options &options,
                      bool is_amsgrad);
    bool collect_sgd(const Member &row, PyObject *own);
    bool add(const Member &row, const StateObjects &state);
    void cut();
    void forget();
    void run_adam(const Block &block, fc_root root, size_t fused_lanes);
    void run_adam_by_torchs_root(const Block &block);
    void run_sgd(const Block &block, const fc_sgd &sgd, size_t fused_lanes);

    std::vector<Member> rows_;
    std::vector<std::unique_ptr<Layout>> layouts_;
    bool is_running_ = false;
    // Of the running step; empty between steps, so that nobody's tensors are kept.
    std::vector<Job> jobs_;
    std::vector<at::Tensor> steps_, written_; // counters; DTensors whose version counts
    double last_step_ = 0;                    // that `numbers_` belong to
    fc_adam numbers_{};
    std::vector<Segment> segments_;
    std::vector<Block> blocks_;
    std::vector<at::Tensor> scratch_; // one per thread
};

GroupPlan::GroupPlan(PyObject *params, PyObject *sharded)
{
    const Py_ssize_t n = PyList_GET_SIZE(params);
    rows_.reserve(static_cast<size_t>(n));
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *param = PyList_GET_ITEM(params, i);
        Ref id = checked(PyLong_FromVoidPtr(param));
        const int is_ours = PySet_Contains(sharded, id.get());
        check(is_ours);
        rows_.push_back({Ref::borrow(param), is_ours == 1, layout_of(param)});
    }
}

Layout *GroupPlan::layout_of(PyObject *param)
{
    if (!is_dtensor(param)) {
        return nullptr;
    }
    Ref spec = spec_of(param);
    for (const auto &layout : layouts_) {
        if (layout->has(spec.get())) {
            return layout.get();
        }
    }
    layouts_.push_back(std::make_unique<Layout>(spec.get()));
    return layouts_.back().get();
}

bool GroupPlan::is_for(PyObject *params) const
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

int GroupPlan::traverse(visitproc visit, void *arg)
{
    for (const Member &row : rows_) {
        Py_VISIT(row.param.get());
    }
    return 0;
}

PyObject *item(PyObject *dict, PyObject *key)
{
    PyObject *found = PyDict_GetItemWithError(dict, key);
    if (found == nullptr && PyErr_Occurred() != nullptr) {
        throw_python();
    }
    return found;
}

bool GroupPlan::add(const Member &row, const StateObjects &state)
{
    const at::Tensor &param = THPVariable_Unpack(row.param.get());
    Ref grad = Ref::take(THPVariable_Wrap(param.grad()));
    Job job{floats_of(row.param.get(), row.layout), floats_of(grad.get(), row.layout), {}, {}};
    if (!job.param.defined() || !job.grad.defined() || job.grad.sizes() != job.param.sizes()) {
        return false;
    }
    written_.push_back(param);
    for (size_t i = 0; i < state.size(); i++) {
        if (state[i] == nullptr) {
            continue;
        }
        job.state[i] = floats_of(state[i], row.layout);
        if (!job.state[i].defined() || job.state[i].sizes() != job.param.sizes()) {
            return false;
        }
        written_.push_back(THPVariable_Unpack(state[i]));
    }
    jobs_.push_back(std::move(job));
    return true;
}

bool GroupPlan::collect_adam(const Member &row, PyObject *own, const fc_adam_options &options,
                             bool is_amsgrad)
{
    PyObject *step = own == nullptr ? nullptr : item(own, step_name);
    PyObject *exp_avg = own == nullptr ? nullptr : item(own, exp_avg_name);
    PyObject *exp_avg_sq = own == nullptr ? nullptr : item(own, exp_avg_sq_name);
    PyObject *largest = own == nullptr || !is_amsgrad ? nullptr : item(own, max_exp_avg_sq_name);
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
    jobs_.back().numbers = numbers_;
    steps_.push_back(THPVariable_Unpack(step));
    return true;
}

bool GroupPlan::collect_sgd(const Member &row, PyObject *own)
{
    PyObject *buffer = own == nullptr ? nullptr : item(own, momentum_buffer_name);
    return buffer != nullptr && add(row, {buffer});
}

// Lays the jobs out in blocks; small ones share a block.
void GroupPlan::cut()
{
    size_t room = 0;
    for (const Job &job : jobs_) {
        const size_t numel = static_cast<size_t>(job.param.numel());
        for (size_t start = 0; start < numel;) {
            if (room == 0) {
                blocks_.push_back({segments_.size(), 0});
                room = block_numel;
            }
            const size_t n = std::min(room, numel - start);
            segments_.push_back({&job, start, n});
            blocks_.back().count++;
            start += n;
            room -= n;
        }
    }
}

void GroupPlan::run_adam_by_torchs_root(const Block &block)
{
    auto *scratch =
        static_cast<float *>(scratch_[static_cast<size_t>(at::get_thread_num())].data_ptr());
    const fc_kern_table *kern = fc_kern();
    size_t filled = 0;
    for (size_t i = block.first; i < block.first + block.count; i++) {
        const Segment &s = segments_[i];
        kern->adam_moments(&s.job->numbers, s.job->param.const_data_ptr<float>() + s.start,
                           s.job->grad.const_data_ptr<float>() + s.start,
                           data_of(s.job->state[0], s.start), data_of(s.job->state[1], s.start),
                           data_of(s.job->state[2], s.start), scratch + filled, s.numel);
        filled += s.numel;
    }
    at::Tensor roots = at::from_blob(scratch, {static_cast<int64_t>(filled)}, at::kFloat);
    at::sqrt_out(roots, roots);
    filled = 0;
    for (size_t i = block.first; i < block.first + block.count; i++) {
        const Segment &s = segments_[i];
        kern->adam_update(&s.job->numbers, static_cast<float *>(s.job->param.data_ptr()) + s.start,
                          data_of(s.job->state[0], s.start), scratch + filled, s.numel);
        filled += s.numel;
    }
}

void GroupPlan::run_adam(const Block &block, fc_root root, size_t fused_lanes)
{
    const fc_kern_table *kern = fc_kern();
    for (size_t i = block.first; i < block.first + block.count; i++) {
        const Segment &s = segments_[i];
        kern->adam(&s.job->numbers, root, data_of(s.job->param, s.start),
                   data_of(s.job->grad, s.start), data_of(s.job->state[0], s.start),
                   data_of(s.job->state[1], s.start), data_of(s.job->state[2], s.start), s.numel,
                   tail_of(s, fused_lanes));
    }
}

void GroupPlan::run_sgd(const Block &block, const fc_sgd &sgd, size_t fused_lanes)
{
    for (size_t i = block.first; i < block.first + block.count; i++) {
        const Segment &s = segments_[i];
        fc_kern()->sgd(&sgd, data_of(s.job->param, s.start), data_of(s.job->grad, s.start),
                       data_of(s.job->state[0], s.start), s.numel, tail_of(s, fused_lanes));
    }
}

// `collect_row` adds a job for a parameter of which it gets the state, a dict or null. `run` steps
// a block.
template <typename Collect, typename Run>
bool GroupPlan::step(PyObject *state, Collect collect_row, Run run)
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
    cut();
    for (const at::Tensor &step : steps_) {
        *static_cast<float *>(step.data_ptr()) += 1;
        bump_version(step);
    }
    for (const at::Tensor &dtensor : written_) {
        bump_version(dtensor);
    }
    for (const Job &job : jobs_) {
        bump_version(job.param);
        for (const at::Tensor &written : job.state) {
            if (written.defined()) {
                bump_version(written);
            }
        }
    }
    NoGil no_gil;
    const auto n_threads = static_cast<size_t>(at::get_num_threads());
    while (scratch_.size() < n_threads) {
        scratch_.push_back(at::empty({static_cast<int64_t>(block_numel)}, at::kFloat));
    }
    at::parallel_for(0, static_cast<int64_t>(blocks_.size()), 1, [&](int64_t begin, int64_t end) {
        at::AutoDispatchBelowADInplaceOrView no_autograd;
        for (int64_t i = begin; i < end; i++) {
            run(blocks_[static_cast<size_t>(i)]);
        }
    });
    return true;
}

bool GroupPlan::step_adam(PyObject *state, const fc_adam_options &options, bool is_amsgrad,
                          size_t fused_lanes)
{
    last_step_ = 0;
    const fc_root root = fused_lanes == 0 ? torchs_root() : FC_ROOT_NEAREST;
    return step(
        state,
        [&](const Member &row, PyObject *own) {
            return collect_adam(row, own, options, is_amsgrad);
        },
        [&](const Block &block) {
            root == FC_ROOT_COUNT ? run_adam_by_torchs_root(block)
                                  : run_adam(block, root, fused_lanes);
        });
}

bool GroupPlan::step_sgd(PyObject *state, const fc_sgd &sgd, bool has_momentum, size_t fused_lanes)
{
    return step(
        state,
        [&](const Member &row, PyObject *own) {
            return has_momentum ? collect_sgd(row, own) : add(row, {});
        },
        [&](const Block &block) { run_sgd(block, sgd, fused_lanes); });
}

void GroupPlan::forget()
{
    jobs_.clear();
    steps_.clear();
    written_.clear();
    segments_.clear();
    blocks_.clear();
    is_running_ = false;
}

// Fills `locals` with those of a row's parameter, gradient and state.
bool row_locals(const Member &member, const std::vector<PyObject *> &values,
                std::vector<Ref> &locals)
{
    locals.clear();
    if (!member.is_ours || member.layout == nullptr) {
        return false;
    }
    for (PyObject *value : values) {
        if (locals.size() < 2 || is_dtensor(value)) {
            locals.push_back(local_of(value, member.layout));
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

void append_row(const std::vector<Ref> &columns, const std::vector<Ref> &values)
{
    for (size_t c = 0; c < columns.size(); c++) {
        check(PyList_Append(columns[c].get(), values[c].get()));
    }
}

void GroupPlan::locals(const std::vector<PyObject *> &columns, PyObject *rows,
                       const std::vector<Ref> &locals) const
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

bool GroupPlan::collect(PyObject *state, const std::vector<PyObject *> &keys,
                        const std::vector<Ref> &locals) const
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

struct PlanObject {
    PyObject_HEAD
    GroupPlan *plan; // owned
};

GroupPlan *plan_of(PyObject *self)
{
    return reinterpret_cast<PlanObject *>(self)->plan;
}

PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *)
{
    PyObject *params, *sharded;
    if (!PyArg_ParseTuple(args, "O!O!:Params", &PyList_Type, &params, &PySet_Type, &sharded)) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        auto plan = std::make_unique<GroupPlan>(params, sharded);
        Ref self = checked(type->tp_alloc(type, 0));
        reinterpret_cast<PlanObject *>(self.get())->plan = plan.release();
        return self.release();
    });
}

int plan_clear(PyObject *self)
{
    GroupPlan *plan = std::exchange(reinterpret_cast<PlanObject *>(self)->plan, nullptr);
    delete plan;
    return 0;
}

void plan_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    plan_clear(self);
    type->tp_free(self);
    Py_DECREF(type);
}

int plan_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    return plan_of(self) == nullptr ? 0 : plan_of(self)->traverse(visit, arg);
}

PyObject *plan_is_for(PyObject *self, PyObject *params)
{
    return PyBool_FromLong(PyList_Check(params) && plan_of(self)->is_for(params));
}

Ref list_of(const std::vector<Ref> &items)
{
    Ref list = checked(PyList_New(0));
    for (const Ref &item : items) {
        check(PyList_Append(list.get(), item.get()));
    }
    return list;
}

PyObject *plan_locals(PyObject *self, PyObject *lists)
{
    return guarded([&]() -> PyObject * {
        Ref all = checked(PySequence_Fast(lists, "expected a list of lists"));
        std::vector<PyObject *> columns;
        std::vector<Ref> locals;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.get()); i++) {
            PyObject *column = PySequence_Fast_GET_ITEM(all.get(), i);
            if (!PyList_Check(column) ||
                (i > 0 && PyList_GET_SIZE(column) != PyList_GET_SIZE(columns[0]))) {
                PyErr_SetString(PyExc_TypeError, "expected lists of one length");
                throw_python();
            }
            columns.push_back(column);
            locals.push_back(checked(PyList_New(0)));
        }
        if (columns.size() < 2) {
            PyErr_SetString(PyExc_TypeError, "expected parameters and gradients");
            throw_python();
        }
        Ref rows = checked(PyList_New(0));
        plan_of(self)->locals(columns, rows.get(), locals);
        return checked(PyTuple_Pack(2, rows.get(), list_of(locals).get())).release();
    });
}

PyObject *plan_collect(PyObject *self, PyObject *args)
{
    PyObject *state, *keys;
    if (!PyArg_ParseTuple(args, "O!O!:collect", &PyDict_Type, &state, &PyTuple_Type, &keys)) {
        return nullptr;
    }
    return guarded([&]() -> PyObject * {
        std::vector<PyObject *> names(PySequence_Fast_ITEMS(keys),
                                      PySequence_Fast_ITEMS(keys) + PyTuple_GET_SIZE(keys));
        std::vector<Ref> locals;
        for (size_t c = 0; c < names.size() + 2; c++) {
            locals.push_back(checked(PyList_New(0)));
        }
        if (!plan_of(self)->collect(state, names, locals)) {
            Py_RETURN_NONE;
        }
        return list_of(locals).release();
    });
}

PyObject *plan_step_adam(PyObject *self, PyObject *args)
{
    fc_adam_options options;
    PyObject *state;
    int is_decoupled, is_amsgrad, is_maximized;
    Py_ssize_t fused_lanes;
    if (!PyArg_ParseTuple(args, "Odddddpppn:step_adam", &state, &options.lr, &options.beta1,
                          &options.beta2, &options.eps, &options.weight_decay, &is_decoupled,
                          &is_amsgrad, &is_maximized, &fused_lanes)) {
        return nullptr;
    }
    if (!PyDict_Check(state)) {
        Py_RETURN_FALSE;
    }
    options.is_decoupled = is_decoupled != 0;
    options.is_maximized = is_maximized != 0;
    return guarded([&] {
        return PyBool_FromLong(plan_of(self)->step_adam(state, options, is_amsgrad != 0,
                                                        static_cast<size_t>(fused_lanes)));
    });
}

PyObject *plan_step_sgd(PyObject *self, PyObject *args)
{
    double lr, momentum, dampening, weight_decay;
    PyObject *state;
    int is_nesterov, is_maximized;
    Py_ssize_t fused_lanes;
    if (!PyArg_ParseTuple(args, "Oddddppn:step_sgd", &state, &lr, &momentum, &dampening,
                          &weight_decay, &is_nesterov, &is_maximized, &fused_lanes)) {
        return nullptr;
    }
    if (!PyDict_Check(state)) {
        Py_RETURN_FALSE;
    }
    const fc_sgd sgd = {static_cast<float>(weight_decay),
                        static_cast<float>(momentum),
                        static_cast<float>(1 - dampening),
                        static_cast<float>(-lr),
                        is_nesterov != 0,
                        is_maximized != 0};
    return guarded([&] {
        return PyBool_FromLong(
            plan_of(self)->step_sgd(state, sgd, momentum != 0, static_cast<size_t>(fused_lanes)));
    });
}

PyMethodDef plan_methods[] = {
    {"is_for", plan_is_for, METH_O, "is_for(params) -> bool: whether it was made for this list."},
    {"locals", plan_locals, METH_O,
     "locals(columns) -> (rows, columns)\n\nLocal tensors for the rows of an optimizer's lists "
     "(parameters, gradients, state ...)\nwhose DTensors are laid out alike. Scalars and None "
     "stay as they are."},
    {"collect", plan_collect, METH_VARARGS,
     "collect(state, keys) -> columns or None\n\nLocal tensors of parameters and gradients, and "
     "what the state has under each key, for every\nparameter that has a gradient. None: a "
     "parameter lacks one of them."},
    {"step_adam", plan_step_adam, METH_VARARGS,
     "step_adam(state, lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize, "
     "fused_lanes) -> bool\n\n"
     "One step of Adam for every parameter that has a gradient. False: torch must do it, nothing "
     "was touched."},
    {"step_sgd", plan_step_sgd, METH_VARARGS,
     "step_sgd(state, lr, momentum, dampening, weight_decay, nesterov, maximize, fused_lanes) -> "
     "bool\n\n"
     "The same for SGD."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot plan_slots[] = {
    {Py_tp_doc, const_cast<char *>("Params(params, sharded)\n--\n\nThe parameters of a group; "
                                   "`sharded` has the ids of those to step here.")},
    {Py_tp_new, reinterpret_cast<void *>(plan_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(plan_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(plan_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(plan_clear)},
    {Py_tp_methods, plan_methods},
    {0, nullptr}};

PyType_Spec plan_spec = {"fsdp_c._C.Params", sizeof(PlanObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, plan_slots};

} // namespace

} // namespace fc

int fc_register_optim(PyObject *module)
{
    using namespace fc;
    PyTypeObject *plan_type;
    const int result = intern({{&step_name, "step"},
                               {&exp_avg_name, "exp_avg"},
                               {&exp_avg_sq_name, "exp_avg_sq"},
                               {&max_exp_avg_sq_name, "max_exp_avg_sq"},
                               {&momentum_buffer_name, "momentum_buffer"}});
    return result < 0 ? -1 : add_type(module, "Params", &plan_spec, &plan_type);
}
