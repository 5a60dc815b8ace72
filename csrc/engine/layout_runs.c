/* Plans for GPU kernels from a unit's layout. */
#include "engine/layout_runs.h"

/* The chunks of all ranks of one parameter, between [outer, rows, inner] and one chunk per rank.
 * Chunks are of one size but for the last one: two blocks, however many ranks there are. */
static fc_status add_chunks(fc_runs *plan, const fc_param *p, fc_side whole, fc_side chunks,
                            bool is_to_chunks)
{
    const size_t whole_bytes = p->inner * fc_dtype_bytes(whole.type);
    const size_t chunk_bytes = p->inner * fc_dtype_bytes(chunks.type);
    const size_t n_even = p->chunk_rows == 0 ? 0 : p->rows / p->chunk_rows;
    const size_t even_rows = p->chunk_rows, last_rows = p->rows - n_even * p->chunk_rows;

    whole.line_stride = p->rows * whole_bytes;
    whole.plane_stride = even_rows * whole_bytes;
    for (int is_last = 0; is_last < 2; is_last++) {
        const size_t rows = is_last ? last_rows : even_rows;
        fc_block block = {
            .planes = is_last ? 1 : n_even, .lines = p->outer, .numel = rows * p->inner};

        chunks.line_stride = rows * chunk_bytes;
        block.to = is_to_chunks ? chunks : whole;
        block.from = is_to_chunks ? whole : chunks;
        FC_TRY(fc_runs_add(plan, &block));
        whole.at += n_even * whole.plane_stride;
        chunks.at += n_even * chunks.plane_stride;
    }
    return FC_OK;
}

/* Contiguous elements on both sides. */
static fc_status add_line(fc_runs *plan, size_t numel, fc_side to, fc_side from)
{
    const fc_block block = {.planes = 1, .lines = 1, .numel = numel, .to = to, .from = from};

    return fc_runs_add(plan, &block);
}

static size_t own_numel(const fc_param *p)
{
    return p->outer * p->own_rows * p->inner;
}

static bool is_wanted(const fc_param *p)
{
    return p->has_grad && p->trainable;
}

fc_status fc_layout_plan_padding(const fc_param *p, fc_runs *plan)
{
    const fc_side to = {.base = FC_BASE_WIRE,
                        .type = p->compute,
                        .at = p->pack_at + own_numel(p) * fc_dtype_bytes(p->compute)};
    const fc_side zeros = {.base = FC_BASE_ZEROS, .type = p->compute};

    return p->is_packed ? add_line(plan, p->chunk_numel - own_numel(p), to, zeros) : FC_OK;
}

/* The same in the chunks of all ranks: behind the last one that has rows, and all of those after
 * it. */
static fc_status add_padding(fc_runs *plan, const fc_param *p, fc_side chunks, size_t n_ranks)
{
    const size_t n_even = p->chunk_rows == 0 ? n_ranks : p->rows / p->chunk_rows;
    const size_t last = p->outer * (p->rows - n_even * p->chunk_rows) * p->inner;
    const fc_side zeros = {.base = FC_BASE_ZEROS, .type = chunks.type};
    fc_side to = chunks;

    if (n_even == n_ranks) {
        return FC_OK;
    }
    to.at += n_even * chunks.plane_stride + last * fc_dtype_bytes(chunks.type);
    FC_TRY(add_line(plan, p->chunk_numel - last, to, zeros));
    to.at = chunks.at + (n_even + 1) * chunks.plane_stride;
    return fc_runs_add(plan, &(fc_block){.planes = n_ranks - n_even - 1,
                                         .lines = 1,
                                         .numel = p->chunk_numel,
                                         .to = to,
                                         .from = zeros});
}

fc_status fc_layout_plan_pack(const fc_layout *layout, fc_runs *plan)
{
    size_t i;

    for (i = 0; i < layout->n_entries; i++) {
        const fc_param *p = &layout->params[i];
        const fc_side to = {.base = FC_BASE_WIRE, .type = p->compute, .at = p->pack_at};
        const fc_side from = {.base = FC_BASE_PARAMS + (uint32_t)i, .type = p->orig};

        if (fc_layout_is_gathered(p)) {
            FC_TRY(add_line(plan, own_numel(p), to, from));
            FC_TRY(fc_layout_plan_padding(p, plan));
        }
    }
    return FC_OK;
}

fc_status fc_layout_plan_unpack(const fc_layout *layout, fc_runs *plan)
{
    size_t i;

    for (i = 0; i < layout->n_entries; i++) {
        const fc_param *p = &layout->params[i];
        const fc_side whole = {.base = FC_BASE_UNIT, .type = p->compute, .at = p->full_at};
        const fc_side chunks = {.base = FC_BASE_WIRE,
                                .type = p->compute,
                                .at = p->pack_at,
                                .plane_stride = layout->pack_bytes};

        if (fc_layout_is_gathered(p)) {
            FC_TRY(add_chunks(plan, p, whole, chunks, false));
        }
    }
    return FC_OK;
}

/* One of the parameters that are reduced in the type of a section. */
static fc_status stage_one(const fc_layout *layout, const fc_section *section, size_t i,
                           fc_dtype grad, fc_wire wire, fc_runs *plan)
{
    const fc_param *p = &layout->params[i];
    const size_t before = (size_t)(layout->n_ranks - 1) * section->at;
    const size_t bytes = fc_dtype_bytes(p->reduce),
                 wire_bytes = fc_dtype_bytes(fc_wire_dtype(p, wire));
    const fc_side whole = {.base = FC_BASE_PARAMS + (uint32_t)i, .type = grad};
    const fc_side chunks = {.base = FC_BASE_WIRE,
                            .type = fc_wire_dtype(p, wire),
                            .at = fc_wire_at(p, wire) + before / bytes * wire_bytes,
                            .plane_stride = section->bytes / bytes * wire_bytes};

    FC_TRY(add_chunks(plan, p, whole, chunks, true));
    return p->is_packed ? add_padding(plan, p, chunks, (size_t)layout->n_ranks) : FC_OK;
}

fc_status fc_layout_plan_stage(const fc_layout *layout, const fc_dtype *grads, fc_wire wire,
                               fc_runs *plan)
{
    size_t i, k;

    for (k = 0; k < layout->n_sections; k++) {
        const fc_section *section = &layout->sections[k];

        for (i = 0; i < layout->n_params; i++) {
            if (is_wanted(&layout->params[i]) && layout->params[i].reduce == section->reduce) {
                FC_TRY(stage_one(layout, section, i, grads[i], wire, plan));
            }
        }
    }
    return FC_OK;
}

fc_status fc_layout_plan_finish(const fc_layout *layout, fc_wire wire, fc_runs *plan)
{
    size_t i;

    for (i = 0; i < layout->n_params; i++) {
        const fc_param *p = &layout->params[i];
        const fc_side to = {.base = FC_BASE_UNIT, .type = p->grad, .at = p->grad_at};
        const fc_side from = {
            .base = FC_BASE_WIRE, .type = fc_wire_dtype(p, wire), .at = fc_wire_at(p, wire)};

        if (is_wanted(p)) {
            FC_TRY(add_line(plan, own_numel(p), to, from));
        }
    }
    return FC_OK;
}
