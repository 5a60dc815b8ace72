/* Copies, casts and sums of one unit. */
#include "engine/unit.h"

#include "engine/domain_private.h"
#include "kernels/kernels.h"

#include <assert.h>
#include <stdalign.h>
#include <string.h>

const fc_layout *fc_unit_layout(const fc_unit *unit)
{
    return &unit->layout;
}

const char *fc_unit_name(const fc_unit *unit)
{
    return unit->name;
}

fc_domain *fc_unit_domain(const fc_unit *unit)
{
    return unit->domain;
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

void *fc_unit_shard_storage(const fc_unit *unit, size_t param)
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

void fc_unit_publish(fc_unit *unit, const void *const *shards)
{
    char *full = unit->domain->region->shared + unit->full_at;

    for (size_t i = 0; i < unit->layout.n_entries; i++) {
        const fc_param *p = &unit->params[i];

        if (!p->is_aliased && fc_layout_is_gathered(p)) {
            scatter_chunk(p, unit->layout.rank, p->own_rows, full + p->full_at, shards[i], p->orig);
        }
    }
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

void fc_unit_pack(const fc_unit *unit, const void *const *shards, char *pack)
{
    for (size_t i = 0; i < unit->layout.n_entries; i++) {
        const fc_param *p = &unit->params[i];

        if (fc_layout_is_gathered(p)) {
            convert(pack + p->pack_at, p->compute, shards[i], p->orig,
                    p->outer * p->own_rows * p->inner);
        }
    }
}

/* Moves `bytes` of a rank's chunk, from byte `at` on, to their place in a full parameter. */
static void scatter_bytes(const fc_param *p, int rank, size_t rows, char *full, size_t at,
                          const char *data, size_t bytes)
{
    const size_t item = fc_dtype_bytes(p->compute);
    const size_t plane = rows * p->inner * item;

    full += chunk_offset(p, rank, p->compute);
    while (bytes > 0) {
        char *to = full + at / plane * p->rows * p->inner * item + at % plane;
        const size_t n = plane - at % plane < bytes ? plane - at % plane : bytes;

        fc_kern()->copy_away(to, data, n);
        at += n;
        data += n;
        bytes -= n;
    }
}

void fc_unit_unpack(const fc_unit *unit, int rank, size_t at, const char *data, size_t bytes,
                    void *dst)
{
    for (size_t i = 0; i < unit->layout.n_entries; i++) {
        const fc_param *p = &unit->params[i];
        const size_t rows = fc_layout_rows(p, rank, unit->layout.n_ranks);
        const size_t end = p->pack_at + p->outer * rows * p->inner * fc_dtype_bytes(p->compute);
        const size_t from = at > p->pack_at ? at : p->pack_at;
        const size_t to = at + bytes < end ? at + bytes : end;

        if (fc_layout_is_gathered(p) && from < to) {
            scatter_bytes(p, rank, rows, (char *)dst + p->full_at, from - p->pack_at,
                          data + (from - at), to - from);
        }
    }
}

/* ---- slices ---- */

void fc_unit_place_slices(fc_unit *sliced, const fc_unit *unit)
{
    for (size_t i = 0; i < unit->layout.n_params; i++) {
        sliced->params[i].full_at = unit->params[i].full_at;
    }
}

void fc_unit_slice(const fc_unit *sliced, const void *full, char *pack)
{
    for (size_t i = 0; i < sliced->layout.n_params; i++) {
        const fc_param *p = &sliced->params[i];
        const size_t item = fc_dtype_bytes(p->compute);
        const size_t plane = p->own_rows * p->inner * item;
        const char *own =
            (const char *)full + p->full_at + chunk_offset(p, sliced->layout.rank, p->compute);

        for (size_t o = 0; o < p->outer; o++) {
            fc_kern()->copy(pack + p->pack_at + o * plane, own + o * p->rows * p->inner * item,
                            plane);
        }
    }
}

/* ---- gradients ---- */

void fc_unit_stage(const fc_unit *unit, size_t param, const void *grad, fc_dtype dtype,
                   fc_wire wire, fc_receivers receivers, char *parts, size_t part_bytes)
{
    const fc_param *p = &unit->params[param];
    fc_dtype to = fc_wire_dtype(p, wire);
    size_t in_stride = p->rows * p->inner * fc_dtype_bytes(dtype);
    int r;

    for (r = 0; r < unit->layout.n_ranks; r++) {
        size_t rows = fc_layout_rows(p, r, unit->layout.n_ranks);
        size_t out_stride = rows * p->inner * fc_dtype_bytes(to);
        char *out = parts + (size_t)r * part_bytes + fc_wire_at(p, wire);
        const char *in = (const char *)grad + chunk_offset(p, r, dtype);
        size_t o;

        if (receivers != FC_TO_ALL && (r == unit->layout.rank) != (receivers == FC_TO_SELF)) {
            continue;
        }
        for (o = 0; o < p->outer; o++) {
            convert(out + o * out_stride, to, in + o * in_stride, dtype, rows * p->inner);
        }
    }
}

static size_t present_at(const fc_param *p)
{
    return p->part_at + p->chunk_numel * fc_dtype_bytes(p->reduce);
}

void fc_unit_count_present(const fc_unit *unit, size_t param, char *parts, int n_parts,
                           size_t part_bytes)
{
    static const float one = 1;
    const fc_param *p = &unit->params[param];
    int r;

    for (r = 0; p->is_counted && r < n_parts; r++) {
        convert(parts + (size_t)r * part_bytes + present_at(p), p->reduce, &one, FC_F32, 1);
    }
}

void fc_unit_read_present(const fc_unit *unit, const char *part, size_t part_bytes, uint64_t *mask)
{
    size_t i;

    for (i = 0; i < unit->layout.n_params; i++) {
        const fc_param *p = &unit->params[i];
        float n = 0;

        if (!p->has_grad || !p->is_counted || present_at(p) >= part_bytes) {
            continue;
        }
        convert(&n, FC_F32, part + present_at(p), p->reduce, 1);
        if (n != 0) {
            mask[i / 64] |= UINT64_C(1) << (i % 64);
        }
    }
}

size_t fc_unit_part_bytes(const fc_unit *unit, fc_wire wire)
{
    return fc_unit_bytes_of(unit, unit->mask, wire);
}

size_t fc_unit_bytes_of(const fc_unit *unit, const uint64_t *mask, fc_wire wire)
{
    size_t i, bytes = 0;

    for (i = 0; i < unit->layout.n_params; i++) {
        const fc_param *p = &unit->params[i];

        if ((mask[i / 64] >> (i % 64) & 1) != 0) {
            size_t end =
                fc_wire_at(p, wire) + p->chunk_numel * fc_dtype_bytes(fc_wire_dtype(p, wire));

            bytes = end > bytes ? end : bytes;
        }
    }
    return fc_round_up(bytes, FC_ALIGN);
}

static bool holds(const fc_source *source, size_t param)
{
    return source->part != NULL && (source->mask[param / 64] >> (param % 64) & 1) != 0;
}

/* What is added up for one parameter: `n` runs of elements, of one type or of several. */
typedef struct operands {
    const void *at[FC_MAX_RANKS];
    size_t stride[FC_MAX_RANKS]; /* bytes from one outer index to the next */
    fc_dtype type[FC_MAX_RANKS];
    size_t n;
    bool is_mixed;
    bool is_strided; /* some run ends at each outer index */
} operands;

static void collect(operands *out, const fc_unit *unit, const fc_source *sources, int n_sources,
                    size_t param)
{
    const fc_param *p = &unit->params[param];
    int r;

    out->n = 0;
    out->is_mixed = false;
    out->is_strided = false;
    for (r = 0; r < n_sources; r++) {
        const fc_source *source = &sources[r];
        fc_dtype type = fc_wire_dtype(p, source->wire);
        size_t n = out->n;

        if (!holds(source, param)) {
            continue;
        }
        out->type[n] = type;
        if (source->grads != NULL) {
            out->at[n] =
                (const char *)source->grads[param].data + chunk_offset(p, unit->layout.rank, type);
            out->stride[n] = p->rows * p->inner * fc_dtype_bytes(type);
            out->is_strided = out->is_strided || p->outer > 1;
        } else {
            out->at[n] = source->part + fc_wire_at(p, source->wire);
            out->stride[n] = p->own_rows * p->inner * fc_dtype_bytes(type);
        }
        out->is_mixed = out->is_mixed || type != out->type[0];
        out->n++;
    }
}

/* Bytes of the stack for sums that are rounded on their way. */
#define ROUNDED_BYTES ((size_t)8 << 10)

/* A sum has the precision of the reduce type, whatever it is added to: it is rounded to that, a
 * block at a time. */
static void sum_equal(void *dst, fc_dtype to, fc_dtype reduce, const void *const *srcs, size_t n,
                      fc_dtype type, size_t numel, double divisor, bool accumulate)
{
    alignas(FC_ALIGN) char rounded[ROUNDED_BYTES];
    const void *const sum = rounded;
    const void *at[FC_MAX_RANKS];
    size_t block_max = sizeof(rounded) / fc_dtype_bytes(reduce);
    size_t block;

    if (reduce == to || fc_dtype_bytes(reduce) > fc_dtype_bytes(to)) {
        fc_kern_reduce(type, to)(dst, srcs, n, numel, divisor, accumulate);
        return;
    }
    for (size_t done = 0; done < numel; done += block) {
        block = numel - done < block_max ? numel - done : block_max;
        for (size_t i = 0; i < n; i++) {
            at[i] = (const char *)srcs[i] + done * fc_dtype_bytes(type);
        }
        fc_kern_reduce(type, reduce)(rounded, at, n, block, divisor, false);
        fc_kern_reduce(reduce, to)((char *)dst + done * fc_dtype_bytes(to), &sum, 1, block, 1,
                                   accumulate);
    }
}

/* Bytes of the stack for operands that are narrower than others. */
#define WIDENED_BYTES ((size_t)64 << 10)
static_assert(WIDENED_BYTES / FC_MAX_RANKS >= 16 * sizeof(float), "room for some of each rank");

/* Operands of several types: the narrower ones are widened to float32, a block at a time. */
static void sum_mixed(void *dst, fc_dtype to, fc_dtype reduce, const operands *from, size_t numel,
                      double divisor, bool accumulate)
{
    alignas(FC_ALIGN) char widened[WIDENED_BYTES];
    const void *at[FC_MAX_RANKS];
    size_t block_max = WIDENED_BYTES / from->n / FC_ALIGN * FC_ALIGN / sizeof(float);
    size_t done, block, i;

    for (done = 0; done < numel; done += block) {
        block = numel - done < block_max ? numel - done : block_max;
        for (i = 0; i < from->n; i++) {
            const char *in = (const char *)from->at[i] + done * fc_dtype_bytes(from->type[i]);
            char *wide = widened + i * block_max * sizeof(float);

            at[i] = in;
            if (from->type[i] != FC_F32) {
                fc_kern_cast(from->type[i], FC_F32)(wide, in, block);
                at[i] = wide;
            }
        }
        sum_equal((char *)dst + done * fc_dtype_bytes(to), to, reduce, at, from->n, FC_F32, block,
                  divisor, accumulate);
    }
}

bool fc_unit_reduce(const fc_unit *unit, const fc_source *sources, int n_sources, size_t param,
                    void *dst, fc_dtype dtype, double divisor, bool accumulate)
{
    const fc_param *p = &unit->params[param];
    size_t numel = p->outer * p->own_rows * p->inner;
    operands from;
    size_t runs, o, i;

    collect(&from, unit, sources, n_sources, param);
    if (from.n == 0) {
        return false;
    }
    runs = from.is_strided ? p->outer : 1;
    numel /= runs;
    for (o = 0; o < runs; o++) {
        char *out = (char *)dst + o * numel * fc_dtype_bytes(dtype);

        if (from.is_mixed) {
            sum_mixed(out, dtype, p->reduce, &from, numel, divisor, accumulate);
        } else {
            sum_equal(out, dtype, p->reduce, from.at, from.n, from.type[0], numel, divisor,
                      accumulate);
        }
        for (i = 0; i < from.n; i++) {
            from.at[i] = (const char *)from.at[i] + from.stride[i];
        }
    }
    return true;
}

void fc_reduce_own(const void *grad, fc_dtype from, void *dst, fc_dtype dtype, size_t numel,
                   double divisor, bool accumulate)
{
    sum_equal(dst, dtype, from, &grad, 1, from, numel, divisor, accumulate);
}

static bool is_wanted(const fc_param *param)
{
    return param->has_grad && param->trainable;
}

/* True when all sources hold exactly the trainable parameters. */
static bool are_complete(const fc_unit *unit, const fc_source *sources, int n_sources)
{
    size_t i;
    int r;

    for (i = 0; i < unit->layout.n_params; i++) {
        for (r = 0; r < n_sources; r++) {
            if (holds(&sources[r], i) != is_wanted(&unit->params[i])) {
                return false;
            }
        }
    }
    return true;
}

/* True when the trainable chunks of every source lie in one row, all of the same types. */
static bool are_parallel(const fc_source *sources, int n_sources)
{
    int r;

    for (r = 0; r < n_sources; r++) {
        if (sources[r].grads != NULL || sources[r].wire != sources[0].wire) {
            return false;
        }
    }
    return true;
}

/* Once from the first trainable parameter to the last. */
static void reduce_row(const fc_unit *unit, const fc_source *sources, int n_sources, void *grads,
                       double divisor)
{
    const fc_param *first = NULL;
    const void *parts[FC_MAX_RANKS];
    size_t i, numel = 0;
    int r;

    for (i = 0; i < unit->layout.n_params; i++) {
        const fc_param *p = &unit->params[i];

        if (is_wanted(p)) {
            first = first == NULL ? p : first;
            /* Up to the last element: a post carries no padding behind it. */
            numel = p->part_at / fc_dtype_bytes(p->reduce) + p->chunk_numel;
        }
    }
    for (r = 0; r < n_sources; r++) {
        parts[r] = sources[r].part;
    }
    sum_equal(grads, first->grad, first->reduce, parts, (size_t)n_sources,
              fc_wire_dtype(first, sources[0].wire), numel, divisor, false);
}

bool fc_unit_reduce_all(const fc_unit *unit, const fc_source *sources, int n_sources, void *grads,
                        double divisor)
{
    size_t i;

    if (!unit->layout.is_uniform || !are_complete(unit, sources, n_sources)) {
        return false;
    }
    if (are_parallel(sources, n_sources)) {
        reduce_row(unit, sources, n_sources, grads, divisor);
        return true;
    }
    for (i = 0; i < unit->layout.n_params; i++) {
        const fc_param *p = &unit->params[i];

        if (is_wanted(p)) {
            (void)fc_unit_reduce(unit, sources, n_sources, i, (char *)grads + p->grad_at, p->grad,
                                 divisor, false);
        }
    }
    return true;
}
