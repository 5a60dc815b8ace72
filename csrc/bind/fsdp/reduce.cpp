// A unit's gradients on their way: posted to the ranks of its shard group, then to the replicas.
#include "bind/compat.h"
#include "bind/fsdp/domain.h"
#include "bind/fsdp/events.h"
#include "bind/fsdp/gradients.h"
#include "bind/fsdp/unit.h"
#include "bind/tensor/tensors.h"
#include "engine/batch.h"
#include "engine/exchange.h"
#include "engine/waits.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace fc {

namespace {

// Scratch memory from the slot pool.
class Scratch {
public:
    explicit Scratch(size_t bytes) { check(fc_slots_acquire(slots(), bytes, &memory_)); }
    ~Scratch() { fc_slots_release(slots(), memory_); }
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    char *data() const { return static_cast<char *>(memory_); }

private:
    void *memory_ = nullptr;
};

// Room for a post; finishes and copies away other posts until there is some.
char *reserve(const Unit *unit, fc_unit *lane, size_t part_bytes, fc_wire wire, fc_domain *domain,
              const Progress &progress)
{
    char *parts = nullptr;
    fc_status status;
    while ((status = fc_exchange_reserve(lane, part_bytes, wire, &parts)) == FC_AGAIN) {
        Range range("FSDP::post_backward_rs_wait", unit);
        progress(domain);
        status = fc_exchange_reserve(lane, part_bytes, wire, &parts);
        if (status != FC_AGAIN) {
            break;
        }
        check(fc_exchange_make_way(lane));
    }
    check(status);
    return parts;
}

// Lent gradients of more bytes are not kept while backward goes on: they would add to its peak.
constexpr size_t lent_bytes_max = size_t{16} << 20;
// Up to here one sum over whole parts is worth more than the copy of the own part.
constexpr size_t lent_bytes_min = size_t{64} << 10;

// The type in which to send gradients: their own where all are alike and the reduction allows it.
fc_wire wire_for(const fc_layout *layout, const std::vector<at::Tensor> &grads)
{
    const at::Tensor *first = nullptr;
    for (const at::Tensor &grad : grads) {
        if (!grad.defined()) {
            continue;
        }
        first = first == nullptr ? &grad : first;
        if (grad.scalar_type() != first->scalar_type()) {
            return FC_WIRE_REDUCE;
        }
    }
    return fc_layout_wire(layout, dtype_of(first->scalar_type()));
}

// True if nobody else can write to the gradients, which are then read later than posted.
bool may_lend(const fc_layout *layout, const std::vector<at::Tensor> &grads, fc_wire wire)
{
    size_t bytes = 0;
    for (size_t i = 0; i < grads.size(); i++) {
        if (!grads[i].defined()) {
            continue;
        }
        bytes += grads[i].nbytes();
        if (dtype_of(grads[i].scalar_type()) != fc_wire_dtype(&layout->params[i], wire) ||
            grads[i].use_count() != 1 || grads[i].storage().use_count() != 1) {
            return false;
        }
    }
    return bytes > lent_bytes_min;
}

} // namespace

Unit *Unit::lender_ = nullptr;
uint64_t Unit::n_reopened_ = 0;

// Who sets `grad_dtype` on a shard after the first forward gets torch's error.
void Unit::check_grad_dtype(const Param &param) const
{
    const auto *meta = torch::autograd::impl::get_autograd_meta(param.sharded_tensor());
    if (meta == nullptr || !meta->grad_dtype_ || *meta->grad_dtype_ == param.grad_type ||
        meta->grad_.defined()) {
        return;
    }
    PyErr_Format(PyExc_RuntimeError,
                 "parameter '%s' of FSDP unit '%s': attempting to assign a gradient with dtype "
                 "'%s' to a tensor with grad_dtype '%s'. From torch 2.15 on grad_dtype can be set "
                 "before the first forward",
                 parameter_name(param).c_str(), name().c_str(), c10::toString(param.grad_type),
                 c10::toString(*meta->grad_dtype_));
    throw_python();
}

// Whether the gradients' collectives over messages have to move parameters that were frozen at
// set-up, too. Decided from what all ranks have alike.
bool Unit::moves_frozen(const std::vector<at::Tensor> &grads) const
{
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; layout->n_frozen > 0 && i < params_.size(); i++) {
        if (layout->params[i].has_grad && !layout->params[i].trainable &&
            (grads[i].defined() || params_[i].unsharded_tensor.requires_grad() ||
             has_bit(partial_mask_.data(), i))) {
            return true;
        }
    }
    return false;
}

void Unit::post(bool with_unused, const ReduceOptions &options, const Progress &progress)
{
    // A post that waits for the peers takes the partial sums along.
    const bool takes_sums = flushes_partial_sums && options.all_reduce && !sums_are_posted_;
    std::vector<at::Tensor> grads = take_gradients(with_unused, takes_sums);
    bool any = false;
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            any = true;
            check_grad_dtype(params_[i]);
        }
    }
    if (!any) {
        return;
    }
    Range range("FSDP::post_backward_reduce", this);
    moves_frozen_ = moves_frozen(grads);
    count_reduction(grads);
    sums_are_posted_ = options.all_reduce;
    if (device_ != nullptr) {
        post_device(grads, options);
    } else if (fc_domain_n_ranks(domain_) == 1) {
        post_own(grads, options, progress);
    } else if (fc_domain_is_mapped(domain_)) {
        post_mapped(std::move(grads), progress);
        if (replicate_ != nullptr && !fc_domain_is_mapped(replicate_domain_)) {
            // The replicas' collectives order the ranks, so every rank must reach them in posting
            // order.
            check(fc_exchange_await(shard_));
            finish(shard_, options, progress);
        }
    } else {
        post_messages(grads, options, progress);
    }
}

bool Unit::settle_step()
{
    if (is_settled_) {
        n_reopened_++; // a second post-backward
        return false;
    }
    is_settled_ = has_all_gradients_ && !unsharded_ && !pending_ && !requested_ && !is_kept_ &&
                  (device_ == nullptr || is_resident_) && !has_partial_sums();
    return is_settled_;
}

void Unit::count_reduction(const std::vector<at::Tensor> &grads)
{
    if (!is_gathered()) {
        return;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    const size_t n_peers = static_cast<size_t>(layout->n_ranks - 1);
    traffic_.reductions +=
        moves_frozen_ || !fc_batch_joins(shard_); // what a batch does counts for its first unit
    for (size_t i = 0; i < grads.size(); i++) {
        const fc_param &p = layout->params[i];
        if (grads[i].defined()) {
            traffic_.reduced += n_peers * p.outer * p.own_rows * p.inner * fc_dtype_bytes(p.reduce);
        }
    }
}

// What the replicas sum up of a parameter, without padding.
size_t Unit::part_bytes(size_t param) const
{
    const fc_param &p = fc_unit_layout(shard_)->params[param];
    return p.outer * p.own_rows * p.inner * fc_dtype_bytes(p.reduce);
}

size_t Unit::bytes_of(const std::vector<uint64_t> &mask) const
{
    size_t bytes = 0;
    for (size_t i = 0; i < params_.size(); i++) {
        bytes += has_bit(mask.data(), i) ? part_bytes(i) : 0;
    }
    return bytes;
}

void Unit::count_all_reduction(size_t bytes)
{
    const auto n = static_cast<uint64_t>(fc_domain_n_ranks(replicate_domain_));
    traffic_.all_reductions += n > 1;
    traffic_.all_reduced += 2 * (n - 1) * bytes / n;
}

void Unit::stage(fc_unit *lane, size_t param, const void *grad, fc_dtype type, fc_wire wire,
                 fc_receivers receivers, char *parts, size_t part_bytes)
{
    const fc_param &p = fc_unit_layout(lane)->params[param];
    const size_t rows = receivers == FC_TO_ALL     ? p.rows
                        : receivers == FC_TO_PEERS ? p.rows - p.own_rows
                                                   : p.own_rows;
    traffic_.copied += p.outer * rows * p.inner * fc_dtype_bytes(fc_wire_dtype(&p, wire));
    fc_unit_stage(lane, param, grad, type, wire, receivers, parts, part_bytes);
}

void Unit::post_mapped(std::vector<at::Tensor> grads, const Progress &progress)
{
    settle_lent();
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            fc_exchange_set_present(shard_, i);
        }
    }
    const fc_wire wire = wire_for(fc_unit_layout(shard_), grads);
    const bool lends = may_lend(fc_unit_layout(shard_), grads, wire);
    const size_t part_bytes = fc_unit_part_bytes(shard_, wire);
    char *parts = reserve(this, shard_, part_bytes, wire, domain_, progress);
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            stage(shard_, i, grads[i].const_data_ptr(), dtype_of(grads[i].scalar_type()), wire,
                  lends ? FC_TO_PEERS : FC_TO_ALL, parts, part_bytes);
        }
    }
    fc_exchange_commit(shard_);
    if (!lends) {
        return;
    }
    lent_ = {std::move(grads), {}, 0, wire, parts, part_bytes};
    for (const at::Tensor &grad : lent_.tensors) {
        lent_.data.push_back(grad.defined() ? grad.const_data_ptr() : nullptr);
        lent_.bytes += grad.defined() ? grad.nbytes() : 0;
    }
    lender_ = this;
}

void Unit::settle()
{
    for (size_t i = 0; i < lent_.data.size(); i++) {
        if (lent_.data[i] != nullptr) {
            stage(shard_, i, lent_.data[i], dtype_of(lent_.tensors[i].scalar_type()), lent_.wire,
                  FC_TO_SELF, lent_.parts, lent_.part_bytes);
        }
    }
    lent_ = Lent();
    lender_ = nullptr;
}

void Unit::settle_lent()
{
    if (lender_ != nullptr) {
        lender_->settle();
    }
}

void Unit::settle_large()
{
    if (lender_ != nullptr && lender_->lent_.bytes > lent_bytes_max) {
        lender_->settle();
    }
}

void Unit::forget_lent(const fc_domain *domain)
{
    if (lender_ != nullptr && lender_->domain_ == domain) {
        Unit *unit = std::exchange(lender_, nullptr);
        unit->lent_ = Lent();
    }
}

// One rank in the shard group and no sums that wait: the gradients go where the replicas read them.
void Unit::post_to_replicas(const std::vector<at::Tensor> &grads, const Progress &progress)
{
    size_t bytes = 0;
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            fc_exchange_set_present(replicate_, i);
            bytes += part_bytes(i);
        }
    }
    count_all_reduction(bytes);
    const fc_wire wire = wire_for(fc_unit_layout(replicate_), grads);
    const size_t part_bytes = fc_unit_part_bytes(replicate_, wire);
    char *part = reserve(this, replicate_, part_bytes, wire, replicate_domain_, progress);
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            stage(replicate_, i, grads[i].const_data_ptr(), dtype_of(grads[i].scalar_type()), wire,
                  FC_TO_ALL, part, part_bytes);
        }
    }
    fc_exchange_commit(replicate_);
    sums_are_posted_ = false;
}

// One rank: its gradient is the sum.
void Unit::post_own(const std::vector<at::Tensor> &grads, const ReduceOptions &options,
                    const Progress &progress)
{
    bool needs_stage = replicate_ != nullptr;
    for (size_t i = 0; i < grads.size(); i++) {
        needs_stage =
            needs_stage || (grads[i].defined() && grads[i].scalar_type() != params_[i].reduce_type);
    }
    if (!needs_stage) {
        write_own(grads, options);
        return;
    }
    if (replicate_ != nullptr && options.all_reduce && !has_partial_sums() &&
        fc_domain_is_mapped(replicate_domain_) && fc_domain_n_ranks(replicate_domain_) > 1) {
        post_to_replicas(grads, progress);
        return;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    Scratch part(layout->part_bytes);
    std::vector<uint64_t> mask(layout->mask_words);
    std::memset(part.data(), 0, layout->part_bytes);
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            set_bit(mask, i);
            stage(shard_, i, grads[i].const_data_ptr(), dtype_of(grads[i].scalar_type()),
                  FC_WIRE_REDUCE, FC_TO_ALL, part.data(), layout->part_bytes);
        }
    }
    reduce_part(part.data(), mask, options, progress);
}

// Its gradients are there when the batch is summed up, at the end of backward at the latest.
void Unit::post_to_batch(const std::vector<at::Tensor> &grads)
{
    char *parts = nullptr;
    size_t pitch = 0;
    check(fc_batch_add(shard_, &parts, &pitch));
    for (size_t i = 0; i < grads.size(); i++) {
        if (grads[i].defined()) {
            stage(shard_, i, grads[i].const_data_ptr(), dtype_of(grads[i].scalar_type()),
                  FC_WIRE_REDUCE, FC_TO_ALL, parts, pitch);
            fc_unit_count_present(shard_, i, parts, fc_domain_n_ranks(domain_), pitch);
        }
    }
}

void Unit::finish_batched(const fc_source &sum, const ReduceOptions &options)
{
    write_gradients(shard_, {sum}, options);
}

void Unit::post_messages(const std::vector<at::Tensor> &grads, const ReduceOptions &options,
                         const Progress &progress)
{
    fc_domain *waiting = fc_batch_waiting(domain_);
    if (waiting != nullptr && (moves_frozen_ || !fc_batch_joins(shard_))) {
        progress(waiting);
    }
    if (!moves_frozen_ && fc_batch_admits(shard_)) {
        post_to_batch(grads);
        return;
    }
    const fc_layout *layout = fc_unit_layout(shard_);
    const size_t n_ranks = static_cast<size_t>(layout->n_ranks);
    const size_t bytes = moves_frozen_ ? layout->part_bytes : layout->trainable_part_bytes;
    Scratch parts(n_ranks * bytes);
    Scratch part(bytes);
    std::vector<uint64_t> mask(layout->mask_words);
    // Every rank sends whole sections, zeros for what it has no gradient of: sizes always agree.
    std::memset(parts.data(), 0, n_ranks * bytes);
    for (size_t i = 0; i < grads.size(); i++) {
        if (!grads[i].defined()) {
            continue;
        }
        const fc_section *section = fc_layout_section(layout, &layout->params[i]);
        char *of_ranks = parts.data() + (n_ranks - 1) * section->at;
        stage(shard_, i, grads[i].const_data_ptr(), dtype_of(grads[i].scalar_type()),
              FC_WIRE_REDUCE, FC_TO_ALL, of_ranks, section->bytes);
        fc_unit_count_present(shard_, i, of_ranks, layout->n_ranks, section->bytes);
    }
    check(fc_waits_reduce_scatter(shard_, part.data(), parts.data(), moves_frozen_));
    fc_unit_read_present(shard_, part.data(), bytes, mask.data());
    reduce_part(part.data(), mask, options, progress);
}

// The sum over the shard group, in memory that may be written: to the replicas, or to the shards.
void Unit::reduce_part(char *part, std::vector<uint64_t> &mask, const ReduceOptions &options,
                       const Progress &progress)
{
    const std::vector<fc_source> sources = {{part, mask.data(), FC_WIRE_REDUCE, nullptr}};
    if (replicate_ == nullptr) {
        write_gradients(shard_, sources, options);
    } else if (options.all_reduce && !fc_domain_is_mapped(replicate_domain_)) {
        all_reduce_part(part, mask, options);
    } else {
        reduce_replicas(sources, options, progress);
    }
}

// ---- between replicas (HSDP) ----

// Adds sums of the shard group up in a part whose mask says what it holds.
void Unit::add_up(const std::vector<fc_source> &sources, char *part, std::vector<uint64_t> &mask)
{
    const fc_layout *layout = fc_unit_layout(shard_);
    for (size_t i = 0; i < params_.size(); i++) {
        const fc_param &p = layout->params[i];
        if (p.has_grad &&
            fc_unit_reduce(shard_, sources.data(), static_cast<int>(sources.size()), i,
                           part + p.part_at, p.reduce, 1, has_bit(mask.data(), i))) {
            set_bit(mask, i);
            traffic_.copied += p.chunk_numel * fc_dtype_bytes(p.reduce);
        }
    }
}

// Adds what earlier backwards kept; it is the replicas' turn then.
void Unit::take_partial(char *part, std::vector<uint64_t> &mask)
{
    if (has_partial_sums()) {
        add_up({{partial_.data(), partial_mask_.data(), FC_WIRE_REDUCE, nullptr}}, part, mask);
    }
    count_all_reduction(bytes_of(mask));
    std::fill(partial_mask_.begin(), partial_mask_.end(), 0);
    sums_are_posted_ = false;
}

// Over messages, which move all of the part: zeros for what it does not hold.
void Unit::all_reduce_part(char *part, std::vector<uint64_t> &mask, const ReduceOptions &options)
{
    const fc_layout *layout = fc_unit_layout(shard_);
    take_partial(part, mask);
    for (size_t i = 0; i < params_.size(); i++) {
        if (has_bit(mask.data(), i)) {
            fc_unit_count_present(shard_, i, part, 1, 0);
        }
    }
    check(fc_waits_all_reduce(replicate_, part, moves_frozen_));
    fc_unit_read_present(shard_, part,
                         moves_frozen_ ? layout->part_bytes : layout->trainable_part_bytes,
                         mask.data());
    write_gradients(replicate_, {{part, mask.data(), FC_WIRE_REDUCE, nullptr}}, options);
}

void Unit::post_partial(const Progress &progress)
{
    for (size_t i = 0; i < params_.size(); i++) {
        if (has_bit(partial_mask_.data(), i)) {
            fc_exchange_set_present(replicate_, i);
        }
    }
    const size_t bytes = fc_unit_part_bytes(replicate_, FC_WIRE_REDUCE);
    char *part = reserve(this, replicate_, bytes, FC_WIRE_REDUCE, replicate_domain_, progress);
    std::memcpy(part, partial_.data(), bytes);
    traffic_.copied += bytes;
    fc_exchange_commit(replicate_);
}

// Adds the shard group's sum to what earlier backwards kept, and keeps it or hands it to the
// replicas.
void Unit::reduce_replicas(const std::vector<fc_source> &sources, const ReduceOptions &options,
                           const Progress &progress)
{
    const fc_layout *layout = fc_unit_layout(shard_);
    if (options.all_reduce && !fc_domain_is_mapped(replicate_domain_)) {
        Scratch part(layout->part_bytes);
        std::vector<uint64_t> mask(layout->mask_words);
        std::memset(part.data(), 0, layout->part_bytes);
        add_up(sources, part.data(), mask);
        all_reduce_part(part.data(), mask, options);
        return;
    }
    if (partial_.size() < layout->part_bytes) {
        partial_.resize(layout->part_bytes);
    }
    add_up(sources, partial_.data(), partial_mask_);
    if (!options.all_reduce) {
        if (fc_domain_is_mapped(replicate_domain_) && fc_domain_n_ranks(replicate_domain_) > 1) {
            fc_exchange_hold(replicate_);
        }
        return;
    }
    count_all_reduction(bytes_of(partial_mask_));
    if (fc_domain_n_ranks(replicate_domain_) == 1) {
        write_gradients(replicate_,
                        {{partial_.data(), partial_mask_.data(), FC_WIRE_REDUCE, nullptr}},
                        options);
    } else {
        post_partial(progress);
    }
    std::fill(partial_mask_.begin(), partial_mask_.end(), 0);
    sums_are_posted_ = false;
}

void Unit::finish(fc_unit *lane, const ReduceOptions &options, const Progress &progress)
{
    const bool is_shard = lane == shard_;
    std::vector<fc_source> sources(
        static_cast<size_t>(fc_domain_n_ranks(is_shard ? domain_ : replicate_domain_)));
    fc_exchange_sources(lane, sources.data());
    Lent lent;
    if (is_shard && lender_ == this) {
        // Taken: hooks that run below may let another thread post.
        lent = std::exchange(lent_, Lent());
        lender_ = nullptr;
        sources[static_cast<size_t>(fc_domain_rank(domain_))].grads = lent.data.data();
    }
    if (is_shard && replicate_ != nullptr) {
        reduce_replicas(sources, options, progress);
    } else {
        write_gradients(lane, sources, options);
    }
    fc_exchange_consume(lane);
}

} // namespace fc
