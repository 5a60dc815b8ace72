/* Sums over messages that travel while backward goes on; see [Note: what travels meanwhile]. */
#include "engine/reduction_private.h"

static bool may_begin(const fc_reduction *r)
{
    const fc_domain *domain = r->shard->domain;
    const fc_message_ops *messages = fc_transport_messages(domain->transport);

    return messages->sum_begin != NULL && r->replicate == NULL && !domain->is_packed &&
           domain->n_ranks > 1 && domain->batch_limit > 0 && !r->shard->is_observed &&
           !r->moves_frozen && r->shard->layout.n_sections == 1;
}

fc_status reduction_begin_sum(fc_reduction *r, scratch_part *parts,
                              const fc_reduce_options *options)
{
    const fc_layout *layout = &r->shard->layout;
    const fc_dtype dtype = layout->sections[0].reduce;
    scratch_part sum;
    bool is_lent = false;
    fc_status st;

    if (!may_begin(r)) {
        return FC_AGAIN;
    }
    FC_TRY(reduction_scratch(r, layout->trainable_part_bytes, &sum));
    st = waits_sum_begin(r->shard, parts->data,
                         layout->trainable_part_bytes / fc_dtype_bytes(dtype), dtype, &is_lent);
    if (st != FC_OK) {
        reduction_give_back(r, &sum);
        return st;
    }
    r->begun = (begun_sum){.sum = sum, .options = *options};
    if (is_lent) {
        r->begun.parts = *parts;
        *parts = (scratch_part){0};
    }
    r->shard->domain->summing = r;
    return FC_OK;
}

/* Takes it from the domain; the caller gives its memory back. */
static begun_sum take_begun(fc_domain *domain)
{
    const begun_sum taken = domain->summing->begun;

    domain->summing->begun = (begun_sum){0};
    domain->summing = NULL;
    return taken;
}

static void give_back(fc_reduction *r, begun_sum *taken)
{
    reduction_give_back(r, &taken->sum);
    if (taken->parts.data != NULL) {
        reduction_give_back(r, &taken->parts);
    }
}

fc_status reduction_end_begun(fc_domain *domain)
{
    fc_reduction *r = domain->summing;
    begun_sum taken;
    fc_status st;

    if (r == NULL) {
        return FC_OK;
    }
    taken = take_begun(domain); /* hooks that look at the gradients may submit again */
    st = waits_sum_end(r->shard, taken.sum.data);
    if (st == FC_OK) {
        const fc_source source = {taken.sum.data, taken.sum.mask, FC_WIRE_REDUCE, NULL};

        fc_unit_read_present(r->shard, taken.sum.data, r->shard->layout.trainable_part_bytes,
                             taken.sum.mask);
        st = reduction_write(r, r->shard, &source, 1, &taken.options);
    }
    give_back(r, &taken);
    return st;
}

void reduction_drop_begun(fc_domain *domain)
{
    fc_reduction *r = domain->summing;

    if (r != NULL) {
        const fc_message_ops *messages = fc_transport_messages(domain->transport);
        begun_sum taken = take_begun(domain);

        messages->sum_drop(messages->context);
        give_back(r, &taken);
    }
}
