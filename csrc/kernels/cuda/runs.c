/* Plans of launches: blocks are folded, cut into runs of 32-bit indices, and counted in tiles. */
#include "kernels/cuda/runs.h"

#include "base/alloc.h"

#include <string.h>

/* ---- arrays that grow ---- */

static fc_status grow(void **items, size_t *room, size_t count, size_t bytes)
{
    size_t wanted = *room == 0 ? 16 : 2 * *room;
    void *fresh;

    if (count < *room) {
        return FC_OK;
    }
    fresh = fc_alloc(wanted, bytes);
    if (fresh == NULL) {
        return fc_fail(FC_ERR_NOMEM, "%zu entries of %zu bytes in a plan of GPU kernels", wanted,
                       bytes);
    }
    if (count != 0) {
        memcpy(fresh, *items, count * bytes);
    }
    fc_free(*items);
    *items = fresh;
    *room = wanted;
    return FC_OK;
}

#define GROW(runs, what)                                                                           \
    grow((void **)&(runs)->what, &(runs)->what##_room, (runs)->n_##what, sizeof(*(runs)->what))

void fc_runs_init(fc_runs *runs)
{
    *runs = (fc_runs){
        .numel_max = FC_RUN_NUMEL_MAX, .stretches_max = FC_STRETCHES_MAX, .stretch_tiles = 1};
}

void fc_runs_clear(fc_runs *runs)
{
    fc_free(runs->runs);
    fc_free(runs->batches);
    fc_free(runs->bases);
    fc_free(runs->slots);
    fc_free(runs->stretches);
    fc_runs_init(runs);
}

/* ---- batches ---- */

static fc_status begin_batch(fc_runs *runs)
{
    FC_TRY(GROW(runs, batches));
    runs->batches[runs->n_batches++] = (fc_batch){.first_run = (uint32_t)runs->n_runs,
                                                  .first_tile = runs->n_tiles,
                                                  .end_tile = runs->n_tiles,
                                                  .first_base = (uint32_t)runs->n_bases};
    return FC_OK;
}

/* Runs that are added next have these operands, and share a batch if their bases are the same. */
static fc_status make_room(fc_runs *runs, size_t n_operands)
{
    if (runs->n_batches == 0 ||
        runs->batches[runs->n_batches - 1].n_bases + n_operands > FC_RUNS_BASES) {
        FC_TRY(begin_batch(runs));
    }
    return FC_OK;
}

/* What the last batch calls a base; a new one is added. Backwards: neighbours share bases. */
static fc_status local_base(fc_runs *runs, uint32_t base, uint16_t *local_out)
{
    fc_batch *batch = &runs->batches[runs->n_batches - 1];
    const uint32_t *known = runs->bases + batch->first_base;
    uint32_t i = batch->n_bases;

    while (i > 0 && known[i - 1] != base) {
        i--;
    }
    if (i == 0) {
        FC_TRY(GROW(runs, bases));
        runs->bases[runs->n_bases++] = base;
        i = ++batch->n_bases;
    }
    *local_out = (uint16_t)(i - 1);
    return FC_OK;
}

/* ---- runs ---- */

/* Multiplies by ceil(2^(32 + shift) / d); right for every dividend below 2^31. */
static fc_divisor divisor_of(uint32_t d)
{
    uint32_t shift = 0;

    while (shift < 31 && UINT32_C(1) << shift < d) {
        shift++;
    }
    return (fc_divisor){
        (uint32_t)((UINT64_C(1) << 32) * ((UINT64_C(1) << shift) - d) / d + 1),
        shift,
    };
}

/* Elements of one vector: the wider type fills it. */
static uint32_t vector_numel(const fc_run *run)
{
    size_t from = fc_dtype_bytes((fc_dtype)run->from), to = fc_dtype_bytes((fc_dtype)run->to);

    return (uint32_t)(FC_VECTOR_BYTES / (from > to ? from : to));
}

/* Lines are shared between warps when they are long, or walked through when they are short. */
static uint64_t choose_tiles(fc_run *run)
{
    const uint32_t tile = FC_TILE_VECTORS * vector_numel(run);
    const uint32_t short_of = run->is_regular ? 8 * tile : tile / 4;
    const uint64_t numel = (uint64_t)run->n_lines * run->line_numel;

    if (run->n_lines > 1 && run->line_numel < short_of) {
        run->tiles_per_line = 0;
        return (numel + tile - 1) / tile;
    }
    run->tiles_per_line = (run->line_numel + tile - 1) / tile;
    return (uint64_t)run->tiles_per_line * run->n_lines;
}

/* Stretches of one tile are half of what a warp can load at once: these are for small plans, where
 * every warp counts. */
static uint32_t room_for_stretches(const fc_runs *runs)
{
    return runs->stretch_tiles == 1 ? runs->stretches_max / 4 : runs->stretches_max;
}

/* Stretches up to `end_tile`, which begin in the run that is added; longer ones where there would
 * be too many. */
static fc_status add_stretches(fc_runs *runs, uint32_t end_tile)
{
    while ((uint64_t)runs->n_stretches * runs->stretch_tiles < end_tile) {
        if (runs->n_stretches < room_for_stretches(runs)) {
            FC_TRY(GROW(runs, stretches));
            runs->stretches[runs->n_stretches++] = (uint32_t)runs->n_runs;
            continue;
        }
        runs->n_stretches /= 2;
        runs->stretch_tiles *= 2;
        for (size_t i = 0; i < runs->n_stretches; i++) {
            runs->stretches[i] = runs->stretches[2 * i];
        }
    }
    return FC_OK;
}

/* Adds a run whose counts, types, offsets and strides are set; there is room in the batch. */
static fc_status append(fc_runs *runs, fc_run *run, const uint32_t *bases, size_t n_operands)
{
    uint64_t tiles = choose_tiles(run);
    fc_batch *batch;
    size_t i;

    if (runs->n_tiles + tiles > UINT32_MAX) {
        return fc_fail(FC_ERR_INVALID, "a plan of GPU kernels would have more than %u tiles",
                       UINT32_MAX);
    }
    for (i = 0; i < n_operands; i++) {
        FC_TRY(local_base(runs, bases[i], &run->base[i]));
    }
    FC_TRY(GROW(runs, runs));
    run->first_tile = runs->n_tiles;
    run->end_tile = runs->n_tiles + (uint32_t)tiles;
    run->by_tiles_per_line = divisor_of(run->tiles_per_line != 0 ? run->tiles_per_line : 1);
    run->by_line = divisor_of(run->line_numel);
    run->by_plane = divisor_of(run->lines_per_plane);
    FC_TRY(add_stretches(runs, run->end_tile));
    runs->runs[runs->n_runs++] = *run;
    runs->n_tiles = run->end_tile;
    batch = &runs->batches[runs->n_batches - 1];
    batch->n_runs++;
    batch->end_tile = run->end_tile;
    return FC_OK;
}

/* ---- blocks ---- */

static bool is_dense(const fc_side *side, size_t numel)
{
    return side->line_stride == numel * fc_dtype_bytes(side->type);
}

/* Planes become lines. */
static void drop_lines(fc_block *block)
{
    block->lines = block->planes;
    block->planes = 1;
    block->to.line_stride = block->to.plane_stride;
    block->from.line_stride = block->from.plane_stride;
}

/* Joins what is contiguous on both sides: long lines are fast lines. */
static void fold(fc_block *block)
{
    int level;

    for (level = 0; level < 2; level++) {
        if (block->lines == 1) {
            drop_lines(block);
        }
        if (is_dense(&block->to, block->numel) && is_dense(&block->from, block->numel)) {
            block->numel *= block->lines;
            drop_lines(block);
        }
    }
    if (block->to.plane_stride == block->lines * block->to.line_stride &&
        block->from.plane_stride == block->lines * block->from.line_stride) {
        block->lines *= block->planes;
        block->planes = 1;
    }
}

/* What is only ever copied goes by its size; 16 bytes are two times 8. */
static void forget_type(fc_block *block)
{
    static const fc_dtype raw[] = {
        [1] = FC_RAW1, [2] = FC_RAW2, [4] = FC_RAW4, [8] = FC_RAW8, [16] = FC_RAW8};
    size_t bytes = fc_dtype_bytes(block->to.type);

    if (!fc_dtype_is_float(block->to.type)) {
        block->numel *= bytes == 16 ? 2 : 1;
        block->to.type = block->from.type = raw[bytes];
    }
}

static bool is_regular(const fc_side *side, size_t vector)
{
    size_t bytes = vector * fc_dtype_bytes(side->type);

    return ((side->at | side->line_stride | side->plane_stride) & (bytes - 1)) == 0;
}

static fc_status append_block(fc_runs *runs, const fc_block *block)
{
    const uint32_t bases[2] = {block->to.base, block->from.base};
    fc_run run = {
        .line_numel = (uint32_t)block->numel,
        .n_lines = (uint32_t)(block->planes * block->lines),
        .lines_per_plane = (uint32_t)block->lines,
        .from = (uint8_t)block->from.type,
        .to = (uint8_t)block->to.type,
        .at = {block->to.at, block->from.at},
        .line_stride = {block->to.line_stride, block->from.line_stride},
        .plane_stride = {block->to.plane_stride, block->from.plane_stride},
    };
    size_t vector = vector_numel(&run);

    runs->has_raw = runs->has_raw || !fc_dtype_is_float(block->to.type);
    run.is_regular = block->numel % vector == 0 && is_regular(&block->to, vector) &&
                     is_regular(&block->from, vector);
    FC_TRY(make_room(runs, 2));
    return append(runs, &run, bases, 2);
}

/* The second part of a block that is cut at plane, line or element `at`. */
static void skip(fc_side *side, size_t planes, size_t lines, size_t numel)
{
    side->at += planes * side->plane_stride + lines * side->line_stride +
                numel * fc_dtype_bytes(side->type);
}

/* Halves of lines begin at whole vectors of any type. */
#define LINE_STEP 64

/* Cuts a block in two; false if it is small enough, or cannot be cut. */
static bool cut(const fc_runs *runs, fc_block *first, fc_block *second)
{
    size_t planes = first->planes / 2, lines = 0, numel = 0; /* 1 / 2: none is skipped */

    if (first->planes * first->lines * first->numel <= runs->numel_max) {
        return false;
    }
    *second = *first;
    if (first->planes > 1) {
        second->planes -= planes;
        first->planes = planes;
    } else if (first->lines > 1) {
        lines = first->lines / 2;
        second->lines -= lines;
        first->lines = lines;
    } else if (first->numel > LINE_STEP) {
        numel = (first->numel / 2 + LINE_STEP - 1) / LINE_STEP * LINE_STEP;
        second->numel -= numel;
        first->numel = numel;
    } else {
        return false;
    }
    skip(&second->to, planes, lines, numel);
    skip(&second->from, planes, lines, numel);
    return true;
}

#define DEPTH_MAX 64 /* each cut halves a count of 64 bits in all */

fc_status fc_runs_add(fc_runs *runs, const fc_block *block)
{
    fc_block pending[DEPTH_MAX];
    size_t n = 0;

    if (block->to.type != block->from.type &&
        !(fc_dtype_is_float(block->to.type) && fc_dtype_is_float(block->from.type))) {
        return fc_fail(FC_ERR_INVALID, "no GPU kernel casts %s to %s",
                       fc_dtype_name(block->from.type), fc_dtype_name(block->to.type));
    }
    if (block->planes == 0 || block->lines == 0 || block->numel == 0) {
        return FC_OK;
    }
    pending[n] = *block;
    forget_type(&pending[n]);
    fold(&pending[n++]);
    while (n > 0) {
        fc_block first = pending[--n], second;

        while (cut(runs, &first, &second)) {
            pending[n++] = second;
        }
        FC_TRY(append_block(runs, &first));
    }
    return FC_OK;
}

fc_status fc_runs_add_flat(fc_runs *runs, fc_dtype type, size_t numel, size_t n,
                           const uint32_t *bases, const size_t *ats)
{
    const uint32_t first_tile = runs->n_tiles;
    size_t done, part, i;

    if (!fc_dtype_is_float(type) || n > FC_RUN_OPERANDS) {
        return fc_fail(FC_ERR_INVALID, "no GPU kernel computes with %zu operands of %s", n,
                       fc_dtype_name(type));
    }
    if (numel > 0) {
        FC_TRY(make_room(runs, n));
    }
    for (done = 0; done < numel; done += part) {
        fc_run run = {.n_lines = 1,
                      .lines_per_plane = 1,
                      .from = (uint8_t)type,
                      .to = (uint8_t)type,
                      .is_regular = true,
                      .slot = (uint32_t)runs->n_slots};

        part = numel - done < runs->numel_max ? numel - done : (size_t)runs->numel_max;
        run.line_numel = (uint32_t)part;
        for (i = 0; i < n; i++) {
            run.at[i] = ats[i] + done * fc_dtype_bytes(type);
        }
        FC_TRY(append(runs, &run, bases, n));
    }
    FC_TRY(GROW(runs, slots));
    runs->slots[runs->n_slots++] = (fc_slot){first_tile, runs->n_tiles};
    return FC_OK;
}
