/* Plans of GPU kernels: into how many runs, tiles, stretches and batches blocks are cut. */
#include "check.h"

#include "base/alloc.h"
#include "kernels/cuda/runs.h"

#include <string.h>

#define TILE 512 /* elements of four bytes */

static fc_side side(uint32_t base, fc_dtype type, size_t line_stride, size_t plane_stride)
{
    return (fc_side){base, type, 0, line_stride, plane_stride};
}

/* Of FC_F32, with the same strides on both sides. */
static fc_block block_of(size_t planes, size_t lines, size_t numel, size_t line_stride,
                         size_t plane_stride)
{
    return (fc_block){planes, lines, numel, side(0, FC_F32, line_stride, plane_stride),
                      side(1, FC_F32, line_stride, plane_stride)};
}

/* The only run of a block's plan. */
static fc_run run_of(fc_block block)
{
    fc_run run = {0};
    fc_runs plan;

    fc_runs_init(&plan);
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_runs, 1);
    if (plan.n_runs == 1) {
        run = plan.runs[0];
        CHECK_EQ(run.first_tile, 0);
        CHECK_EQ(run.end_tile, plan.n_tiles);
    }
    fc_runs_clear(&plan);
    CHECK_EQ(plan.n_runs, 0);
    return run;
}

static void check_lines(fc_block block, uint32_t n_lines, uint32_t numel, uint32_t per_plane)
{
    const fc_run run = run_of(block);

    CHECK_EQ(run.n_lines, n_lines);
    CHECK_EQ(run.line_numel, numel);
    CHECK_EQ(run.lines_per_plane, per_plane);
}

/* What is contiguous on both sides becomes one line. */
static void test_blocks_are_folded(void)
{
    fc_block block;

    check_lines(block_of(1, 1, 7, 0, 0), 1, 7, 1);
    check_lines(block_of(2, 3, 4, 16, 48), 1, 24, 1);
    check_lines(block_of(2, 3, 4, 16, 64), 2, 12, 2);
    check_lines(block_of(2, 3, 4, 32, 96), 6, 4, 6);
    check_lines(block_of(2, 3, 4, 32, 128), 6, 4, 3);
    check_lines(block_of(5, 1, 4, 999, 32), 5, 4, 5);
    check_lines(block_of(5, 1, 4, 999, 16), 1, 20, 1);
    check_lines(block_of(3, 2, 4, 48, 16), 6, 4, 2);
    block = block_of(2, 3, 4, 16, 48); /* one side has gaps */
    block.from.line_stride = 32;
    block.from.plane_stride = 96;
    check_lines(block, 6, 4, 6);
    block.from.plane_stride = 128;
    check_lines(block, 6, 4, 3);
    block = block_of(2, 3, 4, 16, 48);
    block.to.line_stride = 32;
    block.to.plane_stride = 96;
    check_lines(block, 6, 4, 6);
    block.to.plane_stride = 128;
    check_lines(block, 6, 4, 3);
}

static void check_tiles(fc_block block, uint32_t n_tiles, uint32_t per_line)
{
    const fc_run run = run_of(block);

    CHECK_EQ(run.end_tile, n_tiles);
    CHECK_EQ(run.tiles_per_line, per_line);
}

/* Long lines have tiles of their own; short ones share them. */
static void test_lines_are_cut_in_tiles(void)
{
    const size_t far = 1 << 20;
    fc_block block;

    check_tiles(block_of(1, 1, 1, 0, 0), 1, 1);
    check_tiles(block_of(1, 1, TILE, 0, 0), 1, 1);
    check_tiles(block_of(1, 1, TILE + 1, 0, 0), 2, 2);
    check_tiles(block_of(1, 2, TILE + 1, far, 0), 4, 2);
    check_tiles(block_of(1, 3, 8 * TILE - 4, far, 0), 24, 0);
    check_tiles(block_of(1, 3, 8 * TILE, far, 0), 24, 8);
    check_tiles(block_of(1, 9, 60, far, 0), 2, 0);
    check_tiles(block_of(1, 2, 60, far, 0), 1, 0);
    check_tiles(block_of(1, 128, 4, far, 0), 1, 0);
    check_tiles(block_of(1, 9, TILE / 4, far + 4, 0), 9, 1);
    check_tiles(block_of(1, 9, TILE / 4 - 1, far, 0), 3, 0);
    /* A tile is 2 KiB of the wider side. */
    block = block_of(1, 1, 2 * TILE, 0, 0);
    block.to.type = FC_BF16;
    check_tiles(block, 2, 2);
    block.from.type = FC_BF16;
    check_tiles(block, 1, 1);
    block.from.type = FC_F64;
    check_tiles(block, 4, 4);
    block.from.type = block.to.type = FC_U8;
    check_tiles(block, 1, 1);
}

static void check_regular(fc_block block, bool is_regular)
{
    CHECK_EQ(run_of(block).is_regular, is_regular);
}

/* All of it in whole vectors. */
static void test_regular_runs(void)
{
    fc_block block = block_of(2, 3, 8, 48, 160);

    check_regular(block, true);
    block.to.at = 16;
    block.from.at = 32;
    check_regular(block, true);
    block.to.at = 4;
    check_regular(block, false);
    block.to.at = 0;
    block.from.at = 8;
    check_regular(block, false);
    check_regular(block_of(2, 3, 7, 48, 160), false);
    check_regular(block_of(2, 3, 8, 44, 160), false);
    check_regular(block_of(2, 3, 8, 48, 168), false);
    block = block_of(1, 1, 16, 0, 0);
    block.to.type = block.from.type = FC_U8;
    check_regular(block, true);
    block.from.at = 1;
    check_regular(block, false);
    block = block_of(1, 1, 8, 0, 0); /* half a vector of the narrow side is one there */
    block.to.type = FC_BF16;
    block.to.at = 8;
    check_regular(block, true);
    block.to.at = 4;
    check_regular(block, false);
}

/* What is only moved goes by its size. */
static void test_types_that_are_moved(void)
{
    static const struct {
        fc_dtype type;
        uint8_t as;
        uint32_t numel;
    } cases[] = {{FC_U8, FC_RAW1, 6},
                 {FC_I16, FC_RAW2, 6},
                 {FC_I32, FC_RAW4, 6},
                 {FC_I64, FC_RAW8, 6},
                 {FC_RAW16, FC_RAW8, 12}};
    fc_runs plan;

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        fc_block block = block_of(1, 1, 6, 0, 0);

        block.to.type = block.from.type = cases[i].type;
        fc_runs_init(&plan);
        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
        CHECK(plan.has_raw);
        CHECK_EQ(plan.runs[0].to, cases[i].as);
        CHECK_EQ(plan.runs[0].from, cases[i].as);
        CHECK_EQ(plan.runs[0].line_numel, cases[i].numel);
        block = block_of(1, 1, 6, 0, 0);
        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
        CHECK(plan.has_raw); /* still */
        fc_runs_clear(&plan);
    }
    fc_runs_init(&plan);
    CHECK_EQ(
        fc_runs_add(&plan, &(fc_block){1, 1, 6, side(0, FC_BF16, 0, 0), side(1, FC_F16, 0, 0)}),
        FC_OK);
    CHECK(!plan.has_raw);
    fc_runs_clear(&plan);
}

/* ---- many runs ---- */

/* Runs, tiles and batches follow one another. */
static void check_consistent(const fc_runs *plan)
{
    uint32_t run = 0, tile = 0, base = 0;

    for (size_t b = 0; b < plan->n_batches; b++) {
        const fc_batch *batch = &plan->batches[b];

        CHECK_EQ(batch->first_run, run);
        CHECK_EQ(batch->first_tile, tile);
        CHECK_EQ(batch->first_base, base);
        CHECK(batch->n_bases <= FC_RUNS_BASES);
        for (; run < batch->first_run + batch->n_runs; run++) {
            CHECK_EQ(plan->runs[run].first_tile, tile);
            tile = plan->runs[run].end_tile;
        }
        CHECK_EQ(batch->end_tile, tile);
        base += batch->n_bases;
    }
    CHECK_EQ(run, plan->n_runs);
    CHECK_EQ(tile, plan->n_tiles);
    CHECK_EQ(base, plan->n_bases);
}

/* Stretches of one tile while they are few; else twice as long as often as it takes. */
static void check_stretches(const fc_runs *plan)
{
    uint32_t tiles = 1, run = 0;

    while (plan->n_tiles > tiles * (tiles == 1 ? plan->stretches_max / 4 : plan->stretches_max)) {
        tiles *= 2;
    }
    CHECK_EQ(plan->stretch_tiles, tiles);
    CHECK_EQ(plan->n_stretches, (plan->n_tiles + tiles - 1) / tiles);
    for (uint32_t i = 0; i < plan->n_stretches; i++) {
        while (plan->runs[run].end_tile <= i * tiles) {
            run++;
        }
        CHECK_EQ(plan->stretches[i], run);
    }
}

static void test_stretches(void)
{
    for (uint32_t max = 8; max <= 24; max += 8) {
        fc_runs plan;

        fc_runs_init(&plan);
        CHECK_EQ(plan.stretches_max, FC_STRETCHES_MAX);
        plan.stretches_max = max;
        for (size_t i = 0; i < 150; i++) { /* of one to three tiles */
            const fc_block block = block_of(1, 1, 1 + i % 3 * TILE, 0, 0);

            CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
            check_stretches(&plan);
        }
        check_consistent(&plan);
        CHECK_EQ(plan.n_batches, 1);
        CHECK_EQ(plan.n_bases, 2);
        fc_runs_clear(&plan);
    }
}

/* A launch has room for so many addresses; a run's lie in one. */
static void test_batches(void)
{
    fc_block block = block_of(1, 1, 4, 0, 0);
    fc_runs plan;

    fc_runs_init(&plan);
    for (uint32_t i = 0; i < FC_RUNS_BASES / 2; i++) {
        block.to.base = 2 * i + 100;
        block.from.base = 2 * i + 101;
        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    }
    CHECK_EQ(plan.n_batches, 1);
    CHECK_EQ(plan.n_bases, FC_RUNS_BASES);
    CHECK_EQ(plan.runs[7].base[0], 14);
    CHECK_EQ(plan.runs[7].base[1], 15);
    CHECK_EQ(plan.bases[15], 115);
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK); /* bases that are known, and might not be */
    CHECK_EQ(plan.n_batches, 2);
    block.to.base = 100;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_batches, 2);
    CHECK_EQ(plan.batches[1].n_bases, 3);
    CHECK_EQ(plan.runs[plan.n_runs - 1].base[0], 2);
    CHECK_EQ(plan.runs[plan.n_runs - 1].base[1], 1);
    check_consistent(&plan);
    fc_runs_clear(&plan);
    block.to.base = 1; /* two new ones where there is room for one */
    for (uint32_t i = 0; i < FC_RUNS_BASES - 2; i++) {
        block.from.base = 100 + i;
        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    }
    CHECK_EQ(plan.n_bases, FC_RUNS_BASES - 1);
    block.to.base = 2;
    block.from.base = 3;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_batches, 2);
    fc_runs_clear(&plan);
}

/* ---- runs that are too large ---- */

static void check_parts(size_t planes, size_t lines, size_t numel, size_t n,
                        const uint32_t parts[][2])
{
    const fc_block block = block_of(planes, lines, numel, 4096, 1 << 20);
    fc_runs plan;

    fc_runs_init(&plan);
    plan.numel_max = 128;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_runs, n);
    for (size_t i = 0; i < n && i < plan.n_runs; i++) {
        CHECK_EQ(plan.runs[i].n_lines, parts[i][0]);
        CHECK_EQ(plan.runs[i].line_numel, parts[i][1]);
    }
    check_consistent(&plan);
    fc_runs_clear(&plan);
}

/* By planes, then by lines, then by elements, of which halves begin at whole vectors. */
static void test_large_blocks_are_cut(void)
{
    check_parts(1, 1, 128, 1, (const uint32_t[][2]){{1, 128}});
    check_parts(1, 1, 129, 2, (const uint32_t[][2]){{1, 64}, {1, 65}});
    check_parts(1, 1, 257, 3, (const uint32_t[][2]){{1, 128}, {1, 64}, {1, 65}});
    check_parts(1, 1, 130, 2, (const uint32_t[][2]){{1, 128}, {1, 2}});
    check_parts(1, 1, 400, 4, (const uint32_t[][2]){{1, 128}, {1, 128}, {1, 128}, {1, 16}});
    check_parts(1, 1, 64, 1, (const uint32_t[][2]){{1, 64}});
    check_parts(1, 2, 64, 1, (const uint32_t[][2]){{2, 64}});
    check_parts(1, 2, 65, 2, (const uint32_t[][2]){{1, 65}, {1, 65}});
    check_parts(1, 3, 64, 2, (const uint32_t[][2]){{1, 64}, {2, 64}});
    check_parts(3, 2, 64, 3, (const uint32_t[][2]){{2, 64}, {2, 64}, {2, 64}});
    check_parts(2, 2, 65, 4, (const uint32_t[][2]){{1, 65}, {1, 65}, {1, 65}, {1, 65}});
}

static void test_where_the_parts_lie(void)
{
    fc_block block = block_of(2, 2, 129, 4096, 1 << 20);
    fc_runs plan;

    block.to.at = 64;
    block.from.at = 256;
    block.from.line_stride = 8192;
    fc_runs_init(&plan);
    plan.numel_max = 128;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_runs, 8);
    for (size_t i = 0; i < plan.n_runs; i++) {
        const size_t plane = i / 4, line = i / 2 % 2, half = i % 2;

        CHECK_EQ(plan.runs[i].at[0], 64 + (plane << 20) + line * 4096 + half * 256);
        CHECK_EQ(plan.runs[i].at[1], 256 + (plane << 20) + line * 8192 + half * 256);
    }
    fc_runs_clear(&plan);
}

/* Lines that short are never cut; what is empty has no run. */
static void test_small_blocks_are_not_cut(void)
{
    fc_block block = block_of(1, 1, 64, 0, 0);
    fc_runs plan;

    fc_runs_init(&plan);
    plan.numel_max = 16;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_runs, 1);
    for (int i = 0; i < 3; i++) {
        block = block_of(i != 0, i != 1, i != 2, 4, 4);
        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    }
    CHECK_EQ(plan.n_runs, 1);
    fc_runs_clear(&plan);
}

/* Tiles are counted in 32 bits. */
static void test_too_many_tiles(void)
{
    fc_block block = block_of(2047, 1, FC_RUN_NUMEL_MAX, 0, (size_t)1 << 33);
    fc_runs plan;

    fc_runs_init(&plan);
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_runs, 2047);
    block = block_of(1, 1, FC_RUN_NUMEL_MAX, 0, 0);
    CHECK_EQ(fc_runs_add(&plan, &block), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), "a plan of GPU kernels would have more than 4294967295 tiles");
    block.numel -= TILE;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    CHECK_EQ(plan.n_tiles, UINT32_MAX);
    check_consistent(&plan);
    block.numel = 1;
    CHECK_EQ(fc_runs_add(&plan, &block), FC_ERR_INVALID);
    fc_runs_clear(&plan);
}

/* ---- flat runs ---- */

static void test_flat_runs(void)
{
    const uint32_t bases[] = {7, 9, 7, 3, 1};
    const size_t ats[] = {0, 16, 4096, 8, 0};
    fc_runs plan;

    fc_runs_init(&plan);
    plan.numel_max = 2 * TILE;
    CHECK_EQ(fc_runs_add_flat(&plan, FC_F32, 0, 1, bases, ats), FC_OK);
    CHECK_EQ(plan.n_batches + plan.n_runs, 0);
    CHECK_EQ(fc_runs_add_flat(&plan, FC_F32, 5 * TILE + 1, 4, bases, ats), FC_OK);
    CHECK_EQ(fc_runs_add_flat(&plan, FC_F64, 3, 1, bases + 3, ats), FC_OK);
    CHECK_EQ(plan.n_runs, 4);
    CHECK_EQ(plan.n_slots, 3);
    for (uint32_t i = 0; i < 3; i++) {
        const fc_run *run = &plan.runs[i];

        CHECK_EQ(run->line_numel, i < 2 ? 2 * TILE : TILE + 1);
        CHECK_EQ(run->n_lines, 1);
        CHECK_EQ(run->slot, 1);
        CHECK(run->is_regular && run->from == FC_F32 && run->to == FC_F32);
        for (int k = 0; k < 4; k++) {
            CHECK_EQ(run->at[k], ats[k] + (size_t)i * 2 * TILE * 4);
            CHECK_EQ(plan.bases[run->base[k]], bases[k]);
        }
    }
    CHECK_EQ(plan.runs[3].slot, 2);
    CHECK_EQ(plan.slots[0].first_tile, 0);
    CHECK_EQ(plan.slots[0].end_tile, 0);
    CHECK_EQ(plan.slots[1].first_tile, 0);
    CHECK_EQ(plan.slots[1].end_tile, 6);
    CHECK_EQ(plan.slots[2].first_tile, 6);
    CHECK_EQ(plan.slots[2].end_tile, 7);
    CHECK_EQ(plan.n_bases, 3);
    CHECK(!plan.has_raw);
    check_consistent(&plan);
    CHECK_EQ(fc_runs_add_flat(&plan, FC_F32, 4, 5, bases, ats), FC_ERR_INVALID);
    CHECK_STR(fc_last_message(), "no GPU kernel computes with 5 operands of F32");
    CHECK_EQ(fc_runs_add_flat(&plan, FC_I32, 4, 1, bases, ats), FC_ERR_INVALID);
    CHECK_EQ(plan.n_slots, 3);
    fc_runs_clear(&plan);
}

/* Every request for memory fails once; what has been added by then is still there. Lists grow at
 * even numbers of runs: `odd` says whether blocks or flat runs are added there. */
static void test_lack_of_memory(uint32_t odd)
{
    const int64_t live = fc_alloc_live();
    int n_failed = 0;

    for (int64_t nth = 0;; nth++) {
        fc_status st = FC_OK;
        uint32_t n = 0;
        fc_runs plan;

        fc_runs_init(&plan);
        fc_alloc_fail_after(nth);
        for (; n < 600 && st == FC_OK; n++) {
            fc_block block = block_of(1, 1, 4, 0, 0);
            const size_t ats[] = {0, 0};

            block.to.base = 2 * n;
            block.from.base = 2 * n + 1;
            st = n % 2 == odd ? fc_runs_add(&plan, &block)
                              : fc_runs_add_flat(&plan, FC_F32, 4, 2, (uint32_t[]){1, 0}, ats);
        }
        fc_alloc_fail_after(-1);
        CHECK(plan.n_runs == n || (st != FC_OK && plan.n_runs + 1 >= n));
        fc_runs_clear(&plan);
        CHECK_EQ(fc_alloc_live(), live);
        if (st == FC_OK) {
            break;
        }
        CHECK_EQ(st, FC_ERR_NOMEM);
        CHECK_HAS(fc_last_message(), " bytes in a plan of GPU kernels");
        n_failed++;
    }
    CHECK(n_failed > 20);
}

int main(void)
{
    test_blocks_are_folded();
    test_lines_are_cut_in_tiles();
    test_regular_runs();
    test_types_that_are_moved();
    test_stretches();
    test_batches();
    test_large_blocks_are_cut();
    test_where_the_parts_lie();
    test_small_blocks_are_not_cut();
    test_too_many_tiles();
    test_flat_runs();
    test_lack_of_memory(0);
    test_lack_of_memory(1);
    return check_result();
}
