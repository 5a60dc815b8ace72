/* What a launch works on: runs of elements, cut into tiles, in one table for a whole unit.
 *
 * A *run* is a block [planes, lines, numel] whose lines are contiguous in both of its operands (in
 * all of them, for the flat runs of optimizers and norms). A *tile* is FC_TILE_BYTES of the wider
 * operand, a *stretch* is the tiles, one after the other, that one warp does: equally many for all
 * warps. So the work, not the number of parameters, decides the size of the grid: many short runs
 * take a tile each, a long one takes many. The plan says in which run each stretch begins, so that
 * a warp waits for two loads before it knows its addresses, however many runs there are. The table
 * is made once per unit, on the host, and copied to device memory by its user; addresses change
 * from step to step and travel with the launch. So a run names *bases* (numbers that its user gives
 * out) and offsets from them. A launch carries at most FC_RUNS_BASES addresses; a plan that uses
 * more of them is cut into *batches*, each a launch of its own.
 *
 * Threading: a plan is written by one thread and then only read.
 */
#ifndef FC_KERNELS_CUDA_RUNS_H
#define FC_KERNELS_CUDA_RUNS_H

#include "base/dtype.h"
#include "base/status.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FC_WARP 32
#define FC_VECTOR_BYTES 16
#define FC_TILE_VECTORS 128
#define FC_TILE_BYTES (FC_TILE_VECTORS * FC_VECTOR_BYTES)
#define FC_STRETCHES_MAX 16384 /* several for each warp that a GPU holds at a time */
#define FC_RUN_OPERANDS 4
#define FC_RUN_HEAD_BYTES 64
#define FC_RUNS_BASES 448 /* 3.5 of the 4 KiB that the arguments of any kernel may take */
#define FC_RUN_NUMEL_MAX (UINT32_C(1) << 30)

/* Division by a number that is known beforehand, as multiplication. */
typedef struct fc_divisor {
    uint32_t multiplier, shift;
} fc_divisor;

/* The first FC_RUN_HEAD_BYTES are what every kernel needs of it. */
typedef struct fc_run {
    uint32_t first_tile, end_tile; /* in the plan */
    uint32_t tiles_per_line;       /* 0: short lines, whose elements are counted through */
    uint32_t line_numel, n_lines;
    uint16_t base[FC_RUN_OPERANDS]; /* within the batch */
    uint8_t from, to;               /* fc_dtype: the floating ones, and FC_RAW1..FC_RAW8 */
    bool is_regular;                /* all strides and offsets are whole vectors */
    uint64_t at[FC_RUN_OPERANDS];   /* bytes from the base */
    uint32_t slot;                  /* of flat runs */
    uint32_t lines_per_plane;
    fc_divisor by_tiles_per_line, by_line, by_plane;
    uint64_t line_stride[2], plane_stride[2]; /* bytes */
} fc_run;

typedef struct fc_batch {
    uint32_t first_run, n_runs;
    uint32_t first_tile, end_tile;
    uint32_t first_base, n_bases; /* in `bases` of the plan */
} fc_batch;

/* Where the runs of a parameter end: norms are added up per slot. */
typedef struct fc_slot {
    uint32_t first_tile, end_tile;
} fc_slot;

typedef struct fc_runs {
    uint64_t numel_max;     /* of one run; tests lower it */
    uint32_t stretches_max; /* a multiple of 8; tests lower it */
    fc_run *runs;
    size_t n_runs, runs_room;
    fc_batch *batches;
    size_t n_batches, batches_room;
    uint32_t *bases; /* what a user calls the bases of each batch */
    size_t n_bases, bases_room;
    fc_slot *slots;
    size_t n_slots, slots_room;
    uint32_t *stretches; /* the run that each begins in */
    size_t n_stretches, stretches_room;
    uint32_t stretch_tiles; /* of each but the last; grows with the plan */
    uint32_t n_tiles;
    bool has_raw; /* some run can only be moved */
} fc_runs;

/* One side of a block. */
typedef struct fc_side {
    uint32_t base;
    fc_dtype type;
    size_t at, line_stride, plane_stride; /* bytes */
} fc_side;

typedef struct fc_block {
    size_t planes, lines, numel;
    fc_side to, from;
} fc_block;

/* An empty plan; never fails. */
void fc_runs_init(fc_runs *runs);
void fc_runs_clear(fc_runs *runs);

/* A block for the kernels that move and finish. Types must be equal or both floating point. */
FC_MUST_CHECK fc_status fc_runs_add(fc_runs *runs, const fc_block *block);

/* A slot of `numel` contiguous elements in each of `n` operands, all of one type; for the kernels
 * that step optimizers and sum squares. */
FC_MUST_CHECK fc_status fc_runs_add_flat(fc_runs *runs, fc_dtype type, size_t numel, size_t n,
                                         const uint32_t *bases, const size_t *ats);

#ifdef __cplusplus
}
#endif
#endif
