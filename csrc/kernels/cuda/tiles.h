/* Which elements a thread handles: index arithmetic of the GPU kernels. Host and device.
 *
 * A *piece* is what a stretch has of one line (of one run, if its lines are short): a number of
 * *units* of k elements, the body, and single elements before and behind it, the edges. k is a
 * vector where both operands lie alike against 16 bytes and 1 elsewhere: then all elements are
 * edges.
 */
#ifndef FC_KERNELS_CUDA_TILES_H
#define FC_KERNELS_CUDA_TILES_H

#include "kernels/cuda/runs.h"
#include "kernels/cuda/vectors.h"
#include "kernels/kern_both.h"

#include <assert.h>
#include <stddef.h>
#include <string.h>

/* A launch's part of a plan, and where its bases are. */
typedef struct fc_table {
    const fc_run *runs;        /* of the plan, in device memory */
    const uint32_t *stretches; /* the same */
    uint32_t stretch_tiles;
    uint32_t first_run, n_runs;
    uint32_t first_tile, end_tile;
    uint32_t first_stretch, end_stretch; /* the outer ones may reach into other batches */
} fc_table;

/* What is left to do of a stretch: `run` is that of `tile`. */
typedef struct fc_stretch {
    const fc_run *run;
    uint32_t tile, end_tile;
} fc_stretch;

typedef struct fc_bases {
    uint64_t address[FC_RUNS_BASES];
} fc_bases;

/* The last block may have warps too many, whose stretches are none. */
typedef struct fc_thread {
    uint32_t lane, stretch;
} fc_thread;

/* Elements are counted from the beginning of the line, or of the run if its lines are short. */
typedef struct fc_piece {
    uint32_t begin, body, tail; /* elements: the piece's first, the first vector's, the first edge
                                 * behind the vectors */
    uint32_t n_vectors;
    uint32_t n_edges; /* both */
} fc_piece;

/* One launch of a plan: its part of the table, and the addresses that its runs count from. */
static inline fc_table fc_batch_table(const fc_runs *plan, const fc_batch *batch,
                                      const fc_run *runs, const uint32_t *stretches)
{
    fc_table table;

    table.runs = runs;
    table.stretches = stretches;
    table.stretch_tiles = plan->stretch_tiles;
    table.first_run = batch->first_run;
    table.n_runs = batch->n_runs;
    table.first_tile = batch->first_tile;
    table.end_tile = batch->end_tile;
    table.first_stretch = batch->first_tile / plan->stretch_tiles;
    table.end_stretch = (batch->end_tile - 1) / plan->stretch_tiles + 1;
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

static_assert(offsetof(fc_run, slot) == FC_RUN_HEAD_BYTES, "what follows the head");

/* The head of a run, read at once: branches lie between the uses of its fields, and each would wait
 * for memory anew. The rest of what is returned is zeros. */
FC_BOTH fc_run fc_read_run(const fc_run *run)
{
    fc_vector head[FC_RUN_HEAD_BYTES / FC_VECTOR_BYTES];
    fc_run read = {0};

    FC_UNROLL
    for (int i = 0; i < FC_RUN_HEAD_BYTES / FC_VECTOR_BYTES; i++) {
        head[i] = fc_load((const char *)run + i * FC_VECTOR_BYTES, FC_VECTOR_BYTES);
    }
    memcpy(&read, head, sizeof(head));
    return read;
}

FC_BOTH uint32_t fc_smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* As much of a stretch as lies in the batch. */
FC_BOTH fc_stretch fc_stretch_at(const fc_table *table, uint32_t number)
{
    const uint32_t begin = number * table->stretch_tiles;
    fc_stretch stretch;

    stretch.run = &table->runs[table->stretches[number]];
    stretch.tile = begin;
    if (begin < table->first_tile) {
        stretch.run = &table->runs[table->first_run];
        stretch.tile = table->first_tile;
    }
    stretch.end_tile = begin + fc_smaller(table->stretch_tiles, table->end_tile - begin);
    return stretch;
}

/* Goes on behind n tiles of its run. */
FC_BOTH void fc_advance(fc_stretch *stretch, uint32_t n)
{
    stretch->tile += n;
    stretch->run += stretch->tile == stretch->run->end_tile;
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
 * if the operands do not lie alike, or between elements. `dst` and `src` are the line's. */
FC_BOTH int fc_lead(uint64_t dst, uint32_t dst_bytes, uint64_t src, uint32_t src_bytes, uint32_t k)
{
    const uint32_t lead = (uint32_t)(dst & (k * dst_bytes - 1)) / dst_bytes;

    return (dst & (dst_bytes - 1)) == 0 && ((src - lead * src_bytes) & (k * src_bytes - 1)) == 0
               ? (int)lead
               : -1;
}

/* The tiles from `first` to `end` of a long line. `lead`: by how many elements the line begins
 * behind a vector's boundary; negative if its operands do not lie alike. Inner tiles begin at
 * boundaries; the last one takes what is left, up to a vector more than the others. */
FC_BOTH fc_piece fc_cut_line(const fc_run *run, uint32_t first, uint32_t end, uint32_t k, int lead)
{
    const uint32_t numel = FC_TILE_VECTORS * k, shift = lead < 0 ? 0 : (uint32_t)lead;
    const uint32_t last = end == run->tiles_per_line ? run->line_numel : end * numel - shift;
    fc_piece piece;

    piece.begin = first == 0 ? 0 : first * numel - shift;
    piece.body = last;
    piece.n_vectors = 0;
    if (lead >= 0) {
        piece.body = first == 0 && lead > 0 ? k - shift : piece.begin;
        piece.body = fc_smaller(piece.body, last);
        piece.n_vectors = (last - piece.body) / k;
    }
    piece.tail = piece.body + piece.n_vectors * k;
    piece.n_edges = last - piece.begin - piece.n_vectors * k;
    return piece;
}

/* The tiles from `first` to `end` of a run of short lines: whole vectors, or single elements. */
FC_BOTH fc_piece fc_cut_run(const fc_run *run, uint32_t first, uint32_t end, uint32_t k,
                            bool is_vector)
{
    const uint32_t tile = FC_TILE_VECTORS * k;
    const uint32_t last = fc_smaller(end * tile, run->n_lines * run->line_numel);
    fc_piece piece;

    piece.begin = first * tile;
    piece.body = is_vector ? piece.begin : last;
    piece.tail = last;
    piece.n_vectors = is_vector ? (last - piece.begin) / k : 0;
    piece.n_edges = is_vector ? 0 : last - piece.begin;
    return piece;
}

/* The i-th edge element. */
FC_BOTH uint32_t fc_edge(const fc_piece *piece, uint32_t i)
{
    const uint32_t head = piece->body - piece->begin;

    return i < head ? piece->begin + i : piece->tail + (i - head);
}

#endif
