/* Submitting gradients to the shard group, and finishing what is there; see reduction.h. */
#include "engine/reduction_private.h"

#include <stdio.h>
#include <string.h>

/* Up to here one sum over whole parts is worth more than the copy of the own part. */
#define BORROWED_BYTES_MIN ((size_t)64 << 10)

/* ---- scratch memory ---- */

/* Zeros in its mask alone. */
static fc_status take_scratch(fc_reduction *r, size_t bytes, scratch_part *out)
{
    const size_t mask_bytes = r->shard->layout.mask_words * sizeof(uint64_t);
    const size_t mask_at = fc_round_up(bytes, FC_ALIGN);
    void *memory = NULL;

    FC_TRY(fc_slots_acquire(r->scratch, mask_at + mask_bytes, &memory));
    *out = (scratch_part){.data = memory, .mask = (void *)((char *)memory + mask_at)};
    memset(out->mask, 0, mask_bytes);
    return FC_OK;
}

fc_status reduction_scratch(fc_reduction *r, size_t bytes, scratch_part *out)
{
    FC_TRY(take_scratch(r, bytes, out));
    memset(out->data, 0, bytes);
    return FC_OK;
}

void reduction_give_back(fc_reduction *r, scratch_part *part)
{
    fc_slots_release(r->scratch, part->data);
}

/* ---- borrowed gradients ---- */

static void release(fc_reduction *r, borrowed *of)
{
    r->ops->release(of->memory);
    *of = (borrowed){0};
}

/* Takes them from the domain; the caller releases them. */
static borrowed take_borrowed(fc_reduction *r)
{
    const borrowed taken = r->borrowed;

    r->borrowed = (borrowed){0};
    r->shard->domain->borrower = NULL;
    return taken;
}

/* Writes the part for this rank itself after all. */
static void return_borrowed(fc_domain *domain)
{
    fc_reduction *r = domain->borrower;
    borrowed taken;

    if (r == NULL) {
        return;
    }
    taken = take_borrowed(r);
    for (size_t i = 0; i < r->shard->layout.n_params; i++) {
        if (taken.grads[i].data != NULL) {
            reduction_stage(r, r->shard, i, &taken.grads[i], taken.wire, FC_TO_SELF, taken.parts,
                            taken.part_bytes);
        }
    }
    release(r, &taken);
}

void fc_reduction_return_large(fc_domain *domain)
{
    if (domain->borrower != NULL && domain->borrower->borrowed.bytes > FC_BORROWED_BYTES_MAX) {
        return_borrowed(domain);
    }
}

void reduction_forget_borrowed(fc_domain *domain)
{
    fc_reduction *r = domain->borrower;

    if (r != NULL) {
        borrowed taken = take_borrowed(r);

        release(r, &taken);
    }
}

/* True if nobody else can write to the gradients, which are then read later than submitted. */
static bool may_borrow(const fc_layout *layout, const fc_gradient *grads, fc_wire wire,
                       size_t *bytes_out)
{
    size_t bytes = 0;

    for (size_t i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];

        if (grads[i].data == NULL) {
            continue;
        }
        if (grads[i].dtype != fc_wire_dtype(p, wire) || !grads[i].is_exclusive) {
            return false;
        }
        bytes += p->outer * p->rows * p->inner * fc_dtype_bytes(grads[i].dtype);
    }
    *bytes_out = bytes;
    return bytes > BORROWED_BYTES_MIN;
}

/* ---- submitting ---- */

void reduction_stage(fc_reduction *r, fc_unit *unit, size_t param, const fc_gradient *grad,
                     fc_wire wire, fc_receivers receivers, char *parts, size_t part_bytes)
{
    const fc_param *p = &unit->params[param];
    const size_t rows = receivers == FC_TO_ALL     ? p->rows
                        : receivers == FC_TO_PEERS ? p->rows - p->own_rows
                                                   : p->own_rows;

    r->traffic.copied += p->outer * rows * p->inner * fc_dtype_bytes(fc_wire_dtype(p, wire));
    fc_unit_stage(unit, param, grad->data, grad->dtype, wire, receivers, parts, part_bytes);
}

fc_wire reduction_wire(const fc_layout *layout, const fc_gradient *grads)
{
    const fc_gradient *first = NULL;

    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data == NULL) {
            continue;
        }
        first = first == NULL ? &grads[i] : first;
        if (grads[i].dtype != first->dtype) {
            return FC_WIRE_REDUCE;
        }
    }
    return first != NULL ? fc_layout_wire(layout, first->dtype) : FC_WIRE_REDUCE;
}

static fc_status make_room(fc_unit *unit, size_t part_bytes, fc_wire wire, char **parts_out)
{
    fc_status status;

    FC_TRY(fc_reduction_finish_ready(unit->domain, FC_SEARCH_OWN));
    return_borrowed(unit->domain); /* of a submission meanwhile, by another thread */
    status = fc_exchange_reserve(unit, part_bytes, wire, parts_out);
    if (status != FC_AGAIN) {
        return status;
    }
    FC_TRY(fc_exchange_make_way(unit));
    return fc_exchange_reserve(unit, part_bytes, wire, parts_out);
}

fc_status reduction_reserve(fc_reduction *r, fc_unit *unit, size_t part_bytes, fc_wire wire,
                            char **parts_out)
{
    fc_status status = fc_exchange_reserve(unit, part_bytes, wire, parts_out);

    while (status == FC_AGAIN) {
        r->ops->wait(owner_of(r), true);
        status = make_room(unit, part_bytes, wire, parts_out);
        r->ops->wait(owner_of(r), false);
    }
    return status;
}

uint64_t reduction_print(const fc_reduction *r, const uint64_t *mask)
{
    uint64_t print = 1;

    for (size_t i = 0; i < r->shard->layout.mask_words; i++) {
        print = fc_fingerprint(print, mask[i]);
    }
    return print;
}

static fc_status finish(fc_reduction *r, fc_unit *unit, const fc_reduce_options *options);

static fc_status submit_mapped(fc_reduction *r, const fc_gradient *grads, void *memory,
                               const fc_reduce_options *options, bool *is_borrowed)
{
    fc_unit *shard = r->shard;
    const fc_layout *layout = &shard->layout;
    const fc_wire wire = reduction_wire(layout, grads);
    size_t bytes = 0, part_bytes;
    char *parts = NULL;

    return_borrowed(shard->domain);
    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            fc_exchange_set_present(shard, i);
        }
    }
    *is_borrowed = may_borrow(layout, grads, wire, &bytes);
    part_bytes = fc_unit_part_bytes(shard, wire);
    FC_TRY(reduction_reserve(r, shard, part_bytes, wire, &parts));
    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            reduction_stage(r, shard, i, &grads[i], wire, *is_borrowed ? FC_TO_PEERS : FC_TO_ALL,
                            parts, part_bytes);
        }
    }
    fc_exchange_commit(shard);
    if (*is_borrowed) {
        r->borrowed = (borrowed){grads, memory, bytes, wire, parts, part_bytes};
        shard->domain->borrower = r;
    }
    if (r->replicate != NULL && !r->replicate->domain->is_mapped) {
        /* The replicas' collectives order the ranks, so every rank must reach them in the order of
         * submissions. */
        FC_TRY(fc_exchange_await(shard));
        return finish(r, shard, options);
    }
    return FC_OK;
}

/* Straight to the shards. */
static fc_status write_alone(fc_reduction *r, const fc_gradient *grads,
                             const fc_reduce_options *options)
{
    FC_TRY(r->ops->prepare(owner_of(r)));
    for (size_t i = 0; i < r->shard->layout.n_params; i++) {
        const fc_param *p = &r->shard->params[i];
        bool accumulate = false;
        void *target = NULL;

        if (grads[i].data != NULL) {
            FC_TRY(r->ops->target(owner_of(r), i, &target, &accumulate));
            fc_reduce_own(grads[i].data, grads[i].dtype, target, p->grad,
                          p->outer * p->rows * p->inner, options->divisor, accumulate);
            FC_TRY(r->ops->assign(owner_of(r), i, options));
        }
    }
    return FC_OK;
}

/* The sum over the shard group, in memory that may be written. */
static fc_status reduce_part(fc_reduction *r, const scratch_part *sum,
                             const fc_reduce_options *options)
{
    const fc_source source = {sum->data, sum->mask, FC_WIRE_REDUCE, NULL};

    return r->replicate == NULL ? reduction_write(r, r->shard, &source, 1, options)
                                : replicas_reduce_part(r, sum, options);
}

/* One rank: its gradient is the sum. */
static fc_status submit_alone(fc_reduction *r, const fc_gradient *grads, void *memory,
                              const fc_reduce_options *options, bool *is_borrowed)
{
    const fc_layout *layout = &r->shard->layout;
    bool needs_cast = false;
    scratch_part sum;
    fc_status status;

    (void)memory;
    *is_borrowed = false;
    for (size_t i = 0; i < layout->n_params; i++) {
        needs_cast =
            needs_cast || (grads[i].data != NULL && grads[i].dtype != layout->params[i].reduce);
    }
    if (r->replicate == NULL && !needs_cast) {
        return write_alone(r, grads, options);
    }
    if (r->replicate != NULL && options->all_reduce && !fc_reduction_has_sums(r) &&
        r->replicate->domain->is_mapped && r->replicate->domain->n_ranks > 1) {
        return replicas_submit(r, grads);
    }
    FC_TRY(reduction_scratch(r, layout->part_bytes, &sum));
    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            set_bit(sum.mask, i);
            reduction_stage(r, r->shard, i, &grads[i], FC_WIRE_REDUCE, FC_TO_ALL, sum.data,
                            layout->part_bytes);
        }
    }
    status = reduce_part(r, &sum, options);
    reduction_give_back(r, &sum);
    return status;
}

/* Its gradients are there when the batch is summed up, at the end of backward at the latest. */
static fc_status add_to_batch(fc_reduction *r, const fc_gradient *grads)
{
    char *parts = NULL;
    size_t pitch = 0;

    FC_TRY(fc_batch_add(r->shard, &parts, &pitch));
    for (size_t i = 0; i < r->shard->layout.n_params; i++) {
        if (grads[i].data != NULL) {
            reduction_stage(r, r->shard, i, &grads[i], FC_WIRE_REDUCE, FC_TO_ALL, parts, pitch);
            fc_unit_count_present(r->shard, i, parts, r->shard->layout.n_ranks, pitch);
        }
    }
    return FC_OK;
}

/* Zeros where no gradient is written. Parameters lie in a section in their order. */
static void clear_rest(const fc_layout *layout, const fc_gradient *grads, const fc_section *section,
                       char *parts)
{
    for (int rank = 0; rank < layout->n_ranks; rank++) {
        char *row = parts + (size_t)layout->n_ranks * section->at + (size_t)rank * section->bytes;
        size_t at = 0;

        for (size_t i = 0; i < layout->n_params; i++) {
            const fc_param *p = &layout->params[i];

            if (grads[i].data != NULL && fc_layout_section(layout, p) == section) {
                memset(row + at, 0, p->part_at - section->at - at);
                at = p->part_at - section->at +
                     p->outer * fc_layout_rows(p, rank, layout->n_ranks) * p->inner *
                         fc_dtype_bytes(p->reduce);
            }
        }
        memset(row + at, 0, section->bytes - at);
    }
}

static void clear_rests(const fc_layout *layout, const fc_gradient *grads,
                        const fc_section *sections, size_t n, char *parts)
{
    for (size_t i = 0; i < n; i++) {
        clear_rest(layout, grads, &sections[i], parts);
    }
}

/* Whole sections, zeros for what a rank has no gradient of: sizes always agree. */
static void stage_sections(fc_reduction *r, const fc_gradient *grads, char *parts)
{
    const fc_layout *layout = &r->shard->layout;

    clear_rests(layout, grads, layout->sections, layout->n_sections, parts);
    if (r->moves_frozen) {
        clear_rests(layout, grads, layout->frozen, layout->n_frozen, parts);
    }
    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            const fc_section *section = fc_layout_section(layout, &layout->params[i]);
            char *of_ranks = parts + ((size_t)layout->n_ranks - 1) * section->at;

            reduction_stage(r, r->shard, i, &grads[i], FC_WIRE_REDUCE, FC_TO_ALL, of_ranks,
                            section->bytes);
            fc_unit_count_present(r->shard, i, of_ranks, layout->n_ranks, section->bytes);
        }
    }
}

/* Where nothing counts them on the way all ranks must have gradients of the same parameters, which
 * a fingerprint tells. */
static uint64_t note_present(const fc_reduction *r, const fc_gradient *grads, uint64_t *mask)
{
    for (size_t i = 0; i < r->shard->layout.n_params; i++) {
        if (grads[i].data != NULL) {
            set_bit(mask, i);
        }
    }
    return reduction_print(r, mask);
}

static fc_status sum_at_once(fc_reduction *r, const fc_gradient *grads, scratch_part *parts,
                             const fc_reduce_options *options)
{
    const fc_layout *layout = &r->shard->layout;
    const size_t bytes = r->moves_frozen ? layout->part_bytes : layout->trainable_part_bytes;
    fc_present present = {.layout = layout, .frozen = r->moves_frozen};
    scratch_part sum;
    fc_status status;

    FC_TRY(reduction_scratch(r, bytes, &sum));
    if (r->shard->domain->is_packed) {
        present.print = note_present(r, grads, sum.mask);
        present.mask = sum.mask;
    }
    status = fc_waits_reduce_scatter(r->shard, sum.data, parts->data, &present);
    if (status == FC_OK) {
        fc_unit_read_present(r->shard, sum.data, bytes, sum.mask);
        status = reduce_part(r, &sum, options);
    }
    reduction_give_back(r, &sum);
    return status;
}

static fc_status submit_messages(fc_reduction *r, const fc_gradient *grads, void *memory,
                                 const fc_reduce_options *options, bool *is_borrowed)
{
    const fc_layout *layout = &r->shard->layout;
    const size_t bytes = r->moves_frozen ? layout->part_bytes : layout->trainable_part_bytes;
    fc_domain *waiting = fc_batch_waiting(r->shard->domain);
    scratch_part parts;
    fc_status status;

    (void)memory;
    *is_borrowed = false;
    if (waiting != NULL && (r->moves_frozen || !fc_batch_joins(r->shard))) {
        FC_TRY(fc_reduction_finish_ready(waiting, FC_SEARCH_OWN));
    }
    if (!r->moves_frozen && fc_batch_admits(r->shard)) {
        return add_to_batch(r, grads);
    }
    FC_TRY(reduction_end_begun(r->shard->domain));
    FC_TRY(take_scratch(r, (size_t)layout->n_ranks * bytes, &parts));
    stage_sections(r, grads, parts.data);
    status = reduction_begin_sum(r, &parts, options);
    if (status == FC_AGAIN) {
        status = sum_at_once(r, grads, &parts, options);
    }
    if (parts.data != NULL) {
        reduction_give_back(r, &parts);
    }
    return status;
}

/* Whether collectives over messages have to move parameters that were frozen at set-up, too.
 * Decided from what all ranks have alike. */
static bool moves_frozen(const fc_reduction *r, const fc_gradient *grads)
{
    const fc_layout *layout = &r->shard->layout;

    for (size_t i = 0; layout->n_frozen > 0 && i < layout->n_params; i++) {
        if ((grads[i].data != NULL || grads[i].is_wanted) && layout->params[i].has_grad &&
            !layout->params[i].trainable) {
            return true;
        }
    }
    return false;
}

static void count(fc_reduction *r, const fc_gradient *grads)
{
    const fc_layout *layout = &r->shard->layout;

    if (layout->n_ranks == 1) {
        return;
    }
    /* What a batch does counts for its first unit. */
    r->traffic.reductions += r->moves_frozen || !fc_batch_joins(r->shard);
    for (size_t i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];

        if (grads[i].data != NULL) {
            r->traffic.reduced += (size_t)(layout->n_ranks - 1) * p->outer * p->own_rows *
                                  p->inner * fc_dtype_bytes(p->reduce);
        }
    }
}

static void begin(fc_reduction *r, const fc_gradient *grads, const fc_reduce_options *options)
{
    r->moves_frozen = r->keeps_frozen || moves_frozen(r, grads);
    r->keeps_frozen = r->moves_frozen && r->replicate != NULL && !options->all_reduce;
    count(r, grads);
    r->is_submitted = options->all_reduce;
}

fc_status fc_reduction_submit(fc_reduction *r, const fc_gradient *grads, void *memory,
                              const fc_reduce_options *options)
{
    bool is_borrowed = false;
    fc_status status;

    begin(r, grads, options);
    status = r->submit(r, grads, memory, options, &is_borrowed);
    if (!is_borrowed) {
        r->ops->release(memory);
    }
    return status;
}

bool fc_reduction_announce(fc_reduction *r, const fc_gradient *grads,
                           const fc_reduce_options *options, uint64_t *mask_out,
                           uint64_t *print_out)
{
    const fc_layout *layout = &r->shard->layout;

    begin(r, grads, options);
    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            set_bit(r->mask, i);
        }
    }
    memcpy(mask_out, r->mask, layout->mask_words * sizeof(uint64_t));
    *print_out = reduction_print(r, r->mask);
    if (r->replicate != NULL && !options->all_reduce) {
        return false;
    }
    memset(r->mask, 0, layout->mask_words * sizeof(uint64_t));
    r->is_submitted = false;
    return true;
}

bool fc_reduction_is_submitted(const fc_reduction *r)
{
    return r->is_submitted;
}

void fc_reduction_forget(fc_reduction *r)
{
    r->is_submitted = false;
}

/* ---- finishing ---- */

/* The common case: no shard has a gradient, all ranks used all parameters. One kernel call. */
static fc_status write_flat(fc_reduction *r, fc_unit *unit, const fc_source *sources, int n_sources,
                            const fc_reduce_options *options, bool *is_written)
{
    void *flat = NULL;

    *is_written = false;
    if (!unit->layout.is_uniform) {
        return FC_OK;
    }
    FC_TRY(r->ops->flat(owner_of(r), &flat));
    if (flat == NULL || !fc_unit_reduce_all(unit, sources, n_sources, flat, options->divisor)) {
        return FC_OK;
    }
    *is_written = true;
    return r->ops->assign_flat(owner_of(r), options);
}

static bool is_in_any(const fc_source *sources, int n_sources, size_t param)
{
    for (int i = 0; i < n_sources; i++) {
        if (sources[i].part != NULL && has_bit(sources[i].mask, param)) {
            return true;
        }
    }
    return false;
}

/* `peer` negative: it is not known which one. */
static fc_status fail_frozen(fc_reduction *r, const fc_unit *unit, int peer, size_t param)
{
    fc_domain *domain = unit->domain;
    char name[REASON_BYTES / 4], text[REASON_BYTES], who[32] = "another rank";

    r->ops->name(owner_of(r), param, name, sizeof(name));
    if (peer >= 0) {
        (void)snprintf(who, sizeof(who), "rank %d",
                       fc_transport_global_rank(domain->transport, peer));
    }
    (void)snprintf(text, sizeof(text),
                   "parameter '%s' of unit %s is frozen (requires_grad=False) on rank %d, and %s "
                   "has a gradient of it in step %llu: freeze and free parameters alike on all "
                   "ranks, before the forward",
                   name, unit->name, fc_transport_global_rank(domain->transport, domain->rank), who,
                   (unsigned long long)(domain->clock >> STEP_SHIFT));
    return apart_accuse_all(domain, text);
}

/* What a peer trains and this rank does not would get a gradient here that its optimizer does not
 * look for: the shards would be of several models. */
static fc_status check_frozen(fc_reduction *r, const fc_unit *unit, const fc_source *sources,
                              int n_sources)
{
    const size_t n = unit->layout.n_params;
    const int own = unit->domain->is_mapped ? unit->domain->rank : -1;

    for (size_t i = r->ops->find_frozen(owner_of(r), 0); i < n;
         i = r->ops->find_frozen(owner_of(r), i + 1)) {
        int peer = n_sources - 1;

        if (!is_in_any(sources, n_sources, i)) {
            continue;
        }
        if (own >= 0 && unit == r->shard && is_in_any(&sources[own], 1, i)) {
            continue; /* an earlier one of this backward's submissions has brought it */
        }
        while (peer >= 0 && (own < 0 || peer == own || !is_in_any(&sources[peer], 1, i))) {
            peer--;
        }
        return fail_frozen(r, unit, peer, i);
    }
    return FC_OK;
}

fc_status reduction_write(fc_reduction *r, fc_unit *unit, const fc_source *sources, int n_sources,
                          const fc_reduce_options *options)
{
    bool is_written;

    FC_TRY(check_frozen(r, unit, sources, n_sources));
    FC_TRY(write_flat(r, unit, sources, n_sources, options, &is_written));
    if (is_written) {
        return FC_OK;
    }
    FC_TRY(r->ops->prepare(owner_of(r)));
    for (size_t i = 0; i < unit->layout.n_params; i++) {
        const fc_param *p = &unit->params[i];
        bool accumulate = false;
        void *target = NULL;

        if (p->has_grad && is_in_any(sources, n_sources, i)) {
            FC_TRY(r->ops->target(owner_of(r), i, &target, &accumulate));
            (void)fc_unit_reduce(unit, sources, n_sources, i, target, p->grad, options->divisor,
                                 accumulate);
            FC_TRY(r->ops->assign(owner_of(r), i, options));
        }
    }
    return FC_OK;
}

/* Adds up what `unit` (the shard's or the replicas') has ready. */
static fc_status finish(fc_reduction *r, fc_unit *unit, const fc_reduce_options *options)
{
    fc_source sources[FC_MAX_RANKS];
    const bool is_shard = unit == r->shard;
    borrowed taken = {0};
    fc_status status;

    FC_TRY(fc_exchange_sources(unit, sources));
    if (is_shard && unit->domain->borrower == r) {
        /* Taken: hooks that run below may let another thread submit. */
        taken = take_borrowed(r);
        sources[unit->domain->rank].grads = taken.grads;
    }
    status = is_shard && r->replicate != NULL
                 ? replicas_reduce(r, sources, unit->domain->n_ranks, options)
                 : reduction_write(r, unit, sources, unit->domain->n_ranks, options);
    if (status == FC_OK) {
        fc_exchange_consume(unit);
    }
    if (taken.memory != NULL) {
        release(r, &taken);
    }
    return status;
}

/* Sums up what waits in the domain for others to share its collective. */
static fc_status finish_batch(fc_domain *domain)
{
    fc_reduce_options options;
    fc_status status = FC_OK;
    fc_batch *batch = NULL;
    fc_source sum;
    fc_unit *unit;

    FC_TRY(fc_batch_reduce(domain, &batch));
    while (batch != NULL && status == FC_OK && (unit = fc_batch_next(batch, &sum)) != NULL) {
        fc_reduction *r = unit->reduction;

        if (r != NULL) {
            status = r->ops->options(owner_of(r), &options);
            status = status == FC_OK ? reduction_write(r, r->shard, &sum, 1, &options) : status;
        }
    }
    if (batch != NULL) {
        fc_batch_give_back(batch);
    }
    return status;
}

fc_status fc_reduction_finish_ready(fc_domain *domain, fc_search search)
{
    fc_reduce_options options;
    fc_unit *unit = NULL;

    if (!domain->is_mapped) {
        if (search == FC_SEARCH_OLDEST) {
            return FC_OK;
        }
        FC_TRY(reduction_end_begun(domain));
        return finish_batch(domain);
    }
    for (;;) {
        FC_TRY(fc_exchange_next(domain, search, &unit));
        if (unit == NULL) {
            return FC_OK;
        }
        if (unit->reduction == NULL) {
            fc_exchange_consume(unit);
            continue;
        }
        FC_TRY(unit->reduction->ops->options(owner_of(unit->reduction), &options));
        FC_TRY(finish(unit->reduction, unit, &options));
    }
}

static fc_status finish_kind(fc_domain *const *domains, size_t n_domains, bool are_replicate)
{
    for (size_t i = 0; i < n_domains; i++) {
        if (fc_domain_is_replicate(domains[i]) == are_replicate) {
            fc_domain_mark_closed(domains[i]);
        }
    }
    for (size_t i = 0; i < n_domains; i++) {
        if (fc_domain_is_replicate(domains[i]) == are_replicate) {
            FC_TRY(fc_reduction_finish_ready(domains[i], FC_SEARCH_ALL));
        }
    }
    return FC_OK;
}

fc_status fc_reduction_finish_all(fc_domain *const *domains, size_t n_domains)
{
    FC_TRY(finish_kind(domains, n_domains, false));
    return finish_kind(domains, n_domains, true);
}

/* ---- life ---- */

fc_status fc_reduction_create(fc_unit *shard, fc_unit *replicate, fc_slots *scratch,
                              const fc_reduction_ops *ops, fc_reduction **out)
{
    fc_reduction *r = fc_alloc(1, sizeof(*r));
    uint64_t *mask = fc_alloc(shard->layout.mask_words, sizeof(uint64_t));

    if (r == NULL || mask == NULL) {
        fc_free(r);
        fc_free(mask);
        return fc_fail(FC_ERR_NOMEM, "no memory for the reductions of unit '%s'", shard->name);
    }
    *r = (fc_reduction){.shard = shard,
                        .replicate = replicate,
                        .scratch = scratch,
                        .ops = ops,
                        .mask = mask,
                        .submit = fc_domain_is_visible(shard->domain) ? submit_messages
                                  : shard->domain->n_ranks == 1       ? submit_alone
                                  : shard->domain->is_mapped          ? submit_mapped
                                                                      : submit_messages};
    *out = r;
    return FC_OK;
}

void fc_reduction_accumulate(fc_reduction *r)
{
    if (r->shard->domain->is_mapped && r->shard->domain->n_ranks > 1) {
        fc_exchange_accumulate(r->shard);
    }
}

void fc_reduction_attach(fc_reduction *r, void *owner)
{
    fc_unit *const units[] = {r->shard, r->replicate};

    for (size_t i = 0; i < 2; i++) {
        if (units[i] != NULL) {
            units[i]->owner = owner;
            units[i]->reduction = owner != NULL ? r : NULL;
        }
    }
}

void fc_reduction_destroy(fc_reduction *r)
{
    if (r == NULL) {
        return;
    }
    if (r->shard->domain->borrower == r) {
        reduction_forget_borrowed(r->shard->domain);
    }
    if (r->shard->domain->summing == r) {
        reduction_drop_begun(r->shard->domain);
    }
    fc_free(r->partial);
    fc_free(r->mask);
    fc_free(r);
}

fc_traffic *fc_reduction_traffic(fc_reduction *r)
{
    return &r->traffic;
}

void fc_traffic_add(fc_traffic *to, const fc_traffic *more)
{
    to->gathers += more->gathers;
    to->gathered += more->gathered;
    to->reductions += more->reductions;
    to->reduced += more->reduced;
    to->all_reductions += more->all_reductions;
    to->all_reduced += more->all_reduced;
    to->copied += more->copied;
    to->unshards += more->unshards;
}
