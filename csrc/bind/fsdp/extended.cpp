// Extensions of a unit: Python is asked for their inputs, and to make whole parameters.
#include "bind/fsdp/extended.h"

#include "bind/python/fields.h"
#include "libtorch/versions.h"

#include <c10/core/InferenceMode.h>

namespace fc {

namespace {

// What users' code computes here is no part of a graph, and is trained with later, also if a first
// forward is in inference mode.
class UsersCode {
    struct Normal {
        std::optional<c10::InferenceMode> mode;
        Normal()
        {
            if (c10::InferenceMode::is_enabled()) {
                mode.emplace(false);
            }
        }
    } normal_;
    at::NoGradGuard no_grad_;
};

void set_empty(const at::Tensor &tensor, bool is_readable)
{
    c10::StorageImpl *storage = tensor.storage().unsafeGetStorageImpl();
    set_data(storage, at::DataPtr(nullptr, storage->device()), 0, is_readable);
}

} // namespace

bool is_extended(const fc_layout *layout)
{
    return std::any_of(layout->params, layout->params + layout->n_params,
                       [](const fc_param &p) { return p.is_made; });
}

Extended::Extended(Parameters &of, PyObject *rows)
    : of_(of), layout_(fc_unit_layout(of.shard_unit())), made_(layout_->n_entries)
{
    for (size_t i = 0; i < layout_->n_params; i++) {
        if (layout_->params[i].n_inputs > 0) {
            extensions_.push_back({i, {}, false});
            PyObject *row = PyList_GET_ITEM(rows, static_cast<Py_ssize_t>(i));
            take_outputs(checked(PyObject_GetAttrString(row, "outputs")).get());
        }
    }
    hide();
}

void Extended::take_outputs(PyObject *tensors)
{
    for (PyObject *object : items_of(tensors)) {
        const fc_param &input = layout_->params[layout_->n_params + outputs_.size()];
        const at::Tensor &tensor = tensor_of(object);
        outputs_.push_back({tensor, input.full_at, tensor.nbytes()});
        name_reader(tensor);
    }
}

// Who reads it while it has no memory gets an error that names the unit.
void Extended::name_reader(const at::Tensor &tensor) const
{
    set_unreadable_text(tensor.storage().unsafeGetStorageImpl(), sharded_text(of_.shard_unit()));
    set_empty(tensor, false);
}

// What the extension has said that its whole parameter lies in, beside what was gathered.
void Extended::note_inner(Extension &extension)
{
    const Param &p = of_.params()[extension.param];
    const Ref list = checked(PySequence_List(
        checked(PyObject_GetAttr(p.owner.get(), name_of(Attribute::inner_tensors))).get()));
    extension.inner.clear();
    extension.has_names = false;
    for (PyObject *object : items_of(list.get())) {
        const at::Tensor &tensor = tensor_of(object);
        if (std::none_of(outputs_.begin(), outputs_.end(),
                         [&](const Output &output) { return output.tensor.is_alias_of(tensor); })) {
            extension.inner.push_back(tensor);
        }
    }
}

// ---- memory ----

void Extended::show(void *memory) const
{
    for (const Output &output : outputs_) {
        c10::StorageImpl *storage = output.tensor.storage().unsafeGetStorageImpl();
        set_data(storage, at::DataPtr(static_cast<char *>(memory) + output.at, storage->device()),
                 output.bytes, true);
    }
}

void Extended::hide()
{
    for (const Output &output : outputs_) {
        set_empty(output.tensor, false);
    }
    for (Extension &extension : extensions_) {
        for (const at::Tensor &tensor : extension.inner) {
            extension.has_names ? set_empty(tensor, false) : name_reader(tensor);
        }
        extension.has_names = true;
    }
}

// ---- shards ----

void Extended::shards(const void **shards_out) const
{
    for (size_t i = 0; i < layout_->n_entries; i++) {
        const bool is_made = layout_->params[i].is_made;
        shards_out[i] = made_[i].defined()                  ? made_[i].const_data_ptr()
                        : i < layout_->n_params && !is_made ? of_.params()[i].local.const_data_ptr()
                                                            : nullptr;
    }
}

// The first bytes of a shard tell of writes that no counter has seen, where it has memory.
uint64_t Extended::mark_of(size_t param) const
{
    const Param &p = of_.params()[param];
    return layout_->params[param].is_made ? uint64_t{p.shard_versions()} << 32 : p.shard_mark();
}

void Extended::mark(uint64_t *marks_out) const
{
    for (size_t i = 0; i < layout_->n_params; i++) {
        marks_out[i] = mark_of(i);
    }
}

size_t Extended::find_changed(const uint64_t *marks, size_t from) const
{
    return first_from(from, layout_->n_params, [&](size_t i) { return mark_of(i) != marks[i]; });
}

// ---- Python's part ----

void Extended::make()
{
    const UsersCode guards;
    size_t input = layout_->n_params;
    for (size_t i = 0; i < layout_->n_params; i++) {
        const fc_param &p = layout_->params[i];
        if (!p.is_made) {
            continue;
        }
        const Ref given = checked(PySequence_Fast(
            ask_python(Call::make_inputs, of_.params()[i].owner.get()).get(), "a sequence"));
        const size_t n = p.n_inputs > 0 ? p.n_inputs : 1;
        if (static_cast<size_t>(PySequence_Fast_GET_SIZE(given.get())) != n) {
            raise_error(PyExc_RuntimeError, "parameter '%s' needs %zu inputs",
                        parameter_name(of_.params()[i]).c_str(), n);
        }
        for (size_t k = 0; k < n; k++) {
            made_[p.n_inputs > 0 ? input++ : i] =
                tensor_of(PySequence_Fast_GET_ITEM(given.get(), static_cast<Py_ssize_t>(k)));
        }
    }
}

void Extended::fill()
{
    const UsersCode guards;
    for (Extension &extension : extensions_) {
        const Param &p = of_.params()[extension.param];
        for (const at::Tensor &tensor : extension.inner) { // which torch allocates
            if (tensor.storage().nbytes() == 0) {
                set_empty(tensor, true);
            }
        }
        Ref whole = ask_python(Call::fill_unsharded, p.owner.get());
        if (whole.get() != p.unsharded.get()) {
            of_.replace_unsharded(extension.param, std::move(whole));
            note_inner(extension);
        }
        of_.note_filled(extension.param);
    }
}

void Extended::forget()
{
    for (at::Tensor &tensor : made_) {
        tensor = at::Tensor();
    }
}

} // namespace fc
