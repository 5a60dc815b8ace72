// Parameters of a unit: registration, what they show, writes to them.
#include "bind/fsdp/parameters.h"

#include "bind/python/objects.h"
#include "bind/tensor/layout.h"
#include "libtorch/versions.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/variable.h>

namespace fc {

namespace {

constexpr const char *root_name = "(root)"; // as unit_name in fsdp_c/_fully_shard/_fqns.py calls it

PyObject *local_object(const Param &param) // borrowed; null after `del`
{
    return in_slot(param.sharded.get(), param.local_slot);
}

// Whether `object`, which may be null, is the Python object of a tensor that has one.
bool is_object_of(PyObject *object, const c10::TensorImpl *impl)
{
#if FC_TORCH_AT_LEAST(2, 13)
    return object != nullptr && impl->pyobj_slot()->load_pyobj() == object;
#else
    return object != nullptr && THPVariable_Check(object) &&
           THPVariable_Unpack(object).unsafeGetTensorImpl() == impl;
#endif
}

// A BoundParam of fsdp_c/_fully_shard/_engine_bind.py.
Param parse_row(PyObject *row)
{
    Fields fields(row);
    const Ref places = fields.object("places"), reduce = fields.object("reduce"),
              grad = fields.object("grad"), size = fields.object("local_size"),
              stride = fields.object("local_stride");
    Param param;
    param.copies = static_cast<int32_t>(fields.size("copies"));
    param.sharded = fields.object("sharded");
    Ref unsharded = fields.object("unsharded");
    const Ref unsharded_local = fields.object("unsharded_local");
    param.owner = fields.object("owner");
    fields.object("outputs"); // Extended's
    fields.end();
    for (PyObject *named : items_of(places.get())) {
        Fields place(named);
        Ref dict = place.object("parameters"), name = place.object("name"),
            module = place.object("setter");
        place.end();
        param.places.push_back({std::move(dict), std::move(name),
                                module.get() == Py_None ? Ref() : std::move(module)});
    }
    param.dict = param.places.front().dict.get();
    param.key = param.places.front().key.get();
    param.has_one_place = param.places.size() == 1 && !param.places.front().module;
    param.local_slot = slot_of(Py_TYPE(param.sharded.get()), name_of(Attribute::local_tensor));
    param.set_unsharded(std::move(unsharded), tensor_of(unsharded_local.get()));
    param.local = tensor_of(local_object(param));
    param.reduce_type = reinterpret_cast<THPDtype *>(reduce.get())->scalar_type;
    param.grad_type = reinterpret_cast<THPDtype *>(grad.get())->scalar_type;
    for (PyObject *n : items_of(size.get())) {
        param.local_size.push_back(PyLong_AsLongLong(n));
    }
    for (PyObject *n : items_of(stride.get())) {
        param.local_stride.push_back(PyLong_AsLongLong(n));
    }
    return param;
}

} // namespace

uint32_t version_of(const at::Tensor &tensor)
{
    const c10::VariableVersion &version = tensor.unsafeGetTensorImpl()->version_counter();
    return version.enabled() ? version.current_version() : 0;
}

std::string sharded_text(const fc_unit *unit, Call which)
{
    return text_from(ask_python(which, to_python(fc_unit_name(unit)).get()).get());
}

void Param::set_unsharded(Ref object, const at::Tensor &view)
{
    unsharded = std::move(object);
    unsharded_tensor = tensor_of(unsharded.get());
    is_parallel = !view.is_same(unsharded_tensor);
    dtensor_local = is_parallel ? view : at::Tensor();
    is_wrapped = !is_parallel && unsharded_tensor.key_set().has(c10::DispatchKey::Python);
    if (holds_gradients_on_leaf) {
        const at::ScalarType compute = unsharded_tensor.scalar_type();
        leaf_grad_type = unsharded_tensor.grad_dtype();
        is_widened = leaf_grad_type && at::isFloatingType(compute) &&
                     at::isFloatingType(*leaf_grad_type) &&
                     c10::elementSize(*leaf_grad_type) > c10::elementSize(compute);
    }
}

// `.data` goes around the versions: three of the shard's words say what it has changed.
uint64_t Param::shard_mark() const
{
    uint32_t sample = 0;
    const size_t bytes = local.nbytes();
    if (bytes >= sizeof(uint32_t)) {
        const auto *data = static_cast<const char *>(local.const_data_ptr());
        const size_t last = bytes / sizeof(uint32_t) - 1;
        for (const size_t at : {size_t{0}, last / 2, last}) {
            uint32_t word;
            std::memcpy(&word, data + at * sizeof(word), sizeof(word));
            sample = (sample ^ word) * 0x9E3779B1U; // 2^32 / the golden ratio, odd: one to one
        }
    }
    const uint64_t versions = shard_versions();
    return versions << 32 | sample;
}

uint32_t Param::shard_versions() const
{
    return version_of(sharded_tensor()) + version_of(local);
}

bool Param::is_in_place() const
{
    const c10::TensorImpl *impl = local.unsafeGetTensorImpl();
    return is_object_of(local_object(*this), impl) &&
           (storage == nullptr || impl->unsafe_storage().data() == storage);
}

void Param::bump_unsharded_versions() const
{
    bump_version(unsharded_tensor);
    if (is_parallel) {
        bump_version(dtensor_local);
    }
}

bool Param::has_own_grad() const
{
    const at::Tensor &present = sharded_grad();
    return grad.object && present.defined() && present.is_same(grad.tensor);
}

Reused::Reused(Ref made, Ref made_local)
    : object(std::move(made)), local_object(std::move(made_local)), tensor(tensor_of(object.get())),
      local(tensor_of(local_object.get())),
      object_refs(static_cast<uint32_t>(Py_REFCNT(object.get()))),
      local_refs(static_cast<uint32_t>(Py_REFCNT(local_object.get()))),
      tensor_uses(static_cast<uint32_t>(tensor.use_count())),
      local_uses(static_cast<uint32_t>(local.use_count()))
{
}

bool Reused::is_free() const
{
    return Py_REFCNT(object.get()) == object_refs && Py_REFCNT(local_object.get()) == local_refs &&
           tensor.use_count() == tensor_uses && local.use_count() == local_uses;
}

std::string parameter_name(const Param &param)
{
    std::string name;
    if (!succeeds(
            [&] { name = text_from(ask_python(Call::parameter_name, param.owner.get()).get()); })) {
        PyErr_Clear();
        name = "?";
    }
    return name;
}

Parameters::Parameters(fc_unit *shard, PyObject *rows, const at::Tensor &flat)
    : name_(fc_unit_name(shard)), storage_owner_(flat), shard_(shard),
      storage_(flat.storage().unsafeGetStorageImpl()), bytes_(fc_unit_layout(shard)->full_bytes)
{
    if (name_ == root_name) {
        name_.clear(); // profiler ranges of the root have no name
    }
    params_.reserve(static_cast<size_t>(PyList_GET_SIZE(rows)));
    for (PyObject *row : items_of(rows)) {
        params_.push_back(parse_row(row));
        params_.back().has_grad = fc_unit_layout(shard)->params[params_.size() - 1].has_grad;
    }
}

int Parameters::traverse(visitproc visit, void *arg)
{
    for (const Param &p : params_) {
        for (const Place &place : p.places) {
            Py_VISIT(place.dict.get());
            Py_VISIT(place.module.get());
        }
        Py_VISIT(p.owner.get());
    }
    return 0;
}

bool Parameters::is_registered(size_t i) const
{
    const Param &p = params_[i];
    PyObject *const found = PyDict_GetItemWithError(p.dict, p.key);
    if (found == nullptr) {
        PyErr_Clear();
    }
    return found == object_of(i, registered_);
}

bool Parameters::is_intact() const
{
    size_t i = 0;
    while (i < params_.size() && is_registered(i) && params_[i].is_in_place()) {
        i++;
    }
    return i == params_.size();
}

bool Parameters::has_replaced_shards() const
{
    const auto is_replaced = [this](size_t i) { return !is_registered(i); };
    return registered_ == SHARDS && first_from(0, params_.size(), is_replaced) < params_.size();
}

// ---- what they show ----

void Parameters::show(void *memory)
{
    if (shown_ == nullptr || shown_ != memory) {
        set_data(storage_, at::DataPtr(memory, storage_->device()), bytes_, true);
        shown_ = memory;
    }
}

void Parameters::hide(bool keeps_size)
{
    shown_ = nullptr;
    set_data(storage_, at::DataPtr(nullptr, storage_->device()), 0, false);
    if (keeps_size) {
        storage_->set_nbytes(bytes_);
    }
}

void Parameters::withhold(bool is_withheld)
{
    if (!is_withheld) {
        set_unreadable_text(storage_, sharded_text(shard_, says_graph_ ? Call::text_for_graph
                                                                       : Call::text_of_sharded));
        return;
    }
    shown_ = nullptr;
    storage_->set_nbytes(bytes_); // else autograd's views of it would say less
    set_unreadable_text(storage_, sharded_text(shard_, Call::text_of_withheld));
}

PyObject *Parameters::object_of(size_t i, Registered which) const
{
    return which == WHOLE    ? params_[i].unsharded.get()
           : which == SHARDS ? params_[i].sharded.get()
                             : slices_->object(i);
}

// A shard stands in the place of an unsharded parameter: somebody has put it there, or back, as
// `functional_call` does behind a forward that leaves its unit unsharded. The next forward takes
// it.
bool Parameters::is_assigned(size_t i) const
{
    const Param &p = params_[i];
    PyObject *const found = PyDict_GetItem(p.dict, p.key);
    return found != nullptr && found != p.unsharded.get() && found != p.sharded.get() &&
           !p.is_parallel && !p.is_wrapped && PyObject_HasAttrString(found, "_local_tensor") == 1;
}

void Parameters::register_params(Registered which)
{
    for (size_t i = 0; i < params_.size(); i++) {
        const Param &p = params_[i];
        PyObject *object = object_of(i, which);
        if (registered_ == WHOLE && which == SHARDS && is_assigned(i)) {
            continue;
        }
        if (p.has_one_place) {
            check(PyDict_SetItem(p.dict, p.key, object));
            continue;
        }
        for (const Place &place : p.places) {
            if (place.module) {
                check(PyObject_SetAttr(place.module.get(), place.key.get(), object));
            } else {
                check(PyDict_SetItem(place.dict.get(), place.key.get(), object));
            }
        }
    }
    registered_ = which;
}

void Parameters::enter()
{
    const bool had_slices = registered_ == SLICES;
    if (had_slices) {
        slices_->carry_requires_grad(params_);
    }
    for (Param &p : params_) {
        p.is_trained = p.sharded_tensor().requires_grad();
        if (p.is_trained != p.unsharded_tensor.requires_grad()) {
            p.unsharded_tensor.set_requires_grad(p.is_trained);
        }
        p.version = p.unsharded_versions();
    }
    register_params(WHOLE);
    if (had_slices) {
        end_slices();
    }
}

void Parameters::leave(void *slices)
{
    for (const Param &p : params_) {
        if (p.unsharded_tensor.requires_grad() != p.is_trained) { // the user has changed it
            p.sharded_tensor().set_requires_grad(!p.is_trained);
        }
    }
    if (slices == nullptr) {
        register_params(SHARDS);
        return;
    }
    if (slices_ == nullptr) {
        slices_ = std::make_unique<Slices>(params_);
    }
    slices_->show(params_, static_cast<char *>(slices));
    register_params(SLICES);
}

void Parameters::leave_slices()
{
    slices_->carry_requires_grad(params_);
    register_params(SHARDS);
    end_slices();
}

// Who keeps one has a copy; the next forward makes others.
void Parameters::end_slices()
{
    if (!slices_->hide()) {
        slices_.reset();
    }
}

void Parameters::replace_unsharded(size_t param, Ref object)
{
    Param &p = params_[param];
    const Ref view = is_dtensor_or_subclass(object.get()) ? local_tensor_of(object.get())
                                                          : Ref::borrow(object.get());
    at::Tensor grad = std::exchange(p.unsharded_tensor.mutable_grad(), at::Tensor());
    p.set_unsharded(std::move(object), tensor_of(view.get()));
    if (grad.defined()) {
        p.unsharded_tensor.mutable_grad() = std::move(grad);
    }
}

// ---- writes ----

size_t Parameters::find_changed(const uint64_t *marks, size_t from) const
{
    return first_from(from, params_.size(),
                      [&](size_t i) { return params_[i].shard_mark() != marks[i]; });
}

size_t Parameters::find_written_slice(size_t from) const
{
    return first_from(from, params_.size(), [&](size_t i) { return slices_->is_written(i); });
}

size_t Parameters::find_written(size_t from, bool maybe) const
{
    return first_from(from, params_.size(), [&](size_t i) {
        const Param &p = params_[i];
        return p.is_written() || (maybe && (is_data_taken(p.unsharded_tensor) ||
                                            (p.is_parallel && is_data_taken(p.dtensor_local))));
    });
}

void Parameters::tell_of_write(size_t param, fc_written what) const
{
    ask_python(Call::tell_of_write, params_[param].owner.get(), to_python(what).get());
}

bool Parameters::has_hooks() const
{
    return std::any_of(params_.begin(), params_.end(), [](const Param &p) {
        const at::Tensor &tensor = p.sharded_tensor();
        return torch::autograd::impl::get_autograd_meta(tensor) != nullptr &&
               torch::autograd::impl::post_acc_grad_hooks(tensor);
    });
}

} // namespace fc
