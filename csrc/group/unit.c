/* Copies, casts and sums of one unit. */
#include "group/unit.h"

#include "group/domain_private.h"
#include "kernels/kernels.h"

#include <string.h>

const fc_layout *fc_unit_layout(const fc_unit *unit)
{
    return &unit->layout;
}

const char *fc_unit_name(const fc_unit *unit)
{
    return unit->name;
}

void fc_unit_set_owner(fc_unit *unit, void *owner)
{
    unit->owner = owner;
}

void *fc_unit_owner(const fc_unit *unit)
{
    return unit->owner;
}

/* Casts `numel` elements; types without arithmetic are only ever copied. */
static void convert(void *dst, fc_dtype to, const void *src, fc_dtype from, size_t numel)
{
    if (from == to || !fc_dtype_is_float(from) || !fc_dtype_is_float(to)) {
        fc_kern()->copy_away(dst, src, numel * fc_dtype_bytes(from));
    } else {
        fc_kern_cast(from, to)(dst, src, numel);
    }
}

/* ---- parameters ---- */

void *fc_unit_view(const fc_unit *unit)
{
    return unit->domain->region->view + unit->full_at;
}

fc_region *fc_unit_region(const fc_unit *unit)
{
    return unit->domain->region;
}

/* Byte offset of a rank's first row (outer index 0) within a full parameter. */
static size_t chunk_offset(const fc_param *param, int rank, fc_dtype dtype)
{
    return (size_t)rank * param->chunk_rows * param->inner * fc_dtype_bytes(dtype);
}

void *fc_unit_shard_home(const fc_unit *unit, size_t param)
{
    const fc_param *p = &unit->params[param];

    return unit->domain->region->shared + unit->full_at + p->full_at +
           chunk_offset(p, unit->layout.rank, p->compute);
}

/* Moves a rank's chunk [outer, rows, inner] from contiguous memory into its place in a full
 * parameter. */
static void scatter_chunk(const fc_param *p, int rank, size_t rows, char *full, const char *chunk,
                          fc_dtype from)
{
    size_t in_stride = rows * p->inner * fc_dtype_bytes(from);
    size_t out_stride = p->rows * p->inner * fc_dtype_bytes(p->compute);
    size_t o;

    full += chunk_offset(p, rank, p->compute);
    for (o = 0; o < p->outer; o++) {
        convert(full + o * out_stride, p->compute, chunk + o * in_stride, from, rows * p->inner);
    }
}

void fc_unit_publish(fc_unit *unit, size_t param, const void *shard)
{
    const fc_param *p = &unit->params[param];
    char *full = unit->domain->region->shared + unit->full_at + p->full_at;

    scatter_chunk(p, unit->layout.rank, p->own_rows, full, shard, p->orig);
}

void fc_unit_copy_out(const fc_unit *unit, void *dst)
{
    fc_kern()->copy(dst, unit->domain->region->shared + unit->full_at, unit->layout.full_bytes);
}

void fc_unit_discard_writes(fc_unit *unit, size_t param)
{
    const fc_param *p = &unit->params[param];
    size_t bytes = p->outer * p->rows * p->inner * fc_dtype_bytes(p->compute);

    fc_region_discard_writes(unit->domain->region, unit->full_at + p->full_at, bytes);
}

fc_status fc_unit_gather(fc_unit *unit, const void *const *shards, void *dst, char *pack)
{
    const fc_message_ops *messages = fc_transport_messages(unit->domain->transport);
    const fc_layout *layout = &unit->layout;
    char *received = pack + layout->pack_bytes;
    size_t i;
    int r;

    for (i = 0; i < layout->n_params; i++) {
        const fc_param *p = &unit->params[i];

        convert(pack + p->pack_at, p->compute, shards[i], p->orig,
                p->outer * p->own_rows * p->inner);
    }
    FC_TRY(messages->all_gather(messages->context, received, pack, layout->pack_bytes));
    for (r = 0; r < layout->n_ranks; r++) {
        for (i = 0; i < layout->n_params; i++) {
            const fc_param *p = &unit->params[i];

            scatter_chunk(p, r, fc_layout_rows(p, r, layout->n_ranks), (char *)dst + p->full_at,
                          received + (size_t)r * layout->pack_bytes + p->pack_at, p->compute);
        }
    }
    return FC_OK;
}

/* ---- gradients ---- */

void fc_unit_stage(const fc_unit *unit, size_t param, const void *grad, fc_dtype dtype, char *parts,
                   size_t part_bytes)
{
    const fc_param *p = &unit->params[param];
    size_t in_stride = p->rows * p->inner * fc_dtype_bytes(dtype);
    int r;

    for (r = 0; r < unit->layout.n_ranks; r++) {
        size_t rows = fc_layout_rows(p, r, unit->layout.n_ranks);
        size_t out_stride = rows * p->inner * fc_dtype_bytes(p->reduce);
        char *out = parts + (size_t)r * part_bytes + p->part_at;
        const char *in = (const char *)grad + chunk_offset(p, r, dtype);
        size_t o;

        for (o = 0; o < p->outer; o++) {
            convert(out + o * out_stride, p->reduce, in + o * in_stride, dtype, rows * p->inner);
        }
    }
}

size_t fc_unit_part_bytes(const fc_unit *unit)
{
    size_t i, bytes = 0;

    for (i = 0; i < unit->layout.n_params; i++) {
        const fc_param *p = &unit->params[i];

        if (fc_exchange_is_present(unit, i)) {
            size_t end = p->part_at + p->chunk_numel * fc_dtype_bytes(p->reduce);

            bytes = end > bytes ? end : bytes;
        }
    }
    return fc_round_up(bytes, FC_ALIGN);
}

static bool holds(const fc_source *source, size_t param)
{
    return source->part != NULL && (source->mask[param / 64] >> (param % 64) & 1) != 0;
}

bool fc_unit_reduce(const fc_unit *unit, const fc_source *sources, int n_sources, size_t param,
                    void *dst, fc_dtype dtype, double divisor, bool accumulate)
{
    const fc_param *p = &unit->params[param];
    const void *parts[FC_MAX_RANKS];
    size_t n_parts = 0;
    int r;

    for (r = 0; r < n_sources; r++) {
        if (holds(&sources[r], param)) {
            parts[n_parts++] = sources[r].part + p->part_at;
        }
    }
    if (n_parts == 0) {
        return false;
    }
    fc_kern_reduce(p->reduce, dtype)(dst, parts, n_parts, p->outer * p->own_rows * p->inner,
                                     divisor, accumulate);
    return true;
}

void fc_unit_reduce_own(const fc_unit *unit, size_t param, const void *grad, fc_dtype from,
                        void *dst, fc_dtype dtype, double divisor, bool accumulate)
{
    const fc_param *p = &unit->params[param];

    fc_kern_reduce(from, dtype)(dst, &grad, 1, p->outer * p->own_rows * p->inner, divisor,
                                accumulate);
}

bool fc_unit_reduce_all(const fc_unit *unit, const fc_source *sources, int n_sources, void *grads,
                        double divisor)
{
    const fc_layout *layout = &unit->layout;
    const fc_param *first = NULL;
    const void *parts[FC_MAX_RANKS];
    size_t i, end = 0;
    int r;

    if (!layout->is_uniform) {
        return false;
    }
    for (i = 0; i < layout->n_params; i++) {
        bool wanted = unit->params[i].has_grad && unit->params[i].trainable;

        if (wanted) {
            const fc_param *p = &unit->params[i];

            first = first == NULL ? p : first;
            /* Up to the last element: a post carries no padding behind it. */
            end = p->part_at + p->chunk_numel * fc_dtype_bytes(p->reduce);
        }
        for (r = 0; r < n_sources; r++) {
            if (holds(&sources[r], i) != wanted) {
                return false;
            }
        }
    }
    for (r = 0; r < n_sources; r++) {
        parts[r] = sources[r].part;
    }
    fc_kern_reduce(first->reduce, first->grad)(grads, parts, (size_t)n_sources,
                                               end / fc_dtype_bytes(first->reduce), divisor, false);
    return true;
}
