/* GPU kernels run thread by thread on the host, over random plans, against plain loops over
 * elements: every byte of every destination is compared. */
#define _GNU_SOURCE

#include "check.h"
#include "drawn_values.h"
#include "emulated_cuda.h"

#include "base/alloc.h"
#include "engine/layout_runs.h"

#include <dlfcn.h>
#include <math.h>
#include <stdalign.h>

#define BLOCKS_MAX 6
#define ROUNDS 2500

/* Any bits: NaN, infinities and denormals among them. */
static void fill_bits(char *at, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        at[i] = (char)draw(256);
    }
}

/* ---- division ---- */

static void check_division(void)
{
    for (int i = 0; i < 20000; i++) {
        uint32_t d = 1 + (uint32_t)draw(UINT64_C(1) << (1 + draw(30)));
        uint32_t n = (uint32_t)draw(UINT64_C(1) << (1 + draw(31)));
        size_t room = d;
        fc_runs plan;
        const fc_block block = {1, 2, room, {1, FC_U8, 0, 2 * room, 0}, {2, FC_U8, 0, 3 * room, 0}};

        fc_runs_init(&plan);
        plan.numel_max = UINT64_MAX;
        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
        CHECK_MSG(fc_divide(n, plan.runs[0].by_line) == n / d, "%u / %u", n, d);
        CHECK_EQ(plan.n_runs, 1);
        fc_runs_clear(&plan);
    }
}

/* ---- blocks ---- */

/* One side's memory: the base lies `shift` bytes into it. */
typedef struct memory {
    char *bytes, *expected;
    size_t size, shift;
} memory;

/* Strides for the block's lines and planes, the one inside of the other; returns the extent. */
static size_t draw_side(fc_side *side, const fc_block *block, uint32_t base, fc_dtype type)
{
    const size_t bytes = fc_dtype_bytes(type);
    const size_t gap = draw(2) == 0 ? 0 : draw(2) == 0 ? 16 * draw(3) : bytes * draw(5);
    const bool planes_inside = draw(2) == 0;
    const size_t inner = block->numel * bytes + gap;
    const size_t outer = inner * (planes_inside ? block->planes : block->lines) +
                         (draw(3) == 0 ? bytes * draw(40) : 0);

    side->base = base;
    side->type = type;
    side->at = draw(2) == 0 ? FC_ALIGN * draw(2) : bytes * draw(20);
    side->plane_stride = planes_inside ? inner : outer;
    side->line_stride = planes_inside ? outer : inner;
    return side->at + (block->planes - 1) * side->plane_stride +
           (block->lines - 1) * side->line_stride + block->numel * bytes;
}

static void draw_memory(memory *m, const fc_side *side, size_t extent)
{
    m->shift = draw(3) == 0 ? fc_dtype_bytes(side->type) * draw(16) : 16 * draw(2);
    m->size = m->shift + extent;
    m->bytes = take(m->size);
    m->expected = take(m->size);
}

/* Line by line, element by element. */
static void plain_block(const fc_block *block, const fc_sum *sum, char *to, const char *from)
{
    const size_t to_bytes = fc_dtype_bytes(block->to.type);
    const size_t from_bytes = fc_dtype_bytes(block->from.type);

    for (size_t n = 0; n < block->planes * block->lines; n++) {
        const size_t plane = n / block->lines, line = n % block->lines;
        char *dst =
            to + block->to.at + plane * block->to.plane_stride + line * block->to.line_stride;
        const char *src = from == NULL ? NULL
                                       : from + block->from.at + plane * block->from.plane_stride +
                                             line * block->from.line_stride;

        if (src == NULL) {
            memset(dst, 0, block->numel * to_bytes);
        } else if (sum != NULL) {
            const void *srcs[] = {src};

            fc_kern_reduce(block->from.type, block->to.type)(dst, srcs, 1, block->numel,
                                                             sum->divisor, sum->accumulate);
        } else if (block->from.type == block->to.type) {
            memcpy(dst, src, block->numel * to_bytes);
        } else {
            for (size_t i = 0; i < block->numel; i++) {
                fc_kern_cast(block->from.type, block->to.type)(dst + i * to_bytes,
                                                               src + i * from_bytes, 1);
            }
        }
    }
}

static void draw_block(fc_block *block, bool is_sum)
{
    block->planes = 1 + draw(4);
    block->lines = 1 + draw(draw(4) == 0 ? 40 : 4);
    block->numel = draw_numel() / (block->lines > 8 ? 8 : 1) + 1;
    block->to.type = draw_float();
    block->from.type = draw(3) == 0 ? block->to.type : draw_float();
    if (!is_sum && draw(3) == 0) {
        block->to.type = block->from.type = (fc_dtype)(FC_U8 + draw(FC_DTYPE_COUNT - FC_U8));
    }
}

static void fill(memory *m, bool is_sum, fc_dtype type)
{
    if (is_sum) {
        fill_numbers(m->bytes, type, m->size / fc_dtype_bytes(type));
        memset(m->bytes + m->size / fc_dtype_bytes(type) * fc_dtype_bytes(type), 0,
               m->size % fc_dtype_bytes(type));
    } else {
        fill_bits(m->bytes, m->size);
    }
    memcpy(m->expected, m->bytes, m->size);
}

/* A plan of several blocks, each in memory of its own, moved or summed. */
static void check_blocks(bool is_sum)
{
    const fc_sum sum = {draw(2) == 0 ? 1 : (double)(1 + draw(7)), draw(2) == 0};
    const size_t n = 1 + draw(BLOCKS_MAX);
    fc_block blocks[BLOCKS_MAX];
    memory to[BLOCKS_MAX], from[BLOCKS_MAX];
    uint64_t addresses[2 * BLOCKS_MAX];
    fc_runs plan;

    fc_runs_init(&plan);
    plan.numel_max = draw(3) == 0 ? 64 + draw(700) : FC_RUN_NUMEL_MAX;
    plan.stretches_max = draw(2) == 0 ? 8 + 8 * (uint32_t)draw(4) : FC_STRETCHES_MAX;
    for (size_t i = 0; i < n; i++) {
        fc_block *b = &blocks[i];

        draw_block(b, is_sum);
        draw_memory(&to[i], &b->to, draw_side(&b->to, b, (uint32_t)(2 * i), b->to.type));
        draw_memory(&from[i], &b->from,
                    draw_side(&b->from, b, (uint32_t)(2 * i + 1), b->from.type));
        fill(&to[i], is_sum, b->to.type);
        fill(&from[i], is_sum, b->from.type);
        addresses[2 * i] = (uintptr_t)(to[i].bytes + to[i].shift);
        addresses[2 * i + 1] =
            draw(8) == 0 && !is_sum ? 0 : (uintptr_t)(from[i].bytes + from[i].shift);
        plain_block(b, is_sum ? &sum : NULL, to[i].expected + to[i].shift,
                    addresses[2 * i + 1] == 0 ? NULL : from[i].bytes + from[i].shift);
        CHECK_EQ(fc_runs_add(&plan, b), FC_OK);
    }
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, NULL, addresses, NULL};
    CHECK_EQ(is_sum ? emulated_kernels.finish(&launch, sum.divisor, sum.accumulate)
                    : emulated_kernels.move(&launch),
             0);
    for (size_t i = 0; i < n; i++) {
        CHECK_MSG(memcmp(to[i].bytes, to[i].expected, to[i].size) == 0,
                  "block %zu of %zu: %zu x %zu x %zu, %s to %s", i, n, blocks[i].planes,
                  blocks[i].lines, blocks[i].numel, fc_dtype_name(blocks[i].from.type),
                  fc_dtype_name(blocks[i].to.type));
        CHECK(memcmp(from[i].bytes, from[i].expected, from[i].size) == 0);
        free(to[i].bytes);
        free(to[i].expected);
        free(from[i].bytes);
        free(from[i].expected);
    }
    fc_runs_clear(&plan);
}

/* Lines of whole vectors, and one that is none, wherever bases lie against a vector's boundary. */
static void check_shift(const fc_dtype *types, size_t lines, size_t to_shift, size_t from_shift,
                        bool is_zero)
{
    enum {
        ROOM = 2048
    };
    alignas(FC_VECTOR_BYTES) char to[ROOM], expected[ROOM], from[ROOM];
    const size_t numel = lines == 1 ? 37 : 32;
    const size_t to_bytes = fc_dtype_bytes(types[1]), from_bytes = fc_dtype_bytes(types[0]);
    const fc_block block = {1,
                            lines,
                            numel,
                            {0, types[1], 0, (numel + 16) * to_bytes, 0},
                            {1, types[0], 0, (numel + 16) * from_bytes, 0}};
    const uint64_t addresses[] = {(uintptr_t)to + to_shift,
                                  is_zero ? 0 : (uintptr_t)from + from_shift};
    fc_runs plan;

    fill_bits(to, sizeof(to));
    fill_bits(from, sizeof(from));
    memcpy(expected, to, sizeof(to));
    plain_block(&block, NULL, expected + to_shift, is_zero ? NULL : from + from_shift);
    fc_runs_init(&plan);
    CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, NULL, addresses, NULL};
    CHECK_EQ(emulated_kernels.move(&launch), 0);
    CHECK_MSG(memcmp(to, expected, sizeof(to)) == 0, "%s to %s, %zu lines, shifted by %zu and %zu",
              fc_dtype_name(types[0]), fc_dtype_name(types[1]), lines, from_shift, to_shift);
    fc_runs_clear(&plan);
}

static void check_shifts(void)
{
    static const fc_dtype pairs[][2] = {{FC_U8, FC_U8},   {FC_I16, FC_I16},  {FC_F32, FC_F32},
                                        {FC_F64, FC_F64}, {FC_F32, FC_BF16}, {FC_F16, FC_F64}};

    for (size_t p = 0; p < sizeof(pairs) / sizeof(pairs[0]); p++) {
        const size_t to_bytes = fc_dtype_bytes(pairs[p][1]);
        const size_t from_bytes = fc_dtype_bytes(pairs[p][0]);

        for (size_t to = 0; to < FC_VECTOR_BYTES; to += to_bytes) {
            for (size_t from = 0; from < FC_VECTOR_BYTES; from += from_bytes) {
                check_shift(pairs[p], 1, to, from, false);
                check_shift(pairs[p], 3, to, from, false);
            }
            check_shift(pairs[p], 1, to, 0, true);
            check_shift(pairs[p], 3, to, 0, true);
        }
    }
}

/* More bases than one launch can carry, in an order that comes back to the first. */
static void check_many_bases(void)
{
    enum {
        N = 3 * FC_RUNS_BASES,
        NUMEL = 5
    };
    static float from[N][NUMEL], to[N][NUMEL];
    static uint64_t addresses[2 * N];
    fc_runs plan;

    fc_runs_init(&plan);
    for (uint32_t i = 0; i < N; i++) {
        const fc_block block = {
            1, 1, NUMEL, {0, FC_F32, i * sizeof(to[0]), 0, 0}, {1 + i, FC_F32, 0, 0, 0}};

        CHECK_EQ(fc_runs_add(&plan, &block), FC_OK);
        addresses[1 + i] = (uintptr_t)from[i];
        for (uint32_t k = 0; k < NUMEL; k++) {
            from[i][k] = (float)(i * NUMEL + k);
        }
    }
    addresses[0] = (uintptr_t)to;
    CHECK_EQ(plan.n_batches, 4);
    CHECK_EQ(plan.n_tiles, N);
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, NULL, addresses, NULL};
    CHECK_EQ(emulated_kernels.move(&launch), 0);
    CHECK(memcmp(from, to, sizeof(to)) == 0);
    fc_runs_clear(&plan);
}

/* ---- units ---- */

#define PARAMS_MAX 5
#define RANKS_MAX 5

typedef struct unit {
    fc_param params[PARAMS_MAX];
    fc_layout layout[RANKS_MAX];
    fc_param of_rank[RANKS_MAX][PARAMS_MAX];
    fc_dtype grads[PARAMS_MAX];
    size_t n_params;
    int n_ranks;
} unit;

static void draw_unit(unit *u)
{
    const bool is_packed = draw(4) == 0;

    u->n_params = 1 + draw(PARAMS_MAX);
    u->n_ranks = 1 + (int)draw(RANKS_MAX);
    for (size_t i = 0; i < u->n_params; i++) {
        fc_param *p = &u->params[i];

        *p = (fc_param){.outer = draw(3) == 0 ? 1 + draw(4) : 1,
                        .rows = draw(14),
                        .inner = draw(4) == 0 ? 8 * (1 + draw(20)) : 1 + draw(20),
                        .has_grad = draw(5) != 0};
        p->trainable = p->has_grad && draw(4) != 0;
        p->orig = p->has_grad ? draw_float() : (draw(2) == 0 ? FC_I64 : FC_U8);
        p->compute = p->has_grad && draw(2) == 0 ? draw_float() : p->orig;
        p->reduce = p->has_grad ? draw_float() : p->orig;
        p->grad = p->has_grad ? draw_float() : p->orig;
        u->grads[i] = p->has_grad ? draw_float() : p->orig;
        if (is_packed) {
            p->is_packed = true;
        }
    }
    for (int r = 0; r < u->n_ranks; r++) {
        memcpy(u->of_rank[r], u->params, sizeof(u->params));
        CHECK_EQ(fc_layout_init(&u->layout[r], u->of_rank[r], u->n_params, r, u->n_ranks, false),
                 FC_OK);
    }
}

/* Bytes of element [o, row, k] of a full parameter. */
static size_t whole_at(const fc_param *p, size_t o, size_t row, size_t k, fc_dtype type)
{
    return ((o * p->rows + row) * p->inner + k) * fc_dtype_bytes(type);
}

/* The same element in its owner's chunk; says who owns it. */
static size_t chunk_at(const fc_param *p, int n_ranks, size_t o, size_t row, size_t k,
                       fc_dtype type, int *owner_out)
{
    const int owner = (int)(row / p->chunk_rows);
    const size_t rows = fc_layout_rows(p, owner, n_ranks);

    *owner_out = owner;
    return ((o * rows + row % p->chunk_rows) * p->inner + k) * fc_dtype_bytes(type);
}

static void convert_one(char *dst, fc_dtype to, const char *src, fc_dtype from)
{
    if (from == to) {
        memcpy(dst, src, fc_dtype_bytes(to));
    } else {
        fc_kern_cast(from, to)(dst, src, 1);
    }
}

typedef fc_status (*visit)(const fc_layout *layout, fc_runs *plan);

static void run_plan(visit make, const fc_layout *layout, const uint64_t *addresses,
                     const fc_sum *sum)
{
    fc_runs plan;

    fc_runs_init(&plan);
    CHECK_EQ(make(layout, &plan), FC_OK);
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, NULL, addresses, NULL};
    if (sum != NULL) {
        CHECK_EQ(emulated_kernels.finish(&launch, sum->divisor, sum->accumulate), 0);
    } else {
        CHECK_EQ(emulated_kernels.move(&launch), 0);
    }
    /* Up to two runs per parameter, and two of padding, whatever the number of ranks. */
    CHECK(plan.n_runs <= (fc_layout_is_packed(layout) ? 4 : 2) * layout->n_params);
    fc_runs_clear(&plan);
}

/* Others look at what travels: it has zeros behind a chunk that is not whole. */
static void check_padding(const unit *u, int rank, const char *pack)
{
    for (size_t i = 0; i < u->n_params && fc_layout_is_packed(&u->layout[0]); i++) {
        const fc_param *p = &u->of_rank[rank][i];
        const size_t item = fc_dtype_bytes(p->compute);
        const size_t end = p->pack_at + p->chunk_numel * item;

        for (size_t at = p->pack_at + p->outer * p->own_rows * p->inner * item; at < end; at++) {
            CHECK_EQ(pack[at], 0);
        }
    }
}

/* Every rank packs its shards; one takes the packs apart. */
static void check_gather(const unit *u)
{
    const fc_layout *layout = &u->layout[0];
    char *shards[RANKS_MAX][PARAMS_MAX], *packs, *full, *expected;
    uint64_t addresses[FC_BASE_PARAMS + PARAMS_MAX] = {0};

    packs = take((size_t)u->n_ranks * layout->pack_bytes);
    full = take(layout->full_bytes);
    expected = take(layout->full_bytes);
    memset(full, 0x5a, layout->full_bytes);
    memset(expected, 0x5a, layout->full_bytes);
    for (int r = 0; r < u->n_ranks; r++) {
        addresses[FC_BASE_WIRE] = (uintptr_t)(packs + (size_t)r * layout->pack_bytes);
        for (size_t i = 0; i < u->n_params; i++) {
            const fc_param *p = &u->of_rank[r][i];
            size_t bytes = p->outer * p->own_rows * p->inner * fc_dtype_bytes(p->orig);

            shards[r][i] = take(bytes);
            fill_bits(shards[r][i], bytes);
            addresses[FC_BASE_PARAMS + i] = (uintptr_t)shards[r][i];
        }
        memset(packs + (size_t)r * layout->pack_bytes, 0x5a, layout->pack_bytes);
        run_plan(fc_layout_plan_pack, &u->layout[r], addresses, NULL);
        check_padding(u, r, packs + (size_t)r * layout->pack_bytes);
    }
    addresses[FC_BASE_WIRE] = (uintptr_t)packs;
    addresses[FC_BASE_UNIT] = (uintptr_t)full;
    run_plan(fc_layout_plan_unpack, layout, addresses, NULL);
    for (size_t i = 0; i < u->n_params; i++) {
        const fc_param *p = &u->of_rank[0][i];

        for (size_t n = 0; n < p->outer * p->rows * p->inner; n++) {
            const size_t o = n / (p->rows * p->inner), row = n / p->inner % p->rows;
            int owner;
            size_t at = chunk_at(p, u->n_ranks, o, row, n % p->inner, p->orig, &owner);

            convert_one(expected + p->full_at + whole_at(p, o, row, n % p->inner, p->compute),
                        p->compute, shards[owner][i] + at, p->orig);
        }
    }
    CHECK(memcmp(full, expected, layout->full_bytes) == 0);
    for (int r = 0; r < u->n_ranks; r++) {
        for (size_t i = 0; i < u->n_params; i++) {
            free(shards[r][i]);
        }
    }
    free(packs);
    free(full);
    free(expected);
}

static const fc_dtype *grads_of_unit;
static fc_wire wire_of_unit;

static fc_status plan_stage(const fc_layout *layout, fc_runs *plan)
{
    return fc_layout_plan_stage(layout, grads_of_unit, wire_of_unit, plan);
}

static fc_status plan_finish(const fc_layout *layout, fc_runs *plan)
{
    return fc_layout_plan_finish(layout, wire_of_unit, plan);
}

/* Where the chunk that a rank gets of a parameter lies in what is reduced. */
static size_t staged_at(const fc_layout *layout, const fc_param *p, int rank)
{
    const fc_section *section = layout->sections;
    size_t before;

    while (section->reduce != p->reduce) {
        section++;
    }
    before = (size_t)layout->n_ranks * section->at + (size_t)rank * section->bytes + p->part_at -
             section->at;
    return before / fc_dtype_bytes(p->reduce) * fc_dtype_bytes(fc_wire_dtype(p, wire_of_unit));
}

/* The part of a rank. */
static char *part_of(const unit *u, int rank, const char *staged)
{
    const fc_layout *layout = &u->layout[rank];
    char *part = take(layout->part_bytes);

    for (size_t i = 0; i < u->n_params; i++) {
        const fc_param *p = &layout->params[i];

        if (p->has_grad && p->trainable && p->chunk_numel > 0) {
            memcpy(part + fc_wire_at(p, wire_of_unit), staged + staged_at(layout, p, rank),
                   p->chunk_numel * fc_dtype_bytes(fc_wire_dtype(p, wire_of_unit)));
        }
    }
    return part;
}

static void check_finish(const unit *u, int rank, const char *part)
{
    const fc_layout *layout = &u->layout[rank];
    const fc_sum sum = {(double)u->n_ranks, draw(2) == 0};
    char *reduced = take(layout->grad_bytes), *expected = take(layout->grad_bytes);
    uint64_t addresses[2];

    memset(reduced, 0, layout->grad_bytes);
    memset(expected, 0, layout->grad_bytes);
    addresses[FC_BASE_WIRE] = (uintptr_t)part;
    addresses[FC_BASE_UNIT] = (uintptr_t)reduced;
    run_plan(plan_finish, layout, addresses, &sum);
    for (size_t i = 0; i < u->n_params; i++) {
        const fc_param *p = &u->of_rank[rank][i];
        const void *src = part + fc_wire_at(p, wire_of_unit);

        if (p->has_grad && p->trainable) {
            fc_kern_reduce(fc_wire_dtype(p, wire_of_unit),
                           p->grad)(expected + p->grad_at, &src, 1,
                                    p->outer * p->own_rows * p->inner, sum.divisor, sum.accumulate);
        }
    }
    CHECK(memcmp(reduced, expected, layout->grad_bytes) == 0);
    free(reduced);
    free(expected);
}

/* One rank stages full gradients for all; then a rank finishes what it got. */
static void check_reduce(const unit *u)
{
    const fc_layout *layout = &u->layout[0];
    const size_t bytes = (size_t)u->n_ranks * layout->trainable_part_bytes;
    const int finisher = (int)draw((uint64_t)u->n_ranks);
    char *grads[PARAMS_MAX], *staged = take(bytes), *expected = take(bytes), *part;
    uint64_t addresses[FC_BASE_PARAMS + PARAMS_MAX] = {0};

    grads_of_unit = u->grads;
    wire_of_unit = layout->may_narrow ? (fc_wire)draw(3) : FC_WIRE_REDUCE;
    memset(staged, 0x5a, bytes);
    memset(expected, 0x5a, bytes);
    addresses[FC_BASE_WIRE] = (uintptr_t)staged;
    for (size_t i = 0; i < u->n_params; i++) {
        const fc_param *p = &u->of_rank[0][i];
        const fc_dtype type = fc_wire_dtype(p, wire_of_unit);
        const size_t numel = p->outer * p->rows * p->inner;

        grads[i] = take(numel * fc_dtype_bytes(u->grads[i]));
        addresses[FC_BASE_PARAMS + i] = (uintptr_t)grads[i];
        if (!p->has_grad || !p->trainable) {
            continue;
        }
        fill_numbers(grads[i], u->grads[i], numel);
        for (int r = 0; p->is_packed && r < u->n_ranks; r++) {
            memset(expected + staged_at(layout, p, r), 0, p->chunk_numel * fc_dtype_bytes(type));
        }
        for (size_t n = 0; n < numel; n++) {
            const size_t o = n / (p->rows * p->inner), row = n / p->inner % p->rows;
            int owner;
            size_t at = chunk_at(p, u->n_ranks, o, row, n % p->inner, type, &owner);

            convert_one(expected + staged_at(layout, p, owner) + at, type,
                        grads[i] + n * fc_dtype_bytes(u->grads[i]), u->grads[i]);
        }
    }
    run_plan(plan_stage, layout, addresses, NULL);
    CHECK(memcmp(staged, expected, bytes) == 0);
    part = part_of(u, finisher, expected);
    check_finish(u, finisher, part);
    for (size_t i = 0; i < u->n_params; i++) {
        free(grads[i]);
    }
    free(staged);
    free(expected);
    free(part);
}

/* ---- what is refused ---- */

static void check_errors(void)
{
    const fc_block cast = {1, 1, 4, {0, FC_F32, 0, 0, 0}, {1, FC_I32, 0, 0, 0}};
    const fc_block copy = {1, 1, 4, {0, FC_I32, 0, 0, 0}, {1, FC_I32, 0, 0, 0}};
    const uint32_t base = 0;
    const size_t at = 0;
    const fc_cuda_kernels *kernels = NULL;
    Dl_info other;
    fc_runs plan;

    fc_runs_init(&plan);
    CHECK_EQ(fc_runs_add(&plan, &cast), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "no GPU kernel casts I32 to F32");
    CHECK_EQ(fc_runs_add_flat(&plan, FC_I64, 4, 1, &base, &at), FC_ERR_INVALID);
    CHECK_HAS(fc_last_message(), "1 operands of I64");
    CHECK_EQ(plan.n_runs, 0);
    CHECK_EQ(fc_runs_add(&plan, &copy), FC_OK);
    const fc_cuda_launch launch = {&plan, plan.runs, plan.stretches, NULL, NULL, NULL};
    CHECK(emulated_kernels.finish(&launch, 1, false) != 0);
    CHECK_EQ(fc_cuda_move(&emulated_kernels, &launch, 1, true, "reduce", "layers.0"),
             FC_ERR_SYSTEM);
    CHECK_HAS(fc_last_message(), "kernel of 'reduce' of 'layers.0': ");
    CHECK_EQ(fc_cuda_move(&emulated_kernels, &launch, 2, false, "reduce", "layers.0"),
             FC_ERR_SYSTEM);
    fc_runs_clear(&plan);
    CHECK_EQ(fc_cuda_move(&emulated_kernels, &launch, 1, false, "gather", "layers.0"), FC_OK);
    CHECK_EQ(fc_cuda_open("/nowhere/kernels.so", &kernels), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "no GPU kernels at /nowhere/kernels.so: nvcc was missing");
    CHECK_EQ(fc_cuda_open("/dev/null", &kernels), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "cannot be opened: /dev/null");
    CHECK_OR_EXIT(dladdr((void *)(uintptr_t)malloc, &other) != 0);
    CHECK_EQ(fc_cuda_open(other.dli_fname, &kernels), FC_ERR_UNSUPPORTED);
    CHECK_HAS(fc_last_message(), "holds GPU kernels of another version of fsdp_c");
    CHECK(kernels == NULL);
}

int main(void)
{
    unit u;

    check_division();
    for (int round = 0; round < ROUNDS; round++) {
        check_blocks(round % 2 == 1);
        if (round % 4 == 0) {
            draw_unit(&u);
            check_gather(&u);
            check_reduce(&u);
        }
    }
    check_shifts();
    check_many_bases();
    check_errors();
    return check_result();
}
