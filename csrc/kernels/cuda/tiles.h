/* Which elements a thread handles: index arithmetic of the GPU kernels. Host and device.
 *
 * A tile is a number of *units* of k elements, the body, and single elements before and behind it,
 * the edges. k is a vector where both operands lie alike against 16 bytes and 1 elsewhere: then all
 * elements are edges.
 */
#ifndef FC_KERNELS_CUDA_TILES_H
#define FC_KERNELS_CUDA_TILES_H

#include "kernels/cuda/runs.h"
#include "kernels/kern_both.h"

/* A launch's part of a plan, and where its bases are. */
typedef struct fc_table {
    const fc_run *runs; /* of the batch, in device memory */
    uint32_t n_runs;
    uint32_t first_tile, end_tile;
} fc_table;

typedef struct fc_bases {
    uint64_t address[FC_RUNS_BASES];
} fc_bases;

/* A thread among all those of a launch. */
typedef struct fc_thread {
    uint32_t lane, warp, n_warps;
} fc_thread;

/* Elements are counted from the beginning of the line, or of the run if its lines are short. */
typedef struct fc_tile {
    uint32_t begin, body, tail; /* elements: the tile's first, the first vector's, the first edge
                                 * behind the vectors */
    uint32_t n_vectors;
    uint32_t n_edges; /* both */
} fc_tile;

/* One launch of a plan: its part of the table, and the addresses that its runs count from. */
static inline fc_table fc_batch_table(const fc_batch *batch, const fc_run *runs)
{
    fc_table table;

    table.runs = runs + batch->first_run;
    table.n_runs = batch->n_runs;
    table.first_tile = batch->first_tile;
    table.end_tile = batch->end_tile;
    return table;
}

static inline void fc_batch_bases(const fc_runs *plan, const fc_batch *batch,
                                  const uint64_t *addresses, fc_bases *bases_out)
{
    for (uint32_t i = 0; i < batch->n_bases; i++) {
        bases_out->address[i] = addresses[plan->bases[batch->first_base + i]];
    }
}

FC_BOTH uint32_t fc_divide(uint32_t n, fc_divisor by)
{
    return ((uint32_t)((uint64_t)n * by.multiplier >> 32) + n) >> by.shift;
}

/* The run of a tile; tiles only grow for a thread, so the search begins where it ended. */
FC_BOTH uint32_t fc_find_run(const fc_table *table, uint32_t tile, uint32_t known)
{
    uint32_t low = known, high = table->n_runs; /* runs[low].first_tile <= tile */

    if (tile < table->runs[known].end_tile) {
        return known;
    }
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;

        if (table->runs[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

FC_BOTH uint64_t fc_operand(const fc_run *run, const fc_bases *bases, int operand)
{
    uint64_t base = bases->address[run->base[operand]];

    return base == 0 ? 0 : base + run->at[operand];
}

/* Bytes from the beginning of an operand to its line. */
FC_BOTH uint64_t fc_line_offset(const fc_run *run, uint32_t line, int operand)
{
    uint32_t plane = fc_divide(line, run->by_plane);

    return plane * run->plane_stride[operand] +
           (line - plane * run->lines_per_plane) * run->line_stride[operand];
}

/* How many elements of the tile's line lie between a vector's boundary and its beginning; negative
 * if the operands do not lie alike. `dst` and `src` are the line's. */
FC_BOTH int fc_lead(uint64_t dst, uint32_t dst_bytes, uint64_t src, uint32_t src_bytes, uint32_t k)
{
    const uint32_t lead = (uint32_t)(dst & (k * dst_bytes - 1)) / dst_bytes;

    return ((src - lead * src_bytes) & (k * src_bytes - 1)) == 0 ? (int)lead : -1;
}

/* A tile of a long line. `lead`: by how many elements the line begins behind a vector's boundary;
 * negative if its operands do not lie alike. Inner tiles begin at boundaries; the last one takes
 * what is left, up to a vector more than the others. */
FC_BOTH fc_tile fc_cut_line(const fc_run *run, uint32_t piece, uint32_t k, int lead)
{
    const uint32_t numel = FC_TILE_VECTORS * k;
    fc_tile tile;
    uint32_t end;

    tile.begin = piece == 0 || lead < 0 ? piece * numel : piece * numel - (uint32_t)lead;
    end = piece + 1 == run->tiles_per_line ? run->line_numel
          : lead < 0                       ? (piece + 1) * numel
                                           : (piece + 1) * numel - (uint32_t)lead;
    tile.body = end;
    tile.n_vectors = 0;
    if (lead >= 0) {
        tile.body = piece == 0 && lead > 0 ? k - (uint32_t)lead : tile.begin;
        tile.body = tile.body < end ? tile.body : end;
        tile.n_vectors = (end - tile.body) / k;
    }
    tile.tail = tile.body + tile.n_vectors * k;
    tile.n_edges = end - tile.begin - tile.n_vectors * k;
    return tile;
}

/* A tile of a run of short lines: whole vectors, or single elements. */
FC_BOTH fc_tile fc_cut_run(const fc_run *run, uint32_t index, uint32_t k, bool is_vector)
{
    const uint32_t numel = run->n_lines * run->line_numel;
    const uint32_t begin = index * FC_TILE_VECTORS * k;
    const uint32_t left = numel - begin;
    const uint32_t n = left < FC_TILE_VECTORS * k ? left : FC_TILE_VECTORS * k;
    fc_tile tile;

    tile.begin = begin;
    tile.body = is_vector ? begin : begin + n;
    tile.tail = begin + n;
    tile.n_vectors = is_vector ? n / k : 0;
    tile.n_edges = is_vector ? 0 : n;
    return tile;
}

/* The i-th edge element. */
FC_BOTH uint32_t fc_edge(const fc_tile *tile, uint32_t i)
{
    const uint32_t head = tile->body - tile->begin;

    return i < head ? tile->begin + i : tile->tail + (i - head);
}

#endif
