/* Offsets and sizes of a unit's buffers. */
#include "engine/layout.h"

#include "base/alloc.h"

#include <math.h>

uint64_t fc_fingerprint(uint64_t seed, uint64_t value)
{
    /* The finaliser of splitmix64: every input bit reaches every output bit. */
    uint64_t x = seed ^ (value + UINT64_C(0x9e3779b97f4a7c15) + (seed << 6) + (seed >> 2));

    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

size_t fc_layout_rows(const fc_param *param, int rank, int n_ranks)
{
    size_t chunk = (param->rows + (size_t)n_ranks - 1) / (size_t)n_ranks;
    size_t first = chunk * (size_t)rank;

    if (first >= param->rows) {
        return 0;
    }
    return param->rows - first < chunk ? param->rows - first : chunk;
}

/* Takes `bytes` from the end of a buffer of `*used` bytes and returns where they begin. */
static size_t place(size_t *used, size_t bytes)
{
    size_t at = *used;

    *used = fc_round_up(at + bytes, FC_ALIGN);
    return at;
}

/* The same in buffers that travel: `numel` elements of `type`. */
static size_t place_chunk(const fc_param *param, size_t *used, size_t numel, fc_dtype type)
{
    const size_t item = fc_dtype_bytes(type);
    const size_t at = *used;

    if (!param->is_packed) {
        return place(used, numel * item);
    }
    *used = at + numel * item; /* torch sends chunks of several types as bytes, unaligned */
    return at;
}

static void measure(fc_param *param, int rank, int n_ranks, bool may_alias)
{
    param->chunk_rows = (param->rows + (size_t)n_ranks - 1) / (size_t)n_ranks;
    param->own_rows = fc_layout_rows(param, rank, n_ranks);
    param->chunk_numel = param->outer * param->chunk_rows * param->inner;
    param->is_aliased =
        may_alias && !param->is_made && param->outer == 1 && param->orig == param->compute;
}

/* Elements a chunk takes in parts and gradient buffers: a multiple of 64 bytes in any type of two
 * bytes or more, so that neighbours of equal types lie at equal element offsets in both and are
 * reduced in one go. */
static size_t padded_numel(const fc_param *param)
{
    return param->is_packed ? param->chunk_numel
                            : fc_round_up(param->chunk_numel + param->is_counted, FC_ALIGN / 2);
}

/* Begins complex numbers at an even element in both buffers, where packed ones end at an odd one.
 */
static void pair_up(const fc_param *param, size_t section_at, size_t *end, size_t *grad_bytes)
{
    const size_t item = fc_dtype_bytes(param->reduce), grad = fc_dtype_bytes(param->grad);

    if (param->is_complex && (*end - section_at) / item % 2 != 0) {
        *end += item;
        *grad_bytes += grad;
    }
    *grad_bytes = fc_round_up(*grad_bytes, param->is_complex ? 2 * grad : grad);
}

/* Each of its elements lies aligned, also behind packed ones of another type. */
static void place_section(fc_layout *layout, bool trainable, fc_dtype reduce)
{
    const size_t at = fc_round_up(layout->part_bytes, fc_dtype_bytes(reduce));
    size_t i, end = at;

    for (i = 0; i < layout->n_params; i++) {
        fc_param *p = &layout->params[i];

        if (p->has_grad && p->trainable == trainable && p->reduce == reduce) {
            pair_up(p, at, &end, &layout->grad_bytes);
            p->part_at = place_chunk(p, &end, padded_numel(p), p->reduce);
            p->grad_at = place_chunk(p, &layout->grad_bytes, padded_numel(p), p->grad);
        }
    }
    if (end > at) {
        fc_section *section = trainable ? &layout->sections[layout->n_sections++]
                                        : &layout->frozen[layout->n_frozen++];

        *section = (fc_section){.reduce = reduce, .at = at, .bytes = end - at};
        layout->part_bytes = end;
    }
}

/* Parts hold the parameters that were trainable at set-up first, so that frozen ones cost nothing.
 */
static void place_parts(fc_layout *layout, bool trainable)
{
    int type;

    for (type = 0; type < FC_FLOAT_COUNT; type++) {
        place_section(layout, trainable, (fc_dtype)type);
    }
}

/* True when one kernel call can reduce all trainable parameters. */
static bool is_uniform(const fc_layout *layout)
{
    const fc_param *first = NULL;
    size_t i;

    for (i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];

        if (!p->has_grad || !p->trainable) {
            continue;
        }
        first = first != NULL ? first : p;
        if (p->reduce != first->reduce || p->grad != first->grad) {
            return false;
        }
    }
    return first != NULL;
}

/* float16 overflows where sums are large: a part of the division comes before. It is a power of
 * two, so a unit's other types lose nothing by it. */
double fc_layout_pre_divisor(const fc_layout *layout, double divisor)
{
    double factor = 1;
    bool has_f16 = false;

    for (size_t i = 0; i < layout->n_sections; i++) {
        has_f16 = has_f16 || layout->sections[i].reduce == FC_F16;
    }
    while (has_f16 && fmod(divisor, factor) == 0 && divisor / factor > factor) {
        factor *= 2;
    }
    return factor;
}

const fc_section *fc_layout_section(const fc_layout *layout, const fc_param *param)
{
    const fc_section *sections = param->trainable ? layout->sections : layout->frozen;
    const size_t n = param->trainable ? layout->n_sections : layout->n_frozen;

    for (size_t i = 0; i < n; i++) {
        if (sections[i].reduce == param->reduce) {
            return &sections[i];
        }
    }
    return NULL;
}

fc_wire fc_layout_wire(const fc_layout *layout, fc_dtype grads)
{
    if (!layout->may_narrow) {
        return FC_WIRE_REDUCE;
    }
    return grads == FC_BF16 ? FC_WIRE_BF16 : grads == FC_F16 ? FC_WIRE_F16 : FC_WIRE_REDUCE;
}

fc_dtype fc_wire_dtype(const fc_param *param, fc_wire wire)
{
    return wire == FC_WIRE_REDUCE ? param->reduce : wire == FC_WIRE_BF16 ? FC_BF16 : FC_F16;
}

size_t fc_wire_at(const fc_param *param, fc_wire wire)
{
    return param->part_at / fc_dtype_bytes(param->reduce) *
           fc_dtype_bytes(fc_wire_dtype(param, wire));
}

size_t fc_layout_count(const fc_param *params, size_t n_params)
{
    size_t n = n_params;

    for (size_t i = 0; i < n_params; i++) {
        n += params[i].n_inputs;
    }
    return n;
}

static uint64_t mix(uint64_t print, const fc_param *p)
{
    print = fc_fingerprint(print, p->outer);
    print = fc_fingerprint(print, p->rows);
    print = fc_fingerprint(print, p->inner);
    print = fc_fingerprint(print, (uint64_t)p->orig << 24 | (uint64_t)p->compute << 16 |
                                      (uint64_t)p->reduce << 8 | (uint64_t)p->grad);
    return fc_fingerprint(print, (uint64_t)p->n_inputs << 7 | (uint64_t)p->is_complex << 6 |
                                     (uint64_t)p->is_made << 5 | (uint64_t)p->is_packed << 4 |
                                     (uint64_t)p->is_counted << 3 | (uint64_t)p->is_aliased << 2 |
                                     (uint64_t)p->has_grad << 1 | (uint64_t)p->trainable);
}

/* What is gathered, in the buffers that hold it: inputs where their parameter would be. */
static void place_gathered(fc_layout *layout)
{
    fc_param *input = layout->params + layout->n_params;

    for (size_t i = 0; i < layout->n_params; i++) {
        const size_t n_inputs = layout->params[i].n_inputs;
        fc_param *first = n_inputs == 0 ? &layout->params[i] : input;

        for (fc_param *p = first; p < first + (n_inputs == 0 ? 1 : n_inputs); p++) {
            const size_t numel = p->chunk_numel * (size_t)layout->n_ranks;

            p->full_at = place(&layout->full_bytes, numel * fc_dtype_bytes(p->compute));
            p->pack_at = place_chunk(p, &layout->pack_bytes, p->chunk_numel, p->compute);
        }
        input += n_inputs;
    }
}

fc_status fc_layout_init(fc_layout *layout, fc_param *params, size_t n_params, int rank,
                         int n_ranks, bool may_alias)
{
    size_t i;
    uint64_t print = 0;

    *layout = (fc_layout){.params = params,
                          .n_params = n_params,
                          .n_entries = fc_layout_count(params, n_params),
                          .rank = rank,
                          .n_ranks = n_ranks,
                          .may_narrow = true};
    for (i = 0; i < layout->n_entries; i++) {
        fc_param *p = &params[i];
        size_t full_numel;

        measure(p, rank, n_ranks, may_alias);
        layout->may_narrow = layout->may_narrow && (!p->has_grad || p->reduce == FC_F32);
        /* A padded buffer: the last chunks of an uneven parameter may reach past its end. */
        if (__builtin_mul_overflow(p->chunk_numel, (size_t)n_ranks, &full_numel) ||
            full_numel > SIZE_MAX / 64) {
            return fc_fail(FC_ERR_INVALID, "parameter %zu is too large: %zu x %zu x %zu", i,
                           p->outer, p->rows, p->inner);
        }
        print = mix(print, p);
    }
    place_gathered(layout);
    place_parts(layout, true);
    layout->trainable_part_bytes = layout->part_bytes;
    layout->trainable_grad_bytes = layout->grad_bytes;
    layout->is_uniform = is_uniform(layout);
    place_parts(layout, false);
    layout->full_bytes = fc_round_up(layout->full_bytes, FC_PAGE);
    layout->mask_words = (n_params + 63) / 64;
    layout->fingerprint = fc_fingerprint(print, n_params);
    return FC_OK;
}
