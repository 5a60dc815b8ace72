/* Sums of a shard group between its replicas (HSDP), and those that wait for a later backward. */
#include "engine/reduction_private.h"

#include "kernels/kernels.h"

#include <string.h>

/* What the replicas sum up of a parameter, without padding. */
static size_t bytes_of(const fc_param *p)
{
    return p->outer * p->own_rows * p->inner * fc_dtype_bytes(p->reduce);
}

static void count(fc_reduction *r, const uint64_t *mask)
{
    const uint64_t n = (uint64_t)r->replicate->domain->n_ranks;
    size_t bytes = 0;

    for (size_t i = 0; i < r->shard->layout.n_params; i++) {
        bytes += has_bit(mask, i) ? bytes_of(&r->shard->params[i]) : 0;
    }
    r->traffic.all_reductions += n > 1;
    r->traffic.all_reduced += 2 * (n - 1) * bytes / n;
}

fc_status replicas_submit(fc_reduction *r, const fc_gradient *grads)
{
    fc_unit *replicate = r->replicate;
    const fc_layout *layout = &replicate->layout;
    const fc_wire wire = reduction_wire(layout, grads);
    size_t part_bytes;
    char *part = NULL;

    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            fc_exchange_set_present(replicate, i);
        }
    }
    count(r, replicate->mask);
    part_bytes = fc_unit_part_bytes(replicate, wire);
    FC_TRY(reduction_reserve(r, replicate, part_bytes, wire, &part));
    for (size_t i = 0; i < layout->n_params; i++) {
        if (grads[i].data != NULL) {
            reduction_stage(r, replicate, i, &grads[i], wire, FC_TO_ALL, part, part_bytes);
        }
    }
    fc_exchange_commit(replicate);
    r->is_submitted = false;
    return FC_OK;
}

/* Adds sums of the shard group up in a part whose mask says what it holds. */
static void add_up(fc_reduction *r, const fc_source *sources, int n_sources, char *part,
                   uint64_t *mask)
{
    for (size_t i = 0; i < r->shard->layout.n_params; i++) {
        const fc_param *p = &r->shard->params[i];

        if (p->has_grad && fc_unit_reduce(r->shard, sources, n_sources, i, part + p->part_at,
                                          p->reduce, 1, has_bit(mask, i))) {
            set_bit(mask, i);
            r->traffic.copied += p->chunk_numel * fc_dtype_bytes(p->reduce);
        }
    }
}

static void clear(fc_reduction *r)
{
    memset(r->mask, 0, r->shard->layout.mask_words * sizeof(uint64_t));
}

/* Over messages, which move all of the part: zeros for what it does not hold. Adds what earlier
 * backwards kept. */
static fc_status all_reduce(fc_reduction *r, const scratch_part *sum,
                            const fc_reduce_options *options)
{
    const fc_layout *layout = &r->shard->layout;
    const fc_source kept = {r->partial, r->mask, FC_WIRE_REDUCE, NULL};
    const fc_source source = {sum->data, sum->mask, FC_WIRE_REDUCE, NULL};
    fc_present present = {.layout = layout, .frozen = r->moves_frozen};

    if (fc_reduction_has_sums(r)) {
        add_up(r, &kept, 1, sum->data, sum->mask);
    }
    count(r, sum->mask);
    clear(r);
    r->is_submitted = false;
    for (size_t i = 0; i < layout->n_params; i++) {
        if (has_bit(sum->mask, i)) {
            fc_unit_count_present(r->shard, i, sum->data, 1, 0);
        }
    }
    if (r->shard->domain->is_packed) {
        present.print = reduction_print(r, sum->mask);
        present.mask = sum->mask;
    }
    FC_TRY(fc_waits_all_reduce(r->replicate, sum->data, &present));
    fc_unit_read_present(r->shard, sum->data,
                         r->moves_frozen ? layout->part_bytes : layout->trainable_part_bytes,
                         sum->mask);
    return reduction_write(r, r->replicate, &source, 1, options);
}

fc_status replicas_reduce_part(fc_reduction *r, const scratch_part *sum,
                               const fc_reduce_options *options)
{
    const fc_source source = {sum->data, sum->mask, FC_WIRE_REDUCE, NULL};

    return options->all_reduce && !r->replicate->domain->is_mapped
               ? all_reduce(r, sum, options)
               : replicas_reduce(r, &source, 1, options);
}

static fc_status submit_partial(fc_reduction *r)
{
    const size_t n_params = r->shard->layout.n_params;
    size_t bytes;
    char *part = NULL;

    for (size_t i = 0; i < n_params; i++) {
        if (has_bit(r->mask, i)) {
            fc_exchange_set_present(r->replicate, i);
        }
    }
    bytes = fc_unit_part_bytes(r->replicate, FC_WIRE_REDUCE);
    FC_TRY(reduction_reserve(r, r->replicate, bytes, FC_WIRE_REDUCE, &part));
    memcpy(part, r->partial, bytes);
    r->traffic.copied += bytes;
    fc_exchange_commit(r->replicate);
    return FC_OK;
}

static fc_status make_partial(fc_reduction *r)
{
    if (r->partial == NULL) {
        r->partial = fc_alloc(1, r->shard->layout.part_bytes);
    }
    return r->partial != NULL ? FC_OK
                              : fc_fail(FC_ERR_NOMEM, "%zu bytes for partial sums of unit '%s'",
                                        r->shard->layout.part_bytes, r->shard->name);
}

/* In shared memory they wait, or go to the replicas. */
static fc_status keep_or_submit(fc_reduction *r, const fc_source *sources, int n_sources,
                                const fc_reduce_options *options)
{
    const fc_domain *replicas = r->replicate->domain;
    const fc_source kept = {r->partial, r->mask, FC_WIRE_REDUCE, NULL};

    add_up(r, sources, n_sources, r->partial, r->mask);
    if (!options->all_reduce) {
        if (replicas->is_mapped && replicas->n_ranks > 1) {
            fc_exchange_accumulate(r->replicate);
        }
        return FC_OK;
    }
    count(r, r->mask);
    FC_TRY(replicas->n_ranks == 1 ? reduction_write(r, r->replicate, &kept, 1, options)
                                  : submit_partial(r));
    clear(r);
    r->is_submitted = false;
    return FC_OK;
}

fc_status replicas_reduce(fc_reduction *r, const fc_source *sources, int n_sources,
                          const fc_reduce_options *options)
{
    scratch_part sum;
    fc_status status;

    if (!options->all_reduce || r->replicate->domain->is_mapped) {
        FC_TRY(make_partial(r));
        return keep_or_submit(r, sources, n_sources, options);
    }
    FC_TRY(reduction_scratch(r, r->shard->layout.part_bytes, &sum));
    add_up(r, sources, n_sources, sum.data, sum.mask);
    status = all_reduce(r, &sum, options);
    reduction_give_back(r, &sum);
    return status;
}

/* ---- partial sums ---- */

bool fc_reduction_has_sums(const fc_reduction *r)
{
    for (size_t i = 0; r->replicate != NULL && i < r->shard->layout.mask_words; i++) {
        if (r->mask[i] != 0) {
            return true;
        }
    }
    return false;
}

bool fc_reduction_has_sum(const fc_reduction *r, size_t param)
{
    return has_bit(r->mask, param);
}

const void *fc_reduction_sum(const fc_reduction *r, size_t param)
{
    return r->partial != NULL && has_bit(r->mask, param)
               ? r->partial + r->shard->params[param].part_at
               : NULL;
}

fc_status fc_reduction_inherit(fc_reduction *r, const fc_reduction *former)
{
    const fc_layout *layout = &r->shard->layout;

    r->keeps_frozen = former->keeps_frozen;
    if (!fc_reduction_has_sums(former)) {
        return FC_OK;
    }
    if (former->partial != NULL) {
        FC_TRY(make_partial(r));
    }
    memcpy(r->mask, former->mask, layout->mask_words * sizeof(uint64_t));
    for (size_t i = 0; i < layout->n_params; i++) {
        const fc_param *to = &layout->params[i];
        const fc_param *from = &former->shard->params[i];
        const void *sum = fc_reduction_sum(former, i);

        if (sum != NULL) {
            fc_kern_cast(from->reduce, to->reduce)(r->partial + to->part_at, sum, to->chunk_numel);
        }
    }
    return FC_OK;
}

void fc_reduction_drop_sums(fc_reduction *r)
{
    clear(r);
    r->is_submitted = r->keeps_frozen = false;
}

void fc_reduction_trim(fc_reduction *r)
{
    if (!fc_reduction_has_sums(r)) {
        fc_free(r->partial);
        r->partial = NULL;
    }
}

size_t fc_reduction_sum_bytes(const fc_reduction *r)
{
    return r->partial != NULL ? r->shard->layout.part_bytes : 0;
}
