// Parameters of a unit: registration, unshard and reshard, watching the shards.
#include "bind/fsdp/unit.h"

#include "bind/compat.h"
#include "bind/fsdp/domain.h"
#include "bind/fsdp/events.h"
#include "bind/fsdp/steps.h"
#include "bind/python/fields.h"
#include "bind/tensor/data_access.h"
#include "bind/tensor/layout.h"
#include "bind/tensor/tensors.h"
#include "engine/order.h"
#include "engine/root.h"

#include <c10/core/InferenceMode.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>

namespace fc {

namespace {

constexpr const char *root_name = "(root)"; // as unit_name in fsdp_c/_fully_shard/_fqns.py calls it

PyObject *local_object(const Param &param) // borrowed; null after `del`
{
    return in_slot(param.sharded.get(), param.local_slot);
}

std::string sharded_text(const fc_unit *unit)
{
    return "a parameter of FSDP unit '" + std::string(fc_unit_name(unit)) +
           "' is sharded now, so its full weight cannot be read: the unit is not in forward or "
           "backward. Read it inside the unit's forward, call unshard() on the unit first, or use "
           "register_fsdp_forward_method() for the method that needs it";
}

std::string sharded_for_graph_text(const fc_unit *unit)
{
    return sharded_text(unit) +
           ". If it is a backward that reads it, from a tensor inside of the unit that its output "
           "does not depend on: return that tensor from the unit's forward, or call "
           "set_reshard_after_forward(False) on the unit";
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
    param.unsharded = fields.object("unsharded");
    param.owner = fields.object("owner");
    fields.end();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places.get()); i++) {
        Fields place(PyList_GET_ITEM(places.get(), i));
        Ref dict = place.object("parameters"), name = place.object("name"),
            module = place.object("setter");
        place.end();
        param.places.push_back(
            {std::move(dict), std::move(name), module.get() == Py_None ? Ref() : module});
    }
    param.dict = param.places.front().dict.get();
    param.key = param.places.front().key.get();
    param.has_one_place = param.places.size() == 1 && !param.places.front().module;
    static PyObject *const local_tensor = PyUnicode_InternFromString("_local_tensor");
    param.local_slot = slot_of(Py_TYPE(param.sharded.get()), local_tensor);
    param.unsharded_tensor = tensor_of(param.unsharded.get());
    param.local = tensor_of(local_object(param));
    param.reduce_type = reinterpret_cast<THPDtype *>(reduce.get())->scalar_type;
    param.grad_type = reinterpret_cast<THPDtype *>(grad.get())->scalar_type;
    if (holds_gradients_on_leaf) {
        const at::ScalarType compute = param.unsharded_tensor.scalar_type();
        param.leaf_grad_type = param.unsharded_tensor.grad_dtype();
        param.is_widened = param.leaf_grad_type && at::isFloatingType(compute) &&
                           at::isFloatingType(*param.leaf_grad_type) &&
                           c10::elementSize(*param.leaf_grad_type) > c10::elementSize(compute);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(size.get()); i++) {
        param.local_size.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(size.get(), i)));
        param.local_stride.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(stride.get(), i)));
    }
    return param;
}

uint32_t version_of(const at::Tensor &tensor)
{
    const c10::VariableVersion &version = tensor.unsafeGetTensorImpl()->version_counter();
    return version.enabled() ? version.current_version() : 0;
}

} // namespace

uint64_t Param::shard_mark() const
{
    uint32_t first = 0;
    if (local.nbytes() >= sizeof(first)) {
        std::memcpy(&first, local.const_data_ptr(), sizeof(first));
    }
    const uint64_t versions = shard_versions();
    return versions << 32 | first;
}

uint32_t Param::shard_versions() const
{
    return version_of(sharded_tensor()) + version_of(local);
}

const at::Tensor &Param::sharded_tensor() const
{
    return THPVariable_Unpack(sharded.get());
}

bool Param::is_in_place() const
{
    const c10::TensorImpl *impl = local.unsafeGetTensorImpl();
    return is_object_of(local_object(*this), impl) &&
           (storage == nullptr || impl->unsafe_storage().data() == storage);
}

Unit::Unit(PyObject *domain, size_t index, PyObject *replicate_domain, PyObject *rows,
           const at::Tensor &flat, PyObject *on_device, const Updates *updates)
    : domain_object_(Ref::borrow(domain)), domain_(domain_of(domain)),
      shard_(fc_domain_unit(domain_, index)), storage_(flat.storage().unsafeGetStorageImpl()),
      bytes_(fc_unit_layout(shard_)->full_bytes), reduction_(nullptr, fc_reduction_destroy),
      replicate_domain_(nullptr), replicate_(nullptr), updates_(updates),
      name_(fc_unit_name(shard_)), storage_owner_(flat)
{
    if (fc_domain_is_mapped(domain_)) {
        view_ = fc_unit_view(shard_);
    }
    if (replicate_domain != Py_None) {
        replicate_object_ = Ref::borrow(replicate_domain);
        replicate_domain_ = domain_of(replicate_domain);
        replicate_ = fc_domain_unit(replicate_domain_, index);
    }
    if (name_ == root_name) {
        name_.clear(); // profiler ranges of the root have no name
    }
    params_.reserve(static_cast<size_t>(PyList_GET_SIZE(rows)));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(rows); i++) {
        params_.push_back(parse_row(PyList_GET_ITEM(rows, i)));
        has_widened_ = has_widened_ || params_.back().is_widened;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; i < params_.size(); i++) {
        Param &p = params_[i];
        p.has_grad = layout->params[i].has_grad;
        if (fc_domain_is_mapped(domain_) && layout->params[i].is_aliased) {
            p.storage = fc_unit_shard_storage(shard_, i);
            move_to(p.local.storage().unsafeGetStorageImpl(), p.storage, fc_unit_region(shard_));
        }
    }
    for (size_t i = 0; i < params_.size(); i++) {
        const fc_param &p = layout->params[i];
        const size_t row = p.outer * p.inner * fc_dtype_bytes(p.compute);
        gather_bytes_ += (p.rows - p.own_rows) * row;
        publish_bytes_ += p.is_aliased ? 0 : p.own_rows * row;
    }
    if (Streams *streams = domain_streams(domain)) {
        const DeviceComms comms = {domain_device_comm(domain),
                                   replicate_ != nullptr ? domain_device_comm(replicate_domain)
                                                         : nullptr};
        device_ = std::make_unique<DeviceUnit>(streams, shard_, replicate_, comms,
                                               DeviceOptions(on_device));
        device_->set_shards(params_);
        may_reside_ = can_reside();
    }
    is_watched_ = fc_domain_is_mapped(domain_) && device_ == nullptr &&
                  (is_gathered() || publishes()); // else reads are of the shards themselves
    noted_shards_.resize(params_.size());
    fc_reduction *reduction;
    check(fc_reduction_create(shard_, replicate_, slots(), reduction_ops(), &reduction));
    reduction_.reset(reduction);
    traffic_ = fc_reduction_traffic(reduction);
    hooks_.resize(params_.size());
    steps_seen_ = n_steps();
    updates_seen_ = n_updates();
    for (const Param &p : params_) {
        shard_versions_.push_back(p.shard_versions());
    }
    set_unreadable_text(storage_, unreadable_text());
    hide();
}

Unit::~Unit()
{
    drop_ahead();
    end_graph();
    if (arrivals_ != nullptr) {
        arrivals_->is_expected = false;
        arrivals_->state = Ref();
    }
    // Whoever still holds an unsharded parameter gets an error instead of freed memory.
    hide();
    release_slot();
}

int Unit::traverse(visitproc visit, void *arg)
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

void Unit::show(void *memory)
{
    if (shown_ == nullptr || shown_ != memory) {
        set_data(storage_, at::DataPtr(memory, storage_->device()), bytes_, true);
        shown_ = memory;
    }
}

std::string Unit::unreadable_text() const
{
    return is_copied() ? sharded_for_graph_text(shard_) : sharded_text(shard_);
}

void Unit::hide()
{
    if (std::exchange(is_unavailable_, false)) {
        set_unreadable_text(storage_, unreadable_text());
    }
    shown_ = nullptr;
    set_data(storage_, at::DataPtr(nullptr, storage_->device()), 0, false);
}

void Unit::register_params(bool unsharded)
{
    for (Param &p : params_) {
        PyObject *object = unsharded ? p.unsharded.get() : p.sharded.get();
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
}

void Unit::count_gather()
{
    traffic_->unshards++;
    if (device_ != nullptr) {
        traffic_->gathers += device_->gathering_ranks() > 1;
        traffic_->gathered += device_->gathered_bytes();
        return;
    }
    if (!std::exchange(came_along_, false)) {
        traffic_->gathers += is_gathered();
        traffic_->gathered += gather_bytes_;
    }
}

void Unit::take_slot()
{
    if (slot_ == nullptr) {
        check(fc_slots_acquire(slots(), bytes_, &slot_));
    }
}

void Unit::release_slot(bool to_slice)
{
    if (device_ != nullptr) {
        if (to_slice) {
            device_->reshard_to_slice();
        } else {
            device_->reshard();
        }
        slot_ = nullptr;
    } else if (slot_ != nullptr) {
        fc_slots_release(slots(), std::exchange(slot_, nullptr));
    }
    is_kept_ = false;
}

void Unit::unshard_private()
{
    if (unsharded_ || (pending_ && !is_outdated())) {
        requested_ = requested_ || is_ahead_;
        claim_ahead();
        return;
    }
    fc_root_note_use(shard_);
    // What moves nothing has no range: a unit on one rank, and a second call before the wait.
    Range range(is_gathered() && !requested_ ? "FSDP::all_gather" : nullptr, this);
    if (device_ != nullptr) {
        device_->start(fc_domain_is_open(domain_));
    } else if (!fc_domain_is_mapped(domain_)) {
        gather_messages();
    } else if (fc_domain_is_open(domain_)) {
        requested_ = true;
        return; // the phase keeps the shards still: unshard() shows them as they are
    } else {
        take_slot();
        publish();
        fc_domain_open(domain_, {FC_PHASE_UNSHARD, 0, FC_UPDATES_UNKNOWN});
        fc_status status = fc_domain_ready(domain_, shard_);
        if (status == FC_OK) {
            fc_unit_copy_out(shard_, slot_);
            traffic_->copied += bytes_;
            status = fc_domain_close(domain_);
        } else {
            fc_domain_fail(domain_);
        }
        check(status);
    }
    requested_ = pending_ = true;
}

void Unit::unshard()
{
    note_updates();
    if (is_watched_ && (!unsharded_ || is_kept_) && fc_domain_is_open(domain_) &&
        !fc_domain_in_backward(domain_)) {
        renew_if_written();
        is_read_ = true;
    }
    if (unsharded_) {
        if (fc_domain_is_open(domain_)) {
            check(fc_domain_ready(domain_, shard_));
            if (device_ != nullptr) { // for what is prefetched from here
                (void)device_->take(true, fc_domain_in_backward(domain_));
            }
        }
        if (is_kept_ && fc_domain_is_open(domain_) && !fc_domain_in_backward(domain_)) {
            refresh();
        }
        return;
    }
    unshard_private();
    if (device_ == nullptr && !fc_domain_is_mapped(domain_) && fc_domain_in_backward(domain_)) {
        check(fc_order_note(shard_));
    }
    Range range(is_gathered() ? "FSDP::all_gather_copy_out" : nullptr, this);
    const bool is_shared = fc_domain_is_mapped(domain_) && !keeps_storage_;
    if (is_shared && fc_domain_is_open(domain_) && pending_) {
        release_slot(); // the copy is of before the phase: shards may have been written since
        pending_ = false;
    }
    if (device_ != nullptr) {
        slot_ = device_->take(fc_domain_is_open(domain_), fc_domain_in_backward(domain_));
    }
    void *memory = slot_;
    if (!pending_) {
        check(fc_domain_ready(domain_, shard_));
        if (keeps_storage_) {
            take_slot();
            fc_unit_copy_out(shard_, slot_);
            traffic_->copied += bytes_;
            memory = slot_;
        } else {
            memory = view_;
        }
    }
    count_gather();
    show(memory);
    for (Param &p : params_) {
        p.is_trained = p.sharded_tensor().requires_grad();
        if (p.is_trained != p.unsharded_tensor.requires_grad()) {
            p.unsharded_tensor.set_requires_grad(p.is_trained);
        }
        p.version = p.unsharded_tensor.unsafeGetTensorImpl()->version_counter().current_version();
    }
    is_kept_ = is_copied() ? !fc_domain_is_open(domain_) : is_shared && pending_;
    pending_ = requested_ = false;
    unsharded_ = true;
    register_params(true);
}

void Unit::drop_pending()
{
    if (!unsharded_) {
        drop_ahead();
        pending_ = requested_ = false;
        if (!stays()) {
            release_slot();
        }
    }
}

void Unit::make_unavailable()
{
    if (!unsharded_ && !stays()) {
        shown_ = nullptr;
        storage_->set_nbytes(bytes_); // else autograd's views of it would say less
        set_unreadable_text(storage_, "backward needs a parameter of FSDP unit '" +
                                          std::string(fc_unit_name(shard_)) +
                                          "', which was told to do without: call "
                                          "set_unshard_in_backward(True) on it");
        is_unavailable_ = true;
    }
}

void Unit::reshard(bool to_slice)
{
    is_kept_after_forward_ = false;
    if (!unsharded_) {
        if (is_unavailable_ && !stays()) {
            leave_to_graph();
        }
        return;
    }
    register_params(false);
    for (const Param &p : params_) {
        if (p.unsharded_tensor.requires_grad() != p.is_trained) { // the user has changed it
            p.sharded_tensor().set_requires_grad(!p.is_trained);
        }
    }
    if (slot_ == nullptr) {
        discard_writes(); // a write to an unsharded parameter lasts until here
    }
    if (!stays()) {
        leave_to_graph();
        release_slot(to_slice);
    }
    is_kept_ = false;
    unsharded_ = false;
    if (is_resident_) {
        leave_if_written();
    }
}

bool Unit::is_written(const Param &p)
{
    return p.version !=
           p.unsharded_tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

void Unit::discard_writes()
{
    for (size_t i = 0; i < params_.size(); i++) {
        if (is_written(params_[i]) || is_data_taken(params_[i].unsharded_tensor)) {
            fc_unit_discard_writes(shard_, i);
        }
    }
}

bool Unit::is_outdated() const
{
    return device_ == nullptr && !fc_domain_is_mapped(domain_) && !fc_domain_in_backward(domain_) &&
           gathered_at_ != n_steps();
}

void Unit::keep()
{
    if (!unsharded_ || (slot_ != nullptr && !keeps_storage_)) {
        is_kept_ = is_kept_ || (unsharded_ && is_copied());
        return;
    }
    if (slot_ == nullptr) {
        check(fc_domain_ready(domain_, shard_));
        take_slot();
        std::memcpy(slot_, view_, bytes_);
        traffic_->copied += bytes_;
        discard_writes();
        show(slot_);
    }
    is_kept_ = true;
}

void Unit::refresh()
{
    if (std::any_of(params_.begin(), params_.end(), is_written)) {
        return; // writes to an unsharded parameter last until it is resharded
    }
    if (device_ != nullptr) {
        if (device_->is_outdated()) {
            device_->reshard();
            device_->start(true);
            slot_ = device_->take(true, false);
            show(slot_);
        }
        return;
    }
    if (!fc_domain_is_mapped(domain_)) {
        if (is_outdated()) {
            gather_messages();
            count_gather();
        }
    } else if (keeps_storage_) {
        fc_unit_copy_out(shard_, slot_);
        traffic_->copied += bytes_;
        is_kept_ = false;
    } else {
        show(view_);
        release_slot();
    }
}

void Unit::keep_storage(bool keeps)
{
    keeps_storage_ = keeps;
    if (!keeps && !unsharded_ && !pending_ && slot_ != nullptr) {
        leave_to_graph();
        release_slot();
    }
}

bool Unit::is_intact() const
{
    for (size_t i = 0; i < params_.size(); i++) {
        const Param &p = params_[i];
        PyObject *registered = PyDict_GetItem(p.dict, p.key);
        if (registered != (unsharded_ ? p.unsharded : p.sharded).get() || !p.is_in_place()) {
            return false;
        }
        if (device_ != nullptr && p.has_grad && !fc_unit_layout(shard_)->params[i].trainable &&
            p.sharded_tensor().requires_grad()) {
            return false; // the plan stages no gradient of it
        }
    }
    return true;
}

void Unit::publish()
{
    if (device_ != nullptr && !is_resident_) {
        device_->set_shards(params_);
    }
    if (!fc_domain_is_mapped(domain_)) {
        return;
    }
    traffic_->copied += publish_bytes_;
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; i < params_.size(); i++) {
        const Param &p = params_[i];
        if (!layout->params[i].is_aliased) {
            fc_unit_publish(shard_, i, p.local.const_data_ptr());
        }
    }
}

void Unit::note_shards()
{
    is_read_ = false;
    for (size_t i = 0; is_watched_ && i < params_.size(); i++) {
        noted_shards_[i] = params_[i].shard_mark();
    }
}

bool Unit::was_written() const
{
    for (size_t i = 0; is_watched_ && i < params_.size(); i++) {
        if (noted_shards_[i] != params_[i].shard_mark()) {
            return true;
        }
    }
    return false;
}

void Unit::check_unwritten() const
{
    for (size_t i = 0; is_read_ && is_gathered() && i < params_.size(); i++) {
        if (params_[i].storage != nullptr && noted_shards_[i] != params_[i].shard_mark()) {
            fc_domain_fail(domain_);
            PyErr_Format(
                PyExc_RuntimeError,
                "the shard of parameter '%s' was written on rank %d within a forward that "
                "had read the parameter before, so other ranks may have read either "
                "value: write shards between two forwards, or before their first use in "
                "one, or set FSDP_C_TRANSPORT=callback, which gathers for each use",
                parameter_name(params_[i]).c_str(),
                fc_transport_global_rank(fc_domain_transport(domain_), fc_domain_rank(domain_)));
            throw_python();
        }
    }
}

// Shards that were written since this forward began (a momentum encoder's) are read when all ranks
// have written theirs.
void Unit::renew_if_written()
{
    if (!was_written()) {
        return;
    }
    check_unwritten();
    fc_status status = fc_domain_turn(domain_, shard_);
    if (status == FC_OK && publishes()) { // nobody reads now, and nobody does before all have
        publish();
        status = fc_domain_turn(domain_, shard_);
    }
    if (status != FC_OK) {
        fc_domain_fail(domain_);
    }
    check(status);
    note_shards();
}

} // namespace fc
